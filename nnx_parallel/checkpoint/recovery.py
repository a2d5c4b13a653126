"""The newest checkpoint that is whole, and what is said of those that are not."""

from __future__ import annotations

from typing import Any

import jax

from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.contents import AbstractGroups
from nnx_parallel.distributed import exchange
from nnx_parallel.errors import CheckpointDamagedError, CheckpointReadError

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
    problems = exchange("damage", problem)
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
