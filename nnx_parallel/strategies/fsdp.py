"""Fully sharded data parallelism: ZeRO-1, 2 and 3."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from nnx_parallel.errors import suggests_names
from nnx_parallel.sharding.layout import Claims
from nnx_parallel.sharding.rules import FSDPRules, Rules, ZeroAxis, ZeroKind
from nnx_parallel.strategies.base import Strategy


@suggests_names
@dataclass(frozen=True, repr=False)
class FSDP(Strategy):
    """Fully sharded data parallelism: one mesh axis splits batch and training state.

    Each parameter is sharded along a free dim that the axis divides. `FSDPRules`
    chooses the dim whose gather makes the fewest copies. Usually this is the dim that a
    product contracts. The gradient and the optimizer state are sharded in the same way.
    The parameter is all-gathered just before use, and again for the backward pass; its
    gradient is reduce-scattered. A device keeps ``1 / size`` of the training state and
    sends at most 1.5 times the bytes of `DataParallel` per step [1].

    A `Stack` gathers one layer at a time, just before it runs, in both passes. With
    ``prefetch`` it also gathers the first kernel of the next layer in advance [2].

    Attributes:
        size: Number of shards; ``None`` uses all remaining devices.
        shard: The state that is sharded. ``params`` (ZeRO-3): parameters, gradients and
            optimizer state. ``gradients`` (ZeRO-2): parameters are replicated. A step
            sends no more bytes than with `DataParallel`, except that updated parameters
            are gathered in the dtype in which they are stored. ``optimizer`` (ZeRO-1):
            gradients are replicated too, and all-reduced.
        min_size: Parameters of fewer elements are replicated.
        rules: Explicit rules for single arrays. A rule that names the axis ``fsdp``
            chooses the dim that the axis splits; with a rule that does not name the
            axis, the array is not split over it.
        prefetch: ``"first"``: a `Stack` gathers the parameters of the next layer's
            first product, such as the queries' kernel, while the current layer runs; a
            layer gathers the rest itself, during its products. Prefetch is for TPUs on
            which SparseCores run the gathers (docs/benchmarks.md has figures). It needs
            ``shard="params"``. In the stages of a `Pipeline`, `Pipeline.gather` decides
            instead. A stack does not prefetch if it has one layer, or if its input is
            not a floating-point array. ``None``: no prefetch.

    Raises:
        ValueError: If a value is invalid, or if there is nothing to prefetch.

    Example:
        >>> FSDP(shard="optimizer").make_mesh().axis_names
        ('fsdp',)

    References:
        [1] Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
        Parameter Models", 2020, sections 5 and 7, https://arxiv.org/abs/1910.02054
        [2] Zhao et al., "PyTorch FSDP", 2023, section 3.3,
        https://arxiv.org/abs/2304.11277
    """

    size: int | None = None
    shard: ZeroKind = "params"
    min_size: int = 1024
    rules: tuple[Rules, ...] = ()
    _: dataclasses.KW_ONLY
    prefetch: Literal["first"] | None = None

    def __post_init__(self) -> None:
        if self.shard not in (kinds := list(get_args(ZeroKind))):
            raise ValueError(f"FSDP(shard={self.shard!r}): valid values are {kinds}.")
        if not isinstance(self.min_size, int) or self.min_size < 0:
            raise ValueError(f"FSDP(min_size={self.min_size!r}): it must be 0 or more.")
        if self.prefetch not in (None, "first"):
            raise ValueError(
                f"FSDP(prefetch={self.prefetch!r}): the valid value is 'first', or "
                "None to gather each layer when it runs. Gathering whole layers ahead "
                "was slower on every compiler."
            )
        if self.prefetch and self.shard != "params":
            raise ValueError(
                f"FSDP(shard={self.shard!r}, prefetch={self.prefetch!r}): parameters "
                "are not sharded, so there is nothing to gather. Leave prefetch out, "
                "or take shard='params'."
            )

    def claims(self) -> Claims:
        """``fsdp`` splits the batch, and the training state that ``shard`` selects."""
        # `shard` selects which specs have the axis. The dim that the axis splits does
        # not depend on `shard`.
        choice = FSDPRules(axis="fsdp", min_size=self.min_size)
        prefetches = self.prefetch is not None
        return Claims(
            axis_sizes={"fsdp": self.size},
            batch=("fsdp",),  # devices that share the state have different rows
            zero=(ZeroAxis(rules=choice, shard=self.shard, prefetches=prefetches),),
            rules=self.rules,
        )
