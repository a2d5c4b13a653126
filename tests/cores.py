"""Gives each worker of a test run separate cores; tunes compilation for one core."""

import contextlib
import os
import sys

import jax
import jax.numpy as jnp


def keep_to_own_cores() -> None:
    """Divides the cores among the workers of pytest-xdist, if there are enough cores.

    When the threads of two compilers share all cores, each takes up to a fifth longer.
    Processes that a test starts stay on its worker's cores.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker or sys.platform != "linux":
        return
    num_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_workers:
        return
    own = cores[int(worker) % num_workers :: num_workers]
    os.sched_setaffinity(0, own)
    if len(own) == 1:
        _compile_fusions_first()


def _compile_fusions_first() -> None:
    """Gives threads that compile fusions priority over the thread that emits them.

    XLA's CPU compiler hands each emitted fusion, with an MLIR context, to a pool of
    threads. It makes another context if none has been returned. On one core, the
    emitter would hand over many fusions, each with its context, before one is compiled.
    """
    jax.devices()
    priority = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    before = os.listdir("/proc/self/task")
    jax.jit(jnp.negative)(1.0).block_until_ready()  # creates that pool of threads
    for thread in before:
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), priority)
