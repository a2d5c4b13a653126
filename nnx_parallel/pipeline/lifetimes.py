"""Lifetimes: from which tick to which a stage keeps what it will need later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_parallel.pipeline.slots import Ints, Ticks


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
