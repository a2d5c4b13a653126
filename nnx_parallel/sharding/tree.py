"""Any pytree onto a mesh and back: `shard`, `gather`, `process_local_to_global`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.mesh import check_mesh
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import check_axes, check_spec, path_of
from nnx_parallel.sharding.resolve import (
    array_infos,
    as_chain,
    place_leaves,
    resolve_leaves,
)


# Not `Strategy` itself, which is later in the order of imports.
@runtime_checkable
class HasLayout(Protocol):
    """A strategy, as far as placement is concerned."""

    def layout(self, mesh: Mesh | None = None) -> Layout:
        """Its claims on one mesh."""
        ...


def layout_of(where: Mesh | Layout | HasLayout) -> Layout:
    """The layout behind what users pass as ``mesh``.

    Raises:
        MeshAxisTypeError: If an axis of the mesh is not Auto.
        TypeError: If it is neither a mesh, a strategy, nor a layout.
    """
    if isinstance(where, Layout):
        return where
    if isinstance(where, Mesh):
        # Of its own sizes only the types of the axes can be wrong.
        check_mesh(where, where.shape)
        return Layout(mesh=where)
    if isinstance(where, HasLayout):
        return where.layout()
    raise TypeError(
        f"mesh is a {type(where).__name__}. Pass a jax.sharding.Mesh, for example "
        'nnx_parallel.make_mesh({"fsdp": None}), or a strategy.'
    )


def named_tree_map(
    function: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    separator: str = ".",
) -> Any:
    """``jax.tree.map`` whose function also gets the path of each leaf.

    Args:
        function: ``(path, leaf, *rest)`` to a new leaf.
        tree: A pytree.
        rest: Trees of the same structure.
        is_leaf: Where to stop, as in ``jax.tree.map``.
        separator: Between the parts of a path.

    Returns:
        The tree of the results.

    Example:
        >>> named_tree_map(lambda path, x: f"{path}={x}", {"a": 1, "b": {"c": 2}})
        {'a': 'a=1', 'b': {'c': 'b.c=2'}}
    """

    def named(keys: tuple[Any, ...], *leaves: Any) -> Any:
        return function(path_of(keys, separator), *leaves)

    return jax.tree_util.tree_map_with_path(named, tree, *rest, is_leaf=is_leaf)


def resolve_shardings(tree: Any, rules: Any, mesh: Mesh | Layout | HasLayout) -> Any:
    """The sharding of every array of a pytree.

    Nothing is moved, and only shapes are looked at: the tree may be abstract. An array
    without dims is replicated, and no rule is asked about it. So is what no rule
    answers for. Paths start at the node that has the rule.

    Args:
        tree: A pytree of arrays or ``jax.ShapeDtypeStruct``; the Variables of an NNX
            model or state bring their names and kinds along.
        rules: Rules, a spec, a sharding or ``None``, or a prefix tree of these. A tuple
            of rules is a chain: the first that answers decides.
        mesh: The mesh, or a strategy.

    Returns:
        A tree of the same structure of ``NamedSharding``; ``None`` where ``rules`` has
        ``None``.

    Raises:
        PlacementTreeError: If ``rules`` is not a prefix of the tree.
        SpecRankError: If a spec is longer than an array's rank.
        UnknownAxisError: If it names an axis that the mesh lacks.
        IndivisibleDimError: If an axis does not divide its dim.
        UnmatchedRuleError: If strict path rules do not match an array.
        TypeError: If a leaf is not an array.

    Warns:
        UserWarning: If a path rule matches no array, or an array that `FSDPRules` would
            shard has no dim that its axis divides.

    Example:
        >>> from nnx_parallel import FSDPRules, make_mesh
        >>> tree = {"kernel": jax.ShapeDtypeStruct((64, 64), "float32")}
        >>> mesh = make_mesh({"fsdp": None})
        >>> resolve_shardings(tree, FSDPRules(), mesh)["kernel"].spec
        P('fsdp',)
    """
    leaves = resolve_leaves(as_chain(rules), tree, layout_of(mesh).mesh)
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def shard(tree: Any, rules: Any, mesh: Mesh | Layout | HasLayout) -> Any:
    """Puts a pytree on a mesh: each device receives its own shards only.

    Args:
        tree: A pytree of arrays; with several processes, the same global values on all.
        rules: As in `resolve_shardings`: rules, specs, shardings or ``None``.
        mesh: The mesh, or a strategy.

    Returns:
        The same tree of global arrays. Leaves with ``None`` in ``rules`` stay the same
        objects.

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
    shardings = resolve_leaves(as_chain(rules), tree, layout_of(mesh).mesh)
    return place_leaves(_place, tree, shardings)


def _place(x: Any, sharding: Sharding) -> jax.Array:
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if is_global or jax.process_count() == 1:
        return jax.device_put(x, sharding)
    # `device_put` would compare the host's values on all processes, by a collective.
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
        # NumPy has no dtype for random keys.
        if not to_host or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return _replicated(x)
        if x.is_fully_addressable:
            return np.asarray(x)
        # Tiled: the whole array, not one copy for each process along a new dim.
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(bring, tree)


def _replicated(x: jax.Array) -> jax.Array:
    if not isinstance(x.sharding, NamedSharding):
        return x
    # A function of the module, so that it is compiled once for each shape.
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
        axes = layout.claims.batch or layout.mesh.axis_names
    names = axes if isinstance(axes, str) else tuple(axes)
    spec = P(*[None] * dim, names)
    # Checked first as a whole: a leaf that is no array is named by its path.
    infos = list(array_infos(batch, "batch"))
    leaves, tree = jax.tree.flatten(batch)
    # Unflattened once, with arrays: a class of the user's may accept nothing else.
    return tree.unflatten(
        _join(x, path, spec, layout.mesh)
        for x, (_, path) in zip(leaves, infos, strict=True)
    )


def _join(x: Any, path: str, spec: P, mesh: Mesh) -> jax.Array:
    shape = np.shape(x)
    if not shape:
        spec = P()
    elif jax.process_count() == 1 or len(spec) > len(shape):
        # With several processes the global size of the dim is not known yet.
        check_spec(path, shape, spec, mesh)
    check_axes(path, spec, mesh)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))
