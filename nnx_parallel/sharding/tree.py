"""Placement of any pytree: paths of its leaves, and a sharding for each of them.

What says where a tree lives is itself a tree: rules, specs, shardings or ``None``, each
standing for everything below it. `resolve_shardings` makes one sharding per leaf of it.

Moving pytrees onto a mesh and back: `shard`, `gather`, `process_local_to_global`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import PlacementTreeError, UnknownAxisError
from nnx_parallel.mesh import check_mesh
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import ArrayInfo, array_info, suggest
from nnx_parallel.sharding.rules import ChainRules, FSDPRules, PathRules, Rules, members
from nnx_parallel.sharding.specs import check_spec, dim_axes

Placeable = Rules | P | Sharding | None
"""What may say where a tree lives, at any node of it."""


@runtime_checkable
class HasLayout(Protocol):
    """A strategy, as far as placement is concerned."""

    def layout(self, mesh: Mesh | None = None) -> Layout:
        """Its answers over one mesh."""
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
        check_mesh(where, where.shape)
        return Layout(mesh=where)
    if isinstance(where, HasLayout):
        return where.layout()
    raise TypeError(
        f"mesh is a {type(where).__name__}. Pass a jax.sharding.Mesh, for example "
        'nnx_parallel.make_mesh({"fsdp": None}), or a strategy.'
    )


def path_of(keys: tuple[Any, ...], separator: str = ".") -> str:
    """A JAX key path as users write it: ``blocks.0.kernel``.

    Example:
        >>> leaves = jax.tree_util.tree_leaves_with_path({"blocks": [{"kernel": 1}]})
        >>> path_of(leaves[0][0])
        'blocks.0.kernel'
    """
    return jax.tree_util.keystr(keys, simple=True, separator=separator)


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
        separator: Stands between the parts of a path.

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
    answers for. Paths start where the rule stands.

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
        >>> from nnx_parallel import make_mesh
        >>> tree = {"kernel": jax.ShapeDtypeStruct((64, 64), "float32")}
        >>> mesh = make_mesh({"fsdp": None})
        >>> resolve_shardings(tree, FSDPRules(), mesh)["kernel"].spec
        P('fsdp',)
    """
    leaves = resolve_leaves(as_chain(rules), tree, layout_of(mesh).mesh)
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def as_chain(rules: Any) -> Any:
    """A tuple of nothing but rules as one `ChainRules`; anything else as it is."""
    is_tuple = type(rules) is tuple and len(rules) > 0
    if is_tuple and all(isinstance(rule, Rules) for rule in rules):
        return ChainRules(*rules)
    return rules


def is_placeable(x: object) -> bool:
    """Whether a node of a tree of placements says where everything below it lives."""
    return x is None or isinstance(x, P | Sharding | Rules)


def has_rules(placements: Any) -> bool:
    """Whether a tree of placements must see an array's shape to say where it lives."""
    leaves = jax.tree.leaves(placements, is_leaf=is_placeable)
    return any(isinstance(x, Rules) for x in leaves)


def resolve_leaves(
    placements: Any, tree: Any, mesh: Mesh, root: str = ""
) -> list[Sharding | None]:
    """One sharding for each leaf of ``tree``, in order.

    Args:
        placements: A prefix tree of rules, specs, shardings and ``None``.
        tree: A pytree of arrays.
        mesh: The mesh.
        root: What messages call the tree, such as the name of an argument.
    """
    found: list[Sharding | None] = []

    def resolve(keys: tuple[Any, ...], entry: Placeable, below: Any) -> None:
        where = ".".join(filter(None, [root, path_of(keys)]))
        found.extend(_shardings(entry, below, mesh, where))

    try:
        jax.tree_util.tree_map_with_path(
            resolve, placements, tree, is_leaf=is_placeable
        )
    except (ValueError, TypeError) as error:
        if _is_prefix(placements, tree):
            raise
        raise PlacementTreeError(
            f"The placements of `{root or 'the tree'}` do not fit it: {error}. They "
            "are one rule, spec, sharding or None for all of it, or a tree that starts "
            f"like it: {jax.tree.structure(tree)}."
        ) from None
    return found


def _is_prefix(placements: Any, tree: Any) -> bool:
    try:
        jax.tree.map(lambda *_: None, placements, tree, is_leaf=is_placeable)
    except (ValueError, TypeError):
        return False
    return True


def array_infos(tree: Any, root: str = "") -> Iterator[tuple[ArrayInfo, str]]:
    """What rules see of each leaf, its path starting at ``tree``, and its full path.

    Raises:
        TypeError: If a leaf is not an array.
    """

    def is_variable(x: Any) -> bool:
        return isinstance(x, nnx.Variable) and len(jax.tree.leaves(x)) == 1

    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable):
        path = path_of(keys)
        full = ".".join(filter(None, [root, path])) or "the array"
        if is_variable(leaf):
            info = array_info((path,), leaf)
        else:
            shape, dtype = _shape_and_dtype(leaf, full)
            info = ArrayInfo(path=path, shape=shape, dtype=dtype)
        yield info, full


def _shape_and_dtype(leaf: Any, path: str) -> tuple[tuple[int, ...], Any]:
    if isinstance(leaf, bool | int | float | complex):
        return (), np.result_type(leaf)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            f"`{path}` is a {type(leaf).__name__}, not an array, and has no place on a "
            "mesh. Leave it out of the tree; in sharded_jit, declare the argument that "
            "holds it in static_argnames."
        )
    return tuple(leaf.shape), leaf.dtype


def _shardings(
    entry: Placeable, tree: Any, mesh: Mesh, where: str
) -> list[Sharding | None]:
    if isinstance(entry, P):
        entry = NamedSharding(mesh, checked_axes(entry, mesh, where))
    if isinstance(entry, NamedSharding):
        for info, path in array_infos(tree, where):
            check_spec(path, info.shape, entry.spec, entry.mesh)  # pyright: ignore[reportArgumentType]
    if entry is None or isinstance(entry, Sharding):
        return [entry] * len(jax.tree.leaves(tree))
    if not isinstance(entry, Rules):
        raise PlacementTreeError(
            f"{entry!r}, a {type(entry).__name__}, says nothing about placement. Use "
            "rules, a PartitionSpec, a NamedSharding, or None."
        )
    return _by_rules(entry, list(array_infos(tree, where)), mesh)


def checked_axes(spec: P, mesh: Mesh, where: str) -> P:
    """The spec, whose axes the mesh all has.

    Raises:
        UnknownAxisError: If it lacks one.
    """
    for axis in (axis for dim in dim_axes(spec, len(spec)) for axis in dim):
        if axis not in mesh.shape:
            raise UnknownAxisError(
                f"Cannot place `{where or 'the array'}` as {spec}: the mesh has no "
                f"axis {axis!r}.{suggest(axis, mesh.axis_names)} Its axes: "
                f"{list(mesh.axis_names)}."
            )
    return spec


def _by_rules(
    rules: Rules, infos: list[tuple[ArrayInfo, str]], mesh: Mesh
) -> list[Sharding | None]:
    specs, reasons, whole = [], set(), []
    for info, path in infos:
        answer = rules.match(info, mesh) if info.shape else None
        spec, reason = answer or (P(), "")
        check_spec(path, info.shape, spec, mesh)
        specs.append(spec)
        reasons.add(reason)
        if answer is None and (refusal := _refusal(rules, info, mesh)):
            whole.append(f"`{path}` {info.shape}: {refusal}")
    _warn(rules, reasons, whole, [info.path for info, _ in infos])
    return [NamedSharding(mesh, spec) for spec in specs]


def _refusal(rules: Rules, info: ArrayInfo, mesh: Mesh) -> str | None:
    """Why an array that is large enough for `FSDPRules` stays whole."""
    for rule in members(rules):
        if isinstance(rule, FSDPRules) and info.shape and info.size >= rule.min_size:
            return rule.choose_dim(info, (False,) * len(info.shape), mesh)[1]
    return None


def _warn(rules: Rules, reasons: set[str], whole: list[str], paths: list[str]) -> None:
    chain = members(rules)
    pairs = [p for rule in chain if isinstance(rule, PathRules) for p in rule.pairs]
    idle = [regex for regex, _ in pairs if f"path rule {regex!r}" not in reasons]
    if idle and paths:
        shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
        warnings.warn(
            f"Path rules {idle} match no array, or an earlier rule takes them all. "
            f"Paths: {shown}.",
            stacklevel=2,
        )
    if whole:
        shown = "; ".join(whole[:4]) + ("; ..." if len(whole) > 4 else "")
        warnings.warn(
            f"{len(whole)} large arrays stay replicated: {shown}. Pad a dim, or place "
            "them with PathRules.",
            stacklevel=2,
        )


def constrain_tree(tree: Any, placements: Any, mesh: Mesh, root: str = "") -> Any:
    """``jax.lax.with_sharding_constraint`` by rules; ``None`` leaves a part alone."""
    leaves, treedef = jax.tree.flatten(tree)
    shardings = resolve_leaves(as_chain(placements), tree, mesh, root)
    return jax.tree.unflatten(
        treedef,
        [
            x if s is None else jax.lax.with_sharding_constraint(x, s)
            for x, s in zip(leaves, shardings, strict=True)
        ],
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
        axes = layout.claims.batch or layout.mesh.axis_names
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
