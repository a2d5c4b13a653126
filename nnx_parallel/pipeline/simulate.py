"""What a table costs: time, bubble and memory, from the costs of its slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nnx_parallel.errors import ScheduleError
from nnx_parallel.pipeline.lifetimes import find_lifetimes
from nnx_parallel.pipeline.slots import Ints, Ticks


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
