"""Launcher: starts the processes of a run on one machine, and ends them together."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from nnx_parallel.distributed.initialize import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from nnx_parallel.distributed.messages import listen
from nnx_parallel.distributed.runtime import PEER_LOST, TAGGED
from nnx_parallel.errors import MeshShapeError

RESTART = "NNX_PARALLEL_RESTART"
"""Environment variable with the number of restarts so far."""

# GPUs are shared out between processes: each sees its own alone.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# The others notice a lost process within 0.5 s and end by themselves
# (docs/library-notes.md, "Lost processes").
_GRACE_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Command of a run, and how many processes run it.

    Attributes:
        command: The script and its arguments.
        num_processes: Number of processes.
        devices_per_process: Devices of each; ``None`` leaves them to JAX.
        max_restarts: How often all processes are started again after a failure.
        cpu: Simulate the devices on CPU.
        host: Address of the coordinator, in process 0.
    """

    command: tuple[str, ...]
    num_processes: int
    devices_per_process: int | None = None
    max_restarts: int = 0
    cpu: bool = False
    host: str = "127.0.0.1"

    @property
    def cpu_variables(self) -> dict[str, str]:
        """Variables of a process that simulates its devices; empty otherwise."""
        if not self.cpu:
            return {}
        count = self.devices_per_process or 1
        return {
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "JAX_NUM_CPU_DEVICES": str(count),
            "PJRT_NPROC": str(4 * count),  # as `simulate_devices`
        }


def launch(job: Job) -> int:
    """Runs the processes to their end, restarted after failures as the job allows.

    Lines of their output appear as ``[0] ...``. SIGINT, SIGTERM and SIGHUP are
    forwarded to every process, and then nothing is restarted. Children that a process
    leaves behind, of a data loader for instance, are killed when all have ended.

    Args:
        job: The command and its processes.

    Returns:
        0, or the exit code of the first process to fail (128 + n after signal n).

    Raises:
        MeshShapeError: If the visible devices are fewer than the processes need.
    """
    code = 0
    with _Signals() as signals:
        for restart in range(job.max_restarts + 1):
            code = _run_once(job, restart, signals)
            if code == 0 or signals.received:
                return code
            left = job.max_restarts - restart
            if left:
                _say(f"Starting all processes again ({left} restarts left).")
    return code


def _run_once(job: Job, restart: int, signals: _Signals) -> int:
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    with _processes(job, restart) as processes:
        signals.attach(processes)
        threads = [
            threading.Thread(target=_watch, args=(i, process, ended), daemon=True)
            for i, process in enumerate(processes)
        ]
        for thread in threads:
            thread.start()
        return _collect(processes, ended)


def _collect(
    processes: Sequence[subprocess.Popen[bytes]],
    ended: queue.SimpleQueue[tuple[int, int]],
) -> int:
    """Waits for all processes; returns the exit code of the first to fail."""
    failures: list[tuple[int, int]] = []
    deadline: float | None = None
    num_running = len(processes)
    while num_running:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            index, code = ended.get(timeout=wait)
        except queue.Empty:
            # They end by themselves within seconds: these ignore signals, or hang in C.
            deadline = None
            for process in processes:
                _kill_group(process)
            continue
        num_running -= 1
        if code != 0:
            failures.append((index, code))
            deadline = deadline or time.monotonic() + _GRACE_SECONDS
    if not failures:
        return 0
    # A process that ends because another is lost may be reaped before that other one.
    own = [failure for failure in failures if failure[1] != PEER_LOST]
    index, code = (own or failures)[0]
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    _say(f"Process {index} failed first, {how}. All processes have ended.")
    # `Popen` has -n for signal n, a shell 128 + n.
    return 128 - code if code < 0 else code


@contextmanager
def _processes(job: Job, restart: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the processes; on exit none is left, and no child of theirs."""
    with listen(job.host) as probe:  # the coordinator takes the port a moment later
        port = probe.getsockname()[1]
    host = job.host.strip("[]")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(job.num_processes):
            process = subprocess.Popen(
                [sys.executable, *job.command],
                env=_environment(job, address, index, restart),
                stdin=subprocess.DEVNULL,  # not shared out between processes
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A group of its own: a terminal's Ctrl-C comes once, from the
                # launcher, and children can be killed with it.
                start_new_session=True,
            )
            started.append(process)
        yield started
    finally:
        for process in started:
            _kill_group(process)
            process.wait()


def _environment(job: Job, address: str, index: int, restart: int) -> dict[str, str]:
    environment = os.environ | {
        COORDINATOR: address,
        NUM_PROCESSES: str(job.num_processes),
        PROCESS_ID: str(index),
        RESTART: str(restart),
        TAGGED: str(os.getpid()),
        # A pipe is no terminal: Python would hold lines back, and lose them in a kill.
        "PYTHONUNBUFFERED": "1",
        **job.cpu_variables,
    }
    count = job.devices_per_process
    if not job.cpu and count is not None:
        environment[_VISIBLE] = ",".join(_devices(job, count)[index])
    return environment


def _devices(job: Job, count: int) -> list[list[str]]:
    """Names of each process's devices, of those that the launcher may use."""
    needed = job.num_processes * count
    given = os.environ.get(_VISIBLE)
    # Without the variable all devices are visible, numbered from 0.
    names = [str(i) for i in range(needed)]
    if given is not None:
        names = [name for name in given.split(",") if name]
    if len(names) < needed:
        raise MeshShapeError(
            f"{_VISIBLE}={given} names {len(names)} devices, but {job.num_processes} "
            f"processes of {count} devices need {needed}. Launch fewer, or make more "
            "visible."
        )
    return [names[i * count : (i + 1) * count] for i in range(job.num_processes)]


def _watch(
    index: int,
    process: subprocess.Popen[bytes],
    ended: queue.SimpleQueue[tuple[int, int]],
) -> None:
    """Copies a process's output, line by line, and reports its end."""
    streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    readers = [
        threading.Thread(target=_copy, args=(index, *pair), daemon=True)
        for pair in streams
    ]
    for reader in readers:
        reader.start()
    # The readers run already: with none a full pipe would block the process.
    code = process.wait()
    for reader in readers:
        reader.join(_GRACE_SECONDS)  # a child of the process may hold the pipe open
    ended.put((index, code))


# Two threads of each process write lines, which must not mix.
_writing = threading.Lock()


def _copy(index: int, source: IO[bytes] | None, target: IO[str]) -> None:
    assert source is not None
    with source:
        for line in source:
            text = line.decode(errors="replace").rstrip("\n")
            with _writing:
                target.write(f"[{index}] {text}\n")
                target.flush()


class _Signals:
    """Context that forwards the launcher's signals to the processes.

    Attributes:
        received: The signals so far.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._processes: Sequence[subprocess.Popen[bytes]] = ()
        self._previous: dict[signal.Signals, Any] = {}

    def attach(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Sets the receivers, which get the signals so far too."""
        self._processes = processes
        for number in self.received:
            self._forward(number)

    def __enter__(self) -> _Signals:
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self._forward(number)

    def _forward(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)  # does nothing if it has ended


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children, also those that have outlived it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _say(text: str) -> None:
    with _writing:
        sys.stderr.write(f"[launch] {text}\n")
        sys.stderr.flush()
