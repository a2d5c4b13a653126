"""One call of a `Stack`, as data for whoever runs its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nnx_parallel.collectives import Mode
from nnx_parallel.layers.remat import Remat
from nnx_parallel.sharding import Placement


@dataclass(frozen=True, kw_only=True)
class StackCall:
    """One call of a `Stack`, for whoever runs its layers.

    Attributes:
        block: ``(params, others, x, args, slot) -> (x, others, slot)`` of one layer.
        inner: The same, of parameters that have been gathered.
        params: The layers' parameters by path, each with a leading ``layers`` dim.
        others: Their other variables, likewise.
        x: Input of the first layer.
        args: Passed to every layer as they are.
        scanned: A pytree with a leading ``layers`` dim, or ``None``.
        remat: What a layer keeps for the backward pass.
        placements: Placement of a layer's parameters, by path; where one says so, the
            block gathers. What is gathered is never kept.
        prefetch: How the next layer's parameters are gathered beside the present
            layer, or ``None``.
    """

    block: Callable[..., tuple[Any, dict, Any]]
    inner: Callable[..., tuple[Any, dict, Any]]
    params: dict
    others: dict
    x: Any
    args: tuple
    scanned: Any
    remat: Remat
    placements: dict[Any, Placement]
    prefetch: Mode | None

    @property
    def gathers(self) -> bool:
        """Whether layers gather parameters."""
        return any(p.is_gathered for p in self.placements.values())
