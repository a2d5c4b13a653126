"""The rows of a batch: finds them, splits them into microbatches and joins them again.

An entry without rows is the same for all rows. It is an array without dims, or a value
that the data marks as `Shared`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from einops import rearrange
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import (
    BatchShapeError,
    DataError,
    ParallelWarning,
    warn_user,
)
from nnx_parallel.sharding.layout import Layout

END = object()  # stands for a batch once the data has ended
DROPPED = object()  # stands for a smaller batch that is left out


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shared:
    """An entry of a batch that all rows share: an attention mask, a table, a prompt.

    Each device has a copy, and each microbatch gets the entire entry. The loss is given
    ``value`` itself. An array without dims, such as the value of a schedule, is shared
    even without this class. All processes must give the same values.

    Attributes:
        value: An array of any shape, or a pytree of arrays.

    Example:
        >>> from nnx_parallel.data import Shared
        >>> rows, mask = np.ones((8, 16)), np.tril(np.ones((16, 16), bool))
        >>> batch = {"x": rows, "mask": Shared(mask), "temperature": np.asarray(0.5)}
        >>> # the loss reads batch["x"], batch["mask"] and batch["temperature"]
    """

    value: Any


@dataclass(frozen=True)
class Pad:
    """Trains on smaller batches too, by adding copies of the last row.

    Batches are dicts. The entry ``weights`` tells the loss which rows were added: they
    have weight zero. If batches have no such entry, each batch gets one, with ones for
    the original rows. The loss, and each metric that depends on the rows, must be a
    `Mean` that uses these weights for the rows, in its total and in its weight. Its
    value then equals the value of the batch without padding.

    Attributes:
        weights: Key of an array with rows as dim 0, such as a mask of tokens.

    Example:
        >>> batch = Pad("weights").fill({"x": np.array([3.0, 4.0])}, 4)
        >>> batch["x"].tolist(), batch["weights"].tolist()
        ([3.0, 4.0, 4.0, 4.0], [1.0, 1.0, 0.0, 0.0])
    """

    weights: str

    def fill(self, batch: Any, num_rows: int) -> Any:
        """Returns a batch filled up to ``num_rows`` rows, with weights."""
        if not isinstance(batch, Mapping):
            raise DataError(
                f"last_batch={self} got a batch of type {type(batch).__name__}. It "
                f"adds the entry {self.weights!r} to a batch: batches must be dicts."
            )
        found = count_rows(batch)
        weights = batch.get(self.weights, np.ones(found, np.float32))
        if np.ndim(weights) == 0:
            raise DataError(
                f"batch[{self.weights!r}] is {weights!r}, and last_batch={self} gives "
                "rows the weight 0 in it: dim 0 must be the rows."
            )
        batch = {**batch, self.weights: weights}
        if found >= num_rows:
            return batch
        index = np.arange(num_rows)
        rows, shared, join = partition(batch)
        # The added rows are copies, because a row of zeros could give a NaN.
        batch = join([x[np.minimum(index, found - 1)] for x in rows], shared)
        weights = np.array(batch[self.weights])
        weights[found:] = 0
        return batch | {self.weights: weights}


LastBatch = Literal["drop", "error"] | Pad
"""The rule, in training, for a batch with fewer rows than the other batches."""


def check_last_batch(value: object) -> None:
    """Raises an error that names the value, unless it is a `LastBatch`."""
    if not (value in (None, "drop", "error") or isinstance(value, Pad)):
        raise ValueError(
            f"last_batch={value!r}. Valid values are 'drop', which leaves a smaller "
            "batch out, Pad('weights'), which fills it up with rows of weight 0, and "
            "'error'."
        )


@dataclass
class SmallerBatches:
    """The rule for batches with fewer rows than the other batches.

    Attributes:
        rule: ``"error"`` raises an error. ``"drop"`` leaves the batch out, and ``None``
            does so with a warning. A `Pad` fills the batch up.
        num_rows: Rows of a full batch; 0 takes the number from the first batch.
        num_dropped: Number of batches that were left out.
    """

    rule: LastBatch | None = "error"
    num_rows: int = 0
    num_dropped: int = 0

    def resize(self, batch: Any) -> Any:
        """Pads a smaller batch or gives `DROPPED`; returns other batches unchanged."""
        found = 0 if batch is END or self.rule == "error" else rows_of(batch)
        self.num_rows = self.num_rows or found
        if isinstance(self.rule, Pad):
            return self.rule.fill(batch, self.num_rows) if found else batch
        if not 0 < found < self.num_rows:
            return batch
        self._warn(found, self.num_rows)
        return DROPPED

    def count_dropped(self, *, is_first: bool) -> None:
        """Counts a dropped batch; ``is_first``: no batch was used before it."""
        self.num_dropped += 1
        # A resumed run may have smaller batches throughout: the next batch decides.
        self.num_rows = 0 if is_first else self.num_rows

    def drops(self, last: int, num_rows: int) -> bool:
        """Returns True if a last batch of ``last`` rows is left out."""
        return last < num_rows and self.rule in ("drop", None)

    def check_last(self, last: int, num_rows: int, *, index: int) -> None:
        """Refuses, or warns about, a last batch that is known before reading begins."""
        if last < num_rows and self.rule == "error":
            raise BatchShapeError(
                f"Batch {index}, the last one, has {last} rows, and the first has "
                f"{num_rows}. Leave it out by last_batch='drop', fill it up by "
                "last_batch=Pad('weights'), or let the data drop it."
            )
        if last < num_rows:
            self._warn(last, num_rows)

    def _warn(self, found: int, num_rows: int) -> None:
        if self.rule is None:
            warn_user(
                f"A last batch of {found} rows instead of {num_rows} is left out of "
                "the training. Pass last_batch='drop' if this is intended; "
                "last_batch=Pad('weights') trains on it, and the added rows have no "
                "effect.",
                ParallelWarning,
            )
            self.rule = "drop"  # the warning is given only once


def rows_at_ends(data: Any) -> tuple[int, int]:
    """Returns the rows of the first and the last batch of sized data; 0 if unknown.

    Example:
        >>> rows_at_ends([np.zeros(4), np.zeros(4), np.zeros(3)])
        (4, 3)
    """
    size = getattr(data, "batch_size", None)
    # The data is an object of another library, which may lack these attributes. Any
    # failure means that the number is unknown.
    with contextlib.suppress(Exception):
        if hasattr(data, "__getitem__"):
            return rows_of(data[0]), rows_of(data[len(data) - 1])
        if isinstance(size, int):  # PyTorch's DataLoader has it, for example
            rest = 0 if data.drop_last else len(data.sampler) % size
            return size, rest or size
    return 0, 0


def is_marked(entry: Any) -> bool:
    """Returns True for a `Shared` entry."""
    return isinstance(entry, Shared)


def partition(batch: Any) -> tuple[list, list, Callable[[Sequence, Sequence], Any]]:
    """Returns arrays with rows, shared entries, and a function that joins them again.

    Example:
        >>> rows, shared, join = partition({"x": np.ones((4, 2)), "t": np.asarray(1)})
        >>> join([x[:2] for x in rows], shared)["x"].shape
        (2, 2)
    """
    leaves, tree = jax.tree.flatten(batch, is_leaf=is_marked)
    have_rows = [not is_marked(x) and np.ndim(x) > 0 for x in leaves]

    def join(rows: Sequence, shared: Sequence) -> Any:
        of_rows, of_shared = iter(rows), iter(shared)
        entries = [next(of_rows if has else of_shared) for has in have_rows]
        return jax.tree.unflatten(tree, entries)

    rows = [x for x, has in zip(leaves, have_rows, strict=True) if has]
    shared = [x for x, has in zip(leaves, have_rows, strict=True) if not has]
    return rows, shared, join


def count_rows(batch: Any) -> int:
    """Returns the number of rows of a batch that has at least one entry with rows."""
    return partition(batch)[0][0].shape[0]


def rows_of(batch: Any) -> int:
    """Returns the number of rows of an unchecked batch; 0 if it has no rows."""
    rows = partition(batch)[0]
    return getattr(rows[0], "shape", (0,))[0] if rows else 0


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """Returns the rows from ``start`` to ``stop`` of a host batch.

    Example:
        >>> take_rows({"x": np.arange(4)}, 1, 3)
        {'x': array([1, 2])}
    """
    rows, shared, join = partition(batch)
    return join([x[start:stop] for x in rows], shared)


def join_batches(first: Any, second: Any) -> Any:
    """Returns the rows of two host batches as one batch.

    Shared entries are taken from the second batch.
    """
    before, (rows, shared, join) = partition(first)[0], partition(second)
    pairs = zip(before, rows, strict=True)
    return join([np.concatenate(pair) for pair in pairs], shared)


def unmarked(batch: Any) -> Any:
    """Returns the batch as the loss sees it, with the values of `Shared` entries."""
    return jax.tree.map(
        lambda x: x.value if is_marked(x) else x, batch, is_leaf=is_marked
    )


def split_rows(layout: Layout, batch: Any, num_microbatches: int) -> Any:
    """Splits the rows of a batch into microbatches, along a new leading dim.

    Microbatch m holds the rows m, m + M, m + 2M, and so on. So each device keeps its
    rows, for any number of devices, and no row is sent. Shared entries do not change.
    """
    # (batch, ...) -> (microbatches, rows, ...)
    split = partial(rearrange, pattern="(rows m) ... -> m rows ...", m=num_microbatches)
    rows, shared, join = partition(batch)
    return constrain_rows(layout, join([split(x) for x in rows], shared), 1)


def join_rows(outputs: Any) -> Any:
    """Joins the rows that `split_rows` has split, in their original order."""
    return jax.tree.map(lambda x: rearrange(x, "m rows ... -> (rows m) ..."), outputs)


def constrain_rows(layout: Layout, batch: Any, dim: int) -> Any:
    """Constrains a batch so that its rows, along ``dim``, are split over batch axes."""

    def constrain(x: jax.Array) -> jax.Array:
        spec = P(*(None,) * dim, *layout.batch_spec(x.shape[dim]))
        return jax.lax.with_sharding_constraint(x, layout.sharding(spec))

    rows, shared, join = partition(batch)
    return join([constrain(x) for x in rows], shared)
