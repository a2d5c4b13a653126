"""Functions of whole matrices, such as Muon's, when every device holds shards of them.

For N matrices over W devices, one all-to-all gives each device about N / W whole
matrices. The device works on them without communication, and a second all-to-all
returns the results. The matrices are packed by their work: devices may hold different
numbers of each kind.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from nnx_parallel.errors import OptimizerError
from nnx_parallel.sharding.exchange import Exchange, Group, Kind, OfMatrices
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import Path
from nnx_parallel.sharding.names import dim_axes, in_order, path_of
from nnx_parallel.sharding.optimizer import owner_of
from nnx_parallel.sharding.placement import Placement


class _Updates(NamedTuple):
    """The places of an optimizer's updates while it is traced."""

    layout: Layout
    shapes: Mapping[Path, tuple[int, ...]]
    placements: Mapping[Path, Placement]


_updates: ContextVar[_Updates | None] = ContextVar("updates", default=None)


@contextlib.contextmanager
def placing_updates(
    layout: Layout,
    shapes: Mapping[Path, tuple[int, ...]],
    placements: Mapping[Path, Placement],
) -> Iterator[None]:
    """Tells `map_matrices` the parameters, by path, and the places of their updates."""
    token = _updates.set(_Updates(layout, shapes, placements))
    try:
        yield
    finally:
        _updates.reset(token)


class MatrixDims(NamedTuple):
    """The dims of an array of matrices."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All dims as ``(*batch, *rows, *columns)``."""
        return self.batch + self.rows + self.columns


def matrix_dims(
    path: str, shape: Sequence[int], numbers: MuonDimensionNumbers
) -> MatrixDims:
    """Dims of an array by Optax's dimension numbers; the others enumerate matrices.

    Raises:
        OptimizerError: If the numbers do not divide the array into matrices.
    """
    ndim = len(shape)
    given: Any = tuple(
        (dims,) if isinstance(dims, int) else tuple(dims) for dims in numbers
    )
    rows, columns = (tuple(d + ndim * (d < 0) for d in dims) for dims in given)
    wrong = [d for d in rows + columns if not 0 <= d < ndim]
    if not rows or not columns or wrong or len({*rows, *columns}) < len(rows + columns):
        raise OptimizerError(
            f"`{path}` with shape {tuple(shape)} is no array of matrices with rows "
            f"from dims {given[0]} and columns from dims {given[1]}: each needs at "
            f"least one dim of its own from 0 to {ndim - 1}. Dims that neither names "
            "enumerate matrices. muon_dimension_numbers(model) has those of a model; "
            "None leaves an array out."
        )
    batch = tuple(d for d in range(ndim) if d not in rows + columns)
    return MatrixDims(batch, rows, columns)


def map_matrices(
    function: OfMatrices, updates: Any, numbers: Sequence[MuonDimensionNumbers]
) -> Any:
    """Maps every matrix of a tree of updates, each whole on one device.

    Inside a step the matrices are spread over all devices that hold shards or copies of
    them. A device sends and receives its share of the matrices once, in their dtype; if
    data parallelism keeps whole copies, only results are sent. Outside of a step this
    is a plain map.

    Args:
        function: The function of matrices of one shape.
        updates: Pytree like the trained parameters, with parts that may be masked.
        numbers: The dimension numbers of each of its leaves.

    Raises:
        OptimizerError: If a leaf is not an array of matrices.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(updates)
    known = _updates.get()
    mesh = None if known is None else known.layout.mesh
    groups: dict[Group, list[tuple[int, _Stacked]]] = {}
    for index, ((path, x), dims) in enumerate(zip(flat, numbers, strict=True)):
        spec = P() if known is None else _spec_of(path, x, known)
        found = _stacked(path_of(path), x, dims, spec, mesh)
        group = Group(*_spread(found, mesh), jnp.dtype(x.dtype))
        groups.setdefault(group, []).append((index, found))
    results: list[Any] = [None] * len(flat)
    for group, members in groups.items():
        indices, stacked = zip(*members, strict=True)
        run = partial(_map_shards, function, group, _sizes(mesh), stacked)
        if mesh is not None and mesh.size > 1:
            specs = tuple(each.spec for each in stacked)
            # `check_vma` cannot see that gathered results are equal on all devices.
            run = jax.shard_map(
                run, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
            )
        shards = run(*(flat[index][1] for index in indices))
        for index, x in zip(indices, shards, strict=True):
            results[index] = x
    return jax.tree.unflatten(structure, results)


def _spec_of(path: tuple, x: Array, known: _Updates) -> P:
    owner = owner_of(path, dict(known.shapes))
    # An array with another shape than its parameter: the compiler places it.
    if owner is None or known.shapes[owner] != x.shape:
        return P()
    return known.placements[owner].optimizer


@dataclass(frozen=True)
class _Stacked:
    """One array of matrices.

    Attributes:
        kind: Kind of its matrices.
        dims: Dims of the array by meaning.
        local: Shape of the array on one device.
        spec: Spec of the array.
    """

    kind: Kind
    dims: MatrixDims
    local: tuple[int, ...]
    spec: P

    @property
    def count(self) -> int:
        """Number of matrices on one device."""
        return math.prod(self.local[dim] for dim in self.dims.batch)

    def to_rows(self, x: Array) -> Array:
        """A shard as ``(matrices, elements of a shard of one matrix)``."""
        return x.transpose(self.dims.order).reshape(self.count, -1)

    def from_rows(self, rows: Array) -> Array:
        """The shard from the result of `to_rows`."""
        order = self.dims.order
        x = rows.reshape([self.local[dim] for dim in order])
        return x.transpose([order.index(dim) for dim in range(len(order))])


def _stacked(
    path: str, x: Array, numbers: MuonDimensionNumbers, spec: P, mesh: Mesh | None
) -> _Stacked:
    dims, sizes = matrix_dims(path, x.shape, numbers), _sizes(mesh)
    axes = [tuple(a for a in dim if sizes[a] > 1) for dim in dim_axes(spec, x.ndim)]
    local = tuple(
        size // math.prod(sizes[axis] for axis in of_dim)
        for size, of_dim in zip(x.shape, axes, strict=True)
    )
    of_matrix = dims.rows + dims.columns
    kind = Kind(
        block=tuple(local[dim] for dim in of_matrix),
        axes=tuple(axes[dim] for dim in of_matrix),
        num_rows=len(dims.rows),
    )
    return _Stacked(kind, dims, local, spec)


def _spread(
    stacked: _Stacked, mesh: Mesh | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes that split each matrix, and axes that hold copies."""
    if mesh is None:
        return (), ()
    of_dims = dim_axes(stacked.spec, len(stacked.local))
    used = {axis for dim in of_dims for axis in dim}
    split = in_order(tuple({a for dim in stacked.kind.axes for a in dim}), mesh)
    # Over axes that split layers, heads or experts, each device has other matrices.
    copied = tuple(a for a in mesh.axis_names if a not in used and mesh.shape[a] > 1)
    return split, copied


def _sizes(mesh: Mesh | None) -> Mapping[str, int]:
    return {} if mesh is None else mesh.shape


def _map_shards(
    function: OfMatrices,
    group: Group,
    sizes: Mapping[str, int],
    stacked: Sequence[_Stacked],
    *shards: Array,
) -> tuple[Array, ...]:
    """Maps matrices, given one device's shards of them."""
    by_kind: dict[Kind, list[int]] = {}
    for index, each in enumerate(stacked):
        by_kind.setdefault(each.kind, []).append(index)
    # Kinds of one shape follow each other: the function maps them at once.
    kinds = tuple(sorted(by_kind, key=lambda kind: kind.shape(sizes)))
    # (matrices, elements of a shard of one matrix), for each kind
    rows = [
        jnp.concatenate([stacked[i].to_rows(shards[i]) for i in by_kind[kind]])
        for kind in kinds
    ]
    exchange = Exchange.of(function, group, sizes, kinds, [len(x) for x in rows])
    found: list[Any] = [None] * len(stacked)
    for kind, of_kind in zip(kinds, exchange.run(rows), strict=True):
        ends = list(accumulate(stacked[i].count for i in by_kind[kind]))
        for i, (start, end) in zip(by_kind[kind], pairwise([0, *ends]), strict=True):
            found[i] = stacked[i].from_rows(of_kind[start:end])
    return tuple(found)
