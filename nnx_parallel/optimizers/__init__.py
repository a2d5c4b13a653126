"""Optimizers for sharded and stacked parameters.

An optimizer is an Optax transformation that is written for one device. The modules are:

- `steps` applies the update of an optimizer. Start reading here.
- `by_layer` presents each layer of a `Stack` to an optimizer as a separate array.
- `muon` computes Muon's updates of matrices that the mesh splits.
- `matrices` gathers such matrices for `muon` and `by_matrix`.
- `eight_bit_state` stores moments in 8 bits.
- `offload` updates an optimizer that keeps its state in host memory.
"""

from nnx_parallel.optimizers.by_layer import by_layer as by_layer
from nnx_parallel.optimizers.eight_bit_state import (
    eight_bit_state as eight_bit_state,
)
from nnx_parallel.optimizers.muon import by_matrix as by_matrix
from nnx_parallel.optimizers.muon import muon as muon
from nnx_parallel.optimizers.steps import decay_mask as decay_mask
from nnx_parallel.optimizers.steps import (
    muon_dimension_numbers as muon_dimension_numbers,
)
