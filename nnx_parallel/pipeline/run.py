"""A loss written for one device, run as a pipeline: its gradients, or its outputs.

One scan over the ticks of a schedule's table runs everything. A tick of training runs
the prologue of the microbatch that enters, a forward slot of every stage, the epilogue
of the microbatch that leaves the stack and its gradients, a backward slot of every
stage, and the prologue's backward pass for the microbatch whose cotangents come back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.data.batches import split_rows
from nnx_parallel.errors import PipelineError, ScheduleError
from nnx_parallel.layers.jaxprs import Layers
from nnx_parallel.metrics import Mean
from nnx_parallel.pipeline.cut import Arrays, Function, calls_stack
from nnx_parallel.pipeline.executor import Executor
from nnx_parallel.pipeline.memory import (
    StageMemory,
    TickSlots,
    check_stack,
    make_slots,
    read_slot,
    run_if,
    write_slot,
)
from nnx_parallel.pipeline.prologue_epilogue import (
    InFlight,
    PipelineInputs,
    PrologueEpilogue,
)
from nnx_parallel.pipeline.stage import Stage, Stash
from nnx_parallel.precision import cast_floating
from nnx_parallel.schedules.schedules import Schedule
from nnx_parallel.schedules.table import Table, plan_buffers
from nnx_parallel.sharding.claims import Execution
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import Path, flatten, nest
from nnx_parallel.sharding.names import dotted, is_inexact
from nnx_parallel.state import StatePlan, TrainState

Gather = Literal["microbatch", "step"]


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Execution):
    """The step as stages that pass microbatches on.

    Attributes:
        axis: Mesh axis of the stages.
        schedule: Makes the table.
        stash: What a stage keeps of a microbatch between its slots.
        gather: How often weights that FSDP shards are gathered.
    """

    axis: str
    schedule: Schedule
    stash: Stash
    gather: Gather

    def check(self, model: nnx.Module, mesh: Mesh) -> None:
        """Refuses a model whose one `Stack` does not divide into stages."""
        check_stack(model, mesh.shape[self.axis], self.schedule.chunks)

    def merge(
        self, plan: StatePlan, params: dict, variables: dict, *, training: bool
    ) -> nnx.Module:
        """The model; layers of its stack are cast and gathered where they run."""
        return plan.merge(params, variables, training=training, cast_stacked=False)

    def observe_labels(self, run: Callable[[], Any]) -> list[Any]:
        """No labels: a loss that is cut runs without its callbacks, which report."""
        return []

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
        # (rows, ...) -> (microbatches, rows / microbatches, ...)
        microbatches = split_rows(plan.layout, batch, num_microbatches)
        inputs = PipelineInputs.of(state.params, state.variables, microbatches, key)

        def function(params: Arrays, variables: Arrays, batch: Any, key: Any) -> Any:
            means, after = forward(nest(params), nest(variables), batch, key)
            return means, flatten(after)

        table = self.schedule.table(plan.layout.mesh.shape[self.axis], num_microbatches)
        pipelined = PipelinedFunction(plan, self, function, inputs, table)
        grads, variables, means = pipelined.gradients(
            # Scaled within the ticks, where the cotangents of float16 are computed.
            lambda means, weights: state.scaled(means["loss"].over(weights)),
            lambda means: [term.weight for term in means["loss"].terms],
        )
        # (microbatches, ...) -> (...): totals and weights of a Mean add up.
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
        # A prediction may use the model's embedding alone, say.
        if not needs_stack and not calls_stack(whole, *arrays, batch, key):
            return whole(*arrays, batch, key)
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        count = _dividing_microbatches(plan.layout, num_rows, num_microbatches)
        inputs = PipelineInputs.of(*arrays, split_rows(plan.layout, batch, count), key)

        def run(params: Arrays, variables: Arrays, batch: Any, key: Any) -> Any:
            model = self.merge(plan, nest(params), nest(variables), training=False)
            return function(model, batch, key), {}

        num_stages = plan.layout.mesh.shape[self.axis]
        table = self.schedule.forward_table(num_stages, count)
        return join(PipelinedFunction(plan, self, run, inputs, table).outputs())


def _dividing_microbatches(layout: Layout, num_rows: int, wanted: int) -> int:
    """At most so many microbatches that each keeps the split of the rows."""
    # A batch for evaluation may have any number of rows.
    shards = math.prod(layout.mesh.shape[a] for a in layout.claims.batch)
    # Rows that the shards do not divide are not split: any divisor will do.
    rows = num_rows // shards if num_rows % shards == 0 else num_rows
    return max(count for count in range(1, wanted + 1) if rows % count == 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TickState:
    """The state that goes from tick to tick in training.

    A scan carries its leaves in the order of the fields.

    Attributes:
        prologue_variables: Variables that the prologue changes, by path.
        in_flight: Slots for the microbatches in the pipeline.
        grads: Gradients of the parameters outside the stack, by path.
        epilogue_variables: Variables that the epilogue changes, by path.
        layer_grads: Gradients of the layers' parameters, by key.
        memory: What the stages keep.
        outputs: Slots for the function's outputs, one for each microbatch.
        skip_grads: Slots for the gradients of skips, as long as those.
        layer_state: Variables that the layers change, by key.
    """

    prologue_variables: Arrays
    in_flight: InFlight
    grads: Arrays
    epilogue_variables: Arrays
    layer_grads: dict
    memory: StageMemory
    outputs: Any
    skip_grads: list
    layer_state: dict


class PipelinedFunction:
    """A function of a model, cut at its stack and bound to a schedule.

    Args:
        plan: The model's structure and the place of every array.
        schedule: Axis of the stages, and what is kept and gathered.
        function: The function; it calls one `Stack` once.
        inputs: Its arguments.
        table: The slots of all ticks.

    Raises:
        PipelineError: If the function cannot be cut, or a stage would end the process.
        ScheduleError: If the table is not one for this step.
    """

    def __init__(
        self,
        plan: StatePlan,
        schedule: PipelineSchedule,
        function: Function,
        inputs: PipelineInputs,
        table: Table,
    ) -> None:
        mesh, axis = plan.layout.mesh, schedule.axis
        _check_sizes(schedule, table, mesh.shape[axis], len(inputs.keys))
        self._plan = plan
        self._schedule = schedule
        self._inputs = inputs
        self._table = table
        buffers = plan_buffers(table)
        self._ticks = TickSlots.of(table, buffers)
        self._ends = PrologueEpilogue(function, inputs, plan.layout, buffers, axis)
        self._paths = self._ends.cut.layer_paths
        arrays = inputs.params | inputs.variables
        self._arrays = {key: arrays[path] for key, path in self._paths.items()}
        # Blocks place activations by the layout that is active at their trace.
        with using(plan.layout):
            self._stage = Stage(
                self._ends.cut.block,
                self._arrays,
                self._ends.entering,
                mesh=mesh,
                axis=axis,
                compute=plan.precision.compute,
                stash=None if table.is_forward_only else schedule.stash,
                is_split=table.is_split,
            )
        self._check_layer_state()
        self._executor = Executor(self._stage, table, buffers, mesh, axis)

    def _check_layer_state(self) -> None:
        paths = {self._paths[key] for key in self._stage.state_keys}
        for path in sorted(paths & self._ends.cut.shared):
            raise PipelineError(
                f"The loss reads `{dotted(path)}`, which the blocks of the Stack "
                "change. Under a Pipeline it changes on its stage while other "
                "microbatches are in flight: return what the loss needs as an output "
                "of the blocks."
            )

    def outputs(self) -> Any:
        """The function's outputs, each with a leading dim of microbatches."""
        ends, executor, layers = self._ends, self._executor, self._layers()
        variables = ends.pick(ends.cut.epilogue_changes)

        # Evaluation changes no variable: nothing of it goes from tick to tick.
        def tick(carry: Any, slots: TickSlots) -> tuple[Any, None]:
            memory, in_flight, outputs = carry
            enters, leaves = slots.mesh.enters, slots.mesh.leaves
            entering, new, _ = ends.enter(enters, ends.variables)
            in_flight = ends.keep(in_flight, enters, new)
            with using(self._plan.layout):
                _, memory, leaving = executor.forward(layers, memory, entering, slots)
            kept = ends.recall(in_flight, leaves)

            def epilogue() -> Any:
                return ends.epilogue(leaves, ends.params, variables, kept, leaving)[0]

            result = run_if(leaves >= 0, epilogue, scope="after")
            return (memory, in_flight, write_slot(outputs, result, leaves)), None

        memory = executor.allocate(layers, ends.entering)
        start = (memory, ends.make_in_flight(), self._output_slots())
        # xs: (ticks, stages) for the stages' slots, (ticks,) for the mesh's.
        (*_, outputs), _ = jax.lax.scan(tick, start, self._ticks)
        return self._all_outputs(outputs)

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
        ends, executor, layers = self._ends, self._executor, self._layers()
        # Every term of the loss is divided by the weight of the whole batch, which is
        # needed before the first gradient.
        totals = ends.sum_weights(weights)
        state = TickState(
            memory=executor.allocate(layers, ends.entering),
            outputs=self._output_slots(),
            grads={path: self._zero(path, x) for path, x in ends.params.items()},
            layer_grads={
                key: self._zero(self._paths[key], x)
                for key, x in layers.trained.items()
            },
            in_flight=(in_flight := ends.make_in_flight()),
            # Integers among the skips have no gradient, and no slot.
            skip_grads=make_slots(
                executor.buffers.num_flights,
                [x[0] for x in in_flight.skips if is_inexact(x)],
            ),
            prologue_variables=ends.pick(ends.cut.prologue_changes),
            epilogue_variables=ends.pick(ends.cut.epilogue_changes),
            layer_state=layers.state,
        )
        tick = partial(
            self._training_tick, layers, lambda outputs: objective(outputs, totals)
        )
        with using(self._plan.layout):
            state, _ = jax.lax.scan(tick, state, self._ticks)
        stacked = (state.layer_grads, state.layer_state)
        layer_grads, layer_state = executor.to_storage(stacked)
        grads = dict(state.grads)
        for key, x in layer_grads.items():
            path = self._paths[key]
            # A parameter that the layers share with the parts around them has both.
            grads[path] = x + grads[path] if path in grads else x
        variables = self._inputs.variables | state.prologue_variables
        variables |= state.epilogue_variables
        variables |= {self._paths[key]: x for key, x in layer_state.items()}
        return grads, variables, self._all_outputs(state.outputs)

    def _training_tick(
        self,
        layers: Layers,
        objective: Callable[[Any], jax.Array],
        state: TickState,
        slots: TickSlots,
    ) -> tuple[TickState, None]:
        """All slots of a tick, in their order; ``layers`` as before the step."""
        ends, executor = self._ends, self._executor
        enters, leaves = slots.mesh.enters, slots.mesh.leaves
        returns = slots.mesh.returns

        variables = ends.variables | state.prologue_variables
        entering, new, prologue_variables = ends.enter(enters, variables)
        in_flight = ends.keep(state.in_flight, enters, new)

        # What enters is fed to the first stage's forward slot of this same tick.
        layers = replace(layers, state=state.layer_state)
        layers, memory, leaving = executor.forward(
            layers, state.memory, entering, slots
        )

        # The last stage's backward may follow its forward in the same tick: 1F1B keeps
        # one cotangent, and no output of the stack.
        grads, epilogue_variables, skip_grads, cotangents, outputs = ends.leave(
            leaves,
            objective,
            ends.recall(in_flight, leaves),
            leaving,
            (state.grads, state.epilogue_variables),
        )
        skip_grads = write_slot(state.skip_grads, skip_grads, ends.slot(leaves))
        cotangents = ends.pad(cotangents)
        outputs = write_slot(state.outputs, outputs, leaves)

        layer_grads, memory, cotangents = executor.backward(
            layers, memory, state.layer_grads, cotangents, slots
        )

        # The first stage's cotangents come back to the prologue in this same tick.
        kept = ends.recall(in_flight, returns)
        kept_grads = read_slot(skip_grads, ends.slot(returns))
        grads = ends.go_back(returns, kept, kept_grads, cotangents, grads)
        return TickState(
            prologue_variables,
            in_flight,
            grads,
            epilogue_variables,
            layer_grads,
            memory,
            outputs,
            skip_grads,
            layers.state,
        ), None

    def _zero(self, path: Path, x: jax.Array) -> jax.Array:
        """Where a gradient is summed, in the spec and the dtype of gradients."""
        spec = self._plan.placements[path].gradient
        # Not in the dtype of the computation: bfloat16 would round off small terms.
        return jax.lax.with_sharding_constraint(
            jnp.zeros(x.shape, self._plan.precision.gradient_dtype(x.dtype)),
            self._plan.layout.sharding(spec),
        )

    def _output_slots(self) -> Any:
        count, shapes = self._table.num_microbatches, self._ends.cut.output_shapes
        return make_slots(count, shapes)

    def _all_outputs(self, slots: Any) -> Any:
        """The outputs without the spare slot."""
        # (microbatches + 1, ...) -> (microbatches, ...)
        return jax.tree.map(lambda x: x[: self._table.num_microbatches], slots)

    def _layers(self) -> Layers:
        """The layers where the schedule runs them, gathered if once is enough."""
        plan, gathers = self._plan, self._schedule.gather == "step"
        arrays = dict(self._arrays)
        # With one chunk the layers lie where they run, and nothing is sent.
        if gathers or self._table.num_chunks > 1:
            for key in [k for k in arrays if k in self._ends.cut.block.params]:
                # What is sent is sent in the dtype of the computation: half the bytes.
                arrays[key] = cast_floating(arrays[key], plan.precision.compute)
                if gathers:
                    used = plan.placements[self._paths[key]].used
                    arrays[key] = jax.lax.with_sharding_constraint(
                        arrays[key], plan.layout.sharding(used)
                    )
        return self._executor.to_stages(self._stage.split(arrays))


def _check_sizes(
    pipeline: PipelineSchedule, table: Table, num_stages: int, num_microbatches: int
) -> None:
    """A schedule of the user's own may have made any table."""
    found = (table.num_stages, table.num_microbatches, table.num_chunks)
    wanted = (num_stages, num_microbatches, pipeline.schedule.chunks)
    if found != wanted:
        raise ScheduleError(
            f"{pipeline.schedule} made a table of {found} stages, microbatches and "
            f"chunks; the step has {wanted}. A Schedule with several chunks must say "
            "so in its attribute `chunks`, and fill the table it is asked for."
        )
