"""The family Llama, with SmolLM2 and a model like DeepSeek-V3.

Most other families are copies of `LLAMA` with a few parts replaced.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts
from nnx_parallel.models.rotary import (
    LongRopeScaling,
    RopeScaling,
    Scaling,
    YarnScaling,
)
from nnx_parallel.weights.family import Family, Values, block_entries
from nnx_parallel.weights.names import Entry

NEUTRAL = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "add_cross_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "use_bidirectional_attention": (False,),
    "partial_rotary_factor": (1.0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
"""Valid values of settings that change the computation but have no `GPTConfig` field.
"""


def sized(base: Values, shape: str, **more: Any) -> dict[str, Any]:
    """Returns a preset: ``base`` with the sizes in ``shape``, and ``more`` fields.

    ``shape`` lists, in this order, the number of layers, the width, the number of
    heads, the number of key heads, and the width of the MLP. The last ones may be left
    out.
    """
    names = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "mlp_dim")
    return {**base, **dict(zip(names, map(int, shape.split()), strict=False)), **more}


_ATTENTION = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
}
MLP = {f"mlp.{name}": f"mlp.{name}_proj" for name in ("up", "gate", "down")}
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_QK_NORMS = {
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
}

_WIDE_QK_NORMS = {
    "query_norm": ("(heads head_dim) -> heads head_dim", ""),
    "key_norm": ("(kv_heads head_dim) -> kv_heads head_dim", ""),
}


def names(
    fields: Values,
    mlp: Mapping[str, str] = MLP,
    norms: Mapping[str, str] = _NORMS,
    attention: Mapping[str, str] = _ATTENTION,
    patterns: Mapping[str, tuple[str, str]] | None = None,
) -> list[Entry]:
    """Returns the table of names.

    ``mlp``, ``norms`` and ``attention`` are names within a block. ``patterns`` are the
    patterns of layers that differ (`block_entries`).
    """
    layers = {**attention, **mlp, **norms, **(_QK_NORMS if fields["qk_norm"] else {})}
    biased = ("query", "key", "value") if fields["qkv_bias"] else ()
    wide_norms = _WIDE_QK_NORMS if fields["wide_qk_norm"] else {}
    patterns = {**wide_norms, **(patterns or {})}
    found = [
        ("embed.embedding", "model.embed_tokens.weight", "vocab embed -> vocab embed"),
        *block_entries("model.layers.{}.", layers, biased, patterns),
        ("norm.scale", "model.norm.weight", "embed -> embed"),
    ]
    head = ("head.kernel", "lm_head.weight", "vocab embed -> embed vocab")
    return found if fields["tied"] else [*found, head]


def after_dense(
    blocks: Sequence[Entry], dense: Sequence[Entry], count: int
) -> list[Entry]:
    """Returns the table of a model with dense layers before its other layers.

    ``blocks`` is the table of a model without dense layers, and ``dense`` is the table
    of a model that has no other layers. ``count`` is the number of dense layers.
    """
    if not count:
        return [*blocks]
    later = [(a, b.replace("{}", f"{{{count}:}}", 1), c) for a, b, c in blocks]
    first = [(f"dense_{a}", b, c) for a, b, c in dense if a.startswith("blocks.")]
    return [*later, *first]


def read(
    settings: Values, types: Sequence[str] = (), *, is_partial: bool = False
) -> dict[str, Any]:
    """Returns the fields for rotation and windows.

    ``types`` are the kinds of layers, if the file does not list them. ``is_partial`` is
    True for families that can rotate a part of each head.
    """
    # transformers 5 has the setting rope_parameters. Version 4 has rope_scaling, which
    # has priority in version 5 too.
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if nested := sorted(rope.keys() & _KINDS.keys()):
        raise ValueError(
            f"config.json has a rotation for each kind of layer ({', '.join(nested)}). "
            f"A model of model_type {settings['model_type']!r} has only one rotation."
        )
    name = "original_max_position_embeddings"
    if name in settings:  # transformers prefers this value to the rotation's value
        rope = {**rope, name: settings[name]}
    windows = _read_windows(settings, types) if types else {}
    return {**_read_rotation(rope, settings, is_partial=is_partial), **windows}


def read_by_kind(
    settings: Values, types: Sequence[str], local_theta: float
) -> dict[str, Any]:
    """Returns the fields for windows, and for a rotation for each kind of layer.

    ``types`` are the kinds of layers, and ``local_theta`` is the base in layers with a
    window, if the file does not have them.
    """
    given = settings.get("rope_parameters") or {}
    older = settings.get("rope_scaling") or {}
    # transformers sets `rope_type` first, and then ignores its older name `type` in
    # `rope_scaling`.
    plain = {"rope_type": "default"}
    whole = {**(given.get("full_attention") or plain), **older}
    found = _read_rotation(whole, settings)
    local = _read_rotation(
        given.get("sliding_attention") or {}, {**settings, "rope_theta": local_theta}
    )
    if local["rope_scaling"] is not None:
        raise ValueError(
            "config.json stretches the rotation of sliding_attention, which this "
            "library does not support: the rope_type must be 'default'."
        )
    windows = _read_windows(settings, types)
    if "layer_kinds" not in windows:  # all layers have the same rotation
        return {**(local if windows else found), **windows}
    if found != local:
        found["local_rope_theta"] = local["rope_theta"]
    return {**found, **windows}


def _read_rotation(
    rope: Values, settings: Values, *, is_partial: bool = False
) -> dict[str, Any]:
    """Returns the fields of a rotation, as transformers 5 computes its values.

    ``rope`` has the settings of the rotation. Values that it does not have are taken
    from ``settings``.
    """
    rope = {
        "rope_theta": settings.get("rope_theta", 10_000.0),
        "original_max_position_embeddings": settings["max_position_embeddings"],
        "partial_rotary_factor": settings.get("partial_rotary_factor", 1.0),
        **rope,
    }
    found = {
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": _read_scaling(rope, settings["max_position_embeddings"]),
    }
    part = rope["partial_rotary_factor"]
    if is_partial:
        width = settings["hidden_size"] // settings["num_attention_heads"]
        rotary_dim = int((settings.get("head_dim") or width) * part)
        return found | {"rotary_dim": rotary_dim}
    if part != 1.0:
        raise ValueError(
            f"config.json has partial_rotary_factor={part!r} in its rotation, which "
            "this library does not support: it must be 1.0, or absent."
        )
    return found


_LLAMA_31_ROPE = {
    "original_len": "original_max_position_embeddings",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
}
_YARN = {
    "factor": "factor",
    "original_len": "original_max_position_embeddings",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}


def _read_scaling(rope: Values, seq_len: int) -> Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(factor=rope["factor"])
    if kind == "llama3":
        found = {ours: rope[name] for ours, name in _LLAMA_31_ROPE.items()}
        # `RopeScaling` has another meaning without a length, so None must raise.
        found["original_len"] = int(found["original_len"])
        return RopeScaling(factor=rope["factor"], **found)
    if kind == "yarn":
        return _read_yarn(rope, seq_len)
    if kind == "longrope":
        return _read_longrope(rope, seq_len)
    raise ValueError(
        f"config.json has the rope_type {kind!r}, which this library does not "
        "support. Supported rope_types: default, linear, llama3, yarn, longrope."
    )


def _read_yarn(rope: Values, seq_len: int) -> YarnScaling:
    length = int(rope["original_max_position_embeddings"])
    scaling = YarnScaling(
        factor=float(rope.get("factor") or seq_len / length),
        original_len=length,
        fast=float(rope.get("beta_fast") or 32),
        slow=float(rope.get("beta_slow") or 1),
        truncate=rope.get("truncate", True),
        attention_factor=rope.get("attention_factor"),
    )
    # Each weight multiplies the logarithm in the default of `attention_factor`.
    upper, lower = rope.get("mscale"), rope.get("mscale_all_dim")
    if scaling.attention_factor is not None or not (upper and lower):
        return scaling
    rise = scaling.amplitude - 1
    ratio = (1 + upper * rise) / (1 + lower * rise)
    return replace(scaling, attention_factor=ratio)


def _read_longrope(rope: Values, seq_len: int) -> LongRopeScaling:
    length = int(rope["original_max_position_embeddings"])
    given, ratio = rope.get("attention_factor"), rope.get("factor") or seq_len / length
    return LongRopeScaling(
        short=tuple(map(float, rope["short_factor"])),
        long=tuple(map(float, rope["long_factor"])),
        original_len=length,
        attention_factor=_long_amplitude(ratio, length) if given is None else given,
    )


def _long_amplitude(ratio: float, original_len: int) -> float:
    """Returns LongRoPE's default of `attention_factor` for this ratio of lengths."""
    rise = math.log(ratio) / math.log(original_len) if ratio > 1 else 0.0
    return math.sqrt(1 + rise)


def _write_longrope(scaling: LongRopeScaling, seq_len: int) -> dict[str, Any]:
    found = {
        "rope_type": "longrope",
        "short_factor": list(scaling.short),
        "long_factor": list(scaling.long),
        "original_max_position_embeddings": scaling.original_len,
    }
    length, amplitude = scaling.original_len, scaling.amplitude
    is_default = amplitude == _long_amplitude(seq_len / length, length)
    return found if is_default else found | {"attention_factor": amplitude}


def _write_scaling(scaling: Scaling | None, seq_len: int) -> dict[str, Any]:
    match scaling:
        case None:
            return {"rope_type": "default"}
        case YarnScaling():
            found = {name: getattr(scaling, ours) for ours, name in _YARN.items()}
            given = {name: x for name, x in found.items() if x is not None}
            return {"rope_type": "yarn", **given}
        case LongRopeScaling():
            return _write_longrope(scaling, seq_len)
        case RopeScaling(original_len=None):
            return {"rope_type": "linear", "factor": scaling.factor}
    names = _LLAMA_31_ROPE.items()
    found = {name: getattr(scaling, ours) for ours, name in names}
    return {"rope_type": "llama3", "factor": scaling.factor, **found}


def read_experts(settings: Values) -> dict[str, Any]:
    """Returns the fields for a mixture of experts, as in Mixtral and Qwen 3."""
    # For Qwen, transformers 5 writes the number of experts under Mixtral's name. It may
    # also write Qwen's name, with the default number.
    experts = Experts(
        num_experts=settings.get("num_local_experts") or settings["num_experts"],
        top_k=settings["num_experts_per_tok"],
        mlp_dim=settings.get("moe_intermediate_size", settings["intermediate_size"]),
        normalise=settings.get("norm_topk_prob", True),
    )
    return {"mlp_dim": None, "experts": experts}


def write(fields: Values, *, is_partial: bool = False) -> dict[str, Any]:
    """Returns the settings of rotation and windows for transformers 4.53 and later.

    ``is_partial`` is True for families that can rotate a part of each head.
    """
    theta, scaling = fields["rope_theta"], fields["rope_scaling"]
    rope = _write_scaling(scaling, fields["seq_len"])
    part = {"partial_rotary_factor": fields["rotary_dim"] / fields["head_dim"]}
    part = part if is_partial else {}
    found = {
        "hidden_act": "silu",
        # Both forms are written: transformers 4 reads the first settings.
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else rope,
        **part,
        "rope_parameters": rope | {"rope_theta": theta} | part,
    }
    if (window := fields["window"]) is None:
        return found
    theirs = {ours: name for name, ours in _KINDS.items()}
    types = [theirs[kind] for kind in fields["layer_kinds"]]
    return found | {"sliding_window": window + 1, "layer_types": types}


def write_by_kind(fields: Values) -> dict[str, Any]:
    """Returns the settings of `write`, with a rotation for each kind of layer."""
    found, local = write(fields), fields["local_rope_theta"] or fields["rope_theta"]
    rope = {
        "full_attention": found["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return found | {"rope_parameters": rope}


def write_experts(fields: Values) -> dict[str, Any]:
    """Returns the settings of a mixture that Mixtral and Qwen 3 share."""
    experts = fields["experts"]
    return {
        "num_experts_per_tok": experts.top_k,
        "num_local_experts": experts.num_experts,
    }


_KINDS = {"sliding_attention": "local", "full_attention": "global"}


def _read_windows(settings: Values, types: Sequence[str]) -> dict[str, Any]:
    if (window := settings.get("sliding_window")) is None:
        return {}
    kinds = read_kinds(settings, types)
    if set(kinds) == {"global"}:
        return {}
    # In files, the window also counts the key of the query's own token.
    found: dict[str, Any] = {"window": window - 1}
    return found if set(kinds) == {"local"} else found | {"layer_kinds": kinds}


def read_kinds(
    settings: Values, types: Sequence[str], local: str = "sliding_attention"
) -> tuple[str, ...]:
    """Returns the kind of each layer.

    ``types`` are used if the file has no ``layer_types``. ``local`` is the name, in
    files, of the type of layers that do not see all keys.
    """
    known = {local: "local", "full_attention": "global"}
    types = types if settings.get("layer_types") is None else settings["layer_types"]
    if unknown := set(types) - set(known):
        raise ValueError(
            f"config.json has layer_types {sorted(unknown)}, which this library "
            f"does not support. Supported layer_types: {', '.join(known)}."
        )
    if len(types) != (count := settings["num_hidden_layers"]):
        raise ValueError(
            f"config.json has {len(types)} layer_types for {count} layers. It must "
            "have one for each layer."
        )
    return tuple(known[each] for each in types)


def read_rotated(settings: Values) -> tuple[bool, ...]:
    """Returns True for each layer that rotates queries and keys."""
    count, period = settings["num_hidden_layers"], settings["no_rope_layer_interval"]
    # In spite of its name, this setting is 1 for layers that rotate.
    given = settings["no_rope_layers"] or [
        int((i + 1) % period != 0) for i in range(count)
    ]
    if len(given) < count:
        raise ValueError(
            f"config.json has {len(given)} no_rope_layers for {count} layers. It must "
            "have one for each layer."
        )
    return tuple(bool(x) for x in given[:count])


_LLAMA_2 = {"vocab_size": 32_000, "seq_len": 4096}
_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128_256,
    "seq_len": 8192,
    "rope_theta": 500_000.0,
}
_LLAMA_31 = _LLAMA_3 | {
    "seq_len": 131_072,
    "rope_scaling": RopeScaling(factor=8.0, original_len=8192),
}
_LLAMA_32 = _LLAMA_31 | {
    "tied": True,
    "rope_scaling": RopeScaling(factor=32.0, original_len=8192),
}
_SMOLLM = {"vocab_size": 49_152, "seq_len": 8192, "rope_theta": 100_000.0, "tied": True}
LLAMA = Family(
    model="GPT",
    model_type="llama",
    architecture="LlamaForCausalLM",
    parts={
        "norm": "rms",
        "positions": "rope",
        "activation": "swiglu",
        "use_bias": False,
        "tied": False,
    },
    settings={
        "vocab_size": "vocab_size",
        "seq_len": "max_position_embeddings",
        "num_layers": "num_hidden_layers",
        "embed_dim": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "mlp_dim": "intermediate_size",
        "norm_epsilon": "rms_norm_eps",
        "tied": "tie_word_embeddings",
    },
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    valid=NEUTRAL | {"hidden_act": ("silu",)},
    read=read,
    write=write,
    names=names,
    # Older versions also saved frequencies, and the head of tied models.
    ignored=r"rotary_emb\.inv_freq$|^lm_head\.weight$",
    presets={
        "llama2-7b": sized(_LLAMA_2, "32 4096 32 32 11008"),
        "llama2-13b": sized(_LLAMA_2, "40 5120 40 40 13824"),
        "llama2-70b": sized(_LLAMA_2, "80 8192 64 8 28672"),
        "llama3-8b": sized(_LLAMA_3, "32 4096 32 8 14336"),
        "llama3-70b": sized(_LLAMA_3, "80 8192 64 8 28672"),
        "llama3.1-8b": sized(_LLAMA_31, "32 4096 32 8 14336"),
        "llama3.1-70b": sized(_LLAMA_31, "80 8192 64 8 28672"),
        "llama3.1-405b": sized(_LLAMA_31, "126 16384 128 8 53248"),
        "llama3.2-1b": sized(_LLAMA_32, "16 2048 32 8 8192"),
        "llama3.2-3b": sized(_LLAMA_32, "28 3072 24 8 8192"),
        "smollm2-135m": sized(_SMOLLM, "30 576 9 3 1536"),
        "smollm2-360m": sized(_SMOLLM, "32 960 15 5 2560"),
        "smollm2-1.7b": sized(_SMOLLM, "24 2048 32 32 8192", rope_theta=130_000.0),
    },
)
FAMILIES = (LLAMA,)
