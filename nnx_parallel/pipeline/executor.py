"""Runs the slots of all stages in a tick.

The slots run in regions that are manual over the ``pipe`` axis.

In a tick a stage has at most one forward, one backward input and one backward weight
slot. Each kind runs under a ``jax.lax.cond``. Its predicate is equal on all devices:
it is true if some stage has such a slot in this tick. A stage without such a slot masks
its result. This costs no time, because a tick takes as long as its busiest stage in any
case. It is also the only safe form: if a predicate differs between stages, a
collective-permute in a branch hangs or gives wrong numbers, in jax 0.10 and 0.12. The
partitioner inserts such collective-permutes too, for shifts and convolutions.

Each branch has a named scope, the slot's kind, which audits and profiles show.
``ppermute`` sends activations to the next stage, and cotangents to the previous stage.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.layers.stack.residuals import Layers
from nnx_parallel.mesh import manual_region
from nnx_parallel.pipeline.memory import (
    Chunks,
    LayerPermutation,
    MeshSlots,
    StageMemory,
    TickSlots,
    TickState,
    make_slots,
    read_slot,
    run_if,
    write_slot,
    zeros_like,
)
from nnx_parallel.pipeline.stage import Stage
from nnx_parallel.schedules.table import Buffers, Table


@dataclass(frozen=True, eq=False)
class Executor:
    """Runs the slots of a tick on all stages at once.

    Arrays of all stages have a leading ``stages`` dim, split over the pipe axis.

    Attributes:
        stage: Runs the layers of a stage.
        table: The schedule.
        buffers: The memory slots of the schedule.
    """

    stage: Stage
    table: Table
    buffers: Buffers

    @cached_property
    def _chunks(self) -> Chunks:
        return Chunks(self.table.num_chunks)

    def manual(self, function: Callable) -> Callable:
        """Wraps a stage's ``(layers, each, shared) -> (layers, each)`` for all stages.

        The stages split the ``layers`` dim of arrays in ``layers``, and the leading
        ``stages`` dim of arrays in ``each``. Arrays in ``shared`` are the same for all
        stages.
        """

        def body(layers: Any, each: Any, shared: Any) -> Any:
            each = jax.tree.map(lambda x: x[0], each)  # (1, ...) -> (...)
            layers, out = function(layers, each, shared)
            return layers, jax.tree.map(lambda x: x[None], out)

        over_stages = P(self.stage.axis)
        # (layers, ...), (stages, ...), and arrays without a dim that stages split.
        in_specs = (over_stages, over_stages, P())
        mesh, axes = self.stage.mesh, {self.stage.axis}
        return manual_region(body, mesh, in_specs, over_stages, axes=axes)

    def permute(self, tree: Any, *, back: bool = False) -> Any:
        """Moves stacked arrays from their natural order to their stages, or back."""
        table = self.table
        # With one chunk the schedule's order is the natural order.
        if table.num_chunks == 1:
            return tree
        permutation = LayerPermutation.plan(table.num_stages, table.num_chunks)
        permutation = permutation.inverse() if back else permutation
        move = partial(permutation.move, axis=self.stage.axis)
        run = self.manual(lambda layers, *_: (jax.tree.map(move, layers), None))
        return run(tree, None, None)[0]

    def allocate(self, layers: Layers) -> StageMemory:
        """Returns zeros for all memory of the stages."""
        buffers, table, stage = self.buffers, self.table, self.stage

        def slots(count: int, tree: Any) -> Any:
            # Only shapes are computed here. `_of_stages` makes the zeros, already with
            # their sharding.
            return self._of_stages(jax.eval_shape(lambda: make_slots(count, tree)))

        def run(layers: Layers, _: None, activations: list) -> tuple[None, Any]:
            chunk = self._chunks.take(layers, jnp.int32(0))
            activations, _state, stash = stage.forward(chunk, activations)
            if not table.is_split:
                return None, (stash, None)
            cotangents = stage.cut.with_cotangents(activations)
            return None, (stash, stage.backward(chunk, stash, cotangents)[2])

        received = self._of_stages(stage.activations)
        inputs = slots(buffers.num_inputs, stage.activations)
        if table.is_forward_only:
            return StageMemory(None, inputs, None, received, None, None)
        cotangents = stage.cut.with_cotangents(stage.activations)
        shapes = jax.eval_shape(self.manual(run), layers, None, stage.activations)[1]
        stash, pending = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes
        )
        return StageMemory(
            received=received,
            inputs=inputs,
            stash=slots(buffers.num_saved, stash),
            returned=self._of_stages(cotangents),
            cotangents=slots(buffers.num_cotangents, cotangents),
            pending=slots(buffers.num_pending, pending) if table.is_split else None,
        )

    def _of_stages(self, tree: Any) -> Any:
        """Returns zeros for all stages: a shape (...) becomes (stages, ...)."""

        def place(x: jax.Array) -> jax.Array:
            spec = P(self.stage.axis, *(P.UNCONSTRAINED,) * (x.ndim - 1))
            sharding = NamedSharding(self.stage.mesh, spec)
            return jax.lax.with_sharding_constraint(x, sharding)

        size = self.table.num_stages
        # All other dims are unconstrained, so that the partitioner chooses the specs
        # from the layers.
        zeros = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), tree)
        return jax.tree.map(place, zeros)

    def _receive(self, slots: list, fed: list, *each: Any) -> list:
        """Writes a neighbour's values, and values from outside, to memory slots.

        The writes are in a separate manual region. If one region wrote and read, XLA
        would fuse each write with the next read, and copy all memory slots to keep the
        old values.

        Args:
            slots: The memory slots.
            fed: Values from outside the stages.
            each: A neighbour's values, the index of the memory slot for ``fed``, and
                the index for the neighbour's values.
        """

        # docs/library-notes.md, "Arrays and buffers"
        def write(_: None, each: Any, fed: list) -> tuple[None, list]:
            slots, arrived, feed, receive = each
            return None, write_slot(write_slot(slots, arrived, receive), fed, feed)

        return self.manual(write)(None, (slots, *each), fed)[1]

    def _send(self, tree: Any, direction: int) -> Any:
        """Sends a tree to the neighbour in a direction, and returns the received tree.

        If stages hold several chunks, the last and the first stage are neighbours.
        """
        size = self.table.num_stages
        pairs = [(i, (i + direction) % size) for i in range(size)]
        if self.table.num_chunks == 1:
            pairs = [(a, b) for a, b in pairs if b == a + direction]
        # The transfer is outside the conditions, so every stage sends in every tick,
        # even if it has no result. docs/library-notes.md, "Partly manual regions"
        return jax.lax.ppermute(tree, self.stage.axis, pairs) if pairs else tree

    def forward(
        self, layers: Layers, memory: StageMemory, entering: list, tick: TickSlots
    ) -> tuple[Layers, StageMemory, list]:
        """Runs the forward slots of a tick, and sends activations to the next stage.

        ``entering`` are the activations of the microbatch that enters the stack.
        Returns the layers with their new state, the memory, and the stack's output for
        the microbatch that leaves the stack.
        """
        slots = tick.stages
        arrived = (memory.received, slots.feed_input, slots.receive_input)
        inputs = self._receive(memory.inputs, entering, *arrived)
        each = (replace(memory, inputs=inputs), slots)
        state, (memory, activations) = self.manual(self._forward_slot)(
            layers, each, tick.mesh.any_forward
        )
        # (stages, batch, ...): only the last stage's row is an output of the stack.
        leaving = [x[-1] for x in activations[: self.stage.num_x]]
        return replace(layers, state=state), memory, leaving

    def _forward_slot(
        self, layers: Layers, each: Any, is_any: jax.Array
    ) -> tuple[dict, Any]:
        memory, slots = each
        # (layers of the stage, ...) -> (layers of the chunk, ...)
        chunk = self._chunks.take(layers, slots.forward_chunk)
        activations = read_slot(memory.inputs, slots.forward_input)
        if self.table.is_forward_only:
            activations = run_if(
                is_any,
                lambda: self.stage.run(chunk, activations, slots.forward_layers)[0],
                scope="forward",
            )
            received = self._send(activations, 1)
            memory = replace(memory, received=received)
            return layers.state, (memory, activations)
        activations, state, stash = run_if(
            is_any,
            lambda: self.stage.forward(chunk, activations, slots.forward_layers),
            scope="forward",
        )
        memory = replace(
            memory,
            received=self._send(activations, 1),
            stash=write_slot(memory.stash, stash, slots.forward_saved),
        )
        state = self._chunks.put(layers.state, state, slots.forward_chunk)
        return state, (memory, activations)

    def backward(
        self, layers: Layers, state: TickState, cotangents: list, tick: TickSlots
    ) -> tuple[TickState, list]:
        """Runs the backward slots of a tick, and sends cotangents to previous stages.

        ``cotangents`` belong to the values that have left the stack in this tick.
        Returns the state with new memory and gradients, and the cotangents of the
        values that entered the stack.
        """
        memory, slots, mesh = state.memory, tick.stages, tick.mesh
        # The cotangents come from the next stage, which sent them in the last tick, or
        # from the epilogue in this tick.
        arrived = (memory.returned, slots.feed_cotangent, slots.receive_cotangent)
        waiting = self._receive(memory.cotangents, cotangents, *arrived)
        each = (replace(memory, cotangents=waiting), slots)
        grads = state.layer_grads
        both = (layers, None if self.table.is_split else grads)
        added, (memory, sent) = self.manual(self._backward_slot)(both, each, mesh)
        if self.table.is_split:
            # The weight slots have a separate region, because a tick may write one
            # pending value and read another.
            both, each = (layers, grads), (memory.pending, slots)
            added, _ = self.manual(self._weight_slot)(both, each, mesh)
        # (stages, batch, ...): the first stage's cotangents belong to values that
        # entered the stack.
        state = replace(state, memory=memory, layer_grads=added)
        return state, [x[0] for x in sent]

    def _backward_slot(self, both: Any, each: Any, mesh: MeshSlots) -> tuple[Any, Any]:
        (layers, grads), (memory, slots) = both, each
        chunk = self._chunks.take(layers, slots.backward_input_chunk)
        stash = read_slot(memory.stash, slots.backward_saved)
        cotangents = read_slot(memory.cotangents, slots.backward_cotangent)
        is_split, add = self.table.is_split, None
        if not is_split:
            add = self._chunks.adder(slots.backward_input_chunk)

        def run() -> tuple:
            count = slots.backward_layers
            return self.stage.backward(chunk, stash, cotangents, grads, add, count)

        # If no stage has a slot, the gradients pass through unchanged. Zeros would need
        # a second buffer.
        def skip() -> tuple:
            sent = zeros_like(cotangents)
            pending = zeros_like(jax.eval_shape(run)[2]) if is_split else None
            return grads, sent, pending

        with jax.named_scope("backward_input" if is_split else "backward"):
            grads, sent, pending = jax.lax.cond(mesh.any_backward_input, run, skip)
        if is_split:
            pending = write_slot(memory.pending, pending, slots.backward_pending)
        returned = self._send(sent, -1)
        return grads, (replace(memory, pending=pending, returned=returned), sent)

    def _weight_slot(self, both: Any, each: Any, mesh: MeshSlots) -> tuple[dict, None]:
        (layers, grads), (pending, slots) = both, each
        chunk = slots.backward_weight_chunk
        pending = read_slot(pending, slots.weight_pending)

        def run() -> dict:
            taken, add = self._chunks.take(layers, chunk), self._chunks.adder(chunk)
            return self.stage.backward_weight(taken, pending, grads, add)

        with jax.named_scope("backward_weight"):
            # Gradients pass through unchanged, because zeros would need a second
            # buffer.
            grads = jax.lax.cond(mesh.any_backward_weight, run, lambda: grads)
        return grads, None
