"""What jax knows of the processes; the only module that asks its internals.

The public functions would count devices, and so start a backend too early.

What processes print: once, or each line with the name of its process.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from jax._src import distributed, xla_bridge

from nnx_parallel.distributed.addresses import host_of


def process_index() -> int:
    """This process's number."""
    return distributed.global_state.process_id or 0


def process_count() -> int:
    """How many processes there are."""
    return distributed.global_state.num_processes or 1


def coordinator() -> Any:
    """The client of jax's coordination service, or ``None`` before it is started."""
    return distributed.global_state.client


def coordinator_host() -> str:
    """Host of process 0, as all processes reach it."""
    address = distributed.global_state.coordinator_address or "127.0.0.1:0"
    return host_of(address)


def has_backend() -> bool:
    """Whether JAX has counted its devices, after which none can be added."""
    return bool(xla_bridge.backends_are_initialized())


TAGGED = "NNX_PARALLEL_TAGGED"
"""Set by a launcher that tags the lines of its processes itself, to its number."""


def print_once(*values: Any, **options: Any) -> None:
    """Prints on process 0 alone; takes what ``print`` takes.

    Example:
        >>> print_once("loss", 0.5)
        loss 0.5
    """
    if process_index() == 0:
        print(*values, **options)  # noqa: T201


def tag() -> str:
    """What stands before each line of this process; empty if a launcher tags it."""
    if process_count() == 1 or os.environ.get(TAGGED):
        return ""
    return f"[process {process_index()}] "


def write_error(text: str) -> None:
    """Writes lines to standard error in one piece, each with the process's name.

    It ends what the process prints: standard output is flushed before.
    """
    lines = "".join(f"{tag()}{line}\n" for line in text.splitlines())
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        if stream is sys.stderr:
            stream.write(lines)
        stream.flush()


def tag_logging() -> None:
    """Puts the process's name before the message of every record of ``logging``."""
    make_record = logging.getLogRecordFactory()

    def tagged(*args: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*args, **options)
        record.msg = f"{tag().replace('%', '%%')}{record.msg}"
        return record

    logging.setLogRecordFactory(tagged)
