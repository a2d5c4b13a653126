"""The families Mistral, Ministral, Ministral 3 and Mixtral."""

from dataclasses import replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts
from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.models.rotary import YarnScaling
from nnx_parallel.weights.family import Values


def _read(settings: Values) -> dict[str, Any]:
    return llama.read(settings, ["sliding_attention"] * settings["num_hidden_layers"])


def _read_alike(settings: Values) -> dict[str, Any]:
    # In these families, transformers ignores `layer_types`.
    return _read({**settings, "layer_types": None})


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
    read=_read_alike,
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
    read=_read,
    write=llama.write,
    presets={},
)


def _read_3(settings: Values) -> dict[str, Any]:
    found, name = _read(settings), "llama_4_scaling_beta"
    rope = settings.get("rope_scaling") or settings["rope_parameters"]
    if not isinstance(found["rope_scaling"], YarnScaling) or name not in rope:
        raise ValueError(
            "config.json of model_type 'ministral3' needs a rotation with the "
            f"rope_type 'yarn' and {name}, but its rotation is {rope!r}."
        )
    return found | {"rope_scaling": replace(found["rope_scaling"], growth=rope[name])}


def _write_3(fields: Values) -> dict[str, Any]:
    found = _write(fields)
    growth = {"llama_4_scaling_beta": fields["rope_scaling"].growth}
    rope = {name: found[name] | growth for name in ("rope_scaling", "rope_parameters")}
    return found | rope


MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={
        **MISTRAL.defaults,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    read=_read_3,
    write=_write_3,
    presets={
        "ministral3-8b": sized(
            _SMALL_3,
            "34 4096 32 8 14336",
            seq_len=262_144,
            rope_theta=1e6,
            rope_scaling=YarnScaling(
                factor=16.0, original_len=16_384, attention_factor=1.0, growth=0.1
            ),
        ),
    },
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


def _read_experts(settings: Values) -> dict[str, Any]:
    # transformers ignores settings of other mixtures.
    others = ("moe_intermediate_size", "norm_topk_prob")
    known = {name: x for name, x in settings.items() if name not in others}
    return _read_alike(settings) | llama.read_experts(known)


MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    marks=("experts",),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    read=_read_experts,
    write=lambda fields: _write(fields) | llama.write_experts(fields),
    names=lambda fields: llama.names(fields, mlp=_MLP),
    presets={
        "mixtral-8x7b": sized(_MIXTRAL, "32 4096 32 8", experts=_2_OF_8),
        "mixtral-8x22b": sized(
            _MIXTRAL, "56 6144 48 8", seq_len=65_536, experts=_WIDER
        ),
    },
)
FAMILIES = (MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL)
