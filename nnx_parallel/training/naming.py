"""``names="auto"``: names the dims of a model by the program of its loss."""

import warnings
from collections.abc import Iterable
from typing import Any, Literal

import jax
from flax import nnx

from nnx_parallel.data.batches import data_share
from nnx_parallel.data.rows import partition
from nnx_parallel.metrics import split_loss_output
from nnx_parallel.precision import Precision, cast_floating
from nnx_parallel.programs import trace
from nnx_parallel.sharding.constrain import in_context
from nnx_parallel.sharding.derive import derive_names
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import (
    ModelDef,
    ModelFn,
    abstract_model,
    arrays_of,
    set_default_modes,
)
from nnx_parallel.sharding.names import LOGICAL_AXES
from nnx_parallel.sharding.nnx_arrays import (
    array_info,
    follow_names,
    names_of,
    variables_of,
)
from nnx_parallel.sharding.path_names import PathNames
from nnx_parallel.training.arguments import LossFn
from nnx_parallel.training.step import call_loss


def named_model(
    source: nnx.Module | ModelFn,
    seed: int,
    names: PathNames | Literal["auto"] | None,
    losses: Iterable[LossFn],
    sample: Any,
    layout: Layout,
    **kinds: Any,
) -> tuple[nnx.Module, ModelDef | None]:
    """Returns an abstract model with names for its dims, from a Trainer's arguments.

    Args:
        source: The model, or the function that builds it.
        seed: Seed of the function's random streams.
        names: The Trainer's argument.
        losses: See `name_by_loss`.
        sample: This process's part of a batch, or its shapes.
        layout: See `name_by_loss`.
        kinds: The other arguments of `name_by_loss`.

    Returns:
        The model. If its names depend on the layout, also its structure without names.
    """
    rngs = nnx.Rngs(seed)
    is_trained = nnx.Any(*_filters(kinds["wrt"]))
    if names != "auto":
        return abstract_model(source, rngs, names, wrt=is_trained), None
    unnamed = ModelDef.of(abstract_model(source, rngs, wrt=is_trained))
    batch = _global_shapes(sample, layout)
    return name_by_loss(unnamed, losses, batch, layout, **kinds), unnamed


def _filters(wrt: Any) -> list[Any]:
    """Returns the filter, or the filters of all players."""
    return [*wrt.values()] if isinstance(wrt, dict) else [wrt]


def _global_shapes(sample: Any, layout: Layout) -> Any:
    """Returns the shapes of the global batch, given this process's part of it."""
    rows, shared, join = partition(sample)
    _, count = data_share(layout)

    def resize(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.shape[0] * count, *x.shape[1:]), x.dtype)

    return join([*map(resize, rows)], shared)


def name_by_loss(
    unnamed: ModelDef,
    losses: Iterable[LossFn],
    batch: Any,
    layout: Layout,
    *,
    wrt: Any = nnx.Param,
    precision: Precision | None = None,
) -> nnx.Module:
    """Returns an abstract model with the names that `derive_names` finds.

    An array that has a name already keeps its names. The losses are only traced, with
    the dtypes and shapes of a training step.

    Args:
        unnamed: The model's structure, with shapes for arrays.
        losses: The loss, or the losses of all players.
        batch: A global batch, or its shapes.
        layout: The layout; a name is derived only if its axes divide the dim.
        wrt: Filter of the Variables that are trained; with several players, a dict of
            filters by player.
        precision: The dtypes.
    """
    model = unnamed.copy()
    definition = ModelDef.of(set_default_modes(unnamed.copy()))
    arrays, variables = arrays_of(model), dict(variables_of(model))
    cast = {p for p, _ in variables_of(model, nnx.Any(nnx.Param, *_filters(wrt)))}
    used = precision or Precision()

    def as_used(path: Any, x: Any) -> Any:
        stored = cast_floating(x, used.params if path in cast else None)
        return cast_floating(stored, used.compute if path in cast else None)

    def forward(values: list, batch: Any, key: jax.Array) -> Any:
        given = {p: as_used(p, x) for p, x in zip(arrays, values, strict=True)}
        outputs = (
            call_loss(used, loss, definition.merge(given), batch, key)
            for loss in losses
        )
        return [*map(split_loss_output, outputs)]

    key = jax.eval_shape(lambda: jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trace of the step will show them
        traced = trace(in_context(layout, forward), [*arrays.values()], batch, key)
    are_random = {p for p, v in variables.items() if isinstance(v, nnx.RngState)}
    paths = [None if path in are_random else path for path in arrays]
    infos = {p: array_info(p, v) for p, v in variables.items() if p not in are_random}
    inputs = [*paths, *["data"] * len(jax.tree.leaves(batch)), None]
    sizes = {name: layout.num_shards(name) for name in LOGICAL_AXES}
    derived = derive_names(traced, inputs, infos, sizes)
    for path, names in derived.names.items():
        variable = variables[path]
        variable.set_metadata(flops=derived.flops.get(path, 0.0))
        if {*names_of(variable)} <= {None, "layers"}:
            variable.set_metadata(evidence=derived.evidence[path])
            if any(names):
                # Flax cannot place the array now, since the mesh is not known to it.
                variable.set_metadata(out_sharding=names, eager_sharding=False)
    follow_names(model)
    return model
