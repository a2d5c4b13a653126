"""The checkpoints of one run: saves them, deletes old ones, and resumes from them."""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.checksum import PendingChecksums
from nnx_parallel.checkpoint.contents import (
    Base,
    Groups,
    check_groups,
    from_groups,
    make_header,
    split_base,
    to_groups,
    to_write,
    with_base,
)
from nnx_parallel.checkpoint.files import (
    PART,
    delete_remains,
    delete_steps,
    discard_unfinished,
    is_url,
    set_aside,
)
from nnx_parallel.checkpoint.lock import DirectoryLock, lock_directory
from nnx_parallel.checkpoint.memory import RUN, Found, MemoryCopies, forget_copies
from nnx_parallel.checkpoint.options import (
    BEST_RULE,
    Checkpoint,
    Metrics,
    best_rule,
    check_directory,
    check_space,
    check_step,
    check_writable,
    given_options,
    is_of_other_player,
    superseded_steps,
)
from nnx_parallel.checkpoint.orbax_compat import (
    open_directory,
    reading,
    wait_for_writers,
)
from nnx_parallel.checkpoint.reader import CheckpointReader, new_average_note
from nnx_parallel.checkpoint.saving import (
    BackgroundSave,
    save_error,
    wait_on_all_processes,
)
from nnx_parallel.distributed.agreement import check_consistent, strip_addresses
from nnx_parallel.errors import (
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointReadError,
    CheckpointSaveError,
    ParallelWarning,
    ReplicaError,
    warn_user,
)
from nnx_parallel.precision import array_bytes
from nnx_parallel.sharding.checksum import start_checksums
from nnx_parallel.state import TrainState


class Resumed(NamedTuple):
    """A state from which a run continues.

    Attributes:
        state: The state.
        meta: The metadata that was saved with it.
        where: The place where it was found, for a message.
    """

    state: TrainState
    meta: dict[str, Any]
    where: str


class CheckpointManager:
    """Saves the training state of one run, and resumes from it.

    The directory is opened at the first use and stays open until `close`. Use the
    object as a context manager: a process that ends without `close` loses the save in
    progress and its error. All processes make the same calls in the same order, from
    the main thread, because Orbax's checkpointer works only in that thread.

    Args:
        options: A `Checkpoint`, with the directory, the intervals and the rules for the
            steps to keep; or only the directory. With ``None`` no step is due, and
            saving and restoring raise errors.
        description: Description of the run; it is saved as metadata with each state.
        frozen: Paths of parameters that are not trained.

    Attributes:
        options: The given options, as a `Checkpoint` even if only a directory was
            given.
        description: The given description.
        directory: A path, or a URL such as ``gs://...``.
        local_directory: The directory, if it is not a URL. Other files can go there.
        last_saved: The last step that this object has saved or resumed from. `save`
            need not save it again.
        is_preempted: True once jax has announced a preemption, at the same step on all
            processes. The cause is a SIGTERM, which may have come before the fit could
            handle it.
        copies_note: A line about the copies in memory, once `check_state` has found
            that they fit; otherwise empty.
        copied_step: The step of the copy in memory that `resume` has read, or ``None``.
        report: Function that is called with a message once a checkpoint is on the disk
            and would survive a power cut.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with CheckpointManager(directory) as manager:
        ...         manager.save_groups(1, {"params": {"w": jnp.ones(2)}}, {"seed": 0})
        ...         print(manager.saved.describe().groups)
        {'params': {'w': ShapeDtypeStruct(shape=(2,), dtype=float32)}}
    """

    def __init__(
        self,
        options: Checkpoint | str | os.PathLike | None,
        description: Mapping[str, Any] | None = None,
        *,
        frozen: Collection[str] = (),
    ) -> None:
        self.options = None if options is None else given_options(options)
        self.description = dict(description or {})
        self.directory = where = self.options and str(self.options.directory)
        self.local_directory = Path(where) if where and not is_url(where) else None
        self.last_saved: int | None = None
        self.is_preempted = False
        self.report: Callable[[str], object] = str
        self.copies_note = ""
        self.copied_step: int | None = None
        self._lacks_copies = False
        only_hashed = self.options is not None and self.options.frozen == "checksum"
        self._frozen = frozen if only_hashed else ()
        self._reader: CheckpointReader | None = None  # set once the directory is open
        self._orbax: ocp.training.Checkpointer | None = None
        self._lock: DirectoryLock | None = None
        self._save: BackgroundSave | None = None
        self._copies: MemoryCopies | None = None
        self._has_warned_of_best = False
        self._interval_start: float | None = None
        self._has_remains = False  # a failed save left files in the directory

    @property
    def ranks_by_eval(self) -> bool:
        """True if ``keep_best`` names a metric of an evaluation."""
        best = self.options and self.options.keep_best
        return (best or "").startswith("eval_")

    def check_best(self, metrics: Collection[str], where: str) -> None:
        """Warns, once, if a step's metrics lack the metric of ``keep_best``.

        A metric of a player may be missing until this player has done a step.
        """
        best = self.options and self.options.keep_best
        if best is None or best in metrics or self._has_warned_of_best:
            return
        if is_of_other_player(best, metrics, self.description.get("players", ())):
            return
        self._has_warned_of_best = True
        warn_user(
            f"keep_best={best!r} is not among the metrics of {where}. A checkpoint "
            f"without it never counts as best. Metrics: {sorted(metrics) or 'none'}.",
            ParallelWarning,
        )

    @property
    def warns(self) -> bool:
        """True if a failed write does not end the fit."""
        return self.options is not None and self.options.on_save_error == "warn"

    @property
    def saved(self) -> CheckpointReader:
        """The checkpoints on disk, once the save in progress has ended.

        A failed save is reported in the same way as by `wait`.

        Raises:
            CheckpointNotFoundError: If there are no options.
            CheckpointDirectoryError: If the directory cannot be written, or another run
                is writing there.
        """
        reader, _ = self._open()
        with self._reporting_failures():
            self._join_save()
        return reader

    def _open(self) -> tuple[CheckpointReader, ocp.training.Checkpointer]:
        if self._reader is None or self._orbax is None:
            directory = str(given_options(self.options).directory)
            # The directory is checked first. If Orbax cannot make a step's directory,
            # its writers wait for 5 minutes (docs/library-notes.md, "Orbax:
            # directories").
            check_directory(directory)
            # The lock comes before Orbax: when Orbax opens the directory, it deletes
            # the unfinished save of any other run.
            lock = lock_directory(directory)
            with reading(f"the steps in '{directory}'"):
                self._orbax = open_directory(directory)
            if jax.process_index() == 0:
                for problem in delete_remains(directory):
                    warn_user(
                        f"Cannot delete {problem} in '{directory}', the remains of a "
                        "step that was being deleted when its run was killed."
                    )
            self._lock = lock
            self._reader = CheckpointReader(self.options, self.description)
        return self._reader, self._orbax

    def _open_copies(self) -> MemoryCopies | None:
        """Returns the copies in memory, or ``None`` if the run makes none."""
        options = self.options
        if options is None or options.memory_every is None:
            return None
        if self._copies is None:
            self._open()
            where, every = str(options.memory_directory), options.memory_every
            self._copies = MemoryCopies(str(self.directory), where, every)
        return self._copies

    @property
    def latest_step(self) -> int | None:
        """The newest saved step, or ``None``."""
        return None if self.options is None else max(self.saved.steps, default=None)

    @property
    def newest_step(self) -> int | None:
        """The newest step, saved or in memory, from which a run can continue."""
        latest = self.latest_step
        found = self._find_copy() if self.options and self.options.resume else None
        return found.step if found else latest

    def _find_copy(self) -> Found | None:
        copies = self._open_copies()
        newest = max(self.saved.steps, default=-1)
        return copies and copies.find(newest, self._last_listed)

    @property
    def _last_listed(self) -> int:
        """The newest step in the directory, intact or not, or -1."""
        reader, _ = self._open()
        found = [*reader.steps, *reader.corrupt_steps]
        if self._save is not None and self._save.is_saved:
            found.append(self._save.step)
        return max(found, default=-1)

    def is_time(self) -> bool:
        """Returns True once for each interval of ``every``, when it has passed.

        The first interval begins with the first call. If ``every`` is a number of
        steps, the result is False.
        """
        every = self.options and self.options.every
        if not isinstance(every, timedelta):
            return False
        now = time.monotonic()
        self._interval_start = self._interval_start or now
        if now - self._interval_start < every.total_seconds():
            return False
        self._interval_start = now
        return True

    def is_due(self, step: int, *, is_time: bool = False) -> bool:
        """Returns True if ``step`` must be saved, because of ``every`` or a preemption.

        ``is_time`` is the result of `is_time` on process 0 when the batch was read. All
        processes call this once for each step. Through these calls they agree on the
        step at which jax announces a preemption (SIGTERM under ``jax.distributed``).
        """
        if self.options is None:
            return False
        has_notice = False
        with contextlib.suppress(RuntimeError):  # the service is switched off
            has_notice = multihost_utils.reached_preemption_sync_point(step)
        self.is_preempted |= has_notice
        reader, _ = self._open()
        latest = self._save.step if self._save else max(reader.steps, default=-1)
        every = self.options.every
        is_due = is_time if isinstance(every, timedelta) else step % every == 0
        return step > latest and (has_notice or is_due)

    def is_copy_due(self, step: int) -> bool:
        """Returns True if ``step`` must be copied into memory."""
        every = self.options and self.options.memory_every
        return bool(every) and step % every == 0

    def must_copy_again(self, step: int) -> bool:
        """Returns True if ``step`` was read from memory, and a machine has lost parts.

        Without another copy, the loss of a second machine would lose the step.
        """
        return self._lacks_copies and self.copied_step == step

    def copy(
        self,
        state: TrainState,
        step: int,
        progress: Mapping[str, Any],
        metrics: Metrics,
    ) -> None:
        """Copies a state into memory; its arrays may be donated once this returns.

        The arguments are the same as for `save`. A failure is a warning.

        Raises:
            ReplicaError: If the copy before this one has found copies that differ
                between devices.
        """
        copies = self._open_copies()
        assert copies is not None, "is_copy_due"
        groups, base = split_base(to_groups(state), self._frozen)
        check_groups(groups)
        numbers = {name: float(x) for name, x in metrics.items()}
        meta = {**self.description, **progress}
        header = make_header(step, groups, meta, numbers, base)
        hashed = with_base(groups, base)
        start = partial(start_checksums, hashed, "checksums of copies in memory")
        copies.stage(groups, header, start, self._last_listed)

    def save(
        self,
        state: TrainState,
        step: int,
        progress: Mapping[str, Any],
        metrics: Metrics,
        *,
        once: bool = True,
        may_skip: bool = False,
    ) -> None:
        """Saves a state under its step; its arrays may be donated once this returns.

        If an earlier save failed on one of several processes, the others wait for it
        for up to 20 minutes. During that time this method saves nothing if ``may_skip``
        is set and ``on_save_error="warn"``.

        Args:
            state: The state to save.
            step: Number of updates done so far.
            progress: JSON values: the position in the data, and the states of
                callbacks.
            metrics: Values at this step, for ``keep_best``.
            once: True to do nothing if this object has already saved or restored the
                step.
            may_skip: True to return without a save while an earlier save hangs.

        Raises:
            CheckpointError: If another program has saved this step or a later one.

        Warns:
            UserWarning: If ``metrics`` lack the metric of ``keep_best`` (only once), or
                if the step is not saved.
        """
        if once and self.last_saved == step:
            return
        self._open()  # raises an error if there is no directory
        if self.warns and jax.process_count() > 1:
            # This save begins with barriers. If the last save has failed only on this
            # process, this process would wait in the barriers while the other processes
            # still write. So all processes wait here until the last save has ended.
            while not wait_on_all_processes(self._save):
                self.poll()
                if may_skip:
                    warn_user(
                        f"Step {step} is not saved: an earlier save failed on one "
                        "process, and the others wait for it (at most 20 minutes). "
                        "Training goes on.",
                    )
                    return
        self.wait()
        if metrics:
            self.check_best(metrics, f"step {step}")
        meta = {**self.description, **progress}
        if self.options is not None and (rule := best_rule(self.options)):
            meta[BEST_RULE] = rule
        with self._reporting_failures():
            groups, base = split_base(to_groups(state), self._frozen)
            self.save_groups(step, groups, meta, metrics=metrics, base=base)
            self.last_saved = step

    def save_groups(
        self,
        step: int,
        groups: Groups,
        meta: Mapping[str, Any],
        *,
        metrics: Metrics | None = None,
        overwrite: bool = False,
        base: Mapping[str, jax.Array] | None = None,
    ) -> None:
        """Copies arrays and begins to write them; each process writes its shards.

        When it returns, the arrays may be donated; the files are written in the
        background, unless ``asynchronous=False``.

        Args:
            step: Number of updates done so far; must be later than every saved step.
            groups: Arrays by group and path. A group may be empty, but an array may
                not. The names ``metrics`` and ``fingerprints`` are reserved.
            meta: Values that JSON can hold. JSON turns tuples into lists, and keys into
                strings.
            metrics: Values at this step, for ``keep_best``.
            overwrite: True to replace the latest step, if it is ``step``. The old step
                is deleted before the new one is written.
            base: Arrays by path. Their checksums are saved instead of their values.

        Raises:
            CheckpointError: If the step is not later than every saved step, or if an
                argument cannot be saved.
            CheckpointSaveError: If this save could not begin. It is also raised if an
                earlier save failed in the background; then this save does not begin,
                unless ``on_save_error="warn"``.
        """
        # `self.saved` waits for the last save, because Orbax replaces its inner
        # checkpointer if a save begins before the last one has ended.
        saved, (_, orbax) = self.saved, self._open()
        directory, latest = saved.directory, max(saved.steps, default=None)
        check_step(directory, step, latest, overwrite=overwrite)
        replaced = step if step == latest else None
        check_groups(groups)
        metrics = {name: float(x) for name, x in (metrics or {}).items()}
        header = make_header(step, groups, meta, metrics, base or {})
        # The directory is checked before anything is read there. If the disk is
        # unavailable, the save has failed, and a fit may go on. If a process is lost
        # during the check, the error is raised unchanged.
        try:
            check_writable(directory, lambda: self._prepare(directory, replaced))
        except CheckpointDirectoryError as error:
            raise save_error(step, directory, error) from error
        finally:
            if replaced is not None:  # deleted, perhaps in part
                saved.reload()
        # Hashing begins now, because the fit may donate the arrays once this returns.
        # With several processes, Orbax's barriers are programs on the devices: they
        # queue behind the hashes.
        pending = start_checksums(with_base(groups, base), "saved checksums")
        checksums = PendingChecksums(header["digest"], pending)
        superseded = self._superseded(saved, step, metrics)
        save = BackgroundSave(step, directory, metrics, superseded)

        def begin() -> ocp.AsyncResponse[bool] | None:
            # Orbax refuses a step that it has saved before, even if the step has been
            # moved or deleted since.
            orbax.reload()
            return orbax.save_checkpointables_async(
                step,
                to_write(groups) | {PART: checksums},
                force=True,  # `is_due` or the user has decided
                custom_metadata=header,
            )

        try:
            # The save begins in this thread. A save of 513 MB in another thread, from
            # pinned host copies, delayed the steps by 90 ms instead of 160 ms, but
            # Orbax's next call, in the main thread, did not wait for that save.
            save.start(begin)
        except CheckpointSaveError:
            self._clean_after_failure()
            raise
        self._save = save
        if not saved.options.asynchronous:
            self._join_save()

    def _prepare(self, directory: str, replaced: int | None) -> None:
        """Raises ``CheckpointDirectoryError`` unless this run may write."""
        if self._lock is not None:
            self._lock.check()
        if replaced is not None and (problems := delete_steps(directory, [replaced])):
            raise CheckpointDirectoryError(f"Cannot delete {problems[0]}.")

    def _superseded(
        self, saved: CheckpointReader, step: int, metrics: Metrics
    ) -> list[int]:
        """Returns saved steps to delete once ``step``, with its metrics, is saved."""
        ranks = saved.options.keep_best is not None
        found = saved.metrics() if ranks else {x: {} for x in saved.steps}
        # A step of another program is not a step of this run, so it cannot be its best.
        ours = {k: v for k, v in found.items() if k not in saved.listing.foreign}
        is_time = isinstance(saved.options.keep_every, timedelta)
        times = saved.times() if is_time else None
        return superseded_steps(saved.options, {**ours, step: metrics}, times)

    def wait(self) -> None:
        """Waits until the save in progress is on disk.

        Each process reports a failure once, here or in `poll`. With
        ``on_save_error="raise"`` it raises a ``CheckpointSaveError``. With ``"warn"``
        it warns, once the save has ended on all processes.
        """
        with self._reporting_failures():
            self._join_save()

    def poll(self) -> None:
        """Reports a failure like `wait`, but does not wait.

        It may raise an error on only one of several processes.
        """
        with self._reporting_failures():
            if self._save is not None and self._save.error is None:
                self._save.check()
            else:
                self._join_save()

    def _join_save(self) -> None:
        save = self._save
        if save is None:
            return
        save.join(patiently=self.warns)
        self._save = None
        if save.error is not None:
            self._clean_after_failure()
            save.check()
            return
        reader, _ = self._open()
        if self._has_remains:
            discard_unfinished(reader.directory)
            self._has_remains = False
        reader.note_save(save.step, save.metrics, save.superseded)
        where = f"step {save.step} in '{self.directory}'"
        self.report(f"Saved {where} ({save.seconds:.1f} s)")
        for problem in save.problems:
            warn_user(
                f"An older checkpoint in '{self.directory}' could not be deleted: "
                f"{problem}. The newer checkpoints are saved, and training goes on. "
                "The older one takes space until it is deleted."
            )

    def _clean_after_failure(self) -> None:
        reader, orbax = self._open()
        with contextlib.suppress(Exception):
            orbax.wait()  # Orbax raises a failure once for each thread that waits
        discard_unfinished(reader.directory)
        self._has_remains = True  # slow threads may still write
        reader.reload()

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        try:
            yield
        except CheckpointSaveError as error:
            self.last_saved = None
            # If copies differ, the disk is not at fault: the numbers are wrong.
            if not self.warns or isinstance(error.__cause__, ReplicaError):
                raise
            warn_user(f"{error} Training goes on.")

    def resume(
        self,
        abstract: TrainState,
        base: Base | None = None,
        *,
        read_only: bool = False,
    ) -> tuple[Resumed | None, list[str]]:
        """Returns the newest intact state, and notes on steps that were passed over.

        The state is ``None`` if there is no directory or no checkpoint in it. All
        processes call this. The errors are the same as for
        `CheckpointReader.restore_newest`. With ``read_only``, nothing is written or
        renamed, because the run may be alive.
        """
        if self.options is None:
            return None, []
        if read_only:
            exists = self.local_directory is None or self.local_directory.is_dir()
            check_consistent("directory of the run", {str(self.directory): exists})
            if not exists:
                return None, []
            reader = CheckpointReader(self.options, self.description)
        else:
            reader = self.saved
        wanted = to_groups(abstract)
        copies = None if read_only else self._open_copies()
        if copies is not None and self.options.resume:
            resumed, notes = self._resume_copy(copies, reader, abstract, base)
            if resumed is not None:
                return resumed, notes
        found = reader.restore_newest(wanted, base, quarantines=not read_only)
        lost = copies.notes if copies is not None else []
        if found is None:
            if lost:
                lost = [*lost, "Nothing is saved on storage, so the run begins afresh."]
            return None, lost
        (groups, meta), notes = found
        notes = [*notes, *lost]
        state = from_groups(abstract, groups)
        if not read_only:
            self.last_saved = int(state.step)
        return Resumed(state, meta, f"in '{self.directory}'"), notes

    def _resume_copy(
        self,
        copies: MemoryCopies,
        reader: CheckpointReader,
        abstract: TrainState,
        base: Base | None,
    ) -> tuple[Resumed | None, list[str]]:
        """Returns the newest state in memory, if it is later than the saved ones."""
        if (found := self._find_copy()) is None:
            return None, []
        stored, load = copies.describe(found), partial(copies.load, found)
        wanted = to_groups(abstract)
        try:
            groups, meta = reader.restore_copy(stored, load, wanted, base)
        except CheckpointMismatchError as error:
            path = f"{self.directory}/{RUN}"
            error.add_note(f"To continue from storage instead, delete '{path}'.")
            raise
        except CheckpointReadError as error:
            warn_user(
                f"The copy of step {found.step} in memory cannot be read: {error} The "
                "run continues from storage."
            )
            return None, []
        # If another number of processes has made the copy, this one could hold less of
        # the position in the data.
        states = meta.get("position", {}).get("states", ())
        is_alike = len(states) == jax.process_count()
        self._lacks_copies = is_alike and copies.lacks_copies(found)
        copies.use(found)
        self.copied_step = found.step
        latest = max(reader.steps, default=None)
        saved = "holds no step" if latest is None else f"holds step {latest}"
        where = f"in memory; '{self.directory}' {saved}"
        notes = [*copies.notes, *new_average_note(wanted, groups)]
        return Resumed(from_groups(abstract, groups), meta, where), notes

    def is_newest(self, step: int) -> bool:
        """Returns True if a fit would continue from ``step``, which was just read."""
        return not self.saved.corrupt_steps and self.newest_step == step

    def set_aside(self, step: int) -> str:
        """Moves the steps after ``step`` into a directory; returns a message, or "".

        Raises:
            CheckpointDirectoryError: If the directory cannot be written, or another run
                is writing there.
        """
        saved = self.saved
        steps = {*saved.steps, *saved.corrupt_steps} - saved.listing.foreign
        # The later steps are trained again, and then have to be saved again.
        self.last_saved = step
        later = sorted(x for x in steps if x > step)
        if not later:
            forget_copies(str(self.directory))
            return ""
        aside = set_aside(saved.directory, step, later)
        forget_copies(str(self.directory))
        self._reader = CheckpointReader(self.options, self.description)
        return (
            f"Went back to step {step} in '{self.directory}'; steps {later} are "
            f"in '{aside}'."
        )

    def check_options(self) -> None:
        """Raises ``DisagreementError`` on all processes if their options differ."""
        # With different options they would wait for one another: one process would save
        # or delete a step, and the others would not.
        options = strip_addresses(repr(self.options))
        check_consistent("checkpoints", {"checkpoint": options})

    def check_ahead(self, step: int) -> None:
        """Raises ``CheckpointError`` if a saved step is later than ``step``."""
        latest = self.latest_step
        if latest is not None and latest > step:
            raise CheckpointError(
                f"'{self.directory}' holds a checkpoint of step {latest}, but this run "
                f"is at step {step} and would write into the same directory. Choose "
                "another directory for it, restore() the latest step, or set the later "
                f"steps aside: restore({step}, rewind=True)."
            )

    def check_state(self, abstract: TrainState) -> None:
        """Checks that such a state can be saved, before the first step is trained.

        Raises ``CheckpointError`` if the state holds an array that has no elements or a
        dtype that cannot be written. Raises ``CheckpointDirectoryError`` if the state
        does not fit on the disk.
        """
        if self.directory is not None:
            groups, _ = split_base(to_groups(abstract), self._frozen)
            check_groups(groups, jax.ShapeDtypeStruct)
            arrays = jax.tree.leaves(groups)
            needed = sum(array_bytes(x.shape, x.dtype) for x in arrays)
            check_space(self.directory, needed)
            if (copies := self._open_copies()) is None:
                forget_copies(self.directory)
            else:
                self.copies_note = copies.check_space(groups)
                copies.begin()

    def exit_message(self, step: int) -> str:
        """Returns the last message of a run that ends early, at ``step``."""
        if self.directory is None:
            return "Nothing is saved: this Trainer has no checkpoint directory."
        latest = self.latest_step
        if latest is None:
            return f"Nothing is saved in '{self.directory}': step {step} is lost."
        lost = "" if latest == step else f" The steps after it, up to {step}, are lost."
        where = f"Saved step {latest} in '{self.directory}'"
        return f"{where}: resume with the same command.{lost}"

    def abandon_if_shared(self) -> None:
        """Lets go of the directory without waiting for a save of several processes."""
        # The other processes may never take part in that save. The next start deletes
        # its unfinished files.
        if jax.process_count() > 1:
            if self._copies is not None:
                self._copies.abandon()
            self._reader = self._orbax = self._lock = self._save = self._copies = None

    def close(self) -> None:
        """Waits as `wait` does, and then closes the directory even after an error."""
        try:
            self.wait()
        finally:
            copies, self._copies = self._copies, None
            if copies is not None:
                copies.close(saved=self.last_saved)
            orbax, is_pending = self._orbax, self._save is not None
            self._reader = self._orbax = self._save = None
            self.is_preempted = False  # the notice was for the fit that ends here
            # Orbax would wait for the other processes of a pending save. After a failed
            # save it would raise the error again.
            ignored = (Exception,) if self._has_remains else ()
            try:
                if orbax is not None and not is_pending:
                    with contextlib.suppress(*ignored):
                        orbax.close()
                    if self._has_remains:
                        wait_for_writers(seconds=10)
                        discard_unfinished(str(self.directory))
            finally:
                self._lock = None  # the last reference in this process releases it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *rest: object) -> None:
        try:
            self.close()
        except CheckpointSaveError as failure:
            # Python does not print the notes of a SystemExit, so its exit would hide
            # the failure.
            if error is None or isinstance(error, SystemExit):
                raise
            error.add_note(f"Another error: {failure}")
