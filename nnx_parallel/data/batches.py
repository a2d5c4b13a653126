"""Checks batches on the host, compares them between processes, and places them."""

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.data.rows import DROPPED, END, count_rows, partition, rows_of
from nnx_parallel.distributed.agreement import allgather_object, differences
from nnx_parallel.errors import (
    BatchShapeError,
    DataError,
    DataExhaustedError,
    MeshShapeError,
)
from nnx_parallel.sharding.layout import Layout

Signature = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each array of a batch, by its path."""


def check_batch(batch: Any, *, index: int = 0) -> int:
    """Checks a pytree of arrays with rows as dim 0; returns the number of rows.

    Arrays without dims, and arrays in a `Shared`, belong to all rows.

    Raises:
        DataError: If a leaf is not an array of numbers, or if it holds integers that
            do not fit in 32 bits: JAX would wrap them silently.
        BatchShapeError: If there are no rows, or leaves have different numbers of rows.

    Example:
        >>> check_batch({"x": np.zeros((4, 2)), "y": np.zeros(4, int)})
        4
    """
    leaves = _named_leaves(batch)
    for name, leaf in leaves.items():
        _check_leaf(f"{name} of batch {index}", leaf)
    with_rows, shared, join = partition(batch)
    without_shared = join(with_rows, [None] * len(shared))
    named = _named_leaves(without_shared)
    for name, x in named.items():
        # In a batch of two rows, a raw PRNGKey (two uint32) would be taken for one
        # number per row.
        if x.dtype == np.uint32 and x.shape == (2,):
            raise DataError(
                f"{name} of batch {index} is uint32 of shape (2,), like a raw PRNGKey. "
                "Give a key as jax.random.key(seed) or as "
                "nnx_parallel.data.Shared(key), or take rngs in the loss: loss(model, "
                "batch, rngs). If it is a number in each of two rows, make it int32."
            )
    rows = {name: x.shape[0] for name, x in named.items()}
    if not rows:
        raise DataError(
            f"Batch {index} of type {type(batch).__name__} holds no arrays"
            f"{' with rows' * bool(leaves)}. A batch is a pytree of arrays whose dim 0 "
            "is the rows. If it is one large graph, its rows are the nodes that count "
            "in the loss: {'graph': Shared(graph), 'nodes': np.arange(num_nodes)}."
        )
    if len(set(rows.values())) > 1:
        found = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise BatchShapeError(
            f"Arrays of batch {index} disagree about the number of rows ({found}). "
            "Dim 0 of every array is the rows of the global batch; give an array that "
            "all rows share as nnx_parallel.data.Shared(array), such as the edges of a "
            "graph."
        )
    name, num_rows = next(iter(rows.items()))
    if num_rows == 0:
        raise BatchShapeError(
            f"{name} of batch {index} has no rows. A batch must hold at least one."
        )
    return num_rows


def batch_signature(batch: Any) -> Signature:
    """Returns the shape of each array, and the dtype that it will have in JAX, by path.

    Example:
        >>> batch_signature({"x": np.zeros((4, 2))})
        {"batch['x']": ((4, 2), 'float32')}
    """
    return {
        name: (tuple(leaf.shape), _narrow(leaf.dtype))
        for name, leaf in _named_leaves(batch).items()
    }


def check_same(batch: Any, first: Signature | None, *, index: int) -> Signature:
    """Returns a batch's signature; raises an error if it differs from ``first``.

    ``first`` is the signature of the run's first batch. It is ``None`` if ``batch`` is
    that batch.
    """
    found = batch_signature(batch)
    first = first or found
    if found.keys() != first.keys():
        raise BatchShapeError(
            f"Batch {index} holds {sorted(found)} but the first batch held "
            f"{sorted(first)}. All batches of a run must have the same structure."
        )
    for name, (shape, dtype) in found.items():
        first_shape, first_dtype = first[name]
        if found[name] != first[name]:
            raise BatchShapeError(
                f"{name} of batch {index} has shape {shape} and dtype {dtype}, but the "
                f"first batch had {first_shape} and {first_dtype}. Each new shape "
                "would compile the step again: pad all batches to one shape. The last, "
                "smaller batch of an epoch is left out by fit(..., last_batch='drop'), "
                "and filled up by last_batch=Pad('weights')."
            )
    return found


def check_divisible(
    num_rows: int, num_microbatches: int, axis_sizes: Mapping[str, int]
) -> None:
    """Raises `BatchShapeError` unless a batch splits over microbatches and mesh axes.

    Example:
        >>> check_divisible(32, 4, {"data": 2, "fsdp": 2})
    """
    multiple = num_microbatches * math.prod(axis_sizes.values())
    if num_rows % multiple == 0:
        return
    plural = "" if num_microbatches == 1 else "es"
    factors = [f"{num_microbatches} microbatch{plural}"]
    factors += [f"{axis}={size}" for axis, size in axis_sizes.items()]
    below = num_rows // multiple * multiple
    nearest = ", ".join(str(n) for n in (below, below + multiple) if n)
    raise BatchShapeError(
        f"Batch of {num_rows} rows cannot be split: {' * '.join(factors)} need a "
        f"multiple of {multiple} rows. Nearest: {nearest}."
    )


def _named_leaves(batch: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return {f"batch{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}


def _check_leaf(name: str, leaf: Any) -> None:
    if isinstance(leaf, str | bytes):
        raise DataError(
            f"{name} is a text, {leaf[:20]!r}. Leaves must be arrays of booleans or "
            "numbers: encode it, or leave it out of the batch."
        )
    if not isinstance(leaf, np.ndarray | jax.Array):
        is_torch = type(leaf).__module__.partition(".")[0] == "torch"
        place = " In a DataLoader, collate_fn does this." if is_torch else ""
        raise DataError(
            f"{name} has type {type(leaf).__name__}. Leaves must be NumPy or JAX "
            "arrays: convert it with `np.asarray`, so that dim 0 is the rows. An array "
            f"without dims, such as np.asarray(0.5), is shared by all rows.{place}"
        )
    kinds = (np.number, np.bool_, jax.dtypes.extended)  # typed random keys are extended
    if not any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds):
        raise DataError(
            f"{name} has dtype {leaf.dtype}. Leaves must hold booleans or numbers: "
            "encode it, or leave it out of the batch."
        )
    if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
        raise DataError(
            f"{name} has dtype {leaf.dtype.str}, whose byte order is not this "
            "machine's. JAX does not take such arrays: convert it with "
            f"x.astype({leaf.dtype.name!r})."
        )
    # `jax.device_put(np.array([2**40]))` gives 0, without an error or a warning
    # (https://github.com/jax-ml/jax/issues/18385). A JAX array always fits.
    narrow = _narrow(leaf.dtype)
    if isinstance(leaf, jax.Array) or narrow == leaf.dtype.name or leaf.size == 0:
        return
    if leaf.dtype.kind not in "iu":
        return
    limits = np.iinfo(narrow)
    for value in (int(leaf.min()), int(leaf.max())):
        if not limits.min <= value <= limits.max:
            raise DataError(
                f"{name} has dtype {leaf.dtype} and holds {value}. JAX stores it as "
                f"{narrow}, from {limits.min} to {limits.max}, and would wrap it: make "
                "it smaller, or set `jax_enable_x64`."
            )


def _narrow(dtype: Any) -> str:
    return str(jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True))


class Agreed(NamedTuple):
    """The decision of all processes about a batch.

    Attributes:
        num_rows: Number of rows of the batch. It is ``None`` if any process drops its
            rows, because all processes then drop theirs.
        stop_reason: The reason why all processes stop before this batch. It is ``None``
            if they use the batch, or if the data of all processes has ended.
        saves: True if the interval between saves has passed, so that the step of this
            batch is saved.
    """

    num_rows: int | None
    stop_reason: str | None = None
    saves: bool = False


@dataclass(frozen=True)
class BatchAgreement:
    """Compares the next batches of all processes before they are placed.

    It uses no device. If a process had no batch, or a batch of another shape, it would
    compile a different program or none. The other processes would then wait in a
    collective that this process never enters.

    Attributes:
        name: Name of the batches. Two iterators that read at the same time need
            different names.
        stop_reason: Function that returns why this process wants to stop, or ``None``.
        is_time: Function that returns True if the interval between saves has passed.
            The result on process 0 decides for all processes.
    """

    name: str = "batch"
    stop_reason: Callable[[], str | None] = lambda: None
    is_time: Callable[[], bool] = lambda: False

    def check(self, batch: Any, *, index: int, num_read: int) -> Agreed:
        """Waits until each process either has a batch or has reached the data's end.

        Args:
            batch: The batch, `END`, or `DROPPED`.
            index: The batch's number, for messages.
            num_read: Batches that this process has read before, for messages.

        Raises:
            DataError: If this process's batch is unusable, as for `check_batch`.
            BatchShapeError: If another process has an unusable batch, or if
                batches of two processes differ in shape or dtype.
            DataExhaustedError: If the data has ended on some processes but not on all.
        """
        is_dropped = batch is DROPPED
        if jax.process_count() == 1 and (is_dropped or batch is END):
            return Agreed(None if is_dropped else 0)
        if jax.process_count() == 1:
            return Agreed(check_batch(batch, index=index), saves=self.is_time())
        num_rows, signature, problem, shared = 0, None, None, None
        if batch is not END and not is_dropped:
            try:
                num_rows = check_batch(batch, index=index)
                signature, shared = batch_signature(batch), shared_checksums(batch)
            except DataError as error:
                problem = error  # raised after the other processes know about it
        text = None if problem is None else str(problem)
        # `multihost_utils.process_allgather` would run a program on the prefetching
        # thread. Processes that launch programs in different orders can deadlock.
        mine = [signature, text, self.stop_reason(), shared, is_dropped, self.is_time()]
        found = allgather_object(self.name, mine)
        signatures, problems, reasons, all_shared, drops, times = zip(
            *found, strict=True
        )
        for reason in reasons:
            if reason is not None:  # checked first: a run that stops needs no batch
                return Agreed(num_rows, reason)
        if any(drops):
            return Agreed(None, saves=times[0])
        if problem is not None:
            raise problem  # with its traceback; other processes quote the text
        ended = [i for i, x in enumerate(found) if x[:2] == [None, None]]
        if ended and len(ended) < len(found):
            raise DataExhaustedError(
                f"Data of processes {ended} ended after {num_read} batches; others "
                "have more. Every process must give its share of every batch: split "
                "the rows of each batch equally, and drop the remainder."
            )
        for process, text in enumerate(problems):
            if text is not None:
                raise BatchShapeError(f"Process {process} has no usable batch: {text}")
        for process, other in enumerate(signatures):
            if other != signatures[0]:
                lines = differences(process, signatures[0], other, _format)
                raise BatchShapeError(
                    f"Processes 0 and {process} have batches {index} of different "
                    "shapes:\n  "
                    + "\n  ".join(lines)
                    + "\nEvery process gives an equal share of the rows of each batch, "
                    "never the global batch: split them by trainer.data_share, and "
                    "drop or pad the remainder."
                )
        for process, other in enumerate(all_shared):
            if other != all_shared[0]:
                names = [k for k, x in other.items() if x != all_shared[0][k]]
                raise BatchShapeError(
                    f"Processes 0 and {process} have different values in entries of "
                    f"batch {index} that all rows share: {names}. Give the same values "
                    "on all processes."
                )
        return Agreed(num_rows, saves=times[0])


def shared_checksums(batch: Any) -> dict[str, int]:
    """Returns a checksum of each array that all rows share, by its path."""
    with_rows, shared, join = partition(batch)
    leaves = _named_leaves(join([None] * len(with_rows), shared))
    return {name: zlib.crc32(np.asarray(x).tobytes()) for name, x in leaves.items()}


Mark = list[Any]
"""Content of a batch in JSON values: the number of rows and checksums of each array."""

_MARK_BYTES = 2**16  # bytes to hash of each array; this takes 0.1 ms even for 100 MB
_MARK_ROWS = 8  # rows to hash at each end, to compare batches of different sizes
_ROW_BYTES = 2**10  # bytes to hash of each of these rows


def mark_of(batch: Any) -> Mark | None:
    """Returns checksums of a host batch; ``None`` if no array can be read cheaply.

    For each array with rows, the mark has four values: a checksum of all rows,
    checksums of the first rows, checksums of the last rows counted from the end, and
    whether rows differ. If an array has more than 64 KiB, items are sampled evenly
    along all rows. Arrays on accelerators are left out.

    Example:
        >>> mark_of(np.arange(3)) == mark_of(np.arange(3)) != mark_of(np.arange(1, 4))
        True
    """
    marks = []
    for x in partition(batch)[0]:
        if not _is_on_host(x):
            continue
        x = np.asarray(x)
        # Rows are counted from either end. A row is sampled in the same way for any
        # number of rows in its batch.
        ends = (x[:_MARK_ROWS], x[: -_MARK_ROWS - 1 : -1])
        rows = [[*map(zlib.crc32, _sampled(end, _ROW_BYTES))] for end in ends]
        by_row = -(-len(x) * x.itemsize // _MARK_BYTES) | 1
        sample = _sampled(x[::by_row], max(1, _MARK_BYTES * by_row // len(x)))
        marks.append([zlib.crc32(sample), *rows, bool((sample != sample[:1]).any())])
    return [rows_of(batch), *marks] if marks else None


def _is_on_host(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return x.size > 0 and not x.dtype.hasobject
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    is_here = x.is_fully_addressable and x.size > 0
    return is_here and all(device.platform == "cpu" for device in x.devices())


def _sampled(x: np.ndarray, row_bytes: int) -> Any:
    """Returns the bytes of all items, or of a sample: uint8 ``(rows, bytes)``."""
    row_items = x.size // len(x)
    # The step is odd, because images and tokens often repeat at even distances.
    by_item = -(-row_items // max(1, row_bytes // x.itemsize)) | 1
    if x.flags.c_contiguous or by_item == 1:
        x = x.reshape(len(x), -1)[:, ::by_item]
    else:
        # Items are taken by index: flattening a transposed array would copy all of it.
        items = np.arange(0, row_items, by_item)
        x = x[(slice(None), *np.unravel_index(items, x.shape[1:]))]
    return np.ascontiguousarray(x).view(np.uint8)


def is_same_content(found: Mark, saved: Mark, other: Mark, *, row: int) -> bool:
    """Returns True if two batches hold the same rows.

    Arrays that are equal in all batches, such as a mask of ones, are not compared. The
    batches are the same if any other array agrees: augmentation may change images from
    pass to pass, but not their labels.

    Args:
        found: Mark of the present batch.
        saved: Mark of the expected batch.
        other: Mark of another batch of the data that ``saved`` comes from.
        row: If the batches have different numbers of rows: 1 compares the first rows, 2
            the last rows.
    """
    if len(found) != len(saved):
        return False
    arrays = list(zip(found[1:], saved[1:], other[1:], strict=True))
    differ = [(f, s) for f, s, o in arrays if s[0] != o[0]]
    vary = [(f, s) for f, s in differ if s[3]]
    vary_within = [(f, s) for f, s, _ in arrays if s[3]]
    pairs = vary or differ or vary_within or [(f, s) for f, s, _ in arrays]
    return any(is_same_array(f, s, found[0] == saved[0], row) for f, s in pairs)


def is_same_array(found: list, saved: list, has_same_size: bool, row: int = 1) -> bool:
    """Returns True if two arrays' marks agree; compares one end if the sizes differ."""
    if has_same_size:
        return found[0] == saved[0]
    return all(f == s for f, s in zip(found[row], saved[row], strict=False))


def _format(found: Any) -> str:
    if found is None:
        return "no such array"
    shape, dtype = found
    return f"{dtype}[{', '.join(map(str, shape))}]"


def data_share(layout: Layout) -> tuple[int, int]:
    """Returns which part of a batch's rows this process gives, and the number of parts.

    The result is ``(index, count)``. Processes that hold the same rows give the same
    part, as with tensor parallelism across machines.

    Raises:
        MeshShapeError: If two processes hold parts that overlap but are not equal.
    """
    parts = _processes_by_part(layout)
    process = jax.process_index()
    return next(i for i, part in enumerate(parts) if process in part), len(parts)


def _processes_by_part(layout: Layout) -> list[list[int]]:
    """Returns the processes that give each part; parts are in the order of rows."""
    if jax.process_count() == 1:
        return [[0]]
    # JAX is asked for the parts, because the order of the mesh does not determine them.
    # One row for each device is the finest split that a batch can have.
    num_parts = layout.mesh.size
    sharding = layout.sharding(layout.batch_spec(num_parts))
    rows: defaultdict[int, set[int]] = defaultdict(set)
    for device, index in sharding.devices_indices_map((num_parts,)).items():
        rows[device.process_index].update(range(num_parts)[index[0]])
    parts: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for process in sorted(rows):
        parts[tuple(sorted(rows[process]))].append(process)
    if sum(map(len, parts)) != num_parts or len(set(map(len, parts))) > 1:
        raise MeshShapeError(
            f"Mesh {dict(layout.mesh.shape)} divides the batch so that the parts of "
            "two processes overlap but are not equal. The devices of a process must "
            "hold equal parts: let the product of the batch's axes within a process "
            f"divide its {jax.local_device_count()} devices."
        )
    return [parts[part] for part in sorted(parts)]


def place_batch(
    batch: Any,
    layout: Layout,
    *,
    num_microbatches: int | None = None,
    global_batch_size: int | None = None,
) -> Any:
    """Puts a host batch on the mesh, with its rows split over the batch axes.

    Each device receives only its rows. Once this returns, the caller may write to the
    host's arrays again.

    Args:
        batch: A pytree of arrays. Dim 0 is the rows of this process's `data_share`;
            with one process, these are the rows of the global batch. Shared entries are
            copied to every device.
        layout: The strategy's claims on the mesh.
        num_microbatches: The number of microbatches. Together with the sizes of the
            batch axes it must divide the number of rows. With ``None`` (evaluation),
            there is no such check, and the rows are split over the batch axes that
            divide them.
        global_batch_size: Number of rows to which the shares must add up.

    Raises:
        BatchShapeError: If the rows cannot be split evenly, or if their number is not
            ``global_batch_size``.
    """
    index, count = data_share(layout)
    rows, shared, join = partition(batch)
    num_local = count_rows(batch)
    num_rows = num_local * count
    if global_batch_size is not None and num_rows != global_batch_size:
        raise _size_error(num_local, index, count, global_batch_size)
    sizes = {axis: layout.mesh.shape[axis] for axis in layout.claims.batch}
    if num_microbatches is not None:
        check_divisible(num_rows, num_microbatches, sizes)
    # Shared entries are equal on all processes, so each process places its copy.
    shared = _place(layout.sharding(P()), shared) if shared else []
    # (share, ...) in this process -> (batch, ...) over the mesh
    sharding = layout.sharding(layout.batch_spec(num_rows))
    if count > 1 and num_rows % math.prod(sizes.values()) != 0:
        # A device may need rows of another process, so all processes get the entire
        # batch. This runs a collective, so it never happens on a prefetching thread.
        givers = [processes[0] for processes in _processes_by_part(layout)]
        shares = multihost_utils.process_allgather(rows)  # (process, share, ...)
        gathered = jax.tree.map(
            lambda x: np.concatenate([x[p] for p in givers]), shares
        )
        place = partial(jax.make_array_from_process_local_data, sharding)
        return join(jax.tree.map(lambda x: place(x, x.shape), gathered), shared)
    return join(_place(sharding, rows), shared)


def _place(sharding: NamedSharding, arrays: list) -> list:
    """Places this process's arrays, or its parts of global arrays, on the devices."""
    if jax.process_count() > 1:
        # NumPy slices arrays without a program; JAX would run one for each slice.
        arrays = jax.tree.map(np.asarray, arrays)
    # On a mesh of several processes, `jax.device_put` runs a collective to check that
    # the values are equal. The function below does not. With one process, both do the
    # same.
    arrays = jax.tree.map(copy_if_writeable, arrays)
    return jax.make_array_from_process_local_data(sharding, arrays)


def copy_if_writeable(x: Any) -> Any:
    """Copies a NumPy array if its owner could still write to it.

    JAX may read the buffer after `jax.device_put` has returned, and on CPU it keeps
    using the buffer (https://github.com/jax-ml/jax/issues/37830). So a loader that
    fills one buffer again and again would change batches that are already placed.
    """
    return x.copy() if isinstance(x, np.ndarray) and x.flags.writeable else x


def _size_error(num_local: int, index: int, count: int, wanted: int) -> BatchShapeError:
    if count == 1:
        return BatchShapeError(
            f"The batch has {num_local} rows, but global_batch_size={wanted}. Make the "
            "two equal, or leave global_batch_size out."
        )
    hint = " That is the global batch: give each process its share of it."
    rows, rest = divmod(wanted, count)
    valid = f"none: {wanted} rows do not divide by {count}" if rest else rows
    return BatchShapeError(
        f"Batch of {num_local} rows on process {jax.process_index()}, which gives "
        f"share {index} of {count}: together {num_local * count} rows, but "
        f"global_batch_size={wanted}.{hint if num_local == wanted else ''} Rows to "
        f"give here: {valid}."
    )
