"""Batches on their way to the devices: read, checked and placed ahead of the step."""

import copy
import dataclasses
import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, Self, TypeVar

import jax
import numpy as np

from nnx_parallel.data.batches import (
    BatchAgreement,
    check_same,
    copy_if_writeable,
)
from nnx_parallel.data.position import (
    Epochs,
    Resumable,
    decode_state,
    encode_state,
    is_one_shot,
    returned_batches,
)
from nnx_parallel.data.rows import DROPPED, END, SmallerBatches, rows_at_ends, rows_of
from nnx_parallel.errors import DataError, DataExhaustedError, warn_user

T = TypeVar("T")

_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 0.2


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
    num_rows: int = 0
    state: Any = None
    num_dropped: int = 0
    wait_seconds: float = 0.0
    stop_reason: str | None = None


@dataclasses.dataclass(eq=False, repr=False)
class PrefetchIterator(Iterator[PlacedBatch[T]]):
    """Iterator over placed batches, which a thread prepares while the step runs.

    At most ``prefetch`` batches are placed and not yet taken, and at most ``limit`` are
    ever read. Those of a one-shot iterator that are not taken are kept on the host for
    the next of these that reads it: none is lost between two fits. An error in the
    data, in a check or in ``place`` is raised from the iteration, where its batch would
    have come, with its own traceback. `Epochs` may end before the limit.

    Attributes:
        data: The batches: pytrees of NumPy arrays whose dim 0 is the rows, of the
            global batch or of this process's share. An iterable, which is
            fast-forwarded on resume, or a `Resumable` iterator, as Grain's are.
        place: Puts one host batch on the devices. Called on the thread, where context
            managers of JAX have no effect; it must not communicate between processes,
            since the step may do so at the same time.
        limit: How many batches are needed; ``None`` takes all there are.
        skip: Batches to drop first if there is no ``state`` to restore.
        state: Position to restore, from `PlacedBatch.state`.
        prefetch: Batches placed ahead. 0 does all work in the caller's thread.
        uniform: Whether structure, shapes and dtypes must stay the same.
        smaller: What happens then to a batch of fewer rows.
        first_step: Steps done before the first batch, for messages; default ``skip``.
        agreement: Compares each batch with those of other processes.

    Raises:
        DataError: If a batch, or the data itself, is not made of usable arrays.
        BatchShapeError: If rows disagree, or a shape changes under ``uniform``.
        DataExhaustedError: If the data ends before ``limit`` batches; at once if it is
            a list or tuple and there is one process.

    Example:
        >>> batches = [{"x": np.full((4, 2), i, np.float32)} for i in range(3)]
        >>> with PrefetchIterator(batches, jax.device_put, limit=2) as placed:
        ...     [(item.num_rows, float(item.batch["x"][0, 0])) for item in placed]
        [(4, 0.0), (4, 1.0)]
    """

    data: Iterable[Any]
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
        # A copy reads, so that neither it nor the thread refers to this object: an
        # iterator that is dropped halfway is collected, and its thread ends.
        read = copy.copy(self)._read()
        self._items: Iterator[PlacedBatch[T]] = read
        close = self._stop.set
        if self.prefetch:
            end = partial(_stop_item, self.agreement.stop_reason)
            self._items = reader = _Reader(read, self.prefetch, self._stop, end)
            close = partial(_close, reader, self._unused, self._returned)
        self._finalizer = weakref.finalize(self, close)

    def __next__(self) -> PlacedBatch[T]:
        if not self._finalizer.alive:
            raise StopIteration
        start = time.perf_counter()
        item = next(self._items)
        if self._unused and item.stop_reason is None:
            self._unused.popleft()
        return dataclasses.replace(item, wait_seconds=time.perf_counter() - start)

    def close(self) -> None:
        """Stops the thread; keeps what it has read ahead of a one-shot iterator."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self) -> None:
        """Moves an iterator to the position to restore, if it has one."""
        data: Any = self.data
        check_data(data)
        self._iterator: Iterator[Any] = iter(data)
        # On the host: read but not taken, and left by the last one that read the data.
        self._unused, self._returned = deque[Any](), deque[Any]()
        self._keeps = is_one_shot(data) and self.prefetch > 0
        if is_one_shot(data):
            self._returned = returned_batches(data)
            self._iterator = itertools.chain(_drain(self._returned), self._iterator)
        if self.state is not None:
            if isinstance(self._iterator, Resumable):  # though the data may not be
                self._iterator.set_state(decode_state(self.state))
                self.skip = 0
            else:
                warn_user(
                    "The checkpoint holds the position of a resumable iterator, but "
                    f"the data is now a {type(data).__name__} without `get_state` and "
                    f"`set_state`. Its first {self.skip} batches are skipped instead.",
                )
        elif self.skip and is_one_shot(data):
            warn_user(
                f"Data is a one-shot iterator ({type(data).__name__}), whose position "
                f"cannot be restored: its next {self.skip} batches are skipped, which "
                "is right only if it is at its beginning. Pass an object whose "
                "`__iter__` starts again, or a Grain dataset.",
            )
        self._check_ends()

    def _check_ends(self) -> None:
        """Refuses lists that are too short, and last batches, where these are known."""
        data, stop = self.data, 0
        if isinstance(data, Epochs):
            data = data.data  # all of it is read
        # With several processes all find out together.
        elif not isinstance(data, list | tuple) or jax.process_count() > 1:
            return
        elif self.limit is not None:
            stop = self.skip + self.limit
        is_reached = data is not self.data or stop >= len(data)
        num_rows, last = rows_at_ends(data) if is_reached else (0, 0)
        if stop > len(data) - (dropped := int(self.smaller.drops(last, num_rows))):
            raise self._exhausted(len(data), dropped)
        self.smaller.check_last(last, num_rows, index=len(data) - 1)

    def _read(self) -> Iterator[PlacedBatch[Any]]:
        """Reads, checks and places batches, in the thread that iterates over them."""
        for done in range(self.skip):
            if self._stop.is_set():  # skipping may take minutes
                return
            batch = next(self._iterator, END)
            if batch is END:
                raise self._exhausted(done)
            # The batch that is read first may be the last, smaller one of an epoch.
            self.smaller.num_rows = self.smaller.num_rows or rows_of(batch)
        first, num_read, num_used = None, self.skip, 0
        while num_used != self.limit:
            batch = self.smaller.resize(next(self._iterator, END))
            index = self._first_step + num_used
            num_rows, stop_reason = self.agreement.check(
                batch, index=index, num_read=num_read
            )
            if stop_reason is not None:
                self._keep(batch)
                yield PlacedBatch(batch=None, stop_reason=stop_reason)
                return
            num_read += 1
            if num_rows is None:
                self.smaller.count_dropped(is_first=num_used == 0)
                continue
            if batch is END:
                if self.limit is None or isinstance(self.data, Epochs):
                    return
                raise self._exhausted(num_read - 1)
            num_used += 1
            if self.uniform:
                first = check_same(batch, first, index=index)
            # Now, not when the batch is used: the iterator is ahead of its use by then.
            state = None
            if isinstance(self._iterator, Resumable):
                state = encode_state(self._iterator.get_state())
            # Not before: one that is refused is not met again.
            batch = self._keep(batch)
            # No local name for the placed batch: this frame would keep its device
            # memory until the next one is read.
            yield PlacedBatch(
                batch=self.place(batch),
                num_rows=num_rows,
                state=state,
                num_dropped=self.smaller.num_dropped,
            )

    def _keep(self, batch: Any) -> Any:
        """The batch, which stays as it is until it is taken, or read once more."""
        if self._keeps and batch is not END and batch is not DROPPED:
            batch = jax.tree.map(_freeze, batch)
            # The thread may come here after `close`, from data that took long.
            (self._returned if self._stop.is_set() else self._unused).append(batch)
        return batch

    def _exhausted(self, num_read: int, dropped: int = 0) -> DataExhaustedError:
        """The error of data that ends, with as many of its batches ``dropped``."""
        dropped = dropped or self.smaller.num_dropped - self._dropped_before
        skipped = min(self.skip, num_read)
        step = self._first_step + num_read - skipped - dropped + 1
        last = "" if self.limit is None else f" of {self._first_step + self.limit}"
        used_up = ""
        if num_read == 0 and is_one_shot(self.data):
            used_up = " It is an iterator, which may have been read before."
        return DataExhaustedError(
            f"Data ended before step {step}{last}: {type(self.data).__name__} gave "
            f"{num_read} batches here, {skipped} of them skipped to resume"
            f"{f', {dropped} left out as smaller' * bool(dropped)}.{used_up} "
            "Every step needs a batch. To repeat the data, pass an object whose "
            "`__iter__` never ends (`while True: yield from ...`), "
            "`itertools.cycle(batches)`, or a Grain dataset with `.repeat()`."
        )


def _close(reader: "_Reader[Any]", unused: deque[Any], returned: deque[Any]) -> None:
    reader.close()
    returned.extendleft(reversed(unused))
    unused.clear()


def _freeze(x: Any) -> Any:
    """A copy of an array that its owner could still write to."""
    x = copy_if_writeable(x)
    if isinstance(x, np.ndarray):
        x.flags.writeable = False  # so that it is not copied once more to be placed
    return x


def _drain(batches: deque[Any]) -> Iterator[Any]:
    while batches:
        yield batches.popleft()


def _stop_item(stop_reason: Callable[[], str | None]) -> PlacedBatch[Any] | None:
    """Ends the wait for slow data, if the only process is to stop."""
    # Several processes stop together, before a batch that all of them have.
    reason = stop_reason() if jax.process_count() == 1 else None
    return None if reason is None else PlacedBatch(batch=None, stop_reason=reason)


class _Reader(Iterator[T]):
    """Reads an iterator on a thread, at most ``size`` elements ahead of their use.

    An error is raised where its element would have come. What ``instead`` returns, if
    anything, ends the wait for an element. The thread ends once ``stop`` is set.
    """

    def __init__(
        self,
        items: Iterator[T],
        size: int,
        stop: threading.Event,
        instead: Callable[[], T | None] = lambda: None,
    ) -> None:
        # Permits before reading, rather than a bounded queue: a queue of `size` has
        # one element more in the hands of the thread that waits to put it.
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
                # No local name: it would keep an element alive after it was taken.
                self._ready.put(next(items))
        except BaseException as error:  # `StopIteration` too: the last element
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
            del found  # else the traceback and this frame keep each other alive

    def close(self) -> None:
        """Ends the thread and drops what it has read; safe to call in any thread."""
        self._stop.set()
        self._free.release()
        # The finalizer may run in the garbage collector, and so on the thread itself.
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            warn_user(
                f"The data did not return from `next` within {_CLOSE_SECONDS:.0f} s of "
                "being closed; its thread ends when it does.",
            )
        while not self._ready.empty():
            self._ready.get()
        self._ready.put(StopIteration())  # for a consumer that waits on another thread


def check_data(data: object) -> None:
    """Checks that data is an iterable of batches; a `DataError` names its type."""
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
