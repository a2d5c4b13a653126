"""Trains a tiny GPT in processes that tests start, with faults where a test asks.

``python -m nnx_parallel launch ... tests/processes/worker.py '{"steps": 4, ...}'``
"""

import dataclasses
import hashlib
import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import nnx_parallel
from nnx_parallel import (
    FSDP,
    Callback,
    Checkpoint,
    Composite,
    DataParallel,
    Faults,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.checkpoint import orbax_compat
from nnx_parallel.checkpoint.memory import MemoryCopies
from nnx_parallel.distributed import messages, runtime
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding.nnx_arrays import flatten_pure

STRATEGIES = {
    "data": lambda: DataParallel(),
    "fsdp": lambda: FSDP(min_size=0),
    "hsdp": lambda: Composite(DataParallel(2), FSDP(min_size=0)),
    "tensor": lambda: Composite(DataParallel(), TensorParallel(2)),
    "tensor_across": lambda: TensorParallel(4),
    "pipeline": lambda: Composite(Pipeline(2), FSDP(min_size=0)),
}
CONFIG = GPTConfig.tiny(
    vocab_size=64, seq_len=8, num_layers=2, embed_dim=32, num_heads=4
)
NUM_ROWS = 8
SLOW_SECONDS = 4.0
STUCK = threading.Event()
MODELS: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "gpt": lambda rngs: GPT(CONFIG, rngs=rngs),
    "linear": lambda rngs: nnx.Linear(8, 8, rngs=rngs),
    "wide": lambda rngs: nnx.Sequential(
        nnx.Linear(8, 768, rngs=rngs), nnx.Linear(768, 8, rngs=rngs)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one run.

    Attributes:
        strategies: Names in ``STRATEGIES``, trained one after the other.
        model: A name in ``MODELS``. ``linear`` and ``wide`` compile fast, for tests
            that need no GPT. The arrays of ``wide`` are so large that Orbax
            saves them in separate files.
        steps: Total number of updates.
        num_rows: Rows of the global batch.
        out: File to which process 0 writes losses and digests, by strategy.
        checkpoint: Options of a `Checkpoint`, or ``None``. ``seconds`` is the time
            between saves.
        trainer: More options of the `Trainer`.
        faults: Options of the Trainer's `Faults`.
        fault: A fault with its process and step; it occurs at the first start only.
        evaluates: True if the run ends with an evaluation.
        give_up_seconds: Time after which a save that failed on one process is given up.
        notice_seconds: Time after which a waiting process asks where another one is.
        step_seconds: Smallest time limit of a step under ``step_timeout="auto"``.
        heartbeat_seconds: Time after which a silent machine counts as lost.
    """

    strategies: list[str] = field(default_factory=lambda: ["fsdp"])
    model: str = "gpt"
    steps: int = 4
    num_rows: int = NUM_ROWS
    out: str | None = None
    checkpoint: dict[str, Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)
    fault: dict[str, Any] = field(default_factory=dict)
    evaluates: bool = False
    give_up_seconds: int = orbax_compat.GIVE_UP_SECONDS
    notice_seconds: float = 20.0
    step_seconds: float = 600.0
    heartbeat_seconds: int = messages.HEARTBEAT_SECONDS


def global_batches(count: int, num_rows: int = NUM_ROWS) -> list[np.ndarray]:
    """Draws the global batches, windows of 9 tokens, the same in every run."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 64, (num_rows, CONFIG.seq_len + 1)).astype(np.int32)
        for _ in range(count)
    ]


class Batches:
    """This process's share of the global batches, with a fault at one step if given."""

    def __init__(self, settings: Settings, index: int, count: int) -> None:
        self._settings = settings
        num_rows = settings.num_rows
        self._rows = slice(index * num_rows // count, (index + 1) * num_rows // count)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        fault = active_fault(self._settings)
        for step, tokens in enumerate(
            global_batches(self._settings.steps, self._settings.num_rows)
        ):
            if fault.get("step") == step and fault["kind"] == "dry":
                return
            if fault.get("step") == step and fault["kind"] == "data":
                raise OSError("the disk with the data is gone")
            rows = tokens if fault.get("kind") == "global" else tokens[self._rows]
            if fault.get("kind") == "alike":
                rows = tokens[:4]
            if fault.get("kind") == "slow_reads":
                time.sleep(fault["seconds"])
            if fault.get("kind") == "stuck" and step == fault["slow_step"]:
                time.sleep(SLOW_SECONDS)
            if fault.get("kind") == "shape":
                rows = rows[:, :-2]
            yield {"tokens": rows}


def eval_batches(settings: Settings, share: tuple[int, int]) -> Iterator[Any]:
    """This process's share of two batches. A fault may break the last one."""
    first, last = list(Batches(settings, *share))[:2]
    yield first
    kind = active_fault(settings).get("kind")
    if kind == "uneven":
        last = {"tokens": last["tokens"][:-1]}
    if kind == "unusable":
        last = {"tokens": last["tokens"][:0]}
    yield last


class Fault(Callback):
    """Breaks the process after the metrics of a given step are known."""

    def __init__(self, settings: Settings) -> None:
        self._fault = active_fault(settings)
        self._slow_step = settings.fault.get("slow_step")  # applies to all processes

    def on_fit_start(self, trainer: Any) -> None:
        if self._fault.get("kind") == "disk":  # longer files cannot be written
            limit_files(64)
        if saved := self._fault.get("in_save"):
            threading.Thread(target=die_in_save, args=(saved,), daemon=True).start()

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if self._fault.get("kind") == "slow_callback":
            time.sleep(self._fault["seconds"])
        if self._fault.get("kind") == "talk":
            print("says", step)  # noqa: T201
        if step == self._fault.get("heal_at"):
            time.sleep(2)  # until background writes have failed
            limit_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        if step == self._slow_step:
            time.sleep(SLOW_SECONDS)
        if step == self._fault.get("raise_at"):  # a fault after the first one
            raise ValueError("this process has had enough")
        if step != self._fault.get("step"):
            return
        kind = self._fault["kind"]
        if kind == "raise":
            raise ValueError("this process has had enough")
        if kind == "kill":
            finish_copies(trainer)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        if kind == "stop":
            trainer.stop("one process is content")
        if kind == "stuck":
            STUCK.set()
        if kind == "hang":
            threading.Event().wait()
        if kind == "exit":
            sys.exit(0)
        if kind == "save":
            trainer.save()
        if kind == "flip":  # as if this process's memory had failed
            state = trainer.state
            kernel = state.params["kernel"]
            one = jax.device_put(kernel.addressable_data(0) + 1, jax.local_devices()[0])
            changed = jax.make_array_from_single_device_arrays(
                kernel.shape, kernel.sharding, [one]
            )
            params = {**state.params, "kernel": changed}
            trainer.state = dataclasses.replace(state, params=params)


def break_copies(settings: Settings) -> None:
    """Kills this process while it makes, reads or sends a copy in memory."""
    fault = active_fault(settings)
    places = {"in_copy": "_publish", "in_read": "_read", "in_answer": "_answer"}
    place = places.get(fault.get("kind", ""))
    if place is None:
        return
    original, calls = getattr(MemoryCopies, place), itertools.count(1)

    def die(*args: Any) -> Any:
        if next(calls) == fault["call"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(MemoryCopies, place, die)


def finish_copies(trainer: Any) -> None:
    """Waits until all processes have completed the last copy in memory."""
    copies = trainer._run.checkpoints._copies
    if copies is not None and copies._staged is not None:
        copies._staged.has_ended.wait()


def die_in_save(directory: str) -> None:
    """Kills this process when a save has made its directory."""
    while not Path(directory).exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def limit_files(num_bytes: int) -> None:
    """Sets the size limit of the files that this process writes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limit))


def active_fault(settings: Settings) -> dict[str, Any]:
    """This process's fault; empty in other processes and after a restart."""
    restarted = os.environ.get("NNX_PARALLEL_RESTART", "0") != "0"
    here = settings.fault.get("process") == jax.process_index()
    return settings.fault if here and not restarted else {}


def squares(model: Any, batch: Any) -> jax.Array:
    """Squared error of tokens predicted from their predecessors, as real numbers."""
    tokens = batch["tokens"] / 64
    return ((model(tokens[:, :-1]) - tokens[:, 1:]) ** 2).mean()


def stuck_squares(model: Any, batch: Any) -> jax.Array:
    """`squares` with a computation that never ends once `STUCK` is set."""

    def wait() -> None:
        if STUCK.is_set():
            threading.Event().wait()

    jax.debug.callback(wait)  # called by process 0 only
    return squares(model, batch)


def make_trainer(settings: Settings, strategy: Strategy, **options: Any) -> Trainer:
    """Builds the Trainer of a run."""
    loss = next_token_loss if settings.model == "gpt" else squares
    if settings.fault.get("kind") == "stuck":
        loss = stuck_squares
    is_odd = active_fault(settings).get("kind") == "optimizer"
    checkpoint = None
    saves = active_fault(settings).get("kind") != "unsaved"
    if settings.checkpoint is not None and saves:
        given = dict(settings.checkpoint)
        if "seconds" in given:  # JSON has no durations
            given["every"] = timedelta(seconds=given.pop("seconds"))
        checkpoint = Checkpoint(**given)
    return Trainer(
        model=MODELS[settings.model],
        optimizer=optax.adamw(0.02 if is_odd else 0.01),
        loss=loss,
        strategy=strategy,
        num_microbatches=2,
        checkpoint=checkpoint,
        loggers=None if checkpoint else (),
        callbacks=(Fault(settings),),
        seed=1 if active_fault(settings).get("kind") == "seed" else 0,
        faults=Faults(**settings.faults),
        **settings.trainer,
        **options,
    )


def digest(trainer: Trainer) -> str:
    """Reduces all parameters to one number that does not depend on their layout."""
    whole = nnx_parallel.gather(flatten_pure(trainer.state.params))
    total = hashlib.sha256()
    for path in sorted(whole):
        total.update(path.encode() + np.ascontiguousarray(whole[path]).tobytes())
    return total.hexdigest()


def run(settings: Settings) -> dict[str, Any]:
    """Trains under each strategy; returns losses and digest by the strategy's name."""
    found: dict[str, Any] = {}
    break_copies(settings)
    for name in settings.strategies:
        trainer = make_trainer(settings, STRATEGIES[name]())
        history = trainer.fit(Batches(settings, *trainer.data_share), settings.steps)
        losses = [float(x) for x in history.get("loss", [])]
        if active_fault(settings).get("kind") == "save_after":
            trainer.save()
        if settings.evaluates:
            trainer.evaluate(eval_batches(settings, trainer.data_share))
        found[name] = {
            "losses": losses,
            "digest": digest(trainer),
            "share": list(trainer.data_share),
            "step": trainer.step,
            "table": str(trainer.describe()).splitlines()[0],
        }
    return found


def main() -> None:
    """Runs with the settings from the command line."""
    settings = Settings(**json.loads(sys.argv[1]))
    nnx_parallel.initialize(heartbeat_seconds=settings.heartbeat_seconds)
    orbax_compat.GIVE_UP_SECONDS = settings.give_up_seconds
    messages._NOTICE_SECONDS = settings.notice_seconds  # pyright: ignore[reportPrivateUsage]
    runtime._AUTO_SECONDS = settings.step_seconds  # pyright: ignore[reportPrivateUsage]
    found = run(settings)
    if settings.out is not None and jax.process_index() == 0:
        Path(settings.out).write_text(json.dumps(found))
    nnx_parallel.print_once("done")


if __name__ == "__main__":
    main()
