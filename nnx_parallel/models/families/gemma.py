"""The families Gemma, Gemma 2 and Gemma 3."""

from dataclasses import replace
from typing import Any

from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.models.rotary import RopeScaling
from nnx_parallel.weights.family import Values

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _types(count: int, period: int) -> list[str]:
    # The last layer of each period is global, which means that it sees all keys.
    types = ["sliding_attention"] * count
    types[period - 1 :: period] = ["full_attention"] * (count // period)
    return types


def _read(settings: Values) -> Values:
    scale = settings["query_pre_attn_scalar"] ** -0.5
    types = _types(settings["num_hidden_layers"], 2)
    return llama.read(settings, types) | {"attention_scale": scale}


def _write(fields: Values) -> dict[str, Any]:
    found = llama.write(fields)
    del found["hidden_act"]
    return found | {
        "hidden_activation": "gelu_pytorch_tanh",
        # transformers requires an int here.
        "query_pre_attn_scalar": round(fields["attention_scale"] ** -2),
    }


_SIZES = {"norm_epsilon": 1e-6, "head_dim": 256, "attention_scale": 256**-0.5}
_GEMMA_1 = _SIZES | {"vocab_size": 256_000, "seq_len": 8192}

GEMMA = replace(
    LLAMA,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    parts={
        **LLAMA.parts,
        "activation": "geglu",
        "tied": True,
        "zero_centered_norm": True,
        "scale_embedding": True,
    },
    marks=("zero_centered_norm",),
    defaults={
        **LLAMA.defaults,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    # In files of this family, "gelu" also means the approximation by tanh.
    valid=llama.NEUTRAL
    | {
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": ("gelu_pytorch_tanh",),
    },
    write=lambda fields: llama.write(fields) | {"hidden_act": "gelu_pytorch_tanh"},
    presets={
        "gemma-2b": sized(_GEMMA_1, "18 2048 8 1 16384"),
        "gemma-7b": sized(_GEMMA_1, "28 3072 16 16 24576"),
    },
)

_GEMMA_2 = _SIZES | {
    "vocab_size": 256_000,
    "seq_len": 8192,
    "window": 4095,
    "layer_kinds": ("local", "global"),
    "softcap": 50.0,
    "logit_softcap": 30.0,
}

GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    parts={**GEMMA.parts, "post_norms": True},
    marks=("zero_centered_norm", "post_norms"),
    settings={
        **LLAMA.settings,
        "softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
    },
    defaults={
        **GEMMA.defaults,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    valid=llama.NEUTRAL | {"hidden_activation": ("gelu_pytorch_tanh",)},
    read=_read,
    write=_write,
    names=lambda fields: llama.names(fields, norms=_NORMS),
    presets={
        "gemma2-2b": sized(_GEMMA_2, "26 2304 8 4 9216"),
        "gemma2-9b": sized(_GEMMA_2, "42 3584 16 8 14336"),
        "gemma2-27b": sized(
            _GEMMA_2, "46 4608 32 16 36864", head_dim=128, attention_scale=144**-0.5
        ),
    },
)


def _read_3(settings: Values) -> Values:
    local_theta = settings["rope_local_base_freq"]
    types = _types(settings["num_hidden_layers"], settings["sliding_window_pattern"])
    found = llama.read_by_kind(settings, types, local_theta)
    return found | {"attention_scale": settings["query_pre_attn_scalar"] ** -0.5}


def _write_3(fields: Values) -> Values:
    found = _write(fields) | llama.write_by_kind(fields)
    del found["hidden_act"]
    local = found["rope_parameters"]["sliding_attention"]["rope_theta"]
    return found | {"rope_local_base_freq": local}


_GEMMA_3 = _SIZES | {
    "vocab_size": 262_208,
    "seq_len": 131_072,
    "window": 1023,
    "layer_kinds": ("local",) * 5 + ("global",),
    "rope_theta": 1e6,
    "rope_scaling": RopeScaling(factor=8.0),
    "local_rope_theta": 10_000.0,
}
_GEMMA_3_1B = _GEMMA_3 | {"vocab_size": 262_144, "seq_len": 32_768, "window": 511}

GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    parts={**GEMMA2.parts, "qk_norm": True},
    marks=("zero_centered_norm", "post_norms", "qk_norm"),
    settings={**LLAMA.settings, "logit_softcap": "final_logit_softcapping"},
    defaults={
        **GEMMA2.defaults,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
    },
    # transformers defines this soft cap for Gemma 3, but ignores its value.
    valid={**GEMMA2.valid, "attn_logit_softcapping": (None,)},
    read=_read_3,
    write=_write_3,
    presets={
        "gemma3-1b": sized(_GEMMA_3_1B, "26 1152 4 1 6912", rope_scaling=None),
        "gemma3-4b": sized(_GEMMA_3, "34 2560 8 4 10240"),
        "gemma3-12b": sized(_GEMMA_3, "48 3840 16 8 15360"),
        "gemma3-27b": sized(
            _GEMMA_3, "62 5376 32 16 21504", head_dim=128, attention_scale=168**-0.5
        ),
    },
)
FAMILIES = (GEMMA, GEMMA2, GEMMA3)
