"""Traces of chosen steps, for the profiler's timeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class Profile:
    """The steps that are traced.

    Attributes:
        start: First step to trace, counted from 0 like ``range``.
        stop: Step before which the trace ends.

    Raises:
        ValueError: If it covers no step.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(
                f"profile=({self.start}, {self.stop}) covers no step. Give "
                "0 <= start < stop, such as (10, 15)."
            )


class Tracer(contextlib.AbstractContextManager):
    """Writes one `jax.profiler` trace over the steps of a profile.

    Args:
        profile: The steps, or ``None`` for no trace.
        directory: The trace goes to ``profile`` below it, or below the working
            directory.
    """

    def __init__(self, profile: Profile | None, directory: Path | None) -> None:
        self._profile = profile
        self._directory = (directory or Path()) / "profile"
        self._is_tracing = False

    @contextlib.contextmanager
    def step(self, step: int, state: Any) -> Iterator[None]:
        """Names a step in the trace; starts and stops the trace where it is due.

        ``state`` is the result of the step before, finished or not.
        """
        if self._profile is None:
            yield
            return
        # Before the step is dispatched, whose work belongs to no trace any more.
        if step >= self._profile.stop:
            self.stop(state)
        if not self._is_tracing and self._profile.start <= step < self._profile.stop:
            jax.profiler.start_trace(str(self._directory))
            self._is_tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def stop(self, state: Any = None) -> None:
        """Ends the trace, if there is one, once the state is there."""
        if self._is_tracing:
            # Steps are dispatched ahead: without it their work would not be in it.
            jax.block_until_ready(state)
            self._is_tracing = False
            jax.profiler.stop_trace()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
