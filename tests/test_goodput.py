"""The wall time of a run, by part and over all its starts, from its metrics file."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import Checkpoint, Trainer
from nnx_parallel.cli import main
from nnx_parallel.loggers import JSONLinesLogger
from nnx_parallel.loggers.goodput import Account, read_account
from nnx_parallel.training.goodput import describe_slow

ROOT = Path(__file__).parents[1]


class Run:
    """A run that writes its metrics at times that the test decides."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.now = path, 1e9
        self.logger = JSONLinesLogger(path)
        self._seconds: dict[str, float] = {}
        monkeypatch.setattr("time.time", lambda: self.now)

    def start(self, step: int, *, after: float, seconds: float) -> None:
        """Starts the run ``after`` seconds; its first step begins ``seconds`` later."""
        self.now += after + seconds
        self.logger.finish()
        self.logger = JSONLinesLogger(self.path)
        self.logger.start(first_step=step, num_steps=100)
        self.logger.configure({"versions": {}})
        self._step, self._seconds = step, {"start": seconds}
        self.logger.account(step, self._seconds)

    def spend(self, part: str, seconds: float) -> None:
        self.now += seconds
        self._seconds = {**self._seconds, part: seconds + self._seconds.get(part, 0)}
        self.logger.account(self._step, self._seconds)

    def steps(self, last: int, *, seconds: float) -> None:
        for step in range(self._step + 1, last + 1):
            self.now += seconds
            self.logger.log(step, {"loss": 1.0, "compile_seconds": 1.0})
        self._step = last

    def end(self) -> None:
        self.logger.account(self._step, self._seconds, has_ended=True)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(tmp_path / "metrics.jsonl", monkeypatch)
    yield run
    run.logger.finish()


def totals(run: Run) -> dict[str, float]:
    """The account of the file, which equals the account of all its lines."""
    found, every = read_account(run.path), Account()
    for line in run.path.read_text().splitlines():
        every.read(json.loads(line))
    assert found.totals() == every.totals()
    return {name: round(x, 3) for name, x in found.totals().items()}


def train_with_restart(run: Run) -> None:
    """Saves step 10, dies after step 15, and resumes from step 10."""
    run.start(0, after=0, seconds=4)
    run.spend("compile", 6)
    run.steps(10, seconds=2)
    run.spend("saves", 3)
    run.steps(15, seconds=2)
    run.start(10, after=18, seconds=2)
    run.spend("compile", 1)
    run.spend("data", 2)
    run.steps(20, seconds=2)
    run.spend("evaluation", 5)
    run.spend("saves", 9)


WITH_RESTART = {
    "steps": 40,
    "start": 6,
    "compile": 7,
    "data": 2,
    "saves": 12,
    "evaluation": 5,
    "restarts": 18,
    "num_restarts": 1,
    "repeated": 10,
    "num_repeated": 5,
}


def test_account_of_restart_is_exact(run: Run) -> None:
    train_with_restart(run)
    assert totals(run) == WITH_RESTART
    account = read_account(run.path)
    assert account.total_seconds == pytest.approx(100)
    line = (
        "Goodput 40.0 % of 1:40: restarts (1) 18.0 %, saves 12.0 %, repeated steps (5)"
    )
    assert account.line() == f"{line} 10.0 %, others 20.0 %."
    assert run.logger.goodput() == account.line()


def test_two_failures_before_next_save_add_up(run: Run) -> None:
    train_with_restart(run)
    run.steps(25, seconds=1)  # not saved
    run.start(20, after=7, seconds=1)
    run.steps(22, seconds=1)  # not saved either
    run.start(20, after=5, seconds=1)
    run.steps(30, seconds=2)
    assert totals(run) == WITH_RESTART | {
        "steps": 40 + 20,
        "start": 6 + 1 + 1,
        "restarts": 18 + 7 + 5,
        "num_restarts": 3,
        "repeated": 10 + 5 + 2,
        "num_repeated": 5 + 5 + 2,
    }


def test_step_of_earlier_start_repeats_both_starts(run: Run) -> None:
    """Step 20 is damaged, so the run goes back to step 5 of its first start."""
    run.start(0, after=0, seconds=1)
    run.steps(5, seconds=2)
    run.spend("saves", 1)
    run.steps(10, seconds=2)
    run.spend("saves", 1)
    run.start(10, after=3, seconds=1)
    run.steps(20, seconds=2)
    run.spend("saves", 1)
    run.start(5, after=3, seconds=1)
    assert totals(run) == {
        "steps": 10,
        "start": 3,
        "saves": 3,
        "restarts": 6,
        "num_restarts": 2,
        "repeated": 10 + 20,
        "num_repeated": 15,
    }


def test_time_after_end_of_fit_does_not_count(run: Run) -> None:
    run.start(0, after=0, seconds=1)
    run.steps(5, seconds=1)
    run.end()
    # A later start finds nothing to train, and writes only its settings.
    run.now += 1000
    run.logger.start(first_step=5, num_steps=5)
    run.logger.configure({"versions": {}})
    run.logger.message("All 5 steps are done: nothing to train.")
    assert totals(run) == {"start": 1, "steps": 5}
    run.start(5, after=1000, seconds=2)
    run.steps(8, seconds=1)
    assert totals(run) == {"start": 3, "steps": 8}


def test_short_run_has_no_line(run: Run) -> None:
    run.start(0, after=0, seconds=1)
    run.steps(59, seconds=1)
    run.end()
    assert run.logger.goodput() == ""
    run.steps(60, seconds=1)
    run.end()
    assert run.logger.goodput() == "Goodput 98.4 % of 1:01: start 1.6 %."


@pytest.mark.parametrize("restarts", ["0", "2"])
def test_run_without_save_keeps_account_under_launcher(
    run: Run, monkeypatch: pytest.MonkeyPatch, restarts: str
) -> None:
    monkeypatch.setenv("NNX_PARALLEL_RESTART", restarts)
    run.start(0, after=0, seconds=1)
    run.steps(5, seconds=2)
    run.start(0, after=3, seconds=1)
    run.steps(1, seconds=2)
    fresh = {"start": 1, "steps": 2}
    lost = {"restarts": 3, "num_restarts": 1, "repeated": 10, "num_repeated": 5}
    assert totals(run) == (fresh if restarts == "0" else {**fresh, "start": 2, **lost})


def test_account_begins_with_first_fit_that_has_one(run: Run) -> None:
    """Lines that another program, or a logger of metrics only, has written."""
    rows = [{"step": x, "time": 100.0 + x, "loss": 1.0} for x in range(1, 21)]
    run.path.write_text("".join(f"{json.dumps(x)}\n" for x in rows))
    assert read_account(run.path).table() == ""
    run.now = 240.0
    run.start(15, after=0, seconds=1)
    run.steps(17, seconds=3)
    assert totals(run) == {"start": 1, "steps": 6}


def test_strange_lines_change_nothing(run: Run) -> None:
    train_with_restart(run)
    strange: list[dict[str, Any]] = [
        {"step": 20, "time": "noon"},
        {"step": 20},
        {"step": 20, "time": run.now, "seconds": {"saves": "much"}},
        {"step": 20, "time": run.now, "seconds": {"saves": -1}, "before": {}},
        {"step": 20, "time": run.now, "seconds": 7.5, "before": 3.5},  # metrics
        {"step": "x", "time": run.now},
    ]
    with run.path.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in strange)
        file.write('{"step": 21, "time": 2e9, "sec')  # torn by a crash
    assert totals_without_check(run) == WITH_RESTART


def totals_without_check(run: Run) -> dict[str, float]:
    found = read_account(run.path).totals()
    return {name: round(x, 3) for name, x in found.items()}


SCRIPT = """
import os, signal, sys, time
import jax, numpy as np, optax
from flax import nnx
from nnx_parallel import Callback, Checkpoint, Trainer

class Kill(Callback):
    def on_step_end(self, trainer, step, metrics):
        if step == 17 and sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    def on_eval_end(self, trainer, step, metrics):
        time.sleep(0.3)

trainer = Trainer(
    model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    optimizer=optax.sgd(0.1),
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
    checkpoint=Checkpoint(sys.argv[1], every=10),
    callbacks=[Kill()],
)
batches = [{"x": np.ones((8, 4), np.float32)}] * 30
trainer.fit(batches, 30, eval_data=batches[:1], eval_every=5)
"""


def test_killed_run_accounts_for_all_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, environment = tmp_path / "run", os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT, str(directory)]

    def start(how: str) -> tuple[int, str]:
        done = subprocess.run(
            [*command, how],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    began = time.time()
    assert start("kill")[0] == -signal.SIGKILL
    killed = time.time()
    time.sleep(0.5)
    code, text = start("go on")
    ended = time.time()
    assert code == 0, text
    account = read_account(directory / "metrics.jsonl")
    found, total = account.totals(), account.total_seconds
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    # The parts add up to the time from the first call of `fit` to the last line.
    first_account = next(x for x in map(json.loads, lines) if "before" in x)
    called = first_account["time"] - first_account["seconds"]["start"]
    shown = [x for x in map(json.loads, lines) if "seconds" in x][-1]["time"]
    assert total == pytest.approx(shown - called, abs=0.05)
    assert began < called <= first["time"] < killed < last["time"] < ended
    assert total == pytest.approx(sum(v for k, v in found.items() if k[:4] != "num_"))
    # 3 evaluations before the kill, and 4 after it: steps 15, 20, 25 and 30.
    assert 7 * 0.3 <= found["evaluation"] < 7 * 0.3 + 10
    assert (found["num_restarts"], found["num_repeated"]) == (1, 7)
    assert 0.5 < found["restarts"] < ended - killed + 0.5
    assert found["steps"] > 0
    assert min(found[x] for x in ("start", "compile", "saves", "repeated")) > 0
    (goodput,) = [x for x in text.splitlines() if x.startswith("Goodput ")]
    assert "restarts (1) " in goodput
    assert len(goodput) < 100
    assert main(["inspect", str(directory)]) == 0
    out = capsys.readouterr().out
    assert f"\ngoodput: {goodput.split()[1]} % of " in out
    assert "\n  repeated steps (7)  " in out


@pytest.mark.parametrize(("compute", "read"), [(0.06, 0.1), (0.1, 0.05)])
def test_wait_for_data_counts_only_while_devices_are_idle(
    tmp_path: Path, compute: float, read: float
) -> None:
    """Batches are read while the step runs, so only the difference is lost."""

    def loss(model: Any, batch: Any) -> jax.Array:
        def work(x: np.ndarray) -> np.ndarray:
            time.sleep(compute)
            return np.zeros_like(x)

        x = batch["x"]
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        slow = jax.lax.stop_gradient(jax.pure_callback(work, shape, x))
        return (model(x + slow) ** 2).mean()

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            while True:
                time.sleep(read)
                yield {"x": np.ones((8, 4), np.float32)}

    num_steps = 30
    trainer = Trainer(
        model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        optimizer=optax.sgd(0.1),
        loss=loss,
        checkpoint=Checkpoint(tmp_path, every=1000),
        loggers=[JSONLinesLogger(tmp_path / "metrics.jsonl")],
    )
    trainer.fit(Batches(), num_steps)
    found = read_account(tmp_path / "metrics.jsonl").totals()
    # The first batches are read during the compilation.
    expected = (num_steps - 5) * max(0.0, read - compute)
    assert found["data"] == pytest.approx(expected, abs=0.02 * num_steps)
    # The waits before and after the first measured step count as a whole, with steps.
    assert found["steps"] >= (num_steps - 2) * compute


def test_slow_process_is_named() -> None:
    usual = ["a", 0.1, 0.2, 1.0]
    assert describe_slow([usual, usual, ["b", 0.9, 0.2, 1.0]]) == {
        (2, "reads a batch in"): (
            "All processes wait for process 2 (host b): it reads a batch in 0.9 s, "
            "the others 0.1 s; a step takes 1 s. Read faster there, or on more threads."
        )
    }
    assert describe_slow([["b", 0.1, 0.7, 1.0], usual]) == {
        (0, "spends between two steps"): (
            "All processes wait for process 0 (host b): it spends between two steps "
            "0.7 s, the others 0.2 s; a step takes 1 s. Look at its callbacks and "
            "loggers."
        )
    }


@pytest.mark.parametrize(
    "times",
    [
        [["a", 0.9, 0.8, 1.0], ["b", 0.7, 0.7, 1.0]],  # all are slow
        [["a", 0.4, 0.4, 1.0], ["b", 0.1, 0.1, 1.0]],  # the step hides the work
        [["a", 9e-3, 9e-3, 0.01], ["b", 1e-3, 1e-3, 0.01]],  # steps of 10 ms
    ],
)
def test_process_for_which_nobody_waits_is_not_named(times: list[list[Any]]) -> None:
    assert describe_slow(times) == {}
