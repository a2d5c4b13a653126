"""Calls of Orbax: policies, saves, and every workaround for Orbax 0.12.8.

Orbax's v1 API writes and reads the arrays; the rest of the package sees it through this
file. Each workaround has the symptom whose end lets it go, and a known upstream issue.
"""

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import jax
import tensorstore
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.checksum import ChecksumHandler
from nnx_parallel.checkpoint.files import (
    COMMITTED,
    METADATA,
    UNFINISHED,
    LiteralPath,
    delete_steps,
    is_foreign,
    is_ours,
    is_url,
    parse_step,
    printable,
    read_step_metadata,
)
from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.checkpoint.orbax_log import (
    DEBUG,
    LOGGER,
    hide_late_failures,
    hide_log,
    hide_stragglers,
)
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.distributed.runtime import raising_interrupts
from nnx_parallel.errors import (
    CheckpointReadError,
    CheckpointSaveError,
    CheckpointUnavailableError,
    ParallelError,
)

GIVE_UP_SECONDS = 1200
"""After which Orbax gives up a save that has not ended, or failed on one process."""

_SAVE = ocp.training.save_decision_policies


class PreemptionPolicy(_SAVE.PreemptionCheckpointingPolicy):
    """Saves before a preemption, and remembers that one was announced.

    Attributes:
        has_notice: True once jax has announced a preemption: a SIGTERM, possibly one
            that came before the fit could handle it.
    """

    has_notice = False

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        """True if jax announces a preemption at this step, on all processes."""
        self.has_notice |= context.reached_preemption
        return super().should_save(step, previous_steps, context=context)


class StepNames:
    """Names a step by its number, and lists only directories that are checkpoints.

    Orbax by itself takes every directory whose name is a number for a step, and deletes
    it in its turn; and one step whose metadata has an unknown field ends the listing of
    all.

    Attributes:
        corrupt: Steps that the last listing left out although they hold the remains of
            a checkpoint, each with its problem.
        foreign: Steps that another program may have written, listed or corrupt: they
            are neither deleted nor renamed.
    """

    def __init__(self) -> None:
        self.build_name = ocp.path.step.standard_name_format().build_name
        self.corrupt: dict[int, str] = {}
        self.foreign: set[int] = set()

    def find_step(self, base_path: Any, step: int, time: int | None = None) -> Any:
        """The checkpoint of a step; Orbax asks for its path alone."""
        path = LiteralPath(base_path) / str(step)
        return ocp.training.CheckpointMetadata(
            step, path, metadata=None, commit_timestamp_nsecs=time
        )

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yields the checkpoints; ``OSError`` if they cannot be read now."""
        self.corrupt, self.foreign = {}, set()
        # A step of a local directory appears and vanishes at once, by a rename; one of
        # an object store with the file that is written last and deleted first.
        is_local = not is_url(str(base_path))
        for path in LiteralPath(base_path).iterdir():
            step = parse_step(path.name)
            if step is None or not (is_local or (path / COMMITTED).exists()):
                continue
            problem = None
            try:
                # Not by Orbax, which takes a file that cannot be read just now for one
                # that is gone, opens whatever has its name, and parses all of it.
                metadata = read_step_metadata(path)
            except (FileNotFoundError, NotADirectoryError):
                if is_ours(path) is not None:
                    problem = "has no metadata left"
            except ValueError as error:
                # A directory where the file should be is no sign of a checkpoint.
                if (path / METADATA).is_file() or is_ours(path) is not None:
                    problem = f"has metadata that cannot be parsed ({error})"
            else:
                time = metadata["commit_timestamp_nsecs"]
                if (path / "metrics").exists():  # Orbax would open it, here and now
                    problem = "holds metrics of another program"
                elif time is not None:
                    if is_foreign(metadata["custom_metadata"] or {}):
                        self.foreign.add(step)
                    yield self.find_step(base_path, step, time)
                else:
                    problem = "was never completed"
            if problem is not None:
                self.corrupt[step] = problem
                if not is_ours(path):
                    self.foreign.add(step)


def open_directory(
    options: Checkpoint, *, cleanup: bool
) -> tuple[ocp.training.Checkpointer, StepNames, PreemptionPolicy]:
    """Opens a directory with Orbax, to save steps as the options say.

    ``cleanup`` deletes what a killed save has left. Orbax keeps every step: a deletion
    of its own is not atomic, and one that fails would fail the save.
    """
    context = _make_context()
    context.async_options.timeout_secs = GIVE_UP_SECONDS
    registry = ocp.handlers.local_registry()
    registry.add(ChecksumHandler)
    context.checkpointables_options.registry = registry
    # The header and the reader's shardings say all; no mesh goes to disk.
    context.array_options.saving.enable_write_sharding_file = False
    # Each replica of an array writes a slice of it, cut by a program that is compiled
    # for each shape while the fit waits: https://github.com/google/orbax/issues/2934.
    # Below this size one replica writes the whole array.
    context.array_options.saving.min_slice_bytes_for_replica_parallel = 2**20
    # A directory made in the background is one that no fit waits for. If it cannot be
    # made, Orbax's writers wait 5 minutes for it, and the interpreter's exit for them:
    # `options.check_writable` tries first. A URL cannot be tried.
    directory = str(options.directory)
    context.async_options.create_directories_asynchronously = not is_url(directory)
    # The preemption comes first: `AnySavePolicy` asks none after the first yes.
    preemption, every = PreemptionPolicy(), _SAVE.FixedIntervalPolicy(options.every)
    when: Any = _SAVE.AnySavePolicy([preemption, every])
    names = StepNames()
    orbax = ocp.training.Checkpointer(
        LiteralPath(directory),
        context=context,
        save_decision_policy=when,
        step_name_format=names,
        cleanup_tmp_directories=cleanup,  # not Orbax's default: the bytes would stay
    )
    return orbax, names, preemption


def _make_context() -> ocp.Context:
    context = ocp.Context()
    context.file_options.path_class = LiteralPath
    return context


def can_write(dtype: Any) -> bool:
    """True if TensorStore, with which Orbax writes arrays, knows a type.

    It has ``int4`` and not ``uint4``, and most of the 8-bit floats.
    """
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return True  # written as uint32
    try:
        tensorstore.dtype(dtype.name)
    except ValueError:
        return False
    return True


def load(path: str, wanted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Reads the arrays of a step, placed as asked, without waiting for any process."""
    if not wanted:
        return {}
    with _context_of_one():
        return ocp.load_checkpointables(LiteralPath(path), wanted)


def _context_of_one() -> ocp.Context:
    """A context in which this process waits for no other."""
    context = _make_context()
    # Orbax lets all processes meet once each has read its shards: they would wait
    # for one that cannot read. So each process is a job of its own.
    if jax.process_count() > 1:
        me, options = jax.process_index(), context.multiprocessing_options
        options.primary_host, options.active_processes = me, {me}
        options.barrier_sync_key_prefix = f"nnx_parallel_{me}"
    return context


def describe_plain(path: str) -> Any:
    """Orbax's metadata of the one tree in a checkpoint that Orbax alone has written."""
    with _context_of_one():
        return ocp.metadata(LiteralPath(path)).metadata


def load_plain(path: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Reads a part of that tree, placed as asked, without waiting for any process."""
    context = _context_of_one()
    context.pytree_options.loading.partial_load = True
    with context:
        return ocp.load(LiteralPath(path), wanted)


def describe_group(directory: str, group: str) -> Any:
    """Orbax's metadata of the arrays of a group, or the error that hides it.

    Describing a whole step, Orbax takes any error for "no metadata": a bad moment too.
    """
    path = LiteralPath(directory) / group
    with ThreadPoolExecutor(1) as pool:  # the caller may have an event loop of its own
        handler = ocp.handlers.PyTreeHandler
        return pool.submit(lambda: asyncio.run(handler().metadata(path))).result()


class AsyncSave(logging.Filter):
    """One save in progress, and how it ends; the filter of what its thread logs.

    With several processes Orbax reports a failure only after a barrier that the others
    never reach: it gives up 20 minutes after the save began (a barrier that some never
    reach is also in https://github.com/google/orbax/issues/2934). But the process that
    fails logs its error at once, from the thread that writes. `listen` before the save
    starts: the error may be logged before Orbax returns.

    With ``cleans``, it deletes what an earlier one has left when it ends well.

    Attributes:
        error: With which the save has ended on all processes, or ``None``.
        superseded: Older steps to delete once this one is saved.
        problems: A line for each of them that could not be deleted.
        step, seconds: What is saved, and how long that took.
    """

    def __init__(self, step: int, directory: str, *, cleans: bool = False) -> None:
        super().__init__()
        self.step, self._directory, self._cleans = step, directory, cleans
        self.error: BaseException | None = None
        self.superseded: list[int] = []
        self.problems: list[str] = []
        self._began, self.seconds = time.monotonic(), 0.0
        self._logged: Exception | None = None
        self._has_ended = threading.Event()
        self._is_reported = False

    def listen(self) -> None:
        """Reads the log, until `end`."""
        hide_late_failures()
        # A filter that hides a record hides it from those after it.
        LOGGER.removeFilter(hide_stragglers)
        LOGGER.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps the error that Orbax's writing thread logs; hides Orbax's lines."""
        error = record.exc_info and record.exc_info[1]
        # In a thread of this name; other threads, and other libraries, log here too.
        if record.threadName == "async_save" and isinstance(error, Exception):
            self._logged = error
        return hide_log(record)

    def failure(self, error: BaseException) -> CheckpointSaveError:
        """The error to raise when the save cannot start or does not end well."""
        where = f"step {self.step} in '{self._directory}'"
        why = f"{root_cause(error).rstrip('.')}. No other checkpoint was deleted."
        return CheckpointSaveError(f"Saving {where} failed: {why}")

    def follow(self, response: ocp.AsyncResponse[bool]) -> None:
        """Waits for the save, and deletes older steps, in a thread of its own."""

        def wait() -> None:
            try:
                response.result()
                # Only now: as long as this step is not saved, none is deleted.
                if jax.process_index() == 0:
                    self.problems = delete_steps(self._directory, self.superseded)
                    if self._cleans:
                        self.discard()
            except BaseException as error:  # whatever ended Orbax's thread
                self.error = error
            finally:
                self.end()

        # A daemon: the interpreter must not wait 20 minutes for a failed save.
        follower = threading.Thread(target=wait, name="nnx_parallel.save", daemon=True)
        try:
            follower.start()
        except RuntimeError:  # no more threads
            self.end()
            raise

    def end(self) -> None:
        """Marks the save as ended and stops reading the log."""
        LOGGER.removeFilter(self)
        LOGGER.addFilter(hide_stragglers)
        self.seconds = time.monotonic() - self._began
        self._has_ended.set()

    def discard(self) -> None:
        """Deletes what this and earlier saves that failed have written, once it ended.

        Orbax does so only when the directory is opened again. Threads of a save that
        has just failed may still be writing: what they leave goes after the next save.
        """
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):
                for path in LiteralPath(self._directory).glob(f"*.{UNFINISHED}*"):
                    with contextlib.suppress(Exception):
                        path.rmtree()

    def join(self, *, patiently: bool) -> None:
        """Waits until the save has ended; calls `check` meanwhile or ``patiently``."""
        # In turns: a failure of this process is logged while Orbax's barrier waits.
        while not self._has_ended.wait(0.5):
            if not patiently:
                self.check()

    def check(self) -> None:
        """Raises ``error``, or that of this process while others wait for it, once."""
        # A single process waits for no other: its save ends with an error.
        logged = self._logged if jax.process_count() > 1 else None
        error = self.error or logged
        if error is not None and not self._is_reported:
            self._is_reported = True
            raise self.failure(error) from first_cause(error)

    def state(self) -> str:
        """``"ended"``, ``"failed"`` (others wait) or ``"running"``, after 0.5 s."""
        if self._has_ended.wait(0.5):
            return "ended"
        return "running" if self._logged is None else "failed"


def wait_on_all_processes(save: AsyncSave | None) -> bool:
    """Waits until a save has ended on all processes (True), or failed on one (False).

    After a failure on one it ends nowhere before Orbax gives it up.
    """
    states = ["running"]
    while "failed" not in states and set(states) != {"ended"}:
        mine = "ended" if save is None else save.state()
        states = allgather_object("save in progress", mine)
    return "failed" not in states


_ABOUT_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# As jax and TensorStore spell them, within exceptions of no particular class.
_TRANSIENT = re.compile(
    r"\b(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED"
    r"|EIO|ESTALE|EACCES|EMFILE|ENFILE|ENOMEM|ETIMEDOUT)\b"
)


def root_cause(error: BaseException) -> str:
    """The last error of a chain: Orbax wraps what went wrong in unrelated errors."""
    error = _last(error)
    if isinstance(error, ParallelError):
        return f"{type(error).__name__}: {error}"
    # TensorStore adds its whole spec, and lines of its source.
    text, *_ = re.split(r" \[(?:tensorstore_spec|source locations)=", str(error))
    return f"{type(error).__name__}: {printable(text)}"


def first_cause(error: BaseException) -> BaseException:
    """The last error of a chain, without the stacks of Orbax's threads."""
    error = _last(error)
    error.__context__ = None
    return error.with_traceback(None)


def _last(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _last(error.__cause__)


@contextlib.contextmanager
def reading(where: str, steps: list[int] | None = None) -> Iterator[None]:
    """Names the cause of an error of Orbax's, and tells corruption from a bad moment.

    An interrupt is neither: it is raised as it is, also if Orbax has made another error
    of it.

    Raises:
        CheckpointReadError: If the files, ``where``, are corrupt. Without ``steps``,
            the saved ones, an error says nothing of them and is raised as it is.
        CheckpointUnavailableError: If they may be intact, and read well later.
    """
    hide_late_failures()
    LOGGER.addFilter(hide_log)
    try:
        with raising_interrupts():
            yield
    except ParallelError:
        raise
    except Exception as error:
        # Without its chain of tracebacks, which is Orbax's inner life.
        DEBUG.debug("Cannot read %s", where, exc_info=error)
        if is_transient(error) or _are_files_short():
            raise CheckpointUnavailableError(
                f"Cannot read {where} now: {root_cause(error)} That is no damage, and "
                "nothing has changed: start again when it is over."
            ) from None
        if steps is None:
            raise
        raise CheckpointReadError(
            f"Cannot read {where}: {root_cause(error)} Its files are damaged, half "
            f"deleted, or not this library's. Saved steps: {steps}."
        ) from None
    finally:
        LOGGER.removeFilter(hide_log)


def is_transient(error: BaseException) -> bool:
    """True if an error is about the moment, not about what is on disk.

    Memory or file handles used up, a disk or network that does not answer, a directory
    without permission.
    """
    is_io = isinstance(error, OSError | MemoryError)
    if (is_io and not isinstance(error, _ABOUT_FILES)) or _TRANSIENT.search(str(error)):
        return True
    if isinstance(error, CancelledError | asyncio.CancelledError):
        return True  # the read was ended from outside
    return error.__cause__ is not None and is_transient(error.__cause__)


def _are_files_short() -> bool:
    """True where hardly a file can be opened: then any error may come of that.

    C++ fails in words of its own (``random_device: device not available``), without
    ``EMFILE``.
    """
    with contextlib.ExitStack() as opened:
        for _ in range(64):  # as many as a healthy process could still open
            try:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            except OSError:
                return True
    return False
