"""Arrays that files store in few bits, and their values in a wider dtype.

Files store elements, and scales for blocks of elements. Folders in FP8, such as
DeepSeek-V3, have a scale for each block of rows and columns. Folders in MXFP4, such as
gpt-oss, have one for each 32 elements of a row. The setting ``quantization_config`` of
``config.json`` describes this. The values are computed for each shard when the shard is
read. They are the same, bit for bit, as the values that transformers computes with
``dequantize=True``. Other methods are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from nnx_parallel.errors import WeightsError
from nnx_parallel.weights.files import FP8, Pick, Tensor

BlockSize = tuple[int, int] | tuple[()]
"""Number of rows and of columns that share a scale; ``()`` if all elements share it."""

_SCALE, _OF_ACTIVATIONS = "_scale_inv", ".activation_scale"
_SCALE_DTYPES = tuple(np.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16))
_PACKED, _EXPONENTS = "_blocks", "_scales"
_GROUP = 32
"""Number of elements of MXFP4 that share a scale."""

_OF_FP8 = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
"""The value of each byte of FP8. NumPy's cast is slower."""
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_OF_FP4 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""The value of each code of 4 bits; the first bit is the sign."""
with np.errstate(over="ignore"):
    _OF_EXPONENT = np.exp2(np.arange(-127, 129, dtype=np.float32))
"""The scale of each exponent in MXFP4."""


def _multiply(
    values: np.ndarray,
    scales: np.ndarray,
    pick: Pick,
    shape: tuple[int, ...],
    block: tuple[int, ...],
) -> np.ndarray:
    """Multiplies picked values in place by the scales of their blocks.

    ``block`` is the size of a block along each dim of an array of this shape.
    """
    # These arrays give the block of each element, and take no memory.
    numbers = (np.arange(n) // size for n, size in zip(shape, block, strict=True))
    grid = np.meshgrid(*numbers, indexing="ij", sparse=True)
    blocks = [pick(np.broadcast_to(x, shape)) for x in grid]
    for rows in _row_slices(values):
        values[rows] *= scales[tuple(x[rows] for x in blocks)]
    return values


def _row_slices(values: np.ndarray) -> Iterator[slice]:
    """Yields slices of a few million elements, to hold few scales in memory at once."""
    step = max(1, 2**22 // max(1, math.prod(values.shape[1:])))
    for first in range(0, len(values), step):
        yield slice(first, first + step)


@dataclass(frozen=True)
class BlockScaled(Tensor):
    """An array of FP8 with scales. A value is the product of element and scale.

    Attributes:
        scales: An array ``(..., row blocks, column blocks)``, or with one element. The
            last block of a dim may have fewer rows or columns than the others.
        block_size: Number of rows and of columns of a block.
    """

    scales: Tensor
    block_size: BlockSize

    def __post_init__(self) -> None:
        found, scales = tuple(self.scales.shape), self.scales
        ending = self.shape[len(self.shape) - len(self.block_size) :]
        blocks = (-(-n // b) for n, b in zip(ending, self.block_size, strict=True))
        wanted = (*self.shape[:-2], *blocks) if self.block_size else ()
        valid = (wanted,) if self.block_size else ((), (1,))
        if found not in valid or scales.dtype not in _SCALE_DTYPES:
            raise WeightsError(
                f"The scales of an array of shape {self.shape} have dtype "
                f"{scales.dtype} and shape {found} in {str(scales.file)!r}. For the "
                f"block size {self.block_size} they must have shape {wanted} and one "
                f"of the dtypes {', '.join(map(str, _SCALE_DTYPES))}."
            )

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype of such models before they were quantised, which is bfloat16."""
        return np.dtype(jnp.bfloat16)

    def describe(self) -> str:
        """Describes the elements and the scales, to compare copies of a file."""
        return f"{super().describe()}; scales: {self.scales.describe()}"

    def read(self, pick: Pick, elements: np.ndarray) -> np.ndarray:
        """Returns the picked values, in float32."""
        values = _OF_FP8[pick(elements.view(np.uint8))]
        scales = self.scales.view().astype(np.float32)
        if not self.block_size:
            return values * scales.reshape(())
        block = (*(1 for _ in self.shape[:-2]), *self.block_size)
        return _multiply(values, scales, pick, self.shape, block)


@dataclass(frozen=True)
class Packed(Tensor):
    """An array of MXFP4: elements of 4 bits, with scales that are powers of 2.

    The array has shape ``(experts, in, out)``. An element is uint16: its lower byte has
    the code of FP4, and its upper byte the exponent of the scale. In the file, `packed`
    has two codes in each byte, and experts are stored as ``(out, in)``.

    Attributes:
        packed: uint8 ``(experts, out, in / 32, 16)``; a byte has the first of its two
            elements in the lower bits.
        exponents: uint8 ``(experts, out, in / 32)``; 127 means a scale of 1.
    """

    packed: Tensor
    exponents: Tensor

    @classmethod
    def of(cls, packed: Tensor, exponents: Tensor) -> Packed:
        """Joins the two arrays of a file.

        Raises:
            WeightsError: If the arrays do not fit together.
        """
        shape, dtypes = packed.shape, {packed.dtype, exponents.dtype}
        is_met = len(shape) == 4 and shape[3] == _GROUP // 2
        if not is_met or exponents.shape != shape[:3] or dtypes != {np.dtype(np.uint8)}:
            raise WeightsError(
                f"Arrays of MXFP4 in {str(packed.file)!r} have shapes {shape} and "
                f"{exponents.shape}. They must be uint8 (experts, out, in / 32, 16) "
                "and (experts, out, in / 32)."
            )
        experts, outs, groups, _ = shape
        values = (experts, groups * _GROUP, outs)
        dtype = np.dtype(np.uint16)
        return cls(packed.file, dtype, values, packed.start, packed, exponents)

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype of such models before they were quantised, which is bfloat16."""
        return np.dtype(jnp.bfloat16)

    def view(self) -> np.ndarray:
        """Returns all elements."""
        return _unpack(self.packed.view(), self.exponents.view())

    def describe(self) -> str:
        """Describes codes and exponents, to compare copies of a file."""
        return f"{self.packed.describe()}; exponents: {self.exponents.describe()}"

    def read_rows(self, first: int, last: int) -> np.ndarray:
        """Reads the elements of a range of experts."""
        ends = first, last
        return _unpack(self.packed.read_rows(*ends), self.exponents.read_rows(*ends))

    def read(self, pick: Pick, elements: np.ndarray) -> np.ndarray:
        """Returns the picked values, in float32."""
        picked = pick(elements)
        values = _OF_FP4[picked & 15]
        for rows in _row_slices(values):
            values[rows] *= _OF_EXPONENT[picked[rows] >> 8]
        return values


def _unpack(packed: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Joins codes and exponents; returns elements ``(experts, in, out)``."""
    elements = np.empty((*packed.shape, 2), np.uint16)
    np.bitwise_and(packed, 15, out=elements[..., 0])
    np.right_shift(packed, 4, out=elements[..., 1])
    elements |= exponents[..., None, None].astype(np.uint16) << 8
    return elements.reshape(*packed.shape[:2], -1).swapaxes(1, 2)


def read_quantization(config: Mapping[str, Any]) -> BlockSize | None:
    """Returns the size of the blocks of FP8 that a ``config.json`` describes.

    ``None`` means that no array has FP8.

    Raises:
        ValueError: If the arrays are quantised in a way that is not supported.
    """
    inner = config.get("text_config")
    inner = inner if isinstance(inner, Mapping) else {}
    given = config.get("quantization_config") or inner.get("quantization_config")
    if not given:
        return None
    found = given if isinstance(given, Mapping) else {}
    if found.get("quant_method") == "mxfp4":
        return None
    # transformers has the same default.
    size = found.get("weight_block_size", (128, 128))
    sizes = () if size is None else size
    is_size = isinstance(sizes, list | tuple) and len(sizes) in (0, 2)
    rules = (
        ("quant_method", found.get("quant_method") == "fp8"),
        ("fmt", found.get("fmt") in (None, "e4m3")),
        ("expert_dtype", found.get("expert_dtype") in (None, "fp8")),
        ("weight_block_size", is_size and all(type(n) is int and n > 0 for n in sizes)),
    )
    for name, is_met in rules:
        if not is_met:
            raise ValueError(
                f"config.json has a quantization_config with {name}="
                f"{found.get(name)!r}. quantization_config must be None, or have "
                "quant_method='mxfp4', or have quant_method='fp8', fmt='e4m3', "
                "expert_dtype='fp8' and two numbers as weight_block_size. Folders of "
                "other methods must be converted to bfloat16 before they can be read."
            )
    return tuple(sizes)


def join_scales(
    tensors: Mapping[str, Tensor], block_size: BlockSize | None
) -> dict[str, Tensor]:
    """Returns the arrays by name; a quantised array has its scales.

    Scales of activations are left out, because activations are not quantised. The
    arrays ``x_blocks`` and ``x_scales`` of MXFP4 become an array ``x``.

    Raises:
        WeightsError: If an array of FP8 has no scales, or scales do not fit.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        stem = name.removesuffix(_PACKED)
        if stem != name and stem + _EXPONENTS in tensors:
            found[stem] = Packed.of(found.pop(name), found.pop(stem + _EXPONENTS))
        if block_size is not None and name.endswith(_OF_ACTIVATIONS):
            del found[name]
        if tensor.dtype != FP8:
            continue
        scales = found.pop(name + _SCALE, None)
        if scales is None or block_size is None:
            lacks = f"the files have no array {name + _SCALE!r}"
            if scales is not None:
                lacks = "config.json has no quantization_config with a block size"
            raise WeightsError(
                f"{name!r} in {str(tensor.file)!r} has elements of FP8, which must be "
                f"multiplied by scales, but {lacks}."
            )
        found[name] = BlockScaled(**vars(tensor), scales=scales, block_size=block_size)
    return found
