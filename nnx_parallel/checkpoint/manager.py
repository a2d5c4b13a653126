"""The checkpoints of one run: saved asynchronously, and restored on any mesh."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import jax

from nnx_parallel.checkpoint.base import BASE, Base, split_base
from nnx_parallel.checkpoint.checksum import PendingChecksums, start_checksums
from nnx_parallel.checkpoint.contents import (
    AbstractGroups,
    Groups,
    StoredCheckpoint,
    check_groups,
    check_states,
    from_groups,
    make_header,
    to_groups,
    to_write,
)
from nnx_parallel.checkpoint.files import PART, is_url
from nnx_parallel.checkpoint.options import (
    BEST_RULE,
    Checkpoint,
    Metrics,
    best_rule,
    check_ahead,
    check_space,
    check_step,
    check_writable,
    exit_message,
)
from nnx_parallel.checkpoint.orbax_compat import (
    AsyncSave,
    first_cause,
    wait_on_all_processes,
)
from nnx_parallel.checkpoint.saved_steps import SavedSteps
from nnx_parallel.distributed.agreement import check_consistent, strip_addresses
from nnx_parallel.errors import (
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    ParallelWarning,
    ReplicaError,
    warn_user,
)
from nnx_parallel.precision import array_bytes
from nnx_parallel.state import TrainState


class CheckpointManager:
    """Saves and restores the training state of one run.

    The directory is opened at the first use and stays open until `close`. Use it as a
    context manager: a process that ends without `close` loses the save in progress, and
    its error. All processes make the same calls in the same order, from the main
    thread: Orbax's checkpointer is only for that thread.

    Args:
        options: A `Checkpoint`: directory, intervals, and rules for the steps to keep;
            or only the directory. With ``None`` no step is due, and saving and
            restoring are errors.
        description: Description of the run; it is saved as metadata with each state.
        read_only: The same as for `SavedSteps`.
        frozen: Paths of parameters that are not trained.

    Attributes:
        options: The given options; a directory is a `Checkpoint` here.
        description: The given description.
        directory: A path, or a URL such as ``gs://...``.
        local_directory: The directory if it is not a URL: other files can go there.
        last_saved: The step that this object has saved or resumed from, which `save`
            need not save again.
        report: Called with a line for people once a checkpoint is on the disk, where a
            power cut leaves it.

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
        read_only: bool = False,
        frozen: Collection[str] = (),
    ) -> None:
        if options is not None and not isinstance(options, Checkpoint):
            options = Checkpoint(options)
        self.options = options
        self.description = dict(description or {})
        self.directory = where = options and str(options.directory)
        self.local_directory = Path(where) if where and not is_url(where) else None
        self.last_saved: int | None = None
        self.report: Callable[[str], object] = str
        self._read_only = read_only
        self._frozen = frozen if options and options.frozen == "checksum" else ()
        self._opened: SavedSteps | None = None
        self._save: AsyncSave | None = None
        self._has_warned_of_best = False
        self._has_remains = False  # a failed save left files in the directory

    @property
    def ranks_by_eval(self) -> bool:
        """True if the best checkpoint is the best by an evaluation."""
        best = self.options and self.options.keep_best
        return (best or "").startswith("eval_")

    def check_best(self, metrics: Collection[str], where: str) -> None:
        """Warns, once, if the metric of ``keep_best`` is not among a step's metrics."""
        best = self.options and self.options.keep_best
        if best is None or best in metrics or self._has_warned_of_best:
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
    def saved(self) -> SavedSteps:
        """The checkpoints on disk, once the save in progress has ended.

        Raises ``CheckpointNotFoundError`` without options. A save that failed is
        reported as by `wait`.
        """
        opened = self._open()
        with self._reporting_failures():
            self._join_save()
        return opened

    def _open(self) -> SavedSteps:
        if self.options is None:
            raise CheckpointNotFoundError(
                "This Trainer has no checkpoint directory. Pass checkpoint='runs/name'."
            )
        if self._opened is None:
            self._opened = SavedSteps(self.options, read_only=self._read_only)
        return self._opened

    @property
    def latest_step(self) -> int | None:
        """The newest saved step, or ``None``."""
        return None if self.options is None else max(self.saved.steps, default=None)

    @property
    def is_preempted(self) -> bool:
        """True if jax has announced a preemption, at the same step on all processes."""
        return self._opened is not None and self._opened.preemption.has_notice

    def is_due(self, step: int) -> bool:
        """True if ``step`` has to be saved: by ``every``, or before a preemption.

        All processes call it once a step: by these calls they agree on the step at
        which jax announces a preemption (SIGTERM under ``jax.distributed``).
        """
        is_writer = self.options is not None and not self._read_only
        return is_writer and self._open().orbax.should_save(step)

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

        With ``once``, does nothing if this object has saved or restored the step. With
        ``may_skip`` and ``on_save_error="warn"``, saves nothing while an earlier save
        that failed on one of several processes has not been given up. ``progress`` has
        JSON values: the position in the data, and the states of callbacks.

        Raises:
            CheckpointError: If another program has saved this step or a later one.

        Warns:
            UserWarning: If the metric of ``keep_best`` is not among ``metrics`` (once),
                or the step is not saved.
        """
        if once and self.last_saved == step:
            return
        self._open()  # an error without a directory
        if self.warns and jax.process_count() > 1:
            # All processes wait together, because this save begins with barriers: a
            # process whose last save has failed would wait in them for processes that
            # still write it.
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
            step: Updates done so far; later than every saved step.
            groups: Arrays by group and path; groups may be empty, arrays may not. Two
                names are reserved: ``metrics`` and ``fingerprints``.
            meta: Values that JSON can hold (which makes tuples lists and keys strings).
            metrics: Values at this step, for ``keep_best``.
            overwrite: Replace the latest step, if it is ``step``: it is deleted before
                the new one is written.
            base: Arrays by path that are named by checksum, and not written.

        Raises:
            CheckpointError: If the step is not later, or an argument cannot be saved.
            CheckpointSaveError: If this save could not begin, or an earlier one
                failed in the background: then this one was not tried, unless
                ``on_save_error="warn"``.
        """
        # This waits for the last save: otherwise Orbax replaces its inner checkpointer.
        saved = self.saved
        directory = saved.directory
        if self._read_only:
            problem = f"Cannot save in '{directory}': opened with read_only=True."
            raise CheckpointError(problem)
        check_step(directory, step, self.latest_step, overwrite=overwrite)
        check_groups(groups)
        save = AsyncSave(step, directory, cleans=self._has_remains)
        try:
            # This check comes before any read there: an unavailable disk is a failed
            # save, but a process that is lost in the exchange is not.
            check_writable(directory, saved.check_lock)
        except CheckpointDirectoryError as error:
            raise save.failure(error) from error
        metrics = {name: float(x) for name, x in (metrics or {}).items()}
        header = make_header(step, groups, meta, metrics, base or {})
        # Hashing begins now, because the fit may donate the arrays once this returns.
        # With several processes Orbax's barriers, programs on the devices, queue behind
        # the hashes.
        hashed = {**groups, **({BASE: base} if base else {})}
        pending = start_checksums(hashed, "saved checksums")
        checksums = PendingChecksums(header["digest"], pending)
        save.superseded = saved.superseded(step, metrics)
        saved.known_metrics[step] = metrics
        save.listen()
        try:
            # The save begins in this thread: begun in another, from pinned host copies,
            # 513 MB delayed the steps by 90 ms instead of 160 ms, but the next call did
            # not know of the save.
            response = saved.orbax.save_checkpointables_async(
                step,
                to_write(groups) | {PART: checksums},
                force=True,  # `is_due` or the user has decided
                overwrite=overwrite,
                custom_metadata=header,
            )
        except Exception as error:
            save.end()
            self._clean_after(save, saved)
            raise save.failure(error) from first_cause(error)
        assert response is not None, "a forced save is never skipped"
        save.follow(response)
        self._save = save
        if not saved.options.asynchronous:
            self._join_save()

    def wait(self) -> None:
        """Waits until the save in progress is on disk.

        Each process reports a failure once, here or in `poll`: as ``on_save_error``
        says, by a ``CheckpointSaveError``, or by a warning once the save has ended on
        all of them.
        """
        with self._reporting_failures():
            self._join_save()

    def poll(self) -> None:
        """Reports a failure like `wait`, perhaps only on one process; does not wait."""
        with self._reporting_failures():
            if self._save is not None and self._save.error is None:
                self._save.check()
            else:
                self._join_save()

    def _join_save(self) -> None:
        save, opened = self._save, self._opened
        if save is None or opened is None:
            return
        save.join(patiently=self.warns)
        self._save = None
        if save.error is not None:
            self._clean_after(save, opened)
            save.check()
            return
        self._has_remains = False
        opened.forget(save.superseded)
        where = f"step {save.step} in '{self.directory}'"
        self.report(f"Saved {where} ({save.seconds:.1f} s)")
        for problem in save.problems:
            warn_user(
                f"An older checkpoint in '{self.directory}' could not be deleted: "
                f"{problem}. The newer ones are saved, and training goes on; it takes "
                "space until it is deleted."
            )

    def _clean_after(self, save: AsyncSave, opened: SavedSteps) -> None:
        with contextlib.suppress(Exception):
            opened.orbax.wait()  # Orbax raises a failure once in each thread
        save.discard()
        self._has_remains = True  # late threads may still write
        opened.reload()

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        try:
            yield
        except CheckpointSaveError as error:
            self.last_saved = None
            # Copies that differ are not a failure of the disk: their numbers are wrong.
            if not self.warns or isinstance(error.__cause__, ReplicaError):
                raise
            warn_user(f"{error} Training goes on.")

    def restore(
        self,
        abstract: TrainState,
        step: int | Literal["best"] | None = None,
        base: Base | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state of a step in the layout of ``abstract``, and the metadata.

        Steps, ``base`` and errors are the same as for `SavedSteps.restore`.
        """
        wanted = to_groups(abstract)
        groups, meta = self.saved.restore(wanted, step, base, self._adapt)
        return _to_state(abstract, groups), meta

    def _adapt(
        self, stored: StoredCheckpoint, wanted: AbstractGroups
    ) -> AbstractGroups:
        """The groups to read from a checkpoint, after a check of its optimizer.

        A run that begins to keep a moving average starts it from the parameters.
        """
        where = f"Checkpoint {stored.step} in '{self.directory}'"
        check_states(stored, self.description, where)
        if "ema" in stored.groups and "ema" not in wanted:
            warn_user(
                f"{where} has a moving average of the parameters, and this Trainer "
                "keeps no average: it is left out, and lost once the steps that have "
                "it are deleted. To go on with it, pass ema_decay to the Trainer; to "
                "keep it as well, save in another directory.",
            )
        is_new = "ema" in wanted and "ema" not in stored.groups
        return {name: x for name, x in wanted.items() if not is_new or name != "ema"}

    def restore_weights(
        self, state: TrainState, step: int | Literal["best"] | None = None
    ) -> TrainState:
        """The state with a checkpoint's parameters and variables; reads nothing else.

        A moving average starts from the restored parameters.
        """
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            {"model": to_groups(state)["model"]},
        )
        own = to_groups(state)["model"]
        groups, _ = self.saved.restore(wanted, step, lambda: own)
        return from_groups(state, groups).with_new_average()

    def resume(
        self, abstract: TrainState, base: Base | None = None
    ) -> tuple[TrainState, dict[str, Any], list[str]] | None:
        """The newest intact state, the metadata, and a line per corrupt step.

        ``None`` without a directory, or a checkpoint in it. All processes call it;
        errors are the same as for `SavedSteps.restore_newest`.
        """
        wanted = to_groups(abstract)
        found = self.options and self.saved.restore_newest(wanted, base, self._adapt)
        if found is None:
            return None
        (groups, meta), notes = found
        if "ema" in wanted and "ema" not in groups:
            notes.append(
                "The checkpoint has no moving average: it starts from the parameters."
            )
        state = _to_state(abstract, groups)
        self.last_saved = int(state.step)
        return state, meta, notes

    def read_newest(
        self, abstract: TrainState, base: Base | None = None
    ) -> tuple[TrainState, dict[str, Any], list[str]] | None:
        """The same as `resume`, but writes and moves nothing: the run may be alive."""
        if self.directory is None:
            return None
        exists = self.local_directory is None or self.local_directory.is_dir()
        check_consistent("directory of the run", {self.directory: exists})
        if not exists:
            return None
        reader = CheckpointManager(self.options, self.description, read_only=True)
        with reader:
            return reader.resume(abstract, base)

    def is_newest(self, step: int) -> bool:
        """True if a fit continues from this step, which was read."""
        return not self.saved.corrupt_steps and self.latest_step == step

    def set_aside(self, step: int) -> str:
        """Moves the steps after one into a directory; returns a line about it, or "".

        Raises:
            CheckpointDirectoryError: If the directory cannot be written, or another run
                is writing there.
        """
        later, aside = self.saved.set_aside(step)
        # A later step of the same number is a different one, which has to be saved.
        self.last_saved = step
        return (
            f"Went back to step {step} in '{self.directory}'; steps {later} are "
            f"in '{aside}'."
        ) * bool(later)

    def check_options(self) -> None:
        """Raises ``DisagreementError`` on all processes if their options differ."""
        # Otherwise they would wait for one another: one saves, or deletes a step,
        # others do not.
        options = strip_addresses(repr(self.options))
        check_consistent("checkpoints", {"checkpoint": options})

    def check_ahead(self, step: int) -> None:
        """Raises ``CheckpointError`` if a saved step is later than the run's."""
        check_ahead(self.directory, self.latest_step, step)

    def check_state(self, abstract: TrainState) -> None:
        """Checks that such a state can be saved, before the first step is trained.

        Raises ``CheckpointError`` if it holds an array that has no elements or a type
        that files lack; ``CheckpointDirectoryError`` if it does not fit on the disk.
        """
        if self.directory is not None:
            groups, _ = split_base(to_groups(abstract), self._frozen)
            check_groups(groups, jax.ShapeDtypeStruct)
            arrays = jax.tree.leaves(groups)
            needed = sum(array_bytes(x.shape, x.dtype) for x in arrays)
            check_space(self.directory, needed)

    def exit_message(self, step: int) -> str:
        """The last message of a run that ends early, at ``step``."""
        return exit_message(self.directory, self.latest_step, step)

    def abandon_if_shared(self) -> None:
        """Drops the directory without waiting for a save of several processes."""
        # The others may never take part: the next start deletes the unfinished files.
        if jax.process_count() > 1:
            if self._opened is not None:
                self._opened.release()
            self._opened = self._save = None

    def close(self) -> None:
        """Waits as `wait` does, and closes the directory in any case."""
        if self._opened is None:
            return
        try:
            self.wait()
        finally:
            opened, is_pending = self._opened, self._save is not None
            self._opened = self._save = None
            if is_pending:  # Orbax would wait for the other processes
                opened.release()
            elif self._has_remains:
                # Orbax raises the error of the last save again.
                with contextlib.suppress(Exception):
                    opened.close()
            else:
                opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *rest: object) -> None:
        try:
            self.close()
        except CheckpointSaveError as failure:
            # Python prints no notes of a SystemExit: its code would hide the failure.
            if error is None or isinstance(error, SystemExit):
                raise
            error.add_note(f"Besides: {failure}")


def _to_state(abstract: TrainState, groups: Groups) -> TrainState:
    """The state that was read, with a new average if the checkpoint has none."""
    state = from_groups(abstract, groups)
    return state if "ema" in groups else state.with_new_average()
