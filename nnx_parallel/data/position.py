"""Data as a run reads it: passes, one-shot iterators, and saved positions."""

import base64
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from nnx_parallel.data.batches import copy_if_writeable
from nnx_parallel.data.rows import LastBatch, SmallerBatches, rows_at_ends
from nnx_parallel.errors import DataError, warn_user

# The state of a Grain `DataLoader` is bytes; the state of a Grain dataset is a dict
# (docs/library-notes.md, "Grain").
_MARKERS = ({"bytes"}, {"dict"})


@runtime_checkable
class Resumable(Protocol):
    """An iterator that can tell its position and return to it."""

    def get_state(self) -> Any:
        """Returns the position: ``bytes``, or a value that JSON can hold."""

    def set_state(self, state: Any) -> None:
        """Moves to a position that ``get_state`` returned."""


@dataclass(frozen=True)
class StateDict:
    """The position of data that has ``state_dict``, such as torchdata's loaders."""

    data: Any

    def get_state(self) -> Any:
        """Returns ``state_dict()``, or ``None`` if JSON cannot hold it."""
        state = self.data.state_dict()
        try:
            encode_state(state)
        except DataError:  # it holds tensors, for example: then batches are counted
            return None
        return state

    def set_state(self, state: Any) -> None:
        """Calls ``load_state_dict``."""
        self.data.load_state_dict(state)


def resumable_of(data: object) -> Resumable | None:
    """Returns the methods of data, or of an iterator, to get and set its position.

    Example:
        >>> resumable_of([1, 2]) is None
        True
    """
    if isinstance(data, Resumable):
        return data
    has_both = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
    return StateDict(data) if has_both else None


def is_one_shot(data: object) -> bool:
    """Returns True if reading uses up the data and its position cannot be restored.

    A generator, or another plain iterator, continues where its last reader stopped. A
    second reader in the same process must not skip batches again.

    Example:
        >>> batches = [np.zeros(4)]
        >>> is_one_shot(batches), is_one_shot(iter(batches))
        (False, True)
    """
    return isinstance(data, Iterator) and resumable_of(data) is None


def warn_of_one_shot(data: object) -> None:
    """Warns if a checkpoint cannot hold the position of this data."""
    if is_one_shot(data):
        warn_user(
            f"The run saves checkpoints, but its data is a one-shot iterator "
            f"({type(data).__name__}), whose position cannot be saved: a "
            "resumed run skips as many batches as were used, which is right only "
            "if the iterator then starts at its beginning. Pass an object whose "
            "`__iter__` starts again, or a Grain dataset.",
        )


def warn_of_skipping(data: object, num_batches: int) -> None:
    """Warns that the first batches of a one-shot iterator are skipped."""
    warn_user(
        f"Data is a one-shot iterator ({type(data).__name__}), whose position cannot "
        f"be restored: its next {num_batches} batches are skipped, which is right only "
        "if it is at its beginning. Pass an object whose `__iter__` starts again, or a "
        "Grain dataset.",
    )


class Repeated:
    """The first batches of data, repeated without end; a new loop starts over."""

    def __init__(self, data: Iterable[Any], count: int) -> None:
        first = itertools.islice(data, count)
        self._batches = [jax.tree.map(copy_if_writeable, batch) for batch in first]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._batches)


def num_batches_of(data: Any) -> int:
    """Returns the number of batches of one pass over data; -1 if it is unknown."""
    try:
        return len(data)
    except TypeError:  # it has no length, although its class may have `__len__`
        return -1


@dataclass(frozen=True)
class Epochs:
    """Some passes over sized data, one after the other.

    Each pass calls ``data.set_epoch(number)`` or ``data.sampler.set_epoch(number)``, if
    one of them exists. If data shuffles only by this number, a run resumes without
    reading the earlier passes. For Grain's datasets, Grain itself repeats the data,
    shuffles each pass and saves its position.

    Attributes:
        data: The data of one pass.
        count: Number of passes.
    """

    data: Any
    count: int

    def __post_init__(self) -> None:
        found = f"num_epochs={self.count} counts passes over the data, but"
        kind = type(self.data).__name__
        if isinstance(self.data, Iterator):
            raise DataError(
                f"{found} one pass uses up an iterator ({kind}). Pass the object that "
                "it was made from, such as a list or a DataLoader, or num_steps=."
            )
        if not 0 < self.num_batches < sys.maxsize:  # Grain's endless data
            length = "is empty" if self.num_batches == 0 else "has no length"
            raise DataError(
                f"{found} {kind} {length}. Pass data whose len() is the number of its "
                "batches, or num_steps= in place of num_epochs=."
            )

    @property
    def num_batches(self) -> int:
        """Number of batches of one pass; -1 if it is unknown."""
        return num_batches_of(self.data)

    @property
    def repeats(self) -> bool:
        """True if the data repeats itself, as Grain's does."""
        return hasattr(self.data, "to_iter_dataset") and hasattr(self.data, "repeat")

    @property
    def _set_epoch(self) -> Any:
        sampler = getattr(self.data, "sampler", None)
        return getattr(self.data, "set_epoch", getattr(sampler, "set_epoch", None))

    def num_steps(self, last_batch: LastBatch | None) -> int:
        """Returns the number of batches that a fit uses in all passes, if known."""
        num_rows, last = rows_at_ends(self.data)
        dropped = SmallerBatches(last_batch).drops(last, num_rows)
        return self.count * (self.num_batches - dropped)

    @property
    def is_numbered(self) -> bool:
        """True if a pass can be read without reading the earlier passes."""
        is_list = isinstance(self.data, list | tuple)
        return not self.repeats and (self._set_epoch is not None or is_list)

    def begin(self, epoch: int) -> None:
        """Tells data that shuffles by pass number which pass begins."""
        if self._set_epoch is not None:
            self._set_epoch(epoch)


_returned: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
_newest: list[Any] = [None, deque()]


def returned_batches(data: Iterator[Any]) -> deque[Any]:
    """Returns batches read from a one-shot iterator but not used, for its next reader.

    Example:
        >>> batches = (x for x in ())
        >>> returned_batches(batches) is returned_batches(batches)
        True
    """
    try:
        return _returned.setdefault(data, deque())
    except TypeError:
        # `zip`, `map` and others do not allow weak references, so only the newest is
        # kept.
        if _newest[0] is not data:
            _newest[:] = data, deque()
        return _newest[1]


def encode_state(state: Any) -> Any:
    """Returns a position as values that JSON can hold; `decode_state` reverses it.

    ``bytes`` become ``{"bytes": base64}``. NumPy numbers become Python numbers, and
    tuples and arrays become lists; `decode_state` leaves these as they are.

    Raises:
        DataError: If JSON cannot hold a value, or a key is not a string.

    Example:
        >>> encode_state({"next_index": np.int64(3), "rng": b"abc"})
        {'next_index': 3, 'rng': {'bytes': 'YWJj'}}
    """
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode("ascii")}
    if isinstance(state, np.generic | np.ndarray):  # JSON supports neither
        return encode_state(state.tolist())
    if isinstance(state, list | tuple):
        return [encode_state(value) for value in state]
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        encoded = {key: encode_state(value) for key, value in state.items()}
        # If a user's dict looks like one of our markers, a marker is added.
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
