"""Tensor parallelism: each product is split over devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnx_parallel.sharding import Rules
from nnx_parallel.sharding.rules import MeshAxes
from nnx_parallel.strategies.base import Strategy


@dataclass(frozen=True, repr=False)
class TensorParallel(Strategy):
    """Tensor parallelism: the axis ``tensor`` splits heads, hidden units, vocabulary.

    The kernels into ``mlp`` and ``heads`` are split by columns, those out of them by
    rows; a transformer block then communicates twice forward and twice backward, each
    time an all-reduce of its activations [1]. The batch is not split: keep the axis
    inside one machine, and combine it with `FSDP` or `DataParallel`.

    A model tells which dims those are by naming them. A model without names is
    replicated, which `describe` says; place its arrays with ``rules``.

    Attributes:
        size: Number of parts; ``None`` takes the devices that remain.
        rules: Explicit rules for single arrays; `LogicalRules` change what a name
            means, for instance ``{"vocab": None}``.

    Example:
        >>> TensorParallel(4).logical_axes["heads"]
        'tensor'

    References:
        [1] Shoeybi et al., "Megatron-LM", 2019, section 3,
        https://arxiv.org/abs/1909.08053
    """

    size: int | None = None
    rules: tuple[Rules, ...] = ()

    @property
    def axis_sizes(self) -> Mapping[str, int | None]:
        """``tensor``."""
        return {"tensor": self.size}

    @property
    def logical_axes(self) -> Mapping[str, MeshAxes]:
        """``heads``, ``kv_heads``, ``mlp`` and ``vocab``."""
        return dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tensor")

    @property
    def user_rules(self) -> tuple[Rules, ...]:
        """The rules given."""
        return self.rules
