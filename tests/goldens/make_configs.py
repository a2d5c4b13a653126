"""Makes ``configs.json``: files ``config.json``, and what transformers reads in them.

Each line has ``given``, the content of a file, and ``resolved``, the values with which
transformers builds the model: sizes, the frequencies and amplitude of the rotation of
each layer, windows, scales and soft caps. Files are drawn at random from the settings
below. Files that transformers refuses are left out.

The tests do not run this script. To make the file again: ``pip install torch
transformers``, then ``python make_configs.py``. With names of families as arguments, it
draws only the files of these families again.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

FILE = Path(__file__).parent / "configs.json"
NUM_FILES = 12
MORE_FILES = {"qwen3_next": 40, "gemma3n_text": 40, "qwen3_moe": 24}
"""Number of files of families with more settings."""

LEFT_OUT = object()
"""A setting that the file does not have."""

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 8,
    "pad_token_id": 0,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROTATIONS = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 3e4},
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 2.0, "rope_theta": 2e4},
    LLAMA_3,
    {**LLAMA_3, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "attention_factor": 1.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {},
    None,
]
BY_KIND = [
    {"full_attention": {"rope_type": "linear", "factor": 4.0}},
    {"full_attention": {"rope_theta": 7e4}, "sliding_attention": {"rope_theta": 3e3}},
    {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
]
TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]

# The settings of all families, with their values.
COMMON: dict[str, list[Any]] = {
    "rope_theta": [LEFT_OUT, 5e5, 1e6, 50_000],
    "rope_scaling": [LEFT_OUT, LEFT_OUT, *ROTATIONS],
    "rope_parameters": [LEFT_OUT, LEFT_OUT, *ROTATIONS],
    "original_max_position_embeddings": [LEFT_OUT] * 5 + [32],
    "rms_norm_eps": [LEFT_OUT, 1e-4],
    "tie_word_embeddings": [LEFT_OUT, True, False],
    "head_dim": [LEFT_OUT, 8, 16],
    "num_key_value_heads": [LEFT_OUT, 1, 2, 2],
    "attention_bias": [LEFT_OUT] * 6 + [False, True],
    "layer_types": [LEFT_OUT, LEFT_OUT, TYPES],
    "sliding_window": [LEFT_OUT, LEFT_OUT, 16, None],
}
QWEN = {
    "use_sliding_window": [LEFT_OUT, True, True, False],
    "max_window_layers": [LEFT_OUT, 0, 2, 9],
}
EXPERTS = {"num_experts_per_tok": [LEFT_OUT, 2, 3], "norm_topk_prob": [LEFT_OUT, True]}
QWEN_EXPERTS = {
    **QWEN,
    **EXPERTS,
    "num_experts": [8],
    "num_local_experts": [LEFT_OUT, 4],
    "moe_intermediate_size": [24],
}
GEMMA = {
    "query_pre_attn_scalar": [LEFT_OUT, 8, 20],
    "attn_logit_softcapping": [LEFT_OUT, LEFT_OUT, None, 20.0],
    "final_logit_softcapping": [LEFT_OUT, None, 10.0],
    "sliding_window_pattern": [LEFT_OUT, LEFT_OUT, 3],
    "rope_local_base_freq": [LEFT_OUT, 2e4],
}
LAYER_NORM = {
    "layer_norm_epsilon": [LEFT_OUT, 1e-4],
    "n_inner": [LEFT_OUT, None, 48],
    "scale_attn_weights": [LEFT_OUT] * 8 + [True, False],
    "scale_attn_by_inverse_layer_idx": [LEFT_OUT] * 8 + [True],
    "tie_word_embeddings": [LEFT_OUT, True, False],
}
NEOX = {
    "layer_norm_eps": [LEFT_OUT, 1e-4],
    "rotary_pct": [LEFT_OUT, 0.5, 1.0],
    "rotary_emb_base": [LEFT_OUT, 20_000],
}
YARN_3 = {
    "rope_type": "yarn",
    "rope_theta": 2e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.2,
}
YARN_OSS = {
    "rope_type": "yarn",
    "rope_theta": 3e4,
    "factor": 8.0,
    "beta_fast": 28.0,
    "original_max_position_embeddings": 64,
}
LLAMA_4 = {
    "intermediate_size_mlp": [40],
    "num_local_experts": [4],
    "num_experts_per_tok": [LEFT_OUT, 2],
    "interleave_moe_layer_step": [LEFT_OUT, 2, 3],
    "moe_layers": [LEFT_OUT, [], [0, 2], [1, 2, 3]],
    "no_rope_layers": [LEFT_OUT, [], [1, 0, 1, 0], [1, 1, 1, 1]],
    "no_rope_layer_interval": [LEFT_OUT, 2],
    "attention_chunk_size": [LEFT_OUT, 16, None],
    "layer_types": [LEFT_OUT, ["chunked_attention", "full_attention"] * 2],
    "use_qk_norm": [LEFT_OUT, False],
    "attn_temperature_tuning": [LEFT_OUT, False],
    "floor_scale": [LEFT_OUT, 32],
    "attn_scale": [LEFT_OUT, 0.25],
}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.7}
YARN_64 = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DENSE_FIRST = {
    "n_routed_experts": [8],
    "num_experts_per_tok": [3],
    "moe_intermediate_size": [16],
    "n_group": [4],
    "topk_group": [2],
    "n_shared_experts": [LEFT_OUT, 1, 3],
    "first_k_dense_replace": [LEFT_OUT, 0, 2],
    "routed_scaling_factor": [LEFT_OUT, 1.5],
    "norm_topk_prob": [LEFT_OUT, LEFT_OUT, True, False],
}
LATENTS = {
    **COMMON,
    **DENSE_FIRST,
    "num_key_value_heads": [4],
    "head_dim": [8],
    "kv_lora_rank": [16],
    "qk_nope_head_dim": [6],
    "qk_rope_head_dim": [8],
    "v_head_dim": [12],
    "q_lora_rank": [LEFT_OUT, 24, None],
    "rope_scaling": [
        *COMMON["rope_scaling"],
        {**YARN_64, **MSCALE},
        {**YARN_64, "mscale_all_dim": 0.7, "beta_fast": 1.0},
        {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0},
    ],
    "rope_parameters": [*COMMON["rope_parameters"], {**YARN_64, **MSCALE}],
}
LINEAR, FULL = "linear_attention", "full_attention"
NEXT_SIZES = {
    **SIZES,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
}
PARTS = [
    {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
    {**YARN_64, "partial_rotary_factor": 0.5, "rope_theta": 3e4},
    {"type": "default", "partial_rotary_factor": 1.0},
]
QWEN_NEXT = {
    **COMMON,
    "rope_scaling": [*COMMON["rope_scaling"], *PARTS],
    "rope_parameters": [*COMMON["rope_parameters"], *PARTS],
    "partial_rotary_factor": [LEFT_OUT, 0.5, 1.0],
    "full_attention_interval": [LEFT_OUT, 1, 2, 3, 9],
    "layer_types": [
        LEFT_OUT,
        [LINEAR, FULL, FULL, LINEAR],
        [FULL, LINEAR] * 2,
        [LINEAR] * 4,
        [FULL] * 4,
        TYPES,
    ],
    "num_hidden_layers": [4, 3, 6],
    "decoder_sparse_step": [LEFT_OUT, 1, 2, 3, 9],
    "mlp_only_layers": [LEFT_OUT, None, [], [1], [0, 3], [0, 1, 2, 3]],
    "norm_topk_prob": [LEFT_OUT, True, False],
    "hidden_act": [LEFT_OUT] * 8 + ["silu", "gelu"],
    "sliding_window": [LEFT_OUT, 16, None],
    "use_sliding_window": [LEFT_OUT, True],
    "num_local_experts": [LEFT_OUT, 4],
    **{
        name: [LEFT_OUT, *values]
        for name, values in {
            "num_experts": [4],
            "num_experts_per_tok": [3],
            "intermediate_size": [40],
            "moe_intermediate_size": [40],
            "shared_expert_intermediate_size": [40],
            "linear_num_key_heads": [1, 4],
            "linear_num_value_heads": [2, 8],
            "linear_key_head_dim": [10],
            "linear_value_head_dim": [10],
            "linear_conv_kernel_dim": [2, 3],
        }.items()
    },
}
STREAM_SIZES = {
    **SIZES,
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 28,
    "hidden_size_per_layer_input": 4,
}
STREAMS = {
    **COMMON,
    **GEMMA,
    "rope_parameters": [
        *COMMON["rope_parameters"],
        *BY_KIND,
        *BY_KIND,
        {"full_attention": LLAMA_3, "sliding_attention": {"type": "default"}},
        {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"full_attention": YARN_64},
        {"full_attention": None, "sliding_attention": None},
    ],
    "layer_types": [
        LEFT_OUT,
        TYPES * 3,
        [FULL] * 12,
        ["sliding_attention"] * 12,
    ],
    "sliding_window": [LEFT_OUT, 16, 2],
    "num_hidden_layers": [12, 10, 11],
    "intermediate_size": [LEFT_OUT, 40, [48] * 12, [48, 48, 40] * 4],
    "activation_sparsity_pattern": [
        LEFT_OUT,
        None,
        [0.5] * 3 + [0.0] * 9,
        [0.0, 0.25, 0.95] * 4,
    ],
    "num_kv_shared_layers": [0, 1, 5, 7],
    "final_logit_softcapping": [LEFT_OUT, 10.0],
    "hidden_activation": [LEFT_OUT] * 8 + ["gelu_pytorch_tanh", "silu"],
    "altup_num_inputs": [LEFT_OUT, 2, 3],
    "altup_coef_clip": [LEFT_OUT, 1.5],
    "altup_active_idx": [LEFT_OUT] * 8 + [0, 1],
    "altup_correct_scale": [LEFT_OUT] * 8 + [True, False],
    "laurel_rank": [LEFT_OUT, 8],
    "vocab_size_per_layer_input": [20, 32],
    "hidden_size_per_layer_input": [LEFT_OUT, 8],
}
FAMILIES: dict[str, dict[str, list[Any]]] = {
    "gpt2": {**LAYER_NORM},
    "llama": COMMON,
    "mistral": COMMON,
    "ministral": COMMON,
    "mixtral": {
        **COMMON,
        **EXPERTS,
        "num_local_experts": [8],
        "moe_intermediate_size": [LEFT_OUT, 24],
    },
    "qwen2": {**COMMON, **QWEN},
    "qwen3": {**COMMON, **QWEN},
    "qwen2_moe": {
        **COMMON,
        **QWEN_EXPERTS,
        "shared_expert_intermediate_size": [16],
    },
    "qwen3_moe": {**COMMON, **QWEN_EXPERTS},
    "gemma": COMMON,
    "gemma2": {**COMMON, **GEMMA},
    "gemma3_text": {
        **COMMON,
        **GEMMA,
        "rope_parameters": [*COMMON["rope_parameters"], *BY_KIND, *BY_KIND],
    },
    "olmo2": COMMON,
    "olmo3": {
        **COMMON,
        "rope_parameters": [*COMMON["rope_parameters"], *BY_KIND, *BY_KIND],
    },
    "smollm3": {
        **COMMON,
        "use_sliding_window": [LEFT_OUT, True],
        "no_rope_layer_interval": [LEFT_OUT, 2],
        "no_rope_layers": [LEFT_OUT, [1, 1, 0, 0]],
    },
    "olmoe": {
        **COMMON,
        **EXPERTS,
        "num_experts": [8],
        "num_local_experts": [4, 6],
    },
    "phi3": {**COMMON, "partial_rotary_factor": [LEFT_OUT, 0.5]},
    "granite": {
        **COMMON,
        "embedding_multiplier": [LEFT_OUT, 12.0],
        "residual_multiplier": [LEFT_OUT, 0.5],
        "logits_scaling": [LEFT_OUT, 8.0],
        "attention_multiplier": [LEFT_OUT, 0.25],
    },
    "gpt_neox": {**COMMON, **NEOX},
    "ministral3": {
        **COMMON,
        "rope_parameters": [
            *[LEFT_OUT] * 3,
            YARN_3,
            {**YARN_3, "mscale_all_dim": 0.5},
            {**YARN_3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
            {**YARN_3, "attention_factor": 1.5},
            {name: x for name, x in YARN_3.items() if name != "rope_theta"},
            {name: x for name, x in YARN_3.items() if "beta" not in name},
            ROTATIONS[0],
        ],
    },
    "gpt_oss": {
        **COMMON,
        "rope_parameters": [
            *[LEFT_OUT] * 3,
            *ROTATIONS,
            YARN_OSS,
            {**YARN_OSS, "truncate": False},
            {**YARN_OSS, "attention_factor": 1.5},
        ],
        "num_local_experts": [8],
        "num_experts_per_tok": [LEFT_OUT, 2, 3],
        "swiglu_limit": [LEFT_OUT] * 6 + [7.0, 5.0],
    },
    "llama4_text": {**COMMON, **LLAMA_4},
    "deepseek_v2": {
        **LATENTS,
        "topk_method": [LEFT_OUT, "group_limited_greedy", "group_limited_greedy"],
    },
    "deepseek_v3": {
        **LATENTS,
        "rope_interleave": [LEFT_OUT, False],
    },
    "glm4_moe": {
        **COMMON,
        **DENSE_FIRST,
        "partial_rotary_factor": [LEFT_OUT, 0.25],
        "use_qk_norm": [LEFT_OUT, True],
    },
    "qwen3_next": QWEN_NEXT,
    "gemma3n_text": STREAMS,
    # A model of text, images and sound, with the same settings for its text.
    "gemma3n": STREAMS,
}
OTHER_SIZES = {
    "gpt2": {
        "vocab_size": 32,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 256,
    },
    "qwen3_next": NEXT_SIZES,
    "gemma3n_text": STREAM_SIZES,
    "gemma3n": STREAM_SIZES,
}


def draw(kind: str, rng: random.Random) -> dict[str, Any]:
    """Draws the content of a file."""
    sizes = OTHER_SIZES.get(kind, SIZES)
    drawn = {name: rng.choice(values) for name, values in FAMILIES[kind].items()}
    # At most four settings differ from a plain file, so that few files are refused.
    changed = rng.sample(sorted(drawn), min(4, len(drawn)))
    needed = [name for name, values in FAMILIES[kind].items() if len(values) == 1]
    given = {**sizes, **{name: drawn[name] for name in [*changed, *needed]}}
    found = {name: value for name, value in given.items() if value is not LEFT_OUT}
    if kind == "gemma3n":
        found = {"text_config": {"model_type": "gemma3n_text", **found}}
    return {"model_type": kind, **found}


def rounded(x: float) -> float:
    """Rounds to 7 digits."""
    return float(f"{x:.7g}")


def decoder(model: PreTrainedModel) -> Any:
    """Returns the model without its head; Llama 4 has another name for it."""
    return getattr(model.base_model, "model", model.base_model)


def rotations(model: PreTrainedModel, kinds: list[str]) -> list[Any]:
    """Returns each layer's frequencies, followed by the amplitude, or ``None``."""
    base = decoder(model)
    if (rotary := getattr(base, "rotary_emb", None)) is None:
        return [None] * len(kinds)
    found = []
    for index, kind in enumerate(kinds):
        is_by_kind = hasattr(rotary, f"{kind}_inv_freq")
        start = f"{kind}_" if is_by_kind else ""
        values = getattr(rotary, f"{start}inv_freq")
        amplitude = getattr(rotary, f"{start}attention_scaling")
        attention = getattr(base.layers[index], "self_attn", None)
        if kind == "linear_attention":
            found.append(None)
            continue
        if not getattr(attention, "use_rope", True):
            values, amplitude = torch.zeros(1), 1.0
        found.append([*map(rounded, [*values.tolist(), amplitude])])
    return found


def resolve(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with which transformers builds the model."""
    given = json.loads(json.dumps(given))  # transformers changes nested settings
    kind = given.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **given).get_text_config()
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # some settings fail only in a call
        model(torch.zeros((1, 4), dtype=torch.long), use_cache=False)
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    base = decoder(model)
    layers = getattr(base, "layers", None) or base.h
    of_layers = rotations(model, kinds)
    different = [x for i, x in enumerate(of_layers) if x not in of_layers[:i]]
    found: dict[str, Any] = {"rotations": different}
    found["rotation_of_layers"] = [different.index(x) for x in of_layers]
    attentions = [
        getattr(each, "self_attn", None)
        or getattr(each, "attention", None)
        or getattr(each, "linear_attn", None)
        or each.attn
        for each in layers
    ]
    by_config = kind in ("mistral", "ministral3", "mixtral", "qwen3_moe", "phi3")
    found["windows"] = [
        (config.sliding_window if by_config else getattr(a, "sliding_window", None))
        or None
        for a in attentions
    ]
    scales = [rounded(a.scaling) for a in attentions if hasattr(a, "scaling")]
    if scales:  # not in GPT-2, and not in linear attention
        found["scale"] = scales[0]
    # Gemma 3 keeps the soft cap of attention, but does not pass it on.
    has_cap = kind not in ("gemma3_text", "gemma3n_text", "gemma3n")
    cap = "attn_logit_softcapping" if has_cap else None
    found["softcap"] = getattr(config, cap, None) if cap else None
    found["logit_softcap"] = getattr(config, "final_logit_softcapping", None)
    names = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    found["epsilon"] = next(getattr(config, n) for n in names if hasattr(config, n))
    found["tied"] = config.tie_word_embeddings
    found["num_params"] = sum(p.numel() for p in model.parameters())
    routers = [m for m in model.modules() if hasattr(m, "top_k")]
    if routers:
        router = routers[0]
        # Mixtral and gpt-oss always divide the weights by their sum.
        is_sure = kind in ("mixtral", "gpt_oss")
        normalise = getattr(router, "norm_topk_prob", is_sure)
        found["experts"] = [router.top_k, bool(normalise)]
    if kind == "ministral3":  # queries grow with the position
        names = ("llama_4_scaling_beta", "original_max_position_embeddings")
        found["growth"] = [config.rope_parameters.get(name) for name in names]
    if kind == "llama4_text":
        found["chunks"] = [
            config.attention_chunk_size if kind == "chunked_attention" else None
            for kind in config.layer_types
        ]
        found["late_norms"] = [hasattr(a, "qk_norm") for a in attentions]
        found["growths"] = [
            [a.attn_scale, a.floor_scale]
            if a.attn_temperature_tuning and not a.use_rope
            else None
            for a in attentions
        ]
        found["with_experts"] = [layer.is_moe_layer for layer in layers]
    if "n_group" in given:
        # DeepSeek V2 has groups in files, and may ignore them.
        ignores = getattr(config, "topk_method", None) == "greedy"
        groups = (1, 1) if ignores else (config.n_group, config.topk_group)
        found["groups"] = [*groups, config.routed_scaling_factor]
        found["dense_layers"] = config.first_k_dense_replace
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        if kind == "granite":
            found[name] = getattr(config, name)
    if kind == "qwen3_next":
        found |= with_memory(layers)
    if config.model_type == "gemma3n_text":
        found |= with_streams(base, layers)
    return found


def with_memory(layers: list[Any]) -> dict[str, Any]:
    """Returns the values of a model in which some layers have linear attention."""
    names = [
        "num_k_heads",
        "num_v_heads",
        "head_k_dim",
        "head_v_dim",
        "conv_kernel_size",
    ]
    memories = [getattr(layer, "linear_attn", None) for layer in layers]
    mixtures = [layer.mlp if hasattr(layer.mlp, "gate") else None for layer in layers]
    epsilons = [a.norm.variance_epsilon for a in memories if a is not None]
    return {
        "memories": [a and [getattr(a, name) for name in names] for a in memories],
        "memory_epsilons": [*map(rounded, epsilons)],
        "with_experts": [m is not None for m in mixtures],
        "widths": [
            [layer.mlp.up_proj.out_features]
            if m is None
            else [
                m.experts.num_experts,
                m.experts.intermediate_dim,
                m.shared_expert.up_proj.out_features,
            ]
            for m, layer in zip(mixtures, layers, strict=True)
        ],
        "activations": sorted({act_name(layer) for layer in layers}),
    }


def with_streams(base: Any, layers: list[Any]) -> dict[str, Any]:
    """Returns the values of a model with several residual streams."""
    config = base.config
    attentions = [layer.self_attn for layer in layers]
    return {
        "widths": [layer.mlp.up_proj.out_features for layer in layers],
        "sparsity": [layer.mlp.activation_sparsity for layer in layers],
        "shared": [a.is_kv_shared_layer for a in attentions],
        "streams": config.altup_num_inputs,
        "stream_options": [config.altup_active_idx, config.altup_correct_scale],
        "clip": config.altup_coef_clip,
        "laurel": layers[0].laurel.linear_left.out_features,
        "layer_inputs": [
            base.embed_tokens_per_layer.num_embeddings,
            base.hidden_size_per_layer_input,
        ],
        "activations": sorted({act_name(layer) for layer in layers}),
    }


def act_name(layer: Any) -> str:
    """Returns the name of the class of an MLP's nonlinearity."""
    mlp = layer.mlp
    return type(getattr(mlp, "act_fn", None) or mlp.experts.act_fn).__name__


def draw_files(kind: str) -> list[dict[str, Any]]:
    """Returns files of a family; the draws depend only on its name."""
    rng, refused = random.Random(kind), 0
    seen: list[dict] = []
    found: list[dict[str, Any]] = []
    while len(found) < MORE_FILES.get(kind, NUM_FILES) and refused < 200:
        given = draw(kind, rng)
        if given in seen:
            refused += 1
            continue
        seen.append(given)
        try:
            found.append({"given": given, "resolved": resolve(given)})
        except Exception as error:
            refused += 1
            print(kind, type(error).__name__, str(error)[:80], file=sys.stderr)  # noqa: T201
    return found


def main() -> None:
    """Writes the file."""
    transformers.logging.set_verbosity_error()
    kinds, files = sys.argv[1:] or [*FAMILIES], []
    if sys.argv[1:]:
        known = json.loads(FILE.read_text())["files"]
        files = [file for file in known if file["given"]["model_type"] not in kinds]
    files += [file for kind in kinds for file in draw_files(kind)]
    versions = {m.__name__: m.__version__ for m in (torch, transformers)}
    head = f'{{"versions": {json.dumps(versions)},\n"files": [\n'
    FILE.write_text(head + ",\n".join(map(json.dumps, files)) + "\n]}\n")


if __name__ == "__main__":
    main()
