"""Processes compare what must be the same before it can do harm."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any

from nnx_parallel.distributed.messages import join
from nnx_parallel.distributed.runtime import process_index
from nnx_parallel.errors import DisagreementError

EXCHANGE_SECONDS = 1800.0
"""How long processes wait for one another where nothing shorter is said."""


def allgather_object(
    name: str, value: Any, timeout_seconds: float = EXCHANGE_SECONDS
) -> list:
    """Gives a value and returns those of all processes, by process.

    It runs beside the devices and may be called from any thread, as long as all
    processes exchange one name in the same order.

    Args:
        name: Of what is exchanged.
        value: What JSON can hold.
        timeout_seconds: How long to wait for the others.

    Raises:
        ProcessError: If some did not take part in time.

    Example:
        >>> allgather_object("seed", 3)
        [3]
    """
    return reserve_allgather(name, timeout_seconds)(value)


def reserve_allgather(
    name: str, timeout_seconds: float = EXCHANGE_SECONDS
) -> Callable[[Any], list]:
    """An exchange whose turn is taken now, and that is made later on another thread.

    Returns:
        `allgather_object` without the name. If a process never calls it, the others
        time out, but later exchanges of the name are not mixed up with this one.
    """
    line = join()
    if line is None:
        return lambda value: [value]
    key = line.reserve(name)
    return lambda value: line.exchange(key, value, timeout_seconds)


def check_consistent(what: str, fields: Mapping[str, Any]) -> None:
    """Checks that all processes hold the same values.

    Args:
        what: What the fields describe.
        fields: Values that JSON can hold, by name.

    Raises:
        DisagreementError: On all processes, if one differs from process 0. It names
            the process, the field and both values.
    """
    fields = json.loads(json.dumps(fields))
    text = json.dumps(fields, sort_keys=True)
    digests = allgather_object(
        f"digest of the {what}", hashlib.sha256(text.encode()).hexdigest()
    )
    if len(set(digests)) == 1:
        return
    # Whoever agrees with process 0 need not say more: fields may be many.
    differs = digests[process_index()] != digests[0] or process_index() == 0
    found = allgather_object(f"fields of the {what}", fields if differs else None)
    found = [found[0] if other is None else other for other in found]
    lines = [
        f"{name}: process 0 has {_spell(found[0].get(name))}, process {process} has "
        f"{_spell(other.get(name))}"
        for process, other in enumerate(found)
        for name in dict.fromkeys((*found[0], *other))
        if other.get(name) != found[0].get(name)
    ]
    if lines:
        shown = lines[:20] + [f"... and {len(lines) - 20} more"] * (len(lines) > 20)
        raise DisagreementError(
            f"The processes disagree about the {what}:\n  "
            + "\n  ".join(shown)
            + "\nAll processes of a run must run the same script, with the same "
            "arguments, on the same versions."
        )


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide about numbers."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


def strip_addresses(text: str) -> str:
    """A ``repr`` without the addresses of objects, which no two processes share.

    Example:
        >>> strip_addresses("<function f at 0x7f3c>")
        '<function f>'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _spell(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
