"""The causes of failures: a process notes its cause, and the launcher reads it."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from nnx_parallel.files import read_object

CAUSES = "NNX_PARALLEL_CAUSES"
"""Environment variable with the directory in which processes note their causes."""

_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The reason why a process ended.

    Attributes:
        kind: The class of the error, or another short name.
        text: The first line of the error.
        step: The number of the last step that was begun or restored; ``None`` before
            the training.
        code: The exit code for this kind of error.
    """

    kind: str
    text: str = ""
    step: int | None = None
    code: int = 1

    @property
    def place(self) -> str:
        """The step, in words."""
        return "before the training" if self.step is None else f"at step {self.step:,}"

    def is_like(self, other: Cause) -> bool:
        """Returns True if two runs failed at the same step for the same reason."""
        return (self.kind, self.step) == (other.kind, other.step)


def note_step(step: int) -> None:
    """Remembers the step that begins, or that is restored."""
    global _step
    _step = step


def note_cause(
    process: int,
    kind: str,
    text: str,
    *,
    step: int | None = None,
    code: int = 1,
) -> None:
    """Writes the cause of a failure, if a launcher has asked for it.

    Args:
        process: Number of this process.
        kind: The class of the error.
        text: The text of the error.
        step: The failed step; by default the step that began last.
        code: The exit code for this kind of error.
    """
    directory = os.environ.get(CAUSES)
    if directory is None:
        return
    first, *_ = [*text.strip().splitlines(), ""]
    cause = Cause(
        kind=kind, text=first, step=_step if step is None else step, code=code
    )
    # The process is failing, and the launcher also works without this file.
    with contextlib.suppress(OSError):
        path = Path(directory) / f"{process}.json"
        path.write_text(json.dumps(asdict(cause)))


def read_cause(directory: Path, process: int) -> Cause | None:
    """Returns the cause that a process has noted; ``None`` if it has noted none."""
    # A process that was killed may have written only a part of the file.
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Cause(**read_object(directory / f"{process}.json"))
    return None
