"""Failures of Orbax, told by what caused them."""

from __future__ import annotations

import contextlib
import os
import re

from nnx_parallel.errors import CheckpointSaveError

_ABOUT_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# As jax and TensorStore write them, within errors of no kind.
_PASSING = re.compile(
    r"\b(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED"
    r"|EIO|ESTALE|EACCES|EMFILE|ENFILE|ENOMEM|ETIMEDOUT)\b"
)

_SPARE_FILES = 64
"""Handles of files that a process in good order could still open."""


def save_error(step: int, directory: str, error: BaseException) -> CheckpointSaveError:
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
