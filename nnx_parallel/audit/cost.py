"""The walk through a program that adds up what each instruction costs.

A multiplication and an addition count two FLOPs. A convolution counts the products that
it really needs: a kernel element over padding, or over a hole that dilation made, costs
nothing. So a strided convolution and both its gradients count the same, and a dot that
a TPU runs as a convolution over its batch dims counts as a dot. A Pallas kernel counts
what its author estimated.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from nnx_parallel.audit.collectives import Collective, read_collective
from nnx_parallel.audit.hlo import Computation, Instruction, Module, Shape
from nnx_parallel.audit.loops import KnownValue, evaluate, read_loop

# Custom calls by which XLA allocates and awaits buffers; no kernels.
_BOOKKEEPING = {
    "AllocateBuffer",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
}
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


_Counted = TypeVar("_Counted", Collective, Conditional)


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

    def times(self, count: int) -> "Cost":
        """The cost of doing the same several times."""
        return replace(
            self,
            flops=self.flops * count,
            collectives=tuple(_repeat(each, count) for each in self.collectives),
            conditionals=tuple(_repeat(each, count) for each in self.conditionals),
            custom_calls=Counter({k: n * count for k, n in self.custom_calls.items()}),
        )


def _repeat(part: _Counted, count: int) -> _Counted:
    return replace(part, count=part.count * count)


def measure(module: Module, taken: Mapping[str, float]) -> Cost:
    """The cost of one run of a program; `taken` is that of `audit`."""
    return _Walk(module, taken).computation(module.entry, ())


@dataclass(frozen=True)
class _Walk:
    module: Module
    taken: Mapping[str, float]

    def computation(self, name: str, arguments: tuple[KnownValue, ...]) -> Cost:
        computation = self.module.computations[name]
        values = evaluate(self.module, computation, arguments)
        costs = (
            self._instruction(computation, instruction, values)
            for instruction in computation.instructions.values()
        )
        return sum(filter(None, costs), start=Cost())

    def _instruction(
        self,
        computation: Computation,
        instruction: Instruction,
        values: dict[str, KnownValue],
    ) -> Cost | None:
        operands = tuple(values.get(name) for name in instruction.operands)
        collective = read_collective(computation, instruction, self.module.num_devices)
        flops = count_flops(computation, instruction)
        if collective:
            return Cost(collectives=(collective,))
        if flops:
            return Cost(flops=flops)
        match instruction.opcode:
            case "while":
                return self._loop(instruction, operands[0])
            case "conditional":
                return self._conditional(instruction, operands[1:])
            case "custom-call":
                target = instruction.attribute("custom_call_target") or ""
                return Cost(custom_calls=Counter({target} - _BOOKKEEPING))
            case "fusion" | "call" | "async-start":
                return self._call(instruction, operands)
        return None

    def _call(self, instruction: Instruction, operands: tuple[KnownValue, ...]) -> Cost:
        assert instruction.called, f"{instruction.name} calls nothing"
        cost = self.computation(instruction.called, operands)
        is_async = instruction.opcode == "async-start"
        # Inside a fusion the compiler often leaves the source out, and only the wrapper
        # says that a collective is asynchronous.
        collectives = tuple(
            replace(
                each,
                source=each.source or instruction.source,
                asynchronous=each.asynchronous or is_async,
            )
            for each in cost.collectives
        )
        return replace(cost, collectives=collectives)

    def _loop(self, instruction: Instruction, initial: KnownValue) -> Cost:
        loop = read_loop(self.module, instruction, initial)
        trips = 1 if loop.trip_count is None else loop.trip_count
        body, condition = (
            self.computation(instruction.attribute(key) or "", (loop.invariants,))
            for key in ("body", "condition")
        )
        cost = body.times(trips) + condition.times(trips + 1)  # fails the last time
        if loop.trip_count is None:
            cost += Cost(unknown_loops=(instruction.source or instruction.name,))
        return cost

    def _conditional(
        self, instruction: Instruction, arguments: tuple[KnownValue, ...]
    ) -> Cost:
        branches = [
            self.computation(name, (argument,))
            for name, argument in zip(instruction.branches, arguments, strict=True)
        ]
        # An upper bound, unless `taken` says how often it is the one that runs.
        most_expensive = max(
            branches, key=lambda c: (c.flops, sum(each.bytes for each in c.collectives))
        )
        conditional = Conditional(
            source=instruction.source,
            branch_flops=tuple(cost.flops for cost in branches),
            count=1,
        )
        share = self.taken.get(conditional.scope, 1.0)
        cheapest = min(conditional.branch_flops)
        flops = share * most_expensive.flops + (1 - share) * cheapest
        return replace(most_expensive, flops=flops) + Cost(conditionals=(conditional,))


def count_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of an instruction itself on one device, without those of what it calls.

    0 for all but dots, convolutions and known kernels.
    """
    rule = _FLOPS.get(instruction.opcode)
    if rule is None:
        return 0.0
    return float(rule(instruction, computation.operand_shapes(instruction)))


def _dot(instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    contracted = instruction.int_list("lhs_contracting_dims")
    depth = math.prod(operands[0].dims[dim] for dim in contracted)
    return 2 * instruction.shapes[0].num_elements * depth


def _convolution(instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    lhs, kernel, output = operands[0].dims, operands[1].dims, instruction.shapes[0].dims
    # `b01f_01io->b01f`: batch, feature, input and output feature; digits are spatial.
    labels = re.split("_|->", instruction.attribute("dim_labels") or "")
    lhs_labels, kernel_labels, output_labels = labels
    products = kernel[kernel_labels.index("i")]
    products *= output[output_labels.index("b")] * output[output_labels.index("f")]
    window = _window(instruction)
    for dim in range(len(lhs) - 2):
        products *= _num_products(
            lhs[lhs_labels.index(str(dim))],
            kernel[kernel_labels.index(str(dim))],
            output[output_labels.index(str(dim))],
            **{key: values[dim] for key, values in window.items()},
        )
    return 2 * products


def _num_products(
    lhs: int,
    kernel: int,
    output: int,
    *,
    stride: int = 1,
    pad: int = 0,
    lhs_dilate: int = 1,
    rhs_dilate: int = 1,
) -> int:
    """Pairs of an output and a kernel position that meet an element of the input."""
    outputs = np.arange(output)[:, None] * stride - pad  # (output, 1)
    position = outputs + np.arange(kernel)[None, :] * rhs_dilate  # (output, kernel)
    is_inside = (position >= 0) & (position < lhs * lhs_dilate)
    return int(np.count_nonzero(is_inside & (position % lhs_dilate == 0)))


def _window(instruction: Instruction) -> dict[str, list[int]]:
    """The window's numbers by dim: `pad=0_1x2_3` gives the low ones, 0 and 2."""
    text = instruction.attribute("window") or ""
    fields = re.findall(r"(stride|pad|lhs_dilate|rhs_dilate)=([\dx_-]+)", text)
    return {
        key: [int(part.split("_")[0]) for part in values.split("x")]
        for key, values in fields
    }


def _custom_call(instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    """A Pallas kernel, or a library's matrix product."""
    if estimate := _ESTIMATE.search(instruction.attributes):
        return int(estimate.group(1))
    if instruction.attribute("custom_call_target") not in _MATMUL_CALLS:
        return 0
    # (B, M, K) @ (B, K, N) -> (B, M, N), in any order of dims: the three sizes multiply
    # to B^3 (M N K)^2.
    (lhs, rhs), output = operands[:2], instruction.shapes[0]
    batch = math.prod(rhs.dims[:-2])
    square = lhs.num_elements * rhs.num_elements * output.num_elements // batch
    return 2 * math.isqrt(square)


_FLOPS: Mapping[str, Callable[[Instruction, tuple[Shape, ...]], int]] = {
    "dot": _dot,
    "convolution": _convolution,
    "custom-call": _custom_call,
}
