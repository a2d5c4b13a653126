"""Models of images: outputs of folders by transformers and timm beside theirs.

The folders and the outputs are in `tests/goldens/vision`; `make_vision.py` writes them
with transformers and timm. Each folder has a small model with unusual settings. The
output is logits, or the pooled features of a model without classes. A difference is
relative to the largest output.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from benchmarks.families import GOLDENS, STRATEGIES, difference
from benchmarks.timing import Table
from nnx_parallel import Trainer
from nnx_parallel.models import ResNet, ViT, classification_loss
from nnx_parallel.models.vit_config import FAMILIES, PRESETS


def measure(rounds: int = 1000) -> Table:
    """Loads each folder under every strategy, and computes its outputs.

    Args:
        rounds: The number of folders, from the first.
    """
    folders = [path.parent for path in sorted(GOLDENS.glob("vision/*/*.safetensors"))]
    folders = folders[:rounds]
    table = Table(
        f"Folders of image models that transformers and timm wrote: {len(folders)}"
    )
    jax.config.update("jax_disable_most_optimizations", True)
    for folder in folders:
        golden = np.load(folder / "logits.npz")
        expected = np.concatenate([golden["logits"]] * jax.device_count())
        images = np.concatenate(
            [np.moveaxis(golden["images"], 1, -1)] * jax.device_count()
        )
        kind: Any = ResNet if "resnet" in folder.name else ViT
        written: Any = None
        for name, strategy in STRATEGIES.items():
            if kind is ResNet and "pipeline" in name:
                continue  # a ResNet has no list of equal blocks
            trainer = Trainer(
                kind.from_pretrained(folder),
                optax.sgd(0.1),
                classification_loss,
                strategy=strategy,
                loggers=(),
            )
            out = trainer.predict([images], lambda model, images: model(images))
            table.add(f"{name}: {folder.name}", difference(out, expected))
            written = trainer.model
        table.add(f"written as: {folder.name}", written.family.architecture)
    for family in FAMILIES:
        if family.presets:
            table.add(f"presets of {family.architecture}", len(family.presets))
    table.add("presets of image models", len(PRESETS))
    return table
