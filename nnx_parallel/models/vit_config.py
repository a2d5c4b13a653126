"""Configuration of a `ViT`, and the families of published vision transformers.

References:
    [1] Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, section 3.1,
    https://arxiv.org/abs/2010.11929
    [2] Zhai et al., "Scaling Vision Transformers", 2021, table 2 (sizes) and section
    3.2 (pooling instead of a class token), https://arxiv.org/abs/2106.04560
    [3] Darcet et al., "Vision Transformers Need Registers", 2023, section 2.2,
    https://arxiv.org/abs/2309.16588
    [4] Simeoni et al., "DINOv3", 2025, section 3.2,
    https://arxiv.org/abs/2508.10104
    [5] Touvron et al., "Going deeper with Image Transformers", 2021, section 2.2,
    https://arxiv.org/abs/2103.17239
    [6] Zhai et al., "Sigmoid Loss for Language Image Pre-Training", 2023,
    https://arxiv.org/abs/2303.15343
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from nnx_parallel.errors import suggests_names
from nnx_parallel.models.families import dinov3, siglip, timm, vit
from nnx_parallel.weights.family import WithPresets, find_preset

FAMILIES = tuple(
    replace(family, parts={**family.parts, "family": family.model_type})
    for family in (timm.VIT, siglip.SIGLIP, vit.VIT, dinov3.DINOV3)
)
PRESETS = {
    name: {**family.parts, **fields}
    for family in FAMILIES
    for name, fields in family.presets.items()
}
"""Fields of published models, by name."""

Pool = Literal["mean", "class", "attention"]
Positions = Literal["tokens", "patches", "rotary"]
Activation = Literal["gelu", "quick_gelu", "swiglu"]
_CHOICES: dict[str, Any] = {
    "pool": Pool,
    "positions": Positions,
    "activation": Activation,
}
_COUNTS = ("image_size", "patch_size", "num_layers", "embed_dim", "num_heads")


@suggests_names
@dataclass(frozen=True, kw_only=True)
class ViTConfig(metaclass=WithPresets):
    """Shape of a `ViT`.

    The sequence has the class token, if there is one, then the registers, and then the
    patches.

    Attributes:
        image_size: Height and width of an image, in pixels.
        patch_size: Height and width of a patch; must divide ``image_size``.
        num_classes: Number of labels; 0 for a model without a head, which computes
            features.
        num_layers: Number of blocks.
        embed_dim: Width between blocks.
        num_heads: Number of attention heads; must divide the width.
        mlp_dim: Width inside an MLP; ``None`` means ``4 * embed_dim``.
        dropout: Probability that an output of attention or MLP is dropped.
        pool: Input of the head. ``mean`` is the mean of the patches' outputs. ``class``
            is the output of the class token [1]. ``attention`` is an attention layer
            with one learned query, and an MLP, as in SigLIP [6].
        class_token: True for a learned token before the patches [1]. ``None`` means
            true for ``pool="class"``.
        num_registers: Number of further learned tokens [3].
        positions: ``tokens`` adds learned positions to all tokens, and ``patches`` only
            to patches. ``rotary`` rotates queries and keys of patches by the
            coordinates of their centres [4].
        rope_theta: Base of the wavelengths of rotary positions.
        activation: Nonlinearity of an MLP. ``quick_gelu`` is ``x * sigmoid(1.702 x)``.
            ``swiglu`` is ``silu(gate) * up``, with a third kernel.
        exact_gelu: True to compute GELU exactly instead of approximating it by
            ``tanh``.
        norm_epsilon: Number that is added to variances.
        pre_norm: True for a norm before the first block. The patches then have no bias.
        pool_norm: True to apply the last norm after the pool instead of before it.
        qk_norm: True for norms of queries and keys, over each head.
        qkv_bias: True for biases of queries, keys and values.
        key_bias: True for a bias of keys, if ``qkv_bias`` is true.
        layer_scale: Initial value of the factors of the outputs of attention and MLP
            [5]; ``None`` for no factors.
        trim: True to ignore the last rows and columns of an image, if ``patch_size``
            does not divide ``image_size``.
        family: The ``model_type`` of the files from which the model was read. Exported
            files have its format. ``"timm"`` writes files for timm.

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
    class_token: bool | None = None
    num_registers: int = 0
    positions: Positions = "tokens"
    rope_theta: float = 100.0
    activation: Activation = "gelu"
    exact_gelu: bool = False
    norm_epsilon: float = 1e-6
    pre_norm: bool = False
    pool_norm: bool = False
    qk_norm: bool = False
    qkv_bias: bool = True
    key_bias: bool = True
    layer_scale: float | None = None
    trim: bool = False
    family: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (found := getattr(self, name)) not in get_args(choices):
                raise ValueError(
                    f"ViTConfig.{name} is {found!r}; it must be one of "
                    f"{get_args(choices)}."
                )
        least = dict.fromkeys(_COUNTS, 1) | {"num_classes": 0, "num_registers": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value < bound:
                raise ValueError(
                    f"ViTConfig.{name} is {value}; it must be at least {bound}."
                )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"ViTConfig.dropout is {self.dropout}; it must be a probability in "
                "[0, 1)."
            )
        for whole, part in (("image_size", "patch_size"), ("embed_dim", "num_heads")):
            is_trimmed = self.trim and part == "patch_size"
            if getattr(self, whole) % getattr(self, part) and not is_trimmed:
                raise ValueError(
                    f"ViTConfig.{part} is {getattr(self, part)}, which does not divide "
                    f"{whole}={getattr(self, whole)}. Change one of them."
                )
        for message in self._conflicts():
            raise ValueError(f"ViTConfig.{message}.")

    def _conflicts(self) -> Iterator[str]:
        """Yields descriptions of fields that exclude each other."""
        if self.pool == "class" and self.class_token is False:
            yield "pool is 'class', which needs a class token, but class_token is False"
        if self.patch_size > self.image_size:
            yield (
                f"patch_size is {self.patch_size}; it must be at most "
                f"image_size={self.image_size}"
            )
        if self.pool == "attention" and self.pool_norm:
            yield "pool_norm is True, which needs pool='mean' or pool='class'"
        if self.exact_gelu and self.activation != "gelu":
            yield "exact_gelu is True, which needs activation='gelu'"
        if self.key_bias and not self.qkv_bias:
            yield "key_bias is True, which needs qkv_bias=True"
        head_dim = self.sizes["head_dim"]
        if self.positions == "rotary" and head_dim % 4:
            yield (
                f"positions is 'rotary', which needs a multiple of 4 features in each "
                f"head, but embed_dim / num_heads is {head_dim}"
            )

    @property
    def has_class_token(self) -> bool:
        """True if the first token is the class token."""
        return self.pool == "class" or bool(self.class_token)

    @property
    def num_prefix(self) -> int:
        """Number of tokens before the patches: the class token and the registers."""
        return self.has_class_token + self.num_registers

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        """Number of learned positions."""
        counts = {"tokens": self.seq_len, "patches": self.num_patches, "rotary": 0}
        return counts[self.positions]

    @property
    def seq_len(self) -> int:
        """Length of the sequence: the patches, and the tokens before them."""
        return self.num_patches + self.num_prefix

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
        """All fields; ``mlp_dim`` and ``class_token`` are never ``None``."""
        known = {"mlp_dim": self.sizes["mlp"], "class_token": self.has_class_token}
        return vars(self) | known

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        embed, mlp = self.embed_dim, self.sizes["mlp"]
        gate = mlp * (embed + 1) if self.activation == "swiglu" else 0
        perceptron = 2 * embed * mlp + mlp + embed
        attention = 4 * embed * (embed + 1)
        block = attention + perceptron + gate + 4 * embed
        block -= (0 if self.qkv_bias else 2 * embed) + (0 if self.key_bias else embed)
        block += 4 * self.sizes["head_dim"] if self.qk_norm else 0
        block += 2 * embed if self.layer_scale is not None else 0
        patches = 3 * self.patch_size**2 * embed + (0 if self.pre_norm else embed)
        tokens = (self.num_prefix + self.num_positions) * embed
        norms = (4 if self.pre_norm else 2) * embed
        pool = attention + perceptron + gate + 3 * embed
        head = self.num_classes * (embed + 1)
        total = self.num_layers * block + patches + tokens + norms + head
        return total + (pool if self.pool == "attention" else 0)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ViTConfig:
        """Returns the config of a published model by name, such as ``"dinov3-vitb16"``.

        Names of timm, such as ``"vit_base_patch16_siglip_224"``, are names of presets.

        Raises:
            ValueError: If no preset has this name; the error lists the names.

        Example:
            >>> f"{ViTConfig.preset('dinov3-vitb16').num_params:,}"
            '85,659,648'
        """
        return replace(cls(**find_preset(name, PRESETS)), **overrides)

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
