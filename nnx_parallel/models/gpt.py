"""A transformer decoder in the shapes of GPT-2 and Llama 3, and its loss.

Written for one device. Every dim of a parameter or activation has a name, by which a
strategy places it; the sizes are those of `GPTConfig.sizes`.

References:
    [1] Radford et al., "Language Models are Unsupervised Multitask Learners", 2019,
    section 2.3 (pre-norm, residual outputs scaled by depth).
    [2] Su et al., "RoFormer", 2021, section 3.2, https://arxiv.org/abs/2104.09864
    [3] Chowdhery et al., "PaLM", 2022, section 2, https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.layers import (
    Dense,
    Embed,
    Implementation,
    Stack,
    attention,
    linear_cross_entropy,
    named,
    segment_positions,
)
from nnx_parallel.metrics import Mean
from nnx_parallel.models.gpt_config import GPTConfig
from nnx_parallel.sharding import constrain

Start = int | jax.Array
"""Position of the first token, the others follow; or int (batch, seq), of each."""
Cache = tuple[jax.Array, jax.Array]
"""Keys and values so far, each (batch, total_len, kv_heads, head_dim)."""


def _dense(
    config: GPTConfig,
    in_names: str,
    out_names: str,
    *,
    rngs: nnx.Rngs,
    is_residual: bool = False,
) -> Dense:
    # 2 outputs per block add to the residual stream: its variance stays put with depth.
    scale = (2 * config.num_layers) ** -0.5 if is_residual else 1.0
    return Dense(
        {name: config.sizes[name] for name in in_names.split()},
        {name: config.sizes[name] for name in out_names.split()},
        rngs=rngs,
        use_bias=config.use_bias,
        kernel_init=nnx.initializers.normal(0.02 * scale),
    )


def _norm(config: GPTConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    # Both take their statistics and normalise in float32, whatever x and scale are.
    scale_init = named(nnx.initializers.ones_init(), "embed")
    if config.norm == "rms":
        return nnx.RMSNorm(
            config.embed_dim, epsilon=1e-5, scale_init=scale_init, rngs=rngs
        )
    return nnx.LayerNorm(
        config.embed_dim,
        epsilon=1e-5,
        use_bias=config.use_bias,
        scale_init=scale_init,
        bias_init=named(nnx.initializers.zeros_init(), "embed"),
        rngs=rngs,
    )


def _dropout(config: GPTConfig, *, rngs: nnx.Rngs) -> nnx.Dropout:
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding: scores then depend on distances only [2].

    Feature i and feature i + head_dim / 2 are a point in the plane, which turns by
    ``position * theta ** (-2 i / head_dim)``.

    Args:
        x: ``(batch, seq, heads, head_dim)``, queries or keys.
        positions: int ``(seq,)``, or ``(batch, seq)``.
        theta: Base of the wavelengths.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half) / half)  # (half,)
    of_all = (None,) * positions.ndim
    angles = positions[..., None] * frequencies[of_all]  # (seq, half), or of a batch
    dims = (0, 2) if positions.ndim == 1 else (2,)
    cos = jnp.expand_dims(jnp.cos(angles), dims)  # (1 or batch, seq, 1, half)
    sin = jnp.expand_dims(jnp.sin(angles), dims)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _positions(start: Start, length: int) -> jax.Array:
    """Positions of tokens: int (seq,) or (batch, seq)."""
    if isinstance(start, jax.Array) and start.ndim:
        return start
    return start + jnp.arange(length)


class Attention(nnx.Module):
    """Causal self-attention, with or without a cache of earlier keys and values."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        dense = partial(_dense, config, rngs=rngs)
        self.query = dense("embed", "heads head_dim")
        self.key = dense("embed", "kv_heads head_dim")
        self.value = dense("embed", "kv_heads head_dim")
        self.out = dense("heads head_dim", "embed", is_residual=True)
        self.implementation: Implementation | None = config.attention
        self.window, self.softcap = config.window, config.softcap
        self.rope_theta = config.rope_theta if config.positions == "rope" else None

    def __call__(
        self,
        x: jax.Array,
        start: Start,
        cache: Cache | None,
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Attends from ``x``, whose tokens have positions from ``start``."""
        positions = _positions(start, x.shape[1])
        # (batch, seq, embed) -> (batch, seq, heads or kv_heads, head_dim)
        query = constrain(self.query(x), "batch", "seq", "heads", "head_dim")
        key = constrain(self.key(x), "batch", "seq", "kv_heads", "head_dim")
        value = constrain(self.value(x), "batch", "seq", "kv_heads", "head_dim")
        if self.rope_theta is not None:
            query = rotate(query, positions, self.rope_theta)
            key = rotate(key, positions, self.rope_theta)
        attend = partial(
            attention, query, implementation=self.implementation, softcap=self.softcap
        )
        if cache is None:
            rules: dict[str, Any] = {"segments": segments, "window": self.window}
            return self.out(attend(key, value, causal=True, **rules)), None
        keys, values = _write(cache[0], key, start), _write(cache[1], value, start)
        seen = jnp.arange(keys.shape[1])[None, :] <= positions[:, None]
        if self.window is not None:
            first = positions[:, None] - self.window
            seen &= jnp.arange(keys.shape[1])[None, :] >= first
        mask = seen[None, None]  # (1, 1, seq, total_len)
        return self.out(attend(keys, values, mask=mask)), (keys, values)


def _write(cache: jax.Array, new: jax.Array, start: int | jax.Array) -> jax.Array:
    cache = jax.lax.dynamic_update_slice_in_dim(cache, new, start, axis=1)
    return constrain(cache, "batch", None, "kv_heads", "head_dim")


class MLP(nnx.Module):
    """GELU, or SwiGLU, which gates the hidden layer."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        dense = partial(_dense, config, rngs=rngs)
        self.up = dense("embed", "mlp")
        self.gate = dense("embed", "mlp") if config.activation == "swiglu" else None
        self.down = dense("mlp", "embed", is_residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, seq, embed) to the same, through (batch, seq, mlp)."""
        hidden = constrain(self.up(x), "batch", "seq", "mlp")
        if self.gate is None:
            return self.down(jax.nn.gelu(hidden))
        gate = constrain(self.gate(x), "batch", "seq", "mlp")
        return self.down(jax.nn.silu(gate) * hidden)


class Block(nnx.Module):
    """Attention and MLP, added to the residual stream.

    Each behind a norm of its own, one after the other; or both from one norm [3].
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        is_parallel = config.block == "parallel"
        self.mlp_norm = None if is_parallel else _norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = _dropout(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        start: Start = 0,
        cache: Cache | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, Cache | None]:
        """(batch, seq, embed) to the same; given a cache, returns it with x added."""
        normed = self.attention_norm(x)
        attended, new_cache = self.attention(normed, start, cache, segments)
        x = constrain(x + self.dropout(attended), "batch", "seq", "embed")
        if self.mlp_norm is not None:
            normed = self.mlp_norm(x)
        x = x + self.dropout(self.mlp(normed))
        x = constrain(x, "batch", "seq", "embed")
        return x if cache is None else (x, new_cache)


class GPT(nnx.Module):
    """A transformer decoder: tokens to logits of the next token.

    Activations have the dtype of the parameters; norms, softmax and rotation are
    computed in float32.

    Args:
        config: Its shape.
        rngs: Keys of parameters and dropout.

    Example:
        >>> model = GPT(GPTConfig.tiny(), rngs=nnx.Rngs(0))
        >>> nnx.jit(model)(jnp.zeros((2, 16), jnp.int32)).shape
        (2, 16, 256)
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        vocab, embed = config.vocab_size, config.embed_dim
        self.config = config
        self.embed = Embed(vocab, embed, rngs=rngs)
        self.positions = (
            Embed(config.seq_len, embed, rngs=rngs, vocab_name="seq")
            if config.positions == "learned"
            else None
        )
        self.blocks = Stack(
            lambda rngs: Block(config, rngs=rngs),
            config.num_layers,
            rngs=rngs,
            remat=config.remat,
        )
        self.norm = _norm(config, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        self.head = (
            None
            if config.tied
            else Dense({"embed": embed}, {"vocab": vocab}, rngs=rngs, kernel_init=init)
        )
        # Last, so that parameters start the same with dropout and without.
        self.dropout = _dropout(config, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """Logits of the token after each: int (batch, seq) to (batch, seq, vocab).

        Args:
            tokens: int ``(batch, seq)``.
            segments: int ``(batch, seq)``, the document of each token; 0 is padding. A
                document has the logits that it has alone in a row.

        Raises:
            ValueError: If learned positions end before the sequence.
        """
        return self._logits(self.hidden(tokens, segments))

    def hidden(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Inputs of the head: int (batch, seq) to (batch, seq, embed)."""
        if segments is None:
            return self.norm(self.blocks(self._embed(tokens, 0)))
        # Once, here: each layer and each stage of a pipeline takes them as they are.
        positions = segment_positions(segments)
        x = self._embed(tokens, positions)
        return self.norm(self.blocks(x, positions, segments=segments))

    @property
    def head_kernel(self) -> tuple[jax.Array, int]:
        """The head's parameter, and which of its dims is ``vocab``."""
        if self.head is None:
            return self.embed.embedding[...], 0
        return self.head.kernel[...], 1

    def decode(
        self, tokens: jax.Array, start: int | jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Logits after the last of ``tokens``, which follow what the cache holds.

        Args:
            tokens: int ``(batch, seq)``.
            start: Position of the first of them.
            cache: Keys and values of the ``start`` tokens before, from `make_cache`.

        Returns:
            Logits ``(batch, vocab)`` and the cache with ``tokens`` in it.
        """
        x, cache = self.blocks(self._embed(tokens, start), start, scanned=cache)
        return self._logits(self.norm(x[:, -1:]))[:, 0], cache

    def make_cache(self, batch_size: int, total_len: int) -> Cache:
        """An empty cache: (layers, batch, total_len, kv_heads, head_dim), twice."""
        sizes = self.config.sizes
        shape = (batch_size, total_len, sizes["kv_heads"], sizes["head_dim"])
        dtype = self.embed.embedding.get_value().dtype
        empty = jnp.zeros((self.config.num_layers, *shape), dtype)
        empty = constrain(empty, "layers", "batch", None, "kv_heads", "head_dim")
        return empty, empty

    def _embed(self, tokens: jax.Array, start: Start) -> jax.Array:
        self.config.check_length(tokens.shape[1])
        x = self.embed(tokens)  # (batch, seq, embed)
        if self.positions is not None:
            positions = _positions(start, tokens.shape[1])
            positions = positions if positions.ndim > 1 else positions[None, :]
            x = x + self.positions(positions)  # + (1 or batch, seq, embed)
        return constrain(self.dropout(x), "batch", "seq", "embed")

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.head is None:
            return self.embed.attend(x)
        return constrain(self.head(x), "batch", "seq", "vocab")


def next_token_loss(model: GPT, batch: jax.Array | Mapping[str, jax.Array]) -> Mean:
    """Cross-entropy of each token given those before it.

    Logits are computed for a chunk of tokens at a time, and never all of them held.

    Args:
        model: The model.
        batch: int ``(batch, seq + 1)``, or a mapping with it as ``tokens`` and perhaps
            ``weights`` of the same shape: 0 leaves a token out of the loss (not out of
            sight). The first token is never predicted. Of packed documents the mapping
            has ``segments``, int of the same shape, as `GPT` takes them: no token is
            predicted from another document, and no padding.

    Returns:
        The `Mean` in nats per token that is predicted.

    Raises:
        ValueError: If tokens are no (batch, seq + 1), or weights or segments differ in
            shape.

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
            f"Tokens of shape {tokens.shape}; they must be (batch, seq + 1), the input "
            "and the last label, with seq at least 1."
        )
    for name, of_each in (("Weights", weights), ("Segments", segments)):
        if of_each is not None and of_each.shape != tokens.shape:
            raise ValueError(
                f"{name} of shape {of_each.shape} for tokens of shape {tokens.shape}; "
                "each token has its own, the first one too."
            )
    seen = None if segments is None else segments[:, :-1]
    hidden = model.hidden(tokens[:, :-1], seen)
    weights = None if weights is None else weights[:, 1:]
    if segments is not None:
        is_next = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        weights = is_next if weights is None else jnp.where(is_next, weights, 0)
    kernel, vocab_dim = model.head_kernel
    return linear_cross_entropy(
        hidden,
        kernel,
        tokens[:, 1:],
        weights,
        vocab_dim=vocab_dim,
        z_loss=model.config.z_loss,
    )
