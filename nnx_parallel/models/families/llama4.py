"""The family Llama 4, text only: local layers in chunks, and layers without rotation.

The router of a mixture scales the inputs of experts. Some settings in files only affect
training or images, and are not read: ``router_aux_loss_coef``,
``output_router_logits``, ``router_jitter_noise``, ``attention_dropout`` and the
settings outside of ``text_config``.
"""

from dataclasses import replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts
from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.models.rotary import Growth, RopeScaling
from nnx_parallel.weights.family import Values, alternate, period_of
from nnx_parallel.weights.names import Entry


def _read(settings: Values) -> dict[str, Any]:
    rotated, chunk = llama.read_rotated(settings), settings["attention_chunk_size"]
    is_chunked = [x and chunk is not None for x in rotated]
    types = ["chunked_attention" if x else "full_attention" for x in is_chunked]
    kinds = llama.read_kinds(settings, types, local="chunked_attention")
    if "local" in kinds and chunk is None:
        raise ValueError(
            "config.json has layer_types with 'chunked_attention', but no "
            "attention_chunk_size, which these layers need."
        )
    found = {
        **llama.read({**settings, "layer_types": None}),
        **_read_experts(settings),
        "late_qk_norm": bool(settings["use_qk_norm"]) and any(rotated),
    }
    if "local" in kinds:
        found |= {"chunk": chunk, "layer_kinds": kinds}
    if all(rotated):
        return found
    growth = Growth(
        rate=settings["attn_scale"], length=settings["floor_scale"], ahead=1
    )
    grows = bool(settings["attn_temperature_tuning"]) and growth.rate > 0
    return found | {
        "rotated_layers": rotated,
        "query_growth": growth if grows else None,
    }


def _read_experts(settings: Values) -> dict[str, Any]:
    count, step = settings["num_hidden_layers"], settings["interleave_moe_layer_step"]
    given = settings["moe_layers"]
    layers = set(range(step - 1, count, step) if given is None else given)
    has_experts = [i in layers for i in range(count)]
    if not any(has_experts):
        return {}
    width = settings["intermediate_size"]
    experts = Experts(
        num_experts=settings["num_local_experts"],
        top_k=settings["num_experts_per_tok"],
        mlp_dim=width,
        shared_dim=width,
        scores="sigmoid",
        normalise=False,
        scales_inputs=True,
    )
    if all(has_experts):
        return {"experts": experts, "mlp_dim": None}
    pattern = tuple(has_experts[: period_of(has_experts)])
    return {"experts": experts, "expert_layers": pattern}


def _write(fields: Values) -> dict[str, Any]:
    count, experts, growth = (
        fields[name] for name in ("num_layers", "experts", "query_growth")
    )
    rotated = fields["rotated_layers"] or (True,) * count
    has_experts = fields["expert_layers"] or (experts is not None,) * count
    kinds = {"local": "chunked_attention", "global": "full_attention"}
    found = {
        **llama.write(fields),
        "intermediate_size": fields["mlp_dim"] if experts is None else experts.mlp_dim,
        "moe_layers": [i for i in range(count) if has_experts[i]],
        "use_qk_norm": fields["late_qk_norm"],
        "no_rope_layers": [int(x) for x in rotated],
        "attention_chunk_size": fields["chunk"],
        "layer_types": [kinds[kind] for kind in fields["layer_kinds"]],
        "attn_temperature_tuning": growth is not None,
    }
    if experts is not None:
        found |= llama.write_experts(fields)
    if growth is not None:
        found |= {"attn_scale": growth.rate, "floor_scale": growth.length}
    return found


_SHARED = {
    f"mlp.shared.{name}": f"feed_forward.shared_expert.{name}_proj"
    for name in ("up", "gate", "down")
}
_EXPERTS = {"mlp.router": "feed_forward.router", **_SHARED}
_DENSE = {f"mlp.{name}": f"feed_forward.{name}_proj" for name in ("up", "gate", "down")}
# One array in files holds all experts. The columns of gate precede the columns of up.
_HALF = "part {} of 2: expert embed (n mlp) -> n expert embed mlp"
_FUSED = {
    "mlp.gate": ("gate_up_proj", _HALF.format(0)),
    "mlp.up": ("gate_up_proj", _HALF.format(1)),
    "mlp.down": ("down_proj", "expert mlp embed -> expert mlp embed"),
}


def _names(fields: Values) -> list[Entry]:
    # Llama 4 rotates neighbouring features, and this library rotates features i and
    # i + head_dim / 2. So the features of queries and keys are reordered.
    sizes = f"pair=2 half={fields['head_dim'] // 2}"
    patterns = {
        name: (
            f"({heads} half pair) embed -> embed {heads} (pair half), {sizes}",
            "",
        )
        for name, heads in (("query", "heads"), ("key", "kv_heads"))
    }
    fused = [
        (f"blocks.layer.{ours}", f"model.layers.{{}}.feed_forward.experts.{theirs}", p)
        for ours, (theirs, p) in _FUSED.items()
    ]
    dense = llama.names(fields, mlp=_DENSE, patterns=patterns)
    experts = [*llama.names(fields, mlp=_EXPERTS, patterns=patterns), *fused]
    has_experts = fields["expert_layers"] or (fields["experts"] is not None,)
    kinds = has_experts[: period_of(has_experts)]
    return alternate([experts if x else dense for x in kinds])


_1_OF_16 = Experts(
    num_experts=16,
    top_k=1,
    mlp_dim=8192,
    shared_dim=8192,
    scores="sigmoid",
    normalise=False,
    scales_inputs=True,
    balance_loss=0.001,
)
_SIZES: dict[str, Any] = {
    "vocab_size": 202_048,
    "norm_epsilon": 1e-5,
    "head_dim": 128,
    "rope_theta": 500_000.0,
    "rotated_layers": (True, True, True, False),
    "query_growth": Growth(rate=0.1, length=8192, ahead=1),
    "chunk": 8192,
    "layer_kinds": ("local", "local", "local", "global"),
}

LLAMA4 = replace(
    LLAMA,
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    marks=("chunk", "rotated_layers"),
    settings={**LLAMA.settings, "mlp_dim": "intermediate_size_mlp"},
    defaults={
        **LLAMA.defaults,
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    read=_read,
    write=_write,
    names=_names,
    presets={
        "llama4-scout": sized(
            _SIZES,
            "48 5120 40 8",
            seq_len=10_485_760,
            rope_scaling=RopeScaling(
                factor=16.0, original_len=8192, high_frequency=1.0
            ),
            late_qk_norm=True,
            experts=_1_OF_16,
        ),
        "llama4-maverick": sized(
            _SIZES,
            "48 5120 40 8 16384",
            seq_len=1_048_576,
            experts=replace(_1_OF_16, num_experts=128),
            expert_layers=(False, True),
        ),
    },
)
FAMILIES = (LLAMA4,)
