"""``python -m benchmarks.faults [N [SIGNAL [PROCESSES]]]`` ends a run N times.

Each time the processes resume from the newest checkpoint and save every 5 steps in the
background, until one of them (by default there is 1) gets a signal (by default SIGKILL)
at a random moment after a random step. At the end every parameter must equal the
parameter of an undisturbed run bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import Table
from nnx_parallel.distributed import PEER_LOST, PREEMPTED

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "tests" / "processes" / "worker.py"
STEPS_PER_SIGNAL = 40
START_SECONDS = 240
END_SECONDS = 60
# One of several processes ends with an exit code, not by the signal.
_CODES = {
    signal.SIGINT: {-signal.SIGINT, 128 + signal.SIGINT},
    signal.SIGTERM: {PREEMPTED},
}
_SAVED = "resume with the same command"


def measure(
    rounds: int = 50, number: signal.Signals = signal.SIGKILL, processes: int = 1
) -> Table:
    """Ends a run a number of times.

    Args:
        rounds: Number of signals.
        number: The signal.
        processes: Number of processes, one of which gets it.
    """
    table = Table(
        f"{number.name} at {rounds} random moments of a run that saves all the time"
    )
    found = soak(rounds, seed=0, number=number, processes=processes)
    for name, figure in found.items():
        table.add(name, figure)
    return table


def soak(
    num_signals: int,
    seed: int,
    *,
    number: signal.Signals = signal.SIGKILL,
    processes: int = 1,
) -> dict[str, Any]:
    """Ends a run at random moments, resumes it, and compares it with another.

    Args:
        num_signals: Number of signals.
        seed: Seed of the moments, and of the process that gets the signal.
        number: The signal.
        processes: Number of processes.

    Returns:
        Figures by name; ``equal`` says whether the digests are equal.

    Raises:
        RuntimeError: If a process hangs, or ends in an undocumented way.
    """
    draw = random.Random(seed)
    num_steps = STEPS_PER_SIGNAL * (num_signals + 1)
    with tempfile.TemporaryDirectory() as name, closing(Starter()) as starter:
        directory = Path(name)
        whole = _settings(num_steps, directory / "whole.json", None)
        options = {"directory": str(directory / "run"), "every": 5}
        ended = _settings(num_steps, directory / "ended.json", options)
        with starter.run(whole, processes, directory) as run:
            run.end({0}, START_SECONDS)
        num_mid_save = 0
        for _ in range(num_signals):
            with starter.run(ended, processes, directory) as run:
                num_mid_save += _signal(run, directory / "run", draw, number)
        with starter.run(ended, processes, directory) as run:
            run.end({0}, START_SECONDS)
        expected, found = (
            json.loads(Path(s["out"]).read_text())["fsdp"]["digest"]
            for s in (whole, ended)
        )
        left = [p.name for p in (directory / "run").glob("*orbax-checkpoint-tmp*")]
    return {
        "signals": num_signals,
        "of them in the middle of a save": num_mid_save,
        "steps": num_steps,
        "digest of the undisturbed run": expected[:16],
        "digest of the run that was ended": found[:16],
        "equal": found == expected,
        "left by dead saves": len(left),
    }


def _settings(num_steps: int, out: Path, checkpoint: dict | None) -> dict[str, Any]:
    # 1, 2 and 3 processes divide these rows, in 2 microbatches.
    options = {"model": "linear", "steps": num_steps, "num_rows": 12, "out": str(out)}
    return options | ({"checkpoint": checkpoint} if checkpoint else {})


@dataclass(frozen=True)
class Run:
    """The processes of a run, and the files with their output."""

    starter: Starter
    pids: list[int]
    outputs: list[Path]

    def text(self) -> str:
        """Returns the output of all processes."""
        return "".join(path.read_text(errors="replace") for path in self.outputs)

    def show(self) -> str:
        """Returns the exit codes, the output, and the stacks of live processes."""
        codes = self.codes()
        for pid, code in zip(self.pids, codes, strict=True):
            if code is None:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1)  # until the stacks are written
        return f"{codes}, {self.text()}"

    def codes(self) -> list[int | None]:
        """Returns the exit codes: -n after signal n, ``None`` if a process is alive."""
        return [self.starter.code(pid) for pid in self.pids]

    def end(self, expected: set[int], seconds: float) -> list[int]:
        """Waits; raises a RuntimeError with all output if an exit code differs."""
        deadline = time.monotonic() + seconds
        while None in (found := self.codes()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"The run hangs: {self.show()}")
            time.sleep(0.01)
        codes = [code for code in found if code is not None]
        if not expected.issuperset(codes):
            raise RuntimeError(f"The run ended with {codes}: {self.text()}")
        return codes


class Network:
    """Network namespaces of Linux that stand for machines, joined by a bridge.

    It needs the rights of an administrator. The network of the host is not touched.

    Args:
        count: Number of machines.

    Raises:
        OSError: If the system does not permit namespaces.
    """

    def __init__(self, count: int) -> None:
        name = f"machines-{os.getpid()}"
        self._switch, self._count = name, count
        self.namespaces = [f"{name}-{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        try:
            self._ip(f"netns add {name}", f"-n {name} link add bridge type bridge")
            self._ip(f"-n {name} link set bridge up")
            for i, (machine, address) in enumerate(
                zip(self.namespaces, self.addresses, strict=True)
            ):
                peer = f"peer name port{i} netns {name}"
                self._ip(
                    f"netns add {machine}",
                    f"link add eth0 netns {machine} type veth {peer}",
                    f"-n {name} link set port{i} master bridge up",
                    f"-n {machine} addr add {address}/24 dev eth0",
                    f"-n {machine} link set eth0 up",
                    f"-n {machine} link set lo up",
                )
        except OSError:
            self.close()
            raise

    def _ip(self, *commands: str) -> None:
        for command in commands:
            words = ["ip", *command.split()]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"ip {command}: {done.stderr.strip()}")

    def cut(self, machine: int) -> None:
        """Cuts a machine off, without any message to the others."""
        self._ip(f"-n {self._switch} link set port{machine} down")

    def join(self, machine: int) -> None:
        """Connects a machine again."""
        self._ip(f"-n {self._switch} link set port{machine} up")

    def close(self) -> None:
        """Deletes the namespaces."""
        for name in (*self.namespaces, self._switch):
            with suppress(OSError):
                self._ip(f"netns del {name}")


# Imports the slow packages, and then forks a process for each line that it reads. They
# end like any script: with Python's hooks, and JAX's exit handler.
_STARTER = """
import ctypes, faulthandler, json, os, signal, socket, sys
import jax
from tests.processes import worker
codes = {}
for line in sys.stdin:
    request = json.loads(line)
    if isinstance(request, int):  # has it ended?
        if codes.get(request) is None:
            pid, status = os.waitpid(request, os.WNOHANG)
            codes[request] = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(codes[request]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        break
    codes.pop(pid, None)  # numbers of processes are reused
    print(pid, flush=True)
else:
    sys.exit()
output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for number in (1, 2):
    os.dup2(output, number)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
faulthandler.register(signal.SIGUSR1, all_threads=True)
# A process that a shell starts in the background ignores SIGINT, with its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.update(request["variables"])
if request["machine"]:
    namespace, address = request["machine"]
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    # Gloo listens on the address of the host's name, so the address becomes the name.
    new_network, new_name = 0x40000000, 0x04000000
    if libc.setns(file, new_network) or libc.unshare(new_name):
        raise OSError(ctypes.get_errno(), "the process cannot change its namespace")
    socket.sethostname(address)
if request["is_shared"]:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
sys.argv[1:] = [request["settings"]]
worker.main()
"""


class Starter:
    """Starts processes of the worker script without waiting for its imports."""

    def __init__(self) -> None:
        variables = {
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _STARTER],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def code(self, pid: int) -> int | None:
        """Returns the exit code of a process, or ``None`` if it is alive."""
        return self._ask(pid)

    def close(self) -> None:
        """Ends this object's process."""
        self._process.kill()
        self._process.communicate()

    @contextmanager
    def run(
        self,
        settings: dict[str, Any],
        processes: int,
        directory: Path,
        network: Network | None = None,
    ) -> Iterator[Run]:
        """Starts the processes of a run; kills those that are alive at the end.

        With a network, each process runs on a separate machine.
        """
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        host = network.addresses[0] if network else "127.0.0.1"
        run = Run(self, [], [directory / f"output{i}" for i in range(processes)])
        try:
            for i, output in enumerate(run.outputs):
                variables = {
                    "NNX_PARALLEL_COORDINATOR": f"{host}:{port}",
                    "NNX_PARALLEL_NUM_PROCESSES": str(processes),
                    "NNX_PARALLEL_PROCESS_ID": str(i),
                }
                machine = (
                    [network.namespaces[i], network.addresses[i]] if network else None
                )
                request = {
                    "machine": machine,
                    "output": str(output),
                    "variables": variables,
                    "is_shared": processes > 1,
                    "settings": json.dumps(settings),
                }
                run.pids.append(self._ask(request))
            yield run
        finally:
            for pid, code in zip(run.pids, run.codes(), strict=True):
                if code is None:
                    os.kill(pid, signal.SIGKILL)


def _signal(run: Run, where: Path, draw: random.Random, number: signal.Signals) -> int:
    """Sends a signal after some steps; returns 1 if a save was in progress."""
    log = where / "metrics.jsonl"
    wanted = _num_logged(log) + draw.randrange(1, 3 * STEPS_PER_SIGNAL // 4)
    deadline = time.monotonic() + START_SECONDS
    while _num_logged(log) < wanted:
        is_over = time.monotonic() > deadline
        if is_over or run.codes() != [None] * len(run.pids):
            raise RuntimeError(f"It did not come to its {number.name}: {run.text()}")
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.03))
    victim = draw.randrange(len(run.pids))
    os.kill(run.pids[victim], number)
    found = run.end(_CODES.get(number, {-signal.SIGKILL, PEER_LOST}), END_SECONDS)
    if number == signal.SIGKILL:
        if found[victim] != -signal.SIGKILL:
            raise RuntimeError(f"It ended before its kill: {run.text()}")
        if run.text().count(f"Process {victim} is lost") != len(found) - 1:
            raise RuntimeError(f"A process does not say why it ends: {run.text()}")
    elif _SAVED not in run.text() or "is lost" in run.text():
        raise RuntimeError(f"It did not save, or lost a process: {run.text()}")
    return any(where.glob("*orbax-checkpoint-tmp*"))


def _num_logged(log: Path) -> int:
    try:
        # Messages do not count, because some are printed before the first step.
        return log.read_bytes().count(b'"loss"')
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    count, name, processes = [
        *sys.argv[1:],
        *("50", "SIGKILL", "1")[len(sys.argv) - 1 :],
    ]
    table = measure(int(count), signal.Signals[name], int(processes))
    table.show()
    sys.exit(not dict(table.rows)["equal"])
