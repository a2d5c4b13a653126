"""The newest checkpoint that is whole, and what is said of those that are not.

The checkpoints of one Trainer: what a run saves, and how it finds its way back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import jax

from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.contents import AbstractGroups, check_shapes
from nnx_parallel.checkpoint.options import Checkpoint, check_space, is_url
from nnx_parallel.checkpoint.train_state import Groups, from_groups, to_groups
from nnx_parallel.distributed.agreement import (
    allgather_object,
    check_consistent,
    strip_addresses,
)
from nnx_parallel.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointSaveError,
    DisagreementError,
)
from nnx_parallel.state import TrainState

Restored = tuple[dict[str, dict[str, jax.Array]], dict[str, Any]]


def restore_newest(
    checkpointer: Checkpointer, wanted: AbstractGroups
) -> tuple[Restored, list[str]]:
    """Restores the latest step; or the latest whole one, if the options say so.

    Args:
        checkpointer: The directory.
        wanted: As `Checkpointer.restore`.

    Returns:
        What was restored, and a line for each damaged step that was set aside.

    Raises:
        CheckpointDamagedError: If the latest step is damaged and ``on_damage`` is
            ``"error"``, or no step is whole.
        CheckpointMismatchError: If the run differs from that which was saved: this is
            no damage.
    """
    problems: dict[int, str] = {}
    ruined = checkpointer.ruined_steps
    for step in sorted([*ruined, *checkpointer.steps], reverse=True):
        if step in ruined:
            where = f"'{checkpointer.options.directory}'"
            found, problem = None, f"Checkpoint {step} in {where} {ruined[step]}."
        else:
            found, problem = _try(checkpointer, wanted, step)
        if found is not None:
            return found, _set_aside(checkpointer, problems, step)
        problems[step] = problem
        if checkpointer.options.on_damage == "error":
            break
    others = sorted(set(checkpointer.steps) - problems.keys())
    way_out = (
        f"Other steps: {others}. Checkpoint(..., on_damage='previous') sets the "
        "damaged one aside and resumes from the newest of them that is whole."
        if others
        else "No step in the directory is whole. Choose another directory to start "
        "afresh."
    )
    raise CheckpointDamagedError("\n".join(problems.values()) + "\n" + way_out)


def _try(
    checkpointer: Checkpointer, wanted: AbstractGroups, step: int
) -> tuple[Restored | None, str]:
    """A restored step, or what is wrong with it on any process, twice over."""
    found, problem = _try_once(checkpointer, wanted, step)
    if problem and checkpointer.options.on_damage == "previous":
        found, problem = _try_once(checkpointer, wanted, step)
    return found, problem


def _try_once(
    checkpointer: Checkpointer, wanted: AbstractGroups, step: int
) -> tuple[Restored | None, str]:
    found, problem = None, ""
    try:
        found = checkpointer.restore(wanted, step)
    except CheckpointReadError as error:
        problem = str(error)
    problems = allgather_object("damage", problem)
    if len(set(problems)) == 1:
        return found, problem
    bad = [
        f"On process {process}: {text}" if len(problems) > 1 else text
        for process, text in enumerate(problems)
        if text
    ]
    return (None, "\n".join(bad)) if bad else (found, "")


def _set_aside(
    checkpointer: Checkpointer, problems: dict[int, str], step: int
) -> list[str]:
    return [
        f"{text}\nStep {damaged} is set aside as '{checkpointer.set_aside(damaged)}'; "
        f"the run goes on from step {step}."
        for damaged, text in problems.items()
    ]


class Storage:
    """Saves and restores the training state of one run; does nothing without options.

    The directory is opened at the first use and stays open until `close`.

    Args:
        options: A directory, a `Checkpoint`, or ``None``.
        description: Of the run: what goes to disk beside the arrays.
        read_only: Never write, make or clean up anything.
    """

    def __init__(
        self,
        options: Checkpoint | str | os.PathLike | None,
        description: Mapping[str, Any],
        *,
        read_only: bool = False,
    ) -> None:
        if options is not None and not isinstance(options, Checkpoint):
            options = Checkpoint(options)
        self.options = options
        self._description = dict(description)
        self._read_only = read_only
        self._open: Checkpointer | None = None
        self._last_saved: int | None = None

    @property
    def description(self) -> dict[str, Any]:
        """What is said of the run beside the arrays."""
        return dict(self._description)

    @property
    def directory(self) -> str | None:
        """Where the checkpoints go: a path, or a URL such as ``gs://...``."""
        return None if self.options is None else str(self.options.directory)

    @property
    def local_directory(self) -> Path | None:
        """The same where it is a path of this machine: other files can go there."""
        if self.directory is None or is_url(self.directory):
            return None
        return Path(self.directory)

    @property
    def ranks_by_eval(self) -> bool:
        """Whether the best checkpoint is the best by an evaluation."""
        best = self.options and self.options.keep_best
        return bool(best) and best.startswith("eval_")

    @property
    def latest_step(self) -> int | None:
        """The newest saved step, or ``None``."""
        return None if self.options is None else self._checkpointer().latest_step

    @property
    def is_preempted(self) -> bool:
        """Whether jax has told of a preemption, at the same step on all processes."""
        return self._open is not None and self._open.is_preempted

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is one to save."""
        return self.options is not None and self._checkpointer().should_save(step)

    def agree_on_options(self) -> None:
        """Checks that all processes save alike; all of them call it.

        Raises:
            DisagreementError: On all processes, if not. They would wait for one
                another.
        """
        check_consistent(
            "checkpoints", {"checkpoint": strip_addresses(repr(self.options))}
        )

    def agree_on_steps(self) -> None:
        """Checks that all processes see the same steps; all of them call it.

        Raises:
            DisagreementError: On all processes, if not. They would wait for one
                another, or take parts of different steps for damage.
        """
        if self.options is None:
            return
        checkpointer = self._checkpointer()
        mine = [checkpointer.steps, sorted(checkpointer.ruined_steps)]
        found = allgather_object("steps in the directory", mine)
        for process, theirs in enumerate(found):
            if theirs != found[0]:
                raise DisagreementError(
                    f"Processes 0 and {process} see different checkpoints in "
                    f"'{self.directory}': steps {_spell(*found[0])} and "
                    f"{_spell(*theirs)}. Give a directory that all machines share; "
                    "if it is one, its listing was late: start again."
                )

    def resumes(self) -> bool:
        """Whether a fit starts from a saved state.

        Raises:
            CheckpointError: If there is one but ``resume=False``: a fresh run would
                write into the directory of another.
        """
        if self.options is None:
            return False
        if self.latest_step is None and not self._checkpointer().ruined_steps:
            return False
        if not self.options.resume:
            raise CheckpointError(
                f"'{self.directory}' holds checkpoints of steps "
                f"{self._checkpointer().steps}, but resume=False asks for a fresh run. "
                "Choose another directory, remove this one, or leave resume=True."
            )
        return True

    def save(
        self,
        state: TrainState,
        step: int,
        position: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        once: bool = True,
        may_skip: bool = False,
    ) -> None:
        """Saves a state under its step.

        Args:
            state: The state; its arrays may be donated once this returns.
            step: Its step.
            position: Where the data stands, as JSON can hold it.
            metrics: Values at this step.
            once: Do nothing if this object has saved or restored the step itself.
            may_skip: Save nothing, where training goes on after failures, until the
                save before, which has failed on one of several processes, is given up.

        Raises:
            CheckpointError: If somebody else has saved this step or a later one.

        Warns:
            UserWarning: If the metric of ``keep_best`` is not among ``metrics``, or the
                step is not saved.
        """
        if once and self._last_saved == step:
            return
        checkpointer = self._checkpointer()
        goes_on = checkpointer.options.on_save_error == "warn"
        while goes_on and jax.process_count() > 1 and not checkpointer.wait_together():
            self.poll()
            if may_skip:
                warnings.warn(
                    f"Step {step} is not saved: an earlier save has failed on a "
                    "process, for which the others wait (20 minutes at most). Training "
                    "goes on.",
                    stacklevel=2,
                )
                return
        with self._failing_as_told():
            checkpointer.wait()
        best = checkpointer.options.keep_best
        if metrics and best is not None and best not in metrics:
            warnings.warn(
                f"keep_best={best!r} is not among the metrics of step {step}, which "
                f"therefore never counts as best. Metrics: {sorted(metrics)}.",
                stacklevel=2,
            )
        meta = {**self._description, "position": dict(position)}
        with self._failing_as_told():
            checkpointer.save(step, to_groups(state), meta, metrics=metrics)
            self._last_saved = step

    def poll(self) -> None:
        """Tells of a save that has failed in the background, under its own step.

        Raises:
            CheckpointSaveError: If it has, and ``on_save_error`` is ``"raise"``.

        Warns:
            UserWarning: If it has, and ``on_save_error`` is ``"warn"``.
        """
        if self._open is not None:
            with self._failing_as_told():
                self._open.poll()

    @contextlib.contextmanager
    def _failing_as_told(self) -> Iterator[None]:
        try:
            yield
        except CheckpointSaveError as error:
            self._last_saved = None
            if self.options is None or self.options.on_save_error == "raise":
                raise
            warnings.warn(f"{error} Training goes on.", stacklevel=4)

    def check_state(self, abstract: TrainState) -> None:
        """Checks that such a state can be saved, and fits on the disk.

        Raises:
            CheckpointError: If it holds an array without values.
            CheckpointDirectoryError: If it does not fit.
        """
        if self.options is not None:
            groups = to_groups(abstract)
            check_shapes(groups)
            arrays = jax.tree.leaves(groups)
            needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
            check_space(str(self.options.directory), needed)

    def restore_newest(
        self, abstract: TrainState
    ) -> tuple[TrainState, dict[str, Any], list[str]]:
        """The newest state that is whole, the data's position, and what was damaged.

        Args:
            abstract: The state as shapes with shardings.

        Raises:
            CheckpointDamagedError: If the latest is damaged and ``on_damage`` is
                ``"error"``, or none is whole.
            CheckpointMismatchError: If an array differs, before any is read.
        """
        checkpointer = self._checkpointer()
        (groups, meta), notes = restore_newest(checkpointer, to_groups(abstract))
        state = from_groups(abstract, groups)
        self._last_saved = int(state.step)
        return state, meta.get("position", {}), notes

    def check_ahead(self, step: int) -> None:
        """Checks that a run at ``step`` would not meet checkpoints of another.

        Raises:
            CheckpointError: If the directory holds a later step.
        """
        latest = self.latest_step
        if latest is not None and latest > step:
            raise CheckpointError(
                f"'{self.directory}' holds a checkpoint of step {latest}, but this run "
                f"stands at step {step} and would write into the same directory. "
                "Choose another directory for it, or restore() the latest step."
            )

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
        step = self._resolve(step)
        groups, meta = self._checkpointer().restore(to_groups(abstract), step)
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
        wanted = _abstract({"model": to_groups(state)["model"]})
        found, _ = self._checkpointer().restore(wanted, self._resolve(step))
        restored = from_groups(state, found)
        if state.ema is None:
            return restored
        ema = jax.tree.map(
            lambda x, old: x.astype(old.dtype, copy=True), restored.params, state.ema
        )
        return dataclasses.replace(restored, ema=ema)

    def last_words(self, step: int) -> str:
        """What a run says that ends before its time."""
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
        """Lets go of the directory without waiting for a save of several processes.

        Its other processes may never come: what they write stays unfinished and is
        cleaned up by the next start.
        """
        if jax.process_count() > 1:
            self._open = None

    def wait(self) -> None:
        """Waits until the save under way is on disk."""
        if self._open is not None:
            with self._failing_as_told():
                self._open.wait()

    def _resolve(self, step: int | Literal["best"] | None) -> int | None:
        if step != "best":
            return step
        found = self._checkpointer().best_step
        if found is None:
            raise CheckpointNotFoundError(
                f"No best checkpoint in '{self.directory}': none was saved with the "
                "metric of Checkpoint(keep_best=...). Saved steps: "
                f"{self._checkpointer().steps}."
            )
        return found

    def close(self) -> None:
        """Waits for the save under way and lets go of the directory."""
        if self._open is not None:
            opened, self._open = self._open, None
            with self._failing_as_told():
                opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _checkpointer(self) -> Checkpointer:
        if self.options is None:
            raise CheckpointNotFoundError(
                "This Trainer has no checkpoint directory. Pass checkpoint='runs/name'."
            )
        if self._open is None:
            self._open = Checkpointer(self.options, read_only=self._read_only)
        return self._open


def _spell(whole: list[int], ruined: list[int]) -> str:
    return f"{whole}" + (f" (and {ruined}, which are ruined)" if ruined else "")


def _abstract(groups: Groups) -> Groups:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), groups
    )
