"""Moments of a program: which values are in memory at once, counted by their sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nnx_parallel.sharding.model import Path

Kind = Literal[
    "rows", "weight", "layer", "cast", "gradient", "layer gradient", "unsummed",
    "combined", "turned", "whole", "fixed",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Size:
    """What decides the bytes of a value on a device.

    Attributes:
        kind: Of the batch's ``rows``, or what a product needs ``whole`` of rows that
            are split along the sequence; a ``weight`` where it is used, one ``layer``
            of it, its ``cast`` as it is stored, or all layers ``turned``, with the dim
            first that is gathered; a ``gradient``, a ``layer gradient``, what one has
            more while it is ``unsummed`` over devices, or its part of a ``combined``
            sum; anything else is ``fixed``.
        num_bytes: All of it, or those of one row.
        dims: Of rows: its shape without those of layers and rows; of what is fixed: its
            shape.
        name: Of rows: that of the last dim, if a named weight made it.
        path: Of the parameter.
        is_stacked: True if rows are kept for each layer of a stack.
    """

    kind: Kind
    num_bytes: float
    dims: tuple[int, ...] = ()
    name: str = ""
    path: Path = ()
    is_stacked: bool = False


Row = Mapping[Size, int]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Moments of a program that may be its peak.

    Attributes:
        sizes: The sizes of its values.
        counts: How many of each are live: (moments, sizes).
    """

    sizes: tuple[Size, ...]
    counts: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Timeline:
        """Those of rows, without what cannot be a peak."""
        rows = pruned(rows)
        sizes = tuple(dict.fromkeys(size for row in rows for size in row))
        at = {size: i for i, size in enumerate(sizes)}
        counts = np.zeros((len(rows), len(sizes)))
        for i, row in enumerate(rows):
            for size, count in row.items():
                counts[i, at[size]] = count
        return cls(sizes, counts)

    def peak(self, local_bytes: Sequence[float]) -> np.ndarray:
        """Counts at the moment of most bytes, by the bytes of each size."""
        return self.counts[int(np.argmax(self.counts @ np.asarray(local_bytes)))]


def pruned(rows: Iterable[Row]) -> list[Counter]:
    """Rows that no other exceeds in everything."""
    kept: list[Counter] = []
    # The longest first: it may exceed many.
    unique = {frozenset(row.items()): row for row in rows}.values()
    for row in sorted(unique, key=lambda r: -sum(r.values())):
        new = Counter(dict(row))
        if not any(new <= other for other in kept):
            kept.append(new)
    return kept or [Counter()]
