"""The family gpt-oss: attention sinks, and experts with biases and a clamped SwiGLU."""

from dataclasses import replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts
from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.models.rotary import YarnScaling
from nnx_parallel.weights.family import Values
from nnx_parallel.weights.names import Entry

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotation of a ``config.json`` that has no settings for it."""


def _read(settings: Values) -> dict[str, Any]:
    given = settings.get("rope_scaling") or settings.get("rope_parameters")
    kinds = ["sliding_attention", "full_attention"]
    types = [kinds[i % 2] for i in range(settings["num_hidden_layers"])]
    found = llama.read_experts(settings)
    return {
        **llama.read({**settings, "rope_scaling": given or _YARN}, types),
        **found,
        "experts": replace(found["experts"], use_bias=True),
    }


def _write(fields: Values) -> dict[str, Any]:
    found = {**llama.write(fields), **llama.write_experts(fields)}
    return found | {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}


_HALF = "part {} of 2: expert {}(mlp n) -> n expert {}mlp"
_EXTRA = {
    "attention.out.bias": ("self_attn.o_proj.bias", "embed -> embed"),
    "attention.sinks": ("self_attn.sinks", "heads -> heads"),
    "mlp.router": ("mlp.router.weight", "expert embed -> embed expert"),
    "mlp.router_bias": ("mlp.router.bias", "expert -> expert"),
    # One array in files holds all experts, with columns of gate and up in turn.
    "mlp.gate": ("mlp.experts.gate_up_proj", _HALF.format(0, "embed ", "embed ")),
    "mlp.up": ("mlp.experts.gate_up_proj", _HALF.format(1, "embed ", "embed ")),
    "mlp.gate_bias": ("mlp.experts.gate_up_proj_bias", _HALF.format(0, "", "")),
    "mlp.up_bias": ("mlp.experts.gate_up_proj_bias", _HALF.format(1, "", "")),
    "mlp.down": ("mlp.experts.down_proj", "expert mlp embed -> expert mlp embed"),
    "mlp.down_bias": ("mlp.experts.down_proj_bias", "expert embed -> expert embed"),
}


def _names(fields: Values) -> list[Entry]:
    extra = [
        (f"blocks.layer.{ours}", f"model.layers.{{}}.{theirs}", pattern)
        for ours, (theirs, pattern) in _EXTRA.items()
    ]
    return [*llama.names(fields, mlp={}), *extra]


_SIZES = {
    "vocab_size": 201_088,
    "seq_len": 131_072,
    "head_dim": 64,
    "norm_epsilon": 1e-5,
    "window": 127,
    "layer_kinds": ("local", "global"),
    "rope_theta": 150_000.0,
    "rope_scaling": YarnScaling(factor=32.0, original_len=4096, truncate=False),
}
_4_OF_32 = Experts(
    num_experts=32, top_k=4, mlp_dim=2880, use_bias=True, balance_loss=0.001
)
_4_OF_128 = replace(_4_OF_32, num_experts=128)

GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    parts={
        **LLAMA.parts,
        "activation": "clamped_swiglu",
        "use_bias": True,
        "sinks": True,
    },
    marks=("sinks", "experts"),
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 2880,
        "max_position_embeddings": 131_072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_theta": 150_000.0,
    },
    valid={
        **LLAMA.valid,
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    },
    read=_read,
    write=_write,
    names=_names,
    presets={
        "gpt-oss-20b": sized(_SIZES, "24 2880 64 8", experts=_4_OF_32),
        "gpt-oss-120b": sized(_SIZES, "36 2880 64 8", experts=_4_OF_128),
    },
)
FAMILIES = (GPT_OSS,)
