"""``python -m benchmarks.gpu_child WAY TASK`` measures one framework on a device.

The last line of its output is its measurements, as JSON; ``null`` if the device ran
out of memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu_task import GROUPED, PACKED, Side, Task


def work(side: Side, task: Task) -> dict[str, Any]:
    """Warms up and measures; returns the fields of `benchmarks.gpu.Found`."""
    warm_up, num_steps, num_times = (1, 2, 2) if task.is_tiny else (10, 10, 5)
    first = side.train(1)  # compiles
    side.train(warm_up)
    last = first

    def train() -> None:
        nonlocal last
        last = side.train(num_steps)

    seconds = [_seconds(train) / num_steps for _ in range(num_times)]
    peak_bytes = side.peak_bytes()
    count = 2 if task.is_tiny else 50
    side.multiply(count)
    times = [_seconds(lambda: side.multiply(count)) / count for _ in range(num_times)]
    product_flops = 2 * task.product_size**3 / float(np.median(times))
    return {
        "seconds": seconds,
        "product_flops": product_flops,
        "losses": [first, last],
        "peak_bytes": peak_bytes,
    }


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def make_side(way: str, task: Task) -> Side:
    """The framework of a variant, its state on the device."""
    if way in ("ours", PACKED):
        from benchmarks.gpu_ours import Ours

        return Ours(task, is_packed=way == PACKED)
    if way == GROUPED:
        from benchmarks.grouped_torch import Grouped

        return Grouped(task)
    from benchmarks.gpu_torch import Torch

    return Torch(task, way)


def is_out_of_memory(error: Exception) -> bool:
    """True if the error of XLA or PyTorch means that the device is out of memory."""
    said = str(error).lower()
    return "resource_exhausted" in said or "out of memory" in said


def main() -> None:
    """Measures the variant of the command line."""
    way, given = sys.argv[1:]
    task = Task(**json.loads(given))
    try:
        found = work(make_side(way, task), task)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
