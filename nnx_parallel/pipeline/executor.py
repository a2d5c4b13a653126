"""One executor for all tables: a scan over ticks.

In a tick every stage holds at most one forward, one backward input and one backward
weight slot. Each kind stands under a ``jax.lax.cond`` whose predicate is the same on
every device (some stage has such a slot now); a stage that has none masks its result.
It has the slot's kind as its named scope, so that an audit or a profile tells them
apart; the parts around the stack are ``before``, ``after`` and ``before_backward``.
A tick costs what its busiest stage pays anyway, and it is the only safe form: under a
predicate that differs by stage, a collective-permute in a branch hangs or gives wrong
numbers. Activations travel to the next stage by ``ppermute``, cotangents back.

The parts before and after the stack run outside the region that is manual over
``pipe``, spread over the whole mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from nnx_parallel.keeping import Layers
from nnx_parallel.pipeline.buffers import Buffers
from nnx_parallel.pipeline.conditional import run_if, zeros_like
from nnx_parallel.pipeline.memory_slots import (
    Chunks,
    make_slots,
    read_slot,
    write_slot,
)
from nnx_parallel.pipeline.rows import Row
from nnx_parallel.pipeline.stage import Stage
from nnx_parallel.pipeline.table import Table


class Executor:
    """The manual region of a tick: what the stages do with the slots that they have.

    Arrays of all stages have a leading ``stages`` dim, split over the pipe axis.

    Args:
        stage: Runs the layers of a stage.
        table: The schedule.
        buffers: Its memory slots.
        mesh: The mesh.
        axis: Its axis of stages.
    """

    def __init__(
        self,
        stage: Stage,
        table: Table,
        buffers: Buffers,
        mesh: jax.sharding.Mesh,
        axis: str,
    ) -> None:
        self.stage = stage
        self.table = table
        self.buffers = buffers
        self._mesh = mesh
        self._axis = axis
        self._chunks = Chunks(table.num_chunks)

    def manual(self, function: Callable) -> Callable:
        """A function of one stage as one of all: ``(per stage, for all) -> per stage``.

        Values per stage lose their leading dim inside; layers keep theirs.
        """

        def body(layers: Any, each: Any, shared: Any) -> Any:
            each = jax.tree.map(lambda x: x[0], each)
            layers, out = function(layers, each, shared)
            return layers, jax.tree.map(lambda x: x[None], out)

        over_stages = P(self._axis)
        return jax.shard_map(
            body,
            mesh=self._mesh,
            in_specs=(over_stages, over_stages, P()),
            out_specs=over_stages,
            axis_names={self._axis},
            check_vma=False,
        )

    # Memory

    def allocate(self, layers: Layers, travel: list) -> dict[str, Any]:
        """Zeros for everything that the stages keep.

        Args:
            layers: Shapes of all layers.
            travel: Shapes of what enters the stack, for one microbatch.
        """
        num_stages, buffers = self.table.num_stages, self.buffers
        active = self.stage.with_gradients(travel)

        def of_stages(tree: Any) -> Any:
            return self._over_stages(
                jax.tree.map(lambda x: jnp.zeros((num_stages, *x.shape), x.dtype), tree)
            )

        def slots(count: int, tree: Any) -> Any:
            return of_stages(jax.eval_shape(lambda: make_slots(count, tree)))

        memory = {
            "received": of_stages(travel),
            "inputs": slots(buffers.num_inputs, travel),
        }
        if self.table.is_forward_only:
            return memory
        kept, pending = self._shapes(layers, travel)
        memory |= {
            "saved": slots(buffers.num_saved, kept),
            "returned": of_stages(active),
            "cotangents": slots(buffers.num_cotangents, active),
        }
        if self.table.is_split:
            memory["pending"] = slots(buffers.num_pending, pending)
        return memory

    def _over_stages(self, tree: Any) -> Any:
        free = P.UNCONSTRAINED

        def constrain(x: jax.Array) -> jax.Array:
            spec = P(self._axis, *(free,) * (x.ndim - 1))
            sharding = jax.sharding.NamedSharding(self._mesh, spec)
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(constrain, tree)

    def _shapes(self, layers: Layers, travel: list) -> tuple[Any, Any]:
        """Shapes of what a stage keeps between its slots, for one microbatch."""

        def slots(layers: Layers, each: None, travel: list) -> tuple[None, Any]:
            chunk = self._chunks.take(layers, jnp.int32(0))
            travel, _, kept = self.stage.forward(chunk, travel)
            pending = None
            if self.table.is_split:
                grads = self.stage.with_gradients(travel)
                _, pending = self.stage.backward_input(chunk, kept, grads)
            return None, (kept, pending)

        shapes = jax.eval_shape(self.manual(slots), layers, None, travel)[1]
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes
        )

    # Slots

    def forward(
        self, layers: Layers, memory: dict, fed: list, row: Row
    ) -> tuple[Layers, dict, list]:
        """The forward slots of a tick, and the transfer to the next stage.

        Args:
            layers: All layers.
            memory: From `allocate`.
            fed: What enters the stack for a new microbatch.
            row: The tick.

        Returns:
            The layers with their state after it, the memory, and what leaves the last
            stage.
        """
        keeps = not self.table.is_forward_only

        def write(_: None, each: Any, fed: list) -> tuple[None, Any]:
            memory, slot = each
            inputs = write_slot(
                memory["inputs"], memory["received"], slot["receive_input"]
            )
            return None, write_slot(inputs, fed, slot["feed_input"])

        def slots(layers: Layers, each: Any, is_any: jax.Array) -> tuple[dict, Any]:
            memory, slot = each
            chunk = self._chunks.take(layers, slot["forward_chunk"])
            travel = read_slot(memory["inputs"], slot["forward_input"])

            def run() -> Any:
                if not keeps:
                    return self.stage.run(chunk, travel), chunk.state, None
                return self.stage.forward(chunk, travel)

            travel, state, kept = run_if(is_any, run, scope="forward")
            memory = memory | {"received": self._send(travel, 1)}
            if keeps:
                saved = write_slot(memory["saved"], kept, slot["forward_saved"])
                memory["saved"] = saved
                state = self._chunks.put(layers.state, state, slot["forward_chunk"])
                return state, (memory, travel)
            return layers.state, (memory, travel)

        # Buffers are written in one region and read in the next: within one, XLA makes
        # the write a part of the read, and then copies the buffer to keep it as it was.
        _, inputs = self.manual(write)(None, (memory, row["stages"]), fed)
        each = (memory | {"inputs": inputs}, row["stages"])
        is_any = row["whole"]["any_forward"]
        state, (memory, travel) = self.manual(slots)(layers, each, is_any)
        leaving = [x[-1] for x in travel[: self.stage.recorded.num_x]]
        return Layers(layers.trained, layers.fixed, state), memory, leaving

    def backward(
        self, layers: Layers, memory: dict, grads: dict, fed: list, row: Row
    ) -> tuple[dict, dict, list]:
        """The backward slots of a tick, and the transfer to the stage before.

        Args:
            layers: All layers.
            memory: From `forward`.
            grads: Gradients of the trained parameters so far.
            fed: Gradients of what has left the last stage in this tick.
            row: The tick.

        Returns:
            The gradients, the memory, and the gradients of what entered the stack.
        """

        def write(_: None, each: Any, fed: list) -> tuple[None, Any]:
            memory, slot = each
            cotangents = write_slot(
                memory["cotangents"], memory["returned"], slot["receive_cotangent"]
            )
            return None, write_slot(cotangents, fed, slot["feed_cotangent"])

        # In a region of its own, as in `forward`.
        _, cotangents = self.manual(write)(None, (memory, row["stages"]), fed)
        memory = memory | {"cotangents": cotangents}
        each, whole = (memory, row["stages"]), row["whole"]
        if not self.table.is_split:
            both = (layers, grads)
            grads, (memory, returned) = self.manual(self._joint_slot)(both, each, whole)
        else:
            _, (memory, returned) = self.manual(self._input_slot)(layers, each, whole)
            each, both = (memory["pending"], row["stages"]), (layers, grads)
            grads, _ = self.manual(self._weight_slot)(both, each, whole)
        return grads, memory, [x[0] for x in returned]

    def _given(self, layers: Layers, memory: dict, slot: Row) -> tuple:
        """What a backward pass starts from."""
        return (
            self._chunks.take(layers, slot["backward_input_chunk"]),
            read_slot(memory["saved"], slot["backward_saved"]),
            read_slot(memory["cotangents"], slot["backward_cotangent"]),
        )

    def _joint_slot(self, both: Any, each: Any, whole: Row) -> tuple[dict, Any]:
        layers, grads = both
        memory, slot = each
        taken, kept, cotangents = self._given(layers, memory, slot)
        add = self._chunks.adder(slot["backward_input_chunk"])

        def run() -> tuple[dict, list]:
            return self.stage.backward(taken, kept, cotangents, grads, add)

        def skip() -> tuple[dict, list]:
            return grads, zeros_like(cotangents)

        with jax.named_scope("backward"):
            grads, returned = jax.lax.cond(whole["any_backward_input"], run, skip)
        memory = memory | {"returned": self._send(returned, -1)}
        return grads, (memory, returned)

    def _input_slot(self, layers: Layers, each: Any, whole: Row) -> tuple[None, Any]:
        memory, slot = each
        given = self._given(layers, memory, slot)
        returned, pending = run_if(
            whole["any_backward_input"],
            lambda: self.stage.backward_input(*given),
            scope="backward_input",
        )
        pending = write_slot(memory["pending"], pending, slot["backward_pending"])
        memory = memory | {"pending": pending, "returned": self._send(returned, -1)}
        return None, (memory, returned)

    def _weight_slot(self, both: Any, each: Any, whole: Row) -> tuple[dict, None]:
        layers, grads = both
        pending, slot = each
        chunk = slot["backward_weight_chunk"]
        held = read_slot(pending, slot["weight_pending"])

        def run() -> dict:
            taken, add = self._chunks.take(layers, chunk), self._chunks.adder(chunk)
            return self.stage.backward_weight(taken, held, grads, add)

        with jax.named_scope("backward_weight"):
            grads = jax.lax.cond(whole["any_backward_weight"], run, lambda: grads)
        return grads, None

    def _send(self, tree: Any, direction: int) -> Any:
        """What the neighbour sent; around the ends only if stages hold many chunks."""
        size = self.table.num_stages
        pairs = [(i, (i + direction) % size) for i in range(size)]
        if self.table.num_chunks == 1:
            pairs = [(a, b) for a, b in pairs if b == a + direction]
        if not pairs:
            return tree
        return jax.lax.ppermute(tree, self._axis, pairs)
