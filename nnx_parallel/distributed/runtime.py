"""What jax knows of the processes; the only module that asks its internals.

The public functions would count devices, and so start a backend too early.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed, xla_bridge

from nnx_parallel.distributed.addresses import host_of


def process_index() -> int:
    """This process's number."""
    return distributed.global_state.process_id or 0


def process_count() -> int:
    """How many processes there are."""
    return distributed.global_state.num_processes or 1


def coordinator() -> Any:
    """The client of jax's coordination service, or ``None`` before it is started."""
    return distributed.global_state.client


def coordinator_host() -> str:
    """Host of process 0, as all processes reach it."""
    address = distributed.global_state.coordinator_address or "127.0.0.1:0"
    return host_of(address)


def has_backend() -> bool:
    """Whether JAX has counted its devices, after which none can be added."""
    return bool(xla_bridge.backends_are_initialized())
