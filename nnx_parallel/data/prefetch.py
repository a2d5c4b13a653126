"""An iterator read ahead on a thread, which ends with its reader.

The position of a resumable iterator, as JSON can hold it.

Batches on their way to the devices: pulled, checked and placed ahead of the step.

Data is any iterable of pytrees of NumPy arrays, dim 0 being the rows: of the global
batch, or with several processes of this process's share. A thread pulls the next
batches and places them while the step runs, so that it never waits for a copy. A
*resumable* iterator (``get_state`` and ``set_state``, as Grain's have) hands its
position out with every batch; any other iterable is fast-forwarded on resume.
"""

from __future__ import annotations

import base64
import dataclasses
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from nnx_parallel.data.agreement import BatchAgreement, BatchStatus
from nnx_parallel.data.batches import (
    Signature,
    batch_signature,
    check_batch,
    check_same,
)
from nnx_parallel.errors import DataError, DataExhaustedError

_MARKERS = ({"bytes"}, {"dict"})


def encode_state(state: Any) -> Any:
    """Return a position as JSON can hold it; ``decode_state`` reverses it.

    ``bytes`` become ``{"bytes": base64}``, NumPy numbers Python's. Tuples and arrays
    become lists, and stay so.

    Raises:
        DataError: If JSON cannot hold a value, or a key is not a string.

    Example:
        >>> encode_state({"next_index": np.int64(3), "rng": b"abc"})
        {'next_index': 3, 'rng': {'bytes': 'YWJj'}}
    """
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode("ascii")}
    if isinstance(state, np.generic | np.ndarray):
        return encode_state(state.tolist())
    if isinstance(state, list | tuple):
        return [encode_state(value) for value in state]
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        encoded = {key: encode_state(value) for key, value in state.items()}
        return {"dict": encoded} if encoded.keys() in _MARKERS else encoded
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise DataError(
        f"`get_state` returned {state!r} of type {type(state).__name__} in its state. "
        "A position must be made of numbers, strings, bytes, None, lists, and dicts "
        "whose keys are strings."
    )


def decode_state(encoded: Any) -> Any:
    """Return the position that ``encode_state`` encoded.

    Example:
        >>> decode_state({"next_index": 3, "rng": {"bytes": "YWJj"}})
        {'next_index': 3, 'rng': b'abc'}
    """
    if isinstance(encoded, list):
        return [decode_state(value) for value in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if encoded.keys() == {"bytes"}:
        return base64.b64decode(encoded["bytes"])
    if encoded.keys() == {"dict"}:
        encoded = encoded["dict"]
    return {key: decode_state(value) for key, value in encoded.items()}


T = TypeVar("T")

_CLOSE_TIMEOUT_SECONDS = 5.0


class Prefetched(Generic[T]):
    """Reads an iterator on a thread, at most ``size`` elements ahead of their use.

    The thread refers to the queue, never to this object or its owner. An error in the
    iterator is raised where its element would have come, with its own traceback.

    Args:
        items: What to read.
        size: Elements read and not yet taken, 1 or more.
        stop: Set when the thread is to end; ``items`` may watch it.

    Example:
        >>> ahead = Prefetched(iter("abc"), 2, threading.Event())
        >>> list(ahead)
        ['a', 'b', 'c']
        >>> ahead.close()
    """

    def __init__(self, items: Iterator[T], size: int, stop: threading.Event) -> None:
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
        """End the thread and drop what it has read; safe to call in any thread."""
        self._stop.set()
        self._free.release()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            warnings.warn(
                "The data did not return from `next` within "
                f"{_CLOSE_TIMEOUT_SECONDS:.0f} s of being closed; its thread ends when "
                "it does.",
                UserWarning,
                stacklevel=2,
            )
        while not self._ready.empty():
            self._ready.get()
        self._ready.put(_End(None))


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


_END = object()
_REPEAT_HINT = (
    "To repeat the data, pass an object whose `__iter__` never ends "
    "(`while True: yield from ...`), `itertools.cycle(batches)`, "
    "or a Grain dataset with `.repeat()`."
)


@runtime_checkable
class Resumable(Protocol):
    """An iterator that can say where it is and go back there."""

    def get_state(self) -> Any:
        """Return the position: ``bytes``, or what JSON can hold."""
        ...

    def set_state(self, state: Any) -> None:
        """Move to a position that ``get_state`` returned."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedBatch(Generic[T]):
    """One placed batch.

    Attributes:
        batch: What ``place`` returned for the batch.
        num_rows: Rows of the global batch.
        state: The data's position after this batch, as JSON can hold it; ``None`` if
            the data is not resumable.
        wait_seconds: How long the consumer waited for this batch.
        stop_reason: Why all processes stop instead of using this batch, which is then
            none; or ``None``.
    """

    batch: T
    num_rows: int
    state: Any
    wait_seconds: float = 0.0
    stop_reason: str | None = None


class PrefetchIterator(Generic[T]):
    """Iterates over placed batches, which a thread prepares ahead of their use.

    At most ``prefetch`` batches are placed and not yet taken, and at most ``limit`` are
    ever pulled, so that an iterator handed to two feeds in turn loses none between
    them. An error in the data, in a check or in ``place`` is raised from the iteration,
    where its batch would have come, with its own traceback.

    Args:
        data: The batches: an iterable, or an iterator, perhaps resumable.
        place: Puts one host batch on the devices. Called on the feed's thread, where
            context managers of JAX do not reach; it must not communicate between
            processes, since the step may do so at the same time.
        limit: How many batches are needed; ``None`` takes all there are.
        skip: Batches to drop first if there is no ``state`` to restore.
        state: DataState to restore, from ``PlacedBatch.state``.
        prefetch: Batches placed ahead. 0 does all work in the caller's thread.
        uniform: Whether structure, shapes and dtypes must stay the same.
        first_step: Steps done before this feed, for messages; ``skip`` by default.
        agreement: Meets the other processes before each batch; ``None`` with one.

    Raises:
        DataError: If a batch, or the data itself, is not made of usable arrays.
        BatchShapeError: If rows disagree, or a shape changes under ``uniform``.
        DataExhaustedError: If the data ends before ``limit`` batches; at once if it is
            a list or tuple and there is no ``agreement``.

    Example:
        >>> batches = [{"x": np.full((4, 2), i, np.float32)} for i in range(3)]
        >>> with PrefetchIterator(batches, jax.device_put, limit=2) as feed:
        ...     [(item.num_rows, float(item.batch["x"][0, 0])) for item in feed]
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
        if agreement is None:
            source.check_length()
        items = source.items()
        ahead = Prefetched(items, prefetch, stop) if prefetch else None
        self._items: Iterator[PlacedBatch[T]] = items if ahead is None else ahead
        self._finalizer = weakref.finalize(self, ahead.close if ahead else stop.set)

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
        """Stop the thread and drop the batches that were placed ahead."""
        self._finalizer()

    def __enter__(self) -> PrefetchIterator[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def is_one_shot(data: object) -> bool:
    """Whether reading the data uses it up and its position cannot be restored.

    True of generators and other plain iterators. Such an object stands where its last
    reader left it: whoever reads on in the same process must not skip again.

    Example:
        >>> batches = [np.zeros(4)]
        >>> is_one_shot(batches), is_one_shot(iter(batches))
        (False, True)
    """
    return isinstance(data, Iterator) and not isinstance(data, Resumable)


def check_data(data: object) -> None:
    """Refuses what is no iterable of batches.

    Raises:
        DataError: Says what it is instead.
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
    """Return an iterator, at its restored position if it can be, and what to skip."""
    check_data(data)
    iterator: Iterator[Any] = iter(data)
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
            "only if it stands at its beginning. Pass an object whose `__iter__` "
            "starts again, or a Grain dataset."
        )
    return iterator, skip


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)


def _stop_item(reason: str) -> PlacedBatch[Any]:
    return PlacedBatch(batch=None, num_rows=0, state=None, stop_reason=reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source(Generic[T]):
    """Turns an open iterator into placed items, in the thread of whoever pulls."""

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

    def items(self) -> Iterator[PlacedBatch[T]]:
        """Yield placed items; no frame keeps a placed batch alive between pulls."""
        for done in range(self.skip):
            if self.stop.is_set():
                return
            if next(self.iterator, _END) is _END:
                raise self._exhausted(done, 0)
        first: Signature | None = None
        count = 0
        while self.limit is None or count < self.limit:
            batch = next(self.iterator, _END)
            index = self.first_step + count
            if self.agreement is not None:
                status = self._meet(self.agreement, batch, index)
                if status.stop_reason is not None:
                    yield _stop_item(status.stop_reason)
                    return
                self._check_status(status, count)
                status.check_batches(index)
            if batch is _END:
                if self.limit is None:
                    return
                raise self._exhausted(self.skip, count)
            state = None
            if isinstance(self.iterator, Resumable):
                state = encode_state(self.iterator.get_state())
            num_rows = check_batch(batch, index=index)
            if self.uniform:
                first = first or batch_signature(batch)
                check_same(batch, first, index=index)
            yield PlacedBatch(batch=self.place(batch), num_rows=num_rows, state=state)
            count += 1

    def _meet(self, agreement: BatchAgreement, batch: Any, index: int) -> BatchStatus:
        """Meets the others, with what is wrong here, so that nobody waits for it."""
        if batch is _END:
            return agreement.meet(None)
        try:
            check_batch(batch, index=index)
        except DataError as error:
            status = agreement.meet(None, str(error))
            if status.stop_reason is None:
                raise
            return status
        return agreement.meet(batch_signature(batch))

    def _check_status(self, status: BatchStatus, count: int) -> None:
        """Raises on all processes alike if the data has not ended on all of them."""
        if not status.ended or status.all_ended:
            return
        raise DataExhaustedError(
            f"Data of processes {status.ended} ended after {self.skip + count} "
            "batches; others have more. Every process must give its share of every "
            "batch: split the rows of each batch, or drop what does not divide."
        )

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
