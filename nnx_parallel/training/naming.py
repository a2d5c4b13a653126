"""``names="auto"``: names the dims of a model by the program of its loss."""

import warnings
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from nnx_parallel.metrics import split_loss_output
from nnx_parallel.precision import Precision
from nnx_parallel.programs import trace
from nnx_parallel.sharding.constrain import in_context
from nnx_parallel.sharding.derive import derive_names
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import ModelDef, arrays_of, set_default_modes
from nnx_parallel.sharding.names import LOGICAL_AXES
from nnx_parallel.sharding.nnx_arrays import array_info, names_of, variables_of
from nnx_parallel.training.arguments import LossFn
from nnx_parallel.training.step import call_loss


def name_by_loss(
    model: nnx.Module,
    *,
    losses: Iterable[LossFn],
    sample: Any,
    layout: Layout,
    precision: Precision | None = None,
) -> nnx.Module:
    """Writes the names that `derive_names` finds into an abstract model's metadata.

    An array that has a name already keeps its names. The losses are only traced.

    Args:
        model: The abstract model.
        losses: The loss, or the losses of all players.
        sample: A batch, or its shapes.
        layout: The layout; a name is derived only if its axes divide the dim.
        precision: The dtypes.
    """
    definition = ModelDef.of(set_default_modes(nnx.merge(*nnx.split(model), copy=True)))
    arrays, variables = arrays_of(model), dict(variables_of(model))

    def forward(values: list, batch: Any, key: jax.Array) -> Any:
        given = dict(zip(arrays, values, strict=True))
        outputs = (
            call_loss(used, loss, definition.merge(given), batch, key)
            for loss in losses
        )
        return [*map(split_loss_output, outputs)]

    used = precision or Precision()
    key = jax.eval_shape(lambda: jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trace of the step will show them
        traced = trace(in_context(layout, forward), [*arrays.values()], sample, key)
    are_random = {p for p, v in variables.items() if isinstance(v, nnx.RngState)}
    paths = [None if path in are_random else path for path in arrays]
    infos = {p: array_info(p, v) for p, v in variables.items() if p not in are_random}
    inputs = [*paths, *["data"] * len(jax.tree.leaves(sample)), None]
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
    return model
