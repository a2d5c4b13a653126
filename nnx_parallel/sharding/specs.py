"""Functions that compute with partition specs and mesh axes, and check them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import (
    IndivisibleDimError,
    PlacementConflictError,
    SpecRankError,
    UnknownAxisError,
    suggest,
)
from nnx_parallel.sharding.names import (
    AXIS_NAMES,
    LOGICAL_AXES,
    DimAxes,
    MeshAxes,
    as_tuple,
)

_AXES = {n: axis for axis, others in AXIS_NAMES.items() for n in (axis, *others)}


def axes_on(mesh: Mesh, axes: MeshAxes) -> tuple[str, ...]:
    """Translates axes to the names of a mesh.

    Usual names of other libraries are replaced by ours. One of our axes that the mesh
    lacks counts as an axis of size one and is left out, so that the same rules serve
    every strategy. Any other name does not change.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> axes_on(make_mesh({"tensor": None}), ("fsdp", "tp", "mine"))
        ('tensor', 'mine')
    """
    shape = mesh.shape
    names = (a if a in shape else _AXES.get(a, a) for a in as_tuple(axes))
    return tuple(axis for axis in names if axis in shape or axis not in AXIS_NAMES)


def merge_axes(
    left: Mapping[str, MeshAxes], right: Mapping[str, MeshAxes]
) -> dict[str, MeshAxes]:
    """Merges two mappings; a name in both gets the axes of both."""
    return {
        name: tuple(dict.fromkeys((*as_tuple(left.get(name)), *as_tuple(right[name]))))
        if name in right
        else left[name]
        for name in {**left, **right}
    }


def in_order(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Sorts axes by the order of a mesh; axes that the mesh lacks come last."""
    order = (*mesh.axis_names, *axes)
    return tuple(sorted(axes, key=order.index))


def absent_from(
    mesh: Mesh, names: Iterable[MeshAxes], logical: Iterable[str]
) -> tuple[str, ...]:
    """Returns the names of dims that are mesh axes, but not axes of this mesh.

    Names in ``logical`` and in `LOGICAL_AXES` are not mesh axes.
    """
    known = {*logical, *LOGICAL_AXES}
    flat = (axis for name in names for axis in as_tuple(name))
    return tuple(a for a in flat if a not in known and not axes_on(mesh, a))


def splits_rows(mesh: Mesh, axes: MeshAxes) -> bool:
    """True if all axes are axes of data parallelism and the mesh has none of them.

    Models of other libraries give these names to the rows of their activations. If the
    names counted as axes of size one, they would leave the rows unsplit: all devices
    would gather the rows, although other axes of this mesh split the batch.
    """
    our_axes = {_AXES.get(axis, axis) for axis in as_tuple(axes)}
    return bool(our_axes) and our_axes <= {"data", "fsdp"} and not axes_on(mesh, axes)


def spec_on(mesh: Mesh, spec: P, batch: tuple[str, ...] | None = None) -> P:
    """Translates a spec to the axes of a mesh (`axes_on`).

    For the spec of an activation, ``batch`` has the axes of the batch. They replace
    axes of data parallelism that the mesh lacks (`splits_rows`).

    Example:
        >>> from nnx_parallel import make_mesh
        >>> spec_on(make_mesh({"tensor": None}), P("fsdp", "tp"))
        P(None, 'tensor')
    """

    def on_mesh(axes: MeshAxes) -> tuple[str, ...]:
        if batch is not None and splits_rows(mesh, axes):
            return batch
        return axes_on(mesh, axes)

    dims = map(on_mesh, spec)
    return P(*(dim[0] if len(dim) == 1 else dim or None for dim in dims))


def dim_axes(spec: P | Sequence, ndim: int) -> DimAxes:
    """Converts a spec to one tuple of mesh axes for each of ``ndim`` dims.

    Example:
        >>> dim_axes(P(None, "tensor"), 3)
        ((), ('tensor',), ())
    """
    # A spec may be shorter than the rank: dims that it leaves out are not split.
    return tuple(map(as_tuple, spec)) + ((),) * (ndim - len(spec))


def is_spec(x: object) -> bool:
    """True if a node of a pytree is a spec."""
    return isinstance(x, P)


def to_spec(axes: Sequence[tuple[str, ...]]) -> P:
    """Returns the shortest spec with these mesh axes.

    Example:
        >>> to_spec(((), ("tensor",), ())) == P(None, "tensor")
        True
    """
    # P(None) and P() mean the same but are not equal, so trailing Nones are removed.
    entries = [a[0] if len(a) == 1 else a or None for a in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def dividing_prefix(
    size: int, axes: Sequence[str], mesh_shape: Mapping[str, int]
) -> tuple[str, ...]:
    """Returns the longest prefix of ``axes`` with a product that divides ``size``."""
    # If the product of a prefix divides the size, so does each shorter product.
    # The last axes are given up first. For a batch these are the inner axes.
    count = len(axes)
    while size % math.prod(mesh_shape[axis] for axis in axes[:count]):
        count -= 1
    return tuple(axes[:count])


def check_spec(
    path: str,
    shape: Sequence[int],
    spec: P | Sequence,
    mesh: Mesh,
    names: Sequence[MeshAxes] = (),
) -> None:
    """Checks that a spec fits an array and a mesh.

    Args:
        path: The path of the array.
        shape: Its global shape.
        spec: The spec.
        mesh: The mesh.
        names: The names of the dims that the spec follows from, if there are any.

    Raises:
        SpecRankError: If the spec is longer than the array's rank.
        UnknownAxisError: If the spec names an axis that the mesh lacks.
        PlacementConflictError: If one axis splits two dims.
        IndivisibleDimError: If an axis does not divide its dim.
    """
    start = f"Cannot shard `{path}` with global shape {tuple(shape)} as"
    if len(spec) > len(shape):
        raise SpecRankError(
            f"{start} {spec}: the spec has {len(spec)} entries for {len(shape)} dims. "
            "Shorten it."
        )
    # This check comes first, because the next one looks up the size of each axis.
    check_axes(path, spec, mesh)
    axes = dim_axes(spec, len(shape))
    flat = [axis for dim in axes for axis in dim]
    for axis in flat:
        if flat.count(axis) > 1:
            raise PlacementConflictError(
                f"{start} {spec}: mesh axis {axis!r} splits {flat.count(axis)} dims. "
                "An axis can split only one dim of an array; map the other dims to "
                "None."
            )
    for dim, (size, split) in enumerate(zip(shape, axes, strict=True)):
        parts = math.prod(mesh.shape[a] for a in split)
        if size % parts:
            who = f"axis {split[0]!r}" if len(split) == 1 else f"axes {split}"
            divisors = [d for d in range(1, parts + 1) if size % d == 0]
            free = to_spec([() if d == dim else a for d, a in enumerate(axes)])
            rule = f"PathRules((r'^{re.escape(path)}$', {free}))"
            if names and isinstance(names[dim], str):
                rule = f"LogicalRules({{{names[dim]!r}: None}})"
            raise IndivisibleDimError(
                f"{start} {to_spec(axes)}: mesh {who} of size {parts} does not divide "
                f"dim {dim} of size {size}. Pad the dim to "
                f"{math.ceil(size / parts) * parts}, use an axis size among "
                f"{divisors}, or keep the dim whole: rules=({rule},)."
            )


def check_axes(path: str, spec: P | Sequence, mesh: Mesh) -> None:
    """Checks that a mesh has all axes that a spec names."""
    # The message leaves out the shape: if several processes load parts of a batch, no
    # process knows the batch's global shape.
    for axis in (axis for entry in spec for axis in as_tuple(entry)):
        if axis not in mesh.shape:
            raise UnknownAxisError(
                f"Cannot shard `{path}` as {spec}: the mesh has no axis {axis!r}."
                f"{suggest(axis, mesh.axis_names)} Its axes: {list(mesh.axis_names)}."
            )
