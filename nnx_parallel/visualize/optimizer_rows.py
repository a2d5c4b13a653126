"""The arrays of an optimizer's state, as `describe` lists them."""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from nnx_parallel.precision import array_bytes
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import Path
from nnx_parallel.sharding.names import dotted, is_spec, path_of
from nnx_parallel.sharding.offload import HOST
from nnx_parallel.sharding.optimizer import optimizer_specs, owner_of
from nnx_parallel.sharding.placement import Placement


class OptimizerRow(NamedTuple):
    """One array of the optimizer state.

    Attributes:
        bytes_per_device: Bytes of each device's shard, in any memory.
        why_whole: Why every device holds all of it, though the optimizer state of its
            parameter is split; empty if that is not so.
        memory_kind: ``"device"``, or ``"pinned_host"``: the host's memory.
        owner: Path of the parameter that it belongs to; empty without one.
    """

    path: str
    shape: tuple[int, ...]
    spec: P
    bytes_per_device: int
    why_whole: str
    memory_kind: str = "device"
    owner: str = ""

    @property
    def is_on_host(self) -> bool:
        """True if it waits in the host's memory between updates."""
        return self.memory_kind == HOST


def shard_bytes(layout: Layout, shape: tuple, dtype: Any, spec: P) -> int:
    """Bytes of each device's shard."""
    return array_bytes(layout.sharding(spec).shard_shape(shape), dtype)


def optimizer_rows_of(
    state: optax.OptState,
    params: dict[Path, jax.ShapeDtypeStruct],
    placements: dict[Path, Placement],
    layout: Layout,
) -> tuple[OptimizerRow, ...]:
    """The rows of an optimizer's state, of which ``params`` are the trained ones."""
    shapes = {path: tuple(value.shape) for path, value in params.items()}
    specs = optimizer_specs(state, shapes, placements, layout)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    # Specs are leaves here: JAX would take them apart.
    flat_specs = jax.tree.leaves(specs, is_leaf=is_spec)
    rows = []
    for (path, leaf), spec in zip(leaves, flat_specs, strict=True):
        # docs/library-notes.md, "Optax"
        owner, why_whole = owner_of(path, shapes), ""
        # Counters are whole everywhere, and cost nothing.
        if not any(spec) and leaf.size > 1:
            if owner is None:
                why_whole = "belongs to no parameter"
            elif any(placements[owner].optimizer):
                # A factor of Adafactor's, say, that lacks the dim which is split.
                why_whole = f"follows no split dim of {dotted(owner)}"
        size = shard_bytes(layout, leaf.shape, leaf.dtype, spec)
        sharding = getattr(leaf, "sharding", None)
        kind = getattr(sharding, "memory_kind", None) or "device"
        rows.append(
            OptimizerRow(
                path_of(path),
                leaf.shape,
                spec,
                size,
                why_whole,
                kind,
                dotted(owner) if owner else "",
            )
        )
    return tuple(rows)
