"""The metrics of a fit, as `Trainer.fit` returns them."""

import importlib
import math
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

import numpy as np

from nnx_parallel.precision import format_number
from nnx_parallel.visualize.figures import document, text

_WIDTH, _HEIGHT = 300, 120  # pixels of a plot
_MAX_POINTS = 300
_OF_RUN = {
    "step",
    "eval_step",
    "learning_rate",
    "loss_scale",
    "lost_updates",
    "skipped",
    "data_wait_seconds",
    "step_seconds",
    "examples_per_second",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "hfu",
    "device_memory_bytes",
    "device_memory_fraction",
}
"""Metrics that are not plotted."""


class History(dict[str, np.ndarray]):
    """The metrics of a fit: a dict of arrays by name.

    A metric of training has one entry for each step, and ``step`` has the numbers of
    the steps. A metric of evaluations, such as ``eval_loss``, has one entry for each
    evaluation, and ``eval_step`` has the numbers of their steps. Missing names raise a
    `KeyError` that lists the names. A notebook displays the last values and plots.

    Attributes:
        compile_seconds: Seconds that the compilation of the step took; ``None`` if the
            fit ran no step.

    Example:
        >>> history = History(step=np.arange(1, 4), loss=np.array([3.0, 2.5, 2.25]))
        >>> history
        History(steps 1 to 3: loss 3.000 -> 2.250)
        >>> history["loss"].min()
        np.float64(2.25)
    """

    compile_seconds: float | None = None

    def __missing__(self, name: str) -> np.ndarray:
        if not self:
            raise KeyError(
                f"{name!r}: the fit ran no step, because all steps were done before it."
            )
        if name == "compile_seconds":
            raise KeyError("'compile_seconds' is an attribute: history.compile_seconds")
        raise KeyError(f"{name!r} is not a metric of this fit. It has {list(self)}.")

    def __repr__(self) -> str:
        steps = self.get("step", np.empty(0))
        if not steps.size:
            return "History(no steps)"
        losses = [
            n for n in self if n.removeprefix("eval_").rpartition("/")[2] == "loss"
        ]
        return f"History(steps {steps[0]} to {steps[-1]}: {self._changes(losses)})"

    def _changes(self, names: Iterable[str]) -> str:
        ends = ((name, *self[name][[0, -1]]) for name in names)
        return ", ".join(
            f"{name} {format_number(first)} -> {format_number(last)}"
            for name, first, last in ends
        )

    def _repr_html_(self) -> str:
        shown = [n for n in self if n not in _OF_RUN and "learning_rate/" not in n]
        names = [n for n in shown if not n.startswith("eval_")]
        more = [n for n in shown if n.startswith("eval_")]
        names += [n for n in more if n.removeprefix("eval_") not in names]
        plots = "".join(self._plot(name) for name in names)
        return f"<div>{escape(repr(self))}</div><div>{plots}</div>"

    def _plot(self, name: str) -> str:
        """Draws a metric of training as a line, and of evaluations as dots."""
        evaluated = f"eval_{name.removeprefix('eval_')}"
        series = {
            y: points
            for x, y in (("step", name), ("eval_step", evaluated))[name == evaluated :]
            if x in self and y in self and (points := [*_points(self[x], self[y])])
        }
        if not series:
            return ""
        found = [point for points in series.values() for point in points]
        (left, low), (right, high) = map(min, zip(*found)), map(max, zip(*found))  # noqa: B905
        title = self._changes(series)
        marks = [text(6, 12, title, "#7b8794", text_anchor="start")]
        for label, points in series.items():
            placed = [
                (
                    6 + (x - left) / ((right - left) or 1) * (_WIDTH - 12),
                    _HEIGHT - 6 - (y - low) / ((high - low) or 1) * (_HEIGHT - 30),
                )
                for x, y in points
            ]
            if label != evaluated:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
                look = 'fill="none" stroke="#2b7bba"'
                marks.append(f'<polyline points="{path}" {look}/>')
            else:
                marks += [
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#e07020"/>'
                    for x, y in placed
                ]
        return document(marks, _WIDTH, _HEIGHT, title, _WIDTH)

    def to_dataframe(self, *, evaluations: bool = False) -> Any:
        """Returns the metrics of training as a pandas DataFrame, one row for each step.

        Args:
            evaluations: Return the metrics of evaluations instead, one row for each
                evaluation.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ImportError(
                f"to_dataframe needs pandas, which cannot be imported ({error}). "
                "Install it with `pip install pandas`. Without it, history['loss'] "
                "and the other metrics are NumPy arrays."
            ) from error
        index = "eval_step" if evaluations else "step"
        chosen = {n: x for n, x in self.items() if n.startswith("eval_") == evaluations}
        frame = pandas.DataFrame(chosen, columns=list(chosen) or [index])
        return frame.set_index(index)


def _points(steps: np.ndarray, values: np.ndarray) -> Iterator[tuple[float, float]]:
    """Yields finite points, each the mean of some steps if there are many."""
    size = math.ceil(len(steps) / _MAX_POINTS)
    for start in range(0, len(steps), max(size, 1)):
        part = slice(start, start + size)
        kept = np.isfinite(values[part])
        if kept.any():
            yield float(steps[part][kept].mean()), float(values[part][kept].mean())
