"""The families Mistral, Ministral and Mixtral; Mixtral has a mixture of experts."""

from dataclasses import replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts
from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.weights.family import Values


def _read(settings: Values) -> dict[str, Any]:
    return llama.read(settings, ["sliding_attention"] * settings["num_hidden_layers"])


def _write(fields: Values) -> dict[str, Any]:
    found = {"sliding_window": None, **llama.write(fields)}
    found.pop("layer_types", None)  # not needed, because all layers have the window
    return found


_SIZES = {"vocab_size": 32_000, "seq_len": 32_768}
_SMALL_3 = _SIZES | {"vocab_size": 131_072, "rope_theta": 1e8, "head_dim": 128}

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    marks=("window",),
    defaults={**LLAMA.defaults, "num_key_value_heads": 8, "sliding_window": 4096},
    read=_read,
    write=_write,
    presets={
        "mistral-7b": sized(_SIZES, "32 4096 32 8 14336", window=4095),
        "ministral-8b": sized(_SMALL_3, "36 4096 32 8 12288", window=32_767),
        "mistral-small3-24b": sized(_SMALL_3, "40 5120 32 8 32768"),
    },
)
MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    write=llama.write,
    presets={},
)

_MLP = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.up": "block_sparse_moe.experts.{}.w3",
    "mlp.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.down": "block_sparse_moe.experts.{}.w2",
}
_MIXTRAL = {**_SIZES, "rope_theta": 1e6}
_2_OF_8 = Experts(num_experts=8, top_k=2, mlp_dim=14_336, balance_loss=0.02)
_WIDER = replace(_2_OF_8, mlp_dim=16_384)

MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    marks=("experts",),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    read=lambda settings: _read(settings) | llama.read_experts(settings),
    write=lambda fields: _write(fields) | llama.write_experts(fields),
    names=lambda fields: llama.names(fields, mlp=_MLP),
    presets={
        "mixtral-8x7b": sized(_MIXTRAL, "32 4096 32 8", experts=_2_OF_8),
        "mixtral-8x22b": sized(
            _MIXTRAL, "56 6144 48 8", seq_len=65_536, experts=_WIDER
        ),
    },
)
FAMILIES = (MINISTRAL, MISTRAL, MIXTRAL)
