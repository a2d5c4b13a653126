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
import mmap
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
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
    "arrays": {"*": {"*": list}},
    "parts": list,
    "places": {"*": list},
}

Bounds = tuple[tuple[int, int], ...]
"""The first and the last index, exclusive, of a part in each dim of its array."""


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

    def stored_by(self, owner: int, *, is_second: bool) -> bool:
        """Returns True if a file holds the part: an owner's file, or its second one."""
        if is_second:
            return self.is_sent and self.owners[0] == owner
        return owner in self.owners


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
    """Returns the bounds of the elements in two parts, or ``None`` if there are none.

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
        del self.bytes
        with contextlib.suppress(BufferError):  # freed with the last view of it
            self._map.close()


def parts_of(values: Iterable[Sequence[Any]]) -> list[Part]:
    """Returns the parts that an index lists as JSON values."""
    return [
        Part(group, path, tuple((a, b) for a, b in bounds), tuple(owners), bool(sent))
        for group, path, bounds, owners, sent in values
    ]


def part_sizes(
    parts: Sequence[Part], arrays: Mapping[str, Mapping[str, Sequence[Any]]]
) -> list[int]:
    """Returns the bytes of each part; ``arrays`` has a dtype for each array."""
    return [
        int(np.prod(shape_of(x.bounds), dtype=np.int64))
        * jax.numpy.dtype(arrays[x.group][x.path][0]).itemsize
        for x in parts
    ]


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
        self.parts = parts_of(self.index["parts"])
        self.sizes = part_sizes(self.parts, self.index["arrays"])
        self.places = {int(i): (x[0], x[1]) for i, x in self.index["places"].items()}
        with open(open_private(directory, self.path.name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            ends = [start + self.sizes[i] for i, (start, _) in self.places.items()]
            if min((x for x, _ in self.places.values()), default=0) < 0 or (
                max(ends, default=0) > size
            ):
                raise ValueError(f"'{self.path}' is shorter than its index says.")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, number: int) -> np.ndarray:
        """Returns a part as an array that refers to the file."""
        start, part = self.places[number][0], self.parts[number]
        dtype = jax.numpy.dtype(self.index["arrays"][part.group][part.path][0])
        stored = np.frombuffer(self._map, np.uint8, self.sizes[number], start)
        return stored.view(dtype).reshape(shape_of(part.bounds))

    def damaged(self) -> list[int]:
        """Returns the numbers of the parts whose bytes have another checksum."""
        return [
            number
            for number, (start, crc) in self.places.items()
            if zlib.crc32(memoryview(self._map)[start : start + self.sizes[number]])
            != crc
        ]


def write_index(directory: Path, name: Name, index: Mapping[str, Any]) -> None:
    """Writes an index: with it, the file of the same name counts as complete."""
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
