"""Arithmetic on `PartitionSpec`s: what is legal for a shape and a mesh."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import (
    IndivisibleDimError,
    PlacementConflictError,
    SpecRankError,
    UnknownAxisError,
)

MeshAxes = str | tuple[str, ...] | None
"""Mesh axes as users write them."""

DimAxes = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim of an array: ``((), ("tensor", "fsdp"))``."""


def as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    """Mesh axes in any of their spellings as a tuple."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def dim_axes(spec: P | Sequence, ndim: int) -> DimAxes:
    """A spec as one tuple of mesh axes per dim.

    Example:
        >>> dim_axes(P(None, "tensor"), 3)
        ((), ('tensor',), ())
    """
    # A spec may be shorter than the rank: dims that it leaves out are whole.
    return tuple(map(as_tuple, spec)) + ((),) * (ndim - len(spec))


def is_spec(x: object) -> bool:
    """True if a node of a pytree is a spec."""
    return isinstance(x, P)


def to_spec(axes: DimAxes) -> P:
    """The shortest spec with these mesh axes.

    Example:
        >>> to_spec(((), ("tensor",), ())) == P(None, "tensor")
        True
    """
    # P(None) and P() mean the same and are not equal, so there is one spelling.
    entries = [a[0] if len(a) == 1 else a or None for a in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def without_axes(axes: DimAxes, dropped: Collection[str]) -> DimAxes:
    """The same dims, no longer split by the mesh axes ``dropped``."""
    return tuple(tuple(a for a in dim if a not in dropped) for dim in axes)


def dividing_prefix(
    size: int, axes: Sequence[str], mesh_shape: Mapping[str, int]
) -> tuple[str, ...]:
    """The longest prefix of ``axes`` whose product divides ``size``."""
    # If a longer product divides the size, so does each shorter one.
    # The last axes are given up first: of a batch's those are the inner ones.
    count = len(axes)
    while size % math.prod(mesh_shape[axis] for axis in axes[:count]):
        count -= 1
    return tuple(axes[:count])


def check_spec(path: str, shape: Sequence[int], spec: P | Sequence, mesh: Mesh) -> None:
    """Checks that a spec fits an array and a mesh.

    Raises:
        SpecRankError: If it is longer than the array's rank.
        UnknownAxisError: If it names an axis that the mesh lacks.
        PlacementConflictError: If one axis splits two dims.
        IndivisibleDimError: If an axis does not divide its dim.
    """
    shape = tuple(shape)
    if len(spec) > len(shape):
        raise SpecRankError(
            f"Cannot shard `{path}` with global shape {shape} as {spec}: the spec has "
            f"{len(spec)} entries for {len(shape)} dims. Shorten it."
        )
    axes = dim_axes(spec, len(shape))
    # Before sizes are looked up, which a missing axis does not have.
    check_axes(path, spec, mesh)
    flat = [axis for dim in axes for axis in dim]
    for axis in flat:
        if flat.count(axis) > 1:
            raise PlacementConflictError(
                f"Cannot shard `{path}` with global shape {shape} as {spec}: mesh axis "
                f"{axis!r} splits {flat.count(axis)} dims. An axis can split one "
                "dim of an array; map one of the dims to None."
            )
    for dim, (size, names) in enumerate(zip(shape, axes, strict=True)):
        parts = math.prod(mesh.shape[a] for a in names)
        if size % parts:
            raise IndivisibleDimError(
                _indivisible_message(path, shape, axes, dim, parts)
            )


def _indivisible_message(
    path: str, shape: tuple[int, ...], axes: DimAxes, dim: int, parts: int
) -> str:
    names = axes[dim]
    who = f"mesh axis {names[0]!r}" if len(names) == 1 else f"mesh axes {names}"
    padded = math.ceil(shape[dim] / parts) * parts
    divisors = [d for d in range(1, parts + 1) if shape[dim] % d == 0]
    return (
        f"Cannot shard `{path}` with global shape {shape} as {to_spec(axes)}: {who} of "
        f"size {parts} does not divide dim {dim} of size {shape[dim]}. Pad the dim to "
        f"{padded}, use an axis size among {divisors}, or map the dim to None to "
        "replicate it."
    )


def check_axes(path: str, spec: P | Sequence, mesh: Mesh) -> None:
    """Checks that a mesh has all axes that a spec names.

    Raises:
        UnknownAxisError: If it lacks one.
    """
    # Without the shape, since that of a batch which several processes load in parts is
    # not known to one of them.
    for axis in (axis for entry in spec for axis in as_tuple(entry)):
        if axis not in mesh.shape:
            raise UnknownAxisError(
                f"Cannot shard `{path}` as {spec}: the mesh has no axis {axis!r}."
                f"{suggest(axis, mesh.axis_names)} Its axes: {list(mesh.axis_names)}."
            )


def suggest(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest known name, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
