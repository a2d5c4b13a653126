"""Attention: one function for every platform, mask and layout.

`attention`, in `dot_product`, chooses an implementation from `kernels`: a fused kernel,
plain operations, or exact attention in blocks (`blocks`). If the mesh splits the
sequence, `context` exchanges keys and values. Start reading in `dot_product`.
"""

from nnx_parallel.layers.attention.dot_product import attention as attention
from nnx_parallel.layers.attention.dot_product import (
    chunk_segments as chunk_segments,
)
from nnx_parallel.layers.attention.dot_product import (
    segment_positions as segment_positions,
)
