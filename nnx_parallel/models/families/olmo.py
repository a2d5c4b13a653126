"""The families OLMo 2 and OLMo 3, with norms after attention and after the MLP."""

from dataclasses import replace
from typing import Any

from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.models.rotary import YarnScaling
from nnx_parallel.weights.family import Values
from nnx_parallel.weights.names import Entry

_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


_THETA = 500_000.0
"""The base of the rotation in local layers of OLMo 3.

All published models use this base in all layers.
"""


def _names(fields: Values) -> list[Entry]:
    return llama.names(fields, norms=_NORMS)


_OLMO_2 = {
    "vocab_size": 100_352,
    "seq_len": 4096,
    "rope_theta": _THETA,
    "norm_epsilon": 1e-6,
}

OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    parts={
        **LLAMA.parts,
        "pre_norms": False,
        "post_norms": True,
        "qk_norm": True,
        "wide_qk_norm": True,
    },
    marks=("wide_qk_norm", "qk_norm"),
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    names=_names,
    presets={
        "olmo2-1b": sized(_OLMO_2, "16 2048 16 16 8192"),
        "olmo2-7b": sized(_OLMO_2, "32 4096 32 32 11008"),
        "olmo2-13b": sized(_OLMO_2, "40 5120 40 40 13824"),
        "olmo2-32b": sized(_OLMO_2, "64 5120 40 8 27648"),
    },
)


def _read_3(settings: Values) -> dict[str, Any]:
    count = settings["num_hidden_layers"]
    period = ["sliding_attention"] * 3 + ["full_attention"]
    return llama.read_by_kind(settings, (period * count)[:count], _THETA)


_OLMO_3 = _OLMO_2 | {
    "vocab_size": 100_278,
    "seq_len": 65_536,
    "window": 4095,
    "layer_kinds": ("local",) * 3 + ("global",),
    "local_rope_theta": _THETA,
    "rope_scaling": YarnScaling(
        factor=8.0, original_len=8192, attention_factor=1.2079441541679836
    ),
}

OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    marks=("wide_qk_norm", "qk_norm", "window"),
    defaults={
        **OLMO2.defaults,
        "max_position_embeddings": 2048,
        "rope_theta": _THETA,
        "sliding_window": 4096,
    },
    read=_read_3,
    write=llama.write_by_kind,
    presets={
        "olmo3-7b": sized(_OLMO_3, "32 4096 32 32 11008"),
        "olmo3-32b": sized(_OLMO_3, "64 5120 40 8 27648"),
    },
)
FAMILIES = (OLMO2, OLMO3)
