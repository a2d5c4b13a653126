"""The vision models of SigLIP, and of SigLIP 2 with a fixed resolution.

transformers averages the patches for a classifier, and leaves out the attention pool.
"""

from typing import Any

from nnx_parallel.models.classifier import read_labels, write_labels
from nnx_parallel.models.families.llama import sized
from nnx_parallel.models.families.vit import (
    GELU,
    SETTINGS,
    fused,
    head_entries,
    norm_entries,
    patch_entries,
    read_images,
)
from nnx_parallel.weights.family import Family, Values, block_entries
from nnx_parallel.weights.names import Entry

_CLASSIFIER = "SiglipForImageClassification"
_LAYERS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "attention_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
}
_POOL = {
    "out": "attention.out_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "mlp_norm": "layernorm",
}


def _pool_names(theirs: str) -> list[Entry]:
    patterns = fused("query", "key", "value")
    parts = [
        (f"pooling.{layer}.{ours}", f"{theirs}attention.in_proj_{name}", pattern)
        for layer, pair in patterns.items()
        for ours, name, pattern in zip(
            ("kernel", "bias"), ("weight", "bias"), pair, strict=True
        )
    ]
    return [
        ("pooling.probe", f"{theirs}probe", "1 1 embed -> embed"),
        *parts,
        *block_entries(theirs, _POOL, ours="pooling."),
    ]


def _names(fields: Values) -> list[Entry]:
    theirs, table = "vision_model.embeddings.", "seq embed -> seq embed"
    has_pool = fields["pool"] == "attention"
    return [
        *patch_entries(fields, f"{theirs}patch_embedding"),
        ("positions.embedding", f"{theirs}position_embedding.weight", table),
        *block_entries("vision_model.encoder.layers.{}.", _LAYERS),
        *norm_entries("norm", "vision_model.post_layernorm"),
        *(_pool_names("vision_model.head.") if has_pool else []),
        *head_entries(fields, "classifier"),
    ]


def _read(settings: Values) -> Values:
    is_classifier = _CLASSIFIER in (settings.get("architectures") or ())
    has_pool = settings["vision_use_head"] and not is_classifier
    return {
        **read_images(settings),
        "exact_gelu": settings["hidden_act"] == "gelu",
        "num_classes": read_labels(settings) if is_classifier else 0,
        "pool": "attention" if has_pool else "mean",
    }


def _write(fields: Values) -> Values:
    found = {
        "num_channels": 3,
        "hidden_act": "gelu" if fields["exact_gelu"] else "gelu_pytorch_tanh",
        # Without this setting, transformers would expect the pool in the files.
        "vision_use_head": fields["pool"] == "attention",
    }
    if not fields["num_classes"]:
        return found
    return {**found, "architectures": [_CLASSIFIER], **write_labels(fields)}


def _pack(settings: Values) -> dict[str, Any]:
    """Returns the config of the vision model, or of a classifier that contains it."""
    if _CLASSIFIER not in settings["architectures"]:
        return dict(settings)
    outer = ("architectures", "id2label", "label2id")
    inner = {name: x for name, x in settings.items() if name not in outer}
    return {
        "model_type": "siglip",
        **{name: settings[name] for name in outer},
        "vision_config": inner,
    }


def _sized(shape: str, image: int, patch: int) -> dict[str, Any]:
    layers, width, heads, mlp = shape.split()
    fields = {"image_size": image, "patch_size": patch, "num_classes": 0}
    found = sized(fields, f"{layers} {width} {heads}", mlp_dim=int(mlp))
    return found | {"pool": "attention", "trim": bool(image % patch)}


_SIZES = {
    "base": "12 768 12 3072",
    "large": "24 1024 16 4096",
    "so400m": "27 1152 16 4304",
    "giant-opt": "40 1536 16 6144",
}
_PRESETS = {
    "siglip": "base-16-224 base-16-256 base-16-384 base-16-512 large-16-256 "
    "large-16-384 so400m-14-224 so400m-14-384",
    "siglip2": "base-32-256 base-16-224 base-16-256 base-16-384 base-16-512 "
    "large-16-256 large-16-384 large-16-512 so400m-14-224 so400m-14-384 "
    "so400m-16-256 so400m-16-384 so400m-16-512 giant-opt-16-256 giant-opt-16-384",
}

SIGLIP = Family(
    model="ViT",
    model_type="siglip_vision_model",
    architecture="SiglipVisionModel",
    parts={"positions": "tokens"},
    settings=SETTINGS,
    defaults={
        "image_size": 224,
        "patch_size": 16,
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": True,
    },
    valid={
        "num_channels": (3,),
        "hidden_act": GELU,
        "vision_use_head": (True, False),
    },
    read=_read,
    write=_write,
    names=_names,
    pack=_pack,
    part="vision_config",
    new_head={"pool": "mean"},
    prefix="vision_model.",
    ignored=r"^(vision_model\.)?head\.|\.position_ids$",
    presets={
        f"{model}-{size}-patch{patch}-{image}": _sized(
            _SIZES[size], int(image), int(patch)
        )
        for model, names in _PRESETS.items()
        for size, patch, image in (name.rsplit("-", 2) for name in names.split())
    },
)
