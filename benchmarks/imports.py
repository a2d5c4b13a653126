"""The time to import this library, over the time of the libraries that it needs.

A new process imports flax, optax and Orbax first, and then this library. Only the time
of this library counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import numpy as np

from benchmarks.timing import Table

_SCRIPT = """
import time
start = time.perf_counter()
import flax.nnx, optax
from orbax.checkpoint import v1
middle = time.perf_counter()
import nnx_parallel
print(middle - start, time.perf_counter() - middle)
"""


def measure(rounds: int = 10) -> Table:
    """Median seconds, from the bytecode that an installation writes."""
    table = Table("Seconds to import flax, optax and Orbax, and then this library")
    with tempfile.TemporaryDirectory() as cache:
        _import(cache)
        seconds = np.array([_import(cache) for _ in range(rounds)])
    before, ours = np.median(seconds, axis=0)
    table.add("flax, optax, Orbax", float(before))
    table.add("nnx_parallel", float(ours))
    return table


def _import(cache: str) -> list[float]:
    # An environment may forbid bytecode: each import would then parse all sources.
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env=variables | {"PYTHONPYCACHEPREFIX": cache},
    )
    return [float(word) for word in found.stdout.split()]
