"""Starts the worker as processes, and waits for their end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        code: Its exit code.
        text: What it has written, standard output before standard error.
        seconds: How long it took.
    """

    code: int
    text: str
    seconds: float


def command(
    settings: dict[str, Any],
    *,
    processes: int = 2,
    devices: int = 1,
    options: Sequence[str] = (),
) -> list[str]:
    """The command line that launches the worker."""
    launch = [sys.executable, "-m", "nnx_parallel", "launch", "--cpu"]
    sizes = ["--processes", str(processes), "--devices-per-process", str(devices)]
    return [*launch, *sizes, *options, str(WORKER), json.dumps(settings)]


def launch(settings: dict[str, Any], **where: Any) -> Ended:
    """Runs the worker to its end."""
    start = time.monotonic()
    done = subprocess.run(
        command(settings, **where),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=240,
        check=False,
    )
    return Ended(
        code=done.returncode,
        text=done.stdout + done.stderr,
        seconds=time.monotonic() - start,
    )
