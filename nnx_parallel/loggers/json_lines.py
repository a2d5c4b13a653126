"""Metrics as lines of JSON, which outlive a crash and a resume."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from nnx_parallel.errors import LogFileError


class JSONLinesLogger:
    """Appends a JSON object for each logged step to a file.

    A line is ``{"step": 3, "time": 1760000000.0, "loss": 2.4}``, ``time`` in seconds
    since 1970; the operating system has it when ``log`` returns. Values that JSON lacks
    are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as ``float`` reads
    them.

    On resume, lines of later steps than the checkpoint's, written by a run that died,
    are removed in one atomic replacement, and so is a last line torn by a crash. A run
    that starts from step 0 renames an older file to ``<stem>.1<suffix>`` (or 2, ...).

    Args:
        path: The file, often ``metrics.jsonl``; its directory is created if needed.

    Raises:
        LogFileError: On ``start``, if the file has lines of another program.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> logger = JSONLinesLogger(path)
        >>> logger.start(first_step=0, num_steps=10)
        >>> logger.log(1, {"loss": 2.5})
        >>> logger.finish()
        >>> json.loads(path.read_text())["loss"]
        2.5
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._step = 0

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Remove what a dead run wrote after ``first_step``, and open the file."""
        del num_steps
        self.finish()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut_lines(self.path, first_step)
        # Line buffered: a killed process loses no step that was logged.
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._step = first_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line."""
        self._step = step
        self._write({name: _json_number(value) for name, value in metrics.items()})

    def message(self, text: str) -> None:
        """Write one line with the text under ``message``, at the last logged step."""
        self._write({"message": text})

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._file is None:
            raise RuntimeError("The logger is not open. Call `start` before `log`.")
        line = {"step": self._step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")


def _json_number(value: float) -> int | float | str:
    if isinstance(value, int):  # counts stay whole numbers
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _cut_lines(path: Path, last_step: int) -> None:
    """Keep the lines up to a step; at step 0 rename the file of an earlier run."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [
        line
        for number, line in enumerate(lines, start=1)
        # Without an end the line was torn by a crash, and need not be JSON.
        if line.endswith(b"\n") and _line_step(path, number, line) <= last_step
    ]
    if last_step == 0 and lines:
        path.rename(_free_name(path))
    elif len(kept) < len(lines):
        _replace(path, kept)


def _replace(path: Path, lines: list[bytes]) -> None:
    # Written beside it and renamed over it: a crash leaves the old file or the new one.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(descriptor)
    # `mkstemp` lets no one but the owner read.
    os.chmod(temporary, path.stat().st_mode)
    os.replace(temporary, path)


def _line_step(path: Path, number: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise LogFileError(
            f"Line {number} of '{path}' is {line[:40]!r}. JSONLinesLogger appends only "
            'to files whose lines are JSON objects with a "step", since it cuts the '
            "lines of a run that died. Choose another path, or move the file away."
        ) from error


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return name
