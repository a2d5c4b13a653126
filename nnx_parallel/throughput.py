"""Speed of a run: steps, tokens and FLOPs per second, and the share of the peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.mesh import Device

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""Dense bfloat16 FLOP/s of a device by the start of its ``device_kind``, from the
makers' data sheets."""


def peak_flops(device: Device) -> float | None:
    """Peak bfloat16 FLOP/s of a device, or ``None`` where it is not known."""
    kind = device.device_kind
    known = [name for name in PEAK_FLOPS if kind.startswith(name)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def count_tokens(batch: Any) -> int | None:
    """Tokens in a batch: the elements of its first integer array of two dims.

    ``None`` for a batch without one: then speed is counted in examples.
    """
    for leaf in jax.tree.leaves(batch):
        if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf.size
    return None


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What one step does, to turn its seconds into rates.

    Attributes:
        num_rows: Rows of the global batch.
        num_tokens: Its tokens, or ``None``.
        flops_per_device: Of the compiled step, recomputation included, or ``None``.
        device: A device of the mesh that is this process's.
    """

    num_rows: int
    num_tokens: int | None
    flops_per_device: float | None
    device: Device

    def rates(self, step_seconds: float) -> dict[str, float]:
        """Metrics of a step that took ``step_seconds``.

        ``mfu`` divides the FLOPs of the compiled step by the device's peak. Under
        remat these include the recomputation, which makes it the hardware's rather
        than the model's utilisation.
        """
        rates = {
            "step_seconds": step_seconds,
            "examples_per_second": self.num_rows / step_seconds,
        }
        if self.num_tokens is not None:
            rates["tokens_per_second"] = self.num_tokens / step_seconds
        if self.flops_per_device:
            flops = self.flops_per_device / step_seconds
            rates["tflops_per_device"] = flops / 1e12
            if peak := peak_flops(self.device):
                rates["mfu"] = flops / peak
        if stats := self.device.memory_stats():
            rates["device_memory_bytes"] = float(stats.get("peak_bytes_in_use", 0))
        return rates
