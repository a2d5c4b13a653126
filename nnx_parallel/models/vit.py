"""A vision transformer, which treats an image as a sequence of patches.

The model is written for one device. Its dims have the same names as in `models.gpt`, so
the same strategies can place them. `TensorParallel` splits heads and hidden units, and
`Pipeline` splits the layers. `models.vit_config` has the variants and their references.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.errors import suggests_names
from nnx_parallel.layers import Dense, Embed, Stack, name_products, named, project
from nnx_parallel.layers.attention import attention
from nnx_parallel.models.rotary import rotate_by
from nnx_parallel.models.vit_config import FAMILIES, ViTConfig
from nnx_parallel.sharding import constrain
from nnx_parallel.weights.family import Published


def _norm(config: ViTConfig, *, rngs: nnx.Rngs, name: str = "embed") -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.sizes[name],
        epsilon=config.norm_epsilon,
        scale_init=named(nnx.initializers.ones_init(), name),
        bias_init=named(nnx.initializers.zeros_init(), name),
        rngs=rngs,
    )


def _dense(
    config: ViTConfig,
    in_names: str,
    out_names: str,
    *,
    rngs: nnx.Rngs,
    use_bias: bool = True,
) -> Dense:
    into, out = (
        {name: config.sizes[name] for name in names.split()}
        for names in (in_names, out_names)
    )
    init = nnx.initializers.normal(0.02)
    return Dense(into, out, rngs=rngs, use_bias=use_bias, kernel_init=init)


def _vector(config: ViTConfig, value: float, *leading: int) -> nnx.Param:
    """Returns a parameter (*leading, embed), which starts with equal values."""
    init = named(nnx.initializers.constant(value), *(None for _ in leading), "embed")
    return nnx.Param(init(jax.random.key(0), (*leading, config.embed_dim)))


def _activate(config: ViTConfig, up: jax.Array, *gate: jax.Array) -> jax.Array:
    if config.activation == "swiglu":
        return jax.nn.silu(gate[0]) * up
    if config.activation == "quick_gelu":
        return up * jax.nn.sigmoid(1.702 * up)
    return jax.nn.gelu(up, approximate=not config.exact_gelu)


def _angles(config: ViTConfig) -> np.ndarray:
    """Returns the rotation of each token in radians, float32 (seq, head_dim / 2).

    The first half of the angles is proportional to the row of the patch's centre, and
    the second half to its column. Rows and columns range from -1 to 1. Tokens before
    the patches do not rotate.
    """
    side, head_dim = config.image_size // config.patch_size, config.sizes["head_dim"]
    exponents = (np.arange(head_dim // 4) * (4 / head_dim)).astype(np.float32)
    speeds = 1 / np.float32(config.rope_theta) ** exponents
    centres = 2 * ((np.arange(side, dtype=np.float32) + np.float32(0.5)) / side) - 1
    rows_and_columns = np.stack(np.meshgrid(centres, centres, indexing="ij"), axis=-1)
    angles = 2 * math.pi * rows_and_columns.reshape(-1, 2, 1) * speeds
    angles = angles.reshape(len(angles), -1).astype(np.float32)
    return np.pad(angles, ((config.num_prefix, 0), (0, 0)))


class Block(nnx.Module):
    """Attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        dense, norm = partial(_dense, config, rngs=rngs), partial(_norm, config)
        bias = config.qkv_bias
        self.attention_norm = norm(rngs=rngs)
        self.query = dense("embed", "heads head_dim", use_bias=bias)
        self.key = dense("embed", "heads head_dim", use_bias=config.key_bias)
        self.value = dense("embed", "heads head_dim", use_bias=bias)
        has_norms = config.qk_norm
        self.query_norm = norm(rngs=rngs, name="head_dim") if has_norms else None
        self.key_norm = norm(rngs=rngs, name="head_dim") if has_norms else None
        self.out = dense("heads head_dim", "embed")
        self.mlp_norm = norm(rngs=rngs)
        self.up = dense("embed", "mlp")
        self.gate = dense("embed", "mlp") if config.activation == "swiglu" else None
        self.down = dense("mlp", "embed")
        scale = config.layer_scale
        self.attention_scale = None if scale is None else _vector(config, scale)
        self.mlp_scale = None if scale is None else _vector(config, scale)
        self.dropout = nnx.Dropout(
            config.dropout, rngs=rngs if config.dropout else None
        )
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, seq, embed) to the same shape."""
        normed = self.attention_norm(x)
        # (batch, seq, embed) -> (batch, seq, heads, head_dim)
        query, key, value = (
            constrain(y, "batch", "seq", "heads", "head_dim")
            for y in project(normed, self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.config.positions == "rotary":
            angles = jnp.asarray(_angles(self.config))
            query, key = rotate_by(query, angles), rotate_by(key, angles)
        attended = self.out(attention(query, key, value))
        attended = checkpoint_name(attended, "attention_out")
        x = self._add(x, attended, self.attention_scale)
        return self._add(x, _run_mlp(self, self.mlp_norm(x)), self.mlp_scale)

    def _add(self, x: jax.Array, out: jax.Array, scale: nnx.Param | None) -> jax.Array:
        """Adds the output of attention or of the MLP to the residual stream."""
        if scale is not None:
            out = out * jnp.reshape(scale[...], (1, 1, -1)).astype(out.dtype)
        return constrain(x + self.dropout(out), "batch", "seq", "embed")


class AttentionPool(nnx.Module):
    """Attention with one learned query, the probe, followed by an MLP."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        dense = partial(_dense, config, rngs=rngs)
        init = named(nnx.initializers.normal(config.embed_dim**-0.5), "embed")
        self.probe = nnx.Param(init(rngs.params(), (config.embed_dim,)))
        self.query = dense("embed", "heads head_dim")
        self.key = dense("embed", "heads head_dim")
        self.value = dense("embed", "heads head_dim")
        self.out = dense("heads head_dim", "embed")
        self.mlp_norm = _norm(config, rngs=rngs)
        self.up = dense("embed", "mlp")
        self.gate = dense("embed", "mlp") if config.activation == "swiglu" else None
        self.down = dense("mlp", "embed")
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, seq, embed) to (batch, embed)."""
        probe = self.query(self.probe[...].astype(x.dtype))  # (heads, head_dim)
        query = jnp.broadcast_to(probe, (len(x), 1, *probe.shape))
        query, key, value = (
            constrain(y, "batch", "seq", "heads", "head_dim")
            for y in (query, *project(x, self.key, self.value))
        )
        x = constrain(self.out(attention(query, key, value)), "batch", "seq", "embed")
        x = x + _run_mlp(self, self.mlp_norm(x))
        return constrain(x[:, 0], "batch", "embed")


def _run_mlp(layer: Block | AttentionPool, x: jax.Array) -> jax.Array:
    """Runs the MLP of a layer: (batch, seq, embed) to the same shape."""
    layers = [layer.up] if layer.gate is None else [layer.up, layer.gate]
    return layer.down(_activate(layer.config, *name_products(project(x, *layers))))


class ViT(Published):
    """A vision transformer, which maps images to logits of classes or to features.

    Train it with `classification_loss`. `from_pretrained` reads a
    ``ViTForImageClassification``, SigLIP, DINOv3, and the vision transformers of timm.
    Images for such a model must have the mean and standard deviation that are in
    ``preprocessor_config.json``, or in the ``pretrained_cfg`` of timm's
    ``config.json``.

    Args:
        config: Shape of the model.
        rngs: Keys for parameters and dropout.

    Example:
        >>> model = ViT(ViTConfig.tiny(), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((2, 8, 8, 3))).shape
        (2, 10)
        >>> model.features(jnp.ones((2, 8, 8, 3))).shape
        (2, 16, 64)
    """

    families = FAMILIES
    config_type = ViTConfig

    @suggests_names
    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.patches = nnx.Linear(
            3 * config.patch_size**2,
            config.embed_dim,
            use_bias=not config.pre_norm,
            kernel_init=named(nnx.initializers.lecun_normal(), None, "embed"),
            bias_init=named(nnx.initializers.zeros_init(), "embed"),
            rngs=rngs,
        )
        count = config.num_registers
        self.class_token = _vector(config, 0.0) if config.has_class_token else None
        self.registers = _vector(config, 0.0, count) if count else None
        has_table = config.num_positions > 0
        self.positions = (
            Embed(config.num_positions, config.embed_dim, rngs=rngs, vocab_name="seq")
            if has_table
            else None
        )
        self.pre_norm = _norm(config, rngs=rngs) if config.pre_norm else None
        self.blocks = Stack(
            lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.norm = _norm(config, rngs=rngs)
        has_pool = config.pool == "attention"
        self.pooling = AttentionPool(config, rngs=rngs) if has_pool else None
        # The dim of classes has no name, because the data determines its size, and few
        # meshes divide this size.
        make_head = partial(
            nnx.Linear,
            kernel_init=named(nnx.initializers.normal(0.02), "embed", None),
            bias_init=named(nnx.initializers.zeros_init(), None),
            rngs=rngs,
        )
        count = config.num_classes
        self.head = make_head(config.embed_dim, count) if count else None

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps (batch, height, width, 3) to logits (batch, classes).

        A model without a head (``num_classes=0``) returns the pooled features, (batch,
        embed).

        Raises:
            ValueError: If the images do not have the config's size.
        """
        x = self.features(images)
        if self.pooling is not None:
            pooled = self.pooling(x[:, self.config.num_prefix :])
        elif self.config.pool == "class":
            pooled = x[:, 0]
        else:
            pooled = x[:, self.config.num_prefix :].mean(axis=1)
        pooled = self.norm(pooled) if self.config.pool_norm else pooled
        pooled = constrain(pooled, "batch", "embed")
        if self.head is None:
            return pooled
        return constrain(self.head(pooled), "batch", None)

    def features(self, images: jax.Array) -> jax.Array:
        """Maps (batch, height, width, 3) to the last output (batch, seq, embed).

        The output is normalised, unless the config has ``pool_norm``.

        Raises:
            ValueError: If the images do not have the config's size.
        """
        size, patch = self.config.image_size, self.config.patch_size
        if images.shape[1:] != (size, size, 3):
            raise ValueError(
                f"Images have shape {images.shape}; for ViTConfig.image_size={size} "
                f"they must be (batch, {size}, {size}, 3)."
            )
        used = size // patch * patch
        # (batch, height, width, 3) -> (batch, patches, 3 * patch ** 2)
        split = "b (h p) (w q) c -> b (h w) (p q c)"
        patches = rearrange(images[:, :used, :used], split, p=patch, q=patch)
        x = self._add_tokens(self.patches(patches))
        x = constrain(x, "batch", "seq", "embed")
        x = x if self.pre_norm is None else self.pre_norm(x)
        x = self.blocks(x)
        return x if self.config.pool_norm else self.norm(x)

    def _add_tokens(self, x: jax.Array) -> jax.Array:
        """Adds the other tokens and the positions: (batch, patches, embed) to seq."""
        count = self.config.num_positions
        table = self.positions and self.positions(jnp.arange(count)[None, :])
        if table is not None and self.config.positions == "patches":
            x = x + table
        tokens: list[Any] = [self.class_token, self.registers]
        prefix = [
            jnp.reshape(token[...], (1, -1, x.shape[-1]))
            for token in tokens
            if token is not None
        ]
        if prefix:
            joined = jnp.concatenate(prefix, axis=1).astype(x.dtype)
            joined = jnp.broadcast_to(joined, (len(x), *joined.shape[1:]))
            x = jnp.concatenate([joined, x], axis=1)
        if table is not None and self.config.positions == "tokens":
            x = x + table
        return x
