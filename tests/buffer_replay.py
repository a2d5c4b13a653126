"""Replays planned buffers with names in their memory slots instead of arrays.

The plan of the buffers depends only on a table of slots, so the package does not check
it at run time. These checks verify that every value that the table passes on is found
where the plan says.
"""

from __future__ import annotations

from typing import TypeAlias

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.slots import Slots
from nnx_parallel.schedules.table import Buffers, Table, plan_buffers

Value: TypeAlias = tuple[int, int]
"""The indices of a microbatch and a chunk."""


class Memory:
    """The slots of one buffer on one stage.

    Every value is written once and read once. A stage reads a buffer after it has
    written it, so a slot that is read in one tick is written again in the next
    tick at the earliest.

    Args:
        name: Name of the buffer, for messages.
        num_slots: Number of slots.
        stage: Stage of the buffer, for messages.
    """

    def __init__(self, name: str, num_slots: int, stage: int) -> None:
        self._name = name
        self._num_slots = num_slots
        self._stage = stage
        self._values: dict[int, Value] = {}

    def write(self, tick: int, slot: int, value: Value | None) -> None:
        """Puts ``value`` into ``slot``; ``None`` means no value, -1 no slot.

        Raises:
            ScheduleError: If the slot is not valid for the value, or is not free.
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
            ScheduleError: If the slot does not hold ``value``.
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


def checked_buffers(table: Table) -> Buffers:
    """Plans the buffers of a table, and checks the plan with a replay."""
    buffers = plan_buffers(table)
    check_buffers(table, buffers)
    return buffers


def check_buffers(table: Table, buffers: Buffers) -> None:
    """Replays a table tick by tick on memory slots that hold names instead of arrays.

    Raises:
        ScheduleError: If a value is overwritten before it is read, or a slot that is
            read holds another value.
    """
    stages = range(table.num_stages)
    memories = [_memories(buffers, stage) for stage in stages]
    flights = Memory("flights", buffers.num_flights, stage=0)
    for tick in range(table.num_ticks):
        for stage in stages:
            _replay_stage(table, buffers, memories[stage], tick, stage)
        _replay_flights(table, buffers, flights, tick)


def _memories(buffers: Buffers, stage: int) -> dict[str, Memory]:
    names = ("inputs", "saved", "cotangents", "pending")
    return {n: Memory(n, getattr(buffers, f"num_{n}"), stage) for n in names}


def _replay_stage(
    table: Table, buffers: Buffers, memories: dict[str, Memory], tick: int, stage: int
) -> None:
    """Replays one stage in one tick, in the same order as the executor."""

    def write(name: str, field: str, value: Value | None) -> None:
        memories[name].write(tick, int(getattr(buffers, field)[tick, stage]), value)

    def read(name: str, field: str, value: Value | None) -> None:
        memories[name].read(tick, int(getattr(buffers, field)[tick, stage]), value)

    is_first, is_last = stage == 0, stage == table.num_stages - 1
    forward = _value(table.forward, tick, stage)
    backward = _value(table.backward_input, tick, stage)
    weight = _value(table.backward_weight, tick, stage)
    is_new = is_first and forward is not None and forward[1] == 0
    makes_loss = is_last and forward is not None and forward[1] == table.num_chunks - 1
    write("inputs", "receive_input", _arrival(table, table.forward, tick, stage, 1))
    sent = _arrival(table, table.backward_input, tick, stage, -1)
    write("cotangents", "receive_cotangent", sent)
    write("inputs", "feed_input", forward if is_new else None)
    read("inputs", "forward_input", forward)
    write("saved", "forward_saved", None if table.is_forward_only else forward)
    fed = makes_loss and not table.is_forward_only
    write("cotangents", "feed_cotangent", forward if fed else None)
    read("saved", "backward_saved", backward)
    read("cotangents", "backward_cotangent", backward)
    write("pending", "backward_pending", backward if table.is_split else None)
    read("pending", "weight_pending", weight if table.is_split else None)


def _replay_flights(table: Table, buffers: Buffers, flights: Memory, tick: int) -> None:
    entry = _value(table.forward, tick, 0)
    if entry is not None and entry[1] == 0:
        flights.write(tick, int(buffers.flight[entry[0]]), entry)
    leave = _value(table.backward_input, tick, 0)
    last_chunk = 0
    if table.is_forward_only:
        leave = _value(table.forward, tick, table.num_stages - 1)
        last_chunk = table.num_chunks - 1
    if leave is not None and leave[1] == last_chunk:
        flights.read(tick, int(buffers.flight[leave[0]]), (leave[0], 0))


def _value(slots: Slots, tick: int, stage: int) -> Value | None:
    microbatch = int(slots.microbatch[tick, stage])
    return (microbatch, int(slots.chunk[tick, stage])) if microbatch >= 0 else None


def _arrival(
    table: Table, slots: Slots, tick: int, stage: int, direction: int
) -> Value | None:
    """The value that a neighbour sent in the last tick; direction -1 is backward."""
    if tick == 0:
        return None
    sent = _value(slots, tick - 1, (stage - direction) % table.num_stages)
    if sent is None:
        return None
    # Between the last and the first stage a microbatch enters the next chunk.
    is_around = stage == (0 if direction == 1 else table.num_stages - 1)
    chunk = sent[1] + (direction if is_around else 0)
    return (sent[0], chunk) if 0 <= chunk < table.num_chunks else None
