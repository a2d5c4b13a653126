"""Failures of Orbax, told by what caused them.

Reads checkpoints, each process by itself, and tells damage from a bad moment.

Keeps Orbax from writing until a save has copied all of its arrays.

A save that Orbax writes in the background: whether it goes on, and how it ends.

Opens a directory with Orbax.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.checksum import FingerprintHandler
from nnx_parallel.checkpoint.options import METADATA_FILE, Checkpoint, Rules, is_url
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import (
    CheckpointReadError,
    CheckpointSaveError,
    CheckpointUnavailableError,
    ParallelError,
)

_ABOUT_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# As jax and TensorStore write them, within errors of no kind.
_PASSING = re.compile(
    r"\b(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED"
    r"|EIO|ESTALE|EACCES|EMFILE|ENFILE|ENOMEM|ETIMEDOUT)\b"
)

_SPARE_FILES = 64
"""Handles of files that a process in good order could still open."""


def save_error(step: int, directory: str, error: BaseException) -> CheckpointSaveError:
    """The error to raise for one of Orbax while it saved."""
    return CheckpointSaveError(
        f"Saving step {step} in '{directory}' failed: {root_cause(error)} No other "
        "checkpoint was deleted."
    )


def is_passing(error: BaseException) -> bool:
    """Whether an error speaks of the moment, not of what is on disk.

    Memory or file handles used up, a disk or network that does not answer, a directory
    that may not be read: the same files can be read well later.
    """
    if isinstance(error, OSError | MemoryError) and not isinstance(error, _ABOUT_FILES):
        return True
    if _PASSING.search(str(error)):
        return True
    return error.__cause__ is not None and is_passing(error.__cause__)


def is_no_damage(error: BaseException) -> bool:
    """Whether what is on disk may be well in spite of an error.

    It may where the error is one of the moment (`is_passing`); and where hardly a file
    can be opened now, for then any error may come of that: in C++ one of its random
    numbers, for instance.
    """
    return is_passing(error) or _are_files_short()


def _are_files_short() -> bool:
    with contextlib.ExitStack() as opened:
        for _ in range(_SPARE_FILES):
            try:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            except OSError:
                return True
    return False


def root_cause(error: BaseException) -> str:
    """Returns the last of a chain; Orbax wraps what went wrong in unlike errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


T = TypeVar("T")


def load(path: str, wanted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The arrays of a step, placed as asked, read without waiting for anyone.

    Left to itself Orbax has all processes meet once each has read its shards: they
    would wait for one that cannot.

    Args:
        path: The step's directory.
        wanted: Shapes with shardings, by group and path.
    """
    if not wanted:
        return {}
    context = ocp.Context()
    if jax.process_count() > 1:
        me = jax.process_index()
        options = context.multiprocessing_options
        options.primary_host = me
        options.active_processes = {me}
        options.barrier_sync_key_prefix = f"nnx_parallel_{me}"
    with context:
        return ocp.load_checkpointables(path, wanted)


def describe_group(directory: str, group: str) -> Any:
    """What Orbax knows of the arrays of a group, or the error that keeps it from it.

    When it describes a whole step it takes any error for no description: that of a bad
    moment, too.
    """
    path = ocp.path.Path(directory) / group

    async def describe() -> Any:
        return await ocp.handlers.PyTreeHandler().metadata(path)

    with ThreadPoolExecutor(1) as pool:  # the caller may have an event loop of its own
        return pool.submit(asyncio.run, describe()).result()


def read_together(read: Callable[[], T]) -> T:
    """What all processes have read, or an error on all of them.

    Args:
        read: Reads, without waiting for another process.

    Raises:
        CheckpointReadError: On all processes, if one finds damage.
    """
    found: list[T] = []
    problem = ""
    try:
        found.append(read())
    except CheckpointReadError as error:
        if jax.process_count() == 1:
            raise
        problem = str(error)
    problems = allgather_object("read checkpoint", problem)
    bad = [f"On process {i}: {text}" for i, text in enumerate(problems) if text]
    if bad:
        raise CheckpointReadError("\n".join(bad))
    return found[0]


def read_error(where: str, steps: list[int], error: Exception) -> Exception:
    """The error to raise for one of Orbax.

    Args:
        where: The step and its directory.
        steps: The saved steps.
        error: What reading has raised.
    """
    if is_no_damage(error):
        return _unavailable(where, error)
    return CheckpointReadError(
        f"Cannot read {where}: {root_cause(error)} Its files are damaged, half "
        f"deleted, or not this library's. Saved steps: {steps}."
    )


@contextlib.contextmanager
def unavailable_if_no_damage(where: str) -> Iterator[None]:
    """Names an error of the moment as such, and leaves any other as it is.

    Raises:
        CheckpointUnavailableError: In place of an error that may be no damage.
    """
    try:
        yield
    except ParallelError:
        raise
    except Exception as error:
        if not is_no_damage(error):
            raise
        raise _unavailable(where, error) from error


def _unavailable(where: str, error: Exception) -> CheckpointUnavailableError:
    return CheckpointUnavailableError(
        f"Cannot read {where} now: {root_cause(error)} That is no damage, and nothing "
        "has changed: start again when it is over."
    )


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


_LOGGER = logging.getLogger("absl")
_WRITER = "async_save"
"""The thread in which Orbax writes, and logs what it fails of."""


class SaveUnderWay:
    """One save, from before it begins until it has ended, well or not.

    With several processes Orbax tells of a failure only once all of them have met,
    which those that did not fail never come to: 20 minutes after the save began it
    gives up. What fails in this process it logs at once, from the thread that writes:
    maybe before the save has come back from its start, so that this is made before.

    Args:
        step: The step that is saved.
        directory: Where its checkpoints are.
    """

    def __init__(self, step: int, directory: str) -> None:
        self._step = step
        self._directory = directory
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._is_told = False
        self._log = _WriterLog()
        _LOGGER.addHandler(self._log)

    def follow(self, response: ocp.AsyncResponse[bool]) -> None:
        """Waits for the save, in a thread of its own."""

        def wait() -> None:
            try:
                response.result()
            except BaseException as error:  # it ended a thread of Orbax's
                self._error = error
            finally:
                self.end()

        follower = threading.Thread(target=wait, name="nnx_parallel.save", daemon=True)
        try:
            follower.start()
        except RuntimeError:
            self.end()
            raise

    def end(self) -> None:
        """Notices nothing from now on."""
        _LOGGER.removeHandler(self._log)
        self._has_ended.set()

    @property
    def has_failed(self) -> bool:
        """Whether the save has ended, and not well."""
        return self._error is not None

    def join(self, *, patiently: bool) -> None:
        """Waits until the save has ended, well or not.

        Args:
            patiently: Also where it has failed in this process, and the others wait.

        Raises:
            CheckpointSaveError: If it has, unless ``patiently``; it goes on then.
        """
        while not self._has_ended.wait(0.5):
            if not patiently:
                self.check_own_part()

    def own_part(self) -> str:
        """What this process knows of the save within half a second.

        Returns:
            ``"ended"``, well or not; ``"failed"`` here, where the others wait; or
            ``"under way"``.
        """
        if self._has_ended.wait(0.5):
            return "ended"
        return "under way" if self._log.error is None else "failed"

    def check_own_part(self) -> None:
        """Raises what writing has failed of in this process, while others wait for it.

        With one process nobody does: the save ends, and is told of as a whole.

        Raises:
            CheckpointSaveError: Once.
        """
        error = self._log.error
        if jax.process_count() > 1 and error is not None and not self._is_told:
            self._is_told = True
            raise save_error(self._step, self._directory, error)

    def check_whole(self) -> None:
        """Raises what the save has ended with, if not well and not told already.

        Raises:
            CheckpointSaveError: If so.
        """
        if self._error is not None and not self._is_told:
            raise save_error(self._step, self._directory, self._error) from self._error


class _WriterLog(logging.Handler):
    """Keeps the error that Orbax's writing thread logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.error: Exception | None = None

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        if record.threadName == _WRITER and isinstance(error, Exception):
            self.error = error


GIVE_UP_SECONDS = 1200
"""After which Orbax gives up a save that has not ended, or failed on one process."""


class OnlyCheckpoints:
    """Names a step by its number, and lists only directories that are checkpoints.

    Left to itself Orbax takes every directory with a number for a name as a step, and
    deletes it in its turn; and one step whose metadata has a field that it does not
    know keeps it from all others.

    Attributes:
        rejected: Steps whose metadata the last listing could not make out, and why.
    """

    def __init__(self) -> None:
        self._names = ocp.path.step.standard_name_format()
        self.rejected: dict[int, str] = {}

    def build_name(self, step: int) -> str:
        """The name of a step's directory."""
        return self._names.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yields the checkpoints.

        Raises:
            OSError: If their metadata cannot be read now.
        """
        self.rejected = {}
        for path in ocp.path.Path(base_path).iterdir():
            if not path.name.isdecimal() or path.name != str(int(path.name)):
                continue
            try:
                # Orbax takes a file that it cannot read just now for one that is gone.
                (path / METADATA_FILE).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                found = self._names.find_step(base_path, int(path.name))
            except (ValueError, TypeError, KeyError) as error:
                if (path / "commit_success.txt").exists():  # else never completed
                    self.rejected[int(path.name)] = str(error)
                continue
            if found.commit_timestamp_nsecs is not None:
                yield found

    def find_step(self, base_path: Any, step: int) -> Any:
        """What Orbax knows of one checkpoint."""
        return self._names.find_step(base_path, step)


def open_directory(
    options: Checkpoint,
    rules: Rules,
    names: OnlyCheckpoints,
    gate: Gate,
    *,
    cleanup: bool,
) -> ocp.training.Checkpointer:
    """Opens a directory; ``cleanup`` removes what a dead save has left.

    Args:
        options: Which directory.
        rules: When to save, and what to keep.
        names: How steps are named and found.
        gate: Behind which local directories are made.
        cleanup: Whether to remove what a dead save has left.

    Raises:
        OSError: If it cannot be read now.
    """
    context = ocp.Context()
    context.async_options.timeout_secs = GIVE_UP_SECONDS
    registry = ocp.handlers.local_registry()
    registry.add(FingerprintHandler)
    context.checkpointables_options.registry = registry
    # The header and the reader's shardings say all; no mesh goes to disk.
    context.array_options.saving.enable_write_sharding_file = False
    # To have each replica write a part of a small array takes a program for each shape,
    # for which the fit waits.
    context.array_options.saving.min_slice_bytes_for_replica_parallel = 2**20
    # Where a directory cannot be made in the background, writers wait for it, and the
    # interpreter for them: only where it is tried first.
    directory = str(options.directory)
    context.async_options.create_directories_asynchronously = not is_url(directory)
    return ocp.training.Checkpointer(
        directory if is_url(directory) else gate.path(directory),
        context=context,
        save_decision_policy=rules,
        preservation_policy=rules,
        step_name_format=names,
        cleanup_tmp_directories=cleanup,
    )
