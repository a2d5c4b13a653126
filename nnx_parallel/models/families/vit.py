"""The family ViT, and helpers for the families of vision transformers."""

from collections.abc import Mapping

from nnx_parallel.models.classifier import read_labels, write_labels
from nnx_parallel.weights.family import Family, Values, block_entries
from nnx_parallel.weights.names import Entry

SETTINGS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
    "norm_epsilon": "layer_norm_eps",
}
"""The settings of transformers that have the same value as a field, by field."""

GELU = ("gelu", "gelu_pytorch_tanh", "gelu_new")
"""Valid values of ``hidden_act``."""

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


def patch_entries(fields: Values, theirs: str) -> list[Entry]:
    """Returns the entries for the convolution ``theirs``, which maps patches."""
    patch = fields["patch_size"]
    kernel = f"embed c p q -> (p q c) embed, c=3 p={patch} q={patch}"
    found = [("patches.kernel", f"{theirs}.weight", kernel)]
    bias = ("patches.bias", f"{theirs}.bias", "embed -> embed")
    return found if fields["pre_norm"] else [*found, bias]


def norm_entries(ours: str, theirs: str) -> list[Entry]:
    """Returns the entries for a norm."""
    return [
        (f"{ours}.scale", f"{theirs}.weight", "embed -> embed"),
        (f"{ours}.bias", f"{theirs}.bias", "embed -> embed"),
    ]


def head_entries(fields: Values, theirs: str) -> list[Entry]:
    """Returns the entries for the head; none if the model does not have a head."""
    found = [
        ("head.kernel", f"{theirs}.weight", "classes embed -> embed classes"),
        ("head.bias", f"{theirs}.bias", "classes -> classes"),
    ]
    return found if fields["num_classes"] else []


def scale_entries(fields: Values, names: Mapping[str, str]) -> list[Entry]:
    """Returns the entries for the factors of layers, with ``names`` by our names."""
    found = [
        (f"blocks.layer.{ours}", theirs, "embed -> embed")
        for ours, theirs in names.items()
    ]
    return [] if fields["layer_scale"] is None else found


def biased_layers(fields: Values) -> set[str]:
    """Returns the names of the layers in a block that have a bias."""
    found = {"out", "up", "gate", "down", "attention_norm", "mlp_norm"}
    found |= {"query_norm", "key_norm"}
    found |= {"query", "value"} if fields["qkv_bias"] else set()
    return found | ({"key"} if fields["key_bias"] else set())


def fused(*names: str) -> dict[str, tuple[str, str]]:
    """Returns patterns for layers that are parts of one kernel ``(out, in)``."""
    dims = "(n heads head_dim)"
    return {
        name: (
            f"part {i} of {len(names)}: {dims} embed -> n embed heads head_dim",
            f"part {i} of {len(names)}: {dims} -> n heads head_dim",
        )
        for i, name in enumerate(names)
    }


def read_images(settings: Values) -> dict[str, object]:
    """Returns the fields for the sizes of images and patches, in pixels."""
    image, patch = (read_side(settings, name) for name in ("image_size", "patch_size"))
    return {"image_size": image, "patch_size": patch, "trim": bool(image % patch)}


def read_side(settings: Values, name: str) -> int:
    """Returns the side of a square in pixels, which may be given as a pair.

    Raises:
        ValueError: If the setting is not a valid side, or is the size of a rectangle.
    """
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


def _names(fields: Values) -> list[Entry]:
    theirs = "vit.embeddings."
    table = "1 seq embed -> seq embed"
    return [
        ("class_token", f"{theirs}cls_token", "1 1 embed -> embed"),
        ("positions.embedding", f"{theirs}position_embeddings", table),
        *patch_entries(fields, f"{theirs}patch_embeddings.projection"),
        *head_entries(fields, "classifier"),
        *block_entries("vit.encoder.layer.{}.", _LAYERS),
        *norm_entries("norm", "vit.layernorm"),
    ]


def _read(settings: Values) -> Values:
    return {
        **read_images(settings),
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
    parts={"positions": "tokens", "pool": "class"},
    marks=("class_token",),
    settings=SETTINGS,
    defaults={
        "image_size": 224,
        "patch_size": 16,
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
    },
    valid={"num_channels": (3,), "hidden_act": GELU, "qkv_bias": (True,)},
    read=_read,
    write=_write,
    names=_names,
    part="vision_config",
    prefix="vit.",
    ignored=r"^(vit\.)?pooler\.",
)
