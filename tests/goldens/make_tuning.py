"""Makes ``tuning``: losses and weights of fine-tuning runs, by a loop in PyTorch.

A run reads a folder of this directory in float32 and takes 20 steps. With ``adapters``
it trains only adapters, which PEFT made. Weight decay applies to matrices, not to
biases and scales. ``tuning/runs.json`` has, for each run, the losses and, for each
trained array, a summary of its change (`summary`).

Tests compare with ``runs.json``. Where torch and transformers are installed, they also
call `train`. To make the files again: ``pip install torch transformers peft``, then
``python make_tuning.py``.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
FILE = HERE / "tuning" / "runs.json"
NUM_STEPS = 20
ADAMW = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.3}
MOMENTUM = 0.9

RUNS: dict[str, dict[str, Any]] = {
    "llama adamw": {"folder": "llama", "optimizer": "adamw"},
    "llama sgd": {"folder": "llama", "optimizer": "sgd", "rate": 0.05},
    "gpt2 adamw": {"folder": "gpt2", "optimizer": "adamw"},
    "qwen3 adamw": {"folder": "qwen3", "optimizer": "adamw"},
    "llama adapters adamw": {
        "folder": "llama",
        "optimizer": "adamw",
        "adapters": "tuning/adapters",
    },
    # The adapters' scale of 8 multiplies their gradients and their effect.
    "llama adapters sgd": {
        "folder": "llama",
        "optimizer": "sgd",
        "rate": 0.002,
        "adapters": "tuning/adapters",
    },
}


def batches() -> np.ndarray:
    """Returns tokens, int32 (steps, 8, 17): four batches, repeated in this order."""
    tokens = np.random.default_rng(0).integers(3, 128, (4, 8, 17), dtype=np.int32)
    return np.concatenate([tokens] * (NUM_STEPS // len(tokens)))


def summary(change: np.ndarray) -> list[float]:
    """Returns an array's norm, and its products with three vectors of signs.

    A difference in any element changes the products.
    """
    x = np.asarray(change, np.float64).ravel()
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (3, x.size))
    return [float(np.linalg.norm(x)), *map(float, signs @ x)]


def train(
    folder: str,
    optimizer: str,
    *,
    rate: float = 0.0,
    adapters: str | None = None,
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Trains with PyTorch.

    Returns:
        The losses, and the trained arrays before and after, by their names in files.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        HERE / folder, dtype=torch.float32, attn_implementation="eager"
    )
    if adapters is not None:
        import peft

        model = peft.PeftModel.from_pretrained(
            model, HERE / adapters, is_trainable=True
        )
    model.eval()  # without dropout
    trained = [(n, x) for n, x in model.named_parameters() if x.requires_grad]
    values = {n.replace(".default", ""): x.detach().numpy() for n, x in trained}
    before = {name: x.copy() for name, x in values.items()}
    if optimizer == "sgd":
        arrays = [x for _, x in trained]
        update: Any = torch.optim.SGD(arrays, lr=rate, momentum=MOMENTUM)
    else:
        settings: dict[str, Any] = dict(ADAMW)
        decay = settings.pop("weight_decay")
        groups = [
            {"params": [x for _, x in trained if x.ndim > 1], "weight_decay": decay},
            {"params": [x for _, x in trained if x.ndim < 2], "weight_decay": 0.0},
        ]
        update = torch.optim.AdamW(groups, **settings)
    losses = []
    for batch in batches():
        tokens = torch.tensor(batch).long()
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        update.zero_grad()
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses, before, values


def make_adapters() -> None:
    """Writes the adapters as PEFT initialises them: the second factor is zero."""
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        HERE / "llama", dtype=torch.float32
    )
    targets = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules=targets
    )
    folder = HERE / "tuning" / "adapters"
    peft.get_peft_model(base, config).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    given = json.loads(file.read_text()) | {"base_model_name_or_path": "llama"}
    given["target_modules"].sort()  # PEFT writes a set
    file.write_text(json.dumps(given, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Writes the adapters and the file."""
    import peft
    import torch
    import transformers

    make_adapters()
    modules = (torch, transformers, peft, np)
    found: dict[str, Any] = {"versions": {m.__name__: m.__version__ for m in modules}}
    for name, run in RUNS.items():
        losses, before, after = train(**run)
        print(name, losses[0], losses[-1])  # noqa: T201
        changes = {path: summary(x - before[path]) for path, x in after.items()}
        found[name] = {"losses": losses, "changes": changes}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
