"""Lets the processes of a run share the reading of files.

A shard is often a block of columns of the array in the file, and a process that reads
columns reads every page of the file. So each process reads some rows, which are one
range of bytes, and the processes exchange elements. Together they read each byte once.
The exchange is an all-to-all of bytes on the mesh, which no cast or sum can change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.distributed.agreement import allgather_object, check_consistent
from nnx_parallel.distributed.runtime import process_index
from nnx_parallel.errors import WeightsError
from nnx_parallel.mesh import manual_region
from nnx_parallel.weights.files import Tensor
from nnx_parallel.weights.names import Rule
from nnx_parallel.weights.shards import (
    Bounds,
    Index,
    Shards,
    bits_of,
    bounds_of,
    is_within,
    slices_of,
)

_ROUND_BYTES = 2**29
"""Arrays are exchanged in rounds of about this many bytes, or of one larger array."""

_MIN_BYTES = 2**20
"""Shorter ranges are not divided: a system reads whole pages, and some pages ahead."""


class SharedReader:
    """Reads arrays with shards in several processes.

    All processes must make the same calls, even a process without devices in an array's
    sharding. Such a process reads nothing. An error of one process is raised on all
    processes by the next exchange, and at the latest by `finish`.

    Args:
        tensors: The arrays in files, by name.

    Raises:
        DisagreementError: If the processes have different files.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        check_consistent("files of weights", _describe(tensors))
        self.tensors = tensors
        self._error: Exception | None = None
        self._num_read = 0  # arrays in files, on all processes

    def read(self, group: Sequence[Shards]) -> None:
        """Fills the shards of arrays that are parts of the same arrays in files.

        Raises:
            WeightsError: If a process cannot read a file, or finds a value that is not
                finite.
        """
        links = _links(group[0].sharding.device_set)
        names = group[0].names
        needs = _needs(group, self.tensors[names[next(iter(names))]].shape)
        last: Callable[[], object] = int  # does nothing
        for indices in _rounds(names, self.tensors):
            plans = {}
            for index in indices:
                boxes = {p: _at(index, found) for p, found in needs.items()}
                tensor = self.tensors[names[index]]
                ranges = divide(boxes, tensor, self._num_read)
                plans[index] = _Plan(tensor, ranges, boxes)
                self._num_read += 1
            rows = self._attempt(partial(_read_rows, plans))
            messages = self._attempt(partial(_pack, plans, rows, links.processes))
            received = links.exchange(messages, self._agree(messages or {}))
            # The shards of the last round are filled while this round's bytes travel.
            self._attempt(last)
            last = partial(_fill, plans, rows, received, links, group)
        self._attempt(last)

    def finish(self) -> None:
        """Raises the errors of all processes."""
        self._agree({})

    def _attempt(self, function: Callable[[], Any]) -> Any:
        """Calls a function and keeps its error; does nothing after an earlier error."""
        if self._error is None:
            try:
                return function()
            except Exception as error:
                self._error = error
        return None

    def _agree(self, messages: Mapping[int, bytes]) -> int:
        """Returns the size of the largest message on any process; raises all errors."""
        text, error = None, self._error
        if error is not None:
            text = str(error)
            if not isinstance(error, WeightsError):
                text = f"Process {process_index()} cannot read weights: {error!r}"
        size = max(map(len, messages.values()), default=0)
        # Without this exchange, the other processes would wait in the next program.
        found = allgather_object("reading weights", [text, size])
        if error is not None:
            raise error
        for text, _ in found:
            if text is not None:
                raise WeightsError(text)
        return max(size for _, size in found)


def _describe(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    found = {}
    for name, tensor in tensors.items():
        try:
            found[name] = tensor.describe()
        except (OSError, WeightsError) as error:  # the other processes must hear of it
            found[name] = f"unreadable ({error})"
    return found


@dataclass(frozen=True)
class _Plan:
    """The rows of an array in files that each process reads, and the parts it needs.

    Attributes:
        tensor: The array in files.
        ranges: For each range of rows, its reader (a process), its first row, and its
            end.
        boxes: The blocks of the array that each process needs.
    """

    tensor: Tensor
    ranges: Sequence[tuple[int, int, int]]
    boxes: Mapping[int, Sequence[Bounds]]

    def pieces(self, source: int, target: int) -> Iterator[tuple[int, Bounds]]:
        """Yields the parts that a process reads for another, in a fixed order.

        Each part is a block, with the first row of the range that contains it.
        """
        for process, first, last in self.ranges:
            for rows, *others in self.boxes[target] if process == source else ():
                shared = max(first, rows[0]), min(last, rows[1])
                if shared[0] < shared[1]:
                    yield first, (shared, *others)


Rows = Mapping[tuple[Index, int], np.ndarray]
"""Rows that this process has read, by array and first row."""


def _read_rows(plans: Mapping[Index, _Plan]) -> Rows:
    own = process_index()
    return {
        (index, first): bits_of(plan.tensor.read_rows(first, last))
        for index, plan in plans.items()
        for process, first, last in plan.ranges
        if process == own
    }


def _part(rows: np.ndarray, first: int, box: Bounds) -> np.ndarray:
    (start, end), *others = box
    return rows[slices_of(((start - first, end - first), *others))]


def _pack(
    plans: Mapping[Index, _Plan], rows: Rows, processes: Sequence[int]
) -> dict[int, bytes]:
    """Returns the bytes for each other process."""
    own = process_index()
    return {
        process: b"".join(
            _part(rows[index, first], first, box).tobytes()
            for index, plan in plans.items()
            for first, box in plan.pieces(own, process)
        )
        for process in processes
        if process != own
    }


def _fill(
    plans: Mapping[Index, _Plan],
    rows: Rows,
    received: Any,
    links: _Links,
    group: Sequence[Shards],
) -> None:
    """Puts the pieces of each array together, and fills the shards."""
    own = process_index()
    messages = links.messages(received)
    starts = dict.fromkeys(links.processes, 0)
    for index, plan in plans.items():
        if not plan.boxes.get(own):
            continue
        # Only pages that are written take memory.
        tensor = plan.tensor
        elements = np.empty((tensor.num_rows, *tensor.shape[1:]), tensor.dtype)
        bits = bits_of(elements)
        for process in links.processes:
            for first, box in plan.pieces(process, own):
                out = bits[slices_of(box)]
                if process == own:
                    out[...] = _part(rows[index, first], first, box)
                    continue
                start = starts[process]
                starts[process] = end = start + out.nbytes
                piece = messages[process][start:end].view(out.dtype)
                out[...] = piece.reshape(out.shape)
        for shards in group:
            shards.fill(index, tensor, elements.reshape(tensor.shape))


def _rounds(
    names: Mapping[Index, str], tensors: Mapping[str, Tensor]
) -> Iterator[list[Index]]:
    """Divides the arrays into rounds of about `_ROUND_BYTES`."""
    found: list[Index] = []
    size = 0
    for index, name in names.items():
        num_bytes = tensors[name].num_bytes
        if found and size + num_bytes > _ROUND_BYTES:
            yield found
            found, size = [], 0
        found.append(index)
        size += num_bytes
    yield found


def _needs(
    group: Sequence[Shards], theirs: tuple[int, ...]
) -> dict[int, set[tuple[Bounds, Bounds]]]:
    """Returns the blocks that each process needs.

    A block has bounds along the dims of layers and experts, and bounds along the dims
    of each array in files.
    """
    needs: dict[int, set[tuple[Bounds, Bounds]]] = defaultdict(set)
    for shards in group:
        shape, count = shards.array.shape, shards.rule.num_stacked
        rule = replace(shards.rule, ours="", theirs="{}" * count)
        for device, index in shards.sharding.devices_indices_map(shape).items():
            bounds = bounds_of(index, shape)
            box = _box(rule, shape, theirs, bounds[count:])
            found = needs[device.process_index]
            if box is not None:
                found.add((bounds[:count], box))
    return needs


@lru_cache(maxsize=4096)
def _box(
    rule: Rule, ours: tuple[int, ...], theirs: tuple[int, ...], inner: Bounds
) -> Bounds | None:
    """Returns the smallest block of their array that has all elements of ours."""
    bounds = []
    for dim, size in enumerate(theirs):
        # Each element of this array is its index along one dim. It takes no memory.
        shape = [1] * len(theirs)
        shape[dim] = size
        numbers = np.arange(size).reshape(shape)
        found = rule.to_ours(np.broadcast_to(numbers, theirs), rule.sizes(ours))
        found = found[slices_of(inner)]
        if not found.size:
            return None
        once = (slice(None) if stride else slice(1) for stride in found.strides)
        found = found[tuple(once)]
        bounds.append((int(found.min()), int(found.max()) + 1))
    return tuple(bounds) or ((0, 1),)  # an array without dims has one row


def _at(index: Index, needs: set[tuple[Bounds, Bounds]]) -> list[Bounds]:
    return sorted({box for stacked, box in needs if is_within(index, stacked)})


def divide(
    boxes: Mapping[int, Sequence[Bounds]], tensor: Tensor, turn: int
) -> list[tuple[int, int, int]]:
    """Divides the rows of an array between the processes that need some of it.

    If all processes need complete rows, and no row is needed by two of them, each
    process reads its rows. A small array is read by one process. ``turn`` chooses this
    process, so that several processes read small arrays.
    """
    readers = sorted(process for process, found in boxes.items() if found)
    wanted = sorted((*box[0], p) for p in readers for box in boxes[p])
    if not wanted:
        return []
    whole = tuple((0, size) for size in tensor.shape[1:])
    are_rows = all(box[1:] == whole for p in readers for box in boxes[p])
    if are_rows and all(end <= start for (_, end, _), (start, *_) in pairwise(wanted)):
        return [(process, first, last) for first, last, process in wanted]
    first, last = wanted[0][0], max(last for _, last, _ in wanted)
    num_bytes = tensor.num_bytes * (last - first) // tensor.num_rows
    count = min(len(readers), max(1, num_bytes // _MIN_BYTES))
    ends = [first + (last - first) * i // count for i in range(count + 1)]
    return [
        (readers[(turn + i) % len(readers)], start, end)
        for i, (start, end) in enumerate(pairwise(ends))
        if start < end
    ]


@dataclass(frozen=True)
class _Links:
    """Sends bytes from each process to each other process.

    Attributes:
        processes: Numbers of the processes.
        sharding: Sharding of an array ``(from, to, words)``. Each process has a row of
            devices, and each of its devices sends some of the words.
    """

    processes: tuple[int, ...]
    sharding: NamedSharding

    def exchange(self, messages: Mapping[int, bytes] | None, num_bytes: int) -> Any:
        """Starts an exchange of at most ``num_bytes`` bytes from process to process.

        A process without devices in the sharding does not take part.
        """
        is_part = process_index() in self.processes
        if not num_bytes or messages is None or not is_part:
            return None
        num_lanes = self.sharding.mesh.shape["lane"]
        words = -(-num_bytes // (4 * num_lanes)) * num_lanes
        sent = np.zeros((len(self.processes), words), np.uint32)
        for row, process in zip(sent, self.processes, strict=True):
            message = messages.get(process, b"")
            row.view(np.uint8)[: len(message)] = np.frombuffer(message, np.uint8)

        def send(index: Any) -> np.ndarray:
            return sent[None, :, index[2]]

        shape = (len(self.processes), *sent.shape)
        array = jax.make_array_from_callback(shape, self.sharding, send)
        return _all_to_all(self.sharding.mesh)(array)

    def messages(self, received: Any) -> dict[int, np.ndarray]:
        """Waits for an exchange; returns the bytes from each process."""
        if received is None:
            return {}
        shards = sorted(
            received.addressable_shards, key=lambda s: s.index[2].start or 0
        )
        words = np.concatenate([np.asarray(s.data)[:, 0] for s in shards], axis=-1)
        return {
            process: row.view(np.uint8)
            for process, row in zip(self.processes, words, strict=True)
        }


def _links(devices: Iterable[Any]) -> _Links:
    rows: dict[int, list] = defaultdict(list)
    for device in sorted(devices, key=lambda d: (d.process_index, d.id)):
        rows[device.process_index].append(device)
    width = min(map(len, rows.values()))
    mesh = Mesh([row[:width] for row in rows.values()], ("process", "lane"))
    return _Links(tuple(rows), NamedSharding(mesh, P("process", None, "lane")))


@lru_cache(maxsize=8)
def _all_to_all(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    exchange = manual_region(
        lambda sent: jax.lax.all_to_all(
            sent, "process", split_axis=1, concat_axis=0, tiled=True
        ),
        mesh,
        P("process", None, "lane"),
        P(None, "process", "lane"),
    )
    return jax.jit(exchange)
