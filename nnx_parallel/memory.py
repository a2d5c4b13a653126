"""A device without enough memory: what lies on it, and which knob helps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax

from nnx_parallel.errors import DeviceMemoryError
from nnx_parallel.state import StatePlan


@contextlib.contextmanager
def explaining_memory(
    plan: StatePlan, num_microbatches: int, temporary_bytes: int | None
) -> Iterator[None]:
    """Turns an error of the allocator into one that says what lies where.

    Args:
        plan: The place of every array.
        num_microbatches: Of the step.
        temporary_bytes: Of the compiled step on each device, or ``None``.

    Raises:
        DeviceMemoryError: If a device has run out of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
            raise
        reason = text.strip().splitlines()[0]
        advice = _advice(plan, num_microbatches, temporary_bytes)
        raise DeviceMemoryError(f"Out of device memory: {reason}\n{advice}") from error


def _advice(plan: StatePlan, num_microbatches: int, temporary: int | None) -> str:
    state = plan.abstract
    params, optimizer = _shard_bytes(state.params), _shard_bytes(state.opt_state)
    whole = _bytes(state.params) + _bytes(state.opt_state)
    num_devices = plan.layout.mesh.size
    lines = [
        f"On each device: parameters {params:,} bytes, as many or more for gradients, "
        f"optimizer state {optimizer:,} bytes."
    ]
    if temporary is not None:
        lines.append(f"Gradients and activations of the step: {temporary:,} bytes.")
    twice = 2 * num_microbatches
    half = "" if temporary is None else f", by up to {temporary // 2:,} bytes"
    lines.append(
        f"Less for activations: num_microbatches={twice}{half}; or remat='full'."
    )
    saved = params + optimizer - whole // num_devices
    if saved > 0:
        lines.append(
            f"Less for the state: strategy=FSDP() over {num_devices} devices, by "
            f"{saved:,} bytes on each."
        )
    return "\n".join(lines)


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _shard_bytes(tree: Any) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )
