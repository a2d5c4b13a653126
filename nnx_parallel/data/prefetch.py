"""An iterator read ahead on a thread, which ends with its reader."""

from __future__ import annotations

import dataclasses
import queue
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

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
