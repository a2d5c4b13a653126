"""The record of the last `verify` of a run, which is stored beside its checkpoints."""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from nnx_parallel.durable import make_directory
from nnx_parallel.errors import ParallelWarning, warn_user
from nnx_parallel.files import read_object
from nnx_parallel.state import StatePlan
from nnx_parallel.training.compilation import facts_of

NAME = "verified.json"

_PARTS = ("model", "num_params", "strategy", "mesh", "num_microbatches", "optimizer")


def facts_to_verify(
    description: Mapping[str, Any], plan: StatePlan, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the facts that decide how a step is computed.

    A later run compares its facts with the recorded facts.

    Args:
        description: The description of the run in its checkpoints.
        plan: The plan of the training state.
        options: The options of the compiler.
    """
    mine = {name: description.get(name) for name in _PARTS}
    mine["precision"] = repr(plan.precision)
    found = facts_of([*plan.layout.mesh.devices.flat], options)
    return json.loads(json.dumps(mine | found))


def note_verified(
    directory: Path | None, facts: Mapping[str, Any], step: int, result: str
) -> None:
    """Writes the record on process 0, if there is a local directory.

    Warns if the record cannot be written.
    """
    if directory is None or jax.process_index() != 0:
        return
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    record = {"date": date, "step": step, "result": result, "facts": dict(facts)}
    new = directory / f"{NAME}.new"
    try:
        make_directory(directory)
        new.write_text(json.dumps(record, indent=1) + "\n")
        new.replace(directory / NAME)  # a reader sees the entire record, old or new
    except OSError as error:
        warn_user(f"The result of verify is not kept: {error}", ParallelWarning)


def last_verified(directory: Path, facts: Mapping[str, Any]) -> str:
    """Says when a step with these facts was verified last, or which facts differ."""
    record = read_verified(directory)
    if record is None:
        return "never; trainer.verify(batch) compares a step with one device"
    found = record["facts"]
    changed = [name for name in facts if found.get(name) != facts[name]]
    if changed:
        return f"on {record['date']} with another {', '.join(changed)}"
    return f"on {record['date']} at step {record['step']:,}: {record['result']}"


def read_verified(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns the record in a directory, or ``None`` if there is no valid record."""
    kinds = {"date": str, "step": int, "result": str, "facts": dict}
    try:
        record = read_object(Path(directory) / NAME)
    except (OSError, ValueError):
        return None
    is_ours = all(isinstance(record.get(name), kind) for name, kind in kinds.items())
    return record if is_ours else None
