"""``python -m benchmarks copies`` ends a run with copies in memory many times.

Each process has a separate network namespace and directory for the copies, so it counts
as a machine. Copies are made every 5 steps, and checkpoints every 200. In half of the
rounds, a process is killed at a random moment. In the others a machine vanishes with
its memory, or two neighbours do, or a process dies in the middle of a copy or of a
restart. At the end every parameter must equal the parameter of an undisturbed run, bit
for bit.

The time of a restart is measured with the launcher, with and without a compilation
cache.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.faults import (
    END_SECONDS,
    ROOT,
    START_SECONDS,
    WORKER,
    Network,
    Run,
    Starter,
)
from benchmarks.timing import Table
from nnx_parallel import Callback, Checkpoint, Trainer
from nnx_parallel.distributed import PEER_LOST

COPY_EVERY, SAVE_EVERY, PROCESSES = 5, 200, 4
STEPS_PER_ROUND = 24
_MEMORY = "/dev/shm"
_ROWS, _WIDTH = 256, 4736
_WHOLE_SECONDS = 3600.0
_LOSES_BOTH = "two neighbours"
_MACHINES = "a machine", _LOSES_BOTH
_UNUSED = "in memory is not used"
_KINDS = {  # shares of the rounds
    "a process": 50,
    "a machine": 20,
    _LOSES_BOTH: 10,
    "in a copy": 10,
    "in a restart": 10,
}
# On CPUs the processes use different keys in a compilation cache, and only process 0
# writes to it. So its effect is measured with one process.
_RESTARTS = {
    "3 processes": (3, False),
    "1 process": (1, False),
    "1 process with a compilation cache": (1, True),
}
# After the death of a process, Gloo may find data of a later collective in another one,
# and abort it.
_KILLED = {-signal.SIGKILL, PEER_LOST, -signal.SIGABRT}


def measure(rounds: int = 100) -> Table:
    """Ends a run a number of times.

    Args:
        rounds: Number of rounds; 100 or a divisor of it.
    """
    count = f"{PROCESSES} processes"
    table = Table(f"{rounds} deaths of a run of {count} with copies in memory")
    parts = {
        f"{name}, {words}": seconds
        for words, (processes, has_cache) in _RESTARTS.items()
        for name, seconds in restart(processes, has_cache=has_cache).items()
    }
    costs = {
        f"{name}, {words}": figure
        for words, model in _DEVICES.items()
        for name, figure in cost(model).items()
    }
    for name, figure in {**parts, **costs, **soak(rounds, seed=0)}.items():
        table.add(name, figure)
    return table


def restart(processes: int, *, has_cache: bool) -> dict[str, float]:
    """Returns the seconds from the death of a process to the next step, by part.

    The launcher starts the processes again, which read a copy in memory.
    """
    kill = 5
    fault = {"kind": "kill", "process": processes - 1, "step": kill}
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name:
        directory = Path(name)
        settings = whole_settings(kill + 3, directory / "out.json")
        settings |= {"checkpoint": _checkpoint(directory, every=2), "fault": fault}
        settings |= {"model": "gpt", "num_rows": 4 * processes}
        sizes = ["--processes", str(processes), "--devices-per-process", "1"]
        command = [sys.executable, "-m", "nnx_parallel", "launch", "--cpu", *sizes]
        cache = {"JAX_COMPILATION_CACHE_DIR": f"{name}/cache"} if has_cache else {}
        subprocess.run(
            [*command, "--max-restarts", "1", str(WORKER), json.dumps(settings)],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | cache,
            capture_output=True,
            check=True,
        )
        log = directory / "run" / "metrics.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    begins = [i for i, x in enumerate(lines) if x.get("before", {}).get("restarts")]
    later = lines[begins[0] :]
    compiled = next(x for x in later if "compile" in x.get("seconds", {}))
    first = next(x for x in later if "loss" in x)
    found = {
        "end of all processes, imports and connections": later[0]["before"]["restarts"],
        "state read and checked": compiled["seconds"]["start"],
        "step compiled": compiled["seconds"]["compile"],
        "first step": first["time"] - compiled["time"],
    }
    return {x: round(y, 1) for x, y in {**found, "total": sum(found.values())}.items()}


class _Clock(Callback):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.ends.append(time.monotonic())


class _Linears(nnx.Module):
    """A model that computes on the host's cores, about a second a step."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        layers = [nnx.Linear(_WIDTH, _WIDTH, rngs=rngs) for _ in range(4)]
        self.layers = nnx.Sequential(*layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers(x)


class _Elsewhere(nnx.Module):
    """A model whose steps take a second without the host's cores, as on accelerators.

    Most of its state is not trained, because a step would use these cores for that.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(_WIDTH, 8, rngs=rngs)
        self.held = nnx.BatchStat(jax.numpy.ones((2**18, 1024)))

    def __call__(self, x: jax.Array) -> jax.Array:
        def wait(x: np.ndarray) -> np.ndarray:
            time.sleep(1.0)
            return np.zeros_like(x)

        x = self.layer(x)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x + jax.pure_callback(wait, shape, jax.lax.stop_gradient(x))


def cost(model: Callable[[nnx.Rngs], nnx.Module], rounds: int = 2) -> dict[str, Any]:
    """Measures what copies of 1 GiB cost a run of one process on one device.

    Fits with a copy every 20 steps alternate with fits without copies.
    """
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=(_ROWS, _WIDTH)).astype(np.float32)}] * 45
    blocked: list[float] = []
    seconds: dict[bool, list[float]] = {True: [], False: []}
    num_bytes = 0

    def loss(model: Any, batch: Any) -> Any:
        return (model(batch["x"]) ** 2).mean()

    for number in range(2 * rounds):
        has_copies, clock = number % 2 == 0, _Clock()
        with tempfile.TemporaryDirectory(dir=_MEMORY) as directory:
            checkpoint = Checkpoint(
                directory, memory_every=20, memory_directory=directory
            )
            trainer = Trainer(
                model,
                optax.adam(1e-4),
                loss,
                devices=jax.devices()[:1],
                callbacks=(clock,),
                checkpoint=checkpoint if has_copies else None,
                loggers=(),
            )
            run: Any = trainer._run  # pyright: ignore[reportPrivateUsage]
            run.copy = partial(_timed, run.copy, blocked)
            trainer.fit(batches, len(batches))
            num_bytes = sum(x.nbytes for x in jax.tree.leaves(trainer.state))
        seconds[has_copies].append((clock.ends[41] - clock.ends[1]) / 40)
    plain, copied = (statistics.median(seconds[x]) for x in (False, True))
    return {
        "GiB of state": round(num_bytes / 2**30, 3),
        "seconds of a step without copies": round(plain, 3),
        "seconds of a step with a copy every 20 steps": round(copied, 3),
        "percent": round(100 * (copied / plain - 1), 2),
        "seconds that a copy stops the steps, first": round(max(blocked), 3),
        "seconds that a copy stops the steps, median": round(
            statistics.median(blocked), 3
        ),
    }


_DEVICES = {
    "computed by the host": _Linears,
    "computed elsewhere": _Elsewhere,
}


def _timed(call: Callable[[int], None], seconds: list[float], step: int) -> None:
    start = time.monotonic()
    call(step)
    seconds.append(time.monotonic() - start)


@dataclass
class _Run:
    """A run that is ended again and again, and what each restart cost.

    Attributes:
        lost: Steps that were done again, by the kind of death.
        seconds: Time from the start of the processes to their first step.
        noticed: Time from the loss of a machine to the end of all processes.
        from_storage: Number of starts that read a checkpoint.
        begun: The step from which the newest of these starts began.
    """

    directory: Path
    starter: Starter
    network: Network
    draw: random.Random
    num_steps: int
    lost: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    seconds: list[float] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    from_storage: int = 0
    begun: int = 0

    @property
    def log(self) -> Path:
        """The file of metrics."""
        return self.directory / "run" / "metrics.jsonl"

    def settings(self, fault: dict[str, Any]) -> dict[str, Any]:
        """Returns settings of the worker."""
        whole = whole_settings(self.num_steps, self.directory / "ended.json")
        checkpoint = _checkpoint(self.directory, every=COPY_EVERY)
        return whole | {"checkpoint": checkpoint, "fault": fault}

    def train(self, kind: str, before: str) -> None:
        """Starts the processes after a death, and ends them by the next one.

        Args:
            kind: How they end.
            before: How they ended before, or an empty text.
        """
        victims = [self.draw.randrange(PROCESSES)]
        if kind == _LOSES_BOTH:
            victims.append((victims[0] + 1) % PROCESSES)
        call = self.draw.randrange(1, 9)
        fault = {"process": victims[0], "call": call}
        in_copy = fault | {"kind": "in_copy"} if kind == "in a copy" else {}
        reached = last_step(self.log)
        with self.start(in_copy) as run:
            self.resume(run, before, reached, may_end=bool(in_copy))
            if in_copy:
                run.end(_KILLED, START_SECONDS)
            else:
                self._wait(run)
                self._end(run, victims, are_machines=kind in _MACHINES)
        if kind == "in a restart":
            with self.start(fault | {"kind": "in_read"}) as run:
                run.end(_KILLED, START_SECONDS)

    def start(self, fault: dict[str, Any]) -> Any:
        """Starts the processes, with a fault in one of them."""
        settings, where = self.settings(fault), self.directory
        return self.starter.run(settings, PROCESSES, where, self.network)

    def resume(
        self, run: Run, before: str, reached: int, *, may_end: bool = False
    ) -> None:
        """Waits for the first step, and notes what the death before it has cost.

        If the run may end, it may also do so before its first step.
        """
        if not before:
            return
        start, pattern = time.monotonic(), r"step +(\d+)/\d+ · loss"
        wait_for(
            run, lambda: re.search(pattern, run.text()) is not None, may_end=may_end
        )
        first, text = re.search(pattern, run.text()), run.text()
        if first is None:  # the process died before the first step
            return
        is_copy = "in memory; " in text
        self.seconds.append(time.monotonic() - start)
        self.lost[before].append(reached - int(first[1]) + 1)
        self.from_storage += not is_copy
        had_copy = reached > self.begun + 2 * COPY_EVERY
        if before == _LOSES_BOTH and had_copy and not is_copy and _UNUSED not in text:
            raise RuntimeError(f"It does not say that parts are lost: {text}")
        if not is_copy:
            self.begun = int(first[1]) - 1

    def _wait(self, run: Run) -> None:
        """Waits for a random moment after a random step."""
        wanted = last_step(self.log) + self.draw.randrange(1, STEPS_PER_ROUND)
        wait_for(run, lambda: last_step(self.log) >= wanted)
        time.sleep(self.draw.uniform(0, 0.05))

    def _end(self, run: Run, victims: list[int], *, are_machines: bool) -> None:
        """Kills processes, or makes their machines vanish with their memory."""
        if not are_machines:
            for victim in victims:
                os.kill(run.pids[victim], signal.SIGKILL)
            run.end(_KILLED, END_SECONDS)
            return
        start = time.monotonic()
        for victim in victims:
            self.network.cut(victim)
        run.end({PEER_LOST}, END_SECONDS)
        self.noticed.append(time.monotonic() - start)
        for victim in victims:
            shutil.rmtree(self.directory / "memory" / str(victim))
            self.network.join(victim)


def soak(rounds: int, seed: int) -> dict[str, Any]:
    """Ends a run at random moments, and compares it with an undisturbed one.

    Raises:
        RuntimeError: If a process hangs, or ends in an undocumented way.
        OSError: If the system does not permit network namespaces.
    """
    draw = random.Random(seed)
    shares = ([name] * max(1, rounds * x // 100) for name, x in _KINDS.items())
    kinds = [*itertools.chain(*shares)]
    draw.shuffle(kinds)
    num_steps = (STEPS_PER_ROUND + COPY_EVERY) * (len(kinds) + 1)
    with (
        tempfile.TemporaryDirectory(dir=_MEMORY) as name,
        closing(Starter()) as starter,
        closing(Network(PROCESSES)) as network,
    ):
        directory = Path(name)
        run = _Run(directory, starter, network, draw, num_steps)
        whole = whole_settings(num_steps, directory / "whole.json")
        with starter.run(whole, PROCESSES, directory) as started:
            started.end({0}, _WHOLE_SECONDS)
        for before, kind in zip(["", *kinds], kinds, strict=False):
            run.train(kind, before)
        reached = last_step(run.log)
        with run.start({}) as started:
            run.resume(started, kinds[-1], reached)
            started.end({0}, _WHOLE_SECONDS)
        expected, found = (
            json.loads((directory / x).read_text())["fsdp"]["digest"]
            for x in ("whole.json", "ended.json")
        )
        left = [*(directory / "memory").rglob("*.*")]
    in_memory = [x for kind, n in run.lost.items() for x in n if kind != _LOSES_BOTH]
    return {
        "deaths": len(kinds),
        "steps": num_steps,
        "digest of the undisturbed run": expected[:16],
        "digest of the run that was ended": found[:16],
        "equal": found == expected,
        "starts from storage": run.from_storage,
        **{f"most steps lost, {name}": max(run.lost[name]) for name in _KINDS},
        "most steps lost, without two neighbours": max(in_memory),
        "seconds from a start to its first step, median": round(
            statistics.median(run.seconds), 2
        ),
        "seconds from the loss of a machine to the end of all processes, median": round(
            statistics.median(run.noticed), 2
        ),
        "files left in memory": len(left),
    }


def _checkpoint(directory: Path, every: int) -> dict[str, Any]:
    """Returns options of a `Checkpoint` with copies after every few steps."""
    return {
        "directory": str(directory / "run"),
        "every": SAVE_EVERY,
        "memory_every": every,
        "memory_directory": f"{directory}/memory/$NNX_PARALLEL_PROCESS_ID",
    }


def last_step(log: Path) -> int:
    """Returns the newest step in a file of metrics, or 0."""
    try:
        found = re.findall(rb'"step": ?(\d+)[^\n]*"loss"', log.read_bytes())
    except FileNotFoundError:
        return 0
    return int(found[-1]) if found else 0


def whole_settings(num_steps: int, out: Path) -> dict[str, Any]:
    """Returns settings of the worker for an undisturbed run."""
    return {"model": "wide", "steps": num_steps, "num_rows": 16, "out": str(out)}


def wait_for(run: Run, condition: Callable[[], bool], *, may_end: bool = False) -> None:
    """Waits until a condition holds, or until a process ends if it may.

    Raises ``RuntimeError`` if a process must not end, or if nothing happens.
    """
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        has_ended = run.codes() != [None] * len(run.pids)
        if has_ended and may_end:
            return
        if has_ended or time.monotonic() > deadline:
            raise RuntimeError(f"The run ended or hangs: {run.show()}")
        time.sleep(0.002)
