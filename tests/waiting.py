"""Waits for what other processes and threads of a test do."""

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether it is true at last, asked again for so long."""
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_true()
