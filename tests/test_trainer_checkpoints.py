"""An interrupted run continues as if it had not been interrupted."""

import os
import re
import signal
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import multihost_utils

from nnx_parallel import (
    FSDP,
    Callback,
    Checkpoint,
    DataParallel,
    Debugging,
    Evaluation,
    Trainer,
)
from nnx_parallel.checkpoint import CheckpointManager, CheckpointReader, reader
from nnx_parallel.data import DataState
from nnx_parallel.distributed import PREEMPTED, Watchdog
from nnx_parallel.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
    DataError,
    DataExhaustedError,
    DisagreementError,
    ParallelWarning,
)
from nnx_parallel.loggers import JSONLinesLogger
from nnx_parallel.training.loop import Loop
from tests.parity.runs import to_host

pytestmark = pytest.mark.long


class Net(nnx.Module):
    """A linear layer after statistics and dropout."""

    def __init__(self, rngs: nnx.Rngs, width: int = 8) -> None:
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.linear = nnx.Linear(8, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.dropout(self.norm(x)))


def squares(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["x"].sum(1, keepdims=True)) ** 2).mean()


def make_trainer(checkpoint: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "model": Net,
        "optimizer": optax.adam(0.01),
        "strategy": FSDP(min_size=0),
        "loggers": (),
    }
    return Trainer(loss=squares, checkpoint=checkpoint, **(settings | options))


def make_batches(count: int) -> list[dict]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(16, 8)).astype(np.float32)} for _ in range(count)]


def arrays(trainer: Trainer) -> dict:
    state = trainer.state
    return to_host({"params": state.params, "variables": state.variables})


def assert_same_bits(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert [p for p, x in found.items() if x.tobytes() != expected[p].tobytes()] == []


def saved_steps(directory: Path) -> set[int]:
    return {int(path.name) for path in directory.iterdir() if path.name.isdigit()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, np.ndarray]:
    """A directory with steps 2 and 3 of a run; arrays and losses of all 6 steps."""
    directory = tmp_path_factory.mktemp("run")
    interrupted = make_trainer(Checkpoint(directory, every=2), ema_decay=0.9)
    interrupted.fit(make_batches(6), 3)
    whole = make_trainer(ema_decay=0.9)
    losses = whole.fit(make_batches(6), 6)["loss"]
    return directory, arrays(whole), losses


def test_fit_saves_periodically_and_at_end(run: tuple) -> None:
    assert saved_steps(run[0]) == {2, 3}


def test_fit_saves_by_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each batch takes a minute on the fake clock."""
    clock = 0.0
    fake = SimpleNamespace(monotonic=lambda: clock)
    monkeypatch.setattr("nnx_parallel.checkpoint.manager.time", fake)

    class Slow:
        def __iter__(self) -> Iterator[Any]:
            nonlocal clock
            for batch in make_batches(9):
                clock += 60
                yield batch

    every = timedelta(minutes=3)
    trainer = make_trainer(Checkpoint(tmp_path, every=every, keep_last=None))
    trainer.fit(Slow(), 9)
    assert saved_steps(tmp_path) == {4, 7, 9}
    found = vars(trainer)["_run"].facts()["checkpoints"]
    assert found.endswith(", every 3 minutes and at the end")


def test_fresh_trainer_resumes_automatically(run: tuple, tmp_path: Path) -> None:
    directory, expected, losses = run
    trainer = make_trainer(Checkpoint(directory, every=100), ema_decay=0.9)
    assert trainer.step == 3
    history = trainer.fit(make_batches(6), 6)
    assert list(history["step"]) == [4, 5, 6]
    np.testing.assert_array_equal(history["loss"], losses[3:])
    assert_same_bits(arrays(trainer), expected)
    assert 6 in saved_steps(directory)


class Stopping(Callback):
    """Ends a fit at each of the given steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_eval_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        if step in self.steps:
            trainer.stop("enough")


@pytest.mark.parametrize(
    ("asked", "done", "stop"), [(4, 4, 4), (4, 4, 6), (6, 4, 6), (5, 4, 6)]
)
def test_run_of_two_fits_resumes_in_each(
    asked: int, done: int, stop: int, tmp_path: Path
) -> None:
    """The first fit may have ended early."""
    first, second = make_batches(12)[:6], make_batches(12)[6:]
    evaluates: dict[str, Any] = {"eval_data": first[:1], "eval_every": 1}

    def make(directory: Path | None, *stops: int) -> Trainer:
        checkpoint = directory and Checkpoint(directory, every=2)
        return make_trainer(checkpoint, callbacks=[Stopping(*stops)])

    whole = make(None, done)
    whole.fit(first, asked, **evaluates)
    expected = whole.fit(second, 8, **evaluates)["loss"]

    stopped = make(tmp_path, done, stop)
    stopped.fit(first, asked, **evaluates)
    if stop > done:
        stopped.fit(second, 8, **evaluates)

    resumed = make(tmp_path)
    assert resumed.fit(first, asked, **evaluates) == {}
    losses = resumed.fit(second, 8, **evaluates)["loss"]
    np.testing.assert_array_equal(losses, expected[stop - done :])


def test_resumed_fit_skips_used_generator_batches(tmp_path: Path) -> None:
    batches = make_batches(6)
    whole = make_trainer()
    expected = whole.fit(batches, 6)["loss"]
    make_trainer(Checkpoint(tmp_path)).fit(batches, 4)

    resumed, stream = make_trainer(Checkpoint(tmp_path)), iter(batches)
    resumed.fit(stream, 4)
    with pytest.warns(UserWarning, match="its next 4 batches are skipped"):
        losses = resumed.fit(stream, 6)["loss"]
    np.testing.assert_array_equal(losses, expected[4:])


@pytest.mark.parametrize("weights_only", [False, True])
def test_fine_tuned_run_resumes_from_its_checkpoints(
    run: tuple, tmp_path: Path, *, weights_only: bool
) -> None:
    def tuned(steps: int) -> Trainer:
        trainer = make_trainer(Checkpoint(tmp_path, every=2), ema_decay=0.9)
        trainer.restore(2, directory=run[0], weights_only=weights_only)
        trainer.fit(make_batches(6), steps)
        return trainer

    assert saved_steps(tmp_path) == set()
    tuned(3)
    resumed = tuned(6)

    (tmp_path / "whole").mkdir()
    whole = make_trainer(Checkpoint(tmp_path / "whole"), ema_decay=0.9)
    whole.restore(2, directory=run[0], weights_only=weights_only)
    whole.fit(make_batches(6), 6)
    assert_same_bits(arrays(resumed), arrays(whole))


class Interrupted:
    """Evaluation batches; a SIGTERM arrives with the second."""

    def __init__(self) -> None:
        self.num_taken = 0

    def __iter__(self) -> Iterator[dict]:
        for batch in make_batches(9):
            self.num_taken += 1
            if self.num_taken == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


def test_sigterm_ends_evaluation(tmp_path: Path) -> None:
    data = Interrupted()
    trainer = make_trainer(Checkpoint(tmp_path, every=100))
    with pytest.raises(SystemExit) as ended:
        trainer.fit(make_batches(4), 4, eval_data=data, eval_every=2)
    assert ended.value.code == PREEMPTED
    assert saved_steps(tmp_path) == {2}
    assert data.num_taken < 9


def test_failed_evaluation_loses_no_steps(tmp_path: Path) -> None:
    class Broken:
        def __iter__(self) -> Iterator[dict]:
            raise OSError("the disk is gone")

    trainer = make_trainer(Checkpoint(tmp_path, every=100))
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(make_batches(4), 4, eval_data=Broken(), eval_every=2)
    assert saved_steps(tmp_path) == {2}
    resumed = make_trainer(tmp_path)
    resumed.fit(make_batches(4), 4)
    expected = make_trainer()
    expected.fit(make_batches(4), 4)
    assert_same_bits(arrays(resumed), arrays(expected))


def test_refused_data_keeps_position(tmp_path: Path) -> None:
    make_trainer(tmp_path).fit(make_batches(2), 2)
    resumed, expected = make_trainer(tmp_path), make_trainer()
    batches = make_batches(4)
    with pytest.raises(DataError, match="Data is one dict"):
        resumed.fit(batches[0], 4)
    with pytest.raises(DataExhaustedError, match="list gave 3 batches"):
        resumed.fit(batches[:3], 4)
    resumed.fit(batches, 4)
    expected.fit(batches, 4)
    assert_same_bits(arrays(resumed), arrays(expected))


def test_only_weights_can_be_restored_within_fit(tmp_path: Path) -> None:
    class RollBack(Callback):
        def __init__(self, **options: Any) -> None:
            self.options = options

        def on_eval_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == 4:
                trainer.restore(step=2, **self.options)

    def fit(callback: Callback) -> Trainer:
        trainer = make_trainer(Checkpoint(tmp_path, every=2), callbacks=(callback,))
        trainer.fit(make_batches(6), 6, eval_data=make_batches(1), eval_every=2)
        return trainer

    message = "restore() was called in the middle of a fit, which counts its steps"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        fit(RollBack())
    assert saved_steps(tmp_path) == {2, 4}  # the fit saves before the error ends it
    assert fit(RollBack(weights_only=True)).step == 6


def test_numpy_integers_are_valid_counts(tmp_path: Path) -> None:
    counts = {"num_microbatches": np.int64(2), "seed": np.int64(3)}
    make_trainer(tmp_path, **counts).fit(make_batches(2), np.int64(2))  # pyright: ignore[reportArgumentType]
    resumed = make_trainer(tmp_path, **counts)
    resumed.fit(make_batches(4), 4)
    assert resumed.step == 4


def test_jax_preemption_notice_ends_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX may receive a SIGTERM before the fit installs its handler."""
    service = "reached_preemption_sync_point"
    monkeypatch.setattr(multihost_utils, service, lambda step: step == 2)
    trainer = make_trainer(Checkpoint(tmp_path, every=100))
    with pytest.raises(SystemExit) as ended:
        trainer.fit(make_batches(4), 4)
    assert ended.value.code == PREEMPTED
    assert saved_steps(tmp_path) == {2}


def test_watchdog_restarts_after_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    monkeypatch.setattr(Watchdog, "arm", lambda self, step, *_: events.append(step))
    monkeypatch.setattr(Watchdog, "disarm", lambda self: events.append("off"))
    make_trainer(Checkpoint(tmp_path, every=1)).fit(make_batches(3), 3)
    expected = [1, "off", 1, 2, "off", 2, 3, "off"]
    assert events[: len(expected)] == expected
    assert set(events[len(expected) :]) <= {"off"}


def test_different_checkpoints_on_processes_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(Checkpoint(tmp_path, every=2)).fit(make_batches(4), 4)
    seen = [[[2, 4], []], [[2], [3]]]
    monkeypatch.setattr(reader, "allgather_object", lambda name, mine: seen)
    message = (
        f"Processes 0 and 1 see different checkpoints in '{tmp_path}': steps [2, 4] "
        "and [2] (and [3], which are corrupt). Choose a directory that all machines "
        "share. If they already share this one, its listing was out of date: start "
        "again."
    )
    with pytest.raises(DisagreementError, match=re.escape(message)):
        make_trainer(Checkpoint(tmp_path)).fit(make_batches(4), 4)


def test_fit_into_directory_of_loaded_weights_raises(tmp_path: Path) -> None:
    make_trainer(Checkpoint(tmp_path)).fit(make_batches(2), 2)
    trainer = make_trainer(Checkpoint(tmp_path))
    trainer.restore(directory=tmp_path, weights_only=True)
    with pytest.raises(CheckpointError, match="is at step 0 and would write"):
        trainer.fit(make_batches(4), 4)


def test_save_by_hook_records_metrics(tmp_path: Path) -> None:
    class Saving(Callback):
        def on_eval_end(self, trainer: Any, step: int, metrics: Any) -> None:
            trainer.save()

    def make() -> Trainer:
        options = Checkpoint(tmp_path, every=2, keep_best="eval_loss")
        return make_trainer(options, callbacks=[Saving()])

    trainer = make()
    trainer.fit(make_batches(4), 4, eval_data=make_batches(1), eval_every=2)
    found = trainer.evaluate(make_batches(1))["loss"]
    best = make()
    best.restore("best")
    assert best.step in {2, 4}
    assert best.evaluate(make_batches(1))["loss"] <= found


def test_restore_returns_to_given_step(run: tuple) -> None:
    directory, _, losses = run
    trainer = make_trainer(ema_decay=0.9, strategy=DataParallel())
    trainer.restore(2, directory=directory)
    assert trainer.step == 2
    history = trainer.fit(make_batches(6), 4)
    np.testing.assert_allclose(history["loss"], losses[2:4], rtol=1e-5)


def test_restoring_only_weights_keeps_optimizer_and_step(run: tuple) -> None:
    saved = make_trainer(ema_decay=0.9)
    saved.restore(2, directory=run[0])
    trainer = make_trainer(ema_decay=0.5, optimizer=optax.sgd(0.1), seed=3)
    trainer.restore(2, directory=run[0], weights_only=True)
    assert trainer.step == 0
    assert_same_bits(arrays(trainer), arrays(saved))
    assert_same_bits(to_host(trainer.state.ema), to_host(trainer.state.params))
    history = trainer.fit(make_batches(2), 1)
    assert list(history["step"]) == [1]


def test_fresh_run_in_used_directory_raises(run: tuple) -> None:
    directory = run[0]
    message = (
        f"'{directory}' holds checkpoints of steps {sorted(saved_steps(directory))}, "
        "but resume=False asks for a fresh run. Choose another directory, remove this "
        "one, or leave resume=True."
    )
    trainer = make_trainer(Checkpoint(directory, resume=False), ema_decay=0.9)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        trainer.fit(make_batches(1), 1)


def test_missing_step_raises(run: tuple) -> None:
    with pytest.raises(CheckpointNotFoundError, match="No checkpoint for step 7 in"):
        make_trainer(ema_decay=0.9).restore(7, directory=run[0])


def test_mismatched_model_raises_and_keeps_values(run: tuple) -> None:
    trainer = make_trainer(model=lambda rngs: Net(rngs, width=16), ema_decay=0.9)
    before = arrays(trainer)
    with pytest.raises(CheckpointMismatchError, match=re.escape("linear.kernel")):
        trainer.restore(directory=run[0])
    assert_same_bits(arrays(trainer), before)


def test_manual_save_and_restore_round_trip(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    batch = trainer.shard_batch(make_batches(1)[0])
    trainer.state, _ = trainer.train_step(trainer.state, batch)
    trainer.save()
    expected = arrays(trainer)
    trainer.state, _ = trainer.train_step(trainer.state, batch)
    trainer.restore()
    assert trainer.step == 1
    assert_same_bits(arrays(trainer), expected)


@pytest.mark.parametrize("verb", ["save", "restore"])
def test_trainer_without_directory_raises(verb: str) -> None:
    message = "This Trainer has no checkpoint directory. Pass checkpoint='runs/name'."
    with pytest.raises(CheckpointNotFoundError, match=re.escape(message)):
        getattr(make_trainer(), verb)()


def test_best_step_by_evaluation_is_kept(tmp_path: Path) -> None:
    options = Checkpoint(tmp_path, every=1, keep_last=1, keep_best="eval_loss")
    trainer = make_trainer(options, optimizer=optax.sgd(0.0), seed=1)
    # Only the statistics change, so the evaluation loss has its minimum in between.
    history = trainer.fit(make_batches(6), 6, eval_data=make_batches(1), eval_every=1)
    best = int(history["eval_step"][np.argmin(history["eval_loss"])])
    assert saved_steps(tmp_path) == {best, 6}


def test_unknown_keep_best_warns_before_first_save(tmp_path: Path) -> None:
    class Failing(Callback):
        """Ends the fit at its third step, long before a save."""

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == 3:
                raise RuntimeError("third step")

    def fit(keep_best: str, **evaluation: Any) -> list[str]:
        options = Checkpoint(tmp_path / keep_best, keep_best=keep_best)
        trainer = make_trainer(options, callbacks=[Failing()])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with pytest.raises(RuntimeError, match="third step"):
                trainer.fit(make_batches(5), 5, **evaluation)
        said = [w for w in found if issubclass(w.category, ParallelWarning)]
        assert {w.filename for w in said} <= {__file__}
        return [str(w.message) for w in said]

    message = "keep_best='los' is not among the metrics of step 1. A checkpoint without"
    (said,) = fit("los")
    assert said.startswith(message)
    assert "'loss'" in said
    (said,) = fit("eval_loss")
    assert "the metrics of a fit without eval_data. A checkpoint" in said
    evaluation = {"eval_data": make_batches(1), "eval_every": 2}
    (said,) = fit("eval_los", **evaluation)
    assert "the metrics of step 2. " in said
    assert fit("grad_norm") == []
    assert fit("eval_loss", **evaluation) == []


def test_evaluation_is_saved_despite_logging_error(tmp_path: Path) -> None:
    class Failing(JSONLinesLogger):
        def log(self, step: int, metrics: Any) -> None:
            if "eval_loss" in metrics:
                raise OSError("the service is gone")

    logger = Failing(tmp_path / "metrics.jsonl")
    options = Checkpoint(tmp_path / "run", keep_best="eval_loss")
    trainer = make_trainer(options, loggers=[logger])
    with pytest.raises(OSError, match="the service is gone"):
        trainer.fit(make_batches(2), 2, eval_data=make_batches(1))
    trainer.restore("best")
    assert trainer.step == 2


def test_resumed_fit_reads_data_from_start(tmp_path: Path) -> None:
    batches = make_batches(4)
    make_trainer(tmp_path).fit(batches, 2)
    seen = []

    class Spy:
        def __iter__(self) -> Iterator[dict]:
            for index, batch in enumerate(batches):
                seen.append(index)
                yield batch

    make_trainer(tmp_path).fit(Spy(), 4)
    assert seen == [0, 1, 2, 3]


def save_and_wait(manager: CheckpointManager, trainer: Trainer, step: int) -> None:
    manager.save(trainer.state, step, {}, {})
    manager.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_exit_message_names_saved_step(asynchronous: bool, tmp_path: Path) -> None:
    options = Checkpoint(
        tmp_path / "run", on_save_error="warn", asynchronous=asynchronous
    )
    manager = CheckpointManager(options)
    trainer = make_trainer(checkpoint=options)
    save_and_wait(manager, trainer, 3)
    assert "Saved step 3 in" in manager.exit_message(5)
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").write_text("no directory")
    with pytest.warns(UserWarning, match="Saving step 5 .* Training goes on"):
        save_and_wait(manager, trainer, 5)
    (tmp_path / "run").unlink()
    (tmp_path / "away").rename(tmp_path / "run")
    assert "Saved step 3 in" in manager.exit_message(5)
    # The step does not count as saved, so the save is repeated.
    save_and_wait(manager, trainer, 5)
    assert "Saved step 5 in" in manager.exit_message(5)
    manager.close()


def test_exit_message_says_nothing_is_saved(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run")
    assert manager.exit_message(0).startswith("Nothing is saved in")
    manager.close()


def test_sigterm_between_checks_is_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, seen = Loop._ends, []  # pyright: ignore[reportPrivateUsage]

    def look(self: Loop, step: int) -> bool:
        found = ends(self, step)
        if step == 2 and not seen:
            seen.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(Loop, "_ends", look)
    run = tmp_path / "run"
    trainer = make_trainer(checkpoint=Checkpoint(run, every=100))
    with pytest.raises(SystemExit):
        trainer.fit(make_batches(9), num_steps=9)
    assert saved_steps(run) == {trainer.step}


def test_finished_run_trains_nothing(tmp_path: Path) -> None:
    make_trainer(tmp_path).fit(make_batches(2), 2)
    again = make_trainer(tmp_path)
    assert again.fit(make_batches(2), 2) == {}
    assert again.step == 2


def test_branch_does_not_overwrite_original_run(tmp_path: Path) -> None:
    options = Checkpoint(tmp_path / "run", every=2)
    make_trainer(checkpoint=options).fit(make_batches(4), 4)
    branch = make_trainer(checkpoint=options)
    branch.restore(2)
    message = (
        f"'{tmp_path / 'run'}' holds a checkpoint of step 4, but this run is at "
        "step 2 and would write into the same directory."
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        branch.fit(make_batches(6), 6)
    with pytest.raises(CheckpointError, match=re.escape("Cannot save step 2")):
        branch.save()


def test_weights_load_under_another_wrt(tmp_path: Path) -> None:
    whole = make_trainer(checkpoint=tmp_path / "run")
    whole.fit(make_batches(1), 1)
    part = make_trainer(wrt=nnx.PathContains("bias"))
    part.restore(directory=tmp_path / "run", weights_only=True)
    saved, loaded = arrays(whole), arrays(part)
    assert sorted(x.tobytes() for x in saved.values()) == sorted(
        x.tobytes() for x in loaded.values()
    )


def test_restore_best_returns_to_best_step(tmp_path: Path) -> None:
    options = Checkpoint(tmp_path / "run", every=1, keep_last=1, keep_best="eval_loss")
    trainer = make_trainer(checkpoint=options)
    history = trainer.fit(make_batches(4), 4, eval_data=make_batches(1))
    assert list(history["eval_step"]) == [1, 2, 3, 4]
    trainer.restore("best")
    assert trainer.step == history["eval_step"][np.argmin(history["eval_loss"])]


class Resumable:
    """Batches with a position that can be restored."""

    def __init__(self, batches: list[dict]) -> None:
        self._batches, self._next = batches, 0

    def __iter__(self) -> "Resumable":
        return self

    def __next__(self) -> dict:
        if self._next == len(self._batches):
            raise StopIteration
        self._next += 1
        return self._batches[self._next - 1]

    def get_state(self) -> dict:
        return {"next": self._next}

    def set_state(self, state: dict) -> None:
        self._next = state["next"]


def test_position_of_other_process_count_is_skipped(tmp_path: Path) -> None:
    """In a single process, the test changes the metadata to those of two processes."""
    whole = make_trainer().fit(make_batches(6), 6)["loss"]
    make_trainer(tmp_path).fit(Resumable(make_batches(6)), 3)
    resumed = make_trainer(tmp_path).fit(Resumable(make_batches(6)), 4)["loss"]
    np.testing.assert_array_equal(resumed, whole[3:4])
    message = "saved by 2 processes and cannot be restored on 1. The batches used so"
    with pytest.warns(UserWarning, match=message):
        position = DataState.from_json(
            {"first_step": 0, "states": [{"a": 1}, {"a": 1}]}
        )
    assert position.open(make_batches(6), 4).skips == 4


SWAPS = {
    "adam to adabelief": (optax.adam, optax.adabelief, "0.mu"),
    "adam to adamax": (optax.adam, optax.adamax, "0.nu"),
    "adam to yogi": (optax.adam, optax.yogi, "0.nu"),
    "amsgrad to adam": (optax.amsgrad, optax.adam, "0.mu"),
    "momentum to rmsprop": (lambda r: optax.sgd(r, 0.9), optax.rmsprop, None),
}


@pytest.mark.parametrize("name", SWAPS)
def test_resuming_with_another_optimizer_raises(name: str, tmp_path: Path) -> None:
    saved, other, field = SWAPS[name]
    make_trainer(tmp_path, optimizer=saved(0.01)).fit(make_batches(1), 1)
    trainer = make_trainer(tmp_path, optimizer=other(0.01))
    message = "is only in the checkpoint|is not in the checkpoint"
    if field is not None:
        message = re.escape(f"optimizer: `{field}` is a ScaleBy")
    fit = lambda: trainer.fit(make_batches(2), 2)  # noqa: E731
    for restore in (lambda: trainer.state, trainer.restore, fit):
        with pytest.raises(CheckpointMismatchError, match=message):
            restore()
    trainer.restore(weights_only=True)


@pytest.mark.parametrize(
    "other",
    [
        lambda: optax.nadam(0.02, b1=0.8),
        lambda: optax.radam(0.01),
        lambda: optax.chain(optax.scale_by_adam(), optax.scale(-0.5)),
    ],
)
def test_same_moments_are_resumed(other: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(make_batches(1), 1)
    resumed = make_trainer(tmp_path, optimizer=other())
    resumed.restore()
    moments = [to_host(t.state.opt_state[0].nu) for t in (trainer, resumed)]  # pyright: ignore
    assert_same_bits(*moments)


def test_resuming_without_the_average_warns(tmp_path: Path) -> None:
    options = Checkpoint(tmp_path, every=1, keep_last=1)
    make_trainer(options, ema_decay=0.5).fit(make_batches(1), 1)
    with pytest.warns(UserWarning, match="has a moving average of the parameters"):
        make_trainer(options).fit(make_batches(2), 2)


def test_late_average_starts_from_parameters(tmp_path: Path) -> None:
    before = make_trainer(tmp_path)
    before.fit(make_batches(1), 1)
    start = to_host(before.state.params)
    trainer = make_trainer(tmp_path, ema_decay=0.75)
    trainer.restore()
    assert_same_bits(to_host(trainer.state.ema), start)
    again = make_trainer(tmp_path, ema_decay=0.75)
    again.fit(make_batches(2), 2)
    after, found = to_host(again.state.params), to_host(again.state.ema)
    for path, x in found.items():
        expected = 0.75 * start[path] + 0.25 * after[path]
        np.testing.assert_allclose(x, expected, rtol=1e-5)


# Uses of a Trainer before its first fit


def test_first_use_reads_the_newest_step(run: tuple, capsys: Any) -> None:
    options = Checkpoint(run[0], every=100)
    fitted = make_trainer(ema_decay=0.9)
    fitted.restore(directory=run[0])
    expected = arrays(fitted)
    uses = {
        "evaluate": lambda t: t.evaluate(make_batches(1)),
        "predict": lambda t: t.predict([b["x"] for b in make_batches(1)]),
        "model": lambda t: to_host(nnx.to_pure_dict(nnx.state(t.model, nnx.Param))),
        "state": arrays,
    }
    for use in uses.values():
        trainer = make_trainer(options, ema_decay=0.9, loggers=None)
        np.testing.assert_equal(use(trainer), use(fitted))
        step = max(saved_steps(run[0]))
        said = f"The run is at its newest checkpoint, step {step} in '{run[0]}'."
        assert said in capsys.readouterr().out
        assert_same_bits(arrays(trainer), expected)


def test_first_use_writes_nothing(tmp_path: Path) -> None:
    absent = make_trainer(tmp_path / "absent")
    assert absent.step == 0
    assert not (tmp_path / "absent").exists()
    run = tmp_path / "run"
    make_trainer(run).fit(make_batches(2), 2)
    before = sorted(run.rglob("*"))
    assert make_trainer(run).step == 2
    assert sorted(run.rglob("*")) == before
    fast = make_trainer(run, debugging=Debugging(fast_dev_run=True))
    assert fast.step == 0


def test_fit_after_first_use_reads_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    restore = CheckpointReader.restore

    def spy(self: Any, wanted: Any, step: Any, *rest: Any) -> Any:
        reads.append(step)
        return restore(self, wanted, step, *rest)

    whole = make_trainer()
    losses = whole.fit(make_batches(6), 6)["loss"]
    make_trainer(tmp_path).fit(make_batches(6), 3)
    monkeypatch.setattr(CheckpointReader, "restore", spy)
    trainer = make_trainer(tmp_path)
    trainer.evaluate(make_batches(1))
    history = trainer.fit(make_batches(6), 6)
    assert reads == [3]
    np.testing.assert_array_equal(history["loss"], losses[3:])
    assert_same_bits(arrays(trainer), arrays(whole))


@pytest.mark.parametrize("fits", [False, True])
def test_on_damage_applies_to_first_use(fits: bool, tmp_path: Path) -> None:
    def make(**options: Any) -> Trainer:
        return make_trainer(Checkpoint(tmp_path, every=2, **options))

    make().fit(make_batches(6), 4)
    (tmp_path / "4" / "_CHECKPOINT_METADATA").write_text("{")
    with pytest.raises(CheckpointReadError):
        make().evaluate(make_batches(1))
    trainer = make(on_damage="previous")
    assert trainer.step == 2
    assert (tmp_path / "4").exists()
    if fits:
        assert list(trainer.fit(make_batches(6), 6)["step"]) == [3, 4, 5, 6]
        assert len(list(tmp_path.glob("damaged-4-*"))) == 1


def test_resuming_over_assigned_values_raises(tmp_path: Path) -> None:
    make_trainer(tmp_path).fit(make_batches(4), 2)
    kernel = jax.numpy.full((8, 8), 0.5)

    def assign(trainer: Trainer) -> None:
        model: Any = trainer.model
        model.linear.kernel[...] = kernel

    trainer = make_trainer(tmp_path)
    assign(trainer)
    message = "trainer.model was given new values before a fit that resumes from step 2"
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(make_batches(4), 4)
    assert saved_steps(tmp_path) == {2}

    # A run that begins with loaded weights, as the same program started again.
    begun = make_trainer(tmp_path / "other")
    begun.restore(directory=tmp_path, weights_only=True)
    assign(begun)
    begun.fit(make_batches(4), 1)
    again = make_trainer(tmp_path / "other")
    again.restore(directory=tmp_path, weights_only=True)
    assign(again)
    with pytest.raises(CheckpointError, match="resumes from step 1"):
        again.fit(make_batches(4), 2)
    again = make_trainer(tmp_path / "other")
    assert again.step == 1  # not 0, so the weights need not be assigned
    assert list(again.fit(make_batches(4), 2)["step"]) == [2]

    # A run whose weights are changed on purpose.
    changed = make_trainer(Checkpoint(tmp_path, every=100))
    changed.restore()
    assign(changed)
    np.testing.assert_array_equal(arrays(changed)["params.linear.kernel"], kernel)
    assert list(changed.fit(make_batches(4), 4)["step"]) == [3, 4]


def test_resume_reports_replaced_weights(tmp_path: Path, capsys: Any) -> None:
    make_trainer(tmp_path).fit(make_batches(4), 2)
    make_trainer(tmp_path / "other").fit(make_batches(4), 1)
    trainer = make_trainer(tmp_path, loggers=None)
    trainer.restore(directory=tmp_path / "other", weights_only=True)
    assert trainer.step == 0
    trainer.fit(make_batches(4), 4)
    assert "The weights that the Trainer had before this" in capsys.readouterr().out


# The best step


def fit_with_evaluations(directory: Path, num_steps: int, **options: Any) -> Trainer:
    """A run whose evaluation is best at step 3, and gets worse afterwards."""

    def distance(model: Any, batch: Any) -> jax.Array:
        return (model.linear.bias[...].mean() - 0.03) ** 2 + 0 * batch["x"].mean()

    def drift(model: Any, batch: Any) -> jax.Array:
        return 0 * model(batch["x"]).mean() - model.linear.bias[...].sum()

    options = {"every": 1, "keep_last": None, "keep_best": "eval_loss"} | options
    trainer = Trainer(
        Net,
        optax.sgd(0.01),
        drift,
        evaluation=Evaluation(loss=distance),
        checkpoint=Checkpoint(directory, **options),
        loggers=[JSONLinesLogger(directory / "metrics.jsonl")],
    )
    batches = make_batches(1)
    trainer.fit(make_batches(9), num_steps, eval_data=batches, eval_every=1)
    return trainer


def test_best_of_another_run_uses_its_record(tmp_path: Path) -> None:
    fit_with_evaluations(tmp_path, 6)
    user = make_trainer(optimizer=optax.sgd(0.01))
    user.restore("best", directory=tmp_path)
    assert user.step == 3
    worst = Checkpoint(tmp_path, keep_best="eval_loss", best_mode="max")
    user.restore("best", directory=worst)
    assert user.step == 6


def test_best_without_a_record_names_the_metrics(tmp_path: Path) -> None:
    fit_with_evaluations(tmp_path, 2, keep_best=None)
    user = make_trainer(optimizer=optax.sgd(0.01))
    message = (
        f"No best checkpoint in '{tmp_path}': the run that saved there had no "
        "keep_best. Name the metric: restore('best', directory=Checkpoint("
        f"'{tmp_path}', keep_best=...)). Saved metrics: "
        "['compile_seconds', 'data_wait_seconds', 'eval_loss', "
    )
    with pytest.raises(CheckpointNotFoundError, match=re.escape(message)):
        user.restore("best", directory=tmp_path)
    user.restore("best", directory=Checkpoint(tmp_path, keep_best="eval_loss"))
    assert user.step == 2


def test_rewound_run_continues_and_keeps_later_steps(tmp_path: Path) -> None:
    whole = fit_with_evaluations(tmp_path, 6)
    expected = arrays(whole)
    logged = (tmp_path / "metrics.jsonl").read_bytes()

    trainer = make_trainer(
        Checkpoint(tmp_path, every=1, keep_last=None), optimizer=optax.sgd(0.01)
    )
    trainer.restore("best", rewind=True)
    assert trainer.step == 3
    (aside,) = tmp_path.glob("rewound-3-*")
    assert saved_steps(tmp_path) == {1, 2, 3}
    assert saved_steps(aside) == {4, 5, 6}
    assert (aside / "metrics.jsonl").read_bytes() == logged
    later = make_trainer(optimizer=optax.sgd(0.01))
    later.restore(directory=aside)
    assert_same_bits(arrays(later), expected)

    # Another process continues from there, in data and steps. So does this one.
    again = fit_with_evaluations(tmp_path, 6)
    assert_same_bits(arrays(again), expected)
    assert saved_steps(tmp_path) == {1, 2, 3, 4, 5, 6}
    again.restore(5, rewind=True)
    again.restore("best", rewind=True)
    assert again.step == 3
    assert len(list(tmp_path.glob("rewound-*"))) == 3
    again.fit(make_batches(9), 4, eval_data=make_batches(1))
    assert saved_steps(tmp_path) == {1, 2, 3, 4}
    again.restore(rewind=True)  # the newest step, so no step is moved
    assert len(list(tmp_path.glob("rewound-*"))) == 3


def test_invalid_rewind_raises_and_changes_nothing(tmp_path: Path) -> None:
    trainer = fit_with_evaluations(tmp_path, 3)
    with pytest.raises(CheckpointNotFoundError):
        trainer.restore(7, rewind=True)
    message = "goes back in the Trainer's own directory"
    with pytest.raises(ValueError, match=message):
        trainer.restore(1, rewind=True, directory=tmp_path)
    with pytest.raises(ValueError, match=message):
        trainer.restore(1, rewind=True, weights_only=True)
    assert trainer.step == 3
    assert saved_steps(tmp_path) == {1, 2, 3}
