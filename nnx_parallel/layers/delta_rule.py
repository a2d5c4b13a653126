"""The gated delta rule: a memory of keys and values that every token changes.

The rule is a recurrence over tokens. It is computed in chunks of tokens: products of
matrices compute all tokens of a chunk together, and a scan runs over the chunks.

References:
    [1] Yang et al., "Gated Delta Networks", 2024, sections 3.1 and 3.3,
    https://arxiv.org/abs/2412.06464
    [2] Yang et al., "Parallelizing Linear Transformers with the Delta Rule over
    Sequence Length", 2024, section 3, https://arxiv.org/abs/2406.06484
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nnx_parallel.precision import sum_dtype
from nnx_parallel.sharding.constrain import constrain

CHUNK = 64
"""The largest number of tokens in a chunk, as in the implementation of [2]."""


def gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    rate: Array,
    is_first: Array,
    state: Array | None = None,
) -> tuple[Array, Array]:
    """Reads from a memory that each token decays and corrects [1].

    A head of values has a matrix S, which is 0 before the first token. A token with
    query q, key k, value v, decay a and rate r changes it to ``a S + r k (v - a k S)``.
    The output of the token is ``q S``, computed from the new S. All arrays are computed
    in float32 or wider, and matrices are multiplied with the precision of float32,
    because S keeps the error of every token.

    Heads are independent, so heads that are split over ``tensor`` need no
    communication. The sequence must not be split.

    Args:
        query: ``(batch, seq, heads, key_dim)``.
        key: ``(batch, seq, heads, key_dim)``, of norm 1 or less.
        value: ``(batch, seq, heads, group, value_dim)``. Each key is shared by a group
            of values, which have separate matrices, decays and rates.
        log_decay: ``(batch, seq, heads, group)``, the logarithm of the decay, at most
            0.
        rate: ``(batch, seq, heads, group)``, from 0 to 1. A token with ``log_decay``
            and ``rate`` 0 does not change the memory.
        is_first: bool ``(batch, seq)``, True for the first token of a document, which
            finds an empty memory.
        state: ``(batch, heads, group, key_dim, value_dim)``, S before the first token;
            ``None`` means 0.

    Returns:
        The outputs, ``(batch, seq, heads, group, value_dim)``, and S after the last
        token, both in float32 or wider.
    """
    wide = sum_dtype(query.dtype)
    length, (*_, heads, group, value_dim) = query.shape[1], value.shape
    size = min(CHUNK, 1 << (length - 1).bit_length())

    def chunks(x: Array) -> Array:
        # (batch, seq, ...) -> (chunks, batch, size, ...), with zeros after the end
        ends = [(0, 0)] * x.ndim
        ends[1] = (0, -length % size)
        x = jnp.pad(x, ends)
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    shape = (len(query), heads, group, key.shape[-1], value_dim)
    memory = jnp.zeros(shape, wide) if state is None else state.astype(wide)
    memory = constrain(memory, "batch", "heads", None, None, None)
    with jax.default_matmul_precision("highest"):
        chunked = _prepare(
            *(chunks(x.astype(wide)) for x in (query, key, value)),
            log_decay=chunks(log_decay.astype(wide)),
            rate=chunks(rate.astype(wide)),
            is_first=chunks(is_first),
        )
        memory, out = jax.lax.scan(_run_chunk, memory, chunked)
    # (chunks, batch, heads, group, size, value_dim) -> (batch, seq, heads, group, ...)
    out = jnp.transpose(out, (1, 0, 4, 2, 3, 5))
    out = out.reshape(len(query), -1, heads, group, value_dim)
    return out[:, :length], memory


class _Chunk(NamedTuple):
    """The part of a chunk's computation that does not depend on S.

    The arrays of all chunks have a leading dim of chunks.

    Attributes:
        query: ``(batch, size, heads, key_dim)``.
        key: ``(batch, size, heads, key_dim)``.
        scores: ``(batch, heads, group, size, size)``, products of queries and keys.
        written: ``(batch, heads, group, size, value_dim)``, the corrections that tokens
            write if S is 0 before the chunk.
        removed: ``(batch, heads, group, size, key_dim)``. Its product with S is
            subtracted from these corrections.
        into: ``(batch, heads, group, size, 1)``, decay from the chunk's start to a
            token; 0 if a document begins in between.
        out_of: ``(batch, heads, group, size, 1)``, decay from a token to the chunk's
            end; 0 if a document begins in between.
        kept: ``(batch, heads, group, 1, 1)``, decay of S over the whole chunk; 0 if a
            document begins in the chunk.
    """

    query: Array
    key: Array
    scores: Array
    written: Array
    removed: Array
    into: Array
    out_of: Array
    kept: Array


def _prepare(
    query: Array,
    key: Array,
    value: Array,
    *,
    log_decay: Array,
    rate: Array,
    is_first: Array,
) -> _Chunk:
    """Computes all chunks at once; the arrays are (chunks, batch, size, ...)."""
    # (..., size, heads, group) -> (..., heads, group, size)
    log_decay, rate = (jnp.moveaxis(x, 2, -1) for x in (log_decay, rate))
    document = jnp.cumsum(is_first, axis=2)[:, :, None, None]  # (..., 1, 1, size)
    is_same = document[..., :, None] == document[..., None, :]
    is_earlier = is_same & jnp.tril(jnp.ones_like(is_same))
    # Entry (t, u) is the sum of the decays from u + 1 to t. Differences of sums that
    # begin at the chunk's start would lose digits of slow decays after fast ones.
    square = *log_decay.shape, log_decay.shape[-1]
    steps = jnp.tril(jnp.broadcast_to(log_decay[..., None], square), -1)
    summed = jnp.cumsum(steps, axis=-2)
    between = jnp.where(is_earlier, jnp.exp(summed), 0)
    into = jnp.where(document == 0, jnp.exp(jnp.cumsum(log_decay, axis=-1)), 0)
    out_of = between[..., -1, :]
    overlaps = jnp.einsum("nbthk,nbuhk->nbhtu", key, key)[:, :, :, None]
    # A token's correction depends on the corrections of earlier tokens in its chunk.
    # The inverse of this triangular system computes all of them [2].
    system = rate[..., None] * overlaps * between
    inverse = invert_unit_lower(system) * rate[..., None, :]
    scores = jnp.einsum("nbthk,nbuhk->nbhtu", query, key)[:, :, :, None]
    return _Chunk(
        query=query,
        key=key,
        scores=scores * between,
        written=jnp.einsum("nbhgtu,nbuhgv->nbhgtv", inverse, value),
        removed=jnp.einsum("nbhgtu,nbuhk->nbhgtk", inverse * into[..., None, :], key),
        into=into[..., None],
        out_of=out_of[..., None],
        kept=into[..., -1:, None],
    )


def _run_chunk(state: Array, chunk: _Chunk) -> tuple[Array, Array]:
    """Returns S after a chunk, and its outputs (batch, heads, group, size, value)."""
    written = chunk.written - chunk.removed @ state
    read = jnp.einsum("bthk,bhgkv->bhgtv", chunk.query, state)
    out = chunk.into * read + chunk.scores @ written
    change = jnp.einsum("bthk,bhgtv->bhgkv", chunk.key, chunk.out_of * written)
    return chunk.kept * state + change, out


@jax.custom_vjp
def invert_unit_lower(lower: Array) -> Array:
    """Inverts matrices with ones on the diagonal and zeros above it.

    The inverses of two neighbouring blocks on the diagonal give the inverse of the
    block that contains both. The blocks double in size, from single entries to the
    whole matrix. A sum of powers of the matrix would be less exact, because it adds
    large numbers that cancel.

    Args:
        lower: ``(..., size, size)``, where size is a power of two. Only the entries
            below the diagonal are used.

    Returns:
        The inverses, ``(..., size, size)``.
    """
    *batch, size, _ = lower.shape
    found = jnp.ones((*batch, size, 1, 1), lower.dtype)  # a block for each entry
    for width in (1 << i for i in range(size.bit_length() - 1)):
        count = size // (2 * width)
        blocks = lower.reshape(*batch, count, 2 * width, count, 2 * width)
        on_diagonal = jnp.eye(count, dtype=bool)[:, None, :, None]
        on_diagonal = jnp.broadcast_to(on_diagonal, blocks.shape)
        diagonal = jnp.where(on_diagonal, blocks, 0).sum(-2)  # (..., count, 2 w, 2 w)
        pairs = found.reshape(*batch, count, 2, width, width)
        top, bottom = (x.squeeze(-3) for x in jnp.split(pairs, 2, axis=-3))
        corner = -_product(_product(bottom, diagonal[..., width:, :width]), top)
        rows = [[top, jnp.zeros_like(top)], [corner, bottom]]
        found = jnp.block(rows)
    return found.reshape(lower.shape)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _invert_forward(lower: Array) -> tuple[Array, Array]:
    found = invert_unit_lower(lower)
    return found, found


def _invert_backward(found: Array, grad: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(found, -1, -2)
    return (-jnp.tril(_product(_product(transposed, grad), transposed), -1),)


invert_unit_lower.defvjp(_invert_forward, _invert_backward)
