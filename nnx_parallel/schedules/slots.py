"""Slots: the microbatch and the chunk of layers that a stage runs in a tick.

A table stores ``Slots``, over which the pipeline scans. Rules, costs and live ranges
are computed from the inverse, ``Ticks``.
"""

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
        kind: Kind of work; ``backward`` is both halves of a backward pass in one tick.
        tick: Tick in which the slot runs, counted from 0.
        stage: Index of the stage along the ``pipe`` axis.
        microbatch: Index of the microbatch in the step.
        chunk: Index of the chunk among the stage's chunks of layers.
    """

    kind: Kind | Literal["backward"]
    tick: int
    stage: int
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, eq=False)
class Slots:
    """All slots of one kind.

    Attributes:
        microbatch: int32 of shape (ticks, stages): the microbatch of the slot, or -1 if
            the stage has no slot of this kind in the tick.
        chunk: int32 of the same shape: the chunk of the stage's layers, or -1.
    """

    microbatch: Ints
    chunk: Ints

    def __post_init__(self) -> None:
        # The arrays are copied, because otherwise a caller could change the table by
        # writing to them.
        object.__setattr__(self, "microbatch", frozen_ints(self.microbatch))
        object.__setattr__(self, "chunk", frozen_ints(self.chunk))
        if self.microbatch.shape != self.chunk.shape or self.microbatch.ndim != 2:
            raise ScheduleError(
                f"Slots have microbatches of shape {self.microbatch.shape} and chunks "
                f"of shape {self.chunk.shape}. Both must be (ticks, stages)."
            )
        for tick, stage in np.argwhere((self.microbatch < 0) != (self.chunk < 0)):
            raise ScheduleError(
                f"The slot at tick {tick} of stage {stage} has microbatch "
                f"{self.microbatch[tick, stage]} but chunk {self.chunk[tick, stage]}. "
                "Give the slot both, or set both to -1 if the stage has no slot."
            )

    @property
    def active(self) -> NDArray[np.bool_]:
        """True where a stage has a slot: booleans of shape (ticks, stages)."""
        return self.microbatch >= 0

    @property
    def any(self) -> NDArray[np.bool_]:
        """True in ticks in which some stage has a slot: booleans of shape (ticks,)."""
        return np.any(self.active, axis=1)

    # The equality of a dataclass compares tuples of fields, which fails because arrays
    # have no truth value. Tables must compare and hash by content, because strategies
    # are static arguments.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[object, ...]:
        return self.chunk.shape, self.microbatch.tobytes(), self.chunk.tobytes()


class Ticks(NamedTuple):
    """The tick in which each virtual stage runs each microbatch.

    Chunk ``c`` of stage ``s`` is virtual stage ``c * num_stages + s``. A microbatch
    passes through the virtual stages in this order. A table for evaluation has only
    ``forward``.
    """

    num_stages: int
    by_kind: dict[Kind, Ints]  # (chunks * stages, microbatches)

    @property
    def is_split(self) -> bool:
        """True if some weight gradient is computed later than the input's gradient."""
        _, *backward = self.by_kind.values()
        return bool(backward) and not np.array_equal(backward[0], backward[1])


def share_layers(num_layers: int, parts: int) -> tuple[int, ...]:
    """Shares layers among parts as evenly as possible; the first parts get one more.

    Example:
        >>> share_layers(9, 4)
        (3, 2, 2, 2)
    """
    least, more = divmod(num_layers, parts)
    return tuple(least + (part < more) for part in range(parts))


def frozen_ints(values: ArrayLike) -> Ints:
    """Makes a read-only int32 copy, because a write would change the table's hash."""
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array


def name_slot(kind: str, virtual: int, microbatch: int, num_stages: int) -> str:
    """Describes a slot of a virtual stage in words, for messages."""
    chunk, stage = divmod(virtual, num_stages)
    words = kind.replace("_", " ")
    return f"{words} of microbatch {microbatch}, chunk {chunk} on stage {stage}"


def check_sizes(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raises a `ScheduleError` for a size below 1."""
    names = ("num_stages", "num_microbatches", "num_chunks")
    sizes = (num_stages, num_microbatches, num_chunks)
    for name, size in zip(names, sizes, strict=True):
        if size < 1:
            raise ScheduleError(f"{name} is {size}. It must be at least 1.")
