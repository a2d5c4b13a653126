"""Tensor parallelism: each matmul is split over devices."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from nnx_parallel.errors import suggests_names
from nnx_parallel.sharding.layout import Claims
from nnx_parallel.sharding.rules import Rules
from nnx_parallel.strategies.base import Strategy

TensorOverlap = Literal["ring", "halves"]
"""The ways in which `TensorParallel` sends activations during matmuls."""

TENSOR_NAMES = ("heads", "kv_heads", "mlp", "vocab")
"""Names of dims that `TensorParallel` splits."""


@suggests_names
@dataclass(frozen=True, repr=False)
class TensorParallel(Strategy):
    """Tensor parallelism: the axis ``tensor`` splits heads, hidden units, vocabulary.

    Kernels into ``mlp`` and ``heads`` are split by columns, and kernels out of them by
    rows. A transformer block then all-reduces its activations twice in the forward pass
    and twice in the backward pass [1]. The batch is not split: keep the axis inside one
    machine, and combine it with `FSDP` or `DataParallel`.

    Everything between the matmuls (norms, residuals, dropout) is replicated, unless
    ``sequence`` splits it along ``seq`` [2]. Each all-reduce then becomes an all-gather
    before the matmuls and a reduce-scatter after them. Both forms send the same bytes,
    and with ``sequence`` a device keeps ``1 / size`` of these activations. ``overlap``
    runs these transfers during matmuls. ``"ring"`` runs a transfer during the matmuls
    that need it, with `all_gather_matmul` and `matmul_reduce_scatter`: matmuls of one
    input (query, key and value; up and gate) share a ring, and the gradient of that
    input has one ring too (`nnx_parallel.layers.project`, which our models call).
    ``"halves"`` splits the rows in two halves, and runs the transfers of one half
    during the matmuls of the other half [3]. For Llama-2 7B on 64 TPU v5p with
    ``FSDP(16)``, halves hide 73 % of the bytes, and the compiler estimates 2.00 billion
    cycles for a step. Rings hide 98 %, with 2.54 billion cycles. ``sequence`` without
    overlap hides 32 %, with 2.05 billion cycles (``python -m benchmarks maxtext
    --full``).

    If there are more devices than key heads, and the number of devices is a multiple of
    the number of key heads, each device has the kernels of all key heads.

    The names of a model's dims determine which dims are split. A model without names is
    replicated, with a warning: name its dims by path (`PathNames`). ``sequence`` and
    ``overlap`` need names of activations, from `constrain` or from the layers ``Dense``
    and ``Embed``, and warn if they find none.

    Attributes:
        size: Number of parts; ``None`` uses all remaining devices.
        sequence: True splits activations between the matmuls along ``seq``. A sequence
            is not split if ``size`` does not divide its length.
        overlap: ``ring``: matmuls that gather their input or scatter their output
            overlap with the transfers. ``halves``: layers of a `Stack` run on two
            halves of a device's rows. Rows are not split inside the stages of a
            `Pipeline`. They are not split either if a device has an odd number of rows,
            or if a layer has dropout, state, masks or losses of experts. A layer that
            mixes rows gets different numbers, as with ``num_microbatches``. Both values
            imply ``sequence``.
        rules: Explicit rules for single arrays. A `LogicalRules` changes the meaning of
            a name, for instance ``{"vocab": None}``.

    Raises:
        ValueError: If ``overlap`` has another value.

    Example:
        >>> TensorParallel(4).claims().logical["heads"]
        'tensor'

    References:
        [1] Shoeybi et al., "Megatron-LM", 2019, section 3,
        https://arxiv.org/abs/1909.08053
        [2]: see `all_gather_matmul`.
        [3] Wang et al., "Domino", 2024, section 3, https://arxiv.org/abs/2409.15241
    """

    size: int | None = None
    rules: tuple[Rules, ...] = ()
    _: dataclasses.KW_ONLY
    sequence: bool = False
    overlap: TensorOverlap | None = None

    def __post_init__(self) -> None:
        if self.overlap not in (None, *(modes := [*get_args(TensorOverlap)])):
            raise ValueError(
                f"TensorParallel.overlap is {self.overlap!r}; it must be one of "
                f"{modes}, or None to let the compiler place the collectives. Without "
                "overlap, sequence=True splits activations along seq."
            )

    def claims(self) -> Claims:
        """``tensor`` splits heads, hidden units, vocabulary, and optionally ``seq``."""
        return Claims(
            axis_sizes={"tensor": self.size},
            # Kernels into mlp and heads are split by columns, and kernels out of them
            # by rows. The second product's output is then complete after one sum, and
            # nothing is sent between the two products.
            logical=dict.fromkeys(TENSOR_NAMES, "tensor"),
            activations={"seq": "tensor"} if self.sequence or self.overlap else {},
            overlap=None if self.overlap == "halves" else self.overlap,
            halves=self.overlap == "halves",
            rules=self.rules,
        )
