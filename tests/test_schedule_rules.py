"""A table or a plan of buffers that breaks a rule raises, with the reason."""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.schedules import GPipe, Interleaved, OneFOneB, ZeroBubble
from nnx_parallel.schedules.slots import Slot, Slots, frozen_ints
from nnx_parallel.schedules.table import Buffers, Table, plan_buffers
from tests.buffer_replay import check_buffers, checked_buffers


def one_stage(*slots: Slot) -> Table:
    return Table.from_slots(1, 2, slots)


def replaced(array: ArrayLike, value: int, *index: int) -> np.ndarray:
    """A copy of the array with one element replaced."""
    copy = np.array(array)
    copy[index] = value
    return copy


FORWARD = [[0], [1], [2], [3]]
BACKWARD = [[6], [5], [4], [3]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Table.from_ticks(2, [[0, 1], [0, 2]], [[4, 5], [3, 4]]),
            "forward of microbatch 0, chunk 0 on stage 1 is at tick 0; it needs "
            "tick 1 or later: stage 0 makes its input at tick 0.",
        ),
        (
            lambda: Table.from_ticks(2, replaced(FORWARD, 1, 2, 0), BACKWARD),
            "forward of microbatch 0, chunk 1 on stage 0 is at tick 1; it needs "
            "tick 2 or later: stage 1, chunk 0, makes its input at tick 1.",
        ),
        (
            lambda: Table.from_ticks(2, [[0, 1], [1, 2]], [[5, 6], [0, 3]]),
            "backward input of microbatch 0, chunk 0 on stage 1 is at tick 0; it "
            "needs tick 1 or later: its forward is at tick 1.",
        ),
        (
            lambda: Table.from_ticks(2, [[0, 1], [1, 2]], [[2, 3], [1, 3]]),
            "backward input of microbatch 1, chunk 0 on stage 0 is at tick 3; it "
            "needs tick 4 or later: stage 1 makes its cotangent at tick 3.",
        ),
        (
            lambda: Table.from_ticks(2, FORWARD, replaced(BACKWARD, 4, 1, 0)),
            "backward input of microbatch 0, chunk 0 on stage 1 is at tick 4; it "
            "needs tick 5 or later: stage 0, chunk 1, makes its cotangent at tick 4.",
        ),
        (
            lambda: Table.from_ticks(
                2, [[0, 1], [1, 2]], [[3, 4], [2, 3]], [[3, 4], [2, 2]]
            ),
            "backward weight of microbatch 1, chunk 0 on stage 1 is at tick 2, "
            "where the stage already has microbatch 0, chunk 0. A stage has at most "
            "one backward weight slot in a tick.",
        ),
        (
            lambda: Table.from_ticks(1, [[0, 1]], [[1, 2]], [[1, 0]]),
            "backward weight of microbatch 1, chunk 0 on stage 0 is at tick 0; it "
            "needs tick 2 or later: its backward input is at tick 2.",
        ),
        (
            lambda: Table.from_ticks(1, [[1, 0]], [[1, 2]]),
            "forward of microbatch 1, chunk 0 on stage 0 is at tick 0; it needs "
            "tick 2 or later: microbatch 0 comes before it, at tick 1.",
        ),
        (
            lambda: Table.from_ticks(1, [[0, 1]], [[3, 2]]),
            "backward input of microbatch 1, chunk 0 on stage 0 is at tick 2; it "
            "needs tick 4 or later: microbatch 0 comes before it, at tick 3.",
        ),
        (
            lambda: Table.from_ticks(1, [[0, 1]], [[1, 2]], [[4, 3]]),
            "backward weight of microbatch 1, chunk 0 on stage 0 is at tick 3; it "
            "needs tick 5 or later: microbatch 0 comes before it, at tick 4.",
        ),
        (
            lambda: one_stage(Slot("forward", 0, 0, 0)),
            "forward of microbatch 1, chunk 0 on stage 0 is missing. Every stage takes "
            "every microbatch exactly once for each of its chunks.",
        ),
        (
            lambda: one_stage(*(Slot("forward", t, 0, t // 2) for t in range(3))),
            "forward of microbatch 0, chunk 0 on stage 0 is at ticks [0, 1]. Every "
            "stage takes every microbatch exactly once",
        ),
        (
            lambda: one_stage(
                *(Slot("forward", m, 0, m) for m in range(2)),
                *(Slot("backward_input", m, 0, m) for m in range(2)),
            ),
            "backward weight of microbatch 0, chunk 0 on stage 0 is missing.",
        ),
        (
            lambda: one_stage(Slot("forward", 0, 0, 0), Slot("forward", 0, 0, 1)),
            "forward of microbatch 1, chunk 0 on stage 0 is at tick 0, where the "
            "stage already has microbatch 0, chunk 0. A stage has at most one forward "
            "slot in a tick.",
        ),
        (
            lambda: one_stage(Slot("forward", 0, 1, 0)),
            "Slot(kind='forward', tick=0, stage=1, microbatch=0, chunk=0) has stage 1. "
            "Valid: 0 to 0.",
        ),
        (
            lambda: one_stage(Slot("forward", 0, 0, 2)),
            "has microbatch 2. Valid: 0 to 1.",
        ),
        (
            lambda: one_stage(Slot("forward", 0, 0, 0, chunk=-1)),
            "has chunk -1. Valid: 0 to 0.",
        ),
        (
            lambda: one_stage(Slot("forward", -1, 0, 0)),
            "has tick -1. Ticks count from 0.",
        ),
        (
            lambda: Table.from_ticks(2, [[0, 1]]),
            "The ticks have shapes {'forward': (1, 2)}. All must be (chunks * stages, "
            "microbatches), with 2 stages.",
        ),
        (
            lambda: replace(GPipe().table(2, 2), num_stages=3),
            "All must be (ticks, stages) = (6, 3).",
        ),
        (
            lambda: replace(GPipe().table(2, 2), num_microbatches=1),
            "forward of microbatch 1, chunk 0 on stage 0 is at tick 1, but there "
            "are 1 microbatches and 1 chunks, counted from 0.",
        ),
        (
            lambda: Slots(frozen_ints([[0, 1]]), frozen_ints([0])),
            "Slots have microbatches of shape (1, 2) and chunks of shape (1,). Both "
            "must be (ticks, stages).",
        ),
        (
            lambda: Slots(frozen_ints([[0, 1]]), frozen_ints([[0, -1]])),
            "The slot at tick 0 of stage 1 has microbatch 1 but chunk -1. Give the "
            "slot both, or set both to -1 if the stage has no slot.",
        ),
        (lambda: GPipe().table(0, 4), "num_stages is 0. It must be at least 1."),
        (
            lambda: OneFOneB().table(4, -2),
            "num_microbatches is -2. It must be at least 1.",
        ),
        (
            lambda: ZeroBubble().forward_table(4, 0),
            "num_microbatches is 0. It must be at least 1.",
        ),
        (
            lambda: Interleaved(chunks=0),
            "Interleaved(chunks=0) has 0 chunks. A stage holds 1 or more; with 1 this "
            "is OneFOneB.",
        ),
    ],
)
def test_invalid_table_raises(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    "table",
    [
        ZeroBubble().table(3, 4),
        Interleaved(2).table(2, 4),
        GPipe().table(2, 3),
        GPipe().forward_table(3, 4),
    ],
    ids=lambda table: table.name,
)
def test_every_change_of_plan_is_detected(table: Table) -> None:
    buffers = checked_buffers(table)
    unnoticed = []
    for name, array in vars(buffers).items():
        if isinstance(array, int):
            continue
        for index, value in np.ndenumerate(array):
            for wrong in {-1, 0, 1, 99} - {int(value)}:
                changed = replace(buffers, **{name: replaced(array, wrong, *index)})
                if passes(table, changed):
                    unnoticed.append((name, index, wrong))
    # A microbatch may use another free flight slot.
    assert {name for name, _, _ in unnoticed} <= {"flight"}
    assert all(wrong in range(buffers.num_flights) for _, _, wrong in unnoticed)


def passes(table: Table, buffers: Buffers) -> bool:
    try:
        check_buffers(table, buffers)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize(
    ("field", "value", "index", "message"),
    [
        (
            "forward_saved",
            0,
            (1, 0),
            "Slot 0 of saved on stage 0 at tick 1 is written with microbatch 1, chunk "
            "0 while it holds microbatch 0, chunk 0, which is not yet read.",
        ),
        (
            "backward_saved",
            1,
            (2, 0),
            "Slot 1 of saved on stage 0 at tick 2 is read for microbatch 0, chunk 0 "
            "but holds microbatch 1, chunk 0.",
        ),
        (
            "receive_input",
            0,
            (3, 0),
            "Slot 0 of inputs on stage 0 at tick 3 is written, but the table has "
            "nothing there.",
        ),
        (
            "feed_cotangent",
            -1,
            (2, 1),
            "Slot -1 of cotangents on stage 1 at tick 2 is written for microbatch 1, "
            "chunk 0. Valid slots: 0 to 0.",
        ),
        (
            "flight",
            0,
            (1,),
            "Slot 0 of flights on stage 0 at tick 1 is written with microbatch 1, "
            "chunk 0 while it holds microbatch 0, chunk 0, which is not yet read.",
        ),
    ],
)
def test_plan_that_loses_value_raises(
    field: str, value: int, index: tuple[int, ...], message: str
) -> None:
    table = OneFOneB().table(2, 4)
    buffers = plan_buffers(table)
    broken = replace(
        buffers, **{field: replaced(getattr(buffers, field), value, *index)}
    )
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check_buffers(table, broken)
