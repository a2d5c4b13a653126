"""The checkpoints of one directory: saved asynchronously, listed, restored anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.async_save import (
    AsyncSave,
    save_error,
    wait_on_all_processes,
)
from nnx_parallel.checkpoint.checksum import (
    PART,
    PendingChecksums,
    read_checksums,
    start_checksums,
)
from nnx_parallel.checkpoint.contents import (
    AbstractGroups,
    Groups,
    StoredCheckpoint,
    check_checksums,
    check_groups,
    check_header,
    check_match,
    check_shardings,
    make_header,
    read_stored,
)
from nnx_parallel.checkpoint.options import (
    Checkpoint,
    Metrics,
    best_steps,
    check_directory,
    check_step,
    check_writable,
    is_url,
    quarantine,
    unlisted_steps,
)
from nnx_parallel.checkpoint.orbax_compat import (
    Gate,
    PreemptionPolicy,
    StepNames,
    describe_group,
    load,
    open_directory,
    read_error,
    unavailable_if_intact,
)
from nnx_parallel.checkpoint.train_state import from_groups, to_groups
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import (
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointSaveError,
)
from nnx_parallel.state import TrainState

Restored = tuple[dict[str, dict[str, jax.Array]], dict[str, Any]]
T = TypeVar("T")


class CheckpointManager:
    """Saves, lists and restores the checkpoints of one directory.

    The directory is opened at the first use and stays open until `close`. Use it as a
    context manager: a process that ends without `close` loses the save in progress, and
    its error. One job at a time may write to a directory; any number may read with
    ``read_only=True``. All processes make the same calls in the same order, from the
    main thread. Reading waits for the save in progress first.

    Args:
        options: Where and how often to save, and what to keep; or the directory alone.
            With ``None`` no step is due, and saving and restoring are errors.
        description: Of the run; saved as metadata with each state.
        read_only: Never write, make or clean up anything; for looking into the
            directory of a run that may be alive.

    Attributes:
        options: As given; a directory as a `Checkpoint`.
        description: As given.
        last_saved: The step that this object has saved or resumed from, which `save`
            need not save again.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with CheckpointManager(directory) as manager:
        ...         manager.save_groups(1, {"params": {"w": jnp.ones(2)}}, {"seed": 0})
        ...         print(manager.describe().groups)
        {'params': {'w': ShapeDtypeStruct(shape=(2,), dtype=float32)}}
    """

    def __init__(
        self,
        options: Checkpoint | str | os.PathLike | None,
        description: Mapping[str, Any] | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        if options is not None and not isinstance(options, Checkpoint):
            options = Checkpoint(options)
        self.options = options
        self.description = dict(description or {})
        self.last_saved: int | None = None
        self._read_only = read_only
        self._forget()

    def _forget(self) -> None:
        """The state of a directory that has not been opened."""
        self._orbax: ocp.training.Checkpointer | None = None
        self._save: AsyncSave | None = None
        self._is_stale = False  # the listing, against the directory
        self._known_metrics: dict[int, Metrics] = {}
        self._names, self._preemption = StepNames(), PreemptionPolicy()
        self._gate = Gate()

    def _open(self) -> ocp.training.Checkpointer:
        """Opens the directory, unless it is open.

        Raises:
            CheckpointDirectoryError: If the directory cannot be made or written.
            CheckpointNotFoundError: If ``read_only`` and there is no such directory, or
                the options are ``None``.
        """
        if self.options is None:
            raise CheckpointNotFoundError(
                "This Trainer has no checkpoint directory. Pass checkpoint='runs/name'."
            )
        if self._orbax is None:
            check_directory(str(self.directory), read_only=self._read_only)
            with self._listing():
                self._orbax = open_directory(
                    self.options,
                    names=self._names,
                    preemption=self._preemption,
                    metrics=self._known_metrics,
                    gate=self._gate,
                    cleanup=not self._read_only,
                )
        return self._orbax

    @property
    def directory(self) -> str | None:
        """Where the checkpoints go: a path, or a URL such as ``gs://...``."""
        return None if self.options is None else str(self.options.directory)

    @property
    def local_directory(self) -> Path | None:
        """The directory if it is a path of this machine: other files can go there."""
        if self.directory is None or is_url(self.directory):
            return None
        return Path(self.directory)

    @property
    def ranks_by_eval(self) -> bool:
        """True if the best checkpoint is the best by an evaluation."""
        best = self.options and self.options.keep_best
        return bool(best) and best.startswith("eval_")

    @property
    def steps(self) -> list[int]:
        """The saved steps, ascending."""
        orbax = self._open()
        self._join_save()
        if self._is_stale:
            with self._listing():
                orbax.reload()
            self._is_stale = False
        return sorted(found.step for found in orbax.checkpoints)

    @property
    def latest_step(self) -> int | None:
        """The newest saved step, or ``None``."""
        return None if self.options is None else max(self.steps, default=None)

    @property
    def best_step(self) -> int | None:
        """The saved step that is best by ``keep_best``, or ``None``."""
        metrics = self._metrics()
        return next(iter(best_steps(self._options, metrics)), None)

    @property
    def corrupt_steps(self) -> dict[int, str]:
        """Steps of which too little is left to be listed, each with its problem."""
        steps = self.steps
        unlisted = unlisted_steps(str(self.directory), steps)
        rejected = {
            step: f"has metadata that cannot be parsed ({why})"
            for step, why in self._names.rejected.items()
            if step not in steps
        }
        return dict.fromkeys(unlisted, "has no metadata left") | rejected

    def reload(self) -> None:
        """Has the next use list the steps again, if another program writes them."""
        self._is_stale = True

    @property
    def is_preempted(self) -> bool:
        """True if jax has announced a preemption, at the same step on all processes."""
        return self._preemption.has_notice

    def is_due(self, step: int) -> bool:
        """True if ``step`` is one to save: by ``every``, or before a preemption.

        All processes call it once a step: jax announces a preemption (SIGTERM under
        ``jax.distributed``) at a step on which all of them agree by these calls.
        """
        if self.options is None or self._read_only:
            return False
        return self._open().should_save(step)

    def save(
        self,
        state: TrainState,
        step: int,
        position: Mapping[str, Any],
        metrics: Metrics,
        *,
        once: bool = True,
        may_skip: bool = False,
    ) -> None:
        """Saves a state under its step.

        Args:
            state: The state; its arrays may be donated once this returns.
            step: Its step.
            position: The position in the data, as JSON can hold it.
            metrics: Values at this step.
            once: Do nothing if this object has saved or restored the step itself.
            may_skip: Save nothing, with ``on_save_error="warn"``, while an earlier
                save that failed on one of several processes has not been given up.

        Raises:
            CheckpointError: If another program has saved this step or a later one.

        Warns:
            UserWarning: If the metric of ``keep_best`` is not among ``metrics``, or the
                step is not saved.
        """
        if once and self.last_saved == step:
            return
        self._open()
        if self._options.on_save_error == "warn" and jax.process_count() > 1:
            while not wait_on_all_processes(self._save):
                self.poll()
                if may_skip:
                    warnings.warn(
                        f"Step {step} is not saved: an earlier save has failed on a "
                        "process, for which the others wait (20 minutes at most). "
                        "Training goes on.",
                        stacklevel=2,
                    )
                    return
        self.wait()
        best = self._options.keep_best
        if metrics and best is not None and best not in metrics:
            warnings.warn(
                f"keep_best={best!r} is not among the metrics of step {step}, which "
                f"therefore never counts as best. Metrics: {sorted(metrics)}.",
                stacklevel=2,
            )
        meta = {**self.description, "position": dict(position)}
        with self._reporting_failures():
            self.save_groups(step, to_groups(state), meta, metrics=metrics)
            self.last_saved = step

    def save_groups(
        self,
        step: int,
        groups: Groups,
        meta: Mapping[str, Any],
        *,
        metrics: Metrics | None = None,
        overwrite: bool = False,
    ) -> None:
        """Saves ``groups`` and ``meta`` under ``step``.

        When it returns, the arrays have been copied and may be donated; the files are
        written in the background, unless ``asynchronous=False``. Each process writes
        its own shards. A save in progress is waited for first.

        Args:
            step: Updates done so far; later than every saved step.
            groups: Arrays by group and path; groups may be empty, arrays may not. Two
                names are reserved: ``metrics`` and ``fingerprints``.
            meta: Values that JSON can hold (which makes tuples lists and keys strings).
            metrics: Values at this step, for ``keep_best``.
            overwrite: Replace the latest step, if it is ``step``. The old one is
                deleted before the new one is written.

        Raises:
            CheckpointError: If the step is not later, or an argument cannot be saved.
            CheckpointSaveError: If this save could not begin, or an earlier one
                failed in the background: then this one was not tried.
        """
        orbax, directory = self._open(), str(self.directory)
        # Orbax replaces its inner checkpointer before it waits for the save before.
        self._join_save()
        if self._read_only:
            raise CheckpointError(
                f"Cannot save in '{directory}': opened with read_only=True."
            )
        check_step(directory, step, self.latest_step, overwrite=overwrite)
        check_groups(groups)
        try:
            check_writable(directory)
        except CheckpointDirectoryError as error:
            raise save_error(step, directory, error) from error
        metrics = {name: float(x) for name, x in (metrics or {}).items()}
        header = make_header(groups, meta, metrics)
        pending = start_checksums(groups, "saved checksums")
        checksums = PendingChecksums(header["digest"], pending)
        if self._options.keep_best is not None:
            self._metrics()  # `BestPolicy` is asked while Orbax saves
        self._known_metrics[step] = metrics
        save = AsyncSave(step, directory)
        try:
            with self._gate.closed():
                response = orbax.save_checkpointables_async(
                    step,
                    {name: dict(x) for name, x in groups.items() if x}
                    | {PART: checksums},
                    force=True,
                    overwrite=overwrite,
                    custom_metadata=header,
                )
        except Exception as error:
            save.end()
            raise save_error(step, directory, error) from error
        assert response is not None, "a forced save is never skipped"
        save.follow(response)
        self._save = save
        if not self._options.asynchronous:
            self._join_save()

    def wait(self) -> None:
        """Waits until the save in progress is on disk.

        Each process reports a failure once, here or in `poll`. If training goes on
        after it (``on_save_error="warn"``), the save has then ended on all of them.

        Raises:
            CheckpointSaveError: If it failed, and ``on_save_error`` is ``"raise"``.

        Warns:
            UserWarning: If it failed, and ``on_save_error`` is ``"warn"``.
        """
        with self._reporting_failures():
            self._join_save()

    def poll(self) -> None:
        """Reports the failure of the save in progress, as `wait`; does not wait.

        With several processes it may be reported on one of them alone.
        """
        if self._save is None:
            return
        with self._reporting_failures():
            if self._save.has_failed:
                self._join_save()
            else:
                self._save.check_own_part()

    def _join_save(self) -> None:
        save = self._save
        if save is None:
            return
        save.join(patiently=self._options.on_save_error == "warn")
        self._save = None
        if save.has_failed:
            with contextlib.suppress(Exception):
                self._open().wait()  # Orbax raises a failure once in each thread
            self._is_stale = True  # Orbax forgot the steps it would have deleted
            save.check_whole()

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        try:
            yield
        except CheckpointSaveError as error:
            self.last_saved = None
            if self._options.on_save_error == "raise":
                raise
            warnings.warn(f"{error} Training goes on.", stacklevel=4)

    def describe(self, step: int | None = None) -> StoredCheckpoint:
        """Returns the contents of a checkpoint; reads no arrays.

        Args:
            step: A saved step; ``None`` for the latest.

        Raises:
            CheckpointNotFoundError: If there is no such step.
            CheckpointReadError: If its files are corrupt or not this library's.
            CheckpointUnavailableError: If they cannot be read now.
        """
        step = self._existing(step)
        directory = f"{self.directory}/{step}"
        with self._reading(step):
            found = self._open().checkpointables_metadata(step)
            header = check_header(found.custom_metadata)
            groups = {
                name: found.metadata.get(name) or describe_group(directory, name)
                for name, size in header["sizes"].items()
                if size
            }
            checksums = read_checksums(directory, header["digest"])
            return read_stored(step, header, groups, checksums)

    def restore_groups(
        self, abstract_groups: AbstractGroups, step: int | None = None
    ) -> Restored:
        """Returns the arrays of some groups, placed as asked, and the metadata.

        Each device reads its own shards; no array is ever whole on one that holds
        only a part. Values are those saved, bit for bit.

        Args:
            abstract_groups: Shape, dtype and sharding of each array, for all groups
                or some (``{"params": ...}`` reads the weights alone).
            step: A saved step; ``None`` for the latest.

        Raises:
            CheckpointError: If an array has no sharding.
            CheckpointMismatchError: If paths, shapes or dtypes differ from those
                saved, before any array is read.
            CheckpointDamagedError: If an array is not the one that was saved.
            CheckpointNotFoundError, CheckpointReadError, CheckpointUnavailableError: As
                `describe`. Corruption that one process finds is an error on all.
        """
        step = self._existing(step)
        stored, read = _on_all_processes(lambda: self._load(abstract_groups, step))
        where = f"Checkpoint {stored.step} in '{self.directory}'"
        with unavailable_if_intact(where):
            check_checksums(stored, read, where)
        return {name: read.get(name, {}) for name in abstract_groups}, stored.meta

    def _load(
        self, abstract_groups: AbstractGroups, step: int
    ) -> tuple[StoredCheckpoint, dict[str, Any]]:
        stored = self.describe(step)
        check_shardings(abstract_groups)
        check_match(stored, abstract_groups, str(self.directory))
        wanted = {name: dict(group) for name, group in abstract_groups.items() if group}
        with self._reading(step):
            return stored, load(f"{self.directory}/{step}", wanted)

    def restore(
        self, abstract: TrainState, step: int | Literal["best"] | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state of a step in the layout of ``abstract``, and the data's position.

        Args:
            abstract: The state as shapes with shardings.
            step: A saved step; ``"best"`` by ``keep_best``; ``None`` for the latest.

        Raises:
            CheckpointNotFoundError: If there is no such step.
            CheckpointMismatchError: If an array differs, before any is read.
        """
        groups, meta = self.restore_groups(to_groups(abstract), self._resolve(step))
        return from_groups(abstract, groups), meta.get("position", {})

    def restore_weights(
        self, state: TrainState, step: int | Literal["best"] | None = None
    ) -> TrainState:
        """The state with the parameters and other variables of a checkpoint.

        Nothing else is read. A moving average starts from the restored parameters.

        Raises:
            CheckpointNotFoundError: If there is no such step.
            CheckpointMismatchError: If an array differs, before any is read.
        """
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            {"model": to_groups(state)["model"]},
        )
        found, _ = self.restore_groups(wanted, self._resolve(step))
        restored = from_groups(state, found)
        if state.ema is None:
            return restored
        # A copy: the average and the parameters are donated separately.
        ema = jax.tree.map(
            lambda x, old: x.astype(old.dtype, copy=True), restored.params, state.ema
        )
        return dataclasses.replace(restored, ema=ema)

    def quarantine(self, step: int) -> str:
        """Renames a corrupt step so that it is not read again; all processes call it.

        Returns:
            Its new path.
        """
        path = ""
        if jax.process_index() == 0:
            path = quarantine(str(self.directory), step)
        path = allgather_object(f"quarantine step {step}", path)[0]
        self._open().reload()
        return path

    def exit_message(self, step: int) -> str:
        """The last message of a run that ends early, at ``step``."""
        if self.options is None:
            return "Nothing is saved: this Trainer has no checkpoint directory."
        found = self.latest_step
        if found is None:
            return f"Nothing is saved in '{self.directory}': step {step} is lost."
        lost = "" if found == step else f" What step {step} had done since is lost."
        return (
            f"Saved step {found} in '{self.directory}': resume with the same "
            f"command.{lost}"
        )

    def abandon_if_shared(self) -> None:
        """Drops the directory without waiting for a save of several processes.

        The other processes may never take part: the files of the save stay unfinished,
        and the next start deletes them.
        """
        if jax.process_count() > 1:
            self._forget()

    def close(self) -> None:
        """Waits as `wait` does, and closes the directory in any case."""
        if self._orbax is None:
            return
        try:
            self.wait()
        finally:
            if self._save is None:  # else Orbax waits for the other processes
                self._orbax.close()
            self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointSaveError as failure:
            if error is None:
                raise
            error.add_note(f"Besides: {failure}")

    @property
    def _options(self) -> Checkpoint:
        assert self.options is not None, "the directory is open"
        return self.options

    def _metrics(self) -> dict[int, Metrics]:
        """The metrics of each saved step; none of one that cannot be read."""
        steps = self.steps
        for step in steps:
            if step not in self._known_metrics:
                with contextlib.suppress(CheckpointReadError), self._reading(step):
                    found = self._open().checkpointables_metadata(step)
                    header = check_header(found.custom_metadata)
                    self._known_metrics[step] = header["metrics"]
        return {step: self._known_metrics.get(step, {}) for step in steps}

    def _resolve(self, step: int | Literal["best"] | None) -> int | None:
        if step != "best":
            return step
        found = self.best_step
        if found is None:
            raise CheckpointNotFoundError(
                f"No best checkpoint in '{self.directory}': none was saved with the "
                "metric of Checkpoint(keep_best=...). Saved steps: "
                f"{self.steps}."
            )
        return found

    def _existing(self, step: int | None) -> int:
        steps = self.steps
        if step is None and steps:
            return steps[-1]
        if step is None:
            raise CheckpointNotFoundError(
                f"No checkpoint in '{self.directory}'. Save one first."
            )
        if step not in steps:
            raise CheckpointNotFoundError(
                f"No checkpoint for step {step} in '{self.directory}'. Saved "
                f"steps: {steps}. Pass step=None for the latest, or resume=False to "
                "start from step 0."
            )
        return step

    def _listing(self) -> contextlib.AbstractContextManager[None]:
        return unavailable_if_intact(f"the steps in '{self.directory}'")

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            where = f"checkpoint {step} in '{self.directory}'"
            raise read_error(where, self.steps, error) from error


def _on_all_processes(read: Callable[[], T]) -> T:
    """What ``read`` returns, or an error on all processes if it fails on one.

    ``read`` waits for no other process, so that all of them come to the exchange; what
    follows it may use collectives.

    Raises:
        CheckpointReadError: On all processes, if one finds corruption.
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
