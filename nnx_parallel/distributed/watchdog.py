"""A watchdog over steps and evaluations: what hangs is ended, and says where.

SIGTERM: the notice that a machine is taken away, with seconds left to save.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Any, Self

from nnx_parallel.distributed.faults import end_hung
from nnx_parallel.distributed.messages import join

_GRACE_SECONDS = 5.0


class Watchdog:
    """Ends the process if something takes too long, with the stack of every thread.

    Two clocks run: a thread of Python, which can tell the other processes, and one of
    the interpreter's, a little later, for a process whose threads cannot run.

    Args:
        timeout_seconds: How long a step, or a batch of an evaluation, may take;
            ``None`` watches nothing.

    Raises:
        ValueError: If the time is not positive.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ValueError(
                f"step_timeout={timeout_seconds}. It must be a positive number of "
                "seconds, or None to watch nothing."
            )
        self._timeout = timeout_seconds
        self._timer: threading.Timer | None = None

    def arm(self, step: int, awaited: str = "step") -> None:
        """Starts the time anew.

        Args:
            step: The last one that was dispatched.
            awaited: What is to end in time, for the message.
        """
        if self._timeout is None:
            return
        self.disarm()
        self._timer = threading.Timer(self._timeout, self._end, (step, awaited))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(
            self._timeout + _GRACE_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr
        )

    def disarm(self) -> None:
        """Stops the time: for compilation and for a checkpoint."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            faulthandler.cancel_dump_traceback_later()

    def _end(self, step: int, awaited: str) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        line = join()
        end_hung(
            f"No {awaited} has ended for {self._timeout:g} s (step_timeout) after step "
            f"{step} was dispatched; the stack of every thread is above.",
            (lambda reason: None) if line is None else line.fail,
        )


class Termination:
    """Notes a SIGTERM while it is open, instead of ending the process.

    Schedulers and clouds send it before they take a machine. A handler that stands
    already is called too, once the notice has been noted; it is put back in the end.

    Attributes:
        is_requested: Whether the signal has come.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._before: Any = None
        self._is_open = False
        self._has_warned = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main thread handle signals
        before = signal.getsignal(signal.SIGTERM)
        if callable(before):
            warnings.warn(
                f"A handler of SIGTERM, {_name(before)}, was installed before the fit. "
                "During the fit a SIGTERM saves a checkpoint and ends the run; your "
                "handler is called as well, as soon as the signal has come. If it "
                "exits by itself, nothing is saved.",
                stacklevel=3,
            )
        self._before = before
        signal.signal(signal.SIGTERM, self._note)
        self._is_open = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_open and signal.getsignal(signal.SIGTERM) == self._note:
            before = signal.SIG_DFL if self._before is None else self._before
            signal.signal(signal.SIGTERM, before)
        self._is_open = False

    def check(self) -> None:
        """Warns, once, if somebody has put a handler of SIGTERM over this one."""
        if self._has_warned or not self._is_open:
            return
        found = signal.getsignal(signal.SIGTERM)
        if found != self._note:
            self._has_warned = True
            warnings.warn(
                f"A handler of SIGTERM, {_name(found)}, was installed during the fit. "
                "It swallows the notice of a preemption: the run will not save before "
                "it is ended. Install it before the fit, which then calls both.",
                stacklevel=2,
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        if callable(self._before):
            self._before(number, frame)


def _name(handler: Any) -> str:
    return f"`{getattr(handler, '__qualname__', repr(handler))}`"
