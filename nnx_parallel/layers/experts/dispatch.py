"""Sorts tokens by expert, and computes the products of all experts at once.

A row is one choice of a token: a token has a row for each expert that it goes to. On a
mesh, tokens reach the experts in one of two ways. Either the tokens of all devices are
gathered and the outputs are scattered back (`gathered`), or each row goes to the device
of its expert and comes back (`layers.experts.ragged`). Both ways run inside a region
that is manual over all axes.

In the worst case, the experts of one device get the tokens of all devices. On N
devices, buffers for this case would be N times as large as buffers for balanced tokens.
So rows are computed in rounds: a device has room for its share of the rows and a few
more, and the remaining rows wait for the next round. Balanced tokens fit into the first
round, and then there are no further rounds.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.layers.activations import Activate
from nnx_parallel.layers.eight_bit import (
    Grouped,
    Kernel,
    eight_bit_ragged_dot,
    note_layer,
    round_kernel,
)
from nnx_parallel.layers.experts.routing import is_equal
from nnx_parallel.precision import EightBit, sum_dtype

SLACK = 0.25
"""Extra room for rows, as a share of a device's rows under perfect balance."""

Part = Callable[..., Array]
"""A function that computes one round and returns its part of a sum.

The arguments are ``(given, operands)`` for the first round, and ``(index, given,
operands)`` for further rounds (`sum_rounds`).
"""


def round_rows(expected: float, most: int) -> int:
    """Returns the number of rows of a round: a few more than ``expected``.

    The number is at most ``most``.
    """
    rows = math.ceil(expected * (1 + SLACK))
    # Kernels of grouped products work on tiles of 128 rows, so the number of rows is
    # rounded up to a multiple of 128. A small number is rounded up to a multiple of 8.
    step = 128 if rows >= 1024 else 8
    return min(-(-rows // step) * step, most)


def sum_rounds(
    first: Part,
    further: Part,
    num_further: Array | None,
    given: Any,
    operands: Any,
) -> Array:
    """Sums ``first(given, operands)`` and all ``further(index, given, operands)``.

    The gradient runs the same rounds. It uses the saved residuals of the first round
    and recomputes further rounds, so that it needs memory for only one round.

    Args:
        first: The first round. It must be hashable, and must not close over traced
            values.
        further: The further rounds, which balanced tokens do not need. The function
            must also be hashable and must not close over traced values.
        num_further: int32 scalar, the number of further rounds. It must be equal on all
            devices that communicate in a round. ``None`` if further rounds cannot
            occur; then there is no loop.
        given: A pytree of arrays that get no gradient.
        operands: A pytree of arrays. The sum can be differentiated with respect to
            them.
    """
    if num_further is None:
        return first(given, operands)
    return _sum(first, further, num_further, given, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(first: Part, further: Part, count: Array, given: Any, operands: Any) -> Array:
    start = first(given, operands)
    return _add_others(lambda index: further(index, given, operands), count, start)


def _forward(
    first: Part, further: Part, count: Array, given: Any, operands: Any
) -> tuple[Array, Any]:
    start, pull = jax.vjp(partial(first, given), operands)
    total = _add_others(lambda index: further(index, given, operands), count, start)
    return total, (pull, count, given, operands)


def _backward(
    first: Part, further: Part, saved: Any, grad: Array
) -> tuple[None, None, Any]:
    del first
    pull, count, given, operands = saved

    def of_round(index: Array) -> Any:
        _, pull_round = jax.vjp(partial(further, index, given), operands)
        return pull_round(grad)[0]

    return None, None, _add_others(of_round, count, pull(grad)[0])


def _add_others(function: Callable[[Array], Any], count: Array, first: Any) -> Any:
    """Adds the results of further rounds to the result of the first one."""

    def body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        index, total = carry
        return index + 1, jax.tree.map(jnp.add, total, function(index))

    # The number of trips of this loop depends on data. `audit(trips=...)` refers to the
    # loop by the name of this scope.
    with jax.named_scope("more_rounds"):
        start = (jnp.int32(0), first)
        return jax.lax.while_loop(lambda carry: carry[0] < count, body, start)[1]


_sum.defvjp(_forward, _backward)


Axes = tuple[str, ...]


class Order(NamedTuple):
    """The order of rows by expert; a token has a row for each of its `top_k` choices.

    Attributes:
        choice: int ``(rows,)``, the choice of each row, as an index into the choices of
            all tokens.
        row: int ``(tokens, top_k)``, the row of each choice. In the result of `part`,
            choices with rows in other parts have numbers outside the range of rows.
        sizes: int ``(experts,)``, the number of rows of each expert. Rows after the sum
            of the sizes belong to no expert, and contribute zero to the outputs.
    """

    choice: Array
    row: Array
    sizes: Array

    @property
    def token(self) -> Array:
        """Returns the token of each row."""
        return self.choice // self.row.shape[1]

    def part(self, start: Array | int, num_rows: int) -> "Order":
        """Returns the order of the rows ``start`` to ``start + num_rows - 1``."""
        choice = jnp.pad(self.choice, (0, num_rows))
        ends = jnp.clip(jnp.cumsum(self.sizes) - start, 0, num_rows)
        return Order(
            choice=jax.lax.dynamic_slice_in_dim(choice, start, num_rows),
            row=self.row - start,
            sizes=jnp.diff(ends, prepend=0).astype(jnp.int32),
        )


def sort_by_expert(chosen: Array, num_experts: int, num_rows: int) -> Order:
    """Sorts choices, int ``(tokens, top_k)``, into rows by expert.

    Args:
        chosen: The chosen experts. A number of at least ``num_experts`` means no
            expert.
        num_experts: Number of experts.
        num_rows: Maximum number of rows that can belong to experts.
    """
    flat = chosen.reshape(-1)
    choice = jnp.argsort(flat)  # a stable sort: an expert's tokens stay in order
    sizes = jnp.sum(is_equal(flat, num_experts), axis=0, dtype=jnp.int32)
    row = jnp.argsort(choice).reshape(chosen.shape)
    return Order(choice[:num_rows], row, sizes)


# These functions have custom gradients, which are gathers too, because `Order` has the
# token of each row and the row of each choice. JAX's gradient of a gather would be a
# scatter-add, which TPUs and GPUs run row by row.
@jax.custom_vjp
def dispatch(tokens: Array, order: Order) -> Array:
    """Copies tokens to their rows: ``(tokens, width)`` to ``(rows, width)``."""
    return tokens[order.token]


@jax.custom_vjp
def collect(rows: Array, order: Order) -> Array:
    """Sums each token's rows: ``(rows, width)`` to ``(tokens, width)``."""
    return reduce(add, _rows_of_choices(rows, order)).astype(rows.dtype)


@jax.custom_vjp
def combine(rows: Array, weights: Array, order: Order) -> Array:
    """Sums each token's rows, multiplied by its weights ``(tokens, top_k)``."""
    of_choices = zip(_rows_of_choices(rows, order), weights.T, strict=True)
    weighted = (row * weight[:, None] for row, weight in of_choices)
    return reduce(add, weighted).astype(rows.dtype)


def _rows_of_choices(rows: Array, order: Order) -> Iterator[Array]:
    """Yields ``(tokens, width)`` in a wide dtype for each of the `top_k` choices.

    A choice without a row gives zeros. The arrays are yielded one by one, because in
    `gathered` all of them together would be as large as the rows of all devices.
    """
    num_rows = jnp.sum(order.sizes)
    for row in order.row.T:
        exists = (row >= 0) & (row < num_rows)
        found = rows[jnp.clip(row, 0, rows.shape[0] - 1)]
        yield jnp.where(exists[:, None], found, 0).astype(sum_dtype(rows))


def _combine_backward(
    saved: tuple[Array, Array, Order], grad: Array
) -> tuple[Array, Array, None]:
    rows, weights, order = saved
    of_rows = weights.reshape(-1)[order.choice]
    drows = grad[order.token] * of_rows[:, None]
    of_choices = _rows_of_choices(rows, order)
    dweights = jnp.stack([jnp.sum(row * grad, axis=-1) for row in of_choices], axis=-1)
    return drows.astype(rows.dtype), dweights.astype(weights.dtype), None


dispatch.defvjp(
    lambda tokens, order: (dispatch(tokens, order), order),
    lambda order, grad: (collect(grad, order), None),
)
collect.defvjp(
    lambda rows, order: (collect(rows, order), order),
    lambda order, grad: (dispatch(grad, order), None),
)
combine.defvjp(lambda *saved: (combine(*saved), saved), _combine_backward)


LOOKUP = "lookup_by_product"
"""Scope of products with rows of zeros and a 1, which a model's FLOPs leave out."""


class Biases(NamedTuple):
    """The biases of a device's experts; each is ``(experts, out)``."""

    up: Array
    gate: Array | None
    down: Array


class Kernels(NamedTuple):
    """The kernels of a device's experts; each is ``(experts, in, out)``."""

    up: Array
    gate: Array | None
    down: Array
    biases: Biases | None = None

    def for_sum(self, axes: Axes) -> "Kernels":
        """Returns kernels for devices that add their outputs over mesh axes.

        The bias of the output is 0 on all devices except the first, so that it is added
        only once.
        """
        if self.biases is None or not axes:
            return self
        is_first = jax.lax.axis_index(axes) == 0
        down = jnp.where(is_first, self.biases.down, 0)
        return self._replace(biases=self.biases._replace(down=down))


class Rounded(NamedTuple):
    """The kernels of a device's experts in 8 bits."""

    up: Kernel | None
    gate: Kernel | None
    down: Kernel | None

    @classmethod
    def of(cls, kernels: Kernels, recipe: EightBit) -> "Rounded":
        """Rounds kernels, ``(experts, in, out)``."""
        note_layer(recipe)
        each = kernels.up, kernels.gate, kernels.down
        run = partial(round_kernel, ins=(1,), outs=(2,), recipe=recipe)
        return cls(*(None if w is None else run(w) for w in each))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class InEightBits:
    """The 8-bit kernels of a device's experts, and their recipe.

    Attributes:
        recipe: The dtypes of the products.
        axes: Manual mesh axes that split the width of the experts.
        rounded: The kernels.
    """

    recipe: EightBit = field(metadata={"static": True})
    axes: Axes = field(metadata={"static": True})
    rounded: Rounded


@dataclass(frozen=True, kw_only=True)
class ExpertMLPs:
    """The MLPs of a device's experts: the kernels, and the nonlinearity."""

    kernels: Kernels
    activate: Activate
    in_8_bits: InEightBits | None = None

    def __call__(self, rows: Array, sizes: Array) -> Array:
        """Applies each expert's MLP to the expert's rows.

        ``rows`` is ``(rows, embed)``, sorted by expert. On TPUs, each row is multiplied
        only by its expert. On CPUs, it is multiplied by every expert.
        """
        up, gate, down, biases = self.kernels
        into, out_of, rounded = None, None, Rounded(None, None, None)
        if self.in_8_bits is not None:
            rounded = self.in_8_bits.rounded
            recipe, axes = self.in_8_bits.recipe, self.in_8_bits.axes
            into, out_of = Grouped(recipe, (), axes), Grouped(recipe, axes, ())
        multiply = partial(_multiply, sizes, into)
        up_bias, gate_bias, down_bias = biases or (None, None, None)
        product = multiply(rounded.up, rows, up, up_bias)
        hidden = [checkpoint_name(product, "mlp_up")]
        if gate is not None:
            product = multiply(rounded.gate, rows, gate, gate_bias)
            hidden.append(checkpoint_name(product, "mlp_gate"))
        hidden = self.activate(*hidden)
        return _multiply(sizes, out_of, rounded.down, hidden, down, down_bias)

    @property
    def count(self) -> int:
        """Returns the number of experts on this device."""
        return self.kernels.up.shape[0]


def _multiply(
    sizes: Array,
    call: Grouped | None,
    rounded: Kernel | None,
    rows: Array,
    kernel: Array,
    bias: Array | None,
) -> Array:
    """Multiplies each row by its expert's kernel, and adds the expert's bias."""
    out: Any  # in jax 0.10, functions with a custom gradient have no return type
    if call is None or rounded is None:
        out = jax.lax.ragged_dot(rows, kernel, sizes)
    else:
        out = eight_bit_ragged_dot(call, rows, kernel, rounded, sizes)
    if bias is None:
        return out
    # A product with a one-hot row selects the bias of the row's expert. The gradient of
    # a gather would be a scatter-add, which TPUs and GPUs run row by row.
    index, ends = jnp.arange(len(rows))[:, None], jnp.cumsum(sizes)[None]
    is_of = (index < ends) & (index >= ends - sizes[None])  # (rows, experts)
    exact = jax.lax.Precision.HIGHEST
    with jax.named_scope(LOOKUP):
        return out + jnp.matmul(is_of.astype(bias.dtype), bias, precision=exact)


class Routed(NamedTuple):
    """Tokens and the experts that they go to.

    Attributes:
        x: The tokens, ``(batch, seq, embed)``.
        chosen: int ``(batch, seq, top_k)``, the chosen experts. A dropped choice has
            the value ``num_experts``.
        weights: Weights of the choices, ``(batch, seq, top_k)``.
    """

    x: Array
    chosen: Array
    weights: Array

    def with_scaled_inputs(self) -> "Routed":
        """Returns one copy of a token for each choice, scaled by the choice's weight.

        The shape of ``x`` is then ``(batch, seq * top_k, embed)``, and each copy has
        one choice, with weight 1.
        """
        batch, embed = self.x.shape[::2]
        scaled = self.x[:, :, None] * self.weights[..., None]
        chosen = self.chosen.reshape(batch, -1, 1)
        ones = jnp.ones(chosen.shape, self.weights.dtype)
        return Routed(scaled.reshape(batch, -1, embed), chosen, ones)

    def flat(self) -> tuple[Array, Array, Array]:
        """Returns the three arrays with one dim of tokens in place of batch and seq."""
        x, chosen, weights = (a.reshape(-1, a.shape[-1]) for a in self)
        return x, chosen, weights


@dataclass(frozen=True, kw_only=True)
class TokenAxes:
    """Manual mesh axes that split tokens and experts.

    Attributes:
        batch: Axes that split dim 0 of the tokens.
        seq: Axes that split dim 1 of the tokens.
        expert: Axes that split the experts.
        mlp: Axes that split the width of each expert.
    """

    batch: Axes = ()
    seq: Axes = ()
    expert: Axes = ()
    mlp: Axes = ()

    @property
    def can_send(self) -> bool:
        """True if devices with different experts also have different tokens.

        Only then can rows be sent to the devices of their experts.
        """
        return len(self.expert) == 1 and self.expert[0] in self.batch


def gathered(experts: ExpertMLPs, axes: TokenAxes, routed: Routed) -> Array:
    """Computes outputs of tokens; an all-gather brings the tokens to the experts.

    A device gathers the tokens of the devices that have other experts, and computes the
    rows of its experts. A round has room for a few more rows than the device's share.
    The outputs are summed over the devices and scattered back.
    """
    run = partial(_local, experts, axes.expert)
    return around(run, axes, (*axes.expert, *axes.mlp), routed)


def around(
    run: Callable[[Routed], Array], axes: TokenAxes, over: Axes, routed: Routed
) -> Array:
    """Gathers tokens over some axes, calls a function, and sums the outputs.

    Args:
        run: A function that computes a device's part of the outputs, from the gathered
            tokens.
        axes: The manual axes.
        over: The axes along which devices have different experts or different parts of
            experts.
        routed: The device's tokens.
    """
    moves = [
        (dim, names)
        for dim, of_dim in enumerate((axes.batch, axes.seq))
        if (names := tuple(axis for axis in of_dim if axis in over))
    ]
    for dim, names in moves:
        gather = partial(jax.lax.all_gather, axis_name=names, axis=dim, tiled=True)
        routed = jax.tree.map(gather, routed)
    y = run(routed)
    for dim, names in reversed(moves):
        y = jax.lax.psum_scatter(y, names, scatter_dimension=dim, tiled=True)
    # Along the remaining axes, devices have the same tokens, so the parts of the
    # outputs are added.
    kept = tuple(axis for axis in over if axis not in (*axes.batch, *axes.seq))
    return jax.lax.psum(y, kept) if kept else y


def _local(experts: ExpertMLPs, axes: Axes, routed: Routed) -> Array:
    """Computes the part of the outputs that comes from this device's experts."""
    tokens, chosen, weights = routed.flat()
    size = jax.lax.axis_size(axes) if axes else 1
    first = jax.lax.axis_index(axes) * experts.count if axes else 0
    local = chosen - first
    local = jnp.where((local >= 0) & (local < experts.count), local, experts.count)
    # A token goes to an expert at most once.
    most = len(tokens) * min(chosen.shape[1], experts.count)
    order = sort_by_expert(local, experts.count, most)
    num_rows = round_rows(chosen.size / size, most)
    run = partial(_local_round, experts.activate, num_rows)
    num_rounds = -(-jnp.sum(order.sizes) // num_rows)
    y = sum_rounds(
        partial(run, 0),
        partial(_after_first, run),
        num_rounds - 1 if most > num_rows else None,
        (order, experts.in_8_bits),
        (tokens, weights, experts.kernels),
    )
    return y.reshape(routed.x.shape)


def _after_first(run: Callable[..., Array], index: Array, *operands: Any) -> Array:
    return run(index + 1, *operands)


def _local_round(
    activate: Activate,
    num_rows: int,
    index: Array | int,
    given: tuple[Order, InEightBits | None],
    operands: tuple[Array, Array, Kernels],
) -> Array:
    (order, in_8_bits), (tokens, weights, kernels) = given, operands
    experts = ExpertMLPs(kernels=kernels, activate=activate, in_8_bits=in_8_bits)
    order = order.part(index * num_rows, num_rows)
    return combine(products(experts, dispatch(tokens, order), order), weights, order)


def products(experts: ExpertMLPs, rows: Array, order: Order) -> Array:
    """Computes the experts' outputs for rows that are sorted by expert."""
    # An audit finds these products by the name of this scope, because on CPUs they are
    # compiled to ordinary products.
    with jax.named_scope("grouped_products"):
        return experts(rows, order.sizes)
