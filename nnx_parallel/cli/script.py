"""Runs a user's script in this process, up to the place that a command looks for."""

import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Reached(BaseException):
    """Ends a script at its call of `fit`.

    It is a `BaseException`, because a script may catch every `Exception`.
    """

    def __init__(self, trainer: Any, data: Any) -> None:
        super().__init__()
        self.trainer, self.data = trainer, data


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """Runs a script as ``python path arguments`` would run it."""
    code = compile(path.read_bytes(), str(path), "exec")
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    # This keeps objects alive that a model or loss refers to, and lets them be sent to
    # other processes.
    sys.modules["__main__"] = module
    sys.argv, sys.path[:0] = [str(path), *arguments], [str(path.parent)]
    exec(code, vars(module))


def line_of(error: BaseException, path: Path) -> str:
    """Returns `` in line 3`` for an error that passed through a script."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f" in line {lines[-1]}" if lines else ""
