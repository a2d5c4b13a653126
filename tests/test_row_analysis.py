"""Losses that depend on the microbatches warn, and other losses do not."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Mean, Pipeline, Strategy, Sum, Trainer
from nnx_parallel.errors import LossError, ParallelWarning
from nnx_parallel.layers import Stack, cross_entropy, linear_cross_entropy
from nnx_parallel.state import StatePlan
from nnx_parallel.training.step import changes_by_microbatches
from tests.steps import plan_step

STRATEGIES: dict[str, Strategy] = {"FSDP": FSDP(2), "Pipeline": Pipeline(2)}
ROWS, SEQ, DIM, CLASSES = 16, 4, 8, 5
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(ROWS, SEQ, DIM)).astype(np.float32),
    "y": RNG.integers(CLASSES, size=(ROWS, SEQ)),
    "w": np.tril(np.ones((ROWS, SEQ), np.float32)),
    "num": np.asarray(64.0, np.float32),
}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.linear(self.norm(x))[:, :, None]
        seen = jax.nn.dot_product_attention(heads, heads, heads, is_causal=True)
        return x + self.dropout(jax.nn.gelu(seen[:, :, 0]))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, norm: Any = nnx.BatchNorm) -> None:
        self.blocks = Stack(Block, 2, rngs=rngs)
        self.norm = norm(DIM, rngs=rngs)
        self.table = nnx.Embed(CLASSES, DIM, rngs=rngs)
        self.inner = nnx.Linear(DIM, DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.inner(x))


def losses_of(m: Model, b: Any) -> jax.Array:
    return of_logits(m(b["x"]), b["y"])


def of_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def errors(m: Model, b: Any) -> jax.Array:
    return (m.inner(b["x"]) - b["x"]) ** 2


def rows(m: Model, b: Any) -> jax.Array:
    """Returns one vector per row: (rows, DIM)."""
    z = m.inner(b["x"].mean(1))
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def by_row(m: Model, b: Any, over: Callable = jax.vmap) -> jax.Array:
    return over(lambda row: of_logits(m.head(row[0]), row[1]).mean())((b["x"], b["y"]))


def in_map(function: Callable) -> Callable:
    return lambda xs: jax.lax.map(function, xs)


def over_seq(m: Model, b: Any, reduce: Callable) -> jax.Array:
    def add(total: jax.Array, item: tuple) -> tuple[jax.Array, None]:
        return total + reduce(of_logits(m.head(item[0]), item[1])), None

    items = jax.tree.map(lambda x: x.swapaxes(0, 1), (b["x"], b["y"]))
    return jax.lax.scan(add, jnp.float32(0), items)[0] / SEQ


def flat_attention(m: Model, b: Any) -> jax.Array:
    """Attention over all tokens as one sequence, in which each token sees its row."""
    z = m.inner(b["x"]).reshape(-1, DIM)
    row = jnp.repeat(jnp.arange(len(b["x"])), SEQ)
    scores = jnp.where(row[:, None] == row[None], z @ z.T, -1e9)
    return (jax.nn.softmax(scores) @ z).mean()


def triplets(m: Model, b: Any) -> jax.Array:
    a, p, n = (m.inner(b["x"])[:, i] for i in range(3))
    return jnp.maximum(((a - p) ** 2 - (a - n) ** 2).sum(-1) + 1, 0).mean()


def contrast(z: jax.Array, y: jax.Array) -> jax.Array:
    return of_logits(z @ y.T / 0.1, jnp.arange(len(z))).mean()


def clip(m: Model, b: Any) -> jax.Array:
    z, y = rows(m, b), b["x"][:, 0]
    return (contrast(z, y) + contrast(y, z)) / 2


def simclr(m: Model, b: Any) -> jax.Array:
    both = jnp.concatenate([rows(m, b), rows(m, {"x": b["x"][:, ::-1] + 1})])
    scores = both @ both.T - 1e9 * jnp.eye(len(both))
    return of_logits(scores, jnp.roll(jnp.arange(len(both)), len(both) // 2)).mean()


def dice(m: Model, b: Any) -> jax.Array:
    p = jax.nn.sigmoid(m(b["x"])[..., 0])
    return 1 - 2 * (p * b["w"]).sum() / ((p + b["w"]).sum() + 1)


def squares(m: Model) -> Any:
    return sum(
        ((x**2).sum() for x in jax.tree.leaves(nnx.state(m, nnx.Param))), jnp.float32(0)
    )


UNCHANGED = {
    "mean": lambda m, b: losses_of(m, b).mean(),
    "sum over tokens": lambda m, b: losses_of(m, b).sum(1).mean(),
    "sum / rows": lambda m, b: losses_of(m, b).mean(1).sum() / len(b["x"]),
    "weight decay": lambda m, b: losses_of(m, b).mean() + 0.1 * squares(m),
    "learned scale": lambda m, b: (
        losses_of(m, b).mean() * jnp.exp(m.head.bias[0]) + m.head.bias[0]
    ),
    "Mean": lambda m, b: Mean((losses_of(m, b) * b["w"]).sum(), b["w"].sum()),
    "Mean, weight at least 1": lambda m, b: Mean(
        (losses_of(m, b) * b["w"]).sum(), jnp.maximum(b["w"].sum(), 1)
    ),
    "cross_entropy": lambda m, b: cross_entropy(m(b["x"]), b["y"], b["w"]),
    "value of all": lambda m, b: cross_entropy(m(b["x"]), b["y"]).value,
    "linear_cross_entropy": lambda m, b: linear_cross_entropy(
        m.blocks(b["x"]), m.head.kernel[...], b["y"], b["w"]
    ),
    "in chunks": lambda m, b: linear_cross_entropy(
        m.blocks(b["x"]), m.head.kernel[...], b["y"], b["w"], chunk_size=8
    ),
    "two Means": lambda m, b: (
        cross_entropy(m(b["x"]), b["y"], b["w"])
        + 0.1 * Mean(errors(m, b).sum(), errors(m, b).size)
    ),
    "logsumexp": lambda m, b: jax.nn.logsumexp(m(b["x"]), -1).mean(),
    "vmap": lambda m, b: by_row(m, b).mean(),
    "map": lambda m, b: by_row(m, b, in_map).mean(),
    "scan": lambda m, b: over_seq(m, b, jnp.mean),
    "einsum": lambda m, b: jnp.einsum("rt,rt->", losses_of(m, b), b["w"]) / b["w"].size,
    "quotient of each row": lambda m, b: (
        (losses_of(m, b) * b["w"]).sum(1) / b["w"].sum(1)
    ).mean(),
    "BatchNorm": lambda m, b: of_logits(m.head(m.norm(b["x"])), b["y"]).mean(),
    "norm of rows": lambda m, b: jnp.linalg.norm(m.inner(b["x"]), axis=-1).mean(),
    "gather": lambda m, b: (
        -jax.nn.log_softmax(m(b["x"]))[jnp.arange(len(b["y"])), 0, b["y"][:, 0]].mean()
    ),
    "one hot": lambda m, b: (
        -(jax.nn.one_hot(b["y"], CLASSES) * jax.nn.log_softmax(m(b["x"]))).mean()
    ),
    "lookup": lambda m, b: (m.table(b["y"]) ** 2).mean(),
    "flat": lambda m, b: of_logits(
        m(b["x"]).reshape(-1, CLASSES), b["y"].ravel()
    ).mean(),
    "other order of rows": lambda m, b: ((m.inner(b["x"]) - b["x"][::-1]) ** 2).mean(),
    "remat": lambda m, b: jax.checkpoint(m.head)(b["x"]).mean(),
    "largest": lambda m, b: losses_of(m, b).max(),
    "triplets": triplets,
    "blocks": lambda m, b: of_logits(m.head(m.blocks(b["x"])), b["y"]).mean(),
    "pairs in a row": lambda m, b: jax.nn.logsumexp(
        jnp.einsum("rtd,rsd->rts", m.inner(b["x"]), b["x"]), -1
    ).mean(),
    "flat attention": flat_attention,
    "metrics": lambda m, b: (
        losses_of(m, b).mean(),
        {"share": (b["y"] > 0).mean(), "all": Sum(b["w"].sum())},
    ),
}

SIZE, JOINT, PAIRS = "depends on the number of rows", "is a quotient", "compares rows"
CHANGED = {
    "sum": (SIZE, lambda m, b: losses_of(m, b).sum()),
    "blocks": (SIZE, lambda m, b: m.blocks(b["x"]).sum()),
    "sum / number": (SIZE, lambda m, b: losses_of(m, b).sum() / 64),
    "sum / shared entry": (SIZE, lambda m, b: losses_of(m, b).sum() / b["num"]),
    "sum of means": (SIZE, lambda m, b: losses_of(m, b).mean(1).sum()),
    "sum + decay": (SIZE, lambda m, b: losses_of(m, b).sum() + 0.1 * squares(m)),
    "mean + sum": (SIZE, lambda m, b: losses_of(m, b).mean() + errors(m, b).sum()),
    "mean / rows": (SIZE, lambda m, b: losses_of(m, b).mean() / len(b["x"])),
    "norm of all": (SIZE, lambda m, b: jnp.linalg.norm(errors(m, b))),
    "vmap": (SIZE, lambda m, b: by_row(m, b).sum()),
    "map": (SIZE, lambda m, b: by_row(m, b, in_map).sum()),
    "scan": (SIZE, lambda m, b: over_seq(m, b, jnp.sum)),
    "einsum": (SIZE, lambda m, b: jnp.einsum("rt,rt->", losses_of(m, b), b["w"])),
    "BatchNorm": (SIZE, lambda m, b: (m.head(m.norm(b["x"])) ** 2).sum()),
    "Mean of a mean": (SIZE, lambda m, b: Mean(losses_of(m, b).mean(), b["w"].sum())),
    "Mean over 1": (SIZE, lambda m, b: Mean(losses_of(m, b).sum(), 1.0)),
    "metric": (SIZE, lambda m, b: (losses_of(m, b).mean(), {"n": b["w"].sum()})),
    "quotient": (JOINT, lambda m, b: (losses_of(m, b) * b["w"]).sum() / b["w"].sum()),
    "quotient of means": (
        JOINT,
        lambda m, b: (losses_of(m, b) * b["w"]).mean() / (b["w"].mean() + 1e-8),
    ),
    "average": (JOINT, lambda m, b: jnp.average(losses_of(m, b), weights=b["w"])),
    "mean where": (JOINT, lambda m, b: losses_of(m, b).mean(where=b["w"] > 0)),
    "weights that add up to 1": (
        JOINT,
        lambda m, b: (losses_of(m, b) * (b["w"] / b["w"].sum())).sum(),
    ),
    "value": (JOINT, lambda m, b: cross_entropy(m(b["x"]), b["y"], b["w"]).value),
    "root": (JOINT, lambda m, b: jnp.sqrt(errors(m, b).mean())),
    "perplexity": (JOINT, lambda m, b: jnp.exp(losses_of(m, b).mean())),
    "dice": (JOINT, dice),
    "InfoNCE": (PAIRS, lambda m, b: contrast(rows(m, b), rows(m, b))),
    "CLIP": (PAIRS, clip),
    "SimCLR": (PAIRS, simclr),
    "views in a row": (
        PAIRS,
        lambda m, b: contrast(*2 * [m.inner(b["x"]).reshape(-1, DIM)]),
    ),
    "differences": (
        PAIRS,
        lambda m, b: ((rows(m, b)[:, None] - rows(m, b)[None]) ** 2).sum(-1).mean(),
    ),
    "ranks": (
        PAIRS,
        lambda m, b: jax.nn.softplus(
            rows(m, b)[:, None, 0] - rows(m, b)[None, :, 0]
        ).mean(),
    ),
    "two vmaps": (
        PAIRS,
        lambda m, b: jax.vmap(lambda x: jax.vmap(lambda y: x @ y)(rows(m, b)))(
            rows(m, b)
        ).mean(),
    ),
}


@cache
def plan() -> StatePlan:
    return plan_step(Model, FSDP(2))


def changes_of(loss: Any) -> list[str]:
    batch = jax.tree.map(jnp.asarray, BATCH)
    arguments = plan().abstract, batch, jax.random.key(0), 4
    return changes_by_microbatches(plan(), loss, *arguments)


@pytest.mark.parametrize("loss", UNCHANGED.values(), ids=UNCHANGED)
def test_mean_over_rows_does_not_warn(loss: Any) -> None:
    assert changes_of(loss) == []


@pytest.mark.parametrize(("text", "loss"), CHANGED.values(), ids=CHANGED)
def test_loss_that_depends_on_microbatches_warns(text: str, loss: Any) -> None:
    (found,) = changes_of(loss)
    assert text in found
    assert found.startswith("num_microbatches=4 changes the numbers. The ")


def values_of(
    loss: Any, num_microbatches: int, strategy: Strategy = STRATEGIES["FSDP"]
) -> np.ndarray:
    trainer = Trainer(
        lambda rngs: Model(rngs, nnx.LayerNorm),
        optax.sgd(0.1),
        loss,
        strategy=strategy,
        devices=jax.devices()[:2],
        num_microbatches=num_microbatches,
        loggers=(),
    )
    return trainer.fit([BATCH] * 3, num_steps=2)["loss"]


@pytest.mark.filterwarnings("ignore:The loss has no gradient")
def test_remedies_give_the_losses_of_one_microbatch() -> None:
    """Compares the losses, and checks that a fit warns once."""

    def total(m: Model, b: Any) -> Any:
        return errors(m, b).sum()

    def quotient(m: Model, b: Any) -> Any:
        return (errors(m, b).sum(-1) * b["w"]).sum() / b["w"].sum()

    with pytest.warns(ParallelWarning, match=SIZE) as said:
        quarter = values_of(total, 4)[0]
    assert sum(re.search(SIZE, str(x.message)) is not None for x in said) == 1
    np.testing.assert_allclose(4 * quarter, values_of(total, 1)[0], rtol=1e-5)
    with pytest.warns(ParallelWarning, match=JOINT):
        found = values_of(quotient, 4)
    expected = values_of(quotient, 1)
    assert abs(found - expected).max() > 1e-3

    def remedy(m: Model, b: Any) -> Mean:
        return Mean((errors(m, b).sum(-1) * b["w"]).sum(), b["w"].sum())

    np.testing.assert_allclose(values_of(remedy, 4), expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The loss has no gradient")
def test_contrastive_loss_in_pipeline_warns() -> None:
    def loss(m: Model, b: Any) -> jax.Array:
        z = m.blocks(b["x"]).mean(1)
        return contrast(z, z)

    with pytest.warns(ParallelWarning, match=PAIRS):
        values_of(loss, 2, STRATEGIES["Pipeline"])


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_weight_that_depends_on_model_raises(
    strategy: Any, num_microbatches: int
) -> None:
    def loss(m: Model, b: Any) -> Mean:
        z = m.blocks(b["x"])
        # A weight that depends on the stack's output would raise another error.
        return Mean((z**2).sum(), z.size + m.head.kernel[...].sum())

    message = "The weight of a Mean depends on the model's parameters"
    with pytest.raises(LossError, match=message):
        values_of(loss, num_microbatches, strategy)
