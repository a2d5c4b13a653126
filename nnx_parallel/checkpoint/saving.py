"""Follows a save in the background until it ends, or fails on this process."""

import logging
import threading
import time
from collections.abc import Callable

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.files import delete_steps
from nnx_parallel.checkpoint.options import Metrics
from nnx_parallel.checkpoint.orbax_compat import (
    LOGGER,
    first_cause,
    hide_late_failures,
    hide_log,
    hide_stragglers,
    root_cause,
)
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import CheckpointSaveError


def save_error(step: int, directory: str, error: BaseException) -> CheckpointSaveError:
    """Returns the error to raise if a save cannot begin or fails."""
    why = f"{root_cause(error).rstrip('.')}. No other checkpoint was deleted."
    return CheckpointSaveError(f"Saving step {step} in '{directory}' failed: {why}")


class BackgroundSave(logging.Filter):
    """A save in progress and its result; also the log filter that sees its errors.

    With several processes, Orbax reports a failure only after a barrier. Some processes
    never reach this barrier, so Orbax waits until 20 minutes after the start of the
    save. (https://github.com/google/orbax/issues/2934 is about a similar barrier.) But
    the process that fails logs its error immediately, from the thread that writes. This
    may happen before Orbax has returned to the caller.

    Attributes:
        step, metrics: The saved step and its metrics.
        superseded: Older steps, which are deleted once this step is saved.
        seconds: Duration of the save, once it has ended.
        error: The error that ended the save on all processes, or ``None``.
        problems: A line for each older step that could not be deleted.
    """

    def __init__(
        self,
        step: int,
        directory: str,
        metrics: Metrics,
        superseded: list[int],
    ) -> None:
        super().__init__()
        self.step, self.metrics, self.superseded = step, metrics, superseded
        self._directory = directory
        self._began, self.seconds = time.monotonic(), 0.0
        self.error: BaseException | None = None
        self.problems: list[str] = []
        self._logged: Exception | None = None
        self._has_ended = threading.Event()
        self._is_reported = False

    def start(self, begin: Callable[[], ocp.AsyncResponse[bool] | None]) -> None:
        """Begins the save in this thread, and follows it in another.

        Raises ``CheckpointSaveError`` if it cannot begin.
        """
        hide_late_failures()
        # If this filter ran after one that hides a record, it would not see the record.
        LOGGER.removeFilter(hide_stragglers)
        LOGGER.addFilter(self)
        try:
            response = begin()
            assert response is not None, "a forced save is never skipped"
            # The thread is a daemon, because the interpreter must not wait 20 minutes
            # for a failed save.
            threading.Thread(
                target=self._follow,
                args=(response,),
                name="nnx_parallel.save",
                daemon=True,
            ).start()
        except Exception as error:
            self._end()
            raise save_error(self.step, self._directory, error) from first_cause(error)

    def _follow(self, response: ocp.AsyncResponse[bool]) -> None:
        try:
            response.result()
            # This step is saved, so the older steps may be deleted now.
            if jax.process_index() == 0:
                self.problems = delete_steps(self._directory, self.superseded)
        except BaseException as error:  # any error that ended Orbax's thread
            self.error = error
        finally:
            self._end()

    def _end(self) -> None:
        LOGGER.removeFilter(self)
        LOGGER.addFilter(hide_stragglers)
        self.seconds = time.monotonic() - self._began
        self._has_ended.set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps the error that Orbax's writing thread logs; hides Orbax's records."""
        error = record.exc_info and record.exc_info[1]
        # Orbax writes in a thread of this name. Other threads and libraries log too.
        if record.threadName == "async_save" and isinstance(error, Exception):
            self._logged = error
        return hide_log(record)

    @property
    def is_saved(self) -> bool:
        """True if the step is saved, even if `join` was not called yet."""
        return self._has_ended.is_set() and self.error is None

    def join(self, *, patiently: bool) -> None:
        """Waits until the save has ended; calls `check` if not ``patiently``."""
        # The loop sees a failure that is logged while Orbax waits at its barrier.
        while not self._has_ended.wait(0.5):
            if not patiently:
                self.check()

    def check(self) -> None:
        """Raises, only once, ``error`` or the error that this process logged."""
        # A single process waits for no other process, so its save ends with an error.
        logged = self._logged if jax.process_count() > 1 else None
        error = self.error or logged
        if error is not None and not self._is_reported:
            self._is_reported = True
            raise save_error(self.step, self._directory, error) from first_cause(error)

    def state(self) -> str:
        """Returns ``"ended"``, ``"failed"`` or ``"running"`` after at most 0.5 s.

        ``"failed"`` means that other processes still wait for this one.
        """
        if self._has_ended.wait(0.5):
            return "ended"
        return "running" if self._logged is None else "failed"


def wait_on_all_processes(save: BackgroundSave | None) -> bool:
    """Waits for a save on all processes; returns False if it failed on one of them.

    After a failure on one process, the save ends on no process until Orbax gives up.
    """
    states = ["running"]
    while "failed" not in states and set(states) != {"ended"}:
        mine = "ended" if save is None else save.state()
        states = allgather_object("save in progress", mine)
    return "failed" not in states
