"""The rules by which queries see keys, and the blocks of scores in which they meet.

Masks are computed within a block from the positions and documents of its tokens, never
for all queries and keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from nnx_parallel.precision import sum_dtype

BLOCK = 512
"""Most queries, and most keys, of a block."""


class Tokens(NamedTuple):
    """Positions and documents of one side's tokens; masks are computed from them.

    Attributes:
        positions: int ``(batch or 1, seq)``, positions in the row, which causality and
            windows compare. They may come in any order; blocks can be skipped if
            neighbours have near positions.
        segments: int ``(batch or 1, seq)``, the document of each token; 0 is padding,
            which sees nothing and is seen by nothing. ``None``: one document.
    """

    positions: Array
    segments: Array | None = None

    @classmethod
    def in_order(cls, length: int, segments: Array | None = None) -> Self:
        """The tokens of rows, in order from position 0."""
        return cls(jnp.arange(length)[None], segments)


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The distances at which a query sees keys, and the computation of scores.

    Attributes:
        scale: Factor of the products of queries and keys.
        causal: True if a query sees only keys up to its position.
        window: Number of keys seen to the left and to the right of a query's position;
            ``None``: all of them.
        softcap: Bound of the scores: ``softcap * tanh(scores / softcap)``.
        block: Most queries and most keys of a block.
    """

    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    block: tuple[int, int] = (BLOCK, BLOCK)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Least and greatest distance from a key to a query that sees it."""
        left, right = self.window
        return (0 if self.causal else None if right is None else -right), left

    def sees(self, queries: Tokens, keys: Tokens) -> Array | None:
        """True where a query sees a key: ``(batch or 1, queries, keys)``.

        ``None`` if all queries see all keys.
        """
        distance = queries.positions[:, :, None] - keys.positions[:, None, :]
        least, greatest = self.reach
        seen = [] if least is None else [distance >= least]
        seen += [] if greatest is None else [distance <= greatest]
        if queries.segments is not None and keys.segments is not None:
            own, other = queries.segments[:, :, None], keys.segments[:, None, :]
            seen.append((own == other) & (own != 0))
        return jnp.stack(jnp.broadcast_arrays(*seen)).all(0) if seen else None


class Cut(NamedTuple):
    """A sequence's cut into ``num`` blocks of ``size``, the last one padded."""

    num: int
    size: int

    @classmethod
    def of(cls, length: int, most: int) -> Self:
        """Cuts a sequence into as few blocks of at most ``most`` tokens as it needs."""
        count = -(-length // most)
        size = -(-length // count)
        # Several blocks fill whole vector registers.
        return cls(count, size if count == 1 else min(most, -(-size // 8) * 8))

    def __call__(self, x: Array, mode: Any = "constant") -> Array:
        """``(batch, seq, ...)`` to ``(blocks, batch, size, ...)``."""
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, self.num * self.size - x.shape[1])
        x = jnp.pad(x, padding, mode) if padding[1][1] else x
        x = x.reshape(x.shape[0], self.num, self.size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def tokens(self, tokens: Tokens, *, is_padded: bool) -> Tokens:
        """Tokens by block; if a side is padded, with segments that mark the padding."""
        segments = tokens.segments
        if segments is None and is_padded:  # padding will have segment 0
            segments = jnp.ones((1, tokens.positions.shape[1]), jnp.int32)
        segments = None if segments is None else self(segments)
        return Tokens(self(tokens.positions, "edge"), segments)


class Grid:
    """Queries and keys, cut into blocks, and the pairs of blocks that meet.

    The dims of blocks are ``bqngd``, ``bknd`` and ``bngqk``: b is batch, q queries, k
    keys, n kv_heads, g the query heads of each of them, and d head_dim.
    """

    def __init__(
        self,
        query: Array,
        key: Array,
        q_tokens: Tokens,
        k_tokens: Tokens,
        pattern: Pattern,
        mask: Array | None,
    ) -> None:
        lengths = query.shape[1], key.shape[1]
        # Masks depend only on the tokens: JAX would compute the masks of all blocks,
        # queries x keys, before a scan over layers, and hold them. The barrier makes
        # tokens depend on the queries (docs/library-notes.md, "Attention").
        _, q_tokens, k_tokens = jax.lax.optimization_barrier(
            (query, q_tokens, k_tokens)
        )
        self.pattern = pattern
        self.group = key.shape[2], query.shape[2] // key.shape[2]
        self.q, self.k = map(Cut.of, lengths, pattern.block)
        cuts = zip((self.q, self.k), lengths, strict=True)
        is_padded = any(cut.num * cut.size > length for cut, length in cuts)
        # (blocks, batch, size)
        self.q_tokens = self.q.tokens(q_tokens, is_padded=is_padded)
        self.k_tokens = self.k.tokens(k_tokens, is_padded=is_padded)
        needed, masks = self._needed(), self._cut_mask(mask, lengths)
        self.rows = needed, masks
        self.columns = tuple(None if x is None else x.swapaxes(0, 1) for x in self.rows)

    def queries(self, x: Array) -> Array:
        """``(batch, seq, heads, ...)`` to ``(blocks, b, queries, n, g, ...)``."""
        return self.q(x.reshape(*x.shape[:2], *self.group, *x.shape[3:]))

    def keys(self, x: Array) -> Array:
        """``(batch, keys, kv, dim)`` to ``(blocks, batch, keys, kv, dim)``."""
        return self.k(x)

    def join(self, x: Array, query: Array) -> Array:
        """Blocks of queries to ``(batch, seq, heads, ...)``."""
        x = join_blocks(x, query.shape[1])
        return x.reshape(*query.shape[:3], *x.shape[4:])

    def scores(
        self, query: Array, key: Array, q_tokens: Tokens, k_tokens: Tokens, mask: Any
    ) -> tuple[Array, Array | float]:
        """Scores of a block, -inf where unseen, and their derivative by the product."""
        pattern = self.pattern
        scores = product("bqngd,bknd->bngqk", query, key) * pattern.scale
        slope: Array | float = pattern.scale
        if pattern.softcap is not None:
            bent = jnp.tanh(scores / pattern.softcap)
            scores, slope = bent * pattern.softcap, (1 - bent**2) * pattern.scale
        seen = pattern.sees(q_tokens, k_tokens)  # (batch or 1, queries, keys)
        for each in (None if seen is None else seen[:, None, None], mask):
            scores = scores if each is None else jnp.where(each, scores, -jnp.inf)
        return scores, slope

    def unless_empty(self, needed: Array | None, attend: Callable, *state: Any) -> Any:
        """The state after a block, unchanged if the block is not seen at all."""
        if needed is None:
            return attend(*state)
        return jax.lax.cond(needed, attend, lambda *state: state, *state)

    def _needed(self) -> Array | None:
        """(q blocks, k blocks): False if no query of a pair sees a key in any row."""
        if self.q.num * self.k.num == 1:
            return None
        conditions = []
        # Ranges are (blocks, batch), and pairs of them (q blocks, k blocks, batch).
        (low, high), (k_low, k_high) = (
            _ranges(x.positions) for x in (self.q_tokens, self.k_tokens)
        )
        least, greatest = self.pattern.reach
        if least is not None:
            conditions.append(high[:, None] - k_low[None] >= least)
        if greatest is not None:
            conditions.append(low[:, None] - k_high[None] <= greatest)
        own, other = self.q_tokens.segments, self.k_tokens.segments
        if own is not None and other is not None:
            (low, high), (k_low, k_high) = (_ranges(x, x != 0) for x in (own, other))
            conditions.append(
                (low[:, None] <= k_high[None]) & (k_low[None] <= high[:, None])
            )
        if not conditions:
            return None
        return jnp.stack(jnp.broadcast_arrays(*conditions)).all(0).any(-1)

    def _cut_mask(self, mask: Array | None, lengths: tuple[int, int]) -> Array | None:
        """(batch, heads, seq, keys) to (q blocks, k blocks, b, n, g, q, k)."""
        if mask is None:
            return None
        batch, heads = mask.shape[:2]
        mask = jnp.broadcast_to(mask, (batch, heads, *lengths))
        sizes = [(cut.num, cut.size) for cut in (self.q, self.k)]
        ends = [(0, c * s - n) for (c, s), n in zip(sizes, lengths, strict=True)]
        mask = jnp.pad(mask, [(0, 0), (0, 0), *ends])
        group = (1, 1) if heads == 1 else self.group
        mask = mask.reshape(batch, *group, *sizes[0], *sizes[1])
        return mask.transpose(3, 5, 0, 1, 2, 4, 6)


def _ranges(x: Array, valid: Any = True) -> tuple[Array, Array]:
    """Least and greatest valid value per block and row; an empty range without one."""
    limits = jnp.iinfo(x.dtype)
    least = jnp.min(x, -1, initial=limits.max, where=valid)
    return least, jnp.max(x, -1, initial=limits.min, where=valid)


def join_blocks(x: Array, length: int) -> Array:
    """``(blocks, batch, size, ...)`` to ``(batch, length, ...)``."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def product(dims: str, x: Array, y: Array) -> Array:
    """An einsum of two arrays, summed in `sum_dtype`."""
    y = y.astype(jnp.promote_types(x.dtype, y.dtype))
    return jnp.einsum(dims, x.astype(y.dtype), y, preferred_element_type=sum_dtype(y))
