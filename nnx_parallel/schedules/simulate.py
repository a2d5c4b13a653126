"""What a table costs: time, bubble and memory, from the costs of its slots.

Lifetimes: from which tick to which a stage keeps what it will need later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.slots import Ints, Ticks


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """What one kind of buffer holds, each value from its first to its last tick.

    A value occupies its last tick whole, so another may take its place in the next.

    Attributes:
        start: First ticks, of shape (rows, microbatches); a row is a virtual stage,
            or the only one of values that the whole pipeline shares.
        end: Last ticks, of the same shape.
        stage: The stage that keeps the values of a row, of shape (rows,).
    """

    start: Ints
    end: Ints
    stage: Ints

    @property
    def peak(self) -> int:
        """The most values that one stage keeps at once."""
        if not self.start.size:
            return 0
        change = np.zeros((self.stage.max() + 1, self.end.max() + 2), np.int64)
        stage = np.broadcast_to(self.stage[:, None], self.start.shape)
        np.add.at(change, (stage, self.start), 1)
        np.add.at(change, (stage, self.end + 1), -1)
        return int(change.cumsum(axis=1).max())


@dataclass(frozen=True)
class Kept:
    """The lifetimes of everything that a table makes a pipeline keep.

    Attributes:
        inputs: A chunk's input, from its arrival to the forward slot.
        saved: The same input, from the forward slot to the backward input slot.
        cotangents: A chunk's output cotangent, from its arrival to the backward input
            slot.
        pending: What the weight gradient still needs, from the backward input slot to
            the backward weight slot; nothing in a table that is not split.
        flights: A microbatch, from its entry into the pipeline to its last slot in the
            first virtual stage (the last forward slot in evaluation).
    """

    inputs: Lifetimes
    saved: Lifetimes
    cotangents: Lifetimes
    pending: Lifetimes
    flights: Lifetimes


def find_lifetimes(ticks: Ticks) -> Kept:
    """The lifetimes that follow from when each slot runs."""
    num_stages, forward, backward, weight = ticks
    stage = np.arange(len(forward), dtype=np.int32) % num_stages
    first = stage[:1]
    nothing = Lifetimes(forward[:0], forward[:0], stage[:0])
    # The first virtual stage takes a new microbatch when it runs it.
    arrival = np.concatenate([forward[:1], forward[:-1] + 1])
    inputs = Lifetimes(arrival, forward, stage)
    if backward is None or weight is None:
        flights = Lifetimes(forward[:1], forward[-1:], first)
        return Kept(inputs, nothing, nothing, nothing, flights)
    # The part after the stack makes the last cotangent in the tick of the forward.
    made = np.concatenate([backward[1:] + 1, forward[-1:]])
    return Kept(
        inputs=inputs,
        saved=Lifetimes(forward, backward, stage),
        cotangents=Lifetimes(made, backward, stage),
        pending=Lifetimes(backward, weight, stage) if ticks.is_split else nothing,
        flights=Lifetimes(forward[:1], backward[:1], first),
    )


class TimedSlot(NamedTuple):
    """A slot and when it runs; ``backward`` is both halves where they run as one."""

    kind: str
    stage: int
    microbatch: int
    chunk: int
    start: float
    end: float
    tick: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """When every tick and every slot starts.

    Attributes:
        tick_start: Of shape (ticks + 1,); the last is the end.
        slots: By start, then by stage.
    """

    tick_start: NDArray[np.float64]
    slots: tuple[TimedSlot, ...]


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a table costs.

    Attributes:
        total_time: In the units of the costs.
        efficiency: One stage's work divided by ``total_time``.
        peak_stage_inputs: The most inputs of chunks that the busiest stage keeps at
            once between forward and backward.
        peak_residual_bytes: Bytes of all buffers on one device.
        costs: Of one microbatch on one stage, by kind of slot.
        timeline: When every slot runs.
    """

    total_time: float
    efficiency: float
    peak_stage_inputs: int
    peak_residual_bytes: int
    costs: Mapping[str, float]
    timeline: Timeline

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage has no work."""
        return 1 - self.efficiency


def simulate_ticks(
    ticks: Ticks, costs: Mapping[str, float], sizes: Mapping[str, int]
) -> Simulation:
    """Runs a table on paper, in lock step.

    Args:
        ticks: When each slot runs.
        costs: Of ``forward``, ``backward_input`` and ``backward_weight``, for one
            microbatch in all of a stage's layers.
        sizes: Bytes of one ``inputs``, ``saved``, ``cotangents``, ``pending``,
            ``flights`` value.

    Raises:
        ScheduleError: If costs are negative, or all of the table's are zero.
    """
    if min(costs.values()) < 0:
        raise ScheduleError(f"Costs {dict(costs)} must be 0 or more.")
    kinds = _kinds(ticks, costs)
    paid = {kind: cost for kind, (cost, _) in kinds.items()}
    timeline = _time(ticks, kinds)
    total_time = float(timeline.tick_start[-1])
    if not total_time:
        raise ScheduleError(f"Costs {paid} must not all be 0.")
    kept = find_lifetimes(ticks)
    work = ticks.forward.shape[1] * sum(paid.values())
    return Simulation(
        total_time=total_time,
        efficiency=work / total_time,
        peak_stage_inputs=kept.saved.peak,
        peak_residual_bytes=sum(
            getattr(kept, name).peak * size for name, size in sizes.items()
        ),
        costs=paid,
        timeline=timeline,
    )


def _kinds(ticks: Ticks, costs: Mapping[str, float]) -> dict[str, tuple[float, Ints]]:
    """Cost and ticks of what runs as one piece: both halves of a joint backward."""
    kinds = {"forward": (costs["forward"], ticks.forward)}
    if ticks.backward_input is None or ticks.backward_weight is None:
        return kinds
    if ticks.is_split:
        kinds["backward_input"] = (costs["backward_input"], ticks.backward_input)
        kinds["backward_weight"] = (costs["backward_weight"], ticks.backward_weight)
        return kinds
    joint = costs["backward_input"] + costs["backward_weight"]
    return kinds | {"backward": (joint, ticks.backward_input)}


def _time(ticks: Ticks, kinds: Mapping[str, tuple[float, Ints]]) -> Timeline:
    num_ticks = max(int(at.max()) for _, at in kinds.values()) + 1
    # A kind that any stage has in a tick takes its time on all of them.
    durations = np.zeros((len(kinds), num_ticks))
    for row, (cost, at) in enumerate(kinds.values()):
        durations[row, at.ravel()] = cost / ticks.num_chunks
    tick_start = np.concatenate([[0.0], durations.sum(axis=0).cumsum()])
    offsets = tick_start[:-1] + durations.cumsum(axis=0) - durations
    slots = []
    for row, (kind, (_, at)) in enumerate(kinds.items()):
        for (virtual, microbatch), tick in np.ndenumerate(at):
            chunk, stage = divmod(virtual, ticks.num_stages)
            start = float(offsets[row, tick])
            end = start + float(durations[row, tick])
            slots.append(
                TimedSlot(kind, stage, microbatch, chunk, start, end, int(tick))
            )
    slots.sort(key=lambda slot: (slot.start, slot.tick, slot.stage))
    return Timeline(tick_start, tuple(slots))
