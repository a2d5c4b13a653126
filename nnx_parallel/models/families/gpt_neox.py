"""The family GPT-NeoX, with Pythia."""

from typing import Any

from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import sized
from nnx_parallel.weights.family import Family, Values, block_entries
from nnx_parallel.weights.names import Entry

_LAYERS = {
    "attention.query": "attention.query_key_value",
    "attention.key": "attention.query_key_value",
    "attention.value": "attention.query_key_value",
    "attention.out": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
# One kernel in files holds the query, key and value of each head.
_PATTERNS = {
    name: (
        f"part {i} of 3: (heads n head_dim) embed -> n embed heads head_dim",
        f"part {i} of 3: (heads n head_dim) -> n heads head_dim",
    )
    for i, name in enumerate(("query", "key", "value"))
}
_GELU = {
    "gelu": True,
    "gelu_new": False,
    "gelu_fast": False,
    "gelu_pytorch_tanh": False,
}
"""True for names of the exact GELU."""


def _names(fields: Values) -> list[Entry]:
    found = [
        ("embed.embedding", "gpt_neox.embed_in.weight", "vocab embed -> vocab embed"),
        *block_entries("gpt_neox.layers.{}.", _LAYERS, patterns=_PATTERNS),
        ("norm.scale", "gpt_neox.final_layer_norm.weight", "embed -> embed"),
        ("norm.bias", "gpt_neox.final_layer_norm.bias", "embed -> embed"),
    ]
    head = ("head.kernel", "embed_out.weight", "vocab embed -> embed vocab")
    return found if fields["tied"] else [*found, head]


def _read(settings: Values) -> dict[str, Any]:
    act, is_parallel = settings["hidden_act"], settings["use_parallel_residual"]
    # Files store the base and the share of rotated features outside of the rotation's
    # settings, and under other names.
    older = {
        "rope_theta": settings["rotary_emb_base"],
        "partial_rotary_factor": settings["rotary_pct"],
    }
    return llama.read({**settings, **older}, is_partial=True) | {
        "exact_gelu": _GELU[act],
        "block": "parallel" if is_parallel else "sequential",
        "separate_norms": is_parallel,
    }


def _write(fields: Values) -> dict[str, Any]:
    found = llama.write(fields, is_partial=True)
    return found | {
        "rotary_emb_base": found.pop("rope_theta"),
        "rotary_pct": found.pop("partial_rotary_factor"),
        "hidden_act": "gelu" if fields["exact_gelu"] else "gelu_new",
        "use_parallel_residual": fields["block"] == "parallel",
        "attention_bias": True,
    }


_PYTHIA = {"vocab_size": 50_304, "seq_len": 2048}


def _pythia(shape: str, head_dim: int, **more: Any) -> dict[str, Any]:
    return sized(_PYTHIA, shape, rotary_dim=head_dim // 4, **more)


GPT_NEOX = Family(
    model="GPT",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    parts={
        "positions": "rope",
        "exact_gelu": True,
        "block": "parallel",
        "separate_norms": True,
        "tied": False,
    },
    marks=("use_bias",),
    settings={
        "vocab_size": "vocab_size",
        "seq_len": "max_position_embeddings",
        "num_layers": "num_hidden_layers",
        "embed_dim": "hidden_size",
        "num_heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "norm_epsilon": "layer_norm_eps",
        "tied": "tie_word_embeddings",
    },
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": 10_000.0,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
    },
    valid={
        "attention_bias": (True,),
        "hidden_act": tuple(_GELU),
    },
    read=_read,
    write=_write,
    names=_names,
    prefix="gpt_neox.",
    # Older versions also saved masks and frequencies.
    ignored=r"\.attention\.(masked_)?bias$|rotary_emb\.inv_freq$|^embed_out\.weight$",
    presets={
        "pythia-70m": _pythia("6 512 8", 64),
        "pythia-160m": _pythia("12 768 12", 64),
        "pythia-410m": _pythia("24 1024 16", 64),
        "pythia-1b": _pythia("16 2048 8", 256),
        "pythia-1.4b": _pythia("24 2048 16", 128),
        "pythia-2.8b": _pythia("32 2560 32", 80),
        "pythia-6.9b": _pythia("32 4096 32", 128, vocab_size=50_432),
        "pythia-12b": _pythia("36 5120 40", 128, vocab_size=50_688),
        "gpt-neox-20b": _pythia("44 6144 64", 96, vocab_size=50_432, exact_gelu=False),
    },
)
FAMILIES = (GPT_NEOX,)
