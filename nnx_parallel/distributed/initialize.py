"""Finds the number of this process, and joins the other processes of the run."""

import ctypes
import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from nnx_parallel.distributed.messages import host_of, is_loopback, join
from nnx_parallel.distributed.runtime import TAGGED, has_backend, tag, tag_logging
from nnx_parallel.errors import ProcessError

COORDINATOR = "NNX_PARALLEL_COORDINATOR"
NUM_PROCESSES = "NNX_PARALLEL_NUM_PROCESSES"
PROCESS_ID = "NNX_PARALLEL_PROCESS_ID"
CLUSTER = "NNX_PARALLEL_CLUSTER"
"""Variable that says that JAX can find the processes, if no other does (TPUs)."""

_VARIABLES = (
    (COORDINATOR, NUM_PROCESSES, PROCESS_ID),
    ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
# If any of these variables is set, JAX can find the other processes.
_CLUSTERS = {
    CLUSTER, "OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES",
    "MEGASCALE_COORDINATOR_ADDRESS", "JOBSET_NAME", "CLOUD_TPU_TASK_ID",
}  # fmt: skip
# A batch script, or a shell on a node, runs as one process and has only some of these
# variables. The processes that `srun` starts have all of them.
_SLURM_STEP = {"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_NTASKS"}
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class ProcessSpec(NamedTuple):
    """Arguments of `initialize` for a process; JAX finds values that are ``None``."""

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
    """Joins the other processes of a run; does nothing if there is only one process.

    Call it first in the script, before any code counts devices. Without arguments the
    process gets its number from ``python -m nnx_parallel launch``, or, through JAX,
    from Slurm, Open MPI, a Kubernetes JobSet or a TPU pod. From then on an uncaught
    exception ends the process at once, and the loss of any process ends all others
    within seconds, instead of leaving them waiting.

    Args:
        coordinator_address: ``host:port`` of process 0, where JAX's coordinator
            listens. Write an IPv6 address in brackets. Other machines cannot reach a
            loopback address.
        num_processes: Number of processes.
        process_id: Number of this process, from 0.
        local_device_ids: Devices of this machine that belong to this process.
        start_seconds: Longest wait for all processes to start.
        heartbeat_seconds: Silence after which a process counts as dead. The death of a
            process is noticed at once anyway; this time is for machines that vanish.
        shutdown_seconds: Longest time that a process that has ended waits for the
            others.

    Raises:
        ProcessError: If devices have been counted already, or if only some of
            coordinator address, process number and process count are known.

    Example:
        >>> initialize()  # with one process: nothing happens
    """
    if os.environ.get(TAGGED) == str(os.getppid()):
        _outlive_launcher()
    given = ProcessSpec(coordinator_address, num_processes, process_id)
    spec = find_process(given, os.environ)
    if jax.distributed.is_initialized():
        join()
        return
    if spec is None or spec.num_processes == 1:
        return
    _check(spec)
    address = spec.coordinator_address
    # JAX would listen on all interfaces, although only this machine can reach a
    # loopback address.
    is_local = address is not None and is_loopback(host_of(address))
    jax.distributed.initialize(
        *spec,
        local_device_ids=local_device_ids,
        initialization_timeout=start_seconds,
        heartbeat_timeout_seconds=heartbeat_seconds,
        shutdown_timeout_seconds=shutdown_seconds,
        coordinator_bind_address=address if is_local else None,
    )
    if tag():
        tag_logging()
    join()


class _Pipe(io.FileIO):
    """Output of this process, which is discarded once the launcher is gone."""

    is_broken = False  # True once any pipe of this process is broken

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            # Raising the error would end the fit before it saves.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if not _Pipe.is_broken:
                _Pipe.is_broken = True
                signal.raise_signal(signal.SIGTERM)
            return len(data)


def _outlive_launcher() -> None:
    """Arranges for a SIGTERM when the launcher dies; a fit then saves and ends."""
    # A killed launcher cannot forward a signal.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # otherwise the script replaced it
            stream.flush()
            pipe = _Pipe(stream.fileno(), "w", closefd=False)
            # Python's unbuffered streams are built in the same way.
            unbuffered = io.TextIOWrapper(
                pipe, stream.encoding, stream.errors, write_through=True
            )
            setattr(sys, name, unbuffered)


def find_process(given: ProcessSpec, env: Mapping[str, str]) -> ProcessSpec | None:
    """Finds the number of this process; ``None`` if it is the only process.

    The caller's values take precedence over those in the environment.

    Raises:
        ProcessError: If a variable that must be an integer is not.

    Example:
        >>> env = {"JAX_COORDINATOR_ADDRESS": "host:1234",
        ...     "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
        >>> find_process(ProcessSpec(), env).process_id
        1
    """
    if given != ProcessSpec():
        return given
    for address, *numbers in _VARIABLES:
        if {address, *numbers} <= env.keys():
            found = (_integer(env, name) for name in numbers)
            return ProcessSpec(env[address], *found)
    if not (env.keys() >= _SLURM_STEP or env.keys() & _CLUSTERS):
        return None
    # If the cluster says that the run has one process, no service is needed.
    sizes = [env.get(n) for n in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    workers = env.get("TPU_WORKER_HOSTNAMES")
    if workers is not None and "MEGASCALE_COORDINATOR_ADDRESS" not in env:
        sizes.append(str(len(workers.split(","))))
    return None if {*sizes} - {None} == {"1"} else ProcessSpec()


def _check(spec: ProcessSpec) -> None:
    if has_backend():
        raise ProcessError(
            f"initialize() came too late: JAX has started and found "
            f"{jax.device_count()} devices. Call it first in the script, before "
            "anything that touches an array or a device."
        )
    address, count, number = spec
    if None in spec and spec != ProcessSpec():
        raise ProcessError(
            f"initialize() knows coordinator_address={address!r}, "
            f"num_processes={count!r}, process_id={number!r}. Give all three, or none "
            "to have them found."
        )
    if count is not None and number is not None and not 0 <= number < count:
        raise ProcessError(
            f"process_id={number} of num_processes={count}. Valid: 0 to {count - 1}."
        )


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ProcessError(
            f"{name}={environment[name]!r} in the environment. It must be an integer."
        ) from None
