"""Position of a run in its data, so that a resumed run sees the next batch."""

import base64
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import jax
import numpy as np

from nnx_parallel.data.batches import copy_if_writeable
from nnx_parallel.data.rows import LastBatch, SmallerBatches, rows_at_ends
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import DataError, warn_user

# The state of a Grain `DataLoader` is bytes, that of a dataset a dict
# (docs/library-notes.md, "Grain").
_MARKERS = ({"bytes"}, {"dict"})


@runtime_checkable
class Resumable(Protocol):
    """An iterator that can tell its position and return to it."""

    def get_state(self) -> Any:
        """Returns the position: ``bytes``, or what JSON can hold."""

    def set_state(self, state: Any) -> None:
        """Moves to a position that ``get_state`` returned."""


def is_one_shot(data: object) -> bool:
    """True if reading the data uses it up and its position cannot be restored.

    A generator or another plain iterator is where its last reader left it: a second
    reader in the same process must not skip again.

    Example:
        >>> batches = [np.zeros(4)]
        >>> is_one_shot(batches), is_one_shot(iter(batches))
        (False, True)
    """
    return isinstance(data, Iterator) and not isinstance(data, Resumable)


def warn_of_one_shot(data: object) -> None:
    """Warns of data whose position a checkpoint cannot hold."""
    if is_one_shot(data):
        warn_user(
            f"The run saves checkpoints, but its data is a one-shot iterator "
            f"({type(data).__name__}), whose position cannot be saved: a "
            "resumed run skips as many batches as were used, which is right only "
            "if the iterator then starts at its beginning. Pass an object whose "
            "`__iter__` starts again, or a Grain dataset.",
        )


class Repeated:
    """The first batches of data, over and over; can be iterated over again."""

    def __init__(self, data: Iterable[Any], count: int) -> None:
        first = itertools.islice(data, count)
        self._batches = [jax.tree.map(copy_if_writeable, batch) for batch in first]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._batches)


@dataclass(frozen=True)
class Epochs:
    """Some passes over sized data, one after the other.

    Each pass calls ``data.set_epoch(number)``, or that of ``data.sampler``, if there is
    one: data that shuffles by this number alone is resumed without reading the passes
    before. Grain repeats its own: it shuffles each pass and saves its position.

    Attributes:
        data: The data of one pass.
        count: Number of passes.
        first: The pass to begin with.
    """

    data: Any
    count: int
    first: int = 0

    def __post_init__(self) -> None:
        found = f"num_epochs={self.count} counts passes over the data, but"
        kind = type(self.data).__name__
        if isinstance(self.data, Iterator):
            raise DataError(
                f"{found} one pass uses up an iterator ({kind}). Pass what it was made "
                "of, such as a list or a DataLoader, or num_steps=."
            )
        if not 0 < self.num_batches < sys.maxsize:  # of Grain's endless datasets
            length = "is empty" if self.num_batches == 0 else "has no length"
            raise DataError(
                f"{found} {kind} {length}. Pass data with a len(), the number of its "
                "batches, or num_steps= in place of num_epochs=."
            )

    @property
    def num_batches(self) -> int:
        """Batches of one pass; -1 if its length is not known."""
        try:
            return len(self.data)
        except TypeError:  # no length, or one that only some objects of a class have
            return -1

    @property
    def _repeats(self) -> bool:
        return hasattr(self.data, "to_iter_dataset") and hasattr(self.data, "repeat")

    @property
    def _set_epoch(self) -> Any:
        sampler = getattr(self.data, "sampler", None)
        return getattr(self.data, "set_epoch", getattr(sampler, "set_epoch", None))

    def num_steps(self, last_batch: LastBatch | None) -> int:
        """Batches of all passes that a fit uses, as far as is known before."""
        num_rows, last = rows_at_ends(self.data)
        dropped = SmallerBatches(last_batch).drops(last, num_rows)
        return self.count * (self.num_batches - dropped)

    def after(self, num_read: int) -> tuple[Self, int]:
        """All that is left to read, and how many batches of it were read before."""
        is_known = self._set_epoch is not None or isinstance(self.data, list | tuple)
        if self._repeats or not is_known:
            return self, num_read
        first, rest = divmod(num_read, self.num_batches)
        return replace(self, first=first), rest

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data.repeat(self.count)) if self._repeats else self._passes()

    def _passes(self) -> Iterator[Any]:
        for epoch in range(self.first, self.count):
            if self._set_epoch is not None:
                self._set_epoch(epoch)
            yield from self.data


_returned: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
_newest: list[Any] = [None, deque()]


def returned_batches(data: Iterator[Any]) -> deque[Any]:
    """Batches that were read of a one-shot iterator and not used, for its next reader.

    Example:
        >>> batches = (x for x in ())
        >>> returned_batches(batches) is returned_batches(batches)
        True
    """
    try:
        return _returned.setdefault(data, deque())
    except TypeError:
        # `zip`, `map` and the like take no weak reference: only the newest is known.
        if _newest[0] is not data:
            _newest[:] = data, deque()
        return _newest[1]


_COUNTS = ("first_step", "num_steps", "num_dropped", "num_rows")
"""The fields of a `DataState` in a checkpoint; the iterators' states are apart."""


@dataclass
class DataState:
    """Position in the data of a run.

    Batches are counted from the step at which a run began to read its present data. A
    later fit in the same process may bring other data, which begins at its start.

    Attributes:
        first_step: Step at which the present data began.
        state: `PlacedBatch.state` of the newest batch that a step has used.
        num_steps: Last step of the fit that reads the present data; 0 if unknown.
        num_dropped: Smaller batches of the present data that no step has used.
        num_rows: Rows of a batch in this process; 0 if unknown.
    """

    first_step: int = 0
    state: Any = None
    num_steps: int = 0
    num_dropped: int = 0
    num_rows: int = 0
    _passed: int = field(default=0, init=False)  # last step of data before the present
    _data: Any = field(default=None, init=False)
    _is_read: bool = field(default=False, init=False)

    def pass_over(self, data: Any, num_steps: int) -> None:
        """Records that a fit of ``data`` to ``num_steps`` was done before this process.

        The position is in this data unless a later fit, to more steps, has moved it.
        """
        is_last = num_steps > self.first_step and num_steps >= self.num_steps
        if self._data is None and is_last:
            self._data = data
        self._passed = num_steps

    def last_step(self, data: Any, num_steps: int, step: int) -> int:
        """The step at which ``num_steps`` of ``data`` are done, from its first one.

        ``step`` is the present one, at which other data than the newest would begin.
        """
        if self._data is not None:
            return num_steps + (self.first_step if self._data is data else step)
        # A resumed program comes by the data that it had read before the present one.
        earlier = self._passed + num_steps
        return earlier if earlier <= self.first_step else self.first_step + num_steps

    def advance(self, state: Any, num_dropped: int, num_rows: int) -> None:
        """Moves on behind a batch; see the attributes of `PlacedBatch`."""
        self.state, self.num_dropped, self.num_rows = state, num_dropped, num_rows

    def open(self, data: Any, step: int, num_steps: int) -> tuple[int, Any]:
        """Batches to skip for a fit that begins at ``step``, and a state to restore."""
        self.num_steps = num_steps
        # By identity: equal data may be read from the start on purpose.
        if self._data is not None and self._data is not data:
            self.first_step, self.state = step, None
            self.num_dropped = self.num_rows = 0
        # A generator that an earlier fit of this process has read is at the next batch.
        continues = self._is_read and self._data is data and is_one_shot(data)
        self._data, self._is_read = data, True
        num_read = step - self.first_step + self.num_dropped
        return 0 if continues else num_read, self.state

    def to_json(self) -> dict[str, Any]:
        """The position as JSON can hold it. All processes must call it."""
        # Each process reads files of its own: the positions differ, and all are saved.
        states = allgather_object("position in the data", self.state)
        counts = {name: getattr(self, name) for name in _COUNTS}
        return counts | {"states": states}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """The position that was saved; the start if ``saved`` is empty.

        Warns if an iterator's position was saved by another number of processes.

        Raises:
            DataError: If `to_json` cannot have made it.
        """
        counts = {name: saved.get(name, 0) for name in _COUNTS}
        states = saved.get("states", [None])
        numbers = all(isinstance(count, int) for count in counts.values())
        if not numbers or not isinstance(states, list):
            raise DataError(
                f"The checkpoint's metadata gives the position in the data as "
                f"{dict(saved)}. It must hold first_step and num_steps, integers, and "
                "states, a list."
            )
        state = None
        if len(states) == jax.process_count():
            state = states[jax.process_index()]
        # Batches are counted alike by any number of processes; iterators are not.
        elif any(other is not None for other in states):
            warn_user(
                f"The position in the data was saved by {len(states)} processes and "
                f"cannot be restored on {jax.process_count()}. The batches used so far "
                "are skipped instead, which is right if each process still gives its "
                "share of the same global batches.",
            )
        if state is None:  # then the batches are counted, and looked at, from the first
            counts["num_rows"] = 0
        return cls(state=state, **counts)


def encode_state(state: Any) -> Any:
    """Returns a position as JSON can hold it; `decode_state` reverses it.

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
    if isinstance(state, np.generic | np.ndarray):  # JSON knows neither
        return encode_state(state.tolist())
    if isinstance(state, list | tuple):
        return [encode_state(value) for value in state]
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        encoded = {key: encode_state(value) for key, value in state.items()}
        # A dict of the user's that looks like one of our markers is wrapped in one.
        return {"dict": encoded} if encoded.keys() in _MARKERS else encoded
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise DataError(
        f"`get_state` returned {state!r} of type {type(state).__name__} in its state. "
        "A position must be made of numbers, strings, bytes, None, lists, and dicts "
        "whose keys are strings."
    )


def decode_state(encoded: Any) -> Any:
    """Returns the position that `encode_state` encoded.

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
