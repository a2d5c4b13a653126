"""Files of a checkpoint: which directories are steps, and which files may be opened.

A directory of checkpoints may hold files of other programs. So nothing is opened before
its kind and size are known: a pipe would block, and ``/dev/zero`` or gigabytes of JSON
would fill the memory.
"""

import contextlib
import glob
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.durable import move, publish, sync
from nnx_parallel.errors import CheckpointDirectoryError
from nnx_parallel.files import MAX_BYTES, check_regular, parse_object, read_object

METADATA = "_CHECKPOINT_METADATA"
"""Orbax's file in the directory of a step, which holds our header."""

COMMITTED = "commit_success.txt"
"""Orbax's last file in a step; a step in an object store is not complete without it."""

UNFINISHED = "orbax-checkpoint-tmp"
"""Part of the name of a step's directory until the step is complete."""

QUARANTINED, _DELETED = "damaged-", "deleted-"
"""Prefixes of the names of directories that are no longer steps."""

REWOUND = "rewound-"
"""Prefix of a directory with the later steps of a run that went back."""

PART, CHECKSUMS = "fingerprints", "fingerprints.json"
"""The part next to the groups, and its file; the first release chose these names."""

# Names that Orbax and this library write into a group, beside the arrays.
_SIGNS = ("_METADATA", "manifest.ocdbt", "ocdbt.process_", CHECKSUMS)
_METADATA_FILES = (METADATA, *_SIGNS, "_sharding", "process_")


# The class of local paths and of paths in an object store; Orbax exports only the
# abstract class.
_GPath: Any = type(ocp.path.Path("/"))


_STEP_METADATA = {
    "custom_metadata": dict | None,
    "init_timestamp_nsecs": int,
    "commit_timestamp_nsecs": int | None,  # None until the step is complete
}


class LiteralPath(_GPath):
    """A path whose name is not a pattern: a directory may be called ``lr=[0.1,0.2]``.

    Orbax finds the files of all processes by `glob`, to merge them. `glob` takes ``[``,
    ``*`` and ``?`` in the directory's name for a pattern: a save finds nothing to
    merge, or the files of another run (docs/library-notes.md, "Orbax: directories").
    """

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yields all files that match, below this very directory."""
        literal = _GPath(glob.escape(os.fspath(self)))
        return map(type(self), literal.glob(pattern))

    def write_text(self, data: str, *args: Any, **options: Any) -> int:
        """Writes a file; on other processes than the first, to the disk.

        Process 0 syncs a whole step before it appears. But there are file systems that
        keep a write in a machine's memory until that machine itself syncs it.
        """
        size = super().write_text(data, *args, **options)
        if jax.process_index() != 0 and not is_url(os.fspath(self)):
            sync(self)
        return size

    def rename(self, target: str | os.PathLike[str]) -> Self:
        """Renames a directory; the disk has the new name when this returns.

        Orbax calls it to give a step its name, once the step is written: here the step
        is synced (docs/library-notes.md, "Orbax: saving").
        """
        # A part of a step is synced with the step; an object store is always in sync.
        if is_url(os.fspath(self)) or UNFINISHED in self.parent.name:
            return super().rename(target)
        rename = publish if UNFINISHED in self.name else move
        rename(Path(self), Path(target))
        return type(self)(target)


def is_url(path: str) -> bool:
    """True for a directory of an object store, such as ``gs://...``."""
    return "://" in path


def parse_step(name: str) -> int | None:
    """The step that a directory of this name holds; ``None`` for ``0020`` or ``²``."""
    is_number = name.isascii() and name.isdecimal()
    return int(name) if is_number and name == str(int(name)) else None


def read_json(path: LiteralPath) -> dict[str, Any]:
    """The JSON object in a file, which is local or in an object store.

    Raises ``OSError`` if it cannot be read, ``ValueError`` if it is not such a file.
    """
    if not is_url(os.fspath(path)):
        return read_object(path)
    return parse_object(path.read_bytes(), path)


def read_step_metadata(step_path: LiteralPath) -> dict[str, Any]:
    """Orbax's metadata of a step, in which our header is ``"custom_metadata"``.

    Raises the same errors as `read_json`.
    """
    metadata = read_json(step_path / METADATA)
    if not matches(metadata, _STEP_METADATA):
        raise ValueError(f"'{METADATA}' is not in Orbax's format.")
    return metadata


def check_files(step_directory: str) -> None:
    """Raises ``ValueError`` unless a step holds only regular files, of sane sizes.

    A file may be a link to a regular file; a directory in a step may not be a link: it
    could lead anywhere. Object stores have neither.
    """
    if is_url(step_directory):
        return
    for root, directories, names in os.walk(step_directory):
        for name in directories:
            if os.path.islink(os.path.join(root, name)):
                raise ValueError(f"'{name}' is a link to a directory.")
        for name in names:
            path = os.path.join(root, name)
            size = check_regular(path).st_size
            if name.startswith(_METADATA_FILES) and size > MAX_BYTES:
                raise ValueError(
                    f"'{path}' holds {size:,} bytes; at most {MAX_BYTES:,} are read."
                )


@dataclass
class Listing:
    """The steps in a directory.

    Attributes:
        steps: The complete steps.
        corrupt: Steps of which only a part is left, each with its problem.
        foreign: Steps that another program may have written, complete or corrupt: they
            are neither deleted nor renamed.
    """

    steps: set[int] = field(default_factory=set)
    corrupt: dict[int, str] = field(default_factory=dict)
    foreign: set[int] = field(default_factory=set)


def list_steps(directory: str) -> Listing:
    """Lists the steps of a directory; ``OSError`` if it cannot be read now.

    Orbax is not asked. It takes every directory with a number as name for a step,
    treats a file that cannot be read now as missing, and lists nothing if the metadata
    of one step has an unknown field.
    """
    found, root = Listing(), LiteralPath(directory)
    # A rename makes a step of a local directory appear and vanish at once. A step in an
    # object store exists as long as its commit file, which is written last and deleted
    # first.
    is_local = not is_url(directory)
    if not is_local and not root.exists():  # it begins to exist with its first file
        return found
    for path in root.iterdir():
        step = parse_step(path.name)
        if step is None or not (is_local or (path / COMMITTED).exists()):
            continue
        problem, is_others = _judge(path)
        if problem:
            found.corrupt[step] = problem
        elif problem is not None:
            found.steps.add(step)
        if is_others:
            found.foreign.add(step)
    return found


def _judge(path: LiteralPath) -> tuple[str | None, bool]:
    """The problem of a step, and whether another program may have written it.

    The problem is empty if the step is complete, and ``None`` if the directory holds no
    part of a checkpoint.
    """
    try:
        metadata = read_step_metadata(path)
    except (FileNotFoundError, NotADirectoryError):
        is_step, problem = False, "has no metadata left"
    except ValueError as error:
        # A directory in place of the file is not a sign of a checkpoint.
        is_step = (path / METADATA).is_file()
        problem = f"has metadata that cannot be parsed ({error})"
    else:
        if metadata["commit_timestamp_nsecs"] is not None:
            return "", is_foreign(metadata["custom_metadata"] or {})
        is_step, problem = True, "was never completed"
    ours = is_ours(path)
    is_step = is_step or ours is not None
    return (problem, not ours) if is_step else (None, False)


def is_ours(step_path: LiteralPath) -> bool | None:
    """True if this library wrote a directory that has a step's name and no metadata.

    A step of ours has the file of checksums, or its directory beside files or
    directories with Orbax's names. Returns False if only Orbax's names are there: it
    may be another program's checkpoint. Returns ``None`` if there is neither: whatever
    its name, the directory holds no part of a checkpoint.
    """
    if not step_path.is_dir():
        return None
    if (step_path / PART / CHECKSUMS).is_file():
        return True
    found = (*step_path.glob("*"), *step_path.glob("*/*"))
    has_signs = any(x.name.startswith(_SIGNS) for x in found)
    return (step_path / PART).is_dir() if has_signs else None


def quarantine(directory: str, step: int) -> str:
    """Renames a corrupt step, so that it is not read again; returns its new path."""
    # A step of this number may have been damaged, renamed and saved again before.
    moved = LiteralPath(directory) / f"{QUARANTINED}{step}-{uuid.uuid4().hex[:8]}"
    if jax.process_index() == 0:
        (LiteralPath(directory) / str(step)).rename(moved)
    # The other processes wait for the rename, since they list the directory next.
    return allgather_object(f"quarantine step {step}", str(moved))[0]


def set_aside(directory: str, step: int, later: Iterable[int]) -> str:
    """Moves steps into a new directory below theirs; returns its path.

    The newest goes first: after a kill in between, the newest that is left is still the
    end of the run. The file of metrics, whose later lines a resumed run removes, is
    copied.

    Raises:
        CheckpointDirectoryError: On all processes, if process 0 cannot move them.
    """
    aside = LiteralPath(directory) / f"{REWOUND}{step}-{uuid.uuid4().hex[:8]}"
    problem = ""
    if jax.process_index() == 0:
        try:
            aside.mkdir()
            log = LiteralPath(directory) / "metrics.jsonl"
            if not is_url(directory) and log.is_file():
                shutil.copy2(log, aside)
            for number in sorted(later, reverse=True):
                (LiteralPath(directory) / str(number)).rename(aside / str(number))
            if not is_url(directory):
                for path in (*aside.iterdir(), aside, directory):
                    sync(path)
        except OSError as error:
            problem = f"Cannot move the steps after {step} to '{aside}': {error}."
    found = allgather_object(f"steps after {step}", [problem, str(aside)])
    problem, aside = found[0]
    if problem:
        raise CheckpointDirectoryError(problem)
    return aside


def delete_steps(directory: str, steps: Iterable[int]) -> list[str]:
    """Deletes steps; returns a line for each step that could not be deleted."""
    problems = []
    for step in steps:
        path = LiteralPath(directory) / str(step)
        try:
            if is_url(directory):
                # A step without this file is not listed, and the next start deletes
                # the rest.
                (path / COMMITTED).unlink(missing_ok=True)
            else:
                # A rename first: a kill then leaves no half-deleted step. The next
                # start deletes the rest.
                path = path.rename(
                    path.with_name(f"{_DELETED}{step}-{uuid.uuid4().hex[:8]}")
                )
            _delete(path)
        except Exception as error:  # an object store's errors are of any class
            problems.append(f"step {step} ({type(error).__name__}: {error})")
    return problems


def discard_unfinished(directory: str) -> None:
    """Has process 0 delete the files of failed saves, as far as that is possible now.

    Orbax does so only when the directory is opened again.
    """
    if jax.process_index() != 0:
        return
    with contextlib.suppress(Exception):
        for path in LiteralPath(directory).glob(f"*.{UNFINISHED}*"):
            with contextlib.suppress(Exception):
                path.rmtree()


def delete_remains(directory: str) -> list[str]:
    """Deletes the remains of killed deletions; returns a line for each failure."""
    problems = []
    if not is_url(directory):
        for name in filter(is_deleted, os.listdir(directory)):
            try:
                _delete(LiteralPath(directory) / name)
            except OSError as error:
                problems.append(f"'{name}' ({type(error).__name__}: {error})")
    return problems


def is_deleted(name: str) -> bool:
    """True for the name of a step that a killed process was deleting."""
    return re.fullmatch(rf"{_DELETED}\d+-[0-9a-f]{{8}}", name) is not None


def _delete(path: LiteralPath) -> None:
    if is_url(os.fspath(path)):
        path.rmtree(missing_ok=True)
    elif os.path.islink(path):  # somebody else's directory
        os.unlink(path)
    else:
        shutil.rmtree(path)


def printable(value: object) -> str:
    """The text of a value that a stranger may have written, without escape codes."""
    text = str(value)
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in text)


def matches(value: object, kind: Any) -> bool:
    """True if JSON has the types in ``kind``; its key ``"*"`` matches any key."""
    if not isinstance(kind, dict) or not isinstance(value, dict):
        return not isinstance(kind, dict) and isinstance(value, kind)
    if "*" in kind:
        return all(matches(x, kind["*"]) for x in value.values())
    return all(name in value and matches(value[name], kind[name]) for name in kind)


def is_foreign(header: dict[str, Any]) -> bool:
    """True if another program has saved it: it lacks all keys of our header."""
    return not {"format", "digest", "sizes"} & header.keys()
