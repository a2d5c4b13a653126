"""Checks and reads small files that other programs may have written.

A named pipe blocks its reader, reading a device may never end, and parsed JSON takes a
hundred times its size in memory. So a file is opened only if it is a regular file. It
is read up to a limit, and it is parsed only if its number of values and its depth are
within limits. The package reads all small files through this module.
"""

import errno
import itertools
import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 2**20
"""Maximum size of a small file, in bytes."""

MAX_VALUES = 4 * 2**20
"""Maximum number of values in a JSON file; parsed, they take up to a gigabyte."""

MAX_DEPTH = 100
"""Maximum depth of nesting in a JSON file."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Returns the status of a regular file. Links are followed.

    Raises:
        FileNotFoundError: If nothing is at the path.
        OSError: If the system cannot read the status now.
        ValueError: If the path leads to another kind of file, or to a broken link.
    """
    name = os.fspath(path)
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"'{name}' is a link to itself.") from None
        if error.errno == errno.ENOENT and os.path.islink(path):
            raise ValueError(
                f"'{name}' is a link to '{os.readlink(path)}', which does not exist."
            ) from None
        raise
    if not stat.S_ISREG(found.st_mode):
        kinds = (kind for is_kind, kind in _KINDS if is_kind(found.st_mode))
        raise ValueError(
            f"'{name}' is {next(kinds, 'a device')}, not a regular file. Remove it or "
            "move it away."
        )
    return found


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Opens a regular file and returns its file descriptor.

    With ``os.O_CREAT`` a missing file is created. The function can be the ``opener`` of
    `open`. It raises the errors of `check_regular`.
    """
    try:
        # This check comes first, because opening a device may already act on it.
        check_regular(path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    # O_NONBLOCK: a pipe that has replaced the file since the check must not block.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"'{os.fspath(path)}' is not a regular file.")
    return descriptor


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: If the file is missing, or cannot be read now.
        ValueError: If it is not a regular file, or holds more than ``max_bytes``.
    """
    with open(path, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= max_bytes else b""
        if len(content) > size:  # the file has grown, or reports a size of 0
            content += file.read(max_bytes + 1 - len(content))
    if size > max_bytes or len(content) > max_bytes:
        raise ValueError(
            f"'{os.fspath(path)}' holds {max(size, len(content)):,} bytes; at most "
            f"{max_bytes:,} are read."
        )
    return content


def read_object(
    path: str | os.PathLike[str], max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises the errors of `read_bytes` and `parse_object`.
    """
    return parse_object(read_bytes(path, max_bytes), path)


def parse_object(content: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the JSON object in the content of a file.

    Args:
        content: The text, in UTF-8.
        path: The file's path, for errors.

    Raises:
        ValueError: If the content is not a JSON object, has more than `MAX_VALUES`
            values, is nested more than `MAX_DEPTH` deep, or has strings that are not
            Unicode.
    """
    name = os.fspath(path)
    # Each value except the first follows one of these characters. Characters in strings
    # are counted too, so the count may be too high.
    count = sum(map(content.count, (b",", b"[", b"{")))
    if count > MAX_VALUES:
        raise ValueError(
            f"'{name}' has about {count:,} JSON values; at most {MAX_VALUES:,} are "
            "read."
        )
    try:
        found = json.loads(content)
        if _depth(found) > MAX_DEPTH:
            raise RecursionError
        if b"\\ud" in content.lower():  # half of a surrogate pair may be missing
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(
            f"'{name}' is nested too deeply: JSON is read up to {MAX_DEPTH} levels."
        ) from None
    except ValueError as error:
        raise ValueError(f"'{name}' is not JSON in UTF-8: {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"'{name}' holds {type(found).__name__}, not a JSON object.")
    return found


def _depth(value: Any) -> int:
    """Returns the number of nested containers, counted up to `MAX_DEPTH` + 1."""
    level, depth = [value], -1
    while level and depth <= MAX_DEPTH:
        level = [x for x in level if isinstance(x, dict | list)]
        depth += 1
        parts = (x.values() if isinstance(x, dict) else x for x in level)
        level = [*itertools.chain.from_iterable(parts)]
    return depth


def open_private(directory: Path, name: str) -> int:
    """Opens a file that only this user or root can have written.

    Returns the file descriptor.

    Raises:
        OSError: If the file is missing, or cannot be opened.
        ValueError: If the file or its directory belongs to a user other than this user
            and root, or if other users can write to it.
    """
    parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_private(parent, directory)
        # The open is relative to the directory that was checked, even if something has
        # been renamed since.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        _check_private(descriptor, directory / name)
    except ValueError:
        os.close(descriptor)
        raise
    return descriptor


def _check_private(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise ValueError(f"'{path}' is not a regular file.")
    if found.st_uid not in (os.getuid(), 0):
        raise ValueError(
            f"'{path}' belongs to user {found.st_uid}, but must belong to "
            f"{os.getuid()}, the user of this process, or to root."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"'{path}' has mode {stat.S_IMODE(found.st_mode):o}, so that other users "
            f"can write to it. Run: chmod go-w '{path}'."
        )
