"""The walk through a program that adds up what each instruction costs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from nnx_parallel.audit.collectives import Collective, read_collective
from nnx_parallel.audit.flops import count_flops
from nnx_parallel.audit.hlo import Computation, Instruction, Module
from nnx_parallel.audit.loops import Value, evaluate, read_loop

_BOOKKEEPING = {
    "AllocateBuffer",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
}


@dataclass(frozen=True, kw_only=True)
class Conditional:
    """A conditional, of whose branches the dearest is counted.

    Attributes:
        source: The JAX operation that it came from.
        branch_flops: FLOPs per device of each branch, executed once.
        count: Executions per run of the program, loops multiplied out.
    """

    source: str
    branch_flops: tuple[float, ...]
    count: int

    @property
    def scope(self) -> str:
        """The innermost `jax.named_scope` around it; empty if there is none."""
        return self.source.rpartition("/")[0].rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a piece of a program costs on one device.

    Attributes:
        flops: Floating-point operations of dots and convolutions.
        collectives: Every collective instruction.
        conditionals: Every conditional; of its branches only the dearest is in the
            other attributes.
        unknown_loops: Sources of the loops whose trip count depends on data. Their
            bodies are counted once.
        custom_calls: Executions by target of kernels whose FLOPs are not known.
    """

    flops: float = 0.0
    collectives: tuple[Collective, ...] = ()
    conditionals: tuple[Conditional, ...] = ()
    unknown_loops: tuple[str, ...] = ()
    custom_calls: Counter[str] = field(default_factory=Counter)

    @classmethod
    def total(cls, costs: Iterable["Cost"]) -> "Cost":
        """The sum of several costs."""
        costs = tuple(costs)
        return cls(
            flops=sum(cost.flops for cost in costs),
            collectives=tuple(chain.from_iterable(c.collectives for c in costs)),
            conditionals=tuple(chain.from_iterable(c.conditionals for c in costs)),
            unknown_loops=tuple(chain.from_iterable(c.unknown_loops for c in costs)),
            custom_calls=sum((cost.custom_calls for cost in costs), Counter()),
        )

    def times(self, count: int) -> "Cost":
        """The cost of doing the same several times."""
        return Cost(
            flops=self.flops * count,
            collectives=tuple(
                replace(each, count=each.count * count) for each in self.collectives
            ),
            conditionals=tuple(
                replace(each, count=each.count * count) for each in self.conditionals
            ),
            unknown_loops=self.unknown_loops,
            custom_calls=Counter({k: n * count for k, n in self.custom_calls.items()}),
        )


def measure(module: Module, taken: Mapping[str, float]) -> Cost:
    """The cost of one run of a program.

    Args:
        module: The program.
        taken: Share of the executions in which a conditional takes its dearest branch,
            by its scope; the FLOPs are those of the mean. Others always take it.
    """
    return _Walk(module, taken).computation(module.entry, ())


@dataclass(frozen=True)
class _Walk:
    module: Module
    taken: Mapping[str, float]

    def computation(self, name: str, arguments: tuple[Value, ...]) -> Cost:
        computation = self.module.computations[name]
        values = evaluate(self.module, computation, arguments)
        return Cost.total(
            cost
            for instruction in computation.instructions.values()
            for cost in self._instruction(computation, instruction, values)
        )

    def _instruction(
        self,
        computation: Computation,
        instruction: Instruction,
        values: dict[str, Value],
    ) -> Iterator[Cost]:
        operands = tuple(values.get(name) for name in instruction.operands)
        collective = read_collective(computation, instruction, self.module.num_devices)
        flops = count_flops(computation, instruction)
        if collective:
            yield Cost(collectives=(collective,))
        elif flops:
            yield Cost(flops=flops)
        elif instruction.opcode == "while":
            yield self._loop(instruction, operands[0])
        elif instruction.opcode == "conditional":
            yield self._conditional(instruction, operands[1:])
        elif instruction.opcode == "custom-call":
            target = instruction.attribute("custom_call_target") or ""
            if target not in _BOOKKEEPING:
                yield Cost(custom_calls=Counter({target: 1}))
        elif instruction.opcode in ("fusion", "call", "async-start"):
            yield self._call(instruction, operands)

    def _call(self, instruction: Instruction, operands: tuple[Value, ...]) -> Cost:
        assert instruction.called, f"{instruction.name} calls nothing"
        cost = self.computation(instruction.called, operands)
        is_async = instruction.opcode == "async-start"
        return replace(
            cost,
            collectives=tuple(
                replace(
                    each,
                    source=each.source or instruction.source,
                    asynchronous=each.asynchronous or is_async,
                )
                for each in cost.collectives
            ),
        )

    def _loop(self, instruction: Instruction, initial: Value) -> Cost:
        loop = read_loop(self.module, instruction, initial)
        trips = 1 if loop.trip_count is None else loop.trip_count
        parts = [
            self.computation(name, (loop.invariants,)).times(times)
            for key, times in (("body", trips), ("condition", trips + 1))
            if (name := instruction.attribute(key))
        ]
        if loop.trip_count is None:
            parts.append(Cost(unknown_loops=(instruction.source or instruction.name,)))
        return Cost.total(parts)

    def _conditional(
        self, instruction: Instruction, arguments: tuple[Value, ...]
    ) -> Cost:
        branches = [
            self.computation(name, (argument,))
            for name, argument in zip(instruction.branches, arguments, strict=True)
        ]
        dearest = max(branches, key=lambda c: (c.flops, _collective_bytes(c)))
        itself = Conditional(
            source=instruction.source,
            branch_flops=tuple(cost.flops for cost in branches),
            count=1,
        )
        share = self.taken.get(itself.scope, 1.0)
        cheapest = min(itself.branch_flops)
        flops = share * dearest.flops + (1 - share) * cheapest
        counted = replace(dearest, flops=flops)
        return Cost.total((counted, Cost(conditionals=(itself,))))


def _collective_bytes(cost: Cost) -> int:
    return sum(each.bytes for each in cost.collectives)
