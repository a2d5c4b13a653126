"""Families of language models: logits of folders by transformers beside its logits.

The folders and the logits are in `tests/goldens`; `make_goldens.py` there writes them
with transformers. Each folder has a small model with the unusual settings of its
family. A difference is relative to the largest logit. With torch and transformers, two
columns more compare 400 tokens (128 learned positions of GPT-2), and a model that was
trained for three steps and written as a folder, which transformers reads.
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
        if importlib.util.find_spec("transformers") is not None:
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
    table.add(f"400 tokens: {name}", difference(trainer.predict([tokens]), expected))
    trainer.fit([tokens[:, :25]] * 3, 3)
    with TemporaryDirectory() as written:
        save_pretrained(written, trainer.model, source=folder)
        expected = _logits_of_transformers(Path(written), tokens)
    found = difference(trainer.predict([tokens]), expected)
    table.add(f"trained and exported: {name}", found)


def _logits_of_transformers(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Computes logits with PyTorch; the folder must have exactly its arrays."""
    torch: Any = importlib.import_module("torch")
    auto: Any = importlib.import_module("transformers").AutoModelForCausalLM
    model, report = auto.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    if any(report.values()):
        raise ValueError(f"transformers does not read {folder} completely: {report}.")
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens).long()).logits.numpy()
