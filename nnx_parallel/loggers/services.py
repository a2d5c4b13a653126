"""Loggers that need a library of an optional extra."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardLogger:
    """Writes TensorBoard event files, through tensorboardX.

    On resume, TensorBoard drops the points that a dead run left after the step of the
    checkpoint.

    Args:
        directory: Where the event files go; one directory for each run.

    Raises:
        ImportError: If tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        # Here rather than in `start`: a missing library is an error before the fit.
        self._module = _import_extra("tensorboardX", "tensorboard", type(self).__name__)
        self._writer: Any = None
        self._step = 0

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Open a new event file."""
        self.finish()
        self._step = first_step
        dropped = first_step + 1  # and the steps after it
        self._writer = self._module.SummaryWriter(
            str(self.directory), purge_step=dropped
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar for each metric."""
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def message(self, text: str) -> None:
        """Write the text under ``message``, at the last logged step."""
        self._writer.add_text("message", text, self._step)

    def finish(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbLogger:
    """Sends metrics to Weights & Biases.

    To continue the same run after a restart, pass a fixed ``id`` and
    ``resume="allow"``. Metrics are drawn over ``step``, which may then go back.

    Args:
        **init_kwargs: Passed to ``wandb.init``: ``project``, ``name``, ``config``, ...

    Raises:
        ImportError: If wandb is not installed.
    """

    def __init__(self, **init_kwargs: Any) -> None:
        self.init_kwargs = init_kwargs
        self._module = _import_extra("wandb", "wandb", type(self).__name__)
        self._run: Any = None

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Begin, or resume, the run."""
        self.finish()
        self._run = self._module.init(**self.init_kwargs)
        # wandb's own step must not go back, as a resumed run's does.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics with their step."""
        self._run.log({"step": step} | {k: float(x) for k, x in metrics.items()})

    def message(self, text: str) -> None:
        """Print the text, which Weights & Biases keeps with the run's output."""
        self._module.termlog(text)

    def finish(self) -> None:
        """Upload the rest and end the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _import_extra(module: str, extra: str, user: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # With the first error's text: what is installed may fail to import as well.
        raise ImportError(
            f"{user} needs {module}, which cannot be imported ({error}). Install it "
            f'with `pip install "nnx-parallel[{extra}]"`.'
        ) from error
