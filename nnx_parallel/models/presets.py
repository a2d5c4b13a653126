"""Arguments of `GPTConfig` for published models, by name.

Sizes come from each model's ``config.json`` on the Hugging Face hub; a test compares
the number of parameters with the published number.
"""

from dataclasses import replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts
from nnx_parallel.models.rotary import RopeScaling

LLAMA: dict[str, Any] = {
    "norm": "rms",
    "positions": "rope",
    "activation": "swiglu",
    "use_bias": False,
    "tied": False,
}
"""Shared by Llama, Mistral and Qwen."""

_GPT2 = {"vocab_size": 50_257, "seq_len": 1024}
_LLAMA_2 = LLAMA | {"vocab_size": 32_000, "seq_len": 4096}
_LLAMA_3 = LLAMA | {"vocab_size": 128_256, "seq_len": 8192, "rope_theta": 500_000.0}
_LLAMA_31 = _LLAMA_3 | {
    "seq_len": 131_072,
    "rope_scaling": RopeScaling(factor=8.0, original_len=8192),
}
_LLAMA_32 = _LLAMA_31 | {
    "tied": True,
    "rope_scaling": RopeScaling(factor=32.0, original_len=8192),
}
_QWEN = LLAMA | {"seq_len": 32_768, "rope_theta": 1e6, "norm_epsilon": 1e-6}
_QWEN_25 = _QWEN | {"vocab_size": 151_936, "qkv_bias": True}
_QWEN_3 = _QWEN | {
    "vocab_size": 151_936,
    "seq_len": 40_960,
    "qk_norm": True,
    "head_dim": 128,
    "num_kv_heads": 8,
}
_GEMMA = LLAMA | {
    "activation": "geglu",
    "tied": True,
    "norm_epsilon": 1e-6,
    "zero_centered_norm": True,
    "post_norms": True,
    "scale_embedding": True,
    "head_dim": 256,
}
_GEMMA_2 = _GEMMA | {
    "vocab_size": 256_000,
    "seq_len": 8192,
    "window": 4095,
    "layer_kinds": ("local", "global"),
    "softcap": 50.0,
    "logit_softcap": 30.0,
    "attention_scale": 256**-0.5,
}
_GEMMA_3 = _GEMMA | {
    "vocab_size": 262_208,
    "seq_len": 131_072,
    "window": 1023,
    "layer_kinds": ("local",) * 5 + ("global",),
    "rope_theta": 1e6,
    "rope_scaling": RopeScaling(factor=8.0),
    "local_rope_theta": 10_000.0,
    "qk_norm": True,
    "attention_scale": 256**-0.5,
}
_SMOLLM = LLAMA | {
    "vocab_size": 49_152,
    "seq_len": 8192,
    "rope_theta": 100_000.0,
    "tied": True,
}

_2_OF_8 = Experts(num_experts=8, top_k=2, mlp_dim=14_336, balance_loss=0.02)
_8_OF_128 = Experts(num_experts=128, top_k=8, mlp_dim=768, balance_loss=0.001)
_MIXTRAL = LLAMA | {
    "vocab_size": 32_000,
    "seq_len": 32_768,
    "rope_theta": 1e6,
    "experts": _2_OF_8,
}
_QWEN_3_EXPERTS = _QWEN_3 | {
    "experts": _8_OF_128,
}
# It has key heads instead of DeepSeek's latent attention.
_DEEPSEEK_V3 = LLAMA | {
    "vocab_size": 129_280,
    "seq_len": 4096,
    "norm_epsilon": 1e-6,
    "head_dim": 128,
    "dense_layers": 3,
    "experts": Experts(
        num_experts=256,
        top_k=8,
        mlp_dim=2048,
        shared_dim=2048,
        scores="sigmoid",
        scale=2.5,
        num_groups=8,
        top_groups=4,
        bias_rate=0.001,
        balance_loss=0.0001,
    ),
}

_SHAPE = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "mlp_dim")


def _sized(base: dict[str, Any], shape: str, **more: Any) -> dict[str, Any]:
    """A family's parts with the sizes in ``shape``, in the order of `_SHAPE`."""
    return base | dict(zip(_SHAPE, map(int, shape.split()), strict=False)) | more


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _sized(_GPT2, "12 768 12"),
    "gpt2-medium": _sized(_GPT2, "24 1024 16"),
    "gpt2-large": _sized(_GPT2, "36 1280 20"),
    "gpt2-xl": _sized(_GPT2, "48 1600 25"),
    "llama2-7b": _sized(_LLAMA_2, "32 4096 32 32 11008"),
    "llama2-13b": _sized(_LLAMA_2, "40 5120 40 40 13824"),
    "llama2-70b": _sized(_LLAMA_2, "80 8192 64 8 28672"),
    "llama3-8b": _sized(_LLAMA_3, "32 4096 32 8 14336"),
    "llama3-70b": _sized(_LLAMA_3, "80 8192 64 8 28672"),
    "llama3.1-8b": _sized(_LLAMA_31, "32 4096 32 8 14336"),
    "llama3.1-70b": _sized(_LLAMA_31, "80 8192 64 8 28672"),
    "llama3.1-405b": _sized(_LLAMA_31, "126 16384 128 8 53248"),
    "llama3.2-1b": _sized(_LLAMA_32, "16 2048 32 8 8192"),
    "llama3.2-3b": _sized(_LLAMA_32, "28 3072 24 8 8192"),
    "mistral-7b": _sized(_LLAMA_2, "32 4096 32 8 14336", seq_len=32_768, window=4095),
    "qwen2.5-0.5b": _sized(_QWEN_25, "24 896 14 2 4864", tied=True),
    "qwen2.5-1.5b": _sized(_QWEN_25, "28 1536 12 2 8960", tied=True),
    "qwen2.5-3b": _sized(_QWEN_25, "36 2048 16 2 11008", tied=True),
    "qwen2.5-7b": _sized(_QWEN_25, "28 3584 28 4 18944", vocab_size=152_064),
    "qwen2.5-14b": _sized(_QWEN_25, "48 5120 40 8 13824", vocab_size=152_064),
    "qwen2.5-32b": _sized(_QWEN_25, "64 5120 40 8 27648", vocab_size=152_064),
    "qwen2.5-72b": _sized(_QWEN_25, "80 8192 64 8 29568", vocab_size=152_064),
    "qwen3-0.6b": _sized(_QWEN_3, "28 1024 16 8 3072", tied=True),
    "qwen3-1.7b": _sized(_QWEN_3, "28 2048 16 8 6144", tied=True),
    "qwen3-4b": _sized(_QWEN_3, "36 2560 32 8 9728", tied=True),
    "qwen3-8b": _sized(_QWEN_3, "36 4096 32 8 12288"),
    "qwen3-14b": _sized(_QWEN_3, "40 5120 40 8 17408"),
    "qwen3-32b": _sized(_QWEN_3, "64 5120 64 8 25600"),
    "mixtral-8x7b": _sized(_MIXTRAL, "32 4096 32 8"),
    "mixtral-8x22b": _sized(
        _MIXTRAL,
        "56 6144 48 8",
        seq_len=65_536,
        experts=replace(_2_OF_8, mlp_dim=16_384),
    ),
    "qwen3-30b-a3b": _sized(_QWEN_3_EXPERTS, "48 2048 32 4"),
    "qwen3-235b-a22b": _sized(
        _QWEN_3_EXPERTS,
        "94 4096 64 4",
        experts=replace(_8_OF_128, mlp_dim=1536),
    ),
    "deepseek-v3-like": _sized(_DEEPSEEK_V3, "61 7168 64 8 18432"),
    "gemma2-2b": _sized(_GEMMA_2, "26 2304 8 4 9216"),
    "gemma2-9b": _sized(_GEMMA_2, "42 3584 16 8 14336"),
    "gemma2-27b": _sized(
        _GEMMA_2, "46 4608 32 16 36864", head_dim=128, attention_scale=144**-0.5
    ),
    "gemma3-1b": _sized(
        _GEMMA_3,
        "26 1152 4 1 6912",
        vocab_size=262_144,
        seq_len=32_768,
        window=511,
        rope_scaling=None,
    ),
    "gemma3-4b": _sized(_GEMMA_3, "34 2560 8 4 10240"),
    "gemma3-12b": _sized(_GEMMA_3, "48 3840 16 8 15360"),
    "gemma3-27b": _sized(
        _GEMMA_3, "62 5376 32 16 21504", head_dim=128, attention_scale=168**-0.5
    ),
    "smollm2-135m": _sized(_SMOLLM, "30 576 9 3 1536"),
    "smollm2-360m": _sized(_SMOLLM, "32 960 15 5 2560"),
    "smollm2-1.7b": _sized(_SMOLLM, "24 2048 32 32 8192", rope_theta=130_000.0),
}
