"""The families DeepSeek V2 and V3, with R1 and Kimi K2: latent attention and experts.

References:
    [1] DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1, https://arxiv.org/abs/2405.04434
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts, is_int
from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, MLP, sized
from nnx_parallel.models.rotary import Scaling, YarnScaling
from nnx_parallel.weights.family import Values
from nnx_parallel.weights.names import Entry


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Widths of multi-head latent attention [1].

    A query and a key have a plain part and a rotated part. All heads share the rotated
    part of a key.

    Attributes:
        key_dim: Width of the latent from which keys and values are computed.
        query_dim: Width of the latent from which queries are computed; ``None``
            computes them from the residual stream.
        plain_dim: Width of the plain part of a query or key.
        rotary_dim: Width of the rotated part.
        value_dim: Width of a value.
        interleaved: True if files store the rotated features in pairs, as in all
            published models. The model does not depend on it.

    Raises:
        ValueError: If a width is not an int of at least 1, or if a width that files
            store in pairs is odd.
    """

    key_dim: int
    query_dim: int | None = None
    plain_dim: int
    rotary_dim: int
    value_dim: int
    interleaved: bool = True

    def __post_init__(self) -> None:
        in_pairs = ("key_dim", "plain_dim") if self.interleaved else ()
        for name in ("key_dim", "query_dim", "plain_dim", "rotary_dim", "value_dim"):
            found, step = getattr(self, name), 2 if name in in_pairs else 1
            step = 2 if name == "rotary_dim" else step
            is_absent = name == "query_dim" and found is None
            is_met = is_int(found) and found >= 1 and found % step == 0
            if not (is_met or is_absent):
                rule = f"{'an even' if step == 2 else 'an'} int of at least {step}"
                raise ValueError(f"Latents.{name} is {found!r}; it must be {rule}.")


_MOST_PREDICTED = 100
"""The largest valid number of layers that predict further tokens."""


def rows_of_heads(
    first: int, size: int, total: int, columns: str, rows: str = "heads"
) -> str:
    """Returns the pattern of some rows of each head of an array in files.

    Args:
        first: Index of the first row.
        size: Number of rows.
        total: Number of rows of the head in files.
        columns: Name of the columns.
        rows: ``"heads"``, or ``""`` for an array without heads.
    """
    cut = f"size {first}:{first + size} of {total}"
    return f"{cut}: ({rows} size) {columns} -> {columns} {rows} size"


def _pairs(first: int, size: int, total: int, columns: str, rows: str = "heads") -> str:
    """Returns such a pattern for an array with rotated rows in pairs.

    We rotate a feature of the first half with one of the second half. Files have the
    two features next to each other. The rotated rows are the last rows.
    """
    ours = "(two half)" if first + size == total else "(half two)"
    cut = f"half {first // 2}:{(first + size) // 2} of {total // 2}"
    whole = f"({rows} half two) {columns} -> {columns} {rows} {ours}"
    return f"{cut}: {whole}, two=2 half={size // 2}"


def _attention(latents: Latents) -> list[Entry]:
    """Returns the entries for attention."""
    plain, rotary = latents.plain_dim, latents.rotary_dim
    key, value, query = latents.key_dim, latents.value_dim, latents.query_dim
    source = "embed" if query is None else "latent"
    of_queries = "q_proj" if query is None else "q_b_proj"
    of_latents, width, both = "kv_a_proj_with_mqa", plain + value, key + rotary
    head, cut = plain + rotary, _pairs if latents.interleaved else rows_of_heads
    vector, into = "latent -> latent", "latent embed -> embed latent"
    found = [
        ("query", of_queries, cut(0, plain, head, source)),
        ("query_rotary", of_queries, cut(plain, rotary, head, source)),
        ("latent", of_latents, cut(0, key, both, "embed", "")),
        ("key_rotary", of_latents, cut(key, rotary, both, "embed", "")),
        ("key", "kv_b_proj", rows_of_heads(0, plain, width, "latent")),
        ("value", "kv_b_proj", rows_of_heads(plain, value, width, "latent")),
        ("latent_norm", "kv_a_layernorm", vector),
        ("out", "o_proj", "embed (heads head_dim) -> heads head_dim embed"),
    ]
    if query is not None:
        found += [("query_latent", "q_a_proj", into)]
        found += [("query_norm", "q_a_layernorm", vector)]
    return [
        (
            f"blocks.layer.attention.{ours}.{'scale' if 'norm' in ours else 'kernel'}",
            f"model.layers.{{}}.self_attn.{theirs}.weight",
            pattern,
        )
        for ours, theirs, pattern in found
    ]


MIXTURE = {
    "mlp.router": "mlp.gate",
    **{f"mlp.{n}": f"mlp.experts.{{}}.{n}_proj" for n in ("up", "gate", "down")},
    **{f"mlp.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in ("up", "gate")},
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
"""Names of routed and shared experts, which the family GLM-4.5 shares."""

CHOICE_BIAS: Entry = (
    "blocks.layer.mlp.bias",
    "model.layers.{}.mlp.gate.e_score_correction_bias",
    "expert -> expert",
)


def _names(fields: Values) -> list[Entry]:
    def of_blocks(mlp: Mapping[str, str]) -> list[Entry]:
        return [
            *llama.names(fields, mlp=mlp, attention={}),
            *_attention(fields["latents"]),
        ]

    mixture = of_blocks(MIXTURE)
    mixture += [CHOICE_BIAS] if fields["experts"].choice_bias else []
    return llama.after_dense(mixture, of_blocks(MLP), fields["dense_layers"])


def read_mixture(settings: Values, **kind: Any) -> dict[str, Any]:
    """Returns the fields for experts after dense layers; ``kind`` has other fields.

    Raises:
        ValueError: If all layers are dense.
    """
    count, first = settings["num_hidden_layers"], settings["first_k_dense_replace"]
    if not is_int(first) or not 0 <= first < count:
        raise ValueError(
            f"config.json has first_k_dense_replace={first!r}, which GPT does not "
            f"support: it must be 0 or more and less than num_hidden_layers={count}."
        )
    width = settings["moe_intermediate_size"]
    experts = Experts(
        num_experts=settings["n_routed_experts"],
        top_k=settings["num_experts_per_tok"],
        mlp_dim=width,
        shared_dim=width * settings["n_shared_experts"],
        scale=float(settings["routed_scaling_factor"]),
        **kind,
    )
    dense = settings["intermediate_size"] if first else None
    return {"mlp_dim": dense, "dense_layers": first, "experts": experts}


def read_sigmoid(settings: Values) -> dict[str, Any]:
    """Returns the fields for experts as in DeepSeek V3, which GLM-4.5 shares."""
    return read_mixture(
        settings,
        scores="sigmoid",
        choice_bias=True,
        normalise=settings["norm_topk_prob"],
        num_groups=settings["n_group"],
        top_groups=settings["topk_group"],
    )


def write_mixture(fields: Values) -> dict[str, Any]:
    """Returns the settings of experts after dense layers."""
    experts = fields["experts"]
    return {
        "first_k_dense_replace": fields["dense_layers"],
        "moe_intermediate_size": experts.mlp_dim,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": max(1, experts.shared_dim // experts.mlp_dim),
        "num_experts_per_tok": experts.top_k,
        "routed_scaling_factor": float(experts.scale),
        "norm_topk_prob": experts.normalise,
        "n_group": experts.num_groups,
        "topk_group": experts.top_groups,
    }


def predicted_layers(settings: Values) -> str:
    """Returns a regex for the layers that predict further tokens in training.

    Raises:
        ValueError: If the number of these layers is out of range.
    """
    count = settings.get("num_nextn_predict_layers") or 0
    if not is_int(count) or not 0 <= count <= _MOST_PREDICTED:
        raise ValueError(
            f"config.json has num_nextn_predict_layers={count!r}. It must be a whole "
            f"number from 0 to {_MOST_PREDICTED}."
        )
    first = settings["num_hidden_layers"]
    numbers = "|".join(map(str, range(first, first + count)))
    return rf"layers\.(?:{numbers})(?=\.)" if count else ""


def _rise(scaling: Scaling | None) -> float:
    """Returns the growth of scores' square root by YaRN, for a weight of 1."""
    factor = getattr(scaling, "factor", 1.0)
    return 0.1 * math.log(factor) if factor > 1 else 0.0


def _read(settings: Values) -> dict[str, Any]:
    heads, given = settings["num_attention_heads"], settings["num_key_value_heads"]
    if given not in (None, heads):
        raise ValueError(
            f"config.json has num_key_value_heads={given!r}, which latent attention "
            f"does not support: it must be num_attention_heads={heads}, or absent."
        )
    latents = Latents(
        key_dim=settings["kv_lora_rank"],
        query_dim=settings["q_lora_rank"],
        plain_dim=settings["qk_nope_head_dim"],
        rotary_dim=settings["qk_rope_head_dim"],
        value_dim=settings["v_head_dim"],
        interleaved=settings["rope_interleave"],
    )
    found = {**llama.read(settings), "latents": latents}
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    weight = rope.get("mscale_all_dim") or 0
    if found["rope_scaling"] is not None and weight:
        growth = 1 + weight * _rise(found["rope_scaling"])
        width = latents.plain_dim + latents.rotary_dim
        found["attention_scale"] = width**-0.5 * growth * growth
    return found


def _write(fields: Values) -> dict[str, Any]:
    latents, scaling = fields["latents"], fields["rope_scaling"]
    found = llama.write(fields) | write_mixture(fields)
    growth = math.sqrt(fields["attention_scale"] * fields["head_dim"] ** 0.5)
    if rise := _rise(scaling):
        weight = round((growth - 1) / rise, 9)
        more = {"mscale_all_dim": weight} if weight else {}
        if more and isinstance(scaling, YarnScaling):
            upper = (scaling.amplitude * (1 + weight * rise) - 1) / rise
            more["mscale"] = round(upper, 9)
        found["rope_scaling"] = found["rope_scaling"] | more
        found["rope_parameters"] = found["rope_parameters"] | more
    return found | {
        "num_key_value_heads": fields["num_heads"],
        "kv_lora_rank": latents.key_dim,
        "q_lora_rank": latents.query_dim,
        "qk_nope_head_dim": latents.plain_dim,
        "qk_rope_head_dim": latents.rotary_dim,
        "v_head_dim": latents.value_dim,
        "moe_layer_freq": 1,
    }


def _read_2(settings: Values) -> dict[str, Any]:
    groups = {}
    if settings["topk_method"] == "group_limited_greedy":
        groups = {"num_groups": settings["n_group"]}
        groups["top_groups"] = settings["topk_group"]
    experts = read_mixture(settings, normalise=False, best_of_group=1, **groups)
    return _read({**settings, "rope_interleave": True}) | experts


def _write_2(fields: Values) -> dict[str, Any]:
    is_limited = fields["experts"].num_groups > 1
    return _write(fields) | {
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if is_limited else "greedy",
    }


def _read_3(settings: Values) -> dict[str, Any]:
    return _read(settings) | read_sigmoid(settings)


def _write_3(fields: Values) -> dict[str, Any]:
    return _write(fields) | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": fields["latents"].interleaved,
        "num_nextn_predict_layers": 0,
    }


def _read_kimi(settings: Values) -> dict[str, Any]:
    # transformers has no class of this name, so such a model is written as DeepSeek V3.
    return _read_3(settings) | {"family": "deepseek_v3"}


_LATENTS = Latents(
    key_dim=512, query_dim=1536, plain_dim=128, rotary_dim=64, value_dim=128
)


def _stretched(factor: float, weight: float, fast: float = 32.0) -> dict[str, Any]:
    """Returns the fields of a rotation by YaRN; ``weight`` is ``mscale_all_dim``."""
    scaling = YarnScaling(
        factor=factor, original_len=4096, fast=fast, attention_factor=1.0
    )
    growth = 1 + weight * _rise(scaling)
    width = _LATENTS.plain_dim + _LATENTS.rotary_dim
    return {"rope_scaling": scaling, "attention_scale": width**-0.5 * growth * growth}


_BASE = {"norm_epsilon": 1e-6, "latents": _LATENTS}
_V2 = {**_BASE, "vocab_size": 102_400, "seq_len": 163_840, **_stretched(40.0, 0.707)}
_6_OF_64 = Experts(
    num_experts=64,
    top_k=6,
    mlp_dim=1408,
    shared_dim=2816,
    normalise=False,
    best_of_group=1,
    balance_loss=0.001,
)
_6_OF_160 = replace(
    _6_OF_64,
    num_experts=160,
    mlp_dim=1536,
    shared_dim=3072,
    scale=16.0,
    num_groups=8,
    top_groups=3,
)

DEEPSEEK_V2 = replace(
    LLAMA,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    marks=("latents", "experts"),
    settings={
        ours: theirs
        for ours, theirs in LLAMA.settings.items()
        if ours not in ("num_kv_heads", "head_dim")
    },
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    valid={
        **LLAMA.valid,
        "moe_layer_freq": (1,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        # transformers ignores this setting, which the published model code reads.
        "norm_topk_prob": (False,),
    },
    read=_read_2,
    write=_write_2,
    names=_names,
    presets={
        "deepseek-v2-lite": sized(
            {**_V2, "latents": replace(_LATENTS, query_dim=None)},
            "27 2048 16",
            mlp_dim=10_944,
            dense_layers=1,
            experts=_6_OF_64,
        ),
        "deepseek-v2": sized(
            _V2, "60 5120 128", mlp_dim=12_288, dense_layers=1, experts=_6_OF_160
        ),
    },
)

_8_OF_256 = Experts(
    num_experts=256,
    top_k=8,
    mlp_dim=2048,
    shared_dim=2048,
    scores="sigmoid",
    scale=2.5,
    num_groups=8,
    top_groups=4,
    choice_bias=True,
    bias_rate=0.001,
    balance_loss=0.0001,
)
_8_OF_384 = replace(_8_OF_256, num_experts=384, scale=2.827, num_groups=1, top_groups=1)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **DEEPSEEK_V2.defaults,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
    },
    valid={
        **LLAMA.valid,
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    read=_read_3,
    write=_write_3,
    left_out=predicted_layers,
    presets={
        "deepseek-v3": sized(
            {**_BASE, "vocab_size": 129_280, "seq_len": 163_840},
            "61 7168 128",
            mlp_dim=18_432,
            dense_layers=3,
            experts=_8_OF_256,
            **_stretched(40.0, 1.0),
        ),
        "kimi-k2": sized(
            {**_BASE, "vocab_size": 163_840, "seq_len": 131_072},
            "61 7168 64",
            mlp_dim=18_432,
            dense_layers=1,
            experts=_8_OF_384,
            rope_theta=50_000.0,
            **_stretched(32.0, 1.0, fast=1.0),
        ),
    },
)
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", read=_read_kimi, presets={})
FAMILIES = (DEEPSEEK_V2, KIMI_K2, DEEPSEEK_V3)
