"""Multi-head latent attention: keys and values are computed from a short vector.

References:
    [1] DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1, https://arxiv.org/abs/2405.04434
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.layers import Dense, named, project
from nnx_parallel.layers.attention import attention
from nnx_parallel.layers.lora import Adapted
from nnx_parallel.models.cache import Cache, Start, positions_from, write_cache
from nnx_parallel.models.gpt_config import GPTConfig
from nnx_parallel.models.rotary import frequencies, rotate
from nnx_parallel.sharding import constrain

_EPSILON = 1e-6
"""The number that norms of latents add to the variance, in all published models."""


class LatentAttention(nnx.Module):
    """Causal self-attention with keys and values from one latent per token [1].

    A key is a plain part, which is computed from the latent, followed by a rotated
    part, which all heads share. The cache of earlier tokens has only latents and
    rotated keys. Tensor parallelism splits the heads, and each device computes the
    latents of its rows.

    Args:
        config: Shape of the model, with ``latents``.
        rngs: Keys for the parameters.

    Raises:
        ValueError: If the config has no ``latents``.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        if (latents := config.latents) is None:
            raise ValueError("GPTConfig.latents is None, but LatentAttention needs it.")
        normal = nnx.initializers.normal
        dense = partial(Dense, rngs=rngs, kernel_init=normal(0.02))
        embed, heads = {"embed": config.embed_dim}, {"heads": config.num_heads}
        widths = (latents.plain_dim, latents.rotary_dim, latents.value_dim)
        plain, rotary, value = ({"head_dim": width} for width in widths)

        def norm(size: int) -> nnx.RMSNorm:
            scale_init = named(nnx.initializers.ones_init(), "latent")
            return nnx.RMSNorm(size, epsilon=_EPSILON, scale_init=scale_init, rngs=rngs)

        source, width = embed, latents.query_dim
        if width is not None:
            source = {"latent": width}
        self.query_latent = None if width is None else dense(embed, source)
        self.query_norm = None if width is None else norm(width)
        self.query = dense(source, heads | plain)
        self.query_rotary = dense(source, heads | rotary)
        latent = {"latent": latents.key_dim}
        self.latent = dense(embed, latent)
        self.latent_norm = norm(latents.key_dim)
        self.key = dense(latent, heads | plain)
        self.key_rotary = dense(embed, rotary)
        self.value = dense(latent, heads | value)
        # The scale is as for other outputs to the residual stream.
        out_init = normal(0.02 * (2 * config.num_layers) ** -0.5)
        self.out = dense(heads | value, embed, kernel_init=out_init)
        self.config, self.rotary_dim = config, latents.rotary_dim

    def __call__(
        self,
        x: jax.Array,
        start: Start,
        cache: Cache | None,
        segments: jax.Array | None = None,
        chunks: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Computes attention for the tokens of ``x``, with positions from ``start``.

        ``chunks`` is not used, because no layer is local. Returns an array with the
        shape of ``x``, and the new cache or ``None``.
        """
        positions = positions_from(start, x.shape[1])
        length = x.shape[1] if cache is None else cache[0].shape[1]
        query, rotated = self._queries(x)
        latent, key_rotated = project(x, self.latent, self.key_rotary)
        latent = constrain(self.latent_norm(latent), "batch", "seq", "latent")
        key_rotated = key_rotated[:, :, None]  # one head: (batch, seq, 1, rotary_dim)
        turn = partial(self._rotate, positions=positions, length=length)
        rotated, key_rotated = turn(rotated), turn(key_rotated)
        if cache is not None:
            cache = write_cache(cache, latent[:, :, None], key_rotated, start)
            return self._decode(query, rotated, positions, cache), cache
        key, value = project(latent, self.key, self.value)
        shared = jnp.broadcast_to(key_rotated, (*key.shape[:-1], self.rotary_dim))
        query = jnp.concatenate([query, rotated], axis=-1)
        key = jnp.concatenate([key, shared], axis=-1)
        query = constrain(query, "batch", "seq", "heads", "head_dim")
        key = constrain(key, "batch", "seq", "heads", "head_dim")
        value = constrain(value, "batch", "seq", "heads", "head_dim")
        out = self._attend(query, key, value, causal=True, segments=segments)
        return self.out(out), None

    def _queries(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns both parts of queries, each (batch, seq, heads, features)."""
        if self.query_latent is not None and self.query_norm is not None:
            x = self.query_norm(self.query_latent(x))
            x = constrain(x, "batch", "seq", "latent")
        query, rotary = project(x, self.query, self.query_rotary)
        return query, rotary

    def _rotate(self, x: jax.Array, positions: jax.Array, length: int) -> jax.Array:
        config, scaling = self.config, self.config.rope_scaling
        speeds = frequencies(self.rotary_dim, config.rope_theta, scaling, length)
        return rotate(x, positions, speeds, scaling.amplitude if scaling else 1.0)

    def _attend(self, *qkv: jax.Array, **rules: Any) -> jax.Array:
        config = self.config
        # Queries of `_decode` are wider than a head.
        scale = config.attention_scale or config.sizes["head_dim"] ** -0.5
        return attention(*qkv, implementation=config.attention, scale=scale, **rules)

    def _decode(
        self,
        query: jax.Array,
        rotated: jax.Array,
        positions: jax.Array,
        cache: Cache,
    ) -> jax.Array:
        """Computes attention over a cache, whose keys and values are the latents.

        The score of a query and a key that is computed from a latent is the score of
        another query and the latent itself. So keys and values of earlier tokens are
        never computed, and all heads share one key head and one value head.
        """
        latents, keys = cache  # (batch, total_len, 1, latent or rotary_dim)
        key, value = (_kernel(x).astype(query.dtype) for x in (self.key, self.value))
        query = jnp.einsum("bshd,lhd->bshl", query, key)
        query = jnp.concatenate([query, rotated], axis=-1)
        query = constrain(query, "batch", "seq", "heads", "head_dim")
        keys = jnp.concatenate([latents, keys], axis=-1)
        positions = jnp.atleast_2d(positions)  # (1 or batch, seq)
        seen = jnp.arange(keys.shape[1])[None, None, :] <= positions[..., None]
        out = self._attend(query, keys, latents, mask=seen[:, None])
        return self.out(jnp.einsum("bshl,lhd->bshd", out, value))


def _kernel(layer: Dense) -> jax.Array:
    """Returns a layer's kernel, with the product of its adapter's factors if any."""
    kernel = layer.kernel[...]
    return kernel + layer.delta() if isinstance(layer, Adapted) else kernel
