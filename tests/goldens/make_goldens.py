"""Makes the folders next to it: tiny random models of each family, by transformers.

Each folder has ``model.safetensors`` and ``config.json`` as transformers writes them.
It also has ``logits.npz`` with ``tokens``, int (2, 24), ``logits``, float32 (2, 24,
vocab), and ``greedy``, int (64,), the tokens that follow the first row of ``tokens``.
For a family in ``LONG`` there are also ``long_tokens``, int (1, 400), and
``long_logits``, float32 (1, 25, vocab), the logits of every 16th token from the first.
All of these are computed in float32, even if the weights are saved in bfloat16.

The tests do not run this script, and need neither torch nor transformers. To make the
folders again: ``pip install torch transformers safetensors``, then ``python
make_goldens.py``. ``versions.json`` has the versions that made each folder.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
NUM_GREEDY = 64

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The wavelengths of a head of size 8 are 6, 63, 628 and 6283. Llama 3.1 keeps the
# first, interpolates the second, and stretches the other two.
LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
# With base 500,000, YaRN keeps the first wavelength, interpolates the second, and
# stretches the other two.
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 28.0,
    "attention_factor": 1.3,
}
BFLOAT16 = {"dtype": "bfloat16"}
# Each setting of a config has another value than its default in at least one family.
GEMMA = {"query_pre_attn_scalar": 12, "sliding_window": 8, **BFLOAT16}

# The wavelengths of 8 rotated features are 6, 63, 628 and 6283. The first stays, the
# second is interpolated, and the other two are stretched.
MLA_YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
DEEPSEEK = {
    **{k: v for k, v in SIZES.items() if k != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "rms_norm_eps": 1e-4,  # norms of latents keep 1e-6
}

FAMILIES = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 128,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "llama": {
        "model_type": "llama",
        **SIZES,
        "rope_theta": 10_000.0,
        "rope_scaling": LLAMA_31,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "model_type": "mistral",
        **SIZES,
        "sliding_window": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **BFLOAT16,
    },
    "mistral_small3": {  # without a window, unlike Mistral 7B
        "model_type": "mistral",
        **SIZES,
        "head_dim": 16,  # differs from hidden_size / num_attention_heads
        "sliding_window": None,
        "rope_theta": 100_000_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **BFLOAT16,
    },
    "ministral": {
        "model_type": "ministral",
        **SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,  # differs from hidden_size / num_attention_heads
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "sliding_window": 8,
        "rope_theta": 100_000_000.0,
        "tie_word_embeddings": False,
        **BFLOAT16,
    },
    "qwen2": {
        "model_type": "qwen2",
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        **BFLOAT16,
    },
    "qwen3": {
        "model_type": "qwen3",
        **SIZES,
        "head_dim": 16,  # differs from hidden_size / num_attention_heads
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        **BFLOAT16,
    },
    "mixtral": {
        "model_type": "mixtral",
        **SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        **BFLOAT16,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SIZES,
        "intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 16.0,
            "beta_fast": 28.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        **BFLOAT16,
    },
    "olmoe": {
        "model_type": "olmoe",
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        "intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        **BFLOAT16,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 40,
        "rope_theta": 1_000_000.0,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        **BFLOAT16,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SIZES,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        **BFLOAT16,
    },
    "gemma2": {
        "model_type": "gemma2",
        **SIZES,
        "num_hidden_layers": 4,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        **GEMMA,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **SIZES,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        **GEMMA,
    },
    "gemma": {
        "model_type": "gemma",
        **SIZES,
        "head_dim": 16,  # differs from hidden_size / num_attention_heads
        **BFLOAT16,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "rotary_pct": 0.25,
        "rotary_emb_base": 20_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **BFLOAT16,
    },
    "olmo2": {
        "model_type": "olmo2",
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        "rope_theta": 500_000.0,
        **BFLOAT16,
    },
    "olmo3": {
        "model_type": "olmo3",
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "rope_theta": 500_000.0,
        # The other rotation, of layers with a window, is not stretched.
        "rope_scaling": YARN,
        **BFLOAT16,
    },
    "smollm3": {
        "model_type": "smollm3",
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 8,
        **BFLOAT16,
    },
    "granite": {
        "model_type": "granite",
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        "embedding_multiplier": 0.4,
        "residual_multiplier": 1.4,
        "logits_scaling": 0.7,
        "attention_multiplier": 0.5,
        "tie_word_embeddings": True,
        **BFLOAT16,
    },
    "phi3": {
        "model_type": "phi3",
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        "partial_rotary_factor": 0.5,
        "sliding_window": 8,
        # Rows of 24 tokens are long. The continuation begins with 24 tokens too.
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.1, 1.2],
            "long_factor": [1.5, 4.0],
        },
        "tie_word_embeddings": True,
        **BFLOAT16,
    },
    "ministral3": {
        "model_type": "ministral3",
        **SIZES,
        "head_dim": 16,  # differs from hidden_size / num_attention_heads
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,  # queries grow after 8 tokens
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "llama_4_scaling_beta": 0.4,
        },
        "tie_word_embeddings": False,
        **BFLOAT16,
    },
    "llama4": {
        "model_type": "llama4_text",
        **SIZES,
        "intermediate_size": 16,
        "intermediate_size_mlp": 48,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1, 1],
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "attn_scale": 0.4,
        "rms_norm_eps": 1e-3,
        # As in Llama 4 Scout, no wavelength is interpolated.
        "rope_scaling": {**LLAMA_31, "high_freq_factor": 1.0},
        **BFLOAT16,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **DEEPSEEK,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "rope_theta": 20_000.0,
        **BFLOAT16,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **DEEPSEEK,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.3,
        "rope_interleave": False,
        "rope_scaling": MLA_YARN,
        **BFLOAT16,
    },
    "kimi_k2": {
        "model_type": "deepseek_v3",  # transformers has no class for kimi_k2
        **DEEPSEEK,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "q_lora_rank": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "rope_theta": 50_000.0,
        "rope_scaling": {**MLA_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 0.7},
        **BFLOAT16,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **SIZES,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "head_dim": 16,  # differs from hidden_size / num_attention_heads
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.3,
        "rope_theta": 1_000_000.0,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
        **BFLOAT16,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **SIZES,
        "num_hidden_layers": 6,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "mlp_only_layers": [0, 3],
        "max_position_embeddings": 512,
        "head_dim": 16,  # differs from hidden_size / num_attention_heads
        "partial_rotary_factor": 0.5,
        "rope_theta": 20_000.0,
        # Outputs of a memory can be small. With a smaller number, their norm would
        # enlarge rounding errors. Norms of keys of linear attention keep 1e-6.
        "rms_norm_eps": 1e-2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": False,
        **BFLOAT16,
    },
    "smollm": {
        "model_type": "llama",
        **SIZES,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        **BFLOAT16,
    },
}

LONG = ("qwen3_next",)
"""Families whose numbers also depend on the length of a sequence."""


def randomise(model: torch.nn.Module) -> None:
    """Draws random weights that all affect the output: no bias is 0, no scale is 1."""
    # Gemma multiplies embeddings by the square root of their width.
    scale = 0.07 if "gemma" in model.config.model_type else 0.4
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                # A memory that decays slowly reaches over several chunks of tokens.
                weight.copy_(torch.empty_like(weight).uniform_(0.002, 0.3).log())
            elif weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            elif "embed" in name or "wte" in name or "wpe" in name:
                weight.copy_(torch.randn_like(weight) * scale)
            else:
                weight.copy_(torch.randn_like(weight) * (1.5 / weight.shape[-1] ** 0.5))
            if "gpt_oss" in model.config.model_type and name.endswith("gate_up_proj"):
                weight.mul_(4)  # some values must exceed the bounds of the activation
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.add_(0.2 * torch.randn_like(bias))


def make(name: str, seed: int) -> bool:
    """Writes one folder. Returns False if greedy tokens are nearly tied, or repeat."""
    torch.manual_seed(seed)
    settings = dict(FAMILIES[name])
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    model.to(dtype).save_pretrained(HERE / name)
    # The model is read back. Casting it to its dtype and back would have rounded the
    # frequencies of its rotary embedding.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        HERE / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(3, 128, (2, 24))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        long = {}
        if name in LONG:
            tokens_of_long = torch.randint(3, 128, (1, 400))
            found = model(tokens_of_long, use_cache=False).logits[:, ::16]
            long["long_tokens"] = tokens_of_long.numpy().astype(np.int32)
            long["long_logits"] = found.numpy()
        greedy, margin = tokens[:1], float("inf")
        for _ in range(NUM_GREEDY):
            last = model(greedy, use_cache=False).logits[0, -1]
            best = last.topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            greedy = torch.cat([greedy, best.indices[None, :1]], dim=1)
    num_tokens = len(greedy[0, tokens.shape[1] :].unique())
    if margin < 2e-3 or num_tokens < 12:
        return False
    np.savez_compressed(
        HERE / name / "logits.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
        greedy=greedy[0, tokens.shape[1] :].numpy().astype(np.int32),
        **long,
    )
    spread = float(logits.std())
    print(  # noqa: T201
        f"{name}: seed {seed}, logits {spread:.2f}, margin {margin:.4f}, "
        f"{num_tokens} different tokens"
    )
    return True


def main() -> None:
    """Makes the families that the command line names, or all families."""
    file = HERE / "versions.json"
    versions = json.loads(file.read_text())
    for name in sys.argv[1:] or FAMILIES:
        next(seed for seed in range(100) if make(name, seed))
        versions[name] = {m.__name__: m.__version__ for m in (torch, transformers, np)}
    file.write_text(json.dumps(versions, indent=2) + "\n")
    config = HERE / "kimi_k2" / "config.json"
    config.write_text(config.read_text().replace('"deepseek_v3"', '"kimi_k2"'))


if __name__ == "__main__":
    main()
