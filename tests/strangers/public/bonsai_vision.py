"""Models like Bonsai's for images and videos (github.com/jax-ml/bonsai), smaller."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.strangers.public.case import attend, bonsai, cross_entropy, heads
from tests.strangers.vision import classification_loss

# ConvNeXt: calls pass a key on, rates come from NumPy, convolutions are depthwise.


def drop_path(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(key, 1 - rate, (x.shape[0], 1, 1, 1))
    return x * keep / (1 - rate)


class ConvNeXtBlock(nnx.Module):
    """Has a parameter or `None`, depending on a number in the config."""

    def __init__(self, dim: int, rate: float, scale: float, *, rngs: nnx.Rngs) -> None:
        self.dwconv = nnx.Conv(dim, dim, (3, 3), feature_group_count=dim, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.pwconv1 = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.pwconv2 = nnx.Linear(4 * dim, dim, rngs=rngs)
        self.gamma = nnx.Param(scale * jnp.ones(dim)) if scale > 0 else None
        self.drop_path_rate = rate

    def __call__(self, x, *, rngs: jax.Array, train: bool):
        h = self.pwconv2(jax.nn.gelu(self.pwconv1(self.norm(self.dwconv(x)))))
        if self.gamma is not None:
            h = self.gamma[...] * h
        return x + drop_path(h, self.drop_path_rate, rngs) if train else x + h


class ConvNeXt(nnx.Module):
    """Stages of blocks; each block's rate is an entry of a NumPy array."""

    def __init__(self, rngs: nnx.Rngs, dims: tuple[int, ...] = (8, 16)) -> None:
        self.embedding_layer = nnx.Sequential(
            nnx.Conv(1, dims[0], (2, 2), (2, 2), rngs=rngs),
            nnx.LayerNorm(dims[0], rngs=rngs),
        )
        rates = np.split(np.linspace(0, 0.2, len(dims)), len(dims))
        self.stages = nnx.List()
        for i, dim in enumerate(dims):
            stage = nnx.List()
            if i > 0:
                stage.append(nnx.LayerNorm(dims[i - 1], rngs=rngs))
                stage.append(nnx.Conv(dims[i - 1], dim, (2, 2), (2, 2), rngs=rngs))
            stage += [ConvNeXtBlock(dim, rate, 1e-2, rngs=rngs) for rate in rates[i]]
            self.stages.append(stage)
        self.norm = nnx.LayerNorm(dims[-1], rngs=rngs)
        self.head = nnx.Linear(dims[-1], 10, rngs=rngs)

    def __call__(self, x, *, rngs: jax.Array, train: bool = False):
        x = self.embedding_layer(x)
        for stage in self.stages:
            for layer in stage:
                is_block = isinstance(layer, ConvNeXtBlock)
                x = layer(x, rngs=rngs, train=train) if is_block else layer(x)
        return self.head(self.norm(x.mean(axis=(1, 2))))


def convnext_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["image"], rngs=jax.random.key(7), train=True)
    return cross_entropy(logits, batch["label"])


# DenseNet: statistics that are not updated, lists that are indexed in a loop.


class DenseBlock(nnx.Module):
    """Norms and convolutions in two lists; the input grows with each."""

    def __init__(self, count: int, width: int, growth: int, *, rngs: nnx.Rngs) -> None:
        self.bn_layers, self.conv_layers = nnx.List(), nnx.List()
        for _ in range(count):
            self.bn_layers.append(
                nnx.BatchNorm(width, use_running_average=True, rngs=rngs)
            )
            self.conv_layers.append(
                nnx.Conv(width, growth, (3, 3), use_bias=False, rngs=rngs)
            )
            width += growth

    def __call__(self, x):
        for i in range(len(self.conv_layers)):
            h = self.conv_layers[i](nnx.relu(self.bn_layers[i](x)))
            x = jnp.concatenate([x, h], axis=-1)
        return x


class DenseNet(nnx.Module):
    """Pools with a `partial` and with a lambda."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.init_conv = nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs)
        self.init_pool = partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
        blocks = [DenseBlock(2, width, 4, rngs=rngs) for width in (8, 16)]
        self.blocks = nnx.Sequential(*blocks)
        self.final_bn = nnx.BatchNorm(24, use_running_average=True, rngs=rngs)
        self.global_average_pool = lambda x: jnp.mean(x, axis=(1, 2))
        self.linear = nnx.Linear(24, 10, rngs=rngs)

    def __call__(self, x):
        x = self.blocks(self.init_pool(self.init_conv(x)))
        return self.linear(self.global_average_pool(nnx.relu(self.final_bn(x))))


# DINOv3: registers, a module without arrays, a layer without a bias, a dict output.


class RopePositions(nnx.Module):
    """Angles for a grid of patches; the module has no arrays."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim

    def __call__(self, side: int):
        coords = 2 * jnp.arange(0.5, side) / side - 1
        grid = jnp.stack(jnp.meshgrid(coords, coords, indexing="ij"), -1).reshape(-1, 2)
        rate = 100.0 ** -jnp.arange(0.0, 1.0, 4.0 / self.head_dim)
        angles = (2 * jnp.pi * grid[:, :, None] * rate).reshape(grid.shape[0], -1)
        return jnp.cos(jnp.tile(angles, 2)), jnp.sin(jnp.tile(angles, 2))


class DinoLayer(nnx.Module):
    """Rotates only the patches; keys have no bias."""

    def __init__(self, dim: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(dim, rngs=rngs) for _ in range(2))
        self.q_proj = nnx.Linear(dim, dim, rngs=rngs)
        self.k_proj = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.v_proj = nnx.Linear(dim, dim, rngs=rngs)
        self.o_proj = nnx.Linear(dim, dim, rngs=rngs)
        self.lambda1 = nnx.Param(jnp.full((dim,), 0.1))
        self.up_proj = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.down_proj = nnx.Linear(2 * dim, dim, rngs=rngs)
        self.act_fn = nnx.gelu

    def rotate(self, x, angles):
        cos, sin = (a[None, :, None] for a in angles)
        prefix, patches = jnp.split(x, [x.shape[1] - cos.shape[1]], axis=1)
        first, second = jnp.split(patches, 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)
        return jnp.concatenate([prefix, patches * cos + turned * sin], axis=1)

    def __call__(self, x, angles):
        h = self.norm1(x)
        q, k, v = (heads(p(h), 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = attend(self.rotate(q, angles), self.rotate(k, angles), v)
        x = x + self.o_proj(out.reshape(x.shape)) * self.lambda1
        return x + self.down_proj(self.act_fn(self.up_proj(self.norm2(x))))


class Dino(nnx.Module):
    """Puts class and register tokens before the patches."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.cls_token = nnx.Param(jnp.zeros((1, 1, 16)))
        self.register_tokens = nnx.Param(jax.random.normal(rngs.params(), (1, 2, 16)))
        self.patch_embeddings = nnx.Conv(1, 16, (4, 4), strides=(4, 4), rngs=rngs)
        self.rope_embeddings = RopePositions(8)
        self.layer = nnx.List([DinoLayer(16, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, pixels):
        x = self.patch_embeddings(pixels.transpose(0, 2, 3, 1)).reshape(-1, 4, 16)
        tokens = jnp.concat([self.cls_token[...], self.register_tokens[...]], axis=1)
        x = jnp.concat([jnp.broadcast_to(tokens, (len(x), 3, 16)), x], axis=1)
        for layer in self.layer:
            x = layer(x, self.rope_embeddings(2))
        x = self.norm(x)
        return {"last_hidden_state": x, "pooler_output": x[:, 0]}


def distillation_loss(model: Any, batch: Any) -> jax.Array:
    student = model(batch["image"].transpose(0, 3, 1, 2))
    teacher = model(batch["noise"].transpose(0, 3, 1, 2))
    target = nnx.softmax(jax.lax.stop_gradient(teacher["pooler_output"]) / 0.4)
    return optax.softmax_cross_entropy(student["pooler_output"], target).mean()


# EfficientNet: optional parts, modes and random streams passed in the call.


class MBConv(nnx.Module):
    """Expands if the ratio requires it, squeezes and excites, and projects."""

    def __init__(self, width: int, ratio: int, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        inner = width * ratio
        norm = partial(nnx.BatchNorm, momentum=0.9, use_running_average=True, rngs=rngs)
        if ratio != 1:
            self.expand_conv = nnx.Conv(width, inner, (1, 1), use_bias=False, rngs=rngs)
            self.bn0 = norm(inner)
        else:
            self.expand_conv = None
            self.bn0 = None
        self.depthwise_conv = nnx.Conv(
            inner, inner, (3, 3), feature_group_count=inner, use_bias=False, rngs=rngs
        )
        self.bn1 = norm(inner)
        self.reduce = nnx.Conv(inner, 2, (1, 1), padding="VALID", rngs=rngs)
        self.expand = nnx.Conv(2, inner, (1, 1), padding="VALID", rngs=rngs)
        self.project_conv = nnx.Conv(inner, width, (1, 1), use_bias=False, rngs=rngs)

    def __call__(self, x, training: bool):
        h = x
        if self.expand_conv is not None and self.bn0 is not None:
            h = self.bn0(self.expand_conv(h), use_running_average=not training)
        h = self.bn1(self.depthwise_conv(nnx.silu(h)), use_running_average=not training)
        squeezed = nnx.silu(self.reduce(h.mean(axis=(1, 2), keepdims=True)))
        return x + self.project_conv(nnx.silu(h) * nnx.sigmoid(self.expand(squeezed)))


class EfficientNet(nnx.Module):
    """A classifier whose dropout gets random streams in the call."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.stem_conv = nnx.Conv(1, 8, (3, 3), strides=(2, 2), padding=1, rngs=rngs)
        self.blocks = nnx.List([MBConv(8, ratio, rngs=rngs) for ratio in (1, 4)])
        self.gap = partial(jnp.mean, axis=(1, 2))
        self.dropout = nnx.Dropout(rate=0.2, deterministic=False)
        self.classifier = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x, training: bool = False, rngs=None):
        x = nnx.silu(self.stem_conv(x))
        for block in self.blocks:
            x = block(x, training=training)
        x = self.dropout(self.gap(x), deterministic=not training, rngs=rngs)
        return self.classifier(x)


def efficientnet_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["image"], training=True, rngs=nnx.Rngs(dropout=3))
    return cross_entropy(logits, batch["label"])


# ResNet: a module made by its parent, one function in several attributes.


class Bottleneck(nnx.Module):
    """Gets its shortcut, or `None`, as an argument."""

    def __init__(
        self, width: int, out: int, stride: int, downsample=None, *, rngs: nnx.Rngs
    ) -> None:
        self.conv0 = nnx.Conv(width, out, (1, 1), use_bias=False, rngs=rngs)
        self.bn0 = nnx.BatchNorm(out, rngs=rngs)
        self.conv1 = nnx.Conv(
            out, out, (3, 3), strides=stride, padding=1, use_bias=False, rngs=rngs
        )
        self.bn1 = nnx.BatchNorm(out, rngs=rngs)
        self.conv2 = nnx.Conv(out, 4 * out, (1, 1), use_bias=False, rngs=rngs)
        self.downsample = downsample

    def __call__(self, x):
        h = nnx.relu(self.bn0(self.conv0(x)))
        h = self.conv2(nnx.relu(self.bn1(self.conv1(h))))
        return nnx.relu(h + (x if self.downsample is None else self.downsample(x)))


class ResNet(nnx.Module):
    """Groups in numbered attributes; a pool that is a `partial` of a lambda."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 16, (3, 3), use_bias=False, rngs=rngs)
        shortcut = nnx.Conv(16, 32, (1, 1), strides=2, use_bias=False, rngs=rngs)
        self.layer0 = Bottleneck(16, 4, 1, rngs=rngs)
        self.layer1 = Bottleneck(16, 8, 2, shortcut, rngs=rngs)
        self.pool = partial(lambda x: x.mean(axis=(1, 2)))
        self.fc = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.fc(self.pool(self.layer1(self.layer0(self.conv(x)))))


# SAM 2: complex rotations, embeddings resized in the call, a jitted part.


class MemoryAttention(nnx.Module):
    """Rotates queries and keys as complex numbers by a table."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v, self.out = (
            nnx.Linear(dim, dim, rngs=rngs) for _ in range(4)
        )

    def rotate(self, x, turns):
        turned = jax.lax.complex(x[..., 0::2], x[..., 1::2]) * turns[None, :, None]
        parts = jnp.stack([jnp.real(turned), jnp.imag(turned)], axis=-1)
        return parts.reshape(x.shape)

    def __call__(self, x, memory):
        angles = jnp.outer(jnp.arange(x.shape[1]), 10.0 ** -jnp.arange(4.0))
        turns = jax.lax.complex(jnp.cos(angles), jnp.sin(angles))
        q, k = heads(self.q(x), 2), heads(self.k(memory), 2)
        out = attend(
            self.rotate(q, turns), self.rotate(k, turns), heads(self.v(memory), 2)
        )
        return x + self.out(out.reshape(x.shape))


class Sam2(nnx.Module):
    """Encodes a prompt by random frequencies, and attends to an earlier image."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.pos_embed = nnx.Param(
            0.1 * jax.random.normal(rngs.params(), (1, 16, 2, 2))
        )
        self.gaussian_matrix = nnx.Param(jax.random.normal(rngs.params(), (2, 8)))
        self.patch_embed = nnx.Conv(1, 16, (2, 2), strides=(2, 2), rngs=rngs)
        self.no_mem_embed = nnx.Param(jnp.zeros((1, 1, 16)))
        self.memory_attention = MemoryAttention(16, rngs=rngs)
        self.mask_decoder = nnx.Linear(16, 4, rngs=rngs)

    def encode(self, x):
        x = self.patch_embed(x)
        table = jax.image.resize(self.pos_embed[...], (1, 16, *x.shape[1:3]), "cubic")
        return (x + table.transpose(0, 2, 3, 1)).reshape(x.shape[0], -1, 16)

    def __call__(self, image, memory, point):
        x = self.encode(image) + self.no_mem_embed
        x = self.memory_attention(x, self.encode(memory))
        prompt = 2 * jnp.pi * ((2 * point - 1) @ self.gaussian_matrix)
        prompt = jnp.concatenate([jnp.sin(prompt), jnp.cos(prompt)], axis=-1)
        return self.mask_decoder(x * prompt[:, None])


def mask_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["image"], batch["noise"], batch["future"][:, :2])
    target = batch["image"].reshape(-1, 16, 4) > 0
    return optax.sigmoid_binary_cross_entropy(logits, target).mean()


# U-Net: numbered attributes, skip connections, a pool made by `partial`.


class DoubleConv(nnx.Module):
    """Two convolutions, after a pool if requested."""

    def __init__(self, width: int, out: int, *, pool: bool, rngs: nnx.Rngs) -> None:
        pooled = partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
        self.maxpool = pooled if pool else None
        self.conv1 = nnx.Conv(width, out, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(out, out, (3, 3), rngs=rngs)

    def __call__(self, x):
        x = x if self.maxpool is None else self.maxpool(x)
        return nnx.relu(self.conv2(nnx.relu(self.conv1(x))))


class Segmenter(nnx.Module):
    """Halves the resolution twice, and restores it twice."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.inc = DoubleConv(1, 8, pool=False, rngs=rngs)
        self.down1 = DoubleConv(8, 16, pool=True, rngs=rngs)
        self.down2 = DoubleConv(16, 16, pool=True, rngs=rngs)
        self.up1 = nnx.ConvTranspose(
            16, 16, (2, 2), strides=(2, 2), padding="VALID", rngs=rngs
        )
        self.up2 = nnx.ConvTranspose(
            32, 8, (2, 2), strides=(2, 2), padding="VALID", rngs=rngs
        )
        self.outc = nnx.Conv(16, 2, (1, 1), rngs=rngs)

    def __call__(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x = jnp.concatenate([x2, self.up1(self.down2(x2))], axis=-1)
        return self.outc(jnp.concatenate([x1, self.up2(x)], axis=-1))


def pixel_loss(model: Any, batch: Any) -> jax.Array:
    return cross_entropy(
        model(batch["image"]), (batch["image"][..., 0] > 0).astype(int)
    )


# The VAE of Stable Diffusion: `nnx.Data` annotations, group norms, one head.


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # raised by `nnx.Data`

    class ResnetBlock(nnx.Module):
        """The class declares the shortcut as data, because it may be `None`."""

        conv_shortcut: nnx.Data[nnx.Conv | None]

        def __init__(self, width: int, out: int, rngs: nnx.Rngs) -> None:
            self.conv_shortcut = None
            if width != out:
                self.conv_shortcut = nnx.Conv(width, out, (1, 1), rngs=rngs)
            self.norm1 = nnx.GroupNorm(num_groups=4, num_features=width, rngs=rngs)
            self.conv1 = nnx.Conv(width, out, (3, 3), rngs=rngs)

        def __call__(self, x):
            h = self.conv1(nnx.silu(self.norm1(x)))
            return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class AttnBlock(nnx.Module):
    """Attention over pixels."""

    def __init__(self, channels: int, rngs: nnx.Rngs) -> None:
        self.group_norm = nnx.GroupNorm(channels, num_groups=4, rngs=rngs)
        self.to_q = nnx.Linear(channels, channels, rngs=rngs)
        self.to_k = nnx.Linear(channels, channels, rngs=rngs)
        self.to_v = nnx.Linear(channels, channels, rngs=rngs)
        self.to_out = nnx.Linear(channels, channels, rngs=rngs)

    def __call__(self, x):
        h = self.group_norm(x.reshape(x.shape[0], -1, x.shape[-1]))
        h = attend(*(heads(p(h), 1) for p in (self.to_q, self.to_k, self.to_v)))
        return x + self.to_out(h[:, :, 0]).reshape(x.shape)


class StableVAE(nnx.Module):
    """Decodes only the mean, and upsamples by resizing."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.down_blocks = nnx.List([])
        for width, out in ((1, 8), (8, 16)):
            conv = nnx.Conv(out, out, (3, 3), strides=(2, 2), rngs=rngs)
            first = nnx.Conv(width, 8, (3, 3), rngs=rngs) if width == 1 else None
            self.down_blocks.append(
                nnx.List([first, ResnetBlock(8, out, rngs), conv])
                if first
                else nnx.List([ResnetBlock(8, out, rngs), conv])
            )
        self.mid_block = AttnBlock(16, rngs)
        self.quant_conv = nnx.Conv(16, 8, (1, 1), rngs=rngs)
        self.post_quant_conv = nnx.Conv(4, 16, (1, 1), rngs=rngs)
        self.conv_out = nnx.Conv(16, 1, (3, 3), rngs=rngs)

    def __call__(self, x):
        for block in self.down_blocks:
            for layer in block:
                x = layer(x)
        mean, _ = jnp.split(self.quant_conv(self.mid_block(x)), 2, axis=-1)
        x = self.post_quant_conv(mean)
        x = jax.image.resize(x, (x.shape[0], 8, 8, x.shape[-1]), method="nearest")
        return self.conv_out(x)


def reconstruction_loss(model: Any, batch: Any) -> jax.Array:
    return optax.squared_error(model(batch["image"]), batch["image"]).mean()


# VGG: a function inside a Sequential, and in an attribute.


class VGG(nnx.Module):
    """The head consists of convolutions, a pool and a linear layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv_block0 = nnx.List([nnx.Conv(1, 8, (3, 3), rngs=rngs)])
        self.conv_block1 = nnx.List(
            [nnx.Conv(8, 8, (3, 3), rngs=rngs) for _ in range(2)]
        )
        self.global_mean_pool = lambda x: jnp.mean(x, axis=(1, 2))
        self.classifier = nnx.Sequential(
            nnx.Conv(8, 16, (3, 3), rngs=rngs),
            nnx.Conv(16, 16, (1, 1), rngs=rngs),
            self.global_mean_pool,
            nnx.Linear(16, 10, rngs=rngs),
        )

    def __call__(self, x):
        for block in (self.conv_block0, self.conv_block1):
            for conv in block:
                x = nnx.relu(conv(x))
            x = nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2), padding="VALID")
        return self.classifier(x)


# ViT: random streams or `None` in the call, dropouts without streams.


class ViTLayer(nnx.Module):
    """Attention with dropout, whose random streams the caller passes."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=dim, dropout_rate=0.1, decode=False, rngs=rngs
        )
        self.linear1 = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.linear2 = nnx.Linear(2 * dim, dim, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=False)
        self.layernorm_before = nnx.LayerNorm(dim, rngs=rngs)
        self.layernorm_after = nnx.LayerNorm(dim, rngs=rngs)

    def __call__(self, x, head_mask=None, *, rngs: nnx.Rngs | None):
        x = x + self.attention(self.layernorm_before(x), head_mask, rngs=rngs)
        h = jax.nn.gelu(self.linear1(self.layernorm_after(x)))
        return x + self.dropout(self.linear2(h), rngs=rngs)


class ViT(nnx.Module):
    """Interpolates position embeddings for other image sizes."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.projection = nnx.Conv(1, 16, (4, 4), strides=(4, 4), rngs=rngs)
        self.cls_token = nnx.Param(jax.random.normal(rngs.params(), (1, 1, 16)))
        self.pos_embeddings = nnx.Param(jax.random.normal(rngs.params(), (1, 10, 16)))
        self.layers = nnx.List([ViTLayer(16, rngs=rngs) for _ in range(2)])
        self.ln = nnx.LayerNorm(16, rngs=rngs)
        self.classifier = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x, *, rngs: nnx.Rngs | None):
        x = self.projection(x)
        b, h, w, c = x.shape
        stored = self.pos_embeddings[...]
        grid = stored[0, 1:].reshape(1, 3, 3, c)
        grid = jax.image.resize(grid, (1, h, w, c), method="bicubic")
        positions = jnp.concatenate([stored[:, :1], grid.reshape(1, h * w, c)], axis=1)
        cls_tokens = jnp.tile(self.cls_token[...], (b, 1, 1))
        x = jnp.concatenate((cls_tokens, x.reshape(b, h * w, c)), axis=1) + positions
        for layer in self.layers:
            x = layer(x, rngs=rngs)
        return self.classifier(self.ln(x)[:, 0, :])


def vit_loss(model: Any, batch: Any) -> jax.Array:
    model.train()
    logits = model(batch["image"], rngs=nnx.Rngs(0))
    return cross_entropy(logits, batch["label"])


# V-JEPA 2: videos, tokens gathered and sorted by index, an additional predictor.


@dataclass
class JepaConfig:
    """Sizes."""

    hidden_size: int = 24
    pred_hidden_size: int = 12
    num_mask_tokens: int = 2


class JepaLayer(nnx.Module):
    """Rotates each token by its position."""

    def __init__(self, size: int, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.norm1 = nnx.LayerNorm(size, rngs=rngs)
        self.query = nnx.Linear(size, size, rngs=rngs)
        self.key = nnx.Linear(size, size, rngs=rngs)
        self.value = nnx.Linear(size, size, rngs=rngs)
        self.proj = nnx.Linear(size, size, rngs=rngs)
        self.fc = nnx.Linear(size, size, rngs=rngs)

    def rotate(self, x, places):
        size = x.shape[-1] // 2
        angles = places[..., None, None] * 100.0 ** -(jnp.arange(size) / size)
        first, second = x[..., 0::2], x[..., 1::2]
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], -1)
        return turned.reshape(x.shape)

    def __call__(self, x, places):
        h = self.norm1(x)
        q, k, v = (heads(p(h), 2) for p in (self.query, self.key, self.value))
        h = attend(self.rotate(q, places), self.rotate(k, places), v)
        x = x + self.proj(h.reshape(x.shape))
        return x + self.fc(nnx.gelu(x))


def gathered(tokens, places):
    index = jnp.broadcast_to(places[..., None], (*places.shape, tokens.shape[-1]))
    return jnp.take_along_axis(tokens, index, axis=1)


class Jepa(nnx.Module):
    """The predictor gets context and mask tokens in the order of the video."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.config = config = JepaConfig()
        self.proj = nnx.Conv(
            1, config.hidden_size, (1, 4, 4), strides=(1, 4, 4), rngs=rngs
        )
        self.layer = nnx.List([JepaLayer(config.hidden_size, rngs) for _ in range(2)])
        self.predictor_embeddings = nnx.Linear(
            config.hidden_size, config.pred_hidden_size, rngs=rngs
        )
        self.mask_tokens = nnx.Param(
            jnp.zeros((config.num_mask_tokens, 1, 1, config.pred_hidden_size))
        )
        self.predictor = nnx.List([JepaLayer(config.pred_hidden_size, rngs)])
        self.out = nnx.Linear(config.pred_hidden_size, config.hidden_size, rngs=rngs)

    def __call__(self, video, context, target):
        x = self.proj(video).reshape(video.shape[0], -1, self.config.hidden_size)
        every = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        for layer in self.layer:
            x = layer(x, every)
        seen = self.predictor_embeddings(gathered(x, context))
        hidden = jnp.tile(self.mask_tokens[1], (x.shape[0], target.shape[1], 1))
        places = jnp.concatenate([context, target], axis=1)
        order = jnp.argsort(places, axis=1)
        h = gathered(jnp.concatenate([seen, hidden], axis=1), order)
        for layer in self.predictor:
            h = layer(h, jnp.take_along_axis(places, order, axis=1))
        h = gathered(h, jnp.argsort(order, axis=1))[:, context.shape[1] :]
        return {"predicted": self.out(h), "target": gathered(x, target)}


def jepa_loss(model: Any, batch: Any) -> jax.Array:
    order = jnp.argsort(batch["patches"], axis=1)
    out = model(batch["video"], context=order[:, :5], target=order[:, 5:])
    return jnp.abs(out["predicted"] - jax.lax.stop_gradient(out["target"])).mean()


CASES = bonsai(
    convnext=(ConvNeXt, convnext_loss),
    densenet121=(DenseNet, classification_loss),
    dinov3=(Dino, distillation_loss),
    efficientnet=(EfficientNet, efficientnet_loss),
    resnet=(ResNet, classification_loss),
    sam2=(Sam2, mask_loss),
    unet=(Segmenter, pixel_loss),
    vae=(StableVAE, reconstruction_loss),
    vgg19=(VGG, classification_loss),
    vit=(ViT, vit_loss),
    vjepa2=(Jepa, jepa_loss),
)
