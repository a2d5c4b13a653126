"""How a process ends when something is wrong: at once, with a reason and a code.

``sys.exit`` would wait for the others in jax's shutdown barrier, for minutes, while
they wait for this process in a collective.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType

import jax

from nnx_parallel.distributed.runtime import write_error

FAILED = 1
"""Exit code of a process that ends with an error of its own."""

PEER_LOST = 75
"""Exit code of a process that ends because another is lost: try again."""

HUNG = 76
"""Exit code of a process whose step or evaluation did not end in time."""

SILENT = "its connection closed without a word (killed, or out of memory)"
"""What is known of a process that did not say why it ended."""

_WAIT_FOR_REASON_SECONDS = 5.0
_WAIT_FOR_ENDING_SECONDS = 10.0
_RESUME = (
    "All processes end. Start the same command again: it resumes from the last "
    "checkpoint. `python -m nnx_parallel launch --max-restarts` does so by itself."
)

_ending = threading.Lock()


def install(tell: Callable[[str], None]) -> None:
    """Makes an exception that nobody catches end the process at once.

    Args:
        tell: Called with the reason first, to tell the other processes.
    """

    def end(
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if issubclass(kind, jax.errors.JaxRuntimeError):
            # Most likely another process was lost; whoever hears so ends this one.
            threading.Event().wait(_WAIT_FOR_REASON_SECONDS)
        _ending.acquire(timeout=_WAIT_FOR_ENDING_SECONDS)
        interrupted = issubclass(kind, KeyboardInterrupt)
        _end(
            "".join(traceback.format_exception(kind, error, trace)),
            partial(tell, _first_line(error)),
            128 + signal.SIGINT if interrupted else FAILED,
        )

    sys.excepthook = end


def end_by_loss(process: int, reason: str, drain: Callable[[], None]) -> None:
    """Ends this process because another is lost.

    Args:
        process: The lost process.
        reason: What is known.
        drain: Waits until the others have heard of it.
    """
    if not _ending.acquire(blocking=False):
        return  # this process is ending already, for a reason of its own
    hint = "" if reason == SILENT else " Its own output says more."
    text = f"Process {process} is lost: {reason.rstrip('.')}.{hint} {_RESUME}"
    _end(text, drain, PEER_LOST)


def end_hung(reason: str, tell: Callable[[str], None]) -> None:
    """Ends this process because its step or evaluation does not end.

    Args:
        reason: What is known.
        tell: Tells the other processes.
    """
    if not _ending.acquire(blocking=False):
        return
    _end(f"{reason} {_RESUME}", partial(tell, reason.rstrip(".")), HUNG)


def _end(text: str, tell: Callable[[], None], code: int) -> None:
    """Says why, tells the others, and ends: also if nobody reads what is written."""
    try:
        with contextlib.suppress(Exception):
            write_error(text)
        with contextlib.suppress(Exception):
            tell()
    finally:
        os._exit(code)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
