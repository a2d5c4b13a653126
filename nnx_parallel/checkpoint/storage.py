"""The checkpoints of one Trainer: what a run saves, and how it finds its way back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.checkpoint.training import Groups, from_groups, to_groups
from nnx_parallel.errors import CheckpointError, CheckpointNotFoundError
from nnx_parallel.state import TrainState


class Storage:
    """Saves and restores the training state of one run; does nothing without options.

    The directory is opened at the first use and stays open until `close`.

    Args:
        options: A directory, a `Checkpoint`, or ``None``.
        description: Of the run: what goes to disk beside the arrays.
        read_only: Never write, make or clean up anything.
    """

    def __init__(
        self,
        options: Checkpoint | str | os.PathLike | None,
        description: Mapping[str, Any],
        *,
        read_only: bool = False,
    ) -> None:
        if options is not None and not isinstance(options, Checkpoint):
            options = Checkpoint(options)
        self.options = options
        self._description = dict(description)
        self._read_only = read_only
        self._open: Checkpointer | None = None

    @property
    def directory(self) -> Path | None:
        """Where the checkpoints go."""
        return None if self.options is None else Path(self.options.directory)

    @property
    def latest_step(self) -> int | None:
        """The newest saved step, or ``None``."""
        return None if self.options is None else self._checkpointer().latest_step

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is one to save."""
        return self.options is not None and self._checkpointer().should_save(step)

    def resumes(self) -> bool:
        """Whether a fit starts from a saved state.

        Raises:
            CheckpointError: If there is one but ``resume=False``: a fresh run would
                write into the directory of another.
        """
        if self.options is None or self.latest_step is None:
            return False
        if not self.options.resume:
            raise CheckpointError(
                f"'{self.directory}' holds checkpoints of steps "
                f"{self._checkpointer().steps}, but resume=False asks for a fresh run. "
                "Choose another directory, remove this one, or leave resume=True."
            )
        return True

    def save(
        self,
        state: TrainState,
        step: int,
        position: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Saves a state under its step, unless that step is saved already.

        Args:
            state: The state; its arrays may be donated once this returns.
            step: Its step.
            position: Where the data stands, as JSON can hold it.
            metrics: Values at this step.
        """
        checkpointer = self._checkpointer()
        if checkpointer.latest_step == step:
            return
        meta = {**self._description, "position": dict(position)}
        checkpointer.save(step, to_groups(state), meta, metrics=metrics)

    def restore(
        self, abstract: TrainState, step: int | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state of a step in the layout of ``abstract``, and the data's position.

        Raises:
            CheckpointNotFoundError: If there is no such step.
            CheckpointMismatchError: If an array differs, before any is read.
        """
        groups, meta = self._checkpointer().restore(to_groups(abstract), step)
        return from_groups(abstract, groups), meta.get("position", {})

    def restore_weights(self, state: TrainState, step: int | None = None) -> TrainState:
        """The state with the parameters and other variables of a checkpoint.

        Nothing else is read. A moving average starts from the restored parameters.

        Raises:
            CheckpointNotFoundError: If there is no such step.
            CheckpointMismatchError: If an array differs, before any is read.
        """
        groups = to_groups(state)
        wanted = {name: groups[name] for name in ("params", "variables")}
        found, _ = self._checkpointer().restore(_abstract(wanted), step)
        if state.ema is not None:
            found["ema"] = {path: x.copy() for path, x in found["params"].items()}
        return from_groups(state, found)

    def close(self) -> None:
        """Waits for the save under way and lets go of the directory."""
        if self._open is not None:
            opened, self._open = self._open, None
            opened.close()

    def _checkpointer(self) -> Checkpointer:
        if self.options is None:
            raise CheckpointNotFoundError(
                "This Trainer has no checkpoint directory. Pass checkpoint='runs/name'."
            )
        if self._open is None:
            self._open = Checkpointer(self.options, read_only=self._read_only)
        return self._open


def _abstract(groups: Groups) -> Groups:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), groups
    )
