"""Tables: a pipeline schedule as data, checked on construction.

A table says for every tick and stage which microbatch goes forward and which goes
backward. In one tick a stage receives what its neighbours sent in the last one, runs
its forward slot, then (the last stage, for its last chunk) the part after the stack,
then its backward input slot, then its backward weight slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.simulate import Simulation, simulate_ticks
from nnx_parallel.schedules.slots import (
    KINDS,
    Kind,
    Slot,
    Slots,
    Ticks,
    check_sizes,
    check_ticks,
    lay_out,
    read_ticks,
)
from nnx_parallel.visualize.schedules import Drawing


@dataclass(frozen=True, kw_only=True)
class Table:
    """A pipeline schedule: when each stage takes each microbatch, in lock step.

    What a stage sends in one tick arrives in the next. The layers of chunk ``c`` on
    stage ``s`` come at place ``c * num_stages + s`` of the stack. Tables are equal
    when their slots are; they are hashable.

    Attributes:
        num_stages: Size of the ``pipe`` axis.
        num_microbatches: Microbatches in one step.
        num_chunks: Chunks of consecutive layers that every stage holds.
        forward: The slots that run a chunk on a microbatch.
        backward_input: The slots that make the gradient of a chunk's input, which the
            stage before waits for. None at all in a table for evaluation.
        backward_weight: The slots that make the gradient of a chunk's parameters,
            which no stage waits for.
        name: For titles; it does not count when tables are compared.

    Raises:
        ScheduleError: If the slots break a rule of this class or of ``check_ticks``.
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    forward: Slots
    backward_input: Slots
    backward_weight: Slots
    name: str = field(default="Schedule", compare=False)

    def __post_init__(self) -> None:
        check_sizes(self.num_stages, self.num_microbatches, self.num_chunks)
        shapes = {kind: getattr(self, kind).active.shape for kind in KINDS}
        wanted = (self.num_ticks, self.num_stages)
        if set(shapes.values()) != {wanted}:
            raise ScheduleError(
                f"The slots have shapes {shapes}. All must be (ticks, stages) = "
                f"{wanted}."
            )
        check_ticks(self.ticks)

    @classmethod
    def from_slots(
        cls,
        num_stages: int,
        num_microbatches: int,
        slots: Iterable[Slot],
        num_chunks: int = 1,
        name: str = "Schedule",
    ) -> Table:
        """A table from single slots, in any order.

        Raises:
            ScheduleError: If they break a rule, or two share a tick, stage and kind.

        Example:
            >>> table = Table.from_slots(
            ...     num_stages=1,
            ...     num_microbatches=2,
            ...     slots=[Slot(kind, tick=m, stage=0, microbatch=m)
            ...            for m in range(2) for kind in ("forward", "backward")],
            ... )
            >>> table.num_ticks, table.is_split
            (2, False)
        """
        check_sizes(num_stages, num_microbatches, num_chunks)
        cells = lay_out(slots, num_stages, num_microbatches, num_chunks)
        return cls(
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            name=name,
            **cells,
        )

    @classmethod
    def from_ticks(
        cls,
        num_stages: int,
        forward: ArrayLike,
        backward_input: ArrayLike | None = None,
        backward_weight: ArrayLike | None = None,
        name: str = "Schedule",
    ) -> Table:
        """A table from the tick of every slot, which is how schedules are written.

        Args:
            num_stages: Size of the ``pipe`` axis.
            forward: Ticks of shape (chunks * stages, microbatches), the rows in the
                order of the layers.
            backward_input: The same; left out for evaluation.
            backward_weight: The same; by default with ``backward_input``.
            name: For titles.

        Raises:
            ScheduleError: If the ticks break a rule.
        """
        if backward_weight is None:
            backward_weight = backward_input
        kinds = zip(KINDS, (forward, backward_input, backward_weight), strict=True)
        given: dict[Kind, NDArray[Any]] = {
            kind: np.array(at) for kind, at in kinds if at is not None
        }
        rows, num_microbatches = _check_shapes(given, num_stages)
        slots = (
            Slot(kind, int(tick), row % num_stages, microbatch, row // num_stages)
            for kind, at in given.items()
            for (row, microbatch), tick in np.ndenumerate(at)
        )
        num_chunks = rows // num_stages
        return cls.from_slots(num_stages, num_microbatches, slots, num_chunks, name)

    @cached_property
    def ticks(self) -> Ticks:
        """When each slot runs, by virtual stage and microbatch."""
        kinds = KINDS[:1] if self.is_forward_only else KINDS
        sizes = (self.num_microbatches, self.num_chunks)
        return Ticks(
            self.num_stages,
            *(read_ticks(kind, getattr(self, kind), *sizes) for kind in kinds),
        )

    @property
    def num_ticks(self) -> int:
        """Ticks of one step."""
        return len(self.forward.microbatch)

    @property
    def is_split(self) -> bool:
        """Whether some weight slot comes later than its input slot.

        If none does, one joint backward pass makes both gradients.
        """
        return self.ticks.is_split

    @property
    def is_forward_only(self) -> bool:
        """Whether there are no backward slots: a table for evaluation."""
        slots = (self.backward_input, self.backward_weight)
        return not any(each.active.any() for each in slots)

    def simulate(
        self,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        *,
        input_bytes: int = 0,
        saved_bytes: int = 0,
        cotangent_bytes: int = 0,
        pending_bytes: int = 0,
        flight_bytes: int = 0,
    ) -> Simulation:
        """Time, bubble and memory of the table, without running it.

        A kind of slot that any stage has in a tick takes its time on all of them: the
        stages run in lock step, and one without that slot masks its result.

        Args:
            forward: Cost of one microbatch's forward pass in all of a stage's layers;
                a chunk costs its share.
            backward_input: The same, for the gradient of the input.
            backward_weight: The same, for the gradient of the parameters.
            input_bytes: Of a chunk's input that waits for its forward slot.
            saved_bytes: Of what a chunk keeps from forward to backward.
            cotangent_bytes: Of a cotangent that waits for its backward slot.
            pending_bytes: Of what waits for a backward weight slot.
            flight_bytes: Of what the parts around the stack keep for a microbatch.

        Example:
            >>> from nnx_parallel.pipeline import OneFOneB
            >>> table = OneFOneB().table(num_stages=4, num_microbatches=12)
            >>> f"{table.simulate().bubble:.1%}"
            '20.0%'
        """
        costs = {
            "forward": forward,
            "backward_input": backward_input,
            "backward_weight": backward_weight,
        }
        sizes = {
            "inputs": input_bytes,
            "saved": saved_bytes,
            "cotangents": cotangent_bytes,
            "pending": pending_bytes,
            "flights": flight_bytes,
        }
        return simulate_ticks(self.ticks, costs, sizes)

    def draw(
        self,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        *,
        width: int = 960,
    ) -> Drawing:
        """The table as a picture: stages down, time across.

        Args:
            forward: Cost, as in ``simulate``.
            backward_input: Cost, as in ``simulate``.
            backward_weight: Cost, as in ``simulate``.
            width: Of the SVG, in pixels.

        Example:
            >>> from nnx_parallel.pipeline import OneFOneB
            >>> print(OneFOneB().table(num_stages=2, num_microbatches=3).draw())
            1F1B: 2 stages, 3 microbatches · bubble 25.0% · peak memory 3 stage inputs
            stage 0  F0 F1 ·  F2 B0 ·  B1 B2
            stage 1  ·  F0 B0 F1 B1 F2 B2 ·
        """
        return Drawing(
            name=self.name,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_chunks=self.num_chunks,
            simulation=self.simulate(forward, backward_input, backward_weight),
            width=width,
        )


def _check_shapes(
    ticks: Mapping[Kind, NDArray[Any]], num_stages: int
) -> tuple[int, int]:
    """Rows and microbatches of the ticks of all kinds."""
    shapes = {kind: at.shape for kind, at in ticks.items()}
    shape = shapes["forward"]
    is_divided = len(shape) == 2 and num_stages > 0 and shape[0] % num_stages == 0
    if len(set(shapes.values())) > 1 or not is_divided:
        raise ScheduleError(
            f"The ticks have shapes {shapes}. All must be (chunks * stages, "
            f"microbatches), with {num_stages} stages."
        )
    return shape
