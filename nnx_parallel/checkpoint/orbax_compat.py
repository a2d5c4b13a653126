"""Calls of Orbax, filters for its log, and every workaround for Orbax 0.12.8.

Orbax's v1 API writes and reads the arrays. The rest of the package uses Orbax only
through this file. A comment at each workaround names the symptom, and the upstream
issue if one is known. A workaround can be deleted once its symptom is gone.
"""

import asyncio
import contextlib
import functools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import jax
import tensorstore
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.checksum import ChecksumHandler
from nnx_parallel.checkpoint.files import LiteralPath, is_url, printable
from nnx_parallel.distributed.runtime import raising_interrupts
from nnx_parallel.errors import (
    CheckpointReadError,
    CheckpointUnavailableError,
    ParallelError,
)

GIVE_UP_SECONDS = 1200
"""Seconds after which Orbax gives up a save that has not ended or has failed."""


class _NoSteps:
    """Names a step by its number but lists no steps, so Orbax deletes and reads none.

    `files.list_steps` lists steps and `files.delete_steps` deletes them. Orbax's
    deletions are not atomic, and a failed deletion would make the save fail.
    """

    def build_name(self, step: int) -> str:
        return str(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        return iter(())


def open_directory(directory: str) -> ocp.training.Checkpointer:
    """Opens a directory with Orbax for saves, and deletes the files of killed saves.

    Orbax refuses to save a step that it has saved before, until ``reload`` is called.
    """
    context = _make_context()
    context.async_options.timeout_secs = GIVE_UP_SECONDS
    registry = ocp.handlers.local_registry()
    registry.add(ChecksumHandler)
    context.checkpointables_options.registry = registry
    # The header and the reader's shardings suffice, so no mesh is written to disk.
    context.array_options.saving.enable_write_sharding_file = False
    # By default each replica of an array writes a slice of the array. The program that
    # cuts the slice is compiled for each shape while the fit waits:
    # https://github.com/google/orbax/issues/2934. Below this size one replica writes
    # the entire array.
    context.array_options.saving.min_slice_bytes_for_replica_parallel = 2**20
    # The directory is made in the background, so that the fit does not wait for it. If
    # it cannot be made, Orbax's writers wait 5 minutes for it, and the interpreter's
    # exit waits for the writers. So `options.check_writable` tries to write first; it
    # cannot do so for a URL.
    context.async_options.create_directories_asynchronously = not is_url(directory)
    names: Any = _NoSteps()
    return ocp.training.Checkpointer(
        LiteralPath(directory),
        context=context,
        step_name_format=names,
        cleanup_tmp_directories=True,  # by default Orbax would keep these files
    )


def _make_context() -> ocp.Context:
    context = ocp.Context()
    context.file_options.path_class = LiteralPath
    return context


def wait_for_writers(seconds: float) -> None:
    """Waits for the end of all threads that a failed save has started.

    Orbax writes each group of arrays in a separate thread. When one thread fails, the
    others may still make directories and files. Each of them also starts threads for
    asyncio, and ends without waiting for these.
    """
    deadline = time.monotonic() + seconds
    for kind in ("_SignalingThread", "asyncio"):
        for thread in threading.enumerate():
            if kind in (type(thread).__name__, thread.name.partition("_")[0]):
                # The method of Orbax's class would raise the thread's error.
                threading.Thread.join(thread, max(0.0, deadline - time.monotonic()))


def can_write(dtype: Any) -> bool:
    """Returns True if TensorStore, which writes Orbax's arrays, supports a dtype.

    It supports ``int4`` but not ``uint4``, and most of the 8-bit floats.
    """
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return True  # written as uint32
    try:
        tensorstore.dtype(dtype.name)
    except ValueError:
        return False
    return True


def load(path: str, wanted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Reads and places the arrays of a step, without waiting for another process."""
    if not wanted:
        return {}
    with _context_of_one():
        return ocp.load_checkpointables(LiteralPath(path), wanted)


def _context_of_one() -> ocp.Context:
    """Returns a context in which this process does not wait for other processes."""
    context = _make_context()
    # In Orbax, all processes wait for one another after each has read its shards. They
    # would wait for a process that cannot read. So Orbax is told that each process is a
    # separate job.
    if jax.process_count() > 1:
        me, options = jax.process_index(), context.multiprocessing_options
        options.primary_host, options.active_processes = me, {me}
        options.barrier_sync_key_prefix = f"nnx_parallel_{me}"
    return context


def describe_plain(path: str) -> Any:
    """Returns Orbax's metadata of the one tree in a plain checkpoint."""
    with _context_of_one():
        return ocp.metadata(LiteralPath(path)).metadata


def load_plain(path: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Reads and places part of a plain checkpoint; waits for no other process."""
    context = _context_of_one()
    context.pytree_options.loading.partial_load = True
    with context:
        return ocp.load(LiteralPath(path), wanted)


def describe_group(directory: str, group: str) -> Any:
    """Returns Orbax's metadata of the arrays of a group, or raises the actual error.

    Orbax can also describe an entire step. But then it treats every error, even a
    temporary one, as missing metadata.
    """
    path = LiteralPath(directory) / group
    with ThreadPoolExecutor(1) as pool:  # the caller may be running an event loop
        handler = ocp.handlers.PyTreeHandler
        return pool.submit(lambda: asyncio.run(handler().metadata(path))).result()


LOGGER = logging.getLogger("absl")
DEBUG = logging.getLogger("nnx_parallel.checkpoint")

_OF_A_SAVE = re.compile(r"_SignalingThread|Handler Commit|metadata=|Save Finalize")


def hide_log(record: logging.LogRecord) -> bool:
    """Hides warnings and errors of Orbax, as the filter of a logger.

    They go to ``logging.getLogger("nnx_parallel.checkpoint")``, for debugging.
    """
    if record.levelno < logging.WARNING or "orbax" not in record.pathname:
        return True
    DEBUG.debug("Orbax: %s", record.getMessage(), exc_info=record.exc_info)
    return False


def hide_stragglers(record: logging.LogRecord) -> bool:
    """Hides, like `hide_log`, records that Orbax's threads log after a failed save."""
    return hide_log(record) if _OF_A_SAVE.search(record.getMessage()) else True


def hide_lost_reads(record: logging.LogRecord) -> bool:
    """Hides, in asyncio's log, errors of arrays whose read has already failed."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, ValueError) or 'Error opening "zarr' not in str(error):
        return True
    DEBUG.debug("A read of a failed restore has ended: %s", error)
    return False


@functools.cache  # it runs once in a process
def hide_late_failures() -> None:
    """Hides tracebacks of transfers that end after their save or restore has failed.

    TensorStore then calls the event loop of Orbax's thread, which is closed by then,
    and Python prints the resulting error. asyncio also logs the exceptions of that
    loop's tasks. Both happen for every array (docs/library-notes.md, "Orbax: saving"
    and "reading").
    """
    logging.getLogger("asyncio").addFilter(hide_lost_reads)
    show = sys.unraisablehook

    def hook(found: Any) -> None:
        if str(found.exc_value) == "Event loop is closed" and found.object is None:
            DEBUG.debug("A transfer of a failed call has ended: %s", found.exc_value)
        else:
            show(found)

    sys.unraisablehook = hook


_ABOUT_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# JAX and TensorStore give the kind of an error only by a code in its text.
_TRANSIENT = re.compile(
    r"\b(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED"
    r"|EIO|ESTALE|EACCES|EMFILE|ENFILE|ENOMEM|ETIMEDOUT)\b"
)


def root_cause(error: BaseException) -> str:
    """Returns the last error of a chain of causes, as text.

    Orbax wraps causes in unrelated errors.
    """
    error = _last(error)
    if isinstance(error, ParallelError):
        return f"{type(error).__name__}: {error}"
    # TensorStore appends its entire spec and lines of its source; both are cut off.
    text, *_ = re.split(r" \[(?:tensorstore_spec|source locations)=", str(error))
    return f"{type(error).__name__}: {printable(text)}"


def first_cause(error: BaseException) -> BaseException:
    """Returns the last error of a chain, without the stacks of Orbax's threads."""
    error = _last(error)
    error.__context__ = None
    return error.with_traceback(None)


def _last(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _last(error.__cause__)


@contextlib.contextmanager
def reading(where: str, steps: list[int] | None = None) -> Iterator[None]:
    """Turns an Orbax error into one that says whether the files are corrupt.

    An interrupt is raised unchanged, even if Orbax has turned it into another error.

    Args:
        where: The files that are read, for messages.
        steps: The saved steps, for messages. Without them, only transient errors are
            converted; any other error is raised unchanged.

    Raises:
        CheckpointReadError: If the files are corrupt.
        CheckpointUnavailableError: If the files may be intact, and readable later.
    """
    hide_late_failures()
    LOGGER.addFilter(hide_log)
    try:
        with raising_interrupts():
            yield
    except ParallelError:
        raise
    except Exception as error:
        # The new error has no chain of Orbax's internal tracebacks; they go to the
        # debug log.
        DEBUG.debug("Cannot read %s", where, exc_info=error)
        if is_transient(error) or _are_files_short():
            raise CheckpointUnavailableError(
                f"Cannot read {where} now: {root_cause(error)} This is not damage, and "
                "nothing was changed: try again when the cause is gone."
            ) from None
        if steps is None:
            raise
        raise CheckpointReadError(
            f"Cannot read {where}: {root_cause(error)} Its files are damaged, half "
            f"deleted, or from another program. Saved steps: {steps}."
        ) from None
    finally:
        LOGGER.removeFilter(hide_log)


def is_transient(error: BaseException) -> bool:
    """Returns True if an error has a temporary cause, outside of the files.

    Examples are exhausted memory or file handles, a disk or network that does not
    answer, and a directory without permission.
    """
    is_io = isinstance(error, OSError | MemoryError)
    if (is_io and not isinstance(error, _ABOUT_FILES)) or _TRANSIENT.search(str(error)):
        return True
    if isinstance(error, CancelledError | asyncio.CancelledError):
        return True  # something outside ended the read
    return error.__cause__ is not None and is_transient(error.__cause__)


def _are_files_short() -> bool:
    """Returns True if hardly any file can be opened, which may cause any other error.

    C++ code reports this state in other words (``random_device: device not
    available``), without ``EMFILE``.
    """
    with contextlib.ExitStack() as opened:
        for _ in range(64):  # a healthy process can still open this many
            try:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            except OSError:
                return True
    return False
