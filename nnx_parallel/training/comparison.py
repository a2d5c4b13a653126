"""Compares the arrays of two programs, either bit for bit or up to rounding.

The values are compared on the host, shard by shard, so that no device holds them twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.sharding.checksum import data_of
from nnx_parallel.sharding.names import path_of

MAX_NOISE = 0.1
"""An array is not compared if one rounding changes it by more than this fraction."""

_NOISE_FACTOR = 10.0
"""Correct programs may differ by this many times the effect of one rounding."""

_MAX_LIMIT = 0.3
"""The largest limit of an error. A factor of 2 or 1/2 always exceeds it."""

_NEGLIGIBLE = 1e-9
"""A gradient may differ by this fraction of the largest gradient.

One program may compute exactly 0 for a gradient, and another only rounding errors.
"""

GRADIENT = "gradient of "
"""Prefix of the names of gradients."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An array that differs between two runs or programs.

    Attributes:
        array: The name of the array, such as ``"gradient of `head.kernel`"``.
        where: The devices with shards that differ; for a difference in numbers, the
            device of the worst shard.
        error: Root mean square of the difference in the worst shard, relative to the
            root mean square of the array. NaN if only bits were compared.
        limit: The largest error that rounding can explain.
        ratio: The factor between the two arrays that fits best.
    """

    array: str
    where: str
    error: float = math.nan
    limit: float = 0.0
    ratio: float = math.nan

    def __str__(self) -> str:
        """Returns one line of text."""
        if math.isnan(self.error):
            return f"{self.array}: different bits on {self.where}"
        is_factor = math.isfinite(self.ratio) and abs(self.ratio - 1) > 0.01
        factor = f" (about {self.ratio:.3f} times the other)" * is_factor
        return (
            f"{self.array}: relative difference {self.error:.1e}, rounding explains "
            f"{self.limit:.1e}{factor}, on {self.where}"
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of comparing the step with another run or program.

    Attributes:
        name: The run or program that the step is compared with.
        note: The rows, layers or options that were compared, or the reason why nothing
            was compared.
        errors: The error of each array by its name, as in `Difference`. If bits were
            compared, the error is 0.0 for equal arrays and infinite for others.
        differences: The arrays that differ, in the order in which a step computes them.
        skipped: Arrays that are not compared, because rounding changes them too much.
    """

    name: str
    note: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def result(self) -> str:
        """The result in a few words."""
        if not self.errors:
            return "not compared"
        if self.differences:
            return f"{len(self.differences)} of {len(self.errors)} arrays differ"
        largest = max(self.errors.values())
        size = f"at most {largest:.1e} apart" if largest else "bit for bit"
        return f"{len(self.errors)} arrays agree, {size}"


Bounds = tuple[tuple[int, int], ...]
"""Start and stop of a shard along each dim of the global array."""


@dataclass(frozen=True)
class Part:
    """The values of a shard, and the device that held it."""

    values: np.ndarray
    device: str


Arrays = Mapping[str, Mapping[Bounds, Part]]
"""The shards of this process, by the array's name and the bounds, without copies."""


def fetch(arrays: Mapping[str, jax.Array]) -> dict[str, dict[Bounds, Part]]:
    """Copies the shards of this process to the host."""
    found: dict[str, dict[Bounds, Part]] = {}
    for name, x in arrays.items():
        parts = found[name] = {}
        for shard in data_of(x).addressable_shards:
            bounds = bounds_of(shard.index, data_of(x).shape)
            if bounds not in parts:
                # On CPU `np.asarray` would share memory that a step may reuse.
                parts[bounds] = Part(np.array(shard.data), str(shard.device))
    return found


def cut(arrays: Mapping[str, np.ndarray], like: Arrays) -> Arrays:
    """Cuts entire arrays into the shards that ``like`` has."""
    return {
        name: {
            bounds: Part(arrays[name][tuple(slice(*x) for x in bounds)], part.device)
            for bounds, part in parts.items()
        }
        for name, parts in like.items()
    }


def bounds_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Bounds:
    """Returns the bounds of a shard from its index."""
    return tuple(x.indices(n)[:2] for x, n in zip(index or (), shape, strict=True))


def key_kind(x: jax.Array) -> Any:
    """Returns the implementation of random keys; ``None`` for other arrays."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_impl(x) if is_key else None


def as_keys(x: jax.Array, kind: Any) -> jax.Array:
    """Converts numbers back to random keys; inverts `data_of`."""
    return x if kind is None else jax.random.wrap_key_data(x, impl=kind)


def named(tree: Any) -> dict[str, jax.Array]:
    """Returns the arrays of a tree by their paths, in order."""
    return {path_of(keys): x for keys, x in jax.tree.leaves_with_path(tree)}


class HostCopy:
    """A copy of a tree of arrays in host memory, which can be restored.

    Attributes:
        arrays: The shards, by path.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._kinds = [key_kind(x) for x in leaves]
        data = [data_of(x) for x in leaves]
        self._places = [(x.shape, x.sharding) for x in data]
        self.arrays = fetch(named(tree))

    def restore(self) -> Any:
        """Puts the arrays on their devices, as new arrays."""
        found = zip(self._places, self.arrays.values(), self._kinds, strict=True)
        arrays = [
            as_keys(_assemble(shape, sharding, parts), kind)
            for (shape, sharding), parts, kind in found
        ]
        return self._structure.unflatten(arrays)


def _assemble(
    shape: tuple[int, ...], sharding: Any, parts: Mapping[Bounds, Part]
) -> jax.Array:
    return jax.make_array_from_callback(
        shape, sharding, lambda index: parts[bounds_of(index, shape)].values
    )


@dataclass
class Sums:
    """Sums over the shards of an array, which give its relative error.

    Attributes:
        count: Number of elements.
        square: Sum of the squares of the reference array.
        product: Sum of the elementwise products of both arrays.
        worst: The largest mean square of the difference in a shard.
        where: The device of that shard.
    """

    count: int = 0
    square: float = 0.0
    product: float = 0.0
    worst: float = 0.0
    where: str = ""

    @classmethod
    def of(cls, mine: Part, right: Part) -> Sums:
        """Compares one shard with the reference ``right``."""
        a, b = wide(mine.values).ravel(), wide(right.values).ravel()
        are_finite = np.isfinite(a) & np.isfinite(b)
        are_same = are_finite | (a == b) | (np.isnan(a) & np.isnan(b))
        # Values that are not finite must be the same, and are left out of the sums.
        a, b = a[are_finite], b[are_finite]
        mean = float(np.vdot(a - b, a - b).real) / max(b.size, 1)
        return cls(
            count=b.size,
            square=float(np.vdot(b, b).real),
            product=float(np.vdot(b, a).real),
            worst=mean if are_same.all() and math.isfinite(mean) else math.inf,
            where=mine.device,
        )

    def merge(self, other: Sums) -> None:
        """Adds the sums of other shards."""
        self.count += other.count
        self.square += other.square
        self.product += other.product
        if not self.where or other.worst > self.worst:
            self.worst, self.where = other.worst, other.where

    @property
    def size(self) -> float:
        """The root mean square of the reference array."""
        return math.sqrt(self.square / max(self.count, 1))

    @property
    def error(self) -> float:
        """The error of the worst shard, relative to the size of the array."""
        if self.worst == 0:
            return 0.0
        return math.sqrt(self.worst) / self.size if self.size else math.inf


def wide(x: np.ndarray) -> np.ndarray:
    """Converts the values to float64, or to complex128."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def sum_up(mine: Arrays, right: Arrays) -> dict[str, Sums]:
    """Compares arrays with reference arrays, over the shards of all processes."""
    found = {name: Sums() for name in mine}
    for name, parts in mine.items():
        for bounds, part in parts.items():
            found[name].merge(Sums.of(part, right[name][bounds]))
    # Processes exchange JSON, so the sums are sent as lists.
    here = [list(astuple(sums)) for sums in found.values()]
    total = {name: Sums() for name in found}
    for process in allgather_object("verification", here):
        for name, values in zip(total, process, strict=True):
            total[name].merge(Sums(*values))
    return total


def compare(
    name: str,
    mine: Arrays,
    right: Arrays,
    *,
    noise: Mapping[str, Sums],
    floors: Mapping[str, float],
) -> Comparison:
    """Compares the numbers in arrays, up to rounding.

    Args:
        name: The program that computed ``right``.
        mine: The arrays to judge.
        right: The arrays of the other program.
        noise: The effect of one rounding on each array.
        floors: The relative error that is always allowed for each array.
    """
    errors, differences, skipped = {}, [], []
    found = sum_up(mine, right)
    sizes = (sums.size for x, sums in found.items() if x.startswith(GRADIENT))
    negligible = _NEGLIGIBLE * max(sizes, default=0.0)
    for array, sums in found.items():
        is_tiny = array.startswith(GRADIENT) and math.sqrt(sums.worst) <= negligible
        error = 0.0 if is_tiny else sums.error
        moved = noise[array].error
        if error > floors[array] and moved > MAX_NOISE:
            skipped.append(array)
            continue
        limit = max(floors[array], min(_NOISE_FACTOR * moved, _MAX_LIMIT))
        errors[array] = error
        if not error <= limit:
            ratio = sums.product / sums.square if sums.square else math.nan
            facts = {"error": error, "limit": limit, "ratio": ratio}
            differences.append(Difference(array=array, where=sums.where, **facts))
    return Comparison(
        name=name,
        errors=errors,
        differences=tuple(differences),
        skipped=tuple(skipped),
    )


def join(first: Comparison, second: Comparison) -> Comparison:
    """Joins two comparisons with the same program."""
    return Comparison(
        name=first.name,
        note=first.note,
        errors={**first.errors, **second.errors},
        differences=first.differences + second.differences,
        skipped=first.skipped + second.skipped,
    )


Hashes = Mapping[str, Mapping[str, int]]
"""The hash of each shard of this process, by the names of array and device."""


def label(device: Any) -> str:
    """Returns the name of a device, with its process."""
    return f"{device} (process {device.process_index})"


def differing(first: Hashes, second: Hashes) -> dict[str, str]:
    """Returns the devices with shards that differ, by the name of the array.

    All processes must call this function. Each gets the differences of all processes.
    """
    here = [
        (array, device)
        for array, by_device in first.items()
        for device, value in by_device.items()
        if second[array][device] != value
    ]
    found: dict[str, list[str]] = {}
    for array, device in itertools.chain(*allgather_object("hashes", here)):
        found.setdefault(array, []).append(device)
    return {array: ", ".join(found[array]) for array in first if array in found}
