"""Files of a checkpoint: which directories are steps, and which files may be opened.

A directory of checkpoints may also hold files of other programs. So no file is opened
before its kind and size are known. A read from a pipe would block, and ``/dev/zero`` or
gigabytes of JSON would fill the memory.
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
"""File that Orbax writes in the directory of a step; it holds our header."""

COMMITTED = "commit_success.txt"
"""File that Orbax writes last; without it, a step in an object store is incomplete."""

UNFINISHED = "orbax-checkpoint-tmp"
"""Text in the name of a step's directory until the step is complete."""

QUARANTINED, _DELETED = "damaged-", "deleted-"
"""Prefixes of the names of directories that are no longer steps."""

REWOUND = "rewound-"
"""Prefix of a directory that holds the later steps of a run that was set back."""

PART, CHECKSUMS = "fingerprints", "fingerprints.json"
"""Name of the part that holds the checksums, and of its file.

The first release chose these names.
"""

# Names that Orbax and this library write into a group, in addition to the arrays.
_SIGNS = ("_METADATA", "manifest.ocdbt", "ocdbt.process_", CHECKSUMS)
_METADATA_FILES = (METADATA, *_SIGNS, "_sharding", "process_")


# The class of Orbax's paths, local or in an object store. Orbax exports only its
# abstract base class.
_GPath: Any = type(ocp.path.Path("/"))


_STEP_METADATA = {
    "custom_metadata": dict | None,
    "init_timestamp_nsecs": int,
    "commit_timestamp_nsecs": int | None,  # None until the step is complete
}


class LiteralPath(_GPath):
    """A path that `glob` takes literally, since a name may be ``lr=[0.1,0.2]``.

    Orbax finds the files of all processes with `glob`, in order to merge them. `glob`
    treats ``[``, ``*`` and ``?`` in the directory's name as a pattern. A save would
    then find no files to merge, or the files of another run (docs/library-notes.md,
    "Orbax: directories").
    """

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yields all files below this directory that match."""
        literal = _GPath(glob.escape(os.fspath(self)))
        return map(type(self), literal.glob(pattern))

    def write_text(self, data: str, *args: Any, **options: Any) -> int:
        """Writes a file; on processes other than the first, it also syncs the file.

        Process 0 syncs an entire step before the step appears. But some file systems
        keep a write in a machine's memory until that same machine syncs it.
        """
        size = super().write_text(data, *args, **options)
        if jax.process_index() != 0 and not is_url(os.fspath(self)):
            sync(self)
        return size

    def rename(self, target: str | os.PathLike[str]) -> Self:
        """Renames a directory; the new name is on the disk when this returns.

        Orbax calls this to give a step its final name, once the step is written. The
        step is synced here first (docs/library-notes.md, "Orbax: saving").
        """
        # A part of a step is synced with its step. An object store needs no sync.
        if is_url(os.fspath(self)) or UNFINISHED in self.parent.name:
            return super().rename(target)
        rename = publish if UNFINISHED in self.name else move
        rename(Path(self), Path(target))
        return type(self)(target)


def is_url(path: str) -> bool:
    """Returns True for a directory of an object store, such as ``gs://...``."""
    return "://" in path


def parse_step(name: str) -> int | None:
    """Returns the step of a directory of this name; ``None`` for ``0020`` or ``²``."""
    is_number = name.isascii() and name.isdecimal()
    return int(name) if is_number and name == str(int(name)) else None


def read_json(path: LiteralPath) -> dict[str, Any]:
    """Reads the JSON object in a file, which is local or in an object store.

    Raises ``OSError`` if the file cannot be read, and ``ValueError`` if it does not
    hold a JSON object.
    """
    if not is_url(os.fspath(path)):
        return read_object(path)
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"'{path}' holds more than {MAX_BYTES:,} bytes.")
    return parse_object(content, path)


def read_step_metadata(step_path: LiteralPath) -> dict[str, Any]:
    """Reads Orbax's metadata of a step; our header is its ``"custom_metadata"``.

    Raises the same errors as `read_json`.
    """
    metadata = read_json(step_path / METADATA)
    if not matches(metadata, _STEP_METADATA):
        raise ValueError(f"'{METADATA}' is not in Orbax's format.")
    return metadata


def check_files(step_directory: str) -> None:
    """Raises ``ValueError`` unless a step holds only regular files of allowed sizes.

    A file may be a link to a regular file. A directory in a step may not be a link,
    because a link could lead anywhere. Object stores have no links.
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
        corrupt: Incomplete steps, each with its problem.
        foreign: Steps that another program may have written, complete or corrupt. These
            are neither deleted nor renamed.
    """

    steps: set[int] = field(default_factory=set)
    corrupt: dict[int, str] = field(default_factory=dict)
    foreign: set[int] = field(default_factory=set)


def list_steps(directory: str) -> Listing:
    """Lists the steps of a directory; raises ``OSError`` if it cannot be read now.

    Orbax can also list steps, but its list has three faults. To Orbax, every directory
    with a numeric name is a step. It treats a file that cannot be read now as
    missing. It lists nothing if the metadata of one step has an unknown field.
    """
    found, root = Listing(), LiteralPath(directory)
    # In a local directory a rename makes a step appear or vanish in one operation. In
    # an object store, a step exists while its commit file exists: the file that is
    # written last and deleted first.
    is_local = not is_url(directory)
    if not is_local and not root.exists():  # it will exist once it holds a file
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
    """Returns the problem of a step, and whether another program may have written it.

    The problem is empty if the step is complete, and ``None`` if the directory holds no
    part of a checkpoint.
    """
    try:
        metadata = read_step_metadata(path)
    except (FileNotFoundError, NotADirectoryError):
        is_step, problem = False, "has no metadata left"
    except ValueError as error:
        # A directory that is called like the metadata file is not a sign of a
        # checkpoint.
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
    """Returns True if this library wrote a step's directory that has no metadata.

    A step of ours holds the file of checksums, or the directory of this file together
    with files that Orbax named. Returns False if there are only files that Orbax named,
    because they may be another program's checkpoint. Returns ``None`` if nothing in the
    directory looks like a part of a checkpoint.
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
    # The name is unique, because an earlier step of this number may have been damaged
    # and renamed too.
    moved = LiteralPath(directory) / f"{QUARANTINED}{step}-{uuid.uuid4().hex[:8]}"
    if jax.process_index() == 0:
        (LiteralPath(directory) / str(step)).rename(moved)
    # The other processes wait for the rename, since they list the directory next.
    return allgather_object(f"quarantine step {step}", str(moved))[0]


def set_aside(directory: str, step: int, later: Iterable[int]) -> str:
    """Moves steps into a new directory below ``directory``; returns the new path.

    The newest step moves first. If the process is killed before all have moved, the
    newest step that remains is still the end of the run. The file of metrics is copied,
    because a resumed run removes its later lines.

    Raises:
        CheckpointDirectoryError: On all processes, if process 0 cannot move the steps.
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
                # A step without this file is not listed. If the process is killed now,
                # the next start deletes the rest.
                (path / COMMITTED).unlink(missing_ok=True)
            else:
                # The rename comes first, so that a kill leaves no half-deleted step.
                # The next start deletes the rest.
                path = path.rename(
                    path.with_name(f"{_DELETED}{step}-{uuid.uuid4().hex[:8]}")
                )
            _delete(path)
        except Exception as error:  # object stores raise errors of various classes
            problems.append(f"step {step} ({type(error).__name__}: {error})")
    return problems


def discard_unfinished(directory: str) -> None:
    """Makes process 0 delete the files of failed saves, if they can be deleted now.

    Orbax deletes them only when the directory is opened again.
    """
    if jax.process_index() != 0:
        return
    with contextlib.suppress(Exception):
        for path in LiteralPath(directory).glob(f"*.{UNFINISHED}*"):
            with contextlib.suppress(Exception):
                path.rmtree()


def delete_remains(directory: str) -> list[str]:
    """Deletes the remains of interrupted deletions; returns a line for each failure."""
    problems = []
    if not is_url(directory):
        for name in filter(is_deleted, os.listdir(directory)):
            try:
                _delete(LiteralPath(directory) / name)
            except OSError as error:
                problems.append(f"'{name}' ({type(error).__name__}: {error})")
    return problems


def is_deleted(name: str) -> bool:
    """Returns True for the name of a step that a killed process was deleting."""
    return re.fullmatch(rf"{_DELETED}\d+-[0-9a-f]{{8}}", name) is not None


def _delete(path: LiteralPath) -> None:
    if is_url(os.fspath(path)):
        path.rmtree(missing_ok=True)
    elif os.path.islink(path):  # it leads to a directory that we did not make
        os.unlink(path)
    else:
        shutil.rmtree(path)


def printable(value: object) -> str:
    """Returns a value as text without escape codes; a stranger may have written it."""
    text = str(value)
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in text)


def matches(value: object, kind: Any) -> bool:
    """Returns True if JSON has the types in ``kind``; key ``"*"`` matches any key."""
    if not isinstance(kind, dict) or not isinstance(value, dict):
        return not isinstance(kind, dict) and isinstance(value, kind)
    if "*" in kind:
        return all(matches(x, kind["*"]) for x in value.values())
    return all(name in value and matches(value[name], kind[name]) for name in kind)


def is_foreign(header: dict[str, Any]) -> bool:
    """Returns True if another program saved the header: it has none of our keys."""
    return not {"format", "digest", "sizes"} & header.keys()
