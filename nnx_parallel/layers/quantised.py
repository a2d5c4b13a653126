"""Frozen kernels in 4 or 8 bits, with one scale per block, and their exact values.

A block is a run of numbers along one dim of the global kernel, and its scale is a
maximum. So codes and scales do not depend on a layout, even if it cuts a block. A value
is the product of the code's level and the scale in float32, without a sum, so all
layouts compute the same bits. The largest number of a block has the level 1 or -1, so
rounding the values again gives the same codes and scales.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from nnx_parallel.precision import sum_dtype

Base = Literal["nf4", "int8"]
"""How a frozen kernel is stored: in 4-bit NormalFloat or in 8-bit integers."""

BLOCK = 64
"""Most numbers in a block, as in QLoRA."""

_MIN_BLOCK = 16  # a scale has 4 bytes, which is too much for fewer numbers

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""The levels of 4-bit NormalFloat, by code."""

_MIDDLES = ((np.array(NF4)[1:] + np.array(NF4)[:-1]) / 2).tolist()
# In float32 and in float64, 127 times this number is rounded to 1.
_STEP = 1 / 127


class QuantisedParam(nnx.Param):
    """Codes or scales of a frozen kernel.

    The numbers are integers, and a scale is stored as the bits of a float. So no
    optimizer can train them, and `Precision` does not cast them.
    """

    @property
    def num_params(self) -> int:
        """Number of the kernel's parameters that these codes store; 0 for scales."""
        x = self.get_value()
        return x.size * {"uint8": 2, "int8": 1}.get(x.dtype.name, 0)


def block_of(shape: Sequence[int], lead: int, num_in: int) -> tuple[int, int] | None:
    """Returns the dim along which a kernel has blocks, and the size of a block.

    The size is a power of two that divides the dim. It is the largest size that a dim
    allows. The last dim of the input comes first, as in bitsandbytes. The result is
    ``None`` if all dims are too odd.

    Args:
        shape: ``(*layers, *in_dims, *out_dims)``.
        lead: Number of dims of layers.
        num_in: Number of dims of the input.

    Example:
        >>> block_of((12, 96, 32), 1, 1), block_of((30, 128), 0, 1)
        ((1, 32), (1, 64))
    """
    dims = [lead + num_in - 1, len(shape) - 1, *range(lead, len(shape))]
    dim = max(dims, key=lambda d: math.gcd(shape[d], BLOCK))
    size = math.gcd(shape[dim], BLOCK)
    return (dim, size) if size >= _MIN_BLOCK else None


def quantise_blocks(x: Array, base: Base, dim: int, size: int) -> tuple[Array, Array]:
    """Rounds an array to the nearest levels, with one scale per block [1].

    The scale is the largest absolute value of the block. It is float64 for float64
    arrays, and float32 otherwise. A block with a number that is not finite has values
    that are not finite.

    Args:
        x: The array.
        base: ``"nf4"``: uint8 codes, two per byte along ``dim``, the first in the upper
            bits. ``"int8"``: int8 codes from -127 to 127.
        dim: The dim along which numbers share a scale.
        size: Numbers per block. It is even and divides the dim.

    Returns:
        The codes, and the bits of the scales as int32 or int64. The scales have the
        shape of the array, with one entry per block along ``dim``.

    Example:
        >>> x = jnp.array([1.0, -0.25, 0.5, 0.0])
        >>> codes, bits = quantise_blocks(x, "nf4", 0, 4)
        >>> codes.tolist(), dequantise(codes, bits).tolist()
        ([244, 199], [1.0, -0.28444138169288635, 0.44070982933044434, 0.0])

    References:
        [1] Dettmers et al., "QLoRA", 2023, sections 2 and 3,
        https://arxiv.org/abs/2305.14314
    """
    wide = x.astype(sum_dtype(x))
    sides = tuple(size if d == dim else 1 for d in range(x.ndim))
    scale = per_block(jnp.max, jnp.abs(wide), sides)
    whole = spread(scale, x.shape)
    share = wide / jnp.where(whole == 0, 1, whole)
    bits = jax.lax.bitcast_convert_type(scale, f"int{8 * scale.dtype.itemsize}")
    if base == "int8":
        return jnp.round(share * 127).astype(jnp.int8), bits
    nearest = jnp.zeros(x.shape, jnp.uint8)
    for middle in _MIDDLES:
        nearest += share > middle
    pairs = nearest.reshape(*x.shape[:dim], x.shape[dim] // 2, 2, *x.shape[dim + 1 :])
    first, second = jnp.unstack(pairs, axis=dim + 1)
    return first << 4 | second, bits


def dequantise(codes: Array, bits: Array) -> Array:
    """Returns the values of `quantise_blocks`, in the dtype of the scales.

    Gradients do not flow to codes and scales, because they are integers.
    """
    scale = jax.lax.bitcast_convert_type(bits, f"float{8 * bits.dtype.itemsize}")
    if codes.dtype == jnp.int8:
        level = codes.astype(scale.dtype) * jnp.asarray(_STEP, scale.dtype)
        return level * spread(scale, codes.shape)
    dim = block_dim(codes, bits)
    shape = (*codes.shape[:dim], 2 * codes.shape[dim], *codes.shape[dim + 1 :])
    halves = [_level(code, bits.dtype) for code in (codes >> 4, codes & 15)]
    level = jnp.stack(halves, axis=dim + 1).reshape(shape)
    level = jax.lax.bitcast_convert_type(level, scale.dtype)
    return level * spread(scale, shape)


def _level(code: Array, dtype: Any) -> Array:
    """Returns the bits of the level of each code of NF4."""
    # In a stage of a pipeline, XLA's partitioner would abort at a lookup in a table. So
    # each bit of the code selects one half of the levels that are left. A `jnp.where`
    # would broadcast the levels, and JAX would compute these arrays outside of the scan
    # over layers and keep them.
    words = [*np.array(NF4, f"f{dtype.itemsize}").view(dtype)]
    for bit in range(4):
        mask = -(code >> bit & 1).astype(dtype)  # all bits, or none
        pairs = zip(words[::2], words[1::2], strict=True)
        words = [even ^ mask & (even ^ odd) for even, odd in pairs]
    return words[0]


def block_dim(codes: Any, bits: Any) -> int:
    """Returns the dim along which numbers share a scale."""
    sizes = zip(codes.shape, bits.shape, strict=True)
    return next(dim for dim, (num, blocks) in enumerate(sizes) if num != blocks)


# TPUs pad the last dim of an array to 128. A reshape that splits the last dim would
# need eight times the memory. So this dim is split only in the small arrays that have
# one number for each block of rows.


def per_block(reduce: Callable, x: Array, sides: tuple[int, ...]) -> Array:
    """Reduces each block to one number, along one dim after the other."""
    for dim, side in enumerate(sides):
        shape = (*x.shape[:dim], x.shape[dim] // side, side, *x.shape[dim + 1 :])
        x = reduce(x.reshape(shape), axis=dim + 1) if side > 1 else x
    return x


def spread(scale: Array, shape: Sequence[int]) -> Array:
    """Repeats the scale of each block for all numbers in it."""
    for dim in reversed(range(len(shape))):
        if scale.shape[dim] < shape[dim]:
            side = shape[dim] // scale.shape[dim]
            wide = jnp.expand_dims(scale, dim + 1)
            full = (*wide.shape[: dim + 1], side, *wide.shape[dim + 2 :])
            joined = (*scale.shape[:dim], shape[dim], *scale.shape[dim + 1 :])
            scale = jnp.broadcast_to(wide, full).reshape(joined)
    return scale
