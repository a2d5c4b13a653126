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
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import numpy as np
from flax import nnx

from nnx_parallel.errors import suggests_names
from nnx_parallel.layers import named
from nnx_parallel.models.classifier import read_labels, write_labels
from nnx_parallel.sharding import constrain
from nnx_parallel.weights.family import Family, Published, Values
from nnx_parallel.weights.names import Entry

BlockKind = Literal["basic", "bottleneck"]


@suggests_names
@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
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


_MOST_BLOCKS = 10_000
_NORM = {"scale": "weight", "bias": "bias"}
_NORM |= {"mean": "running_mean", "var": "running_var"}


def _names(fields: Values) -> list[Entry]:
    found = [
        ("head.kernel", "classifier.1.weight", "classes into -> into classes"),
        ("head.bias", "classifier.1.bias", "classes -> classes"),
    ]
    for conv, norm, path in _pairs(fields):
        kernel = "out into h w -> h w into out"
        found.append((f"{conv}.kernel", f"{path}.convolution.weight", kernel))
        for ours, theirs in _NORM.items():
            name = f"{path}.normalization.{theirs}"
            found.append((f"{norm}.{ours}", name, "out -> out"))
    return found


def _pairs(fields: Values) -> list[tuple[str, str, str]]:
    """Returns our names of each convolution and its norm, and their name in files."""
    is_basic = fields["block"] == "basic"
    names = ["up", "down"] if is_basic else ["reduce", "up", "down"]
    found = [("stem", "stem_norm", "resnet.embedder.embedder")]
    index = 0
    for stage, depth in enumerate(fields["stage_sizes"]):
        for layer in range(depth):
            theirs = f"resnet.encoder.stages.{stage}.layers.{layer}"
            places = {name: f"layer.{i}" for i, name in enumerate(names)}
            # Shapes change in the first block of a stage, except in the first stage of
            # a network with basic blocks.
            if layer == 0 and (stage > 0 or not is_basic):
                places["project"] = "shortcut"
            for name, place in places.items():
                ours = f"blocks.{index}.{name}"
                found.append((ours, f"{ours}_norm", f"{theirs}.{place}"))
            index += 1
    return found


def _read(settings: Values) -> Values:
    depths, widths = settings["depths"], list(settings["hidden_sizes"])
    kind, width = settings["layer_type"], settings["embedding_size"]
    is_counts = isinstance(depths, list | tuple) and all(
        type(depth) is int and depth >= 1 for depth in depths
    )
    if not is_counts or not 1 <= sum(depths) <= _MOST_BLOCKS or len(depths) > 32:
        raise ValueError(
            f"config.json has depths={depths!r}. It must be a list of at most 32 whole "
            f"numbers of at least 1, whose sum is at most {_MOST_BLOCKS:,}."
        )
    if widths != (expected := _stage_widths(kind, width, len(depths))):
        raise ValueError(
            f"config.json has hidden_sizes={widths}. The width of a ResNet doubles "
            f"with each stage: for embedding_size={width} and layer_type={kind!r} it "
            f"must be {expected}."
        )
    return {"stage_sizes": tuple(depths), "num_classes": read_labels(settings)}


def _stage_widths(kind: str, width: int, num_stages: int) -> list[int]:
    widest = width if kind == "basic" else 4 * width
    return [widest * 2**stage for stage in range(num_stages)]


def _write(fields: Values) -> Values:
    depths = fields["stage_sizes"]
    return {
        "num_channels": 3,
        "hidden_sizes": _stage_widths(fields["block"], fields["width"], len(depths)),
        "depths": [*depths],
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        **write_labels(fields),
    }


RESNET = Family(
    model="ResNet",
    model_type="resnet",
    architecture="ResNetForImageClassification",
    parts={"is_small": False, "activation": jax.nn.relu},
    settings={"width": "embedding_size", "block": "layer_type"},
    defaults={
        "layer_type": "bottleneck",
        "embedding_size": 64,
        "depths": (3, 4, 6, 3),
        "hidden_sizes": (256, 512, 1024, 2048),
    },
    valid={
        "num_channels": (3,),
        "hidden_act": ("relu",),
        "downsample_in_first_stage": (False,),
        "downsample_in_bottleneck": (False,),
    },
    read=_read,
    write=_write,
    names=_names,
    prefix="resnet.",
    ignored=r"\.num_batches_tracked$",
)


class ResNet(Published):
    """A residual network, which maps images to logits of classes.

    Train it with `classification_loss`. `from_pretrained` reads a
    ``ResNetForImageClassification``, such as ``microsoft/resnet-50``, including the
    statistics of its norms. Images for such a model must have the mean and standard
    deviation that are in ``preprocessor_config.json``.

    Args:
        config: Shape of the model.
        rngs: Keys for the parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> model = ResNet(ResNetConfig.tiny(), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((2, 8, 8, 3))).shape
        (2, 10)
    """

    families = (RESNET,)
    config_type = ResNetConfig

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

    def constants_in_files(self) -> dict[str, np.ndarray]:
        """Returns zeros for step counters of norms, which `ResNet` does not have."""
        name, pairs = "normalization.num_batches_tracked", _pairs(self.config.fields)
        return {f"{path}.{name}": np.zeros((), np.int64) for *_, path in pairs}
