"""Families of language models: logits of folders by transformers beside its logits.

The folders and the logits are in `tests/goldens`; `make_goldens.py` there writes them
with transformers. Each folder has a small model with the unusual settings of its
family. A difference is relative to the largest logit. If torch and transformers are
installed, two more columns compare rows of 400 tokens, or of fewer if a model has fewer
learned positions, and a model after training. This model is trained for three steps and
exported, and transformers reads the folder.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from nnx_parallel.weights import save_pretrained
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
        trainers = {}
        for label, strategy in STRATEGIES.items():
            trainers[label] = Trainer(
                model.from_pretrained(folder),
                optax.sgd(0.01, momentum=0.9),
                next_token_loss,
                strategy=strategy,
                loggers=(),
            )
            tokens = np.concatenate([golden["tokens"]] * rows)
            logits = trainers[label].predict([tokens])
            table.add(f"{label}: {name}", difference(logits, expected))
        if all(map(importlib.util.find_spec, ("torch", "transformers"))):
            _compare_with_transformers(table, name, folder, trainers["FSDP"])
        content = json.loads((folder / "config.json").read_text())
        config = model.config_type(**read_fields(content, model.families)[1])
        (architecture,) = write_settings(config, model.families)["architectures"]
        table.add(f"written as: {name}", architecture)
        presets = len(family_of(config, model.families).presets)
        table.add(f"presets: {name}", presets)
    return table


def difference(found: np.ndarray, expected: np.ndarray) -> str:
    """Returns the largest difference, relative to the largest expected value."""
    return f"{np.abs(found - expected).max() / np.abs(expected).max():.0e}"


def _compare_with_transformers(
    table: Table, name: str, folder: Path, trainer: Any
) -> None:
    """Adds the differences for 400 tokens, and after three steps and an export."""
    config = trainer.model.config
    is_limited = getattr(config, "positions", None) == "learned"
    length = config.seq_len if is_limited else 400
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (jax.device_count(), length), np.int32)
    expected = _logits_of_transformers(folder, tokens)
    before = trainer.predict([tokens])
    table.add(f"400 tokens: {name}", difference(before, expected))
    trainer.fit([tokens[:, :25]] * 3, 3)
    with TemporaryDirectory() as written:
        save_pretrained(written, trainer.model, source=folder)
        expected = _logits_of_transformers(Path(written), tokens)
    after = trainer.predict([tokens])
    if np.abs(after - before).max() < 1e-4 * np.abs(before).max():
        raise ValueError(f"Training did not change the logits of {name}.")
    table.add(f"trained and exported: {name}", difference(after, expected))


def _logits_of_transformers(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Computes logits with PyTorch, from exactly the arrays of the folder."""
    torch: Any = importlib.import_module("torch")
    # transformers has no class for `kimi_k2`; config.json names DeepSeek V3's class.
    settings = json.loads((folder / "config.json").read_text())
    (architecture,) = settings.pop("architectures")
    written: Any = getattr(importlib.import_module("transformers"), architecture)
    del settings["model_type"]
    model, report = written.from_pretrained(
        folder,
        config=written.config_class(**settings),
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    if any(report.values()):
        raise ValueError(f"Arrays of {folder} do not match transformers: {report}.")
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens).long()).logits.numpy()
