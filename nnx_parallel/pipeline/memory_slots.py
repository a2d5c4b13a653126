"""Memory slots: values of one shape, written and read by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def make_slots(count: int, tree: Any) -> Any:
    """Zeros for ``count`` values like those of a tree, and for one that nobody reads.

    What a stage without a slot of its own computes is written there: to keep the old
    value instead it would have to be read, and XLA copies a whole buffer that is read
    and written at once.
    """
    return jax.tree.map(lambda x: jnp.zeros((count + 1, *x.shape), x.dtype), tree)


def read_slot(slots: Any, slot: jax.Array) -> Any:
    """The value in a slot; anything if the slot is -1."""
    index = jnp.maximum(slot, 0)
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), slots
    )


def write_slot(slots: Any, value: Any, slot: jax.Array) -> Any:
    """The slots with a value in one of them, unless the slot is -1."""

    def write(x: jax.Array, new: jax.Array) -> jax.Array:
        index = jnp.where(slot >= 0, slot, x.shape[0] - 1)
        return jax.lax.dynamic_update_index_in_dim(x, new, index, axis=0)

    return jax.tree.map(write, slots, value)


class Chunks:
    """The chunks of layers that a stage holds, one after the other.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def take(self, layers: Any, chunk: jax.Array) -> Any:
        """The layers of one chunk; of any if it is -1."""
        if self._count == 1:
            return layers

        def take(x: jax.Array) -> jax.Array:
            size = x.shape[0] // self._count
            return jax.lax.dynamic_slice_in_dim(x, jnp.maximum(chunk, 0) * size, size)

        return jax.tree.map(take, layers)

    def put(self, layers: Any, new: Any, chunk: jax.Array) -> Any:
        """The layers with one chunk replaced, unless the chunk is -1."""

        def put(x: jax.Array, part: jax.Array, old: jax.Array) -> jax.Array:
            part = jnp.where(chunk >= 0, part, old)
            start = jnp.maximum(chunk, 0) * part.shape[0]
            return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=0)

        return jax.tree.map(put, layers, new, self.take(layers, chunk))

    def adder(self, chunk: jax.Array) -> Callable[[Any, Any, jax.Array], Any]:
        """``(totals of all layers, values of one, its index in the chunk) -> totals``.

        Adds in the totals' dtype, in place; nothing if the chunk is -1.
        """

        def add(totals: Any, new: Any, layer: jax.Array) -> Any:
            def add_one(x: jax.Array, part: jax.Array) -> jax.Array:
                size = x.shape[0] // self._count
                index = jnp.maximum(chunk, 0) * size + layer
                old = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
                part = jnp.where(chunk >= 0, part.astype(x.dtype), 0)
                return jax.lax.dynamic_update_index_in_dim(x, old + part, index, axis=0)

            return jax.tree.map(add_one, totals, new)

        return add
