"""Saves and restores through Orbax; the only module that speaks to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.contents import (
    AbstractGroups,
    Groups,
    StoredCheckpoint,
    check_groups,
    check_shardings,
    differences,
    make_header,
    read_stored,
)
from nnx_parallel.checkpoint.options import (
    Checkpoint,
    Metrics,
    Rules,
    best_steps,
    check_directory,
    is_taken,
)
from nnx_parallel.errors import (
    CheckpointError,
    CheckpointMismatchError,
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
        self._pending: tuple[int, ocp.AsyncResponse[bool]] | None = None
        check_directory(str(options.directory), read_only=read_only)
        self._orbax = _open(options, cleanup=not read_only)

    @property
    def steps(self) -> list[int]:
        """The saved steps, ascending."""
        return list(self._metrics())

    @property
    def latest_step(self) -> int | None:
        """The newest saved step, or ``None``."""
        return max(self.steps, default=None)

    @property
    def best_step(self) -> int | None:
        """The saved step that is best by ``keep_best``, or ``None``."""
        return next(iter(best_steps(self.options, self._metrics())), None)

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
            groups: Arrays by group and path; groups may be empty, arrays may not.
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
        self._check_step(step, overwrite=overwrite)
        check_groups(groups)
        header = make_header(groups, meta)
        try:
            response = self._orbax.save_checkpointables_async(
                step,
                {name: dict(arrays) for name, arrays in groups.items() if arrays},
                force=True,
                overwrite=overwrite,
                metrics={name: float(x) for name, x in (metrics or {}).items()} or None,
                custom_metadata=header,
            )
        except Exception as error:
            raise self._save_error(step, error) from error
        assert response is not None, "a forced save is never skipped"
        self._pending = step, response
        if not self.options.asynchronous:
            self.wait()

    def describe(self, step: int | None = None) -> StoredCheckpoint:
        """Returns what a checkpoint holds; reads no arrays.

        Args:
            step: A saved step; ``None`` for the latest.

        Raises:
            CheckpointNotFoundError: If there is no such step.
            CheckpointReadError: If its files are damaged or not this library's.
        """
        step = self._existing(step)
        with self._reading(step):
            found = self._orbax.checkpointables_metadata(step)
            return read_stored(
                step, found.custom_metadata, found.metadata, self._metrics()[step]
            )

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
            CheckpointNotFoundError, CheckpointReadError: As `describe`.
        """
        stored = self.describe(step)
        check_shardings(abstract_groups)
        self._check_match(stored, abstract_groups)
        wanted = {name: dict(group) for name, group in abstract_groups.items() if group}
        with self._reading(stored.step):
            read: dict[str, Any] = (
                self._orbax.load_checkpointables(stored.step, wanted) if wanted else {}
            )
        return {name: read.get(name, {}) for name in abstract_groups}, stored.meta

    def wait(self) -> None:
        """Waits until the save under way is on disk, or raises its failure."""
        if self._pending is None:
            return
        step, response = self._pending
        try:
            response.result()
        except Exception as error:
            self._pending = None
            with contextlib.suppress(Exception):
                self._orbax.wait()  # Orbax raises a failure once in each thread
            self._is_stale = True  # Orbax forgot the steps it would have deleted
            raise self._save_error(step, error) from error
        self._pending = None

    def close(self) -> None:
        """Waits as `wait` does, and lets go of the directory in any case."""
        try:
            self.wait()
        finally:
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
        self.wait()
        if self._is_stale:
            self._orbax.reload()
            self._is_stale = False
        checkpoints: Sequence[Any] = self._orbax.checkpoints
        return {found.step: found.metrics or {} for found in checkpoints}

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

    def _check_step(self, step: int, *, overwrite: bool) -> None:
        where = f"'{self.options.directory}'"
        latest = self.latest_step
        if self._read_only:
            raise CheckpointError(
                f"Cannot save in {where}: opened with read_only=True."
            )
        if step == latest:
            if not overwrite:
                raise CheckpointError(
                    f"Step {step} is already saved in {where}. Pass overwrite=True to "
                    "replace it, or save a later step."
                )
        elif latest is not None and step < latest:
            raise CheckpointError(
                f"Cannot save step {step} in {where} after step {latest}: steps must "
                f"ascend. Save step {latest + 1} or later, or use another directory."
            )
        elif is_taken(self.options, step):
            raise CheckpointError(
                f"Cannot save step {step} in {where}: '{step}' is there and is not a "
                "checkpoint. Move it away, or use another directory."
            )

    def _check_match(self, stored: StoredCheckpoint, wanted: AbstractGroups) -> None:
        lines = differences(stored, wanted)
        if lines:
            raise CheckpointMismatchError(
                f"Checkpoint {stored.step} in '{self.options.directory}' differs from "
                "what is asked for:\n  " + "\n  ".join(lines) + "\nBuild the same "
                "model and optimizer, or restore other groups. Saved groups: "
                f"{list(stored.groups)}."
            )

    def _save_error(self, step: int, error: Exception) -> CheckpointSaveError:
        return CheckpointSaveError(
            f"Saving step {step} in '{self.options.directory}' failed: "
            f"{_root_cause(error)} No earlier checkpoint was deleted."
        )

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CheckpointReadError(
                f"Cannot read checkpoint {step} in '{self.options.directory}': "
                f"{_root_cause(error)} Its files are damaged, half deleted, or not "
                f"this library's. Saved steps: {self.steps}."
            ) from error


class _OnlyCheckpoints:
    """Names a step by its number, and lists only directories that are checkpoints.

    Left to itself Orbax takes every directory with a number for a name as a step, and
    deletes it in its turn.
    """

    def __init__(self) -> None:
        self._names = ocp.path.step.standard_name_format()

    def build_name(self, step: int) -> str:
        return self._names.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        for found in self._names.find_all(base_path):
            if found.commit_timestamp_nsecs is not None:
                yield found

    def find_step(self, base_path: Any, step: int) -> Any:
        return self._names.find_step(base_path, step)


def _open(options: Checkpoint, *, cleanup: bool) -> ocp.training.Checkpointer:
    context = ocp.Context()
    # The header and the reader's shardings say all; no mesh goes to disk.
    context.array_options.saving.enable_write_sharding_file = False
    rules = Rules(options)
    return ocp.training.Checkpointer(
        str(options.directory),
        context=context,
        save_decision_policy=rules,
        preservation_policy=rules,
        step_name_format=_OnlyCheckpoints(),
        cleanup_tmp_directories=cleanup,
    )


def _root_cause(error: BaseException) -> str:
    """Returns the last of a chain; Orbax wraps what went wrong in unlike errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
