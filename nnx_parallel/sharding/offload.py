"""Arrays of a training state that wait in the host's memory while no step needs them.

A placement has a memory kind beside its spec: ``device``, or ``pinned_host``, which an
accelerator reads and writes by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from jax.sharding import Mesh

from nnx_parallel.errors import OffloadError, suggests_names

HOST = "pinned_host"

Kept = Literal["block_inputs"]
"""Activations that can wait on the host."""


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Offload:
    """Chooses arrays for pinned host memory, in shards as on the devices [1].

    A step brings the optimizer's arrays in, updates them and sends them back in parts,
    one layer of a `Stack` at a time, so that a device holds the arrays of one layer.
    The arithmetic is the same, and checkpoints interchange. Per step each of these
    bytes goes in and out once over the host's link: worth it where the state does not
    fit, or makes room for a larger batch. Stored parameters stay on the device, and
    with mixed precision these are the float32 ones.

    An optimizer whose update of an array looks at all of it (Adafactor, LAMB, Muon), or
    at the moments of all arrays (clipping after Adam, `optax.MultiSteps`), gets whole
    arrays at once, as long as the update lasts.

    Attributes:
        optimizer: Arrays of the optimizer's state that belong to a parameter. Counters
            and hyperparameters stay on the devices.
        activations: ``"block_inputs"``: the input of each block of a `Stack`, which
            remat keeps for the backward pass.

    Raises:
        OffloadError: If a value is unknown, or nothing would be offloaded.

    Example:
        >>> Offload(activations="block_inputs")
        Offload(optimizer=True, activations='block_inputs')

    References:
        [1] Ren et al., "ZeRO-Offload", 2021, section 4,
        https://arxiv.org/abs/2101.06840
    """

    optimizer: bool = True
    activations: Kept | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, bool):
            raise OffloadError(
                f"Offload got optimizer={self.optimizer!r}. It must be True or False."
            )
        if self.activations not in (None, *get_args(Kept)):
            raise OffloadError(
                f"Offload got activations={self.activations!r}. It must be one of "
                f"{list(get_args(Kept))}, or None to keep them on the devices."
            )
        if not self.optimizer and self.activations is None:
            raise OffloadError(
                "Offload(optimizer=False) offloads nothing. Give "
                "activations='block_inputs', or pass offload=None."
            )


def check_host_memory(mesh: Mesh) -> None:
    """Refuses a mesh whose devices cannot reach pinned memory of their host.

    Raises:
        OffloadError: If they cannot; it lists the kinds of memory that they reach.
    """
    device = mesh.devices.flat[0]
    # A described slice, without real devices, answers the same.
    check_kinds([m.kind for m in device.addressable_memories()], device.device_kind)


def check_kinds(kinds: Sequence[str], device_kind: str) -> None:
    """Refuses kinds of memory without the host's; see `check_host_memory`."""
    if HOST not in kinds:
        raise OffloadError(
            f"Offload needs memory of kind {HOST!r}. Devices of kind {device_kind!r} "
            f"reach {sorted(kinds)} here. Leave offload out; FSDP() over more devices "
            "divides the same arrays."
        )
