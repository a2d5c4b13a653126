"""What a checkpoint holds: what may be saved, and how it differs from what is wanted.

Orbax knows arrays by shape and dtype. Which groups are empty, which arrays are random
keys (stored as their words), and the user's metadata stand in a header beside them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.checkpoint.checksum import PART, Fingerprints, digest, fingerprints
from nnx_parallel.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
)

Groups = Mapping[str, Mapping[str, jax.Array]]
AbstractGroups = Mapping[str, Mapping[str, jax.ShapeDtypeStruct]]

_FORMAT = 3  # grows when a change would make an older reader misread the files

_TAKEN = ("metrics", PART)  # names of parts that are no groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """What one checkpoint holds, without its arrays.

    Attributes:
        step: The step it was saved under.
        groups: Global shape and dtype of each array, by group and path.
        meta: The metadata saved with it.
        metrics: The metrics saved with it; empty if there were none.
        fingerprints: The fingerprint of each array, by group and path.
    """

    step: int
    groups: dict[str, dict[str, jax.ShapeDtypeStruct]]
    meta: dict[str, Any]
    metrics: dict[str, float]
    fingerprints: Fingerprints


def check_groups(groups: Groups) -> None:
    """Raises ``CheckpointError`` unless every leaf is an array that can be saved."""
    if not any(groups.values()):
        raise CheckpointError("Nothing to save: no group holds an array.")
    for name, group in groups.items():
        if not name.isidentifier() or name in _TAKEN:
            raise CheckpointError(
                f"Cannot save a group named {name!r}: a name must be a Python "
                f"identifier other than {', '.join(map(repr, _TAKEN))}."
            )
        for path, array in group.items():
            fault = _fault(array)
            if fault is not None:
                raise CheckpointError(
                    f"Cannot save `{path}` of group {name!r}: {fault}"
                )
    check_shapes(groups)


def check_shapes(groups: Groups | AbstractGroups) -> None:
    """Raises ``CheckpointError`` unless every array, abstract or not, holds a value."""
    for name, group in groups.items():
        for path, array in group.items():
            if 0 in array.shape:
                raise CheckpointError(
                    f"Cannot save `{path}` of group {name!r}: its shape {array.shape} "
                    "holds no value. Leave empty arrays out."
                )


def check_shardings(groups: AbstractGroups) -> None:
    """Raises ``CheckpointError`` unless every leaf says where it shall live."""
    for name, group in groups.items():
        for path, array in group.items():
            if getattr(array, "sharding", None) is None:
                raise CheckpointError(
                    f"Cannot restore `{path}` of group {name!r}: it has no sharding. "
                    "Give every array a jax.ShapeDtypeStruct with sharding=...; else "
                    "it would live where it did when it was saved."
                )


def make_header(
    groups: Groups, meta: Mapping[str, Any], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Returns what is saved beside the arrays, as JSON."""
    keys = {
        name: {
            path: str(jax.random.key_impl(array))
            for path, array in group.items()
            if _is_key(array)
        }
        for name, group in groups.items()
    }
    sizes = {name: len(group) for name, group in groups.items()}
    try:
        meta = json.loads(json.dumps(meta))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"Cannot save the metadata: {error}. It may hold only what JSON can: dict, "
            "list, str, int, float, bool and None."
        ) from error
    header = {
        "format": _FORMAT,
        "sizes": sizes,
        "keys": keys,
        "arrays": {
            name: {path: _spell(array) for path, array in group.items()}
            for name, group in groups.items()
        },
        "metrics": {name: float(x) for name, x in metrics.items()},
        "meta": meta,
    }
    return header | {"digest": digest(header)}


def check_fingerprints(stored: StoredCheckpoint, read: Groups, where: str) -> None:
    """Compares what was read with what was saved, array by array.

    Raises:
        CheckpointDamagedError: If an array has another fingerprint.
    """
    lines = [
        f"{name}: `{path}` has fingerprint {value:08x}, saved was "
        f"{stored.fingerprints[name][path]:08x}"
        for name, group in fingerprints(read).items()
        for path, value in group.items()
        if stored.fingerprints[name][path] != value
    ]
    if lines:
        raise CheckpointDamagedError(
            f"{where} is damaged: {len(lines)} arrays are not what was saved.\n  "
            + "\n  ".join(lines)
        )


def check_header(header: Any) -> dict[str, Any]:
    """Returns what `make_header` made.

    Raises:
        ValueError: If this is something else.
    """
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f"Its header is not of format {_FORMAT}.")
    if header.get("digest") != digest(header):
        raise ValueError("Its header is not what was saved.")
    for name in header["sizes"]:
        if not name.isidentifier():  # it is a file's name too, and stays in place
            raise ValueError(f"A group is named {name!r}, which is no identifier.")
    return header


def read_stored(
    step: int,
    header: Mapping[str, Any],
    found: Mapping[str, Any],
    fingerprints: Fingerprints,
) -> StoredCheckpoint:
    """Joins the header with what Orbax says of the arrays in each group.

    Raises:
        ValueError: If arrays are gone.
    """
    groups = {}
    for name, size in header["sizes"].items():
        arrays, keys = found.get(name) or {}, header["keys"][name]
        if len(arrays) != size:
            raise ValueError(
                f"Group {name!r} has {len(arrays)} arrays; {size} were saved."
            )
        groups[name] = {
            path: _abstract(array.shape, array.dtype, keys.get(path))
            for path, array in arrays.items()
        }
        for path, saved in header["arrays"][name].items():
            found_here = _spell(groups[name][path]) if path in arrays else "nothing"
            if found_here != saved:
                raise ValueError(
                    f"`{path}` of group {name!r} was saved as {saved}; its files hold "
                    f"{found_here}."
                )
    if _paths(fingerprints) != _paths(header["arrays"]):
        raise ValueError("Its fingerprints are of other arrays.")
    return StoredCheckpoint(
        step=step,
        groups=groups,
        meta=header["meta"],
        metrics=header["metrics"],
        fingerprints=fingerprints,
    )


def _paths(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, set[str]]:
    return {name: set(group) for name, group in groups.items()}


def check_match(
    stored: StoredCheckpoint, wanted: AbstractGroups, directory: str
) -> None:
    """Compares what is asked for with what a checkpoint in ``directory`` holds.

    Raises:
        CheckpointMismatchError: With one line for each array that differs in path,
            shape or dtype.
    """
    lines = [
        f"{name}: {line}"
        for name, group in wanted.items()
        for line in _group_differences(stored.groups.get(name), group)
    ]
    if lines:
        raise CheckpointMismatchError(
            f"Checkpoint {stored.step} in '{directory}' differs from what is asked "
            "for:\n  " + "\n  ".join(lines) + "\nBuild the same model and optimizer, "
            f"or restore other groups. Saved groups: {list(stored.groups)}."
        )


def _group_differences(
    stored: Mapping[str, jax.ShapeDtypeStruct] | None,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
) -> Iterator[str]:
    if stored is None:
        yield "the checkpoint has no such group"
        return
    for path, array in wanted.items():
        if path not in stored:
            yield (
                f"`{path}` {_spell(array)} is not in the checkpoint"
                f"{_nearest(path, 'there', stored.keys() - wanted.keys())}"
            )
        elif _spell(stored[path]) != _spell(array):
            yield (
                f"`{path}` is {_spell(stored[path])} in the checkpoint and "
                f"{_spell(array)} here"
            )
    for path in stored:
        if path in wanted:
            continue
        yield (
            f"`{path}` {_spell(stored[path])} is only in the checkpoint"
            f"{_nearest(path, 'here', wanted.keys() - stored.keys())}"
        )


def _nearest(path: str, where: str, others: Iterable[str]) -> str:
    close = difflib.get_close_matches(path, sorted(others), n=1)
    return f" (nearest {where}: `{close[0]}`)" if close else ""


def _spell(array: jax.ShapeDtypeStruct | jax.Array) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _is_key(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _abstract(
    shape: tuple[int, ...], dtype: Any, key_impl: str | None
) -> jax.ShapeDtypeStruct:
    if key_impl is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    key = jax.eval_shape(lambda: jax.random.key(0, impl=key_impl))
    return jax.ShapeDtypeStruct(shape[:-1], key.dtype)


def _fault(array: Any) -> str | None:
    if not isinstance(array, jax.Array):
        return f"found {type(array).__name__}; only jax.Array can be saved."
    if array.is_deleted():
        return "it was donated. Save what the step returned, not what it was given."
    return None
