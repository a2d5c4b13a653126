"""The slots of all stages in one tick, in regions that are manual over the pipe axis.

In a tick a stage has at most one forward, one backward input and one backward weight
slot. Each kind runs under a ``jax.lax.cond`` whose predicate is equal on all devices
(some stage has such a slot now); a stage that has none masks its result. A tick costs
what its busiest stage pays anyway, and it is the only safe form: where a predicate
differs by stage, a collective-permute in a branch (the partitioner's own too, from
shifts and convolutions) hangs or gives wrong numbers, in jax 0.10 and 0.12.

A branch has the slot's kind as its named scope, for audits and profiles. Activations go
to the next stage by ``ppermute``, cotangents back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.layers.jaxprs import Layers
from nnx_parallel.pipeline.memory import (
    Chunks,
    LayerPermutation,
    MeshSlots,
    StageMemory,
    StageSlots,
    TickSlots,
    make_slots,
    read_slot,
    run_if,
    write_slot,
    zeros_like,
)
from nnx_parallel.pipeline.stage import Stage
from nnx_parallel.schedules.table import Buffers, Table


class Executor:
    """Runs the slots of a tick on all stages at once.

    Arrays of all stages have a leading ``stages`` dim, split over the pipe axis.

    Args:
        stage: Runs the layers of a stage.
        table: The schedule.
        buffers: Its memory slots.
        mesh: The mesh.
        axis: Its axis of stages.
    """

    def __init__(
        self, stage: Stage, table: Table, buffers: Buffers, mesh: Mesh, axis: str
    ) -> None:
        self.stage = stage
        self.table = table
        self.buffers = buffers
        self._mesh = mesh
        self._axis = axis
        self._chunks = Chunks(table.num_chunks)
        self._permutation = LayerPermutation.plan(table.num_stages, table.num_chunks)

    def manual(self, function: Callable) -> Callable:
        """A function ``(layers, each, shared) -> (layers, each)``, of all stages.

        Arrays in ``layers`` have their ``layers`` dim split over the stages, those in
        ``each`` a leading ``stages`` dim; those in ``shared`` are the same for all.
        """

        def body(layers: Any, each: Any, shared: Any) -> Any:
            each = jax.tree.map(lambda x: x[0], each)  # (1, ...) -> (...)
            layers, out = function(layers, each, shared)
            return layers, jax.tree.map(lambda x: x[None], out)

        over_stages = P(self._axis)
        return jax.shard_map(
            body,
            mesh=self._mesh,
            # (layers, ...), (stages, ...), and arrays without a dim for the stages.
            in_specs=(over_stages, over_stages, P()),
            out_specs=over_stages,
            # Over all other axes the region is partitioned by XLA, as the rest is.
            axis_names={self._axis},
            check_vma=False,
        )

    # Layers

    def to_stages(self, tree: Any) -> Any:
        """Stacked arrays in the layers' natural order, moved to where they run."""
        return self._permute(tree, self._permutation)

    def to_storage(self, tree: Any) -> Any:
        """Undoes `to_stages`."""
        return self._permute(tree, self._permutation.inverse())

    def _permute(self, tree: Any, permutation: LayerPermutation) -> Any:
        # One chunk: the schedule's order is the natural one.
        if len(permutation.receiver) == 1:
            return tree
        move = jax.shard_map(
            partial(jax.tree.map, partial(permutation.move, axis=self._axis)),
            mesh=self._mesh,
            in_specs=P(self._axis),  # (layers, ...)
            out_specs=P(self._axis),
            axis_names={self._axis},
            check_vma=False,
        )
        return move(tree)

    # Memory

    def allocate(self, layers: Layers, activations: list) -> StageMemory:
        """Zeros for all that the stages keep, from shapes of layers and activations."""
        buffers, table = self.buffers, self.table

        def slots(count: int, tree: Any) -> Any:
            # Shapes alone: the zeros are made once, where they are placed.
            return self._of_stages(jax.eval_shape(lambda: make_slots(count, tree)))

        received = self._of_stages(activations)
        inputs = slots(buffers.num_inputs, activations)
        if table.is_forward_only:
            return StageMemory(None, inputs, None, received, None, None)
        cotangents = self.stage.block.with_cotangents(activations)
        stash, pending = self._shapes(layers, activations)
        return StageMemory(
            received=received,
            inputs=inputs,
            stash=slots(buffers.num_saved, stash),
            returned=self._of_stages(cotangents),
            cotangents=slots(buffers.num_cotangents, cotangents),
            pending=slots(buffers.num_pending, pending) if table.is_split else None,
        )

    def _of_stages(self, tree: Any) -> Any:
        """Zeros of some shapes for each stage: (...) becomes (stages, ...)."""

        def place(x: jax.Array) -> jax.Array:
            spec = P(self._axis, *(P.UNCONSTRAINED,) * (x.ndim - 1))
            sharding = NamedSharding(self._mesh, spec)
            return jax.lax.with_sharding_constraint(x, sharding)

        size = self.table.num_stages
        # Unconstrained in all other dims: the partitioner takes what the layers use.
        zeros = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), tree)
        return jax.tree.map(place, zeros)

    def _shapes(self, layers: Layers, activations: list) -> tuple[Any, Any]:
        """Shapes of a microbatch's stash, and of what is pending after its backward."""

        def slots(layers: Layers, _: None, activations: list) -> tuple[None, Any]:
            chunk = self._chunks.take(layers, jnp.int32(0))
            activations, _state, stash = self.stage.forward(chunk, activations)
            if not self.table.is_split:
                return None, (stash, None)
            cotangents = self.stage.block.with_cotangents(activations)
            _sent, pending = self.stage.backward_input(chunk, stash, cotangents)
            return None, (stash, pending)

        shapes = jax.eval_shape(self.manual(slots), layers, None, activations)[1]
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes
        )

    def _receive(
        self,
        memory: StageMemory,
        slots: StageSlots,
        fed: list,
        select: Callable[[StageMemory, StageSlots], tuple],
    ) -> list:
        """A buffer with what a neighbour sent, and with what comes from outside.

        A region of its own: within one XLA makes the write a part of the read that
        follows, and then copies the buffer to keep it as it was.
        """

        # docs/library-notes.md, "Arrays and buffers"
        def write(_: None, each: Any, fed: list) -> tuple[None, list]:
            buffer, arrived, receive, feed = select(*each)
            return None, write_slot(write_slot(buffer, arrived, receive), fed, feed)

        return self.manual(write)(None, (memory, slots), fed)[1]

    def _send(self, tree: Any, direction: int) -> Any:
        """The neighbour's tree; around the ends only if stages hold many chunks."""
        size = self.table.num_stages
        pairs = [(i, (i + direction) % size) for i in range(size)]
        if self.table.num_chunks == 1:
            pairs = [(a, b) for a, b in pairs if b == a + direction]
        # Outside of the conditions: every stage sends in every tick, also nothing.
        # docs/library-notes.md, "Partly manual regions"
        return jax.lax.ppermute(tree, self._axis, pairs) if pairs else tree

    # Slots

    def forward(
        self, layers: Layers, memory: StageMemory, entering: list, tick: TickSlots
    ) -> tuple[Layers, StageMemory, list]:
        """The forward slots of a tick, and the transfer to the next stage.

        Args:
            layers: All layers.
            memory: What the stages keep.
            entering: Activations of a microbatch that enters the stack.
            tick: The tick.

        Returns:
            The layers with their new state, the memory, and the stack's output for the
            microbatch that leaves it.
        """
        inputs = self._receive(
            memory,
            tick.stages,
            entering,
            lambda m, s: (m.inputs, m.received, s.receive_input, s.feed_input),
        )
        each = (replace(memory, inputs=inputs), tick.stages)
        state, (memory, activations) = self.manual(self._forward_slot)(
            layers, each, tick.mesh.any_forward
        )
        # (stages, batch, ...): only the last stage's is an output of the stack.
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
                is_any, lambda: self.stage.run(chunk, activations)[0], scope="forward"
            )
            received = self._send(activations, 1)
            memory = replace(memory, received=received)
            return layers.state, (memory, activations)
        activations, state, stash = run_if(
            is_any, lambda: self.stage.forward(chunk, activations), scope="forward"
        )
        memory = replace(
            memory,
            received=self._send(activations, 1),
            stash=write_slot(memory.stash, stash, slots.forward_saved),
        )
        state = self._chunks.put(layers.state, state, slots.forward_chunk)
        return state, (memory, activations)

    def backward(
        self,
        layers: Layers,
        memory: StageMemory,
        grads: dict,
        cotangents: list,
        tick: TickSlots,
    ) -> tuple[dict, StageMemory, list]:
        """The backward slots of a tick, and the transfer to the stage before.

        Args:
            layers: All layers.
            memory: From `forward`.
            grads: Gradients of the trained parameters so far.
            cotangents: Of what has left the stack in this tick.
            tick: The tick.

        Returns:
            The gradients, the memory, and the cotangents of what entered the stack.
        """
        # Sent by the next stage in the last tick, or made by the epilogue in this one.
        waiting = self._receive(
            memory,
            tick.stages,
            cotangents,
            lambda m, s: (
                m.cotangents,
                m.returned,
                s.receive_cotangent,
                s.feed_cotangent,
            ),
        )
        memory = replace(memory, cotangents=waiting)
        each, mesh = (memory, tick.stages), tick.mesh
        if not self.table.is_split:
            both = (layers, grads)
            grads, (memory, sent) = self.manual(self._joint_slot)(both, each, mesh)
        else:
            # Two regions: a tick may write a pending value and read another.
            _, (memory, sent) = self.manual(self._input_slot)(layers, each, mesh)
            each, both = (memory.pending, tick.stages), (layers, grads)
            grads, _ = self.manual(self._weight_slot)(both, each, mesh)
        # (stages, batch, ...): the first stage's belong to what entered the stack.
        return grads, memory, [x[0] for x in sent]

    def _backward_inputs(
        self, layers: Layers, memory: StageMemory, slots: StageSlots
    ) -> tuple:
        return (
            self._chunks.take(layers, slots.backward_input_chunk),
            read_slot(memory.stash, slots.backward_saved),
            read_slot(memory.cotangents, slots.backward_cotangent),
        )

    def _joint_slot(self, both: Any, each: Any, mesh: MeshSlots) -> tuple[dict, Any]:
        (layers, grads), (memory, slots) = both, each
        chunk, stash, cotangents = self._backward_inputs(layers, memory, slots)
        add = self._chunks.adder(slots.backward_input_chunk)

        with jax.named_scope("backward"):
            # Without a slot the gradients pass through as they are: zeros for them
            # would be a second buffer.
            grads, sent = jax.lax.cond(
                mesh.any_backward_input,
                lambda: self.stage.backward(chunk, stash, cotangents, grads, add),
                lambda: (grads, zeros_like(cotangents)),
            )
        returned = self._send(sent, -1)
        return grads, (replace(memory, returned=returned), sent)

    def _input_slot(
        self, layers: Layers, each: Any, mesh: MeshSlots
    ) -> tuple[None, Any]:
        memory, slots = each
        inputs = self._backward_inputs(layers, memory, slots)
        sent, pending = run_if(
            mesh.any_backward_input,
            lambda: self.stage.backward_input(*inputs),
            scope="backward_input",
        )
        memory = replace(
            memory,
            pending=write_slot(memory.pending, pending, slots.backward_pending),
            returned=self._send(sent, -1),
        )
        return None, (memory, sent)

    def _weight_slot(self, both: Any, each: Any, mesh: MeshSlots) -> tuple[dict, None]:
        (layers, grads), (pending, slots) = both, each
        chunk = slots.backward_weight_chunk
        pending = read_slot(pending, slots.weight_pending)

        def run() -> dict:
            taken, add = self._chunks.take(layers, chunk), self._chunks.adder(chunk)
            return self.stage.backward_weight(taken, pending, grads, add)

        with jax.named_scope("backward_weight"):
            # As in `_joint_slot`: zeros would be a second buffer.
            grads = jax.lax.cond(mesh.any_backward_weight, run, lambda: grads)
        return grads, None
