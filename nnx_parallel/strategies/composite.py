"""Several strategies as one."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from nnx_parallel.collectives.ring import Overlap
from nnx_parallel.errors import PlacementConflictError
from nnx_parallel.mesh import MESH_AXES
from nnx_parallel.schedules.schedules import PipelineOptions
from nnx_parallel.sharding.layout import ZeroAxis
from nnx_parallel.sharding.rules import MeshAxes, Rules, logical_items
from nnx_parallel.strategies.base import Strategy


@dataclass(frozen=True, init=False)
class Composite(Strategy):
    """Several strategies over one mesh: hybrid, 2D and 3D parallelism.

    Their answers merge: the batch is split over all batch axes, each array over the
    axes that claim its dims. The order of the arguments means nothing; the mesh's
    axes are ordered by how much they communicate.

    Args:
        parts: The strategies, each with mesh axes of its own.
        rules: Explicit rules for single arrays, beside those of the parts.

    Raises:
        PlacementConflictError: If two parts use one mesh axis, or give one name to
            different axes.

    Example:
        >>> from nnx_parallel import FSDP, TensorParallel
        >>> strategy = Composite(FSDP(), TensorParallel(2))
        >>> dict(strategy.make_mesh().shape)
        {'fsdp': 4, 'tensor': 2}
        >>> strategy == Composite(TensorParallel(2), FSDP())
        True
    """

    parts: tuple[Strategy, ...]
    rules: tuple[Rules, ...] = ()

    def __init__(self, *parts: Strategy, rules: tuple[Rules, ...] = ()) -> None:
        if not parts:
            raise ValueError("Composite() has no strategies. Give it at least one.")
        ordered = sorted(parts, key=_mesh_order)
        nested = tuple(r for s in ordered for r in _own_rules(s))
        flat = sorted((p for s in ordered for p in _flatten(s)), key=_mesh_order)
        object.__setattr__(self, "parts", tuple(flat))
        object.__setattr__(self, "rules", tuple(rules) + nested)
        _check_axes(self.parts)
        _check_names(self.parts, {name for name, _ in logical_items(self.user_rules)})

    @property
    def axis_sizes(self) -> Mapping[str, int | None]:
        """Those of all parts."""
        return {a: size for p in self.parts for a, size in p.axis_sizes.items()}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Those of all parts."""
        return tuple(axis for p in self.parts for axis in p.batch_axes)

    @property
    def logical_axes(self) -> Mapping[str, MeshAxes]:
        """Those of all parts."""
        return {n: axes for p in self.parts for n, axes in p.logical_axes.items()}

    @property
    def activation_axes(self) -> Mapping[str, MeshAxes]:
        """Those of all parts."""
        return {n: axes for p in self.parts for n, axes in p.activation_axes.items()}

    @property
    def overlap_mode(self) -> Overlap | None:
        """That of the part that overlaps."""
        return next((p.overlap_mode for p in self.parts if p.overlap_mode), None)

    @property
    def zero_axes(self) -> tuple[ZeroAxis, ...]:
        """Those of all parts."""
        return tuple(zero for p in self.parts for zero in p.zero_axes)

    @property
    def user_rules(self) -> tuple[Rules, ...]:
        """Its own and those of all parts."""
        return self.rules + tuple(r for p in self.parts for r in p.user_rules)

    @property
    def pipeline(self) -> PipelineOptions | None:
        """That of the part that pipelines; axes are distinct, so there is only one."""
        return next((p.pipeline for p in self.parts if p.pipeline), None)

    def __repr__(self) -> str:
        rules = f", rules={self.rules}" if self.rules else ""
        return f"Composite({', '.join(map(repr, self.parts))}{rules})"


def _flatten(strategy: Strategy) -> tuple[Strategy, ...]:
    return strategy.parts if isinstance(strategy, Composite) else (strategy,)


def _own_rules(strategy: Strategy) -> tuple[Rules, ...]:
    return strategy.rules if isinstance(strategy, Composite) else ()


def _mesh_order(strategy: Strategy) -> tuple[int, str]:
    first = next(iter(strategy.axis_sizes))
    return (MESH_AXES.index(first) if first in MESH_AXES else -1, first)


def _check_axes(parts: Sequence[Strategy]) -> None:
    owners: dict[str, Strategy] = {}
    for part in parts:
        for axis in part.axis_sizes:
            if axis in owners:
                raise PlacementConflictError(
                    f"Both {owners[axis]!r} and {part!r} use the mesh axis {axis!r}. "
                    "Each part of a Composite needs axes of its own: keep one of them "
                    "and give it the product of the sizes."
                )
            owners[axis] = part


def _check_names(parts: Sequence[Strategy], decided: Container[str]) -> None:
    """Two parts must agree on a name unless the user has decided it."""
    meanings: dict[str, tuple[MeshAxes, Strategy]] = {}
    for part in parts:
        for name, axes in part.logical_axes.items():
            other, owner = meanings.get(name, (axes, part))
            if other != axes and name not in decided:
                raise PlacementConflictError(
                    f"{owner!r} gives dims named {name!r} to {other!r}, {part!r} gives "
                    f"them to {axes!r}. Decide with rules=(LogicalRules({{{name!r}: "
                    "...}),)."
                )
            meanings[name] = (axes, part)
