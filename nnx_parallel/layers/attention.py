"""Scaled dot-product attention over named heads."""

from __future__ import annotations

import jax

from nnx_parallel.layers.fused_attention import (
    Implementation,
    choose_implementation,
    fused_attention,
    jax_attention,
)
from nnx_parallel.sharding import constrain


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    mask: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Softmax of scaled scores, times values [1]; heads may be grouped [2].

    Heads are independent: split over ``tensor``, they need no communication. A fused
    kernel runs on each device's rows and heads, under any strategy, and holds no scores
    [3]; whatever the remat policy, it is computed again for the backward pass unless
    everything is kept.

    Args:
        query: ``(batch, seq, heads, head_dim)``.
        key: ``(batch, keys, kv_heads, head_dim)``; kv_heads divides heads.
        value: Like ``key``.
        causal: Whether position i sees positions up to i only.
        mask: bool ``(batch or 1, heads or 1, seq, keys)``, True where seen.
        implementation: ``cudnn`` on NVIDIA GPUs, ``splash`` on TPUs, or ``xla``: plain
            operations, which the partitioner splits. ``None``: the platform's kernel
            where it takes these arrays, else ``xla``.

    Returns:
        ``(batch, seq, heads, head_dim)``.

    Raises:
        ValueError: If there is no such implementation.
        AttentionKernelError: If the one asked for cannot compute this: another
            platform, dtype or ``head_dim`` (cudnn), or sequence length or mask
            (splash).

    References:
        [1] Vaswani et al., "Attention Is All You Need", 2017, section 3.2,
        https://arxiv.org/abs/1706.03762
        [2] Ainslie et al., "GQA", 2023, https://arxiv.org/abs/2305.13245
        [3] Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135
    """
    chosen = choose_implementation(query, key, mask, implementation)
    if chosen == "xla":
        out = jax_attention(
            query, key, value, mask, causal=causal, implementation="xla"
        )
    else:
        out = fused_attention(chosen, query, key, value, mask, causal=causal)
    return constrain(out, "batch", "seq", "heads", "head_dim")
