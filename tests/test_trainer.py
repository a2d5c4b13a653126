"""A fit from its first batch to its history, and what can end it early."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Callback, Debugging, Mean, Trainer
from nnx_parallel.distributed import Watchdog
from nnx_parallel.errors import DataError
from nnx_parallel.loggers import JSONLinesLogger, Logger
from nnx_parallel.state import init_state
from nnx_parallel.training.evaluation import Programs
from nnx_parallel.training.step import StepOptions
from tests.parity.runs import to_host
from tests.steps import plan_step

ROWS = 16


class Net(nnx.Module):
    """A linear layer after dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        return self.linear(self.dropout(batch["x"]))


def squares(model: Any, batch: Any) -> tuple[Any, dict]:
    errors = ((model(batch) - batch["y"]) ** 2)[:, 0]
    return errors.mean(), {"largest": errors.max()}


def weighted_squares(model: Any, batch: Any) -> Mean:
    errors = ((model(batch) - batch["y"]) ** 2)[:, 0]
    return Mean((errors * batch["w"]).sum(), batch["w"].sum())


def make_batch(seed: int, rows: int = ROWS) -> dict:
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True), "w": np.abs(x[:, 0])}


def make_batches(count: int) -> list[dict]:
    return [make_batch(seed) for seed in range(count)]


make_trainer = partial(
    Trainer,
    model=Net,
    optimizer=optax.sgd(0.05),
    loss=squares,
    strategy=FSDP(min_size=0),
    loggers=(),
)


class Watch(Callback):
    """Records every call, and stops the fit at one of the calls."""

    def __init__(self, name: str, calls: list, at: tuple | None = None) -> None:
        self.name, self.calls, self.at = name, calls, at

    def note(self, trainer: Trainer, *call: Any) -> None:
        self.calls.append((self.name, *call))
        if call == self.at:
            trainer.stop("seen enough")

    def on_fit_start(self, trainer: Trainer) -> None:
        self.note(trainer, "start", trainer.step)

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        assert {"loss", "grad_norm", "largest", "data_wait_seconds"} <= metrics.keys()
        self.note(trainer, "step", step)

    def on_eval_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        assert metrics.keys() == {"loss", "largest"}
        self.note(trainer, "eval", step)

    def on_fit_end(self, trainer: Trainer, history: Any) -> None:
        self.note(trainer, "end", len(history["step"]))


class Memory(Logger):
    """Keeps all rows of metrics."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.messages: list[str] = []

    def start(self, *, first_step: int, num_steps: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def log(self, step: int, metrics: Any) -> None:
        self.steps.append(step)

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_stop_before_first_hook_ends_fit() -> None:
    class Hasty(Memory):
        def start(self, *, first_step: int, num_steps: int) -> None:
            trainer.stop("before the first hook, as while a checkpoint is restored")

    trainer = make_trainer(loggers=[Hasty()])
    trainer.fit([make_batch(0)] * 2, 2)
    assert trainer.step == 1


# History


def test_history_has_one_entry_per_step() -> None:
    trainer = make_trainer()
    history = trainer.fit(make_batches(5), 5, eval_data=make_batches(2), eval_every=2)
    assert list(history["step"]) == [1, 2, 3, 4, 5]
    assert list(history["eval_step"]) == [2, 4, 5]
    evals = {"eval_step", "eval_loss", "eval_largest"}
    lengths = {name: len(values) for name, values in history.items()}
    assert {lengths.pop(name) for name in evals} == {3}
    assert set(lengths.values()) == {5}
    assert np.isfinite(history["loss"]).all()
    assert history.compile_seconds is not None
    assert history.compile_seconds > 0
    assert "compile_seconds" not in history
    assert np.isnan(history["step_seconds"][0])
    assert (history["examples_per_second"][1:] > 0).all()
    assert "tokens_per_second" not in history


def test_second_fit_continues_to_total_num_steps() -> None:
    batches = make_batches(6)
    expected = make_trainer().fit(batches, 6)
    trainer = make_trainer()
    first, second = trainer.fit(batches, 2), trainer.fit(batches, 6)
    assert trainer.step == 6
    assert list(second["step"]) == [3, 4, 5, 6]
    losses = np.concatenate([first["loss"], second["loss"]])
    np.testing.assert_array_equal(losses, expected["loss"])
    assert trainer.fit(batches, 6) == {}


def test_second_fit_continues_generator() -> None:
    expected = make_trainer().fit(make_batches(4), 4)["loss"]
    trainer, data = make_trainer(), iter(make_batches(4))
    losses = [trainer.fit(data, stop)["loss"] for stop in (2, 4)]
    np.testing.assert_array_equal(np.concatenate(losses), expected)


def test_custom_loop_matches_fit() -> None:
    batches = make_batches(3)
    fitted, own = make_trainer(), make_trainer()
    losses = []
    for batch in batches:
        own.state, metrics = own.train_step(own.state, own.shard_batch(batch))
        losses.append(float(metrics["loss"]))
    np.testing.assert_array_equal(losses, fitted.fit(batches, 3)["loss"])
    assert own.step == 3
    found = own.evaluate(batches)
    assert found == fitted.evaluate(batches)


def test_log_every_does_not_thin_history() -> None:
    memory = Memory()
    trainer = make_trainer(loggers=[memory], log_every=2)
    history = trainer.fit(make_batches(5), 5)
    assert memory.steps == [2, 4]
    assert len(history["loss"]) == 5
    trainer.fit(make_batches(5), 5)
    assert memory.messages[-1] == "All 5 steps are done: nothing to train."
    memory = Memory()
    resumed = make_trainer(loggers=[memory])
    resumed.state = trainer.state
    resumed.fit(make_batches(3), 3)
    found = dict(line.split(maxsplit=1) for line in memory.messages[0].splitlines())
    assert found["step"] == "5 done, and this fit asks for 3"


def test_overfit_batches_repeats_first_batches() -> None:
    batches = make_batches(2)
    expected = make_trainer().fit(batches * 3, 6)
    found = make_trainer(debugging=Debugging(overfit_batches=2)).fit(make_batches(3), 6)
    np.testing.assert_array_equal(found["loss"], expected["loss"])


def test_fast_dev_run_takes_two_steps_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = []
    trainer = make_trainer(
        debugging=Debugging(fast_dev_run=True, profile=(0, 1)),
        checkpoint=tmp_path / "run",
        callbacks=[Watch("a", calls)],
    )
    history = trainer.fit(make_batches(9), 9, eval_data=make_batches(3))
    assert len(history["loss"]) == 2
    assert [call[1:] for call in calls] == [
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("eval", 2),
        ("end", 2),
    ]
    assert list(tmp_path.iterdir()) == []


# Callbacks


def test_callbacks_are_called_in_order() -> None:
    calls = []
    trainer = make_trainer(callbacks=[Watch("a", calls), Watch("b", calls)])
    trainer.fit(make_batches(2), 2, eval_data=make_batches(1), eval_every=1)
    assert calls[::2] == [("a", *call[1:]) for call in calls[1::2]]
    assert [call[1:] for call in calls[::2]] == [
        ("start", 0),
        ("step", 1),
        ("eval", 1),
        ("step", 2),
        ("eval", 2),
        ("end", 2),
    ]


def test_callbacks_from_iterator_run_at_every_hook() -> None:
    calls: list[tuple] = []
    watches: Any = (watch for watch in [Watch("a", calls)])
    trainer = make_trainer(callbacks=watches)
    trainer.fit(make_batches(2), 2)
    steps = [("start", 0), ("step", 1), ("step", 2), ("end", 2)]
    assert [call[1:] for call in calls] == steps


@pytest.mark.parametrize("at", [("step", 2), ("eval", 2), ("start", 0)])
def test_callback_stop_evaluates_and_saves(at: tuple, tmp_path: Path) -> None:
    calls, memory = [], Memory()
    trainer = make_trainer(
        callbacks=[Watch("a", calls, at)], loggers=[memory], checkpoint=tmp_path
    )
    history = trainer.fit(make_batches(8), 8, eval_data=make_batches(1), eval_every=2)
    step = trainer.step
    assert step <= at[1] + 2
    if at[0] == "eval":
        assert step == 2
    assert history["eval_step"][-1] == step
    assert calls.count(("a", "eval", step)) == 1
    assert memory.messages[-1] == f"Stopped at step {step}: seen enough"
    assert (tmp_path / str(step)).is_dir()
    trainer.fit(make_batches(8), step + 1)
    assert trainer.step == step + 1


# Evaluation and prediction


def norm(trainer: Trainer) -> float:
    return float(optax.tree.norm(trainer.state.params))


class Norms(Callback):
    """Logs a norm every three steps."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        if step % 3 == 0:
            trainer.log({"norm": norm(trainer)})


def test_callback_logs_numbers_of_newest_step(tmp_path: Path) -> None:
    batches, file = make_batches(7), tmp_path / "metrics.jsonl"
    loggers = (JSONLinesLogger(file),)
    trainer = make_trainer(callbacks=(Norms(),), loggers=loggers)
    history = trainer.fit(batches, num_steps=7)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = {row["step"]: row["norm"] for row in rows if "norm" in row}
    # The metrics of step 3 arrive two steps later, and those of step 6 at the end.
    shorter = make_trainer()
    shorter.fit(batches, num_steps=5)
    assert found == pytest.approx({5: norm(shorter), 7: norm(trainer)})
    assert "norm" not in history
    trainer.log({"norm": 0.0})  # the fit is over, so nothing is logged
    assert len(file.read_text().splitlines()) == len(rows)


def model_arrays(trainer: Trainer) -> dict:
    return {"params": trainer.state.params, "variables": trainer.state.variables}


def rows_of(batches: list[dict]) -> dict:
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


@pytest.fixture(scope="module")
def ragged() -> list[dict]:
    """Batches of 16 rows, 7 rows and 1 row."""
    return [make_batch(0), make_batch(1, rows=7), make_batch(2, rows=1)]


def test_evaluation_covers_all_rows_without_dropout(ragged: list[dict]) -> None:
    trainer = make_trainer()
    trainer.fit(make_batches(2), 2)
    before = to_host(model_arrays(trainer))
    found = trainer.evaluate(ragged)
    rows = rows_of(ragged)
    linear = trainer.model.linear  # pyright: ignore[reportAttributeAccessIssue]
    kernel, bias = np.asarray(linear.kernel[...]), np.asarray(linear.bias[...])
    errors = (rows["x"] @ kernel + bias[None] - rows["y"]) ** 2
    np.testing.assert_allclose(found["loss"], errors.mean(), rtol=1e-5)
    assert trainer.evaluate(ragged) == found
    after = to_host(model_arrays(trainer))
    assert all(after[path].tobytes() == x.tobytes() for path, x in before.items())
    weighted = make_trainer(loss=weighted_squares, model=trainer.model)
    np.testing.assert_allclose(
        weighted.evaluate(ragged)["loss"],
        np.average(errors[:, 0], weights=rows["w"]),
        rtol=1e-5,
    )


def test_predict_covers_all_rows(ragged: list[dict]) -> None:
    trainer = make_trainer()
    found = trainer.predict(ragged)
    assert isinstance(found, np.ndarray)
    expected = trainer.model(rows_of(ragged))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    def named(model: Any, batch: Any) -> dict:
        return {"out": 2 * model(batch), "x": batch["x"]}

    outputs = trainer.predict(iter(ragged), named)
    np.testing.assert_allclose(outputs["out"], 2 * found, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs["x"], rows_of(ragged)["x"])


def test_ema_argument_selects_parameters(ragged: list[dict]) -> None:
    trainer = make_trainer(ema_decay=0.5)
    trainer.fit(make_batches(3), 3)
    averaged = trainer.evaluate(ragged, ema=True)
    assert averaged == trainer.evaluate(ragged) != trainer.evaluate(ragged, ema=False)
    expected = make_trainer(model=trainer.ema_model).evaluate(ragged)
    np.testing.assert_allclose(averaged["loss"], expected["loss"], rtol=1e-6)
    averaged, trained = (trainer.predict(ragged, ema=ema) for ema in (True, False))
    assert (averaged != trained).any()
    np.testing.assert_array_equal(trainer.predict(ragged), averaged)
    message = "This Trainer keeps no average. Pass ema_decay=0.999."
    for verb in ("evaluate", "predict"):
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(make_trainer(), verb)(ragged, ema=True)


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_empty_data_raises(verb: str) -> None:
    with pytest.raises(DataError, match="the data is empty"):
        getattr(make_trainer(), verb)([])


def test_watchdog_pauses_while_evaluation_compiles() -> None:
    """The watchdog pauses before new batch shapes, and restarts at other batches."""
    plan = plan_step(Net, FSDP())
    programs = Programs(plan=plan, loss=squares, options=StepOptions())
    state = init_state(plan, Net, nnx.Rngs(0), 0)
    data = [make_batch(0), make_batch(1), make_batch(2, rows=7), make_batch(3)]

    class Clock(Watchdog):
        def __init__(self) -> None:
            super().__init__(None)
            self.events: list[str] = []

        def arm(self, step: int, awaited: str = "step") -> None:
            self.events.append("start")

        def disarm(self) -> None:
            self.events.append("stop")

    def evaluate() -> list[str]:
        clock = Clock()
        programs.evaluate(state, data, watchdog=clock)
        return clock.events

    assert evaluate() == ["start", "stop", *["start"] * 2, "stop", *["start"] * 2]
    assert evaluate() == ["start"] * 5
