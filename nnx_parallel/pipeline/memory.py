"""Memory slots that hold names instead of arrays, to replay a plan of them."""

from __future__ import annotations

from typing import TypeAlias

from nnx_parallel.errors import ScheduleError

Value: TypeAlias = tuple[int, int]
"""A microbatch and a chunk."""


class Memory:
    """The slots of one buffer on one stage.

    Every value is written once and read once. A stage reads a buffer after it has
    written it, so a slot that is read in a tick is written again in the next at the
    earliest.

    Args:
        name: Of the buffer, for messages.
        num_slots: Slots that it has.
        stage: Where it is, for messages.
    """

    def __init__(self, name: str, num_slots: int, stage: int) -> None:
        self._name = name
        self._num_slots = num_slots
        self._stage = stage
        self._values: dict[int, Value] = {}

    def write(self, tick: int, slot: int, value: Value | None) -> None:
        """Puts ``value`` into ``slot``; ``None`` and -1 are nothing and nowhere.

        Raises:
            ScheduleError: If it belongs elsewhere or the slot is not free.
        """
        if not self._is_used(tick, slot, value, "written"):
            return
        if slot in self._values:
            raise ScheduleError(
                f"{self._where(tick, slot)} is written with {_words(value)} while it "
                f"holds {_words(self._values[slot])}, which is not yet read."
            )
        if value is not None:
            self._values[slot] = value

    def read(self, tick: int, slot: int, value: Value | None) -> None:
        """Takes ``value`` out of ``slot``.

        Raises:
            ScheduleError: If the slot holds something else.
        """
        if not self._is_used(tick, slot, value, "read"):
            return
        held = self._values.pop(slot, None)
        if held != value:
            raise ScheduleError(
                f"{self._where(tick, slot)} is read for {_words(value)} but holds "
                f"{_words(held)}."
            )

    def _is_used(self, tick: int, slot: int, value: Value | None, verb: str) -> bool:
        if value is None and slot >= 0:
            raise ScheduleError(
                f"{self._where(tick, slot)} is {verb}, but the table has nothing there."
            )
        if value is not None and not 0 <= slot < self._num_slots:
            raise ScheduleError(
                f"{self._where(tick, slot)} is {verb} for {_words(value)}. Valid "
                f"slots: 0 to {self._num_slots - 1}."
            )
        return value is not None

    def _where(self, tick: int, slot: int) -> str:
        return f"Slot {slot} of {self._name} on stage {self._stage} at tick {tick}"


def _words(value: Value | None) -> str:
    if value is None:
        return "nothing"
    return f"microbatch {value[0]}, chunk {value[1]}"
