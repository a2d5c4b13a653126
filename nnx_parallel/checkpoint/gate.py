"""Keeps Orbax from writing until a save has copied all of its arrays."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from orbax.checkpoint import v1 as ocp

UNFINISHED = "orbax-checkpoint-tmp"
"""In the name of a step's directory until it is whole."""

_MOST_SECONDS = 10.0
"""No save is held up for longer, whatever Orbax waits for meanwhile."""

_Path: Any = type(ocp.path.Path("/"))


class Gate:
    """Holds the writers of a save back while it is closed.

    Orbax copies one group of arrays after the other, and writes each from then on, on
    the cores and under the interpreter's lock that copying the next one needs: the fit
    then waits for twice as long. Its writers wait for the step's directory, which is
    made in the background: not before the gate opens.
    """

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Closed until the block ends."""
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()

    def path(self, directory: str) -> ocp.path.Path:
        """A local directory in which directories of steps are made behind the gate."""
        is_open = self._is_open

        class GatedPath(_Path):
            def mkdir(self, *args: Any, **options: Any) -> None:
                is_step = UNFINISHED in self.name and UNFINISHED not in self.parent.name
                if is_step:
                    is_open.wait(_MOST_SECONDS)
                super().mkdir(*args, **options)

        return GatedPath(directory)
