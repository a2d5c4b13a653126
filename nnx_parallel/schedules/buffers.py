"""Buffers: the memory slots of a table, planned before anything runs.

Everything that a stage keeps has a lifetime of ticks. Values whose lifetimes do not
meet share a memory slot; the greedy choice of the lowest free slot needs as many as
are ever alive at once, which is the least there can be [1]. All stages run one
program, so all have as many slots as the busiest.

References:
    [1] Poletto and Sarkar, "Linear Scan Register Allocation", 1999, section 4,
    https://doi.org/10.1145/330249.330250

Memory slots that hold names instead of arrays, to replay a plan of them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.simulate import Lifetimes, find_lifetimes
from nnx_parallel.schedules.slots import Ints, Slots, frozen_ints
from nnx_parallel.schedules.table import Table

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """Which memory slot every stage writes and reads in every tick.

    Arrays are int32 of shape (ticks, stages), -1 where nothing is written or read. A
    slot that is read for the last time in a tick is written again in the next one at
    the earliest.

    Attributes:
        num_inputs: Slots for inputs that wait for their forward.
        receive_input: Written at the start of a tick by what the stage before sent.
        feed_input: Written by a new microbatch; the first stage alone.
        forward_input: Read by the forward.
        num_saved: Slots for inputs that wait for their backward.
        forward_saved: Written by the forward.
        backward_saved: Read by the backward input slot.
        num_cotangents: Slots for cotangents that wait for their backward.
        receive_cotangent: Written at the start of a tick by what the stage after sent.
        feed_cotangent: Written by the part after the stack; the last stage alone.
        backward_cotangent: Read by the backward input slot.
        num_pending: Slots for what waits for its weight gradient; 0 if not split.
        backward_pending: Written by the backward input slot.
        weight_pending: Read by the backward weight slot.
        num_flights: Slots for microbatches that are in the pipeline.
        flight: The slot of each microbatch, of shape (microbatches,).
    """

    num_inputs: int
    receive_input: Ints
    feed_input: Ints
    forward_input: Ints
    num_saved: int
    forward_saved: Ints
    backward_saved: Ints
    num_cotangents: int
    receive_cotangent: Ints
    feed_cotangent: Ints
    backward_cotangent: Ints
    num_pending: int
    backward_pending: Ints
    weight_pending: Ints
    num_flights: int
    flight: Ints


def plan_buffers(table: Table) -> Buffers:
    """The fewest memory slots that hold what a table keeps.

    Example:
        >>> from nnx_parallel.pipeline import OneFOneB
        >>> buffers = plan_buffers(OneFOneB().table(num_stages=4, num_microbatches=64))
        >>> buffers.num_inputs, buffers.num_saved, buffers.num_cotangents
        (1, 7, 1)
    """
    kept = find_lifetimes(table.ticks)
    shape = (table.num_ticks, table.num_stages)
    inputs, saved = _colour(kept.inputs), _colour(kept.saved)
    cotangents, pending = _colour(kept.cotangents), _colour(kept.pending)
    flights = _colour(kept.flights)
    buffers = Buffers(
        num_inputs=_count(inputs),
        receive_input=_writes(kept.inputs, inputs, shape, slice(1, None)),
        feed_input=_writes(kept.inputs, inputs, shape, slice(0, 1)),
        forward_input=_reads(kept.inputs, inputs, shape),
        num_saved=_count(saved),
        forward_saved=_writes(kept.saved, saved, shape),
        backward_saved=_reads(kept.saved, saved, shape),
        num_cotangents=_count(cotangents),
        receive_cotangent=_writes(kept.cotangents, cotangents, shape, slice(0, -1)),
        feed_cotangent=_writes(kept.cotangents, cotangents, shape, slice(-1, None)),
        backward_cotangent=_reads(kept.cotangents, cotangents, shape),
        num_pending=_count(pending) if table.is_split else 0,
        backward_pending=_writes(kept.pending, pending, shape),
        weight_pending=_reads(kept.pending, pending, shape),
        num_flights=_count(flights),
        flight=frozen_ints(flights[0]),
    )
    check_buffers(table, buffers)
    return buffers


def check_buffers(table: Table, buffers: Buffers) -> None:
    """Replays a table tick by tick on memory slots that hold names instead of arrays.

    Raises:
        ScheduleError: If a value is overwritten while it is needed, or a slot is read
            that holds another one.
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
    """What a stage does in a tick, in the order in which it does it."""

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
    """What a neighbour sent in the last tick; ``direction`` is 1 forward, -1 back."""
    if tick == 0:
        return None
    sent = _value(slots, tick - 1, (stage - direction) % table.num_stages)
    if sent is None:
        return None
    # Around the ends of the pipeline a microbatch enters the next chunk.
    is_around = stage == (0 if direction == 1 else table.num_stages - 1)
    chunk = sent[1] + (direction if is_around else 0)
    return (sent[0], chunk) if 0 <= chunk < table.num_chunks else None


def _colour(lifetimes: Lifetimes) -> Ints:
    """A slot for each value, none shared by two that live in one tick."""
    slots = np.full(lifetimes.start.shape, -1, np.int32)
    for stage in np.unique(lifetimes.stage):
        rows = np.flatnonzero(lifetimes.stage == stage)
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        count = 0
        microbatches = range(len(slots[0]))
        values = [(lifetimes.start[v, m], v, m) for v in rows for m in microbatches]
        for start, row, microbatch in sorted(values):
            while busy and busy[0][0] < start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                heapq.heappush(free, count)
                count += 1
            slot = heapq.heappop(free)
            heapq.heappush(busy, (lifetimes.end[row, microbatch], slot))
            slots[row, microbatch] = slot
    return slots


def _count(slots: Ints) -> int:
    """At least 1: arrays without elements are awkward to index."""
    return int(slots.max(initial=0)) + 1


def _writes(
    lifetimes: Lifetimes, slots: Ints, shape: tuple[int, int], rows: slice = slice(None)
) -> Ints:
    return _place(lifetimes.start, lifetimes.stage, slots, shape, rows)


def _reads(lifetimes: Lifetimes, slots: Ints, shape: tuple[int, int]) -> Ints:
    return _place(lifetimes.end, lifetimes.stage, slots, shape, slice(None))


def _place(
    ticks: Ints, stage: Ints, slots: Ints, shape: tuple[int, int], rows: slice
) -> Ints:
    cells = np.full(shape, -1, np.int32)
    cells[ticks[rows], stage[rows, None]] = slots[rows]
    return frozen_ints(cells)
