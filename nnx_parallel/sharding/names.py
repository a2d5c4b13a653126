"""Names of arrays (paths), of their dims (logical axes), and their axes (specs)."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import (
    IndivisibleDimError,
    PlacementConflictError,
    SpecRankError,
    UnknownAxisError,
    suggest,
)

# One of these that no strategy maps leaves its dim free. An unknown name is an error,
# so that a misspelt one does not replicate its dim silently (`Layout.axes_of`).
LOGICAL_AXES = (
    "batch", "seq", "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab", "layers",
    "expert",
)  # fmt: skip
"""The names that this library's models give to their dims."""

# "sp" as an axis splits long sequences; sequence parallelism, which some also call
# "sp", has the axis "tensor".
AXIS_NAMES = {
    "pipe": ("pp", "pipeline", "stage", "stages"),
    "data": ("dp", "ddp", "replica", "replicas"),
    "fsdp": (),
    "expert": ("ep", "experts"),
    "context": ("cp", "sp", "sequence"),
    "tensor": ("tp", "mp", "mdl", "model"),
}
"""Our mesh axes, and their customary names in other libraries' models."""

_AXES = {n: axis for axis, others in AXIS_NAMES.items() for n in (axis, *others)}

MeshAxes = str | tuple[str, ...] | None
"""Mesh axes as users write them."""

DimAxes = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim of an array: ``((), ("tensor", "fsdp"))``."""


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """One array of a model as rules see it.

    Attributes:
        path: Dotted path in the model, such as ``blocks.mlp.up.kernel``.
        shape: Global shape.
        dtype: dtype of the elements.
        names: Logical (or mesh) axis of each dim, ``None`` for a dim without one;
            ``None`` as a whole for an array without names.
        kind: Class of its NNX Variable: ``Param``, ``BatchStat``, ``RngKey``.
        is_param: True for a parameter (any subclass of ``nnx.Param``).
        splits_layers: False where stages do not run its layers, or share them unevenly.
    """

    path: str
    shape: tuple[int, ...]
    # The default suits a leaf that is not a Variable: FSDP splits it, and strict rules
    # must match it.
    dtype: jax.typing.DTypeLike = jnp.float32
    names: tuple[MeshAxes, ...] | None = None
    kind: str = "Param"
    is_param: bool = True
    splits_layers: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_stacked(self) -> bool:
        """True if dim 0 enumerates the layers of a `Stack`."""
        # `Stack` puts this name in front of the names of its block's dims.
        return bool(self.names) and self.names[0] == "layers"


def dotted(path: tuple[Hashable, ...]) -> str:
    """A path of attribute names and indices as users write it: ``blocks.0.kernel``."""
    return ".".join(map(str, path))


def path_of(keys: tuple[Any, ...], separator: str = ".") -> str:
    """A JAX key path as users write it.

    Example:
        >>> leaves = jax.tree_util.tree_leaves_with_path({"blocks": [{"kernel": 1}]})
        >>> path_of(leaves[0][0])
        'blocks.0.kernel'
    """
    return jax.tree_util.keystr(keys, simple=True, separator=separator)


class Constant(nnx.Variable):
    """An array that a module holds outside of Variables: not trained, as in NNX."""


def variables_of(
    model: object, wrt: Any = ...
) -> Iterator[tuple[tuple[Hashable, ...], nnx.Variable]]:
    """Path and Variable of every array of a model, each shared one once.

    ``wrt`` filters them as in NNX. An array of a pytree that a Variable holds comes in
    a Variable like it, at a separate path; an array in no Variable as a `Constant`.
    Sown values are left out: they are not state.
    """
    for path, leaf in nnx.to_flat_state(nnx.state(model, wrt)):
        if not isinstance(leaf, nnx.Intermediate):
            yield from inner_variables(path, leaf)


def inner_variables(
    path: tuple[Hashable, ...], leaf: Any
) -> Iterator[tuple[tuple[Hashable, ...], nnx.Variable]]:
    """`variables_of` one leaf of NNX's graph."""
    if not isinstance(leaf, nnx.Variable):
        yield path, Constant(leaf)
    elif holds_one_array(leaf):
        yield path, leaf
    else:
        placements = leaf.get_metadata().get("placement")
        arrays = jax.tree.leaves_with_path(leaf.get_value())
        for index, (keys, x) in enumerate(arrays):
            variable = leaf.replace(x)
            if placements:
                variable.set_metadata(placement=placements[index])
            yield (*path, *map(_entry, keys)), variable


def holds_one_array(variable: nnx.Variable) -> bool:
    """False if a Variable holds ``None``, or a pytree with arrays inside."""
    return jax.tree_util.all_leaves([variable.get_value()])


def _entry(key: Any) -> Hashable:
    """A part of a JAX key path as part of a path."""
    names = ("key", "idx", "name")  # of dicts, of sequences, of dataclasses
    return next(getattr(key, name) for name in names if hasattr(key, name))


def array_info(path: tuple[Hashable, ...], variable: nnx.Variable) -> ArrayInfo:
    """Reads shape and names of a Variable; more names than dims are an error."""
    value = variable.get_value()
    names = names_of(variable) or None
    if names:
        if len(names) > value.ndim:
            raise SpecRankError(
                f"`{dotted(path)}` has shape {value.shape} but {len(names)} names "
                f"{names}. Give one name, or None, for each of its {value.ndim} dims."
            )
        # Like in a PartitionSpec, dims without a name come last.
        names += (None,) * (value.ndim - len(names))
    return ArrayInfo(
        path=dotted(path),
        shape=tuple(value.shape),
        dtype=value.dtype,
        names=names,
        kind=type(variable).__name__,
        is_param=isinstance(variable, nnx.Param),
    )


# Arrays that Flax's modules make, and their dims.
_NUM_DIMS = (
    (nnx.Linear, "kernel", 2),
    (nnx.Embed, "embedding", 2),
    (nnx.LayerNorm, "scale", 1),
    (nnx.RMSNorm, "scale", 1),
    (nnx.BatchNorm, "scale", 1),
)


# Not `Stack` itself, which is later in the order of imports.
@runtime_checkable
class HasLayers(Protocol):
    """A module whose arrays have a leading dim of layers."""

    def name_layers(self) -> None:
        """Names that dim in the metadata of its arrays."""
        ...


def name_dim(variable: nnx.Variable) -> None:
    """Names dim 0 of an array ``layers``, unless it already has this name."""
    names = names_of(variable)
    if names[:1] != ("layers",):
        # If each dim already has a name, the name of dim 0 is None.
        ndim = getattr(variable.get_value(), "ndim", None)
        names = ("layers", *names[names[:1] == (None,) and len(names) == ndim :])
    # The mesh is not known yet, so Flax cannot place it now.
    variable.set_metadata(out_sharding=names, eager_sharding=False)


def name_layers(model: nnx.Module) -> None:
    """Names the dims of layers in an abstract model, if they lack the name."""
    # `nnx.update` and `nnx.merge` take the metadata of their arguments: names that
    # a user has stacked or loaded lack the layers (docs/library-notes.md, "Flax NNX").
    stacks = stacks_of(model)
    for stack in stacks.values():
        stack.name_layers()
    arrays: dict[tuple[Hashable, ...], nnx.Variable] = {
        path: leaf
        for path, leaf in nnx.to_flat_state(nnx.state(model))
        if isinstance(leaf, nnx.Variable) and not is_inside(path, stacks)
    }
    for path, module in nnx.iter_modules(model):
        for kind, name, ndim in _NUM_DIMS:
            array = arrays.get((*path, name)) if isinstance(module, kind) else None
            if array is not None and len(array.get_value().shape) == ndim + 1:
                _name_vmapped(arrays, path, array.get_value().shape[0])


@runtime_checkable
class FollowsNames(Protocol):
    """A module in which some arrays take names from others (a kernel's adapters)."""

    def follow_names(self) -> None:
        """Names these arrays by the others, whose names may have changed."""


def stacks_of(model: nnx.Module) -> dict[tuple[Hashable, ...], HasLayers]:
    """The stacks of a model by path."""
    return {p: m for p, m in nnx.iter_modules(model) if isinstance(m, HasLayers)}


def is_inside(
    path: tuple[Hashable, ...], stacks: dict[tuple[Hashable, ...], HasLayers]
) -> bool:
    """True if an array is inside a stack."""
    return any(path[: len(stack)] == stack for stack in stacks)


def _name_vmapped(
    arrays: dict[tuple[Hashable, ...], nnx.Variable],
    path: tuple[Hashable, ...],
    count: int,
) -> None:
    """Names dim 0 of the largest module around a path whose arrays all have it."""

    def below(root: tuple[Hashable, ...]) -> list[nnx.Variable]:
        return [v for p, v in arrays.items() if p[: len(root)] == root]

    def is_vmapped(variable: nnx.Variable) -> bool:
        shape = getattr(variable.get_value(), "shape", ())
        names = names_of(variable)
        # If the user has named every dim, the names do not change.
        is_free = len(names) < len(shape) or names[0] in (None, "layers")
        return shape[:1] == (count,) and is_free

    while path and all(map(is_vmapped, below(path[:-1]))):
        path = path[:-1]
    for variable in filter(is_vmapped, below(path)):
        name_dim(variable)


def names_of(variable: nnx.Variable) -> tuple[MeshAxes, ...]:
    """The names of dims in a Variable's metadata, also where a sharding gives them."""
    # The key under which Flax keeps the names of nnx.with_partitioning: a tuple, a
    # spec, a sharding with a spec, or a format with a sharding.
    found = variable.get_metadata().get("out_sharding")
    found = getattr(found, "sharding", found)
    names = as_tuple(getattr(found, "spec", found))
    return tuple(None if name is P.UNCONSTRAINED else name for name in names)


def flatten_pure(tree: Any) -> dict[str, jax.Array]:
    """A pytree of arrays as one flat dict by dotted path."""
    return {path_of(keys): leaf for keys, leaf in jax.tree.leaves_with_path(tree)}


def is_inexact(x: Any) -> bool:
    """True if gradients flow through it: floating-point or complex numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def as_tuple(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Names, such as names of mesh axes, in any of their spellings as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names or ())


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
    own = (a if a in shape else _AXES.get(a, a) for a in as_tuple(axes))
    return tuple(axis for axis in own if axis in shape or axis not in AXIS_NAMES)


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
    own = {_AXES.get(axis, axis) for axis in as_tuple(axes)}
    return bool(own) and own <= {"data", "fsdp"} and not axes_on(mesh, axes)


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
