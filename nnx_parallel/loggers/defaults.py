"""The loggers of a run that names none."""

from __future__ import annotations

from pathlib import Path

from nnx_parallel.loggers.console import ConsoleLogger
from nnx_parallel.loggers.json_lines import JSONLinesLogger
from nnx_parallel.loggers.logger import Logger


def default_loggers(directory: Path | None) -> list[Logger]:
    """The console, and ``metrics.jsonl`` in the run's directory if it has one."""
    loggers: list[Logger] = [ConsoleLogger()]
    if directory is not None:
        loggers.append(JSONLinesLogger(directory / "metrics.jsonl"))
    return loggers
