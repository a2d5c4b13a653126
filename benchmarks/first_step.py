"""The time to a fit's first step, over the time of plain ``nnx.jit`` on one device.

The time covers compilation and all work before it: tracing, initializers, placement.
Each first step runs in a new process, because a second step would find the compiled
programs of the first. Variants alternate within a round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.first_step_child import CASES, STRATEGIES
from benchmarks.timing import Ratio, Table, interleave

ROOT = Path(__file__).parents[1]
PLAIN = "nnx.jit"
_TIMEOUT_SECONDS = 600


def measure(rounds: int = 5) -> Table:
    """Returns the ratios for every model under every strategy."""
    table = Table(f"Seconds to the first step, over those of {PLAIN} on one device")
    for model in CASES:
        compiling: dict[str, list[float]] = {way: [] for way in (PLAIN, *STRATEGIES)}

        def run(way: str, model: str = model, into: dict = compiling) -> float:
            seconds, of_compiler = first_step(model, way)
            into[way].append(of_compiler)
            return seconds

        ways = {way: partial(run, way) for way in compiling}
        seconds = interleave(ways, rounds, warm_up=0)
        table.add(f"{model}: {PLAIN}, seconds", float(np.median(seconds[PLAIN])))
        for way in STRATEGIES:
            ratio = Ratio.of(seconds[way], seconds[PLAIN])
            table.add(f"{model}: {way} / {PLAIN}", ratio)
            # The library can shorten only the time outside XLA's compiler.
            alone = Ratio.of(np.array(compiling[way]), seconds[PLAIN])
            table.add(f"{model}: {way}, XLA's compiler alone / {PLAIN}", alone)
    return table


def first_step(model: str, way: str) -> tuple[float, float]:
    """Seconds to the first step in a new process, and seconds in XLA's compiler."""
    command = [sys.executable, "-m", "benchmarks.first_step_child", model, way]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    if found.returncode:
        raise RuntimeError(f"{model}, {way}, has failed:\n{found.stderr}")
    seconds, compiling, _ = json.loads(found.stdout.splitlines()[-1])
    return seconds, compiling
