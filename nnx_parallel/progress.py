"""How far a run has come: its state and its data, saved and found again together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Literal

from nnx_parallel.checkpoint import Checkpoint, Storage
from nnx_parallel.data import Position
from nnx_parallel.engine import Engine
from nnx_parallel.errors import CheckpointError
from nnx_parallel.hyperparameters import warn_of_changes


class Progress:
    """The state and the position in the data, which move together.

    Args:
        engine: Holds the state.
        storage: Where it is saved.
    """

    def __init__(self, engine: Engine, storage: Storage) -> None:
        self.position = Position()
        self._metrics: dict[int, dict[str, float]] = {}
        self._engine = engine
        self._storage = storage
        self._is_counting = self._is_evaluated = False

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        """Notes the metrics of a step, for a save that a hook may ask for."""
        self._metrics = {step: dict(metrics)}
        self._is_evaluated = False

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Notes an evaluation of the step, besides what was measured of it."""
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self._metrics = {step: self.metrics_of(step) | named}
        self._is_evaluated = True

    def is_evaluated(self, step: int) -> bool:
        """Whether this fit has evaluated the step."""
        return self._is_evaluated and step in self._metrics

    def metrics_of(self, step: int) -> dict[str, float]:
        """What was noted of a step; nothing of any but the last one noted."""
        return dict(self._metrics.get(step, {}))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """While a fit counts steps from the state that it has found."""
        self._is_counting, self._is_evaluated = True, False
        try:
            yield
        finally:
            self._is_counting = False

    def save(self) -> None:
        """Saves the present state under its step, and waits until it is on disk."""
        state = self._engine.state
        try:
            step, position = int(state.step), self.position.to_json()
            metrics = self._metrics.get(step, {})
            self._storage.save(state, step, position, metrics, once=False)
        finally:
            self._storage.close()

    def restore(
        self,
        step: int | Literal["best"] | None,
        directory: str | os.PathLike | None,
        *,
        weights_only: bool,
    ) -> None:
        """Replaces the state by a saved one.

        That of another run is what this one begins with: it still resumes from its own
        checkpoints, as it does when the same program is started again.

        Raises:
            CheckpointError: If a fit is at work, whose count of steps a state of
                another step would contradict.
        """
        if self._is_counting and not weights_only:
            raise CheckpointError(
                "restore() in the middle of a fit, which counts its steps from the "
                "state that it began with. Call trainer.stop(reason), and restore and "
                "fit again after that; or restore weights_only=True."
            )
        where = self._storage.options if directory is None else Checkpoint(directory)
        storage = Storage(where, {}, read_only=True)
        try:
            if weights_only:
                state = storage.restore_weights(self._engine.state, step)
            else:
                state, position = storage.restore(self._engine.plan.abstract, step)
                self.position = Position.from_json(position)
            if self._engine.is_fresh and storage.directory != self._storage.directory:
                self._engine.start_from(state)
            else:
                self._engine.state = state
        finally:
            storage.close()

    def resume(self) -> str | None:
        """Takes up the newest checkpoint, if nothing has been trained yet.

        Returns:
            What was done, or ``None`` for nothing.
        """
        if not self._engine.is_fresh:
            return None
        self._storage.agree_on_steps()
        if not self._storage.resumes():
            return None
        abstract = self._engine.plan.abstract
        state, position, notes = self._storage.restore_newest(abstract)
        warn_of_changes(self._engine.plan, state)
        self._engine.state = state
        self.position = Position.from_json(position)
        done = f"Resumed from step {int(state.step)} in '{self._storage.directory}'."
        return "\n".join([*notes, done])
