"""One save in the background: its end on all processes, or its failure on this one."""

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
    """The error to raise when a save cannot start or does not end well."""
    why = f"{root_cause(error).rstrip('.')}. No other checkpoint was deleted."
    return CheckpointSaveError(f"Saving step {step} in '{directory}' failed: {why}")


class BackgroundSave(logging.Filter):
    """One save in progress, and its result; it filters the log of the writing thread.

    With several processes Orbax reports a failure only after a barrier that the others
    never reach: it gives up 20 minutes after the save began (a barrier that some never
    reach is also in https://github.com/google/orbax/issues/2934). But the process that
    fails logs its error at once, from the thread that writes, perhaps before Orbax has
    returned to the caller.

    Attributes:
        step, metrics: The saved step and its metrics.
        superseded: Older steps, which are deleted once this step is saved.
        seconds: Duration of the save, once it has ended.
        error: Error with which the save has ended on all processes, or ``None``.
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
        # A filter that hides a record hides it from later filters too.
        LOGGER.removeFilter(hide_stragglers)
        LOGGER.addFilter(self)
        try:
            response = begin()
            assert response is not None, "a forced save is never skipped"
            # A daemon: the interpreter must not wait 20 minutes for a failed save.
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
            # Only now: no step is deleted before this one is saved.
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
        """Keeps the error that Orbax's writing thread logs; hides Orbax's lines."""
        error = record.exc_info and record.exc_info[1]
        # Orbax writes in a thread of this name; other threads and libraries log too.
        if record.threadName == "async_save" and isinstance(error, Exception):
            self._logged = error
        return hide_log(record)

    def join(self, *, patiently: bool) -> None:
        """Waits until the save has ended; calls `check` if not ``patiently``."""
        # A loop: a failure of this process is logged while Orbax's barrier waits.
        while not self._has_ended.wait(0.5):
            if not patiently:
                self.check()

    def check(self) -> None:
        """Raises, once, ``error`` or this process's error while others wait for it."""
        # A single process waits for no other: its save ends with an error.
        logged = self._logged if jax.process_count() > 1 else None
        error = self.error or logged
        if error is not None and not self._is_reported:
            self._is_reported = True
            raise save_error(self.step, self._directory, error) from first_cause(error)

    def state(self) -> str:
        """``"ended"``, ``"failed"`` (others wait) or ``"running"``, after 0.5 s."""
        if self._has_ended.wait(0.5):
            return "ended"
        return "running" if self._logged is None else "failed"


def wait_on_all_processes(save: BackgroundSave | None) -> bool:
    """Waits until a save has ended on all processes (True), or failed on one (False).

    After a failure on one process it ends on no process before Orbax gives up.
    """
    states = ["running"]
    while "failed" not in states and set(states) != {"ended"}:
        mine = "ended" if save is None else save.state()
        states = allgather_object("save in progress", mine)
    return "failed" not in states
