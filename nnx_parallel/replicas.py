"""Copies of an array that should be equal, compared: silent corruption has a name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
from jax.sharding import NamedSharding

from nnx_parallel.checkpoint.fingerprint import device_hashes
from nnx_parallel.distributed import exchange
from nnx_parallel.errors import ReplicaError
from nnx_parallel.sharding.optimizer import state_path

Hashes = dict[str, dict[str, list[tuple[str, int]]]]


def check_replicas(state: Any, step: int) -> None:
    """Checks that all devices that hold the same part of an array hold the same bits.

    Each device hashes its shards; nothing but the hashes is sent. With several
    processes all of them call it.

    Args:
        state: A pytree of global arrays.
        step: The step, for the message.

    Raises:
        ReplicaError: On all processes, if copies differ. It names the arrays and the
            devices.
    """
    leaves = [
        (state_path(path), x)
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if isinstance(x.sharding, NamedSharding)
    ]
    found = device_hashes([x for _, x in leaves])
    mine = {
        path: _by_part(x, hashes)
        for (path, x), hashes in zip(leaves, found, strict=True)
    }
    lines: list[str] = []
    for path, copies in _merge(exchange("replicas", mine)).items():
        lines += [f"`{path}`{line}" for line in _odd_ones(copies)]
    if lines:
        raise ReplicaError(
            f"Copies of {len(lines)} arrays differ at step {step}:\n  "
            + "\n  ".join(lines[:20])
            + "\nThe memory or the arithmetic of these devices is at fault, or "
            "processes have trained apart. Go back to the last checkpoint, without "
            "these devices: `python -m nnx_parallel inspect DIR --verify` says whether "
            "it is whole."
        )


def _by_part(x: jax.Array, hashes: dict[int, int]) -> dict[str, list[tuple[str, int]]]:
    """Devices of this process and their hashes, by the part of the array they hold."""
    parts: dict[str, list[tuple[str, int]]] = {}
    for shard in x.addressable_shards:
        name = f"{shard.device} (process {shard.device.process_index})"
        part = str([(s.start, s.stop) for s in shard.index])
        parts.setdefault(part, []).append((name, hashes[shard.device.id]))
    return parts


def _merge(shares: list[Hashes]) -> Hashes:
    merged: Hashes = {}
    for share in shares:
        for path, parts in share.items():
            for part, copies in parts.items():
                merged.setdefault(path, {}).setdefault(part, []).extend(copies)
    return merged


def _odd_ones(parts: dict[str, list[tuple[str, int]]]) -> list[str]:
    lines = []
    for part, copies in parts.items():
        counts = Counter(value for _, value in copies)
        if len(counts) == 1:
            continue
        common, count = counts.most_common(1)[0]
        odd = [name for name, value in copies if value != common]
        if 2 * count > len(copies):
            lines.append(f"{part}: {', '.join(odd)} differ from {count} others")
        else:
            names = ", ".join(name for name, _ in copies)
            lines.append(f"{part}: {names} do not agree")
    return lines
