"""Where a run stands in its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx_parallel.data.feed import is_one_shot


class Position:
    """Where a run stands in its data, so that a resumed one sees the next batch.

    Batches are counted from the step at which a run began to read its present data. A
    later fit in the same process may bring other data: that begins at its start.

    Args:
        first_step: Step at which the present data began.
        state: Position of a resumable iterator, from ``Item.state``.
    """

    def __init__(self, first_step: int = 0, state: Any = None) -> None:
        self._first_step = first_step
        self._state = state
        self._data: Any = None

    def open(self, data: Any, step: int) -> tuple[int, Any]:
        """How many batches of ``data`` to skip at ``step``, and a state to restore."""
        if self._data is not None and self._data is not data:
            self._first_step, self._state = step, None
        continues = self._data is data and is_one_shot(data)
        self._data = data
        return 0 if continues else step - self._first_step, self._state

    def advance(self, state: Any) -> None:
        """Notes the position after a batch that a step has used."""
        self._state = state

    def to_json(self) -> dict[str, Any]:
        """The position as JSON can hold it."""
        return {"first_step": self._first_step, "state": self._state}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Position:
        """The position that was saved; the start for an empty one."""
        return cls(int(saved.get("first_step", 0)), saved.get("state"))
