"""Text that every machine has: the source of Python's standard library, as bytes.

Entire files are held out for validation. They are chosen by their names only, so every
run with the same version of Python reads the same bytes in the same order.
"""

import hashlib
import math
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Installed packages, tests, tables of data, and parts of the standard library that
# Linux distributions package separately.
_LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idlelib", "lib2to3", "turtledemo"),
    *("encodings", "ensurepip", "pydoc_data"),
}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files to train on and files held out.

    Attributes:
        name: Name of the project.
        train_files: Files to train on, sorted by name.
        valid_files: Files held out, sorted by name.
    """

    name: str
    train_files: tuple[Path, ...]
    valid_files: tuple[Path, ...]

    @property
    def train(self) -> np.ndarray:
        """The bytes to train on: uint8 ``(length,)``."""
        return _read(self.train_files)

    @property
    def valid(self) -> np.ndarray:
        """The bytes held out: uint8 ``(length,)``."""
        return _read(self.valid_files)


def standard_library(root: Path | None = None, *, hold_out: int = 20) -> Corpus:
    """The standard library of the running Python.

    Args:
        root: Another directory of Python files, to read instead.
        hold_out: About one in this many files is held out.

    Raises:
        FileNotFoundError: If there are too few files to hold any out.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py")) if _is_wanted(file, root)]
    held_out = {file for file in files if _hash(file.relative_to(root)) % hold_out == 0}
    if not held_out or len(held_out) == len(files):
        raise FileNotFoundError(
            f"{len(files)} Python files in '{root}': too few to hold any out. The demo "
            "learns from the source of the standard library, which this Python lacks. "
            "Use a Python that has it: make PYTHON=..."
        )
    return Corpus(
        name=f"Python {platform.python_version()}'s standard library",
        train_files=tuple(file for file in files if file not in held_out),
        valid_files=tuple(file for file in files if file in held_out),
    )


@dataclass(frozen=True, kw_only=True)
class RandomWindows:
    """Endless batches of windows at random positions, the same on every iteration.

    Attributes:
        text: uint8 ``(length,)``.
        global_batch_size: Windows in a batch.
        seq_len: Bytes to predict in a window; a window has one byte more.
        seed: Seed of the positions.
    """

    text: np.ndarray
    global_batch_size: int
    seq_len: int
    seed: int = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yields int32 ``(global_batch_size, seq_len + 1)``."""
        random = np.random.default_rng(self.seed)
        offsets = np.arange(self.seq_len + 1)
        while True:
            starts = random.integers(
                len(self.text) - self.seq_len, size=(self.global_batch_size, 1)
            )
            yield self.text[starts + offsets].astype(np.int32)


def spread_windows(
    text: np.ndarray, *, num_batches: int, global_batch_size: int, seq_len: int
) -> list[np.ndarray]:
    """Batches of windows spread evenly over a text: int32, as in `RandomWindows`."""
    count = num_batches * global_batch_size
    starts = np.linspace(0, len(text) - seq_len - 1, count).astype(int)
    windows = text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
    return np.split(windows, num_batches)


def unigram_bits(train: np.ndarray, batches: list[np.ndarray]) -> float:
    """Bits per byte of a model that knows how frequent each byte is.

    Args:
        train: uint8 ``(length,)``. One is added to each of the 256 counts.
        batches: int ``(rows, seq + 1)`` each. The first byte of a row is not predicted.
    """
    counts = np.bincount(train, minlength=256) + 1
    targets = np.concatenate(batches)[:, 1:]
    return _mean_bits(counts[targets] / counts.sum())


def bigram_bits(train: np.ndarray, batches: list[np.ndarray]) -> float:
    """Bits per byte of a model that knows which byte follows which.

    Args:
        train: uint8 ``(length,)``. One is added to each of the 256^2 counts of pairs.
        batches: int ``(rows, seq + 1)`` each. The first byte of a row is not predicted.
    """
    pairs = 256 * train[:-1].astype(int) + train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 1
    rows = np.concatenate(batches)
    before, targets = rows[:, :-1], rows[:, 1:]
    return _mean_bits(counts[before, targets] / counts.sum(axis=1)[before])


def _mean_bits(probabilities: np.ndarray) -> float:
    return float(-np.log(probabilities).mean() / math.log(2))


def _is_wanted(file: Path, root: Path) -> bool:
    folders = file.relative_to(root).parts[:-1]
    is_built = any(part.startswith("config-") for part in folders)
    is_built |= file.name.startswith("_sysconfigdata")
    return not is_built and not _LEFT_OUT.intersection(folders)


def _hash(name: Path) -> int:
    return int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:8], "big")


def _read(files: tuple[Path, ...]) -> np.ndarray:
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
