"""``python -m benchmarks.faults [N]`` kills a run N times at random, and compares.

Each time a process resumes from the newest checkpoint and saves every 5 steps in the
background, until a SIGKILL at a random moment after a random step. At the end every
parameter must be bit for bit that of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.timing import Table

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "tests" / "processes" / "worker.py"
STEPS_PER_KILL = 40
_START_SECONDS = 120


def measure(rounds: int = 50) -> Table:
    """Kills a run a number of times.

    Args:
        rounds: Number of kills.
    """
    table = Table(
        f"SIGKILL at {rounds} random moments of a run that saves all the time"
    )
    found = soak(rounds, seed=0)
    for name, figure in found.items():
        table.add(name, figure)
    return table


def soak(num_kills: int, seed: int) -> dict[str, Any]:
    """Kills a run at random moments until it ends, and compares it with another.

    Args:
        num_kills: Number of kills.
        seed: Seed of the moments.

    Returns:
        Figures by name; ``equal`` says whether the digests are.
    """
    draw = random.Random(seed)
    num_steps = STEPS_PER_KILL * (num_kills + 1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        whole = _settings(num_steps, directory / "whole.json", None)
        _end(_start(whole))
        options = {"directory": str(directory / "run"), "every": 5}
        killed = _settings(num_steps, directory / "killed.json", options)
        num_mid_save = sum(
            _kill(killed, directory / "run", draw) for _ in range(num_kills)
        )
        _end(_start(killed))
        expected, found = (
            json.loads(Path(s["out"]).read_text())["fsdp"]["digest"]
            for s in (whole, killed)
        )
        left = [p.name for p in (directory / "run").glob("*orbax-checkpoint-tmp*")]
    return {
        "kills": num_kills,
        "of them in the middle of a save": num_mid_save,
        "steps": num_steps,
        "digest of the run left alone": expected[:16],
        "digest of the killed run": found[:16],
        "equal": found == expected,
        "left by dead saves": len(left),
    }


def _settings(num_steps: int, out: Path, checkpoint: dict | None) -> dict[str, Any]:
    options = {"model": "linear", "steps": num_steps, "out": str(out)}
    return options | ({"checkpoint": checkpoint} if checkpoint else {})


def _start(settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, str(WORKER), json.dumps(settings)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"The run failed by itself: {errors.decode()}")


def _kill(settings: dict[str, Any], run: Path, draw: random.Random) -> bool:
    """Kills a process some time after its start; True if a save was in progress."""
    log = run / "metrics.jsonl"
    before = _num_lines(log)
    process = _start(settings)
    wanted = before + draw.randrange(1, 3 * STEPS_PER_KILL // 4)
    deadline = time.monotonic() + _START_SECONDS
    while _num_lines(log) < wanted:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            _, errors = process.communicate()
            raise RuntimeError(f"It did not come to its kill: {errors.decode()}")
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.03))
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"It ended before its kill: {errors.decode()}")
    return any(run.glob("*orbax-checkpoint-tmp*"))


def _num_lines(log: Path) -> int:
    try:
        return log.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    table = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
    table.show()
    sys.exit(not dict(table.rows)["equal"])
