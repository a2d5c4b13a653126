"""Attention: one call for every platform, mask and layout.

`attention` takes named heads and chooses an implementation (`kernels`): a fused kernel,
a plain product, or exact attention in blocks (`blocks`). If the mesh splits the
sequence, `context` exchanges keys and values. Start reading in `dot_product`.
"""

from nnx_parallel.layers.attention.dot_product import attention as attention
from nnx_parallel.layers.attention.dot_product import (
    segment_positions as segment_positions,
)
