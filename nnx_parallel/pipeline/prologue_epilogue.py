"""Runs the parts of a loss around its stack, for one microbatch at a time.

These parts run outside the region that is manual over ``pipe``, and the whole mesh
shares their work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from nnx_parallel.data.rows import count_rows, is_marked, partition
from nnx_parallel.layers.stack.stack import using_runner
from nnx_parallel.pipeline.cut import Arrays, PartitionedJaxpr, record
from nnx_parallel.pipeline.memory import (
    InFlight,
    TickState,
    make_slots,
    read_slot,
    write_slot,
    zeros_like,
    zeros_of,
)
from nnx_parallel.precision import sum_dtype
from nnx_parallel.programs import names_in, trace
from nnx_parallel.schedules.table import Buffers
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import flatten, nest
from nnx_parallel.sharding.names import as_tuple
from nnx_parallel.sharding.nnx_arrays import is_inexact

Function = Callable[[dict, dict, Any, Any], tuple[Any, dict]]
"""``(params, variables, batch, key) -> (outputs, new variables)``, of nested dicts."""


@dataclass(frozen=True, kw_only=True)
class PipelineInputs:
    """The arguments of a pipelined function.

    Attributes:
        params: Trained parameters, by path.
        variables: All other arrays of the model, by path.
        batch: Microbatches, along a leading dim.
        keys: A random key for each microbatch.
    """

    params: Arrays
    variables: Arrays
    batch: Any
    keys: jax.Array

    @classmethod
    def of(
        cls, params: Any, variables: Any, microbatches: Any, key: jax.Array
    ) -> PipelineInputs:
        """Makes the inputs from nested arrays; each microbatch gets a different key.

        If there is only one microbatch, it gets the given key.
        """
        count = count_rows(microbatches)
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(count))
        # `fold_in` takes the microbatch's index, as in a step that accumulates
        # microbatches, so that dropout masks are the same.
        return cls(
            params=flatten(params),
            variables=flatten(variables),
            batch=microbatches,
            keys=keys if count > 1 else key[None],
        )

    def take(self, index: jax.Array) -> tuple[Any, jax.Array]:
        """Returns a microbatch and its key, or arbitrary values if the index is -1."""
        rows, shared, join = partition(self.batch)
        rows, key = read_slot((rows, self.keys), index)
        return join(rows, shared), key


@dataclass(eq=False)
class PrologueEpilogue:
    """The parts of a function before and after its stack.

    Methods take the index of a microbatch, or -1 in a tick without a microbatch.

    Attributes:
        function: The function to cut. It calls one `Stack` once.
        inputs: The function's arguments.
        layout: The layout of the step.
        buffers: Memory slots of the schedule.
        axis: Mesh axis of the stages.
        cut: The function, cut at its stack.
        params: The trained parameters that the prologue and the epilogue use, by path.
        variables: The other arrays that they use, by path.
        prologue_variables: Variables that the prologue changes, with their values
            before the step.
        epilogue_variables: Variables that the epilogue changes, with their values
            before the step.
        entering: Shapes of the arrays that enter the stack.
    """

    function: Function
    inputs: PipelineInputs
    layout: Layout
    buffers: Buffers
    axis: str

    def __post_init__(self) -> None:
        inputs, first = self.inputs, jnp.int32(0)
        item = jax.eval_shape(inputs.take, first)
        num_rows = count_rows(item[0])
        self._spread = spread_over_stages(self.layout, self.axis, num_rows)

        def flat(params: Arrays, variables: Arrays, *item: Any) -> tuple[Any, Arrays]:
            outputs, after = self.function(nest(params), nest(variables), *item)
            return outputs, flatten(after)

        args = (inputs.params, inputs.variables, *item)
        with using(self._spread), using_runner(record):
            # Calls that contain the stack (jit, checkpoint) are inlined, so that the
            # stack's equation is an equation of the loss itself.
            traced = trace(flat, *args, inlined=lambda eqn: "stack" in names_in([eqn]))
        self.cut = PartitionedJaxpr(traced)
        # The stack's arrays are left out unless they are shared, because they would be
        # inputs of every condition.
        inside = {*self.cut.layer_paths.values()} - self.cut.shared
        self.params, self.variables = (
            {path: x for path, x in arrays.items() if path not in inside}
            for arrays in (inputs.params, inputs.variables)
        )
        self.prologue_variables, self.epilogue_variables = (
            {path: self.variables[path] for path in changes}
            for changes in (self.cut.prologue_changes, self.cut.epilogue_changes)
        )
        run = partial(self.prologue, params=self.params, variables={})
        self.entering, self._skips, _ = jax.eval_shape(run, first)

    def enter(
        self, microbatch: jax.Array, before: Arrays, in_flight: InFlight
    ) -> tuple[list, InFlight, Arrays]:
        """Runs the prologue of a microbatch that enters in this tick.

        ``before`` are the variables that the prologue changes, and ``in_flight`` are
        the memory slots for kept values. Returns the arrays that enter the stack, the
        memory slots, and the variables after the prologue.
        """

        def run() -> tuple[list, list, Arrays]:
            return self.prologue(microbatch, self.params, before)

        # The old variables are returned, and not zeros, because a tick without a
        # microbatch does not change them.
        def skip() -> tuple[list, list, Arrays]:
            return *zeros_of(run)[:2], before

        with jax.named_scope("before"):
            entering, skips, after = jax.lax.cond(microbatch >= 0, run, skip)
        # The variables before the prologue are kept, because `go_back` runs it again.
        kept = InFlight(skips, before)
        return entering, write_slot(in_flight, kept, self._slot(microbatch)), after

    def leave(
        self,
        microbatch: jax.Array,
        objective: Callable[[Any], jax.Array],
        state: TickState,
        leaving: list,
    ) -> tuple[TickState, list]:
        """Runs the epilogue of a microbatch that leaves now, and adds its gradients.

        ``objective`` computes the scalar to differentiate from the function's outputs,
        and ``leaving`` is the output of the stack. Returns the state, and the
        cotangents of all activations.
        """
        kept = self.recall(state.in_flight, microbatch)
        variables = kept.variables | state.epilogue_variables

        def epilogue(params: Arrays, floats: list, leaving: list) -> Any:
            rest = iter(floats)
            skips = [next(rest) if is_inexact(x) else x for x in kept.skips]
            out, after = self.epilogue(microbatch, params, variables, skips, leaving)
            return objective(out), (out, after)

        def run() -> tuple:
            # Integers have no cotangent, so `epilogue` closes over them.
            floats = [x for x in kept.skips if is_inexact(x)]
            value, vjp, (outputs, changed) = jax.vjp(
                epilogue, self.params, floats, leaving, has_aux=True
            )
            new, *cotangents = vjp(jnp.ones_like(value))
            return _add(state.grads, new), changed, *cotangents, outputs

        def skip() -> tuple:
            return state.grads, state.epilogue_variables, *zeros_of(run)[2:]

        # The index comes from the table, so the predicate is equal on all devices. In
        # ticks in which no microbatch leaves, the gradients pass through unchanged.
        with jax.named_scope("after"):
            grads, changed, skip_grads, cotangents, outputs = jax.lax.cond(
                microbatch >= 0, run, skip
            )
        slot = self._slot(microbatch)
        skip_grads = write_slot(state.skip_grads, skip_grads, slot)
        # The stack does not output the blocks' arguments, so their cotangents start as
        # zeros.
        rest = self.cut.with_cotangents(self.entering)[len(cotangents) :]
        cotangents = [*cotangents, *zeros_like(rest)]
        state = replace(
            state,
            grads=grads,
            epilogue_variables=changed,
            skip_grads=skip_grads,
            outputs=write_slot(state.outputs, outputs, microbatch),
        )
        return state, cotangents

    def go_back(
        self, microbatch: jax.Array, state: TickState, cotangents: list
    ) -> Arrays:
        """Adds the prologue's gradients for a microbatch whose cotangents came back.

        The prologue is run again, because its residuals would otherwise be kept as long
        as the skips.
        """
        kept = self.recall(state.in_flight, microbatch)
        skip_grads = read_slot(state.skip_grads, self._slot(microbatch))

        def prologue(params: Arrays) -> list:
            entering, skips, _ = self.prologue(microbatch, params, kept.variables)
            floats = [x for x in skips if is_inexact(x)]
            return [*self.cut.with_cotangents(entering), *floats]

        def run() -> Arrays:
            _, vjp = jax.vjp(prologue, self.params)
            (new,) = vjp([*self.spread(cotangents), *skip_grads])
            return _add(state.grads, new)

        with jax.named_scope("before_backward"):
            return jax.lax.cond(microbatch >= 0, run, lambda: state.grads)

    def prologue(
        self, microbatch: jax.Array, params: Arrays, variables: Arrays
    ) -> tuple[list, list, Arrays]:
        """Computes the stack's input arrays, the skips, and the changed variables."""
        batch, key = self.inputs.take(microbatch)
        arrays = params | self.variables | variables
        with using(self._spread):
            return self.cut.prologue(arrays, (self.spread(batch), key))

    def epilogue(
        self,
        microbatch: jax.Array,
        params: Arrays,
        variables: Arrays,
        skips: list,
        leaving: list,
    ) -> tuple[Any, Arrays]:
        """Computes the function's outputs, and variables that the epilogue changes."""
        batch, key = self.inputs.take(microbatch)
        arrays = params | self.variables | variables
        with using(self._spread):
            batch, leaving = self.spread((batch, leaving))
            return self.cut.epilogue(arrays, (batch, key), skips, leaving)

    def spread(self, tree: Any) -> Any:
        """Splits arrays with rows over the whole mesh, including the axis of stages."""

        def spread(x: Any) -> Any:
            if is_marked(x):
                return x
            # (batch, seq, ...): `pipe` does not split the output of the stages. Without
            # this constraint every stage would compute the whole epilogue.
            names = ("batch", "seq")[: x.ndim] + (None,) * (x.ndim - 2)
            spec = self._spread.activation_spec(x.shape, names)
            free = [P.UNCONSTRAINED] * (x.ndim - len(spec))
            sharding = self._spread.sharding(P(*spec, *free))
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(spread, tree, is_leaf=is_marked)

    def make_in_flight(self) -> InFlight:
        """Makes memory slots for the microbatches that are in the pipeline at once."""
        one = InFlight(self._skips, self.prologue_variables)
        return make_slots(self.buffers.num_flights, one)

    def recall(self, memory: InFlight, microbatch: jax.Array) -> InFlight:
        """Returns the values kept for a microbatch."""
        return read_slot(memory, self._slot(microbatch))

    def _slot(self, microbatch: jax.Array) -> jax.Array:
        # (microbatches,)
        slots = jnp.asarray(self.buffers.flight)
        return jnp.where(microbatch >= 0, slots[jnp.maximum(microbatch, 0)], -1)

    def sum_weights(self, select: Callable[[Any], list]) -> list:
        """Sums selected outputs over the batch. They must not depend on the stack."""
        rows, shared, join = partition(self.inputs.batch)

        def weigh(changed: Arrays, item: Any) -> tuple[Arrays, list]:
            arrays = self.params | self.variables | changed
            rows, key = item
            with using(self._spread):
                given = join(rows, shared), key
                found, changed = self.cut.without_stack(select, arrays, given)
            return changed, found

        items = (rows, self.inputs.keys)
        _, weights = jax.lax.scan(weigh, self.prologue_variables, items)
        return [jnp.sum(w, axis=0, dtype=sum_dtype(w)) for w in weights]


def spread_over_stages(layout: Layout, axis: str, num_rows: int) -> Layout:
    """Returns the layout of the parts around the stack.

    In this layout the axis of stages splits the rows too. If the axis does not divide
    the number of rows, it splits the sequence.
    """
    claims = layout.claims
    # The axis comes last in the spec, even if it does not in the mesh. Each device then
    # takes a part of the rows that it already holds, and no rows are sent.
    batch = (*claims.batch, axis)
    if num_rows % math.prod(layout.mesh.shape[name] for name in batch) == 0:
        return replace(layout, claims=replace(claims, batch=batch))
    if claims.sequence is not None:
        # Here too a device takes a part of the tokens that it already holds.
        own, given = layout.sequence_axes, as_tuple(claims.activations.get("seq"))
        seq = (*own, axis, *(name for name in given if name not in own))
        activations = {**claims.activations, "seq": seq}
        return replace(layout, claims=replace(claims, activations=activations))
    seq = (axis, *as_tuple(claims.logical.get("seq")))
    logical = {**claims.logical, "seq": seq}
    return replace(layout, claims=replace(claims, logical=logical))


def _add(grads: Arrays, new: Arrays) -> Arrays:
    """Adds ``new`` to ``grads``, in the dtype of ``grads``."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, new)
