"""`Callback`: hooks of a fit, for code of the user's own; `EarlyStopping`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nnx_parallel.checkpoint.options import grows
from nnx_parallel.training.recorder import Values


class Callback:
    """Hooks of a fit; each does nothing by default. Subclass it and override some.

    Metrics reach a hook when they have arrived from the devices, up to two steps after
    the step itself. A hook ends the fit early with ``trainer.stop(reason)``. What
    `get_state` returns is saved with the run, and given back when it is restored.

    Example:
        >>> class StopBelow(Callback):
        ...     def on_step_end(self, trainer, step, metrics):
        ...         if metrics["loss"] < 0.1:
        ...             trainer.stop("the loss is below 0.1")
    """

    needs_evaluation: bool = False
    """Whether a fit without ``eval_data`` is an error."""

    @property
    def end_reason(self) -> str | None:
        """Why a fit that begins has no step left to do; ``None`` lets it begin."""
        return None

    # `trainer` is `Any`, since the Trainer's module imports this one.
    def on_fit_start(self, trainer: Any) -> None:
        """Before the first step, the state built or restored."""

    def on_step_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """Once the metrics of a step are known."""

    def on_eval_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """After each evaluation."""

    def on_fit_end(self, trainer: Any, history: Mapping[str, Any]) -> None:
        """After the last step, checkpoint included."""

    def get_state(self) -> Any:
        """What a resumed run needs of this object, as JSON can hold it; or ``None``."""
        return None

    def set_state(self, state: Any) -> None:
        """Takes back what `get_state` returned when the checkpoint was saved."""


class EarlyStopping(Callback):
    """Ends a fit once a metric has not improved for a while.

    A value is better if it beats the best one so far by more than ``min_delta``; NaN
    never does. After ``patience`` values in a row that are not better, the fit ends
    with that step, evaluated and saved; with several processes, which agree on it with
    the batches that they read ahead, a few steps later. The best value and the count
    are saved with the run: a resumed one decides as if it had not been interrupted, and
    one that has stopped, started again, stops at once. ``Checkpoint(keep_best=...)``
    keeps the best.

    Args:
        metric: Name as in the history: ``"eval_..."`` is judged after each evaluation,
            one of training after each step.
        patience: How many values in a row may be no better.
        min_delta: By how much a value must be better to count.
        mode: Whether the smallest or the largest is the best; by default ``"min"``, but
            for a metric that grows, such as an accuracy, it must be said.

    Attributes:
        best: The best value so far, or ``None``.
        best_step: Its step.
        num_since: Values since then.

    Raises:
        ValueError: If an argument is out of range; in the fit: if it has no
            ``eval_data`` for an ``"eval_..."`` metric, or none of this name.

    Example:
        >>> stopping = EarlyStopping("eval_accuracy", mode="max", patience=2)
        >>> for step, x in enumerate([0.5, 0.7, 0.6, 0.7]):
        ...     stopped = stopping.observe(step, x)
        >>> stopped, stopping.best, stopping.best_step
        (True, 0.7, 1)
    """

    def __init__(
        self,
        metric: str = "eval_loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(
                f"EarlyStopping(patience={patience!r}): it must be an int of at least "
                "1."
            )
        if not 0 <= min_delta < math.inf:
            raise ValueError(
                f"EarlyStopping(min_delta={min_delta!r}): it must be at least 0."
            )
        if mode not in (None, "min", "max"):
            raise ValueError(
                f"EarlyStopping(mode={mode!r}): it must be 'min', 'max' or None."
            )
        if mode is None and grows(metric):
            raise ValueError(
                f"EarlyStopping({metric!r}) would stop while the values grow. Say "
                "which are the best: mode='max', or 'min'."
            )
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.mode = mode or "min"
        self.needs_evaluation = metric.startswith("eval_")
        self.best: float | None = None
        self.best_step: int | None = None
        self.num_since = 0

    def __repr__(self) -> str:
        return f"EarlyStopping({self.metric!r}, patience={self.patience})"

    def observe(self, step: int, value: float) -> bool:
        """Takes the metric's next value; true if the fit has to end."""
        sign = 1 if self.mode == "min" else -1
        best = math.inf if self.best is None else sign * self.best
        if sign * value < best - self.min_delta:
            self.best, self.best_step, self.num_since = value, step, 0
        else:
            self.num_since += 1
        return self.num_since >= self.patience

    @property
    def end_reason(self) -> str | None:
        """Says that a fit has been ended, to one that would go on from there."""
        return self._reason() if self.num_since >= self.patience else None

    def on_step_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """Judges a metric of training."""
        # A step that was left out may have no loss, and the model is as it was.
        if not self.needs_evaluation and not metrics.get("skipped"):
            self._judge(trainer, step, metrics, self.metric)

    def on_eval_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """Judges a metric of an evaluation."""
        if self.needs_evaluation:
            self._judge(trainer, step, metrics, self.metric.removeprefix("eval_"))

    def get_state(self) -> dict[str, Any]:
        """The best value and the count."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "num_since": self.num_since,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state."""
        self.best, self.best_step = state["best"], state["best_step"]
        self.num_since = state["num_since"]

    def _judge(self, trainer: Any, step: int, metrics: Values, name: str) -> None:
        if name not in metrics:
            raise ValueError(
                f"EarlyStopping({self.metric!r}): no such metric at step {step}. Of "
                f"{'an evaluation' if self.needs_evaluation else 'training'} there "
                f"are: {', '.join(sorted(metrics))}."
            )
        if self.observe(step, float(metrics[name])):
            trainer.stop(self._reason())

    def _reason(self) -> str:
        best = "none" if self.best is None else f"{self.best:.6g}"
        return (
            f"{self.metric} has not improved for {self.num_since} values; its best, "
            f"{best}, is of step {self.best_step}"
        )


def states_of(callbacks: Sequence[Callback]) -> list[list[Any]]:
    """The states that are saved with a run, each with its callback's class."""
    states = [(type(each).__qualname__, each.get_state()) for each in callbacks]
    return [[name, state] for name, state in states if state is not None]


def restore_states(callbacks: Sequence[Callback], states: Sequence[Any]) -> None:
    """Gives callbacks their saved states: those of one class in their order."""
    left = [*states]
    for callback in callbacks:
        name = type(callback).__qualname__
        found = next((pair for pair in left if pair[0] == name), None)
        if found is not None:
            left.remove(found)
            callback.set_state(found[1])
