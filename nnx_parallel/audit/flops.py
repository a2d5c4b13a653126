"""FLOPs of single instructions.

A multiplication and an addition count two FLOPs. A convolution counts the products that
it really needs: a kernel element over padding, or over a hole that dilation made, costs
nothing. So a strided convolution and both its gradients count the same, and a dot that
a TPU runs as a convolution over its batch dims counts as a dot. A Pallas kernel counts
its author's estimate.
"""

import math
import re

import numpy as np

from nnx_parallel.audit.hlo import Computation, Instruction, Shape

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
