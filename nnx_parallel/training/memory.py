"""An allocator's error, and the changes that would have fit."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import jax

from nnx_parallel.errors import DeviceMemoryError
from nnx_parallel.precision import array_bytes
from nnx_parallel.state import StatePlan

_advisers: list[Callable[[Any, Any, str], str]] = []


def advise_with(adviser: Callable[[Any, Any, str], str]) -> None:
    """Sets the function that knows which changes fit; the plan module sets it.

    It is called with the Trainer, the first batch and the error's text.
    """
    _advisers[:] = [adviser]


@contextlib.contextmanager
def explaining_memory(
    plan: StatePlan,
    num_microbatches: int,
    temporary_bytes: int | None,
    run: tuple[Any, Any] | None = None,
) -> Iterator[None]:
    """Turns an error of the allocator into a `DeviceMemoryError` with remedies.

    ``temporary_bytes`` are the compiled step's temporary bytes on each device, if
    known; ``run`` is the Trainer and its first batch.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # XLA's status is only in the text: all its errors are of one class.
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
            raise
        reason = text.strip().splitlines()[0]
        advice = _advice(plan, num_microbatches, temporary_bytes)
        if run is not None and run[1] is not None:
            # A failure of the adviser must not hide the error.
            with contextlib.suppress(Exception):
                advice = "\n".join(adviser(*run, text) for adviser in _advisers)
        raise DeviceMemoryError(f"Out of device memory: {reason}\n{advice}") from error


def _advice(plan: StatePlan, num_microbatches: int, temporary: int | None) -> str:
    state, num_devices = plan.abstract, plan.layout.mesh.size
    trees = jax.tree.leaves(state.params), jax.tree.leaves(state.opt_state)
    params, optimizer = (
        sum(array_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in arrays)
        for arrays in trees
    )
    whole = sum(array_bytes(x.shape, x.dtype) for x in chain(*trees))
    text = (
        f"On each device: parameters {params:,} bytes, as many or more for gradients, "
        f"optimizer state {optimizer:,} bytes.\n"
    )
    half = ""
    if temporary is not None:
        text += f"Gradients and activations of the step: {temporary:,} bytes.\n"
        half = f", by up to {temporary // 2:,} bytes"
    text += (
        f"Less for activations: num_microbatches={2 * num_microbatches}{half}; or "
        "remat='full'."
    )
    # FSDP leaves each device its share of the whole; it saves the replicas.
    if (saved := params + optimizer - whole // num_devices) > 0:
        text += (
            f"\nLess for the state: strategy=FSDP() over {num_devices} devices, by "
            f"{saved:,} bytes on each."
        )
    return text
