"""Each worker of a test run has separate cores, and compiles as is best on one."""

import contextlib
import os
import sys

import jax
import jax.numpy as jnp


def keep_to_own_cores() -> None:
    """Shares the cores out to the workers of pytest-xdist, where there is one for each.

    The threads of two compilers that meet on all cores cost up to a fifth more of their
    time. Processes that a test starts stay on its worker's cores.
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
    """Has the threads that compile fusions run before the one that emits them.

    XLA's CPU compiler hands each fusion that it has emitted, with an MLIR context, to a
    pool of threads, and makes another context while that one is not back. On one core
    the emitter would hand over many before any is compiled.
    """
    jax.devices()
    priority = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    before = os.listdir("/proc/self/task")
    jax.jit(jnp.negative)(1.0).block_until_ready()  # which makes that pool
    for thread in before:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), priority)
