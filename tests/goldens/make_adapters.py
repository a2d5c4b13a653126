"""Makes the folders in ``adapters``: random LoRA adapters of tiny models, by PEFT.

Each has ``adapter_model.safetensors`` and ``adapter_config.json`` as PEFT writes them
for a model in a folder beside ``adapters``. It also has ``logits.npz`` with
``logits``, float32 (2, 24, vocab), which transformers and PEFT compute from that
model's ``tokens``.

The tests do not run this script. To make the folders again: ``pip install torch
transformers peft safetensors``, then ``python make_adapters.py``.
"""

import json
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

HERE = Path(__file__).parent
_TWO = ["q_proj", "down_proj"]

# A key is the name of a folder. A value has the name of the base model's folder, and
# settings of PEFT.
TARGETS = {
    "llama": ("llama", {"r": 3, "lora_alpha": 6, "target_modules": _TWO}),
    "gemma3": (
        "gemma3",
        {"r": 2, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"},
    ),
    # Several ranks and scales, and a start that leaves the base model unchanged.
    "patterns": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 6,
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, "mlp.*": 8},
            "alpha_pattern": {r"layers\.\d+\.mlp\.up_proj": 3},
            "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
            "init_lora_weights": "orthogonal",
        },
    ),
    # PEFT's name c_proj fits two layers of a block, whose kernels are (in, out).
    "gpt2": ("gpt2", {"r": 2, "lora_alpha": 4, "target_modules": ["mlp.c_proj"]}),
}


def main() -> None:
    """Makes all adapters."""
    for name, (source, settings) in TARGETS.items():
        torch.manual_seed(0)
        base = transformers.AutoModelForCausalLM.from_pretrained(
            HERE / source, dtype=torch.float32, attn_implementation="eager"
        )
        config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
        model = peft.get_peft_model(base, config).eval()
        with torch.no_grad():
            for path, x in model.named_parameters():
                if "lora_B" in path:
                    x.copy_(0.3 * torch.randn_like(x))
        folder = HERE / "adapters" / name
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        given = json.loads((folder / "adapter_config.json").read_text())
        given["base_model_name_or_path"] = source  # in place of a path on this machine
        given["target_modules"].sort()  # PEFT writes a set
        text = json.dumps(given, indent=2, sort_keys=True)
        (folder / "adapter_config.json").write_text(text + "\n")
        tokens = np.load(HERE / source / "logits.npz")
        with torch.no_grad():
            logits = model(torch.tensor(tokens["tokens"]).long()).logits.numpy()
        moved = np.abs(logits - tokens["logits"]).max()
        print(f"{name}: logits change by up to {moved:.2f}")  # noqa: T201
        np.savez_compressed(folder / "logits.npz", logits=logits)
    modules = (torch, transformers, peft, np)
    versions = {m.__name__: m.__version__ for m in modules}
    text = json.dumps(versions, indent=2) + "\n"
    (HERE / "adapters" / "versions.json").write_text(text)


if __name__ == "__main__":
    main()
