"""Reads checkpoints, each process by itself, and tells damage from a bad moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.failures import is_no_damage, root_cause
from nnx_parallel.distributed import exchange
from nnx_parallel.errors import (
    CheckpointReadError,
    CheckpointUnavailableError,
    ParallelError,
)

T = TypeVar("T")


def load(path: str, wanted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The arrays of a step, placed as asked, read without waiting for anyone.

    Left to itself Orbax has all processes meet once each has read its shards: they
    would wait for one that cannot.

    Args:
        path: The step's directory.
        wanted: Shapes with shardings, by group and path.
    """
    if not wanted:
        return {}
    context = ocp.Context()
    if jax.process_count() > 1:
        me = jax.process_index()
        options = context.multiprocessing_options
        options.primary_host = me
        options.active_processes = {me}
        options.barrier_sync_key_prefix = f"nnx_parallel_{me}"
    with context:
        return ocp.load_checkpointables(path, wanted)


def describe_group(directory: str, group: str) -> Any:
    """What Orbax knows of the arrays of a group, or the error that keeps it from it.

    When it describes a whole step it takes any error for no description: that of a bad
    moment, too.
    """
    path = ocp.path.Path(directory) / group

    async def describe() -> Any:
        return await ocp.handlers.PyTreeHandler().metadata(path)

    with ThreadPoolExecutor(1) as pool:  # the caller may have an event loop of its own
        return pool.submit(asyncio.run, describe()).result()


def read_together(read: Callable[[], T]) -> T:
    """What all processes have read, or an error on all of them.

    Args:
        read: Reads, without waiting for another process.

    Raises:
        CheckpointReadError: On all processes, if one finds damage.
    """
    found: list[T] = []
    problem = ""
    try:
        found.append(read())
    except CheckpointReadError as error:
        if jax.process_count() == 1:
            raise
        problem = str(error)
    problems = exchange("read checkpoint", problem)
    bad = [f"On process {i}: {text}" for i, text in enumerate(problems) if text]
    if bad:
        raise CheckpointReadError("\n".join(bad))
    return found[0]


def read_error(where: str, steps: list[int], error: Exception) -> Exception:
    """The error to raise for one of Orbax.

    Args:
        where: The step and its directory.
        steps: The saved steps.
        error: What reading has raised.
    """
    if is_no_damage(error):
        return _unavailable(where, error)
    return CheckpointReadError(
        f"Cannot read {where}: {root_cause(error)} Its files are damaged, half "
        f"deleted, or not this library's. Saved steps: {steps}."
    )


@contextlib.contextmanager
def unavailable_if_no_damage(where: str) -> Iterator[None]:
    """Names an error of the moment as such, and leaves any other as it is.

    Raises:
        CheckpointUnavailableError: In place of an error that may be no damage.
    """
    try:
        yield
    except ParallelError:
        raise
    except Exception as error:
        if not is_no_damage(error):
            raise
        raise _unavailable(where, error) from error


def _unavailable(where: str, error: Exception) -> CheckpointUnavailableError:
    return CheckpointUnavailableError(
        f"Cannot read {where} now: {root_cause(error)} That is no damage, and nothing "
        "has changed: start again when it is over."
    )
