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

A table and its buffers as what a scan over ticks is fed.

One tick of training: forward, the part after the stack, backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from nnx_parallel.layers.residuals import Layers
from nnx_parallel.pipeline.cut import Arrays
from nnx_parallel.pipeline.edges import (
    Chunks,
    Edges,
    Flight,
    make_slots,
    read_slot,
    run_if,
    write_slot,
    zeros_like,
    zeros_of,
)
from nnx_parallel.pipeline.stage import Stage
from nnx_parallel.schedules.buffers import Buffers
from nnx_parallel.schedules.table import Table
from nnx_parallel.sharding.names import is_inexact

Row = dict[str, Any]
"""The slots of one tick: scalars for the mesh, and one entry for each stage."""


def make_rows(table: Table, buffers: Buffers) -> Row:
    """The table and its buffers as arrays with a leading ``ticks`` dim."""
    kinds = ("forward", "backward_input", "backward_weight")
    slots = {kind: getattr(table, kind) for kind in kinds}
    stages = {f"{kind}_chunk": slot.chunk for kind, slot in slots.items()}
    stages |= {
        name: getattr(buffers, name)
        for name in (
            "receive_input",
            "feed_input",
            "forward_input",
            "forward_saved",
            "backward_saved",
            "receive_cotangent",
            "feed_cotangent",
            "backward_cotangent",
            "backward_pending",
            "weight_pending",
        )
    }
    last = table.num_chunks - 1

    def moments(kind: str, stage: int, chunk: int) -> np.ndarray:
        """The microbatch of one chunk of a stage in each tick, or -1."""
        column = slots[kind].microbatch[:, stage]
        return np.where(slots[kind].chunk[:, stage] == chunk, column, -1)

    whole = {f"any_{kind}": slot.any for kind, slot in slots.items()}
    whole |= {
        "enters": moments("forward", 0, 0),
        "leaves": moments("forward", -1, last),
        "returns": moments("backward_input", 0, 0),
    }
    arrays = {"whole": whole, "stages": stages}
    return jax.tree.map(np.asarray, arrays)


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


Carry = dict[str, Any]


class TrainingTick:
    """The body of a scan over ticks.

    Args:
        edges: The parts around the stack.
        executor: Runs the stages.
        layers: The layers, as they are before the step.
        objective: The scalar of one microbatch whose gradient is summed.
    """

    def __init__(
        self,
        edges: Edges,
        executor: Executor,
        layers: Layers,
        objective: Callable[[Any], jax.Array],
    ) -> None:
        self._edges = edges
        self._executor = executor
        self._layers = layers
        self._objective = objective

    def start(
        self, memory: dict, outputs: Any, grads: Arrays, layer_grads: dict
    ) -> Carry:
        """The carry before the first tick.

        Args:
            memory: Of the stages.
            outputs: Memory for the function's outputs.
            grads: Zeros for the gradients of parameters outside the stack.
            layer_grads: The same of its layers.
        """
        edges = self._edges
        flights = edges.make_flights()
        floats = [x[0] for x in flights.skips if is_inexact(x)]
        num_slots = self._executor.buffers.num_flights
        return {
            "state": self._layers.state,
            "memory": memory,
            "outputs": outputs,
            "flights": flights,
            "skip_grads": make_slots(num_slots, floats),
            "early": edges.pick(edges.cut.early),
            "late": edges.pick(edges.cut.late),
            "layer_grads": layer_grads,
            "grads": grads,
        }

    def __call__(self, carry: Carry, row: Row) -> tuple[Carry, None]:
        """All slots of a tick, in their order."""
        edges, whole = self._edges, row["whole"]
        variables = edges.variables | carry["early"]
        fed, flight, early = edges.enter(whole["enters"], variables)
        flights = edges.keep(carry["flights"], whole["enters"], flight)
        layers = dataclasses.replace(self._layers, state=carry["state"])
        layers, memory, leaving = self._executor.forward(
            layers, carry["memory"], fed, row
        )
        carry = carry | {"flights": flights, "early": early, "state": layers.state}
        carry, fed = self._turn(carry, whole["leaves"], leaving)
        layer_grads, memory, returned = self._executor.backward(
            layers, memory, carry["layer_grads"], fed, row
        )
        grads = self._leave(carry, whole["returns"], returned)
        carry |= {"memory": memory, "layer_grads": layer_grads, "grads": grads}
        return carry, None

    def _turn(
        self, carry: Carry, microbatch: jax.Array, leaving: list
    ) -> tuple[Carry, list]:
        """The part after the stack and its gradients, for who leaves the stack now.

        Returns:
            The carry, and the gradients of what has left the stack.
        """
        edges = self._edges
        flight = edges.recall(carry["flights"], microbatch)

        def objective(params: Arrays, skips: list, leaving: list) -> Any:
            rest = iter(skips)
            skips = [next(rest) if is_inexact(x) else x for x in flight.skips]
            outputs, late = edges.after(
                microbatch, params, carry["late"], Flight(skips, flight.early), leaving
            )
            return self._objective(outputs), (outputs, late)

        def run() -> Any:
            skips = [x for x in flight.skips if is_inexact(x)]
            value, vjp, (outputs, late) = jax.vjp(
                objective, edges.params, skips, leaving, has_aux=True
            )
            new, *grads = vjp(jnp.ones_like(value))
            return add(carry["grads"], new), late, *grads, outputs

        def skip() -> Any:
            _, _, *rest = zeros_of(run)
            return carry["grads"], carry["late"], *rest

        with jax.named_scope("after"):
            grads, late, skip_grads, cotangents, outputs = jax.lax.cond(
                microbatch >= 0, run, skip
            )
        kept = write_slot(carry["skip_grads"], skip_grads, edges.slot(microbatch))
        # The arguments of the blocks end with the last one: no gradient comes back.
        active = edges.with_gradients(edges.entering)
        ended = zeros_like(active[len(cotangents) :])
        outputs = write_slot(carry["outputs"], outputs, microbatch)
        carry = carry | {"grads": grads, "skip_grads": kept, "late": late}
        return carry | {"outputs": outputs}, [*cotangents, *ended]

    def _leave(self, carry: Carry, microbatch: jax.Array, returned: list) -> Arrays:
        """Gradients with those of the part before, whose backward pass runs now."""
        edges = self._edges
        flight = edges.recall(carry["flights"], microbatch)
        skip_grads = read_slot(carry["skip_grads"], edges.slot(microbatch))

        def before(params: Arrays) -> list:
            entering, skips = edges.before(microbatch, params, flight)
            skips = [x for x in skips if is_inexact(x)]
            return [*edges.with_gradients(entering), *skips]

        def run() -> Arrays:
            _, vjp = jax.vjp(before, edges.params)
            (new,) = vjp([*edges.spread(returned), *skip_grads])
            return add(carry["grads"], new)

        with jax.named_scope("before_backward"):
            return jax.lax.cond(microbatch >= 0, run, lambda: carry["grads"])


def add(grads: Arrays, new: Arrays) -> Arrays:
    """Sums in the dtype of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, new)
