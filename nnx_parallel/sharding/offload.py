"""Offload: arrays of a training state stay in host memory until a step needs them.

A sharding has a memory kind besides its spec: ``device`` or ``pinned_host``. An
accelerator reads and writes pinned host memory directly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from jax.sharding import Mesh

from nnx_parallel.errors import OffloadError, suggests_names

HOST = "pinned_host"

Kept = Literal["block_inputs"]
"""The activations that can be kept on the host."""


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Offload:
    """Keeps arrays in pinned host memory, sharded as on the devices [1].

    A step moves the optimizer's arrays to the device, updates them and moves them back,
    one layer of a `Stack` at a time, so that a device holds the arrays of only one
    layer. The arithmetic is the same, and a checkpoint can be restored with or without
    offload. Each step sends every offloaded byte over the host's link once in each
    direction. This is worth the time if the state would not fit otherwise, or if the
    freed memory allows a larger batch. Stored parameters stay on the device; with mixed
    precision these are float32.

    Some updates cannot run layer by layer: they read all of an array (Adafactor, LAMB,
    Muon), or the moments of all arrays (clipping after Adam, `optax.MultiSteps`). Then
    the arrays of all layers are on the devices during the update.

    Attributes:
        optimizer: True to offload arrays of the optimizer's state that belong to a
            parameter. Counters and hyperparameters stay on the devices.
        activations: ``"block_inputs"`` to offload the input of each block of a `Stack`,
            which remat saves for the backward pass. ``None``: activations stay on the
            devices.

    Raises:
        OffloadError: If a value is unknown, or if nothing would be offloaded.

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
    """Refuses a mesh if its devices cannot reach pinned memory of their host.

    Raises:
        OffloadError: If they cannot. The message lists the kinds of memory that the
            devices reach.
    """
    device = mesh.devices.flat[0]
    # This works for described devices too, which are not real.
    check_kinds([m.kind for m in device.addressable_memories()], device.device_kind)


def check_kinds(kinds: Sequence[str], device_kind: str) -> None:
    """Refuses kinds of memory if pinned host memory is not among them."""
    if HOST not in kinds:
        raise OffloadError(
            f"Offload needs memory of kind {HOST!r}. Devices of kind {device_kind!r} "
            f"reach {sorted(kinds)} here. Leave offload out; FSDP() over more devices "
            "divides the same arrays."
        )
