"""The families Qwen 2 and Qwen 3 with a mixture of experts."""

from dataclasses import replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts
from nnx_parallel.models.families import llama, qwen
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.models.families.qwen import QWEN2, QWEN3
from nnx_parallel.weights.family import Values
from nnx_parallel.weights.names import Entry

MLP = {
    "mlp.router": "mlp.gate",
    "mlp.up": "mlp.experts.{}.up_proj",
    "mlp.gate": "mlp.experts.{}.gate_proj",
    "mlp.down": "mlp.experts.{}.down_proj",
}
"""Names of routed experts, which the family OLMoE shares."""

WITH_SHARED = MLP | {
    f"mlp.shared.{n}": f"mlp.shared_expert.{n}_proj" for n in ("up", "gate", "down")
}
"""Names of routed experts and of the shared expert."""

SHARED_GATE: Entry = (
    "blocks.layer.mlp.shared_gate",
    "model.layers.{}.mlp.shared_expert_gate.weight",
    "1 embed -> embed",
)


def write_mixture(fields: Values) -> dict[str, Any]:
    """Returns the settings of experts that all of Qwen's mixtures share."""
    experts = fields["experts"]
    return {
        **llama.write_experts(fields),
        "num_experts": experts.num_experts,
        "moe_intermediate_size": experts.mlp_dim,
        "norm_topk_prob": experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def write(fields: Values) -> dict[str, Any]:
    """Returns the settings that both families share."""
    return {**qwen.write(fields), **write_mixture(fields)}


def read_with_shared(settings: Values) -> dict[str, Any]:
    """Returns the fields for routed experts and a shared expert with a gate."""
    # In these families, transformers ignores Mixtral's name for the number of experts.
    found = llama.read_experts({**settings, "num_local_experts": None})
    width = settings["shared_expert_intermediate_size"]
    experts = replace(found["experts"], shared_dim=width, shared_gate=True)
    return {**found, "experts": experts}


def _read_2(settings: Values) -> dict[str, Any]:
    windows = {} if settings["use_sliding_window"] else {"sliding_window": None}
    # Every second layer before this number has the window.
    last = settings["max_window_layers"]
    types = [
        "full_attention" if i % 2 or i >= last else "sliding_attention"
        for i in range(settings["num_hidden_layers"])
    ]
    rest = llama.read({**settings, **windows}, types)
    return {**rest, **read_with_shared(settings)}


def _write_2(fields: Values) -> Values:
    width = fields["experts"].shared_dim
    return {**write(fields), "shared_expert_intermediate_size": width, "qkv_bias": True}


def _names_2(fields: Values) -> list[Entry]:
    return [*llama.names(fields, mlp=WITH_SHARED), SHARED_GATE]


_QWEN_15 = {"vocab_size": 151_936, "rope_theta": 1e6, "norm_epsilon": 1e-6}
_4_OF_60 = Experts(
    num_experts=60,
    top_k=4,
    mlp_dim=1408,
    shared_dim=5632,
    shared_gate=True,
    normalise=False,
    balance_loss=0.001,
)
_8_OF_64 = replace(_4_OF_60, num_experts=64, top_k=8, mlp_dim=2560, shared_dim=20_480)

QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    marks=("qkv_bias", "experts"),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "sliding_window": 4096,
    },
    valid={**QWEN2.valid, "qkv_bias": (True,)},
    read=_read_2,
    write=_write_2,
    names=_names_2,
    presets={
        "qwen1.5-moe-a2.7b": sized(
            _QWEN_15, "24 2048 16 16", seq_len=8192, experts=_4_OF_60
        ),
        "qwen2-57b-a14b": sized(
            _QWEN_15, "28 3584 28 4", seq_len=131_072, experts=_8_OF_64
        ),
    },
)

_QWEN_3 = _QWEN_15 | {"seq_len": 40_960, "head_dim": 128}
_8_OF_128 = Experts(num_experts=128, top_k=8, mlp_dim=768, balance_loss=0.001)
_WIDER = replace(_8_OF_128, mlp_dim=1536)


def _read_3(settings: Values) -> dict[str, Any]:
    # All layers have the window. transformers ignores `layer_types`.
    alike = {**settings, "max_window_layers": 0, "layer_types": None}
    return qwen.read(alike) | llama.read_experts(settings)


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    marks=("qk_norm", "experts"),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": 4096,
        "norm_topk_prob": False,
    },
    read=_read_3,
    write=write,
    names=lambda fields: llama.names(fields, mlp=MLP),
    presets={
        "qwen3-30b-a3b": sized(_QWEN_3, "48 2048 32 4", experts=_8_OF_128),
        "qwen3-235b-a22b": sized(_QWEN_3, "94 4096 64 4", experts=_WIDER),
    },
)
FAMILIES = (QWEN2_MOE, QWEN3_MOE)
