"""Optimizers on sharded and stacked parameters.

An optimizer is an Optax transformation, written for one device. `steps` applies its
update, `by_layer` shows it each layer of a `Stack` as a separate array, `muon` is Muon
on matrices that the mesh splits (`matrices`), and `offload` keeps the state on the
host. Start reading in `steps`.
"""
