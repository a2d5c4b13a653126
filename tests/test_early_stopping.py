"""Early stopping: its decisions, and the same decisions in a resumed run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import Callback, Checkpoint, EarlyStopping, Evaluation, Trainer

BATCH = {"x": np.ones((8, 4), np.float32), "score": np.zeros(8, np.float32)}


class Scores:
    """Evaluation data. Each pass yields one batch, which holds the next score."""

    def __init__(self, *scores: float) -> None:
        self.left = [*scores]

    def __iter__(self) -> Iterator[Any]:
        yield BATCH | {"score": np.full(8, self.left.pop(0), np.float32)}


def loss(model: Any, batch: Any) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


def score(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    return batch["score"].mean(), {"accuracy": -batch["score"].mean()}


def make_trainer(*callbacks: Callback, directory: Path | None = None) -> Trainer:
    return Trainer(
        lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        optax.sgd(0.0),
        loss,
        evaluation=Evaluation(loss=score),
        callbacks=callbacks,
        checkpoint=directory and Checkpoint(directory, every=1),
        loggers=(),
    )


def fit(trainer: Trainer, num_steps: int, *scores: float) -> int:
    data = Scores(*scores)
    trainer.fit([BATCH] * 20, num_steps, eval_data=data, eval_every=1)
    return trainer.step


def test_fit_ends_after_patience_is_exhausted(tmp_path: Path) -> None:
    stopping = EarlyStopping(patience=2)
    trainer = make_trainer(stopping, directory=tmp_path)
    assert fit(trainer, 9, 3.0, 2.0, 2.5, float("nan"), 1.0) == 4
    assert (stopping.best, stopping.best_step, stopping.num_since) == (2.0, 2, 2)
    # A new process with the same program stops at once, without an evaluation.
    again = EarlyStopping(patience=2)
    assert fit(make_trainer(again, directory=tmp_path), 9) == 4
    assert again.best == 2.0
    # With more patience, the run continues.
    patient = EarlyStopping(patience=3)
    assert fit(make_trainer(patient, directory=tmp_path), 9, 2.1, 1.0) == 5


def test_resumed_run_stops_at_same_step(tmp_path: Path) -> None:
    class Other(Callback):
        """Has no state. The other callbacks must still get back their saved states."""

    first = EarlyStopping(patience=2), EarlyStopping("eval_accuracy", mode="max")
    assert fit(make_trainer(*first, directory=tmp_path), 3, 3.0, 2.0, 2.5) == 3
    both = EarlyStopping(patience=2), EarlyStopping("eval_accuracy", mode="max")
    trainer = make_trainer(Other(), *both, directory=tmp_path)
    assert fit(trainer, 9, 2.4, 1.0) == 4
    assert (both[0].best, both[1].best, both[1].num_since) == (2.0, -2.0, 2)
    # A restore of only the weights does not restore callbacks.
    fresh = EarlyStopping(patience=2)
    trainer = make_trainer(fresh)
    trainer.restore(directory=tmp_path, weights_only=True)
    assert fresh.best is None
    trainer.restore(directory=tmp_path)
    assert fresh.best == 2.0


def test_min_delta_and_mode_define_improvement() -> None:
    fine = EarlyStopping(patience=1, min_delta=0.5)
    assert [fine.observe(i, x) for i, x in enumerate((3, 2.4, 2.0))] == [0, 0, 1]
    large = EarlyStopping("eval_accuracy", mode="max", patience=1, min_delta=0.1)
    assert [large.observe(i, x) for i, x in enumerate((0.5, 0.7, 0.79))] == [0, 0, 1]
    # A criterion on a training metric is checked at each step. Rate 0 keeps the loss
    # constant.
    stopping = EarlyStopping("loss", patience=2)
    trainer = make_trainer(stopping)
    trainer.fit([BATCH] * 20, 20)
    # Metrics arrive up to two steps late.
    assert trainer.step <= 5
    assert stopping.best_step == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "EarlyStopping(patience=0): it must be an int of at least 1"),
        ({"min_delta": -1.0}, "EarlyStopping(min_delta=-1.0): it must be at least 0."),
        ({"mode": "up"}, "EarlyStopping(mode='up'): it must be 'min', 'max' or None."),
        ({"metric": "eval_accuracy"}, "would stop while the values grow. Say which"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        EarlyStopping(**arguments)


def test_missing_eval_data_or_metric_raises() -> None:
    trainer = make_trainer(EarlyStopping())
    with pytest.raises(ValueError, match="needs evaluations: pass eval_data and eval_"):
        trainer.fit([BATCH] * 2, 2)
    with pytest.raises(
        ValueError, match=r"no such metric at step 1. Metrics of an eval.*loss"
    ):
        fit(make_trainer(EarlyStopping("eval_perplexity")), 3, 1.0)
