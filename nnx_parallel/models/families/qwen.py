"""The families Qwen 2 and 2.5, and Qwen 3."""

from dataclasses import replace
from typing import Any

from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.weights.family import Values


def read(settings: Values) -> dict[str, Any]:
    """Returns the fields for rotation and windows."""
    if not settings.get("use_sliding_window", False):
        return llama.read(settings)
    count = settings["num_hidden_layers"]
    # The first layers are global, which means that they see all keys.
    whole = max(0, min(settings["max_window_layers"], count))
    types = ["full_attention"] * whole + ["sliding_attention"] * (count - whole)
    return llama.read(settings, types)


def write(fields: Values) -> dict[str, Any]:
    """Returns the settings of rotation and windows."""
    return llama.write(fields) | {"use_sliding_window": fields["window"] is not None}


_SIZES = {"vocab_size": 151_936, "rope_theta": 1e6, "norm_epsilon": 1e-6}
_QWEN_25 = _SIZES | {"seq_len": 32_768}

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    parts={**LLAMA.parts, "qkv_bias": True},
    marks=("qkv_bias",),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    read=read,
    write=write,
    presets={
        "qwen2.5-0.5b": sized(_QWEN_25, "24 896 14 2 4864", tied=True),
        "qwen2.5-1.5b": sized(_QWEN_25, "28 1536 12 2 8960", tied=True),
        "qwen2.5-3b": sized(_QWEN_25, "36 2048 16 2 11008", tied=True),
        "qwen2.5-7b": sized(_QWEN_25, "28 3584 28 4 18944", vocab_size=152_064),
        "qwen2.5-14b": sized(_QWEN_25, "48 5120 40 8 13824", vocab_size=152_064),
        "qwen2.5-32b": sized(_QWEN_25, "64 5120 40 8 27648", vocab_size=152_064),
        "qwen2.5-72b": sized(_QWEN_25, "80 8192 64 8 29568", vocab_size=152_064),
    },
)

_QWEN_3 = _SIZES | {"seq_len": 40_960, "head_dim": 128}

QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    parts={**LLAMA.parts, "qk_norm": True},
    marks=("qk_norm",),
    defaults={**QWEN2.defaults, "head_dim": 128},
    presets={
        "qwen3-0.6b": sized(_QWEN_3, "28 1024 16 8 3072", tied=True),
        "qwen3-1.7b": sized(_QWEN_3, "28 2048 16 8 6144", tied=True),
        "qwen3-4b": sized(_QWEN_3, "36 2560 32 8 9728", tied=True),
        "qwen3-8b": sized(_QWEN_3, "36 4096 32 8 12288"),
        "qwen3-14b": sized(_QWEN_3, "40 5120 40 8 17408"),
        "qwen3-32b": sized(_QWEN_3, "64 5120 64 8 25600"),
    },
)

FAMILIES = (QWEN2, QWEN3)
