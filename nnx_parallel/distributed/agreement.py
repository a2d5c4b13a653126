"""Compares values between processes, because they deadlock if their programs differ."""

import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any

from nnx_parallel.distributed.messages import join
from nnx_parallel.distributed.runtime import EXCHANGE_SECONDS, process_index
from nnx_parallel.errors import DisagreementError

_MAX_LINES = 20
_MAX_CHARACTERS = 200

Fields = Mapping[str, Any]


def allgather_object(name: str, value: Any) -> list:
    """Sends a JSON value to all processes; returns a list of their values, by process.

    The exchange uses no device, so it may run during a step, on any thread. All
    processes must make the exchanges with the same ``name`` in the same order. Errors
    quote the name.

    Raises:
        ProcessError: If some processes did not take part in time.

    Example:
        >>> allgather_object("seed", 3)
        [3]
    """
    return reserve_allgather(name)(value)


def meet(call: str) -> None:
    """Checks that all processes begin the same call.

    Raises:
        DisagreementError: On all processes, if a process is in a different call. The
            message says in which call each process is.
    """
    allgather_object(call, None)


def count_step() -> None:
    """Counts a step that a fit begins. Call it after all exchanges before that step."""
    client = join()
    if client is not None:
        client.steps_begun += 1


def reserve_allgather(
    name: str, timeout_seconds: float = EXCHANGE_SECONDS
) -> Callable[[Any], list]:
    """Reserves the next exchange of a name, which another thread can make later.

    Returns:
        A function that takes the value and makes the exchange, like `allgather_object`.
        If a process never calls the function, the other processes time out, but this
        exchange does not get mixed up with later exchanges of the name.
    """
    client = join()
    if client is None:
        return lambda value: [value]
    # A background save ends at a different time on each process. The exchange gets its
    # number here, on the main thread, so that all processes exchange the values of the
    # same save.
    key = client.reserve(name)
    return lambda value: client.allgather(key, value, timeout_seconds)


def check_consistent(what: str, fields: Fields) -> None:
    """Checks that all processes have the same fields: JSON values by name.

    Raises:
        DisagreementError: On all processes, if the fields of a process differ from the
            fields of process 0. The message quotes ``what``, and names the process, the
            field and both values.
    """
    fields = json.loads(json.dumps(fields))  # tuples arrive as lists
    text = json.dumps(fields, sort_keys=True).encode()
    digest = hashlib.sha256(text).hexdigest()
    digests = allgather_object(f"digest of the {what}", digest)
    if len(set(digests)) == 1:
        return
    # Fields may take megabytes (for example a program), so only process 0 and the
    # processes that differ from it send their fields.
    differs = digests[process_index()] != digests[0] or process_index() == 0
    found = allgather_object(f"fields of the {what}", fields if differs else None)
    found = [found[0] if other is None else other for other in found]
    lines = [
        line
        for process, other in enumerate(found)
        for line in differences(process, found[0], other, _format)
    ]
    if lines:
        if num_more := len(lines[_MAX_LINES:]):
            lines[_MAX_LINES:] = [f"... and {num_more} more"]
        raise DisagreementError(
            f"The processes disagree about the {what}:\n  "
            + "\n  ".join(lines)
            + "\nAll processes of a run must run the same script, with the same "
            "arguments and the same versions of all libraries."
        )


def differences(
    process: int, first: Fields, other: Fields, spell: Callable[[Any], str]
) -> list[str]:
    """Returns one line for each field in which a process differs from process 0."""
    return [
        f"{name}: process 0 has {spell(first.get(name))}, process {process} has "
        f"{spell(other.get(name))}"
        for name in dict.fromkeys((*first, *other))  # a set would lose the order
        if other.get(name) != first.get(name)
    ]


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that affect the numerics."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


def strip_addresses(text: str) -> str:
    """Removes object addresses, which differ between processes, from a ``repr``.

    Example:
        >>> strip_addresses("<function f at 0x7f3c>")
        '<function f>'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _format(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "..."
