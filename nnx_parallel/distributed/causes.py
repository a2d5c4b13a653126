"""A process that fails writes the reason to a file, which the launcher reads."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from nnx_parallel.errors import ParallelError
from nnx_parallel.files import read_object

CAUSE = "NNX_PARALLEL_CAUSE"
"""Environment variable with the file in which a process notes its cause."""

_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The reason why a process has ended.

    Attributes:
        kind: The class of the error, or another short name.
        text: The first line of the error.
        step: The last step that a fit began or restored; ``None`` if no fit has begun.
        code: The exit code of this kind of error.
        pid: The process id.
    """

    kind: str
    text: str = ""
    step: int | None = None
    code: int = 1
    pid: int = 0


def note_step(step: int) -> None:
    """Remembers the step that a fit begins or restores."""
    global _step
    _step = step


def exit_code_of(error: BaseException | None) -> int:
    """Returns the exit code for an error that nothing catches."""
    # An error of another library may also have an attribute `exit_code`.
    return error.exit_code if isinstance(error, ParallelError) else 1


def note_cause(kind: str, text: str, code: int = 1) -> None:
    """Writes the cause of this process's end, if a launcher has asked for it."""
    path = os.environ.get(CAUSE)
    if path is None:
        return
    # The process is ending, and the launcher also works without this file.
    with contextlib.suppress(Exception):
        first, *_ = [*text.strip().splitlines(), ""]
        pid = os.getpid()
        cause = Cause(kind=kind, text=first, step=_step, code=code, pid=pid)
        # Two threads may end the process at the same time.
        new = Path(f"{path}.{pid}.new")
        new.write_text(json.dumps(asdict(cause)))
        new.replace(path)


def read_cause(path: Path, pid: int) -> Cause | None:
    """Returns the cause that a process has noted.

    Returns ``None`` if the process has written no cause. A child of the process may
    have written another cause to the same file.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        cause = Cause(**read_object(path))
        return cause if cause.pid == pid else None
    return None
