"""Rows that go to the devices of their experts, and come back.

Who sends what to whom follows from one table, the rows of each device for each expert.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Moves(NamedTuple):
    """Rows from here to each device, as `jax.lax.ragged_all_to_all` takes it.

    Attributes:
        starts: int ``(devices,)``, where the rows for each device begin.
        sizes: Their numbers.
        places: Where they begin at the receiver.
        received: The numbers of rows that come from each device.
    """

    starts: Array
    sizes: Array
    places: Array
    received: Array


class RowExchange(NamedTuple):
    """Which rows go where.

    Attributes:
        there: To the devices of their experts.
        back: From these.
        expert: int ``(rows,)``, the expert of each row that comes, of this device's;
            their number, where no row comes.
    """

    there: Moves
    back: Moves
    expert: Array

    @classmethod
    def plan(
        cls,
        counts: Array,
        index: Array,
        num_local: int,
        first: Array | int,
        num_rows: int,
    ) -> "RowExchange":
        """From the rows ``(devices, experts)`` of each device for each expert.

        Rows are sorted by expert at the sender, hence by receiver, and by sender at the
        receiver. Those go that each receiver has at ``first`` and after, so many that
        ``num_rows`` come.
        """
        num_devices = counts.shape[0]
        # (from, to, expert of the receiver)
        counts = counts.reshape(num_devices, num_devices, num_local)
        pairs = jnp.sum(counts, axis=2)  # (from, to)
        at_sender = jnp.cumsum(pairs, axis=1) - pairs
        at_receiver = jnp.cumsum(pairs, axis=0) - pairs - first
        begin = jnp.clip(-at_receiver, 0, pairs)
        sizes = jnp.clip(num_rows - at_receiver, 0, pairs) - begin
        starts = at_sender + begin
        places = jnp.clip(at_receiver, 0, num_rows)
        ends = jnp.cumsum(counts[:, index].reshape(-1)) - first  # of (from, expert)
        # Compared with each and reduced at once: a search is a loop of gathers.
        is_after = jnp.arange(num_rows)[:, None] >= ends[None]
        segment = jnp.sum(is_after, axis=1, dtype=jnp.int32)
        own = jnp.where(segment < len(ends), segment % num_local, num_local)
        return cls(
            there=Moves(starts[index], sizes[index], places[index], sizes[:, index]),
            back=Moves(
                places[:, index], sizes[:, index], starts[:, index], sizes[index]
            ),
            expert=own,
        )

    def send(self, rows: Array, axis: str) -> Array:
        """A device's rows to those of their experts: ``(received rows, width)``."""
        sizes = (len(rows), len(self.expert))
        return _move(axis, sizes, rows, self.there, self.back)

    def send_back(self, rows: Array, num_rows: int, axis: str) -> Array:
        """The inverse of `send`; rows that it did not send are zero."""
        return _move(axis, (len(rows), num_rows), rows, self.back, self.there)


# JAX's own gradient exchanges the offsets once more, which both sides know here.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(
    axis: str, sizes: tuple[int, int], rows: Array, there: Moves, back: Moves
) -> Array:
    """Rows to other devices; their number here and there, and the inverse."""
    out = jnp.zeros((sizes[1], rows.shape[1]), rows.dtype)
    return jax.lax.ragged_all_to_all(rows, out, *there, axis_name=axis)


def _move_backward(
    axis: str, sizes: tuple[int, int], saved: tuple[Moves, Moves], grad: Array
) -> tuple[Array, None, None]:
    return _move(axis, sizes[::-1], grad, *saved), None, None


_move.defvjp(
    lambda axis, sizes, rows, *moves: (_move(axis, sizes, rows, *moves), moves[::-1]),
    _move_backward,
)
