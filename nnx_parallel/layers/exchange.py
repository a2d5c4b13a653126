"""Rows that go to the devices of their experts, and come back.

Who sends what to whom follows from one table, the rows of each device for each expert.
A device's tokens go in chunks: while the rows of one travel, the experts multiply those
of another.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nnx_parallel.layers.dispatch import (
    ExpertMLPs,
    Kernels,
    Order,
    Routed,
    TokenAxes,
    around,
    collect,
    combine,
    dispatch,
    products,
    sort_by_expert,
)
from nnx_parallel.layers.rounds import round_rows, sum_rounds
from nnx_parallel.precision import sum_dtype

NUM_CHUNKS = 2
"""Parts of a device's tokens that travel by themselves.

Each further part hides more of the exchanges and adds tiles of grouped products that
are not full: of 128 rows, one for each further expert of a device.
"""


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

    def numbers(self, of_rows: Array, axis: str) -> Array:
        """`send` of one number a row: ``(received rows,)``."""
        return _pick(of_rows, self.back, len(self.expert), axis)

    def numbers_back(self, of_rows: Array, num_rows: int, axis: str) -> Array:
        """The inverse of `numbers`."""
        return _pick(of_rows, self.there, num_rows, axis)


def _pick(numbers: Array, own: Moves, length: int, axis: str) -> Array:
    """Of the rows of all devices one number each: those of the rows that are here.

    An exchange of rows of one number would send 128, which TPUs pad them to.
    """
    table = jax.lax.all_gather(numbers, axis)  # (devices, rows there)
    first = jnp.arange(len(table)) * len(numbers) + own.places
    offset = jnp.arange(length)[:, None] - own.starts[None]  # (rows here, devices)
    is_in = (offset >= 0) & (offset < own.sizes[None])
    place = jnp.sum(jnp.where(is_in, first[None] + offset, 0), axis=1)
    return jnp.where(jnp.any(is_in, axis=1), table.reshape(-1)[place], 0)


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


def ragged(
    experts: ExpertMLPs,
    axes: TokenAxes,
    routed: Routed,
    alongside: Array | None = None,
) -> Array:
    """Outputs of tokens, each row of which goes to its expert and comes back.

    Not on CPUs, for which `jax.lax.ragged_all_to_all` is not implemented. A device has
    room for a few more rows than it sends; further ones come in further rounds, and no
    row is ever dropped. What is computed ``alongside`` is ready before the first
    products: it can hide the exchange that these wait for.
    """
    run = partial(_in_chunks, experts, axes.expert[0], alongside)
    return around(run, axes, axes.mlp, routed)


class _Routes(NamedTuple):
    """Where the rows of each chunk go.

    Attributes:
        order: Of a chunk's rows, each array with a leading dim of chunks.
        counts: int ``(chunks, devices, experts)``, the rows of each device for each
            expert.
        further: int ``(chunks,)``, rounds after the first.
        alongside: Computed before the first products; without a gradient.
    """

    order: Order
    counts: Array
    further: Array
    alongside: Array | None


_Operands = tuple[Array, Array, Kernels]
"""Tokens ``(chunks, tokens, embed)``, weights ``(chunks, tokens, top_k)``, kernels."""


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
    # Equal on all devices of the axis, which take part in each exchange.
    further = jnp.maximum(-(-jnp.max(received, axis=1) // num_rows) - 1, 0)
    exchange = _Exchange(activate=experts.activate, num_rows=num_rows, axis=axis)
    y = sum_rounds(
        exchange.chunks,
        exchange.further_round,
        jnp.sum(further) if most > num_rows else None,
        _Routes(order, counts, further, jax.lax.stop_gradient(alongside)),
        (tokens, weights, experts.kernels),
    )
    return y.reshape(routed.x.shape)


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """Rounds in which rows meet their experts."""

    activate: Callable[[Array], Array]
    num_rows: int
    axis: str

    def chunks(self, routes: _Routes, operands: _Operands) -> Array:
        """Outputs of all chunks, the first round of each."""
        rounds = [self._round(i, 0, routes, operands) for i in range(len(operands[0]))]
        came, outs = rounds[0].send(), []
        if routes.alongside is not None:
            came, _ = jax.lax.optimization_barrier((came, routes.alongside))
        for this, following in zip(rounds, [*rounds[1:], None], strict=True):
            coming = [] if following is None else following.send()
            # XLA's scheduler for TPUs has one exchange under way at a time. Here each
            # has the products of one chunk to itself: the next chunk comes during
            # these, and their results go back during the next ones. Where it could
            # choose between two, it ran some with no product beside them.
            rows, came = jax.lax.optimization_barrier((this.multiply(came), coming))
            outs.append(rows)
        # Likewise backward, where the last chunk comes first: its gradients can come
        # while its own products are computed again, those of the others after these.
        after = [*outs[1:], outs[-2]] if len(outs) > 1 else [None]
        parts = zip(rounds, outs, after, strict=True)
        return jnp.stack([this.send_back(rows, known) for this, rows, known in parts])

    def further_round(
        self, index: Array, routes: _Routes, operands: _Operands
    ) -> Array:
        """Outputs of one chunk, which had more rows than there was room for."""
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
        """Of a chunk, the rows that each receiver has at ``first`` and after."""
        tokens, weights, kernels = operands
        experts = ExpertMLPs(kernels=kernels, activate=self.activate)
        order, counts, own, weight = jax.tree.map(
            lambda x: x[chunk], (routes.order, routes.counts, tokens, weights)
        )
        here = jax.lax.axis_index(self.axis)
        plan = RowExchange.plan(counts, here, experts.count, first, self.num_rows)
        return _Round(experts, self.axis, plan, order, own, weight)


class _Round(NamedTuple):
    """Rows of one chunk of tokens, as many as there is room for."""

    experts: ExpertMLPs
    axis: str
    plan: RowExchange
    order: Order
    tokens: Array
    weights: Array

    def send(self) -> Array:
        return self.plan.send(dispatch(self.tokens, self.order), self.axis)

    def multiply(self, rows: Array) -> Array:
        # From the order of senders to that of experts, and back.
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
    """Rows back to the device of their tokens, and there added by weight.

    The gradient is sent ``after`` something else is known.
    """
    del after
    return combine(plan.send_back(rows, weights.size, axis), weights, order)


# JAX's own gradient has the rows that came back, for that of the weights. Kept they are
# as many numbers as all of a layer's rows, and with remat they are sent once more. Here
# the weights go to the rows instead, one number for each.
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
