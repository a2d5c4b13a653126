"""The time of a scheduled program: one clock for the chip, one for its links.

A TPU's program runs in the order in which it is printed. Each operation takes the
cycles that the compiler has estimated when it chose its tiles, a collective its bytes
over the links that its group spans. What is started asynchronously holds the links and
nothing else, until the operation that awaits it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from nnx_parallel.audit.collectives import Collective, read_collective
from nnx_parallel.audit.flops import count_flops
from nnx_parallel.audit.hlo import Computation, Instruction, KnownValue, Module, parse
from nnx_parallel.audit.transfers import sent_bytes

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**60  # the compiler's word for "not known"
_CALLED = re.compile(r"called_computations=\{%?([\w.\-$]+)")
_ASYNC = "AsyncCollective"


@dataclass
class Work:
    """What a program does in one run, and how long it takes.

    Attributes:
        cycles: Estimated by the compiler, of all but kernels.
        product_cycles: Those of operations with a product among them.
        kernels: Executions of kernels by name; the compiler estimates none.
        link_seconds: All transfers.
        waited_seconds: Transfers that nothing runs beside, by groups' size.
    """

    seconds: float = 0.0
    cycles: float = 0.0
    product_cycles: float = 0.0
    kernel_flops: float = 0.0
    kernel_seconds: float = 0.0
    link_seconds: float = 0.0
    waited_seconds: float = 0.0
    kernels: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, other: Work, count: int) -> None:
        """Adds ``count`` runs of another piece."""
        for name, value in vars(other).items():
            if name == "kernels":
                for kernel, times in other.kernels.items():
                    self.kernels[kernel] += count * times
            else:
                setattr(self, name, getattr(self, name) + count * value)


def run_schedule(
    text: str,
    *,
    clock: float,
    bandwidth: Callable[[Collective], float],
    kernel_seconds: Callable[[Instruction, Computation], tuple[float, float]],
    speed: float = 1.0,
) -> Work:
    """Runs a scheduled program on two clocks.

    Args:
        text: Of the program after code generation, with the compiler's estimates.
        clock: Cycles per second.
        bandwidth: Bytes/s at which a device sends in a collective.
        kernel_seconds: FLOPs of a kernel, and its seconds.
        speed: Share of its own estimate that the chip attains.
    """
    return _Run(parse(text), clock * speed, bandwidth, kernel_seconds).entry()


@dataclass
class _Run:
    module: Module
    clock: float
    bandwidth: Callable[[Collective], float]
    kernel_seconds: Callable[[Instruction, Computation], tuple[float, float]]
    _has_product: dict[str, bool] = field(default_factory=dict)

    def entry(self) -> Work:
        return self.of(self.module.entry, ())

    def of(self, name: str, arguments: tuple[KnownValue, ...]) -> Work:
        """The work of a computation; its transfers end within it."""
        computation = self.module.computations[name]
        values = self.module.evaluate(name, arguments)
        work, links_free = Work(), 0.0
        pending: dict[str, float] = {}
        for instruction in computation.instructions.values():
            operands = tuple(values.get(o) for o in instruction.operands)
            inner = self._inner(instruction, operands)
            if inner is not None:
                for each, count in inner:
                    work.add(each, count)
                links_free = max(links_free, work.seconds)
                continue
            names = (o.partition("#")[0] for o in instruction.operands)
            ends = [pending[o] for o in names if o in pending]
            roles = self._roles(instruction)
            if ends and (instruction.opcode.endswith("-done") or "Done" in roles):
                late = max(0.0, max(ends) - work.seconds)
                work.seconds += late
                work.waited_seconds += late
                continue
            if ends:
                pending[instruction.name] = max(ends)
            spent = self._compute(computation, instruction, work)
            found = None if ends else self._collective(computation, instruction)
            if found is not None:
                lasts = sent_bytes(found) / self.bandwidth(found)
                work.link_seconds += lasts
                begin = max(links_free, work.seconds)
                links_free = begin + lasts
                if self._is_async(instruction, roles):
                    pending[instruction.name] = links_free
                elif spent and self._products(instruction.called or ""):
                    # A product that gathers its operand piece by piece.
                    pass
                else:
                    work.waited_seconds += links_free - work.seconds
                    work.seconds = links_free
                    spent = 0.0
            work.seconds += spent
            if found is not None and spent and not pending.get(instruction.name):
                late = max(0.0, links_free - work.seconds)
                work.waited_seconds += late
                work.seconds += late
        return work

    def _inner(
        self, instruction: Instruction, operands: tuple[KnownValue, ...]
    ) -> list[tuple[Work, int]] | None:
        """The pieces of a loop, a call or a conditional, and how often each runs."""
        if instruction.opcode == "while":
            loop = self.module.read_loop(instruction, operands[0])
            body = instruction.attribute("body") or ""
            return [(self.of(body, (loop.invariants,)), loop.trip_count or 1)]
        if instruction.opcode == "call":
            return [(self.of(instruction.called or "", operands), 1)]
        if instruction.opcode == "conditional":
            runs = [self.of(name, operands) for name in instruction.branches]
            return [(max(runs, key=lambda work: work.seconds), 1)]
        return None

    def _compute(
        self, computation: Computation, instruction: Instruction, work: Work
    ) -> float:
        """Seconds of an operation itself."""
        if "tpu_custom_call" in instruction.attributes:
            flops, seconds = self.kernel_seconds(instruction, computation)
            work.kernels[instruction.name.rstrip("0123456789.")] += 1
            work.kernel_flops += flops
            work.kernel_seconds += seconds
            return seconds
        found = _CYCLES.search(instruction.attributes)
        cycles = int(found[1]) if found else 0
        if cycles > _NO_ESTIMATE:
            return 0.0
        work.cycles += cycles
        if self._products(instruction.called or ""):
            work.product_cycles += cycles
        return cycles / self.clock

    def _called(self, instruction: Instruction) -> Iterator[Computation]:
        names = [instruction.called]
        if found := _CALLED.search(instruction.attributes):
            names.append(found[1])
        for name in filter(None, names):
            if name in self.module.computations:
                yield self.module.computations[name]

    def _products(self, name: str) -> bool:
        if name not in self.module.computations:
            return False
        if name not in self._has_product:
            inner = self.module.computations[name]
            self._has_product[name] = any(
                count_flops(inner, i) or self._products(i.called or "")
                for i in inner.instructions.values()
            )
        return self._has_product[name]

    def _roles(self, instruction: Instruction) -> set[str]:
        """What a fusion does with a collective that is spread over several."""
        if instruction.opcode != "fusion":
            return set()
        return {
            target.removeprefix(_ASYNC)
            for inner in self._called(instruction)
            for each in inner.instructions.values()
            if (target := each.attribute("custom_call_target") or "").startswith(_ASYNC)
        }

    def _is_async(self, instruction: Instruction, roles: set[str]) -> bool:
        return instruction.opcode.endswith("-start") or "Start" in roles

    def _collective(
        self, computation: Computation, instruction: Instruction
    ) -> Collective | None:
        devices = self.module.num_devices
        if found := read_collective(computation, instruction, devices):
            return found
        if instruction.opcode not in ("fusion", "async-start", "custom-call-start"):
            return None
        return next(
            (
                found
                for inner in self._called(instruction)
                for each in inner.instructions.values()
                if (found := self._collective(inner, each))
            ),
            None,
        )


def torus_bandwidth(
    coords: list[tuple[int, ...]],
    wraps: tuple[bool, ...],
    shape: tuple[int, ...],
    link: float,
) -> Callable[[Collective], float]:
    """Bytes/s that a device sends in a collective over a torus.

    A ring along a dim that wraps around uses both links of a device along it; along one
    that does not, a line's ends have one. Over several dims a collective splits its
    bytes among rings along all of them.

    Args:
        coords: Where each device is, in the order of the program.
        wraps: Dims whose links close a ring.
        shape: Chips along each dim.
        link: Bytes/s of one link in one direction.
    """
    known: Mapping[tuple[int, ...], float] = {}

    def of(found: Collective) -> float:
        group = found.groups[0] if found.groups else tuple(range(len(coords)))
        if group not in known:
            places = [coords[i] for i in group]
            links = 0
            for dim, is_ring in enumerate(wraps):
                count = len({place[dim] for place in places})
                if count > 1:
                    links += 2 if is_ring and count == shape[dim] else 1
            known[group] = max(1, links) * link  # pyright: ignore[reportIndexIssue]
        return known[group]

    return of


def share_of_array(sizes: tuple[int, ...], width: int) -> float:
    """Share of a systolic array that a product with these dims fills [1].

    Dims that are shorter than the array, or no multiple of it, leave the rest idle.

    Example:
        >>> share_of_array((128, 4096), 256)
        0.5

    References:
        [1] Austin et al., "How to Scale Your Model", 2025, section 2,
        https://jax-ml.github.io/scaling-book/tpus/
    """
    return math.prod(n / (math.ceil(n / width) * width) for n in sizes)
