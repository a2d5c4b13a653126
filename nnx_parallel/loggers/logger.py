"""The interface of a logger, and the one place that decides which process logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import jax

from nnx_parallel.loggers.console import ConsoleLogger
from nnx_parallel.loggers.json_lines import JSONLinesLogger


class Logger(Protocol):
    """Receives the metrics and messages of a run.

    Metrics are scalars on the host, such as ``loss``, ``grad_norm``, ``learning_rate``,
    ``step_seconds``, ``tokens_per_second``, ``mfu``, ``eval_loss``. Steps count from 1:
    the first update is step 1.
    """

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Begin a run of ``num_steps`` in all, of which ``first_step`` are done."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; perhaps twice, with others, for one step."""
        ...

    def message(self, text: str) -> None:
        """Record a line for people to read."""
        ...

    def finish(self) -> None:
        """Release files and the terminal; called after an error too."""
        ...


class LoggerGroup:
    """Several loggers as one, silent on every process but the first.

    Args:
        loggers: The loggers; nothing is called on them but on process 0.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = tuple(loggers)

    def _active(self) -> tuple[Logger, ...]:
        # Asked at each call: a group may be made before processes are joined.
        return self._loggers if jax.process_index() == 0 else ()

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Start each logger."""
        for logger in self._active():
            logger.start(first_step=first_step, num_steps=num_steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log to each logger."""
        for logger in self._active():
            logger.log(step, metrics)

    def message(self, text: str) -> None:
        """Send the text to each logger."""
        for logger in self._active():
            logger.message(text)

    def finish(self) -> None:
        """Finish every logger, even if one of them raises."""
        with contextlib.ExitStack() as stack:
            for logger in reversed(self._active()):  # a stack runs them in their order
                stack.callback(logger.finish)


def default_loggers(directory: Path | None) -> list[Logger]:
    """The console, and ``metrics.jsonl`` in the run's directory if it has one."""
    # `LoggerGroup` keeps these silent on all processes but the first.
    loggers: list[Logger] = [ConsoleLogger()]
    if directory is not None:
        loggers.append(JSONLinesLogger(directory / "metrics.jsonl"))
    return loggers
