"""Moving pytrees onto a mesh and back: `shard`, `gather`, `process_local_to_global`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.specs import check_spec
from nnx_parallel.sharding.trees import (
    HasLayout,
    array_infos,
    as_chain,
    checked_axes,
    layout_of,
    resolve_leaves,
)


def shard(tree: Any, rules: Any, mesh: Mesh | Layout | HasLayout) -> Any:
    """Puts a pytree on a mesh: each device receives its own shards only.

    Args:
        tree: A pytree of arrays; with several processes, the same global values on all.
        rules: What `resolve_shardings` takes: rules, specs, shardings or ``None``.
        mesh: The mesh, or a strategy.

    Returns:
        The same tree of global arrays. What ``rules`` has ``None`` for is left as it
        is, the same objects.

    Raises:
        PlacementTreeError: If ``rules`` is not a prefix of the tree.
        IndivisibleDimError: If an axis does not divide its dim.
        SpecRankError: If a spec is longer than an array's rank.
        UnknownAxisError: If it names an axis that the mesh lacks.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> tree = shard({"w": np.ones((8, 4))}, P("fsdp"), make_mesh({"fsdp": None}))
        >>> tree["w"].addressable_shards[0].data.shape
        (1, 4)
    """
    leaves, treedef = jax.tree.flatten(tree)
    shardings = resolve_leaves(as_chain(rules), tree, layout_of(mesh).mesh)
    placed = [
        x if sharding is None else _place(x, sharding)
        for x, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(treedef, placed)


def _place(x: Any, sharding: Sharding) -> jax.Array:
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if is_global or jax.process_count() == 1:
        return jax.device_put(x, sharding)
    # `device_put` would compare the host's values on all processes.
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def gather(tree: Any, *, to_host: bool = True) -> Any:
    """Brings every array of a pytree together: the whole of it in one place.

    Args:
        tree: A pytree. With several processes all of them call this.
        to_host: Return NumPy arrays; else arrays of which each device of their mesh
            has a copy, and nothing touches the host.

    Returns:
        The same tree. Leaves that are no ``jax.Array`` stay the same objects; typed
        random keys, which NumPy cannot hold, are replicated.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"fsdp": None})
        >>> gather(shard({"x": np.arange(8.0)}, P("fsdp"), mesh))["x"]
        array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)
    """

    def bring(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        if not to_host or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return _replicated(x)
        if x.is_fully_addressable:
            return np.asarray(x)
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(bring, tree)


def _replicated(x: jax.Array) -> jax.Array:
    if not isinstance(x.sharding, NamedSharding):
        return x
    return jax.jit(_identity, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)


def _identity(x: jax.Array) -> jax.Array:
    return x


def process_local_to_global(
    batch: Any,
    mesh: Mesh | Layout | HasLayout,
    axes: str | Sequence[str] | None = None,
    *,
    dim: int = 0,
) -> Any:
    """Joins what each process has loaded into global arrays.

    Args:
        batch: A pytree of host arrays: this process's part of the global batch.
        mesh: The mesh, or a strategy.
        axes: The mesh axes that split ``dim``; by default the strategy's batch axes,
            or all axes of a mesh.
        dim: The dim along which the parts follow one another.

    Returns:
        The same tree of global arrays, sharded along ``dim``. Arrays without dims,
        which are then the same everywhere, are replicated. With one process this is
        ``jax.device_put``.

    Raises:
        UnknownAxisError: If the mesh lacks an axis.
        IndivisibleDimError: If the axes do not divide the global dim.
        SpecRankError: If an array has no such dim.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"data": 4, "tensor": 2})
        >>> process_local_to_global(np.ones((8, 3)), mesh, "data").sharding.spec
        P('data',)
    """
    layout = layout_of(mesh)
    if axes is None:
        axes = layout.batch_axes or layout.mesh.axis_names
    names = axes if isinstance(axes, str) else tuple(axes)
    spec = P(*[None] * dim, names)
    leaves, treedef = jax.tree.flatten(batch)
    infos = array_infos(batch, "batch")
    return jax.tree.unflatten(
        treedef,
        [
            _join(x, info.shape, path, spec, layout.mesh)
            for x, (info, path) in zip(leaves, infos, strict=True)
        ],
    )


def _join(x: Any, shape: tuple[int, ...], path: str, spec: P, mesh: Mesh) -> jax.Array:
    if not shape:
        spec = P()
    elif jax.process_count() == 1 or len(spec) > len(shape):
        check_spec(path, shape, spec, mesh)
    sharding = NamedSharding(mesh, checked_axes(spec, mesh, path))
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))
