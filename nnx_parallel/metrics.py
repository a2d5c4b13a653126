"""Weighted means and sums, which add up exactly over microbatches and devices."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from nnx_parallel.errors import LossError, ParallelWarning, warn_user
from nnx_parallel.precision import sum_dtype

# The record of a step is one flat dict with these names and the names of the loss's
# metrics.
RESERVED_METRICS = (
    *("step", "time", "loss", "grad_norm", "learning_rate"),
    *("loss_scale", "lost_updates", "skipped"),
    *("compile_seconds", "data_wait_seconds", "step_seconds"),
    *("examples_per_second", "tokens_per_second", "tokens_per_second_per_device"),
    *("tflops_per_device", "mfu", "hfu", "device_memory_bytes"),
)
"""Names of the values that a run itself reports; the loss's metrics cannot use them."""

_EVAL_PREFIX = "eval_"  # prefix of an evaluation's metrics
_PREFIXES = (_EVAL_PREFIX, "learning_rate/")

Scalar = jax.Array | float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A mean, stored as a total and a weight, so that partial means add up exactly.

    A loss that averages over tokens must divide by the number of tokens in the entire
    batch. If microbatches have different numbers of tokens, the mean of their means is
    a different number. A `Mean` can be multiplied by a number and added to a `Mean`:
    ``token_loss + 1e-4 * z_loss``. Terms with the same weight are merged. Terms with
    different weights stay separate, and each is divided by its weight.

    Attributes:
        total: The weighted sum.
        weight: The sum of weights (tokens, examples). It has no gradient. If the weight
            of a training loss depends on the parameters, a `LossError` is raised. JAX
            treats a count that a `jax.custom_vjp` returns as if it depended on the
            parameters: pass ``jax.lax.stop_gradient(count)`` instead.
        more: Further terms, with other weights. Adding two means creates them.

    Example:
        >>> left, right = Mean(6.0, 3.0), Mean(2.0, 1.0)
        >>> float((0.5 * left + right).value)
        3.0
        >>> float(left.merge(right).value)
        2.0
    """

    total: Scalar
    weight: Scalar
    more: tuple[Mean, ...] = ()

    @property
    def terms(self) -> tuple[Mean, ...]:
        """Means with a single weight each; their values add up to ``value``."""
        return (Mean(self.total, self.weight), *self.more)

    @property
    def value(self) -> jax.Array:
        """The mean: the sum of total / weight over all terms.

        A term with weight 0 adds 0. If all weights are 0, a run reports NaN instead,
        because there was no data.
        """
        return sum((_divide(t.total, t.weight) for t in self.terms), jnp.float32(0))

    @property
    def counts(self) -> Any:
        """True if any weight is not 0. Otherwise the mean has no data."""
        return functools.reduce(operator.or_, (t.weight != 0 for t in self.terms))

    def over(self, weights: Sequence[jax.Array]) -> jax.Array:
        """Returns the share that this mean contributes to a mean over more data.

        ``weights`` has the weight of all that data for each term.
        """
        # A microbatch's total is divided by the weight of the entire batch. These
        # values add up to the mean, and their gradients add up to its gradient.
        terms = zip(self.terms, weights, strict=True)
        parts = (
            _divide(_with_constant_weight(t.total, t.weight), weight)
            for t, weight in terms
        )
        return sum(parts, jnp.float32(0))

    def merge(self, other: Mean) -> Mean:
        """Returns the mean over the data of both."""
        # Totals and weights are added term by term. Both means come from the same loss,
        # so their terms have the same order.
        pairs = zip(self.terms, other.terms, strict=True)
        sums = (
            Mean(_add(a.total, b.total), _add(a.weight, b.weight)) for a, b in pairs
        )
        return _from_terms(*sums)

    def __add__(self, other: Mean) -> Mean:
        if not isinstance(other, Mean):
            raise LossError(
                f"Cannot add a {type(other).__name__} to a Mean: the weight of the sum "
                "would be unknown. Add a Mean instead: Mean(value * weight, weight)."
            )
        # The key is the weight's identity, because traced weights cannot be compared.
        terms: dict[int, Mean] = {}
        for term in (*self.terms, *other.terms):
            if same := terms.get(id(term.weight)):
                term = Mean(_add(same.total, term.total), term.weight)
            terms[id(term.weight)] = term
        return _from_terms(*terms.values())

    def __radd__(self, other: Mean | int) -> Mean:
        # `sum` starts with the integer 0.
        return self if isinstance(other, int) and other == 0 else self + other  # pyright: ignore[reportOperatorIssue]

    def __neg__(self) -> Mean:
        return self * -1.0

    def __sub__(self, other: Mean) -> Mean:
        return self + -other

    def __mul__(self, factor: Scalar) -> Mean:
        # A weight counts data, so a factor does not change it.
        return _from_terms(*(Mean(t.total * factor, t.weight) for t in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Scalar) -> Mean:
        return self * (1 / divisor)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum:
    """A metric that is a function of a sum over the data, and not a mean.

    Examples are a confusion matrix, and the counts from which an F1 score follows.
    These add up over microbatches, devices and the batches of an evaluation. If the
    metric is not a single number, ``Trainer.evaluate`` returns it and ``on_eval_end``
    gets it, but it is not logged. A training loss cannot return such a metric.

    Attributes:
        total: An array of any shape, or a pytree of arrays.
        then: Function that maps the sum over all data to the metric. By default the
            metric is the sum.

    Example:
        >>> def f1(counts):  # the numbers of true positives and of errors
        ...     return 2 * counts[0] / (2 * counts[0] + counts[1])
        >>> float(Sum(jnp.array([3.0, 2.0]), then=f1).value)
        0.75
    """

    total: Any
    then: Callable[[Any], Any] | None = field(
        default=None, metadata={"static": True}, kw_only=True
    )

    @property
    def value(self) -> Any:
        """The metric, computed from this data only."""
        return self.total if self.then is None else self.then(self.total)


def result_of(metric: Mean | Sum) -> Any:
    """Returns the value to report. It is NaN, not 0, for a mean without data."""
    if isinstance(metric, Sum) or metric.counts is True:  # known at trace time
        return metric.value
    return jnp.where(metric.counts, metric.value, jnp.nan)


def _from_terms(first: Mean, *more: Mean) -> Mean:
    return Mean(first.total, first.weight, more)


def _add(a: Scalar, b: Scalar) -> jax.Array:
    # In bfloat16, counts would be exact only up to 256.
    dtype = sum_dtype(a, b)
    return jnp.asarray(a, dtype) + jnp.asarray(b, dtype)


def _divide(total: Scalar, weight: Scalar) -> jax.Array:
    dtype = sum_dtype(total, weight)
    weight = jnp.asarray(weight, dtype)
    total = _with_constant_weight(jnp.asarray(total, dtype), weight)
    # The divisor is replaced too, because a NaN in the other branch would make the
    # gradient NaN.
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))


def _with_constant_weight(total: Scalar, weight: Scalar) -> jax.Array:
    """Returns the total. Its derivative raises an error if the weight has one too."""
    # The weight becomes a float, because integers have tangents of a special dtype.
    return _total_of(jnp.asarray(total), jnp.asarray(weight, sum_dtype(weight)))


@jax.custom_jvp
def _total_of(total: jax.Array, weight: jax.Array) -> jax.Array:
    del weight
    return total


# JAX knows which tangents are always zero. Examples are the tangents of data, of counts
# and other results of comparisons, and of results of `stop_gradient`.
@partial(_total_of.defjvp, symbolic_zeros=True)
def _total_jvp(primals: tuple, tangents: tuple) -> tuple:
    if not isinstance(tangents[1], SymbolicZero):
        raise LossError(
            "The weight of a Mean depends on the model's parameters, and a Mean has "
            "no gradient with respect to its weight: the model would be trained as if "
            "the weight were a constant. A weight counts data, such as rows or "
            "tokens. Put factors that the model computes into the total, as in "
            "Mean((losses * gates).sum(), num_tokens), or mark the weight as a "
            "constant: Mean(total, jax.lax.stop_gradient(weight))."
        )
    return primals[0], tangents[0]


def as_mean(value: Any, name: str, weight: float = 1.0) -> Mean:
    """Checks a metric and returns it as a `Mean`. A plain scalar gets ``weight``."""
    if isinstance(value, Mean):
        for term in value.terms:
            check_scalar(term.total, f"{name}'s total")
            check_scalar(term.weight, f"{name}'s weight")
        return value
    check_scalar(value, name)
    value = jnp.asarray(value, sum_dtype(value))
    return Mean(value * weight, weight)


def check_scalar(value: Any, name: str) -> None:
    """Raises a `LossError` unless a value is a single real number."""
    if not isinstance(value, get_args(ArrayLike)):
        key = " A dict of metrics needs the key 'loss'." * isinstance(value, Mapping)
        raise LossError(
            f"{name} is a {type(value).__name__}. It must be a real scalar or a "
            f"Mean(total, weight).{key}"
        )
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    is_real = any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.floating))
    if shape != () or not is_real:
        raise LossError(
            f"{name} has shape {shape} and dtype {dtype}. It must be a real scalar or "
            "a Mean(total, weight): reduce it, for instance with .mean()."
            + " A Sum(array) may have any shape."
            * name.startswith("Metric")
        )


def _by_name(aux: Any) -> dict[str, Any]:
    """Returns metrics by path, such as ``accuracy.top_1``.

    If the metrics are not in a dict, their path begins with ``aux``.
    """
    named = {}
    for name, part in aux.items() if isinstance(aux, Mapping) else [("aux", aux)]:
        leaves = jax.tree.leaves_with_path(
            part, is_leaf=lambda x: isinstance(x, Mean | Sum)
        )
        for keys, x in leaves:
            inner = jax.tree_util.keystr(keys, simple=True, separator=".")
            named[f"{name}.{inner}" if keys else name] = x
    return named


def _without_outputs(aux: Any) -> Any:
    """Returns aux without the arrays of a tuple or list that are not scalars.

    These arrays are outputs of the model, such as logits. If only one dict remains, the
    dict is returned instead of the tuple. Arrays in a dict have names, so they are
    metrics.
    """
    shapes: list[tuple[int, ...]] = []

    def kept(part: Any) -> Any:
        if type(part) in (tuple, list):
            return [kept(each) for each in part]
        if not isinstance(part, get_args(ArrayLike)) or jnp.shape(part) == ():
            return part
        shapes.append(jnp.shape(part))
        return None

    found = kept(aux)
    if not shapes:
        return aux
    warn_user(
        f"The loss returned (loss, aux) with an array of shape {shapes[0]} in aux. It "
        "is not a scalar, so it is not reported as a metric. For a metric, return "
        "(loss, {'accuracy': accuracy.mean()}). For outputs of the model, such as "
        "logits, call trainer.predict.",
        ParallelWarning,
    )
    rest = [x for x in found or () if jax.tree.leaves(x)]
    return rest[0] if len(rest) == 1 and isinstance(rest[0], Mapping) else found


def split_loss_output(
    output: Any, weight: float = 1.0
) -> tuple[Mean, dict[str, Mean | Sum]]:
    """Checks a loss function's output and returns its loss and metrics.

    The output is ``loss``, ``(loss, metrics)``, or a dict of metrics with a ``"loss"``.
    In place of ``metrics`` there may be a scalar, or a tuple or list of scalars, dicts
    of metrics, and arrays. Arrays are left out, with a warning. Plain scalars are
    returned as a `Mean` with ``weight``. A metric that is also named ``"loss"`` is
    renamed to ``aux.loss``, unless it is the loss itself.
    """
    loss, metrics = output, {}
    if isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
        metrics = _by_name({k: x for k, x in output.items() if k != "loss"})
    elif isinstance(output, tuple):
        if len(output) != 2:
            kinds = ", ".join(type(part).__name__ for part in output)
            raise LossError(
                f"The loss returned a tuple of ({kinds}). Return loss, or (loss, "
                "metrics), where metrics is a dict of scalars or Means. For several "
                "values: return loss, (second, third)."
            )
        if type(output[1]).__name__ == "State":
            raise LossError(
                "The loss returned an nnx.State beside the loss, such as gradients. "
                "The Trainer computes the gradients: return only the loss, without "
                "nnx.grad or nnx.value_and_grad."
            )
        loss, metrics = output[0], _by_name(_without_outputs(output[1]))
        if "loss" in metrics and (same := metrics.pop("loss")) is not loss:
            metrics["aux.loss"] = same
    mean = as_mean(loss, "The loss", weight)
    if any(isinstance(t.weight, int | float) and t.weight == 0 for t in mean.terms):
        raise LossError(
            "The loss is a Mean with the weight 0, so no row would count. The weight "
            "is the number of rows or tokens in the total: Mean(losses.sum(), count)."
        )
    # The dtype of the returned loss is checked, because `as_mean` casts integers.
    dtype = jnp.result_type(loss.total if isinstance(loss, Mean) else loss)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise LossError(
            f"The loss has dtype {dtype}, which has no gradient. Return a "
            "floating-point scalar or a Mean."
        )
    for name in metrics:
        if name in RESERVED_METRICS or str(name).startswith(_PREFIXES):
            raise LossError(
                f"A metric is named {name!r}, which the run reports itself. Rename "
                f"the metric. Reserved names: {list(RESERVED_METRICS)}, and all names "
                f"that begin with {' or '.join(map(repr, _PREFIXES))}."
            )
    return mean, {
        name: x if isinstance(x, Sum) else as_mean(x, f"Metric {name!r}", weight)
        for name, x in metrics.items()
    }
