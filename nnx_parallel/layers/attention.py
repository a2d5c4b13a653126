"""Scaled dot-product attention over named heads."""

from __future__ import annotations

import jax

from nnx_parallel.sharding import constrain


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Softmax of scaled scores, times values [1]; heads may be grouped [2].

    Heads are independent: split over ``tensor``, they need no communication.

    Args:
        query: ``(batch, seq, heads, head_dim)``.
        key: ``(batch, keys, kv_heads, head_dim)``; kv_heads divides heads.
        value: Like ``key``.
        causal: Whether position i sees positions up to i only.
        mask: bool ``(batch or 1, heads or 1, seq, keys)``, True where seen.

    Returns:
        ``(batch, seq, heads, head_dim)``.

    References:
        [1] Vaswani et al., "Attention Is All You Need", 2017, section 3.2,
        https://arxiv.org/abs/1706.03762
        [2] Ainslie et al., "GQA", 2023, https://arxiv.org/abs/2305.13245
    """
    out = jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=causal)
    return constrain(out, "batch", "seq", "heads", "head_dim")
