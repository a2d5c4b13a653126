"""Layers moved to the stages that run them, and back.

Layers are stored in their natural order, a block of neighbours on each stage, whatever
the schedule. With several chunks a stage runs layers from all over the stack: then
every step sends them there, and their gradients back, a stage's worth of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


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
