"""Slots: which microbatch and chunk of layers a stage works on in a tick.

The same facts stand in two forms. ``Slots`` is what the pipeline runs from: one row a
tick, one column a stage. ``Ticks`` is what rules and lifetimes are written in: one row
a *virtual stage*, in the order in which a microbatch passes through them, one column a
microbatch. Chunk ``c`` of stage ``s`` is virtual stage ``c * num_stages + s``.

The rules of a table: what makes a schedule one that a pipeline can follow.

A rule says the earliest tick of every slot and why. One slot before its tick is an
error that names it, the tick that it needs, and the slot that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nnx_parallel.errors import ScheduleError

Kind: TypeAlias = Literal["forward", "backward_input", "backward_weight"]
Ints: TypeAlias = NDArray[np.int32]

KINDS: tuple[Kind, ...] = ("forward", "backward_input", "backward_weight")
"""The three kinds of slots, in the order in which a stage runs them in one tick."""


@dataclass(frozen=True)
class Slot:
    """One piece of a stage's work: a chunk of its layers, on one microbatch.

    Attributes:
        kind: ``backward`` is both halves of a backward pass in one tick.
        tick: When, counted from 0.
        stage: Where: the index along the ``pipe`` axis.
        microbatch: Its index in the step.
        chunk: Which of the stage's chunks of layers.
    """

    kind: Literal["forward", "backward_input", "backward_weight", "backward"]
    tick: int
    stage: int
    microbatch: int
    chunk: int = 0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of slots that this one fills."""
        if self.kind == "backward":
            return ("backward_input", "backward_weight")
        return (self.kind,)


@dataclass(frozen=True, eq=False)
class Slots:
    """All slots of one kind.

    Attributes:
        microbatch: Integers of shape (ticks, stages); -1 where the stage has no such
            slot in the tick.
        chunk: The same for the chunk of the stage's layers.
    """

    microbatch: Ints
    chunk: Ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "microbatch", frozen_ints(self.microbatch))
        object.__setattr__(self, "chunk", frozen_ints(self.chunk))
        if self.microbatch.shape != self.chunk.shape or self.microbatch.ndim != 2:
            raise ScheduleError(
                f"Slots have microbatches of shape {self.microbatch.shape} and chunks "
                f"of shape {self.chunk.shape}. Both must be (ticks, stages)."
            )
        uneven = np.argwhere((self.microbatch < 0) != (self.chunk < 0))
        if uneven.size:
            tick, stage = uneven[0]
            raise ScheduleError(
                f"The slot at tick {tick} of stage {stage} has microbatch "
                f"{self.microbatch[tick, stage]} but chunk {self.chunk[tick, stage]}. "
                "Give it both, or -1 for both where the stage has none."
            )

    @property
    def active(self) -> NDArray[np.bool_]:
        """Where a stage has a slot: booleans of shape (ticks, stages)."""
        return self.microbatch >= 0

    @property
    def any(self) -> NDArray[np.bool_]:
        """In which ticks some stage has a slot: booleans of shape (ticks,)."""
        return np.any(self.active, axis=1)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Slots)
            and np.array_equal(self.microbatch, other.microbatch)
            and np.array_equal(self.chunk, other.chunk)
        )

    def __hash__(self) -> int:
        arrays = (self.microbatch, self.chunk)
        return hash((self.chunk.shape, *(array.tobytes() for array in arrays)))


class Ticks(NamedTuple):
    """When each virtual stage takes each microbatch.

    Attributes:
        num_stages: Stages; a row's stage is its index modulo this.
        forward: Integers of shape (chunks * stages, microbatches).
        backward_input: The same; ``None`` in a table for evaluation.
        backward_weight: The same.
    """

    num_stages: int
    forward: Ints
    backward_input: Ints | None = None
    backward_weight: Ints | None = None

    @property
    def num_chunks(self) -> int:
        """Chunks of layers that a stage holds."""
        return len(self.forward) // self.num_stages

    @property
    def is_split(self) -> bool:
        """Whether some weight gradient is made later than its input's."""
        if self.backward_input is None or self.backward_weight is None:
            return False
        return not np.array_equal(self.backward_input, self.backward_weight)

    def name(self, kind: Kind, virtual: int, microbatch: int) -> str:
        """A slot in words, for messages."""
        chunk, stage = divmod(virtual, self.num_stages)
        return name_slot(kind, stage, microbatch, chunk)


def frozen_ints(values: ArrayLike) -> Ints:
    """A copy as int32 that cannot be written to: tables are compared by content."""
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array


def name_slot(kind: str, stage: int, microbatch: int, chunk: int) -> str:
    """A slot in words, for messages."""
    words = kind.replace("_", " ")
    return f"{words} of microbatch {microbatch}, chunk {chunk} on stage {stage}"


def lay_out(
    slots: Iterable[Slot], num_stages: int, num_microbatches: int, num_chunks: int
) -> dict[Kind, Slots]:
    """Puts single slots into the cells of (ticks, stages), one array for each kind.

    Raises:
        ScheduleError: If a slot is outside of the pipeline, or its cell is taken.
    """
    slots = list(slots)
    for slot in slots:
        _check_inside(slot, num_stages, num_microbatches, num_chunks)
    num_ticks = max((slot.tick for slot in slots), default=-1) + 1
    shape = (2, num_ticks, num_stages)
    cells: dict[Kind, Ints] = {kind: np.full(shape, -1, np.int32) for kind in KINDS}
    for slot in slots:
        for kind in slot.kinds:
            cell = cells[kind][:, slot.tick, slot.stage]
            if cell[0] >= 0:
                mine = name_slot(kind, slot.stage, slot.microbatch, slot.chunk)
                raise ScheduleError(
                    f"{mine} stands at tick {slot.tick}, where the stage already has "
                    f"microbatch {cell[0]}, chunk {cell[1]}. A stage has at most one "
                    f"{kind.replace('_', ' ')} slot in a tick."
                )
            cell[:] = slot.microbatch, slot.chunk
    return {kind: Slots(*arrays) for kind, arrays in cells.items()}


def _check_inside(
    slot: Slot, num_stages: int, num_microbatches: int, num_chunks: int
) -> None:
    for field, value, limit in (
        ("stage", slot.stage, num_stages),
        ("microbatch", slot.microbatch, num_microbatches),
        ("chunk", slot.chunk, num_chunks),
    ):
        if not 0 <= value < limit:
            raise ScheduleError(f"{slot} has {field} {value}. Valid: 0 to {limit - 1}.")
    if slot.tick < 0:
        raise ScheduleError(f"{slot} has tick {slot.tick}. Ticks count from 0.")


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
