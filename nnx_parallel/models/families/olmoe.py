"""The family OLMoE: norms of queries and keys over all heads, and many experts."""

from dataclasses import replace

from nnx_parallel.layers.experts.routing import Experts
from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.models.families.qwen_moe import MLP
from nnx_parallel.weights.family import Values


def _write(fields: Values) -> Values:
    experts = fields["experts"]
    found = llama.write(fields) | llama.write_experts(fields)
    del found["num_local_experts"]
    return found | {
        "num_experts": experts.num_experts,
        "norm_topk_prob": experts.normalise,
    }


_SIZES = {"vocab_size": 50_304, "seq_len": 4096}
_8_OF_64 = Experts(
    num_experts=64,
    top_k=8,
    mlp_dim=1024,
    normalise=False,
    balance_loss=0.01,
    z_loss=0.001,
)

OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    parts={**LLAMA.parts, "qk_norm": True, "wide_qk_norm": True},
    marks=("wide_qk_norm", "qk_norm", "experts"),
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    valid={**LLAMA.valid, "clip_qkv": (None,)},
    read=lambda settings: llama.read(settings) | llama.read_experts(settings),
    write=_write,
    names=lambda fields: llama.names(fields, mlp=MLP),
    presets={"olmoe-1b-7b": sized(_SIZES, "16 2048 16 16", experts=_8_OF_64)},
)
FAMILIES = (OLMOE,)
