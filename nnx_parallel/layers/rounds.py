"""Work of unknown amount in rounds, each in buffers for a little more than the mean.

A device's experts may get the tokens of all devices. Buffers for that case would be as
many times larger than those of balanced tokens as there are devices. So rows are taken
in rounds: a device has room for its share and some slack; what is left waits for the
next round. Balanced tokens are done in the first, and the loop that follows never runs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

SLACK = 0.25
"""Room for rows beyond those of perfect balance, as a share of them."""

Part = Callable[..., Array]
"""A part of a sum, of integers and operands; a further one of its index before them."""


def round_rows(expected: float, most: int) -> int:
    """The rows that one round has room for, of ``expected`` ones, and ``most`` ever."""
    rows = math.ceil(expected * (1 + SLACK))
    # Kernels of grouped products take tiles of 128 rows; few rows need no such step.
    step = 128 if rows >= 1024 else 8
    return min(-(-rows // step) * step, most)


def sum_rounds(
    first: Part,
    further: Part,
    num_further: Array | None,
    given: Any,
    operands: Any,
) -> Array:
    """``first(given, operands)``, and all ``further(index, given, operands)``.

    The gradient runs the same rounds: it saves what the first one needs, and computes
    the others again, so that memory is that of one round.

    Args:
        first: Hashable, without traced values of its own.
        further: Likewise, of rounds that balanced tokens do not need.
        num_further: int32 scalar, their number; equal on devices that communicate in a
            round. `None` if there can be none: then there is no loop.
        given: A pytree of integers.
        operands: A pytree of arrays that are differentiated.
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
    """Adds what comes of the rounds after the first."""

    def body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        index, total = carry
        return index + 1, jax.tree.map(jnp.add, total, function(index))

    # `audit(trips=...)` names the loop by this scope: its length depends on data.
    with jax.named_scope("more_rounds"):
        start = (jnp.int32(0), first)
        return jax.lax.while_loop(lambda carry: carry[0] < count, body, start)[1]


_sum.defvjp(_forward, _backward)
