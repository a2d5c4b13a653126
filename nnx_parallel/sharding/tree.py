"""Moves any pytree onto a mesh and back, given rules, specs or shardings for it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.distributed.agreement import meet
from nnx_parallel.errors import ParallelWarning, PlacementTreeError, warn_user
from nnx_parallel.mesh import auto_mesh
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import ArrayInfo, path_of
from nnx_parallel.sharding.nnx_arrays import array_info, holds_one_array
from nnx_parallel.sharding.rules import (
    ChainRules,
    FSDPRules,
    PathRules,
    Rules,
    answer_of,
    is_rule,
    members,
    warn_idle,
)
from nnx_parallel.sharding.specs import check_axes, check_spec


# This is a protocol, because this package must not import `Strategy`.
@runtime_checkable
class HasLayout(Protocol):
    """A strategy, or any object that has a layout on a mesh."""

    def layout(self, mesh: Mesh | None = None) -> Layout:
        """Returns the layout of the strategy on a mesh."""
        ...


MeshLike = Mesh | Layout | HasLayout
"""The types of ``mesh`` arguments."""


def layout_of(where: MeshLike) -> Layout:
    """Returns the layout for an argument ``mesh``; Explicit axes become Auto."""
    if isinstance(where, Layout):
        return where
    if isinstance(where, Mesh):
        return Layout(mesh=auto_mesh(where))
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
    """Maps a tree like ``jax.tree.map``, with the path as the first argument.

    Args:
        function: Takes ``(path, leaf, *rest)``.
        tree: Any pytree.
        rest: Further trees that have the structure of ``tree`` as a prefix.
        is_leaf: As in ``jax.tree.map``.
        separator: The text between the parts of a path.

    Example:
        >>> named_tree_map(lambda path, x: f"{path}={x}", {"a": 1, "b": {"c": 2}})
        {'a': 'a=1', 'b': {'c': 'b.c=2'}}
    """

    def named(keys: tuple[Any, ...], *leaves: Any) -> Any:
        return function(path_of(keys, separator), *leaves)

    return jax.tree.map_with_path(named, tree, *rest, is_leaf=is_leaf)


def resolve_shardings(tree: Any, rules: Any, mesh: MeshLike) -> Any:
    """Returns the sharding of every array of a pytree.

    The tree may be abstract, since only shapes and dtypes are read. An array without
    dims is replicated, and no rule is asked about it. An array that no rule answers for
    is replicated too. A rule gets paths that start at the node of ``rules`` that holds
    the rule.

    Args:
        tree: A pytree of arrays or ``jax.ShapeDtypeStruct``. Rules also get the names
            and kinds of Variables in an NNX model or state.
        rules: Rules, a spec, a sharding or ``None``, or a prefix tree of these. A tuple
            of rules is a chain: the first that answers decides.
        mesh: The mesh, or a strategy.

    Returns:
        The same tree of ``NamedSharding``; ``None`` where ``rules`` has ``None``.

    Raises:
        PlacementTreeError: If ``rules`` is not a prefix of the tree.
        SpecRankError: If a spec is longer than an array's rank.
        UnknownAxisError: If a spec names an axis that the mesh lacks.
        IndivisibleDimError: If an axis does not divide its dim.
        UnmatchedRuleError: If strict path rules do not match an array.
        TypeError: If a leaf is not an array.

    Warns:
        ParallelWarning: If a path rule matches no array, if an array matches no path
            rule, or if `FSDPRules` finds no dim of a large array that its axis divides.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> from nnx_parallel.sharding import FSDPRules
        >>> tree = {"kernel": jax.ShapeDtypeStruct((64, 64), "float32")}
        >>> mesh = make_mesh({"fsdp": None})
        >>> resolve_shardings(tree, FSDPRules(), mesh)["kernel"].spec
        P('fsdp',)
    """
    leaves = resolve_leaves(as_chain(rules), tree, layout_of(mesh).mesh)
    return jax.tree.structure(tree).unflatten(leaves)


def as_chain(rules: Any) -> Any:
    """Converts a tuple of rules to a `ChainRules`; returns anything else unchanged."""
    # An empty tuple is a tree of placements, and so is a NamedTuple such as a state of
    # Optax.
    if type(rules) is tuple and rules and all(map(is_rule, rules)):
        return ChainRules(*rules)
    return rules


def is_placeable(x: object) -> bool:
    """True if an object is one placement for everything below its node in a tree."""
    return x is None or isinstance(x, P | Sharding) or is_rule(x)


def has_rules(placements: Any) -> bool:
    """True if a tree of placements has rules, which need the shapes of arrays."""
    entries = jax.tree.leaves(placements, is_leaf=is_placeable)
    return any(map(is_rule, entries))


def on_mesh(placements: Any, mesh: Mesh, where: str) -> Any:
    """Replaces every spec by a ``NamedSharding``, after a check of its axes."""

    def place(entry: Any) -> Any:
        if not is_placeable(entry):
            raise PlacementTreeError(
                f"Cannot place `{where}`: {entry!r}, a {type(entry).__name__}, says "
                "nothing about placement. Use a rule (not its class), a PartitionSpec, "
                "a NamedSharding, or None."
            )
        if not isinstance(entry, P):
            return entry
        # NamedSharding's error does not say which argument has the spec.
        check_axes(where, entry, mesh)
        return NamedSharding(mesh, entry)

    # Arguments and outputs are tuples, and a list is not a prefix of a tuple.
    placements = tuple(placements) if isinstance(placements, list) else placements
    return jax.tree.map(place, placements, is_leaf=is_placeable)


def resolve_leaves(
    placements: Any, tree: Any, mesh: Mesh, root: str = ""
) -> list[Sharding | None]:
    """Returns the sharding of each leaf of ``tree``, called ``root`` in messages."""
    parts: list[tuple[Any, ...]] = []  # (key path, entry, the tree below it)
    try:
        # `is_placeable` makes None a leaf; to JAX it is a node without leaves.
        jax.tree.map_with_path(
            lambda *part: parts.append(part), placements, tree, is_leaf=is_placeable
        )
    except (ValueError, TypeError) as error:
        raise PlacementTreeError(
            f"The placements of `{root or 'the tree'}` do not fit it: {error}. "
            "Placements are one rule, spec, sharding or None for the whole tree, or a "
            f"tree prefix of its structure: {jax.tree.structure(tree)}."
        ) from None
    # This is outside the `try`, so that an error of a rule is not reported as a misfit
    # of the placements.
    return [
        sharding
        for keys, entry, below in parts
        for sharding in _shardings(entry, below, mesh, _join(root, path_of(keys)))
    ]


def resolve_prefix(placements: Any, tree: Any, mesh: Mesh, root: str) -> Any:
    """Checks that placements fit a tree, and replaces rules by shardings.

    Returns:
        A tree with a sharding for each leaf if there are rules in ``placements``;
        otherwise ``placements``.
    """
    leaves = resolve_leaves(placements, tree, mesh, root)
    if not has_rules(placements):
        return placements
    return jax.tree.structure(tree).unflatten(leaves)


def _join(*paths: str) -> str:
    return ".".join(filter(None, paths))


def _shardings(entry: Any, tree: Any, mesh: Mesh, where: str) -> list[Sharding | None]:
    entry = on_mesh(entry, mesh, where or "the array")
    if isinstance(entry, NamedSharding):
        for info, path in array_infos(tree, where):
            check_spec(path, info.shape, entry.spec, entry.mesh)  # pyright: ignore[reportArgumentType]
    if entry is None or isinstance(entry, Sharding):
        return [entry] * len(jax.tree.leaves(tree))
    return _by_rules(entry, list(array_infos(tree, where)), mesh)


def array_infos(tree: Any, root: str = "") -> Iterator[tuple[ArrayInfo, str]]:
    """Yields the `ArrayInfo` of each leaf, and the path from ``root`` for messages."""

    def is_variable(x: Any) -> bool:
        # A Variable has names and a kind. But a Variable that does not hold exactly one
        # array has no shape.
        return isinstance(x, nnx.Variable) and holds_one_array(x)

    for keys, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_variable):
        path = path_of(keys)
        full = _join(root, path) or "the array"
        if is_variable(leaf):
            yield array_info((path,), leaf), full
        # To `jax.jit` and `jax.device_put` a Python number is an array without dims.
        elif isinstance(leaf, bool | int | float | complex):
            yield ArrayInfo(path=path, shape=(), dtype=np.result_type(leaf)), full
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            # The dtype on the device, where NumPy's float64 becomes float32.
            dtype: Any = jax.dtypes.canonicalize_dtype(leaf.dtype, True)
            yield ArrayInfo(path=path, shape=tuple(leaf.shape), dtype=dtype), full
        else:
            raise TypeError(
                f"`{full}` is a {type(leaf).__name__}, not an array, and cannot be "
                "placed on a mesh. Leave it out of the tree; in sharded_jit, declare "
                "the argument that holds it in static_argnames."
            )


def _by_rules(
    rules: Rules, infos: list[tuple[ArrayInfo, str]], mesh: Mesh
) -> list[Sharding | None]:
    # Scalars have no dim to split, so rules are not asked about them.
    answers = [
        answer_of([rules], info, mesh, path) if info.shape else None
        for info, path in infos
    ]
    if infos:
        shown = ", ".join(info.path for info, _ in infos[:8])
        more = ", ..." if len(infos) > 8 else ""
        reasons = {answer[1] for answer in answers if answer}
        warn_idle([rules], reasons, f"Paths: {shown}{more}.")
    pairs = zip(infos, answers, strict=True)
    replicated = [pair for pair, answer in pairs if answer is None and pair[0].shape]
    _warn_replicated(members(rules), replicated, mesh)
    return [NamedSharding(mesh, answer[0] if answer else P()) for answer in answers]


def _warn_replicated(
    rules: tuple[Rules, ...], infos: list[tuple[ArrayInfo, str]], mesh: Mesh
) -> None:
    """Warns about arrays that no rule answers for, unless that looks intended."""
    kind = "arrays match no path rule and"
    remedy = "End with (r'.*', P()) if this is meant; strict=True refuses them."
    found = [f"`{path}` {info.shape}" for info, path in infos if info.is_param]
    if fsdp := [rule for rule in rules if isinstance(rule, FSDPRules)]:
        kind, remedy = "large arrays", "Pad a dim, or place them with PathRules."
        found = []
        for info, path in infos:
            # Smaller arrays are replicated on purpose. All dims count as free, because
            # only one rule decides about an array of a pytree: no name and no other
            # rule has taken a dim.
            if large := [rule for rule in fsdp if info.size >= rule.min_size]:
                _, why = large[0].choose_dim(info, ((),) * len(info.shape), mesh)
                found.append(f"`{path}` {info.shape}: {why}")
    elif not any(isinstance(r, PathRules) and r.strict is None for r in rules):
        return  # other rules may leave arrays replicated on purpose
    if found:
        shown = "; ".join(found[:4]) + ("; ..." if len(found) > 4 else "")
        text = f"{len(found)} {kind} stay replicated: {shown}. {remedy}"
        warn_user(text, ParallelWarning)


def constrain_tree(tree: Any, placements: Any, mesh: Mesh, root: str = "") -> Any:
    """Constrains the arrays of a tree by placements; ``None`` constrains nothing."""
    if placements is None:
        return tree
    return _placed(jax.lax.with_sharding_constraint, tree, placements, mesh, root)


def _placed(place: Callable, tree: Any, rules: Any, mesh: Mesh, root: str = "") -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    shardings = resolve_leaves(as_chain(rules), tree, mesh, root)
    pairs = zip(leaves, shardings, strict=True)
    return treedef.unflatten(x if to is None else place(x, to) for x, to in pairs)


def shard(tree: Any, rules: Any, mesh: MeshLike) -> Any:
    """Puts a pytree on a mesh as global arrays; each device receives only its shards.

    It raises the errors of `resolve_shardings`.

    Args:
        tree: A pytree of arrays. All processes must pass the same global values.
        rules: Rules, specs or shardings, as in `resolve_shardings`. A leaf with the
            entry ``None`` is returned unchanged.
        mesh: The mesh, or a strategy.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> tree = shard({"w": np.ones((8, 4))}, P("fsdp"), make_mesh({"fsdp": None}))
        >>> tree["w"].addressable_shards[0].data.shape
        (1, 4)
    """
    return _placed(_place, tree, rules, layout_of(mesh).mesh)


def _place(x: Any, sharding: Sharding) -> jax.Array:
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if is_global or jax.process_count() == 1:
        return jax.device_put(x, sharding)
    # `device_put` would compare the values of all processes, in a collective.
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def gather(tree: Any, *, to_host: bool = True) -> Any:
    """Gathers the shards of every array of a pytree.

    A leaf that is not a ``jax.Array`` is returned unchanged. Typed random keys are
    always replicated, because NumPy cannot hold them.

    Args:
        tree: A pytree. All processes must call this function.
        to_host: True to return NumPy arrays. False to return replicated arrays, which
            do not pass through the host.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"fsdp": None})
        >>> gather(shard({"x": np.arange(8.0)}, P("fsdp"), mesh))["x"]
        array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)
    """
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if not all(x.is_fully_addressable for x in arrays):
        meet("gather")

    def bring(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        if not to_host or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return _replicated(x)
        return _to_host(x, ())

    return jax.tree.map(bring, tree)


def gather_at(x: jax.Array | np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """Gathers ``x[index]`` on the host, bit for bit.

    Args:
        x: An array. All processes must call this function.
        index: Indices of the leading dims. The tuple may be empty.
    """
    if isinstance(x, np.ndarray):
        return np.asarray(x[index])
    if not x.is_fully_addressable:
        meet("gather")
    return _to_host(x, index)


def _to_host(x: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    if x.is_fully_addressable and not index:
        return np.asarray(x)
    bits = _bits_at(x, index)
    if not x.is_fully_addressable:
        # `tiled` returns the array itself, not one copy per process along a new dim.
        bits = multihost_utils.process_allgather(bits, tiled=True)
    return np.asarray(bits).view(x.dtype)


# If a mesh axis splits a dim, an index into it becomes a sum with zeros, and the sum of
# -0.0 and 0.0 is 0.0. CPUs gather bfloat16 as float32, which changes signalling NaNs.
# Integers keep all bits (docs/library-notes.md, "Arrays and buffers").
@jax.jit
def _bits_at(x: jax.Array, index: tuple[int, ...]) -> jax.Array:
    """Returns ``x[index]``; a real number becomes an integer of the same size."""
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 8:
        x = jax.lax.bitcast_convert_type(x, f"u{x.dtype.itemsize}")
    return x[index]


def _replicated(x: jax.Array) -> jax.Array:
    if not isinstance(x.sharding, NamedSharding):
        return x
    # `_identity` is defined once, so that JAX compiles it once for each shape.
    return jax.jit(_identity, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)


def _identity(x: jax.Array) -> jax.Array:
    return x


def process_local_to_global(
    batch: Any, mesh: MeshLike, axes: str | Sequence[str] | None = None, *, dim: int = 0
) -> Any:
    """Joins the arrays of all processes into global arrays, sharded along one dim.

    Arrays without dims must be equal in all processes, and are replicated. For a single
    array with a known sharding, JAX has ``jax.make_array_from_process_local_data`` and
    ``multihost_utils.host_local_array_to_global_array``.

    Args:
        batch: A pytree of host arrays: this process's part of the global batch.
        mesh: The mesh, or a strategy.
        axes: The mesh axes that split ``dim``. The default is the batch axes of a
            strategy, or all axes of a mesh.
        dim: The dim along which the parts are concatenated.

    Raises:
        UnknownAxisError: If the mesh lacks an axis.
        IndivisibleDimError: If the axes do not divide the global dim.
        SpecRankError: If an array has no dim ``dim``.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"data": 4, "tensor": 2})
        >>> process_local_to_global(np.ones((8, 3)), mesh, "data").sharding.spec
        P('data',)
    """
    layout = layout_of(mesh)
    if axes is None:
        axes = layout.claims.batch or layout.mesh.axis_names
    spec = P(*[None] * dim, axes if isinstance(axes, str) else tuple(axes))
    # The batch is checked first, so that an error has the path of the wrong leaf.
    paths = [path for _, path in array_infos(batch, "batch")]
    leaves, tree = jax.tree.flatten(batch)
    pairs = zip(leaves, paths, strict=True)
    # The tree is built only once, with arrays, because a user's pytree class may accept
    # nothing else.
    return tree.unflatten(_from_local(x, path, spec, layout.mesh) for x, path in pairs)


def _from_local(x: Any, path: str, spec: P, mesh: Mesh) -> jax.Array:
    shape = np.shape(x)
    if not shape:
        spec = P()
    elif jax.process_count() == 1 or len(spec) > len(shape):
        # With several processes this check is left out, because the global size of the
        # dim is not known here.
        check_spec(path, shape, spec, mesh)
    check_axes(path, spec, mesh)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))
