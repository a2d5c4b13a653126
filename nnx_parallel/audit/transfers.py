"""A scheduled program: its text, and which collectives run while a product does.

A scheduled program is printed in the order in which it runs. What lies between the
start of a collective and its end runs meanwhile. Where a collective starts depends on
who runs it. A `-start` that has operands sends them at once; that of a SparseCore has
none, and sends when an `-update` hands it the data. A TensorCore that sends and
multiplies at once has the steps of a collective in several fusions.

FLOPs of an instruction: a multiplication and an addition count two. A convolution
counts the products that it really needs: a kernel element over padding, or over a hole
that dilation made, costs nothing. So a strided convolution and both its gradients count
the same, and a dot that a TPU runs as a convolution over its batch dims counts as a
dot. A Pallas kernel counts its author's estimate.
"""

import math
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nnx_parallel.audit.hlo import Computation, Instruction, Module, Shape

_MATMUL_CALLS = {"__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul"}
_ESTIMATE = re.compile(r'"cost_estimate":\{[^}]*"flops":"(\d+)"')


def count_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of an instruction on one device, without the computations that it calls.

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


# Kernels that compute, whether they state their FLOPs or not.
_KERNELS = re.compile(r"tpu_custom_call|mosaic|triton|__cudnn|__cublas|__onednn")
_ASYNC = "AsyncCollective"  # how the targets of its custom calls begin
# By these the value of an asynchronous fusion comes to the next of its steps.
_PASSES_ON = {"get-tuple-element", "bitcast", "fusion", "tuple", "copy"}


def compile_with_text(lowered: jax.stages.Lowered) -> tuple[Any, str]:
    """A compiled program and its text.

    jaxlib 0.10 cannot print all that the libtpu of today compiles: there it is the text
    that the compiler itself writes, which lacks its estimates of cycles.
    """
    if jax.__version_info__ >= (0, 12):
        compiled = lowered.compile()
        return compiled, compiled.as_text() or ""
    with tempfile.TemporaryDirectory() as directory:
        compiled = lowered.compile(compiler_options={"xla_dump_to": directory})
        for file in Path(directory).glob("*.after_optimizations.txt"):
            return compiled, file.read_text()
    return compiled, compiled.as_text() or ""


@dataclass(frozen=True)
class Overlap:
    """Answers for the instructions of one scheduled program."""

    module: Module
    _products: dict[str, list[int]] = field(default_factory=dict)
    _has_product: dict[str, bool] = field(default_factory=dict)

    def is_hidden(self, computation: Computation, instruction: Instruction) -> bool:
        """True if a product runs between a collective's start and its end.

        Args:
            computation: Where the instruction is.
            instruction: The collective, or the fusion or start that it is in.
        """
        order = list(computation.instructions)
        at = order.index(instruction.name)
        if instruction.opcode.endswith("-start"):
            first, last = self._between(computation, instruction, at)
        elif self.starts_fusion(instruction):
            # The first and the last of its fusions may multiply themselves.
            first, last = at, self._end_of_fusions(computation, instruction, at) + 1
        else:
            return False
        products = self._products_of(computation)
        found = bisect_left(products, first)
        return found < len(products) and products[found] < last

    def starts_fusion(self, instruction: Instruction) -> bool:
        """True for the first of the fusions over which a collective is spread."""
        return "Start" in roles_of(self.module, instruction)

    def _between(
        self, computation: Computation, start: Instruction, at: int
    ) -> tuple[int, int]:
        """The positions where a collective starts to send and where it is awaited."""
        order = list(computation.instructions.values())
        done = f"{start.opcode.removesuffix('-start')}-done"
        names, first = {start.name}, at + 1 if any(start.operands) else len(order)
        for position, each in enumerate(order[at + 1 :], at + 1):
            if names.isdisjoint(each.operands):
                continue
            if each.opcode == done:
                return first, position
            if each.opcode.endswith("-update"):
                names.add(each.name)
                first = min(first, position + 1)
        return first, len(order)

    def _end_of_fusions(
        self, computation: Computation, start: Instruction, at: int
    ) -> int:
        """The position of the last fusion that holds a step of a collective."""
        names, last = {start.name}, at
        for position, each in enumerate(computation.instructions.values()):
            if position <= at or names.isdisjoint(each.operands):
                continue
            if "Done" in roles_of(self.module, each):
                return position
            if each.opcode in _PASSES_ON:
                names.add(each.name)
                # An instruction that only reads the last step's result is not a step.
                last = position if self._continues(each) else last
        return last

    def _continues(self, instruction: Instruction) -> bool:
        if instruction.opcode != "fusion":
            return False
        inner = self.module.computations[instruction.called or ""].instructions
        return any("async_collective_fusion" in x.attributes for x in inner.values())

    def _products_of(self, computation: Computation) -> list[int]:
        """Positions of the instructions that multiply, in order."""
        if computation.name not in self._products:
            self._products[computation.name] = [
                position
                for position, each in enumerate(computation.instructions.values())
                if self._multiplies(computation, each)
            ]
        return self._products[computation.name]

    def _multiplies(self, computation: Computation, instruction: Instruction) -> bool:
        if _is_running_sum(instruction):
            return False
        if count_flops(computation, instruction):
            return True
        if instruction.opcode == "custom-call":
            target = instruction.attribute("custom_call_target") or ""
            return bool(_KERNELS.search(target))
        return not is_spare(instruction) and any(
            self._multiplies_inside(name) for name in _called(instruction)
        )

    def _multiplies_inside(self, name: str) -> bool:
        if name not in self._has_product:
            computation = self.module.computations[name]
            self._has_product[name] = any(
                self._multiplies(computation, each)
                for each in computation.instructions.values()
            )
        return self._has_product[name]


def roles_of(module: Module, instruction: Instruction) -> set[str]:
    """The role of an instruction in a collective that is spread over several fusions.

    ``Start`` and ``Done`` are its first and its last step. A fusion has them inside.
    """
    steps = [instruction]
    inner = module.computations.get(instruction.called or "")
    if instruction.opcode == "fusion" and inner:
        steps = [*inner.instructions.values()]
    targets = (
        each.attribute("custom_call_target") or ""
        for each in steps
        if each.opcode == "custom-call"
    )
    return {t.removeprefix(_ASYNC) for t in targets if t.startswith(_ASYNC)}


def is_spare(instruction: Instruction) -> bool:
    """True for the further rounds of experts, which balanced tokens do not need."""
    return instruction.source.endswith("more_rounds/while")


def _is_running_sum(instruction: Instruction) -> bool:
    """True for a `cumsum`, which the compiler for TPUs writes as a convolution."""
    return instruction.source.endswith("reduce_window_sum")


def _called(instruction: Instruction) -> Iterator[str]:
    """The computations that an instruction calls."""
    match instruction.opcode:
        case "while":
            yield instruction.attribute("body") or ""
        case "fusion" | "call":
            yield instruction.called or ""
        case "conditional":
            yield from instruction.branches  # one that is not always taken too
