"""`Callback`: hooks of a fit, for code of the user's own."""

from collections.abc import Mapping
from typing import Any

from nnx_parallel.training.recorder import Values


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

    # `trainer` is `Any`, since the Trainer's module imports this one.
    def on_fit_start(self, trainer: Any) -> None:
        """Before the first step, the state built or restored."""

    def on_step_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """Once the metrics of a step are known."""

    def on_eval_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """After each evaluation."""

    def on_fit_end(self, trainer: Any, history: Mapping[str, Any]) -> None:
        """After the last step, checkpoint included."""
