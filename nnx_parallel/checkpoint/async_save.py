"""One asynchronous save, from before Orbax starts it until it has ended."""

from __future__ import annotations

import logging
import threading

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.orbax_compat import root_cause
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import CheckpointSaveError

_LOGGER = logging.getLogger("absl")
_WRITER = "async_save"
"""Name of the thread in which Orbax writes, and logs why it failed."""


def save_error(step: int, directory: str, error: BaseException) -> CheckpointSaveError:
    """The error to raise when a save cannot start or does not end well."""
    return CheckpointSaveError(
        f"Saving step {step} in '{directory}' failed: {root_cause(error)} No other "
        "checkpoint was deleted."
    )


class AsyncSave:
    """One save in progress, and how it ends.

    With several processes Orbax 0.12.8 reports a failure only after a barrier that the
    other processes never reach: it gives up 20 minutes after the save began (a barrier
    that some never reach is also in https://github.com/google/orbax/issues/2934). But
    the process that fails logs its error at once, from the thread that writes, and this
    object reads that log. Create it before the save starts: the error may be logged
    before Orbax returns.
    """

    def __init__(self, step: int, directory: str) -> None:
        self._step = step
        self._directory = directory
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._is_reported = False
        self._log = _WriterLog()
        _LOGGER.addHandler(self._log)

    def follow(self, response: ocp.AsyncResponse[bool]) -> None:
        """Waits for the save in a thread of its own."""

        def wait() -> None:
            try:
                response.result()
            except BaseException as error:  # whatever ended Orbax's thread
                self._error = error
            finally:
                self.end()

        # A daemon: the interpreter must not wait 20 minutes for a failed save.
        follower = threading.Thread(target=wait, name="nnx_parallel.save", daemon=True)
        try:
            follower.start()
        except RuntimeError:  # no more threads
            self.end()
            raise

    def end(self) -> None:
        """Marks the save as ended and stops reading the log."""
        _LOGGER.removeHandler(self._log)
        self._has_ended.set()

    @property
    def has_failed(self) -> bool:
        """True if the save has ended on all processes, with an error."""
        return self._error is not None

    def join(self, *, patiently: bool) -> None:
        """Waits until the save has ended, successfully or not.

        Raises:
            CheckpointSaveError: If it has failed on this process and the others wait
                for it, unless ``patiently``.
        """
        # In turns: a failure of this process is logged while Orbax's barrier waits.
        while not self._has_ended.wait(0.5):
            if not patiently:
                self.check_own_part()

    def check_own_part(self) -> None:
        """Raises the error of this process, once, while the others wait for it."""
        # A single process waits for no other: its save ends, and `check_whole` reports.
        error = self._log.error
        if jax.process_count() > 1 and error is not None and not self._is_reported:
            self._is_reported = True
            raise save_error(self._step, self._directory, error)

    def check_whole(self) -> None:
        """Raises the error with which the save has ended, unless it has been raised."""
        if self._error is not None and not self._is_reported:
            raise save_error(self._step, self._directory, self._error) from self._error

    def state(self) -> str:
        """``"ended"``, ``"failed"`` here while others wait, or ``"running"``.

        Takes half a second at most.
        """
        if self._has_ended.wait(0.5):
            return "ended"
        return "running" if self._log.error is None else "failed"


def wait_on_all_processes(save: AsyncSave | None) -> bool:
    """Waits until a save has ended on all processes, or failed on one of them.

    Returns:
        True if it has ended on all, so that `AsyncSave.join` returns at once; False if
        it has failed on one, so that it ends nowhere before Orbax gives it up.
    """
    while True:
        mine = "ended" if save is None else save.state()
        states = allgather_object("save in progress", mine)
        if "failed" in states:
            return False
        if set(states) == {"ended"}:
            return True


class _WriterLog(logging.Handler):
    """Keeps the error that Orbax's writing thread logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.error: Exception | None = None

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        # Other threads, and other libraries, log here too.
        if record.threadName == _WRITER and isinstance(error, Exception):
            self.error = error
