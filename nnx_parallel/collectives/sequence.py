"""Orders and exchanges the tokens of sequences that a mesh axis splits.

Call these functions inside a region that is manual over the axis. Arrays are
``(batch, seq_shard, ...)``.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class SequenceOrder:
    """The division of a sequence's tokens among n devices along a manual axis.

    In the plain order, each device has a run of neighbouring tokens. With causal
    attention, the last device then has 2 n - 1 times the work of the first device. In
    the balanced order, the sequence is cut into 2 n chunks, and device i has the chunks
    i and 2 n - 1 - i. Then all devices have the same work [1].

    Attributes:
        axis: The manual mesh axis.
        is_balanced: True for the balanced order.

    References:
        [1] Brandon et al., "Striped Attention", 2023, section 3,
        https://arxiv.org/abs/2311.09431; Llama Team, "The Llama 3 Herd of Models",
        2024, section 3.3.2, https://arxiv.org/abs/2407.21783
    """

    axis: str
    is_balanced: bool

    @property
    def size(self) -> int:
        """Returns the number of devices."""
        return jax.lax.axis_size(self.axis)

    def positions(self, device: int | jax.Array, length: int) -> jax.Array:
        """Returns the positions of a device's tokens in the sequence.

        The shape is ``(1, length)``.
        """
        if not self.is_balanced:
            return (device * length + jnp.arange(length))[None]
        # The even chunk always comes first, as in `balanced_moves`.
        last, half = 2 * self.size - 1, jnp.arange(length // 2)
        even = jnp.where(device % 2 == 0, device, last - device)
        chunks = (even, last - even)
        return jnp.concatenate([c * (length // 2) + half for c in chunks])[None]

    def enter(self, x: jax.Array) -> jax.Array:
        """Moves tokens among devices from the plain order to this order."""
        return self._exchange(x, is_back=False)

    def leave(self, x: jax.Array) -> jax.Array:
        """Moves tokens back to the plain order, which undoes `enter`."""
        return self._exchange(x, is_back=True)

    def _exchange(self, x: jax.Array, *, is_back: bool) -> jax.Array:
        if not self.is_balanced or self.size == 1:
            return x
        halves = zip(jnp.split(x, 2, axis=1), balanced_moves(self.size), strict=True)
        exchanged = []
        with jax.named_scope("reorder"):  # the name in profiles and HLO
            for half, moves in halves:
                pairs = [(b, a) if is_back else (a, b) for a, b in moves]
                exchanged.append(jax.lax.ppermute(half, self.axis, pairs))
            return jnp.concatenate(exchanged, axis=1)


def balanced_moves(size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns pairs of devices; the first of a pair sends half a shard to the second.

    The first list moves the first halves of the shards; the second list moves the
    second halves.

    A sequence has 2 n chunks. In the plain order, device d has the chunks 2 d and
    2 d + 1. In the balanced order, chunk c belongs to device c if c < n, and to device
    2 n - 1 - c otherwise. So each device gets one even chunk and one odd chunk.

    Example:
        >>> balanced_moves(2)
        ([(0, 0), (1, 1)], [(0, 1), (1, 0)])
    """

    def owner(chunk: int) -> int:
        return min(chunk, 2 * size - 1 - chunk)

    first, second = ([(d, owner(2 * d + i)) for d in range(size)] for i in range(2))
    return first, second


def send_on(tree: Any, axis: str) -> Any:
    """Sends arrays to the next device; returns the arrays of the previous device."""
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(tree, axis, [(i, (i + 1) % size) for i in range(size)])


def heads_for_sequence(x: jax.Array, axis: str) -> jax.Array:
    """Splits the heads instead of the sequence, by an all-to-all.

    ``(batch, seq_shard, heads, ...)`` becomes ``(batch, seq, heads_shard, ...)``.
    """
    return jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)


def sequence_for_heads(x: jax.Array, axis: str) -> jax.Array:
    """Splits the sequence instead of the heads, by an all-to-all.

    ``(batch, seq, heads_shard, ...)`` becomes ``(batch, seq_shard, heads, ...)``.
    """
    return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)
