"""Positions of tokens, and caches of earlier tokens for generation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nnx_parallel.layers.stack.stack import ByBlock
from nnx_parallel.sharding import constrain

Start = int | jax.Array
"""The position of the first token, of the first token of each row, int (batch,), or of
all tokens, int (batch, seq)."""
Cache = tuple[jax.Array, jax.Array]
"""Two arrays of earlier tokens, each (batch, total_len, kv_heads, features).

They are keys and values, or latents and rotated keys (`GPTConfig.cache_dims`).
"""
DeltaCache = tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]
"""The cache of linear attention, whose size does not depend on the number of tokens.

It has the last inputs of three convolutions, each (batch, conv_len - 1, heads,
features), and the memory (batch, heads, group, key_dim, value_dim).
"""
Caches = tuple[Cache | DeltaCache | ByBlock, ...]
"""A cache for each stack of a model; its arrays have a leading dim of layers.

If blocks of several kinds alternate in a stack, the stack's cache is a `ByBlock` with a
cache for each block of a group.
"""


def last_token(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Returns the last token of each row, ``(batch, 1, ...)``, before its padding.

    ``x`` is ``(batch, seq, embed)``. ``lengths`` is int ``(batch,)``, or ``None`` if
    there is no padding.
    """
    if lengths is None:
        return x[:, -1:]
    return jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)


def positions_from(start: Start, length: int) -> jax.Array:
    """Returns the positions of tokens: int (seq,) or (batch, seq)."""
    if isinstance(start, jax.Array) and start.ndim == 2:
        return start
    if isinstance(start, jax.Array) and start.ndim == 1:
        return start[:, None] + jnp.arange(length)[None, :]  # (batch, seq)
    return start + jnp.arange(length)


def write_cache(
    cache: Cache, first: jax.Array, second: jax.Array, start: Start
) -> Cache:
    """Returns the cache with the tokens from position ``start`` written to it.

    ``first`` and ``second`` are (batch, seq, kv_heads, features). If each row has a
    start, each row gets one token.
    """

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        if isinstance(start, jax.Array) and start.ndim == 1:
            slots = jnp.arange(cache.shape[1])[None, :]
            is_next = slots == start[:, None]  # (batch, total_len)
            cache = jnp.where(is_next[:, :, None, None], new, cache)
        else:
            cache = jax.lax.dynamic_update_slice_in_dim(cache, new, start, axis=1)
        return constrain(cache, "batch", None, "kv_heads", "head_dim")

    return write(cache[0], first), write(cache[1], second)
