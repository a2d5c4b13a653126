"""Times the slots of a pipeline and the parts around its stack in separate calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from nnx_parallel import TrainState
from nnx_parallel.data.rows import split_rows
from nnx_parallel.layers.stack.residuals import Layers
from nnx_parallel.models import GPT, next_token_loss
from nnx_parallel.pipeline.executor import Executor
from nnx_parallel.pipeline.memory import Chunks
from nnx_parallel.pipeline.prologue_epilogue import PipelineInputs, PrologueEpilogue
from nnx_parallel.pipeline.run import PipelineSchedule
from nnx_parallel.pipeline.stage import Stage
from nnx_parallel.schedules.table import Table, plan_buffers
from nnx_parallel.sharding import using
from nnx_parallel.sharding.model import flatten
from nnx_parallel.state import StatePlan

Run = Callable[[], float]


def slot_runs(
    plan: StatePlan, state: TrainState, batch: Any, table: Table
) -> dict[str, Run]:
    """Seconds of one slot of each kind, run by all stages at once.

    ``before``, ``after`` and ``before_backward`` are the parts around the stack for one
    microbatch, and ``update`` is the optimizer's update. Slots with gradients of
    weights start from the parameters as totals, which are copied here, but not in the
    executor.
    """
    ends = _ends(plan, state, batch, table)
    with using(plan.layout):
        slots = _stage_runs(plan, flatten(state.params), ends, table)
        return slots | _end_runs(ends) | {"update": _update_run(plan, state)}


def _ends(
    plan: StatePlan, state: TrainState, batch: Any, table: Table
) -> PrologueEpilogue:
    def function(params: dict, variables: dict, batch: Any, key: Any) -> Any:
        model = plan.merge(params, variables, training=True, cast_stacked=False)
        assert isinstance(model, GPT)
        return next_token_loss(model, batch), {}

    count = table.num_microbatches
    split = jax.jit(partial(split_rows, plan.layout, num_microbatches=count))
    inputs = PipelineInputs(
        params=flatten(state.params),
        variables=flatten(state.variables),
        batch=split(batch),
        keys=jax.random.split(state.key, count),
    )
    gathering, buffers = plan.gathering(function), plan_buffers(table)
    return PrologueEpilogue(gathering, inputs, plan.layout, buffers, "pipe")


def _stage_runs(
    plan: StatePlan, params: dict, ends: PrologueEpilogue, table: Table
) -> dict[str, Run]:
    pipeline = plan.layout.claims.execution
    assert isinstance(pipeline, PipelineSchedule)
    mesh, axis = plan.layout.mesh, pipeline.axis
    arrays = {key: params[path] for key, path in ends.cut.layer_paths.items()}
    stage = Stage(
        cut=ends.cut,
        arrays=arrays,
        activations=ends.entering,
        mesh=mesh,
        axis=axis,
        compute=plan.precision.compute,
        stash=pipeline.stash,
        is_split=True,
    )
    manual = Executor(stage, table, plan_buffers(table)).manual
    layers = stage.split(arrays)

    def forward(layers: Layers, activations: list, _: None) -> tuple[None, Any]:
        out, _state, stash = stage.forward(layers, activations)
        return None, (out, stash)

    add = Chunks(1).adder(jnp.int32(0))

    def backward(layers: Layers, given: Any, _: None) -> Any:
        stash, grads = given
        return stage.backward(layers, stash, grads, layers.trained, add)[:2]

    def backward_input(layers: Layers, given: Any, _: None) -> tuple[None, Any]:
        return None, stage.backward(layers, *given)[1:]

    def backward_weight(layers: Layers, pending: Any, _: None) -> tuple[dict, None]:
        return stage.backward_weight(layers, pending, layers.trained, add), None

    activations = [
        jax.device_put(
            jax.random.normal(jax.random.key(0), (table.num_stages, *x.shape), x.dtype),
            jax.NamedSharding(mesh, P(axis)),
        )
        for x in ends.entering
    ]
    runs: dict[str, Run] = {}

    def run(function: Callable, given: Any) -> Any:
        compiled = jax.jit(manual(function))
        runs[function.__name__] = _timed(compiled, layers, given, None)
        return compiled(layers, given, None)

    _, (_, stash) = run(forward, activations)
    run(backward, (stash, activations))
    _, (_, pending) = run(backward_input, (stash, activations))
    run(backward_weight, pending)
    return runs


def _end_runs(ends: PrologueEpilogue) -> dict[str, Run]:
    first = jnp.int32(0)

    def before(params: dict) -> list:
        entering, *_ = ends.prologue(first, params, {})
        return ends.cut.with_cotangents(entering)

    def before_backward(params: dict, grads: list) -> dict:
        return jax.vjp(before, params)[1](ends.spread(grads))[0]

    def after(params: dict, leaving: list) -> Any:
        def loss(params: dict, leaving: list) -> jax.Array:
            mean, _ = ends.epilogue(first, params, {}, [], leaving)
            return mean.value

        return jax.value_and_grad(loss, (0, 1))(params, leaving)

    entered = jax.jit(before)(ends.params)
    return {
        "before": _timed(jax.jit(before), ends.params),
        "after": _timed(jax.jit(after), ends.params, entered),
        "before_backward": _timed(jax.jit(before_backward), ends.params, entered),
    }


def _update_run(plan: StatePlan, state: TrainState) -> Run:
    tx = optax.with_extra_args_support(plan.tx)

    def update(params: dict, opt_state: Any, grads: dict) -> Any:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return _timed(jax.jit(update), state.params, state.opt_state, state.params)


def _timed(function: Callable, *args: Any) -> Run:
    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        return time.perf_counter() - start

    return run
