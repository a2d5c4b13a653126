"""A transformer decoder with variants for the language models in `models.families`.

The model is written for one device. Every dim of a parameter or activation has a name,
and a strategy places the dim by this name. `GPTConfig.sizes` has the size for each
name.

References:
    [1] Radford et al., "Language Models are Unsupervised Multitask Learners", 2019,
    section 2.3 (pre-norm, residual outputs scaled by depth).
    [2] Chowdhery et al., "PaLM", 2022, section 2, https://arxiv.org/abs/2204.02311
    [3] Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019,
    https://arxiv.org/abs/1910.07467
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.errors import suggests_names
from nnx_parallel.layers import (
    Dense,
    Embed,
    MoE,
    Stack,
    compute_gradient_once,
    linear_cross_entropy,
    name_products,
    named,
    project,
    segment_positions,
)
from nnx_parallel.layers.activations import ACTIVATIONS
from nnx_parallel.layers.attention import attention, chunk_segments
from nnx_parallel.layers.experts.moe import warn_of_lost_losses
from nnx_parallel.layers.stack.stack import ByBlock
from nnx_parallel.metrics import Mean
from nnx_parallel.models.cache import (
    Cache,
    Caches,
    DeltaCache,
    Start,
    last_token,
    positions_from,
    write_cache,
)
from nnx_parallel.models.gpt_config import FAMILIES, GPTConfig
from nnx_parallel.models.latent_attention import LatentAttention
from nnx_parallel.models.linear_attention import LinearAttention
from nnx_parallel.models.rotary import YarnScaling, frequencies, rotate
from nnx_parallel.sharding import constrain
from nnx_parallel.weights.family import Published, period_of

Stream = jax.Array | tuple[jax.Array, jax.Array]
"""Activations (batch, seq, embed), and with expert losses a pair: also (batch, seq)."""
Rotation = tuple[jax.Array, float | jax.Array]
"""The frequencies of a layer's rotation, and the factor of rotated features."""


def _dense(
    config: GPTConfig,
    in_names: str,
    out_names: str,
    *,
    rngs: nnx.Rngs,
    is_residual: bool = False,
    use_bias: bool | None = None,
) -> Dense:
    # Each block adds two outputs to the residual stream. With this scale, the variance
    # of the stream does not grow with the number of layers.
    scale = (2 * config.num_layers) ** -0.5 if is_residual else 1.0
    return Dense(
        {name: config.sizes[name] for name in in_names.split()},
        {name: config.sizes[name] for name in out_names.split()},
        rngs=rngs,
        use_bias=config.use_bias if use_bias is None else use_bias,
        kernel_init=nnx.initializers.normal(0.02 * scale),
    )


class RMSNorm(nnx.Module):
    """An RMSNorm [3] over the last dims, which have names.

    If it is zero-centered, the scale is 1 + parameter, so that weight decay pulls it to
    1.
    """

    def __init__(
        self, dims: Mapping[str, int], epsilon: float, *, is_zero_centered: bool
    ) -> None:
        inits = nnx.initializers
        init = inits.zeros_init() if is_zero_centered else inits.ones_init()
        sizes = tuple(dims.values())
        self.scale = nnx.Param(named(init, *dims)(jax.random.key(0), sizes))
        self.epsilon = epsilon
        self.is_zero_centered = is_zero_centered

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises (..., *dims) in float32 or wider; returns the same shape."""
        scale = self.scale[...]
        normed = _normalise(x, tuple(range(-scale.ndim, 0)), self.epsilon)
        scale = scale.astype(normed.dtype)
        scale = 1 + scale if self.is_zero_centered else scale
        return (normed * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)


def _normalise(x: jax.Array, axes: tuple[int, ...], epsilon: float) -> jax.Array:
    """Divides by the root of the mean square, in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    variance = (wide**2).mean(axes, keepdims=True)
    return wide * jax.lax.rsqrt(variance + epsilon)


Norm = nnx.LayerNorm | nnx.RMSNorm | RMSNorm


def _rms_norm(config: GPTConfig, *names: str, rngs: nnx.Rngs) -> Norm:
    """Returns an RMSNorm [3] over the dims that have these names."""
    dims, epsilon = {n: config.sizes[n] for n in names}, config.norm_epsilon
    if config.zero_centered_norm or names[1:]:
        return RMSNorm(dims, epsilon, is_zero_centered=config.zero_centered_norm)
    scale_init = named(nnx.initializers.ones_init(), *names)
    (size,) = dims.values()
    return nnx.RMSNorm(size, epsilon=epsilon, scale_init=scale_init, rngs=rngs)


def _make_norm(config: GPTConfig, *, rngs: nnx.Rngs) -> Norm:
    """Returns a norm for the residual stream of a model."""
    # All norms compute in float32, for any dtypes of x and the scale.
    if config.norm == "rms":
        return _rms_norm(config, "embed", rngs=rngs)
    return nnx.LayerNorm(
        config.embed_dim,
        epsilon=config.norm_epsilon,
        use_bias=config.use_bias,
        scale_init=named(nnx.initializers.ones_init(), "embed"),
        bias_init=named(nnx.initializers.zeros_init(), "embed"),
        rngs=rngs,
    )


def _dropout(config: GPTConfig, *, rngs: nnx.Rngs) -> nnx.Dropout:
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)


class Attention(nnx.Module):
    """Causal self-attention, with or without a cache of earlier keys and values."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        dense = partial(_dense, config, rngs=rngs)
        self.query = dense("embed", "heads head_dim", use_bias=config.qkv_bias)
        self.key = dense("embed", "kv_heads head_dim", use_bias=config.qkv_bias)
        self.value = dense("embed", "kv_heads head_dim", use_bias=config.qkv_bias)
        gated = config.output_gate
        self.gate = dense("embed", "heads head_dim") if gated else None
        self.out = dense("heads head_dim", "embed", is_residual=True)
        norm = partial(_rms_norm, config, rngs=rngs)
        wide = config.wide_qk_norm
        query_dims = ("heads", "head_dim") if wide else ("head_dim",)
        key_dims = ("kv_heads", "head_dim") if wide else ("head_dim",)
        self.query_norm = norm(*query_dims) if config.qk_norm else None
        self.key_norm = norm(*key_dims) if config.qk_norm else None
        zeros = named(nnx.initializers.zeros_init(), "heads")
        sinks = zeros(jax.random.key(0), (config.num_heads,))
        self.sinks = nnx.Param(sinks) if config.sinks else None
        # Flags are variables, because all layers of a stack run the same program.
        self.is_local = nnx.Variable(jnp.array(False)) if config.is_mixed else None
        self.is_rotated = (
            None if all(config.rotated) else nnx.Variable(jnp.array(False))
        )
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        start: Start,
        cache: Cache | None,
        segments: jax.Array | None = None,
        chunks: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Computes attention for the tokens of ``x``, with positions from ``start``.

        Local layers use ``chunks`` instead of ``segments``, unless ``chunks`` is
        ``None``. Returns an array with the shape of ``x``, and the new cache or
        ``None``.
        """
        positions = positions_from(start, x.shape[1])
        # (batch, seq, embed) -> (batch, seq, heads or kv_heads, head_dim)
        gates = [] if self.gate is None else [self.gate]
        layers = [self.query, self.key, self.value, *gates]
        query, key, value, *gates = project(x, *layers)
        query = constrain(query, "batch", "seq", "heads", "head_dim")
        key = constrain(key, "batch", "seq", "kv_heads", "head_dim")
        value = constrain(value, "batch", "seq", "kv_heads", "head_dim")
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.config.positions == "rope":
            length = x.shape[1] if cache is None else cache[0].shape[1]
            query, key = self._rotate(query, key, positions, length)
        if cache is None:
            attended = self._attend(query, key, value, segments, chunks)
            return self._output(attended, gates), None
        keys, values = write_cache(cache, key, value, start)
        positions = jnp.atleast_2d(positions)  # (1 or batch, seq)
        seen = self._seen(
            jnp.arange(keys.shape[1])[None, None, :], positions[..., None]
        )
        mask = seen[:, None]  # (1 or batch, 1, seq, total_len)
        attended = self._attention(query, keys, values, mask=mask)
        return self._output(attended, gates), (keys, values)

    def _output(self, attended: jax.Array, gates: list[jax.Array]) -> jax.Array:
        """Applies the output gate, if any, and maps heads to (batch, seq, embed)."""
        if gates:
            gate = constrain(gates[0], "batch", "seq", "heads", "head_dim")
            attended = attended * jax.nn.sigmoid(gate)
        return self.out(attended)

    def _rotate(
        self, query: jax.Array, key: jax.Array, positions: jax.Array, length: int
    ) -> tuple[jax.Array, jax.Array]:
        """Rotates queries and keys, and makes the queries of late positions larger."""
        config, scaling = self.config, self.config.rope_scaling
        speeds, amplitude = self._rotation(length)
        query, key = (rotate(x, positions, speeds, amplitude) for x in (query, key))
        if isinstance(scaling, YarnScaling) and scaling.growth:
            query = scaling.grow(query, positions)
        is_rotated = True if self.is_rotated is None else self.is_rotated[...]
        if config.late_qk_norm:
            normed = (_normalise(x, (-1,), config.norm_epsilon) for x in (query, key))
            pairs = zip(normed, (query, key), strict=True)
            query, key = (jnp.where(is_rotated, n.astype(x.dtype), x) for n, x in pairs)
        if config.query_growth is not None:
            grown = config.query_growth(query, positions)
            query = jnp.where(is_rotated, query, grown)
        return query, key

    def _rotation(self, length: int) -> Rotation:
        """Returns the frequencies (rotary_dim / 2,) and the amplitude of this layer.

        ``length`` is the length of the sequence, or of the cache.
        """
        config, scaling = self.config, self.config.rope_scaling
        dim = config.rotary_dim or config.sizes["head_dim"]
        amplitude = 1.0 if scaling is None else scaling.amplitude
        speeds = frequencies(dim, config.rope_theta, scaling, length)
        found: Rotation = speeds, amplitude
        if self.is_local is not None and config.local_rope_theta is not None:
            local = frequencies(dim, config.local_rope_theta)
            found = _choose(self.is_local[...], (local, 1.0), found)
        if self.is_rotated is not None:  # a frequency of 0 does not rotate
            still = jnp.zeros_like(found[0]), 1.0
            found = _choose(self.is_rotated[...], found, still)
        return found

    def _attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: jax.Array | None,
        chunks: jax.Array | None,
    ) -> jax.Array:
        """Computes causal attention, limited to a window or chunk in local layers."""

        def attend(rules: dict[str, Any], *qkv: jax.Array) -> jax.Array:
            return self._attention(*qkv, causal=True, **rules)

        near = segments if chunks is None else chunks
        local = partial(attend, {"segments": near, "window": self.config.window})
        whole = partial(attend, {"segments": segments})
        if self.is_local is not None:  # each layer runs one of two branches
            return jax.lax.cond(self.is_local[...], local, whole, query, key, value)
        run = local if self.config.kinds[0] == "local" else whole
        return run(query, key, value)

    def _attention(self, *qkv: jax.Array, **rules: Any) -> jax.Array:
        config = self.config
        return attention(
            *qkv,
            implementation=config.attention,
            softcap=config.softcap,
            scale=config.attention_scale,
            sinks=None if self.sinks is None else self.sinks[...],
            **rules,
        )

    def _seen(self, keys: jax.Array, queries: jax.Array) -> jax.Array:
        """Returns bool (1 or batch, seq, total_len): True where a query sees a key.

        ``keys`` (1, 1, total_len) and ``queries`` (1 or batch, seq, 1) are positions.
        """
        seen, (window, chunk) = keys <= queries, (self.config.window, self.config.chunk)
        if window is not None:
            near = seen & (keys >= queries - window)
        elif chunk is not None:
            near = seen & (keys // chunk == queries // chunk)
        else:
            return seen
        if self.is_local is not None:
            return jnp.where(self.is_local[...], near, seen)
        return near if self.config.kinds[0] == "local" else seen


def _choose(flag: jax.Array, yes: Rotation, no: Rotation) -> Rotation:
    speeds = jnp.where(flag, yes[0], no[0])
    if isinstance(yes[1], float) and yes[1] == no[1]:
        return speeds, yes[1]
    return speeds, jnp.where(flag, yes[1], no[1])


class MLP(nnx.Module):
    """An MLP, with a gate unless the activation is GELU."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        dense = partial(_dense, config, rngs=rngs)
        self.up = dense("embed", "mlp")
        self.gate = None if config.activation == "gelu" else dense("embed", "mlp")
        self.down = dense("mlp", "embed", is_residual=True)
        self.activate: Callable[..., jax.Array] = ACTIVATIONS[config.activation]
        if config.exact_gelu:
            self.activate = partial(jax.nn.gelu, approximate=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, seq, embed) to the same shape; hidden is (batch, seq, mlp)."""
        layers = [self.up] if self.gate is None else [self.up, self.gate]
        up, *gate = name_products(project(x, *layers))
        return self.down(self.activate(compute_gradient_once(up), *gate))


def _split(x: Stream) -> tuple[jax.Array, jax.Array | None]:
    return x if isinstance(x, tuple) else (x, None)


def _make_mlp(config: GPTConfig, *, rngs: nnx.Rngs) -> MLP | MoE:
    if config.experts is None:
        return MLP(config, rngs=rngs)
    out = nnx.initializers.normal(0.02 * (2 * config.num_layers) ** -0.5)
    return MoE(
        config.embed_dim,
        config.experts,
        rngs=rngs,
        activation=config.activation,
        kernel_init=nnx.initializers.normal(0.02),
        out_init=out,
    )


class Block(nnx.Module):
    """Attention and an MLP. Their outputs are added to the residual stream.

    In a sequential block, the MLP runs after attention. Attention and MLP each have a
    norm before them, if the config has ``pre_norms``, and a norm after them, if it has
    ``post_norms``. In a parallel block, attention and MLP have the same input, which is
    the output of one norm [2], or of two norms with ``separate_norms``.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        pre, self.is_parallel = config.pre_norms, config.block == "parallel"
        shares_norm = self.is_parallel and not config.separate_norms
        self.attention_norm = _make_norm(config, rngs=rngs) if pre else None
        kind: Any = Attention if config.latents is None else LatentAttention
        kind = kind if config.delta_net is None else LinearAttention
        self.attention = kind(config, rngs=rngs)
        has_norm = pre and not shares_norm
        self.mlp_norm = _make_norm(config, rngs=rngs) if has_norm else None
        self.mlp = _make_mlp(config, rngs=rngs)
        post = config.post_norms
        self.attention_post_norm = _make_norm(config, rngs=rngs) if post else None
        self.mlp_post_norm = _make_norm(config, rngs=rngs) if post else None
        self.dropout = _dropout(config, rngs=rngs)
        multipliers = config.multipliers
        self.multiplier = 1.0 if multipliers is None else multipliers.residual

    def __call__(
        self,
        stream: Stream,
        start: Start = 0,
        cache: Cache | DeltaCache | None = None,
        segments: jax.Array | None = None,
        chunks: jax.Array | None = None,
    ) -> Stream | tuple[Stream, Cache | DeltaCache | None]:
        """Maps (batch, seq, embed) to the same shape.

        If a cache is given, the block also returns the cache, with the keys and values
        of ``stream`` added.
        """
        x, losses = _split(stream)
        normed = x if self.attention_norm is None else self.attention_norm(x)
        attended, new_cache = self.attention(normed, start, cache, segments, chunks)
        attended = checkpoint_name(attended, "attention_out")
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        given, x = x, self._add(x, attended)
        given = given if self.is_parallel else x
        if self.mlp_norm is not None:
            # The gradient of this norm's output is the sum of the gradients from up and
            # gate. The gradients of the norm's input and scale both need this sum, so
            # it is computed only once.
            normed = compute_gradient_once(self.mlp_norm(given))
        elif self.attention_norm is None:
            normed = given
        if isinstance(self.mlp, MoE):
            hidden, own = self.mlp(
                normed, counts_tokens=cache is None, segments=segments
            )
            losses = None if losses is None else losses + own
        else:
            hidden = self.mlp(normed)
        if self.mlp_post_norm is not None:
            hidden = self.mlp_post_norm(hidden)
        x = self._add(x, hidden)
        out = x if losses is None else (x, losses)
        return out if cache is None else (out, new_cache)

    def _add(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """Adds the output of attention or of the MLP to the residual stream."""
        out = self.dropout(out)
        out = out if self.multiplier == 1.0 else out * self.multiplier
        return constrain(x + out, "batch", "seq", "embed")


def _stack(config: GPTConfig, layers: range, *, rngs: nnx.Rngs) -> Stack:
    """Returns a stack with one block for each of these layers."""
    parts = config.layer_parts
    kinds = [parts[i] for i in layers]
    period = period_of(kinds)
    configs = [config.with_parts(*kind) for kind in kinds[:period]]
    makers = [partial(Block, each) for each in configs]
    stack = Stack(makers, len(layers) // period, rngs=rngs, remat=config.remat)
    block: Any = stack.layer
    for first, each in zip(layers, block if makers[1:] else [block], strict=False):
        own = range(first, layers.stop, period)
        if config.is_mixed:
            is_local = [config.kinds[i] == "local" for i in own]
            each.attention.is_local.set_value(jnp.array(is_local))
        if not all(config.rotated):
            is_rotated = [config.rotated[i] for i in own]
            each.attention.is_rotated.set_value(jnp.array(is_rotated))
    return stack


class GPT(Published):
    """A transformer decoder, which maps tokens to logits of the next token.

    Activations have the dtype of the parameters. Norms, softmax and rotation are
    computed in float32.

    Args:
        config: Shape of the model.
        rngs: Keys for parameters and dropout.

    Example:
        >>> model = GPT(GPTConfig.tiny(), rngs=nnx.Rngs(0))
        >>> nnx.jit(model)(jnp.zeros((2, 16), jnp.int32)).shape
        (2, 16, 256)
    """

    families = FAMILIES
    config_type = GPTConfig

    @suggests_names
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        vocab, embed = config.vocab_size, config.embed_dim
        self.config = config
        self.embed = Embed(vocab, embed, rngs=rngs)
        self.positions = (
            Embed(config.seq_len, embed, rngs=rngs, vocab_name="seq")
            if config.positions == "learned"
            else None
        )
        count = config.dense_layers
        self.dense_blocks = _stack(config, range(count), rngs=rngs) if count else None
        self.blocks = _stack(config, range(count, config.num_layers), rngs=rngs)
        self.norm = _make_norm(config, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        self.head = (
            None
            if config.tied
            else Dense({"embed": embed}, {"vocab": vocab}, rngs=rngs, kernel_init=init)
        )
        # Dropout comes last, so that parameters have the same initial values with and
        # without dropout.
        self.dropout = _dropout(config, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """Returns the logits of each next token, ``(batch, seq, vocab)``.

        Args:
            tokens: int ``(batch, seq)``.
            segments: int ``(batch, seq)``, the id of each token's document; 0 marks
                padding. The logits of a document do not depend on the other documents
                in the same row.

        Raises:
            ValueError: If the sequence is longer than the learned positions.
        """
        return self._logits(self.hidden(tokens, segments))

    def hidden(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Returns the input of the head, ``(batch, seq, embed)``, for int tokens."""
        hidden, losses = self.hidden_and_losses(tokens, segments)
        if losses is not None:
            mixtures = (m for _, m in nnx.iter_modules(self) if isinstance(m, MoE))
            warn_of_lost_losses(next(mixtures))
        return hidden

    def hidden_and_losses(
        self, tokens: jax.Array, segments: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the input of the head, and the losses of experts or ``None``.

        The losses, ``(batch, seq)``, are summed over layers.
        """
        experts = self.config.experts
        # Positions are computed only once, and passed to all layers and pipeline
        # stages.
        positions = 0 if segments is None else segment_positions(segments)
        x = self._embed(tokens, positions)
        if experts is not None and experts.has_losses:
            zeros = constrain(jnp.zeros(tokens.shape, jnp.float32), "batch", "seq")
            x = (x, zeros)
        args: dict[str, Any] = {}
        if segments is not None:
            args = {"start": positions, "segments": segments}
        if (chunk := self.config.chunk) is not None:
            # Layers see the chunks as documents, so every implementation supports them.
            args["chunks"] = chunk_segments(tokens.shape, chunk, segments)
        for stack in self._stacks:
            x = stack(x, **args)
        x, losses = _split(x)
        return self._normed(x), losses

    @property
    def head_kernel(self) -> tuple[jax.Array, int]:
        """The head's parameter, and the index of its dim ``vocab``."""
        if self.head is None:
            return self.embed.embedding[...], 0
        return self.head.kernel[...], 1

    def decode(
        self,
        tokens: jax.Array,
        start: int | jax.Array,
        cache: Caches,
        *,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches]:
        """Returns the logits of the token that follows ``tokens``.

        Args:
            tokens: int ``(batch, seq)``, the tokens that follow the tokens in the
                cache.
            start: Number of tokens in the cache, which is the position of the first of
                ``tokens``. If it differs between rows, it is int ``(batch,)``, and each
                row has one token.
            cache: Keys and values of the earlier tokens, or memories of linear
                attention; `make_cache` makes an empty cache.
            lengths: int ``(batch,)``, the number of tokens of each row, without the
                padding that follows; ``None`` if there is no padding.

        Returns:
            Logits ``(batch, vocab)``, and the cache with ``tokens`` added.
        """
        x, caches = self._embed(tokens, start), []
        args: dict[str, Any] = {}
        if lengths is not None and self.config.delta_net is not None:
            is_token = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
            # Padding must not change memories.
            args = {"segments": is_token.astype(jnp.int32)}
        for stack, own in zip(self._stacks, cache, strict=True):
            x, own = stack(x, start, scanned=own, **args)
            caches.append(own)
        last = last_token(x, lengths)
        return self._logits(self._normed(last))[:, 0], tuple(caches)

    def make_cache(self, batch_size: int, total_len: int) -> Caches:
        """Returns an empty cache for each stack.

        The cache of attention is a pair of arrays ``(layers, batch, total_len,
        kv_heads, features)``; the last two sizes are `GPTConfig.cache_dims`.
        `LinearAttention.make_cache` describes the cache of linear attention. If blocks
        of several kinds alternate, a stack has a `ByBlock` with a cache for each block
        of a group. A model with dense first layers has two stacks.

        Raises:
            ValueError: If the model has fewer learned positions than ``total_len``.
        """
        self.config.check_length(total_len)
        dtype = self.embed.embedding.get_value().dtype

        def empty(layers: int, dims: tuple[int, int]) -> jax.Array:
            zeros = jnp.zeros((layers, batch_size, total_len, *dims), dtype)
            return constrain(zeros, "layers", "batch", None, "kv_heads", "head_dim")

        def cache_of(block: Block, layers: int) -> Cache | DeltaCache:
            if isinstance(block.attention, LinearAttention):
                return block.attention.make_cache(layers, batch_size, dtype)
            first, second = self.config.cache_dims
            return empty(layers, first), empty(layers, second)

        caches = []
        for stack in self._stacks:
            layer: Any = stack.layer
            blocks = layer if stack.period > 1 else [layer]
            own = tuple(cache_of(block, stack.num_layers) for block in blocks)
            caches.append(ByBlock(own) if stack.period > 1 else own[0])
        return tuple(caches)

    @property
    def _stacks(self) -> list[Stack]:
        """Returns the stacks that hold all layers, in order."""
        return [s for s in (self.dense_blocks, self.blocks) if s is not None]

    def _embed(self, tokens: jax.Array, start: Start) -> jax.Array:
        self.config.check_length(tokens.shape[1])
        x = self.embed(tokens)  # (batch, seq, embed)
        if self.config.scale_embedding:
            x = x * jnp.asarray(self.config.embed_dim**0.5, x.dtype)
        if self.config.multipliers is not None:
            x = x * self.config.multipliers.embedding
        if self.positions is not None:
            positions = positions_from(start, tokens.shape[1])
            positions = positions if positions.ndim > 1 else positions[None, :]
            x = x + self.positions(positions)  # + (1 or batch, seq, embed)
        return constrain(self.dropout(x), "batch", "seq", "embed")

    def _normed(self, x: jax.Array) -> jax.Array:
        """Returns the input of the head for the output of the last layer."""
        x, multipliers = self.norm(x), self.config.multipliers
        return x if multipliers is None else x / multipliers.logit_divisor

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.head is None:
            logits = self.embed.attend(x)
        else:
            logits = constrain(self.head(x), "batch", "seq", "vocab")
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def next_token_loss(model: GPT, batch: jax.Array | Mapping[str, jax.Array]) -> Mean:
    """Returns the cross-entropy of each token given the tokens before it.

    Logits are computed for one chunk of tokens at a time, so that the logits of all
    tokens never exist together.

    Args:
        model: The model.
        batch: int ``(batch, seq + 1)``, or a mapping that holds this array as
            ``tokens``. The first token of a row is not predicted. The mapping may also
            have ``weights`` of the same shape: a token of weight 0 does not count in
            the loss, but later tokens still see it. For packed documents, the mapping
            has ``segments``, int of the same shape, as for `GPT`. Then no token is
            predicted from another document, and padding is not predicted.

    Returns:
        The loss, a `Mean` in nats per predicted token. It includes the losses of
        experts.

    Raises:
        ValueError: If the shape of tokens is not (batch, seq + 1), or if weights or
            segments do not have the same shape as tokens.

    Example:
        >>> model = GPT(GPTConfig.tiny(), rngs=nnx.Rngs(0))
        >>> loss = nnx.jit(next_token_loss)(model, jnp.zeros((2, 17), jnp.int32))
        >>> float(loss.weight)
        32.0
    """
    if not isinstance(batch, Mapping):
        batch = {"tokens": batch}
    tokens, weights = batch["tokens"], batch.get("weights")
    segments = batch.get("segments")
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(
            f"Tokens have shape {tokens.shape}; they must be (batch, seq + 1), the "
            "input and one more label, with seq at least 1."
        )
    for name, of_each in (("Weights", weights), ("Segments", segments)):
        if of_each is not None and of_each.shape != tokens.shape:
            raise ValueError(
                f"{name} have shape {of_each.shape}, but tokens have shape "
                f"{tokens.shape}; the shapes must be equal."
            )
    weights, seen = None if weights is None else weights[:, 1:], None
    if segments is not None:
        is_next = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        # The last token of a document predicts no token, and no later token sees it, so
        # it becomes padding. The last token of a row is not an input at all. So the
        # loss of a document does not depend on its place in the row.
        seen = jnp.where(is_next, segments[:, :-1], 0)
        weights = is_next if weights is None else jnp.where(is_next, weights, 0)
    hidden, losses = model.hidden_and_losses(tokens[:, :-1], seen)
    kernel, vocab_dim = model.head_kernel
    loss = linear_cross_entropy(
        hidden,
        kernel,
        tokens[:, 1:],
        weights,
        vocab_dim=vocab_dim,
        z_loss=model.config.z_loss,
        softcap=model.config.logit_softcap,
    )
    if losses is None:
        return loss
    if weights is None:
        return loss + Mean(jnp.sum(losses), float(losses.size))
    weights = weights.astype(losses.dtype)
    return loss + Mean(jnp.sum(losses * weights), jnp.sum(weights))
