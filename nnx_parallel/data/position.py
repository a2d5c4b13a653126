"""Where a run stands in its data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax

from nnx_parallel.data.prefetch import is_one_shot
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import DataError


class DataState:
    """Where a run stands in its data, so that a resumed one sees the next batch.

    Batches are counted from the step at which a run began to read its present data. A
    later fit in the same process may bring other data: that begins at its start.

    Args:
        first_step: Step at which the present data began.
        state: DataState of a resumable iterator, from ``PlacedBatch.state``.
        num_steps: Where the fit that reads the present data is to end; 0 if unknown.
    """

    def __init__(
        self, first_step: int = 0, state: Any = None, num_steps: int = 0
    ) -> None:
        self._first_step = first_step
        self._state = state
        self._num_steps = num_steps
        self._data: Any = None
        self._is_read = False

    def pass_over(self, data: Any, num_steps: int) -> None:
        """Notes that a fit of ``data`` to ``num_steps`` was done before this process.

        The position is in this data unless a later fit, to more steps, has moved it on:
        to other data, or further in this one.
        """
        is_last = num_steps > self._first_step and num_steps >= self._num_steps
        if self._data is None and is_last:
            self._data = data

    def open(self, data: Any, step: int, num_steps: int) -> tuple[int, Any]:
        """How many batches of ``data`` to skip at ``step``, and a state to restore.

        Args:
            data: The data of a fit.
            step: Where it begins.
            num_steps: Where it is to end.
        """
        self._num_steps = num_steps
        if self._data is not None and self._data is not data:
            self._first_step, self._state = step, None
        continues = self._is_read and self._data is data and is_one_shot(data)
        self._data, self._is_read = data, True
        return 0 if continues else step - self._first_step, self._state

    def advance(self, state: Any) -> None:
        """Notes the position after a batch that a step has used."""
        self._state = state

    def to_json(self) -> dict[str, Any]:
        """The position as JSON can hold it: of all processes, which all call this."""
        states = allgather_object("position in the data", self._state)
        return {
            "first_step": self._first_step,
            "num_steps": self._num_steps,
            "states": states,
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> DataState:
        """The position that was saved; the start for an empty one.

        Raises:
            DataError: If it is not what `to_json` makes.

        Warns:
            UserWarning: If an iterator's position was saved by another number of
                processes: batches are then skipped instead.
        """
        first_step, states = saved.get("first_step", 0), saved.get("states", [None])
        num_steps = saved.get("num_steps", 0)
        numbers = isinstance(first_step, int) and isinstance(num_steps, int)
        if not numbers or not isinstance(states, list):
            raise DataError(
                f"The checkpoint's metadata gives the position in the data as "
                f"{dict(saved)}. It must hold first_step and num_steps, integers, and "
                "states, a list."
            )
        count = jax.process_count()
        if len(states) == count:
            return cls(first_step, states[jax.process_index()], num_steps)
        if any(state is not None for state in states):
            warnings.warn(
                f"The position in the data was saved by {len(states)} processes and "
                f"cannot be restored on {count}. The batches used so far are skipped "
                "instead, which is right if each process still gives its share of the "
                "same global batches.",
                stacklevel=2,
            )
        return cls(first_step, num_steps=num_steps)
