"""Walks through a compiled program, and adds up its costs."""

import abc
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from nnx_parallel.audit.collectives import KINDS, UNREAD, Collective, read_collective
from nnx_parallel.audit.hlo import Computation, Instruction, Known, KnownValue, Module
from nnx_parallel.audit.transfers import Overlap, count_flops

_TARGET = "custom_call_target"
_FUSION_START = "AsyncCollectiveStart"
# Custom calls by which XLA allocates and awaits buffers; they are not kernels.
_BOOKKEEPING = {"AllocateBuffer", "AsyncCollectiveDone", _FUSION_START, "ConcatBitcast"}
_CALLS = ("while", "conditional", "fusion", "call")
# Names and flags of instructions that send data. Some are not collectives that can be
# read: transfers between two hosts or stages, and kernels that write into the memory of
# other devices.
_SENDS = re.compile(r"(send|recv|all-|collective-|ragged-all|reduce-scatter)")
_KERNEL_SENDS = re.compile(r'"(has_communication":\s*true|collective_id":\s*"?\d)')
# If a device has more rows than its share, a mixture of experts computes the remaining
# rows in further rounds. Unless `trips` is given, a count assumes balanced tokens,
# which need no further round.
TRIPS = {"more_rounds": 0}
# Names of `jax.lax.ragged_dot` on TPUs, and of the products of `MoE` on all platforms.
_GROUPED = re.compile(r"ragged[-_]dot|grouped_products")

Total = TypeVar("Total")


class Loop(NamedTuple, Generic[Total]):
    """A `while`, with the totals of one execution of its parts.

    Attributes:
        body: The repeated computation.
        condition: The computation that decides whether to go on. It is executed once
            more than the body.
        trips: Executions of the body.
        is_known: False if the number of trips depends on data, and `trips` is an
            assumption.
    """

    body: Total
    condition: Total
    trips: int
    is_known: bool


@dataclass(frozen=True)
class Walk(abc.ABC, Generic[Total]):
    """Goes through a program, from its entry or any other computation.

    It enters loops, conditionals and calls with the known part of their arguments, so
    that the loops inside can be read too. A subclass computes the totals of
    computations, loops and conditionals.

    Attributes:
        module: The program.
        trips: Number of trips of loops whose length depends on data, by the innermost
            scope around each loop.
    """

    module: Module
    trips: Mapping[str, int] = field(default_factory=dict)

    @abc.abstractmethod
    def computation(self, name: str, arguments: Known) -> Total:
        """Returns the total of a computation that is executed once."""

    @abc.abstractmethod
    def loop(self, instruction: Instruction, loop: Loop[Total]) -> Total:
        """Returns the total of a `while`, from the totals of its parts."""

    @abc.abstractmethod
    def conditional(self, instruction: Instruction, branches: list[Total]) -> Total:
        """Returns the total of a conditional, from the totals of its branches."""

    def enter(
        self, instruction: Instruction, values: Mapping[str, KnownValue]
    ) -> Total:
        """Returns the total of a loop, a conditional, or a called computation."""
        operands = tuple(map(values.get, instruction.operands))
        match instruction.opcode:
            case "while":
                return self._loop(instruction, operands[0])
            case "conditional":
                pairs = zip(instruction.branches, operands[1:], strict=True)
                branches = [self.computation(name, (given,)) for name, given in pairs]
                return self.conditional(instruction, branches)
        return self.computation(instruction.called or "", operands)

    def _loop(self, instruction: Instruction, initial: KnownValue) -> Total:
        known = self.module.read_loop(instruction, initial)
        scope, trips = scope_of(instruction.source), known.trip_count
        if trips is None:
            trips = {**TRIPS, **self.trips}.get(scope, 1)
        body, condition = (
            self.computation(instruction.attribute(key) or "", (known.invariants,))
            for key in ("body", "condition")
        )
        is_known = known.trip_count is not None or scope in self.trips
        return self.loop(instruction, Loop(body, condition, trips, is_known))


@dataclass(frozen=True, kw_only=True)
class Conditional:
    """A conditional. Only its most expensive branch is counted.

    Attributes:
        source: The JAX operation that it came from.
        branch_flops: FLOPs per device of one execution of each branch.
        count: Number of executions in a run of the program, counting all trips of
            loops.
    """

    source: str
    branch_flops: tuple[float, ...]
    count: int

    @property
    def scope(self) -> str:
        """The innermost `jax.named_scope` around it, or an empty string."""
        return scope_of(self.source)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The contribution of a part of a program to a `Report`, on one device."""

    flops: float = 0.0
    grouped_flops: float = 0.0
    grouped_products: int = 0
    collectives: tuple[Collective, ...] = ()
    unread: tuple[Collective, ...] = ()
    conditionals: tuple[Conditional, ...] = ()
    unknown_loops: tuple[str, ...] = ()
    custom_calls: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Cost") -> "Cost":
        """Returns the cost of both: every field is added."""
        return Cost(**{k: v + getattr(other, k) for k, v in vars(self).items()})

    def times(self, n: int) -> "Cost":
        """Returns the cost of `n` executions."""
        if n == 0:
            return Cost(unknown_loops=self.unknown_loops)
        collectives = (replace(c, count=c.count * n) for c in self.collectives)
        unread = (replace(c, count=c.count * n) for c in self.unread)
        conditionals = (replace(c, count=c.count * n) for c in self.conditionals)
        return replace(
            self,
            flops=self.flops * n,
            grouped_flops=self.grouped_flops * n,
            grouped_products=self.grouped_products * n,
            collectives=tuple(collectives),
            unread=tuple(unread),
            conditionals=tuple(conditionals),
            custom_calls=Counter({k: m * n for k, m in self.custom_calls.items()}),
        )


@dataclass(frozen=True)
class CostWalk(Walk[Cost]):
    """Adds up the costs of a program.

    Attributes:
        taken: Share of the executions in which a conditional takes its most expensive
            branch, by the scope directly around it.
    """

    taken: Mapping[str, float] = field(default_factory=dict)
    _walked: set[str] = field(default_factory=set)

    def program(self) -> Cost:
        """Returns the cost of the whole program, with its unread instructions."""
        cost = self.computation(self.module.entry, ())
        return cost + Cost(unread=tuple(self._never_reached()))

    def _never_reached(self) -> Iterator[Collective]:
        """Yields collectives in computations that no known instruction calls."""
        for name in self.module.computations.keys() - self._walked:
            computation = self.module.computations[name]
            for each in computation.instructions.values():
                found = read_collective(computation, each, self.module.num_devices)
                if found or _is_unknown(each):
                    yield self._unread(computation, each)

    @cached_property
    def _overlap(self) -> Overlap:
        return Overlap(self.module)

    def computation(self, name: str, arguments: Known) -> Cost:
        """Returns the cost of a computation that is executed once."""
        self._walked.add(name)
        computation = self.module.computations[name]
        values = self.module.evaluate(name, arguments)
        costs = (
            self.instruction(computation, each, values)
            for each in computation.instructions.values()
        )
        return sum(filter(None, costs), start=Cost())

    def instruction(
        self,
        computation: Computation,
        instruction: Instruction,
        values: Mapping[str, KnownValue],
    ) -> Cost | None:
        """Returns the cost of an instruction and all that it calls, or `None`."""
        if found := read_collective(computation, instruction, self.module.num_devices):
            return self._placed(Cost(collectives=(found,)), computation, instruction)
        cost = self._computed(computation, instruction, values)
        if _is_unknown(instruction) or not self._is_readable(computation, instruction):
            cost = (cost or Cost()) + Cost(
                unread=(self._unread(computation, instruction),)
            )
        return cost

    def _computed(
        self,
        computation: Computation,
        instruction: Instruction,
        values: Mapping[str, KnownValue],
    ) -> Cost | None:
        """Returns the cost of an instruction that is not a collective."""
        if flops := count_flops(computation, instruction):
            is_grouped = bool(_GROUPED.search(instruction.source))
            return Cost(
                flops=flops,
                grouped_flops=flops * is_grouped,
                grouped_products=int(is_grouped),
            )
        if instruction.opcode == "custom-call":
            return self._custom_call(instruction)
        if instruction.opcode not in _CALLS and not _starts(instruction):
            return None
        if instruction.opcode in ("while", "conditional"):
            return self.enter(instruction, values)
        if (instruction.called or "") not in self.module.computations:
            return None  # `instruction` counts it as unread
        return self._placed(self.enter(instruction, values), computation, instruction)

    def _is_readable(self, computation: Computation, instruction: Instruction) -> bool:
        """False if it starts a computation that the program's text does not show."""
        if instruction.opcode in ("fusion", "call") or _starts(instruction):
            return instruction.called in self.module.computations
        if instruction.attribute(_TARGET) == _FUSION_START:
            given = map(computation.instructions.get, instruction.operands)
            return any(each and _SENDS.match(each.opcode) for each in given)
        return True

    def _unread(self, computation: Computation, instruction: Instruction) -> Collective:
        given = computation.operand_shapes(instruction)
        name = instruction.attribute(_TARGET) or instruction.opcode
        return Collective(
            kind=UNREAD,
            bytes_each=max(
                sum(shape.num_bytes for shape in given),
                sum(shape.num_bytes for shape in instruction.shapes),
            ),
            count=1,
            dtypes=tuple(dict.fromkeys(shape.dtype for shape in given)),
            group_size=self.module.num_devices,
            groups=None,
            source=f"{name}: {instruction.source or instruction.name}",
            asynchronous=instruction.opcode.endswith("-start"),
            is_hidden=False if self.module.is_scheduled else None,
        )

    def _custom_call(self, instruction: Instruction) -> Cost:
        target = instruction.attribute(_TARGET) or ""
        # In a compiler's dump a custom call can call a SparseCore's program.
        if (called := instruction.called or "") in self.module.computations:
            cost = self.computation(called, ())
            if cost.collectives or cost.unread:
                return cost
        return Cost(custom_calls=Counter({target} - _BOOKKEEPING))

    def _placed(
        self, cost: Cost, computation: Computation, instruction: Instruction
    ) -> Cost:
        """Completes the collectives of a cost from the instruction around them.

        Inside a fusion the compiler often leaves the source out. Only the instruction
        around a collective shows that it is asynchronous, and which other instructions
        run at the same time.
        """
        if not cost.collectives:
            return cost
        wraps = _starts(instruction)
        overlaps = self.module.is_scheduled and self._overlap.is_hidden(
            computation, instruction
        )
        collectives = []
        for each in cost.collectives:
            is_async = each.asynchronous or wraps
            is_hidden = bool(each.is_hidden) or (is_async and overlaps)
            found = replace(
                each,
                source=each.source or instruction.source,
                asynchronous=is_async,
                is_hidden=is_hidden if self.module.is_scheduled else None,
            )
            collectives.append(found)
        return replace(cost, collectives=tuple(collectives))

    def loop(self, instruction: Instruction, loop: Loop[Cost]) -> Cost:
        """Returns the cost of all trips; lists a loop of unknown length."""
        cost = loop.body.times(loop.trips) + loop.condition.times(loop.trips + 1)
        if not loop.is_known:
            cost += Cost(unknown_loops=(instruction.source or instruction.name,))
        return cost

    def conditional(self, instruction: Instruction, branches: list[Cost]) -> Cost:
        """Returns the most expensive branch's cost, or the mean that `taken` gives."""
        # This is an upper bound, unless `taken` says how often that branch runs.
        most = max(
            branches, key=lambda c: (c.flops, sum(x.bytes for x in c.collectives))
        )
        flops = tuple(cost.flops for cost in branches)
        found = Conditional(source=instruction.source, branch_flops=flops, count=1)
        share = self.taken.get(found.scope, 1.0)
        mean = share * most.flops + (1 - share) * min(flops)
        return replace(most, flops=mean) + Cost(conditionals=(found,))


def _starts(instruction: Instruction) -> bool:
    """Returns True if it starts a computation that runs during other instructions.

    Compilers name such a start differently: `async-start`, `call-start` (libtpu 0.0.50)
    or `custom-call-start` (0.0.52).
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind == instruction.opcode or kind in KINDS or _SENDS.match(kind):
        return False
    return kind in ("async", "call", "custom-call") or instruction.called is not None


def _is_unknown(instruction: Instruction) -> bool:
    """Returns True for an instruction that sends but is not a known collective."""
    opcode = instruction.opcode
    if opcode == "custom-call":
        return bool(_KERNEL_SENDS.search(instruction.attributes))
    kind = opcode.removesuffix("-start")
    is_end = opcode.endswith(("-done", "-update"))
    return bool(_SENDS.match(opcode)) and not is_end and kind not in KINDS


def scope_of(source: str) -> str:
    """Returns the innermost `jax.named_scope` around a JAX operation, or ""."""
    return source.rpartition("/")[0].rpartition("/")[2]
