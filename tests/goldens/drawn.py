"""Random weights that need no file: each array depends only on its name and shape."""

import zlib
from collections.abc import Sequence

import numpy as np


def draw(name: str, shape: Sequence[int]) -> np.ndarray:
    """Returns a float32 array for a residual network of timm."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("running_var"):
        return 0.5 + rng.random(shape, np.float32)
    found = rng.standard_normal(shape, np.float32)
    if len(shape) > 1:
        fan_in = np.float32(np.prod(shape[1:]))
        return found * np.float32(1.5) / np.sqrt(fan_in)
    return np.float32(name.endswith("weight")) + np.float32(0.3) * found
