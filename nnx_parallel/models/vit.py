"""A vision transformer, which treats an image as a sequence of patches.

The model is written for one device. Its dims have the same names as in `models.gpt`, so
the same strategies can place them. `TensorParallel` splits heads and hidden units, and
`Pipeline` splits the layers.

References:
    [1] Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, section 3.1,
    https://arxiv.org/abs/2010.11929
    [2] Zhai et al., "Scaling Vision Transformers", 2021, table 2 (sizes) and section
    3.2 (pooling instead of a class token), https://arxiv.org/abs/2106.04560
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from nnx_parallel.errors import suggests_names
from nnx_parallel.layers import Dense, Embed, Stack, named, project
from nnx_parallel.layers.attention import attention
from nnx_parallel.models.classifier import read_labels, write_labels
from nnx_parallel.sharding import constrain
from nnx_parallel.weights.family import Family, Published, Values, block_entries
from nnx_parallel.weights.names import Entry

Pool = Literal["mean", "class"]
_SIZES = ("num_layers", "embed_dim", "num_heads")


@suggests_names
@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Shape of a `ViT`.

    Attributes:
        image_size: Height and width of an image, in pixels.
        patch_size: Height and width of a patch; must divide ``image_size``.
        num_classes: Number of labels.
        num_layers: Number of blocks.
        embed_dim: Width between blocks.
        num_heads: Number of attention heads; must divide the width.
        mlp_dim: Width inside an MLP; ``None`` means ``4 * embed_dim``.
        dropout: Probability that an output of attention or MLP is dropped.
        pool: Input of the head. ``mean`` is the mean of the patches' outputs. ``class``
            is the output of a learned class token before the patches [1], as in
            published weights.
        norm_epsilon: Number that is added to variances.
        exact_gelu: True to compute GELU exactly instead of approximating it by
            ``tanh``.

    Raises:
        ValueError: If a value is out of range, or if a size does not divide another
            that it must divide.

    Example:
        >>> f"{ViTConfig.g14().num_params:,}"
        '1,012,608,616'
    """

    image_size: int
    patch_size: int
    num_classes: int
    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int | None = None
    dropout: float = 0.0
    pool: Pool = "mean"
    norm_epsilon: float = 1e-6
    exact_gelu: bool = False

    def __post_init__(self) -> None:
        if self.pool not in get_args(Pool):
            raise ValueError(
                f"ViTConfig.pool is {self.pool!r}; it must be one of {get_args(Pool)}."
            )
        for name in ("image_size", "patch_size", "num_classes", *_SIZES):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"ViTConfig.{name} is {value}; it must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"ViTConfig.dropout is {self.dropout}; it must be a probability in "
                "[0, 1)."
            )
        for whole, part in (("image_size", "patch_size"), ("embed_dim", "num_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"ViTConfig.{part} is {getattr(self, part)}, which does not divide "
                    f"{whole}={getattr(self, whole)}. Change one of them."
                )

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def seq_len(self) -> int:
        """Length of the sequence: the patches, and the class token if there is one."""
        return self.num_patches + (self.pool == "class")

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each logical axis."""
        return {
            "embed": self.embed_dim,
            "heads": self.num_heads,
            "head_dim": self.embed_dim // self.num_heads,
            "mlp": self.mlp_dim or 4 * self.embed_dim,
        }

    @property
    def fields(self) -> dict[str, Any]:
        """All fields; ``mlp_dim`` is a number, never ``None``."""
        return vars(self) | {"mlp_dim": self.sizes["mlp"]}

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        embed, mlp = self.embed_dim, self.sizes["mlp"]
        attention = 4 * embed * (embed + 1)
        block = attention + 2 * embed * mlp + mlp + embed + 4 * embed
        patches = 3 * self.patch_size**2 * embed + embed + self.seq_len * embed
        patches += embed if self.pool == "class" else 0
        head = self.num_classes * (embed + 1)
        return self.num_layers * block + patches + 2 * embed + head

    @classmethod
    def tiny(cls, **overrides: Any) -> ViTConfig:
        """Returns a config for images of 8 x 8 pixels in 16 patches, for tests."""
        base = cls(
            image_size=8,
            patch_size=2,
            num_classes=10,
            num_layers=2,
            embed_dim=64,
            num_heads=4,
        )
        return replace(base, **overrides)

    @classmethod
    def b16(cls, **overrides: Any) -> ViTConfig:
        """Returns ViT-B/16, with 86 M parameters [1]."""
        base = cls(
            image_size=224,
            patch_size=16,
            num_classes=1000,
            num_layers=12,
            embed_dim=768,
            num_heads=12,
        )
        return replace(base, **overrides)

    @classmethod
    def g14(cls, **overrides: Any) -> ViTConfig:
        """Returns ViT-g/14, with 1 B parameters [2]."""
        base = cls.b16(
            patch_size=14, num_layers=40, embed_dim=1408, num_heads=16, mlp_dim=6144
        )
        return replace(base, **overrides)


def _norm(config: ViTConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.embed_dim,
        epsilon=config.norm_epsilon,
        scale_init=named(nnx.initializers.ones_init(), "embed"),
        bias_init=named(nnx.initializers.zeros_init(), "embed"),
        rngs=rngs,
    )


class Block(nnx.Module):
    """Attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        def dense(in_names: str, out_names: str) -> Dense:
            into, out = (
                {name: config.sizes[name] for name in names.split()}
                for names in (in_names, out_names)
            )
            init = nnx.initializers.normal(0.02)
            return Dense(into, out, rngs=rngs, use_bias=True, kernel_init=init)

        self.attention_norm = _norm(config, rngs=rngs)
        self.query = dense("embed", "heads head_dim")
        self.key = dense("embed", "heads head_dim")
        self.value = dense("embed", "heads head_dim")
        self.out = dense("heads head_dim", "embed")
        self.mlp_norm = _norm(config, rngs=rngs)
        self.up = dense("embed", "mlp")
        self.down = dense("mlp", "embed")
        self.exact_gelu = config.exact_gelu
        self.dropout = nnx.Dropout(
            config.dropout, rngs=rngs if config.dropout else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, seq, embed) to the same shape."""
        normed = self.attention_norm(x)
        # (batch, seq, embed) -> (batch, seq, heads, head_dim)
        query, key, value = (
            constrain(y, "batch", "seq", "heads", "head_dim")
            for y in project(normed, self.query, self.key, self.value)
        )
        attended = self.out(attention(query, key, value))
        x = constrain(x + self.dropout(attended), "batch", "seq", "embed")
        hidden = constrain(self.up(self.mlp_norm(x)), "batch", "seq", "mlp")
        hidden = jax.nn.gelu(hidden, approximate=not self.exact_gelu)
        x = x + self.dropout(self.down(hidden))
        return constrain(x, "batch", "seq", "embed")


_LAYERS = {
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "out": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
    "attention_norm": "layernorm_before",
    "mlp_norm": "layernorm_after",
}


def _names(fields: Values) -> list[Entry]:
    theirs, patch = "vit.embeddings.", fields["patch_size"]
    table = "1 seq embed -> seq embed"
    kernel = f"embed c p q -> (p q c) embed, c=3 p={patch} q={patch}"
    return [
        ("class_token", f"{theirs}cls_token", "1 1 embed -> embed"),
        ("positions.embedding", f"{theirs}position_embeddings", table),
        ("patches.kernel", f"{theirs}patch_embeddings.projection.weight", kernel),
        ("patches.bias", f"{theirs}patch_embeddings.projection.bias", "embed -> embed"),
        ("head.kernel", "classifier.weight", "classes embed -> embed classes"),
        ("head.bias", "classifier.bias", "classes -> classes"),
        *block_entries("vit.encoder.layer.{}.", _LAYERS),
        ("norm.scale", "vit.layernorm.weight", "embed -> embed"),
        ("norm.bias", "vit.layernorm.bias", "embed -> embed"),
    ]


def _read_side(settings: Values, name: str) -> int:
    found = settings[name]
    sides = [found] if isinstance(found, int) else found
    is_size = isinstance(sides, list | tuple) and all(
        type(x) is int and 1 <= x <= 65_536 for x in sides
    )
    if not is_size or len({*sides}) != 1:
        raise ValueError(
            f"config.json has {name}={found!r}; it must be the side of a square in "
            "pixels, from 1 to 65,536."
        )
    return sides[0]


def _read(settings: Values) -> Values:
    return {
        "image_size": _read_side(settings, "image_size"),
        "patch_size": _read_side(settings, "patch_size"),
        "exact_gelu": settings.get("hidden_act") in ("gelu", None),
        "num_classes": read_labels(settings),
    }


def _write(fields: Values) -> Values:
    return {
        "num_channels": 3,
        "hidden_act": "gelu" if fields["exact_gelu"] else "gelu_pytorch_tanh",
        "qkv_bias": True,
        **write_labels(fields),
    }


VIT = Family(
    model="ViT",
    model_type="vit",
    architecture="ViTForImageClassification",
    parts={"pool": "class"},
    settings={
        "image_size": "image_size",
        "patch_size": "patch_size",
        "num_layers": "num_hidden_layers",
        "embed_dim": "hidden_size",
        "num_heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "norm_epsilon": "layer_norm_eps",
    },
    defaults={
        "image_size": 224,
        "patch_size": 16,
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
    },
    valid={
        "num_channels": (3,),
        "hidden_act": ("gelu", "gelu_pytorch_tanh", "gelu_new"),
        "qkv_bias": (True,),
    },
    read=_read,
    write=_write,
    names=_names,
    prefix="vit.",
    ignored=r"^(vit\.)?pooler\.",
)


class ViT(Published):
    """A vision transformer, which maps images to logits of classes.

    Train it with `classification_loss`. `from_pretrained` reads a
    ``ViTForImageClassification``. Images for such a model must have the mean and
    standard deviation that are in ``preprocessor_config.json``.

    Args:
        config: Shape of the model.
        rngs: Keys for parameters and dropout.

    Example:
        >>> model = ViT(ViTConfig.tiny(), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((2, 8, 8, 3))).shape
        (2, 10)
    """

    families = (VIT,)
    config_type = ViTConfig

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.patches = nnx.Linear(
            3 * config.patch_size**2,
            config.embed_dim,
            kernel_init=named(nnx.initializers.lecun_normal(), None, "embed"),
            bias_init=named(nnx.initializers.zeros_init(), "embed"),
            rngs=rngs,
        )
        zeros = named(nnx.initializers.zeros_init(), "embed")
        self.class_token = (
            nnx.Param(zeros(jax.random.key(0), (config.embed_dim,)))
            if config.pool == "class"
            else None
        )
        self.positions = Embed(
            config.seq_len, config.embed_dim, rngs=rngs, vocab_name="seq"
        )
        self.blocks = Stack(
            lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.norm = _norm(config, rngs=rngs)
        # The dim of classes has no name, because the data determines its size, and few
        # meshes divide this size.
        self.head = nnx.Linear(
            config.embed_dim,
            config.num_classes,
            kernel_init=named(nnx.initializers.normal(0.02), "embed", None),
            bias_init=named(nnx.initializers.zeros_init(), None),
            rngs=rngs,
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps (batch, height, width, 3) to logits (batch, classes).

        Raises:
            ValueError: If the images do not have the config's size.
        """
        size, patch = self.config.image_size, self.config.patch_size
        if images.shape[1:] != (size, size, 3):
            raise ValueError(
                f"Images have shape {images.shape}; for ViTConfig.image_size={size} "
                f"they must be (batch, {size}, {size}, 3)."
            )
        # (batch, height, width, 3) -> (batch, seq, 3 * patch ** 2)
        split = "b (h p) (w q) c -> b (h w) (p q c)"
        x = self.patches(rearrange(images, split, p=patch, q=patch))
        if self.class_token is not None:
            token = self.class_token[...].astype(x.dtype)
            token = jnp.broadcast_to(token, (len(x), 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
        x = x + self.positions(jnp.arange(self.config.seq_len)[None, :])
        x = self.blocks(constrain(x, "batch", "seq", "embed"))
        x = self.norm(x)
        pooled = x.mean(axis=1) if self.class_token is None else x[:, 0]
        return constrain(self.head(constrain(pooled, "batch", "embed")), "batch", None)
