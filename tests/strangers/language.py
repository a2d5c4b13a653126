"""Language models: decoders, an encoder with a decoder, and adapters."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def next_token_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["tokens"][:, 1:]
    ).mean()


# Llama, Qwen: a frozen config, projections with the usual names, a list of layers.


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of Llama."""

    vocab_size: int = 64
    hidden_size: int = 32
    intermediate_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8


class RMSNorm(nnx.Module):
    """Flax has this layer too, but many models write their own version."""

    def __init__(self, dim: int) -> None:
        self.scale = nnx.Param(jnp.ones(dim))

    def __call__(self, x):
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.scale


def apply_rope(x, sin, cos):
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


class Attention(nnx.Module):
    """Grouped-query attention."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        width, kv_width = (n * cfg.head_dim for n in (cfg.num_heads, cfg.num_kv_heads))
        self.cfg = cfg
        self.q_proj = nnx.Linear(cfg.hidden_size, width, use_bias=False, rngs=rngs)
        self.k_proj = nnx.Linear(cfg.hidden_size, kv_width, use_bias=False, rngs=rngs)
        self.v_proj = nnx.Linear(cfg.hidden_size, kv_width, use_bias=False, rngs=rngs)
        self.o_proj = nnx.Linear(width, cfg.hidden_size, use_bias=False, rngs=rngs)

    def __call__(self, x, sin, cos, mask):
        b, t, _ = x.shape
        q = self.q_proj(x).reshape(b, t, -1, self.cfg.head_dim)
        k = self.k_proj(x).reshape(b, t, -1, self.cfg.head_dim)
        v = self.v_proj(x).reshape(b, t, -1, self.cfg.head_dim)
        q, k = apply_rope(q, sin, cos), apply_rope(k, sin, cos)
        out = jax.nn.dot_product_attention(q, k, v, mask=mask)
        return self.o_proj(out.reshape(b, t, -1))


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        sizes = cfg.hidden_size, cfg.intermediate_size
        self.gate_proj = nnx.Linear(*sizes, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(*sizes, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(*sizes[::-1], use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """One decoder layer."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(cfg.hidden_size)
        self.self_attn = Attention(cfg, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size)
        self.mlp = MLP(cfg, rngs=rngs)

    def __call__(self, x, sin, cos, mask):
        x = x + self.self_attn(self.input_layernorm(x), sin, cos, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """A decoder with tied embeddings as its head."""

    def __init__(self, rngs: nnx.Rngs, cfg: LlamaConfig = LlamaConfig()) -> None:
        self.cfg = cfg
        self.embed_tokens = nnx.Embed(cfg.vocab_size, cfg.hidden_size, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(cfg, rngs=rngs) for _ in range(cfg.num_layers)]
        )
        self.norm = RMSNorm(cfg.hidden_size)

    def __call__(self, tokens):
        x = self.embed_tokens(tokens)
        positions, half = jnp.arange(tokens.shape[1]), self.cfg.head_dim // 2
        angles = positions[:, None] * 10_000.0 ** -(jnp.arange(half) / half)
        sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
        mask = positions[:, None] >= positions
        for layer in self.layers:
            x = layer(x, sin, cos, mask[None, None])
        return self.embed_tokens.attend(self.norm(x))


# Gemma: einsums of raw parameters that name mesh axes; layers return a cache first.


class Einsum(nnx.Module):
    """An einsum with a parameter, whose dims have names of mesh axes."""

    def __init__(self, text: str, shape, axes, *, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(
            nnx.initializers.normal(0.1), axes, eager_sharding=False
        )
        self.text = text
        self.w = nnx.Param(init(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.text, x, self.w[...])


class GemmaBlock(nnx.Module):
    """A layer with global or local attention, which returns ``(cache, x)``."""

    def __init__(self, dim, heads, window, *, rngs: nnx.Rngs) -> None:
        self.window, size = window, dim // heads
        self.qkv_einsum = Einsum(
            "BTD,SNDH->SBTNH",
            (3, heads, dim, size),
            (None, "tp", "fsdp", None),
            rngs=rngs,
        )
        self.attn_vec_einsum = Einsum(
            "BTNH,NHD->BTD", (heads, size, dim), ("tp", None, "fsdp"), rngs=rngs
        )
        self.gating = Einsum(
            "BTD,GDF->GBTF", (2, dim, 4 * dim), (None, "fsdp", "tp"), rngs=rngs
        )
        self.linear = Einsum("BTF,FD->BTD", (4 * dim, dim), ("tp", "fsdp"), rngs=rngs)
        self.pre_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.post_norm = nnx.RMSNorm(dim, rngs=rngs)

    def __call__(self, x, cache, positions):
        q, k, v = self.qkv_einsum(self.pre_norm(x))
        distance = positions[:, :, None] - positions[:, None]
        mask = (distance >= 0) & (distance < self.window)
        logits = jnp.einsum("BTNH,BSNH->BNTS", q, k) * q.shape[-1] ** -0.5
        logits = 50.0 * jnp.tanh(logits / 50.0)
        probs = nnx.softmax(jnp.where(mask[:, None], logits, -2.3819763e38))
        x = x + self.attn_vec_einsum(jnp.einsum("BNTS,BSNH->BTNH", probs, v))
        gate, up = self.gating(self.post_norm(x))
        return cache, x + self.linear(nnx.gelu(gate) * up)


class Gemma(nnx.Module):
    """Local and global layers alternate; the embeddings are a raw parameter."""

    def __init__(self, rngs: nnx.Rngs, num_layers: int = 2) -> None:
        init = nnx.with_partitioning(
            nnx.initializers.normal(0.1), ("tp", "fsdp"), eager_sharding=False
        )
        self.input_embedding = nnx.Param(init(rngs.params(), (64, 32)))
        self.layers = nnx.List(
            GemmaBlock(32, 4, 4 if i % 2 else 1024, rngs=rngs)
            for i in range(num_layers)
        )
        self.final_norm = nnx.RMSNorm(32, rngs=rngs)

    def __call__(self, tokens):
        x = self.input_embedding[...][tokens] * 32**0.5
        positions = jnp.arange(tokens.shape[1])[None]
        cache: list[Any] = [None] * len(self.layers)
        for i, layer in enumerate(self.layers):
            cache[i], x = layer(x, cache[i], positions)
        logits = jnp.dot(self.final_norm(x), self.input_embedding[...].T)
        return 30.0 * jnp.tanh(logits / 30.0)


# Flax's lm1b: logical names in initializers, a sinusoidal table, layers by setattr.


def sinusoids(length: int, dim: int):
    rate = 10_000.0 ** -(jnp.arange(0, dim, 2) / dim)
    angles = jnp.arange(length)[:, None] * rate
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[None]


def kernel(*names: str):
    return nnx.with_partitioning(
        nnx.initializers.xavier_uniform(), names, eager_sharding=False
    )


class EncoderBlock1D(nnx.Module):
    """Flax's attention, and dropout."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs) -> None:
        self.ln1 = nnx.LayerNorm(dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4,
            dim,
            kernel_init=kernel("embed", "heads", "kv"),
            out_kernel_init=kernel("heads", "kv", "embed"),
            use_bias=False,
            decode=False,
            rngs=rngs,
        )
        self.ln2 = nnx.LayerNorm(dim, rngs=rngs)
        self.wi = nnx.Linear(
            dim, 4 * dim, kernel_init=kernel("embed", "mlp"), rngs=rngs
        )
        self.wo = nnx.Linear(
            4 * dim, dim, kernel_init=kernel("mlp", "embed"), rngs=rngs
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.dropout(self.attention(self.ln1(x), mask=mask))
        return x + self.dropout(self.wo(self.dropout(nnx.relu(self.wi(self.ln2(x))))))


class TransformerLM(nnx.Module):
    """Layers are attributes with a number in their names."""

    def __init__(self, *, rngs: nnx.Rngs, num_layers: int = 1) -> None:
        init = nnx.with_partitioning(
            nnx.initializers.normal(1.0), ("vocab", "embed"), eager_sharding=False
        )
        self.embed = nnx.Embed(64, 32, embedding_init=init, rngs=rngs)
        self.pos_embedding = sinusoids(64, 32)
        self.num_layers = num_layers
        for i in range(num_layers):
            setattr(self, f"encoderblock_{i}", EncoderBlock1D(32, rngs=rngs))
        self.norm = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.pos_embedding[:, : tokens.shape[1]]
        mask = nnx.make_causal_mask(tokens)
        for i in range(self.num_layers):
            x = getattr(self, f"encoderblock_{i}")(x, mask)
        return self.embed.attend(self.norm(x)) / 32**0.5


# T5, Whisper: an encoder, and a decoder with attention to the encoder's output.


class CrossBlock(nnx.Module):
    """Self attention, cross attention if there is an encoder output, and an MLP."""

    def __init__(self, dim: int, *, cross: bool, rngs: nnx.Rngs) -> None:
        options: Any = {"decode": False, "rngs": rngs}
        self.norm1 = nnx.LayerNorm(dim, rngs=rngs)
        self.self_attn = nnx.MultiHeadAttention(4, dim, **options)
        if cross:
            self.norm2 = nnx.LayerNorm(dim, rngs=rngs)
            self.cross_attn = nnx.MultiHeadAttention(4, dim, **options)
        self.norm3 = nnx.LayerNorm(dim, rngs=rngs)
        self.fc1 = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.fc2 = nnx.Linear(2 * dim, dim, rngs=rngs)

    def __call__(self, x, mask, encoded=None, cross_mask=None):
        x = x + self.self_attn(self.norm1(x), mask=mask)
        if encoded is not None:
            seen = self.cross_attn(self.norm2(x), encoded, mask=cross_mask)
            x = x + seen
        return x + self.fc2(nnx.gelu(self.fc1(self.norm3(x))))


class Seq2Seq(nnx.Module):
    """Two lists of layers; token 0 is padding."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.pos_embed = nnx.Param(0.1 * jax.random.normal(rngs.params(), (16, 32)))
        self.encoder = nnx.List(
            [CrossBlock(32, cross=False, rngs=rngs) for _ in range(1)]
        )
        self.decoder = nnx.List(
            [CrossBlock(32, cross=True, rngs=rngs) for _ in range(2)]
        )
        self.head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, inputs, targets):
        is_token = inputs > 0
        encoded = self.embed(inputs) + self.pos_embed[: inputs.shape[1]]
        mask = nnx.make_attention_mask(is_token, is_token)
        for layer in self.encoder:
            encoded = layer(encoded, mask)
        x = self.embed(targets) + self.pos_embed[: targets.shape[1]]
        cross_mask = nnx.make_attention_mask(jnp.ones_like(targets), is_token)
        for layer in self.decoder:
            x = layer(x, nnx.make_causal_mask(targets), encoded, cross_mask)
        return self.head(x)


def translation_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["inputs"], batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["tokens"][:, 1:]
    ).mean()


# LoRA, wrapped around the linear layers of an existing model.


def with_lora(model: nnx.Module, rank: int, rngs: nnx.Rngs) -> Any:
    def wrap(path, node):
        if isinstance(node, nnx.Linear):
            sizes = node.in_features, rank, node.out_features
            return nnx.LoRA(*sizes, base_module=node, rngs=rngs)
        return node

    return nnx.recursive_map(wrap, model)
