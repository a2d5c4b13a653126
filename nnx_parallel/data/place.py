"""Host batches to global arrays, rows split over the batch's mesh axes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nnx_parallel.data.batches import check_divisible
from nnx_parallel.sharding import Layout


def place_batch(
    batch: Any, layout: Layout, *, num_microbatches: int | None = None
) -> Any:
    """Puts a host batch on the mesh, its rows split over the batch axes.

    Each device receives its own rows only.

    Args:
        batch: A pytree of arrays whose dim 0 counts the rows of the global batch.
        layout: The layout.
        num_microbatches: Check that the rows divide evenly over microbatches and
            batch axes. ``None`` (evaluation) splits the rows over as many axes as
            divide them, none if it must.

    Raises:
        BatchShapeError: If the rows do not divide.
    """
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    if num_microbatches is not None:
        sizes = {axis: layout.mesh.shape[axis] for axis in layout.batch_axes}
        check_divisible(num_rows, num_microbatches, sizes)
    sharding = layout.sharding(layout.batch_spec(num_rows))

    def place(x: Any) -> jax.Array:
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)

    return jax.tree.map(place, batch)
