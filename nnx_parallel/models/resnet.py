"""Residual networks for images: ResNet-18 and ResNet-50, with batch normalisation.

The model is written for one device. A block's last two convolutions are named like an
MLP, by output channels and then by input channels, so that `TensorParallel` splits them
as a pair; other strategies need no names. A `BatchNorm` takes its statistics over all
rows of a (micro)batch, on any number of devices.

References:
    [1] He et al., "Deep Residual Learning for Image Recognition", 2015, section 3.3,
    https://arxiv.org/abs/1512.03385
    [2] Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 5.1 (stride in the
    3x3 convolution, last scale of a block starts at 0), https://arxiv.org/abs/1706.02677
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from flax import nnx

from nnx_parallel.layers import named
from nnx_parallel.models.hf_vision import (
    resnet_counters,
    resnet_from_hf,
    resnet_names,
    resnet_to_hf,
)
from nnx_parallel.sharding import constrain
from nnx_parallel.weights.files import find_folder, read_config
from nnx_parallel.weights.pretrained import Pretrained

BlockKind = Literal["basic", "bottleneck"]


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Shape of a `ResNet`.

    Attributes:
        stage_sizes: Blocks in each stage; a stage halves the height and width and
            doubles the channels of the stage before it.
        block: Two 3x3 convolutions; or 1x1, 3x3, and 1x1 to four times the channels.
        num_classes: Number of labels.
        width: Channels of the first stage.
        is_small: True for a 3x3 convolution in front, for images of about 32 pixels,
            instead of a 7x7 convolution with stride 2 and a pool.
        activation: Function between convolutions.

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

    def __post_init__(self) -> None:
        if self.block not in get_args(BlockKind):
            raise ValueError(
                f"ResNetConfig.block is {self.block!r}; it must be one of "
                f"{get_args(BlockKind)}."
            )
        if not self.stage_sizes or min(self.stage_sizes) < 1:
            raise ValueError(
                f"ResNetConfig.stage_sizes is {self.stage_sizes}; it must have a "
                "stage, and each at least 1 block."
            )
        for name in ("num_classes", "width"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"ResNetConfig.{name} is {getattr(self, name)}; it must be at "
                    "least 1."
                )

    @classmethod
    def resnet18(cls, **overrides: Any) -> ResNetConfig:
        """11.7 M parameters [1]."""
        return replace(cls(stage_sizes=(2, 2, 2, 2), block="basic"), **overrides)

    @classmethod
    def resnet50(cls, **overrides: Any) -> ResNetConfig:
        """25.6 M parameters [1]."""
        return replace(cls(stage_sizes=(3, 4, 6, 3), block="bottleneck"), **overrides)

    @classmethod
    def tiny(cls, **overrides: Any) -> ResNetConfig:
        """Two stages for images of 8 pixels and more, for tests and laptops."""
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
    # Variance 2 / fan-out keeps the gradients' scale behind rectifiers.
    init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
    return nnx.Conv(
        in_channels,
        out_channels,
        (size, size),
        strides=stride,
        padding=size // 2,  # on both sides, as published weights were trained
        use_bias=False,  # the norm behind it would subtract it again
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
    """Convolutions added to their input, which is projected where shapes differ.

    The last norm's scale starts at 0, so that a block starts as the identity [2].
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
        """(batch, height, width, channels) to the same shape, or halved and widened."""
        branch = x
        if self.reduce is not None and self.reduce_norm is not None:
            branch = self.activation(self.reduce_norm(self.reduce(x)))
        branch = self.activation(self.up_norm(self.up(branch)))
        branch = constrain(branch, "batch", None, None, "mlp")
        branch = self.down_norm(self.down(branch))
        if self.project is not None and self.project_norm is not None:
            x = self.project_norm(self.project(x))
        return constrain(self.activation(x + branch), "batch", None, None, None)


class ResNet(nnx.Module):
    """A residual network: images to logits of classes.

    Train it with `classification_loss`.

    Args:
        config: Shape of the model.
        rngs: Keys of the parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> model = ResNet(ResNetConfig.tiny(), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((2, 8, 8, 3))).shape
        (2, 10)
    """

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
        """(batch, height, width, 3) to logits (batch, classes)."""
        x = self.config.activation(self.stem_norm(self.stem(images)))
        if not self.config.is_small:
            padding: Any = ((1, 1), (1, 1))  # as in PyTorch; "SAME" pads only one end
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=padding)
        x = constrain(x, "batch", None, None, None)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))  # (batch, channels) -> (batch, classes)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: Any = None, **overrides: Any
    ) -> Pretrained:
        """A model with the weights of a ``ResNetForImageClassification``.

        This is a model of transformers, such as ``microsoft/resnet-50``; the statistics
        of its norms are read too. Images must have the mean and deviation given in
        ``preprocessor_config.json``.

        Args:
            path: Folder or repository, as in `GPT.from_pretrained`.
            dtype: Dtype of the parameters; see `Pretrained`.
            overrides: Fields of the `ResNetConfig` to set. With another
                ``num_classes`` the head is a new one.

        Returns:
            An argument for ``Trainer(model=...)``: each device reads its shards.

        Raises:
            ValueError: If the config belongs to another kind of model.
            WeightsError: If files are damaged, or config and files disagree.
        """
        folder = find_folder(path)
        saved = ResNetConfig(**resnet_from_hf(read_config(folder)))
        config = replace(saved, **overrides)
        return Pretrained(
            lambda rngs: cls(config, rngs=rngs),
            folder,
            resnet_names(config),
            dtype=dtype,
            ignored=r"\.num_batches_tracked$",
            new=None if config.num_classes == saved.num_classes else r"^head\.",
        )

    def names_in_files(self) -> tuple[tuple[str, str, str], ...]:
        """The table of the parameters' names in files of transformers."""
        return resnet_names(self.config)

    def config_in_files(self) -> dict[str, Any]:
        """The model's ``config.json``, as transformers reads it."""
        return resnet_to_hf(self.config)

    def constants_in_files(self) -> dict[str, np.ndarray]:
        """The norms' counters of steps: zeros, since a `ResNet` does not count them."""
        return {name: np.zeros((), np.int64) for name in resnet_counters(self.config)}
