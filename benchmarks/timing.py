"""Timing on a busy machine: alternating steps, and ratios within a round.

Other load on the machine affects neighbouring steps equally, so that the ratio of two
steps of one round is more reliable than the ratio of two averages. Two copies of one
program, timed in the same way, show the noise of the ratio.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclass
class Runner:
    """A step with its state: each call runs one step on idle devices and waits for it.

    Attributes:
        step: ``(state, batch) -> (new state, metrics)``; it may donate the state.
        state: The current state.
        batch: The batch of every step.
    """

    step: Step
    state: Any
    batch: Any

    def __call__(self) -> float:
        """Runs a step and waits for it: seconds."""
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start

    def dispatch(self) -> float:
        """Dispatches a step: seconds until the call returns, not until it has run."""
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        seconds = time.perf_counter() - start
        jax.block_until_ready((self.state, metrics))
        return seconds


def interleave(
    runs: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 5
) -> dict[str, np.ndarray]:
    """Seconds of each run in each round; every round starts with another run."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for index in range(warm_up + rounds):
            first = index % len(names)
            order = names[first:] + names[:first]
            # Every other round is reversed, so that no run always follows the same run.
            for name in reversed(order) if index // len(names) % 2 else order:
                taken = runs[name]()
                if index >= warm_up:
                    seconds[name].append(taken)
    finally:
        gc.enable()
    return {name: np.asarray(values) for name, values in seconds.items()}


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median over rounds of one run's time over another's.

    Attributes:
        median: The ratio.
        low: Lower end of a 95 % interval, from order statistics: no assumption on how
            the times are distributed.
        high: Upper end.
        rounds: Number of rounds.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, times: np.ndarray, reference: np.ndarray) -> Ratio:
        """The ratio of times from the same rounds."""
        ratios = np.sort(times / reference)
        half_width = 0.98 * math.sqrt(len(ratios))
        low = max(0, math.floor(len(ratios) / 2 - half_width))
        high = min(len(ratios) - 1, math.ceil(len(ratios) / 2 + half_width))
        return cls(
            median=float(np.median(ratios)),
            low=float(ratios[low]),
            high=float(ratios[high]),
            rounds=len(ratios),
        )

    def __str__(self) -> str:
        """`1.003 (0.997 to 1.009, 500 rounds)`."""
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, {self.rounds})"


@dataclass
class Table:
    """Figures by row and column, to print and to write.

    Attributes:
        title: The measured quantity.
        rows: Name and figure of each measurement.
        hardware: Devices of other processes, if they measured.
        packages: Further packages whose versions matter.
    """

    title: str
    rows: list[tuple[str, Any]] = field(default_factory=list)
    hardware: str | None = None
    packages: tuple[str, ...] = ()

    def add(self, name: str, figure: Any) -> None:
        """Adds a row, and prints it immediately: a benchmark takes minutes."""
        self.rows.append((name, figure))
        print(f"  {name}: {figure}", file=sys.stderr, flush=True)

    def show(self) -> None:
        """Prints the table."""
        width = max(len(name) for name, _ in self.rows)
        print(self.title)
        for key, value in circumstances(self.hardware, self.packages).items():
            print(f"  {key}: {value}")
        print()
        for name, figure in self.rows:
            print(f"{name.ljust(width)}  {_shown(figure)}")

    def write(self, path: str | os.PathLike) -> None:
        """Writes figures and circumstances as JSON."""
        figures = {
            name: asdict(figure) if isinstance(figure, Ratio) else figure
            for name, figure in self.rows
        }
        found = circumstances(self.hardware, self.packages)
        contents = {"title": self.title, **found, "figures": figures}
        Path(path).write_text(json.dumps(contents, indent=2) + "\n")


def _shown(figure: Any) -> str:
    return f"{figure:.4g}" if isinstance(figure, float) else str(figure)


def circumstances(
    hardware: str | None = None, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Command, hardware, load and versions.

    Args:
        hardware: The devices, if other processes measured.
        packages: Further packages whose versions matter.
    """
    arguments = shlex.join(sys.argv[1:])
    if hardware is None:
        hardware = f"{len(jax.devices())} {jax.devices()[0].platform} devices"
    names = ("jax", "jaxlib", "flax", "optax", *packages)
    return {
        "command": f"python -m benchmarks {arguments}",
        "hardware": f"{_processor()}, {os.cpu_count()} cores, {hardware}",
        "load average": f"{os.getloadavg()[0]:.1f}",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in names},
        },
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
