"""A loss written for one device, run as a pipeline: its gradients, or its outputs.

Layers moved to the stages that run them, and back.

Layers are stored in their natural order, a block of neighbours on each stage, whatever
the schedule. With several chunks a stage runs layers from all over the stack: then
every step sends them there, and their gradients back, a stage's worth of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.data.batches import split_rows
from nnx_parallel.errors import PipelineError, ScheduleError
from nnx_parallel.layers.residuals import Layers
from nnx_parallel.metrics import Mean
from nnx_parallel.pipeline.check import check_layer
from nnx_parallel.pipeline.cut import Arrays, Function, Given, calls_stack
from nnx_parallel.pipeline.edges import Edges, make_slots, run_if, write_slot
from nnx_parallel.pipeline.executor import Executor, Row, TrainingTick, make_rows
from nnx_parallel.pipeline.stage import Stage, Stash
from nnx_parallel.precision import cast_floating
from nnx_parallel.schedules.buffers import plan_buffers
from nnx_parallel.schedules.schedules import Schedule
from nnx_parallel.schedules.table import Table
from nnx_parallel.sharding.claims import Execution
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import Path, flatten, nest
from nnx_parallel.sharding.names import dotted
from nnx_parallel.state import StatePlan, TrainState

Gather = Literal["microbatch", "step"]


@dataclass(frozen=True, eq=False)
class Rounds:
    """Transfers in which every stage sends one block of layers and receives one.

    Attributes:
        receiver: Stage to which each stage sends, of shape (rounds, stages).
        taken: Position of the block that it sends, likewise.
        put: Position at which each stage puts what it receives, likewise.
    """

    receiver: np.ndarray
    taken: np.ndarray
    put: np.ndarray

    def reversed(self) -> Rounds:
        """The transfers that undo these."""
        rows = np.arange(len(self.receiver))[:, None]
        sender = np.argsort(self.receiver, axis=1)
        return Rounds(sender, self.put, self.taken[rows, np.arange(sender.shape[1])])


def plan_rounds(num_stages: int, num_chunks: int) -> Rounds:
    """Transfers from the natural order to the schedule's.

    Block b of the stack is stored on stage ``b // chunks`` and run on stage
    ``b % stages``. The transfers are a regular bipartite graph, which falls apart into
    perfect matchings (König's theorem): one for each chunk.
    """
    shape = (num_chunks, num_stages)
    receiver = np.zeros(shape, np.int32)
    taken, put = np.zeros_like(receiver), np.zeros_like(receiver)
    if num_chunks == 1:
        return Rounds(np.arange(num_stages)[None], taken, put)
    # Imported here for the time that it takes.
    from scipy.optimize import linear_sum_assignment

    waiting = np.zeros((num_stages, num_stages), int)
    blocks: dict[tuple[int, int], list[int]] = {}
    for block in range(num_stages * num_chunks):
        edge = (block // num_chunks, block % num_stages)
        blocks.setdefault(edge, []).append(block)
        waiting[edge] += 1
    for r in range(num_chunks):
        senders, receivers = linear_sum_assignment(waiting > 0, maximize=True)
        for source, target in zip(senders, receivers, strict=True):
            block = blocks[source, target].pop()
            waiting[source, target] -= 1
            receiver[r, source] = target
            taken[r, source] = block % num_chunks
            put[r, target] = block // num_stages
    return Rounds(receiver, taken, put)


def reorder(tree: Any, rounds: Rounds, mesh: Mesh, axis: str) -> Any:
    """A tree of stacked arrays with their blocks of layers moved between stages.

    Args:
        tree: Arrays whose leading ``layers`` dim is split over ``axis``.
        rounds: The transfers.
        mesh: The mesh.
        axis: The axis of stages.
    """
    if len(rounds.receiver) == 1:
        return tree
    is_key = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key), tree)
    data = jax.tree.map(
        lambda x, key: jax.random.key_data(x) if key else x, tree, is_key
    )
    move = jax.shard_map(
        lambda data: jax.tree.map(lambda x: _move(x, rounds, axis), data),
        mesh=mesh,
        in_specs=P(axis),
        out_specs=P(axis),
        axis_names={axis},
        check_vma=False,
    )
    return jax.tree.map(
        lambda new, old, key: (
            jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if key else new
        ),
        move(data),
        tree,
        is_key,
    )


def _move(x: jax.Array, rounds: Rounds, axis: str) -> jax.Array:
    stage = jax.lax.axis_index(axis)
    size = x.shape[0] // len(rounds.receiver)
    moved = x
    for r, receiver in enumerate(rounds.receiver):
        start = jnp.asarray(rounds.taken[r])[stage] * size
        block = jax.lax.dynamic_slice_in_dim(x, start, size)
        pairs = [(source, int(target)) for source, target in enumerate(receiver)]
        block = jax.lax.ppermute(block, axis, pairs)
        start = jnp.asarray(rounds.put[r])[stage] * size
        moved = jax.lax.dynamic_update_slice_in_dim(moved, block, start, axis=0)
    return moved


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Execution):
    """The step as stages that pass microbatches on.

    Attributes:
        axis: Mesh axis of the stages.
        schedule: Makes the table.
        stash: What a stage keeps of a microbatch between its slots.
        gather: How often weights that FSDP shards are gathered.
    """

    cuts_loss: ClassVar[bool] = True

    axis: str
    schedule: Schedule
    stash: Stash
    gather: Gather

    def gradients(
        self,
        plan: StatePlan,
        forward: Callable[[dict, dict, Any, jax.Array], tuple[dict[str, Mean], dict]],
        state: TrainState,
        batch: Any,
        key: jax.Array,
        num_microbatches: int,
    ) -> tuple[dict, dict, dict[str, Mean]]:
        """Gradients of the batch's mean loss, in the schedule's order."""
        microbatches = split_rows(plan.layout, batch, num_microbatches)
        given = Given.of(state.params, state.variables, microbatches, key)

        def function(params: Arrays, variables: Arrays, batch: Any, key: Any) -> Any:
            means, after = forward(nest(params), nest(variables), batch, key)
            return means, flatten(after)

        table = self.schedule.table(plan.layout.mesh.shape[self.axis], num_microbatches)
        pipelined = PipelinedFunction(plan, self, function, given, table)
        grads, variables, means = pipelined.gradients(
            lambda means, weights: state.scaled(means["loss"].over(weights)),
            lambda means: [term.weight for term in means["loss"].terms],
        )
        means = jax.tree.map(lambda x: jnp.sum(x, axis=0), means)
        return nest(grads), nest(variables), means

    def outputs(
        self,
        plan: StatePlan,
        function: Callable[[nnx.Module, Any, jax.Array], Any],
        arrays: tuple[dict, dict],
        batch: Any,
        key: jax.Array,
        num_microbatches: int,
        *,
        join: Callable[[Any], Any],
        needs_stack: bool,
    ) -> Any:
        """Outputs by the forward half of the schedule, microbatch by microbatch."""
        whole = partial(plan.evaluate, function)
        if not needs_stack and not calls_stack(whole, *arrays, batch, key):
            return whole(*arrays, batch, key)
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        count = _dividing_microbatches(plan.layout, num_rows, num_microbatches)
        given = Given.of(*arrays, split_rows(plan.layout, batch, count), key)

        def run(params: Arrays, variables: Arrays, batch: Any, key: Any) -> Any:
            model = plan.merge(
                nest(params), nest(variables), training=False, cast_stacked=False
            )
            return function(model, batch, key), {}

        num_stages = plan.layout.mesh.shape[self.axis]
        table = self.schedule.forward_table(num_stages, count)
        return join(PipelinedFunction(plan, self, run, given, table).outputs())


def _dividing_microbatches(layout: Layout, num_rows: int, wanted: int) -> int:
    """At most so many microbatches that each keeps the split of the rows."""
    shards = math.prod(layout.mesh.shape[a] for a in layout.claims.batch)
    rows = num_rows // shards if num_rows % shards == 0 else num_rows
    return max(count for count in range(1, wanted + 1) if rows % count == 0)


class PipelinedFunction:
    """A function of a model, cut at its stack and bound to a schedule.

    Args:
        plan: The model's structure and the place of every array.
        pipeline: Axis of the stages, and what is kept and gathered.
        function: The function; it calls one `Stack` once.
        given: What it is run on.
        table: The schedule.

    Raises:
        PipelineError: If the function cannot be cut, or a stage would end the process.
    """

    def __init__(
        self,
        plan: StatePlan,
        pipeline: PipelineSchedule,
        function: Function,
        given: Given,
        table: Table,
    ) -> None:
        self._plan = plan
        self._options = pipeline
        self._given = given
        self._table = table
        _check_sizes(plan, pipeline, given, table)
        self._rounds = plan_rounds(table.num_stages, table.num_chunks)
        buffers = plan_buffers(table)
        self._rows: Row = make_rows(table, buffers)
        self._edges = Edges(function, given, plan.layout, buffers, pipeline.axis)
        cut = self._edges.cut
        self._inside = cut.stack_params | cut.stack_others
        stash = "inputs" if table.is_forward_only else pipeline.stash
        stage = Stage(cut.recorded, cut.differentiated, plan.precision.compute, stash)
        mesh = plan.layout.mesh
        with using(plan.layout):
            jaxpr, self._state_keys = stage.trace_layer(
                self._split(frozenset(cut.stack_others)), self._edges.entering
            )
        check_layer(jaxpr, mesh, pipeline.axis)
        self._check_state(cut.shared)
        self._executor = Executor(stage, table, buffers, mesh, pipeline.axis)

    def _check_state(self, shared: frozenset[Path]) -> None:
        """Variables that the layers change change on their stage alone."""
        for key in self._state_keys:
            path = self._inside[key]
            if path in shared:
                raise PipelineError(
                    f"The loss reads `{dotted(path)}`, which the blocks of the Stack "
                    "change. Under a Pipeline it changes on its stage while other "
                    "microbatches are under way: return what the loss needs as an "
                    "output of the blocks."
                )

    def outputs(self) -> Any:
        """The function's outputs, each with a leading dim of microbatches."""
        edges, executor, layers = self._edges, self._executor, self._layers()
        late = edges.pick(edges.cut.late)

        def tick(carry: Any, row: Row) -> tuple[Any, None]:
            memory, flights, outputs = carry
            whole = row["whole"]
            fed, flight, _ = edges.enter(whole["enters"], edges.variables)
            flights = edges.keep(flights, whole["enters"], flight)
            with using(self._plan.layout):
                _, memory, leaving = executor.forward(layers, memory, fed, row)
            flight = edges.recall(flights, whole["leaves"])

            def after() -> Any:
                args = (edges.params, late, flight, leaving)
                return edges.after(whole["leaves"], *args)[0]

            new = run_if(whole["leaves"] >= 0, after, scope="after")
            outputs = write_slot(outputs, new, whole["leaves"])
            return (memory, flights, outputs), None

        carry = (
            executor.allocate(layers, edges.entering),
            edges.make_flights(),
            self._make_outputs(),
        )
        return self._outputs(jax.lax.scan(tick, carry, self._rows)[0][2])

    def gradients(
        self,
        objective: Callable[[Any, list], jax.Array],
        weights: Callable[[Any], list],
    ) -> tuple[Arrays, Arrays, Any]:
        """Gradients of a sum over microbatches.

        Args:
            objective: ``(outputs, weights) -> scalar`` of one microbatch, with the
                weights of the whole batch.
            weights: The weights of a microbatch among the outputs; they come from the
                data alone.

        Returns:
            Gradients of the parameters by path, the variables after the step, and the
            outputs with a leading dim of microbatches.
        """
        if self._table.is_forward_only:
            raise ScheduleError(
                f"The table {self._table.name!r} has no backward slots: it is one for "
                "evaluation. Training needs both."
            )
        edges, layers = self._edges, self._layers()
        totals = edges.weights(weights)
        tick = TrainingTick(
            edges, self._executor, layers, lambda outputs: objective(outputs, totals)
        )
        memory = self._executor.allocate(layers, edges.entering)
        carry = tick.start(
            memory,
            self._make_outputs(),
            self._zeros(edges.params),
            self._layer_zeros(layers),
        )
        with using(self._plan.layout):
            carry, _ = jax.lax.scan(tick, carry, self._rows)
        stacked = (carry["layer_grads"], carry["state"])
        layer_grads, state = self._reorder(stacked, self._rounds.reversed())
        grads = dict(carry["grads"])
        for key, x in layer_grads.items():
            path = self._inside[key]
            grads[path] = x + grads[path] if path in grads else x
        variables = self._given.variables | carry["early"] | carry["late"]
        variables |= {self._inside[k]: x for k, x in state.items()}
        return grads, variables, self._outputs(carry["outputs"])

    def _zeros(self, params: Arrays) -> Arrays:
        """Where gradients are summed, in the specs and the dtype of gradients."""
        return {path: self._zero(path, x) for path, x in params.items()}

    def _layer_zeros(self, layers: Layers) -> dict:
        """The same for the trained parameters of the layers, by key."""
        return {k: self._zero(self._inside[k], x) for k, x in layers.trained.items()}

    def _zero(self, path: Path, x: jax.Array) -> jax.Array:
        spec = self._plan.placements[path].gradient
        return jax.lax.with_sharding_constraint(
            jnp.zeros(x.shape, self._plan.precision.gradient_dtype(x.dtype)),
            self._plan.layout.sharding(spec),
        )

    def _make_outputs(self) -> Any:
        """Memory for the outputs of every microbatch."""
        return make_slots(self._table.num_microbatches, self._edges.cut.outputs)

    def _outputs(self, slots: Any) -> Any:
        """The outputs without the slot of ticks in which nothing leaves."""
        return jax.tree.map(lambda x: x[: self._table.num_microbatches], slots)

    # The layers

    def _layers(self) -> Layers:
        """The layers where the schedule runs them, gathered if once is enough."""
        layers = self._split(self._state_keys)
        if self._options.gather == "step" or self._table.num_chunks > 1:
            # What is sent is sent in the dtype of the computation.
            trained, fixed = self._used(layers.trained), self._used(layers.fixed)
            layers = Layers(trained, fixed, layers.state)
        return self._reorder(layers, self._rounds)

    def _split(self, state_keys: frozenset) -> Layers:
        given, inside = self._given, self._inside
        arrays = given.params | given.variables
        is_trained = {key: path in given.params for key, path in inside.items()}
        return Layers(
            trained={k: arrays[p] for k, p in inside.items() if is_trained[k]},
            fixed={
                k: arrays[p]
                for k, p in inside.items()
                if not is_trained[k] and k not in state_keys
            },
            state={k: arrays[inside[k]] for k in state_keys},
        )

    def _used(self, arrays: dict) -> dict:
        """Parameters in the dtype of the computation, gathered if once is enough."""
        plan, used = self._plan, dict(arrays)
        for key in arrays.keys() & self._edges.cut.stack_params.keys():
            used[key] = cast_floating(arrays[key], plan.precision.compute)
            if self._options.gather == "step":
                place = plan.placements[self._inside[key]]
                used[key] = jax.lax.with_sharding_constraint(
                    used[key], plan.layout.sharding(place.used)
                )
        return used

    def _reorder(self, tree: Any, rounds: Any) -> Any:
        return reorder(tree, rounds, self._plan.layout.mesh, self._options.axis)


def _check_sizes(
    plan: StatePlan, options: PipelineSchedule, given: Given, table: Table
) -> None:
    """A schedule of the user's own may have made any table."""
    found = (table.num_stages, table.num_microbatches, table.num_chunks)
    wanted = (
        plan.layout.mesh.shape[options.axis],
        len(given.keys),
        options.schedule.chunks,
    )
    if found != wanted:
        raise ScheduleError(
            f"{options.schedule} made a table of {found} stages, microbatches and "
            f"chunks; the step has {wanted}. A Schedule with several chunks must say "
            "so in its attribute `chunks`, and fill the table it is asked for."
        )
