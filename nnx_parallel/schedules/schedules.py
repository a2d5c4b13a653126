"""Schedules: in which order the stages of a pipeline take the microbatches."""

import abc
from dataclasses import dataclass, field

import numpy as np

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.slots import Ints, check_sizes
from nnx_parallel.schedules.table import Table


@dataclass(frozen=True)
class Schedule(abc.ABC):
    """A way to fill a table, for any number of stages and microbatches.

    In those below a stage passes a microbatch on in each tick, so that nothing queues;
    they differ in how much waits and is kept. ``S`` is the number of stages, ``M`` of
    microbatches, ``V`` of chunks; efficiencies assume slots that cost the same.

    Attributes:
        chunks: Chunks of consecutive layers that every stage holds; a subclass whose
            tables have several sets it.
    """

    chunks: int = field(default=1, init=False, repr=False)

    @abc.abstractmethod
    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """The table of a training step.

        Raises:
            ScheduleError: If a size is less than 1.
        """

    def forward_table(self, num_stages: int, num_microbatches: int) -> Table:
        """The table of an evaluation step: only forward slots, the same chunks.

        Raises:
            ScheduleError: If a size is less than 1.
        """
        forward, _ = _one_f_one_b(num_stages, num_microbatches, self.chunks)
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
        forward, backward = _one_f_one_b(num_stages, num_microbatches)
        # The order of 1F1B, once the last stage has run all its forward slots.
        backward += num_microbatches
        return Table.from_ticks(num_stages, forward, backward, name="GPipe")


@dataclass(frozen=True)
class OneFOneB(Schedule):
    """One forward, one backward: a microbatch goes back as soon as it can [1].

    The efficiency equals ``GPipe``'s, ``M / (M + S - 1)``, and a stage keeps the inputs
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
        ticks = _one_f_one_b(num_stages, num_microbatches)
        return Table.from_ticks(num_stages, *ticks, name="1F1B")


@dataclass(frozen=True)
class Interleaved(Schedule):
    """1F1B over stages that each hold several ``chunks`` of consecutive layers [1].

    The stack goes ``V`` times around the stages, so that a stage starts after a
    ``V``-th of the work before it: efficiency is ``M / (M + (S - 1) / V)`` when ``S``
    divides ``M``, and less when the last group of ``S`` microbatches is not full. Every
    chunk's input is sent, ``V`` times the communication, and a stage keeps at most
    ``(V + 1) * S - 1`` of them. Microbatches go around in groups, as in the circular
    pipelines of praxis and MaxText. Choose it when ``M`` cannot be several times ``S``.

    Layers are stored in their natural order whatever the schedule. Once a step a stage
    sends its parameters (in the dtype of the computation) to where they run, and its
    gradients back, and holds a copy of its parameters meanwhile.

    References:
        [1] As of `OneFOneB`.

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

        Backward goes through the chunks in the same rhythm, the other way.
        """
        ticks = _one_f_one_b(num_stages, num_microbatches, self.chunks)
        return Table.from_ticks(num_stages, *ticks, name="Interleaved 1F1B")


@dataclass(frozen=True)
class ZeroBubble(Schedule):
    """1F1B whose weight gradients wait until no stage waits for them [1].

    Only the gradient of a stage's input is on the way back; the gradient of its
    parameters is made ``s`` ticks later on stage ``s``, when all stages have one to
    make. Efficiency is ``3 * M / (3 * M + 2 * (S - 1))``. A stage keeps as much as
    under ``OneFOneB`` and at most ``S - 1`` microbatches that wait for their weight
    gradient. Two halves may compute more than a joint backward pass: choose it for many
    stages and few microbatches, and measure.

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
        forward, backward = _one_f_one_b(num_stages, num_microbatches)
        # On all stages when the first, the last on the way back, has a backward slot.
        ticks = forward, backward, np.broadcast_to(backward[0], backward.shape)
        return Table.from_ticks(num_stages, *ticks, name="Zero bubble")


@dataclass(frozen=True)
class Fixed(Schedule):
    """Your table, for the one size that it has.

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
        # `chunks` is not an argument here, and the dataclass is frozen.
        object.__setattr__(self, "chunks", self.given.num_chunks)

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """The given table; any other size is a `ScheduleError`."""
        sizes = (self.given.num_stages, self.given.num_microbatches)
        if sizes != (num_stages, num_microbatches):
            raise ScheduleError(
                f"The table {self.given.name!r} has {sizes[0]} stages and {sizes[1]} "
                f"microbatches, but the step has {num_stages} stages and "
                f"{num_microbatches} microbatches. Make the two equal, or give a "
                "schedule that fits any size."
            )
        return self.given


def _one_f_one_b(
    num_stages: int, num_microbatches: int, chunks: int = 1
) -> tuple[Ints, Ints]:
    """Ticks of forward and backward, of shape (chunks * stages, microbatches).

    Microbatches go around in groups of as many as there are stages: the first of a
    group comes back to the first stage just as that one has sent off the last.
    """
    check_sizes(num_stages, num_microbatches, chunks)
    # (chunks * stages, 1) and (1, microbatches)
    chunk, stage = np.divmod(np.arange(chunks * num_stages)[:, None], num_stages)
    group, place = np.divmod(np.arange(num_microbatches)[None], num_stages)
    forward = (group * chunks + chunk) * num_stages + place + stage
    # The way back is the way forward, seen from the last virtual stage, which goes back
    # in the tick in which it went forward.
    return forward, forward[::-1] + len(forward) - 1
