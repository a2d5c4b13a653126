"""Fine-tuning gives the numbers of a training loop in PyTorch, under every strategy.

`tests/goldens/make_tuning.py` has the loop, with models of transformers and adapters of
PEFT, and wrote the losses and changes that the first test expects.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.models import GPT, next_token_loss
from nnx_parallel.optimizers import decay_mask
from nnx_parallel.weights import load_adapters, save_adapters, save_pretrained
from tests.folders import GOLDENS, content
from tests.goldens import make_tuning

pytestmark = pytest.mark.long

EXPECTED = json.loads(make_tuning.FILE.read_text())
STRATEGIES: dict[str, Strategy] = {
    "one device": DataParallel(1),
    "fsdp": FSDP(8, min_size=0),
    "tensor": Composite(TensorParallel(2), FSDP(4, min_size=0)),
}
QUICK = [
    ("gpt2 adamw", "tensor"),
    ("llama sgd", "fsdp"),
    ("llama adapters adamw", "tensor"),
    ("llama adapters sgd", "fsdp"),
    ("qwen3 adamw", "one device"),
]
LIMITS = {"adamw": 1e-4, "sgd": 1e-5}
"""Largest difference of losses. For an array it is relative to its largest element, or
to 0.1 if all elements are smaller."""


def optimizer(run: dict[str, Any], wrt: Any) -> Any:
    if run["optimizer"] == "sgd":
        return optax.sgd(run["rate"], make_tuning.MOMENTUM)
    settings: dict[str, Any] = dict(make_tuning.ADAMW)
    rate, (b1, b2) = settings.pop("lr"), settings.pop("betas")

    def build(model: nnx.Module) -> optax.GradientTransformation:
        return optax.adamw(rate, b1, b2, mask=decay_mask(model, wrt), **settings)

    return build


def train(
    name: str, strategy: str, target: Path
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the losses, and the written arrays."""
    run, placed = make_tuning.RUNS[name], STRATEGIES[strategy]
    model: Any = GPT.from_pretrained(GOLDENS / run["folder"], dtype="float32")
    wrt = nnx.Param
    if "adapters" in run:
        model, wrt = load_adapters(model, GOLDENS / run["adapters"]), nnx.LoRAParam
    trainer = Trainer(
        model,
        optimizer(run, wrt),
        next_token_loss,
        strategy=placed,
        devices=jax.devices()[: 1 if strategy == "one device" else 8],
        wrt=wrt,
        loggers=(),
    )
    history = trainer.fit(list(make_tuning.batches()), make_tuning.NUM_STEPS)
    if "adapters" in run:
        save_adapters(target, trainer.model, base=run["folder"])
    else:
        save_pretrained(target, trainer.model)
    return np.asarray(history["loss"]), content(target)


@cache
def before(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays at the start, by their names in files."""
    run = make_tuning.RUNS[name]
    found = content(GOLDENS / run.get("adapters", run["folder"]))
    return {path: x.astype(np.float32) for path, x in found.items()}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(n, s, marks=() if (n, s) in QUICK else pytest.mark.deep)
        for n in make_tuning.RUNS
        for s in STRATEGIES
    ],
)
def test_training_matches_pytorch(name: str, strategy: str, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    limit = LIMITS[make_tuning.RUNS[name]["optimizer"]]
    losses, after = train(name, strategy, tmp_path / "tuned")
    np.testing.assert_allclose(losses, expected["losses"], atol=limit, rtol=0)
    assert after.keys() == expected["changes"].keys()
    errors = {}
    for path, x in after.items():
        found = make_tuning.summary(x - before(name)[path])
        theirs = expected["changes"][path]
        # A difference of `limit` in each element changes a product by about this.
        most = limit * max(np.abs(x).max(), 0.1) * x.size**0.5
        errors[path] = np.abs(np.subtract(found, theirs)).max() / most
    assert {path: error for path, error in errors.items() if not error <= 1} == {}


# PEFT 0.21 uses a property that transformers 5.24 renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is dep:FutureWarning")
@pytest.mark.parametrize("name", make_tuning.RUNS)
def test_training_matches_pytorch_array_by_array(name: str, tmp_path: Path) -> None:
    for library in ("torch", "transformers", "peft"):
        pytest.importorskip(library)
    run = make_tuning.RUNS[name]
    limit = LIMITS[run["optimizer"]]
    expected_losses, start, expected = make_tuning.train(**run)
    losses, after = train(name, "tensor", tmp_path / "tuned")
    np.testing.assert_allclose(losses, expected_losses, atol=limit, rtol=0)
    assert after.keys() == expected.keys()
    errors = {}
    for path, x in after.items():
        np.testing.assert_array_equal(before(name)[path], start[path])
        difference = np.abs(x - expected[path]).max()
        errors[path] = difference / max(np.abs(expected[path]).max(), 0.1)
    assert {path: error for path, error in errors.items() if not error <= limit} == {}
