"""Arrays that files store in few bits, and their values in a wider dtype.

Many published folders store kernels in FP8 with a scale for each block of rows and
columns, such as DeepSeek-V3. The setting ``quantization_config`` of ``config.json``
describes this. The values are computed for each shard when the shard is read. They are
the same, bit for bit, as the values that transformers computes with
``dequantize=True``. Other methods are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
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
_VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
"""The value of each byte of FP8. NumPy's cast is slower."""


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

    def read(self, pick: Pick) -> np.ndarray:
        """Returns the picked values, in float32."""
        values = _VALUES[pick(self.view().view(np.uint8))]
        scales = self.scales.view().astype(np.float32)
        if not self.block_size:
            return values * scales.reshape(())
        # Each element has the numbers of its block. These arrays take no memory.
        sizes = (*(1 for _ in self.shape[:-2]), *self.block_size)
        numbers = (np.arange(n) // b for n, b in zip(self.shape, sizes, strict=True))
        grid = np.meshgrid(*numbers, indexing="ij", sparse=True)
        blocks = [pick(np.broadcast_to(x, self.shape)) for x in grid]
        return values * scales[tuple(blocks)]


def read_quantization(config: Mapping[str, Any]) -> BlockSize | None:
    """Returns the size of the blocks that a ``config.json`` describes.

    ``None`` means that no array is quantised.

    Raises:
        ValueError: If the arrays are quantised in a way that is not supported.
    """
    inner = config.get("text_config")
    inner = inner if isinstance(inner, Mapping) else {}
    given = config.get("quantization_config") or inner.get("quantization_config")
    if not given:
        return None
    found = given if isinstance(given, Mapping) else {}
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
                "quant_method='fp8', fmt='e4m3', expert_dtype='fp8' and two numbers as "
                "weight_block_size. Folders of other methods must be converted to "
                "bfloat16 before they can be read."
            )
    return tuple(sizes)


def join_scales(
    tensors: Mapping[str, Tensor], block_size: BlockSize | None
) -> dict[str, Tensor]:
    """Returns the arrays by name; an array of FP8 has its scales.

    Scales of activations are left out, because activations are not quantised.

    Raises:
        WeightsError: If an array of FP8 has no scales, or scales of another shape.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
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
