"""Floating-point operations of one instruction: dots and convolutions.

A multiplication and an addition count two. A convolution counts the products that it
really needs: a kernel element over padding, or over a hole that dilation made, costs
nothing. So a strided convolution and both its gradients count the same, and a dot that
a TPU runs as a convolution over its batch dims counts as a dot. A Pallas kernel counts
what its author estimated.
"""

import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from nnx_parallel.audit.hlo import Computation, Instruction, Shape

_MATMUL_CALLS = {"__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul"}
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')


def count_flops(computation: Computation, instruction: Instruction) -> float:
    """The FLOPs of an instruction itself, without those of what it calls.

    Args:
        computation: The one that holds the instruction and defines its operands.
        instruction: Any instruction.

    Returns:
        FLOPs on one device; 0 for all but dots, convolutions and known kernels.
    """
    rule = _RULES.get(instruction.opcode)
    if rule is None:
        return 0.0
    return float(rule(instruction, computation.operand_shapes(instruction)))


def _dot(instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    contracted = instruction.int_list("lhs_contracting_dims")
    depth = math.prod(operands[0].dims[dim] for dim in contracted)
    return 2 * instruction.shapes[0].num_elements * depth


def _convolution(instruction: Instruction, operands: tuple[Shape, ...]) -> int:
    lhs, kernel, output = operands[0].dims, operands[1].dims, instruction.shapes[0].dims
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
    outputs = np.arange(output)[:, None] * stride - pad
    position = outputs + np.arange(kernel)[None, :] * rhs_dilate
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
    """A Pallas kernel, or a library's matrix product.

    The sizes of (B, M, K), (B, K, N) and (B, M, N) multiply to B^3 (M N K)^2, whatever
    is transposed.
    """
    if estimate := _ESTIMATE.search(instruction.attributes):
        return int(estimate.group(1))
    if instruction.attribute("custom_call_target") not in _MATMUL_CALLS:
        return 0
    (lhs, rhs), output = operands[:2], instruction.shapes[0]
    batch = math.prod(rhs.dims[:-2])
    square = lhs.num_elements * rhs.num_elements * output.num_elements // batch
    return 2 * math.isqrt(square)


_RULES: Mapping[str, Callable[[Instruction, tuple[Shape, ...]], int]] = {
    "dot": _dot,
    "convolution": _convolution,
    "custom-call": _custom_call,
}
