"""Host batches to global arrays, rows split over the batch's mesh axes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from nnx_parallel.data.batches import check_divisible
from nnx_parallel.errors import BatchShapeError, MeshShapeError
from nnx_parallel.sharding import Layout


def data_share(layout: Layout) -> tuple[int, int]:
    """Which part of the rows of each batch this process gives: ``(index, count)``.

    Processes that split no rows between them, as under tensor parallelism across
    machines, give the same part.

    Raises:
        MeshShapeError: If two processes have some of their rows in common, not all.
    """
    parts = _processes_by_part(layout)
    mine = jax.process_index()
    return next(i for i, p in enumerate(parts) if mine in p), len(parts)


def _processes_by_part(layout: Layout) -> list[list[int]]:
    """The processes that give each part of the rows, parts in the order of rows."""
    if jax.process_count() == 1:
        return [[0]]
    num_parts = layout.mesh.size
    sharding = layout.sharding(layout.batch_spec(num_parts))
    rows: dict[int, set[int]] = {}
    for device, index in sharding.devices_indices_map((num_parts,)).items():
        mine = rows.setdefault(device.process_index, set())
        mine.update(range(num_parts)[index[0]])
    parts: dict[tuple[int, ...], list[int]] = {}
    for process in sorted(rows):
        parts.setdefault(tuple(sorted(rows[process])), []).append(process)
    if sum(map(len, parts)) != num_parts or len(set(map(len, parts))) > 1:
        raise MeshShapeError(
            f"Mesh {dict(layout.mesh.shape)} gives processes parts of the batch that "
            "overlap without being equal. The devices of a process must hold equal "
            "parts: let the product of the batch's axes within a process divide its "
            f"{jax.local_device_count()} devices."
        )
    return [parts[part] for part in sorted(parts)]


def place_batch(
    batch: Any,
    layout: Layout,
    *,
    num_microbatches: int | None = None,
    global_batch_size: int | None = None,
) -> Any:
    """Puts a host batch on the mesh, its rows split over the batch axes.

    Each device receives its own rows only. The host's arrays may be written to again
    once this returns.

    Args:
        batch: A pytree of arrays whose dim 0 counts the rows of this process's
            `data_share`: with one process those of the global batch.
        layout: The layout.
        num_microbatches: Check that the rows divide evenly over microbatches and
            batch axes. ``None`` (evaluation) splits the rows over as many axes as
            divide them, none if it must.
        global_batch_size: Check that the shares add up to so many rows.

    Raises:
        BatchShapeError: If the rows do not divide, or are not those stated.
    """
    index, count = data_share(layout)
    num_local = jax.tree.leaves(batch)[0].shape[0]
    num_rows = num_local * count
    if global_batch_size is not None and num_rows != global_batch_size:
        raise _size_error(num_local, index, count, global_batch_size)
    sizes = {axis: layout.mesh.shape[axis] for axis in layout.batch_axes}
    if num_microbatches is not None:
        check_divisible(num_rows, num_microbatches, sizes)
    sharding = layout.sharding(layout.batch_spec(num_rows))
    if jax.process_count() == 1:
        return jax.tree.map(lambda x: jax.device_put(own_array(x), sharding), batch)
    if count > 1 and num_rows % np.prod(list(sizes.values())) != 0:
        givers = [processes[0] for processes in _processes_by_part(layout)]
        shares = multihost_utils.process_allgather(batch)
        return jax.tree.map(
            lambda x: _replicate(np.concatenate([x[p] for p in givers]), sharding),
            shares,
        )
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(
            sharding, own_array(np.asarray(x))
        ),
        batch,
    )


def own_array(x: Any) -> Any:
    """A copy of an array that its owner could write to, which jax may read later."""
    return x.copy() if isinstance(x, np.ndarray) and x.flags.writeable else x


def _replicate(host: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def _size_error(num_local: int, index: int, count: int, wanted: int) -> BatchShapeError:
    if count == 1:
        return BatchShapeError(
            f"Batch of {num_local} rows, but global_batch_size={wanted}. Make the two "
            "equal, or leave global_batch_size out."
        )
    whose = " That is the global batch: give each process its share of it."
    rule = (
        f"{wanted // count}"
        if wanted % count == 0
        else f"none: {wanted} rows do not divide by {count}"
    )
    return BatchShapeError(
        f"Batch of {num_local} rows on process {jax.process_index()}, which gives "
        f"share {index} of {count}: together {num_local * count} "
        f"rows, but global_batch_size={wanted}."
        f"{whose if num_local == wanted else ''} Rows to give here: {rule}."
    )
