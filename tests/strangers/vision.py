"""Image models: classifiers, a U-Net, two towers, a variational autoencoder."""

from functools import partial
from typing import Any

import einops
import jax
import jax.numpy as jnp
import optax
from flax import nnx


def classification_loss(model: Any, batch: Any) -> tuple[jax.Array, Any]:
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


class CNN(nnx.Module):
    """Flax's MNIST tutorial: batch statistics, dropout, pooling made by `partial`."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.1)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(64, 32, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.1, rngs=rngs)
        self.linear2 = nnx.Linear(32, 10, rngs=rngs)
        self.dropout1.rngs = self.dropout2.rngs  # both use one stream

    def __call__(self, x):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x)))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        return self.linear2(self.dropout2(nnx.relu(self.linear1(x))))


class TransformerEncoder(nnx.Module):
    """A layer of a ViT; its MLP is a `nnx.Sequential` that contains functions."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(dim, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, dim, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(dim, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(dim, 4 * dim, rngs=rngs),
            nnx.gelu,
            nnx.Linear(4 * dim, dim, rngs=rngs),
        )

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nnx.Module):
    """The JAX AI stack's ViT: class token, positions, layers in a `nnx.Sequential`."""

    def __init__(self, rngs: nnx.Rngs, dim: int = 32, num_layers: int = 2) -> None:
        self.patch_embeddings = nnx.Conv(
            1, dim, kernel_size=(4, 4), strides=(4, 4), padding="VALID", rngs=rngs
        )
        init = jax.nn.initializers.truncated_normal(0.02)
        self.position_embeddings = nnx.Param(init(rngs.params(), (1, 5, dim)))
        self.cls_token = nnx.Param(jnp.zeros((1, 1, dim)))
        self.encoder = nnx.Sequential(
            *[TransformerEncoder(dim, rngs=rngs) for _ in range(num_layers)]
        )
        self.final_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.classifier = nnx.Linear(dim, 10, rngs=rngs)

    def __call__(self, x):
        patches = einops.rearrange(self.patch_embeddings(x), "b h w c -> b (h w) c")
        cls_token = jnp.tile(self.cls_token[...], (x.shape[0], 1, 1))
        x = jnp.concatenate([cls_token, patches], axis=1) + self.position_embeddings
        return self.classifier(self.final_norm(self.encoder(x))[:, 0])


class ResBlock(nnx.Module):
    """Group norms, a time embedding, and a shortcut only where the width changes."""

    def __init__(self, cin: int, cout: int, time_dim: int, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.GroupNorm(cin, num_groups=4, rngs=rngs)
        self.conv1 = nnx.Conv(cin, cout, (3, 3), rngs=rngs)
        self.time = nnx.Linear(time_dim, cout, rngs=rngs)
        self.norm2 = nnx.GroupNorm(cout, num_groups=4, rngs=rngs)
        self.conv2 = nnx.Conv(cout, cout, (3, 3), rngs=rngs)
        if cin != cout:
            self.shortcut = nnx.Conv(cin, cout, (1, 1), use_bias=False, rngs=rngs)

    def __call__(self, x, time):
        h = self.conv1(nnx.silu(self.norm1(x))) + self.time(time)[:, None, None, :]
        h = self.conv2(nnx.silu(self.norm2(h)))
        return h + (self.shortcut(x) if hasattr(self, "shortcut") else x)


class UNet(nnx.Module):
    """A denoiser that halves and restores the resolution, with skip connections."""

    def __init__(self, rngs: nnx.Rngs, channels: tuple[int, ...] = (8, 16)) -> None:
        self.time_mlp = nnx.Sequential(
            nnx.Linear(8, 16, rngs=rngs), nnx.silu, nnx.Linear(16, 16, rngs=rngs)
        )
        self.conv_in = nnx.Conv(1, channels[0], (3, 3), rngs=rngs)
        self.down, self.downsample = nnx.List(), nnx.List()
        width = channels[0]
        for c in channels:
            self.down.append(ResBlock(width, c, 16, rngs=rngs))
            self.downsample.append(nnx.Conv(c, c, (3, 3), strides=(2, 2), rngs=rngs))
            width = c
        self.mid = ResBlock(width, width, 16, rngs=rngs)
        self.upsample, self.up = nnx.List(), nnx.List()
        for c in reversed(channels):
            self.upsample.append(
                nnx.ConvTranspose(width, c, (4, 4), strides=(2, 2), rngs=rngs)
            )
            self.up.append(ResBlock(2 * c, c, 16, rngs=rngs))
            width = c
        self.conv_out = nnx.Conv(width, 1, (1, 1), rngs=rngs)

    def __call__(self, x, t):
        angles = t[:, None] * 2.0 ** jnp.arange(4)
        time = self.time_mlp(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        x, kept = self.conv_in(x), []
        for block, downsample in zip(self.down, self.downsample, strict=True):
            x = block(x, time)
            kept.append(x)
            x = downsample(x)
        x = self.mid(x, time)
        for upsample, block in zip(self.upsample, self.up, strict=True):
            x = block(jnp.concatenate([upsample(x), kept.pop()], axis=-1), time)
        return self.conv_out(x)


def denoising_loss(model: Any, batch: Any) -> jax.Array:
    t = batch["time"][:, None, None, None]
    noisy = (1 - t) * batch["image"] + t * batch["noise"]
    velocity = batch["noise"] - batch["image"]
    return optax.squared_error(model(noisy, batch["time"]), velocity).mean()


class CLIP(nnx.Module):
    """Two towers in an `nnx.Dict`, a scalar temperature, and two outputs."""

    def __init__(self, rngs: nnx.Rngs, dim: int = 32) -> None:
        self.patches = nnx.Conv(1, dim, (4, 4), strides=(4, 4), rngs=rngs)
        self.words = nnx.Embed(64, dim, rngs=rngs)
        self.towers = nnx.Dict(
            {
                name: nnx.Sequential(
                    nnx.Linear(dim, 2 * dim, rngs=rngs),
                    nnx.relu,
                    nnx.Linear(2 * dim, dim, use_bias=False, rngs=rngs),
                )
                for name in ("image", "text")
            }
        )
        self.logit_scale = nnx.Param(jnp.array(2.6592))

    def __call__(self, image, tokens):
        inputs = {
            "image": self.patches(image).mean(axis=(1, 2)),
            "text": self.words(tokens).mean(axis=1),
        }
        out = {name: self.towers[name](x) for name, x in inputs.items()}
        out = {
            k: x / jnp.linalg.norm(x, axis=-1, keepdims=True) for k, x in out.items()
        }
        logits = out["image"] @ out["text"].T * jnp.exp(self.logit_scale[...])
        return logits, logits.T


def contrastive_loss(model: Any, batch: Any) -> Any:
    labels = jnp.arange(batch["image"].shape[0])
    both = model(batch["image"], batch["tokens"])
    each = (optax.softmax_cross_entropy_with_integer_labels(x, labels) for x in both)
    return sum(x.mean() for x in each) / 2


class Loss(nnx.Variable):
    """A Variable for a layer's contribution to the loss."""


class VAE(nnx.Module):
    """Flax's example: noise in the forward pass, and a loss that is sown and popped."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Linear(64, 32, rngs=rngs)
        self.mean = nnx.Linear(32, 8, rngs=rngs)
        self.std = nnx.Linear(32, 8, rngs=rngs)
        self.decoder = nnx.Sequential(
            nnx.Linear(8, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 64, rngs=rngs)
        )
        self.rngs = rngs

    def __call__(self, x):
        hidden = nnx.relu(self.encoder(x.reshape(x.shape[0], -1)))
        mean, std = self.mean(hidden), jnp.exp(self.std(hidden))
        kl = jnp.mean((mean**2 + std**2 - 2 * jnp.log(std) - 1).sum(-1) / 2)
        self.sow(Loss, "kl", kl)
        z = mean + std * jax.random.normal(self.rngs.noise(), mean.shape)
        return self.decoder(z).reshape(x.shape)


def evidence_loss(model: Any, batch: Any) -> jax.Array:
    logits, target = model(batch["image"]), batch["image"] > 0
    kl = sum(jax.tree.leaves(nnx.pop(model, Loss)))
    return optax.sigmoid_binary_cross_entropy(logits, target).mean() + 0.1 * kl
