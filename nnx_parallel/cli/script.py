"""Runs a user's script in this process, up to the place that a command looks for."""

import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Reached(BaseException):
    """Ends a script at the place where it trains.

    It is a `BaseException`, because a script may catch every `Exception`.
    """

    def __init__(self, trainer: Any, data: Any) -> None:
        super().__init__()
        self.trainer, self.data = trainer, data


def main_module(path: Path) -> types.ModuleType:
    """Returns an empty module for a script that is run."""
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    return module


def run_script(
    path: Path, arguments: Sequence[str], module: types.ModuleType | None = None
) -> None:
    """Runs a script as ``python path arguments`` would run it.

    Args:
        path: The script.
        arguments: Its arguments.
        module: The module that gets the script's global variables.
    """
    code = compile(path.read_bytes(), str(path), "exec")
    module = module or main_module(path)
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
