"""Sends shards of matrices to the devices that get them whole, and results back.

Each device gets a share of the matrices by their work: devices may hold different
numbers of each kind.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nnx_parallel.sharding.names import DimAxes

OfMatrices = Callable[[Array], Array]
"""``(matrices, rows, columns)`` to the same shape, each matrix separately."""


@dataclass(frozen=True)
class Kind:
    """The division of matrices; matrices of several arrays may have the same one.

    Attributes:
        block: Sizes of a shard of one matrix, along its dims of rows, then of columns.
        axes: Mesh axes that split each of these dims.
        num_rows: Number of these dims that are rows.
    """

    block: tuple[int, ...]
    axes: DimAxes
    num_rows: int

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Rows and columns of a whole matrix."""
        whole = [
            size * math.prod(sizes[axis] for axis in axes)
            for size, axes in zip(self.block, self.axes, strict=True)
        ]
        return math.prod(whole[: self.num_rows]), math.prod(whole[self.num_rows :])


@dataclass(frozen=True)
class Group:
    """Arrays whose matrices travel together.

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
    """Numbers of matrices of each shape per device; equal devices follow each other.

    The largest matrices come first, each for the device with the least work so far [1].

    Args:
        works: FLOPs, and elements, of one matrix of each shape.
        counts: Number of matrices of each shape.
        num_devices: Number of devices that share them.

    Example:
        >>> pack([(18, 4), (6, 1)], [3, 6], 2)
        [(2, 1), (1, 5)]

    References:
        [1] Graham, "Bounds on Multiprocessing Timing Anomalies", 1969, section 5.
    """
    rows = [[0] * len(works) for _ in range(num_devices)]
    # With equal work, the device with fewer elements comes first, because the fullest
    # device decides the bytes that are sent.
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
        devices: Number of these devices.
        counts: Number of matrices of each kind, or of each shape, on each device.
    """

    devices: int
    counts: tuple[int, ...]


def _shares(rows: Sequence[tuple[int, ...]]) -> list[_Share]:
    return [_Share(len(list(equal)), counts) for counts, equal in groupby(rows)]


def _flops(rows: int, columns: int) -> float:
    """Work of one matrix, up to a factor: X X^T, its square, and a product with X."""
    short, long = sorted((rows, columns))
    return float(short * short * (2 * long + short))


@dataclass(frozen=True)
class Exchange:
    """Sends shards of matrices to the devices that get them whole, and results back.

    Attributes:
        function: The function that each device applies to its matrices.
        group: The mesh axes over which the matrices are spread.
        sizes: Sizes of all mesh axes.
        kinds: The kinds of matrices, sorted by shape.
        shares: Numbers of matrices of each kind on each device.
        shape_shares: Numbers of matrices of each shape on each device.
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
        """The exchange for given counts of each kind, packed onto the devices."""
        num_devices = math.prod(sizes[axis] for axis in group.copied + group.split)
        shapes = [kind.shape(sizes) for kind in kinds]
        total: dict[tuple[int, int], int] = {}
        for shape, count in zip(shapes, counts, strict=True):
            total[shape] = total.get(shape, 0) + count
        works = [(_flops(*shape), math.prod(shape)) for shape in total]
        packed = pack(works, list(total.values()), num_devices)
        # Kinds that all devices can share evenly are shared evenly.
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
        """Results for the shards ``(matrices, elements)`` of each kind."""
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
        # The branches of this step are products; the steps around it copy. Each branch
        # is compiled, and there are fewer shapes than kinds.
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
        """Calls a function with this device's share."""
        if len(shares) == 1:
            return function(shares[0], x)
        axes = self.group.copied + self.group.split
        # Devices of one share follow each other.
        ends = jnp.asarray(list(accumulate(share.devices for share in shares)))
        mine = jnp.sum(jax.lax.axis_index(axes) >= ends)
        return jax.lax.switch(mine, [partial(function, each) for each in shares], x)

    def _send(self, rows: list[Array]) -> Array:
        """The elements for each device, ``(devices, elements)``, padded."""
        # Each share takes consecutive matrices by slices, because a gather would copy.
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
        """Whole matrices, one after the other, as one array."""
        found, start = [], 0
        for kind, count in zip(self.kinds, share.counts, strict=True):
            end = start + count * math.prod(kind.block)
            x = parts[:, start:end].reshape(self._parts_shape(kind, count))
            found.append(x.transpose(self._order(kind)).reshape(-1))
            start = end
        return _padded(jnp.concatenate(found), parts.size)

    def _compute(self, share: _Share, matrices: Array) -> Array:
        """Results of the function, in the places of their matrices."""
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
        """The parts of whole matrices: the inverse of `_join`."""
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
        """From ``(axes, count, *block)`` to ``(count, axes of dim 0, dim 0, ...)``."""
        split = self.group.split
        order = [len(split)]
        for dim, axes in enumerate(kind.axes):
            order += [*map(split.index, axes), len(split) + 1 + dim]
        return order

    def _receive(self, parts: Array, sizes: list[int]) -> list[Array]:
        """Results for each kind, from each device's results in the order of `_send`."""
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
    """Zeros after the last dim, up to a length."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])
