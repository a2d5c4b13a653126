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

    A device keeps ``1 / size`` of all activations, so sequences can be ``size`` times
    as long; the batch is not split. The model is written as for one device. All layers
    except attention work token by token. Attention sends keys and values over the axis,
    in the way that ``exchange`` selects, and computes the same numbers as on one
    device. Under causal masks devices exchange halves of their tokens before and after
    attention, so that all devices have the same work.

    Each device sees only its tokens, so gradients are summed over the axis. With `FSDP`
    the axis splits the training state too: a parameter is gathered over both axes
    together, and a device keeps ``1 / (fsdp * size)`` of the state. Without `FSDP` each
    device keeps a copy of the state.

    The model must call `nnx_parallel.layers.attention`. For any other attention, such
    as ``nnx.MultiHeadAttention``, the partitioner gathers the sequence: the numbers are
    right, but a device needs memory for the whole sequence. `describe` says so. Passing
    an array as ``mask`` has the same effect.

    Attributes:
        size: Number of parts; ``None`` uses all remaining devices. It must divide the
            sequence length. Twice the size should divide it too; otherwise the work of
            causal attention is not balanced.
        exchange: The transfers of attention. ``ring``: keys and values go from device
            to device [1]. A device sends each piece on before it computes with it.
            In the backward pass it sends their gradients too. Any number of heads
            works. ``all_to_all``: a device receives the whole sequence for some of the
            heads, and sends the outputs back [2]. ``size`` must divide the number of
            heads (of one tensor shard). Any attention kernel works, because it sees
            whole sequences. ``gather``: each device gathers all keys and values [3], in
            the forward pass and again in the backward pass; this is simple, and cheap
            with few key heads.
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
        """``context`` splits ``seq`` of activations, and arrays that FSDP splits."""
        return Claims(
            axis_sizes={"context": self.size},
            activations={"seq": "context"},
            sequence=SequenceAxis("context", self.exchange),
            rules=self.rules,
        )
