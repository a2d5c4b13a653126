"""How far a run has come: its state and its data, saved and found again together."""

from __future__ import annotations

import os
from typing import Literal

from nnx_parallel.checkpoint import Checkpoint, Storage
from nnx_parallel.data import Position
from nnx_parallel.engine import Engine
from nnx_parallel.hyperparameters import warn_of_changes


class Progress:
    """The state and the position in the data, which move together.

    Args:
        engine: Holds the state.
        storage: Where it is saved.
    """

    def __init__(self, engine: Engine, storage: Storage) -> None:
        self.position = Position()
        self._engine = engine
        self._storage = storage

    def save(self) -> None:
        """Saves the present state under its step, and waits until it is on disk."""
        state = self._engine.state
        try:
            position = self.position.to_json()
            self._storage.save(state, int(state.step), position, {}, once=False)
        finally:
            self._storage.close()

    def restore(
        self,
        step: int | Literal["best"] | None,
        directory: str | os.PathLike | None,
        *,
        weights_only: bool,
    ) -> None:
        """Replaces the state by a saved one."""
        where = self._storage.options if directory is None else Checkpoint(directory)
        storage = Storage(where, {}, read_only=True)
        try:
            if weights_only:
                self._engine.state = storage.restore_weights(self._engine.state, step)
            else:
                self._take(storage, step)
        finally:
            storage.close()

    def resume(self) -> str | None:
        """Takes up the newest checkpoint, if nothing has been trained yet.

        Returns:
            What was done, or ``None`` for nothing.
        """
        if not self._engine.is_fresh or not self._storage.resumes():
            return None
        abstract = self._engine.plan.abstract
        state, position, notes = self._storage.restore_newest(abstract)
        warn_of_changes(self._engine.plan, state)
        self._engine.state = state
        self.position = Position.from_json(position)
        done = f"Resumed from step {int(state.step)} in '{self._storage.directory}'."
        return "\n".join([*notes, done])

    def _take(self, storage: Storage, step: int | Literal["best"] | None) -> None:
        state, position = storage.restore(self._engine.plan.abstract, step)
        self._engine.state = state
        self.position = Position.from_json(position)
