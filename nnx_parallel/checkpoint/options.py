"""Where checkpoints go, how often, and which are kept."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nnx_parallel.checkpoint.directory import is_url
from nnx_parallel.errors import CheckpointError

Metrics = Mapping[str, float]

_CHOICES = {
    "best_mode": ("min", "max"),
    "on_damage": ("error", "previous"),
    "on_save_error": ("raise", "warn"),
}


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
        on_damage: What a fit does if the latest is damaged: ``"error"``, or go back
            to the ``"previous"`` one that is whole; the damaged one is set aside.
        on_save_error: Whether a save that fails ends the fit (``"raise"``) or is told
            as a warning (``"warn"``), and training goes on.

    Raises:
        CheckpointError: If a number is below 1 or a choice is unknown.

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
    on_damage: Literal["error", "previous"] = "error"
    on_save_error: Literal["raise", "warn"] = "raise"

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
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise CheckpointError(
                    f"Checkpoint({name}={getattr(self, name)!r}) must be "
                    f"{choices[0]!r} or {choices[1]!r}."
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
    """The options' answers, in the form in which Orbax asks for them.

    Args:
        options: What to keep.
        metrics: Metrics of the saved steps, which whoever saves keeps up to date.

    Attributes:
        is_preempted: Whether jax has told of a preemption: of a SIGTERM that has come
            before a fit could note it.
    """

    def __init__(self, options: Checkpoint, metrics: Mapping[int, Metrics]) -> None:
        self.is_preempted = False
        self._options = options
        self._metrics = metrics

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        """Returns whether to save now: every so often, and before a preemption."""
        del previous_steps
        self.is_preempted |= context.reached_preemption
        return step.step % self._options.every == 0 or context.reached_preemption

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """Returns whether to keep each checkpoint."""
        del context
        metrics = {
            found.step: self._metrics.get(found.step, {}) for found in checkpoints
        }
        kept = kept_steps(self._options, metrics)
        return [found.step in kept for found in checkpoints]


def _absolute(directory: str | os.PathLike[str]) -> str:
    path = os.fspath(directory)
    return path if is_url(path) else os.path.abspath(os.path.expanduser(path))
