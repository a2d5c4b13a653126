"""Placement of a whole model: decided from shapes, then built or copied sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from nnx_parallel.errors import ModelError
from nnx_parallel.sharding.layout import Layout, Placement
from nnx_parallel.sharding.names import array_info, dotted, variables_of
from nnx_parallel.sharding.rules import warn_idle

Path = tuple[Hashable, ...]
ModelFn = Callable[[nnx.Rngs], nnx.Module]


def abstract_model(source: nnx.Module | ModelFn, rngs: nnx.Rngs) -> nnx.Module:
    """The model with shapes for arrays; nothing is allocated.

    Args:
        source: The model, or the function that builds it.
        rngs: Random streams for the function; they are not advanced.

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
    """Refuses a model with arrays in no Variable, or two of one name."""
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
    """Writes each array's `Placement` into its Variable's metadata.

    Metadata travels in the graphdef, so that a `Stack` knows where its arrays live.

    Args:
        model: An abstract model; its metadata is changed.
        layout: The layout.

    Returns:
        The placements by path.

    Warns:
        UserWarning: If a path rule matches no array.
    """
    placements = {}
    for path, variable in variables_of(model):
        placements[path] = layout.place(array_info(path, variable))
        # Eager sharding would have Flax place the array by its names, on a mesh of
        # its own context, when the model is merged.
        variable.set_metadata(placement=placements[path], eager_sharding=False)
    reasons = {placement.reason for placement in placements.values()}
    hint = "strategy.describe(model) lists every path."
    warn_idle(layout.claims.rules, reasons, hint)
    return placements


def stored_specs(state: nnx.State, layout: Layout) -> nnx.State:
    """The spec in which each array of a state is kept, as the same tree."""
    flat = nnx.to_flat_state(state)
    placed = [(path, v, layout.place(array_info(path, v))) for path, v in flat]
    return nnx.from_flat_state([(p, v.replace(place.stored)) for p, v, place in placed])


def placed_arrays(
    source: nnx.Module | ModelFn,
    rngs: nnx.Rngs,
    shardings: dict[Path, NamedSharding],
) -> dict:
    """The arrays of a model, each in its place.

    Args:
        source: A function, which runs under jit so that no device ever holds the model
            whole; or a model, whose arrays are copied: donating them leaves it whole.
        rngs: Random streams for the function; they are not advanced.
        shardings: The sharding of each array, by path.

    Returns:
        Nested dicts of global arrays.
    """
    if not isinstance(source, nnx.Module):
        build, random = arrays_from(source, rngs)
        # Random numbers do not depend on shardings (partitionable threefry), so each
        # strategy starts from the same weights.
        return jax.jit(build, out_shardings=nest(shardings))(random)
    arrays = {path: v.get_value() for path, v in variables_of(source)}
    if jax.process_count() > 1:
        # Compiled, so that each process places its own shards of what all of them have.
        return nest(jax.jit(dict, out_shardings=shardings)(arrays))
    # `may_alias=False` is not enough: of a replicated array the shard on the device
    # that holds the source is the source itself, and donating it deletes the source
    # (docs/library-notes.md, "Arrays and buffers").
    placed = {p: jax.device_put(_copy(x), shardings[p]) for p, x in arrays.items()}
    return nest(placed)


def _copy(x: jax.typing.ArrayLike) -> Any:
    return x.copy() if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x)


def arrays_from(
    model_fn: ModelFn, rngs: nnx.Rngs
) -> tuple[Callable[[dict], dict], dict]:
    """A function's model as a pure function of random streams, and these streams.

    It gives the model's arrays in nested dicts; the streams are not advanced.
    """
    graphdef, state = nnx.split(rngs)

    def build(state: dict) -> dict:
        with nnx.use_eager_sharding(False):
            model = model_fn(nnx.merge(graphdef, state))
        return nnx.to_pure_dict(nnx.state(model))

    return build, nnx.to_pure_dict(state)


def stored_shardings(
    placements: dict[Path, Placement], layout: Layout
) -> dict[Path, NamedSharding]:
    """The sharding in which each array is kept, by path."""
    return {p: layout.sharding(place.stored) for p, place in placements.items()}


def nest(flat: dict[Path, Any]) -> dict:
    """A flat dict by path as nested dicts."""
    return nnx.traversals.unflatten_mapping(flat)


def flatten(nested: dict) -> dict[Path, Any]:
    """Nested dicts as one flat dict by path."""
    return dict(nnx.traversals.flatten_mapping(nested))
