"""Exact attention in blocks: no array of queries x keys is ever held.

Queries meet keys one block at a time, and a block's part of the output is merged with
the earlier parts by the log-sum-exp of its scores [1]. The backward pass computes the
scores of a block again, from the log-sum-exp that the forward pass kept [2]. Masks are
computed from positions and segment ids within a block; blocks that causality, a window
or the ends of documents empty are skipped.

A ring calls `forward_block`, `merge` and `backward_block` for each piece of the keys
that passes by. The arrays here belong to one device: nothing communicates.

References:
    [1] Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021,
    https://arxiv.org/abs/2112.05682
    [2] Dao, "FlashAttention-2", 2023, section 3.1, https://arxiv.org/abs/2307.08691
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from nnx_parallel.layers.score_blocks import (
    Grid,
    Pattern,
    Tokens,
    join_blocks,
    product,
)
from nnx_parallel.precision import sum_dtype

Partial = tuple[Array, Array]
"""Attention to some of the keys, and the log-sum-exp of its scores.

Float32 ``(batch, seq, heads, value_dim)``, normalised, and ``(batch, seq, heads)``:
0 and -inf for a query that sees none of these keys.
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
    """Attention of queries to a piece of the keys, in blocks.

    Args:
        query: ``(batch, seq, heads, head_dim)``.
        key: ``(batch, keys, kv_heads, head_dim)``; kv_heads divides heads.
        value: ``(batch, keys, kv_heads, value_dim)``.
        q_tokens: Positions and segments of the queries.
        k_tokens: Positions and segments of the keys; segments are on both sides or on
            neither.
        pattern: The keys that each query may see.
        mask: bool ``(batch or 1, heads or 1, seq, keys)``, True where a key is seen,
            unless the pattern hides it.
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
                # For a query that has seen nothing yet, exp(-inf - 0) is 0, not NaN.
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
        # A query that sees nothing gets out 0 / 1, and -inf + log(0).
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
    """Gradients of queries and of a piece of the keys and values, in blocks [2].

    Args:
        query: The queries, with the shape that `forward_block` takes.
        key: The keys of the piece.
        value: The values of the piece.
        grad: Gradient of the whole output, ``(batch, seq, heads, value_dim)``.
        lse: Log-sum-exp of a query's scores with all keys and with its sink.
        delta: `output_delta` of the whole output.
        q_tokens: The same as in `forward_block`.
        k_tokens: The same as in `forward_block`.
        pattern: The same as in `forward_block`.
        mask: The same as in `forward_block`.

    Returns:
        Arrays like query, key and value, in float32: partial sums that a ring adds up.
    """
    grid = Grid(query, key, q_tokens, k_tokens, pattern, mask)
    queries = tuple(grid.queries(x) for x in (query, grad, lse, delta))
    keys = (grid.keys(key), grid.keys(value))
    dtype = sum_dtype(query)

    # A query's gradient is carried over the blocks of keys and written in place; if
    # each were emitted, the gradients of all blocks of keys would exist at once.
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
    """Attention to the keys of two pieces that have no key in common."""
    lse = jnp.logaddexp(first[1], second[1])
    # Where both see nothing, the weights are exp(-inf - 0).
    weights = (jnp.exp(own - _finite(lse))[..., None] for _, own in (first, second))
    out = sum(w * x for w, (x, _) in zip(weights, (first, second), strict=True))
    return jnp.asarray(out), lse


def with_sinks(part: Partial, sinks: Array | None) -> Partial:
    """Attention with one more logit per head ``(heads,)``, whose value is 0."""
    if sinks is None:
        return part
    out, lse = part
    sinks = sinks.astype(lse.dtype)
    return merge((out, lse), (jnp.zeros_like(out), jnp.broadcast_to(sinks, lse.shape)))


def output_delta(out: Array, grad: Array) -> Array:
    """Product of a query's output and its gradient ``(batch, seq, heads)``."""
    dtype = sum_dtype(out)
    return jnp.sum(out.astype(dtype) * grad.astype(dtype), axis=-1)


def sinks_gradient(sinks: Array | None, lse: Array, delta: Array) -> Array | None:
    """Gradient of the sinks, from the log-sum-exp that includes them."""
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
    """Attention to all keys, in the dtype of the query.

    It is differentiable once, in reverse mode. The operands, the output and one number
    per query and head are kept for the backward pass.

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
    out = out.astype(query.dtype)
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
    """`jax.lax.scan`; for one block, its body without the loop."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(function, start, xs)
    carry, out = function(start, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


def _to_queries(x: Array) -> Array:
    """``(b, n, g, queries, ...)`` to ``(b, queries, n, g, ...)``."""
    return jnp.moveaxis(x, 3, 1)


def _to_scores(x: Array) -> Array:
    """``(b, queries, n, g)`` to ``(b, n, g, queries, 1)``."""
    return jnp.moveaxis(x, 1, 3)[..., None]


def _finite(x: Array) -> Array:
    """0 for -inf, which is the log of nothing."""
    return jnp.where(x == -jnp.inf, 0, x)
