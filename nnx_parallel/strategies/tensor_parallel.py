"""Tensor parallelism: each product is split over devices."""

import dataclasses
from dataclasses import dataclass
from typing import get_args

from nnx_parallel.collectives.ring import Overlap
from nnx_parallel.sharding.layout import Claims
from nnx_parallel.sharding.rules import Rules
from nnx_parallel.strategies.base import Strategy


@dataclass(frozen=True, repr=False)
class TensorParallel(Strategy):
    """Tensor parallelism: the axis ``tensor`` splits heads, hidden units, vocabulary.

    Kernels into ``mlp`` and ``heads`` are split by columns, those out of them by rows;
    a transformer block then all-reduces its activations twice forward and twice
    backward [1]. The batch is not split: keep the axis inside one machine, and combine
    it with `FSDP` or `DataParallel`.

    All between the products (norms, residuals, dropout) is whole on every device,
    unless ``sequence`` splits it along ``seq`` [2]: an all-reduce then becomes an
    all-gather before the products and a reduce-scatter after them, the same bytes, and
    a device keeps ``1 / size`` of those activations. ``overlap`` runs both during the
    products they feed, as `all_gather_matmul` and `matmul_reduce_scatter`. Products
    that share an input (query, key and value; up and gate) each have a ring: compilers
    merge those that gather it, but its gradient is summed once for each, 3 times into
    attention and twice into a gated MLP. For a GPT on 4 TPU v5p rings send 9.2 GiB a
    step where ``sequence`` alone sends 7.7, and 95 % of it runs during products, where
    none did (``python -m benchmarks overlap``).

    A model says which dims those are by naming them. One without names is replicated,
    of which a warning and `describe` tell: name its dims by path (`PathNames`).

    Attributes:
        size: Number of parts; ``None`` takes the devices that remain.
        sequence: Whether activations between the products are split along ``seq``. A
            length that ``size`` does not divide stays whole.
        overlap: ``ring`` or ``bidirectional``: products that gather their input or
            scatter their output overlap with the transfers; implies ``sequence``.
        rules: Explicit rules for single arrays; `LogicalRules` change what a name
            means, for instance ``{"vocab": None}``.

    Raises:
        ValueError: If ``overlap`` is none of these.

    Example:
        >>> TensorParallel(4).claims().logical["heads"]
        'tensor'

    References:
        [1] Shoeybi et al., "Megatron-LM", 2019, section 3,
        https://arxiv.org/abs/1909.08053
        [2] As of `all_gather_matmul`.
    """

    size: int | None = None
    rules: tuple[Rules, ...] = ()
    _: dataclasses.KW_ONLY
    sequence: bool = False
    overlap: Overlap | None = None

    def __post_init__(self) -> None:
        if self.overlap not in (None, *get_args(Overlap)):
            raise ValueError(
                f"TensorParallel.overlap is {self.overlap!r}; it must be one of "
                f"{list(get_args(Overlap))}, or None for collectives that the compiler "
                "places, with sequence=True to split activations along seq."
            )

    def claims(self) -> Claims:
        """``tensor`` splits heads, hidden units and vocabulary, perhaps ``seq``."""
        return Claims(
            axis_sizes={"tensor": self.size},
            # Into mlp and heads by columns, out of them by rows: a product's output is
            # then whole but for one sum, and nothing is sent between the two.
            logical=dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tensor"),
            activations={"seq": "tensor"} if self.sequence or self.overlap else {},
            overlap=self.overlap,
            rules=self.rules,
        )
