"""`Callback`, with hooks that run a user's code in a fit, and `EarlyStopping`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nnx_parallel.checkpoint.options import grows, is_of_other_player
from nnx_parallel.training.recorder import Values


class Callback:
    """Hooks of a fit. A subclass overrides some hooks; by default they do nothing.

    A hook gets metrics once they have arrived from the devices, up to two steps after
    the step itself. ``trainer.state`` and ``trainer.step`` are then newer than the
    metrics. So a hook that acts every n steps must test its argument ``step``, which
    takes every value once. All processes run all hooks.

    A hook ends the fit early with ``trainer.stop(reason)``, and logs numbers with
    ``trainer.log(metrics)``. The value that `get_state` returns is saved with the run.
    When the run is restored, `set_state` gets this value.

    Example:
        >>> class StopBelow(Callback):
        ...     def on_step_end(self, trainer, step, metrics):
        ...         if metrics["loss"] < 0.1:
        ...             trainer.stop("the loss is below 0.1")
    """

    needs_evaluation: bool = False
    """True if a fit without ``eval_data`` raises an error."""

    @property
    def end_reason(self) -> str | None:
        """The reason why a fit must not begin; ``None`` lets it begin."""
        return None

    # `trainer` is `Any`, because the Trainer's module imports this module.
    def on_fit_start(self, trainer: Any) -> None:
        """Runs before the first step, after the state is built or restored."""

    def on_step_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """Runs once the metrics of a step are known."""

    def on_eval_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """Runs after each evaluation. ``trainer.state`` is the evaluated state."""

    def on_fit_end(self, trainer: Any, history: Mapping[str, Any]) -> None:
        """Runs after the last step and its checkpoint."""

    def get_state(self) -> Any:
        """Returns the state that a resumed run needs, as JSON values, or ``None``."""
        return None

    def set_state(self, state: Any) -> None:
        """Takes the value that `get_state` returned when the checkpoint was saved."""


class EarlyStopping(Callback):
    """Ends a fit once a metric has not improved for a while.

    A value is better if it beats the best value so far by more than ``min_delta``. NaN
    is never better. After ``patience`` values in a row that are not better, the fit
    ends with the current step, which is evaluated and saved. With several processes the
    fit ends a few steps later, because the processes agree on the end when they read
    batches, and they read some steps ahead. The best value and the count are saved with
    the run. So a resumed run decides as if it had not been interrupted. If a run that
    has stopped is started again, it stops at once. ``Checkpoint(keep_best=...)`` keeps
    the best checkpoint.

    Args:
        metric: Name of the metric in the history. An ``"eval_..."`` metric is judged
            after each evaluation, a metric of training after each step.
        patience: Number of values in a row that are not better, after which the fit
            ends.
        min_delta: Improvement that a value must exceed to count as better.
        mode: ``"min"`` (the default) if the smallest value is the best, ``"max"`` if
            the largest is. It must be given if the metric's name suggests that
            larger is better, as for an accuracy.

    Attributes:
        best: The best value so far, or ``None``.
        best_step: The step of the best value.
        num_since: Number of values since the best value.

    Raises:
        ValueError: If an argument is out of range. The fit raises this error if there
            is no metric of this name, or no ``eval_data`` for an ``"eval_..."`` metric.

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
                "which values are best: mode='max' or mode='min'."
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
        """Takes the metric's next value. Returns True if the fit has to end."""
        sign = 1 if self.mode == "min" else -1
        best = math.inf if self.best is None else sign * self.best
        if sign * value < best - self.min_delta:
            self.best, self.best_step, self.num_since = value, step, 0
        else:
            self.num_since += 1
        return self.num_since >= self.patience

    @property
    def end_reason(self) -> str | None:
        """The reason why an earlier fit ended, if this fit would continue it."""
        return self._reason() if self.num_since >= self.patience else None

    def on_step_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """Judges a metric of training."""
        # A skipped step may have no loss, and it has not changed the model.
        if is_of_other_player(self.metric, metrics, trainer.players or ()):
            return
        if not self.needs_evaluation and not metrics.get("skipped"):
            self._judge(trainer, step, metrics, self.metric)

    def on_eval_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """Judges a metric of an evaluation."""
        if self.needs_evaluation:
            self._judge(trainer, step, metrics, self.metric.removeprefix("eval_"))

    def get_state(self) -> dict[str, Any]:
        """Returns the best value and the count."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "num_since": self.num_since,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self.best, self.best_step = state["best"], state["best_step"]
        self.num_since = state["num_since"]

    def _judge(self, trainer: Any, step: int, metrics: Values, name: str) -> None:
        if name not in metrics:
            source = "an evaluation" if self.needs_evaluation else "training"
            raise ValueError(
                f"EarlyStopping({self.metric!r}): no such metric at step {step}. "
                f"Metrics of {source}: {', '.join(sorted(metrics))}. A metric of an "
                "evaluation has the prefix eval_, as in eval_loss."
            )
        if self.observe(step, float(metrics[name])):
            trainer.stop(self._reason())

    def _reason(self) -> str:
        best = "none" if self.best is None else f"{self.best:.6g}"
        return (
            f"{self.metric} has not improved for {self.num_since} values; its best, "
            f"{best}, was at step {self.best_step}"
        )


def states_of(callbacks: Sequence[Callback]) -> list[list[Any]]:
    """Returns the states that are saved with a run, each with its callback's class."""
    states = [(type(each).__qualname__, each.get_state()) for each in callbacks]
    return [[name, state] for name, state in states if state is not None]


def restore_states(callbacks: Sequence[Callback], states: Sequence[Any]) -> None:
    """Gives callbacks their saved states.

    If several callbacks have the same class, the order of the saved states decides.
    """
    left = [*states]
    for callback in callbacks:
        name = type(callback).__qualname__
        found = next((pair for pair in left if pair[0] == name), None)
        if found is not None:
            left.remove(found)
            callback.set_state(found[1])
