"""The family GLM-4.5: heads that rotate in part, and experts as in DeepSeek V3."""

from dataclasses import replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts
from nnx_parallel.models.families import llama
from nnx_parallel.models.families.deepseek import (
    CHOICE_BIAS,
    MIXTURE,
    predicted_layers,
    read_sigmoid,
    write_mixture,
)
from nnx_parallel.models.families.llama import LLAMA, MLP, sized
from nnx_parallel.weights.family import Values
from nnx_parallel.weights.names import Entry


def _read(settings: Values) -> dict[str, Any]:
    return llama.read(settings, is_partial=True) | read_sigmoid(settings)


def _write(fields: Values) -> dict[str, Any]:
    found = llama.write(fields, is_partial=True) | write_mixture(fields)
    return found | {"num_nextn_predict_layers": 0}


def _names(fields: Values) -> list[Entry]:
    mixture = [*llama.names(fields, mlp=MIXTURE), CHOICE_BIAS]
    dense = llama.names(fields, mlp=MLP)
    return llama.after_dense(mixture, dense, fields["dense_layers"])


_SIZES = {
    "vocab_size": 151_552,
    "seq_len": 131_072,
    "norm_epsilon": 1e-5,
    "rope_theta": 1e6,
    "head_dim": 128,
    "rotary_dim": 64,
    "qkv_bias": True,
}
_8_OF_128 = Experts(
    num_experts=128,
    top_k=8,
    mlp_dim=1408,
    shared_dim=1408,
    scores="sigmoid",
    choice_bias=True,
    bias_rate=0.001,
    balance_loss=0.0001,
)
_8_OF_160 = replace(
    _8_OF_128, num_experts=160, mlp_dim=1536, shared_dim=1536, scale=2.5
)

GLM4_MOE = replace(
    LLAMA,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    marks=("dense_layers", "experts"),
    settings={
        **LLAMA.settings,
        "qkv_bias": "attention_bias",
        "qk_norm": "use_qk_norm",
    },
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    valid={
        name: values
        for name, values in LLAMA.valid.items()
        if name not in ("attention_bias", "partial_rotary_factor")
    },
    read=_read,
    write=_write,
    names=_names,
    left_out=predicted_layers,
    presets={
        "glm-4.5-air": sized(
            _SIZES, "46 4096 96 8 10944", dense_layers=1, experts=_8_OF_128
        ),
        "glm-4.5": sized(
            _SIZES,
            "92 5120 96 8 12288",
            dense_layers=3,
            experts=_8_OF_160,
            qk_norm=True,
        ),
    },
)
FAMILIES = (GLM4_MOE,)
