"""Weighted means that add up exactly over microbatches and devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.errors import LossError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A mean kept as total and weight, so that partial means add up exactly.

    A loss that averages over tokens must divide by the tokens of the whole batch. The
    mean over microbatches of their means is another number when they hold different
    counts; the sum of totals over the sum of weights is not. A `Mean` can be scaled by
    a number and added to another one: ``token_loss + 1e-4 * z_loss``. Terms of one
    weight merge; terms of different weights are kept apart, each divided by its own.

    Attributes:
        total: Scalar, the weighted sum.
        weight: Scalar, the sum of weights (tokens, examples); no gradient flows
            through it.
        more: Further terms of other weights, made by ``+``.

    Example:
        >>> left, right = Mean(6.0, 3.0), Mean(2.0, 1.0)
        >>> float((0.5 * left + right).value)
        3.0

        >>> float(left.merge(right).value)
        2.0
    """

    total: jax.Array | float
    weight: jax.Array | float
    more: tuple[Mean, ...] = ()

    @property
    def terms(self) -> tuple[Mean, ...]:
        """This mean as a sum of means of one weight each."""
        return (Mean(self.total, self.weight), *self.more)

    @property
    def value(self) -> jax.Array:
        """The mean: the sum over terms of total / weight; 0 where a weight is 0."""
        return sum((_divide(t.total, t.weight) for t in self.terms), jnp.float32(0))

    def merge(self, other: Mean) -> Mean:
        """The mean over both batches: totals and weights add, term by term."""
        pairs = zip(self.terms, other.terms, strict=True)
        return _from_terms(
            Mean(_add(a.total, b.total), _add(a.weight, b.weight)) for a, b in pairs
        )

    def __add__(self, other: Mean) -> Mean:
        if not isinstance(other, Mean):
            return NotImplemented
        terms = list(self.terms)
        for term in other.terms:
            same = [i for i, t in enumerate(terms) if t.weight is term.weight]
            if same:
                (i,) = same
                terms[i] = Mean(_add(terms[i].total, term.total), term.weight)
            else:
                terms.append(term)
        return _from_terms(terms)

    def __mul__(self, factor: float | jax.Array) -> Mean:
        return _from_terms(Mean(t.total * factor, t.weight) for t in self.terms)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | jax.Array) -> Mean:
        return self * (1 / divisor)


def _from_terms(terms: Iterable[Mean]) -> Mean:
    first, *more = terms
    return Mean(first.total, first.weight, tuple(more))


def _add(a: jax.Array | float, b: jax.Array | float) -> jax.Array | float:
    return jnp.asarray(a, jnp.float32) + jnp.asarray(b, jnp.float32)


def _divide(total: jax.Array | float, weight: jax.Array | float) -> jax.Array:
    total = jnp.asarray(total, jnp.float32)
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))


def as_mean(value: Any, name: str, weight: float = 1.0) -> Mean:
    """A metric as a `Mean`; a plain scalar counts with ``weight``.

    Raises:
        LossError: If it is neither a `Mean` nor a floating-point scalar.
    """
    if isinstance(value, Mean):
        return value
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != () or not jnp.issubdtype(dtype, jnp.number):
        raise LossError(
            f"{name} has shape {shape} and dtype {dtype}. It must be a scalar or a "
            "Mean(total, weight): reduce it, for instance with .mean()."
        )
    return Mean(jnp.asarray(value, jnp.float32) * weight, weight)


def split_loss_output(output: Any, weight: float = 1.0) -> tuple[Mean, dict[str, Mean]]:
    """Checks what a loss returned and gives loss and metrics as means.

    Args:
        output: What the loss returned.
        weight: How much a plain scalar counts.

    Raises:
        LossError: If the output is not ``loss`` or ``(loss, metrics)``.
    """
    loss, metrics = output if isinstance(output, tuple) else (output, {})
    if not isinstance(metrics, Mapping):
        raise LossError(
            f"The loss returned a {type(metrics).__name__} beside the loss. Return "
            "loss, or (loss, metrics) with metrics a dict of scalars or Means."
        )
    total = loss.total if isinstance(loss, Mean) else loss
    if not jnp.issubdtype(jnp.result_type(total), jnp.floating):
        raise LossError(
            f"The loss has dtype {jnp.result_type(total)}, which has no gradient. "
            "Return a floating-point scalar or a Mean."
        )
    named = {
        name: as_mean(value, f"Metric {name!r}", weight)
        for name, value in metrics.items()
    }
    if "loss" in named:
        raise LossError("A metric is named 'loss', as the loss itself. Rename it.")
    return as_mean(loss, "The loss", weight), named
