"""Makes the folder ``gemma3n/text``: a tiny random Gemma 3n, by transformers.

The script works like `make_goldens.py`. ``logits.npz`` also has ``long``, int32 (1,
400), and ``long_logits``, the logits of every eighth of its tokens. ``clipped`` are the
logits of ``tokens`` in training, where coefficients of streams are clipped. ``norms``
are the norms of the gradients of the loss of ``tokens``, in the order of ``names``.
``sizes.json`` has the numbers of parameters of published models.

The tests do not run this script. To make the folder again: ``pip install torch
transformers safetensors``, then ``python make_gemma3n.py``.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

HERE = Path(__file__).parent / "gemma3n"
NUM_GREEDY = 64
LOCAL, GLOBAL = "sliding_attention", "full_attention"
SETTINGS = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 120,  # the tokens from 120 on have no embedding
    "hidden_size": 32,
    "hidden_size_per_layer_input": 12,
    "intermediate_size": [48, 48, 48, 40, 40, 40, 40, 40],
    "activation_sparsity_pattern": [0.7, 0.7, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0],
    "num_hidden_layers": 8,
    "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL],
    "num_kv_shared_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {
        GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
        LOCAL: {"rope_type": "default", "rope_theta": 7000.0},
    },
    "final_logit_softcapping": 3.0,
    "altup_num_inputs": 3,
    "altup_coef_clip": 0.08,
    "laurel_rank": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PUBLISHED = {
    "gemma3n-e2b": {
        "num_hidden_layers": 30,
        "intermediate_size": [8192] * 30,
        "num_kv_shared_layers": 10,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    },
    "gemma3n-e4b": {},
}


def randomise(model: torch.nn.Module) -> None:
    """Draws random weights that all affect the output: no scale is 0 or 1.

    The coefficients are small. Large ones would amplify rounding errors.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            elif "embed_tokens" in name:
                weight.copy_(torch.randn_like(weight) * 0.2)
            elif "coefs" in name:
                weight.copy_(torch.randn_like(weight) * 0.1)
            elif "modality_router" in name:  # its inputs are divided by the width
                weight.copy_(torch.randn_like(weight) * 2)
            else:
                weight.copy_(torch.randn_like(weight) * (0.8 / weight.shape[-1] ** 0.5))


@torch.enable_grad()
def gradient_norms(
    model: torch.nn.Module, tokens: torch.Tensor
) -> tuple[list[str], list[float]]:
    """Returns the names of parameters, and the norms of the loss's gradients."""
    logits = model(tokens[:, :-1], use_cache=False).logits
    labels = tokens[:, 1:].flatten()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels).backward()
    found = {n: float(p.grad.norm()) for n, p in model.named_parameters()}
    return [*found], [*found.values()]


def make(seed: int) -> bool:
    """Writes the folder. Returns False if greedy tokens are nearly tied, or repeat."""
    torch.manual_seed(seed)
    config = Gemma3nTextConfig(**SETTINGS)
    model = Gemma3nForCausalLM(config)
    randomise(model)
    folder = HERE / "text"
    model.to(torch.bfloat16).save_pretrained(folder)
    model = Gemma3nForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(3, 128, (2, 24))
    long = torch.randint(3, 128, (1, 400))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        long_logits = model(long, use_cache=False).logits[:, ::8]
        greedy, margin = tokens[:1], float("inf")
        for _ in range(NUM_GREEDY):
            best = model(greedy, use_cache=False).logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            greedy = torch.cat([greedy, best.indices[None, :1]], dim=1)
        names, norms = gradient_norms(model, tokens)
        # In training, transformers clips the weights in place.
        clipped = model.train()(tokens, use_cache=False).logits
    num_tokens = len(greedy[0, tokens.shape[1] :].unique())
    if margin < 2e-3 or num_tokens < 12:
        return False
    np.savez_compressed(
        folder / "logits.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
        clipped=clipped.numpy(),
        long=long.numpy().astype(np.int32),
        long_logits=long_logits.numpy(),
        greedy=greedy[0, tokens.shape[1] :].numpy().astype(np.int32),
        names=names,
        norms=norms,
    )
    print(  # noqa: T201
        f"seed {seed}, logits {float(logits.std()):.2f}, clipped "
        f"{float((logits - clipped).abs().max()):.2f}, margin {margin:.4f}, "
        f"{num_tokens} different tokens"
    )
    return True


def main() -> None:
    """Makes the folder and the sizes."""
    next(seed for seed in range(100) if make(seed))
    sizes = {}
    for name, settings in PUBLISHED.items():
        with torch.device("meta"):
            model = Gemma3nForCausalLM(Gemma3nTextConfig(**settings))
        sizes[name] = model.num_parameters()
    versions = {m.__name__: m.__version__ for m in (torch, transformers, np)}
    content = {"sizes": sizes, "versions": versions}
    (HERE / "sizes.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
