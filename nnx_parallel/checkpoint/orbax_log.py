"""Hides the output of Orbax and TensorStore about a save or a read that fails.

They print hundreds of lines, but our one message has the cause.
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
    """Filter of a logger: hides warnings and errors of Orbax.

    They go to ``logging.getLogger("nnx_parallel.checkpoint")``, for debugging.
    """
    if record.levelno < logging.WARNING or "orbax" not in record.pathname:
        return True
    DEBUG.debug("Orbax: %s", record.getMessage(), exc_info=record.exc_info)
    return False


def hide_stragglers(record: logging.LogRecord) -> bool:
    """`hide_log` for records of Orbax's writing threads after their save has failed."""
    return hide_log(record) if _OF_A_SAVE.search(record.getMessage()) else True


def hide_lost_reads(record: logging.LogRecord) -> bool:
    """Filter of asyncio's logger: hides errors of arrays whose read failed before."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, ValueError) or 'Error opening "zarr' not in str(error):
        return True
    DEBUG.debug("A read of a failed restore has ended: %s", error)
    return False


@functools.cache  # it runs once in a process
def hide_late_failures() -> None:
    """Hides tracebacks of transfers that end after their save or restore has failed.

    TensorStore then calls the event loop of Orbax's thread, which is closed, and Python
    prints that error; asyncio logs the exceptions of that loop's tasks. Both happen for
    every array (docs/library-notes.md, "Orbax: saving" and "reading").
    """
    logging.getLogger("asyncio").addFilter(hide_lost_reads)
    show = sys.unraisablehook

    def hook(found: Any) -> None:
        if str(found.exc_value) == "Event loop is closed" and found.object is None:
            DEBUG.debug("A transfer of a failed call has ended: %s", found.exc_value)
        else:
            show(found)

    sys.unraisablehook = hook
