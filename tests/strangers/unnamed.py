"""Transformers without names of dims, and the names that an expert gives them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.strangers import language, vision

WIDTH, HEADS, SIZE = 32, 4, 8


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


def attend(q, k, v, bias=None):
    """Attention over arrays of shape (rows, length, heads, size)."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    return jnp.einsum("bhts,bshk->bthk", nnx.softmax(scores), v)


def causal(x):
    """0 where a token may look, and a large negative number elsewhere."""
    positions = jnp.arange(x.shape[1])
    return jnp.where(positions[:, None] >= positions, 0.0, -1e9)


class Separate(nnx.Module):
    """T5: a matrix each for queries, keys and values; the output of another width."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v = (linear(WIDTH, WIDTH, rngs) for _ in range(3))
        self.o = linear(WIDTH, WIDTH, rngs)

    def __call__(self, x, seen=None, bias=None):
        seen = x if seen is None else seen
        q, k, v = (
            each(y).reshape(*y.shape[:2], HEADS, SIZE)
            for each, y in ((self.q, x), (self.k, seen), (self.v, seen))
        )
        return self.o(attend(q, k, v, bias).reshape(x.shape))


class Fused(nnx.Module):
    """GPT-NeoX: one matrix, whose output has the three parts within each head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query_key_value = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, bias=None):
        fused = self.query_key_value(x).reshape(*x.shape[:2], HEADS, 3 * SIZE)
        q, k, v = jnp.split(fused, 3, axis=-1)
        return self.dense(attend(q, k, v, bias).reshape(x.shape))


class Thirds(Fused):
    """GPT-2: the output of the one matrix is cut into three."""

    def __call__(self, x, bias=None):
        parts = jnp.split(self.query_key_value(x), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], HEADS, SIZE) for part in parts)
        return self.dense(attend(q, k, v, bias).reshape(x.shape))


class Einsums(nnx.Module):
    """Kernels with a dim for heads."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def normal(*shape: int) -> nnx.Param:
            return nnx.Param(0.2 * rngs.params.normal(shape))

        self.wq, self.wk = (normal(WIDTH, n, SIZE) for n in (HEADS, HEADS // 2))
        self.wv = normal(WIDTH, HEADS // 2, SIZE)
        self.wo = normal(HEADS, SIZE, WIDTH)

    def __call__(self, x, bias=None):
        q, k, v = (
            jnp.einsum("btd,dhk->bthk", x, w[...]) for w in (self.wq, self.wk, self.wv)
        )
        k, v = (jnp.repeat(part, 2, axis=2) for part in (k, v))
        return jnp.einsum("bthk,hkd->btd", attend(q, k, v, bias), self.wo[...])


class Gated(nnx.Module):
    """T5 1.1, Llama: two products into the hidden units."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wi_0, self.wi_1 = (linear(WIDTH, 2 * WIDTH, rngs) for _ in range(2))
        self.wo = linear(2 * WIDTH, WIDTH, rngs)

    def __call__(self, x):
        return self.wo(nnx.gelu(self.wi_0(x)) * self.wi_1(x))


def sequential(rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(
        nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
        nnx.gelu,
        nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
    )


class Experts(nnx.Module):
    """Mixtral: two experts for each token, by products over all of them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def normal(*shape: int) -> nnx.Param:
            return nnx.Param(0.2 * rngs.params.normal(shape))

        self.gate = linear(WIDTH, 4, rngs)
        self.w1, self.w3 = normal(4, WIDTH, 2 * WIDTH), normal(4, WIDTH, 2 * WIDTH)
        self.w2 = normal(4, 2 * WIDTH, WIDTH)

    def __call__(self, x):
        weights, chosen = jax.lax.top_k(nnx.softmax(self.gate(x)), 2)
        shares = (nnx.one_hot(chosen, 4) * weights[..., None]).sum(-2)
        up = [jnp.einsum("btd,edf->betf", x, w[...]) for w in (self.w1, self.w3)]
        out = jnp.einsum("betf,efd->betd", nnx.silu(up[0]) * up[1], self.w2[...])
        return jnp.einsum("betd,bte->btd", out, shares)


class Block(nnx.Module):
    """A layer: attention, perhaps to another sequence too, and an MLP."""

    def __init__(self, attention, mlp, rngs: nnx.Rngs, cross=None) -> None:
        self.norm1, self.norm2 = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.mixer, self.ff = attention(rngs), mlp(rngs)
        if cross is not None:
            self.norm3, self.crossing = nnx.RMSNorm(WIDTH, rngs=rngs), cross(rngs)

    def __call__(self, x, bias=None, seen=None):
        x = x + self.mixer(self.norm1(x), bias=bias)
        if seen is not None:
            x = x + self.crossing(self.norm3(x), seen)
        return x + self.ff(self.norm2(x))


class Decoder(nnx.Module):
    """A language model with learned positions; the embeddings serve as the head."""

    def __init__(self, attention, mlp, rngs: nnx.Rngs) -> None:
        self.words = nnx.Embed(64, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(16, WIDTH, rngs=rngs)
        self.stages = nnx.List([Block(attention, mlp, rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.words(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.stages:
            x = block(x, causal(x))
        return self.words.attend(x)


class ScannedDecoder(nnx.Module):
    """Layers of `nnx.vmap`, scanned and recomputed; a head of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(Einsums, Gated, rngs)

        self.words = nnx.Embed(64, WIDTH, rngs=rngs)
        self.stages = make(rngs)
        self.head = linear(WIDTH, 64, rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return nnx.remat(lambda block, x: block(x, causal(x)))(block, x)

        return self.head(run(self.words(tokens), self.stages))


class T5(nnx.Module):
    """Relative positions by a table of a bias for each head, shared by the layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.shared = nnx.Embed(64, WIDTH, rngs=rngs)
        self.relative = nnx.Embed(8, HEADS, rngs=rngs)
        self.encoder = Block(Separate, Gated, rngs)
        self.decoder = Block(Separate, Gated, rngs, cross=Separate)
        self.head = linear(WIDTH, 64, rngs)

    def bias(self, x):
        positions = jnp.arange(x.shape[1])
        distances = jnp.clip(positions - positions[:, None], -4, 3) + 4
        return self.relative(distances).transpose(2, 0, 1)[None]

    def __call__(self, inputs, targets):
        encoded = self.shared(inputs)
        encoded = self.encoder(encoded, self.bias(encoded))
        x = self.shared(targets)
        x = self.decoder(x, self.bias(x) + causal(x), encoded)
        return self.head(x)


class FlaxAttention(nnx.Module):
    """Flax's attention, called with a bias as a mask."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mha = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)

    def __call__(self, x, seen=None, bias=None):
        return self.mha(x, seen, mask=None if bias is None else bias[None, None] == 0)


class Whisper(nnx.Module):
    """Two convolutions before the encoder; a table of sines; a decoder that looks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(3, WIDTH, (3,), rngs=rngs)
        self.conv2 = nnx.Conv(WIDTH, WIDTH, (3,), strides=(2,), rngs=rngs)
        self.words = nnx.Embed(64, WIDTH, rngs=rngs)
        self.encoder = Block(FlaxAttention, sequential, rngs)
        self.decoder = Block(FlaxAttention, sequential, rngs, cross=FlaxAttention)

    def __call__(self, sound, tokens):
        x = nnx.gelu(self.conv2(nnx.gelu(self.conv1(sound))))
        encoded = self.encoder(x + language.sinusoids(x.shape[1], WIDTH))
        x = self.words(tokens)
        return self.words.attend(self.decoder(x, causal(x), encoded))


class CLIP(nnx.Module):
    """Two towers with a projection each."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(1, WIDTH, (4, 4), strides=(4, 4), rngs=rngs)
        self.words = nnx.Embed(64, WIDTH, rngs=rngs)
        self.image, self.text = (
            Block(FlaxAttention, sequential, rngs) for _ in range(2)
        )
        self.of_image, self.of_text = (linear(WIDTH, 16, rngs) for _ in range(2))

    def __call__(self, image, tokens):
        x = self.patches(image)
        x = self.image(x.reshape(x.shape[0], -1, WIDTH)).mean(1)
        y = self.text(self.words(tokens)).mean(1)
        logits = self.of_image(x) @ self.of_text(y).T
        return logits, logits.T


class DiTBlock(nnx.Module):
    """A layer whose shifts, scales and gates are computed from the condition."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, use_bias=False, use_scale=False, rngs=rngs)
        self.mixer, self.ff = FlaxAttention(rngs), sequential(rngs)
        self.adaLN = nnx.Linear(WIDTH, 6 * WIDTH, rngs=rngs)

    def __call__(self, x, condition):
        parts = jnp.split(self.adaLN(nnx.silu(condition))[:, None], 6, axis=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.mixer(self.norm(x) * (1 + scale1) + shift1)
        return x + gate2 * self.ff(self.norm(x) * (1 + scale2) + shift2)


class DiT(nnx.Module):
    """A diffusion transformer, conditioned on the time and on a label."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(1, WIDTH, (4, 4), strides=(4, 4), rngs=rngs)
        self.time = nnx.Sequential(
            nnx.Linear(8, WIDTH, rngs=rngs),
            nnx.silu,
            nnx.Linear(WIDTH, WIDTH, rngs=rngs),
        )
        self.labels = nnx.Embed(11, WIDTH, rngs=rngs)
        self.blocks = nnx.List([DiTBlock(rngs) for _ in range(2)])
        self.last = nnx.Linear(WIDTH, 16, rngs=rngs)

    def __call__(self, image, time, label):
        angles = time[:, None] * 2.0 ** jnp.arange(4)
        condition = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        condition = condition + self.labels(label)
        x = self.patches(image)
        x = x.reshape(x.shape[0], -1, WIDTH)
        for block in self.blocks:
            x = block(x, condition)
        x = self.last(x).reshape(-1, 2, 2, 4, 4, 1)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(image.shape)


def diffusion_loss(model: Any, batch: Any) -> jax.Array:
    noisy = batch["image"] + batch["time"][:, None, None, None] * batch["noise"]
    found = model(noisy, batch["time"], batch["label"])
    return optax.squared_error(found, batch["noise"]).mean()


def speech_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["past"], batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["tokens"][:, 1:]
    ).mean()


Pairs = tuple[tuple[str, str], ...]

WORDS = (r"(words|shared|embed_tokens)\.embedding", "vocab embed")
FLAX = (
    (r"(query|key|value)\.kernel", "embed heads head_dim"),
    (r"(query|key|value)\.bias", "heads head_dim"),
    (r"out\.kernel", "heads head_dim embed"),
)
SEQUENTIAL = (
    (r"(ff|mlp)\.layers\.0\.kernel", "embed mlp"),
    (r"(ff|mlp)\.layers\.0\.bias", "mlp"),
    (r"(ff|mlp)\.layers\.2\.kernel", "mlp embed"),
)
GATED = ((r"wi_\d\.kernel", "embed mlp"), (r"ff\.wo\.kernel", "mlp embed"))
FUSED = (
    (r"query_key_value\.kernel", "embed heads"),
    (r"query_key_value\.bias", "heads"),
    (r"dense\.kernel", "heads embed"),
)
LLAMA = (
    (r"q_proj\.kernel", "embed heads"),
    (r"[kv]_proj\.kernel", "embed kv_heads"),
    (r"o_proj\.kernel", "heads embed"),
    (r"(gate|up)_proj\.kernel", "embed mlp"),
    (r"down_proj\.kernel", "mlp embed"),
)
EINSUMS = (
    (r"wq$", "embed heads head_dim"),
    (r"w[kv]$", "embed kv_heads head_dim"),
    (r"wo$", "heads head_dim embed"),
)


@dataclass(frozen=True, kw_only=True)
class Unnamed:
    """A model of others, and the names that its dims should get.

    Attributes:
        build: Builds the model.
        loss: Its loss.
        pairs: The names of each dim by path, separated by spaces.
    """

    build: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable[..., Any]
    pairs: Pairs


UNNAMED = {
    "gpt": Unnamed(
        build=lambda rngs: Decoder(Fused, sequential, rngs),
        loss=language.next_token_loss,
        pairs=(WORDS, *FUSED, *SEQUENTIAL),
    ),
    "llama": Unnamed(
        build=language.Llama,
        loss=language.next_token_loss,
        pairs=(WORDS, *LLAMA),
    ),
    "scanned": Unnamed(
        build=ScannedDecoder,
        loss=language.next_token_loss,
        pairs=(WORDS, *EINSUMS, *GATED, (r"head\.kernel", "embed vocab")),
    ),
    "t5": Unnamed(
        build=T5,
        loss=language.translation_loss,
        pairs=(
            WORDS,
            (r"relative\.embedding", "- heads"),
            (r"\.[qkv]\.kernel", "embed heads"),
            (r"\.o\.kernel", "heads embed"),
            *GATED,
            (r"head\.kernel", "embed vocab"),
        ),
    ),
    "vit": Unnamed(
        build=vision.VisionTransformer,
        loss=vision.classification_loss,
        pairs=(*FLAX, *SEQUENTIAL),
    ),
    "clip": Unnamed(
        build=CLIP,
        loss=vision.contrastive_loss,
        pairs=(WORDS, *FLAX, *SEQUENTIAL),
    ),
    "dit": Unnamed(
        build=DiT,
        loss=diffusion_loss,
        pairs=(
            *FLAX,
            *SEQUENTIAL,
            (r"adaLN\.kernel", "mlp -"),
            (r"time\.layers\.2\.kernel", "- mlp"),
            (r"time\.layers\.2\.bias", "mlp"),
            (r"labels\.embedding", "- mlp"),
        ),
    ),
    "whisper": Unnamed(
        build=Whisper,
        loss=speech_loss,
        pairs=(
            WORDS,
            *FLAX,
            *SEQUENTIAL,
            (r"conv1\.kernel", "- - mlp"),
            (r"conv1\.bias", "mlp"),
            (r"conv2\.kernel", "- mlp embed"),
        ),
    ),
    "mixtral": Unnamed(
        build=lambda rngs: Decoder(Einsums, Experts, rngs),
        loss=language.next_token_loss,
        pairs=(
            WORDS,
            *EINSUMS,
            (r"w[13]$", "expert embed mlp"),
            (r"w2$", "expert mlp embed"),
        ),
    ),
}
