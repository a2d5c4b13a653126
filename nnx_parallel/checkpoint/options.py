"""Where checkpoints go, how often, and which are kept."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nnx_parallel.errors import (
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointNotFoundError,
)

Metrics = Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where checkpoints go, how often, and which are kept.

    A checkpoint is kept while any rule asks for it; the newest always is.

    Attributes:
        directory: Root of the run's checkpoints; made absolute. A URL (``gs://...``)
            is left as it is.
        every: Steps between saves.
        keep_last: How many of the newest are kept; ``None`` keeps all.
        keep_every: Saved steps that this divides are kept for ever.
        keep_best: Name of the metric by which the best are kept. Checkpoints without
            it, or with a value that is not finite, never count as best.
        best_mode: Whether the smallest or the largest value is the best.
        num_best: How many of the best are kept.
        asynchronous: Whether a save returns before its files are written.
        resume: Whether a fit continues from the latest checkpoint.

    Raises:
        CheckpointError: If a number is below 1 or ``best_mode`` is unknown.

    Example:
        >>> options = Checkpoint("/tmp/run", every=500, keep_best="eval_loss")
        >>> options.keep_last
        3
    """

    directory: str | os.PathLike[str] = dataclasses.field(kw_only=False)
    every: int = 1000
    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: str | None = None
    best_mode: Literal["min", "max"] = "min"
    num_best: int = 1
    asynchronous: bool = True
    resume: bool = True

    def __post_init__(self) -> None:
        for name in ("every", "keep_last", "keep_every", "num_best"):
            value = getattr(self, name)
            if value is None and name in ("keep_last", "keep_every"):
                continue
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(
                    f"Checkpoint({name}={value!r}) must be a whole number of at "
                    "least 1 (keep_last and keep_every may be None)."
                )
        if self.best_mode not in ("min", "max"):
            raise CheckpointError(
                f"Checkpoint(best_mode={self.best_mode!r}) must be 'min' or 'max'."
            )
        object.__setattr__(self, "directory", _absolute(self.directory))


def best_steps(options: Checkpoint, metrics: Mapping[int, Metrics]) -> list[int]:
    """Returns the steps that have a finite ``keep_best``, the best first.

    Of equals the later is the better.
    """
    if options.keep_best is None:
        return []
    sign = 1 if options.best_mode == "min" else -1
    scores = {
        step: sign * values.get(options.keep_best, math.nan)
        for step, values in metrics.items()
    }
    scores = {step: score for step, score in scores.items() if math.isfinite(score)}
    return sorted(scores, key=lambda step: (scores[step], -step))


def kept_steps(options: Checkpoint, metrics: Mapping[int, Metrics]) -> set[int]:
    """Returns the steps to keep, given the metrics of all that are there."""
    steps = sorted(metrics)
    if options.keep_last is None:
        return set(steps)
    kept = set(steps[-options.keep_last :])
    kept.update(best_steps(options, metrics)[: options.num_best])
    if options.keep_every is not None:
        kept.update(step for step in steps if step % options.keep_every == 0)
    return kept


class Rules:
    """The options' answers, in the form in which Orbax asks for them."""

    def __init__(self, options: Checkpoint) -> None:
        self._options = options

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        """Returns whether to save now: every so often, and before a preemption."""
        del previous_steps
        return step.step % self._options.every == 0 or context.reached_preemption

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """Returns whether to keep each checkpoint."""
        del context
        metrics = {found.step: found.metrics or {} for found in checkpoints}
        kept = kept_steps(self._options, metrics)
        return [found.step in kept for found in checkpoints]


def check_directory(directory: str, *, read_only: bool) -> None:
    """Makes the directory and tries to write there, or to read only asks if it is.

    A URL is left to Orbax.

    Raises:
        CheckpointDirectoryError: If it cannot be made or written.
        CheckpointNotFoundError: If ``read_only`` and it is not there.
    """
    if _is_url(directory):
        return
    if read_only:
        if not os.path.isdir(directory):
            raise CheckpointNotFoundError(f"No directory '{directory}' to read from.")
        return
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CheckpointDirectoryError(
            f"Cannot write checkpoints to '{directory}': {error}. Choose a directory "
            "that exists or can be made, and that this process may write."
        ) from error


def is_taken(options: Checkpoint, step: int) -> bool:
    """Returns whether something stands where the files of ``step`` would go.

    Always false for a URL: object stores write in place, and Orbax clears what is dead.
    """
    path = os.path.join(options.directory, str(step))
    return not _is_url(path) and os.path.exists(path)


def _is_url(path: str) -> bool:
    return "://" in path


def _absolute(directory: str | os.PathLike[str]) -> str:
    path = os.fspath(directory)
    return path if _is_url(path) else os.path.abspath(os.path.expanduser(path))
