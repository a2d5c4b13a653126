"""Data parallelism: the batch is split, the training state is copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnx_parallel.sharding.rules import Rules
from nnx_parallel.strategies.base import Strategy


@dataclass(frozen=True, repr=False)
class DataParallel(Strategy):
    """Data parallelism: the axis ``data`` splits the batch, each device has a replica.

    Each microbatch sends each gradient as an all-reduce, about twice its bytes per
    device; that of a tied table twice, from its two uses. Memory per device does not
    fall with the number of devices, except for activations; use `FSDP` where that is
    too much.

    Attributes:
        size: Number of replicas; ``None`` takes the devices that remain.
        rules: Explicit rules for single arrays.

    Example:
        >>> DataParallel().make_mesh().axis_names
        ('data',)
    """

    size: int | None = None
    rules: tuple[Rules, ...] = ()

    @property
    def axis_sizes(self) -> Mapping[str, int | None]:
        """``data``."""
        return {"data": self.size}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """``data``."""
        return ("data",)

    @property
    def user_rules(self) -> tuple[Rules, ...]:
        """The rules given."""
        return self.rules
