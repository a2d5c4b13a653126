"""Optimizers for sharded and stacked parameters.

An optimizer is an Optax transformation that is written for one device. The modules are:

- `steps` applies the update of an optimizer. Start reading here.
- `by_layer` presents each layer of a `Stack` to an optimizer as a separate array.
- `muon` computes Muon's updates of matrices that the mesh splits.
- `matrices` gathers such matrices for `muon` and `by_matrix`.
- `offload` updates an optimizer that keeps its state in host memory.
"""
