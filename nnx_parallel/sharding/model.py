"""Placement of a whole model and its optimizer: decided from shapes, built sharded."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import ModelError
from nnx_parallel.sharding.layout import Layout, Placement
from nnx_parallel.sharding.names import (
    array_info,
    dim_axes,
    dividing_prefix,
    dotted,
    to_spec,
    variables_of,
)
from nnx_parallel.sharding.rules import warn_idle

Path = tuple[Hashable, ...]
ModelFn = Callable[[nnx.Rngs], nnx.Module]
Optimizer = optax.GradientTransformation | optax.GradientTransformationExtraArgs

nest = nnx.traversals.unflatten_mapping
"""A flat dict by path as nested dicts."""

flatten = nnx.traversals.flatten_mapping
"""Nested dicts as one flat dict by path."""


def abstract_model(source: nnx.Module | ModelFn, rngs: nnx.Rngs) -> nnx.Module:
    """The model with shapes for arrays; nothing is allocated, ``rngs`` not advanced.

    Raises:
        ModelError: If an array is in no Variable, or two have one name.
    """
    if isinstance(source, nnx.Module):
        _check_arrays(source)
        graphdef, state = nnx.split(source)
        # A copy, whose metadata are free to be changed.
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)),
            nnx.to_pure_dict(state),
        )
        with nnx.use_eager_sharding(False):
            return nnx.merge(graphdef, shapes)
    model_fn: ModelFn = source
    graphdef, state = nnx.split(rngs)

    def build() -> nnx.Module:
        model = model_fn(nnx.merge(graphdef, state, copy=True))
        _check_arrays(model)
        return model

    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(build)


def _check_arrays(model: nnx.Module) -> None:
    leaves = nnx.to_flat_state(nnx.state(model))
    names = Counter(dotted(path) for path, _ in leaves)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ModelError(
            f"Several arrays of the model are called {twice}. Paths are written with "
            "dots between their parts: use names without dots, or other names."
        )
    bare = [path for path, leaf in leaves if not isinstance(leaf, nnx.Variable)]
    # Flax takes an array that is made under a trace for no data, and lets it escape.
    bare += [
        (*path, name)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, Tracer)
    ]
    if bare:
        raise ModelError(
            f"The model holds arrays in no Variable: {sorted(map(dotted, bare))}. Wrap "
            "each where it is made: nnx.Param(x) if it is trained, nnx.Variable(x) if "
            "it is a constant."
        )


def place_model(model: nnx.Module, layout: Layout) -> dict[Path, Placement]:
    """Each array's `Placement` by path, also written into an abstract model's metadata.

    Metadata travels in the graphdef, so that a `Stack` knows where its arrays live.
    Warns of path rules that match no array.
    """
    placements = {}
    for path, variable in variables_of(model):
        placements[path] = layout.place(array_info(path, variable))
        # Eager sharding would have Flax place the array by its names, on a mesh of
        # its own context, when the model is merged.
        variable.set_metadata(placement=placements[path], eager_sharding=False)
    reasons = {placement.reason for placement in placements.values()}
    warn_idle(
        layout.claims.rules, reasons, "strategy.describe(model) lists every path."
    )
    return placements


def stored_specs(state: nnx.State, layout: Layout) -> nnx.State:
    """The spec in which each array of a state is kept, as the same tree."""
    flat = nnx.to_flat_state(state)
    placed = [(path, v, layout.place(array_info(path, v))) for path, v in flat]
    return nnx.from_flat_state([(p, v.replace(place.stored)) for p, v, place in placed])


def stored_shardings(
    placements: dict[Path, Placement], layout: Layout
) -> dict[Path, NamedSharding]:
    """The sharding in which each array is kept, by path."""
    return {p: layout.sharding(place.stored) for p, place in placements.items()}


def placed_arrays(model: nnx.Module, shardings: dict[Path, NamedSharding]) -> dict:
    """Copies of a model's arrays, each in its place, in nested dicts."""
    arrays = {path: v.get_value() for path, v in variables_of(model)}
    if jax.process_count() > 1:
        # Compiled, so that each process places its own shards of what all of them have.
        return nest(jax.jit(dict, out_shardings=shardings)(arrays))
    # `may_alias=False` is not enough: of a replicated array the shard on the device
    # that holds the source is the source itself, and donating it deletes the source
    # (docs/library-notes.md, "Arrays and buffers").
    return nest({p: jax.device_put(_copy(x), shardings[p]) for p, x in arrays.items()})


def _copy(x: jax.typing.ArrayLike) -> Any:
    return x.copy() if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x)


def arrays_from(
    model_fn: ModelFn, rngs: nnx.Rngs
) -> tuple[Callable[[dict], dict], dict]:
    """A pure function of random streams to a model's arrays, and these streams.

    Both are nested dicts; the streams are not advanced.
    """
    graphdef, state = nnx.split(rngs)

    def build(state: dict) -> dict:
        with nnx.use_eager_sharding(False):
            model = model_fn(nnx.merge(graphdef, state))
        return nnx.to_pure_dict(nnx.state(model))

    return build, nnx.to_pure_dict(state)


def optimizer_specs(
    abstract_state: optax.OptState,
    shapes: dict[Path, tuple[int, ...]],
    placements: dict[Path, Placement],
    layout: Layout,
) -> optax.OptState:
    """The spec of every array of an Optax state, as the same tree.

    Transformations keep trees like the parameters' inside their state, whole or with
    parts masked out. An array has the ``optimizer`` spec of the parameter whose path
    ends its own; one of another shape (the row and column factors of Adafactor) follows
    the dims whose sizes match; counters and all other arrays are replicated.

    Args:
        abstract_state: ``jax.eval_shape(tx.init, params)``.
        shapes: Shape of each parameter, by its path in the parameters' nested dict.
        placements: Placement of each parameter, by the same paths.
        layout: The layout, for divisibility.
    """

    # A part that a mask leaves out is an `optax.MaskedNode`: a node without leaves,
    # which stays as it is.
    def spec(path: tuple, leaf: Any) -> P:
        owner = owner_of(path, shapes)
        if owner is None:
            return P()
        shape = shapes[owner]
        axes = dim_axes(placements[owner].optimizer, len(shape))
        kept: list[tuple[str, ...]] = []
        start = 0  # Adafactor keeps one dim of a matrix in one array, one in another
        for size in leaf.shape:
            matches = [d for d in range(start, len(shape)) if shape[d] == size]
            of_dim = axes[matches[0]] if matches else ()
            start = matches[0] + 1 if matches else start
            kept.append(dividing_prefix(size, of_dim, layout.mesh.shape))
        return to_spec(kept)

    return jax.tree_util.tree_map_with_path(spec, abstract_state)


def owner_of(path: tuple, shapes: dict[Path, tuple[int, ...]]) -> Path | None:
    """The parameter whose path ends that of an array of the state, if one does."""
    # Optax's masks, chains and partitions only add keys before a parameter's path
    # (docs/library-notes.md, "Optax").
    keys = tuple(getattr(entry, "key", None) for entry in path)
    endings = (keys[start:] for start in range(len(keys)))
    return next((ending for ending in endings if ending in shapes), None)


def as_transformation(optimizer: Any, model: Any) -> Optimizer:
    """The Optax transformation behind what a user passes as ``optimizer``.

    That is a transformation; ``optax.MultiSteps``; or a function from the abstract
    model to one of them. Else a `TypeError` is raised.
    """
    if isinstance(optimizer, Callable) and not isinstance(optimizer, tuple):
        optimizer = optimizer(model)
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}. Pass an Optax transformation "
            "such as optax.adamw(3e-4), optax.MultiSteps(...), or a function of the "
            "abstract model that returns one."
        )
    return optimizer
