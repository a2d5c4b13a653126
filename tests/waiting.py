"""Waits for other processes and threads of a test."""

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Polls for up to ``seconds``; returns whether the condition became true."""
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_true()
