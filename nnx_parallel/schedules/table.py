"""Tables, which store and check pipeline schedules, and their memory slots."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from nnx_parallel.drawing import as_html
from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.simulate import (
    LiveRanges,
    Simulation,
    live_ranges,
    simulate_ticks,
)
from nnx_parallel.schedules.slots import (
    KINDS,
    Ints,
    Kind,
    Slot,
    Slots,
    Ticks,
    check_sizes,
    frozen_ints,
    name_slot,
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A pipeline schedule: when each stage runs each microbatch, in lock step.

    In one tick a stage first receives the outputs that its neighbours computed in the
    last tick. It then runs its forward slot, its backward input slot and its backward
    weight slot, in this order. After the forward slot of the last stage's last chunk,
    the part of the loss after the stack runs. The stack is divided into equal parts:
    chunk ``c`` of stage ``s`` is part ``c * num_stages + s``. Tables with equal slots
    are equal, and tables are hashable.

    Attributes:
        num_stages: Size of the ``pipe`` axis.
        num_microbatches: Microbatches in one step.
        num_chunks: Chunks of consecutive layers that every stage holds.
        forward: The slots that run a chunk on a microbatch.
        backward_input: The slots that compute the gradient of a chunk's input, which
            the previous stage waits for. A table for evaluation does not have them.
        backward_weight: The slots that compute the gradient of a chunk's parameters,
            which no stage waits for.
        name: Name in titles. Equality of tables ignores it.

    Raises:
        ScheduleError: If a slot is missing, is given twice, or comes before its inputs,
            or if the slots of one kind have microbatches out of order.
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
        _check_ticks(self.ticks)

    @classmethod
    def from_slots(
        cls,
        num_stages: int,
        num_microbatches: int,
        slots: Iterable[Slot],
        num_chunks: int = 1,
        name: str = "Schedule",
    ) -> Table:
        """Makes a table from single slots, in any order.

        Raises:
            ScheduleError: If the slots break a rule, or two slots share a tick, stage
                and kind.

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
        # The sizes are checked first, because slots are compared with them below.
        check_sizes(num_stages, num_microbatches, num_chunks)
        return cls(
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            name=name,
            **_lay_out(list(slots), num_stages, num_microbatches, num_chunks),
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
        """Makes a table from the tick of every slot, as this library's schedules do.

        Args:
            num_stages: Number of stages.
            forward: Ticks of shape (chunks * stages, microbatches), with rows in the
                order of the layers.
            backward_input: Ticks in the same form; ``None`` for evaluation.
            backward_weight: Ticks in the same form; by default ``backward_input``.
            name: Name in titles.

        Raises:
            ScheduleError: If the ticks break a rule.
        """
        if backward_weight is None:
            backward_weight = backward_input
        given = zip(KINDS, (forward, backward_input, backward_weight), strict=True)
        ticks: dict[Kind, Ints] = {
            kind: np.array(at) for kind, at in given if at is not None
        }
        shapes = {kind: at.shape for kind, at in ticks.items()}
        shape = shapes["forward"]
        is_divided = len(shape) == 2 and num_stages > 0 and shape[0] % num_stages == 0
        if len(set(shapes.values())) > 1 or not is_divided:
            raise ScheduleError(
                f"The ticks have shapes {shapes}. All must be (chunks * stages, "
                f"microbatches), with {num_stages} stages."
            )
        # Rows are virtual stages: row c * num_stages + s is chunk c of stage s.
        slots = (
            Slot(kind, int(tick), row % num_stages, microbatch, row // num_stages)
            for kind, at in ticks.items()
            for (row, microbatch), tick in np.ndenumerate(at)
        )
        return cls.from_slots(num_stages, shape[1], slots, shape[0] // num_stages, name)

    def __repr__(self) -> str:
        sizes = f"{self.num_stages} stages, {self.num_microbatches} microbatches"
        chunks = f", {self.num_chunks} chunks" * (self.num_chunks > 1)
        return f"<{self.name}: {sizes}{chunks}, {self.num_ticks} ticks>"

    def _repr_html_(self) -> str:
        # A joint backward slot is in both kinds of slots, but it is shown once.
        is_joint = not (self.is_forward_only or self.is_split)
        rows = [[f"stage {i}"] + [""] * self.num_ticks for i in range(self.num_stages)]
        for letter, kind in zip("FB" if is_joint else "FBW", KINDS, strict=False):
            found = getattr(self, kind)
            for tick, stage in np.argwhere(found.active):
                chunk = f".{found.chunk[tick, stage]}" * (self.num_chunks > 1)
                label = f"{letter}{found.microbatch[tick, stage]}{chunk}"
                rows[stage][tick + 1] = f"{rows[stage][tick + 1]} {label}".strip()
        header = ["", *map(str, range(self.num_ticks))]
        return as_html(header, rows, title=repr(self)[1:-1])

    # The result is cached, because rules, simulations and buffers all read it.
    @cached_property
    def ticks(self) -> Ticks:
        """The tick of each slot, by virtual stage and microbatch."""
        kinds = KINDS[:1] if self.is_forward_only else KINDS
        shape = (self.num_chunks * self.num_stages, self.num_microbatches)
        return Ticks(
            self.num_stages,
            {kind: _invert(kind, getattr(self, kind), shape) for kind in kinds},
        )

    @property
    def num_ticks(self) -> int:
        """Number of ticks in a step."""
        return len(self.forward.microbatch)

    @property
    def is_split(self) -> bool:
        """False if every backward slot computes both gradients in one joint pass."""
        return self.ticks.is_split

    @property
    def is_forward_only(self) -> bool:
        """True for a table without backward slots, which is for evaluation."""
        return not (self.backward_input.any.any() or self.backward_weight.any.any())

    def simulate(
        self,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        *,
        num_layers: int | None = None,
        input_bytes: int = 0,
        saved_bytes: int = 0,
        cotangent_bytes: int = 0,
        pending_bytes: int = 0,
        flight_bytes: int = 0,
    ) -> Simulation:
        """Computes time, bubble and memory of the table, without running it.

        Stages run in lock step: if any stage has a slot of some kind in a tick, the
        slot takes time on all stages. A stage without such a slot masks its result.

        Args:
            forward: Cost of a microbatch's forward pass through all layers of a stage.
                A chunk costs its share of this.
            backward_input: The same for the gradient of the input.
            backward_weight: The same for the gradient of the parameters.
            num_layers: Number of layers of the stack. If the chunks have different
                numbers of layers, the costs are for a stage with the mean number of
                layers, and a slot takes the time of the longest chunk. ``None`` means
                that all chunks have the same number of layers.
            input_bytes: Bytes of a chunk's input that waits for its forward slot.
            saved_bytes: Bytes that a chunk keeps for a microbatch from forward to
                backward.
            cotangent_bytes: Bytes of a cotangent that waits for its backward slot.
            pending_bytes: Bytes that wait for a backward weight slot.
            flight_bytes: Bytes that the parts around the stack keep for a microbatch.

        Example:
            >>> from nnx_parallel import OneFOneB
            >>> table = OneFOneB().table(num_stages=4, num_microbatches=12)
            >>> f"{table.simulate().bubble:.1%}"
            '20.0%'
            >>> f"{table.simulate(num_layers=58).bubble:.1%}"  # 15, 15, 14 and 14
            '22.7%'

        Raises:
            ScheduleError: If a cost is negative, all costs of the table's slots are 0,
                or there are fewer layers than chunks.
        """
        costs = (forward, backward_input, backward_weight)
        sizes = (input_bytes, saved_bytes, cotangent_bytes, pending_bytes, flight_bytes)
        return simulate_ticks(self.ticks, costs, sizes, num_layers)


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """The memory slots that every stage writes and reads in every tick.

    Fields ``num_*`` are numbers of memory slots. Arrays are int32 of shape (ticks,
    stages): the memory slot that is written or read in a tick, or -1. If the value in a
    memory slot is read for the last time in a tick, a new value is written in the next
    tick at the earliest.
    """

    num_inputs: int  # memory slots for inputs that wait for their forward slot
    receive_input: Ints  # written at a tick's start, from the previous stage
    feed_input: Ints  # written by a new microbatch; only the first stage
    forward_input: Ints  # read by the forward slot
    num_saved: int  # memory slots for inputs that wait for their backward slot
    forward_saved: Ints  # written by the forward slot
    backward_saved: Ints  # read by the backward input slot
    num_cotangents: int  # memory slots for cotangents, until their backward slot
    receive_cotangent: Ints  # written at a tick's start, from the next stage
    feed_cotangent: Ints  # written by the part after the stack; only the last stage
    backward_cotangent: Ints  # read by the backward input slot
    num_pending: int  # memory slots for values, until a weight slot; 0 if not split
    backward_pending: Ints  # written by the backward input slot
    weight_pending: Ints  # read by the backward weight slot
    num_flights: int  # memory slots for in-flight microbatches
    flight: Ints  # the memory slot of each microbatch, of shape (microbatches,)


def plan_buffers(table: Table) -> Buffers:
    """Assigns the values of a table to the fewest memory slots.

    Every value that a stage keeps has a live range of ticks. Values can share a memory
    slot if their ranges do not overlap. Each value gets the lowest free one. This
    greedy choice needs only as many memory slots as there are live values in the
    busiest tick [1]. All stages run the same program, so all have as many memory slots
    as the stage that needs the most.

    Example:
        >>> from nnx_parallel import OneFOneB
        >>> buffers = plan_buffers(OneFOneB().table(num_stages=4, num_microbatches=64))
        >>> buffers.num_inputs, buffers.num_saved, buffers.num_cotangents
        (1, 7, 1)

    References:
        [1] Poletto and Sarkar, "Linear Scan Register Allocation", 1999, section 4,
        https://doi.org/10.1145/330249.330250
    """
    live = live_ranges(table.ticks)
    slots = {name: _assign(ranges) for name, ranges in live.items()}
    # There is always a memory slot, because empty arrays are awkward to index.
    counts = {name: int(own.max(initial=0)) + 1 for name, own in slots.items()}

    def at(when: str, name: str, rows: slice = slice(None)) -> Ints:
        """Places memory slots at the ticks where live ranges ``start`` or ``end``."""
        ranges = live[name]
        cells = np.full((table.num_ticks, table.num_stages), -1, np.int32)
        cells[getattr(ranges, when)[rows], ranges.stage[rows, None]] = slots[name][rows]
        return frozen_ints(cells)

    # Rows are virtual stages. The first row gets new microbatches, the last row gets
    # the cotangents of the loss, and all others receive from a neighbour.
    return Buffers(
        num_inputs=counts["inputs"],
        receive_input=at("start", "inputs", slice(1, None)),
        feed_input=at("start", "inputs", slice(0, 1)),
        forward_input=at("end", "inputs"),
        num_saved=counts["saved"],
        forward_saved=at("start", "saved"),
        backward_saved=at("end", "saved"),
        num_cotangents=counts["cotangents"],
        receive_cotangent=at("start", "cotangents", slice(0, -1)),
        feed_cotangent=at("start", "cotangents", slice(-1, None)),
        backward_cotangent=at("end", "cotangents"),
        num_pending=counts["pending"] if table.is_split else 0,
        backward_pending=at("start", "pending"),
        weight_pending=at("end", "pending"),
        num_flights=counts["flights"],
        flight=frozen_ints(slots["flights"][0]),
    )


def _lay_out(
    slots: list[Slot], num_stages: int, num_microbatches: int, num_chunks: int
) -> dict[Kind, Slots]:
    """Arranges single slots in one grid of (ticks, stages) for each kind."""
    limits = {"stage": num_stages, "microbatch": num_microbatches, "chunk": num_chunks}
    for slot in slots:
        for name, limit in limits.items():
            if not 0 <= (at := getattr(slot, name)) < limit:
                raise ScheduleError(f"{slot} has {name} {at}. Valid: 0 to {limit - 1}.")
        if slot.tick < 0:
            raise ScheduleError(f"{slot} has tick {slot.tick}. Ticks count from 0.")
    # Without any slots this is a table of 0 ticks; `_invert` then names the missing
    # slots.
    num_ticks = max((slot.tick for slot in slots), default=-1) + 1
    shape = (2, num_ticks, num_stages)  # microbatch and chunk of each cell
    cells: dict[Kind, Ints] = {kind: np.full(shape, -1, np.int32) for kind in KINDS}
    for slot in slots:
        for kind in KINDS[1:] if slot.kind == "backward" else (slot.kind,):
            cell = cells[kind][:, slot.tick, slot.stage]
            if cell[0] >= 0:
                virtual = slot.chunk * num_stages + slot.stage
                raise ScheduleError(
                    f"{name_slot(kind, virtual, slot.microbatch, num_stages)} is at "
                    f"tick {slot.tick}, where the stage already has microbatch "
                    f"{cell[0]}, chunk {cell[1]}. A stage has at most one "
                    f"{kind.replace('_', ' ')} slot in a tick."
                )
            cell[:] = slot.microbatch, slot.chunk
    return {kind: Slots(*arrays) for kind, arrays in cells.items()}


def _invert(kind: Kind, slots: Slots, shape: tuple[int, int]) -> Ints:
    """Returns the tick in which each virtual stage runs each microbatch."""
    # From (ticks, stages), through a list of slots, to (chunks * stages, microbatches).
    num_stages = slots.active.shape[1]
    tick, stage = np.nonzero(slots.active)
    microbatch = slots.microbatch[tick, stage]
    virtual = slots.chunk[tick, stage] * num_stages + stage
    for at in np.flatnonzero((microbatch >= shape[1]) | (virtual >= shape[0])):
        raise ScheduleError(
            f"{name_slot(kind, virtual[at], microbatch[at], num_stages)} is at tick "
            f"{tick[at]}, but there are {shape[1]} microbatches and "
            f"{shape[0] // num_stages} chunks, counted from 0."
        )
    count = np.zeros(shape, np.int32)
    np.add.at(count, (virtual, microbatch), 1)
    for wrong, lost in np.argwhere(count != 1):
        ticks = tick[(virtual == wrong) & (microbatch == lost)].tolist()
        raise ScheduleError(
            f"{name_slot(kind, wrong, lost, num_stages)} is "
            f"{f'at ticks {ticks}' if ticks else 'missing'}. Every stage takes every "
            "microbatch exactly once for each of its chunks."
        )
    result = np.empty_like(count)
    result[virtual, microbatch] = tick
    return result


def _check_ticks(ticks: Ticks) -> None:
    """Checks that slots come after their inputs, and that microbatches are in order."""
    for kind, earliest, step, reason in _rules(ticks):
        actual = ticks.by_kind[kind]
        early = actual < earliest
        if not early.any():
            continue
        # The error names the first slot in time, because later slots may break the rule
        # only as a result of this slot.
        first = int(np.where(early, actual, actual.max() + 1).argmin())
        virtual, microbatch = divmod(first, actual.shape[1])
        tick = int(earliest[virtual, microbatch])
        chunk, stage = divmod(virtual + step, ticks.num_stages)
        is_same = chunk == virtual // ticks.num_stages
        near = f"stage {stage}" if is_same else f"stage {stage}, chunk {chunk},"
        values = {"near": near, "sent": tick - 1, "tick": tick, "last": microbatch - 1}
        raise ScheduleError(
            f"{name_slot(kind, virtual, microbatch, ticks.num_stages)} is at tick "
            f"{actual[virtual, microbatch]}; it needs tick {tick} or later: "
            f"{reason.format(**values)}."
        )


def _rules(ticks: Ticks) -> Iterator[tuple[Kind, Ints, int, str]]:
    """Yields rules: the kind of slots, their earliest ticks, a step, and the reason.

    The reason is a part of the error message. It names a virtual stage. The number
    of this stage is the slot's virtual stage plus the step.
    """
    forward, *both_backward = ticks.by_kind.values()
    # All arrays are (chunks * stages, microbatches). A neighbour's output arrives in
    # the next tick, so 1 is added. A row without such a neighbour is padded with 0, so
    # that the rule always holds for it.
    arrival = np.pad(forward[:-1] + 1, ((1, 0), (0, 0)))
    yield "forward", arrival, -1, "{near} makes its input at tick {sent}"
    if both_backward:
        backward, _ = both_backward
        # This rule is only needed for the last virtual stage. For the others it follows
        # from the order of cotangents.
        loss = np.pad(forward[-1:], ((len(forward) - 1, 0), (0, 0)))
        yield "backward_input", loss, 0, "its forward is at tick {tick}"
        arrival = np.pad(backward[1:] + 1, ((0, 1), (0, 0)))
        yield "backward_input", arrival, 1, "{near} makes its cotangent at tick {sent}"
        # Here 1 is not added: within a tick the input slot runs before the weight slot.
        yield "backward_weight", backward, 0, "its backward input is at tick {tick}"
    # One microbatch passes its random state to the next, and gradients are summed in
    # the order of microbatches. In another order, the numbers would differ from the
    # numbers on one device.
    for kind, ticks_of_kind in ticks.by_kind.items():
        after_last = np.pad(ticks_of_kind[:, :-1] + 1, ((0, 0), (1, 0)))
        yield kind, after_last, 0, "microbatch {last} comes before it, at tick {sent}"


def _assign(ranges: LiveRanges) -> Ints:
    """Assigns memory slots. Values with overlapping live ranges get different ones."""
    start, end, stages = ranges
    slots = np.full_like(start, -1, dtype=np.int32)
    for stage in np.unique(stages):
        rows = np.flatnonzero(stages == stage).tolist()
        values = [(row, m) for row in rows for m in range(start.shape[1])]
        free = [*range(len(values))]  # a heap, with the lowest memory slot first
        busy: list[tuple[int, int]] = []  # (last tick, memory slot), the earliest first
        for value in sorted(values, key=lambda at: (start[at], at)):
            # A memory slot is free only after its last tick, not within this tick. A
            # stage writes received values at the start of a tick, before it reads.
            while busy and busy[0][0] < start[value]:
                heapq.heappush(free, heapq.heappop(busy)[1])
            slots[value] = slot = heapq.heappop(free)
            heapq.heappush(busy, (int(end[value]), slot))
    return slots
