"""Arithmetic on partition specs and mesh axes, and the checks of a spec on a mesh."""

import math
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
    """Mesh axes by the mesh's names; a name that is unknown to us does not change.

    Conventional names of other libraries become ours. One of our axes that the mesh
    lacks has size one, and is left out: the same rules then serve every strategy.

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
    """The axes of each name, from both sides together."""
    return {
        name: tuple(dict.fromkeys((*as_tuple(left.get(name)), *as_tuple(right[name]))))
        if name in right
        else left[name]
        for name in {**left, **right}
    }


def in_order(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Axes in the order of a mesh; those that it lacks come last."""
    order = (*mesh.axis_names, *axes)
    return tuple(sorted(axes, key=order.index))


def absent_from(
    mesh: Mesh, names: Iterable[MeshAxes], logical: Iterable[str]
) -> tuple[str, ...]:
    """The mesh axes among names of dims that a mesh lacks; without logical axes."""
    known = {*logical, *LOGICAL_AXES}
    flat = (axis for name in names for axis in as_tuple(name))
    return tuple(a for a in flat if a not in known and not axes_on(mesh, a))


def splits_rows(mesh: Mesh, axes: MeshAxes) -> bool:
    """True for axes of data parallelism that a mesh lacks.

    Other libraries' models give these names to the rows of their activations. As axes
    of size one, they would gather the rows on all devices of the axes that split the
    batch here.
    """
    our_axes = {_AXES.get(axis, axis) for axis in as_tuple(axes)}
    return bool(our_axes) and our_axes <= {"data", "fsdp"} and not axes_on(mesh, axes)


def spec_on(mesh: Mesh, spec: P, batch: tuple[str, ...] | None = None) -> P:
    """A spec in the axes of a mesh (`axes_on`); an activation's with the batch's axes.

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


def to_spec(axes: Sequence[tuple[str, ...]]) -> P:
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


def dividing_prefix(
    size: int, axes: Sequence[str], mesh_shape: Mapping[str, int]
) -> tuple[str, ...]:
    """The longest prefix of ``axes`` whose product divides ``size``."""
    # If a longer product divides the size, so does each shorter one.
    # The last axes are given up first: for a batch these are the inner ones.
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
    start = f"Cannot shard `{path}` with global shape {tuple(shape)} as"
    if len(spec) > len(shape):
        raise SpecRankError(
            f"{start} {spec}: the spec has {len(spec)} entries for {len(shape)} dims. "
            "Shorten it."
        )
    # This comes before sizes are looked up, which a missing axis does not have.
    check_axes(path, spec, mesh)
    axes = dim_axes(spec, len(shape))
    flat = [axis for dim in axes for axis in dim]
    for axis in flat:
        if flat.count(axis) > 1:
            raise PlacementConflictError(
                f"{start} {spec}: mesh axis {axis!r} splits {flat.count(axis)} dims. "
                "An axis can split one dim of an array; map one of the dims to None."
            )
    for dim, (size, names) in enumerate(zip(shape, axes, strict=True)):
        parts = math.prod(mesh.shape[a] for a in names)
        if size % parts:
            who = f"axis {names[0]!r}" if len(names) == 1 else f"axes {names}"
            divisors = [d for d in range(1, parts + 1) if size % d == 0]
            raise IndivisibleDimError(
                f"{start} {to_spec(axes)}: mesh {who} of size {parts} does not divide "
                f"dim {dim} of size {size}. Pad the dim to "
                f"{math.ceil(size / parts) * parts}, use an axis size among "
                f"{divisors}, or map the dim to None to replicate it."
            )


def check_axes(path: str, spec: P | Sequence, mesh: Mesh) -> None:
    """Checks that a mesh has all axes that a spec names."""
    # Without the shape, since the shape of a batch that several processes load in parts
    # is not known to one of them.
    for axis in (axis for entry in spec for axis in as_tuple(entry)):
        if axis not in mesh.shape:
            raise UnknownAxisError(
                f"Cannot shard `{path}` as {spec}: the mesh has no axis {axis!r}."
                f"{suggest(axis, mesh.axis_names)} Its axes: {list(mesh.axis_names)}."
            )
