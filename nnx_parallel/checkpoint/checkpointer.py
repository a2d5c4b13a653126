"""Saves and restores through Orbax; the files beside this one do the parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import jax

from nnx_parallel.checkpoint.checksum import (
    PART,
    LateFingerprints,
    read_fingerprints,
    start_fingerprints,
)
from nnx_parallel.checkpoint.contents import (
    AbstractGroups,
    Groups,
    StoredCheckpoint,
    check_fingerprints,
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
    Rules,
    best_steps,
    check_directory,
    check_step,
    check_writable,
    set_aside,
    unlisted_steps,
)
from nnx_parallel.checkpoint.orbax_compat import (
    Gate,
    OnlyCheckpoints,
    SaveUnderWay,
    describe_group,
    load,
    open_directory,
    read_error,
    read_together,
    save_error,
    unavailable_if_no_damage,
)
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import (
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointSaveError,
)


class Checkpointer:
    """Saves, lists and restores the checkpoints of one directory.

    Use it as a context manager: a process that ends without ``close`` loses the save
    under way, and its failure. One job at a time may write to a directory; any number
    may read with ``read_only=True``. All processes make the same calls in the same
    order. What reads waits for the save under way first.

    Args:
        options: Where and how often to save, and what to keep.
        read_only: Never write, make or clean up anything; for looking into the
            directory of a run that may be alive.

    Raises:
        CheckpointDirectoryError: If the directory cannot be made or written.
        CheckpointNotFoundError: If ``read_only`` and there is no such directory.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with Checkpointer(Checkpoint(directory)) as checkpointer:
        ...         checkpointer.save(1, {"params": {"w": jnp.ones(2)}}, {"seed": 0})
        ...         print(checkpointer.describe().groups)
        {'params': {'w': ShapeDtypeStruct(shape=(2,), dtype=float32)}}
    """

    def __init__(self, options: Checkpoint, *, read_only: bool = False) -> None:
        self.options = options
        self._read_only = read_only
        self._is_stale = False
        self._under_way: SaveUnderWay | None = None
        check_directory(str(options.directory), read_only=read_only)
        self._known_metrics: dict[int, Metrics] = {}
        self._rules = rules = Rules(options, self._known_metrics)
        self._names = OnlyCheckpoints()
        self._gate = Gate()
        with self._listing():
            self._orbax = open_directory(
                options, rules, self._names, self._gate, cleanup=not read_only
            )

    @property
    def steps(self) -> list[int]:
        """The saved steps, ascending."""
        self.wait()
        if self._is_stale:
            with self._listing():
                self._orbax.reload()
            self._is_stale = False
        return sorted(found.step for found in self._orbax.checkpoints)

    def reload(self) -> None:
        """Lists the steps anew, for a directory that another program writes."""
        self._is_stale = True

    @property
    def latest_step(self) -> int | None:
        """The newest saved step, or ``None``."""
        return max(self.steps, default=None)

    @property
    def ruined_steps(self) -> dict[int, str]:
        """Steps of which too little is left to be listed, and what is wrong."""
        steps = self.steps
        unlisted = unlisted_steps(str(self.options.directory), steps)
        rejected = {
            step: f"has metadata that cannot be made out ({why})"
            for step, why in self._names.rejected.items()
            if step not in steps
        }
        return dict.fromkeys(unlisted, "has no metadata left") | rejected

    @property
    def best_step(self) -> int | None:
        """The saved step that is best by ``keep_best``, or ``None``."""
        return next(iter(best_steps(self.options, self._metrics())), None)

    @property
    def is_preempted(self) -> bool:
        """Whether `should_save` has found a preemption notice."""
        return self._rules.is_preempted

    def should_save(self, step: int) -> bool:
        """Returns whether ``step`` is one to save: by ``every``, or a preemption.

        All processes must call it once in each step, for a preemption notice (SIGTERM
        under ``jax.distributed``) becomes true at the same step on all of them.
        """
        return not self._read_only and self._orbax.should_save(step)

    def save(
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
        its own shards. A save still under way is waited for first.

        Args:
            step: Updates done so far; later than every saved step.
            groups: Arrays by group and path; groups may be empty, arrays may not. Two
                names are taken: ``metrics`` and ``fingerprints``.
            meta: Whatever JSON can hold (which makes tuples lists and keys strings).
            metrics: Values at this step, for ``keep_best``.
            overwrite: Replace the latest step, if it is ``step``. The old one is
                deleted before the new one is written.

        Raises:
            CheckpointError: If the step is not later, or an argument cannot be saved.
            CheckpointSaveError: If this save could not begin, or an earlier one
                failed in the background: then this one was not tried.
        """
        self.wait()
        directory = str(self.options.directory)
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
        late = LateFingerprints(
            header["digest"], start_fingerprints(groups, "saved fingerprints")
        )
        if self.options.keep_best is not None:
            self._metrics()  # Orbax asks while it saves
        self._known_metrics[step] = metrics
        under_way = SaveUnderWay(step, directory)
        try:
            with self._gate.closed():
                response = self._orbax.save_checkpointables_async(
                    step,
                    {name: dict(x) for name, x in groups.items() if x} | {PART: late},
                    force=True,
                    overwrite=overwrite,
                    custom_metadata=header,
                )
        except Exception as error:
            under_way.end()
            raise save_error(step, directory, error) from error
        assert response is not None, "a forced save is never skipped"
        under_way.follow(response)
        self._under_way = under_way
        if not self.options.asynchronous:
            self.wait()

    def describe(self, step: int | None = None) -> StoredCheckpoint:
        """Returns what a checkpoint holds; reads no arrays.

        Args:
            step: A saved step; ``None`` for the latest.

        Raises:
            CheckpointNotFoundError: If there is no such step.
            CheckpointReadError: If its files are damaged or not this library's.
            CheckpointUnavailableError: If they cannot be read now.
        """
        step = self._existing(step)
        directory = f"{self.options.directory}/{step}"
        with self._reading(step):
            found = self._orbax.checkpointables_metadata(step)
            header = check_header(found.custom_metadata)
            groups = {
                name: found.metadata.get(name) or describe_group(directory, name)
                for name, size in header["sizes"].items()
                if size
            }
            prints = read_fingerprints(directory, header["digest"])
            return read_stored(step, header, groups, prints)

    def restore(
        self, abstract_groups: AbstractGroups, step: int | None = None
    ) -> tuple[dict[str, dict[str, jax.Array]], dict[str, Any]]:
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
            CheckpointDamagedError: If an array is not what was saved.
            CheckpointNotFoundError, CheckpointReadError, CheckpointUnavailableError: As
                `describe`. With several processes damage that one finds is an error on
                all of them.
        """
        step = self._existing(step)
        stored, read = read_together(lambda: self._load(abstract_groups, step))
        where = f"Checkpoint {stored.step} in '{self.options.directory}'"
        with unavailable_if_no_damage(where):
            check_fingerprints(stored, read, where)
        return {name: read.get(name, {}) for name in abstract_groups}, stored.meta

    def _load(
        self, abstract_groups: AbstractGroups, step: int
    ) -> tuple[StoredCheckpoint, dict[str, Any]]:
        stored = self.describe(step)
        check_shardings(abstract_groups)
        check_match(stored, abstract_groups, str(self.options.directory))
        wanted = {name: dict(group) for name, group in abstract_groups.items() if group}
        with self._reading(step):
            return stored, load(f"{self.options.directory}/{step}", wanted)

    def wait(self) -> None:
        """Waits until the save under way is on disk, or raises its failure.

        Each process raises a failure once, here or in `poll`. Where training goes on
        after it (``on_save_error="warn"``), the save has ended on all of them then.
        """
        if self._under_way is None:
            return
        save = self._under_way
        save.join(patiently=self.options.on_save_error == "warn")
        self._under_way = None
        if save.has_failed:
            with contextlib.suppress(Exception):
                self._orbax.wait()  # Orbax raises a failure once in each thread
            self._is_stale = True  # Orbax forgot the steps it would have deleted
            save.check_whole()

    def wait_together(self) -> bool:
        """Waits until the save under way has ended on all processes, or failed on one.

        All of them call it. A save that has failed on one ends on none before Orbax
        gives it up, 20 minutes after it began: that is not waited for.

        Returns:
            Whether it has ended on all, well or not: `wait` returns at once and says.
        """
        while True:
            save = self._under_way
            mine = "ended" if save is None else save.own_part()
            states = allgather_object("save under way", mine)
            if "failed" in states:
                return False
            if set(states) == {"ended"}:
                return True

    def poll(self) -> None:
        """Raises the failure of the save under way if it has failed; does not wait.

        With several processes it may be raised on one of them alone.
        """
        if self._under_way is None:
            return
        if self._under_way.has_failed:
            self.wait()
        else:
            self._under_way.check_own_part()

    def set_aside(self, step: int) -> str:
        """Puts a damaged step out of the way, and returns where it is now.

        With several processes all of them call it.
        """
        path = ""
        if jax.process_index() == 0:
            path = set_aside(str(self.options.directory), step)
        path = allgather_object(f"set aside step {step}", path)[0]
        self._orbax.reload()
        return path

    def close(self) -> None:
        """Waits as `wait` does, and lets go of the directory in any case."""
        try:
            self.wait()
        finally:
            if self._under_way is None:  # else Orbax waits for the other processes
                self._orbax.close()

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

    def _metrics(self) -> dict[int, Metrics]:
        """The metrics of each saved step; none of one that cannot be read."""
        steps = self.steps
        for step in steps:
            if step not in self._known_metrics:
                with contextlib.suppress(CheckpointReadError), self._reading(step):
                    found = self._orbax.checkpointables_metadata(step)
                    header = check_header(found.custom_metadata)
                    self._known_metrics[step] = header["metrics"]
        return {step: self._known_metrics.get(step, {}) for step in steps}

    def _existing(self, step: int | None) -> int:
        steps = self.steps
        if step is None and steps:
            return steps[-1]
        if step is None:
            raise CheckpointNotFoundError(
                f"No checkpoint in '{self.options.directory}'. Save one first."
            )
        if step not in steps:
            raise CheckpointNotFoundError(
                f"No checkpoint for step {step} in '{self.options.directory}'. Saved "
                f"steps: {steps}. Pass step=None for the latest, or resume=False to "
                "start from step 0."
            )
        return step

    def _listing(self) -> AbstractContextManager[None]:
        return unavailable_if_no_damage(f"the steps in '{self.options.directory}'")

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            where = f"checkpoint {step} in '{self.options.directory}'"
            raise read_error(where, self.steps, error) from error
