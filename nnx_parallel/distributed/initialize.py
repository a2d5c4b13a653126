"""Starts the processes of a run: found from the environment, or told."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from nnx_parallel.distributed.addresses import host_of, is_loopback
from nnx_parallel.distributed.messages import join
from nnx_parallel.distributed.runtime import (
    TAGGED,
    has_backend,
    process_count,
    tag_logging,
)
from nnx_parallel.errors import ProcessError

COORDINATOR = "NNX_PARALLEL_COORDINATOR"
NUM_PROCESSES = "NNX_PARALLEL_NUM_PROCESSES"
PROCESS_ID = "NNX_PARALLEL_PROCESS_ID"
CLUSTER = "NNX_PARALLEL_CLUSTER"
"""Set where jax can ask the cluster for all of it, and no variable tells that it can:
a TPU VM has a server for that."""

_VARIABLES = (
    (COORDINATOR, NUM_PROCESSES, PROCESS_ID),
    ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
# What tells that there is a cluster which jax itself can ask for the rest.
_CLUSTERS = (
    CLUSTER,
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_COMM_WORLD_SIZE",
    "TPU_WORKER_HOSTNAMES",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "JOBSET_NAME",
    "CLOUD_TPU_TASK_ID",
)
# A batch script and a shell have a job too, but run once: srun's processes have all.
_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_NTASKS")
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process's place among all; ``None`` where jax is to find it.

    Attributes:
        coordinator_address: ``host:port`` of process 0.
        num_processes: How many there are.
        process_id: This one's number.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    start_seconds: int = 300,
    heartbeat_seconds: int = 30,
    shutdown_seconds: int = 300,
) -> None:
    """Joins the other processes of a run; does nothing where there is only one.

    Call it first in the script, before anything counts devices. Without arguments the
    place of the process comes from ``python -m nnx_parallel launch``, or from Slurm,
    Open MPI, a Kubernetes JobSet or a TPU pod, as jax finds it. From then on an
    exception that nobody catches ends the process at once, and the loss of any process
    ends all others within seconds, instead of leaving them waiting.

    Args:
        coordinator_address: ``host:port`` of process 0, where jax's coordinator
            listens; an IPv6 address in brackets. On a loopback address nobody else
            can reach it.
        num_processes: How many processes there are.
        process_id: This one's number, from 0.
        local_device_ids: The devices of this machine that are this process's.
        start_seconds: How long to wait for all processes to start.
        heartbeat_seconds: After how long a silent process counts as dead. A process
            that dies is noticed at once; this is for machines that vanish.
        shutdown_seconds: How long a process that has ended waits for the others: for
            one that still exports a model, say.

    Raises:
        ProcessError: If devices have been counted already, or only some of address,
            number and count are known.

    Example:
        >>> initialize()  # with one process: nothing happens
    """
    given = Place(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
    )
    _follow_launcher()
    place = find_place(given, os.environ)
    if place is None or place.num_processes == 1 or jax.distributed.is_initialized():
        if jax.distributed.is_initialized():
            join()
        return
    _check_place(place)
    address = place.coordinator_address
    bind = None if address is None or not is_loopback(host_of(address)) else address
    jax.distributed.initialize(
        address,
        place.num_processes,
        place.process_id,
        local_device_ids=local_device_ids,
        initialization_timeout=start_seconds,
        heartbeat_timeout_seconds=heartbeat_seconds,
        shutdown_timeout_seconds=shutdown_seconds,
        coordinator_bind_address=bind,
    )
    if process_count() > 1:
        if not os.environ.get(TAGGED):
            tag_logging()
        join()


def find_place(given: Place, environment: Mapping[str, str]) -> Place | None:
    """The process's place; ``None`` where nothing speaks of several processes.

    Args:
        given: What the caller has said; it comes first.
        environment: The environment variables.

    Raises:
        ProcessError: If a number in the environment is none.

    Example:
        >>> find_place(Place(), {"JAX_COORDINATOR_ADDRESS": "host:1234",
        ...     "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}).process_id
        1
    """
    if given != Place():
        return given
    for address, count, number in _VARIABLES:
        if address in environment and count in environment and number in environment:
            return Place(
                coordinator_address=environment[address],
                num_processes=_integer(environment, count),
                process_id=_integer(environment, number),
            )
    is_step = all(name in environment for name in _SLURM_STEP)
    if is_step or any(name in environment for name in _CLUSTERS):
        return _cluster_place(environment)
    return None


def _cluster_place(environment: Mapping[str, str]) -> Place | None:
    """Left to jax, but for clusters that say that this process is alone."""
    sizes = [environment.get(n) for n in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    workers = environment.get("TPU_WORKER_HOSTNAMES")
    if workers is not None and "MEGASCALE_COORDINATOR_ADDRESS" not in environment:
        sizes.append(str(len(workers.split(","))))
    known = [size for size in sizes if size is not None]
    return None if known and set(known) == {"1"} else Place()


def _check_place(place: Place) -> None:
    if has_backend():
        raise ProcessError(
            f"initialize() came too late: JAX has started and found "
            f"{jax.device_count()} devices. Call it first in the script, before "
            "anything that touches an array or a device."
        )
    values = (place.coordinator_address, place.num_processes, place.process_id)
    if None in values and any(value is not None for value in values):
        raise ProcessError(
            f"initialize() knows coordinator_address={values[0]!r}, "
            f"num_processes={values[1]!r}, process_id={values[2]!r}. Give all three, "
            "or none to have them found."
        )
    count, number = place.num_processes, place.process_id
    if count is not None and number is not None and not 0 <= number < count:
        raise ProcessError(
            f"process_id={number} of num_processes={count}. Valid: 0 to {count - 1}."
        )


def _follow_launcher() -> None:
    """Has the system send SIGTERM when the launcher that started this process dies."""
    if sys.platform == "linux" and os.environ.get(TAGGED) == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ProcessError(
            f"{name}={environment[name]!r} in the environment. It must be an integer."
        ) from None
