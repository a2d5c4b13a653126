"""Context parallelism: long sequences are split over devices."""

from dataclasses import dataclass
from typing import get_args

from nnx_parallel.collectives.ring import Exchange, SequenceAxis
from nnx_parallel.errors import suggests_names
from nnx_parallel.sharding.layout import Claims
from nnx_parallel.sharding.rules import Rules
from nnx_parallel.strategies.base import Strategy


@suggests_names
@dataclass(frozen=True, repr=False)
class ContextParallel(Strategy):
    """Context parallelism: the axis ``context`` splits the tokens of each sequence.

    A device keeps ``1 / size`` of all activations, so that ``size`` times longer
    sequences fit; the batch is not split. The model is written as for one device.
    Everything works token by token but attention, which sends keys and values over the
    axis, as ``exchange`` says, with the same numbers. Under causal masks devices
    exchange halves of their tokens around it, so that all have the same work.

    Each device sees only its tokens, so gradients are summed over the axis. With
    `FSDP` the training state is split over it too: one gather over both axes, and
    ``1 / (fsdp * size)`` of the state on a device. Alone, or with `DataParallel`, each
    device keeps a copy.

    The step's attention must be `nnx_parallel.layers.attention`: around any other, such
    as ``nnx.MultiHeadAttention``, the partitioner gathers the sequence, which is right
    and needs its memory; `describe` says so. An array as ``mask`` has that effect too.

    Attributes:
        size: Number of parts; ``None`` takes the devices that remain. It must divide
            the sequence, and twice its size should: else causal work is not balanced.
        exchange: The transfers of attention. ``ring``: keys and values from device to
            device [1], each piece sent on before the products with it; their gradients
            travel too. The number of heads does not matter. ``all_to_all``: heads for
            sequence and back [2]; ``size`` must divide the heads (of one tensor shard),
            and any kernel then runs on whole sequences. ``gather``: keys and values
            whole on each device [3], forward and again backward; simple, and cheap with
            few key heads.
        rules: Explicit rules for single arrays.

    Raises:
        ValueError: If the exchange is unknown.

    Example:
        >>> from nnx_parallel import Composite, FSDP
        >>> strategy = Composite(ContextParallel(4), FSDP())
        >>> dict(strategy.make_mesh().shape)
        {'fsdp': 2, 'context': 4}

    References:
        [1] Liu et al., "Ring Attention with Blockwise Transformers", 2023,
        https://arxiv.org/abs/2310.01889
        [2] Jacobs et al., "DeepSpeed Ulysses", 2023, https://arxiv.org/abs/2309.14509
        [3] Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2,
        https://arxiv.org/abs/2407.21783
    """

    size: int | None = None
    exchange: Exchange = "ring"
    rules: tuple[Rules, ...] = ()

    def __post_init__(self) -> None:
        if self.exchange not in (exchanges := list(get_args(Exchange))):
            raise ValueError(
                f"ContextParallel(exchange={self.exchange!r}): valid values are "
                f"{exchanges}."
            )

    def claims(self) -> Claims:
        """``context`` splits ``seq`` of activations, and FSDP's arrays."""
        return Claims(
            axis_sizes={"context": self.size},
            activations={"seq": "context"},
            sequence=SequenceAxis("context", self.exchange),
            rules=self.rules,
        )
