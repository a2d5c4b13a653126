"""Data parallelism: the batch is split, and the training state is copied."""

from dataclasses import dataclass

from nnx_parallel.errors import suggests_names
from nnx_parallel.sharding.layout import Claims
from nnx_parallel.sharding.rules import Rules
from nnx_parallel.strategies.base import Strategy


@suggests_names
@dataclass(frozen=True, repr=False)
class DataParallel(Strategy):
    """Data parallelism: the axis ``data`` splits the batch; each device has a replica.

    In each microbatch every gradient is all-reduced: a device sends about twice the
    gradient's bytes. The gradient of a tied table is all-reduced twice, once for each
    use. Parameters, gradients and optimizer state take the same memory on any number of
    devices; only activations shrink. Use `FSDP` if parameters, gradients and optimizer
    state do not fit.

    Attributes:
        size: Number of replicas; ``None`` uses all remaining devices.
        rules: Explicit rules for single arrays.

    Example:
        >>> DataParallel().make_mesh().axis_names
        ('data',)
    """

    size: int | None = None
    rules: tuple[Rules, ...] = ()

    def claims(self) -> Claims:
        """``data`` splits the batch."""
        # There is no claim on the training state: each device has all of it.
        return Claims(axis_sizes={"data": self.size}, batch=("data",), rules=self.rules)
