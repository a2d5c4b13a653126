"""Makes the folders in ``vision``: tiny random models of images, by transformers.

The script works like `make_goldens.py`, for models of images. ``logits.npz`` has
``images``, float32 (2, 3, 16, 16), in the layout of transformers, and ``logits``,
float32 (2, classes), computed in evaluation mode. The statistics of the norms are
random too.

The tests do not run this script. To make the folders again: ``pip install torch
transformers safetensors``, then ``python make_vision.py``.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "vision"
MODELS = {
    "vit": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
            num_labels=6,
        ),
    ),
    "resnet": (
        transformers.ResNetForImageClassification,
        transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[32, 64], depths=[2, 1], num_labels=6
        ),
    ),
    "resnet-basic": (
        transformers.ResNetForImageClassification,
        transformers.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 2],
            layer_type="basic",
            num_labels=6,
        ),
    ),
}


def randomise(model: torch.nn.Module) -> None:
    """Draws random weights and statistics that all affect the output."""
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if not x.is_floating_point():
                continue
            if name.endswith("running_var"):
                x.copy_(0.5 + torch.rand_like(x))
            elif x.ndim <= 1 or "cls_token" in name or "position" in name:
                x.add_(0.3 * torch.randn_like(x))
            else:
                x.copy_(torch.randn_like(x) * (1.5 / x[0].numel() ** 0.5))


def main() -> None:
    """Makes all models."""
    for name, (kind, config) in MODELS.items():
        torch.manual_seed(0)
        model = kind(config).eval()
        randomise(model)
        model.save_pretrained(HERE / name)
        images = torch.randn(2, 3, 16, 16)
        with torch.no_grad():
            logits = kind.from_pretrained(HERE / name).eval()(images).logits
        print(f"{name}: logits {float(logits.std()):.2f}")  # noqa: T201
        arrays = {"images": images.numpy(), "logits": logits.numpy()}
        np.savez_compressed(HERE / name / "logits.npz", **arrays)
    versions = {m.__name__: m.__version__ for m in (torch, transformers, np)}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
