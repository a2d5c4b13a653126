"""Schedules: in which order the stages of a pipeline take the microbatches.

Each is a formula for the tick of every slot, in which microbatches move through the
stages as wavefronts: a stage passes a microbatch on in each tick, so nothing queues
between stages. They differ in how much waits and in how much is kept; see
``Table.simulate`` for the numbers and ``visualize(table)`` for the picture.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

import numpy as np

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.slots import Ints, check_sizes
from nnx_parallel.schedules.table import Table


@dataclass(frozen=True)
class Schedule(abc.ABC):
    """A way to fill a table, for any number of stages and microbatches.

    In what follows ``S`` is the number of stages, ``M`` of microbatches and ``V`` of
    chunks. Efficiencies are those of slots that cost the same.

    A subclass whose tables have several chunks sets `chunks`.

    Attributes:
        chunks: Chunks of consecutive layers that every stage holds.
    """

    chunks: int = field(default=1, init=False, repr=False)

    @abc.abstractmethod
    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """The table of a training step.

        Raises:
            ScheduleError: If a size is less than 1.
        """

    def forward_table(self, num_stages: int, num_microbatches: int) -> Table:
        """The table of an evaluation step: forward slots alone, the same chunks.

        Raises:
            ScheduleError: If a size is less than 1.
        """
        forward = _forward_ticks(*_index(num_stages, num_microbatches, self.chunks))
        return Table.from_ticks(num_stages, forward, name="Forward")


@dataclass(frozen=True)
class GPipe(Schedule):
    """All microbatches forward, then all backward [1].

    Efficiency is ``M / (M + S - 1)`` and a stage keeps the inputs of all ``M``
    microbatches. ``OneFOneB`` is as fast and keeps fewer; choose this one where the
    backward passes must all come after the forward passes.

    References:
        [1] Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
        Pipeline Parallelism", 2019, section 2, https://arxiv.org/abs/1811.06965

    Example:
        >>> GPipe().table(num_stages=4, num_microbatches=8).simulate().peak_stage_inputs
        8
    """

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Forward at ``m + s``, backward at ``M + S - 1 + m + S - 1 - s``."""
        # (stages, 1) and (1, microbatches): what is made from both is a table of ticks.
        _, stage, microbatch = _index(num_stages, num_microbatches)
        first = num_microbatches + num_stages - 1
        backward = first + microbatch + num_stages - 1 - stage
        return Table.from_ticks(num_stages, microbatch + stage, backward, name="GPipe")


@dataclass(frozen=True)
class OneFOneB(Schedule):
    """One forward, one backward: a microbatch goes back as soon as it can [1].

    Efficiency is that of ``GPipe``, ``M / (M + S - 1)``, and a stage keeps the inputs
    of at most ``2 * S - 1`` microbatches however many there are. In lock step a
    microbatch spends one tick in each stage on its way back too, hence ``2 * S - 1``
    and not ``S``. The schedule to start with.

    References:
        [1] Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
        Clusters Using Megatron-LM", 2021, section 2.2 (PipeDream-Flush),
        https://arxiv.org/abs/2104.04473

    Example:
        >>> table = OneFOneB().table(num_stages=4, num_microbatches=64)
        >>> table.simulate().peak_stage_inputs
        7
    """

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Forward at ``m + s``, backward at ``2 * (S - 1) - s + m``."""
        _, stage, microbatch = _index(num_stages, num_microbatches)
        # The last stage goes back in the tick in which it went forward.
        backward = 2 * (num_stages - 1) - stage + microbatch
        return Table.from_ticks(num_stages, microbatch + stage, backward, name="1F1B")


@dataclass(frozen=True)
class Interleaved(Schedule):
    """1F1B over stages that each hold several chunks of layers [1].

    The stack goes ``V`` times around the stages, so that a stage starts after a
    ``V``-th of the work before it: efficiency is ``M / (M + (S - 1) / V)`` when ``S``
    divides ``M``, and less when the last group of ``S`` microbatches is not full. Every
    chunk's input is sent, ``V`` times the communication, and a stage keeps at most
    ``(V + 1) * S - 1`` of them. Microbatches go around in groups, as in the circular
    pipelines of praxis and MaxText. Choose it when ``M`` cannot be several times ``S``.

    Layers are stored in their natural order whatever the schedule. Once a step a stage
    sends its parameters (in the dtype of the computation) to where they run, and its
    gradients back, and holds a copy of its parameters meanwhile.

    Attributes:
        chunks: Chunks of consecutive layers that every stage holds.

    References:
        [1] Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
        Clusters Using Megatron-LM", 2021, section 2.2,
        https://arxiv.org/abs/2104.04473

    Example:
        >>> table = Interleaved(chunks=3).table(num_stages=4, num_microbatches=4)
        >>> f"{table.simulate().bubble:.1%}"
        '20.0%'
    """

    chunks: int = 2

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ScheduleError(
                f"{self} has {self.chunks} chunks. A stage holds 1 or more; with 1 "
                "this is OneFOneB."
            )

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Forward at ``(g * V + c) * S + r + s`` where ``m = g * S + r``.

        Backward of the last virtual stage is in the tick of its forward, and goes back
        through the chunks in the same rhythm.
        """
        chunk, stage, microbatch = _index(num_stages, num_microbatches, self.chunks)
        forward = _forward_ticks(chunk, stage, microbatch)
        # The way back is the way forward, seen from the last virtual stage.
        ahead = self.chunks - 1 - chunk, num_stages - 1 - stage
        backward = len(chunk) - 1 + _forward_ticks(*ahead, microbatch)
        return Table.from_ticks(num_stages, forward, backward, name="Interleaved 1F1B")


@dataclass(frozen=True)
class ZeroBubble(Schedule):
    """1F1B whose weight gradients wait until no stage waits for them [1].

    Only the gradient of a stage's input is on the way back; the gradient of its
    parameters is made ``s`` ticks later on stage ``s``, when all stages have one to
    make. Efficiency is ``3 * M / (3 * M + 2 * (S - 1))``. A stage keeps what
    ``OneFOneB`` keeps and at most ``S - 1`` microbatches that wait for their weight
    gradient. The backward pass in two halves may compute more than a joint one, so
    choose it for many stages and few microbatches, and measure.

    References:
        [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2 (ZB-H1),
        https://arxiv.org/abs/2401.10241

    Example:
        >>> table = ZeroBubble().table(num_stages=4, num_microbatches=8)
        >>> f"{table.simulate().bubble:.1%}"
        '20.0%'
    """

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """As ``OneFOneB``; weights at ``2 * (S - 1) + m`` on all stages."""
        _, stage, microbatch = _index(num_stages, num_microbatches)
        backward = 2 * (num_stages - 1) - stage + microbatch
        # The same tick on all stages; 0 * stage broadcasts to (stages, microbatches).
        weight = 2 * (num_stages - 1) + microbatch + 0 * stage
        return Table.from_ticks(
            num_stages, microbatch + stage, backward, weight, name="Zero bubble"
        )


@dataclass(frozen=True)
class Fixed(Schedule):
    """A table of your own, for the one size that it has.

    Attributes:
        given: The table of a training step; ``Table.from_slots`` makes one.

    Example:
        >>> table = GPipe().table(num_stages=2, num_microbatches=4)
        >>> Fixed(table).table(num_stages=2, num_microbatches=4) is table
        True
    """

    given: Table

    def __post_init__(self) -> None:
        if self.given.is_forward_only:
            raise ScheduleError(
                f"The table {self.given.name!r} has no backward slots: it is one for "
                "evaluation. Training needs both."
            )
        # `chunks` is no argument here, and the dataclass is frozen.
        object.__setattr__(self, "chunks", self.given.num_chunks)

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """The given table.

        Raises:
            ScheduleError: If it has another size.
        """
        sizes = (self.given.num_stages, self.given.num_microbatches)
        if sizes != (num_stages, num_microbatches):
            raise ScheduleError(
                f"The table {self.given.name!r} has {sizes[0]} stages and {sizes[1]} "
                f"microbatches, but the step has {num_stages} stages and "
                f"{num_microbatches} microbatches. Make the two equal, or give a "
                "schedule that fits any size."
            )
        return self.given


def _index(
    num_stages: int, num_microbatches: int, chunks: int = 1
) -> tuple[Ints, Ints, Ints]:
    """Chunk and stage of every row and microbatch of every column of ``Ticks``."""
    check_sizes(num_stages, num_microbatches, chunks)
    virtual = np.arange(chunks * num_stages, dtype=np.int32)[:, None]
    chunk, stage = np.divmod(virtual, num_stages)
    return chunk, stage, np.arange(num_microbatches, dtype=np.int32)[None]


def _forward_ticks(chunk: Ints, stage: Ints, microbatch: Ints) -> Ints:
    """Ticks of microbatches that go around in groups, one chunk after the other.

    A group has as many microbatches as there are stages: the first of it comes back to
    the first stage just as that one has sent off the last.
    """
    num_stages, num_chunks = int(stage.max()) + 1, int(chunk.max()) + 1
    group, place = np.divmod(microbatch, num_stages)
    return (group * num_chunks + chunk) * num_stages + place + stage
