"""Writes, syncs and renames files in an order that survives a power cut.

Written data may be only in the computer's memory until it is synced. The same holds for
the directory entry of a new or renamed file. Everything that is reported as saved goes
through this module.
"""

import errno
import fcntl
import os
from itertools import takewhile
from pathlib import Path

# Apple's `fsync` leaves the data in the disk's cache. This command flushes that cache.
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)

# `sync` ignores these errors for directories. Some network file systems cannot sync a
# directory and do not need to. Also, a directory may permit new entries but no reading.
_UNSYNCED_DIRECTORY = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until a file's content, or a directory's entries, are on the disk.

    Raises ``OSError`` if the disk cannot store them.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if _FULL_SYNC is None:
                os.fsync(descriptor)
            else:
                fcntl.fcntl(descriptor, _FULL_SYNC)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCED_DIRECTORY or not os.path.isdir(path):
            raise


def sync_tree(directory: str | os.PathLike[str]) -> None:
    """Waits until a directory and everything below it are on the disk."""

    def fail(error: OSError) -> None:
        raise error

    for root, _, names in os.walk(directory, topdown=False, onerror=fail):
        for name in names:
            sync(os.path.join(root, name))
        sync(root)


def make_directory(path: str | os.PathLike[str]) -> None:
    """Creates a directory and its missing parents, and syncs them to the disk."""
    path = Path(path)
    missing = [*takewhile(lambda each: not each.exists(), (path, *path.parents))]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)


def publish(temporary: Path, target: Path) -> None:
    """Renames a directory to the name under which it counts as saved.

    All files are on the disk before the rename, so a power cut never leaves a part of
    them under the new name. When this returns, the entire directory survives a power
    cut under its new name.
    """
    sync_tree(temporary)
    move(temporary, target)
    sync(target)


def move(source: Path, target: Path) -> None:
    """Renames a directory within its parent, and syncs the new name to the disk."""
    source.rename(target)
    sync(target.parent)
