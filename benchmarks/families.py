"""Families of language models: logits of folders by transformers beside its logits.

The folders and the logits are in `tests/goldens`; `make_goldens.py` there writes them
with transformers. Each folder has a small model with the unusual settings of its
family. A difference is relative to the largest logit.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import optax

from benchmarks.timing import Table
from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.models import GPT, Gemma3n, next_token_loss
from nnx_parallel.weights.family import family_of, read_fields, write_settings

GOLDENS = Path(__file__).parents[1] / "tests" / "goldens"
STRATEGIES: dict[str, Strategy] = {
    "replicas": DataParallel(),
    "FSDP": FSDP(min_size=0),
    "tensor x FSDP": Composite(TensorParallel(2), FSDP(min_size=0)),
    "pipeline x FSDP": Composite(Pipeline(2), FSDP(min_size=0)),
}


def measure(rounds: int = 1000) -> Table:
    """Loads each folder under every strategy, and computes its logits.

    Args:
        rounds: The number of folders, from the first.
    """
    folders = [path.parent for path in sorted(GOLDENS.glob("*/logits.npz"))]
    folders = [*folders, GOLDENS / "gemma3n" / "text"][:rounds]
    table = Table(f"Folders of language models that transformers wrote: {len(folders)}")
    # Machine code need not be fast here: each program runs once.
    jax.config.update("jax_disable_most_optimizations", True)
    for folder in folders:
        golden = np.load(folder / "logits.npz")
        rows = jax.device_count() // len(golden["tokens"])
        expected = np.concatenate([golden["logits"]] * rows)
        name = folder.relative_to(GOLDENS).parts[0]
        model = Gemma3n if name == "gemma3n" else GPT
        for label, strategy in STRATEGIES.items():
            trainer = Trainer(
                model.from_pretrained(folder),
                optax.sgd(0.1),
                next_token_loss,
                strategy=strategy,
                loggers=(),
            )
            logits = trainer.predict([np.concatenate([golden["tokens"]] * rows)])
            share = np.abs(logits - expected).max() / np.abs(expected).max()
            table.add(f"{label}: {name}", f"{share:.0e}")
        content = json.loads((folder / "config.json").read_text())
        config = model.config_type(**read_fields(content, model.families)[1])
        (architecture,) = write_settings(config, model.families)["architectures"]
        table.add(f"written as: {name}", architecture)
        presets = len(family_of(config, model.families).presets)
        table.add(f"presets: {name}", presets)
    return table
