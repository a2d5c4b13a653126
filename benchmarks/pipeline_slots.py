"""The slots of a pipeline and the parts around its stack, each as a separate call."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from models import GPT, next_token_loss
from nnx_parallel import TrainState
from nnx_parallel.data.batches import split_rows
from nnx_parallel.layers.residuals import Layers
from nnx_parallel.pipeline.edges import Chunks, Edges, Flight, Given
from nnx_parallel.pipeline.executor import Executor
from nnx_parallel.pipeline.run import PipelineSchedule
from nnx_parallel.pipeline.stage import Stage
from nnx_parallel.schedules.buffers import plan_buffers
from nnx_parallel.schedules.table import Table
from nnx_parallel.sharding import using
from nnx_parallel.sharding.model import flatten, nest
from nnx_parallel.state import StatePlan

Run = Callable[[], float]


def slot_runs(
    plan: StatePlan, state: TrainState, batch: Any, table: Table
) -> dict[str, Run]:
    """Seconds of one slot of each kind, run by all stages at once.

    ``before``, ``after`` and ``before_backward`` are the parts around the stack for one
    microbatch, ``update`` is that of the optimizer. Slots with gradients of weights
    start from the parameters as totals, which are copied: the executor's are not.
    """
    edges = _edges(plan, state, batch, table)
    with using(plan.layout):
        slots = _stage_runs(plan, flatten(state.params), edges, table)
        return slots | _edge_runs(edges) | {"update": _update_run(plan, state)}


def _edges(plan: StatePlan, state: TrainState, batch: Any, table: Table) -> Edges:
    def function(params: dict, variables: dict, batch: Any, key: Any) -> Any:
        model = plan.merge(
            nest(params), nest(variables), training=True, cast_stacked=False
        )
        assert isinstance(model, GPT)
        return next_token_loss(model, batch), {}

    count = table.num_microbatches
    split = jax.jit(partial(split_rows, plan.layout, num_microbatches=count))
    given = Given(
        params=flatten(state.params),
        variables=flatten(state.variables),
        batch=split(batch),
        keys=jax.random.split(state.key, count),
    )
    return Edges(function, given, plan.layout, plan_buffers(table), "pipe")


def _stage_runs(
    plan: StatePlan, params: dict, edges: Edges, table: Table
) -> dict[str, Run]:
    pipeline = plan.layout.claims.execution
    assert isinstance(pipeline, PipelineSchedule)
    stage = Stage(
        edges.cut.recorded,
        edges.cut.differentiated,
        plan.precision.compute,
        pipeline.stash,
    )
    mesh, axis = plan.layout.mesh, pipeline.axis
    manual = Executor(stage, table, plan_buffers(table), mesh, axis).manual
    trained = {key: params[path] for key, path in edges.cut.stack_params.items()}
    layers = Layers(trained, {}, {})

    def forward(layers: Layers, travel: list, _: None) -> tuple[None, Any]:
        out, _state, kept = stage.forward(layers, travel)
        return None, (out, kept)

    add = Chunks(1).adder(jnp.int32(0))

    def backward(layers: Layers, given: Any, _: None) -> Any:
        kept, grads = given
        return stage.backward(layers, kept, grads, layers.trained, add)

    def backward_input(layers: Layers, given: Any, _: None) -> tuple[None, Any]:
        return None, stage.backward_input(layers, *given)

    def backward_weight(layers: Layers, pending: Any, _: None) -> tuple[dict, None]:
        return stage.backward_weight(layers, pending, layers.trained, add), None

    travel = [
        jax.device_put(
            jax.random.normal(jax.random.key(0), (table.num_stages, *x.shape), x.dtype),
            jax.NamedSharding(mesh, P(axis)),
        )
        for x in edges.entering
    ]
    runs: dict[str, Run] = {}

    def run(function: Callable, given: Any) -> Any:
        compiled = jax.jit(manual(function))
        runs[function.__name__] = _timed(compiled, layers, given, None)
        return compiled(layers, given, None)

    _, (_, kept) = run(forward, travel)
    run(backward, (kept, travel))
    _, (_, pending) = run(backward_input, (kept, travel))
    run(backward_weight, pending)
    return runs


def _edge_runs(edges: Edges) -> dict[str, Run]:
    first = jnp.int32(0)

    def before(params: dict) -> list:
        entering, _ = edges.before(first, params, Flight([], {}))
        return edges.with_gradients(entering)

    def before_backward(params: dict, grads: list) -> dict:
        return jax.vjp(before, params)[1](edges.spread(grads))[0]

    def after(params: dict, leaving: list) -> Any:
        def loss(params: dict, leaving: list) -> jax.Array:
            mean, _ = edges.after(first, params, {}, Flight([], {}), leaving)
            return mean.value

        return jax.value_and_grad(loss, (0, 1))(params, leaving)

    entered = jax.jit(before)(edges.params)
    return {
        "before": _timed(jax.jit(before), edges.params),
        "after": _timed(jax.jit(after), edges.params, entered),
        "before_backward": _timed(jax.jit(before_backward), edges.params, entered),
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
