"""Models like Bonsai's language models (github.com/jax-ml/bonsai), but much smaller."""

import copy
import math
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from tests.strangers.public.case import attend, bonsai, cross_entropy, heads

# Gemma 3 and Qwen3: a function makes a cache of modules; metadata comes from a config.


@dataclass(slots=True, frozen=True)
class ShardConfig:
    """Specs of parameters and activations; all are None by default."""

    attn_kernel: PartitionSpec | None = None
    activation: PartitionSpec | None = None

    @staticmethod
    def no_sharding() -> "ShardConfig":
        return ShardConfig()


class AttentionMode(Enum):
    """Whether a layer's attention is global or local."""

    FULL = "full_attention"
    SLIDE = "sliding_attention"


@dataclass(frozen=True)
class TextConfig:
    """Sizes, and a list with the kind of each layer."""

    vocab_size: int = 64
    hidden_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    layer_types: list = field(
        default_factory=lambda: [AttentionMode.SLIDE, AttentionMode.FULL]
    )
    shd_cfg: ShardConfig = ShardConfig.no_sharding()  # noqa: RUF009


class LayerCache(nnx.Module):
    """Keys and values of earlier tokens, and the position of the next ones."""

    def __init__(self, cfg: TextConfig, rows: int, size: int) -> None:
        shape = (rows, size, cfg.num_kv_heads, cfg.head_dim)
        self.k_cache = nnx.Cache(jnp.zeros(shape, out_sharding=cfg.shd_cfg.activation))
        self.v_cache = nnx.Cache(jnp.zeros(shape, out_sharding=cfg.shd_cfg.activation))
        self.size = self.k_cache.shape[1]
        self.start_ind = nnx.Variable(-1 * jnp.ones((rows,), dtype=jnp.int32))
        self.cur_ind = nnx.Variable(jnp.zeros((), dtype=jnp.int32))


def init_cache(cfg: TextConfig, rows: int, tokens: int) -> list[LayerCache]:
    size = 2 ** math.ceil(math.log2(tokens))
    return [LayerCache(cfg, rows, size) for _ in cfg.layer_types]


def rotated(x, positions):
    first, second = jnp.split(x, 2, axis=-1)
    rate = 100.0 ** -(jnp.arange(first.shape[-1]) / first.shape[-1])
    angles = jnp.einsum("bt,k->btk", positions, rate)[:, :, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    parts = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(parts, axis=-1)


class CachedAttention(nnx.Module):
    """Writes keys and values into a given cache; its sizes are properties."""

    def __init__(self, cfg: TextConfig, *, rngs: nnx.Rngs) -> None:
        self.shd_cfg = cfg.shd_cfg
        metadata = {"out_sharding": cfg.shd_cfg.attn_kernel}
        einsum = partial(nnx.Einsum, kernel_metadata=metadata, rngs=rngs)
        dim, size = cfg.hidden_size, cfg.head_dim
        self.q_proj = einsum("BTD,DNH->BTNH", (dim, cfg.num_heads, size))
        self.k_proj = einsum("BSD,DKH->BSKH", (dim, cfg.num_kv_heads, size))
        self.v_proj = einsum("BSD,DKH->BSKH", (dim, cfg.num_kv_heads, size))
        self.o_proj = einsum("BTNH,NHD->BTD", (cfg.num_heads, size, dim))
        self.q_norm = nnx.RMSNorm(size, rngs=rngs)
        self.n_rep = cfg.num_heads // cfg.num_kv_heads

    @jax.named_scope("attention")
    def __call__(self, x, cache: LayerCache, segment_ids, window=None):
        shd = self.shd_cfg.activation
        q = self.q_norm(self.q_proj(x, out_sharding=shd))
        k, v = self.k_proj(x, out_sharding=shd), self.v_proj(x, out_sharding=shd)
        pads = jnp.sum(jnp.cumsum(segment_ids != 0, axis=-1) == 0, -1)
        start = cache.start_ind[...]
        cache.start_ind.set_value(jnp.where(start < 0, pads, start))
        positions = jax.vmap(
            lambda row: jnp.where(
                row != 0, jnp.arange(row.shape[0]) - jnp.argmax(row), 2**30
            )
        )(segment_ids)
        positions = positions + cache.cur_ind[...]
        q, k = rotated(q, positions), rotated(k, positions)
        at = (0, cache.cur_ind[...], 0, 0)
        for kept, new in ((cache.k_cache, k), (cache.v_cache, v)):
            kept.set_value(jax.lax.dynamic_update_slice(kept[...], new, at))
        b, t, _, h = q.shape
        q = q.reshape((b, t, self.num_kv_heads, self.n_rep, h))
        logits = jnp.einsum("BTKGH,BSKH->BTSKG", q, cache.k_cache[...]) * h**-0.5
        slots, first = jnp.arange(cache.size), cache.start_ind[:, None]
        places = cache.cur_ind[...] + jnp.arange(t)[None] - first
        mask = (slots[None] - first)[:, None] <= places[:, :, None]
        filled = (slots >= first) & (slots < cache.cur_ind[...] + t)
        mask &= filled[:, None] == (segment_ids != 0)[:, :, None]
        if window is not None:
            mask &= (slots[None] - first)[:, None] > places[:, :, None] - window
        logits = jnp.where(mask[..., None, None], logits, jnp.finfo(jnp.bfloat16).min)
        weights = jax.nn.softmax(logits, axis=2)
        out = jnp.einsum("BTSKG,BSKH->BTKGH", weights, cache.v_cache[...])
        cache.cur_ind.set_value(cache.cur_ind[...] + t)
        return self.o_proj(out.reshape((b, t, -1, h)), out_sharding=shd)

    @property
    def num_kv_heads(self) -> int:
        return self.k_proj.kernel.shape[1]


class CachedLayer(nnx.Module):
    """A layer that stores its config as an attribute."""

    def __init__(self, cfg: TextConfig, layer_idx: int, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.config, self.layer_idx = cfg, layer_idx
        self.use_sliding = cfg.layer_types[layer_idx] == AttentionMode.SLIDE
        self.input_layernorm = nnx.RMSNorm(cfg.hidden_size, rngs=rngs)
        self.attn = CachedAttention(cfg, rngs=rngs)
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate_proj = linear(cfg.hidden_size, 32)
        self.up_proj = linear(cfg.hidden_size, 32)
        self.down_proj = linear(32, cfg.hidden_size)

    def __call__(self, x, cache, segment_ids):
        window = 4 if self.use_sliding else None
        x = x + self.attn(self.input_layernorm(x), cache, segment_ids, window)
        return x + self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Qwen3(nnx.Module):
    """Looks embeddings up with `at[...].get`; the head is an `nnx.Einsum`."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.config = cfg = TextConfig()
        self.embedder = nnx.Embed(cfg.vocab_size, cfg.hidden_size, rngs=rngs)
        self.out_emb_shd = cfg.shd_cfg.activation
        self.layers = nnx.List([CachedLayer(cfg, i, rngs=rngs) for i in range(2)])
        self.final_norm = nnx.RMSNorm(cfg.hidden_size, rngs=rngs)
        self.lm_head = nnx.Einsum(
            "BTD,DV->BTV", (cfg.hidden_size, cfg.vocab_size), rngs=rngs
        )

    def __call__(self, tokens, *, cache, segment_ids):
        table = self.embedder.embedding[...]
        x = table.at[(tokens,)].get(out_sharding=self.out_emb_shd)
        for i, layer in enumerate(self.layers):
            x = layer(x, cache[i], segment_ids)
        return self.lm_head(self.final_norm(x), out_sharding=self.out_emb_shd)


def cached_loss(model: Any, batch: Any) -> jax.Array:
    tokens = batch["tokens"]
    cache = init_cache(model.config, tokens.shape[0], tokens.shape[1] - 1)
    segment_ids = 1 * (tokens[:, :-1] != 0)
    logits = model(tokens[:, :-1], cache=cache, segment_ids=segment_ids)
    return cross_entropy(logits, tokens[:, 1:])


class Gemma3(nnx.Module):
    """Merges image tokens into the text, row by row, with `jax.vmap`."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.config = cfg = TextConfig()
        self.patch_embedding = nnx.Conv(
            1,
            cfg.hidden_size,
            kernel_size=(4, 4),
            strides=(4, 4),
            kernel_init=partial(jax.nn.initializers.lecun_normal(), out_sharding=None),
            padding="valid",
            rngs=rngs,
        )
        self.position_ids = nnx.data(jnp.expand_dims(jnp.arange(4), 0))
        self.position_embedding = nnx.Embed(4, cfg.hidden_size, rngs=rngs)
        self.mm_input_projection_weight = nnx.Param(
            jax.random.normal(rngs.params(), (16, cfg.hidden_size)) / 4, rngs=rngs
        )
        self.weight = nnx.Embed(cfg.vocab_size, cfg.hidden_size, rngs=rngs)
        self.embed_scale = nnx.data(jnp.array(cfg.hidden_size**0.5, dtype=jnp.float32))
        self.layers = nnx.List([CachedLayer(cfg, i, rngs=rngs) for i in range(2)])

    def __call__(self, tokens, pixels, *, cache, segment_ids):
        images = self.patch_embedding(pixels).reshape(len(tokens), 4, -1)
        images = images + self.position_embedding(self.position_ids)
        images = jnp.matmul(images, self.mm_input_projection_weight[...])
        text = self.weight(tokens) * self.embed_scale

        def merge(image, text, is_image):
            index = jnp.clip(jnp.cumsum(is_image) - 1, 0, image.shape[0] - 1)
            return jnp.where(is_image[:, None], image[index], text)

        x = jax.vmap(merge)(images, text, tokens < 20)
        for layer, kept in zip(self.layers, cache, strict=True):
            x = layer(x, kept, segment_ids)
        return jax.nn.tanh(self.weight.attend(x) / 30.0) * 30.0


def multimodal_loss(model: Any, batch: Any) -> jax.Array:
    tokens = batch["tokens"]
    cache = init_cache(model.config, tokens.shape[0], tokens.shape[1] - 1)
    logits = model(
        tokens[:, :-1], batch["image"], cache=cache, segment_ids=0 * tokens[:, :-1] + 1
    )
    return cross_entropy(logits, tokens[:, 1:])


# Qwen3-VL: lists of mergers, whose outputs are added to early layers.


class Qwen3VL(nnx.Module):
    """Features from several depths of the image blocks enter the text layers."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.config = cfg = TextConfig()
        self.deepstack_visual_indexes = (0, 1)
        self.patch_embed = nnx.Conv(1, 16, (4, 4), strides=(4, 4), rngs=rngs)
        self.pos_embed = nnx.Embed(9, 16, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.deepstack_merger_list = nnx.List(
            [
                nnx.Linear(16, cfg.hidden_size, rngs=rngs)
                for _ in self.deepstack_visual_indexes
            ]
        )
        self.embed_tokens = nnx.Embed(cfg.vocab_size, cfg.hidden_size, rngs=rngs)
        self.layers = nnx.List([CachedLayer(cfg, i, rngs=rngs) for i in range(2)])

    def interpolated(self, side: int):
        at = jnp.linspace(0, 2, side)
        low = jnp.floor(at).astype(jnp.int32)
        high, part = jnp.clip(low + 1, 0, 2), at - low
        rows = (low, 1 - part), (high, part)
        corners = [
            self.pos_embed((i[:, None] * 3 + j).flatten())
            * jnp.outer(a, b).reshape(-1, 1)
            for i, a in rows
            for j, b in rows
        ]
        return sum(corners)

    def __call__(self, tokens, pixels, cache, segment_ids):
        x = self.patch_embed(pixels).reshape(len(tokens), 4, -1) + self.interpolated(2)
        features = []
        for i, block in enumerate(self.blocks):
            x = x + nnx.gelu(block(x))
            if i in self.deepstack_visual_indexes:
                at = self.deepstack_visual_indexes.index(i)
                features.append(self.deepstack_merger_list[at](x))
        h = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            h = layer(h, cache[i], segment_ids)
            if i < len(features):
                h = h.at[:, : features[i].shape[1]].add(features[i])
        return self.embed_tokens.attend(h)


def deepstack_loss(model: Any, batch: Any) -> jax.Array:
    tokens = batch["tokens"]
    cache = init_cache(model.config, tokens.shape[0], tokens.shape[1] - 1)
    ids = 0 * tokens[:, :-1] + 1
    logits = model(tokens[:, :-1], batch["image"], cache, ids)
    return cross_entropy(logits, tokens[:, 1:])


# LLaDA: calls return a key, a bias is stored as data, `nnx.Embed` has a subclass.


class ShardedLinear(nnx.Module):
    """A raw parameter; without a bias, zeros are stored as data."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        init = jax.nn.initializers.lecun_normal()
        self.kernel = nnx.Param(
            init(rngs.params(), (inputs, outputs), dtype=jnp.float32, out_sharding=None)
        )
        self.bias = nnx.data(jnp.zeros((outputs,), out_sharding=None))

    def __call__(self, x, *, out_sharding=None):
        kernel: Any = self.kernel
        return jnp.matmul(x, kernel, out_sharding=out_sharding) + self.bias


class ShardedEmbedding(nnx.Embed):
    """Flax's embedding with another lookup."""

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        (embedding,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype)
        return embedding.at[inputs].get(out_sharding=out_sharding)


class LladaBlock(nnx.Module):
    """Dropouts take a key, and the block returns the next key."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs) -> None:
        self.attn_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=False)
        self.q_proj = ShardedLinear(dim, dim, rngs=rngs)
        self.k_proj = ShardedLinear(dim, dim, rngs=rngs)
        self.v_proj = ShardedLinear(dim, dim, rngs=rngs)
        self.attn_out = ShardedLinear(dim, dim, rngs=rngs)
        self.ff_proj = ShardedLinear(dim, 2 * dim, rngs=rngs)
        self.ff_out = ShardedLinear(2 * dim, dim, rngs=rngs)

    def __call__(self, x, key):
        h = self.attn_norm(x)
        q, k, v = (heads(p(h), 4) for p in (self.q_proj, self.k_proj, self.v_proj))
        key, subkey = jax.random.split(key)
        x = x + self.dropout(
            self.attn_out(attend(q, k, v).reshape(x.shape)), rngs=subkey
        )
        key, subkey = jax.random.split(key)
        h = self.ff_out(jax.nn.silu(self.ff_proj(x)))
        return x + self.dropout(h, rngs=subkey), key


class Llada(nnx.Module):
    """A diffusion model of text."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        init = partial(nnx.initializers.normal(0.1), out_sharding=None)
        self.wte = ShardedEmbedding(64, 16, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([LladaBlock(16, rngs=rngs) for _ in range(2)])
        self.ff_out = ShardedLinear(16, 64, rngs=rngs)

    def __call__(self, tokens, key):
        x, hidden_states = self.wte(tokens), []
        for block in self.blocks:
            hidden_states.append(x)
            x, key = block(x, key)
        return self.ff_out(x), key, hidden_states


def masked_loss(model: Any, batch: Any) -> jax.Array:
    key = jax.random.key(11)
    key, subkey = jax.random.split(key)
    is_masked = jax.random.bernoulli(subkey, 0.4, batch["tokens"].shape)
    logits, key, _ = model(jnp.where(is_masked, 0, batch["tokens"]), key)
    losses = -jnp.take_along_axis(
        nnx.log_softmax(logits), batch["tokens"][..., None], axis=-1
    )[..., 0]
    return (losses * is_masked).sum() / is_masked.sum()


# Mamba 2: a cache in a registered dataclass, chunks, the loss among the outputs.


@jax.tree_util.register_pytree_node_class
@dataclass
class MambaCache:
    """Cached states of all layers."""

    ssm_states: list
    conv_states: list

    def tree_flatten(self):
        return (self.ssm_states, self.conv_states), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(ssm_states=list(children[0]), conv_states=list(children[1]))


def segsum(x):
    total = jnp.cumsum(x, axis=-1)
    mask = jnp.tril(jnp.ones((x.shape[-1], x.shape[-1]), dtype=bool))
    return jnp.where(mask, total[..., :, None] - total[..., None, :], -jnp.inf)


class DepthwiseConv1d(nnx.Module):
    """A causal convolution that also returns its last inputs."""

    def __init__(self, features: int, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(
            in_features=features,
            out_features=features,
            kernel_size=(3,),
            padding=((0, 0),),
            feature_group_count=features,
            rngs=rngs,
        )

    def __call__(self, x, conv_state=None):
        before = jnp.zeros_like(x[:, :2]) if conv_state is None else conv_state
        padded = jnp.concatenate([before, x], axis=1)
        return self.conv(padded), padded[:, -2:]


class Mamba2Mixer(nnx.Module):
    """State space duality in chunks; activations come from a dict of functions."""

    def __init__(self, dim: int, layer_idx: int, *, rngs: nnx.Rngs) -> None:
        self.layer_idx, self.inner, self.state, self.chunk = layer_idx, 2 * dim, 4, 4
        self.act = {"silu": nnx.silu}["silu"]
        self.in_proj = nnx.Linear(dim, 2 * self.inner + 2 * 4 + 4, rngs=rngs)
        self.conv1d = DepthwiseConv1d(self.inner + 8, rngs=rngs)
        start = jnp.exp(jax.random.uniform(rngs.params(), (4,)) * 2 - 4)
        self.dt_bias = nnx.Param(start + jnp.log(-jnp.expm1(-start)))
        self.A_log = nnx.Param(
            jnp.log(jax.random.uniform(rngs.params(), (4,), minval=1.0, maxval=4.0))
        )
        self.D = nnx.Param(jnp.ones((4,)))
        self.out_proj = nnx.Linear(self.inner, dim, rngs=rngs)

    def __call__(self, x, conv_state=None):
        z, xbc, dt = jnp.split(
            self.in_proj(x), [self.inner, 2 * self.inner + 8], axis=-1
        )
        xbc, conv_state = self.conv1d(xbc, conv_state=conv_state)
        xs, b, c = jnp.split(self.act(xbc), [self.inner, self.inner + 4], axis=-1)
        dt = jnp.clip(nnx.softplus(dt + self.dt_bias[:]), 0.0, float("inf"))
        u, decay = heads(xs, 4) * dt[..., None], -jnp.exp(self.A_log[:]) * dt

        def chunks(t):
            return t.reshape(t.shape[0], -1, self.chunk, *t.shape[2:])

        u, decay, b, c = (chunks(t) for t in (u, decay, b, c))
        decay = jnp.transpose(decay, (0, 3, 1, 2))
        total = jnp.cumsum(decay, axis=-1)
        inside = jnp.exp(segsum(decay))
        y = jnp.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, inside, u)
        states = jnp.einsum(
            "bcln,bhcl,bclhp->bchpn", b, jnp.exp(total[..., -1:] - total), u
        )
        states = jnp.concatenate([jnp.zeros_like(states[:, :1]), states], axis=1)
        ends = jnp.pad(total[..., -1], ((0, 0), (0, 0), (1, 0)))
        states = jnp.einsum("bhzc,bchpn->bzhpn", jnp.exp(segsum(ends)), states)
        states, last = states[:, :-1], states[:, -1]
        y = y + jnp.einsum("bcln,bchpn,bhcl->bclhp", c, states, jnp.exp(total))
        y = y.reshape(*x.shape[:2], 4, -1) + self.D[:][:, None] * heads(xs, 4)
        y = y.reshape(*x.shape[:2], -1) * nnx.silu(z)
        return x + self.out_proj(y), conv_state, last


class Mamba2(nnx.Module):
    """Returns a dict, which has the loss if labels are given."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embedder = nnx.Embed(64, 16, rngs=rngs)
        self.layers = nnx.List([Mamba2Mixer(16, i, rngs=rngs) for i in range(2)])
        self.final_norm = nnx.RMSNorm(16, rngs=rngs)
        self.lm_head = None

    def __call__(self, tokens, labels=None, cache: MambaCache | None = None):
        x, kept = self.embedder(tokens), MambaCache([], [])
        for i, layer in enumerate(self.layers):
            before = None if cache is None else cache.conv_states[i]
            x, conv_state, ssm_state = layer(x, conv_state=before)
            kept.conv_states.append(conv_state)
            kept.ssm_states.append(ssm_state)
        logits = self.final_norm(x) @ self.embedder.embedding[:].T
        loss = None if labels is None else cross_entropy(logits[:, :-1], labels[:, 1:])
        return {"logits": logits, "loss": loss, "cache": kept}


def returned_loss(model: Any, batch: Any) -> jax.Array:
    tokens = batch["tokens"][:, :12]
    return model(tokens, labels=tokens)["loss"]


# UMT5: a mutable config that is copied, lists of sublayers, outputs in tuples.


@dataclass
class T5Config:
    """Sizes; the decoder's config is a modified copy."""

    d_model: int = 16
    num_layers: int = 2
    is_decoder: bool = False
    dropout_rate: float = 0.1
    act: str = "gelu"


class T5Attention(nnx.Module):
    """Attention with a table of biases, which every layer computes again."""

    def __init__(
        self, config: T5Config, *, has_relative_attention_bias=False, rngs: nnx.Rngs
    ) -> None:
        super().__init__()
        self.is_decoder = config.is_decoder
        self.has_relative_attention_bias = has_relative_attention_bias
        linear = partial(
            nnx.Linear,
            config.d_model,
            config.d_model,
            use_bias=False,
            precision=jax.lax.Precision.HIGHEST,
            rngs=rngs,
        )
        self.q, self.k, self.v, self.o = linear(), linear(), linear(), linear()
        self.dropout = nnx.Dropout(config.dropout_rate, deterministic=False, rngs=rngs)
        if self.has_relative_attention_bias:
            self.relative_attention_bias = nnx.Embed(8, 4, rngs=rngs)

    def __call__(self, x, encoded=None, mask=None):
        seen = x if encoded is None else encoded
        q, k, v = heads(self.q(x), 4), heads(self.k(seen), 4), heads(self.v(seen), 4)
        scores = jnp.einsum("binc,bjnc->bnij", q, k)
        if self.has_relative_attention_bias:
            far = jnp.arange(k.shape[1])[None] - jnp.arange(q.shape[1])[:, None]
            bucket = (far > 0) * 4 + jnp.minimum(jnp.abs(far), 3)
            scores += self.relative_attention_bias(bucket).transpose(2, 0, 1)[None]
        scores = scores if mask is None else scores + mask
        weights = self.dropout(jax.nn.softmax(scores, axis=-1))
        out = jnp.einsum("bnij,bjnc->binc", weights, v)
        return self.dropout(self.o(out.reshape(x.shape)))


class T5Part(nnx.Module):
    """A residual sublayer: a custom norm, then attention or an MLP."""

    def __init__(self, config: T5Config, part: Any, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.scale = nnx.Param(jnp.ones(config.d_model), dtype=jnp.float32)
        self.part = part
        self.dropout = nnx.Dropout(config.dropout_rate, deterministic=False, rngs=rngs)

    def __call__(self, x, *args):
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        return x + self.dropout(self.part(self.scale * normed, *args))


class T5Block(nnx.Module):
    """Two or three sublayers in a list, found by index; it returns a tuple."""

    def __init__(self, config: T5Config, layer_idx: int, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.is_decoder = config.is_decoder
        attention = partial(T5Attention, config, rngs=rngs)
        self.layer = nnx.List()
        self.layer.append(
            T5Part(config, attention(has_relative_attention_bias=True), rngs=rngs)
        )
        if self.is_decoder:
            self.layer.append(T5Part(config, attention(), rngs=rngs))
        mlp = nnx.Sequential(
            nnx.Linear(16, 32, use_bias=False, rngs=rngs),
            {"gelu": nnx.gelu}[config.act],
            nnx.Linear(32, 16, use_bias=False, rngs=rngs),
        )
        self.layer.append(T5Part(config, mlp, rngs=rngs))

    def __call__(self, x, mask=None, encoded=None):
        x = self.layer[0](x, None, mask)
        if self.is_decoder and encoded is not None:
            x = self.layer[1](x, encoded)
        return (self.layer[-1](x),)


class T5Stack(nnx.Module):
    """An encoder or a decoder, depending on the config."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.embed_tokens = nnx.Embed(64, config.d_model, rngs=rngs)
        self.is_decoder = config.is_decoder
        self.block = nnx.List(
            [T5Block(config, layer_idx=i, rngs=rngs) for i in range(config.num_layers)]
        )

    def __call__(self, tokens, encoded=None):
        mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
        mask = (1.0 - mask) * jnp.finfo(jnp.float32).min if self.is_decoder else None
        x = self.embed_tokens(tokens)
        for block in self.block:
            x = block(x, mask, encoded)[0]
        return x


class UMT5(nnx.Module):
    """An encoder, a decoder, and a head that the caller applies."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.config = config = T5Config()
        encoder_config = copy.deepcopy(config)
        self.encoder = T5Stack(encoder_config, rngs=rngs)
        decoder_config = copy.deepcopy(config)
        decoder_config.is_decoder, decoder_config.num_layers = True, 1
        self.decoder = T5Stack(decoder_config, rngs=rngs)
        self.lm_head = nnx.Linear(16, 64, use_bias=False, rngs=rngs)

    def __call__(self, inputs, targets):
        return self.decoder(targets, self.encoder(inputs))


def umt5_loss(model: Any, batch: Any) -> jax.Array:
    hidden = model(batch["inputs"], batch["tokens"][:, :-1])
    return cross_entropy(model.lm_head(hidden), batch["tokens"][:, 1:])


# Whisper: convolutions before the encoder, flags in calls, a model without a call.


class WhisperLayer(nnx.Module):
    """Flax's attention with `decode=False` in the call; a function as an attribute."""

    def __init__(self, dim: int, *, cross: bool, rngs: nnx.Rngs) -> None:
        options: Any = {"num_heads": 2, "in_features": dim, "dropout_rate": 0.0}
        self.self_attn = nnx.MultiHeadAttention(**options, rngs=rngs)
        if cross:
            self.encoder_attn = nnx.MultiHeadAttention(**options, rngs=rngs)
        self.activation_fn = partial(jax.nn.gelu, approximate=False)
        self.fc1 = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.fc2 = nnx.Linear(2 * dim, dim, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(dim, use_fast_variance=False, rngs=rngs)

    def __call__(self, x, mask=None, encoded=None, decode: bool = False):
        x = x + self.self_attn(x, mask=mask, decode=decode, deterministic=True)
        if encoded is not None:
            x = x + self.encoder_attn(
                inputs_q=x, inputs_k=encoded, decode=decode, deterministic=True
            )
        return x + self.fc2(self.activation_fn(self.fc1(self.layer_norm(x))))


class Whisper(nnx.Module):
    """An encoder and a decoder, which training calls one after the other."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(3, 16, kernel_size=3, strides=1, padding=1, rngs=rngs)
        self.conv2 = nnx.Conv(16, 16, kernel_size=3, strides=2, padding=1, rngs=rngs)
        self.embed_positions = nnx.Embed(6, 16, rngs=rngs)
        self.encoder = nnx.List([WhisperLayer(16, cross=False, rngs=rngs)])
        self.embed_tokens = nnx.Embed(64, 16, rngs=rngs)
        self.decoder = nnx.List([WhisperLayer(16, cross=True, rngs=rngs)])

    def encode(self, features):
        x = jax.nn.gelu(self.conv2(jax.nn.gelu(self.conv1(features))))
        x = x + self.embed_positions(jnp.arange(self.embed_positions.num_embeddings))
        for layer in self.encoder:
            x = layer(x)
        return x

    def decode(self, tokens, encoded):
        x = self.embed_tokens(tokens)
        for layer in self.decoder:
            x = layer(x, nnx.make_causal_mask(tokens), encoded, decode=False)
        return self.embed_tokens.attend(x)

    def __call__(self, *args, **kwargs):
        raise NotImplementedError("Call encode and decode.")


def speech_loss(model: Any, batch: Any) -> jax.Array:
    logits = model.decode(batch["tokens"][:, :-1], model.encode(batch["past"]))
    return cross_entropy(logits, batch["tokens"][:, 1:])


CASES = bonsai(
    gemma3=(Gemma3, multimodal_loss),
    llada=(Llada, masked_loss),
    mamba2=(Mamba2, returned_loss),
    qwen3=(Qwen3, cached_loss),
    qwen3_vl=(Qwen3VL, deepstack_loss),
    umt5=(UMT5, umt5_loss),
    whisper=(Whisper, speech_loss),
)
