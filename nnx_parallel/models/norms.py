"""The norms of a `GPT`.

References:
    [1] Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019,
    https://arxiv.org/abs/1910.07467
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.layers import named
from nnx_parallel.models.gpt_config import GPTConfig


class ZeroCenteredRMSNorm(nnx.Module):
    """RMSNorm whose scale is 1 plus a parameter, so that weight decay pulls it to 1."""

    def __init__(self, size: int, epsilon: float, name: str) -> None:
        init = named(nnx.initializers.zeros_init(), name)
        self.scale = nnx.Param(init(jax.random.key(0), (size,)))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., size) to the same, computed in float32 or wider."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        variance = (wide**2).mean(-1, keepdims=True)
        scale = 1 + self.scale[...].astype(wide.dtype)
        normed = wide * jax.lax.rsqrt(variance + self.epsilon)
        return (normed * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)


Norm = nnx.LayerNorm | nnx.RMSNorm | ZeroCenteredRMSNorm


def rms_norm(config: GPTConfig, name: str, *, rngs: nnx.Rngs) -> Norm:
    """RMSNorm [1] over a dim that has this name."""
    size, epsilon = config.sizes[name], config.norm_epsilon
    if config.zero_centered_norm:
        return ZeroCenteredRMSNorm(size, epsilon, name)
    scale_init = named(nnx.initializers.ones_init(), name)
    return nnx.RMSNorm(size, epsilon=epsilon, scale_init=scale_init, rngs=rngs)


def make_norm(config: GPTConfig, *, rngs: nnx.Rngs) -> Norm:
    """The norm of a model's residual stream."""
    # All compute statistics and normalise in float32, whatever dtype x and scale have.
    if config.norm == "rms":
        return rms_norm(config, "embed", rngs=rngs)
    return nnx.LayerNorm(
        config.embed_dim,
        epsilon=config.norm_epsilon,
        use_bias=config.use_bias,
        scale_init=named(nnx.initializers.ones_init(), "embed"),
        bias_init=named(nnx.initializers.zeros_init(), "embed"),
        rngs=rngs,
    )
