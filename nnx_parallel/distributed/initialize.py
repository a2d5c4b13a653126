"""Finds the number of this process, and joins the other processes of the run."""

import ctypes
import io
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from nnx_parallel.distributed.messages import (
    HEARTBEAT_SECONDS,
    host_of,
    is_loopback,
    join,
)
from nnx_parallel.distributed.runtime import TAGGED, has_backend, tag, tag_logging
from nnx_parallel.errors import ProcessError

COORDINATOR = "NNX_PARALLEL_COORDINATOR"
NUM_PROCESSES = "NNX_PARALLEL_NUM_PROCESSES"
PROCESS_ID = "NNX_PARALLEL_PROCESS_ID"
CLUSTER = "NNX_PARALLEL_CLUSTER"
"""Variable that says that JAX can find the processes, for TPUs without another one."""

_VARIABLES = (
    (COORDINATOR, NUM_PROCESSES, PROCESS_ID),
    ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
# If any of these variables is set, JAX can find the other processes.
_CLUSTERS = {
    CLUSTER, "OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES",
    "MEGASCALE_COORDINATOR_ADDRESS", "JOBSET_NAME", "CLOUD_TPU_TASK_ID",
}  # fmt: skip
# Processes that `srun` starts have all of these variables. A batch script, or a shell
# on a node, is one process and has only some of them.
_SLURM_STEP = {"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_NTASKS"}
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class ProcessSpec(NamedTuple):
    """Arguments of `initialize` for one process; JAX finds the values for ``None``."""

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
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    shutdown_seconds: int = 300,
) -> None:
    """Joins the other processes of a run; does nothing if there is only one process.

    Call it at the start of the script, before any code counts devices. Without
    arguments, the process gets its number from ``python -m nnx_parallel launch``, or,
    through JAX, from Slurm, Open MPI, a Kubernetes JobSet or a TPU pod. After the call,
    an uncaught exception ends the process at once. The loss of any process ends all
    other processes within seconds, instead of leaving them waiting.

    Args:
        coordinator_address: ``host:port`` on the machine of process 0, where JAX's
            coordinator listens. Write an IPv6 address in brackets. Other machines
            cannot reach a loopback address.
        num_processes: Number of processes.
        process_id: Number of this process, from 0.
        local_device_ids: Devices of this machine that this process uses.
        start_seconds: Longest time in which all processes must start.
        heartbeat_seconds: If a machine does not answer for this time, it counts as
            lost, and all processes end. The death of a process is noticed at once. A
            machine answers even if its processes are busy, so only a break of the
            network or a paused machine can be mistaken for a loss.
        shutdown_seconds: Longest time that a process waits at its end for the other
            processes.

    Raises:
        ProcessError: If devices have already been counted, if only some of the
            coordinator address, the number and the count of processes are known, or if
            a number is invalid.

    Example:
        >>> initialize()  # does nothing if there is only one process
    """
    if os.environ.get(TAGGED) == str(os.getppid()):
        _outlive_launcher()
    if heartbeat_seconds < 1:
        raise ProcessError(
            f"heartbeat_seconds={heartbeat_seconds} is invalid. It must be at least 1."
        )
    given = ProcessSpec(coordinator_address, num_processes, process_id)
    spec = find_process(given, os.environ)
    if jax.distributed.is_initialized():
        join()
        return
    if spec is None or spec.num_processes == 1:
        return
    _check(spec)
    address = spec.coordinator_address
    # By default JAX listens on all interfaces. This is not needed for a loopback
    # address, because all processes are then on this machine.
    is_local = address is not None and is_loopback(host_of(address))
    jax.distributed.initialize(
        *spec,
        local_device_ids=local_device_ids,
        initialization_timeout=start_seconds,
        # Otherwise JAX would abort the processes before they print a reason.
        heartbeat_timeout_seconds=3 * heartbeat_seconds,
        shutdown_timeout_seconds=shutdown_seconds,
        coordinator_bind_address=address if is_local else None,
    )
    if tag():
        tag_logging()
    if (client := join()) is not None:
        client.set_heartbeat(heartbeat_seconds)


class _Pipe(io.FileIO):
    """The stdout or stderr of this process; discards output after the launcher dies."""

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
    """Requests a SIGTERM for the launcher's death, so that a fit saves and ends."""
    # A launcher that was killed cannot forward a signal.
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
    """Finds the number of this process; returns ``None`` if there is no other process.

    The values in ``given`` take precedence over the environment.

    Raises:
        ProcessError: If a variable that must be an integer is not, or if only some of
            the variables are set.

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
        if some := {address, *numbers} & env.keys():
            raise ProcessError(
                f"Of the variables {address}, {', '.join(numbers)}, only "
                f"{', '.join(sorted(some))} is set. Set all three, or none."
            )
    if not (env.keys() >= _SLURM_STEP or env.keys() & _CLUSTERS):
        return None
    # If the cluster says that the run has one process, JAX's coordination service is
    # not needed.
    sizes = [env.get(n) for n in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    workers = env.get("TPU_WORKER_HOSTNAMES")
    if workers is not None and "MEGASCALE_COORDINATOR_ADDRESS" not in env:
        sizes.append(str(len(workers.split(","))))
    return None if {*sizes} - {None} == {"1"} else ProcessSpec()


def _check(spec: ProcessSpec) -> None:
    address, count, number = spec
    if None in spec and spec != ProcessSpec():
        raise ProcessError(
            f"initialize() got coordinator_address={address!r}, "
            f"num_processes={count!r}, process_id={number!r}. Give all three "
            "arguments, or none: then they are read from the environment."
        )
    if count is not None and number is not None and not 0 <= number < count:
        raise ProcessError(
            f"process_id={number} is invalid for num_processes={count}. It must be "
            f"from 0 to {count - 1}."
        )
    if address is not None and not re.search(r":\d+$", address):
        raise ProcessError(
            f"coordinator_address={address!r} has no port. Write host:port, such as "
            "'10.0.0.1:8476'."
        )
    if has_backend():
        raise ProcessError(
            f"initialize() came too late: JAX has started and found "
            f"{jax.device_count()} devices. Call it at the start of the script, before "
            "any code that uses an array or a device."
        )


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ProcessError(
            f"The environment variable {name} is {environment[name]!r}. It must be an "
            "integer."
        ) from None
