"""Applies functions of complete matrices, such as Muon's, to matrices in shards.

For N matrices on W devices, one all-to-all gives each device about N / W complete
matrices. Each device works on its matrices without communication, and a second
all-to-all returns the results. Matrices are distributed so that the work is about
equal. So devices may get different numbers of matrices of each kind.
"""

import contextlib
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from nnx_parallel.errors import OptimizerError
from nnx_parallel.mesh import manual_region
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import Path
from nnx_parallel.sharding.names import DimAxes, path_of
from nnx_parallel.sharding.optimizer import owner_of
from nnx_parallel.sharding.placement import Placement
from nnx_parallel.sharding.specs import dim_axes, in_order

OfMatrices = Callable[[Array], Array]
"""A function of an array ``(matrices, rows, columns)`` that keeps the shape.

The function treats each matrix separately.
"""


@dataclass(frozen=True)
class Kind:
    """The shape of a matrix and its split over devices.

    Matrices of several arrays may have the same kind.

    Attributes:
        block: Shape of a shard of one matrix: the dims that form its rows, followed by
            the dims that form its columns.
        axes: Mesh axes that split each dim of ``block``.
        num_rows: Number of dims that form the rows.
    """

    block: tuple[int, ...]
    axes: DimAxes
    num_rows: int

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Returns the numbers of rows and columns of a complete matrix."""
        whole = [
            size * math.prod(sizes[axis] for axis in axes)
            for size, axes in zip(self.block, self.axes, strict=True)
        ]
        return math.prod(whole[: self.num_rows]), math.prod(whole[self.num_rows :])


@dataclass(frozen=True)
class Group:
    """The common properties of arrays whose matrices travel together.

    Attributes:
        split: Mesh axes that split each matrix.
        copied: Mesh axes over which each matrix is replicated.
        dtype: The dtype of all matrices.
    """

    split: tuple[str, ...]
    copied: tuple[str, ...]
    dtype: Any


def pack(
    works: Sequence[tuple[float, int]], counts: Sequence[int], num_devices: int
) -> list[tuple[int, ...]]:
    """Distributes matrices over devices.

    The matrices are distributed in order of their work, the largest first. Each matrix
    goes to the device that has the least work so far [1].

    Args:
        works: For each shape, the FLOPs and the number of elements of one matrix.
        counts: Number of matrices of each shape.
        num_devices: Number of devices.

    Returns:
        For each device, the number of matrices of each shape. Devices with the same
        numbers are next to each other.

    Example:
        >>> pack([(18, 4), (6, 1)], [3, 6], 2)
        [(2, 1), (1, 5)]

    References:
        [1] Graham, "Bounds on Multiprocessing Timing Anomalies", 1969, section 5.
    """
    rows = [[0] * len(works) for _ in range(num_devices)]
    # If two devices have equal work, the device with fewer elements is chosen, because
    # the bytes that are sent depend on the device with the most elements.
    heap = [(0.0, 0, device) for device in range(num_devices)]
    for shape in sorted(range(len(works)), key=lambda shape: -works[shape][0]):
        for _ in range(counts[shape]):
            flops, size, device = heap[0]
            rows[device][shape] += 1
            more_flops, more = works[shape]
            heapq.heapreplace(heap, (flops + more_flops, size + more, device))
    return sorted(map(tuple, rows), reverse=True)


class _Share(NamedTuple):
    """Consecutive devices that get the same numbers of matrices.

    Attributes:
        devices: Number of devices.
        counts: Number of matrices of each kind, or of each shape, on one device.
    """

    devices: int
    counts: tuple[int, ...]


def _shares(rows: Sequence[tuple[int, ...]]) -> list[_Share]:
    return [_Share(len(list(equal)), counts) for counts, equal in groupby(rows)]


def _flops(rows: int, columns: int) -> float:
    """Returns the work for one matrix, up to a constant factor.

    For a matrix X, an iteration of Muon computes A = X X^T, A A, and a product with X.
    """
    short, long = sorted((rows, columns))
    return float(short * short * (2 * long + short))


@dataclass(frozen=True)
class Exchange:
    """Gathers matrices on devices, applies a function, and sends the results back.

    Attributes:
        function: The function that each device applies to its matrices.
        group: The mesh axes over which the matrices are distributed.
        sizes: Sizes of all mesh axes.
        kinds: The kinds of matrices, sorted by shape.
        shares: The number of matrices of each kind on each device.
        shape_shares: The number of matrices of each shape on each device.
    """

    function: OfMatrices
    group: Group
    sizes: Mapping[str, int]
    kinds: tuple[Kind, ...]
    shares: list[_Share]
    shape_shares: list[_Share]

    @classmethod
    def of(
        cls,
        function: OfMatrices,
        group: Group,
        sizes: Mapping[str, int],
        kinds: tuple[Kind, ...],
        counts: Sequence[int],
    ) -> "Exchange":
        """Distributes ``counts`` matrices of each kind over the devices."""
        num_devices = math.prod(sizes[axis] for axis in group.copied + group.split)
        shapes = [kind.shape(sizes) for kind in kinds]
        total: dict[tuple[int, int], int] = {}
        for shape, count in zip(shapes, counts, strict=True):
            total[shape] = total.get(shape, 0) + count
        works = [(_flops(*shape), math.prod(shape)) for shape in total]
        packed = pack(works, list(total.values()), num_devices)
        # Each kind is distributed evenly if this is possible for all kinds.
        is_even = len(set(packed)) == 1 and not any(n % num_devices for n in counts)
        left, rows = list(counts), []
        for of_shapes in packed:
            needed, row = dict(zip(total, of_shapes, strict=True)), []
            for kind, shape in enumerate(shapes):
                even = counts[kind] // num_devices
                taken = even if is_even else min(left[kind], needed[shape])
                left[kind] -= taken
                needed[shape] -= taken
                row.append(taken)
            rows.append(tuple(row))
        return cls(function, group, sizes, kinds, _shares(rows), _shares(packed))

    def run(self, rows: list[Array]) -> list[Array]:
        """Gathers matrices, applies the function, and sends the results back.

        Args:
            rows: For each kind, this device's shards ``(matrices, elements)``.

        Returns:
            This device's shards of the results, with the shapes of ``rows``.
        """
        split, copied = (
            math.prod(self.sizes[axis] for axis in axes)
            for axes in (self.group.split, self.group.copied)
        )
        sent = self._send(rows)  # (devices, elements)
        if copied > 1:
            sent = sent.reshape(copied, split, -1)
            index = jax.lax.axis_index(self.group.copied)
            sent = jax.lax.dynamic_index_in_dim(sent, index, keepdims=False)
        parts = self._all_to_all(sent)  # (parts of each matrix, elements)
        matrices = self._on_own(self._join, self.shares, parts)
        # Only this step computes products; all other steps only copy. The step has a
        # branch for each share of shapes and not of kinds, because a branch with
        # products takes long to compile, and there are fewer shapes than kinds.
        results = self._on_own(self._compute, self.shape_shares, matrices)
        back = self._all_to_all(self._on_own(self._cut, self.shares, results))
        if copied > 1:
            back = jax.lax.all_gather(back, self.group.copied, tiled=True)
        return self._receive(back, [x.shape[1] for x in rows])

    def _all_to_all(self, x: Array) -> Array:
        if not self.group.split:
            return x
        return jax.lax.all_to_all(x, self.group.split, 0, 0, tiled=True)

    def _on_own(
        self, function: Callable[[_Share, Array], Array], shares: list[_Share], x: Array
    ) -> Array:
        """Calls a function with this device's share and ``x``."""
        if len(shares) == 1:
            return function(shares[0], x)
        axes = self.group.copied + self.group.split
        # The devices of a share are consecutive.
        ends = jnp.asarray(list(accumulate(share.devices for share in shares)))
        mine = jnp.sum(jax.lax.axis_index(axes) >= ends)
        return jax.lax.switch(mine, [partial(function, each) for each in shares], x)

    def _send(self, rows: list[Array]) -> Array:
        """Returns an array ``(devices, elements)`` with the elements for each device.

        Rows are padded to the same length.
        """
        # Each share gets consecutive matrices, as slices, because a gather would copy.
        starts, parts = [0] * len(rows), []
        for devices, counts in self.shares:
            ends = [s + devices * n for s, n in zip(starts, counts, strict=True)]
            taken = [x[s:e] for x, s, e in zip(rows, starts, ends, strict=True)]
            size = sum(n * x.shape[1] for n, x in zip(counts, rows, strict=True))
            of_each = [
                x.reshape(devices, n * x.shape[1])
                for x, n in zip(taken, counts, strict=True)
            ]
            parts.append((size, jnp.concatenate(of_each, axis=1)))
            starts = ends
        most = max(size for size, _ in parts)
        return jnp.concatenate([_padded(part, most) for _, part in parts])

    def _join(self, share: _Share, parts: Array) -> Array:
        """Joins the parts of gathered matrices; returns a flat array of matrices."""
        found, start = [], 0
        for kind, count in zip(self.kinds, share.counts, strict=True):
            end = start + count * math.prod(kind.block)
            x = parts[:, start:end].reshape(self._parts_shape(kind, count))
            found.append(x.transpose(self._order(kind)).reshape(-1))
            start = end
        return _padded(jnp.concatenate(found), parts.size)

    def _compute(self, share: _Share, matrices: Array) -> Array:
        """Applies the function to a flat array of matrices; returns a flat array."""
        shapes = dict.fromkeys(kind.shape(self.sizes) for kind in self.kinds)
        found, start = [], 0
        for shape, count in zip(shapes, share.counts, strict=True):
            end = start + count * math.prod(shape)
            if count:
                x = matrices[start:end].reshape(count, *shape)
                found.append(self.function(x).reshape(-1))
            start = end
        found = found or [jnp.zeros(0, matrices.dtype)]
        return _padded(jnp.concatenate(found), matrices.size)

    def _cut(self, share: _Share, results: Array) -> Array:
        """Undoes `_join`: cuts the matrices of a flat array into shards."""
        num_parts = math.prod(self.sizes[axis] for axis in self.group.split)
        found, start = [], 0
        for kind, count in zip(self.kinds, share.counts, strict=True):
            end = start + count * math.prod(kind.shape(self.sizes))
            order, shape = self._order(kind), self._parts_shape(kind, count)
            x = results[start:end].reshape([shape[dim] for dim in order])
            x = x.transpose([order.index(dim) for dim in range(len(order))])
            found.append(x.reshape(num_parts, count * math.prod(kind.block)))
            start = end
        return _padded(jnp.concatenate(found, axis=1), results.size // num_parts)

    def _parts_shape(self, kind: Kind, count: int) -> tuple[int, ...]:
        return (*(self.sizes[axis] for axis in self.group.split), count, *kind.block)

    def _order(self, kind: Kind) -> list[int]:
        """Returns the order of dims that joins the parts of each matrix.

        A transpose by this order changes dims ``(axes, count, *block)`` to
        ``(count, axes of dim 0, dim 0, axes of dim 1, dim 1, ...)``.
        """
        split = self.group.split
        order = [len(split)]
        for dim, axes in enumerate(kind.axes):
            order += [*map(split.index, axes), len(split) + 1 + dim]
        return order

    def _receive(self, parts: Array, sizes: list[int]) -> list[Array]:
        """Undoes `_send`: returns the results of each kind."""
        found: list[list[Array]] = [[] for _ in sizes]
        row = 0
        for devices, counts in self.shares:
            column = 0
            for of_kind, count, size in zip(found, counts, sizes, strict=True):
                mine = parts[row : row + devices, column : column + count * size]
                of_kind.append(mine.reshape(devices * count, size))
                column += count * size
            row += devices
        return [jnp.concatenate(of_kind) for of_kind in found]


def _padded(x: Array, length: int) -> Array:
    """Pads the last dim with zeros at the end, to a length."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])


class _Updates(NamedTuple):
    """The placements of an optimizer's updates, known while the optimizer is traced."""

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
    """Sets the shapes and placements of parameters for `map_matrices`, by path."""
    token = _updates.set(_Updates(layout, shapes, placements))
    try:
        yield
    finally:
        _updates.reset(token)


class MatrixDims(NamedTuple):
    """The dims of an array of matrices, by their meaning.

    Attributes:
        batch: Dims that enumerate matrices.
        rows: Dims that form the rows of a matrix.
        columns: Dims that form the columns of a matrix.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Returns all dims as ``(*batch, *rows, *columns)``."""
        return self.batch + self.rows + self.columns


def matrix_dims(
    path: str, shape: Sequence[int], numbers: MuonDimensionNumbers
) -> MatrixDims:
    """Interprets Optax's dimension numbers of an array.

    Dims that are neither rows nor columns enumerate matrices.

    Raises:
        OptimizerError: If a dim does not exist or is listed twice, or if there are no
            dims for the rows or for the columns.
    """
    ndim = len(shape)
    given: Any = tuple(
        (dims,) if isinstance(dims, int) else tuple(dims) for dims in numbers
    )
    rows, columns = (tuple(d + ndim * (d < 0) for d in dims) for dims in given)
    wrong = [d for d in rows + columns if not 0 <= d < ndim]
    if not rows or not columns or wrong or len({*rows, *columns}) < len(rows + columns):
        raise OptimizerError(
            f"`{path}` with shape {tuple(shape)} cannot be an array of matrices with "
            f"rows from dims {given[0]} and columns from dims {given[1]}: rows and "
            f"columns each need at least one separate dim from 0 to {ndim - 1}. All "
            "other dims enumerate matrices. muon_dimension_numbers(model) returns the "
            "numbers for a model. None excludes an array."
        )
    batch = tuple(d for d in range(ndim) if d not in rows + columns)
    return MatrixDims(batch, rows, columns)


def map_matrices(
    function: OfMatrices, updates: Any, numbers: Sequence[MuonDimensionNumbers]
) -> Any:
    """Applies a function to every matrix of a tree of updates.

    Inside a step, the matrices are distributed over all devices that hold shards or
    copies of them, and each matrix is gathered on one device. A device sends and
    receives its share of the matrices once, in their dtype. If data parallelism keeps
    complete copies, only results are sent. Outside of a step, there is no
    communication.

    Args:
        function: The function of matrices of one shape.
        updates: A pytree like the trained parameters; parts of it may be masked.
        numbers: The dimension numbers of each leaf of ``updates``.

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
            run = manual_region(run, mesh, specs, specs)
        shards = run(*(flat[index][1] for index in indices))
        for index, x in zip(indices, shards, strict=True):
            results[index] = x
    return jax.tree.unflatten(structure, results)


def _spec_of(path: tuple, x: Array, known: _Updates) -> P:
    owner = owner_of(path, dict(known.shapes))
    # If the shape of an array differs from the shape of its parameter, the compiler
    # chooses the placement.
    if owner is None or known.shapes[owner] != x.shape:
        return P()
    return known.placements[owner].optimizer


@dataclass(frozen=True)
class _Stacked:
    """One array of matrices.

    Attributes:
        kind: The kind of the matrices.
        dims: The dims of the array, by meaning.
        local: The shape of the array's shard on one device.
        spec: Spec of the array.
    """

    kind: Kind
    dims: MatrixDims
    local: tuple[int, ...]
    spec: P

    @property
    def count(self) -> int:
        """Returns the number of matrices on one device."""
        return math.prod(self.local[dim] for dim in self.dims.batch)

    def to_rows(self, x: Array) -> Array:
        """Reshapes a shard to ``(matrices, elements of a shard of one matrix)``."""
        return x.transpose(self.dims.order).reshape(self.count, -1)

    def from_rows(self, rows: Array) -> Array:
        """Undoes `to_rows`."""
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
    """Returns the mesh axes that split each matrix, and the axes that hold copies."""
    if mesh is None:
        return (), ()
    of_dims = dim_axes(stacked.spec, len(stacked.local))
    used = {axis for dim in of_dims for axis in dim}
    split = in_order(tuple({a for dim in stacked.kind.axes for a in dim}), mesh)
    # Axes that split layers, heads or experts do not split or copy matrices, because
    # devices have different matrices along these axes.
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
    """Applies the function to matrices, given one device's shards of the arrays."""
    by_kind: dict[Kind, list[int]] = {}
    for index, each in enumerate(stacked):
        by_kind.setdefault(each.kind, []).append(index)
    # Kinds with the same shape are next to each other, so that one call of the function
    # maps all of them.
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
