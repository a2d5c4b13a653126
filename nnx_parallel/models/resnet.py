"""Residual networks for images: ResNet-18 and ResNet-50, with batch normalisation.

The model is written for one device. The last two convolutions of a block have names, as
the two kernels of an MLP do. So `TensorParallel` can split the first by its output
channels and the second by its input channels. Other strategies need no names. A
`BatchNorm` computes its statistics over all rows of a (micro)batch, on any number of
devices.

References:
    [1] He et al., "Deep Residual Learning for Image Recognition", 2015, section 3.3,
    https://arxiv.org/abs/1512.03385
    [2] Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 5.1 (stride in the
    3x3 convolution, last scale of a block starts at 0), https://arxiv.org/abs/1706.02677
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import jax
from flax import nnx

from nnx_parallel.errors import suggests_names
from nnx_parallel.layers import named
from nnx_parallel.models.families import resnet, timm
from nnx_parallel.sharding import constrain
from nnx_parallel.weights.family import Published, WithPresets

FAMILIES = tuple(
    replace(family, parts={**family.parts, "family": family.model_type})
    for family in (timm.RESNET, resnet.RESNET)
)
BlockKind = Literal["basic", "bottleneck"]


@suggests_names
@dataclass(frozen=True, kw_only=True)
class ResNetConfig(metaclass=WithPresets):
    """Shape of a `ResNet`.

    Attributes:
        stage_sizes: Number of blocks in each stage. Each stage after the first has half
            the height and width, and twice the channels, of the stage before it.
        block: Convolutions of a block. A ``basic`` block has two of size 3x3. A
            ``bottleneck`` block has sizes 1x1, 3x3 and 1x1, and the last of them has
            four times the channels.
        num_classes: Number of labels.
        width: Channels of the first stage.
        is_small: True for images of about 32 pixels. The first layer is then a 3x3
            convolution, instead of a 7x7 convolution with stride 2 and a pool.
        activation: Function between convolutions.
        family: The ``model_type`` of the files from which the model was read. Exported
            files have its format. ``"timm"`` writes files for timm.

    Raises:
        ValueError: If a value is out of range.

    Example:
        >>> ResNetConfig.resnet50().stage_sizes
        (3, 4, 6, 3)
    """

    stage_sizes: tuple[int, ...]
    block: BlockKind
    num_classes: int = 1000
    width: int = 64
    is_small: bool = False
    activation: Callable[[jax.Array], jax.Array] = jax.nn.relu
    family: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.block not in get_args(BlockKind):
            raise ValueError(
                f"ResNetConfig.block is {self.block!r}; it must be one of "
                f"{get_args(BlockKind)}."
            )
        if not self.stage_sizes or min(self.stage_sizes) < 1:
            raise ValueError(
                f"ResNetConfig.stage_sizes is {self.stage_sizes}; there must be at "
                "least 1 stage, with at least 1 block in each."
            )
        for name in ("num_classes", "width"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"ResNetConfig.{name} is {getattr(self, name)}; it must be at "
                    "least 1."
                )

    @property
    def fields(self) -> dict[str, Any]:
        """All fields."""
        return vars(self)

    @classmethod
    def resnet18(cls, **overrides: Any) -> ResNetConfig:
        """Returns ResNet-18, with 11.7 M parameters [1]."""
        return replace(cls(stage_sizes=(2, 2, 2, 2), block="basic"), **overrides)

    @classmethod
    def resnet50(cls, **overrides: Any) -> ResNetConfig:
        """Returns ResNet-50, with 25.6 M parameters [1]."""
        return replace(cls(stage_sizes=(3, 4, 6, 3), block="bottleneck"), **overrides)

    @classmethod
    def tiny(cls, **overrides: Any) -> ResNetConfig:
        """Returns a two-stage network for images from 8 x 8 pixels, for tests."""
        base = cls(
            stage_sizes=(1, 1), block="basic", num_classes=10, width=16, is_small=True
        )
        return replace(base, **overrides)


def _conv(
    in_channels: int,
    out_channels: int,
    size: int,
    *,
    rngs: nnx.Rngs,
    stride: int = 1,
    names: tuple[str | None, str | None] = (None, None),
) -> nnx.Conv:
    # With variance 2 / fan-out, gradients keep their scale through rectifiers.
    init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
    return nnx.Conv(
        in_channels,
        out_channels,
        (size, size),
        strides=stride,
        padding=size // 2,  # equal on both sides, as for published weights
        use_bias=False,  # the norm that follows would cancel a bias
        kernel_init=named(init, None, None, *names),
        rngs=rngs,
    )


def _norm(
    channels: int,
    *,
    rngs: nnx.Rngs,
    name: str | None = None,
    is_last: bool = False,
) -> nnx.BatchNorm:
    constant = nnx.initializers.constant(0.0 if is_last else 1.0)
    return nnx.BatchNorm(
        channels,
        momentum=0.9,
        epsilon=1e-5,
        scale_init=named(constant, name),
        bias_init=named(nnx.initializers.zeros_init(), name),
        rngs=rngs,
    )


class Block(nnx.Module):
    """Convolutions whose output is added to their input.

    If the shapes of output and input differ, the output is added to a projection of the
    input. The scale of the last norm starts at 0, so that the convolutions contribute
    nothing at first [2].
    """

    def __init__(
        self,
        config: ResNetConfig,
        in_channels: int,
        channels: int,
        stride: int,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        is_basic = config.block == "basic"
        out_channels = channels if is_basic else 4 * channels
        self.reduce = None if is_basic else _conv(in_channels, channels, 1, rngs=rngs)
        self.reduce_norm = None if is_basic else _norm(channels, rngs=rngs)
        entering = in_channels if is_basic else channels
        self.up = _conv(
            entering, channels, 3, stride=stride, names=(None, "mlp"), rngs=rngs
        )
        self.up_norm = _norm(channels, name="mlp", rngs=rngs)
        size = 3 if is_basic else 1
        self.down = _conv(channels, out_channels, size, names=("mlp", None), rngs=rngs)
        self.down_norm = _norm(out_channels, is_last=True, rngs=rngs)
        changes = stride > 1 or in_channels != out_channels
        self.project = (
            _conv(in_channels, out_channels, 1, stride=stride, rngs=rngs)
            if changes
            else None
        )
        self.project_norm = _norm(out_channels, rngs=rngs) if changes else None
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images (batch, height, width, channels) to an array of the same shape.

        Only the first block of a stage may change height, width and channels.
        """
        branch = x
        if self.reduce is not None and self.reduce_norm is not None:
            branch = self.activation(self.reduce_norm(self.reduce(x)))
        branch = self.activation(self.up_norm(self.up(branch)))
        branch = constrain(branch, "batch", None, None, "mlp")
        branch = self.down_norm(self.down(branch))
        if self.project is not None and self.project_norm is not None:
            x = self.project_norm(self.project(x))
        return constrain(self.activation(x + branch), "batch", None, None, None)


class ResNet(Published):
    """A residual network, which maps images to logits of classes.

    Train it with `classification_loss`. `from_pretrained` reads a
    ``ResNetForImageClassification``, such as ``microsoft/resnet-50``, or a ResNet of
    timm, such as ``timm/resnet50.a1_in1k``, including the statistics of its norms.
    Images for such a model must have the mean and standard deviation that are in
    ``preprocessor_config.json``, or in the ``pretrained_cfg`` of timm's
    ``config.json``.

    Args:
        config: Shape of the model.
        rngs: Keys for the parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> model = ResNet(ResNetConfig.tiny(), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((2, 8, 8, 3))).shape
        (2, 10)
    """

    families = FAMILIES
    config_type = ResNetConfig

    @suggests_names
    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        size, stride = (3, 1) if config.is_small else (7, 2)
        self.stem = _conv(3, config.width, size, stride=stride, rngs=rngs)
        self.stem_norm = _norm(config.width, rngs=rngs)
        blocks, in_channels = [], config.width
        for stage, num_blocks in enumerate(config.stage_sizes):
            channels = config.width * 2**stage
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Block(config, in_channels, channels, stride, rngs=rngs))
                in_channels = channels * (1 if config.block == "basic" else 4)
        self.blocks = nnx.List(blocks)
        init = nnx.initializers.normal(0.01)
        self.head = nnx.Linear(
            in_channels, config.num_classes, kernel_init=init, rngs=rngs
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps (batch, height, width, 3) to logits (batch, classes)."""
        x = self.config.activation(self.stem_norm(self.stem(images)))
        if not self.config.is_small:
            padding: Any = ((1, 1), (1, 1))  # as PyTorch does; "SAME" pads only one end
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=padding)
        x = constrain(x, "batch", None, None, None)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))  # (batch, channels) -> (batch, classes)
