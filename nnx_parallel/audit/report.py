"""`audit`, its `Report`, and the walk that adds up the costs of instructions.

A multiplication and an addition count two FLOPs. A convolution counts the products that
it really needs: a kernel element over padding, or over a hole that dilation made, costs
nothing. So a strided convolution and both its gradients count the same, and a dot that
a TPU runs as a convolution over its batch dims counts as a dot. A Pallas kernel counts
what its author estimated.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from nnx_parallel.audit.collectives import KINDS, Collective, read_collective
from nnx_parallel.audit.hlo import (
    Computation,
    Instruction,
    Known,
    KnownValue,
    Module,
    Shape,
    parse,
)
from nnx_parallel.drawing import aligned, as_html

if TYPE_CHECKING:
    import jax

# Custom calls by which XLA allocates and awaits buffers; no kernels.
_BOOKKEEPING = {
    "AllocateBuffer",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
}
_CALLS = ("while", "conditional", "fusion", "call", "async-start")
_MATMUL_CALLS = {"__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul"}
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')


@dataclass(frozen=True, kw_only=True)
class Conditional:
    """A conditional, of whose branches the most expensive is counted.

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
    """The share of a `Report` that a piece of a program contributes, on one device."""

    flops: float = 0.0
    collectives: tuple[Collective, ...] = ()
    conditionals: tuple[Conditional, ...] = ()
    unknown_loops: tuple[str, ...] = ()
    custom_calls: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Cost") -> "Cost":
        """The cost of doing both; all fields are sums."""
        return Cost(**{k: v + getattr(other, k) for k, v in vars(self).items()})

    def times(self, n: int) -> "Cost":
        """The cost of doing the same `n` times."""
        collectives = (replace(c, count=c.count * n) for c in self.collectives)
        conditionals = (replace(c, count=c.count * n) for c in self.conditionals)
        return replace(
            self,
            flops=self.flops * n,
            collectives=tuple(collectives),
            conditionals=tuple(conditionals),
            custom_calls=Counter({k: m * n for k, m in self.custom_calls.items()}),
        )


@dataclass(frozen=True)
class _Walk:
    module: Module
    taken: Mapping[str, float]

    def computation(self, name: str, arguments: Known) -> Cost:
        computation = self.module.computations[name]
        values = self.module.evaluate(name, arguments)
        costs = (
            self._instruction(computation, each, values)
            for each in computation.instructions.values()
        )
        return sum(filter(None, costs), start=Cost())

    def _instruction(
        self,
        computation: Computation,
        instruction: Instruction,
        values: Mapping[str, KnownValue],
    ) -> Cost | None:
        if found := read_collective(computation, instruction, self.module.num_devices):
            return Cost(collectives=(found,))
        if flops := count_flops(computation, instruction):
            return Cost(flops=flops)
        if instruction.opcode == "custom-call":
            target = instruction.attribute("custom_call_target") or ""
            return Cost(custom_calls=Counter({target} - _BOOKKEEPING))
        if instruction.opcode not in _CALLS:
            return None
        operands = tuple(map(values.get, instruction.operands))
        match instruction.opcode:
            case "while":
                return self._loop(instruction, operands[0])
            case "conditional":
                return self._conditional(instruction, operands[1:])
        return self._call(instruction, operands)

    def _call(self, instruction: Instruction, operands: Known) -> Cost:
        assert instruction.called, f"{instruction.name} calls nothing"
        cost = self.computation(instruction.called, operands)
        # Inside a fusion the compiler often leaves the source out, and only the wrapper
        # says that a collective is asynchronous.
        collectives = []
        for each in cost.collectives:
            is_async = each.asynchronous or instruction.opcode == "async-start"
            source = each.source or instruction.source
            collectives.append(replace(each, source=source, asynchronous=is_async))
        return replace(cost, collectives=tuple(collectives))

    def _loop(self, instruction: Instruction, initial: KnownValue) -> Cost:
        loop = self.module.read_loop(instruction, initial)
        trips = 1 if loop.trip_count is None else loop.trip_count
        body, condition = (
            self.computation(instruction.attribute(key) or "", (loop.invariants,))
            for key in ("body", "condition")
        )
        cost = body.times(trips) + condition.times(trips + 1)  # fails the last time
        if loop.trip_count is None:
            cost += Cost(unknown_loops=(instruction.source or instruction.name,))
        return cost

    def _conditional(self, instruction: Instruction, arguments: Known) -> Cost:
        branches = [
            self.computation(name, (argument,))
            for name, argument in zip(instruction.branches, arguments, strict=True)
        ]
        # An upper bound, unless `taken` says how often it is the one that runs.
        most = max(
            branches, key=lambda c: (c.flops, sum(x.bytes for x in c.collectives))
        )
        flops = tuple(cost.flops for cost in branches)
        found = Conditional(source=instruction.source, branch_flops=flops, count=1)
        share = self.taken.get(found.scope, 1.0)
        mean = share * most.flops + (1 - share) * min(flops)
        return replace(most, flops=mean) + Cost(conditionals=(found,))


def count_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of an instruction itself on one device, without those of what it calls.

    0 for all but dots, convolutions and known kernels.
    """
    if rule := _FLOPS.get(instruction.opcode):
        return float(rule(instruction, computation.operand_shapes(instruction)))
    return 0.0


def _dot(instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    contracted = re.findall(r"\d+", instruction.attribute("lhs_contracting_dims") or "")
    depth = math.prod(operands[0].dims[int(dim)] for dim in contracted)
    return 2 * instruction.shapes[0].num_elements * depth


def _convolution(instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    shapes = (operands[0].dims, operands[1].dims, instruction.shapes[0].dims)
    # `b01f_01io->b01f`: batch, feature, input and output feature; digits are spatial.
    labels = re.split("_|->", instruction.attribute("dim_labels") or "")
    sizes = [dict(zip(*pair, strict=True)) for pair in zip(labels, shapes, strict=True)]
    lhs, kernel, output = sizes
    products = kernel["i"] * output["b"] * output["f"]
    window = re.findall(r"(\w+)=([\dx_-]+)", instruction.attribute("window") or "")
    for dim in filter(str.isdigit, lhs):
        # `pad=0_1x2_3` has the low and the high padding of each dim.
        low = {k: int(v.split("x")[int(dim)].split("_")[0]) for k, v in window}
        starts = np.arange(output[dim]) * low.get("stride", 1) - low.get("pad", 0)
        within = np.arange(kernel[dim]) * low.get("rhs_dilate", 1)
        position = starts[:, None] + within[None, :]  # (output, kernel)
        hole = low.get("lhs_dilate", 1)
        is_inside = (position >= 0) & (position < lhs[dim] * hole)
        # Pairs of an output and a kernel position that meet an element of the input.
        products *= int(np.count_nonzero(is_inside & (position % hole == 0)))
    return 2 * products


def _custom_call(instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    """A Pallas kernel, or a library's matrix product."""
    if estimate := _ESTIMATE.search(instruction.attributes):
        return int(estimate[1])
    if instruction.attribute("custom_call_target") not in _MATMUL_CALLS:
        return 0
    # (B, M, K) @ (B, K, N) -> (B, M, N), in any order of dims: the three sizes multiply
    # to B^3 (M N K)^2.
    (lhs, rhs), output = operands[:2], instruction.shapes[0]
    batch = math.prod(rhs.dims[:-2])
    square = lhs.num_elements * rhs.num_elements * output.num_elements // batch
    return 2 * math.isqrt(square)


_FLOPS = {"dot": _dot, "convolution": _convolution, "custom-call": _custom_call}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Computation, communication and memory of one run of a program on one device.

    Attributes:
        flops: Floating-point operations of dots and convolutions, and of Pallas kernels
            that state theirs; a multiplication and an addition count two.
        collectives: Every collective instruction among more than one device.
        conditionals: Every conditional. The other attributes count its most expensive
            branch, by FLOPs and then by bytes in collectives.
        unknown_loops: Loops whose trip count depends on data; bodies are counted once.
        custom_calls: Executions, by target, of kernels of unknown, uncounted FLOPs.
        opcodes: Instructions by opcode in the whole text, loops not multiplied: two
            programs that differ here are not the same.
        temporary_bytes: Scratch memory; like the next two, `None` for a text.
        argument_bytes: Memory of the arguments.
        output_bytes: Memory of the results, donated arguments included.
    """

    flops: float
    collectives: tuple[Collective, ...]
    conditionals: tuple[Conditional, ...]
    unknown_loops: tuple[str, ...]
    custom_calls: Counter[str]
    opcodes: Counter[str]
    temporary_bytes: int | None
    argument_bytes: int | None
    output_bytes: int | None

    def count(self, kind: str | None = None) -> int:
        """Executions per run of the collectives of a kind in `KINDS`, or of all.

        Raises:
            ValueError: If there is no such kind.
        """
        return sum(each.count for each in self._of_kind(kind))

    def bytes(self, kind: str | None = None) -> int:
        """Bytes per device and run of the same collectives as in `count`.

        Those of the data, as in `Collective.bytes_each`, loops multiplied out.
        """
        return sum(each.bytes for each in self._of_kind(kind))

    def table(self) -> str:
        """Totals, then a line for each group of equal collectives."""
        return "\n".join((*self._totals(), "", aligned(self._rows())))

    def _rows(self) -> list[tuple[str, ...]]:
        # Layers outside of a loop send the same: their groups and counts are merged.
        alike = Counter()
        for each in self.collectives:
            alike[replace(each, count=1, groups=None)] += each.count
        rows = [("collective", "count", "each", "total", "group", "source")]
        rows += [
            (
                each.kind + (" (async)" if each.asynchronous else ""),
                str(count),
                _readable(each.bytes_each, "B"),
                _readable(each.bytes_each * count, "B"),
                str(each.group_size),
                # A collective of many arrays has the names of all, in one text.
                each.source[:100] + "..." * (len(each.source) > 100),
            )
            for each, count in sorted(alike.items(), key=lambda item: item[0].kind)
        ]
        return rows

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        sent = f"{self.count()} collectives of {_readable(self.bytes(), 'B')}"
        return f"<{_readable(self.flops, '')} FLOPs, {sent} on each device>"

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        return as_html(header, rows, title=repr(self)[1:-1], notes=self._totals())

    def _of_kind(self, kind: str | None) -> tuple[Collective, ...]:
        if kind is not None and kind not in KINDS:
            known = ", ".join(KINDS)
            raise ValueError(f"No collective is called {kind!r}. Kinds: {known}.")
        return tuple(c for c in self.collectives if kind in (None, c.kind))

    def _totals(self) -> Iterator[str]:
        yield f"FLOPs per device: {_readable(self.flops, '')}"
        memory = (self.temporary_bytes, self.argument_bytes, self.output_bytes)
        names = ("temporaries", "arguments", "outputs")
        for name, size in zip(names, memory, strict=True):
            if size is not None:
                yield f"{name}: {_readable(size, 'B')}"
        for source in self.unknown_loops:
            yield f"loop of unknown length, counted once: {source}"
        for each in self.conditionals:
            yield f"conditional, most expensive branch counted: {each.source}"
        if calls := ", ".join(f"{k} x {n}" for k, n in self.custom_calls.items()):
            yield f"kernels of unknown FLOPs: {calls}"


def audit(
    compiled: "jax.stages.Compiled | str", *, taken: Mapping[str, float] | None = None
) -> Report:
    """Counts what a compiled program computes and sends.

    Nothing is run. Unlike XLA's own `cost_analysis`, the body of a loop counts once for
    each iteration.

    Args:
        compiled: `jax.jit(f).lower(...).compile()`, or the text of optimised HLO, for
            any backend.
        taken: Share of the executions in which a conditional takes its most expensive
            branch, by the `jax.named_scope` directly around it. FLOPs are then those of
            the mean; collectives stay those of the most expensive branch.

    Raises:
        ValueError: If a text is not optimised HLO, or no conditional has a scope.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> def layers(x):
        ...     return jax.lax.scan(lambda x, _: (x @ x, None), x, length=16)[0]
        >>> report = audit(jax.jit(layers).lower(jnp.ones((8, 8))).compile())
        >>> report.flops == 16 * 2 * 8**3
        True
        >>> report.count("all-gather")
        0
    """
    # `cost_analysis` counts the body of a loop once, and knows no collectives.
    is_text = isinstance(compiled, str)
    module = parse((compiled if is_text else compiled.as_text()) or "")
    memory = None if is_text else compiled.memory_analysis()
    taken = taken or {}
    cost = _Walk(module, taken).computation(module.entry, ())
    scopes = {each.scope for each in cost.conditionals}
    if missing := taken.keys() - scopes:
        raise ValueError(
            f"taken= names the scopes {sorted(missing)}, but the conditionals are in "
            f"{sorted(scopes)}. Put jax.named_scope directly around the jax.lax.cond."
        )
    all_instructions = (c.instructions.values() for c in module.computations.values())
    opcodes = Counter(each.opcode for each in chain.from_iterable(all_instructions))
    return Report(
        **vars(cost),  # whose fields have the same names
        opcodes=opcodes,
        temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
        argument_bytes=getattr(memory, "argument_size_in_bytes", None),
        output_bytes=getattr(memory, "output_size_in_bytes", None),
    )


def flops_of(compiled: "jax.stages.Compiled") -> float:
    """The `Report.flops` of a compiled program alone, which takes half of the time."""
    module = parse(compiled.as_text() or "")
    return _Walk(module, {}).computation(module.entry, ()).flops


def _readable(number: float, unit: str) -> str:
    """1,500 as `1.50 k`."""
    # Decimal, as bandwidths and FLOPs per second are given; memory elsewhere is in KiB.
    thousands = max(0, math.floor(math.log10(number) / 3)) if number else 0
    scaled = f"{number / 1000**thousands:.{2 if thousands else 0}f}"
    return f"{scaled} {' kMGTPE'[thousands].strip()}{unit}".strip()
