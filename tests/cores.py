"""Each worker of a test run has processor cores of its own."""

import os


def keep_to_own_cores() -> None:
    """Shares the cores out to the workers of pytest-xdist, where there is one for each.

    The threads of two compilers that meet on all cores cost up to a fifth more of their
    time. What a test starts stays on its worker's cores.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker or not hasattr(os, "sched_setaffinity"):
        return
    num_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= num_workers:
        os.sched_setaffinity(0, cores[int(worker) % num_workers :: num_workers])
