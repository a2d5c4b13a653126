"""Folders of weights for tests: the goldens, Trainers on them, and their content."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from safetensors import safe_open

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    TensorParallel,
    Trainer,
)
from nnx_parallel.models import next_token_loss

GOLDENS = Path(__file__).parent / "goldens"
STRATEGIES: dict[str, Callable] = {
    "one device": lambda: DataParallel(1),
    "fsdp": FSDP,
    "tp": lambda: Composite(TensorParallel(2), FSDP()),
    "pipeline": lambda: Composite(Pipeline(2), FSDP()),
}


def make_trainer(model: Any, strategy: str = "fsdp", **options: Any) -> Trainer:
    one = strategy == "one device"
    return Trainer(
        model,
        optax.sgd(0.1),
        next_token_loss,
        strategy=STRATEGIES[strategy](),
        devices=jax.devices()[:1] if one else jax.devices(),
        num_microbatches=2 if strategy == "pipeline" else 1,
        loggers=(),
        **options,
    )


def content(folder: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a folder, read by the package safetensors."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="flax") as file:
            names = file.keys()
            found |= {name: np.asarray(file.get_tensor(name)) for name in names}
    return found


def check_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == array.tobytes(), name
