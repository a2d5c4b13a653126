"""Means add up exactly, and invalid losses raise."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel import Mean
from nnx_parallel.errors import LossError, ParallelWarning
from nnx_parallel.metrics import RESERVED_METRICS, as_mean, split_loss_output


def test_merged_means_match_whole_mean() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=32), rng.integers(0, 3, 32).astype(float)
    parts = np.split(np.arange(32), [3, 4, 20])
    means = [Mean((values[i] * weights[i]).sum(), weights[i].sum()) for i in parts]
    total = means[0]
    for mean in means[1:]:
        total = total.merge(mean)
    np.testing.assert_allclose(
        total.value, np.average(values, weights=weights), rtol=1e-6
    )


def test_arithmetic_acts_on_values() -> None:
    left, right = Mean(6.0, 3.0), Mean(5.0, 2.0)
    assert float((left + right).value) == 2.0 + 2.5
    assert float((left * 0.5).value) == 1.0
    assert float((0.5 * left).value) == 1.0
    assert float((left / 4).value) == 0.5
    assert float((3 * (left + right) / 2).value) == 6.75


def test_only_terms_of_same_weight_merge() -> None:
    weight = jnp.float32(4.0)
    assert len((Mean(1.0, weight) + Mean(2.0, weight)).terms) == 1
    apart = Mean(1.0, weight) + Mean(2.0, jnp.float32(4.0)) + Mean(3.0, weight)
    assert [float(term.total) for term in apart.terms] == [4.0, 2.0]
    shared = jax.tree.map(lambda _: weight, Mean(1.0, 3.0) + Mean(2.0, 4.0))
    assert float((shared + Mean(0.0, weight)).value) == 2.0


def test_sums_merge_term_by_term() -> None:
    first = Mean(6.0, 3.0) + 0.1 * Mean(10.0, 1.0)
    second = Mean(2.0, 1.0) + 0.1 * Mean(40.0, 4.0)
    np.testing.assert_allclose(first.merge(second).value, 8 / 4 + 0.1 * 50 / 5)


def test_mean_of_weight_zero_has_finite_gradient() -> None:
    value, grad = jax.value_and_grad(lambda x: Mean(x, jnp.float32(0)).value)(1.0)
    assert (float(value), float(grad)) == (0.0, 0.0)


CONSTANT_WEIGHTS = {
    "counts": lambda pred: (pred > 0).sum(),
    "float counts": lambda pred: jnp.where(pred > 0, 1.0, 0.0).sum(),
    "classes": lambda pred: 1 + jnp.argmax(pred),
    "shapes": lambda pred: jnp.ones_like(pred).sum(),
    "said to be constant": lambda pred: jax.lax.stop_gradient((pred**2).sum()),
}


def through_scan(loss: Any) -> Any:
    return lambda x: jax.lax.scan(lambda c, y: (c + loss(y), None), 0.0, x[None])[0]


TRANSFORMS = {"grad": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}
TRANSFORMS["scan"] = through_scan


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_weight_with_gradient_raises(transform: Any) -> None:
    x = jnp.arange(1.0, 5.0)
    for weight in CONSTANT_WEIGHTS.values():
        loss = transform(lambda x, weight=weight: Mean((x**2).sum(), weight(x)).value)
        np.testing.assert_allclose(jax.grad(loss)(x), 2 * x / weight(x), rtol=1e-6)
    message = "The weight of a Mean depends on the model's parameters"
    for wrong in (
        lambda x: Mean((x**2).sum(), x.sum()).value,
        lambda x: Mean((x**2).sum(), x.sum()).over([jnp.float32(4)]),
        lambda x: (Mean(x.sum(), 4.0) + Mean(1.0, x.sum())).value,
    ):
        with pytest.raises(LossError, match=message):
            jax.grad(transform(wrong))(x)


def test_mean_passes_through_jit_and_scan() -> None:
    def part(carry: None, x: jax.Array) -> tuple[None, Mean]:
        return carry, Mean(x.sum(), jnp.float32(x.size))

    _, means = jax.jit(lambda x: jax.lax.scan(part, None, x))(
        jnp.arange(12.0).reshape(3, 4)
    )
    total = jax.tree.map(lambda x: x.sum(0), means)
    assert float(total.value) == 5.5


def test_adding_number_to_mean_raises() -> None:
    mean = Mean(1.0, 1.0)
    assert float(sum([mean, mean]).value) == 2.0  # pyright: ignore[reportAttributeAccessIssue]
    assert float((mean - 0.25 * mean).value) == 0.75
    message = "Cannot add a float to a Mean: the weight of the sum would be unknown."
    with pytest.raises(LossError, match=re.escape(message)):
        mean + 0.5  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]


def test_scalars_get_given_weight() -> None:
    loss, metrics = split_loss_output((jnp.bfloat16(2.0), {"hits": 3}), weight=4)
    assert (float(loss.total), float(loss.weight)) == (8.0, 4.0)
    assert (float(metrics["hits"].total), float(metrics["hits"].value)) == (12.0, 3.0)
    assert jnp.result_type(loss.total) == jnp.float32


@pytest.mark.parametrize(
    ("output", "loss", "metrics"),
    [
        ({"loss": 2.0, "mse": 1.0}, 2.0, {"mse": 1.0}),
        ((2.0, {"loss": 3.0, "mse": 1.0}), 2.0, {"aux.loss": 3.0, "mse": 1.0}),
        ((2.0, (3.0, {"mse": 1.0})), 2.0, {"aux.0": 3.0, "aux.1.mse": 1.0}),
    ],
)
def test_other_forms_of_output(output: Any, loss: float, metrics: Any) -> None:
    mean, found = split_loss_output(output)
    assert mean.value == loss
    assert {name: float(each.value) for name, each in found.items()} == metrics


LOGITS = np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    ("aux", "metrics"),
    [
        (LOGITS, {}),
        ((LOGITS, [LOGITS, None]), {}),
        ((LOGITS, 1.0), {"aux.1": 1.0}),
        ((LOGITS, {"mse": 1.0}), {"mse": 1.0}),
        (({"mse": 1.0}, (LOGITS, LOGITS)), {"mse": 1.0}),
        ((LOGITS, 3.0, {"mse": 1.0}), {"aux.1": 3.0, "aux.2.mse": 1.0}),
    ],
)
def test_outputs_beside_loss_are_left_out(aux: Any, metrics: Any) -> None:
    message = "with an array of shape (2, 4) in aux. It is not a scalar, so it is not"
    with pytest.warns(ParallelWarning, match=re.escape(message)):
        _, found = split_loss_output((2.0, aux))
    assert {name: float(each.value) for name, each in found.items()} == metrics


def test_loss_among_its_metrics_is_reported_once() -> None:
    loss = Mean(6.0, 3.0)
    assert split_loss_output((loss, {"loss": loss, "mse": 1.0}))[1].keys() == {"mse"}


def test_means_keep_their_weight() -> None:
    mean = Mean(jnp.float32(6.0), 3.0)
    assert split_loss_output(mean, weight=100)[0] is mean
    assert as_mean(mean, "x") is mean


SCALAR = " It must be a real scalar or a Mean(total, weight)"
TUPLE = " Return loss, or (loss, metrics), where metrics is a dict of scalars or Means."


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            np.ones(3, np.float32),
            f"The loss has shape (3,) and dtype float32.{SCALAR}: reduce it, for "
            "instance with .mean().",
        ),
        (
            Mean(jnp.ones(3), 3.0),
            f"The loss's total has shape (3,) and dtype float32.{SCALAR}: reduce it",
        ),
        (Mean(1.0, jnp.ones((2, 3))), "The loss's weight has shape (2, 3) and dtype"),
        (
            3,
            "The loss has dtype int32, which has no gradient. Return a floating-point "
            "scalar or a Mean.",
        ),
        (True, f"The loss has shape () and dtype bool.{SCALAR}"),
        (1j, f"The loss has shape () and dtype complex64.{SCALAR}"),
        (None, f"The loss is a NoneType.{SCALAR}."),
        ({"mse": 1.0}, f"The loss is a dict.{SCALAR}."),
        ([1.0, {}], f"The loss is a list.{SCALAR}."),
        (
            (1.0, {}, {}),
            f"The loss returned a tuple of (float, dict, dict).{TUPLE} For several "
            "values: return loss, (second, third).",
        ),
        (
            (1.0, ({"mse": 1.0}, {"logits": jnp.ones((2, 4))})),
            "Metric 'aux.1.logits' has shape (2, 4) and dtype float32.",
        ),
        (
            (1.0, {"logits": jnp.ones((2, 4))}),
            f"Metric 'logits' has shape (2, 4) and dtype float32.{SCALAR}: reduce it, "
            "for instance with .mean(). A Sum(array) may have any shape.",
        ),
        ((1.0, {"name": "x"}), f"Metric 'name' is a str.{SCALAR}."),
        *[
            (
                (1.0, {name: 1.0}),
                f"A metric is named {name!r}, which the run reports itself. Rename "
                f"the metric. Reserved names: {list(RESERVED_METRICS)}, and all names "
                "that begin with 'eval_' or 'learning_rate/'.",
            )
            for name in (*RESERVED_METRICS, "eval_loss")
            if name != "loss"
        ],
    ],
)
def test_invalid_loss_output_raises(output: Any, message: str) -> None:
    with pytest.raises(LossError, match=re.escape(message)):
        split_loss_output(output)
