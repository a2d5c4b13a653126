"""Schedules: the order in which the stages of a pipeline run the microbatches."""

import abc
from dataclasses import dataclass, field

import numpy as np

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.slots import Ints, check_sizes
from nnx_parallel.schedules.table import Table


@dataclass(frozen=True)
class Schedule(abc.ABC):
    """Makes a table for any number of stages and microbatches.

    In this library's schedules a microbatch moves on to the next stage in every tick,
    so that no microbatches queue. The schedules differ in how long stages wait and how
    many values they keep. ``S`` is the number of stages, ``M`` the number of
    microbatches and ``V`` the number of chunks. A subclass's formulas give the ticks of
    microbatch ``m`` on stage ``s``. Efficiencies assume that all slots cost the same.

    Attributes:
        chunks: Number of chunks of consecutive layers that every stage holds. A
            subclass with several chunks in its tables sets it.
    """

    chunks: int = field(default=1, init=False, repr=False)

    @abc.abstractmethod
    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Makes the table of a training step.

        Raises:
            ScheduleError: If a size is less than 1.
        """

    def forward_table(self, num_stages: int, num_microbatches: int) -> Table:
        """Makes the table of an evaluation step, which has only forward slots.

        By default microbatches go around in groups, as with `Interleaved`. A subclass
        overrides this method too if its stages run forward slots in another order.

        Raises:
            ScheduleError: If a size is less than 1.
        """
        forward, _ = _one_f_one_b(num_stages, num_microbatches, self.chunks)
        return Table.from_ticks(num_stages, forward, name="Forward")


@dataclass(frozen=True)
class GPipe(Schedule):
    """Runs all microbatches forward, then all microbatches backward [1].

    Efficiency is ``M / (M + S - 1)`` and a stage keeps the inputs of all ``M``
    microbatches. ``OneFOneB`` is as fast and keeps fewer inputs. Choose ``GPipe`` if
    all backward passes must come after all forward passes.

    References:
        [1] Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
        Pipeline Parallelism", 2019, section 2, https://arxiv.org/abs/1811.06965

    Example:
        >>> GPipe().table(num_stages=4, num_microbatches=8).simulate().peak_stage_inputs
        8
    """

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Makes the table of a training step.

        Forward slots are at ``m + s``, backward slots at ``M + S - 1 + m + S - 1 - s``.
        """
        forward, backward = _one_f_one_b(num_stages, num_microbatches)
        # The order is as in 1F1B, but backward slots start after the last stage has run
        # all its forward slots.
        backward += num_microbatches
        return Table.from_ticks(num_stages, forward, backward, name="GPipe")


@dataclass(frozen=True)
class OneFOneB(Schedule):
    """One forward, one backward: a backward pass starts as soon as it can [1].

    The efficiency equals ``GPipe``'s, ``M / (M + S - 1)``. A stage keeps the inputs of
    at most ``2 * S - 1`` microbatches, however many there are. The number is ``2 * S -
    1`` and not ``S`` because stages run in lock step: the backward pass of a microbatch
    also takes one tick in each stage. Start with this schedule.

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
        """Makes the table of a training step.

        Forward slots are at ``m + s``, backward slots at ``2 * (S - 1) - s + m``.
        """
        ticks = _one_f_one_b(num_stages, num_microbatches)
        return Table.from_ticks(num_stages, *ticks, name="1F1B")


@dataclass(frozen=True)
class Interleaved(Schedule):
    """1F1B over stages that each hold several ``chunks`` of consecutive layers [1].

    A microbatch goes around the stages ``V`` times, so a stage waits only for ``1 / V``
    of the work of the stages before it. Efficiency is ``M / (M + (S - 1) / V)`` if
    ``S`` divides ``M``, and less if the last group of ``S`` microbatches is not full.
    The input of every chunk is sent, which is ``V`` times the communication of
    `OneFOneB`, and a stage keeps at most ``(V + 1) * S - 1`` of these inputs.
    Microbatches go around in groups, as in the circular pipelines of praxis and
    MaxText. Choose this schedule when ``M`` cannot be several times ``S``.

    Layers are stored in their natural order, as with every schedule. Once per step, a
    stage sends the parameters that it stores (in the dtype of the computation) to the
    stages that run them, and these stages send gradients back. During the step, a stage
    holds a copy of the parameters that it runs.

    References:
        [1]: see `OneFOneB`.

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
        """Makes the table of a training step.

        The forward slot of chunk ``c`` is at ``(g * V + c) * S + r + s``, where ``m = g
        * S + r``. Backward slots have the same pattern, with the chunks in reverse
        order.
        """
        ticks = _one_f_one_b(num_stages, num_microbatches, self.chunks)
        return Table.from_ticks(num_stages, *ticks, name="Interleaved 1F1B")


@dataclass(frozen=True)
class ZeroBubble(Schedule):
    """1F1B that computes weight gradients later, when no stage waits [1].

    In a backward slot a stage computes only the gradient of its input. Stage ``s``
    computes the gradient of its parameters ``s`` ticks later, in a tick in which all
    stages compute such a gradient. Efficiency is ``3 * M / (3 * M + 2 * (S - 1))``. A
    stage keeps the same values as with ``OneFOneB``, and in addition the values of at
    most ``S - 1`` microbatches that wait for their weight gradient. The two halves may
    compute more than a joint backward pass. Choose this schedule for many stages and
    few microbatches, and measure whether it is faster.

    References:
        [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2 (ZB-H1),
        https://arxiv.org/abs/2401.10241

    Example:
        >>> table = ZeroBubble().table(num_stages=4, num_microbatches=8)
        >>> f"{table.simulate().bubble:.1%}"
        '20.0%'
    """

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Makes the table of a training step.

        Forward and backward slots are as in ``OneFOneB``. Weight slots are at ``2 * (S
        - 1) + m`` on all stages.
        """
        forward, backward = _one_f_one_b(num_stages, num_microbatches)
        # All stages have their weight slot in the tick of the first stage's backward
        # slot, which is the microbatch's last backward slot.
        ticks = forward, backward, np.broadcast_to(backward[0], backward.shape)
        return Table.from_ticks(num_stages, *ticks, name="Zero bubble")


@dataclass(frozen=True)
class Fixed(Schedule):
    """A given table, which fits one number of stages and microbatches.

    Attributes:
        given: The table of a training step, for example from ``Table.from_slots``.

    Example:
        >>> table = GPipe().table(num_stages=2, num_microbatches=4)
        >>> Fixed(table).table(num_stages=2, num_microbatches=4) is table
        True
    """

    given: Table

    def __post_init__(self) -> None:
        if self.given.is_forward_only:
            raise ScheduleError(
                f"The table {self.given.name!r} has no backward slots: it is for "
                "evaluation. Training needs forward and backward slots."
            )
        # `chunks` is set here, because it is not an argument. The dataclass is frozen.
        object.__setattr__(self, "chunks", self.given.num_chunks)

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Returns the given table. Raises a `ScheduleError` for any other size."""
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
    """Returns the ticks of forward and of backward slots.

    Both have the shape (chunks * stages, microbatches). Microbatches go around in
    groups, which have as many microbatches as there are stages. The first microbatch of
    a group comes back to the first stage right after this stage has run the last
    microbatch of the group.
    """
    check_sizes(num_stages, num_microbatches, chunks)
    # (chunks * stages, 1) and (1, microbatches)
    chunk, stage = np.divmod(np.arange(chunks * num_stages)[:, None], num_stages)
    group, place = np.divmod(np.arange(num_microbatches)[None], num_stages)
    forward = (group * chunks + chunk) * num_stages + place + stage
    # The backward slots mirror the forward slots. The last virtual stage runs a
    # microbatch's backward slot in the tick of its forward slot.
    return forward, forward[::-1] + len(forward) - 1
