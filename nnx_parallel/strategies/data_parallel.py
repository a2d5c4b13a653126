"""Data parallelism: the batch is split, the training state is copied."""

from dataclasses import dataclass

from nnx_parallel.sharding.layout import Claims
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

    def claims(self) -> Claims:
        """``data`` splits the batch."""
        # No claim on state: each device has all of it.
        return Claims(axis_sizes={"data": self.size}, batch=("data",), rules=self.rules)
