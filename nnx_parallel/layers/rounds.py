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

Round = Callable[[Array, Any, Any], Array]
"""From the index of a round, integers and operands: its part of a sum."""


def round_rows(expected: float, most: int) -> int:
    """The rows that one round has room for, of ``expected`` ones, and ``most`` ever."""
    rows = math.ceil(expected * (1 + SLACK))
    # Kernels of grouped products take tiles of 128 rows; few rows need no such step.
    step = 128 if rows >= 1024 else 8
    return min(-(-rows // step) * step, most)


def sum_rounds(
    function: Round, max_rounds: int, count: Array, given: Any, operands: Any
) -> Array:
    """The sum of ``function(index, given, operands)`` over rounds, at least one.

    The gradient runs the same rounds: it saves what the first one needs, and computes
    the others again, so that memory is that of one round.

    Args:
        function: Hashable, without traced values of its own.
        max_rounds: The most that ``count`` can be; with 1 there is no loop.
        count: int32 scalar, the number of rounds; equal on devices that communicate
            in a round.
        given: A pytree of integers.
        operands: A pytree of arrays that are differentiated.
    """
    if max_rounds == 1:
        return function(jnp.int32(0), given, operands)
    return _sum(function, count, given, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(function: Round, count: Array, given: Any, operands: Any) -> Array:
    first = function(jnp.int32(0), given, operands)
    return _add_others(lambda index: function(index, given, operands), count, first)


def _forward(
    function: Round, count: Array, given: Any, operands: Any
) -> tuple[Array, Any]:
    first, pull = jax.vjp(partial(function, jnp.int32(0), given), operands)
    total = _add_others(lambda index: function(index, given, operands), count, first)
    return total, (pull, count, given, operands)


def _backward(function: Round, saved: Any, grad: Array) -> tuple[None, None, Any]:
    pull, count, given, operands = saved

    def of_round(index: Array) -> Any:
        _, pull_round = jax.vjp(partial(function, index, given), operands)
        return pull_round(grad)[0]

    return None, None, _add_others(of_round, count, pull(grad)[0])


def _add_others(function: Callable[[Array], Any], count: Array, first: Any) -> Any:
    """Adds what comes of the rounds after the first."""

    def body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        index, total = carry
        return index + 1, jax.tree.map(jnp.add, total, function(index))

    # `audit(trips=...)` names the loop by this scope: its length depends on data.
    with jax.named_scope("more_rounds"):
        start = (jnp.int32(1), first)
        return jax.lax.while_loop(lambda carry: carry[0] < count, body, start)[1]


_sum.defvjp(_forward, _backward)
