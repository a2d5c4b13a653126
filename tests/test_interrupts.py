"""Ctrl-C and SIGTERM in a fit: its checkpoint, and the data for the next fit."""

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import Callback, Checkpoint, DataParallel, Trainer
from nnx_parallel.checkpoint import reader
from nnx_parallel.data import PrefetchIterator
from nnx_parallel.distributed import runtime
from nnx_parallel.errors import CheckpointReadError
from tests.parity.runs import to_host
from tests.processes.running import ENVIRONMENT


@pytest.fixture(autouse=True)
def _hears_interrupts() -> Iterator[None]:
    """Restores SIGINT, which background processes of a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class At(Callback):
    """Calls a function when the metrics of a step are known."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == self._step:
            self._act()


class Before(Callback):
    """Calls a function before the first step."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def on_fit_start(self, trainer: Any) -> None:
        self._act()


def squares(model: Any, batch: Any) -> jax.Array:
    return (model(batch[0] if isinstance(batch, tuple) else batch) ** 2).mean()


def make_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        optimizer=optax.adam(0.1),
        loss=squares,
        strategy=DataParallel(),
        devices=jax.devices()[:1],
        callbacks=callbacks,
        loggers=(),
        **options,
    )


def batches(count: int = 20) -> Iterator[np.ndarray]:
    """A generator that reuses one buffer for all batches."""
    buffer = np.empty((8, 4), np.float32)
    for i in range(count):
        buffer[:] = i + 1
        yield buffer


class Data:
    """Batches that can be iterated again."""

    def __iter__(self) -> Iterator[np.ndarray]:
        return batches()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_the_collector() -> None:
    """Sends Ctrl-C to a callback of the garbage collector, which swallows it."""

    def act(*_: object) -> None:
        gc.callbacks.remove(act)
        interrupt()

    gc.callbacks.append(act)
    gc.collect()


def params(trainer: Trainer) -> dict[str, np.ndarray]:
    return to_host(trainer.state.params)


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """Parameters after 12 steps without an interrupt."""
    trainer = make_trainer()
    trainer.fit(batches(), 12)
    return params(trainer)


@pytest.mark.parametrize("act", [interrupt, interrupt_the_collector])
def test_ctrl_c_saves_step_and_ends_fit(
    act: Callable[[], None], tmp_path: Path, expected: dict, capfd: Any
) -> None:
    trainer = make_trainer(At(2, act), checkpoint=Checkpoint(tmp_path, every=100))
    with pytest.raises(KeyboardInterrupt, match=r"^Ctrl-C$"):
        trainer.fit(Data(), 12)
    assert 2 <= trainer.step <= 5
    assert saved_steps(tmp_path) == [trainer.step]
    assert "Ctrl-C: the fit ends after this step, once it is saved." in (
        capfd.readouterr().err
    )
    resumed = make_trainer(checkpoint=tmp_path)
    resumed.fit(Data(), 12)
    np.testing.assert_equal(params(resumed), expected)


def test_second_ctrl_c_ends_fit_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    trainer = make_trainer(At(2, twice), checkpoint=Checkpoint(tmp_path, every=100))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Data(), 12)
    assert saved_steps(tmp_path) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_before_first_step_ends_at_once(tmp_path: Path) -> None:
    trainer = make_trainer(Before(interrupt), checkpoint=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Data(), 12)
    assert saved_steps(tmp_path) == []
    # The collector swallows the interrupt, so the fit notices it after the first step.
    trainer = make_trainer(Before(interrupt_the_collector), checkpoint=tmp_path)
    with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        trainer.fit(Data(), 12)
    assert saved_steps(tmp_path) == [1]


def test_user_handler_is_kept() -> None:
    calls = []
    signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    try:
        make_trainer(At(2, interrupt)).fit(Data(), 4)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert calls == [1]


def test_fit_on_thread_installs_no_handler() -> None:
    trainer = make_trainer(At(2, lambda: seen.append(signal.getsignal(signal.SIGINT))))
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: trainer.fit(Data(), 4))
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_wait_for_data(number: int, tmp_path: Path) -> None:
    comes = threading.Event()

    class Stalling:
        def __iter__(self) -> Iterator[np.ndarray]:
            yield from itertools.islice(batches(), 3)
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
            comes.wait(3)  # as long as `close` waits
            yield np.ones((8, 4), np.float32)

    trainer = make_trainer(checkpoint=tmp_path)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(Stalling(), 12)
    assert trainer.step == 3
    assert saved_steps(tmp_path) == [3]


def stop_by_error() -> None:
    raise ValueError("this fit has had enough")


@pytest.mark.parametrize("kind", [iter, zip])  # a zip has no weak references
@pytest.mark.parametrize("act", [interrupt, stop_by_error, None])
def test_next_fit_gets_batches_read_ahead(
    act: Callable[[], None] | None, kind: Callable, expected: dict
) -> None:
    trainer = make_trainer(At(3, act or (lambda: trainer.stop("enough for now"))))
    data = kind(batches())
    with contextlib.suppress(KeyboardInterrupt, ValueError):
        trainer.fit(data, 12)
    assert 3 <= trainer.step <= 5
    trainer.fit(data, 12)
    np.testing.assert_equal(params(trainer), expected)


def test_next_reader_gets_batches_read_ahead() -> None:
    data = batches()
    first = make_trainer(At(3, lambda: first.stop("enough")))
    first.fit(data, 12)
    placed = PrefetchIterator(data, np.array, limit=2)
    seen = [float(item.batch[0, 0]) for item in placed]
    assert seen == [first.step + 1, first.step + 2]


SCRIPT = """
import os, signal, sys
import jax, numpy as np, optax
from flax import nnx
from nnx_parallel import Callback, Checkpoint, Trainer

signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupts(Callback):
    def on_step_end(self, trainer, step, metrics):
        for _ in range(int(sys.argv[1]) if step == 2 else 0):
            os.kill(os.getpid(), signal.SIGINT)


trainer = Trainer(
    lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    optax.adam(0.1),
    lambda model, batch: (model(batch) ** 2).mean(),
    checkpoint=Checkpoint(sys.argv[2], every=100),
    callbacks=[Interrupts()],
)
"""
CELL = "trainer.fit([np.ones((8, 4), np.float32)] * 9, 9); print('not reached')"
NOTEBOOK = f"""
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell()
assert shell.run_cell({SCRIPT!r}).success
assert not shell.run_cell({CELL!r}).success
shell.run_cell("print('still here, at step', trainer.step)")
"""


@pytest.mark.parametrize(
    ("script", "signals", "code", "said"),
    [
        (SCRIPT + CELL, 1, -signal.SIGINT, ""),
        (
            SCRIPT + CELL,
            2,
            -signal.SIGINT,
            "KeyboardInterrupt: Ctrl-C twice, without a save, in Interrupts.on_step_",
        ),
        (NOTEBOOK, 1, 0, "KeyboardInterrupt: Ctrl-C\n"),
    ],
    ids=["script", "twice", "notebook"],
)
def test_interrupted_fit_prints_no_traceback(
    script: str, signals: int, code: int, said: str, tmp_path: Path
) -> None:
    """Python dies by SIGINT after a Ctrl-C, which a shell reports as code 130."""
    if script is NOTEBOOK:
        pytest.importorskip("IPython", reason="IPython is not installed")
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", script, str(signals), str(run)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    assert "Traceback" not in text
    assert 'File "' not in text
    assert "not reached" not in text
    assert said in text
    if signals == 2:
        return
    (step,) = saved_steps(run)
    assert "Ctrl-C: the fit ends after this step, once it is saved." in done.stderr
    saved = f"Saved step {step} in '{run}': resume with the same command."
    assert done.stdout.count("Saved step") == 1
    assert saved in done.stdout
    if script is NOTEBOOK:
        assert f"still here, at step {step}" in done.stdout
    else:
        assert done.stdout.splitlines()[-1] == saved
        assert "KeyboardInterrupt" not in text


def test_ctrl_c_without_checkpoint_promises_no_save(capfd: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_trainer(At(2, interrupt)).fit(Data(), 12)
    said = "Ctrl-C: the fit ends after this step. It saves no checkpoint. A second"
    assert said in capfd.readouterr().err


def test_other_errors_use_original_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error))
    monkeypatch.setattr(runtime, "_excepthook", None)
    for _ in range(2):  # the second fit does not install the hook again
        make_trainer().fit(Data(), 2)
    error = ValueError("no interrupt")
    sys.excepthook(ValueError, error, None)
    assert seen == [(ValueError, error, None)]


def wrap() -> None:
    try:
        interrupt()
    except KeyboardInterrupt as error:
        raise ValueError("incompatible handler") from error


def replace() -> None:
    try:
        interrupt()
    except KeyboardInterrupt:
        raise FileNotFoundError("no manifest") from None


def lose() -> None:
    interrupt_the_collector()
    raise ValueError("short read")


def cancel_elsewhere() -> None:
    """Cancels a read on another thread while the main thread is interrupted."""
    with contextlib.suppress(KeyboardInterrupt):
        interrupt()
    raise ValueError("short read") from asyncio.CancelledError()


def wrap_an_exit() -> None:
    try:
        sys.exit(3)
    except SystemExit as error:
        raise ExceptionGroup("reads", [ValueError("a"), ValueError("b")]) from error


# The collector's callback swallows the interrupt, and Python warns about that.
swallows = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@swallows
@pytest.mark.parametrize(
    "act",
    [
        interrupt,
        interrupt_the_collector,
        wrap,
        replace,
        lose,
        cancel_elsewhere,
        wrap_an_exit,
    ],
)
def test_interrupted_read_is_not_damage(
    act: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Checkpoint(tmp_path, every=2, on_damage="previous")
    make_trainer(checkpoint=options).fit(Data(), 4)
    before = sorted(tmp_path.iterdir())
    load = reader.load

    def load_interrupted(*given: Any) -> Any:
        act()
        return load(*given)

    monkeypatch.setattr(reader, "load", load_interrupted)
    kind = SystemExit if act is wrap_an_exit else KeyboardInterrupt
    with pytest.raises(kind):
        make_trainer(checkpoint=options).fit(Data(), 6)
    with pytest.raises(kind):
        make_trainer(checkpoint=options).restore()
    assert sorted(tmp_path.iterdir()) == before


def test_damage_after_interrupt_raises_read_error(tmp_path: Path) -> None:
    make_trainer(checkpoint=tmp_path).fit(Data(), 2)
    (tmp_path / "2" / "model" / "manifest.ocdbt").write_bytes(b"")
    try:
        interrupt()
    except KeyboardInterrupt:
        with pytest.raises(CheckpointReadError, match="Its files are damaged"):
            make_trainer(checkpoint=tmp_path).restore()


@swallows
def test_ctrl_c_while_building_trainer_raises() -> None:
    def model(rngs: nnx.Rngs) -> nnx.Linear:
        interrupt_the_collector()
        return nnx.Linear(4, 4, rngs=rngs)

    with pytest.raises(KeyboardInterrupt):
        Trainer(model, optax.adam(0.1), squares, loggers=())
