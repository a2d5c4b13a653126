"""Lists the contents of a run's directory, and writes nothing to it."""

import contextlib
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import jax

from nnx_parallel.checkpoint.contents import StoredCheckpoint
from nnx_parallel.checkpoint.files import (
    QUARANTINED,
    REWOUND,
    UNFINISHED,
    LiteralPath,
    is_deleted,
    is_url,
    printable,
    read_step_metadata,
)
from nnx_parallel.checkpoint.memory import RUN
from nnx_parallel.checkpoint.reader import CheckpointReader
from nnx_parallel.drawing import aligned
from nnx_parallel.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CheckpointUnavailableError,
    ParallelError,
)
from nnx_parallel.loggers.goodput import read_account
from nnx_parallel.precision import array_bytes, format_bytes


def inspect(directory: str, *, verify: bool, arrays: bool) -> int:
    """Prints the steps of a checkpoint directory, and the contents of the newest step.

    With ``verify``, it reads every array of every step and compares its checksum. With
    ``arrays``, it prints a line for each array of the newest step.

    Returns:
        0 if there is no problem, 1 if a step is damaged or cannot be read, 2 if the
        directory has no checkpoint.
    """
    # The accelerator may be busy with the run that is inspected.
    jax.config.update("jax_platforms", "cpu")
    try:
        # The run may be alive, so none of its files is deleted, written or cleaned up.
        saved = CheckpointReader(directory)
        where = LiteralPath(saved.directory)
        return _show(saved, where, verify=verify, arrays=arrays)
    except (CheckpointNotFoundError, CheckpointError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _show(
    saved: CheckpointReader, directory: LiteralPath, *, verify: bool, arrays: bool
) -> int:
    steps = sorted({*saved.steps, *saved.corrupt_steps})
    if not steps:
        copies = (
            " The run makes copies in memory, from which it may continue; only its "
            "machines can read them."
        )
        note = copies * (directory / RUN).exists()
        sys.stderr.write(f"No checkpoint in '{directory}'.{note}\n")
        return 2
    newest: StoredCheckpoint | None = None
    num_damaged = 0
    _write(f"{directory}\n{_ROW.format('step', 'date', 'size', 'loss', 'arrays')}")
    for step in steps:
        stored, verdict = _judge(saved, step, verify=verify)
        newest = stored or newest
        # A step that a live run deletes meanwhile is not damaged.
        num_damaged += verdict.startswith(("DAMAGED", "NOT READ"))
        path = directory / str(step)
        loss = stored.metrics.get("loss") if stored else None
        shown = f"{step:,}", _date(path), format_bytes(_size(path))
        row = (*shown, "-" if loss is None else f"{loss:.5g}", verdict)
        _write(_ROW.format(*row).replace("\n", "\n    "))
    for name in sorted(path.name for path in directory.iterdir()):
        if UNFINISHED in name:
            _write(f"  '{name}': left by a failed save; the next start removes it")
        elif is_deleted(name):
            _write(f"  '{name}': partly deleted; the next start removes it")
        elif name.startswith(QUARANTINED):
            _write(f"  '{name}': in quarantine, because it is corrupt")
        elif name.startswith(REWOUND):
            _write(f"  '{name}': later steps, set aside when the run was rewound")
    if newest is not None:
        _describe(newest, arrays=arrays)
    if not is_url(saved.directory):
        _show_goodput(directory / "metrics.jsonl")
    return 1 if num_damaged else 0


# The width is fixed, because a line is written as soon as its step has been read, and
# reading may take long.
_ROW = "{:>11}  {:16}  {:>9}  {:>9}  {}"


def _size(path: LiteralPath) -> int:
    with contextlib.suppress(OSError):  # deleted meanwhile
        if not path.is_dir():
            return path.stat().length
        return sum(_size(x) for x in path.iterdir() if not os.path.islink(x))
    return 0


def _date(path: LiteralPath) -> str:
    """Returns the local time of a step's end, or "-" if its metadata is corrupt."""
    with contextlib.suppress(OSError, ValueError, TypeError, OverflowError):
        seconds = read_step_metadata(path)["commit_timestamp_nsecs"] / 1e9
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
    return "-"


def _judge(
    saved: CheckpointReader, step: int, *, verify: bool
) -> tuple[StoredCheckpoint | None, str]:
    """Returns the contents of a step, and a verdict on whether it is intact."""
    # The run may have been deleting this step, file by file, during the listing.
    if step in saved.corrupt_steps and _is_gone(saved, step):
        return None, _GONE
    if step in saved.corrupt_steps:
        return None, f"DAMAGED: it {saved.corrupt_steps[step]}"
    stored = None
    try:
        stored = saved.describe(step)
        if not verify:
            return stored, "not verified"
        cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        # One group is read at a time, so that the host does not hold parameters and
        # optimizer state at the same time.
        for name, group in stored.groups.items():
            placed = {
                path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cpu)
                for path, x in group.items()
            }
            saved.restore({name: placed}, step)
    except (CheckpointUnavailableError, CheckpointFormatError) as error:
        # The step is not damaged, because its files may be readable later, or by
        # another program.
        return stored, f"NOT READ: {error}"
    except ParallelError as error:
        # A run that goes on training deletes old steps while they are read.
        if _is_gone(saved, step):
            return None, _GONE
        return stored, f"DAMAGED: {error}"
    return stored, "complete: every array matches its checksum"


# The errors of a restore show differences in these values.
_INTERNAL = {"optimizer_states"}
_GONE = "deleted by the run meanwhile"


def _is_gone(saved: CheckpointReader, step: int) -> bool:
    saved.reload()
    return step not in {*saved.steps, *saved.corrupt_steps}


def _describe(stored: StoredCheckpoint, *, arrays: bool) -> None:
    _write(f"step {stored.step:,}:")
    for name, value in stored.meta.items():
        if name not in _INTERNAL:
            _write(f"  {printable(name)}: {printable(_shown(name, value))}")
    for name, value in stored.metrics.items():
        _write(f"  {name}: {value:.6g}")
    for name, group in stored.groups.items():
        size = sum(array_bytes(x.shape, x.dtype) for x in group.values())
        _write(f"  {name}: {len(group)} arrays, {format_bytes(size)}")
        rows = [
            (path, f"{x.dtype}{list(x.shape)}", f"{stored.checksums[name][path]:08x}")
            for path, x in group.items()
        ]
        if arrays:
            _write(aligned(rows, indent="    "))


def _shown(name: str, value: Any) -> Any:
    """Returns a value of a step's metadata as a text for people."""
    if name == "position" and isinstance(value, dict):
        shares = value.get("shares")
        each = "" if shares == 1 else f" by each of {shares} processes"
        return f"epoch {value.get('epoch')}, {value.get('pass_rows')} rows read{each}"
    if isinstance(value, dict):
        return ", ".join(f"{key}={x}" for key, x in value.items())
    return f"{value:,}" if type(value) is int else value


def _show_goodput(path: LiteralPath) -> None:
    if not os.path.lexists(path):
        return
    try:
        text = read_account(Path(path)).table()
    except (OSError, ValueError) as error:
        text = f"goodput: unknown, because '{path}' cannot be read: {error}"
    if text:
        _write(text)


def _write(text: str) -> None:
    # Names and values come from the checkpoint, which may be untrusted.
    for line in text.split("\n"):
        sys.stdout.write(f"{printable(line)}\n")
