"""The directory of a run's checkpoints: what stands there, and what can be written.

A URL (``gs://...``) is mostly left to Orbax: it has no free space to ask for, object
stores write in place, and there is nothing to try first.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.distributed import exchange
from nnx_parallel.errors import (
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointNotFoundError,
)

METADATA_FILE = "_CHECKPOINT_METADATA"
"""Orbax's own, in the directory of a step; a checkpoint without it is not listed."""


def check_directory(directory: str, *, read_only: bool) -> None:
    """Makes the directory and tries to write there, or to read only asks if it is.

    A URL is left to Orbax.

    Raises:
        CheckpointDirectoryError: If it cannot be made or written.
        CheckpointNotFoundError: If ``read_only`` and it is not there.
    """
    if is_url(directory):
        return
    if read_only:
        if not os.path.isdir(directory):
            raise CheckpointNotFoundError(f"No directory '{directory}' to read from.")
        return
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CheckpointDirectoryError(
            f"Cannot write checkpoints to '{directory}': {error}. Choose a directory "
            "that exists or can be made, and that this process may write."
        ) from error


def check_writable(directory: str) -> None:
    """Tries to write before a save: Orbax makes its directory in the background.

    With several processes all of them call it, and hear what process 0, which makes it,
    has found.

    Raises:
        CheckpointDirectoryError: If it cannot be written.
    """
    problem = ""
    if jax.process_index() == 0:
        try:
            check_directory(directory, read_only=False)
        except CheckpointDirectoryError as error:
            problem = str(error)
    problem = exchange("directory of a save", problem)[0]
    if problem:
        raise CheckpointDirectoryError(problem)


def check_step(
    directory: str, step: int, latest: int | None, *, overwrite: bool
) -> None:
    """Checks that a checkpoint of ``step`` may be saved beside those that are there.

    Args:
        directory: Where the checkpoints are.
        step: Updates done so far.
        latest: The newest step that is saved.
        overwrite: Whether it may be saved again.

    Raises:
        CheckpointError: If ``step`` is not later, or its place is taken.
    """
    if step == latest:
        if not overwrite:
            raise CheckpointError(
                f"Step {step} is already saved in '{directory}'. Pass overwrite=True "
                "to replace it, or save a later step."
            )
    elif latest is not None and step < latest:
        raise CheckpointError(
            f"Cannot save step {step} in '{directory}' after step {latest}: steps must "
            f"ascend. Save step {latest + 1} or later, or use another directory."
        )
    elif not is_url(directory) and os.path.exists(os.path.join(directory, str(step))):
        raise CheckpointError(
            f"Cannot save step {step} in '{directory}': '{step}' is there and is not a "
            "checkpoint. Move it away, or use another directory."
        )


def check_space(directory: str, needed_bytes: int) -> None:
    """Checks that a checkpoint would fit on the disk; a URL is left to itself.

    Raises:
        CheckpointDirectoryError: If it would not.
    """
    if is_url(directory):
        return
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise CheckpointDirectoryError(
            f"A checkpoint of this run takes {needed_bytes:,} bytes, but only {free:,} "
            f"are free in '{directory}'. Free {needed_bytes - free:,} more, or choose "
            "another directory."
        )


def set_aside(directory: str, step: int) -> str:
    """Renames a damaged step, so that it is neither read nor in the way.

    Returns:
        Where it is now.
    """
    if is_url(directory):
        base = ocp.path.Path(directory)
        aside = base / f"damaged-{step}-{uuid.uuid4().hex[:8]}"
        (base / str(step)).rename(aside)
        return str(aside)
    path = os.path.join(directory, str(step))
    aside = tempfile.mkdtemp(prefix=f"damaged-{step}-", dir=directory)
    os.rename(path, aside)
    return aside


def unlisted_steps(directory: str, listed: Iterable[int]) -> list[int]:
    """Steps whose directories hold what is left of a checkpoint, ascending.

    Orbax does not list them, for their own metadata is gone. A directory that holds
    nothing of the kind is somebody else's, and so is a URL's.
    """
    if is_url(directory) or not os.path.isdir(directory):
        return []
    left = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        parts = [os.path.join(path, part) for part in (METADATA_FILE, "model")]
        if name.isdigit() and any(map(os.path.exists, parts)):
            left.append(int(name))
    return sorted(set(left) - set(listed))


def is_url(path: str) -> bool:
    """Whether a directory is an object store's, such as ``gs://...``."""
    return "://" in path
