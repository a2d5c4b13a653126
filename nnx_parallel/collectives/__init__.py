"""Operations on shards, for code that is manual over a mesh axis (``shard_map``).

The matrix products of `matmul` send one shard while they multiply another shard, along
the rings of `ring`. The functions of `sequence` exchange parts of a sequence for
attention. `ring.on_shards` turns a function of shards into a function of global arrays.
"""

from nnx_parallel.collectives.matmul import all_gather_matmul as all_gather_matmul
from nnx_parallel.collectives.matmul import (
    column_parallel_matmul as column_parallel_matmul,
)
from nnx_parallel.collectives.matmul import (
    matmul_reduce_scatter as matmul_reduce_scatter,
)
from nnx_parallel.collectives.matmul import row_parallel_matmul as row_parallel_matmul
from nnx_parallel.collectives.ring import Mode as Mode
