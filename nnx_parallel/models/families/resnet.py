"""The family ResNet."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from nnx_parallel.models.classifier import read_labels, write_labels
from nnx_parallel.weights.family import Family, Values
from nnx_parallel.weights.names import Entry

_MOST_BLOCKS = 10_000
_NORM = {"scale": "weight", "bias": "bias"}
_NORM |= {"mean": "running_mean", "var": "running_var"}

Convs = Iterable[tuple[str, str, str]]
"""Our name of each convolution, and the names of it and of its norm in files."""


def convolutions(
    fields: Values, block: str, project: str, names: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yields our name of each convolution in the blocks, and its name in files.

    Args:
        fields: Fields of the model.
        block: Start of names in files, with ``{stage}`` and ``{layer}``.
        project: End of the name of the convolution that changes the shape.
        names: Ends of the names of the other convolutions, in the order of the block.
    """
    is_basic, index = fields["block"] == "basic", 0
    ours = ["up", "down"] if is_basic else ["reduce", "up", "down"]
    for stage, depth in enumerate(fields["stage_sizes"]):
        for layer in range(depth):
            start = block.format(stage=stage, next=stage + 1, layer=layer)
            for name, theirs in zip(ours, names, strict=False):
                yield f"blocks.{index}.{name}", f"{start}{theirs}"
            # Shapes change in the first block of a stage, except in the first stage of
            # a network with basic blocks.
            if layer == 0 and (stage > 0 or not is_basic):
                yield f"blocks.{index}.project", f"{start}{project}"
            index += 1


def conv_entries(convs: Convs) -> list[Entry]:
    """Returns the entries for convolutions and their norms."""
    found = []
    for ours, conv, norm in convs:
        kernel = "out into h w -> h w into out"
        found.append((f"{ours}.kernel", f"{conv}.weight", kernel))
        for name, theirs in _NORM.items():
            entry = (f"{ours}_norm.{name}", f"{norm}.{theirs}", "out -> out")
            found.append(entry)
    return found


def counters(convs: Convs) -> dict[str, np.ndarray]:
    """Returns zeros for step counters of norms, which `ResNet` does not have."""
    zero = np.zeros((), np.int64)
    return {f"{norm}.num_batches_tracked": zero for *_, norm in convs}


def read_depths(settings: Values, name: str) -> tuple[int, ...]:
    """Returns the number of blocks in each stage.

    Raises:
        ValueError: If the setting is not a list of counts.
    """
    depths = settings[name]
    is_counts = isinstance(depths, list | tuple) and all(
        type(depth) is int and depth >= 1 for depth in depths
    )
    if not is_counts or not 1 <= sum(depths) <= _MOST_BLOCKS or len(depths) > 32:
        raise ValueError(
            f"config.json has {name}={depths!r}. It must be a list of at most 32 whole "
            f"numbers of at least 1, whose sum is at most {_MOST_BLOCKS:,}."
        )
    return tuple(depths)


def _convs(fields: Values) -> Iterator[tuple[str, str, str]]:
    block = "resnet.encoder.stages.{stage}.layers.{layer}."
    names = [f"layer.{i}" for i in range(3)]
    stem = ("stem", "resnet.embedder.embedder")
    for ours, path in (stem, *convolutions(fields, block, "shortcut", names)):
        yield ours, f"{path}.convolution", f"{path}.normalization"


def _names(fields: Values) -> list[Entry]:
    return [
        ("head.kernel", "classifier.1.weight", "classes into -> into classes"),
        ("head.bias", "classifier.1.bias", "classes -> classes"),
        *conv_entries(_convs(fields)),
    ]


def _read(settings: Values) -> Values:
    depths, widths = read_depths(settings, "depths"), list(settings["hidden_sizes"])
    kind, width = settings["layer_type"], settings["embedding_size"]
    if widths != (expected := _stage_widths(kind, width, len(depths))):
        raise ValueError(
            f"config.json has hidden_sizes={widths}. The width of a ResNet doubles "
            f"with each stage: for embedding_size={width} and layer_type={kind!r} it "
            f"must be {expected}."
        )
    return {"stage_sizes": depths, "num_classes": read_labels(settings)}


def _stage_widths(kind: str, width: int, num_stages: int) -> list[int]:
    widest = width if kind == "basic" else 4 * width
    return [widest * 2**stage for stage in range(num_stages)]


def _write(fields: Values) -> dict[str, Any]:
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
    constants=lambda fields: counters(_convs(fields)),
    part="vision_config",
    prefix="resnet.",
    ignored=r"\.num_batches_tracked$",
)
