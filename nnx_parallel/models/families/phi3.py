"""The family Phi-3, with Phi-4 and Phi-4-mini."""

from dataclasses import replace
from typing import Any

from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.weights.family import Values
from nnx_parallel.weights.names import Entry

_ATTENTION = {
    "attention.query": "self_attn.qkv_proj",
    "attention.key": "self_attn.qkv_proj",
    "attention.value": "self_attn.qkv_proj",
    "attention.out": "self_attn.o_proj",
}
_MLP = {
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
    "mlp.down": "mlp.down_proj",
}


def _names(fields: Values) -> list[Entry]:
    # One kernel in files holds all heads of queries, then of keys, then of values.
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"]
    ends = [0, heads, heads + kv_heads, heads + 2 * kv_heads]
    pattern = "(heads head_dim) embed -> embed heads head_dim"
    kernels = {
        name: f"heads {first}:{last} of {ends[-1]}: {pattern}"
        for name, first, last in zip(
            ("query", "key", "value"), ends, ends[1:], strict=False
        )
    }
    for i, name in enumerate(("gate", "up")):
        kernels[name] = f"part {i} of 2: (n mlp) embed -> n embed mlp"
    patterns = {name: (kernel, "") for name, kernel in kernels.items()}
    return llama.names(fields, mlp=_MLP, attention=_ATTENTION, patterns=patterns)


def _read(settings: Values) -> dict[str, Any]:
    name = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    rope = settings.get(name) or {}
    # Older files have other names for this kind of rotation.
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        settings = {**settings, name: {**rope, "rope_type": "longrope"}}
    types = ["sliding_attention"] * settings["num_hidden_layers"]
    return llama.read(settings, types, is_partial=True)


def _write(fields: Values) -> dict[str, Any]:
    found, scaling = llama.write(fields, is_partial=True), fields["rope_scaling"]
    found.pop("layer_types", None)  # not needed, because all layers have the window
    if scaling is None:
        return found
    rope = dict(found["rope_scaling"])
    # transformers 4 expects these three settings and no other one.
    rope["type"] = rope.pop("rope_type")
    length = rope.pop("original_max_position_embeddings", fields["seq_len"])
    found |= {"rope_scaling": rope, "original_max_position_embeddings": length}
    return found


_PHI_3 = {"vocab_size": 32_064, "seq_len": 4096, "window": 2046}

PHI3 = replace(
    LLAMA,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "original_max_position_embeddings": 4096,
    },
    valid={
        **{k: v for k, v in LLAMA.valid.items() if k != "partial_rotary_factor"},
        "hidden_act": ("silu",),
    },
    read=_read,
    write=_write,
    names=_names,
    presets={
        "phi3-mini-4k": sized(_PHI_3, "32 3072 32 32 8192"),
        "phi3-medium-4k": sized(_PHI_3, "40 5120 40 10 17920"),
        "phi4-14b": sized(
            {"vocab_size": 100_352, "seq_len": 16_384, "rope_theta": 250_000.0},
            "40 5120 40 10 17920",
        ),
    },
)
FAMILIES = (PHI3,)
