"""Schedules have the times and memory that theory predicts."""

import itertools
import re

import numpy as np
import pytest

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.schedules import (
    Fixed,
    GPipe,
    Interleaved,
    OneFOneB,
    Schedule,
    ZeroBubble,
)
from nnx_parallel.schedules.slots import KINDS, Slot
from nnx_parallel.schedules.table import Table
from tests.buffer_replay import checked_buffers

STAGES = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 2, 3, 7, 8, 24, 64)
SCHEDULES = (
    GPipe(),
    OneFOneB(),
    ZeroBubble(),
    *(Interleaved(chunks) for chunks in (1, 2, 3, 4)),
)
sizes = pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(s, m) for s in STAGES for m in MICROBATCHES]
)
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)


@sizes
@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), Interleaved(1)], ids=repr)
def test_joint_backward_efficiency_matches_theory(
    schedule: Schedule, num_stages: int, num_microbatches: int
) -> None:
    simulation = schedule.table(num_stages, num_microbatches).simulate()
    expected = num_microbatches / (num_microbatches + num_stages - 1)
    assert simulation.efficiency == pytest.approx(expected, rel=1e-12)
    assert simulation.bubble == pytest.approx(1 - expected, abs=1e-12)


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved_efficiency_matches_theory(
    num_stages: int, groups: int, chunks: int
) -> None:
    num_microbatches = groups * num_stages
    table = Interleaved(chunks).table(num_stages, num_microbatches)
    expected = num_microbatches / (num_microbatches + (num_stages - 1) / chunks)
    assert table.simulate().efficiency == pytest.approx(expected, rel=1e-12)


@sizes
def test_zero_bubble_efficiency_matches_theory(
    num_stages: int, num_microbatches: int
) -> None:
    table = ZeroBubble().table(num_stages, num_microbatches)
    work = 3 * num_microbatches
    expected = work / (work + 2 * (num_stages - 1))
    assert table.simulate().efficiency == pytest.approx(expected, rel=1e-12)
    assert table.is_split is (num_stages > 1)


@schedules
def test_forward_table_has_only_forward_slots(schedule: Schedule) -> None:
    table = schedule.table(4, 8)
    forward = schedule.forward_table(4, 8)
    assert forward.is_forward_only
    assert not table.is_forward_only
    assert forward.num_chunks == table.num_chunks == schedule.chunks
    assert forward.num_ticks == 8 * schedule.chunks + 3
    assert forward.forward.any.all()
    np.testing.assert_array_equal(
        forward.ticks.by_kind["forward"], table.ticks.by_kind["forward"]
    )
    total_time = forward.simulate(forward=2.0).total_time
    assert total_time == pytest.approx(2 * (8 + 3 / schedule.chunks))


def test_tick_time_is_longest_slot_of_stages() -> None:
    # 3 warm-up ticks run only forward slots, 5 ticks both, and 3 drain ticks only
    # backward.
    simulation = OneFOneB().table(4, 5).simulate(1.0, 2.0, 4.0)
    assert simulation.total_time == 3 * 1 + 3 * 1 + 2 * 7 + 6 * 6
    halves = Interleaved(2).table(1, 1).simulate(1.0, 2.0, 4.0)
    np.testing.assert_allclose(halves.timeline.tick_start, [0.0, 0.5, 4.0, 7.0])


@schedules
def test_all_stages_wait_for_largest_stage(schedule: Schedule) -> None:
    table, parts = schedule.table(4, 8), 4 * schedule.chunks
    even, uneven = table.simulate(), table.simulate(num_layers=2 * parts + 1)
    assert table.simulate(num_layers=3 * parts).efficiency == even.efficiency
    # Stages have 3, 2, 2, ... layers. A tick takes the time of 3 layers, and the mean
    # is a little over 2.
    longer = 3 * parts / (2 * parts + 1)
    assert uneven.total_time == pytest.approx(even.total_time * longer, rel=1e-12)
    assert 1 - uneven.bubble == pytest.approx((1 - even.bubble) / longer, rel=1e-12)
    work = [
        sum(s.end - s.start for s in uneven.timeline.slots if s.stage == stage)
        for stage in range(4)
    ]
    layers = [2 * schedule.chunks + (stage == 0) for stage in range(4)]
    assert work == pytest.approx(np.array(layers) * work[1] / layers[1])
    assert sum(work) / 4 == pytest.approx(8 * sum(uneven.costs.values()))
    with pytest.raises(ScheduleError, match=f"fewer than the {parts} chunks"):
        table.simulate(num_layers=parts - 1)


@schedules
def test_slots_of_one_stage_do_not_overlap(schedule: Schedule) -> None:
    timeline = schedule.table(4, 8).simulate(1.0, 2.0, 3.0).timeline
    for stage in range(4):
        own = [slot for slot in timeline.slots if slot.stage == stage]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))
        assert sum(slot.end - slot.start for slot in own) == pytest.approx(8 * 6)
    for slot in timeline.slots:
        assert timeline.tick_start[slot.tick] <= slot.start + 1e-9
        assert slot.end <= timeline.tick_start[slot.tick + 1] + 1e-9


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ((1.0, -1.0, 1.0), "'backward_input': -1.0, 'backward_weight': 1.0} must be 0"),
        ((0.0, 0.0, 0.0), "Costs {'forward': 0.0, 'backward': 0.0} must not all be 0."),
    ],
)
def test_invalid_costs_raise(costs: tuple, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        GPipe().table(2, 2).simulate(*costs)


@sizes
def test_peak_memory_matches_theory(num_stages: int, num_microbatches: int) -> None:
    def peak(schedule: Schedule) -> int:
        table = schedule.table(num_stages, num_microbatches)
        return table.simulate().peak_stage_inputs

    assert peak(GPipe()) == num_microbatches
    assert peak(OneFOneB()) == min(num_microbatches, 2 * num_stages - 1)
    assert peak(ZeroBubble()) == peak(OneFOneB())
    assert peak(Interleaved(1)) == peak(OneFOneB())


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved_peak_memory_matches_theory(num_stages: int, chunks: int) -> None:
    table = Interleaved(chunks).table(num_stages, 8 * num_stages)
    expected = (chunks + 1) * num_stages - 1
    assert table.simulate().peak_stage_inputs == expected


@sizes
def test_pending_weight_slots_are_bounded_by_stages(
    num_stages: int, num_microbatches: int
) -> None:
    table = ZeroBubble().table(num_stages, num_microbatches)
    inputs = (table.backward_input.active).cumsum(axis=0)
    weights = (table.backward_weight.active).cumsum(axis=0)
    backlog = (inputs - weights).max()
    assert backlog == min(num_stages - 1, num_microbatches)
    # A slot becomes free in the next tick, so one more slot is in use within a tick.
    num_pending = checked_buffers(table).num_pending
    assert num_pending == (min(num_stages, num_microbatches) if table.is_split else 0)


@sizes
@schedules
def test_buffers_replay_every_value(
    schedule: Schedule, num_stages: int, num_microbatches: int
) -> None:
    table = schedule.table(num_stages, num_microbatches)
    buffers = checked_buffers(table)
    assert buffers.num_saved == table.simulate().peak_stage_inputs
    assert (buffers.receive_input >= 0).sum() == (
        (schedule.chunks * num_stages - 1) * num_microbatches
    )
    assert (buffers.feed_input[:, 0] >= 0).sum() == num_microbatches
    assert (buffers.feed_cotangent[:, -1] >= 0).sum() == num_microbatches
    assert (buffers.feed_input[:, 1:] == -1).all()
    assert (buffers.feed_cotangent[:, :-1] == -1).all()
    # In wavefront schedules, a value is used in the tick in which it arrives.
    assert buffers.num_inputs == 1
    if not isinstance(schedule, GPipe):
        assert buffers.num_cotangents == 1


@schedules
def test_evaluation_buffers_hold_only_values_in_flight(schedule: Schedule) -> None:
    table = schedule.forward_table(4, 64)
    buffers = checked_buffers(table)
    assert buffers.num_inputs == 1
    assert buffers.num_flights == 4
    assert buffers.num_pending == 0
    for written in (buffers.forward_saved, buffers.feed_cotangent):
        assert (written == -1).all()


def test_bytes_match_buffer_slots() -> None:
    table = ZeroBubble().table(4, 16)
    buffers = checked_buffers(table)
    expected = {
        "input_bytes": buffers.num_inputs,
        "saved_bytes": buffers.num_saved,
        "cotangent_bytes": buffers.num_cotangents,
        "pending_bytes": buffers.num_pending,
        "flight_bytes": buffers.num_flights,
    }
    assert expected == {
        name: table.simulate(**{name: 1}).peak_residual_bytes for name in expected
    }
    assert table.simulate(saved_bytes=10, pending_bytes=100).peak_residual_bytes == 470


def test_custom_table_is_built_from_ticks() -> None:
    """Runs two microbatches forward, then backward; weight slots fill idle ticks."""
    ticks = np.array(
        [[[0, 1], [1, 2]], [[3, 4], [2, 3]], [[4, 5], [2, 4]]],
    )
    slots = [
        Slot(KINDS[kind], tick, stage, microbatch)
        for (kind, stage, microbatch), tick in np.ndenumerate(ticks)
    ]
    table = Table.from_slots(2, 2, reversed(slots), name="mine")
    forward, backward_input, backward_weight = ticks
    same = Table.from_ticks(2, forward, backward_input, backward_weight)
    assert table == same
    assert hash(table) == hash(same)
    assert table != Table.from_ticks(2, forward, backward_input)
    assert table.is_split
    np.testing.assert_array_equal(
        table.backward_weight.microbatch,
        [[-1, -1], [-1, -1], [-1, 0], [-1, -1], [0, 1], [1, -1]],
    )
    assert checked_buffers(table).num_pending == 2
    schedule = Fixed(table)
    assert schedule.table(2, 2) is table
    assert schedule.forward_table(2, 5).num_microbatches == 5


def test_custom_table_of_other_size_raises() -> None:
    table = Interleaved(2).table(4, 8)
    assert Fixed(table).chunks == 2
    message = (
        "The table 'Interleaved 1F1B' has 4 stages and 8 microbatches, but the step "
        "has 4 stages and 16 microbatches. Make the two equal, or give a schedule that "
        "fits any size."
    )
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Fixed(table).table(4, 16)


def test_tables_compare_by_value() -> None:
    assert GPipe().table(2, 4) == GPipe().table(2, 4)
    assert GPipe().table(2, 4) != OneFOneB().table(2, 4)
    assert Fixed(GPipe().table(2, 4)) == Fixed(GPipe().table(2, 4))
    assert GPipe().table(1, 4).forward != GPipe().table(1, 5).forward
    with pytest.raises(ValueError, match="read-only"):
        GPipe().table(2, 4).forward.microbatch[0, 0] = 3
