"""A watchdog over steps and evaluations: what hangs is ended, and says where."""

from __future__ import annotations

import faulthandler
import sys
import threading

from nnx_parallel.distributed.faults import end_hung
from nnx_parallel.distributed.line import join

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
