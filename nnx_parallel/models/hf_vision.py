"""Vision models in the files of transformers: their ``config.json``, and their names.

The models are ``ViTForImageClassification`` and ``ResNetForImageClassification``, in
both directions. Tables are written as in `models.hf_names`. Their images are (batch, 3,
height, width), ours are (batch, height, width, 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx_parallel.weights.files import check_counts

Entry = tuple[str, str, str]

# Settings that change the numbers of a model and have no counterpart here.
_VIT = {"hidden_act": ("gelu", "gelu_pytorch_tanh", "gelu_new"), "qkv_bias": (True,)}
_RESNET = {
    "hidden_act": ("relu",),
    "downsample_in_first_stage": (False,),
    "downsample_in_bottleneck": (False,),
}
_MOST_BLOCKS = 10_000
_BOTH = {"num_channels": (3,), "quantization_config": (None,)}


def vit_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the `ViTConfig` that matches a ``config.json``.

    Raises:
        ValueError: If it belongs to another kind of model, or has no counterpart.
    """
    _check(config, "vit", _VIT, "A ViT")
    return {
        "image_size": _side(config, "image_size", 224),
        "patch_size": _side(config, "patch_size", 16),
        "num_classes": _num_classes(config),
        "num_layers": config.get("num_hidden_layers", 12),
        "embed_dim": config.get("hidden_size", 768),
        "num_heads": config.get("num_attention_heads", 12),
        "mlp_dim": config.get("intermediate_size", 3072),
        "norm_epsilon": config.get("layer_norm_eps", 1e-12),
        "exact_gelu": config.get("hidden_act", "gelu") == "gelu",
        "pool": "class",
    }


def resnet_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the `ResNetConfig` of a ``config.json``; errors as in `vit_from_hf`."""
    _check(config, "resnet", _RESNET, "A ResNet")
    kind = config.get("layer_type", "bottleneck")
    width = config.get("embedding_size", 64)
    depths = config.get("depths", (3, 4, 6, 3))
    is_counts = isinstance(depths, list | tuple) and all(
        type(depth) is int and depth >= 1 for depth in depths
    )
    if not is_counts or not 1 <= sum(depths) <= _MOST_BLOCKS or len(depths) > 32:
        raise ValueError(
            f"config.json has depths={depths!r}. It must be a list of at most 32 whole "
            f"numbers from 1, of {_MOST_BLOCKS:,} blocks in all."
        )
    found = list(config.get("hidden_sizes", (256, 512, 1024, 2048)))
    if found != (expected := _stage_widths(kind, width, len(depths))):
        raise ValueError(
            f"config.json has hidden_sizes={found}. The stages of a ResNet double: for "
            f"embedding_size={width} and layer_type={kind!r} it must be {expected}."
        )
    return {
        "stage_sizes": tuple(depths),
        "block": kind,
        "num_classes": _num_classes(config),
        "width": width,
    }


def _stage_widths(kind: str, width: int, num_stages: int) -> list[int]:
    widest = width if kind == "basic" else 4 * width
    return [widest * 2**stage for stage in range(num_stages)]


def _check(
    config: Mapping[str, Any], kind: str, only: Mapping[str, tuple], what: str
) -> None:
    if (found := config.get("model_type")) != kind:
        raise ValueError(
            f"config.json has model_type {found!r}. {what} is made of {kind!r}."
        )
    check_counts(config)
    for key, valid in {**_BOTH, **only}.items():
        if (found := config.get(key, valid[0])) not in valid:
            raise ValueError(
                f"config.json has {key}={found!r}. {what} has no counterpart of it: it "
                f"must be {' or '.join(map(repr, valid))}, or absent."
            )


def _side(config: Mapping[str, Any], key: str, default: int) -> int:
    found = config.get(key, default)
    sides = [found] if isinstance(found, int) else found
    is_size = isinstance(sides, list | tuple) and all(
        type(x) is int and 1 <= x <= 65_536 for x in sides
    )
    if not is_size or len({*sides}) != 1:
        raise ValueError(
            f"config.json has {key}={found!r}; it must be the side of a square, from 1 "
            "to 65,536 pixels."
        )
    return sides[0]


def _num_classes(config: Mapping[str, Any]) -> int:
    # transformers assumes two labels if the file has neither.
    return len(config.get("id2label") or ()) or config.get("num_labels", 2)


def _labels(num_classes: int) -> dict[str, Any]:
    names = [f"LABEL_{i}" for i in range(num_classes)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def vit_to_hf(config: Any) -> dict[str, Any]:
    """The ``config.json`` of a `ViTConfig`, without dropout, which only training uses.

    Raises:
        ValueError: If no model of transformers has this shape.
    """
    if config.pool != "class":
        raise ValueError(
            f"ViTConfig.pool is {config.pool!r}. ViTForImageClassification of "
            "transformers has pool='class': no model there has this shape."
        )
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": 3,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.sizes["mlp"],
        "layer_norm_eps": config.norm_epsilon,
        "hidden_act": "gelu" if config.exact_gelu else "gelu_pytorch_tanh",
        "qkv_bias": True,
        **_labels(config.num_classes),
    }


def resnet_to_hf(config: Any) -> dict[str, Any]:
    """The ``config.json`` of a `ResNetConfig`; errors as in `vit_to_hf`."""
    name = getattr(config.activation, "__name__", "?")
    for field, found, only in (
        ("is_small", config.is_small, False),
        ("activation", name, "relu"),
    ):
        if found != only:
            raise ValueError(
                f"ResNetConfig.{field} is {found!r}. ResNetForImageClassification of "
                f"transformers has {only!r}: no model there has this shape."
            )
    kind, depths = config.block, config.stage_sizes
    return {
        "model_type": "resnet",
        "architectures": ["ResNetForImageClassification"],
        "num_channels": 3,
        "embedding_size": config.width,
        "hidden_sizes": _stage_widths(kind, config.width, len(depths)),
        "depths": [*depths],
        "layer_type": kind,
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        **_labels(config.num_classes),
    }


def vit_names(config: Any) -> tuple[Entry, ...]:
    """The entries of all parameters of a `ViT` with a class token."""
    ours, theirs = "blocks.layer.", "vit.encoder.layer.{}."
    patch = config.patch_size
    embeddings = "vit.embeddings."
    projection = f"{embeddings}patch_embeddings.projection."
    found: list[Entry] = [
        ("class_token", f"{embeddings}cls_token", "1 1 embed -> embed"),
        (
            "positions.embedding",
            f"{embeddings}position_embeddings",
            "1 seq embed -> seq embed",
        ),
        (
            "patches.kernel",
            f"{projection}weight",
            f"embed c p q -> (p q c) embed, c=3 p={patch} q={patch}",
        ),
        ("patches.bias", f"{projection}bias", "embed -> embed"),
        ("head.kernel", "classifier.weight", "classes embed -> embed classes"),
        ("head.bias", "classifier.bias", "classes -> classes"),
    ]
    for name in ("query", "key", "value"):
        path = f"{theirs}attention.attention.{name}."
        kernel = "(heads head_dim) embed -> embed heads head_dim"
        bias = "(heads head_dim) -> heads head_dim"
        found.append((f"{ours}{name}.kernel", f"{path}weight", kernel))
        found.append((f"{ours}{name}.bias", f"{path}bias", bias))
    dense = {
        "out": (
            "attention.output.dense",
            "embed (heads head_dim) -> heads head_dim embed",
        ),
        "up": ("intermediate.dense", "mlp embed -> embed mlp"),
        "down": ("output.dense", "embed mlp -> mlp embed"),
    }
    for name, (path, kernel) in dense.items():
        bias = "mlp -> mlp" if name == "up" else "embed -> embed"
        found.append((f"{ours}{name}.kernel", f"{theirs}{path}.weight", kernel))
        found.append((f"{ours}{name}.bias", f"{theirs}{path}.bias", bias))
    norms = {
        f"{ours}attention_norm": f"{theirs}layernorm_before",
        f"{ours}mlp_norm": f"{theirs}layernorm_after",
        "norm": "vit.layernorm",
    }
    for name, path in norms.items():
        found.append((f"{name}.scale", f"{path}.weight", "embed -> embed"))
        found.append((f"{name}.bias", f"{path}.bias", "embed -> embed"))
    return tuple(found)


def resnet_names(config: Any) -> tuple[Entry, ...]:
    """The entries of all parameters and statistics of a `ResNet`."""
    found: list[Entry] = [
        ("head.kernel", "classifier.1.weight", "classes into -> into classes"),
        ("head.bias", "classifier.1.bias", "classes -> classes"),
    ]
    for conv, norm, path in _pairs(config):
        kernel = "out into h w -> h w into out"
        found.append((f"{conv}.kernel", f"{path}.convolution.weight", kernel))
        for ours, theirs in _NORM.items():
            name = f"{path}.normalization.{theirs}"
            found.append((f"{norm}.{ours}", name, "out -> out"))
    return tuple(found)


_NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean"}
_NORM |= {"var": "running_var"}


def resnet_counters(config: Any) -> list[str]:
    """Names of the counters of steps that PyTorch keeps with each norm's statistics."""
    return [f"{path}.normalization.num_batches_tracked" for *_, path in _pairs(config)]


def _pairs(config: Any) -> list[tuple[str, str, str]]:
    """Our convolution, the norm behind it, and the pair's name in files, for each."""
    names = ["up", "down"] if config.block == "basic" else ["reduce", "up", "down"]
    found = [("stem", "stem_norm", "resnet.embedder.embedder")]
    index = 0
    for stage, depth in enumerate(config.stage_sizes):
        for layer in range(depth):
            theirs = f"resnet.encoder.stages.{stage}.layers.{layer}"
            places = {name: f"layer.{i}" for i, name in enumerate(names)}
            # Shapes change in the first block of a stage, except in the first stage of
            # basic blocks.
            if layer == 0 and (stage > 0 or config.block == "bottleneck"):
                places["project"] = "shortcut"
            for name, place in places.items():
                ours = f"blocks.{index}.{name}"
                found.append((ours, f"{ours}_norm", f"{theirs}.{place}"))
            index += 1
    return found
