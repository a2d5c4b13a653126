"""The place of one array: four specs, and the reason for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.sharding.names import ArrayInfo, DimAxes, as_tuple
from nnx_parallel.sharding.specs import to_spec


def axes_of(spec: P) -> tuple[str, ...]:
    """Returns the mesh axes of all dims of a spec."""
    return tuple(axis for dim in spec for axis in as_tuple(dim))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The four specs of one array, and the reason for them.

    Attributes:
        stored: Spec between steps.
        used: Spec in the computation; differs from ``stored`` if the array is gathered
            at use.
        gradient: Spec of its gradient, after the sum over devices.
        optimizer: Spec of its optimizer state.
        reason: The rule that decided, or the reason why the array is replicated.
        is_stacked: True if dim 0 enumerates layers, which are gathered one by one.
        absent: Axes in the array's rule or names that the mesh lacks. They count as
            axes of size one.
        is_looked_up: True for the table of an embedding if its gradient and the table
            in use are split differently along the columns.
        is_staged: True if stages of a pipeline run its layers.
        stage_axes: Axes of stages that cannot split the dim ``layers``, and so split
            another dim of the stored array. The array is gathered over them at use,
            because a stage needs complete layers.
    """

    stored: P
    used: P
    gradient: P
    optimizer: P
    reason: str
    is_stacked: bool = False
    absent: tuple[str, ...] = ()
    is_looked_up: bool = False
    is_staged: bool = False
    stage_axes: tuple[str, ...] = ()

    def of_layer(self) -> Placement:
        """Returns the placement of one layer of a stacked array."""
        # (layers, ...) to (...)
        place = self.map(lambda spec: P(*spec[1:]))
        return replace(place, is_stacked=False)

    def in_stage(self) -> Placement:
        """Returns the placement inside a stage, without the axes of stages."""
        if not self.stage_axes:
            return self
        dropped = {*self.stage_axes}
        place = self.map(
            lambda spec: to_spec(
                [tuple(a for a in as_tuple(dim) if a not in dropped) for dim in spec]
            )
        )
        return replace(place, stage_axes=())

    def map(self, function: Callable[[P], P]) -> Placement:
        """Returns the placement with ``function`` applied to all four specs."""
        roles = ("stored", "used", "gradient", "optimizer")
        specs: dict[str, Any] = {r: function(getattr(self, r)) for r in roles}
        return replace(self, **specs)

    @property
    def is_gathered(self) -> bool:
        """True if the spec in use, or of the gradient, differs from the stored spec."""
        return self.used != self.stored or self.gradient != self.stored


class Staged(NamedTuple):
    """A `Stack` that runs in stages."""

    path: tuple[Hashable, ...]  # the path of the stack in the model
    is_even: bool  # all stages have the same number of layers


_ROWS, _COLUMNS = 8, 128
"""The rows and columns of a TPU's tile, which covers the last two dims."""


def cheapest_dim(
    dims: Sequence[int], shape: Sequence[int], size: int
) -> tuple[int, bool]:
    """Chooses the dim along which a gather over ``size`` devices copies the least.

    Args:
        dims: The candidates; ``size`` divides each of them.
        shape: The shape of the array.
        size: The number of shards.

    Returns:
        The dim, and whether its shards fit the tiles of a TPU, so that a gather needs
        no additional copy.
    """
    last = len(shape) - 1

    # A gather joins shards without a copy if they are whole tiles; otherwise it copies
    # them. If shards of the last dim have a multiple of 8 columns, XLA lays out columns
    # as rows: the gather is cheap, but a product with the transpose is a little slower.
    # Estimated cycles of 4 layers of Llama 2 7B over 64 v5p chips, with kernels (4096,
    # 11008) and (11008, 4096): 372 million if a shard has 172 columns of the first
    # kernel and 172 rows of the second, 332 million with 64 rows and 172 rows, 318
    # million with 64 rows and 64 columns.
    def rank(dim: int) -> int:
        shard = shape[dim] // size
        if dim == last:
            return 2 if shard % _COLUMNS == 0 else int(shard % _ROWS == 0)
        return 2 if dim < last - 1 or shard % _ROWS == 0 else 0

    dim = max(dims, key=lambda d: (rank(d), d != last, shape[d], -d))
    return dim, rank(dim) > 0


def choose_other_dim(
    info: ArrayInfo, taken: DimAxes, axes: tuple[str, ...], mesh: Mesh, min_size: int
) -> tuple[int | None, str]:
    """Chooses a dim for the axes of stages to split, instead of the dim `layers`.

    Args:
        info: The array, with the layers as dim 0.
        taken: The mesh axes that other claims give to each dim.
        axes: The axes of stages.
        mesh: The mesh.
        min_size: Arrays of fewer elements are not split.

    Returns:
        The dim and the reason, or ``None`` and the reason why no dim is split.
    """
    sizes, name = mesh.shape, "+".join(axes)
    size = math.prod(sizes[axis] for axis in axes)

    def part(dim: int) -> int:
        return info.shape[dim] // math.prod(sizes[axis] for axis in taken[dim])

    fitting = [d for d in range(1, len(taken)) if part(d) and part(d) % size == 0]
    # Small arrays are not split, as under FSDP, because each split array is sent in a
    # separate message.
    if not fitting or info.size < min_size:
        return None, f"{name}={size} does not split the layers: whole on all stages"
    # A dim that another axis splits is chosen only if there is no free dim.
    free = [d for d in fitting if not taken[d]] or fitting
    dim, _ = cheapest_dim(free, [part(d) for d in range(len(taken))], size)
    return dim, f"{name}: dim {dim}, because it does not split the layers"


def place_array(
    path: tuple[Hashable, ...],
    info: ArrayInfo,
    staged: Staged | None,
    place: Callable[[ArrayInfo], Placement],
) -> Placement:
    """Places one array of a model, which may have a `Stack` that runs in stages."""
    if staged is None:
        return place(info)
    is_staged = path[: len(staged.path)] == staged.path
    info = replace(info, splits_layers=is_staged and staged.is_even)
    return replace(place(info), is_staged=is_staged)
