"""The family Gemma 3n, text only.

Settings outside of ``text_config`` are not read. Published files have projections of
keys and values even for layers that use the keys and values of an earlier layer. Like
transformers, this library does not read these projections.
"""

from itertools import groupby
from typing import Any

from nnx_parallel.models.families import llama
from nnx_parallel.weights.family import Family, Values, block_entries
from nnx_parallel.weights.names import Entry


def runs_of(fields: Values) -> list[range]:
    """Returns the layers of each `Stack`.

    Consecutive layers are one stack if they have the same width and sparsity of the
    MLP, and if either all or none of them compute keys and values.
    """
    count, dims, sparsity = (fields[n] for n in ("num_layers", "mlp_dim", "sparsity"))
    first = count - fields["num_shared_layers"]
    kinds = ((dims[i], sparsity[i], i >= first) for i in range(count))
    runs, start = [], 0
    for _, run in groupby(kinds):
        runs.append(range(start, start + len([*run])))
        start = runs[-1].stop
    return runs


_LAYERS = {
    "attention.query": "self_attn.q_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.out": "self_attn.o_proj",
    **llama.MLP,
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "laurel_in": "laurel.linear_left",
    "laurel_out": "laurel.linear_right",
    "laurel_norm": "laurel.post_laurel_norm",
    "input_gate": "per_layer_input_gate",
    "input_out": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
    "altup.norm": "altup.router_norm",
    "altup.modes": "altup.modality_router",
}
_PAIRS = {
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.key_norm": "self_attn.k_norm",
}
_INTO = "latent embed -> embed latent", ""
_OUT_OF = "embed latent -> latent embed", ""
_PATTERNS = {
    **dict.fromkeys(("laurel_in", "input_gate", "modes"), _INTO),
    **dict.fromkeys(("laurel_out", "input_out"), _OUT_OF),
}
_ALTUP = [
    ("prediction", "prediction_coefs.weight", "(to source) by -> to source by"),
    ("correction", "correction_coefs.weight", "to by -> to by"),
    ("scale", "correct_output_scale", "embed -> embed"),
]


def _names(fields: Values) -> list[Entry]:
    projection = "mlp embed -> embed mlp"
    found = [
        ("embed.embedding", "model.embed_tokens.weight", "vocab embed -> vocab embed"),
        (
            "inputs.table",
            "model.embed_tokens_per_layer.weight",
            "vocab (layers latent) -> layers vocab latent",
        ),
        (
            "inputs.kernel",
            "model.per_layer_model_projection.weight",
            "(layers latent) embed -> layers embed latent",
        ),
        (
            "inputs.norm.scale",
            "model.per_layer_projection_norm.weight",
            "latent -> latent",
        ),
        ("expand.{}.kernel", "model.altup_projections.{}.weight", projection),
        ("merge.{}.kernel", "model.altup_unembed_projections.{}.weight", projection),
        ("norm.scale", "model.norm.weight", "embed -> embed"),
    ]
    first = fields["num_layers"] - fields["num_shared_layers"]
    for i, run in enumerate(runs_of(fields)):
        ours, theirs = f"runs.{i}.layer.", f"model.layers.{{{run.start}:}}."
        layers = _LAYERS if run.start >= first else _LAYERS | _PAIRS
        found += block_entries(theirs, layers, (), _PATTERNS, ours)
        found += [
            (f"{ours}altup.{a}", f"{theirs}altup.{b}", pattern)
            for a, b, pattern in _ALTUP
        ]
    return found


def _read(settings: Values) -> dict[str, Any]:
    count, dims = settings["num_hidden_layers"], settings["intermediate_size"]
    sparsity = settings["activation_sparsity_pattern"]
    if sparsity is None:
        sparse = 10 if count > 10 else 0
        sparsity = [0.95] * sparse + [0.0] * (count - sparse)
    types = [
        "sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(count)
    ]
    found = llama.read_by_kind(settings, types, settings["rope_local_base_freq"])
    return {
        "local_rope_theta": found["rope_theta"],
        **found,
        "layer_kinds": llama.read_kinds(settings, types),
        "window": settings["sliding_window"] - 1,
        "mlp_dim": tuple(dims) if isinstance(dims, list) else (dims,) * count,
        "sparsity": tuple(map(float, sparsity)),
    }


def _write(fields: Values) -> dict[str, Any]:
    found = llama.write_by_kind({**fields, "rotary_dim": fields["head_dim"]})
    del found["hidden_act"]
    return found | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": fields["local_rope_theta"],
        "intermediate_size": [*fields["mlp_dim"]],
        "activation_sparsity_pattern": [*fields["sparsity"]],
        "tie_word_embeddings": True,
    }


_SETTINGS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 262_400),
    "seq_len": ("max_position_embeddings", 32_768),
    "num_layers": ("num_hidden_layers", 35),
    "embed_dim": ("hidden_size", 2048),
    "num_heads": ("num_attention_heads", 8),
    "num_kv_heads": ("num_key_value_heads", 2),
    "head_dim": ("head_dim", 256),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
    "logit_softcap": ("final_logit_softcapping", 30.0),
    "num_shared_layers": ("num_kv_shared_layers", 15),
    "num_streams": ("altup_num_inputs", 4),
    "coefficient_clip": ("altup_coef_clip", 120.0),
    "laurel_dim": ("laurel_rank", 64),
    "layer_vocab_size": ("vocab_size_per_layer_input", 262_144),
    "layer_input_dim": ("hidden_size_per_layer_input", 256),
}
"""By field, the setting with the same value and its default."""

_DEFAULTS = dict(_SETTINGS.values()) | {
    "intermediate_size": 16_384,
    "sliding_window": 512,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10_000.0,
    "activation_sparsity_pattern": None,
}


def _preset(**changes: int) -> dict[str, Any]:
    """Returns the fields for the default settings with changes."""
    settings = _DEFAULTS | changes
    same = {ours: settings[name] for ours, (name, _) in _SETTINGS.items()}
    return same | _read(settings)


GEMMA3N = Family(
    model="Gemma3n",
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    parts={},
    settings={ours: name for ours, (name, _) in _SETTINGS.items()},
    defaults=_DEFAULTS,
    valid={
        "attention_bias": (False,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "tie_word_embeddings": (True,),
        "use_bidirectional_attention": (False,),
        "altup_active_idx": (0,),
        "altup_correct_scale": (True,),
    },
    read=_read,
    write=_write,
    names=_names,
    ignored=r"self_attn\.(k_proj|v_proj|k_norm)\.weight$|^lm_head\.weight$",
    presets={
        "gemma3n-e2b": _preset(
            num_hidden_layers=30, intermediate_size=8192, num_kv_shared_layers=10
        ),
        "gemma3n-e4b": _preset(),
    },
)
FAMILIES = (GEMMA3N,)
