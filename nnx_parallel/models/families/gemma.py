"""The families Gemma 2 and Gemma 3."""

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


def _read(settings: Values) -> Values:
    # The last layer of each period is global, which means that it sees all keys.
    count = settings["num_hidden_layers"]
    period = settings["sliding_window_pattern"] or count + 1
    types = ["sliding_attention"] * count
    types[period - 1 :: period] = ["full_attention"] * (count // period)
    scale = settings["query_pre_attn_scalar"] ** -0.5
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
_GEMMA_2 = _SIZES | {
    "vocab_size": 256_000,
    "seq_len": 8192,
    "window": 4095,
    "layer_kinds": ("local", "global"),
    "softcap": 50.0,
    "logit_softcap": 30.0,
}

GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    parts={
        **LLAMA.parts,
        "activation": "geglu",
        "tied": True,
        "zero_centered_norm": True,
        "post_norms": True,
        "scale_embedding": True,
    },
    marks=("zero_centered_norm",),
    settings={
        **LLAMA.settings,
        "softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
    },
    defaults={
        **LLAMA.defaults,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
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
    given = settings.get("rope_parameters") or {}
    whole = {**(given.get("full_attention") or {}), **(settings["rope_scaling"] or {})}
    local = llama.read_rotation(
        given.get("sliding_attention") or {},
        {**settings, "rope_theta": settings["rope_local_base_freq"]},
    )
    if local["rope_scaling"] is not None:
        raise ValueError(
            "config.json stretches the rotation of sliding_attention, which GPT does "
            "not support: the rope_type must be 'default'."
        )
    return {
        **_read({**settings, "rope_scaling": None, "rope_parameters": None}),
        **llama.read_rotation(whole, settings),
        "local_rope_theta": local["rope_theta"],
    }


def _write_3(fields: Values) -> Values:
    found, local = _write(fields), fields["local_rope_theta"] or fields["rope_theta"]
    rope = {
        "full_attention": found["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return found | {"rope_local_base_freq": local, "rope_parameters": rope}


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
    marks=("zero_centered_norm", "qk_norm"),
    defaults={
        **GEMMA2.defaults,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": None,
    },
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
FAMILIES = (GEMMA2, GEMMA3)
