"""Reads and writes safetensors files: checks headers, and returns views of arrays.

A file has three parts with no bytes between them. The first is the length of the header
(8 bytes, little endian). The second is the header (JSON of at most 100 MB), which maps
names to dtype, shape and offsets. The third is the data of the arrays. See
https://github.com/huggingface/safetensors#format.

The package safetensors (0.8) is not used, for four reasons. First, it does not tell
where an array is in the file, and it reads ranges through a memory map. To read an
eighth of the rows of arrays of 11.5 MB, the map reads 5.8 times the bytes of the range
from disk, and `read_rows` reads 1.0 times. Second, it does not read FP8 with NumPy.
Third, its errors do not name the array or the sizes that disagree. Fourth, it writes
only arrays that are in memory together.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from nnx_parallel.errors import WeightsError
from nnx_parallel.files import check_regular, open_regular, parse_object, read_object

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Dtypes that are read and written, by their names in a header."""

FP8 = np.dtype(jnp.float8_e4m3fn)
"""Dtype of elements that need scales; see `nnx_parallel.weights.quantised`."""

_READ = DTYPES | {"F8_E4M3": FP8}
_CODES = {dtype: code for code, dtype in DTYPES.items()}

_HEAD_BYTES = 64
"""Number of bytes at the start of an array by which copies of a file are compared."""

Pick = Callable[[np.ndarray], np.ndarray]
"""A function that returns a part of an array, such as a shard, perhaps rearranged."""


@dataclass(frozen=True)
class Tensor:
    """An array in a file.

    Attributes:
        file: Path of the file.
        dtype: Dtype of the elements.
        shape: Shape, in C order.
        start: Position in the file of the array's first byte.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype in which a model can hold the values without loss of precision."""
        return self.dtype

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Size of the first dim. An array without dims has one row."""
        return self.shape[0] if self.shape else 1

    def read(self, pick: Pick, elements: np.ndarray) -> np.ndarray:
        """Returns the picked values of the array, given its elements."""
        return pick(elements)

    def view(self) -> np.ndarray:
        """Returns a read-only memory map, which is read from disk when it is used."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, "r", self.start, self.shape)

    def read_rows(self, first: int, last: int) -> np.ndarray:
        """Reads a range of the first dim.

        Raises:
            WeightsError: If the file ends before the last row.
        """
        rows = np.empty((last - first, *self.shape[1:]), self.dtype)
        row_bytes = self.num_bytes // self.num_rows
        self._read_into(rows.reshape(-1).view(np.uint8), self.start + first * row_bytes)
        return rows

    def describe(self) -> str:
        """Describes the array and its first elements, to compare copies of a file.

        Raises:
            WeightsError: If the file ends before these elements.
        """
        head = np.empty(min(self.num_bytes, _HEAD_BYTES), np.uint8)
        self._read_into(head, self.start)
        return (
            f"{self.dtype}{list(self.shape)} at byte {self.start} of {self.file.name}, "
            f"first bytes with checksum {zlib.crc32(head.data):08x}"
        )

    def _read_into(self, out: np.ndarray, start: int) -> None:
        """Fills an array of bytes from the file."""
        # The file is read without a memory map and without read-ahead, because each of
        # them would read megabytes of rows that belong to other processes.
        with open(self.file, "rb", buffering=0, opener=open_regular) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file.seek(start)
            left = out.data
            while left and (count := file.readinto(left)):
                left = left[count:]
        if left:
            raise WeightsError(
                f"{str(self.file)!r} is truncated: {len(left):,} bytes are missing."
            )


def open_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the arrays of a file, or of a folder, by name.

    As in transformers, only ``model.safetensors`` of a folder is read if it exists.
    Otherwise the files in the folder's index are read. If there is no index, all
    safetensors files of the folder are read.

    Raises:
        WeightsError: If a file is damaged, truncated or not a safetensors file, or if
            an index names files outside of its folder or disagrees with the files.
    """
    if not path.is_dir():
        return _read_header(path)
    if os.path.lexists(whole := path / WHOLE):
        return _read_header(whole)
    index = path / INDEX
    if not os.path.lexists(index):
        files = sorted(path.glob("*.safetensors"))
        if not files:
            found = sorted(each.name for each in path.glob("*"))[:8]
            raise WeightsError(
                f"No file in {str(path)!r} ends with .safetensors. It has: "
                f"{', '.join(found) or 'nothing'}. Pickled weights (.bin, .pt) are not "
                "read, because reading a pickle can run code. Convert them."
            )
        return _merge(files)
    places = _read_index(index)
    tensors = _merge([path / name for name in sorted(set(places.values()))])
    for name, file in places.items():
        if name not in tensors or tensors[name].file.name != file:
            raise WeightsError(f"{INDEX} says that {name!r} is in {file}. It is not.")
    if unlisted := sorted(tensors.keys() - places.keys()):
        raise WeightsError(f"{INDEX} does not list {unlisted[:5]}, which is in a file.")
    return tensors


def find_folder(path: str | Path) -> Path:
    """Returns a folder by its path, or by the name of a Hugging Face repository.

    Raises:
        WeightsError: If the path looks like a repository's name, but `huggingface_hub`
            is not installed.
    """
    if Path(path).exists() or str(path).count("/") != 1:
        return Path(path)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise WeightsError(
            f"Folder {str(path)!r} does not exist. To download a repository of this "
            "name from the Hugging Face hub: pip install 'nnx-parallel[hub]'."
        ) from None
    kept = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    return Path(snapshot_download(str(path), allow_patterns=kept))


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Returns the content of a folder's ``config.json``, or of the file ``name``.

    Raises:
        WeightsError: If the file is missing, or is not a JSON object in a regular file.
    """
    path = folder / name
    try:
        return read_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise WeightsError(f"{str(folder)!r} has no file {name}.") from None
    except ValueError as error:
        raise WeightsError(f"Cannot read JSON: {error}") from None


def _merge(files: list[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = _read_header(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise WeightsError(f"{twice[0]!r} is in {file.name} and in another file.")
        tensors |= found
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    content = read_config(path.parent, path.name)
    places = content.get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(name, str) for name in places.values()
    ):
        raise WeightsError(f"{str(path)!r} has no weight_map of names to files.")
    for name in places.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(
                f"{str(path)!r} names the file {name!r}. It must be a .safetensors "
                "file in the same folder."
            )
    return places


def _read_header(path: Path) -> dict[str, Tensor]:
    try:
        size = check_regular(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        raise WeightsError(f"File {str(path)!r} does not exist.") from None
    except ValueError as error:
        raise WeightsError(f"{error}") from None
    with open(path, "rb", opener=open_regular) as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            what = "a pickle" if _is_pickle(start) else "truncated, or another format"
            raise WeightsError(
                f"{str(path)!r} is not a safetensors file: its first bytes say that a "
                f"header of {length:,} bytes follows, but the file has {size:,} bytes. "
                f"It is {what}."
            )
        header = _parse(file.read(length), path)
    header.pop("__metadata__", None)
    tensors = {n: _tensor(path, n, e, 8 + length) for n, e in header.items()}
    _check_places(path, tensors, 8 + length, size)
    return tensors


def _is_pickle(start: bytes) -> bool:
    """Returns True for a pickle, or a zip archive with pickles as PyTorch writes it."""
    return start[:2] == b"PK" or start[:1] == b"\x80"


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return parse_object(content, path)
    except ValueError as error:
        raise WeightsError(f"Cannot read JSON: {error}") from None


def _tensor(path: Path, name: str, entry: Any, start: int) -> Tensor:
    where = f"{name!r} in {str(path)!r}"
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [first, last]}:
            pass
        case _:
            raise WeightsError(
                f"The header lacks the dtype, shape or offsets of {where}."
            )
    if code not in _READ:
        raise WeightsError(
            f"{where} has dtype {code}. Supported dtypes: {', '.join(_READ)}."
        )
    numbers = [*shape, first, last]
    if not all(type(n) is int and 0 <= n < 2**60 for n in numbers):
        raise WeightsError(
            f"{where} has invalid numbers: shape {shape}, offsets {[first, last]}."
        )
    dtype = _READ[code]
    if last - first != math.prod(shape) * dtype.itemsize:
        raise WeightsError(
            f"{where} has {last - first:,} bytes, but its shape {tuple(shape)} and "
            f"dtype {code} need {math.prod(shape) * dtype.itemsize:,} bytes."
        )
    return Tensor(path, dtype, tuple(shape), start + first)


def _check_places(
    path: Path, tensors: Mapping[str, Tensor], start: int, size: int
) -> None:
    """Checks that the arrays fill the file without gaps, from the header to the end."""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < start:
            raise WeightsError(
                f"{name!r} in {str(path)!r} overlaps with another array."
            )
        if tensor.start > start:
            raise WeightsError(f"{str(path)!r} has unused bytes before {name!r}.")
        start += math.prod(tensor.shape) * tensor.dtype.itemsize
    if start != size:
        raise WeightsError(
            f"{str(path)!r} has {size:,} bytes, but its header describes {start:,}: it "
            f"is {'truncated' if size < start else 'longer than its arrays'}."
        )


Described = tuple[str, tuple[int, ...], np.dtype]
"""Name, shape and dtype of an array to write."""


def num_bytes(described: Described) -> int:
    """Returns the number of bytes of an array's data."""
    _, shape, dtype = described
    return math.prod(shape) * dtype.itemsize


def write_tensors(
    file: BinaryIO, described: list[Described], arrays: Iterator[np.ndarray]
) -> None:
    """Writes a file; ``arrays`` yields the arrays in the order of ``described``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first = 0
    for each in described:
        name, shape, dtype = each
        last = first + num_bytes(each)
        offsets = [first, last]
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": offsets}
        first = last
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # arrays must begin at a multiple of 8
    file.write(len(content).to_bytes(8, "little") + content)
    for _, array in zip(described, arrays, strict=True):
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def code_of(dtype: np.dtype) -> str:
    """Returns the name of a dtype in a header.

    Raises:
        WeightsError: If `DTYPES` does not have this dtype.
    """
    if dtype not in _CODES:
        raise WeightsError(
            f"Files of safetensors cannot store {dtype}. Supported dtypes: "
            f"{', '.join(map(str, _CODES))}."
        )
    return _CODES[dtype]
