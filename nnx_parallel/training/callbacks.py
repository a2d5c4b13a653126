"""What a user may do during a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Callback:
    """Hooks of a fit; each does nothing by default. Subclass it and override some.

    Metrics reach a hook when they have arrived from the devices, up to two steps after
    the step itself. A hook ends the fit early with ``trainer.stop(reason)``.

    Example:
        >>> class StopBelow(Callback):
        ...     def on_step_end(self, trainer, step, metrics):
        ...         if metrics["loss"] < 0.1:
        ...             trainer.stop("the loss is below 0.1")
    """

    def on_fit_start(self, trainer: Any) -> None:
        """Before the first step, the state built or restored."""

    def on_step_end(
        self, trainer: Any, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Once the metrics of a step are known."""

    def on_eval_end(
        self, trainer: Any, step: int, metrics: Mapping[str, float]
    ) -> None:
        """After each evaluation."""

    def on_fit_end(self, trainer: Any, history: Mapping[str, Any]) -> None:
        """After the last step, checkpoint included."""


class Hooks:
    """The callbacks of one trainer, called in order.

    Args:
        trainer: What they are called with.
        callbacks: The user's callbacks.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self._callbacks = tuple(callbacks)
        self.stop_reason: str | None = None

    def fit_start(self) -> None:
        """Forgets an earlier stop and calls ``on_fit_start``."""
        self.stop_reason = None
        for callback in self._callbacks:
            callback.on_fit_start(self._trainer)

    def step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Calls ``on_step_end``."""
        for callback in self._callbacks:
            callback.on_step_end(self._trainer, step, metrics)

    def eval_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Calls ``on_eval_end``."""
        for callback in self._callbacks:
            callback.on_eval_end(self._trainer, step, metrics)

    def fit_end(self, history: Mapping[str, Any]) -> None:
        """Calls ``on_fit_end``."""
        for callback in self._callbacks:
            callback.on_fit_end(self._trainer, history)
