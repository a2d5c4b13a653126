"""Sends rows to the devices of their experts, and back.

Each device knows how many rows every device has for every expert. From this table, it
computes which rows it sends and receives. The tokens of a device are sent in chunks:
while the rows of one chunk travel, the experts compute the products of another chunk.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nnx_parallel.layers.activations import Activate
from nnx_parallel.layers.experts.dispatch import (
    ExpertMLPs,
    InEightBits,
    Kernels,
    Order,
    Routed,
    TokenAxes,
    around,
    collect,
    combine,
    dispatch,
    products,
    round_rows,
    sort_by_expert,
    sum_rounds,
)
from nnx_parallel.precision import sum_dtype

NUM_CHUNKS = 2
"""Number of chunks of a device's tokens, which travel separately.

With more chunks, products hide more of the exchanges. But for each expert of a device,
each chunk after the first adds a partly filled tile of 128 rows to the grouped
products.
"""


class Moves(NamedTuple):
    """Sizes and offsets of the rows that travel, for `jax.lax.ragged_all_to_all`.

    All attributes are int ``(devices,)``.

    Attributes:
        starts: The index on this device at which the rows for each device begin.
        sizes: The number of rows for each device.
        places: The index on each receiver at which these rows begin.
        received: The number of rows that come from each device.
    """

    starts: Array
    sizes: Array
    places: Array
    received: Array


class RowExchange(NamedTuple):
    """The moves of rows to the devices of their experts and back.

    Attributes:
        there: The moves to the devices of the experts.
        back: The moves back.
        expert: int ``(rows,)``, the expert of each received row, as an index into this
            device's experts. At indices without a received row, the value is the number
            of experts.
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
        """Plans the moves of one round.

        On a sender, rows are sorted by expert, and so also by receiver. On a receiver,
        rows are sorted by sender.

        Args:
            counts: int ``(devices, experts)``, the number of rows that each device has
                for each expert.
            index: The index of this device.
            num_local: The number of experts on each device.
            first: The index of the first row of this round, among all rows of a
                receiver.
            num_rows: Maximum number of rows that a receiver gets in a round.
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
        # Each row is compared with all ends. A binary search would be a loop of
        # gathers.
        is_after = jnp.arange(num_rows)[:, None] >= ends[None]
        segment = jnp.sum(is_after, axis=1, dtype=jnp.int32)
        local_expert = jnp.where(segment < len(ends), segment % num_local, num_local)
        return cls(
            there=Moves(starts[index], sizes[index], places[index], sizes[:, index]),
            back=Moves(
                places[:, index], sizes[:, index], starts[:, index], sizes[index]
            ),
            expert=local_expert,
        )

    def send(self, rows: Array, axis: str) -> Array:
        """Sends rows to the devices of their experts: ``(received rows, width)``."""
        sizes = (len(rows), len(self.expert))
        return _move(axis, sizes, rows, self.there, self.back)

    def send_back(self, rows: Array, num_rows: int, axis: str) -> Array:
        """Undoes `send`; rows that `send` did not send are zero."""
        return _move(axis, (len(rows), num_rows), rows, self.back, self.there)

    def numbers(self, of_rows: Array, axis: str) -> Array:
        """Sends one number per row, like `send`; returns ``(received rows,)``."""
        return _pick(of_rows, self.back, len(self.expert), axis)

    def numbers_back(self, of_rows: Array, num_rows: int, axis: str) -> Array:
        """Sends one number per received row back, which undoes `numbers`."""
        return _pick(of_rows, self.there, num_rows, axis)


def _pick(numbers: Array, moves: Moves, length: int, axis: str) -> Array:
    """Moves one number per row, by an all-gather and a selection.

    In `jax.lax.ragged_all_to_all`, TPUs would pad each number to a row of 128 numbers.
    """
    table = jax.lax.all_gather(numbers, axis)  # (devices, rows there)
    first = jnp.arange(len(table)) * len(numbers) + moves.places
    offset = jnp.arange(length)[:, None] - moves.starts[None]  # (rows here, devices)
    is_in = (offset >= 0) & (offset < moves.sizes[None])
    place = jnp.sum(jnp.where(is_in, first[None] + offset, 0), axis=1)
    return jnp.where(jnp.any(is_in, axis=1), table.reshape(-1)[place], 0)


# The gradient is custom, because JAX's gradient would exchange the offsets once more,
# although both sides know them.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(
    axis: str, sizes: tuple[int, int], rows: Array, there: Moves, back: Moves
) -> Array:
    """Moves rows to other devices; ``sizes``: number of rows before and after."""
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


def ragged(
    experts: ExpertMLPs,
    axes: TokenAxes,
    routed: Routed,
    alongside: Array | None = None,
) -> Array:
    """Computes outputs of tokens by sending rows to the devices of their experts.

    This does not run on CPUs, for which `jax.lax.ragged_all_to_all` is not implemented.
    A device can receive a few more rows than it sends. The remaining rows arrive in
    further rounds, so that no row is dropped.

    ``alongside`` is the result of another computation. This computation runs before the
    first products of experts, and hides the exchange that these products wait for.
    """
    run = partial(_in_chunks, experts, axes.expert[0], alongside)
    return around(run, axes, axes.mlp, routed)


class _Routes(NamedTuple):
    """The routes of the rows of each chunk.

    Attributes:
        order: Order of the rows of each chunk; arrays have a leading dim of chunks.
        counts: int ``(chunks, devices, experts)``, the number of rows of each device
            for each expert.
        further: int ``(chunks,)``, the number of rounds after the first round.
        alongside: An array that is computed before the first products, or ``None``. No
            gradient flows to the array from here.
        in_8_bits: The kernels in 8 bits, or ``None``.
    """

    order: Order
    counts: Array
    further: Array
    alongside: Array | None
    in_8_bits: InEightBits | None


_Operands = tuple[Array, Array, Kernels]
"""Tokens ``(chunks, tokens, embed)``; weights ``(chunks, tokens, top_k)``; kernels."""


def _in_chunks(
    experts: ExpertMLPs, axis: str, alongside: Array | None, routed: Routed
) -> Array:
    size, num_tokens = jax.lax.axis_size(axis), math.prod(routed.x.shape[:2])
    num_chunks = math.gcd(NUM_CHUNKS, num_tokens)
    # (chunks, tokens of a chunk, ...)
    tokens, chosen, weights = (
        a.reshape(num_chunks, -1, a.shape[-1]) for a in routed.flat()
    )
    num_choices, num_experts = chosen[0].size, experts.count * size
    order = jax.vmap(lambda c: sort_by_expert(c, num_experts, num_choices))(chosen)
    counts = jax.lax.all_gather(order.sizes, axis, axis=1)
    most = size * tokens.shape[1] * min(chosen.shape[2], experts.count)
    num_rows = round_rows(num_choices, most)
    received = jnp.sum(counts.reshape(num_chunks, size, size, -1), axis=(1, 3))
    # The maximum makes `further` equal on all devices of the axis, because all of them
    # must take part in each exchange.
    further = jnp.maximum(-(-jnp.max(received, axis=1) // num_rows) - 1, 0)
    exchange = _Exchange(activate=experts.activate, num_rows=num_rows, axis=axis)
    y = sum_rounds(
        exchange.chunks,
        exchange.further_round,
        jnp.sum(further) if most > num_rows else None,
        _Routes(
            order,
            counts,
            further,
            jax.lax.stop_gradient(alongside),
            experts.in_8_bits,
        ),
        (tokens, weights, experts.kernels),
    )
    return y.reshape(routed.x.shape)


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """Runs rounds of sending rows to experts, multiplying, and sending back."""

    activate: Activate
    num_rows: int
    axis: str

    def chunks(self, routes: _Routes, operands: _Operands) -> Array:
        """Computes the outputs of all chunks in their first rounds."""
        rounds = [self._round(i, 0, routes, operands) for i in range(len(operands[0]))]
        came, outs = rounds[0].send(), []
        if routes.alongside is not None:
            came, _ = jax.lax.optimization_barrier((came, routes.alongside))
        for this, following in zip(rounds, [*rounds[1:], None], strict=True):
            coming = [] if following is None else following.send()
            # XLA's scheduler for TPUs runs one exchange at a time. These barriers let
            # the products of one chunk hide each exchange: the next chunk arrives
            # during these products, and their results go back during the next products.
            # Without barriers, the scheduler put two exchanges beside the same
            # products, so that products hid only one of them.
            rows, came = jax.lax.optimization_barrier((this.multiply(came), coming))
            outs.append(rows)
        # The same holds in the backward pass, which begins with the last chunk. The
        # gradients of the last chunk can arrive while its products are recomputed, and
        # the gradients of the other chunks can arrive after that.
        after = [*outs[1:], outs[-2]] if len(outs) > 1 else [None]
        parts = zip(rounds, outs, after, strict=True)
        return jnp.stack([this.send_back(rows, known) for this, rows, known in parts])

    def further_round(
        self, index: Array, routes: _Routes, operands: _Operands
    ) -> Array:
        """Computes outputs for rows of a chunk that did not fit into earlier rounds."""
        ends = jnp.cumsum(routes.further)
        chunk = jnp.sum(index >= ends)
        number = index - (ends - routes.further)[chunk] + 1
        this = self._round(chunk, number * self.num_rows, routes, operands)
        y = this.send_back(this.multiply(this.send()))
        zeros = jnp.zeros_like(operands[0])
        return jax.lax.dynamic_update_index_in_dim(zeros, y, chunk, 0)

    def _round(
        self,
        chunk: int | Array,
        first: int | Array,
        routes: _Routes,
        operands: _Operands,
    ) -> "_Round":
        """Makes the round that begins at row ``first`` of each receiver."""
        tokens, weights, kernels = operands
        experts = ExpertMLPs(
            kernels=kernels, activate=self.activate, in_8_bits=routes.in_8_bits
        )
        order, counts, chunk_tokens, weight = jax.tree.map(
            lambda x: x[chunk], (routes.order, routes.counts, tokens, weights)
        )
        here = jax.lax.axis_index(self.axis)
        plan = RowExchange.plan(counts, here, experts.count, first, self.num_rows)
        return _Round(experts, self.axis, plan, order, chunk_tokens, weight)


class _Round(NamedTuple):
    """One round, with as many rows of a chunk as receivers have room for."""

    experts: ExpertMLPs
    axis: str
    plan: RowExchange
    order: Order
    tokens: Array
    weights: Array

    def send(self) -> Array:
        return self.plan.send(dispatch(self.tokens, self.order), self.axis)

    def multiply(self, rows: Array) -> Array:
        # Rows are sorted by sender. They are sorted by expert for the products, and
        # then put back into the order of senders.
        expert = self.plan.expert
        inner = sort_by_expert(expert[:, None], self.experts.count, len(expert))
        return collect(products(self.experts, dispatch(rows, inner), inner), inner)

    def send_back(self, rows: Array, after: Array | None = None) -> Array:
        return _bring_home(self.axis, rows, self.weights, self.plan, self.order, after)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bring_home(
    axis: str,
    rows: Array,
    weights: Array,
    plan: RowExchange,
    order: Order,
    after: Array | None,
) -> Array:
    """Sends rows back to the devices of their tokens, which compute weighted sums.

    In the backward pass, the gradient is sent only after ``after`` has been computed.
    """
    del after
    return combine(plan.send_back(rows, weights.size, axis), weights, order)


# JAX's gradient of the weights would need the rows that were sent back. Keeping these
# rows would take as much memory as all rows of a layer, and with remat they would be
# sent once more. Instead, this gradient sends the weights to the rows: one number for
# each row.
def _bring_home_backward(
    axis: str, saved: tuple, grad: Array
) -> tuple[Array, Array, None, None, None]:
    rows, weights, plan, order, after = saved
    grad, _ = jax.lax.optimization_barrier((grad, after))
    came = plan.send(dispatch(grad, order), axis)
    weight = plan.numbers(weights.reshape(-1)[order.choice], axis)
    wide = sum_dtype(rows)
    found = jnp.sum(rows.astype(wide) * came.astype(wide), axis=-1)
    found = plan.numbers_back(found, weights.size, axis)
    drows = (came * weight[:, None]).astype(rows.dtype)
    return drows, found[order.row].astype(weights.dtype), None, None, None


_bring_home.defvjp(
    lambda axis, *saved: (_bring_home(axis, *saved), saved), _bring_home_backward
)
