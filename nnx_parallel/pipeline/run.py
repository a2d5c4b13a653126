"""Runs a loss that was written for one device as a pipeline.

One scan over the ticks of a schedule's table runs everything. A tick of training runs,
in this order: the prologue of the microbatch that enters; a forward slot of every
stage; the epilogue of the microbatch that leaves the stack, with its gradients; a
backward slot of every stage; and the prologue's backward pass for the microbatch whose
cotangents come back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.data.rows import count_rows, split_rows
from nnx_parallel.errors import PipelineError, ScheduleError
from nnx_parallel.layers.stack.residuals import Layers
from nnx_parallel.layers.stack.stack import using_runner
from nnx_parallel.metrics import Mean
from nnx_parallel.pipeline.cut import calls_stack, record
from nnx_parallel.pipeline.division import (
    Division,
    check_stacks,
    describe_stacks,
    find_stack,
)
from nnx_parallel.pipeline.executor import Executor
from nnx_parallel.pipeline.memory import (
    TickSlots,
    TickState,
    make_slots,
    run_if,
    write_slot,
    zeros_like,
)
from nnx_parallel.pipeline.prologue_epilogue import (
    Function,
    PipelineInputs,
    PrologueEpilogue,
)
from nnx_parallel.pipeline.stage import Stage, Stash
from nnx_parallel.precision import cast_floating
from nnx_parallel.programs import trace
from nnx_parallel.schedules.schedules import Fixed, Schedule
from nnx_parallel.schedules.table import Table, plan_buffers
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.layout import Execution
from nnx_parallel.sharding.model import Path, nest
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import is_inexact
from nnx_parallel.sharding.placement import Staged
from nnx_parallel.state import StatePlan, TrainState

Gather = Literal["microbatch", "step"]


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Execution):
    """Runs a step in stages; each stage sends microbatches to the next stage.

    Attributes:
        axis: Mesh axis of the stages.
        schedule: The schedule that makes the table.
        stash: Values that a stage keeps for a microbatch between its slots.
        gather: How often FSDP's shards of weights are gathered.
        stack: Path of the stack that runs in stages; ``None`` means the largest stack.
    """

    axis: str
    schedule: Schedule
    stash: Stash
    gather: Gather
    stack: str | None = None

    def check(self, model: nnx.Module, mesh: Mesh) -> None:
        """Checks that the model has a `Stack` with enough layers (`check_stacks`)."""
        check_stacks(model, self.stack, self._parts(mesh))

    def find_staged(self, model: nnx.Module, mesh: Mesh) -> Staged | None:
        """Returns the stack that runs in stages, or ``None`` if there is none.

        It is the stack at the given path, or the stack with the most parameters.
        """
        if (found := find_stack(model, self.stack)) is None:
            return None
        path, stack = found
        division = Division(stack.num_layers, *self._parts(mesh))
        return Staged(path, division.is_even)

    def describe(self, model: nnx.Module, mesh: Mesh) -> tuple[str, ...]:
        """Returns notes on uneven shares of layers and on stacks outside the stages."""
        return describe_stacks(model, self.stack, self._parts(mesh))

    def describe_waits(self, mesh: Mesh, num_microbatches: int) -> str:
        """Returns a bubble of more than a quarter, and a better `num_microbatches`.

        The better value is four microbatches per stage. The text is empty if the bubble
        is smaller, or if no better value is known.
        """
        size = mesh.shape[self.axis]
        better = 4 * size
        if num_microbatches >= better or isinstance(self.schedule, Fixed):
            return ""
        now, then = (
            self.schedule.table(size, count).simulate().bubble
            for count in (num_microbatches, better)
        )
        if now <= 1 / 4:
            return ""
        return (
            f"with {num_microbatches} microbatch{'es' * (num_microbatches > 1)}, "
            f"{size} stages wait {now:.0%} of the time; "
            f"num_microbatches={better} makes it {then:.0%}"
        )

    def _parts(self, mesh: Mesh) -> tuple[int, int]:
        """Returns the number of stages, and the number of chunks per stage."""
        return mesh.shape[self.axis], self.schedule.chunks

    def gradients(
        self,
        plan: StatePlan,
        forward: Callable[[dict, dict, Any, jax.Array], tuple[dict[str, Mean], dict]],
        state: TrainState,
        batch: Any,
        key: jax.Array,
        num_microbatches: int,
    ) -> tuple[dict, dict, dict[str, Mean]]:
        """Computes gradients of the batch's mean loss, in the schedule's order."""
        # (rows, ...) -> (microbatches, rows / microbatches, ...)
        microbatches = split_rows(plan.layout, batch, num_microbatches)
        inputs = PipelineInputs.of(state.params, state.variables, microbatches, key)
        table = self.schedule.table(plan.layout.mesh.shape[self.axis], num_microbatches)
        pipelined = PipelinedFunction(plan, self, forward, inputs, table)
        return pipelined.gradients(state.scaled)

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
        """Computes a function's outputs for each microbatch, in stages."""
        evaluate = partial(plan.evaluate, function)
        if not needs_stack:
            with using_runner(record):
                traced = trace(evaluate, *arrays, batch, key)
            # A prediction may leave out the stack, for example to use only the
            # embedding.
            if not calls_stack(traced):
                return evaluate(*arrays, batch, key)
        # A batch for evaluation may have any number of rows.
        num_rows = count_rows(batch)
        shards = math.prod(plan.layout.mesh.shape[a] for a in plan.layout.claims.batch)
        # If the number of shards does not divide the number of rows, the rows are not
        # split. Then the number of microbatches may be any divisor of the number of
        # rows.
        rows = num_rows // shards if num_rows % shards == 0 else num_rows
        count = max(n for n in range(1, num_microbatches + 1) if rows % n == 0)
        inputs = PipelineInputs.of(*arrays, split_rows(plan.layout, batch, count), key)

        def run(params: dict, variables: dict, batch: Any, key: Any) -> Any:
            model = plan.merge(params, variables, training=False, cast_stacked=False)
            return function(model, batch, key), {}

        num_stages = plan.layout.mesh.shape[self.axis]
        table = self.schedule.forward_table(num_stages, count)
        return join(
            PipelinedFunction(plan, self, plan.gathering(run), inputs, table).outputs()
        )


@dataclass(eq=False)
class PipelinedFunction:
    """A function of a model, cut at its stack and bound to a schedule.

    Attributes:
        plan: The model's structure and the placement of every array.
        pipeline: The axis of stages, and the options ``stash`` and ``gather``.
        function: The function. It calls one `Stack` once.
        inputs: The arguments of the function.
        table: The slots of all ticks.

    Raises:
        PipelineError: If the function cannot be cut, or if XLA would abort the process
            while it compiles a stage.
        ScheduleError: If the table does not fit this step.
    """

    plan: StatePlan
    pipeline: PipelineSchedule
    function: Function
    inputs: PipelineInputs
    table: Table

    def __post_init__(self) -> None:
        layout, axis = self.plan.layout, self.pipeline.axis
        table, schedule = self.table, self.pipeline.schedule
        found = (table.num_stages, table.num_microbatches, table.num_chunks)
        wanted = (layout.mesh.shape[axis], len(self.inputs.keys), schedule.chunks)
        # A user's schedule may make any table.
        if found != wanted:
            raise ScheduleError(
                f"{schedule} made a table of {found} stages, microbatches and chunks; "
                f"the step has {wanted}. A Schedule with several chunks must set its "
                "attribute `chunks`, and its tables must have the requested sizes."
            )
        buffers = plan_buffers(table)
        ends = PrologueEpilogue(self.function, self.inputs, layout, buffers, axis)
        self._ends, self._paths = ends, ends.cut.layer_paths
        arrays = self.inputs.params | self.inputs.variables
        first = arrays[next(iter(self._paths.values()))]
        self._division = Division(len(first), table.num_stages, table.num_chunks)
        self._ticks = TickSlots.of(table, buffers, self._division)
        # Blocks constrain activations by the layout that is active during their trace.
        with using(layout):
            self._stage = Stage(
                cut=ends.cut,
                arrays={key: arrays[path] for key, path in self._paths.items()},
                activations=ends.entering,
                mesh=layout.mesh,
                axis=axis,
                compute=self.plan.precision.compute,
                stash=None if table.is_forward_only else self.pipeline.stash,
                is_split=table.is_split,
            )
        changed = {self._paths[key] for key in self._stage.state_keys}
        for path in sorted(changed & ends.cut.shared):
            raise PipelineError(
                f"The loss reads `{dotted(path)}`, which the blocks of the Stack "
                "change. Under a Pipeline the variable changes on its stage while "
                "other microbatches are in flight: let the blocks return the value "
                "that the loss needs as a part of their output."
            )
        self._executor = Executor(self._stage, table, buffers)

    def outputs(self) -> Any:
        """Returns the function's outputs, each with a leading ``microbatches`` dim."""
        ends, executor, layers = self._ends, self._executor, self._layers()
        before = ends.prologue_variables

        # Evaluation does not change variables, so the carry has no variables.
        def tick(carry: Any, slots: TickSlots) -> tuple[Any, None]:
            memory, in_flight, outputs = carry
            leaves = slots.mesh.leaves
            entering, in_flight, _ = ends.enter(slots.mesh.enters, before, in_flight)
            with using(self.plan.layout):
                _, memory, leaving = executor.forward(layers, memory, entering, slots)
            kept = ends.recall(in_flight, leaves)

            def epilogue() -> Any:
                variables = kept.variables | ends.epilogue_variables
                skips, params = kept.skips, ends.params
                return ends.epilogue(leaves, params, variables, skips, leaving)[0]

            result = run_if(leaves >= 0, epilogue, scope="after")
            return (memory, in_flight, write_slot(outputs, result, leaves)), None

        memory = executor.allocate(layers)
        start = (memory, ends.make_in_flight(), self._output_slots())
        # The shapes of xs are (ticks, stages) for values of stages and (ticks,) for
        # values of the mesh.
        (*_, outputs), _ = jax.lax.scan(tick, start, self._ticks)
        return self._all_outputs(outputs)

    def gradients(
        self, scaled: Callable[[jax.Array], jax.Array]
    ) -> tuple[dict, dict, dict[str, Mean]]:
        """Computes gradients of the batch's mean loss.

        The function's outputs are means by name, including ``loss``. The loss is
        ``scaled`` within the ticks, because these may compute cotangents in float16.

        Returns:
            Gradients of the parameters, the variables after the step, and the means.
        """
        if self.table.is_forward_only:
            raise ScheduleError(
                f"The table {self.table.name!r} has no backward slots: it is for "
                "evaluation. Training needs forward and backward slots."
            )
        ends, executor, layers = self._ends, self._executor, self._layers()
        # Every term of the loss is divided by the weight of the whole batch, so the
        # weight is needed before the first gradient.
        totals = ends.sum_weights(lambda m: [term.weight for term in m["loss"].terms])
        state = TickState(
            memory=executor.allocate(layers),
            outputs=self._output_slots(),
            grads={path: self._zero(path, x) for path, x in ends.params.items()},
            layer_grads={
                key: self._zero(self._paths[key], x, is_layers=True)
                for key, x in layers.trained.items()
            },
            in_flight=(in_flight := ends.make_in_flight()),
            # Integers among the skips have no gradient, so they need no memory slot.
            skip_grads=zeros_like([x for x in in_flight.skips if is_inexact(x)]),
            prologue_variables=ends.prologue_variables,
            epilogue_variables=ends.epilogue_variables,
            layer_state=layers.state,
        )
        tick = partial(
            self._training_tick, layers, lambda m: scaled(m["loss"].over(totals))
        )
        with using(self.plan.layout):
            state, _ = jax.lax.scan(tick, state, self._ticks)
        stacked = (state.layer_grads, state.layer_state)
        layer_grads, layer_state = self._to_store(*stacked)
        grads = dict(state.grads)
        for key, x in layer_grads.items():
            path = self._paths[key]
            # A parameter that is used both in the layers and outside the stack has two
            # gradients.
            grads[path] = x + grads[path] if path in grads else x
        variables = self.inputs.variables | state.prologue_variables
        variables |= state.epilogue_variables
        variables |= {self._paths[key]: x for key, x in layer_state.items()}
        # (microbatches, ...) -> (...), because totals and weights of a Mean add up.
        outputs = self._all_outputs(state.outputs)
        means = jax.tree.map(lambda x: jnp.sum(x, axis=0), outputs)
        return nest(grads), nest(variables), means

    def _training_tick(
        self,
        layers: Layers,
        objective: Callable[[Any], jax.Array],
        state: TickState,
        slots: TickSlots,
    ) -> tuple[TickState, None]:
        """Runs all slots of a tick in order, with the parameters before the step."""
        ends, executor, mesh = self._ends, self._executor, slots.mesh
        entering, in_flight, variables = ends.enter(
            mesh.enters, state.prologue_variables, state.in_flight
        )
        state = replace(state, prologue_variables=variables, in_flight=in_flight)
        # The first stage's forward slot takes the entering microbatch in the same tick.
        layers = replace(layers, state=state.layer_state)
        layers, memory, leaving = executor.forward(
            layers, state.memory, entering, slots
        )
        # In the last stage the backward slot may follow the forward slot in the same
        # tick. So 1F1B keeps one cotangent, and does not keep outputs of the stack.
        state, cotangents = ends.leave(mesh.leaves, objective, state, leaving)
        state = replace(state, memory=memory, layer_state=layers.state)
        state, cotangents = executor.backward(layers, state, cotangents, slots)
        # The prologue takes the first stage's cotangents in the same tick.
        grads = ends.go_back(mesh.returns, state, cotangents)
        return replace(state, grads=grads), None

    def _zero(self, path: Path, x: jax.Array, *, is_layers: bool = False) -> jax.Array:
        """Returns zeros for a sum of gradients, with their spec and dtype."""
        spec = self.plan.placements[path].gradient
        if is_layers and not self._division.is_even:
            spec = self._in_stages(path, "gradient")
        # The dtype of the computation would be too narrow: a sum in bfloat16 loses
        # small terms.
        return jax.lax.with_sharding_constraint(
            jnp.zeros(x.shape, self.plan.precision.gradient_dtype(x.dtype)),
            self.plan.layout.sharding(spec),
        )

    def _output_slots(self) -> Any:
        return make_slots(self.table.num_microbatches, self._ends.cut.traced.shapes[0])

    def _all_outputs(self, slots: Any) -> Any:
        """Returns the outputs without the spare slot."""
        # (microbatches + 1, ...) -> (microbatches, ...)
        return jax.tree.map(lambda x: x[: self.table.num_microbatches], slots)

    def _layers(self) -> Layers:
        """Moves layers to their stages, and gathers them if ``gather`` is ``step``."""
        plan, arrays = self.plan, dict(self._stage.arrays)
        gathers = self.pipeline.gather == "step"
        is_even, params = self._division.is_even, sorted(self._ends.cut.call.params)
        # With one chunk and an even division, each stage already stores its layers, and
        # nothing is sent.
        if gathers or self.table.num_chunks > 1 or not is_even:
            for key in params:
                # Parameters are sent in the dtype of the computation, because bfloat16
                # halves the bytes.
                arrays[key] = cast_floating(arrays[key], plan.precision.compute)
        for key in params if gathers and is_even else ():
            used = plan.layout.sharding(plan.placements[self._paths[key]].used)
            arrays[key] = jax.lax.with_sharding_constraint(arrays[key], used)
        if is_even:
            return self._executor.permute(self._stage.split(arrays))
        for key, x in arrays.items():
            role = "used" if gathers and key in params else "stored"
            spec = self._in_stages(self._paths[key], role)
            stored = plan.placements[self._paths[key]].stored
            arrays[key] = self._division.to_stages(
                x, plan.layout.sharding(stored), plan.layout.sharding(spec)
            )
        return self._stage.split(arrays)

    def _to_store(self, grads: dict, state: dict) -> tuple[dict, dict]:
        """Puts the layers' gradients and state in the order of the stored layers."""
        if self._division.is_even:
            return self._executor.permute((grads, state), back=True)

        def store(key: Any, x: jax.Array, role: str) -> jax.Array:
            spec = getattr(self.plan.placements[self._paths[key]], role)
            return self._division.to_store(x, self.plan.layout.sharding(spec))

        return (
            {key: store(key, x, "gradient") for key, x in grads.items()},
            {key: store(key, x, "stored") for key, x in state.items()},
        )

    def _in_stages(self, path: Path, role: str) -> P:
        """Returns the spec on the stages, for layers that are divided unevenly."""
        spec = getattr(self.plan.placements[path].in_stage(), role)
        return P(self.pipeline.axis, *spec[1:])
