"""Does an unknown amount of work in rounds, with buffers a little above the mean.

A device's experts may get the tokens of all devices. On N devices, buffers for that
case would be N times as large as buffers for balanced tokens. So rows are taken in
rounds: a device has room for its share and some slack; the other rows wait for the next
round. Balanced tokens fit into the first round, and then the loop over further rounds
does not run.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

SLACK = 0.25
"""Extra room for rows, as a share of the rows of perfect balance."""

Part = Callable[..., Array]
"""Computes a part of a sum from integers and operands, and from an index before these
if it is a further part.
"""


def round_rows(expected: float, most: int) -> int:
    """Rows that one round has room for: for ``expected`` rows, but at most ``most``."""
    rows = math.ceil(expected * (1 + SLACK))
    # Kernels of grouped products take tiles of 128 rows; few rows need a smaller step.
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

    The gradient runs the same rounds: it saves the residuals of the first round and
    computes the others again, so that it needs the memory of only one round.

    Args:
        first: The first round; hashable, and does not close over traced values.
        further: The rounds that balanced tokens do not need; hashable, and does not
            close over traced values.
        num_further: int32 scalar, the number of further rounds; equal on devices that
            communicate in a round. `None` if further rounds cannot occur: then there is
            no loop.
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
    """Adds the results of the rounds after the first."""

    def body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        index, total = carry
        return index + 1, jax.tree.map(jnp.add, total, function(index))

    # `audit(trips=...)` names the loop by this scope: its length depends on data.
    with jax.named_scope("more_rounds"):
        start = (jnp.int32(0), first)
        return jax.lax.while_loop(lambda carry: carry[0] < count, body, start)[1]


_sum.defvjp(_forward, _backward)
