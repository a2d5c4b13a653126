"""Failures of Orbax: noticed when they happen, and told by what caused them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading

from orbax.checkpoint import v1 as ocp

from nnx_parallel.errors import CheckpointSaveError

_ABOUT_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# As jax and TensorStore write them, within errors of no kind.
_PASSING = re.compile(
    r"\b(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED"
    r"|EIO|ESTALE|EACCES|EMFILE|ENFILE|ENOMEM|ETIMEDOUT)\b"
)

_LOGGER = logging.getLogger("absl")
_WRITER = "async_save"
"""The thread in which Orbax writes, and logs what it fails of."""

_SPARE_FILES = 64
"""Handles of files that a process in good order could still open."""


class Watch:
    """Notices that a save fails, as soon as it does.

    With several processes Orbax tells of a failure only once all of them have met,
    which those that did not fail never come to. What fails in this process it logs at
    once, from the thread that writes: maybe before the save has come back from its
    start, so that this is made before.

    Attributes:
        is_told: Whether `take_local_error` has told of a failure.
    """

    def __init__(self) -> None:
        self._has_failed = threading.Event()
        self._has_ended = threading.Event()
        self.is_told = False
        self._log = _WriterLog()
        _LOGGER.addHandler(self._log)

    def follow(self, response: ocp.AsyncResponse[bool]) -> None:
        """Waits for the save, in a thread of its own."""

        def wait() -> None:
            try:
                response.result()
            except Exception:
                self._has_failed.set()
            finally:
                self.end()

        threading.Thread(target=wait, name="nnx_parallel.save", daemon=True).start()

    def end(self) -> None:
        """Notices nothing from now on."""
        _LOGGER.removeHandler(self._log)
        self._has_ended.set()

    def wait(self, seconds: float) -> bool:
        """Whether the save has ended, well or not, within some seconds."""
        return self._has_ended.wait(seconds)

    @property
    def has_failed(self) -> bool:
        """Whether the save has failed, and all processes have met."""
        return self._has_failed.is_set()

    @property
    def has_failed_here(self) -> bool:
        """Whether writing has failed in this process."""
        return self._log.error is not None

    def take_local_error(self) -> Exception | None:
        """What writing has failed of in this process, once; ``None`` if it has not."""
        error = None if self.is_told else self._log.error
        self.is_told |= error is not None
        return error


class _WriterLog(logging.Handler):
    """Keeps the error that Orbax's writing thread logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.error: Exception | None = None

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        if record.threadName == _WRITER and isinstance(error, Exception):
            self.error = error


def save_error(step: int, directory: str, error: Exception) -> CheckpointSaveError:
    """The error to raise for one of Orbax while it saved."""
    return CheckpointSaveError(
        f"Saving step {step} in '{directory}' failed: {root_cause(error)} No other "
        "checkpoint was deleted."
    )


def is_passing(error: BaseException) -> bool:
    """Whether an error speaks of the moment, not of what is on disk.

    Memory or file handles used up, a disk or network that does not answer, a directory
    that may not be read: the same files can be read well later.
    """
    if isinstance(error, OSError | MemoryError) and not isinstance(error, _ABOUT_FILES):
        return True
    if _PASSING.search(str(error)):
        return True
    return error.__cause__ is not None and is_passing(error.__cause__)


def is_no_damage(error: BaseException) -> bool:
    """Whether what is on disk may be well in spite of an error.

    It may where the error is one of the moment (`is_passing`); and where hardly a file
    can be opened now, for then any error may come of that: in C++ one of its random
    numbers, for instance.
    """
    return is_passing(error) or _are_files_short()


def _are_files_short() -> bool:
    with contextlib.ExitStack() as opened:
        for _ in range(_SPARE_FILES):
            try:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            except OSError:
                return True
    return False


def root_cause(error: BaseException) -> str:
    """Returns the last of a chain; Orbax wraps what went wrong in unlike errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
