"""The rules of a table: what makes a schedule one that a pipeline can follow.

A rule says the earliest tick of every slot and why. One slot before its tick is an
error that names it, the tick that it needs, and the slot that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nnx_parallel.errors import ScheduleError
from nnx_parallel.pipeline.slots import KINDS, Ints, Kind, Slots, Ticks, name_slot


def check_sizes(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Checks that there is something to schedule.

    Raises:
        ScheduleError: If a size is less than 1.
    """
    sizes = {
        "num_stages": num_stages,
        "num_microbatches": num_microbatches,
        "num_chunks": num_chunks,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ScheduleError(f"{name} is {size}. It must be at least 1.")


def read_ticks(
    kind: Kind, slots: Slots, num_microbatches: int, num_chunks: int
) -> Ints:
    """When each virtual stage has its slot of ``kind`` for each microbatch.

    Raises:
        ScheduleError: If a slot is not there exactly once.
    """
    tick, stage = np.nonzero(slots.active)
    microbatch, chunk = slots.microbatch[tick, stage], slots.chunk[tick, stage]
    outside = np.flatnonzero((microbatch >= num_microbatches) | (chunk >= num_chunks))
    if outside.size:
        at = outside[0]
        name = name_slot(kind, int(stage[at]), int(microbatch[at]), int(chunk[at]))
        raise ScheduleError(
            f"{name} stands at tick {tick[at]}, but there are {num_microbatches} "
            f"microbatches and {num_chunks} chunks, counted from 0."
        )
    num_stages = slots.active.shape[1]
    virtual = chunk * num_stages + stage
    count = np.zeros((num_chunks * num_stages, num_microbatches), np.int32)
    np.add.at(count, (virtual, microbatch), 1)
    if (count != 1).any():
        wrong, lost = np.argwhere(count != 1)[0]
        ticks = tick[(virtual == wrong) & (microbatch == lost)].tolist()
        name = name_slot(kind, wrong % num_stages, lost, wrong // num_stages)
        found = f"stands at ticks {ticks}" if ticks else "is missing"
        raise ScheduleError(
            f"{name} {found}. Every stage takes every microbatch exactly once for "
            "each of its chunks."
        )
    result = np.empty_like(count)
    result[virtual, microbatch] = tick
    return result


class _Rule(NamedTuple):
    """The earliest tick of each slot of a kind, and why it is not earlier."""

    kind: Kind
    earliest: Ints
    reason: Callable[[int, int, int], str]


def check_ticks(ticks: Ticks) -> None:
    """Checks that every slot comes after what it needs, and microbatches in order.

    The order is that of random state, which one microbatch hands to the next, and that
    in which gradients are summed.

    Raises:
        ScheduleError: If a slot comes too early; the message names what it waits for.
    """
    for rule in _rules(ticks):
        actual = getattr(ticks, rule.kind)
        early = actual < rule.earliest
        if not early.any():
            continue
        first = np.where(early, actual, actual.max() + 1).argmin()
        virtual, microbatch = (int(i) for i in np.unravel_index(first, actual.shape))
        needed = int(rule.earliest[virtual, microbatch])
        raise ScheduleError(
            f"{ticks.name(rule.kind, virtual, microbatch)} stands at tick "
            f"{actual[virtual, microbatch]}; it needs tick {needed} or later: "
            f"{rule.reason(virtual, microbatch, needed)}."
        )


def _rules(ticks: Ticks) -> Iterator[_Rule]:
    def stage(virtual: int, near: int) -> str:
        chunk, index = divmod(virtual, ticks.num_stages)
        differs = chunk != near // ticks.num_stages
        return f"stage {index}, chunk {chunk}," if differs else f"stage {index}"

    _, forward, backward, weight = ticks
    yield _Rule(
        "forward",
        np.pad(forward[:-1] + 1, ((1, 0), (0, 0))),
        lambda v, m, t: f"{stage(v - 1, v)} makes its input at tick {t - 1}",
    )
    if backward is not None and weight is not None:
        yield _Rule(
            "backward_input",
            np.pad(forward[-1:], ((len(forward) - 1, 0), (0, 0))),
            lambda v, m, t: f"its forward stands at tick {t}",
        )
        yield _Rule(
            "backward_input",
            np.pad(backward[1:] + 1, ((0, 1), (0, 0))),
            lambda v, m, t: f"{stage(v + 1, v)} makes its cotangent at tick {t - 1}",
        )
        yield _Rule(
            "backward_weight",
            backward,
            lambda v, m, t: f"its backward input stands at tick {t}",
        )
    for kind in KINDS:
        if (own := getattr(ticks, kind)) is not None:
            yield _Rule(
                kind,
                np.pad(own[:, :-1] + 1, ((0, 0), (1, 0))),
                lambda v, m, t: f"microbatch {m - 1} comes before it, at tick {t - 1}",
            )
