"""Exact attention in blocks, without an array of the size queries x keys.

Scores are computed for one block of queries and keys at a time. The output of a block
is merged with the output of earlier blocks, weighted by the log-sum-exp of the scores
[1]. The backward pass recomputes the scores of each block, and their softmax from the
log-sum-exp that the forward pass kept [2]. The mask of a block is computed from
positions and segment ids. A block is skipped if causality, a window or the borders of
documents hide all its keys.

`context` calls `forward_block`, `merge` and `backward_block` for the keys of each
device. The functions here work on the arrays of one device and do not communicate.

References:
    [1] Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021,
    https://arxiv.org/abs/2112.05682
    [2] Dao, "FlashAttention-2", 2023, section 3.1, https://arxiv.org/abs/2307.08691
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.precision import sum_dtype

OUTPUT = "attention"
"""Checkpoint name of the output, and of the log-sum-exp that its gradient needs."""

BLOCK = 512
"""Maximum number of queries, and of keys, in a block."""


class Tokens(NamedTuple):
    """Positions and documents of queries or of keys, from which masks are computed.

    Attributes:
        positions: int ``(batch or 1, seq)``, positions in the row, for causality and
            windows. They may have any order, but blocks can be skipped only if the
            tokens of a block have similar positions.
        segments: int ``(batch or 1, seq)``, the id of each token's document. 0 marks
            padding, which sees no token and is seen by no token. ``None``: each row is
            one document.
    """

    positions: Array
    segments: Array | None = None

    @classmethod
    def in_order(cls, length: int, segments: Array | None = None) -> Self:
        """Makes the tokens of complete rows, with positions that count from 0."""
        return cls(jnp.arange(length)[None], segments)


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Which keys a query sees, given their distance, and how scores are computed.

    Attributes:
        scale: Factor of the products of queries and keys.
        causal: True if a query sees only keys up to its position.
        window: Number of keys that a query sees to the left and to the right of its
            position. ``None``: all keys.
        softcap: Bound of the scores, which become ``softcap * tanh(scores / softcap)``.
        block: Maximum number of queries and of keys in a block.
    """

    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    block: tuple[int, int] = (BLOCK, BLOCK)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Returns the smallest and largest distance at which a query sees a key.

        The distance is the query's position minus the key's. ``None``: no limit.
        """
        left, right = self.window
        return (0 if self.causal else None if right is None else -right), left

    def sees(self, queries: Tokens, keys: Tokens) -> Array | None:
        """Returns a bool array, True if a query sees a key.

        Its shape is ``(batch or 1, queries, keys)``. Returns ``None`` if all queries
        see all keys.
        """
        distance = queries.positions[:, :, None] - keys.positions[:, None, :]
        least, greatest = self.reach
        seen = [] if least is None else [distance >= least]
        seen += [] if greatest is None else [distance <= greatest]
        if queries.segments is not None and keys.segments is not None:
            q_segments, k_segments = (
                queries.segments[:, :, None],
                keys.segments[:, None, :],
            )
            seen.append((q_segments == k_segments) & (q_segments != 0))
        return jnp.stack(jnp.broadcast_arrays(*seen)).all(0) if seen else None


class Cut(NamedTuple):
    """The division of a sequence into ``num`` blocks of ``size``, with padding."""

    num: int
    size: int

    @classmethod
    def of(cls, length: int, most: int) -> Self:
        """Divides a sequence into the fewest blocks of at most ``most`` tokens."""
        count = -(-length // most)
        size = -(-length // count)
        # If there are several blocks, their size is a multiple of 8 tokens, which fills
        # vector registers.
        return cls(count, size if count == 1 else min(most, -(-size // 8) * 8))

    def __call__(self, x: Array, mode: Any = "constant") -> Array:
        """Cuts ``(batch, seq, ...)`` into ``(blocks, batch, size, ...)``."""
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, self.num * self.size - x.shape[1])
        x = jnp.pad(x, padding, mode) if padding[1][1] else x
        x = x.reshape(x.shape[0], self.num, self.size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def tokens(self, tokens: Tokens, *, is_padded: bool) -> Tokens:
        """Cuts tokens into blocks; padding gets segment 0."""
        segments = tokens.segments
        if segments is None and is_padded:  # all tokens except padding get segment 1
            segments = jnp.ones((1, tokens.positions.shape[1]), jnp.int32)
        segments = None if segments is None else self(segments)
        return Tokens(self(tokens.positions, "edge"), segments)


class Grid:
    """Queries and keys in blocks, and the pairs of blocks to compute.

    The dims of a block are ``bqngd`` for queries, ``bknd`` for keys and ``bngqk`` for
    scores. The letters mean: b batch, q queries, k keys, n kv_heads, g query heads for
    each of the kv_heads, and d head_dim.
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
        # Masks depend only on the tokens. So JAX would compute the masks of all blocks,
        # an array of queries x keys, before a scan over layers, and keep them. Because
        # of this barrier, the tokens depend on the queries, and the masks are computed
        # inside the scan (docs/library-notes.md, "Attention").
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
        """Cuts ``(b, seq, heads, ...)`` into ``(blocks, b, queries, n, g, ...)``."""
        return self.q(x.reshape(*x.shape[:2], *self.group, *x.shape[3:]))

    def keys(self, x: Array) -> Array:
        """Cuts ``(batch, keys, kv, dim)`` into ``(blocks, batch, keys, kv, dim)``."""
        return self.k(x)

    def join(self, x: Array, query: Array) -> Array:
        """Undoes `queries`: joins blocks into ``(batch, seq, heads, ...)``."""
        x = join_blocks(x, query.shape[1])
        return x.reshape(*query.shape[:3], *x.shape[4:])

    def scores(
        self, query: Array, key: Array, q_tokens: Tokens, k_tokens: Tokens, mask: Any
    ) -> tuple[Array, Array | float]:
        """Computes a block's scores and their derivatives with respect to ``q @ k``.

        A score is -inf if the query does not see the key.
        """
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
        """Returns ``attend(*state)``, or ``state`` if ``needed`` is False."""
        if needed is None:
            return attend(*state)
        return jax.lax.cond(needed, attend, lambda *state: state, *state)

    def _needed(self) -> Array | None:
        """Returns which pairs of blocks are needed, bool ``(q blocks, k blocks)``.

        A pair is False if none of its queries sees any of its keys. Returns ``None`` if
        all pairs are needed.
        """
        if self.q.num * self.k.num == 1:
            return None
        conditions = []
        # Ranges are (blocks, batch), and conditions (q blocks, k blocks, batch).
        (low, high), (k_low, k_high) = (
            _ranges(x.positions) for x in (self.q_tokens, self.k_tokens)
        )
        least, greatest = self.pattern.reach
        if least is not None:
            conditions.append(high[:, None] - k_low[None] >= least)
        if greatest is not None:
            conditions.append(low[:, None] - k_high[None] <= greatest)
        q_segments, k_segments = self.q_tokens.segments, self.k_tokens.segments
        if q_segments is not None and k_segments is not None:
            (low, high), (k_low, k_high) = (
                _ranges(x, x != 0) for x in (q_segments, k_segments)
            )
            conditions.append(
                (low[:, None] <= k_high[None]) & (k_low[None] <= high[:, None])
            )
        if not conditions:
            return None
        return jnp.stack(jnp.broadcast_arrays(*conditions)).all(0).any(-1)

    def _cut_mask(self, mask: Array | None, lengths: tuple[int, int]) -> Array | None:
        """Cuts (batch, heads, seq, keys) into (q blocks, k blocks, b, n, g, q, k)."""
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
    """Returns the smallest and largest valid value of each block and row.

    If no value is valid, the smallest value is greater than the largest.
    """
    limits = jnp.iinfo(x.dtype)
    least = jnp.min(x, -1, initial=limits.max, where=valid)
    return least, jnp.max(x, -1, initial=limits.min, where=valid)


def join_blocks(x: Array, length: int) -> Array:
    """Joins ``(blocks, batch, size, ...)`` into ``(batch, length, ...)``."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def product(dims: str, x: Array, y: Array) -> Array:
    """Computes an einsum of two arrays, with sums in the dtype `sum_dtype`."""
    y = y.astype(jnp.promote_types(x.dtype, y.dtype))
    return jnp.einsum(dims, x.astype(y.dtype), y, preferred_element_type=sum_dtype(y))


Partial = tuple[Array, Array]
"""Attention to some of the keys, and the log-sum-exp of the scores.

The first array is the normalised output, float32 ``(batch, seq, heads, value_dim)``. It
is 0 for a query that sees none of these keys. The second array is the log-sum-exp,
float32 ``(batch, seq, heads)``. It is -inf for such a query.
"""


def forward_block(
    query: Array,
    key: Array,
    value: Array,
    q_tokens: Tokens,
    k_tokens: Tokens,
    pattern: Pattern,
    mask: Array | None = None,
) -> Partial:
    """Computes attention to some of the keys, in blocks.

    Args:
        query: ``(batch, seq, heads, head_dim)``.
        key: ``(batch, keys, kv_heads, head_dim)``; kv_heads divides heads.
        value: ``(batch, keys, kv_heads, value_dim)``.
        q_tokens: Positions and segments of the queries.
        k_tokens: Positions and segments of the keys. Either both queries and keys must
            have segments, or neither.
        pattern: The keys that each query may see.
        mask: bool ``(batch or 1, heads or 1, seq, keys)``, True if a query sees a key,
            unless the pattern hides the key.
    """
    grid = Grid(query, key, q_tokens, k_tokens, pattern, mask)
    queries, keys = grid.queries(query), (grid.keys(key), grid.keys(value))
    shape = (query.shape[0], *grid.group, grid.q.size)
    dtype = sum_dtype(query)

    def of_queries(_: None, xs: tuple) -> tuple[None, Partial]:
        query, q_tokens, row = xs

        def of_keys(state: tuple, xs: tuple) -> tuple[tuple, None]:
            (key, value), k_tokens, (needed, mask) = xs

            def attend(out: Array, top: Array, total: Array) -> tuple:
                scores = grid.scores(query, key, q_tokens, k_tokens, mask)[0]
                new_top = jnp.maximum(top, scores.max(-1))
                # For a query that has seen no key yet, exp(-inf - 0) is 0, not NaN.
                base = _finite(new_top)
                weights = jnp.exp(scores - base[..., None])
                shrink = jnp.exp(top - base)
                out = out * shrink[..., None] + product(
                    "bngqk,bknd->bngqd", weights.astype(value.dtype), value
                )
                return out, new_top, total * shrink + weights.sum(-1)

            return grid.unless_empty(needed, attend, *state), None

        empty = jnp.zeros((*shape, value.shape[-1]), dtype)
        start = (empty, jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))
        (out, top, total), _ = _scan(of_keys, start, (keys, grid.k_tokens, row))
        # For a query that sees no key, `out` is 0 / 1, and the log-sum-exp is
        # -inf + log(0), which is -inf.
        out /= jnp.where(total == 0, 1, total)[..., None]
        return None, (_to_queries(out), _to_queries(top + jnp.log(total)))

    _, found = _scan(of_queries, None, (queries, grid.q_tokens, grid.rows))
    return grid.join(found[0], query), grid.join(found[1], query)


def backward_block(
    query: Array,
    key: Array,
    value: Array,
    grad: Array,
    lse: Array,
    delta: Array,
    q_tokens: Tokens,
    k_tokens: Tokens,
    pattern: Pattern,
    mask: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Computes gradients of queries and of some of the keys and values, in blocks [2].

    Args:
        query: The same as in `forward_block`.
        key: Some of the keys, as in `forward_block`.
        value: The values of these keys.
        grad: Gradient of the complete output, ``(batch, seq, heads, value_dim)``.
        lse: Log-sum-exp of a query's scores with all keys and with its sink.
        delta: `output_delta` of the complete output.
        q_tokens: The same as in `forward_block`.
        k_tokens: The same as in `forward_block`.
        pattern: The same as in `forward_block`.
        mask: The same as in `forward_block`.

    Returns:
        The gradients, float32 arrays with the shapes of query, key and value. If
        several calls compute gradients for parts of the keys or queries, their results
        must be added.
    """
    grid = Grid(query, key, q_tokens, k_tokens, pattern, mask)
    queries = tuple(grid.queries(x) for x in (query, grad, lse, delta))
    keys = (grid.keys(key), grid.keys(value))
    dtype = sum_dtype(query)

    # The scan over blocks of keys carries the gradients of queries and updates them in
    # place. As outputs of the scan, they would exist once for each block of keys.
    def of_keys(dqueries: Array, xs: tuple) -> tuple[Array, tuple]:
        (key, value), k_tokens, column = xs

        def of_queries(carry: tuple, xs: tuple) -> tuple[tuple, None]:
            dqueries, dkey, dvalue = carry
            i, (query, grad, lse, delta), q_tokens, (needed, mask) = xs

            def attend(dquery: Array, dkey: Array, dvalue: Array) -> tuple:
                scores, slope = grid.scores(query, key, q_tokens, k_tokens, mask)
                weights = jnp.exp(scores - _finite(_to_scores(lse)))
                narrow = weights.astype(value.dtype)
                dvalue += product("bngqk,bqngd->bknd", narrow, grad)
                dweights = product("bqngd,bknd->bngqk", grad, value)
                dscores = weights * (dweights - _to_scores(delta)) * slope
                dscores = dscores.astype(query.dtype)
                dquery += product("bngqk,bknd->bqngd", dscores, key)
                dkey += product("bngqk,bqngd->bknd", dscores, query)
                return dquery, dkey, dvalue

            dquery = jax.lax.dynamic_index_in_dim(dqueries, i, keepdims=False)
            dquery, dkey, dvalue = grid.unless_empty(
                needed, attend, dquery, dkey, dvalue
            )
            dqueries = jax.lax.dynamic_update_index_in_dim(dqueries, dquery, i, 0)
            return (dqueries, dkey, dvalue), None

        zeros = (jnp.zeros(key.shape, dtype), jnp.zeros(value.shape, dtype))
        xs = (jnp.arange(grid.q.num), queries, grid.q_tokens, column)
        (dqueries, *dkeys), _ = _scan(of_queries, (dqueries, *zeros), xs)
        return dqueries, tuple(dkeys)

    start = jnp.zeros(queries[0].shape, dtype)
    dquery, (dkey, dvalue) = _scan(of_keys, start, (keys, grid.k_tokens, grid.columns))
    join_keys = partial(join_blocks, length=key.shape[1])
    return grid.join(dquery, query), join_keys(dkey), join_keys(dvalue)


def merge(first: Partial, second: Partial) -> Partial:
    """Merges the attention to two sets of keys that have no key in common."""
    lse = jnp.logaddexp(first[1], second[1])
    # If a query sees no key in either set, the weights are exp(-inf - 0) = 0.
    weights = (
        jnp.exp(part_lse - _finite(lse))[..., None] for _, part_lse in (first, second)
    )
    out = sum(w * x for w, (x, _) in zip(weights, (first, second), strict=True))
    return jnp.asarray(out), lse


def with_sinks(part: Partial, sinks: Array | None) -> Partial:
    """Adds to each head a key with the head's sink as its logit and 0 as its value."""
    if sinks is None:
        return part
    out, lse = part
    sinks = sinks.astype(lse.dtype)
    return merge((out, lse), (jnp.zeros_like(out), jnp.broadcast_to(sinks, lse.shape)))


def output_delta(out: Array, grad: Array) -> Array:
    """Sums outputs times their gradients over value_dim: ``(batch, seq, heads)``."""
    dtype = sum_dtype(out)
    return jnp.sum(out.astype(dtype) * grad.astype(dtype), axis=-1)


def sinks_gradient(sinks: Array | None, lse: Array, delta: Array) -> Array | None:
    """Computes the gradient of the sinks; ``lse`` must include the sinks."""
    if sinks is None:
        return None
    weights = jnp.exp(sinks.astype(lse.dtype)[None, None] - lse)
    return -(weights * delta).sum((0, 1)).astype(sinks.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise_attention(
    pattern: Pattern,
    query: Array,
    key: Array,
    value: Array,
    q_tokens: Tokens,
    k_tokens: Tokens,
    sinks: Array | None = None,
    mask: Array | None = None,
) -> Array:
    """Computes attention to all keys, in blocks; returns the dtype of the query.

    The function can be differentiated once, in reverse mode. The backward pass needs
    the operands, the output, and one number per query and head.

    Example:
        >>> x = jnp.ones((1, 1024, 2, 8))
        >>> tokens, pattern = Tokens.in_order(1024), Pattern(scale=1.0, causal=True)
        >>> blockwise_attention(pattern, x, x, x, tokens, tokens).shape
        (1, 1024, 2, 8)
    """
    operands = (query, key, value, q_tokens, k_tokens, sinks, mask)
    return _blockwise_forward(pattern, *operands)[0]


def _blockwise_forward(pattern: Pattern, *operands: Any) -> tuple[Array, tuple]:
    query, key, value, q_tokens, k_tokens, sinks, mask = operands
    part = forward_block(query, key, value, q_tokens, k_tokens, pattern, mask)
    out, lse = with_sinks(part, sinks)
    out, lse = checkpoint_name((out.astype(query.dtype), lse), OUTPUT)
    return out, (*operands, out, lse)


def _blockwise_backward(pattern: Pattern, saved: tuple, grad: Array) -> tuple:
    query, key, value, q_tokens, k_tokens, sinks, mask, out, lse = saved
    delta = output_delta(out, grad)
    sides = (q_tokens, k_tokens, pattern, mask)
    grads = backward_block(query, key, value, grad, lse, delta, *sides)
    operands = zip(grads, (query, key, value), strict=True)
    dquery, dkey, dvalue = (g.astype(x.dtype) for g, x in operands)
    return dquery, dkey, dvalue, None, None, sinks_gradient(sinks, lse, delta), None


blockwise_attention.defvjp(_blockwise_forward, _blockwise_backward)


def _scan(function: Callable, start: Any, xs: Any) -> tuple[Any, Any]:
    """Calls `jax.lax.scan`; if there is only one block, calls the body directly."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(function, start, xs)
    carry, out = function(start, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


def _to_queries(x: Array) -> Array:
    """Transposes ``(b, n, g, queries, ...)`` to ``(b, queries, n, g, ...)``."""
    return jnp.moveaxis(x, 3, 1)


def _to_scores(x: Array) -> Array:
    """Transposes ``(b, queries, n, g)`` to ``(b, n, g, queries, 1)``."""
    return jnp.moveaxis(x, 1, 3)[..., None]


def _finite(x: Array) -> Array:
    """Replaces -inf by 0, so that -inf - 0 is not NaN."""
    return jnp.where(x == -jnp.inf, 0, x)
