"""What Orbax and TensorStore print of a save or a read that fails.

Hundreds of lines, of which our one message has the cause.
"""

import functools
import logging
import re
import sys
from typing import Any

LOGGER = logging.getLogger("absl")
DEBUG = logging.getLogger("nnx_parallel.checkpoint")

_OF_A_SAVE = re.compile(r"_SignalingThread|Handler Commit|metadata=|Save Finalize")


def hide_log(record: logging.LogRecord) -> bool:
    """Filter of a logger: passes on what is not Orbax's.

    The rest is there for debugging: ``logging.getLogger("nnx_parallel.checkpoint")``.
    """
    if record.levelno < logging.WARNING or "orbax" not in record.pathname:
        return True
    DEBUG.debug("Orbax: %s", record.getMessage(), exc_info=record.exc_info)
    return False


def hide_stragglers(record: logging.LogRecord) -> bool:
    """`hide_log` for what Orbax's writing threads log once their save has failed."""
    return hide_log(record) if _OF_A_SAVE.search(record.getMessage()) else True


@functools.cache  # once in a process
def hide_closed_loops() -> None:
    """Hides tracebacks of writes that end after their save has failed.

    TensorStore then calls the event loop of Orbax's thread, which is closed, and has
    Python print the error: one for each array (docs/library-notes.md, "Orbax: saving").
    """
    show = sys.unraisablehook

    def hook(found: Any) -> None:
        if str(found.exc_value) == "Event loop is closed" and found.object is None:
            DEBUG.debug("A write of a failed save has ended: %s", found.exc_value)
        else:
            show(found)

    sys.unraisablehook = hook
