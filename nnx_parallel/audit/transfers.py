"""Gets a scheduled program's text, and finds collectives that products hide.

A scheduled program is printed in the order in which it runs. Instructions between the
start and the end of a collective run at the same time as the collective. A collective
starts in one of three ways. A `-start` that has operands sends them immediately. The
`-start` of a SparseCore has no operands, and sends when an `-update` passes it the
data. If a TensorCore sends and multiplies at the same time, the steps of a collective
are in several fusions.

In FLOPs a multiplication and an addition count as two. A convolution counts only the
products that it needs: products of a kernel element with padding, or with a hole from
dilation, do not count. So a strided convolution and both its gradients count the same.
A TPU runs some dots as convolutions over their batch dims, and such a convolution
counts the same as the dot. For a Pallas kernel, the estimate of its author is used.
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
    """Counts FLOPs of an instruction on one device, without computations that it calls.

    Only dots, convolutions and known kernels have FLOPs; other instructions count 0.
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
    # In `b01f_01io->b01f` b is batch, f feature, i and o input and output feature, and
    # digits are spatial dims.
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
        # Counts pairs of an output and a kernel position that meet an element of the
        # input.
        products *= int(np.count_nonzero(is_inside & (position % hole == 0)))
    return 2 * products


def _custom_call(instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    """Counts a Pallas kernel, or a library's matrix product."""
    if estimate := _ESTIMATE.search(instruction.attributes):
        return int(estimate[1])
    if instruction.attribute("custom_call_target") not in _MATMUL_CALLS:
        return 0
    # In (B, M, K) @ (B, K, N) -> (B, M, N) the sizes of the three arrays multiply to
    # B^3 (M N K)^2, for any order of dims.
    (lhs, rhs), output = operands[:2], instruction.shapes[0]
    batch = math.prod(rhs.dims[:-2])
    square = lhs.num_elements * rhs.num_elements * output.num_elements // batch
    return 2 * math.isqrt(square)


_FLOPS = {"dot": _dot, "convolution": _convolution, "custom-call": _custom_call}


# Kernels that compute. Some of them do not state their FLOPs.
_KERNELS = re.compile(r"tpu_custom_call|mosaic|triton|__cudnn|__cublas|__onednn")
_ASYNC = "AsyncCollective"  # prefix of the names of custom calls in such fusions
# Opcodes that pass the value of an asynchronous fusion on to its next step.
_PASSES_ON = {"get-tuple-element", "bitcast", "fusion", "tuple", "copy"}


def compile_with_text(lowered: jax.stages.Lowered) -> tuple[Any, str]:
    """Compiles a program; returns it and its text.

    jaxlib 0.10 cannot print every program of a newer libtpu. The text of such a program
    is the compiler's dump, which lacks the estimates of cycles.
    """
    if jax.__version_info__ >= (0, 12):
        compiled = lowered.compile()
        return compiled, compiled.as_text() or ""
    with tempfile.TemporaryDirectory() as directory:
        compiled = lowered.compile(compiler_options={"xla_dump_to": directory})
        try:
            return compiled, compiled.as_text() or ""
        except jax.errors.JaxRuntimeError:
            for file in Path(directory).glob("*.after_optimizations.txt"):
                return compiled, file.read_text()
            raise


@dataclass(frozen=True)
class Overlap:
    """Finds the collectives of a scheduled program that products hide."""

    module: Module
    _products: dict[str, list[int]] = field(default_factory=dict)
    _has_product: dict[str, bool] = field(default_factory=dict)

    def is_hidden(self, computation: Computation, instruction: Instruction) -> bool:
        """Returns True if a product runs between a collective's start and its end.

        Args:
            computation: The computation that has the instruction.
            instruction: The collective, or the fusion or start that it is in.
        """
        order = list(computation.instructions)
        at = order.index(instruction.name)
        if instruction.opcode.endswith("-start"):
            first, last = self._between(computation, instruction, at)
        elif self.starts_fusion(instruction):
            # The first and the last fusion count too, because they may contain a
            # product.
            first, last = at, self._end_of_fusions(computation, instruction, at) + 1
        else:
            return False
        products = self._products_of(computation)
        found = bisect_left(products, first)
        return found < len(products) and products[found] < last

    def starts_fusion(self, instruction: Instruction) -> bool:
        """Returns True for the first fusion of a collective in several fusions."""
        return "Start" in roles_of(self.module, instruction)

    def _between(
        self, computation: Computation, start: Instruction, at: int
    ) -> tuple[int, int]:
        """Returns the positions at which a collective begins to send and is awaited."""
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
        """Returns the position of the last fusion with a step of a collective."""
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
        """Returns the positions of the instructions that multiply, in order."""
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
    """Returns an instruction's roles in a collective that is spread over fusions.

    The roles ``Start`` and ``Done`` are the first and the last step of the collective.
    A fusion has the roles of the instructions inside.
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
    """Returns True for the loop over further rounds of `MoE` (`walk.TRIPS`)."""
    return instruction.source.endswith("more_rounds/while")


def _is_running_sum(instruction: Instruction) -> bool:
    """Returns True for a `cumsum`, which the TPU compiler writes as a convolution."""
    return instruction.source.endswith("reduce_window_sum")


def _called(instruction: Instruction) -> Iterator[str]:
    """Yields the computations that an instruction calls."""
    match instruction.opcode:
        case "while":
            yield instruction.attribute("body") or ""
        case "fusion" | "call":
            yield instruction.called or ""
        case "conditional":
            yield from instruction.branches  # even if one is rarely taken
