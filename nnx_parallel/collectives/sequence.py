"""Sequences split over a mesh axis: in which order, and how they are exchanged.

Used inside a region that is manual over the axis, on ``(batch, seq_shard, ...)``.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class SequenceOrder:
    """The tokens that each of n devices along a manual axis computes with.

    In turn, each has a run of neighbours. Causal attention gives the last device
    2 n - 1 times the work of the first. Balanced, the sequence is cut into 2 n chunks
    and device i has chunks i and 2 n - 1 - i: all have the same work [1].

    References:
        [1] Brandon et al., "Striped Attention", 2023, section 3,
        https://arxiv.org/abs/2311.09431; Llama Team, "The Llama 3 Herd of Models",
        2024, section 3.3.2, https://arxiv.org/abs/2407.21783
    """

    axis: str
    is_balanced: bool

    @property
    def size(self) -> int:
        """Number of devices."""
        return jax.lax.axis_size(self.axis)

    def positions(self, device: int | jax.Array, length: int) -> jax.Array:
        """Positions ``(1, length)`` in the row of the tokens that a device has."""
        if not self.is_balanced:
            return (device * length + jnp.arange(length))[None]
        # The even chunk comes first: so no half needs to know where it goes.
        last, half = 2 * self.size - 1, jnp.arange(length // 2)
        even = jnp.where(device % 2 == 0, device, last - device)
        chunks = (even, last - even)
        return jnp.concatenate([c * (length // 2) + half for c in chunks])[None]

    def enter(self, x: jax.Array) -> jax.Array:
        """A device's neighbours, exchanged for the tokens that it computes with."""
        return self._exchange(x, is_back=False)

    def leave(self, x: jax.Array) -> jax.Array:
        """The inverse of `enter`."""
        return self._exchange(x, is_back=True)

    def _exchange(self, x: jax.Array, *, is_back: bool) -> jax.Array:
        if not self.is_balanced or self.size == 1:
            return x
        halves = zip(jnp.split(x, 2, axis=1), balanced_moves(self.size), strict=True)
        exchanged = []
        with jax.named_scope("reorder"):  # a name in profiles and programs
            for half, moves in halves:
                pairs = [(b, a) if is_back else (a, b) for a, b in moves]
                exchanged.append(jax.lax.ppermute(half, self.axis, pairs))
            return jnp.concatenate(exchanged, axis=1)


def balanced_moves(size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """From and to which device the first and the second half of each shard go.

    Device d has the chunks 2 d and 2 d + 1 of 2 n; chunk c belongs to device c, or to
    2 n - 1 - c. Each device gets one even chunk and one odd one.

    Example:
        >>> balanced_moves(2)
        ([(0, 0), (1, 1)], [(0, 1), (1, 0)])
    """

    def owner(chunk: int) -> int:
        return min(chunk, 2 * size - 1 - chunk)

    first, second = ([(d, owner(2 * d + i)) for d in range(size)] for i in range(2))
    return first, second


def send_on(tree: Any, axis: str) -> Any:
    """Arrays of the device before along a ring."""
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(tree, axis, [(i, (i + 1) % size) for i in range(size)])


def heads_for_sequence(x: jax.Array, axis: str) -> jax.Array:
    """``(batch, seq_shard, heads, ...)`` to ``(batch, seq, heads_shard, ...)``."""
    return jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)


def sequence_for_heads(x: jax.Array, axis: str) -> jax.Array:
    """``(batch, seq, heads_shard, ...)`` to ``(batch, seq_shard, heads, ...)``."""
    return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)
