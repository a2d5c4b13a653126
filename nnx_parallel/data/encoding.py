"""The position of a resumable iterator, as JSON can hold it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx_parallel.errors import DataError

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
