"""Starts the worker in several processes, and waits until they end."""

import contextlib
import io
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nnx_parallel.cli import main

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    # As in conftest.py.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
}
ENVIRONMENT = os.environ | VARIABLES


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        code: Exit code of the launcher.
        text: Standard output, followed by standard error.
        seconds: Duration of the run.
    """

    code: int
    text: str
    seconds: float


def arguments(
    settings: dict[str, Any],
    *,
    processes: int = 2,
    devices: int = 1,
    options: Sequence[str] = (),
) -> list[str]:
    """Arguments of ``python -m nnx_parallel`` that launch the worker."""
    sizes = ["--processes", str(processes), "--devices-per-process", str(devices)]
    return ["launch", "--cpu", *sizes, *options, str(WORKER), json.dumps(settings)]


def launch(settings: dict[str, Any], **where: Any) -> Ended:
    """Runs the worker to its end.

    The launcher runs in this process, because a new process would spend seconds on
    imports. It forwards signals to the workers.

    Args:
        settings: Settings of the worker, as `Settings` names them.
        where: Further arguments of `arguments`.
    """
    return run(*arguments(settings, **where))


def run(*words: str) -> Ended:
    """Runs ``python -m nnx_parallel`` with these arguments, in this process."""
    output, errors = io.StringIO(), io.StringIO()
    start = time.monotonic()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        code = main(words)
    return Ended(
        code=code,
        text=output.getvalue() + errors.getvalue(),
        seconds=time.monotonic() - start,
    )
