"""A save that Orbax writes in the background: whether it goes on, and how it ends."""

from __future__ import annotations

import logging
import threading

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.failures import save_error

_LOGGER = logging.getLogger("absl")
_WRITER = "async_save"
"""The thread in which Orbax writes, and logs what it fails of."""


class SaveUnderWay:
    """One save, from before it begins until it has ended, well or not.

    With several processes Orbax tells of a failure only once all of them have met,
    which those that did not fail never come to: 20 minutes after the save began it
    gives up. What fails in this process it logs at once, from the thread that writes:
    maybe before the save has come back from its start, so that this is made before.

    Args:
        step: The step that is saved.
        directory: Where its checkpoints are.
    """

    def __init__(self, step: int, directory: str) -> None:
        self._step = step
        self._directory = directory
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._is_told = False
        self._log = _WriterLog()
        _LOGGER.addHandler(self._log)

    def follow(self, response: ocp.AsyncResponse[bool]) -> None:
        """Waits for the save, in a thread of its own."""

        def wait() -> None:
            try:
                response.result()
            except BaseException as error:  # it ended a thread of Orbax's
                self._error = error
            finally:
                self.end()

        follower = threading.Thread(target=wait, name="nnx_parallel.save", daemon=True)
        try:
            follower.start()
        except RuntimeError:
            self.end()
            raise

    def end(self) -> None:
        """Notices nothing from now on."""
        _LOGGER.removeHandler(self._log)
        self._has_ended.set()

    @property
    def has_failed(self) -> bool:
        """Whether the save has ended, and not well."""
        return self._error is not None

    def join(self, *, patiently: bool) -> None:
        """Waits until the save has ended, well or not.

        Args:
            patiently: Also where it has failed in this process, and the others wait.

        Raises:
            CheckpointSaveError: If it has, unless ``patiently``; it goes on then.
        """
        while not self._has_ended.wait(0.5):
            if not patiently:
                self.check_own_part()

    def own_part(self) -> str:
        """What this process knows of the save within half a second.

        Returns:
            ``"ended"``, well or not; ``"failed"`` here, where the others wait; or
            ``"under way"``.
        """
        if self._has_ended.wait(0.5):
            return "ended"
        return "under way" if self._log.error is None else "failed"

    def check_own_part(self) -> None:
        """Raises what writing has failed of in this process, while others wait for it.

        With one process nobody does: the save ends, and is told of as a whole.

        Raises:
            CheckpointSaveError: Once.
        """
        error = self._log.error
        if jax.process_count() > 1 and error is not None and not self._is_told:
            self._is_told = True
            raise save_error(self._step, self._directory, error)

    def check_whole(self) -> None:
        """Raises what the save has ended with, if not well and not told already.

        Raises:
            CheckpointSaveError: If so.
        """
        if self._error is not None and not self._is_told:
            raise save_error(self._step, self._directory, self._error) from self._error


class _WriterLog(logging.Handler):
    """Keeps the error that Orbax's writing thread logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.error: Exception | None = None

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        if record.threadName == _WRITER and isinstance(error, Exception):
            self.error = error
