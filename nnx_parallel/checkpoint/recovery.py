"""How a run finds its way back: which checkpoint it resumes from, past corrupt ones."""

from __future__ import annotations

import math
from typing import Any

import jax

from nnx_parallel.checkpoint.contents import AbstractGroups, check_shapes
from nnx_parallel.checkpoint.manager import CheckpointManager
from nnx_parallel.checkpoint.options import check_space
from nnx_parallel.checkpoint.saved_steps import Restored, SavedSteps
from nnx_parallel.checkpoint.train_state import from_groups, to_groups
from nnx_parallel.distributed.agreement import (
    allgather_object,
    check_consistent,
    strip_addresses,
)
from nnx_parallel.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointReadError,
    DisagreementError,
)
from nnx_parallel.state import TrainState


def check_options(manager: CheckpointManager) -> None:
    """Raises ``DisagreementError`` on all processes if their options differ."""
    # They would wait for one another: one saves, or deletes a step, and others do not.
    check_consistent(
        "checkpoints", {"checkpoint": strip_addresses(repr(manager.options))}
    )


def resume(
    manager: CheckpointManager, abstract: TrainState
) -> tuple[TrainState, dict[str, Any], list[str]] | None:
    """The newest intact state, the data's position, and a line per corrupt step.

    All processes call it.

    Args:
        manager: The checkpoints.
        abstract: The state as shapes with shardings.

    Returns:
        ``None`` if there is no checkpoint, or no directory.

    Raises:
        CheckpointError: If there is a checkpoint but ``resume=False``: a fresh run
            would write into the directory of another.
        CheckpointDamagedError: If the latest is corrupt and ``on_damage`` is
            ``"error"``, or none is intact.
        CheckpointMismatchError: If an array differs, before any is read.
        DisagreementError: If the processes see different steps.
    """
    if manager.options is None:
        return None
    saved = manager.saved
    _check_same_steps(saved)
    if not saved.steps and not saved.corrupt_steps:
        return None
    if not manager.options.resume:
        raise CheckpointError(
            f"'{saved.directory}' holds checkpoints of steps {saved.steps}, but "
            "resume=False asks for a fresh run. Choose another directory, remove this "
            "one, or leave resume=True."
        )
    (groups, meta), notes = restore_newest(saved, to_groups(abstract))
    state = from_groups(abstract, groups)
    manager.last_saved = int(state.step)
    return state, meta.get("position", {}), notes


def _check_same_steps(saved: SavedSteps) -> None:
    """Raises ``DisagreementError`` on all processes if they see different steps."""
    # They would wait for one another, or take parts of different steps for corruption.
    mine = [saved.steps, sorted(saved.corrupt_steps)]
    found = allgather_object("steps in the directory", mine)
    for process, theirs in enumerate(found):
        if theirs != found[0]:
            raise DisagreementError(
                f"Processes 0 and {process} see different checkpoints in "
                f"'{saved.directory}': steps {_spell(*found[0])} and "
                f"{_spell(*theirs)}. Give a directory that all machines share; "
                "if it is one, its listing was late: start again."
            )


def _spell(intact: list[int], corrupt: list[int]) -> str:
    return f"{intact}" + (f" (and {corrupt}, which are corrupt)" if corrupt else "")


def restore_newest(
    saved: SavedSteps, wanted: AbstractGroups
) -> tuple[Restored, list[str]]:
    """Restores the latest step; or the latest intact one, if the options say so.

    Returns:
        The arrays and metadata, and a line for each corrupt step, now in quarantine.

    Raises:
        CheckpointDamagedError: If the latest step is corrupt and ``on_damage`` is
            ``"error"``, or no step is intact.
        CheckpointMismatchError: If the run differs from the one that was saved: that
            is no corruption.
    """
    problems: dict[int, str] = {}
    corrupt = saved.corrupt_steps
    for step in sorted([*corrupt, *saved.steps], reverse=True):
        if step in corrupt:
            found = f"Checkpoint {step} in '{saved.directory}' {corrupt[step]}."
        else:
            found = _try(saved, wanted, step)
        if not isinstance(found, str):
            # Only now: as long as no step is known to be intact, nothing is moved.
            return found, [
                f"{problem}\nStep {bad} is in quarantine as "
                f"'{saved.quarantine(bad)}'; the run goes on from step {step}."
                for bad, problem in problems.items()
            ]
        problems[step] = found
        if saved.options.on_damage == "error":
            break
    others = sorted(set(saved.steps) - problems.keys())
    way_out = (
        f"Other steps: {others}. Checkpoint(..., on_damage='previous') quarantines the "
        "damaged one and resumes from the newest of them that is intact."
        if others
        else "No step in the directory is intact. Choose another directory to start "
        "afresh."
    )
    raise CheckpointDamagedError("\n".join(problems.values()) + "\n" + way_out)


def _try(saved: SavedSteps, wanted: AbstractGroups, step: int) -> Restored | str:
    """A restored step, or its problem."""
    # The same on all processes without another exchange: `SavedSteps.restore` raises on
    # all of them what one cannot read, and compares checksums that all have gathered.
    try:
        return saved.restore(wanted, step)
    except CheckpointReadError as error:
        problem = str(error)
    if saved.options.on_damage == "error":
        return problem
    try:
        # Read twice before it is moved: a network disk may have given a torn file once.
        return saved.restore(wanted, step)
    except CheckpointReadError as error:
        return str(error)


def check_ahead(manager: CheckpointManager, step: int) -> None:
    """Raises ``CheckpointError`` if the directory holds a step later than the run's."""
    latest = manager.latest_step
    if latest is not None and latest > step:
        raise CheckpointError(
            f"'{manager.directory}' holds a checkpoint of step {latest}, but this run "
            f"is at step {step} and would write into the same directory. "
            "Choose another directory for it, or restore() the latest step."
        )


def check_state(manager: CheckpointManager, abstract: TrainState) -> None:
    """Checks that such a state can be saved, before the first step is trained.

    Raises:
        CheckpointError: If it holds an array without elements.
        CheckpointDirectoryError: If it does not fit on the disk.
    """
    if manager.options is not None:
        groups = to_groups(abstract)
        check_shapes(groups)
        arrays = jax.tree.leaves(groups)
        needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        check_space(str(manager.directory), needed)
