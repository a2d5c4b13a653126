"""Calls of Orbax: policies, saves, and every workaround for Orbax 0.12.8.

Orbax's v1 API writes and reads the arrays; the rest of the package sees it through this
file. Each workaround has the symptom whose end lets it go, and a known upstream issue.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.checksum import ChecksumHandler
from nnx_parallel.checkpoint.options import Checkpoint, Metrics, best_steps, is_url
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import (
    CheckpointReadError,
    CheckpointSaveError,
    CheckpointUnavailableError,
    ParallelError,
)

UNFINISHED = "orbax-checkpoint-tmp"
"""In the name of a step's directory until it is complete."""

_METADATA, _COMMITTED = "_CHECKPOINT_METADATA", "commit_success.txt"
"""Orbax's files in the directory of a step."""

GIVE_UP_SECONDS = 1200
"""After which Orbax gives up a save that has not ended, or failed on one process."""

_SAVE = ocp.training.save_decision_policies
_KEEP = ocp.training.preservation_policies


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


@dataclasses.dataclass(eq=False)
class BestPolicy(_KEEP.PreservationPolicy):
    """Keeps the best steps by ``keep_best``; ``metrics`` are those of all saved steps.

    Orbax's ``BestN`` reads a metrics file of its own, orders NaN arbitrarily, and keeps
    every step while there are no more than ``n``, those without the metric too.
    """

    options: Checkpoint
    metrics: Mapping[int, Metrics]

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """True for each checkpoint that is one of the best."""
        metrics = {x.step: self.metrics.get(x.step, {}) for x in checkpoints}
        best = best_steps(self.options, metrics)[: self.options.num_best]
        return [found.step in best for found in checkpoints]


class StepNames:
    """Names a step by its number, and lists only directories that are checkpoints.

    Orbax by itself takes every directory whose name is a number for a step, and deletes
    it in its turn; and one step whose metadata has an unknown field ends the listing of
    all.

    Attributes:
        corrupt: Steps that the last listing left out although they hold the remains of
            a checkpoint, each with its problem.
    """

    def __init__(self) -> None:
        names = ocp.path.step.standard_name_format()
        self.build_name, self.find_step = names.build_name, names.find_step
        self.corrupt: dict[int, str] = {}

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yields the checkpoints; ``OSError`` if they cannot be read now."""
        self.corrupt = {}
        # A step of a local directory appears complete, by a rename, and is deleted file
        # by file. An object store may also be in the middle of writing one: there, what
        # is missing means nothing.
        is_local = not is_url(str(base_path))
        # No glob: a directory may be called `run[1]`.
        for path in ocp.path.Path(base_path).iterdir():
            if not path.name.isdecimal() or path.name != str(int(path.name)):
                continue
            step = int(path.name)
            try:
                # Orbax takes a file that cannot be read just now for one that is gone.
                (path / _METADATA).read_bytes()
                found = self.find_step(base_path, step)
            except (FileNotFoundError, NotADirectoryError):
                # Without a group either, the directory belongs to another program.
                if is_local and (path / "model").exists():
                    self.corrupt[step] = "has no metadata left"
            except (ValueError, TypeError, KeyError) as error:
                if is_local or (path / _COMMITTED).exists():
                    self.corrupt[step] = f"has metadata that cannot be parsed ({error})"
            else:
                if found.commit_timestamp_nsecs is not None:
                    yield found
                elif is_local:
                    self.corrupt[step] = "has no metadata left"


def open_directory(
    options: Checkpoint, metrics: Mapping[int, Metrics], *, cleanup: bool
) -> tuple[ocp.training.Checkpointer, StepNames, PreemptionPolicy]:
    """Opens a directory with Orbax, to save and keep steps as the options say.

    ``metrics`` are those of the saved steps, which the caller keeps up to date;
    ``cleanup`` deletes what a killed save has left.
    """
    context = ocp.Context()
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
    kept = [_KEEP.LatestN(options.keep_last), BestPolicy(options, metrics)]
    if options.keep_every is not None:
        kept.append(_KEEP.EveryNSteps(options.keep_every))
    which: Any = _KEEP.AnyPreservationPolicy(kept)
    names = StepNames()
    orbax = ocp.training.Checkpointer(
        directory,
        context=context,
        save_decision_policy=when,
        preservation_policy=which,
        step_name_format=names,
        cleanup_tmp_directories=cleanup,  # not Orbax's default: the bytes would stay
    )
    return orbax, names, preemption


def load(path: str, wanted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Reads the arrays of a step, placed as asked, without waiting for any process."""
    if not wanted:
        return {}
    context = ocp.Context()
    # Orbax lets all processes meet once each has read its shards: they would wait
    # for one that cannot read. So each process is a job of its own.
    if jax.process_count() > 1:
        me, options = jax.process_index(), context.multiprocessing_options
        options.primary_host, options.active_processes = me, {me}
        options.barrier_sync_key_prefix = f"nnx_parallel_{me}"
    with context:
        return ocp.load_checkpointables(path, wanted)


def describe_group(directory: str, group: str) -> Any:
    """Orbax's metadata of the arrays of a group, or the error that hides it.

    Describing a whole step, Orbax takes any error for "no metadata": a bad moment too.
    """
    path = ocp.path.Path(directory) / group
    with ThreadPoolExecutor(1) as pool:  # the caller may have an event loop of its own
        handler = ocp.handlers.PyTreeHandler
        return pool.submit(lambda: asyncio.run(handler().metadata(path))).result()


_LOGGER = logging.getLogger("absl")


class AsyncSave(logging.Handler):
    """One save in progress, and how it ends; the handler of what its thread logs.

    With several processes Orbax reports a failure only after a barrier that the others
    never reach: it gives up 20 minutes after the save began (a barrier that some never
    reach is also in https://github.com/google/orbax/issues/2934). But the process that
    fails logs its error at once, from the thread that writes. `listen` before the save
    starts: the error may be logged before Orbax returns.

    Attributes:
        error: With which the save has ended on all processes, or ``None``.
    """

    def __init__(self, step: int, directory: str) -> None:
        super().__init__(logging.ERROR)
        self._step, self._directory = step, directory
        self.error: BaseException | None = None
        self._logged: Exception | None = None
        self._has_ended = threading.Event()
        self._is_reported = False

    def listen(self) -> None:
        """Reads the log, until `end`."""
        _LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the error that Orbax's writing thread logs."""
        error = record.exc_info and record.exc_info[1]
        # In a thread of this name; other threads, and other libraries, log here too.
        if record.threadName == "async_save" and isinstance(error, Exception):
            self._logged = error

    def failure(self, error: BaseException) -> CheckpointSaveError:
        """The error to raise when the save cannot start or does not end well."""
        where = f"step {self._step} in '{self._directory}'"
        why = f"{root_cause(error)} No other checkpoint was deleted."
        return CheckpointSaveError(f"Saving {where} failed: {why}")

    def follow(self, response: ocp.AsyncResponse[bool]) -> None:
        """Waits for the save in a thread of its own."""

        def wait() -> None:
            try:
                response.result()
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
        _LOGGER.removeHandler(self)
        self._has_ended.set()

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
            raise self.failure(error) from self.error

    def state(self) -> str:
        """``"ended"``, ``"failed"`` here while others wait, or ``"running"``.

        Takes half a second at most.
        """
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
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def reading(where: str, steps: list[int] | None = None) -> Iterator[None]:
    """Names the cause of an error of Orbax's, and tells corruption from a bad moment.

    Raises:
        CheckpointReadError: If the files, ``where``, are corrupt. Without ``steps``,
            the saved ones, an error says nothing of them and is raised as it is.
        CheckpointUnavailableError: If they may be intact, and read well later.
    """
    try:
        yield
    except ParallelError:
        raise
    except Exception as error:
        if is_transient(error) or _are_files_short():
            raise CheckpointUnavailableError(
                f"Cannot read {where} now: {root_cause(error)} That is no damage, and "
                "nothing has changed: start again when it is over."
            ) from error
        if steps is None:
            raise
        raise CheckpointReadError(
            f"Cannot read {where}: {root_cause(error)} Its files are damaged, half "
            f"deleted, or not this library's. Saved steps: {steps}."
        ) from error


def is_transient(error: BaseException) -> bool:
    """True if an error is about the moment, not about what is on disk.

    Memory or file handles used up, a disk or network that does not answer, a directory
    without permission.
    """
    is_io = isinstance(error, OSError | MemoryError)
    if (is_io and not isinstance(error, _ABOUT_FILES)) or _TRANSIENT.search(str(error)):
        return True
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
