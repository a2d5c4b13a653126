"""Calls of Orbax: policies, saves, and every workaround for Orbax 0.12.8.

Orbax's v1 API writes and reads the arrays; the rest of the package sees it through this
file. A comment at each workaround names the symptom, and the upstream issue if one is
known; the workaround can go once the symptom is gone.
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
"""Time after which Orbax gives up a save that has not ended or failed on a process."""

_SAVE = ocp.training.save_decision_policies


class PreemptionPolicy(_SAVE.PreemptionCheckpointingPolicy):
    """Saves before a preemption, and remembers that one was announced.

    Attributes:
        has_notice: True once jax has announced a preemption: a SIGTERM, possibly one
            that came before the fit could handle it.
    """

    has_notice = False

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        """True on all processes if jax announces a preemption at this step."""
        self.has_notice |= context.reached_preemption
        return super().should_save(step, previous_steps, context=context)


class StepNames:
    """Names a step by its number, and lists only directories that are checkpoints.

    By default Orbax takes every directory with a number as name for a step, and deletes
    it as an old step. And one step whose metadata has an unknown field makes the whole
    listing fail.

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
        """The checkpoint of a step; Orbax asks only for its path."""
        path = LiteralPath(base_path) / str(step)
        return ocp.training.CheckpointMetadata(
            step, path, metadata=None, commit_timestamp_nsecs=time
        )

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yields the checkpoints; ``OSError`` if they cannot be read now."""
        self.corrupt, self.foreign = {}, set()
        # A rename makes a step of a local directory appear and vanish at once. A step
        # in an object store exists as long as its commit file, which is written last
        # and deleted first.
        is_local = not is_url(str(base_path))
        for path in LiteralPath(base_path).iterdir():
            step = parse_step(path.name)
            if step is None or not (is_local or (path / COMMITTED).exists()):
                continue
            problem = None
            try:
                # The file is not read with Orbax, which treats a file that cannot be
                # read now as missing, opens files of any kind, and parses files of any
                # size.
                metadata = read_step_metadata(path)
            except (FileNotFoundError, NotADirectoryError):
                if is_ours(path) is not None:
                    problem = "has no metadata left"
            except ValueError as error:
                # A directory in place of the file is not a sign of a checkpoint.
                if (path / METADATA).is_file() or is_ours(path) is not None:
                    problem = f"has metadata that cannot be parsed ({error})"
            else:
                time = metadata["commit_timestamp_nsecs"]
                if (path / "metrics").exists():  # Orbax would open it at once
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

    ``cleanup`` deletes the remains of a killed save. Orbax keeps every step: its
    deletions are not atomic, and a failed deletion would fail the save.
    """
    context = _make_context()
    context.async_options.timeout_secs = GIVE_UP_SECONDS
    registry = ocp.handlers.local_registry()
    registry.add(ChecksumHandler)
    context.checkpointables_options.registry = registry
    # The header and the reader's shardings suffice; no mesh goes to disk.
    context.array_options.saving.enable_write_sharding_file = False
    # Each replica of an array writes a slice of it, cut by a program that is compiled
    # for each shape while the fit waits: https://github.com/google/orbax/issues/2934.
    # Below this size one replica writes the whole array.
    context.array_options.saving.min_slice_bytes_for_replica_parallel = 2**20
    # The fit does not wait for a directory that is made in the background. If it cannot
    # be made, Orbax's writers wait 5 minutes for it, and the interpreter's exit waits
    # for them: so `options.check_writable` tries first. It cannot try a URL.
    directory = str(options.directory)
    context.async_options.create_directories_asynchronously = not is_url(directory)
    # The preemption comes first: `AnySavePolicy` asks no policy after the first yes.
    preemption, every = PreemptionPolicy(), _SAVE.FixedIntervalPolicy(options.every)
    when: Any = _SAVE.AnySavePolicy([preemption, every])
    names = StepNames()
    orbax = ocp.training.Checkpointer(
        LiteralPath(directory),
        context=context,
        save_decision_policy=when,
        step_name_format=names,
        cleanup_tmp_directories=cleanup,  # by default Orbax would leave the bytes
    )
    return orbax, names, preemption


def _make_context() -> ocp.Context:
    context = ocp.Context()
    context.file_options.path_class = LiteralPath
    return context


def can_write(dtype: Any) -> bool:
    """True if TensorStore, which writes Orbax's arrays, knows a type.

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
    # Orbax makes all processes meet once each has read its shards: they would wait for
    # a process that cannot read. So each process is a separate job for Orbax.
    if jax.process_count() > 1:
        me, options = jax.process_index(), context.multiprocessing_options
        options.primary_host, options.active_processes = me, {me}
        options.barrier_sync_key_prefix = f"nnx_parallel_{me}"
    return context


def describe_plain(path: str) -> Any:
    """Orbax's metadata of the one tree in a plain checkpoint."""
    with _context_of_one():
        return ocp.metadata(LiteralPath(path)).metadata


def load_plain(path: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Reads a part of a plain checkpoint, placed as asked; waits for no process."""
    context = _context_of_one()
    context.pytree_options.loading.partial_load = True
    with context:
        return ocp.load(LiteralPath(path), wanted)


def describe_group(directory: str, group: str) -> Any:
    """Orbax's metadata of the arrays of a group, or the error that hides it.

    When Orbax describes a whole step, it takes any error for "no metadata", also a
    temporary one.
    """
    path = LiteralPath(directory) / group
    with ThreadPoolExecutor(1) as pool:  # the caller may be running an event loop
        handler = ocp.handlers.PyTreeHandler
        return pool.submit(lambda: asyncio.run(handler().metadata(path))).result()


class AsyncSave(logging.Filter):
    """One save in progress, and its result; it filters the log of the writing thread.

    With several processes Orbax reports a failure only after a barrier that the others
    never reach: it gives up 20 minutes after the save began (a barrier that some never
    reach is also in https://github.com/google/orbax/issues/2934). But the process that
    fails logs its error at once, from the thread that writes. Call `listen` before the
    save starts: the error may be logged before Orbax returns.

    With ``cleans``, a save that ends well deletes the remains of earlier ones.

    Attributes:
        error: Error with which the save has ended on all processes, or ``None``.
        superseded: Older steps to delete once this one is saved.
        problems: A line for each of these steps that could not be deleted.
        step, seconds: The saved step, and the duration of the save.
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
        # A filter that hides a record hides it from later filters too.
        LOGGER.removeFilter(hide_stragglers)
        LOGGER.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps the error that Orbax's writing thread logs; hides Orbax's lines."""
        error = record.exc_info and record.exc_info[1]
        # Orbax writes in a thread of this name; other threads and libraries log too.
        if record.threadName == "async_save" and isinstance(error, Exception):
            self._logged = error
        return hide_log(record)

    def failure(self, error: BaseException) -> CheckpointSaveError:
        """The error to raise when the save cannot start or does not end well."""
        where = f"step {self.step} in '{self._directory}'"
        why = f"{root_cause(error).rstrip('.')}. No other checkpoint was deleted."
        return CheckpointSaveError(f"Saving {where} failed: {why}")

    def follow(self, response: ocp.AsyncResponse[bool]) -> None:
        """Waits for the save, and deletes older steps, in a separate thread."""

        def wait() -> None:
            try:
                response.result()
                # Only now: no step is deleted before this one is saved.
                if jax.process_index() == 0:
                    self.problems = delete_steps(self._directory, self.superseded)
                    if self._cleans:
                        self.discard()
            except BaseException as error:  # any error that ended Orbax's thread
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
        """Deletes the files of this and earlier failed saves, once this save has ended.

        Orbax does so only when the directory is opened again. Threads of a save that
        has just failed may still be writing: their files are deleted after the next
        save.
        """
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):
                for path in LiteralPath(self._directory).glob(f"*.{UNFINISHED}*"):
                    with contextlib.suppress(Exception):
                        path.rmtree()

    def join(self, *, patiently: bool) -> None:
        """Waits until the save has ended; calls `check` if not ``patiently``."""
        # A loop: a failure of this process is logged while Orbax's barrier waits.
        while not self._has_ended.wait(0.5):
            if not patiently:
                self.check()

    def check(self) -> None:
        """Raises, once, ``error`` or this process's error while others wait for it."""
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

    After a failure on one process it ends on no process before Orbax gives up.
    """
    states = ["running"]
    while "failed" not in states and set(states) != {"ended"}:
        mine = "ended" if save is None else save.state()
        states = allgather_object("save in progress", mine)
    return "failed" not in states


_ABOUT_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Codes in the text of jax's and TensorStore's errors, whose class does not tell.
_TRANSIENT = re.compile(
    r"\b(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED"
    r"|EIO|ESTALE|EACCES|EMFILE|ENFILE|ENOMEM|ETIMEDOUT)\b"
)


def root_cause(error: BaseException) -> str:
    """The last error of a chain, as text: Orbax wraps the cause in unrelated errors."""
    error = _last(error)
    if isinstance(error, ParallelError):
        return f"{type(error).__name__}: {error}"
    # TensorStore adds its whole spec, and lines of its source; both are cut off.
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
    """Names the cause of an Orbax error: corrupt files, or a condition that passes.

    An interrupt is raised unchanged, also if Orbax has turned it into another error.

    Args:
        where: The files that are read, for messages.
        steps: The saved steps, for messages. Without them an error says nothing about
            the files, and is raised unchanged.

    Raises:
        CheckpointReadError: If the files are corrupt.
        CheckpointUnavailableError: If they may be intact, and can be read later.
    """
    hide_late_failures()
    LOGGER.addFilter(hide_log)
    try:
        with raising_interrupts():
            yield
    except ParallelError:
        raise
    except Exception as error:
        # Raised without the chain of Orbax's internal tracebacks, which goes to the
        # debug log.
        DEBUG.debug("Cannot read %s", where, exc_info=error)
        if is_transient(error) or _are_files_short():
            raise CheckpointUnavailableError(
                f"Cannot read {where} now: {root_cause(error)} This is not damage, and "
                "nothing was changed: try again when the cause is over."
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
    """True if an error is about a condition that may pass, not about the files.

    Examples are exhausted memory or file handles, a disk or network that does not
    answer, and a directory without permission.
    """
    is_io = isinstance(error, OSError | MemoryError)
    if (is_io and not isinstance(error, _ABOUT_FILES)) or _TRANSIENT.search(str(error)):
        return True
    if isinstance(error, CancelledError | asyncio.CancelledError):
        return True  # the read was ended from outside
    return error.__cause__ is not None and is_transient(error.__cause__)


def _are_files_short() -> bool:
    """True if hardly any file can be opened: this may then cause any other error.

    C++ code reports it in other words (``random_device: device not available``),
    without ``EMFILE``.
    """
    with contextlib.ExitStack() as opened:
        for _ in range(64):  # a healthy process can still open this many
            try:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            except OSError:
                return True
    return False
