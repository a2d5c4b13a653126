"""The place of one array: four specs, and why."""

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
    """The mesh axes of a spec."""
    return tuple(axis for dim in spec for axis in as_tuple(dim))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The four specs of one array, and why.

    Attributes:
        stored: Spec between steps.
        used: Spec in the computation; differs from ``stored`` where it is gathered at
            use.
        gradient: Spec of its gradient, once summed.
        optimizer: Spec of its optimizer state.
        reason: The rule that decided, or the reason why it stays replicated.
        is_stacked: True if dim 0 enumerates layers, which are gathered one by one.
        absent: Axes that a rule or a name gives it and the mesh lacks: of size one.
        is_looked_up: True for a table whose rows are split in its gradient.
        is_staged: True for layers that stages of a pipeline run.
        moved: Axes of stages that cannot split its ``layers``, and split the stored
            array along another dim. They are gathered at use; stages take whole layers.
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
        """The placement of one layer of a stacked array."""
        # (layers, ...) to (...)
        place = self._map(lambda spec: P(*spec[1:]))
        return replace(place, is_stacked=False)

    def in_stage(self) -> Placement:
        """The placement in a stage, without the axes of stages."""
        if not self.stage_axes:
            return self
        dropped = {*self.stage_axes}
        place = self._map(
            lambda spec: to_spec(
                [tuple(a for a in as_tuple(dim) if a not in dropped) for dim in spec]
            )
        )
        return replace(place, stage_axes=())

    def _map(self, function: Callable[[P], P]) -> Placement:
        """The placement with other specs, in all four roles."""
        roles = ("stored", "used", "gradient", "optimizer")
        specs: dict[str, Any] = {r: function(getattr(self, r)) for r in roles}
        return replace(self, **specs)

    @property
    def is_gathered(self) -> bool:
        """True if the computation uses it in another layout than it is stored in."""
        return self.used != self.stored or self.gradient != self.stored


class Staged(NamedTuple):
    """A `Stack` that runs in stages."""

    path: tuple[Hashable, ...]  # of the stack, in the model
    is_even: bool  # all stages have as many layers


_ROWS, _COLUMNS = 8, 128
"""A tile of a TPU, over the last two dims."""


def cheapest_dim(
    dims: Sequence[int], shape: Sequence[int], size: int
) -> tuple[int, bool]:
    """The dim that ``size`` divides and whose gather copies the least.

    Returns the dim, and whether its shards are whole tiles.
    """
    last = len(shape) - 1

    # A gather puts whole tiles one after the other; other shards it copies. A last
    # dim of some rows' length is laid out as rows: its gather is cheap, the product of
    # its transpose a little less. Estimated cycles of 4 layers of Llama 2 7B over 64
    # v5p chips, (4096, 11008) and (11008, 4096) split to 172 columns and 172 rows: 372
    # million; to 64 rows and 172 rows: 332; to 64 rows and 64 columns: 318.
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
    """The dim that axes of stages split in place of layers, and why this one.

    ``taken`` has the mesh axes that other claims give to each dim; arrays of fewer
    elements than ``min_size`` stay whole.
    """
    sizes, name = mesh.shape, "+".join(axes)
    size = math.prod(sizes[axis] for axis in axes)

    def part(dim: int) -> int:
        return info.shape[dim] // math.prod(sizes[axis] for axis in taken[dim])

    fitting = [d for d in range(1, len(taken)) if part(d) and part(d) % size == 0]
    # As with FSDP, each array would be a separate message.
    if not fitting or info.size < min_size:
        return None, f"{name}={size} does not split the layers: whole on all stages"
    # A dim of another axis is taken only if all dims have one.
    free = [d for d in fitting if not taken[d]] or fitting
    dim, _ = cheapest_dim(free, [part(d) for d in range(len(taken))], size)
    return dim, f"{name}: dim {dim}, for it does not split the layers"


def place_array(
    path: tuple[Hashable, ...],
    info: ArrayInfo,
    staged: Staged | None,
    place: Callable[[ArrayInfo], Placement],
) -> Placement:
    """The placement of an array of a model, some of whose layers may run in stages."""
    if staged is None:
        return place(info)
    is_staged = path[: len(staged.path)] == staged.path
    info = replace(info, splits_layers=is_staged and staged.is_even)
    return replace(place(info), is_staged=is_staged)
