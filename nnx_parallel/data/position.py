"""Position of a run in its data, so that a resumed run sees the next batch."""

import base64
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import jax
import numpy as np

from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import DataError

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


@dataclass
class DataState:
    """Position in the data of a run.

    Batches are counted from the step at which a run began to read its present data. A
    later fit in the same process may bring other data, which begins at its start.

    Attributes:
        first_step: Step at which the present data began.
        state: `PlacedBatch.state` of the newest batch that a step has used.
        num_steps: Last step of the fit that reads the present data; 0 if unknown.
    """

    first_step: int = 0
    state: Any = None
    num_steps: int = 0
    _data: Any = field(default=None, init=False)
    _is_read: bool = field(default=False, init=False)

    def pass_over(self, data: Any, num_steps: int) -> None:
        """Records that a fit of ``data`` to ``num_steps`` was done before this process.

        The position is in this data unless a later fit, to more steps, has moved it.
        """
        is_last = num_steps > self.first_step and num_steps >= self.num_steps
        if self._data is None and is_last:
            self._data = data

    def open(self, data: Any, step: int, num_steps: int) -> tuple[int, Any]:
        """Batches to skip for a fit that begins at ``step``, and a state to restore."""
        self.num_steps = num_steps
        # By identity: equal data may be read from the start on purpose.
        if self._data is not None and self._data is not data:
            self.first_step, self.state = step, None
        # A generator that an earlier fit of this process has read is at the next batch.
        continues = self._is_read and self._data is data and is_one_shot(data)
        self._data, self._is_read = data, True
        return 0 if continues else step - self.first_step, self.state

    def to_json(self) -> dict[str, Any]:
        """The position as JSON can hold it. All processes must call it."""
        # Each process reads files of its own: the positions differ, and all are saved.
        states = allgather_object("position in the data", self.state)
        counts = {"first_step": self.first_step, "num_steps": self.num_steps}
        return counts | {"states": states}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """The position that was saved; the start if ``saved`` is empty.

        Warns if an iterator's position was saved by another number of processes.

        Raises:
            DataError: If `to_json` cannot have made it.
        """
        first_step, states = saved.get("first_step", 0), saved.get("states", [None])
        num_steps = saved.get("num_steps", 0)
        numbers = isinstance(first_step, int) and isinstance(num_steps, int)
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
            warnings.warn(
                f"The position in the data was saved by {len(states)} processes and "
                f"cannot be restored on {jax.process_count()}. The batches used so far "
                "are skipped instead, which is right if each process still gives its "
                "share of the same global batches.",
                stacklevel=2,
            )
        return cls(first_step, state, num_steps)


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
