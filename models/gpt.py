"""A transformer decoder in the shapes of GPT-2 and Llama 3, its loss, and sampling.

Written for one device. Every dim of a parameter or activation has a name, by which a
strategy places it; the sizes are those of `GPTConfig.sizes`. Configuration, blocks,
model, loss and generation follow in this order.

References:
    [1] Radford et al., "Language Models are Unsupervised Multitask Learners", 2019,
    section 2.3 (pre-norm, residual outputs scaled by depth).
    [2] Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.2,
    https://arxiv.org/abs/2407.21783
    [3] Su et al., "RoFormer", 2021, section 3.2, https://arxiv.org/abs/2104.09864
    [4] Shazeer, "GLU Variants Improve Transformer", 2020,
    https://arxiv.org/abs/2002.05202
    [5] Chowdhery et al., "PaLM", 2022, section 5 and appendix B,
    https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.layers import (
    Dense,
    Embed,
    Remat,
    Stack,
    attention,
    check_remat,
    cross_entropy,
    named,
)
from nnx_parallel.metrics import Mean
from nnx_parallel.sharding import constrain

Norm = Literal["layer", "rms"]
Positions = Literal["learned", "rope"]
Activation = Literal["gelu", "swiglu"]
Cache = tuple[jax.Array, jax.Array]
"""Keys and values so far, each (batch, total_len, kv_heads, head_dim)."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a `GPT`, and what it is made of.

    Attributes:
        vocab_size: Number of tokens.
        seq_len: Longest sequence; the rows of the table of learned positions.
        num_layers: Number of blocks.
        embed_dim: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, each shared by as many query heads;
            ``None``: one for each.
        head_dim: Width of a head; ``None``: ``embed_dim / num_heads``.
        mlp_dim: Width of the MLP; ``None``: ``4 * embed_dim``.
        norm: LayerNorm or RMSNorm, before attention and MLP.
        positions: A learned table, or rotation of queries and keys [3].
        rope_theta: Base of the rotation's wavelengths.
        activation: GELU, or SwiGLU with its third kernel [4].
        use_bias: Whether kernels and LayerNorms have biases.
        tied: Whether the embedding is also the head.
        dropout: Probability of dropping an output of embedding, attention and MLP.
        remat: What a block keeps for the backward pass; ``None`` follows the Trainer.
        z_loss: Weight of the squared log-normaliser in the loss [5].

    Raises:
        ValueError: If a value is out of range, or sizes do not divide.

    Example:
        >>> f"{GPTConfig.gpt2_124m().num_params:,}"
        '124,439,808'
        >>> GPTConfig.tiny(num_kv_heads=2).sizes["kv_heads"]
        2
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    norm: Norm = "layer"
    positions: Positions = "learned"
    rope_theta: float = 10_000.0
    activation: Activation = "gelu"
    use_bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    remat: Remat | None = None
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        norms, positions = get_args(Norm), get_args(Positions)
        activations = get_args(Activation)
        rules = (
            ("norm", self.norm in norms, f"one of {norms}"),
            ("positions", self.positions in positions, f"one of {positions}"),
            ("activation", self.activation in activations, f"one of {activations}"),
            ("rope_theta", self.rope_theta > 0, "above 0"),
            ("dropout", 0 <= self.dropout < 1, "a probability in [0, 1)"),
            ("z_loss", self.z_loss >= 0, "at least 0"),
        )
        numbers = ("vocab_size", "seq_len", "num_layers", "embed_dim", "num_heads")
        numbers += ("num_kv_heads", "head_dim", "mlp_dim")
        given = {n: v for n in numbers if (v := getattr(self, n)) is not None}
        rules += tuple((n, v >= 1, "at least 1") for n, v in given.items())
        for name, is_met, rule in rules:
            if not is_met:
                found = getattr(self, name)
                raise ValueError(f"GPTConfig.{name} is {found!r}; it must be {rule}.")
        check_remat(self.remat)
        self._check_heads()

    def _check_heads(self) -> None:
        heads, kv_heads = self.num_heads, self.sizes["kv_heads"]
        if self.head_dim is None and self.embed_dim % heads:
            raise ValueError(
                f"GPTConfig.embed_dim is {self.embed_dim} and num_heads {heads}, which "
                f"does not divide it. Give embed_dim a multiple of {heads}, or say "
                "head_dim."
            )
        if heads % kv_heads:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"GPTConfig.num_kv_heads is {kv_heads} and num_heads {heads}: each "
                "key head serves the same number of query heads. num_kv_heads must "
                f"divide num_heads: one of {divisors}."
            )
        if self.positions == "rope" and self.sizes["head_dim"] % 2:
            raise ValueError(
                f"GPTConfig.head_dim is {self.sizes['head_dim']}, but positions='rope' "
                "rotates features in pairs: head_dim must be even."
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each logical axis."""
        return {
            "embed": self.embed_dim,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads or self.num_heads,
            "head_dim": self.head_dim or self.embed_dim // self.num_heads,
            "mlp": self.mlp_dim or 4 * self.embed_dim,
            "vocab": self.vocab_size,
        }

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        sizes = self.sizes
        embed = sizes["embed"]
        norm = embed * (2 if self.norm == "layer" and self.use_bias else 1)
        biases = (sizes["heads"] + 2 * sizes["kv_heads"]) * sizes["head_dim"] + embed
        biases += sizes["mlp"] * (2 if self.activation == "swiglu" else 1) + embed
        block = 2 * norm + (biases if self.use_bias else 0)
        looked_up = 0 if self.tied else sizes["vocab"] * embed
        looked_up += self.seq_len * embed if self.positions == "learned" else 0
        return self.num_product_params + self.num_layers * block + norm + looked_up

    @property
    def num_product_params(self) -> int:
        """Number of parameters that take part in products: all kernels and the head.

        A tied embedding is the head and counts once. Norms and biases do not count,
        nor do tables that are only looked up in: learned positions, and an embedding
        beside a head of its own.
        """
        sizes = self.sizes
        attention = 2 * (sizes["heads"] + sizes["kv_heads"]) * sizes["head_dim"]
        mlp = (3 if self.activation == "swiglu" else 2) * sizes["mlp"]
        return sizes["embed"] * (self.num_layers * (attention + mlp) + sizes["vocab"])

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of a training step per token, forward and backward, for MFU [5].

        ``6 N`` for N `num_product_params`, and ``12 L E T`` for the products of queries
        with keys and of scores with values, E being all heads together. A causal mask
        halves the work that a good kernel does, but not this number; recomputation does
        not raise it.
        """
        attended = self.sizes["heads"] * self.sizes["head_dim"] * seq_len
        return 6 * self.num_product_params + 12 * self.num_layers * attended

    @classmethod
    def tiny(cls, **overrides: Any) -> GPTConfig:
        """GPT-2's parts over bytes, for tests and laptops: 0.2 M parameters."""
        base = cls(vocab_size=256, seq_len=64, num_layers=4, embed_dim=64, num_heads=4)
        return replace(base, **overrides)

    @classmethod
    def tiny_llama(cls, **overrides: Any) -> GPTConfig:
        """Llama's parts in the same size, two query heads to a key head."""
        base = cls.tiny(num_kv_heads=2, mlp_dim=128, **_LLAMA_PARTS)
        return replace(base, **overrides)

    @classmethod
    def gpt2_124m(cls, **overrides: Any) -> GPTConfig:
        """GPT-2 small [1]."""
        base = cls(
            vocab_size=50_257, seq_len=1024, num_layers=12, embed_dim=768, num_heads=12
        )
        return replace(base, **overrides)

    @classmethod
    def gpt_1_3b(cls, **overrides: Any) -> GPTConfig:
        """GPT-2 in the size of GPT-3 XL; vocabulary padded to a multiple of 128."""
        base = cls(
            vocab_size=50_304, seq_len=2048, num_layers=24, embed_dim=2048, num_heads=16
        )
        return replace(base, **overrides)

    @classmethod
    def llama3_8b(cls, **overrides: Any) -> GPTConfig:
        """Llama 3 8B [2]."""
        base = cls(
            vocab_size=128_256,
            seq_len=8192,
            num_layers=32,
            embed_dim=4096,
            num_heads=32,
        )
        base = replace(base, num_kv_heads=8, mlp_dim=14_336, **_LLAMA_PARTS)
        return replace(base, **overrides)

    @classmethod
    def llama3_70b(cls, **overrides: Any) -> GPTConfig:
        """Llama 3 70B [2]."""
        base = cls.llama3_8b(
            num_layers=80, embed_dim=8192, num_heads=64, mlp_dim=28_672
        )
        return replace(base, **overrides)


_LLAMA_PARTS: dict[str, Any] = {
    "norm": "rms",
    "positions": "rope",
    "rope_theta": 500_000.0,
    "activation": "swiglu",
    "use_bias": False,
    "tied": False,
}


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
    """Rotary position embedding: scores then depend on distances only [3].

    Feature i and feature i + head_dim / 2 are a point in the plane, which turns by
    ``position * theta ** (-2 i / head_dim)``.

    Args:
        x: ``(batch, seq, heads, head_dim)``, queries or keys.
        positions: int ``(seq,)``.
        theta: Base of the wavelengths.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half) / half)  # (half,)
    angles = positions[:, None] * frequencies[None, :]  # (seq, half)
    cos = jnp.cos(angles)[None, :, None, :]  # (1, seq, 1, half)
    sin = jnp.sin(angles)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention, with or without a cache of earlier keys and values."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        dense = partial(_dense, config, rngs=rngs)
        self.query = dense("embed", "heads head_dim")
        self.key = dense("embed", "kv_heads head_dim")
        self.value = dense("embed", "kv_heads head_dim")
        self.out = dense("heads head_dim", "embed", is_residual=True)
        self.rope_theta = config.rope_theta if config.positions == "rope" else None

    def __call__(
        self, x: jax.Array, start: int | jax.Array, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        """Attends from ``x``, whose first token has position ``start``."""
        positions = start + jnp.arange(x.shape[1])  # (seq,)
        # (batch, seq, embed) -> (batch, seq, heads or kv_heads, head_dim)
        query = constrain(self.query(x), "batch", "seq", "heads", "head_dim")
        key = constrain(self.key(x), "batch", "seq", "kv_heads", "head_dim")
        value = constrain(self.value(x), "batch", "seq", "kv_heads", "head_dim")
        if self.rope_theta is not None:
            query = rotate(query, positions, self.rope_theta)
            key = rotate(key, positions, self.rope_theta)
        if cache is None:
            return self.out(attention(query, key, value, causal=True)), None
        keys, values = _write(cache[0], key, start), _write(cache[1], value, start)
        seen = jnp.arange(keys.shape[1])[None, :] <= positions[:, None]
        mask = seen[None, None]  # (1, 1, seq, total_len)
        return self.out(attention(query, keys, values, mask=mask)), (keys, values)


def _write(cache: jax.Array, new: jax.Array, start: int | jax.Array) -> jax.Array:
    cache = jax.lax.dynamic_update_slice_in_dim(cache, new, start, axis=1)
    return constrain(cache, "batch", None, "kv_heads", "head_dim")


class MLP(nnx.Module):
    """GELU, or SwiGLU: a gate beside the hidden layer."""

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
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = _dropout(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, start: int | jax.Array = 0, cache: Cache | None = None
    ) -> jax.Array | tuple[jax.Array, Cache | None]:
        """(batch, seq, embed) to the same; given a cache, returns it with x added."""
        attended, new_cache = self.attention(self.attention_norm(x), start, cache)
        x = constrain(x + self.dropout(attended), "batch", "seq", "embed")
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
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
        >>> model(jnp.zeros((2, 16), jnp.int32)).shape
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

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the token after each: int (batch, seq) to (batch, seq, vocab).

        Raises:
            ValueError: If learned positions end before the sequence.
        """
        return self._logits(self.blocks(self._embed(tokens, 0)))

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
        return self._logits(x[:, -1:])[:, 0], cache

    def make_cache(self, batch_size: int, total_len: int) -> Cache:
        """An empty cache: (layers, batch, total_len, kv_heads, head_dim), twice."""
        sizes = self.config.sizes
        shape = (batch_size, total_len, sizes["kv_heads"], sizes["head_dim"])
        dtype = self.embed.embedding.get_value().dtype
        empty = jnp.zeros((self.config.num_layers, *shape), dtype)
        empty = constrain(empty, "layers", "batch", None, "kv_heads", "head_dim")
        return empty, empty

    def _embed(self, tokens: jax.Array, start: int | jax.Array) -> jax.Array:
        _check_length(self.config, tokens.shape[1])
        x = self.embed(tokens)  # (batch, seq, embed)
        if self.positions is not None:
            positions = start + jnp.arange(tokens.shape[1])
            x = x + self.positions(positions[None, :])  # + (1, seq, embed)
        return constrain(self.dropout(x), "batch", "seq", "embed")

    def _logits(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)
        if self.head is None:
            return self.embed.attend(x)
        return constrain(self.head(x), "batch", "seq", "vocab")


def _check_length(config: GPTConfig, length: int) -> None:
    if config.positions == "learned" and length > config.seq_len:
        raise ValueError(
            f"A sequence of {length} tokens, but learned positions end at "
            f"GPTConfig.seq_len={config.seq_len}. Shorten it, raise seq_len, or use "
            "positions='rope'."
        )


def next_token_loss(model: GPT, batch: jax.Array | Mapping[str, jax.Array]) -> Mean:
    """Cross-entropy of each token given those before it.

    Args:
        model: The model.
        batch: int ``(batch, seq + 1)``, or a mapping with it as ``tokens`` and perhaps
            ``weights`` of the same shape: 0 leaves a token out of the loss (not out of
            sight). The first token is never predicted.

    Returns:
        The `Mean` in nats per token.

    Raises:
        ValueError: If tokens are no (batch, seq + 1), or weights differ in shape.

    Example:
        >>> model = GPT(GPTConfig.tiny(), rngs=nnx.Rngs(0))
        >>> loss = next_token_loss(model, jnp.zeros((2, 17), jnp.int32))
        >>> float(loss.weight)
        32.0
    """
    if not isinstance(batch, Mapping):
        batch = {"tokens": batch}
    tokens, weights = batch["tokens"], batch.get("weights")
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(
            f"Tokens of shape {tokens.shape}; they must be (batch, seq + 1), the input "
            "and the last label, with seq at least 1."
        )
    if weights is not None and weights.shape != tokens.shape:
        raise ValueError(
            f"Weights of shape {weights.shape} for tokens of shape {tokens.shape}; "
            "each token has its weight, the first one too."
        )
    logits = model(tokens[:, :-1])
    weights = None if weights is None else weights[:, 1:]
    return cross_entropy(logits, tokens[:, 1:], weights, z_loss=model.config.z_loss)


def generate(
    model: GPT,
    prompt: jax.Array,
    *,
    max_new_tokens: int,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> jax.Array:
    """Continues prompts token by token, without dropout.

    A pure function: wrap it in `jax.jit` with the keyword arguments but ``key`` static.
    Keys and values of earlier tokens are kept, so that a token costs one pass over the
    parameters and the cache.

    Args:
        model: The model; it stays as it is.
        prompt: int ``(batch, prompt_len)``.
        max_new_tokens: How many to add.
        key: Key to sample with; not needed when greedy.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Sample from the k likeliest tokens only.

    Returns:
        int ``(batch, prompt_len + max_new_tokens)``: prompt and continuation.

    Raises:
        ValueError: If an argument is out of range, or learned positions end too early.

    Example:
        >>> model = GPT(GPTConfig.tiny(), rngs=nnx.Rngs(0))
        >>> prompt = jnp.array([[1, 2, 3]])
        >>> generate(model, prompt, max_new_tokens=5, temperature=0).shape
        (1, 8)
    """
    top = model.config.vocab_size if top_k is None else top_k
    _check_sampling(model.config, max_new_tokens, key is not None, temperature, top)
    _check_length(model.config, prompt.shape[1] + max_new_tokens)
    keys = jax.random.split(jax.random.key(0) if key is None else key, max_new_tokens)
    sample = partial(_sample, temperature=temperature, top_k=top)
    return _continue(model, prompt, keys, sample)


def _continue(
    model: GPT, prompt: jax.Array, keys: jax.Array, sample: Callable[..., jax.Array]
) -> jax.Array:
    graphdef, state = nnx.split(model)

    def next_token(
        tokens: jax.Array, start: int | jax.Array, cache: Cache, key: jax.Array
    ) -> tuple[jax.Array, Cache]:
        # A copy: what it changes (counters) must not leave the trace of the scan.
        copy = nnx.merge(graphdef, state, copy=True)
        copy.eval()
        logits, cache = copy.decode(tokens, start, cache)
        return sample(logits, key).astype(prompt.dtype), cache

    def step(carry: tuple, slices: tuple) -> tuple:
        token, cache = carry
        start, key = slices
        token, cache = next_token(token[:, None], start, cache, key)
        return (token, cache), token

    (batch_size, prompt_len), num_new = prompt.shape, len(keys)
    cache = model.make_cache(batch_size, prompt_len + num_new)
    first, cache = next_token(prompt, 0, cache, keys[0])
    starts = prompt_len + jnp.arange(num_new - 1)
    _, rest = jax.lax.scan(step, (first, cache), (starts, keys[1:]))
    # (batch, prompt_len), (batch, 1), (batch, num_new - 1)
    return jnp.concatenate([prompt, first[:, None], rest.T], axis=1)


def _check_sampling(
    config: GPTConfig,
    max_new_tokens: int,
    has_key: bool,
    temperature: float,
    top_k: int,
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    if temperature < 0:
        raise ValueError(
            f"temperature is {temperature}; it must be at least 0 (greedy)."
        )
    if temperature > 0 and not has_key:
        raise ValueError(
            f"Sampling at temperature {temperature} without a key. Pass "
            "key=jax.random.key(0), or temperature=0 for the likeliest token."
        )
    if not 1 <= top_k <= config.vocab_size:
        raise ValueError(
            f"top_k is {top_k}; it must be from 1 to the {config.vocab_size} tokens of "
            "the vocabulary, or None for all."
        )


def _sample(
    logits: jax.Array, key: jax.Array, temperature: float, top_k: int
) -> jax.Array:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)  # (batch,)
    logits = logits.astype(jnp.float32) / temperature
    if top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]  # (batch, 1)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits)
