"""Hugging Face's ``config.json`` of a language model, as a `GPTConfig`, and back.

It covers GPT-2, Llama, Mistral, Mixtral, Qwen 2, 3 and 3 MoE, Gemma 2 and 3, and models
of these types, such as SmolLM and Llama 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts
from nnx_parallel.models.gpt_config import GPTConfig, LayerKind
from nnx_parallel.models.presets import LLAMA
from nnx_parallel.models.rotary import RopeScaling
from nnx_parallel.weights.files import check_counts

CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""The class in transformers of each ``model_type`` that can be read."""

_ACTIVATIONS = {
    "gpt2": ("activation_function", "gelu_new"),
    "gemma2": ("hidden_activation", "gelu_pytorch_tanh"),
    "gemma3_text": ("hidden_activation", "gelu_pytorch_tanh"),
}

# Settings that change the numbers of a model and have no counterpart in `GPTConfig`.
_NEUTRAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "add_cross_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "use_bidirectional_attention": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

# Values that transformers takes for settings that a file leaves out, where ours differ:
# files of Gemma 3 and Mistral do leave them out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "gemma2": {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
    },
}

_EXPERTS = ("mixtral", "qwen3_moe")
_KINDS: dict[str, LayerKind] = {
    "sliding_attention": "local",
    "full_attention": "global",
}


def config_from_hf(config: Mapping[str, Any], **overrides: Any) -> GPTConfig:
    """The shape of a model from its ``config.json``.

    Args:
        config: The file's content, written by transformers 4 or 5.
        overrides: Fields of the `GPTConfig` to set, such as ``remat``.

    Raises:
        ValueError: If it is another type of model, or if a setting has no counterpart
            here: the model would compute something else.

    Example:
        >>> config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024}
        >>> config |= {"n_layer": 12, "n_embd": 768, "n_head": 12}
        >>> config_from_hf(config) == GPTConfig.preset("gpt2")
        True
    """
    inner = config.get("text_config")
    config = dict(inner) if isinstance(inner, Mapping) and inner else dict(config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CLASSES:
        raise ValueError(
            f"config.json has model_type {kind!r}. A GPT is made of one of: "
            f"{', '.join(CLASSES)}."
        )
    _check_neutral(config)
    config = _DEFAULTS.get(kind, {}) | config
    check_counts(config)
    try:
        parts = _of_gpt2(config) if kind == "gpt2" else _of_llama(config, kind)
    except KeyError as error:
        raise ValueError(
            f"config.json has no {error} and is of model_type {kind!r}, which needs it."
        ) from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"config.json of model_type {kind!r} has a setting of the wrong kind: "
            f"{error}."
        ) from error
    return replace(GPTConfig(**parts), **overrides)


def _check_neutral(config: dict[str, Any]) -> None:
    name, value = _ACTIVATIONS.get(config["model_type"], ("hidden_act", "silu"))
    for key, only in (_NEUTRAL | {name: value}).items():
        if (found := config.get(key, only)) not in (only, None):
            raise ValueError(
                f"config.json has {key}={found!r}. A GPT has no counterpart of it: it "
                f"must be {only!r}, or absent."
            )


def _of_gpt2(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": config["vocab_size"],
        "seq_len": config["n_positions"],
        "num_layers": config["n_layer"],
        "embed_dim": config["n_embd"],
        "num_heads": config["n_head"],
        "mlp_dim": config.get("n_inner"),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "tied": config.get("tie_word_embeddings", True),
    }


def _of_llama(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Fields for Llama and the types that followed it."""
    is_gemma = kind.startswith("gemma")
    parts = LLAMA | {
        "vocab_size": config["vocab_size"],
        "seq_len": config["max_position_embeddings"],
        "num_layers": config["num_hidden_layers"],
        "embed_dim": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "mlp_dim": config["intermediate_size"],
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "tied": config.get("tie_word_embeddings", is_gemma),
        "qkv_bias": True if kind == "qwen2" else None,
        "qk_norm": kind in ("qwen3", "qwen3_moe", "gemma3_text"),
    }
    parts |= _rotation(config) | _windows(config, kind)
    if kind in _EXPERTS:
        parts |= {"mlp_dim": None, "experts": _experts(config, kind)}
    if is_gemma:
        parts |= {
            "activation": "geglu",
            "zero_centered_norm": True,
            "post_norms": True,
            "scale_embedding": True,
            "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
        }
        parts["softcap"] = config.get("attn_logit_softcapping")
        parts["logit_softcap"] = config.get("final_logit_softcapping")
    return parts


def _experts(config: dict[str, Any], kind: str) -> Experts:
    if kind == "mixtral":
        count, width = config["num_local_experts"], config["intermediate_size"]
    else:
        # transformers 5 also writes Mixtral's name, and the default beside it.
        count = config.get("num_local_experts", config["num_experts"])
        width = config["moe_intermediate_size"]
    return Experts(
        num_experts=count,
        top_k=config["num_experts_per_tok"],
        mlp_dim=width,
        normalise=config.get("norm_topk_prob", True),
    )


def _rotation(config: dict[str, Any]) -> dict[str, Any]:
    """Bases and stretching: transformers 5 has one entry, version 4 up to three."""
    given = config.get("rope_parameters")
    if given is None:
        whole = {"rope_theta": config.get("rope_theta", 10_000.0)}
        whole |= config.get("rope_scaling") or {}
        local = config.get("rope_local_base_freq")
    elif "full_attention" in given:
        whole = given["full_attention"]
        local = given["sliding_attention"]["rope_theta"]
    else:
        whole, local = given, None
    return {
        "rope_theta": whole.get("rope_theta", 10_000.0),
        "rope_scaling": _scaling(whole),
        "local_rope_theta": local,
    }


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(factor=rope["factor"])
    if kind == "llama3":
        return RopeScaling(
            factor=rope["factor"],
            original_len=rope["original_max_position_embeddings"],
            low_frequency=rope["low_freq_factor"],
            high_frequency=rope["high_freq_factor"],
        )
    raise ValueError(
        f"config.json has a rotation of rope_type {kind!r}. A GPT's is one of: "
        "default, linear, llama3."
    )


def _windows(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The window and the layers that have it."""
    window = config.get("sliding_window")
    if kind.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    if window is None or kind == "llama":
        return {}
    count, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:  # before transformers 4.53
        every = {"gemma2": 2, "gemma3_text": config.get("sliding_window_pattern", 6)}
        types = ["sliding_attention"] * count
        if period := every.get(kind):
            types[period - 1 :: period] = ["full_attention"] * (count // period)
        elif kind.startswith("qwen"):  # the first layers see all keys
            whole = max(0, min(config.get("max_window_layers", count), count))
            types[:whole] = ["full_attention"] * whole
    if unknown := set(types) - set(_KINDS):
        raise ValueError(
            f"config.json has layer_types {sorted(unknown)}. A GPT's layers are of: "
            f"{', '.join(_KINDS)}."
        )
    kinds = tuple(_KINDS[each] for each in types)
    if set(kinds) == {"global"}:
        return {}
    # Their number also counts the key of the query's token.
    found: dict[str, Any] = {"window": window - 1}
    return found if set(kinds) == {"local"} else found | {"layer_kinds": kinds}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """The ``config.json`` of a model, as transformers 4.53 and later read it.

    Settings that only training uses (dropout, remat, losses that balance experts, the
    kernel of attention) are left out.

    Raises:
        ValueError: If no model of transformers has this shape.

    Example:
        >>> config_to_hf(GPTConfig.preset("qwen3-8b"))["model_type"]
        'qwen3'
    """
    kind = config.nearest_type
    found = _to_gpt2(config) if kind == "gpt2" else _to_llama(config, kind)
    found = {"model_type": kind, "architectures": [CLASSES[kind]], **found}
    back = config_from_hf(found)
    for name in _SHAPES:
        ours, theirs = _plain(config)[name], _plain(back)[name]
        if ours != theirs:
            raise ValueError(
                f"GPTConfig.{name} is {ours!r}. The nearest model of transformers, "
                f"{CLASSES[kind]}, has {theirs!r}: no model there has this shape."
            )
    return found


_TRAINING = ("dropout", "attention", "remat", "z_loss")
_SHAPES = tuple(
    name for name in GPTConfig.__dataclass_fields__ if name not in _TRAINING
)


def _plain(config: GPTConfig) -> dict[str, Any]:
    """All fields; a field that is ``None`` has the value that follows from others."""
    found = {name: getattr(config, name) for name in _SHAPES}
    sizes = config.sizes
    found |= {f"num_{n}": sizes[n] for n in ("heads", "kv_heads")}
    found |= {"head_dim": sizes["head_dim"], "mlp_dim": sizes["mlp"]}
    found["qkv_bias"] = config.use_bias if config.qkv_bias is None else config.qkv_bias
    found["layer_kinds"] = config.kinds
    if config.experts is not None:
        training = {"balance_loss": 0.0, "balance_over": "sequence", "z_loss": 0.0}
        found["experts"] = replace(config.experts, **training)
    scale = config.attention_scale or sizes["head_dim"] ** -0.5
    found["attention_scale"] = round(scale, 12)
    if config.positions == "learned":
        found["rope_theta"] = None
    return found


def _to_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.seq_len,
        "n_layer": config.num_layers,
        "n_embd": config.embed_dim,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "layer_norm_epsilon": config.norm_epsilon,
        "activation_function": "gelu_new",
        "tie_word_embeddings": config.tied,
    }


def _to_llama(config: GPTConfig, kind: str) -> dict[str, Any]:
    sizes = config.sizes
    name, value = _ACTIVATIONS.get(kind, ("hidden_act", "silu"))
    whole: dict[str, Any] = {"rope_type": "default"}
    if scaling := config.rope_scaling:
        whole = {"rope_type": "linear", "factor": scaling.factor}
        if scaling.original_len is not None:
            whole |= {
                "rope_type": "llama3",
                "original_max_position_embeddings": scaling.original_len,
                "low_freq_factor": scaling.low_frequency,
                "high_freq_factor": scaling.high_frequency,
            }
    found: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.seq_len,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "intermediate_size": sizes["mlp"],
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        name: value,
        # Both forms: transformers 4 reads the first two.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else whole,
        "rope_parameters": whole | {"rope_theta": config.rope_theta},
    }
    if config.window is not None:
        theirs = {ours: name for name, ours in _KINDS.items()}
        found["sliding_window"] = config.window + 1
        if kind not in ("mistral", "mixtral"):  # in these all layers have it
            found["layer_types"] = [theirs[each] for each in config.kinds]
    if kind.startswith("qwen"):
        found["use_sliding_window"] = config.window is not None
    found |= _experts_to_hf(config, kind)
    if kind.startswith("gemma"):
        scale = config.attention_scale or sizes["head_dim"] ** -0.5
        found |= {
            "query_pre_attn_scalar": round(scale**-2),  # transformers demands an int
            "attn_logit_softcapping": config.softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    if kind == "gemma3_text":
        local = config.local_rope_theta or config.rope_theta
        found["rope_local_base_freq"] = local
        found["rope_parameters"] = {
            "full_attention": found["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return found


def _experts_to_hf(config: GPTConfig, kind: str) -> dict[str, Any]:
    if (experts := config.experts) is None:
        return {}
    found: dict[str, Any] = {
        "num_experts_per_tok": experts.top_k,
        "num_local_experts": experts.num_experts,
    }
    if kind == "mixtral":
        return found
    return found | {
        "num_experts": experts.num_experts,
        "moe_intermediate_size": experts.mlp_dim,
        "norm_topk_prob": experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
