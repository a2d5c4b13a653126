"""Computes the costs of a table: time, bubble, and how long each value is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.slots import KINDS, Ints, Ticks, share_layers


class LiveRanges(NamedTuple):
    """First and last tick in which the values of one buffer are kept.

    Arrays have one row for each virtual stage, or a single row for values that are kept
    only once in the pipeline.
    """

    start: Ints  # (rows, microbatches)
    end: Ints  # (rows, microbatches)
    stage: Ints  # the stage that keeps a row's values: (rows,)

    @property
    def peak(self) -> int:
        """Maximum number of values that one stage keeps at once."""
        if not self.start.size:
            return 0
        change = np.zeros((self.stage.max() + 1, self.end.max() + 2), np.int64)
        np.add.at(change, (self.stage[:, None], self.start), 1)
        # A value is read at some time within its last tick, so its memory is free from
        # the next tick on.
        np.add.at(change, (self.stage[:, None], self.end + 1), -1)
        return int(change.cumsum(axis=1).max())


def live_ranges(ticks: Ticks) -> dict[str, LiveRanges]:
    """Returns the live ranges of all values that a pipeline keeps, by buffer.

    - ``inputs``: a chunk's input, from its arrival to the forward slot.
    - ``saved``: the same input, from the forward slot to the backward input slot.
    - ``cotangents``: a chunk's output cotangent, from its arrival to the backward
      input slot.
    - ``pending``: values that the weight gradient still needs, from the backward input
      slot to the backward weight slot. It is empty if a stage computes both gradients
      in one slot.
    - ``flights``: an in-flight microbatch, from its entry into the pipeline to its
      last slot in the first virtual stage (the last forward slot in evaluation).
    """
    forward, *both_backward = ticks.by_kind.values()
    stage = np.arange(len(forward), dtype=np.int32) % ticks.num_stages
    # A stage's output arrives one tick later. The first virtual stage receives nothing:
    # it takes and runs a new microbatch in the same tick.
    arrival = np.concatenate([forward[:1], forward[:-1] + 1])
    none = LiveRanges(forward[:0], forward[:0], stage[:0])
    ranges = {
        "inputs": LiveRanges(arrival, forward, stage),
        **dict.fromkeys(("saved", "cotangents", "pending"), none),
        "flights": LiveRanges(forward[:1], forward[-1:], stage[:1]),
    }
    if both_backward:
        backward, weight = both_backward
        # Cotangents travel the other way. The part after the stack computes the
        # cotangents of the last virtual stage in the tick of that stage's forward slot.
        made = np.concatenate([backward[1:] + 1, forward[-1:]])
        ranges["saved"] = LiveRanges(forward, backward, stage)
        ranges["cotangents"] = LiveRanges(made, backward, stage)
        ranges["flights"] = LiveRanges(forward[:1], backward[:1], stage[:1])
        if ticks.is_split:
            ranges["pending"] = LiveRanges(backward, weight, stage)
    return ranges


class TimedSlot(NamedTuple):
    """A slot with its times. The kind of a joint backward pass is ``backward``."""

    kind: str
    stage: int
    microbatch: int
    chunk: int
    start: float
    end: float
    tick: int


class Timeline(NamedTuple):
    """The start of each tick, and all slots with their times."""

    tick_start: NDArray[np.float64]  # (ticks + 1,): the last element is the end
    slots: tuple[TimedSlot, ...]  # sorted by start, tick and stage


@dataclass(frozen=True, eq=False)
class Simulation:
    """The time and memory of a step that follows a table.

    Attributes:
        total_time: Time of a step, in the unit of the costs.
        efficiency: The stages' mean work divided by ``total_time``.
        peak_stage_inputs: Maximum number of chunk inputs that a stage keeps at once
            between forward and backward.
        peak_residual_bytes: Bytes of all buffers on one device.
        costs: Costs of one microbatch on one stage, by kind of slot.
        timeline: The times of all slots. If a chunk has one layer less than other
            chunks, its slot ends before the tick does.
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
    ticks: Ticks,
    costs: Sequence[float],
    value_bytes: Sequence[int],
    num_layers: int | None = None,
) -> Simulation:
    """Computes the result of `Table.simulate`.

    ``costs`` are in the order of `KINDS`, and ``value_bytes`` in the order of
    `live_ranges`.
    """
    named = dict(zip(KINDS, costs, strict=True))
    if min(costs) < 0:
        raise ScheduleError(f"Costs {named} must be 0 or more.")
    kinds: dict[str, tuple[float, Ints]] = {
        kind: (named[kind], at) for kind, at in ticks.by_kind.items()
    }
    # If weight slots do not come later, one joint backward pass computes both
    # gradients.
    if "backward_input" in kinds and not ticks.is_split:
        weight, _ = kinds.pop("backward_weight")
        cost, at = kinds.pop("backward_input")
        kinds["backward"] = cost + weight, at
    paid = {kind: cost for kind, (cost, _) in kinds.items()}
    timeline = _time(ticks.num_stages, kinds, _shares(ticks, num_layers))
    total_time = float(timeline.tick_start[-1])
    if not total_time:
        raise ScheduleError(f"Costs {paid} must not all be 0.")
    peaks = {name: ranges.peak for name, ranges in live_ranges(ticks).items()}
    pairs = zip(peaks.values(), value_bytes, strict=True)
    return Simulation(
        total_time=total_time,
        efficiency=ticks.by_kind["forward"].shape[1] * sum(paid.values()) / total_time,
        peak_stage_inputs=peaks["saved"],
        peak_residual_bytes=sum(peak * size for peak, size in pairs),
        costs=paid,
        timeline=timeline,
    )


def _shares(ticks: Ticks, num_layers: int | None) -> NDArray[np.float64]:
    """Returns each virtual stage's number of layers, divided by the mean number.

    The shape is (chunks * stages,).
    """
    parts = len(ticks.by_kind["forward"])
    if num_layers is None:
        return np.ones(parts)
    if num_layers < parts:
        chunks = parts // ticks.num_stages
        raise ScheduleError(
            f"num_layers is {num_layers}, fewer than the {parts} chunks of "
            f"{ticks.num_stages} stages ({chunks} each), and every chunk needs at "
            "least one layer."
        )
    return np.array(share_layers(num_layers, parts)) * (parts / num_layers)


def _time(
    num_stages: int,
    kinds: Mapping[str, tuple[float, Ints]],
    shares: NDArray[np.float64],
) -> Timeline:
    num_ticks = max(int(at.max()) for _, at in kinds.values()) + 1
    durations = np.zeros((len(kinds), num_ticks))
    for row, (cost, at) in enumerate(kinds.values()):
        # The predicates in the compiled step are the same on all devices. So if any
        # stage has a slot of some kind in a tick, the slot takes time on all stages. A
        # chunk takes its share of a stage's cost. All chunks run the same program, with
        # as many layers as the longest chunk.
        chunk_cost = cost / (len(at) // num_stages)
        durations[row, at.ravel()] = chunk_cost * shares.max()
    tick_start = np.concatenate([[0.0], durations.sum(axis=0).cumsum()])
    # (kinds, ticks): within a tick the kinds of slots run one after the other.
    starts = tick_start[:-1] + durations.cumsum(axis=0) - durations
    slots = []
    for row, (kind, (_, at)) in enumerate(kinds.items()):
        for (virtual, microbatch), tick in np.ndenumerate(at):
            chunk, stage = divmod(virtual, num_stages)
            start = float(starts[row, tick])
            duration = float(durations[row, tick] * shares[virtual] / shares.max())
            times = start, start + duration, int(tick)
            slots.append(TimedSlot(kind, stage, microbatch, chunk, *times))
    slots.sort(key=lambda slot: (slot.start, slot.tick, slot.stage))
    return Timeline(tick_start, tuple(slots))
