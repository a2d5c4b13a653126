"""A sharding for every array of a pytree, by rules on a mesh.

Placements are a tree too: rules, specs, shardings or ``None``, each for everything
below it. They need a mesh and no layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import PlacementTreeError
from nnx_parallel.sharding.names import (
    ArrayInfo,
    array_info,
    check_axes,
    check_spec,
    path_of,
)
from nnx_parallel.sharding.rules import (
    ChainRules,
    FSDPRules,
    Rules,
    answer_of,
    members,
    warn_idle,
)

Placeable = Rules | P | Sharding | None
"""A placement of everything below a node of a tree."""


def as_chain(rules: Any) -> Any:
    """A tuple of nothing but rules as one `ChainRules`; anything else as it is."""
    # A NamedTuple, like a state of Optax, is a tree of placements, and so is ().
    is_tuple = type(rules) is tuple and len(rules) > 0
    if is_tuple and all(isinstance(rule, Rules) for rule in rules):
        return ChainRules(*rules)
    return rules


def is_placeable(x: object) -> bool:
    """True if a node of a tree of placements places everything below it."""
    return x is None or isinstance(x, P | Sharding | Rules)


def on_mesh(placements: Any, mesh: Mesh, where: str) -> Any:
    """Placements with every spec on the mesh, its axes checked."""

    def place(entry: Any) -> Any:
        if not isinstance(entry, P):
            return entry
        # NamedSharding's own error does not say which argument has the spec.
        check_axes(where, entry, mesh)
        return NamedSharding(mesh, entry)

    # Arguments and outputs are tuples, which a list is no prefix of.
    placements = tuple(placements) if isinstance(placements, list) else placements
    return jax.tree.map(place, placements, is_leaf=is_placeable)


def resolve_leaves(
    placements: Any, tree: Any, mesh: Mesh, root: str = ""
) -> list[Sharding | None]:
    """One sharding for each leaf of ``tree``, in order.

    Args:
        placements: A prefix tree of rules, specs, shardings and ``None``.
        tree: A pytree of arrays.
        mesh: The mesh.
        root: Name of the tree in messages, such as that of an argument.
    """
    # By itself and first: what rules raise later is no misfit of the two trees.
    try:
        jax.tree.map(lambda *_: None, placements, tree, is_leaf=is_placeable)
    except (ValueError, TypeError) as error:
        raise PlacementTreeError(
            f"The placements of `{root or 'the tree'}` do not fit it: {error}. They "
            "are one rule, spec, sharding or None for all of it, or a tree that starts "
            f"like it: {jax.tree.structure(tree)}."
        ) from None
    found: list[Sharding | None] = []

    def resolve(keys: tuple[Any, ...], entry: Placeable, below: Any) -> None:
        where = ".".join(filter(None, [root, path_of(keys)]))
        found.extend(_shardings(entry, below, mesh, where))

    # `is_placeable` makes a leaf of None, which to JAX is a node without leaves.
    jax.tree_util.tree_map_with_path(resolve, placements, tree, is_leaf=is_placeable)
    return found


def resolve_prefix(placements: Any, tree: Any, mesh: Mesh, root: str) -> Any:
    """Shardings of a tree: of every leaf by rules, else the prefix itself, checked."""
    leaves = resolve_leaves(placements, tree, mesh, root)
    entries = jax.tree.leaves(placements, is_leaf=is_placeable)
    has_rules = any(isinstance(x, Rules) for x in entries)
    return jax.tree.structure(tree).unflatten(leaves) if has_rules else placements


def array_infos(tree: Any, root: str = "") -> Iterator[tuple[ArrayInfo, str]]:
    """Each leaf as rules see it, its path starting at ``tree``, and its full path.

    Raises:
        TypeError: If a leaf is not an array.
    """

    def is_variable(x: Any) -> bool:
        # A Variable brings names and kind along. One that holds several arrays, or
        # none, has no single shape.
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
    # To `jax.jit` and `jax.device_put` a Python number is an array without dims.
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
    entry = on_mesh(entry, mesh, where or "the array")
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


def _by_rules(
    rules: Rules, infos: list[tuple[ArrayInfo, str]], mesh: Mesh
) -> list[Sharding | None]:
    specs, reasons = [], set()
    whole = []  # large arrays that `FSDPRules` could not split
    for info, path in infos:
        # Scalars have no dim to split: a rule need not provide for them.
        answer = answer_of([rules], info, mesh, path) if info.shape else None
        spec, reason = answer or (P(), "")
        specs.append(spec)
        reasons.add(reason)
        if answer is None and (refusal := _refusal(rules, info, mesh)):
            whole.append(f"`{path}` {info.shape}: {refusal}")
    if infos:
        shown = ", ".join(info.path for info, _ in infos[:8])
        more = ", ..." if len(infos) > 8 else ""
        warn_idle([rules], reasons, f"Paths: {shown}{more}.")
    if whole:
        shown = "; ".join(whole[:4]) + ("; ..." if len(whole) > 4 else "")
        warnings.warn(
            f"{len(whole)} large arrays stay replicated: {shown}. Pad a dim, or place "
            "them with PathRules.",
            stacklevel=4,
        )
    return [NamedSharding(mesh, spec) for spec in specs]


def _refusal(rules: Rules, info: ArrayInfo, mesh: Mesh) -> str | None:
    """Why an array that is large enough for `FSDPRules` stays whole."""
    for rule in members(rules):
        if isinstance(rule, FSDPRules) and info.shape and info.size >= rule.min_size:
            # No dim is taken: in a tree one rule decides, and names claim nothing.
            return rule.choose_dim(info, (False,) * len(info.shape), mesh)[1]
    return None


def constrain_tree(tree: Any, placements: Any, mesh: Mesh, root: str = "") -> Any:
    """``jax.lax.with_sharding_constraint`` by rules; ``None`` leaves a part alone."""
    if placements is None:
        return tree
    shardings = resolve_leaves(as_chain(placements), tree, mesh, root)
    return place_leaves(jax.lax.with_sharding_constraint, tree, shardings)


def place_leaves(
    place: Callable[[Any, Sharding], Any],
    tree: Any,
    shardings: Sequence[Sharding | None],
) -> Any:
    """The tree with each leaf placed; ``None`` leaves one as it is."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, shardings, strict=True)
    placed = [x if sharding is None else place(x, sharding) for x, sharding in pairs]
    return jax.tree.unflatten(treedef, placed)
