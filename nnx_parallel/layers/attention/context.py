"""Attention over a sequence that the mesh splits, with three kinds of exchange.

All code runs in one region that is manual over every axis. There, each device has its
rows, heads and tokens of queries, keys and values, and sends the arrays that the
exchange needs. Masks are made from positions and segment ids. Each device can compute
the positions of all devices' tokens. Segment ids travel with the keys.
"""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.collectives.ring import SequenceAxis, check_divides
from nnx_parallel.collectives.sequence import (
    SequenceOrder,
    heads_for_sequence,
    send_on,
    sequence_for_heads,
)
from nnx_parallel.errors import IndivisibleDimError, ParallelWarning, warn_user
from nnx_parallel.layers.attention.blocks import (
    BLOCK,
    OUTPUT,
    Partial,
    Pattern,
    Tokens,
    backward_block,
    forward_block,
    merge,
    output_delta,
    sinks_gradient,
    with_sinks,
)
from nnx_parallel.layers.attention.kernels import (
    HEADS,
    AttentionCall,
    for_each_device,
    repeat_heads,
)
from nnx_parallel.mesh import free_axes
from nnx_parallel.precision import sum_dtype
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.specs import dim_axes

Kernel = Callable[[AttentionCall], Array]


def split_sequence(layout: Layout | None, call: AttentionCall) -> SequenceAxis | None:
    """Returns the axis and exchange of an attention, or ``None`` without an exchange.

    There is an exchange if a strategy splits the queries. During generation there is a
    single query, which is not split. A call with a mask array also has no exchange: the
    mask already has the size queries x keys, and XLA's partitioner gathers the keys.

    Raises:
        IndivisibleDimError: If the axis does not divide the number of queries.
    """
    query = call.query
    found = None if layout is None else layout.claims.sequence
    if layout is None or found is None or query.shape[1] == 1 or call.mask is not None:
        return None
    is_manual = found.axis in jax.sharding.get_abstract_mesh().manual_axes
    size = layout.mesh.shape[found.axis]
    if is_manual or size == 1 or found.axis not in layout.activation_axes("seq"):
        return None
    # Other activations are not split if the axis does not divide them. Here this is an
    # error, because each device would then compute the complete attention.
    check_divides(found.axis, size, ("the queries of an attention", query, 1))
    return found


def context_attention(layout: Layout, call: AttentionCall, kernel: Kernel) -> Array:
    """Computes attention over a sequence that a mesh axis splits (`split_sequence`).

    In cross-attention, the axis may not divide the number of keys. Then each device has
    all keys, and there is no exchange.

    Args:
        layout: The active layout, with an axis for sequences.
        call: The call with global arrays.
        kernel: Function that computes attention over complete sequences, for the
            exchange ``all_to_all``.

    Raises:
        IndivisibleDimError: If the exchange is ``all_to_all`` and the axis does not
            divide the heads.
    """
    split = layout.claims.sequence
    assert split is not None
    axes = dim_axes(layout.used_spec(call.query.shape, HEADS), 4)
    axes = (axes[0], (split.axis,), *axes[2:])
    size = layout.mesh.shape[split.axis]
    keys = (split.axis,) if call.lengths[1] % size == 0 else ()
    if split.exchange == "all_to_all" and keys:
        _check_heads(call, layout, axes[2], split.axis)
        run = partial(_all_to_all, split.axis, kernel)
    else:
        exchange = _EXCHANGES[split.exchange] if keys else _Local
        run = exchange.of(call, split.axis, size).attend
    return for_each_device(run, call, layout, axes, keys)


def _check_heads(
    call: AttentionCall, layout: Layout, shares: tuple[str, ...], axis: str
) -> None:
    sizes, size = layout.mesh.shape, layout.mesh.shape[axis]
    tensor = math.prod(sizes[a] for a in shares if a in free_axes(layout.mesh))
    heads = call.query.shape[2] // tensor
    if heads % size:
        own = f" (a tensor shard's share of {call.query.shape[2]})"
        divisors = [d for d in range(1, heads + 1) if heads % d == 0]
        raise IndivisibleDimError(
            f"exchange='all_to_all' splits the heads of attention over {axis}={size}, "
            f"which does not divide {heads} heads{own if tensor > 1 else ''}. Use a "
            f"size among {divisors}, or exchange='ring' or 'gather', which do not "
            "split heads."
        )


def _all_to_all(axis: str, kernel: Kernel, call: AttentionCall) -> Array:
    """Computes attention with an all-to-all before it and another one after it.

    After the first exchange, a device has all tokens of some heads, instead of some
    tokens of all heads.
    """
    size, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    key, value = (repeat_heads(x, size) for x in (call.key, call.value))
    query, key, value = (heads_for_sequence(x, axis) for x in (call.query, key, value))
    gather = partial(jax.lax.all_gather, axis_name=axis, axis=1, tiled=True)
    segments, sinks = jax.tree.map(gather, call.segments), call.sinks
    if sinks is not None:
        share = len(sinks) // size
        sinks = jax.lax.dynamic_slice_in_dim(sinks, index * share, share)
    gathered_call = replace(
        call, query=query, key=key, value=value, segments=segments, sinks=sinks
    )
    return sequence_for_heads(kernel(gathered_call), axis)


class _Keys(NamedTuple):
    """The keys, values and segments of some tokens, which travel together."""

    key: Array
    value: Array
    segments: Array | None


class _Sides(NamedTuple):
    """Queries, and the values that the backward pass needs for each query."""

    query: Array
    grad: Array
    lse: Array
    delta: Array


@dataclass(frozen=True, kw_only=True)
class _Exchange(abc.ABC):
    """A way to compute attention of a device's queries to the keys of all devices."""

    order: SequenceOrder
    pattern: Pattern

    # True if keys are moved into the same order as queries (`SequenceOrder.enter`).
    moves_keys: ClassVar[bool] = False

    @classmethod
    def of(cls, call: AttentionCall, axis: str, size: int) -> Self:
        """Makes the exchange for a call with global arrays; balanced if possible."""
        queries, keys = call.lengths
        length, is_causal = queries // size, call.causal and queries == keys
        if is_causal and length % 2:
            warn_user(
                f"Causal attention of {queries} tokens over {axis}={size} is not "
                f"balanced: the last device has {2 * size - 1} times the work of the "
                f"first. Use a sequence length that is a multiple of {2 * size}.",
                ParallelWarning,
            )
        is_balanced = is_causal and length % 2 == 0
        # Each block lies within one chunk. A block across the border of two chunks
        # could almost never be skipped.
        chunk = length // 2 if is_balanced else length
        block = -(-chunk // -(-chunk // BLOCK))
        return cls(
            order=SequenceOrder(axis=axis, is_balanced=is_balanced),
            pattern=replace(call.pattern, block=(block, block)),
        )

    @abc.abstractmethod
    def forward(self, query: Array, q_tokens: Tokens, keys: _Keys) -> Partial:
        """Computes attention to the keys of all devices."""

    @abc.abstractmethod
    def backward(self, sides: _Sides, q_tokens: Tokens, keys: _Keys) -> tuple:
        """Computes float32 gradients of this device's queries, keys and values."""

    def attend(self, call: AttentionCall) -> Array:
        """Computes the attention of this device's queries, inside a manual region."""
        q_segments, k_segments = call.segments or (None, None)
        keys = _Keys(call.key, call.value, k_segments)
        query, q_segments = jax.tree.map(self.order.enter, (call.query, q_segments))
        if self.moves_keys:
            keys = jax.tree.map(self.order.enter, keys)
        return self.order.leave(_attend(self, query, keys, q_segments, call.sinks))

    def outputs(
        self, query: Array, q_tokens: Tokens, keys: _Keys, k_tokens: Tokens
    ) -> Partial:
        """Computes attention to some of the keys."""
        operands = query, keys.key, keys.value, q_tokens, k_tokens
        return forward_block(*operands, self.pattern)

    def gradients(
        self, sides: _Sides, q_tokens: Tokens, keys: _Keys, k_tokens: Tokens
    ) -> tuple[Array, Array, Array]:
        """Computes the contribution of some keys to the gradients, in float32."""
        operands = sides.query, keys.key, keys.value, sides.grad, sides.lse, sides.delta
        return backward_block(*operands, q_tokens, k_tokens, self.pattern)

    def q_tokens(self, query: Array, segments: Array | None) -> Tokens:
        """Returns positions and segments of this device's queries."""
        index = jax.lax.axis_index(self.order.axis)
        return Tokens(self.order.positions(index, query.shape[1]), segments)


# The exchange has a custom gradient, because JAX's gradient would keep all keys that
# pass through a device.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    exchange: _Exchange,
    query: Array,
    keys: _Keys,
    q_segments: Array | None,
    sinks: Array | None,
) -> Array:
    return _attend_forward(exchange, query, keys, q_segments, sinks)[0]


def _attend_forward(
    exchange: _Exchange,
    query: Array,
    keys: _Keys,
    q_segments: Array | None,
    sinks: Array | None,
) -> tuple[Array, tuple]:
    part = exchange.forward(query, exchange.q_tokens(query, q_segments), keys)
    out, lse = with_sinks(part, sinks)
    out, lse = checkpoint_name((out.astype(query.dtype), lse), OUTPUT)
    return out, (query, keys, q_segments, sinks, out, lse)


def _attend_backward(exchange: _Exchange, saved: tuple, grad: Array) -> tuple:
    query, keys, q_segments, sinks, out, lse = saved
    # Without this barrier, XLA would see that both passes receive the same arrays from
    # other devices, and would keep them after the forward pass.
    keys, grad = jax.lax.optimization_barrier((keys, grad))
    delta = output_delta(out, grad)
    sides = _Sides(query, grad, lse, delta)
    grads = exchange.backward(sides, exchange.q_tokens(query, q_segments), keys)
    operands = zip(grads, (query, keys.key, keys.value), strict=True)
    dquery, dkey, dvalue = (g.astype(x.dtype) for g, x in operands)
    return dquery, _Keys(dkey, dvalue, None), None, sinks_gradient(sinks, lse, delta)


_attend.defvjp(_attend_forward, _attend_backward)


class _Local(_Exchange):
    """An exchange that sends nothing, because every device has all keys."""

    def forward(self, query: Array, q_tokens: Tokens, keys: _Keys) -> Partial:
        tokens = Tokens.in_order(keys.key.shape[1], keys.segments)
        return self.outputs(query, q_tokens, keys, tokens)

    def backward(self, sides: _Sides, q_tokens: Tokens, keys: _Keys) -> tuple:
        tokens = Tokens.in_order(keys.key.shape[1], keys.segments)
        return self.gradients(sides, q_tokens, keys, tokens)


class _Gather(_Local):
    """Gathers the keys of all devices, and gathers them again in the backward pass."""

    def forward(self, query: Array, q_tokens: Tokens, keys: _Keys) -> Partial:
        return super().forward(query, q_tokens, self._gather(keys))

    def backward(self, sides: _Sides, q_tokens: Tokens, keys: _Keys) -> tuple:
        dquery, *grads = super().backward(sides, q_tokens, self._gather(keys))
        axis = self.order.axis
        return dquery, *(
            jax.lax.psum_scatter(g, axis, scatter_dimension=1, tiled=True)
            for g in grads
        )

    def _gather(self, keys: _Keys) -> _Keys:
        axis = self.order.axis
        return jax.tree.map(
            lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True), keys
        )


class _Ring(_Exchange):
    """Sends keys from device to device; their gradients follow in the backward pass.

    Each hop starts before the product that hides it. Barriers make the next turn wait
    for the hop and the product of this turn. So a device holds the keys of only two
    devices, and XLA's scheduler for TPUs cannot move a hop after the last product.
    """

    moves_keys: ClassVar[bool] = True

    def forward(self, query: Array, q_tokens: Tokens, keys: _Keys) -> Partial:
        def attend(keys: _Keys, hop: int | Array) -> Partial:
            return self.outputs(query, q_tokens, keys, self._tokens(keys, hop))

        def turn(state: tuple, hop: Array) -> tuple[tuple, None]:
            part, keys = state
            following = send_on(keys, self.order.axis)
            found, following = jax.lax.optimization_barrier(
                (attend(keys, hop), following)
            )
            return (merge(part, found), following), None

        last = self.order.size - 1
        dtype = sum_dtype(query)
        out = jnp.zeros((*query.shape[:3], keys.value.shape[-1]), dtype)
        start = (out, jnp.full(out.shape[:3], -jnp.inf, dtype)), keys
        (part, keys), _ = jax.lax.scan(turn, start, jnp.arange(last))
        return merge(part, attend(keys, last))

    def backward(self, sides: _Sides, q_tokens: Tokens, keys: _Keys) -> tuple:
        axis, last = self.order.axis, self.order.size - 1
        # The keys of this device need no hop. The products with these keys hide two
        # other hops: products with the first half of the queries hide the first hop of
        # keys, and products with the second half hide the last hop of gradients.
        half = sides[0].shape[1] // 2
        (early, early_tokens), (late, late_tokens) = (
            jax.tree.map(lambda x, at=at: x[:, at], (sides, q_tokens))
            for at in (slice(half), slice(half, None))
        )
        passing = send_on(keys, axis)
        dearly, *local_grads = self._backward(early, early_tokens, keys, 0)
        dquery = jnp.zeros(sides[0].shape, dearly.dtype)
        local_grads, passing = jax.lax.optimization_barrier((local_grads, passing))

        def turn(state: tuple, hop: int | Array, *, ends: bool = False) -> tuple:
            # `sums` holds the gradients that travel with the keys. It starts empty.
            dquery, sums, passing = state
            following = () if ends else send_on(passing, axis)
            arriving = send_on(sums, axis)
            more, *found = self._backward(sides, q_tokens, passing, hop)
            # The sums are added after the product, so that the product does not wait
            # for them.
            found, arriving = jax.lax.optimization_barrier((found, arriving))
            found = jax.tree.map(jnp.add, found, arriving) if arriving else found
            return jax.lax.optimization_barrier((dquery + more, found, following)), None

        state = turn((dquery, [], passing), 1, ends=last == 1)[0]
        if last > 2:
            state, _ = jax.lax.scan(turn, state, jnp.arange(2, last))
        if last > 1:
            state = turn(state, last, ends=True)[0]
        dquery, sums, _ = state
        home = send_on(sums, axis)
        dlate, *more = self._backward(late, late_tokens, keys, 0)
        dquery += jnp.concatenate([dearly, dlate], axis=1)
        return dquery, *(
            a + b + c for a, b, c in zip(local_grads, more, home, strict=True)
        )

    def _backward(
        self, sides: _Sides, q_tokens: Tokens, keys: _Keys, hop: int | Array
    ) -> tuple:
        return self.gradients(sides, q_tokens, keys, self._tokens(keys, hop))

    def _tokens(self, keys: _Keys, hop: int | Array) -> Tokens:
        """Returns positions and segments of keys that have travelled ``hop`` hops."""
        owner = (jax.lax.axis_index(self.order.axis) - hop) % self.order.size
        positions = self.order.positions(owner, keys.key.shape[1])
        return Tokens(positions, keys.segments)


_EXCHANGES: dict[str, type[_Exchange]] = {"ring": _Ring, "gather": _Gather}
