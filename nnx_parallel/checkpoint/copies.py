"""Files of copies in memory: the parts of arrays that a process holds, and an index.

A process writes two files for each copy. The first one holds the bytes of parts of
arrays. The second one is an index in JSON with the place and the checksum of each part.
It appears only when the bytes are complete. Every index also lists the parts of all
processes, so that a reader knows whether it has found all of them.

Nothing is synced to a disk: the files must survive their process, but not their
machine.
"""

import contextlib
import json
import math
import mmap
import os
import re
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from nnx_parallel.checkpoint.checksum import digest
from nnx_parallel.checkpoint.files import matches
from nnx_parallel.files import MAX_BYTES, open_private, parse_object

_VERSION = 1  # increases when an older reader would misread the files
_NAME = re.compile(r"(\d+)-([0-9a-f]{16})\.(\d+)(s?)\.json")
_INDEX = {
    "version": int,
    "run": str,
    "saved": int,
    "header": dict,
    "checksums": {"*": {"*": int}},
    "layout": str,
    "places": {"*": list},
}

Bounds = tuple[tuple[int, int], ...]
"""The start and the stop, exclusive, of a part in each dim of its array."""


class Part(NamedTuple):
    """A part of an array, and the processes that store it.

    Attributes:
        group, path: Name of the array.
        bounds: The part's place in the array.
        owners: Numbers of the processes that store the part. They are on different
            machines.
        is_sent: True if the first owner sends a second copy to another machine.
    """

    group: str
    path: str
    bounds: Bounds
    owners: tuple[int, ...]
    is_sent: bool


class Name(NamedTuple):
    """The name of a file.

    Attributes:
        step: Number of updates done.
        attempt: Random text of 16 characters, which all files of a copy have in common.
        owner: Number of the process whose parts the file holds.
        is_second: True if another process holds the file for the owner.
    """

    step: int
    attempt: str
    owner: int
    is_second: bool

    @property
    def stem(self) -> str:
        """The file's name without its ending."""
        second = "s" * self.is_second
        return f"{self.step}-{self.attempt}.{self.owner}{second}"


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    """Returns the shape of a part.

    Example:
        >>> shape_of(((2, 4), (0, 3)))
        (2, 3)
    """
    return tuple(stop - start for start, stop in bounds)


def overlap(wanted: Bounds, found: Bounds) -> Bounds | None:
    """Returns the bounds of the elements that two parts share, or ``None``.

    Example:
        >>> overlap(((0, 4),), ((2, 8),)), overlap(((0, 2),), ((2, 8),))
        (((2, 4),), None)
    """
    both = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, found, strict=True)
    )
    return both if all(start < stop for start, stop in both) else None


def slices(inner: Bounds, outer: Bounds) -> tuple[slice, ...]:
    """Returns the slices that select ``inner`` in an array that holds ``outer``."""
    pairs = zip(inner, outer, strict=True)
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)


@dataclass(eq=False)
class Buffer:
    """A file in memory, mapped into this process.

    A buffer is used again for later copies: the first write of a page takes six times
    as long as a later one.
    """

    path: Path
    size: int

    def __post_init__(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            # A write to a mapped page that memory cannot hold would end the process.
            os.posix_fallocate(descriptor, 0, max(self.size, 1))
            self._map = mmap.mmap(descriptor, max(self.size, 1))
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.bytes = np.frombuffer(self._map, np.uint8)

    def rename(self, path: Path) -> None:
        """Gives the file another name in its directory."""
        self.path.rename(path)
        self.path = path

    def remove(self) -> None:
        """Deletes the file, and frees its memory."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Ends the mapping into this process."""
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # freed with the last view of it
            self._map.close()


class Layout:
    """The arrays of a copy, and the parts into which the strategy has divided them.

    Many arrays are divided in the same way, so the text has each division only once.

    Args:
        text: The result of `spell`.

    Attributes:
        text: The given text.
        arrays: The dtype and the shape of each array, by group and path.
        parts: All parts. Indexes refer to them by number.
        sizes: Bytes of each part.
    """

    def __init__(self, text: str) -> None:
        self.text, self.arrays = text, dict[str, dict[str, tuple[Any, list[int]]]]()
        self.parts: list[Part] = []
        self.sizes: list[int] = []
        self._stored = defaultdict[tuple[int, bool], list[int]](list)
        content = json.loads(text)
        divisions = [
            [
                (tuple((a, b) for a, b in x), tuple(owners), sent)
                for x, owners, sent in y
            ]
            for y in content["divisions"]
        ]
        for group, path, dtype, shape, number in content["arrays"]:
            array = jnp.dtype(dtype), shape
            self.arrays.setdefault(group, {})[path] = array
            for bounds, owners, is_sent in divisions[number]:
                self._add(Part(group, path, bounds, owners, is_sent), array[0])

    def _add(self, part: Part, dtype: np.dtype) -> None:
        number = len(self.parts)
        self.parts.append(part)
        self.sizes.append(math.prod(shape_of(part.bounds)) * dtype.itemsize)
        for owner in part.owners:
            self._stored[owner, False].append(number)
        if part.is_sent:
            self._stored[part.owners[0], True].append(number)

    def numbers(self, owner: int, *, is_second: bool) -> list[int]:
        """Returns the numbers of the parts in the first or second file of an owner."""
        return self._stored.get((owner, is_second), [])

    def bytes_of(self, owner: int, *, is_second: bool) -> int:
        """Returns the size of the file with these parts."""
        numbers = self.numbers(owner, is_second=is_second)
        return places_of(numbers, self.sizes)[1]


@lru_cache(maxsize=2)  # all files of a copy have the same layout
def read_layout(text: str) -> Layout:
    """Returns the layout of a text; raises ``ValueError`` if it is not a layout."""
    try:
        return Layout(text)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"The layout of a copy cannot be read: {error}.") from None


def spell(
    arrays: Iterable[tuple[str, str, str, Sequence[int], Any]],
    divide: Callable[[Any], list[Any]],
) -> str:
    """Returns the text of a layout.

    Args:
        arrays: Group, path, dtype and shape of each array, and a key for its division.
        divide: Maps a key to the bounds, owners and ``is_sent`` of the parts.
    """
    numbers: dict[Any, int] = {}
    spelt = [[*rest, numbers.setdefault(key, len(numbers))] for *rest, key in arrays]
    return json.dumps({"arrays": spelt, "divisions": [*map(divide, numbers)]})


def places_of(
    numbers: Iterable[int], sizes: Sequence[int]
) -> tuple[dict[int, int], int]:
    """Returns the offset of each part in a file, and the size of the file."""
    offsets, end = dict[int, int](), 0
    for number in numbers:
        offsets[number] = end
        end += -(-sizes[number] // 64) * 64  # each part begins at a multiple of 64
    return offsets, end


class Copy:
    """A file of parts that this process can read, and its index.

    Raises:
        ValueError: If the files are damaged, or not in this format.
        OSError: If they cannot be read.
    """

    def __init__(self, directory: Path, name: Name) -> None:
        self.name, self.path = name, directory / f"{name.stem}.data"
        # Another user could otherwise plant weights in a directory that all may write.
        path = f"{name.stem}.json"
        with open(open_private(directory, path), "rb") as file:
            self.index = check_index(parse_object(file.read(MAX_BYTES), path))
        self.header = self.index["header"]
        self.layout = read_layout(self.index["layout"])
        self.places = {int(i): (x[0], x[1]) for i, x in self.index["places"].items()}
        sizes = self.layout.sizes
        bounds = [(start, start + sizes[i]) for i, (start, _) in self.places.items()]
        with open(open_private(directory, self.path.name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not all(start >= 0 and end <= size for start, end in bounds):
                raise ValueError(f"'{self.path}' is shorter than its index says.")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, number: int) -> np.ndarray:
        """Returns a part as an array that refers to the file."""
        start, part = self.places[number][0], self.layout.parts[number]
        dtype, _ = self.layout.arrays[part.group][part.path]
        size = self.layout.sizes[number]
        stored = np.frombuffer(self._map, np.uint8, size, start)
        return stored.view(dtype).reshape(shape_of(part.bounds))

    def damaged(self) -> list[int]:
        """Returns the numbers of the parts whose bytes have another checksum."""
        found, sizes = memoryview(self._map), self.layout.sizes
        return [
            number
            for number, (start, crc) in self.places.items()
            if zlib.crc32(found[start : start + sizes[number]]) != crc
        ]


def write_index(directory: Path, name: Name, index: Mapping[str, Any]) -> None:
    """Writes an index, which marks the file of the same name as complete."""
    content = {"version": _VERSION, **index}
    temporary = directory / f"{name.stem}.tmp"
    text = json.dumps(content | {"digest": digest(content)})
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
    temporary.rename(directory / f"{name.stem}.json")


def check_index(index: dict[str, Any]) -> dict[str, Any]:
    """Returns an index, or raises ``ValueError`` if its version or digest is wrong."""
    if index.get("version") != _VERSION:
        raise ValueError("Another version of nnx_parallel wrote the copy.")
    if index.get("digest") != digest(index) or not matches(index, _INDEX):
        raise ValueError("The index of a copy is damaged.")
    return index


def list_names(directory: Path) -> Iterator[Name]:
    """Yields the names of the complete files in a directory."""
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(os.listdir(directory)):
            if found := _NAME.fullmatch(entry):
                step, attempt, owner, second = found.groups()
                yield Name(int(step), attempt, int(owner), bool(second))


def private_directory(path: Path) -> Path:
    """Makes a directory that only this user can open, and returns it.

    Raises:
        OSError: If it cannot be made, or is the directory of another user.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not path.is_dir() or path.is_symlink() or found.st_uid != os.getuid():
        raise OSError(f"'{path}' is not a directory of this user.")
    if found.st_mode & 0o077:
        raise OSError(f"'{path}' can be opened by other users. Run: chmod 700 '{path}'")
    return path


def free_bytes(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> int:
    """Returns the bytes that new files in a directory may take.

    If the directory is in memory, its files also count against the memory of the
    machine and against the limits of the container. ``mounts`` lists the file systems.
    """
    free = shutil.disk_usage(directory).free
    where = os.stat(directory).st_dev
    device = f"{os.major(where)}:{os.minor(where)}"
    with contextlib.suppress(OSError, LookupError, ValueError):
        lines = [x.split() for x in mounts.read_text().splitlines()]
        kinds = {x[x.index("-") + 1] for x in lines if x[2] == device}
        if not kinds.isdisjoint(("tmpfs", "ramfs")):
            available = dict(
                x.split(":") for x in Path("/proc/meminfo").read_text().splitlines()
            )["MemAvailable"]
            free = min(free, 1024 * int(available.split()[0]))
            free = min([free, *free_in_container()])  # there may be no limit
    return free


def free_in_container(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Yields the bytes that are left below each memory limit of this process.

    Args:
        groups: File with the control groups of this process.
        root: Directory of all control groups, of version 1 or 2.
    """
    for line in groups.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        # The system can free the memory of files on disks.
        at, limit, used = root, "max", "current"
        cached = "inactive_file", "active_file"
        if controllers:  # version 1
            at, limit, used = root / "memory", "limit_in_bytes", "usage_in_bytes"
            cached = "total_inactive_file", "total_active_file"
        if controllers and "memory" not in controllers.split(","):
            continue
        # In a container, the names of the groups may be the names on the host.
        group = at / name.lstrip("/")
        for each in (group, *group.parents[: len(group.relative_to(at).parts)]):
            # Without a limit the file has the text "max" or is missing.
            with contextlib.suppress(OSError, ValueError, KeyError):
                most, now = (
                    int((each / f"memory.{x}").read_text()) for x in (limit, used)
                )
                lines = (each / "memory.stat").read_text().splitlines()
                stat = dict(x.split() for x in lines)
                yield most - now + sum(int(stat[x]) for x in cached)
