"""The compiled evaluation and prediction.

Under a pipeline both run the forward half of the schedule, on microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.metrics import Mean, split_loss_output
from nnx_parallel.microbatches import join_rows, split_rows
from nnx_parallel.pipeline.find import calls_stack
from nnx_parallel.pipeline.given import Given
from nnx_parallel.pipeline.run import PipelinedFunction
from nnx_parallel.precision import cast_floating
from nnx_parallel.sharding import using
from nnx_parallel.sharding.model import nest
from nnx_parallel.state import StatePlan
from nnx_parallel.step import Batch, LossFn, StepOptions, call_loss


def make_eval_step(
    plan: StatePlan, loss: LossFn, options: StepOptions
) -> Callable[[dict, dict, jax.Array, int, Batch], dict[str, Mean]]:
    """The compiled evaluation: ``(params, variables, key, index, batch)`` to means.

    The model is in evaluation mode and its variables stay as they are. A plain scalar
    weighs by the batch's rows, a `Mean` by its weight. Each batch, by its index, draws
    random numbers of its own, the same in every evaluation. Under a pipeline the
    batch is split into microbatches, each like a batch of its own.
    """

    def means_of(model: nnx.Module, batch: Batch, key: jax.Array) -> dict[str, Mean]:
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        output = call_loss(plan, loss, model, batch, key)
        mean, metrics = split_loss_output(output, weight=num_rows)
        return {"loss": mean, **metrics}

    def eval_step(
        params: dict, variables: dict, key: jax.Array, index: int, batch: Batch
    ) -> dict[str, Mean]:
        key = jax.random.fold_in(key, index)
        if plan.layout.pipeline is None:
            with using(plan.layout):
                model = plan.merge(params, variables, training=False)
                return means_of(model, batch, key)
        means = _pipelined_outputs(
            plan, means_of, params, variables, batch, key, options.num_microbatches
        )
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), means)

    return jax.jit(eval_step)


def make_predict_step(
    plan: StatePlan, function: Callable[[Any, Batch], Any], options: StepOptions
) -> Callable[[dict, dict, Batch], Any]:
    """The compiled prediction: ``(params, variables, batch)`` to outputs by row.

    Every output has the rows as its first dim: a pipeline splits and joins them.
    """

    def call(model: nnx.Module, batch: Batch, key: jax.Array) -> Any:
        return function(model, batch)

    def run(params: dict, variables: dict, batch: Batch) -> Any:
        with using(plan.layout):
            return function(plan.merge(params, variables, training=False), batch)

    def predict_step(params: dict, variables: dict, batch: Batch) -> Any:
        batch = cast_floating(batch, plan.precision.inputs)
        args = (params, variables, batch)
        if plan.layout.pipeline is None or not calls_stack(run, *args):
            return run(*args)
        key = jax.random.key(0)
        outputs = _pipelined_outputs(
            plan, call, params, variables, batch, key, options.num_microbatches
        )
        return join_rows(outputs)

    return jax.jit(predict_step)


def _pipelined_outputs(
    plan: StatePlan,
    function: Callable[[nnx.Module, Batch, jax.Array], Any],
    params: dict,
    variables: dict,
    batch: Batch,
    key: jax.Array,
    num_microbatches: int,
) -> Any:
    """What a function of the model in evaluation mode gives for each microbatch."""
    pipeline = plan.layout.pipeline
    assert pipeline is not None
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    count = _dividing_microbatches(plan, num_rows, num_microbatches)
    given = Given.of(params, variables, split_rows(plan, batch, count), key)

    def run(params: dict, variables: dict, batch: Batch, key: jax.Array) -> Any:
        model = plan.merge(
            nest(params), nest(variables), training=False, cast_stacked=False
        )
        return function(model, batch, key), {}

    num_stages = plan.layout.mesh.shape[pipeline.axis]
    table = pipeline.schedule.forward_table(num_stages, count)
    return PipelinedFunction(plan, run, given, table).outputs()


def _dividing_microbatches(plan: StatePlan, num_rows: int, wanted: int) -> int:
    """At most so many microbatches that each keeps the split of the rows."""
    shards = math.prod(plan.layout.mesh.shape[a] for a in plan.layout.batch_axes)
    rows = num_rows // shards if num_rows % shards == 0 else num_rows
    return max(count for count in range(1, wanted + 1) if rows % count == 0)
