"""Several strategies as one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.mesh import MESH_AXES
from nnx_parallel.sharding.claims import Claims
from nnx_parallel.sharding.rules import Rules
from nnx_parallel.strategies.base import Strategy


@dataclass(frozen=True, init=False)
class Composite(Strategy):
    """Several strategies over one mesh: hybrid, 2D and 3D parallelism.

    Their claims merge: the batch is split over all batch axes, each array over the
    axes that claim its dims. The order of the arguments means nothing; the mesh's
    axes are ordered by how much they communicate.

    Args:
        parts: The strategies, each with mesh axes of its own.
        rules: Explicit rules for single arrays, in addition to those of the parts.

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
        # Flat and in the mesh's order, so that equal composites are equal values.
        flat: list[Strategy] = []
        for part in sorted(parts, key=_mesh_order):
            is_nested = isinstance(part, Composite)
            flat += part.parts if is_nested else (part,)
            rules = (*rules, *(part.rules if is_nested else ()))
        object.__setattr__(self, "parts", tuple(sorted(flat, key=_mesh_order)))
        object.__setattr__(self, "rules", tuple(rules))
        self.claims()  # refuses parts that contradict each other

    def claims(self) -> Claims:
        """Those of all parts, merged.

        Raises:
            PlacementConflictError: If two parts contradict each other.
        """
        claims = [part.claims() for part in self.parts]
        # All rules first: one of any part may decide a name that two others claim.
        rules = self.rules + tuple(rule for each in claims for rule in each.rules)
        owned = (
            replace(each, rules=(), owner=repr(part))
            for part, each in zip(self.parts, claims, strict=True)
        )
        return reduce(or_, owned, Claims(rules=rules))

    def check(self, model: nnx.Module, mesh: Mesh) -> None:
        """Refuses a model that one of the parts cannot run."""
        for part in self.parts:
            part.check(model, mesh)

    def __repr__(self) -> str:
        rules = f", rules={self.rules}" if self.rules else ""
        return f"Composite({', '.join(map(repr, self.parts))}{rules})"


def _mesh_order(strategy: Strategy) -> tuple[int, str]:
    # An axis that is not ours comes first: nothing is known of how much it sends.
    first = next(iter(strategy.claims().axis_sizes))
    return (MESH_AXES.index(first) if first in MESH_AXES else -1, first)
