"""The vision transformers of DINOv3.

Three settings are for training in transformers, and inference ignores them:
``pos_embed_shift``, ``pos_embed_jitter`` and ``pos_embed_rescale``, which change the
coordinates of patches at random. Here they are always ignored, and `ViT` trains with
the coordinates that inference uses. ``drop_path_rate`` and ``attention_dropout`` are
ignored too.
"""

from typing import Any

import numpy as np

from nnx_parallel.models.families.llama import sized
from nnx_parallel.models.families.vit import (
    SETTINGS,
    biased_layers,
    head_entries,
    norm_entries,
    patch_entries,
    read_images,
    scale_entries,
)
from nnx_parallel.weights.family import Family, Values, block_entries
from nnx_parallel.weights.names import Entry

_LAYERS = {
    "query": "attention.q_proj",
    "key": "attention.k_proj",
    "value": "attention.v_proj",
    "out": "attention.o_proj",
    "up": "mlp.up_proj",
    "gate": "mlp.gate_proj",
    "down": "mlp.down_proj",
    "attention_norm": "norm1",
    "mlp_norm": "norm2",
}
_SCALES = {
    "attention_scale": "layer.{}.layer_scale1.lambda1",
    "mlp_scale": "layer.{}.layer_scale2.lambda1",
}


def _names(fields: Values) -> list[Entry]:
    has_gate = fields["activation"] == "swiglu"
    layers = {k: x for k, x in _LAYERS.items() if k != "gate" or has_gate}
    registers = (
        "registers",
        "embeddings.register_tokens",
        "1 count embed -> count embed",
    )
    return [
        ("class_token", "embeddings.cls_token", "1 1 embed -> embed"),
        *([registers] if fields["num_registers"] else []),
        *patch_entries(fields, "embeddings.patch_embeddings"),
        *block_entries("layer.{}.", layers, biased_layers(fields)),
        *scale_entries(fields, _SCALES),
        *norm_entries("norm", "norm"),
        *head_entries(fields, "classifier"),
    ]


def _read(settings: Values) -> Values:
    act, is_gated = settings["hidden_act"], settings["use_gated_mlp"]
    if act != (needed := "silu" if is_gated else "gelu"):
        raise ValueError(
            f"config.json has hidden_act={act!r} and use_gated_mlp={is_gated}, which "
            f"ViT does not support: with this use_gated_mlp, hidden_act must be "
            f"{needed!r}."
        )
    query, key, value = (settings[f"{x}_bias"] for x in ("query", "key", "value"))
    if query != value or (key and not query):
        raise ValueError(
            f"config.json has query_bias={query}, key_bias={key} and "
            f"value_bias={value}, which ViT does not support: query_bias and "
            "value_bias must be equal, and key_bias needs both."
        )
    return {
        **read_images(settings),
        "activation": "swiglu" if is_gated else "gelu",
        "exact_gelu": not is_gated,
        "qkv_bias": query,
        "key_bias": key,
        "num_classes": 0,
    }


def _write(fields: Values) -> dict[str, Any]:
    is_gated = fields["activation"] == "swiglu"
    return {
        "num_channels": 3,
        "use_gated_mlp": is_gated,
        "hidden_act": "silu" if is_gated else "gelu",
        "query_bias": fields["qkv_bias"],
        "key_bias": fields["key_bias"],
        "value_bias": fields["qkv_bias"],
        "proj_bias": True,
        "mlp_bias": True,
    }


def _constants(fields: Values) -> dict[str, np.ndarray]:
    """Returns zeros for the token of masked patches, which transformers needs in files.

    It uses the token only for masked patches. A model without registers has an empty
    array of registers in the files.
    """
    width = fields["embed_dim"]
    counts = {"embeddings.mask_token": 1}
    if not fields["num_registers"]:
        counts["embeddings.register_tokens"] = 0
    return {name: np.zeros((1, n, width), np.float32) for name, n in counts.items()}


_BASE = {
    "image_size": 224,
    "patch_size": 16,
    "num_classes": 0,
    "num_registers": 4,
    "norm_epsilon": 1e-5,
    "key_bias": False,
    "layer_scale": 1.0,
    "exact_gelu": True,
}
_GATED = {"activation": "swiglu", "exact_gelu": False}

DINOV3 = Family(
    model="ViT",
    model_type="dinov3_vit",
    architecture="DINOv3ViTModel",
    parts={"positions": "rotary", "pool": "class"},
    settings={
        **SETTINGS,
        "num_registers": "num_register_tokens",
        "rope_theta": "rope_theta",
        "layer_scale": "layerscale_value",
    },
    defaults={
        "image_size": 224,
        "patch_size": 16,
        "num_hidden_layers": 12,
        "hidden_size": 384,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "use_gated_mlp": False,
        "query_bias": True,
        "key_bias": False,
        "value_bias": True,
        "num_register_tokens": 0,
        "rope_theta": 100.0,
        "layerscale_value": 1.0,
    },
    valid={"num_channels": (3,), "proj_bias": (True,), "mlp_bias": (True,)},
    read=_read,
    write=_write,
    names=_names,
    constants=_constants,
    part="vision_config",
    prefix="",
    ignored=r"^embeddings\.(mask_token|register_tokens)$|^rope_embeddings\.",
    presets={
        "dinov3-vits16": sized(_BASE, "12 384 6", mlp_dim=1536),
        "dinov3-vits16plus": sized(_BASE, "12 384 6", mlp_dim=1536, **_GATED),
        "dinov3-vitb16": sized(_BASE, "12 768 12", mlp_dim=3072),
        "dinov3-vitl16": sized(_BASE, "24 1024 16", mlp_dim=4096),
        "dinov3-vith16plus": sized(_BASE, "32 1280 20", mlp_dim=5120, **_GATED),
        "dinov3-vit7b16": sized(
            _BASE, "40 4096 32", mlp_dim=8192, qkv_bias=False, **_GATED
        ),
    },
)
