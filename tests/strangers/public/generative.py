"""Models like Jasmine's world models and diffuse_nnx's transformers, but smaller."""

import copy
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.strangers.public.case import Public

# Jasmine: a decorated call, closures as attributes, outputs in a dict.


def patchify(videos, size: int):
    return einops.rearrange(
        videos, "b t (hn hp) (wn wp) c -> b t (hn wn) (hp wp c)", hp=size, wp=size
    )


def unpatchify(patches, size: int, side: int):
    return einops.rearrange(
        patches,
        "b t (hn wn) (hp wp c) -> b t (hn hp) (wn wp) c",
        hp=size,
        wp=size,
        hn=side // size,
    )


def positions_function(dim: int) -> Callable:
    """Returns a function whose closure has a sinusoidal table."""
    rate = jnp.exp(jnp.arange(0, dim, 2) * (-np.log(10_000.0) / dim))
    angles = jnp.arange(16.0)[:, jnp.newaxis] * rate
    table = jnp.zeros((16, dim))
    table = table.at[:, 0::2].set(jnp.sin(angles)).at[:, 1::2].set(jnp.cos(angles))

    def encode(x):
        x = x + table[jnp.newaxis, : x.shape[1], jnp.newaxis]
        return x + table[jnp.newaxis, jnp.newaxis, : x.shape[2]]

    return encode


def attention_function(is_causal: bool) -> Callable:
    """Attention with any leading dims, padded to a multiple of 4."""

    def attention_fn(query, key, value, bias=None, mask=None, **kwargs):
        def padded(x):
            x = einops.rearrange(x, "... l h k -> (...) l h k")
            return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 4), (0, 0), (0, 0)))

        length = query.shape[-3]
        size = length + -length % 4
        allowed = jnp.ones((size, size), dtype=jnp.bool_)
        allowed = allowed.at[length:, :].set(False).at[:, length:].set(False)
        out = jax.nn.dot_product_attention(
            padded(query),
            padded(key),
            padded(value),
            mask=allowed[jnp.newaxis, jnp.newaxis],
            is_causal=is_causal,
        )
        return out[..., :length, :, :].reshape(query.shape)

    return attention_fn


class AxialBlock(nnx.Module):
    """Attention over patches, then over frames; the call is rematerialised."""

    def __init__(self, dim: int, rngs: nnx.Rngs, sow_activations: bool) -> None:
        self.sow_activations = sow_activations
        attention = partial(
            nnx.MultiHeadAttention,
            num_heads=2,
            in_features=dim,
            qkv_features=dim,
            decode=False,
            rngs=rngs,
        )
        self.spatial_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.spatial_attention = attention(attention_fn=attention_function(False))
        self.temporal_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.temporal_attention = attention(attention_fn=attention_function(True))
        self.ffn_dense1 = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.ffn_dense2 = nnx.Linear(2 * dim, dim, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        x = x + self.spatial_attention(self.spatial_norm(x))
        x = x.swapaxes(1, 2)
        x = x + self.temporal_attention(self.temporal_norm(x))
        x = x.swapaxes(1, 2)
        x = x + self.ffn_dense2(jax.nn.gelu(self.ffn_dense1(x)))
        if self.sow_activations:
            self.sow(nnx.Intermediate, "activations", x)
        return x


class AxialTransformer(nnx.Module):
    """Maps frames of patches to frames of patches."""

    def __init__(
        self, inputs: int, outputs: int, rngs: nnx.Rngs, sow_activations: bool = False
    ) -> None:
        self.input_dense = nnx.Linear(inputs, 16, rngs=rngs)
        self.pos_enc = positions_function(16)
        self.blocks = nnx.List()
        self.blocks.append(AxialBlock(16, rngs, sow_activations))
        self.output_dense = nnx.Linear(16, outputs, rngs=rngs)

    def __call__(self, x):
        x = self.pos_enc(self.input_dense(x))
        for block in self.blocks:
            x = block(x)
        return self.output_dense(x)


def normalize(x):
    return x / (jnp.linalg.norm(x, ord=2, axis=-1, keepdims=True) + 1e-8)


class VectorQuantizer(nnx.Module):
    """Returns the nearest code, with straight-through gradients."""

    def __init__(self, size: int, count: int, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(stddev=1)
        self.codebook = nnx.Param(normalize(init(rngs.params(), (count, size))))
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, training: bool):
        x, codebook = normalize(x), self.codebook[...]
        distance = -jnp.matmul(x, normalize(codebook).T)
        if training:
            distance = self.drop(distance)
        indices = jnp.argmin(distance, axis=-1)
        z = codebook[indices]
        return x + jax.lax.stop_gradient(z - x), z, x, indices


class TokenizerVQVAE(nnx.Module):
    """An encoder, a quantizer and a decoder."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = AxialTransformer(16, 8, rngs)
        self.vq = VectorQuantizer(8, 32, rngs)
        self.decoder = AxialTransformer(8, 16, rngs)

    def __call__(self, batch, training: bool = True):
        z = self.encoder(patchify(batch["videos"], 4))
        quantized, codes, emb, indices = self.vq(z.reshape(-1, 8), training)
        recon = unpatchify(nnx.sigmoid(self.decoder(quantized.reshape(z.shape))), 4, 8)
        return {"recon": recon, "z": codes, "emb": emb, "indices": indices}


def tokenizer_loss(model: Any, batch: Any) -> Any:
    truth = nnx.sigmoid(batch["video"])
    inputs = {"videos": truth}
    model.train()
    outputs = model(inputs, training=True)
    mse = jnp.square(truth - outputs["recon"]).mean()
    emb, z = outputs["emb"], outputs["z"]
    q_loss = jnp.square(jax.lax.stop_gradient(emb) - z).mean()
    commitment = jnp.square(emb - jax.lax.stop_gradient(z)).mean()
    _, counts = jnp.unique_counts(jnp.ravel(outputs["indices"]), size=32, fill_value=0)
    usage = (counts != 0).mean()
    loss = mse + q_loss + 0.25 * commitment
    metrics = {"mse": mse, "loss": loss, "codebook_usage": usage}
    return loss, (outputs["recon"], metrics)


class LatentActionModel(nnx.Module):
    """Each frame has an action token beside its patches."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = AxialTransformer(16, 8, rngs)
        init = nnx.initializers.lecun_uniform()
        self.action_in = nnx.Param(init(rngs.params(), (1, 1, 1, 16)))
        self.vq = VectorQuantizer(8, 8, rngs)
        self.patch_up = nnx.Linear(16, 16, rngs=rngs)
        self.action_up = nnx.Linear(8, 16, rngs=rngs)
        self.decoder = AxialTransformer(16, 16, rngs)

    def __call__(self, batch, training: bool = True):
        patches = patchify(batch["videos"], 4)
        pad = jnp.broadcast_to(self.action_in[...], (*patches.shape[:2], 1, 16))
        z = self.encoder(jnp.concatenate((pad, patches), axis=2))[:, 1:, 0]
        quantized, codes, emb, _ = self.vq(z.reshape(-1, 8), training)
        action = self.action_up(quantized.reshape(*z.shape[:2], 1, 8))
        inputs = self.patch_up(patches[:, :-1])
        outputs = {"z": codes, "emb": emb, "recon": inputs}
        del outputs["recon"], patches
        out = self.decoder(jnp.broadcast_to(action, inputs.shape) + inputs)
        outputs["recon"] = unpatchify(nnx.sigmoid(out), 4, 8)
        return outputs


def action_loss(model: Any, batch: Any) -> jax.Array:
    truth = nnx.sigmoid(batch["video"])
    outputs = model({"videos": truth}, training=True)
    mse = jnp.square(truth[:, 1:] - outputs["recon"]).mean()
    target = jax.lax.stop_gradient(outputs["emb"])
    return mse + jnp.square(target - outputs["z"]).mean()


class DynamicsMaskGIT(nnx.Module):
    """Each row has a rate and a key, by `jax.vmap`; hidden states are sown."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.transformer = AxialTransformer(16, 32, rngs, sow_activations=True)
        self.patch_embed = nnx.Embed(32, 16, rngs=rngs)
        init = nnx.initializers.lecun_uniform()
        self.mask_token = nnx.Param(init(rngs.params(), (1, 1, 1, 16)))
        self.action_up = nnx.Linear(4, 16, rngs=rngs)

    def __call__(self, batch):
        embedded = self.patch_embed(batch["video_tokens"])
        rows = embedded.shape[0]
        key, *keys = jax.random.split(batch["mask_rng"], rows + 1)
        rate = jax.random.uniform(key, shape=(rows,), minval=0.5)
        mask = jax.vmap(
            lambda key, rate: jax.random.bernoulli(key, rate, embedded.shape[1:-1])
        )(jnp.asarray(keys), rate)
        mask = mask.at[:, 0].set(False)
        embedded = jnp.where(mask[..., None], self.mask_token[...], embedded)
        action = self.action_up(batch["latent_actions"])
        padded = jnp.pad(action, ((0, 0), (1, 0), (0, 0), (0, 0)))
        logits = self.transformer(jnp.concatenate([padded, embedded], axis=2))
        return logits[:, :, 1:], mask


def dynamics_loss(model: Any, batch: Any) -> Any:
    inputs = {
        "video_tokens": (batch["tokens"][:, :8] % 32).reshape(-1, 2, 4),
        "latent_actions": batch["future"][:, None, None],
        "mask_rng": jax.random.key(3),
    }
    logits, mask = model(inputs)
    nnx.pop(model, nnx.Intermediate)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, inputs["video_tokens"]
    )
    loss = (mask * losses).sum() / mask.sum()
    accuracy = (mask * (logits.argmax(-1) == inputs["video_tokens"])).sum() / mask.sum()
    return loss, {"masked_token_accuracy": accuracy}


class DynamicsDiffusion(nnx.Module):
    """Draws steps and noise in the model, from a key in its input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.denoise_steps = 8
        self.diffusion_transformer = AxialTransformer(16, 16, rngs)
        self.action_up = nnx.Linear(4, 16, rngs=rngs)
        self.timestep_embed = nnx.Embed(8, 16, rngs=rngs)

    def __call__(self, batch):
        time_key, noise_key = jax.random.split(batch["rng"])
        latents = batch["token_latents"]
        step = jax.random.randint(
            time_key, latents.shape[:2], minval=0, maxval=self.denoise_steps
        )
        embedded = self.timestep_embed(step)[:, :, None]
        t = (step / self.denoise_steps)[:, :, jnp.newaxis, jnp.newaxis]
        noise = jax.random.normal(noise_key, latents.shape)
        noised = (1 - (1 - 1e-5) * t) * noise + t * latents
        action = self.action_up(batch["latent_actions"])
        action = jnp.pad(action, ((0, 0), (1, 0), (0, 0), (0, 0)))
        inputs = jnp.concatenate([action, embedded, noised], axis=2)
        return self.diffusion_transformer(inputs)[:, :, 2:], t


def world_loss(model: Any, batch: Any) -> jax.Array:
    latents = patchify(batch["video"], 4)
    inputs = {
        "token_latents": latents,
        "latent_actions": batch["future"][:, None, None],
        "rng": jax.random.key(5),
    }
    predicted, t = model(inputs)
    weight = 0.9 * t + 0.1
    return (weight * jnp.square(predicted - latents)).mean()


# diffuse_nnx: an interface that uses its network's streams and copies.


class Buffer(nnx.Variable):
    """A table that is not trained."""


class TimeEmbedder(nnx.Module):
    """Applies `stop_gradient` to a parameter."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs) -> None:
        self.gaussian_basis = nnx.Param(jax.random.normal(rngs.params(), (4,)))
        self.mlp = nnx.Sequential(
            nnx.Linear(8, dim, rngs=rngs), nnx.silu, nnx.Linear(dim, dim, rngs=rngs)
        )

    def __call__(self, t):
        t = (
            t[..., None]
            * jax.lax.stop_gradient(self.gaussian_basis[None, :])
            * 2
            * np.pi
        )
        return self.mlp(jnp.concatenate([jnp.sin(t), jnp.cos(t)], axis=-1))


class ClassEmbedder(nnx.Module):
    """Drops labels at random with a stream of the module."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs) -> None:
        self.embedding_table = nnx.Embed(11, dim, rngs=rngs)
        self.rngs, self.deterministic = rngs, False

    def __call__(self, labels):
        if not self.deterministic:
            drawn = jax.random.uniform(self.rngs.label_dropout(), (labels.shape[0],))
            labels = jnp.where(drawn < 0.1, 10, labels)
        return self.embedding_table(labels)


class DiTBlock(nnx.Module):
    """Norms without parameters; the condition gives shifts, scales and gates."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs, **attn_kwargs: Any) -> None:
        norm = partial(nnx.LayerNorm, use_scale=False, use_bias=False, rngs=rngs)
        self.norm1, self.norm2 = norm(dim), norm(dim)
        self.attn = nnx.MultiHeadAttention(
            2, dim, decode=False, rngs=rngs, **attn_kwargs
        )
        self.mlp = nnx.Sequential(
            nnx.Linear(dim, 2 * dim, rngs=rngs),
            partial(nnx.gelu, approximate=True),
            nnx.Linear(2 * dim, dim, rngs=rngs),
        )
        init = nnx.initializers.normal(0.1)
        self.adaLN_mod = nnx.Sequential(
            nnx.silu, nnx.Linear(dim, 6 * dim, kernel_init=init, rngs=rngs)
        )

    def __call__(self, x, c):
        a, b, d, e, f, g = jnp.split(self.adaLN_mod(c)[:, None], 6, axis=-1)
        x = x + d * self.attn(self.norm1(x) * (1 + b) + a)
        return x + g * self.mlp(self.norm2(x) * (1 + f) + e)


class DiT(nnx.Module):
    """Copies an embedder with `copy.deepcopy`; returns the features of all layers."""

    def __init__(
        self, *, rngs: nnx.Rngs, take_dt: bool = False, take_features: bool = False
    ) -> None:
        self.rngs, self.take_dt = rngs, take_dt
        self.hidden_size, self.return_intermediate_features = 16, take_features
        self.x_proj = nnx.Conv(
            1, 16, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs
        )
        table = np.sin(np.arange(64.0)).reshape(1, 4, 16)
        self.pe = Buffer(jnp.full((1, 4, 16), table, dtype=jnp.float32))
        self.t_embedder = TimeEmbedder(16, rngs=rngs)
        if take_dt:
            self.dt_embedder = copy.deepcopy(self.t_embedder)
        self.y_embedder = ClassEmbedder(16, rngs=rngs)
        self.blocks = nnx.List([DiTBlock(16, rngs=rngs) for _ in range(2)])
        self.final_layer = nnx.Linear(
            16, 16, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    def __call__(self, x, t, y=None, dt=None):
        side = x.shape[1]
        x = self.x_proj(x).reshape(x.shape[0], 4, 16) + self.pe
        if y is None:
            y = jnp.zeros((x.shape[0],), dtype=jnp.int32) + 10
        c = self.t_embedder(t) + self.y_embedder(y)
        if self.take_dt:
            c = c + self.dt_embedder(dt)
        features = []
        for block in self.blocks:
            x = block(x, c)
            if self.return_intermediate_features:
                features.append(x)
        out = unpatchify(self.final_layer(x)[:, None], 4, side)[:, 0]
        return out, features


class TimeDistribution(Enum):
    """The distribution that times are drawn from."""

    UNIFORM = 1
    LOGITNORMAL = 2


class SiTInterface(nnx.Module):
    """Wraps the network, uses its random streams, and returns one loss per row."""

    def __init__(self, network: nnx.Module, distribution: str) -> None:
        self.network: Any = network
        self.distribution = TimeDistribution[distribution.upper()]

    def sample_t(self, shape):
        key = self.network.rngs.time()
        if self.distribution == TimeDistribution.LOGITNORMAL:
            return nnx.sigmoid(jax.random.normal(key, shape))
        return jax.random.uniform(key, shape)

    @staticmethod
    def right(t, x):
        return t.reshape(-1, *[1] * (x.ndim - 1))

    def loss(self, x, y):
        t = self.sample_t((x.shape[0],))
        noise = jax.random.normal(self.network.rngs.noise(), x.shape)
        mixed = (1 - self.right(t, x)) * x + self.right(t, x) * noise
        out, features = self.network(mixed, t, y=y)
        losses = jnp.mean((out - (noise - x)) ** 2, axis=list(range(1, x.ndim)))
        return {"loss": losses, "features": features}

    def __call__(self, x, *args, **kwargs):
        return self.loss(x, *args, **kwargs)


class MeanFlowInterface(SiTInterface):
    """Takes the derivative along the path with `jax.jvp` through the network."""

    def loss(self, x, y):
        t, r = self.sample_t((x.shape[0],)), self.sample_t((x.shape[0],))
        t, r = jnp.maximum(t, r), jnp.minimum(t, r)
        is_flow = jnp.arange(t.shape[0]) < int(t.shape[0] * 0.75)
        r = jnp.where(is_flow, t, r)
        noise = jax.random.normal(self.network.rngs.noise(), x.shape)
        velocity = noise - x
        mixed = (1 - self.right(t, x)) * x + self.right(t, x) * noise
        self.network.y_embedder.deterministic = True

        def u_fn(x, t, r):
            return self.network(x, t, y=y, dt=t - r)[0]

        ones, zeros = jnp.ones_like(t), jnp.zeros_like(r)
        u, dudt = jax.jvp(u_fn, (mixed, t, r), (velocity, ones, zeros))
        target = velocity - jnp.clip(self.right(t - r, x), 0.0, 1.0) * dudt
        losses = jnp.mean((u - jax.lax.stop_gradient(target)) ** 2, axis=(1, 2, 3))
        weight = 1 / (losses + 1e-3)
        return {"loss": jax.lax.stop_gradient(weight) * losses}


class Repa(nnx.Module):
    """Wraps an interface, and enables the network's feature outputs."""

    def __init__(self, interface: Any) -> None:
        self.interface = interface
        self.projector = nnx.Linear(16, 8, rngs=interface.network.rngs)
        self.interface.network.return_intermediate_features = True

    def __call__(self, x, feature, y):
        found = self.interface(x, y)
        ours = self.projector(found["features"][0].reshape(-1, 16))
        ours = ours.reshape(x.shape[0], -1, 8)
        ours = ours / jnp.linalg.norm(ours, axis=-1, keepdims=True)
        repa = -(ours * feature / jnp.linalg.norm(feature)).sum(axis=-1)
        return {"loss": found["loss"] + 0.5 * repa.mean(axis=1), "repa": repa}


STREAMS: Any = {"time": 1, "noise": 2, "label_dropout": 3}


def sit(rngs: nnx.Rngs) -> nnx.Module:
    return SiTInterface(
        DiT(rngs=nnx.Rngs(0, **STREAMS)), "logit_normal".replace("_", "")
    )


def mean_flow(rngs: nnx.Rngs) -> nnx.Module:
    return MeanFlowInterface(DiT(rngs=nnx.Rngs(0, **STREAMS), take_dt=True), "uniform")


def repa(rngs: nnx.Rngs) -> nnx.Module:
    return Repa(sit(rngs))


def latent_loss(model: Any, batch: Any) -> Any:
    found = model(batch["image"], y=batch["label"])
    return found["loss"].mean(), {"worst": found["loss"].max()}


def repa_loss(model: Any, batch: Any) -> Any:
    found = model(
        batch["image"], batch["noise"].reshape(-1, 4, 16)[..., :8], batch["label"]
    )
    return found["loss"].mean(), {k: x.mean() for k, x in found.items()}


JASMINE: Any = partial(Public, repository="p-doom/jasmine", is_built=True)
DIFFUSE: Any = partial(Public, repository="willisma/diffuse_nnx")

CASES = {
    "jasmine tokenizer": JASMINE(
        path="jasmine/models/tokenizer.py",
        build=TokenizerVQVAE,
        loss=tokenizer_loss,
    ),
    "jasmine actions": JASMINE(
        path="jasmine/models/lam.py", build=LatentActionModel, loss=action_loss
    ),
    "jasmine maskgit": JASMINE(
        path="jasmine/models/dynamics.py", build=DynamicsMaskGIT, loss=dynamics_loss
    ),
    "jasmine diffusion": JASMINE(
        path="jasmine/models/dynamics.py", build=DynamicsDiffusion, loss=world_loss
    ),
    "diffuse_nnx sit": DIFFUSE(
        path="networks/transformers/dit_nnx.py", build=sit, loss=latent_loss
    ),
    "diffuse_nnx mean flow": DIFFUSE(
        path="interfaces/continuous.py", build=mean_flow, loss=latent_loss
    ),
    "diffuse_nnx repa": DIFFUSE(path="interfaces/repa.py", build=repa, loss=repa_loss),
}
