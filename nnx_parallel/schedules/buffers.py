"""Buffers: the memory slots of a table, planned before anything runs."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from nnx_parallel.schedules.simulate import LiveRanges, live_ranges
from nnx_parallel.schedules.slots import Ints, frozen_ints
from nnx_parallel.schedules.table import Table


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """The memory slot that every stage writes and reads in every tick.

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
        num_flights: Slots for in-flight microbatches.
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

    Every value that a stage keeps has a live range of ticks. Values whose ranges do not
    meet share a slot; the greedy choice of the lowest free one needs as many as are
    ever alive at once [1]. All stages run one program, so all have as many as the
    busiest.

    Example:
        >>> from nnx_parallel import OneFOneB
        >>> buffers = plan_buffers(OneFOneB().table(num_stages=4, num_microbatches=64))
        >>> buffers.num_inputs, buffers.num_saved, buffers.num_cotangents
        (1, 7, 1)

    References:
        [1] Poletto and Sarkar, "Linear Scan Register Allocation", 1999, section 4,
        https://doi.org/10.1145/330249.330250
    """
    live = live_ranges(table.ticks)
    slots = {name: _assign(ranges) for name, ranges in live.items()}
    # At least 1: arrays without elements are awkward to index.
    counts = {name: int(own.max(initial=0)) + 1 for name, own in slots.items()}

    def at(when: str, name: str, rows: slice = slice(None)) -> Ints:
        """The slot of each value at the ``start`` or ``end`` of its live range."""
        own = live[name]
        cells = np.full((table.num_ticks, table.num_stages), -1, np.int32)
        cells[getattr(own, when)[rows], own.stage[rows, None]] = slots[name][rows]
        return frozen_ints(cells)

    # Rows are virtual stages: the first is fed new microbatches, the last cotangents of
    # the loss, and all others receive from a neighbour.
    return Buffers(
        num_inputs=counts["inputs"],
        receive_input=at("start", "inputs", slice(1, None)),
        feed_input=at("start", "inputs", slice(0, 1)),
        forward_input=at("end", "inputs"),
        num_saved=counts["saved"],
        forward_saved=at("start", "saved"),
        backward_saved=at("end", "saved"),
        num_cotangents=counts["cotangents"],
        receive_cotangent=at("start", "cotangents", slice(0, -1)),
        feed_cotangent=at("start", "cotangents", slice(-1, None)),
        backward_cotangent=at("end", "cotangents"),
        num_pending=counts["pending"] if table.is_split else 0,
        backward_pending=at("start", "pending"),
        weight_pending=at("end", "pending"),
        num_flights=counts["flights"],
        flight=frozen_ints(slots["flights"][0]),
    )


def _assign(ranges: LiveRanges) -> Ints:
    """A slot for each value, none shared by two that are alive in one tick."""
    start, end, stages = ranges
    slots = np.full_like(start, -1, dtype=np.int32)
    for stage in np.unique(stages):
        values = [at for at in np.ndindex(start.shape) if stages[at[0]] == stage]
        free = [*range(len(values))]  # a heap: the lowest first
        busy: list[tuple[int, int]] = []  # last tick and slot, the earliest first
        for value in sorted(values, key=lambda at: (start[at], at)):
            # Before it, not at it: a stage writes what it receives in a tick before it
            # reads anything, so a slot's last reader keeps it for the whole tick.
            while busy and busy[0][0] < start[value]:
                heapq.heappush(free, heapq.heappop(busy)[1])
            slots[value] = slot = heapq.heappop(free)
            heapq.heappush(busy, (int(end[value]), slot))
    return slots
