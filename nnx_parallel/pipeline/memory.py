"""Memory slots, the slots of a tick, and the transfer of layers to their stages.

A buffer has memory slots for values of one shape. They are written and read by index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.pipeline.division import Division
from nnx_parallel.schedules.slots import KINDS, Slots
from nnx_parallel.schedules.table import Buffers, Table


def zeros_like(tree: Any) -> Any:
    """Returns zeros with the shapes of a tree."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def zeros_of(run: Callable[[], Any]) -> Any:
    """Returns zeros with the shapes of a function's result, without running it."""
    return zeros_like(jax.eval_shape(run))


def run_if(predicate: jax.Array, run: Callable[[], Any], *, scope: str) -> Any:
    """Returns a function's result, or zeros with its shapes, under a named scope."""
    with jax.named_scope(scope):
        return jax.lax.cond(predicate, run, lambda: zeros_of(run))


def make_slots(count: int, tree: Any) -> Any:
    """Makes memory slots: zeros for ``count`` copies of a tree, and a spare slot.

    A stage that has no work in a tick writes its result to the spare memory slot. It
    does not write an old value back, because it would have to read that value first,
    and XLA copies a whole buffer if one fusion reads and writes it (measured on a v5p:
    0.4 of 3.7 GiB, and two copies of the stash in each tick).
    """
    # (count + 1, ...); docs/library-notes.md, "Arrays and buffers"
    return jax.tree.map(lambda x: jnp.zeros((count + 1, *x.shape), x.dtype), tree)


def read_slot(slots: Any, slot: jax.Array) -> Any:
    """Returns the value in a memory slot, or an arbitrary value if the slot is -1."""
    # If the slot is -1, any value will do. The result that depends on it goes to the
    # spare memory slot or is masked.
    index = jnp.maximum(slot, 0)
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), slots
    )


def write_slot(slots: Any, value: Any, slot: jax.Array) -> Any:
    """Writes a value to a memory slot, unless ``slot`` is -1."""

    def write(x: jax.Array, new: jax.Array) -> jax.Array:
        index = jnp.where(slot >= 0, slot, x.shape[0] - 1)  # the spare slot is last
        return jax.lax.dynamic_update_index_in_dim(x, new, index, axis=0)

    return jax.tree.map(write, slots, value)


@dataclass(frozen=True)
class Chunks:
    """The chunks of layers that a stage holds, one after the other."""

    count: int

    def take(self, layers: Any, chunk: jax.Array) -> Any:
        """Returns the layers of a chunk, or of an arbitrary chunk for -1."""
        if self.count == 1:
            return layers  # a slice of all layers would be a copy

        def take(x: jax.Array) -> jax.Array:
            # (layers, ...) -> (layers / chunks, ...)
            size = x.shape[0] // self.count
            return jax.lax.dynamic_slice_in_dim(x, jnp.maximum(chunk, 0) * size, size)

        return jax.tree.map(take, layers)

    def put(self, layers: Any, new: Any, chunk: jax.Array) -> Any:
        """Replaces the layers of one chunk, unless the chunk is -1."""

        def put(x: jax.Array, part: jax.Array, old: jax.Array) -> jax.Array:
            # A masked update copies the state, but the state is small. So no spare
            # chunk is needed.
            part = jnp.where(chunk >= 0, part, old)
            start = jnp.maximum(chunk, 0) * part.shape[0]
            return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=0)

        return jax.tree.map(put, layers, new, self.take(layers, chunk))

    def adder(self, chunk: jax.Array) -> Callable[[Any, Any, jax.Array], Any]:
        """Makes a function that adds the values of one layer to totals of all layers.

        The function is ``(totals, values, index) -> totals``, where the index counts
        the layers of the chunk. It adds in the totals' dtype, in place, and adds
        nothing if the chunk is -1.
        """

        def add(layer: jax.Array, x: jax.Array, new: jax.Array) -> jax.Array:
            size = x.shape[0] // self.count
            index = jnp.maximum(chunk, 0) * size + layer
            old = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
            # If the stage has no slot, the mask adds zeros. A branch is not allowed
            # here, because its predicate would differ between stages, as the chunks do.
            new = jnp.where(chunk >= 0, new.astype(x.dtype), 0)
            return jax.lax.dynamic_update_index_in_dim(x, old + new, index, axis=0)

        return lambda totals, new, layer: jax.tree.map(partial(add, layer), totals, new)


class LayerPermutation(NamedTuple):
    """A list of transfers. In each, every stage sends and receives one block of layers.

    With every schedule, layers are stored in their natural order, and each stage stores
    consecutive layers. With several chunks a stage runs layers from different parts of
    the stack. Then every step sends these layers to the stage, and their gradients
    back.

    Attributes:
        receiver: Stage to which each stage sends, of shape (chunks, stages).
        taken: Position of the block that each stage sends.
        put: Position at which each stage puts the block that it receives.
    """

    receiver: np.ndarray
    taken: np.ndarray
    put: np.ndarray

    @classmethod
    def plan(cls, num_stages: int, num_chunks: int) -> LayerPermutation:
        """Plans the transfers from the natural order to the schedule's order.

        Block b of the stack is stored on stage ``b // chunks`` and run on stage ``b %
        stages``. The transfers are a regular bipartite graph, which is a union of
        perfect matchings (König's theorem), one for each chunk.
        """
        receiver, taken, put = np.zeros((3, num_chunks, num_stages), np.int32)
        # The import is slow, and schedules with one chunk do not need it.
        from scipy.optimize import linear_sum_assignment

        waiting = defaultdict(list)
        for block in range(num_stages * num_chunks):
            waiting[block // num_chunks, block % num_stages].append(block)
        stages = range(num_stages)
        for chunk in range(num_chunks):
            counts = [[len(waiting[a, b]) for b in stages] for a in stages]
            # A regular graph minus a perfect matching is regular, so the next matching
            # exists.
            pairs = linear_sum_assignment(np.array(counts) > 0, maximize=True)
            for source, target in zip(*pairs, strict=True):
                block = waiting[source, target].pop()
                receiver[chunk, source] = target
                taken[chunk, source] = block % num_chunks
                put[chunk, target] = block // num_stages
        return cls(receiver, taken, put)

    def inverse(self) -> LayerPermutation:
        """Returns the transfers that undo these transfers."""
        # Each row is a permutation of the stages, and argsort inverts it.
        sender = np.argsort(self.receiver, axis=1)
        return LayerPermutation(sender, self.put, self.taken)

    def move(self, x: jax.Array, axis: str) -> jax.Array:
        """Moves a stage's layers by the transfers, inside a manual region."""
        stage = jax.lax.axis_index(axis)
        size = x.shape[0] // len(self.receiver)
        moved = x  # (layers, ...) of this stage
        for receiver, taken, put in zip(*self, strict=True):
            start = jnp.asarray(taken)[stage] * size
            block = jax.lax.dynamic_slice_in_dim(x, start, size)
            block = jax.lax.ppermute(block, axis, [*enumerate(receiver.tolist())])
            start = jnp.asarray(put)[stage] * size
            moved = jax.lax.dynamic_update_slice_in_dim(moved, block, start, axis=0)
        return moved


# A scan carries the leaves of these classes in the order of their fields. The program,
# and so the key of the compilation cache, depends on that order.


class StageSlots(NamedTuple):
    """The chunks of layers and the memory slots that each stage uses in a tick, or -1.

    Arrays have shape (ticks, stages) for all ticks, (stages,) in a tick, and () inside
    a stage. `Buffers` explains the memory slots. The last two fields are the number of
    layers in the slot's chunk. They are ``None`` if all chunks have the same number.
    """

    backward_cotangent: Any
    backward_input_chunk: Any
    backward_pending: Any
    backward_saved: Any
    backward_weight_chunk: Any
    feed_cotangent: Any
    feed_input: Any
    forward_chunk: Any
    forward_input: Any
    forward_saved: Any
    receive_cotangent: Any
    receive_input: Any
    weight_pending: Any
    forward_layers: Any = None
    backward_layers: Any = None


class MeshSlots(NamedTuple):
    """Values of a tick that are equal on the whole mesh.

    Arrays have shape (ticks,) for all ticks.

    Attributes:
        any_backward_input: True if some stage has a slot of the kind
            ``backward_input``.
        any_backward_weight: True if some stage has a ``backward_weight`` slot.
        any_forward: True if some stage has a ``forward`` slot.
        enters: The microbatch that enters the stack, or -1.
        leaves: The microbatch that leaves the stack, or -1.
        returns: The microbatch whose cotangents come back to the stack's input, or -1.
    """

    any_backward_input: Any
    any_backward_weight: Any
    any_forward: Any
    enters: Any
    leaves: Any
    returns: Any


class TickSlots(NamedTuple):
    """The slots of one tick, or of all ticks along a leading ``ticks`` dim."""

    stages: StageSlots
    mesh: MeshSlots

    @classmethod
    def of(cls, table: Table, buffers: Buffers, division: Division) -> TickSlots:
        """Returns the slots of all ticks of a table."""
        arrays = vars(buffers) | {f"{k}_chunk": getattr(table, k).chunk for k in KINDS}
        arrays["forward_layers"] = arrays["backward_layers"] = None
        if not division.is_even:
            arrays["forward_layers"] = _layers(table.forward, division)
            arrays["backward_layers"] = _layers(table.backward_input, division)

        def at(slots: Slots, stage: int, chunk: int) -> np.ndarray:
            """Returns the microbatch that a stage's chunk runs in each tick, or -1."""
            is_chunk = slots.chunk[:, stage] == chunk
            return np.where(is_chunk, slots.microbatch[:, stage], -1)

        mesh = MeshSlots(
            # The predicates of conditions are values of the whole mesh, so that they
            # are equal on all devices (docs/library-notes.md, "Partly manual regions").
            **{f"any_{kind}": getattr(table, kind).any for kind in KINDS},
            enters=at(table.forward, 0, 0),
            leaves=at(table.forward, -1, table.num_chunks - 1),
            returns=at(table.backward_input, 0, 0),
        )
        stages = StageSlots(**{name: arrays[name] for name in StageSlots._fields})
        return cls(stages, mesh)


def _layers(slots: Slots, division: Division) -> np.ndarray:
    """Returns the number of layers of each slot's chunk, of shape (ticks, stages)."""
    stage = np.arange(division.num_stages)
    # If a stage has no slot, any number will do, because the results are discarded.
    return division.counts[np.maximum(slots.chunk, 0) * division.num_stages + stage]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageMemory:
    """All values that the stages keep from slot to slot.

    Arrays have a leading ``stages`` dim, which the pipe axis splits and which is
    dropped inside a stage. In arrays with memory slots, the next dim is ``slots``.
    Every field is a tree of arrays, or ``None`` if the table does not need it.

    Attributes:
        cotangents: Memory slots for cotangents that wait for their backward slot.
        inputs: Memory slots for activations that wait for their forward slot.
        pending: Memory slots for values that wait for a weight slot.
        received: Activations that the previous stage sent in the last tick.
        returned: Cotangents that the next stage sent in the last tick.
        stash: Memory slots for values that wait for a backward slot.
    """

    cotangents: Any
    inputs: Any
    pending: Any
    received: Any
    returned: Any
    stash: Any


class InFlight(NamedTuple):
    """Values that are kept for a microbatch while it is in the pipeline.

    Attributes:
        skips: Values of the prologue that the epilogue needs.
        variables: Values before the prologue, of variables that the prologue changes.
    """

    skips: list
    variables: dict


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TickState:
    """The state that training passes from tick to tick.

    Attributes:
        prologue_variables: Variables that the prologue changes, by path.
        in_flight: Memory slots for the microbatches in the pipeline.
        grads: Gradients of the parameters outside the stack, by path.
        epilogue_variables: Variables that the epilogue changes, by path.
        layer_grads: Gradients of the layers' parameters, by key.
        memory: The memory of the stages.
        outputs: Memory slots for the function's outputs, one for each microbatch.
        skip_grads: Memory slots for gradients of skips, as many as for the skips.
        layer_state: Variables that the layers change, by key.
    """

    prologue_variables: dict
    in_flight: InFlight
    grads: dict
    epilogue_variables: dict
    layer_grads: dict
    memory: StageMemory
    outputs: Any
    skip_grads: list
    layer_state: dict
