"""Linear attention: a layer that keeps a memory of fixed size instead of all keys.

References:
    [1] Yang et al., "Gated Delta Networks", 2024, section 3.4,
    https://arxiv.org/abs/2412.06464
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nnx_parallel.errors import IndivisibleDimError
from nnx_parallel.layers import Dense, named, project
from nnx_parallel.layers.delta_rule import gated_delta_rule
from nnx_parallel.models.cache import DeltaCache, Start, positions_from
from nnx_parallel.models.gpt_config import GPTConfig
from nnx_parallel.sharding import constrain
from nnx_parallel.sharding.constrain import active_layout

_HEADS = ("batch", "seq", "heads", "head_dim")


class LinearAttention(nnx.Module):
    """A layer with the gated delta rule, as in Qwen3-Next [1].

    Queries, keys and values pass through a short causal convolution. The rule
    (`gated_delta_rule`) reads from and writes to a memory. Its outputs are normalised,
    and multiplied by a gate that is computed from the token. Tensor parallelism splits
    the key heads, together with the value heads that share them.

    The documents of a packed row have separate memories, and the convolution does not
    reach into an earlier document.

    Args:
        config: Shape of the model, with ``delta_net``.
        rngs: Keys for the parameters.

    Raises:
        ValueError: If the config has no ``delta_net``.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        if (sizes := config.delta_net) is None:
            raise ValueError(
                "GPTConfig.delta_net is None, but LinearAttention needs it."
            )
        heads, group = sizes.num_key_heads, sizes.group
        normal, uniform = nnx.initializers.normal, jax.random.uniform
        embed = {"embed": config.embed_dim}

        def dense(width: int) -> Dense:
            outs = {"heads": heads, "head_dim": width}
            return Dense(embed, outs, rngs=rngs, kernel_init=normal(0.02))

        def conv(width: int) -> nnx.Param:
            init = named(normal(sizes.conv_len**-0.5), "heads", None)
            return nnx.Param(init(rngs.params(), (heads * width, sizes.conv_len)))

        values = group * sizes.value_dim  # features of the values of a key head
        self.query, self.key = dense(sizes.key_dim), dense(sizes.key_dim)
        self.value, self.gate = dense(values), dense(values)
        self.rate, self.decay = dense(group), dense(group)
        self.query_conv, self.key_conv = conv(sizes.key_dim), conv(sizes.key_dim)
        self.value_conv = conv(values)
        ones, per_head = nnx.initializers.ones_init(), (heads * group,)
        make = named(ones, "heads")
        self.decay_bias = nnx.Param(make(rngs.params(), per_head))
        # The decay of a head is between about 1 and 1e-9 at the start of training.
        speeds = uniform(rngs.params(), per_head, minval=0.01, maxval=16.0)
        make = named(nnx.initializers.constant(jnp.log(speeds)), "heads")
        self.log_speed = nnx.Param(make(rngs.params(), per_head))
        self.norm = nnx.RMSNorm(
            sizes.value_dim,
            epsilon=config.norm_epsilon,
            scale_init=named(ones, "head_dim"),
            rngs=rngs,
        )
        # The scale is as for other outputs to the residual stream.
        out_init = normal(0.02 * (2 * config.num_layers) ** -0.5)
        ins = {"heads": heads, "head_dim": values}
        self.out = Dense(ins, embed, rngs=rngs, kernel_init=out_init)
        self.sizes = sizes

    def __call__(
        self,
        x: Array,
        start: Start,
        cache: DeltaCache | None,
        segments: Array | None = None,
        chunks: Array | None = None,
    ) -> tuple[Array, DeltaCache | None]:
        """Runs the layer for the tokens of ``x``, with positions from ``start``.

        A token at position 0 begins a document. Tokens with the segment 0 are padding,
        which does not change the memory. ``chunks`` is not used. Returns an array with
        the shape of ``x``, and the new cache or ``None``.
        """
        _check_sequence()
        positions = jnp.atleast_2d(positions_from(start, x.shape[1]))
        positions = jnp.broadcast_to(positions, x.shape[:2])
        layers = self.query, self.key, self.value, self.gate, self.rate, self.decay
        *inputs, gate, rate, decay = (
            constrain(y, *_HEADS) for y in project(x, *layers)
        )
        before = (None,) * 3 if cache is None else cache[0]
        kernels = (self.query_conv, self.key_conv, self.value_conv)
        found = [
            _convolve(y, kernel[...], earlier, positions)
            for y, kernel, earlier in zip(inputs, kernels, before, strict=True)
        ]
        query, key, value = (constrain(y, *_HEADS) for y, _ in found)
        log_decay, rate = self._factors(decay, rate, segments)
        out, state = gated_delta_rule(
            _unit(query) * self.sizes.key_dim**-0.5,
            _unit(key),
            self._grouped(value),
            log_decay,
            rate,
            positions == 0,
            None if cache is None else cache[1],
        )
        out = self.norm(out) * jax.nn.silu(self._grouped(gate).astype(out.dtype))
        out = constrain(out.reshape(gate.shape).astype(x.dtype), *_HEADS)
        if cache is None:
            return self.out(out), None
        last = [_last_inputs(y, self.sizes.conv_len, segments) for _, y in found]
        return self.out(out), ((last[0], last[1], last[2]), state)

    def make_cache(self, layers: int, batch_size: int, dtype: jnp.dtype) -> DeltaCache:
        """Returns an empty cache of these layers; the memory is in float32 or wider."""
        sizes, heads = self.sizes, self.sizes.num_key_heads
        values = sizes.group * sizes.value_dim

        def inputs(width: int) -> Array:
            shape = (layers, batch_size, sizes.conv_len - 1, heads, width)
            empty = jnp.zeros(shape, dtype)
            return constrain(empty, "layers", "batch", None, "heads", "head_dim")

        shape = (layers, batch_size, heads, sizes.group, sizes.key_dim, sizes.value_dim)
        memory = jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32))
        memory = constrain(memory, "layers", "batch", "heads", None, None, None)
        return (inputs(sizes.key_dim), inputs(sizes.key_dim), inputs(values)), memory

    def _factors(
        self, decay: Array, rate: Array, segments: Array | None
    ) -> tuple[Array, Array]:
        """Returns the logarithm of decays, and rates, (batch, seq, heads, group)."""
        wide = jnp.promote_types(decay.dtype, jnp.float32)
        shape = (1, 1, *decay.shape[2:])
        speed, bias = (
            x[...].astype(wide).reshape(shape)
            for x in (self.log_speed, self.decay_bias)
        )
        log_decay = -jnp.exp(speed) * jax.nn.softplus(decay.astype(wide) + bias)
        rate = jax.nn.sigmoid(rate.astype(wide))
        if segments is None:
            return log_decay, rate
        is_token = jnp.broadcast_to((segments != 0)[..., None, None], rate.shape)
        return jnp.where(is_token, log_decay, 0), jnp.where(is_token, rate, 0)

    def _grouped(self, x: Array) -> Array:
        """Splits the values of a key head: (batch, seq, heads, group, value_dim)."""
        return x.reshape(*x.shape[:3], self.sizes.group, self.sizes.value_dim)


def _check_sequence() -> None:
    """Checks that no strategy splits the sequence, over which the memory changes."""
    layout = active_layout()
    for axis in layout.sequence_axes if layout else ():
        if layout and (size := layout.mesh.shape[axis]) > 1:
            raise IndivisibleDimError(
                f"The mesh axis {axis!r} of size {size} splits the sequence, but the "
                "model has linear attention (GPTConfig.delta_net). The memory changes "
                "from token to token, so one device needs the whole sequence. Remove "
                "ContextParallel, and use FSDP, TensorParallel, ExpertParallel or "
                "Pipeline."
            )


def _unit(x: Array) -> Array:
    """Divides vectors by their norm, in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * jax.lax.rsqrt((wide**2).sum(-1, keepdims=True) + 1e-6)


def _convolve(
    x: Array, kernel: Array, before: Array | None, positions: Array
) -> tuple[Array, Array]:
    """Convolves each feature over the last tokens of its document, and applies SiLU.

    The result is computed as a sum of shifted arrays, because XLA's partitioner
    computes wrong gradients of grouped convolutions (docs/library-notes.md, "What
    the partitioner computes wrongly").

    Args:
        x: ``(batch, seq, heads, head_dim)``.
        kernel: ``(heads * head_dim, conv_len)``; the last column is the weight of the
            token itself.
        before: The inputs before the first token, ``(batch, conv_len - 1, heads,
            head_dim)``; ``None`` means zeros.
        positions: int ``(batch, seq)``, positions in the document.

    Returns:
        The result, with the shape and dtype of ``x``, and ``before`` followed by ``x``.
    """
    length, count = x.shape[1], kernel.shape[-1]
    if before is None:
        before = jnp.zeros((len(x), count - 1, *x.shape[2:]), x.dtype)
    inputs = jnp.concatenate([before, x], axis=1)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    factors = kernel.astype(wide).reshape(1, 1, *x.shape[2:], count)
    out = x * factors[..., -1]
    for back in range(1, count):
        first = count - 1 - back
        earlier = inputs[:, first : first + length] * factors[..., -1 - back]
        is_in = jnp.broadcast_to((positions >= back)[..., None, None], out.shape)
        out += jnp.where(is_in, earlier, 0)
    return jax.nn.silu(out).astype(x.dtype), inputs


def _last_inputs(inputs: Array, conv_len: int, segments: Array | None) -> Array:
    """Returns the inputs of the last tokens, (batch, conv_len - 1, heads, head_dim).

    ``inputs`` also has ``conv_len - 1`` entries before the first token. Padding may
    follow the tokens of a row.
    """
    size = conv_len - 1
    if segments is None:
        return inputs[:, inputs.shape[1] - size :]
    counts = jnp.sum(segments != 0, axis=1)
    cut = partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=0)
    return jax.vmap(cut)(inputs, counts)
