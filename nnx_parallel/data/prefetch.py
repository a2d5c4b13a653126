"""Batches on their way to the devices: read, checked and placed ahead of the step.

Data is any iterable of pytrees of NumPy arrays whose dim 0 is the rows: of the global
batch, or with several processes of this process's share. A thread reads the next
batches and places them while the step runs, so that the step never waits for a copy. A
*resumable* iterator (``get_state`` and ``set_state``, as Grain's have) gives its
position with every batch; any other iterable is fast-forwarded on resume.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from nnx_parallel.data.agreement import BatchAgreement, Signature
from nnx_parallel.data.batches import batch_signature, check_batch, check_same
from nnx_parallel.data.position import (
    Resumable,
    decode_state,
    encode_state,
    is_one_shot,
)
from nnx_parallel.errors import DataError, DataExhaustedError

T = TypeVar("T")

_CLOSE_SECONDS = 5.0
_END = object()
_REPEAT_HINT = (
    "To repeat the data, pass an object whose `__iter__` never ends "
    "(`while True: yield from ...`), `itertools.cycle(batches)`, "
    "or a Grain dataset with `.repeat()`."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedBatch(Generic[T]):
    """A batch on the devices.

    Attributes:
        batch: The batch as ``place`` returned it.
        num_rows: Rows of the batch in this process.
        state: Position of the data after this batch, as JSON can hold it; ``None`` if
            the data is not resumable.
        wait_seconds: How long the consumer waited for this batch.
        stop_reason: Why all processes stop instead of using this batch, which is then
            ``None``.
    """

    batch: T
    num_rows: int
    state: Any
    wait_seconds: float = 0.0
    stop_reason: str | None = None


class PrefetchIterator(Generic[T]):
    """Iterator over placed batches, which a thread prepares ahead of their use.

    At most ``prefetch`` batches are placed and not yet taken, and at most ``limit`` are
    ever read, so that an iterator handed to two of these in turn loses none between
    them. An error in the data, in a check or in ``place`` is raised from the iteration,
    where its batch would have come, with its own traceback.

    Args:
        data: The batches: an iterable, or an iterator, perhaps resumable.
        place: Puts one host batch on the devices. Called on the thread, where context
            managers of JAX have no effect; it must not communicate between processes,
            since the step may do so at the same time.
        limit: How many batches are needed; ``None`` takes all there are.
        skip: Batches to drop first if there is no ``state`` to restore.
        state: Position to restore, from `PlacedBatch.state`.
        prefetch: Batches placed ahead. 0 does all work in the caller's thread.
        uniform: Whether structure, shapes and dtypes must stay the same.
        first_step: Steps done before the first batch, for messages; default ``skip``.
        agreement: Compares each batch with those of other processes; ``None`` with one.

    Raises:
        DataError: If a batch, or the data itself, is not made of usable arrays.
        BatchShapeError: If rows disagree, or a shape changes under ``uniform``.
        DataExhaustedError: If the data ends before ``limit`` batches; at once if it is
            a list or tuple and there is no ``agreement``.

    Example:
        >>> batches = [{"x": np.full((4, 2), i, np.float32)} for i in range(3)]
        >>> with PrefetchIterator(batches, jax.device_put, limit=2) as placed:
        ...     [(item.num_rows, float(item.batch["x"][0, 0])) for item in placed]
        [(4, 0.0), (4, 1.0)]
    """

    def __init__(
        self,
        data: Iterable[Any],
        place: Callable[[Any], T],
        *,
        limit: int | None = None,
        skip: int = 0,
        state: Any = None,
        prefetch: int = 2,
        uniform: bool = True,
        first_step: int | None = None,
        agreement: BatchAgreement | None = None,
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}. It must be 0 or more.")
        stop = threading.Event()
        iterator, skip_now = _open(data, skip, state)
        source = _Source(
            iterator=iterator,
            place=place,
            limit=limit,
            skip=skip_now,
            first_step=skip if first_step is None else first_step,
            uniform=uniform,
            data=data,
            stop=stop,
            agreement=agreement,
        )
        if agreement is None:  # else all processes find out together
            source.check_length()
        items = source.items()
        reader = _Reader(items, prefetch, stop) if prefetch else None
        self._items: Iterator[PlacedBatch[T]] = reader or items
        # Neither the thread nor the source refers to this object: an iterator that is
        # dropped halfway is collected, and its thread ends.
        self._finalizer = weakref.finalize(self, reader.close if reader else stop.set)

    def __iter__(self) -> PrefetchIterator[T]:
        return self

    def __next__(self) -> PlacedBatch[T]:
        if not self._finalizer.alive:
            raise StopIteration
        start = time.perf_counter()
        item = next(self._items)
        waited = time.perf_counter() - start
        return dataclasses.replace(item, wait_seconds=waited)

    def close(self) -> None:
        """Stops the thread and drops the batches that were placed ahead."""
        self._finalizer()

    def __enter__(self) -> PrefetchIterator[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_data(data: object) -> None:
    """Checks that data is an iterable of batches.

    Raises:
        DataError: If it is not; it names its type.
    """
    if isinstance(data, Mapping | str | bytes | np.ndarray | jax.Array):
        raise DataError(
            f"Data is one {type(data).__name__}. It must be an iterable of batches; "
            "pass `[batch]` for a single one."
        )
    if not isinstance(data, Iterable):
        raise DataError(
            f"Data of type {type(data).__name__} cannot be iterated over. It must be "
            "an iterable of batches, for instance a list, an object with `__iter__`, "
            "or a Grain dataset."
        )


def _open(data: Any, skip: int, state: Any) -> tuple[Iterator[Any], int]:
    """Returns an iterator, at its restored position if it can be, and what to skip."""
    check_data(data)
    iterator: Iterator[Any] = iter(data)  # resumable, though the data may not be
    if state is not None and isinstance(iterator, Resumable):
        iterator.set_state(decode_state(state))
        return iterator, 0
    if state is not None:
        _warn(
            "The checkpoint holds the position of a resumable iterator, but the data "
            f"is now a {type(data).__name__} without `get_state` and `set_state`. "
            f"Its first {skip} batches are skipped instead."
        )
    elif skip and is_one_shot(data):
        _warn(
            f"Data is a one-shot iterator ({type(data).__name__}), whose position "
            f"cannot be restored: its next {skip} batches are skipped, which is right "
            "only if it is at its beginning. Pass an object whose `__iter__` "
            "starts again, or a Grain dataset."
        )
    return iterator, skip


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source(Generic[T]):
    """Reads, checks and places batches, in the thread that iterates over `items`."""

    iterator: Iterator[Any]
    place: Callable[[Any], T]
    limit: int | None
    skip: int
    first_step: int
    uniform: bool
    data: Any
    stop: threading.Event
    agreement: BatchAgreement | None

    def check_length(self) -> None:
        """Refuses a list that is too short before its first batch is used."""
        if self.limit is None or not isinstance(self.data, list | tuple):
            return
        if len(self.data) < self.skip + self.limit:
            skipped = min(self.skip, len(self.data))
            raise self._exhausted(skipped, len(self.data) - skipped)

    def items(self) -> Iterator[PlacedBatch[Any]]:
        for done in range(self.skip):
            if self.stop.is_set():  # skipping may take minutes
                return
            if next(self.iterator, _END) is _END:
                raise self._exhausted(done, 0)
        first: Signature | None = None
        count = 0
        while self.limit is None or count < self.limit:
            batch = next(self.iterator, _END)
            index = self.first_step + count
            num_rows, stop_reason = self._check(batch, index, count)
            if stop_reason is not None:
                none = PlacedBatch(batch=None, num_rows=0, state=None)
                yield dataclasses.replace(none, stop_reason=stop_reason)
                return
            if batch is _END:
                if self.limit is None:
                    return
                raise self._exhausted(self.skip, count)
            if self.uniform:
                first = first or batch_signature(batch)
                check_same(batch, first, index=index)
            # Now, not when the batch is used: the iterator is ahead of its use by then.
            state = None
            if isinstance(self.iterator, Resumable):
                state = encode_state(self.iterator.get_state())
            # No local name for the placed batch: this frame would keep its device
            # memory until the next one is read.
            yield PlacedBatch(batch=self.place(batch), num_rows=num_rows, state=state)
            count += 1

    def _check(self, batch: Any, index: int, count: int) -> tuple[int, str | None]:
        """Returns the rows of a batch that all processes can use, or why they stop."""
        num_rows, problem = 0, None
        if batch is not _END:
            try:
                num_rows = check_batch(batch, index=index)
            except DataError as error:
                if self.agreement is None:
                    raise
                problem = error  # raised once the others know of it
        if self.agreement is None:
            return num_rows, None
        usable = batch is not _END and problem is None
        stop_reason = self.agreement.check(
            batch_signature(batch) if usable else None,
            problem,
            index=index,
            num_read=self.skip + count,
        )
        return num_rows, stop_reason

    def _exhausted(self, skipped: int, count: int) -> DataExhaustedError:
        last = "" if self.limit is None else f" of {self.first_step + self.limit}"
        used_up = (
            " It is an iterator, which may have been read before."
            if skipped + count == 0 and is_one_shot(self.data)
            else ""
        )
        return DataExhaustedError(
            f"Data ended before step {self.first_step + count + 1}{last}: "
            f"{type(self.data).__name__} gave {skipped + count} batches here, "
            f"{skipped} of them skipped to resume.{used_up} Every step needs a batch. "
            + _REPEAT_HINT
        )


class _Reader(Generic[T]):
    """Reads an iterator on a thread, at most ``size`` elements ahead of their use.

    An error in the iterator is raised where its element would have come, with its own
    traceback.

    Args:
        items: The iterator.
        size: Elements read and not yet taken, 1 or more.
        stop: Set when the thread must end; ``items`` may watch it.
    """

    def __init__(self, items: Iterator[T], size: int, stop: threading.Event) -> None:
        # Permits before reading, rather than a bounded queue: a queue of `size` has
        # one element more in the hands of the thread that waits to put it.
        self._free = threading.Semaphore(size)
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = stop
        self._thread = threading.Thread(
            target=_fill,
            args=(items, self._free, self._ready, stop),
            name="nnx_parallel.prefetch",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        found = self._ready.get()
        if not isinstance(found, _End):
            self._free.release()
            return found
        self._stop.set()
        try:
            raise found.error or StopIteration
        finally:
            del found  # else the traceback and this frame keep each other alive

    def close(self) -> None:
        """Ends the thread and drops what it has read; safe to call in any thread."""
        self._stop.set()
        self._free.release()
        # The finalizer may run in the garbage collector, and so on the thread itself.
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            warnings.warn(
                f"The data did not return from `next` within {_CLOSE_SECONDS:.0f} s of "
                "being closed; its thread ends when it does.",
                UserWarning,
                stacklevel=2,
            )
        while not self._ready.empty():
            self._ready.get()
        self._ready.put(_End(None))  # for a consumer that waits on another thread


@dataclasses.dataclass(frozen=True)
class _End:
    error: BaseException | None


def _fill(
    items: Iterator[Any],
    free: threading.Semaphore,
    ready: queue.SimpleQueue[Any],
    stop: threading.Event,
) -> None:
    try:
        while free.acquire() and not stop.is_set():
            # No local name: it would keep an element alive after it was taken.
            ready.put(next(items))
    except StopIteration:
        ready.put(_End(None))
    except BaseException as error:
        ready.put(_End(error))
