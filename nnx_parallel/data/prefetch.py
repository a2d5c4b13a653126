"""Reads, checks and places batches on a thread, before the steps that need them."""

import copy
import dataclasses
import inspect
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, Self, TypeVar

import jax
import numpy as np

from nnx_parallel.data.batches import (
    BatchAgreement,
    Mark,
    check_same,
    copy_if_writeable,
)
from nnx_parallel.data.position import is_one_shot, warn_of_skipping
from nnx_parallel.data.reading import Cursor, Position, Read
from nnx_parallel.data.rows import END, SmallerBatches, rows_at_ends, rows_of
from nnx_parallel.errors import DataError, DataExhaustedError, warn_user

T = TypeVar("T")

_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedBatch(Position, Generic[T]):
    """A batch on the devices, and its place in the data.

    Attributes:
        batch: The batch as ``place`` returned it.
        wait_seconds: Seconds that the consumer waited for this batch.
        read_seconds: Seconds in which the batch was read, without the wait for the
            batches of other processes.
        stop_reason: Why all processes stop before this batch; ``batch`` is then
            ``None``.
        saves: True if the step of this batch is saved, because the interval between
            saves has passed.
    """

    batch: T
    wait_seconds: float = 0.0
    read_seconds: float = 0.0
    stop_reason: str | None = None
    saves: bool = False


@dataclasses.dataclass(eq=False, repr=False)
class PrefetchIterator(Iterator[PlacedBatch[T]]):
    """Iterator over placed batches, which a thread prepares while the step runs.

    At most ``prefetch`` batches are placed but not yet taken, and at most ``limit`` are
    read in all. If a one-shot iterator has given batches that are not taken, they are
    kept on the host for the next ``PrefetchIterator`` that reads it: no batch is lost
    between two fits. An error in the data, in a check or in ``place`` is raised from
    the iteration, in place of its batch and with its traceback. If the data is read in
    passes (`Epochs`), it may end before the limit.

    Attributes:
        data: The batches: pytrees of NumPy arrays. Dim 0 is the rows of the global
            batch or of this process's share. The data is an iterable, which is
            fast-forwarded on resume, or a `Resumable` iterator such as Grain's. It may
            also be a `Cursor`, which knows its place and keeps batches that are read
            but not taken.
        place: Puts one host batch on the devices. It is called on the thread, where
            context managers of JAX have no effect. It must not communicate between
            processes, because the step may do so at the same time.
        limit: Number of batches that are needed; ``None`` takes all batches.
        skip: Number of batches to drop first, if there is no ``state`` to restore.
        state: Position to restore, from `PlacedBatch.state`.
        prefetch: Number of batches placed ahead. With 0, all work is done in the
            caller's thread.
        uniform: True if structure, shapes and dtypes must be the same for all batches.
        smaller: The rule for a batch of fewer rows.
        first_step: Steps done before the first batch, for messages; by default
            ``skip``.
        agreement: Compares each batch with other processes' batches.

    Raises:
        DataError: If a batch, or the data itself, does not consist of usable arrays.
        BatchShapeError: If numbers of rows differ, or if a shape changes under
            ``uniform``.
        DataExhaustedError: If the data ends before ``limit`` batches. For a list or
            tuple and a single process, this is raised immediately.

    Example:
        >>> batches = [{"x": np.full((4, 2), i, np.float32)} for i in range(3)]
        >>> with PrefetchIterator(batches, jax.device_put, limit=2) as placed:
        ...     [(item.num_rows, float(item.batch["x"][0, 0])) for item in placed]
        [(4, 0.0), (4, 1.0)]
    """

    data: Iterable[Any] | Cursor
    place: Callable[[Any], T]
    _: dataclasses.KW_ONLY
    limit: int | None = None
    skip: int = 0
    state: Any = None
    prefetch: int = 2
    uniform: bool = True
    smaller: SmallerBatches = dataclasses.field(default_factory=SmallerBatches)
    first_step: int | None = None
    agreement: BatchAgreement = dataclasses.field(default_factory=BatchAgreement)

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch}. It must be 0 or more.")
        self._first_step = self.skip if self.first_step is None else self.first_step
        self._dropped_before = self.smaller.num_dropped
        self._stop = threading.Event()
        self._open()
        # A copy of this object reads, so that neither the copy nor the thread refers to
        # this object. If the caller drops this object halfway, it is collected and the
        # thread ends.
        read = copy.copy(self)._read()
        self._items: Iterator[PlacedBatch[T]] = read
        close = self._stop.set
        if self.prefetch:
            end = partial(_stop_item, self.agreement.stop_reason)
            self._items = reader = _Reader(read, self.prefetch, self._stop, end)
            close = partial(_close, reader, self._cursor)
        self._finalizer = weakref.finalize(self, close)

    def __next__(self) -> PlacedBatch[T]:
        if not self._finalizer.alive:
            raise StopIteration
        start = time.perf_counter()
        item = next(self._items)
        # The caller who gives a cursor moves it after a batch is used.
        ahead = self._cursor.ahead
        if ahead and item.stop_reason is None and self.data is not self._cursor:
            ahead.popleft()
        return dataclasses.replace(item, wait_seconds=time.perf_counter() - start)

    def close(self) -> None:
        """Stops the thread; keeps the batches read ahead from a one-shot iterator."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self) -> None:
        """Opens the data, and restores its position if there is one to restore."""
        given = self.data
        if isinstance(given, Cursor):
            cursor = given
            self._keeps = cursor.is_kept and self.prefetch > 0
        else:
            check_data(given)
            cursor = Cursor(given, skips=self.skip)
            self._keeps = is_one_shot(given) and self.prefetch > 0
        self._cursor, cursor.is_started = cursor, True
        if self.state is not None:
            if cursor.resumable is not None:
                cursor.restore(self.state)
                cursor.skips = 0
            else:
                warn_user(
                    "The checkpoint holds the position of a resumable iterator, but "
                    f"the data is now a {type(cursor.data).__name__} without "
                    f"`get_state` and `set_state`. Its first {self.skip} batches are "
                    "skipped instead.",
                )
        elif given is not cursor and self.skip and is_one_shot(cursor.data):
            warn_of_skipping(cursor.data, self.skip)
        self._check_ends()

    def _check_ends(self) -> None:
        """Refuses a list that is too short, and a last batch of known, smaller size."""
        cursor, skipped, stop = self._cursor, 0, 0
        data: Any = cursor.data
        # Several processes compare their batches, and so find a missing one together.
        if cursor.epochs is None:
            if not isinstance(data, list | tuple) or jax.process_count() > 1:
                return
            if self.limit is not None:
                skipped = cursor.count_skipped()
                stop = skipped + self.limit
        is_reached = cursor.epochs is not None or stop >= len(data)
        num_rows, last = rows_at_ends(data) if is_reached else (0, 0)
        if stop > len(data) - (dropped := int(self.smaller.drops(last, num_rows))):
            raise self._exhausted(len(data), min(skipped, len(data)), dropped)
        self.smaller.check_last(last, num_rows, index=len(data) - 1)

    def _read(self) -> Iterator[PlacedBatch[Any]]:
        """Reads, checks and places batches, in the thread that iterates over them."""
        cursor, num_read, num_used, signature = self._cursor, 0, 0, None
        for read in cursor.skip():
            if self._stop.is_set():  # checked here, because skipping may take minutes
                return
            if read.batch is END:
                raise self._exhausted(num_read, num_read)
            num_read += 1
            # The next batch may be the last and smaller one of an epoch, so the number
            # of rows of a full batch is taken from a skipped batch.
            self.smaller.num_rows = self.smaller.num_rows or rows_of(read.batch)
        num_skipped, place = num_read, cursor.place
        # These variables cover the batches since the last used batch.
        dropped, marks, saves = list[Read](), list[Mark | None](), False
        while num_used != self.limit:
            began = time.perf_counter()
            read = cursor.take()
            read_seconds = time.perf_counter() - began
            if self._keeps:
                read = read._replace(batch=jax.tree.map(_freeze, read.batch))
            batch = self.smaller.resize(read.batch)
            index = self._first_step + num_used
            agreed = self.agreement.check(batch, index=index, num_read=num_read)
            num_rows, saves = agreed.num_rows, saves or agreed.saves
            if agreed.stop_reason is not None:
                self._keep(None, [*dropped, read])
                yield PlacedBatch(batch=None, stop_reason=agreed.stop_reason)
                return
            num_read += 1
            if batch is not END:
                place = cursor.place_after(read, place)
                cursor.compare_next(place.mark)
                marks.append(place.mark)
            if num_rows is None:
                self.smaller.count_dropped(is_first=num_used == 0)
                dropped.append(read)
                continue
            if batch is END:
                if self.limit is None or cursor.epochs is not None:
                    return
                raise self._exhausted(num_read - 1, num_skipped)
            num_used += 1
            if self.uniform:
                signature = check_same(batch, signature, index=index)
            # This comes after the checks: a refused batch is not returned to the data.
            self._keep(marks[0], [*dropped, read])
            dropped.clear()
            marks.clear()
            place = dataclasses.replace(
                place, num_rows=num_rows, num_dropped=self.smaller.num_dropped
            )
            # The placed batch gets no local name here, because this frame would keep
            # its device memory until the next batch is read.
            yield PlacedBatch(
                batch=self.place(batch),
                saves=saves,
                read_seconds=read_seconds,
                **vars(place),
            )
            saves = False

    def _keep(self, mark: Mark | None, reads: list[Read]) -> None:
        """Keeps a batch until it is used, with the smaller batches before it."""
        reads = reads if self._keeps else []
        if self._stop.is_set():
            # The thread may arrive here after `close`, if reading took long.
            self._cursor.returned.extend(reads)
        else:
            self._cursor.ahead.append((mark, reads))

    def _exhausted(
        self, num_read: int, skipped: int, dropped: int = 0
    ) -> DataExhaustedError:
        """Returns the error for data that ended; ``dropped`` batches were too small."""
        dropped = dropped or self.smaller.num_dropped - self._dropped_before
        step = self._first_step + num_read - skipped - dropped + 1
        last = "" if self.limit is None else f" of {self._first_step + self.limit}"
        used_up = ""
        if num_read == 0 and is_one_shot(self._cursor.data):
            used_up = " It is an iterator, which may have been read before."
        kind = type(self._cursor.data).__name__
        return DataExhaustedError(
            f"Data ended before step {step}{last}: {kind} gave "
            f"{num_read} batches here, {skipped} of them skipped to resume"
            f"{f', {dropped} left out as smaller' * bool(dropped)}.{used_up} "
            "Every step needs a batch. To repeat the data, pass an object whose "
            "`__iter__` never ends (`while True: yield from ...`), "
            "`itertools.cycle(batches)`, or a Grain dataset with `.repeat()`."
        )


def _close(reader: "_Reader[Any]", cursor: Cursor) -> None:
    reader.close()
    cursor.give_back()


def _freeze(x: Any) -> Any:
    """Returns a copy of an array if its owner could still write to it."""
    x = copy_if_writeable(x)
    if isinstance(x, np.ndarray):
        x.flags.writeable = False  # so that placing it does not copy it again
    return x


def _stop_item(stop_reason: Callable[[], str | None]) -> PlacedBatch[Any] | None:
    """Returns the item that ends the wait for data, if a single process is to stop."""
    # Several processes cannot stop here: they stop together, before a placed batch.
    reason = stop_reason() if jax.process_count() == 1 else None
    return None if reason is None else PlacedBatch(batch=None, stop_reason=reason)


class _Reader(Iterator[T]):
    """Reads an iterator on a thread, at most ``size`` elements ahead of their use.

    An error is raised in place of its element. If ``instead`` returns a value, the wait
    for an element ends with that value. The thread ends once ``stop`` is set.
    """

    def __init__(
        self,
        items: Iterator[T],
        size: int,
        stop: threading.Event,
        instead: Callable[[], T | None] = lambda: None,
    ) -> None:
        # The thread needs a permit before it reads. With a bounded queue, it would read
        # one more element and hold that element while it waits to put it.
        self._free = threading.Semaphore(size)
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop, self._instead = stop, instead
        self._thread = threading.Thread(
            target=self._fill, args=(items,), name="nnx_parallel.prefetch"
        )
        self._thread.daemon = True
        self._thread.start()

    def _fill(self, items: Iterator[T]) -> None:
        try:
            while self._free.acquire() and not self._stop.is_set():
                # A local name would keep an element alive after it was taken.
                self._ready.put(next(items))
        except BaseException as error:  # also `StopIteration`, as the last element
            self._ready.put(error)

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        found = None
        while found is None:
            try:
                found = self._ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if (instead := self._instead()) is not None:
                    return instead
        if not isinstance(found, BaseException):
            self._free.release()
            return found
        self._stop.set()
        try:
            raise found
        finally:
            del found  # otherwise the traceback and this frame keep each other alive

    def close(self) -> None:
        """Ends the thread and drops its batches; safe to call in any thread."""
        self._stop.set()
        self._free.release()
        # The finalizer may run in the garbage collector, and so in this very thread.
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            warn_user(
                f"The data did not return from `next` within {_CLOSE_SECONDS:.0f} s "
                "after it was closed; its thread ends once `next` returns.",
            )
        while not self._ready.empty():
            self._ready.get()
        self._ready.put(StopIteration())  # for a consumer that waits in another thread


def check_data(data: object) -> None:
    """Raises `DataError`, which names the type, unless data can be iterated over."""
    if isinstance(data, Mapping | str | bytes | np.ndarray | jax.Array):
        raise DataError(
            f"Data is one {type(data).__name__}. It must be an iterable of batches; "
            "pass `[batch]` for a single one."
        )
    if not isinstance(data, Iterable):
        is_maker = inspect.isgeneratorfunction(data)
        call = f" Call the function: {getattr(data, '__name__', '')}()." * is_maker
        raise DataError(
            f"Data of type {type(data).__name__} cannot be iterated over. It must be "
            "an iterable of batches, for instance a list, an object with `__iter__`, "
            f"or a Grain dataset.{call}"
        )
