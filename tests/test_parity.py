"""Every strategy trains every model to the same numbers as one device.

``make test`` runs every model once or more, and every strategy with every number of
microbatches. ``make test-deep`` adds cases until all pairs of (model, strategy),
(model, microbatches) and (strategy, microbatches) are covered, and runs each strategy
with one of two further models. ``make test-all`` adds all other combinations, and
compiles these with all of XLA's optimizations.
"""

from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import Mean, Trainer
from nnx_parallel.layers import cross_entropy
from nnx_parallel.metrics import as_mean
from nnx_parallel.sharding import PathRules
from nnx_parallel.training.step import LossFn
from tests.parity.checks import (
    assert_gradients_close,
    assert_parts,
    assert_placed,
    assert_same_numbers,
    axes_in_use,
)
from tests.parity.models import (
    CASES,
    VOCAB,
    WIDTH,
    Arrays,
    Case,
    token_batch,
    token_loss,
)
from tests.parity.pairs import all_pairs, pairs_met
from tests.parity.runs import (
    compiling,
    described,
    measure,
    reference,
    to_host,
)
from tests.parity.strategies import ONE_DEVICE, PLANS, Plan

DEEP = pytest.mark.deep
MICROBATCHES = (1, 4)
PRODUCT = list(product(CASES, PLANS, MICROBATCHES))
FURTHER = ("rnn", "annotated")
"""Models of stock modules. Each strategy runs one of them, without all pairs."""
MAIN = [model for model in CASES if model not in FURTHER]
PAIRS = all_pairs(MAIN, list(PLANS), MICROBATCHES)
CHOSEN = PAIRS + [
    (FURTHER[i % 2], plan, MICROBATCHES[i // 2 % 2]) for i, plan in enumerate(PLANS)
]
# These cases cover every strategy with every number of microbatches. Each of the
# slowest models runs with only one number of microbatches, so that its reference on one
# device is computed once.
CHEAP = ("mlp", "rnn", "annotated")
LONG = {
    ("fsdp8", 1): "llama",
    ("fsdp8", 4): "cnn",
    ("fsdp8_gradients", 1): "lora",
    ("tp2", 4): "gpt",
    ("tp4", 1): "lora",
    ("fsdp4_tp2", 4): "gpt",
    ("dp2_fsdp2_tp2", 1): "llama",
    ("dp2_fsdp2_tp2", 4): "cnn",
}
QUICK = [
    (LONG.get((plan, n), CHEAP[i % 3]), plan, n)
    for i, (plan, n) in enumerate(product(PLANS, MICROBATCHES))
]


def parametrized() -> list:
    """All combinations as pytest parameters, with their marks.

    Cases that share programs are in one group, so that one worker runs them.
    """
    return [
        pytest.param(
            *combination,
            marks=[
                pytest.mark.xdist_group(f"parity {combination[0]}"),
                *marks_of(combination),
            ],
        )
        for combination in PRODUCT
    ]


def marks_of(combination: tuple) -> list[pytest.MarkDecorator]:
    if combination in QUICK:
        return []
    return [DEEP if combination in CHOSEN else pytest.mark.slow]


def test_selection_covers_every_pair() -> None:
    assert pairs_met(PAIRS) == pairs_met(product(MAIN, PLANS, MICROBATCHES))
    assert {(m, n) for m, _, n in CHOSEN} == set(product(CASES, MICROBATCHES))
    assert {plan for m, plan, _ in CHOSEN if m in FURTHER} == set(PLANS)
    assert len(CHOSEN) < 0.6 * len(PRODUCT)
    assert {(plan, n) for _, plan, n in QUICK} == set(product(PLANS, MICROBATCHES))
    assert {model for model, *_ in QUICK} == set(CASES)


@pytest.mark.parametrize(("model", "plan", "microbatches"), parametrized())
def test_training_matches_one_device(model: str, plan: str, microbatches: int) -> None:
    case, strategy = CASES[model], PLANS[plan].strategy(CASES[model])
    devices = PLANS[plan].devices()
    optimized = (model, plan, microbatches) not in [*QUICK, *CHOSEN]
    expected = reference(model, microbatches, optimized=optimized)
    with compiling(optimized=optimized):
        run = measure(case, strategy, devices, microbatches)

    assert_same_numbers(run, expected)

    description = described(case, strategy, devices)
    assert_placed(run.start, description)
    assert_placed(run.end, description)
    assert_parts(run.end.params, PLANS[plan].params_parts)
    assert_parts(run.end.opt_state, PLANS[plan].optimizer_parts)
    assert axes_in_use(run) >= set(strategy.axis_sizes) - {"data"}


# The mean is over the whole batch, however the batch is split


class Bigram(nnx.Module):
    """Predicts a token from its predecessor. It compiles in a fraction of a GPT's time.

    The mean does not depend on the model.
    """

    def __init__(self, dropout: float, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.gelu(self.embed(tokens))))


BIGRAM = Case(
    build=lambda rngs: Bigram(0.1, rngs),
    loss=token_loss,
    make_batch=token_batch,
    tensor_rules=(PathRules((r"head\.kernel", P(None, "tensor"))),),
)


def masked_loss(model: Any, batch: Any) -> Mean:
    """The mean over tokens of weight 1, whose number differs between rows."""
    logits = model(batch["tokens"][:, :-1])
    return cross_entropy(logits, batch["tokens"][:, 1:], batch["weights"][:, 1:])


def loss_of_two_weights(model: Any, batch: Any) -> Mean:
    """Token loss plus a z-loss, a mean that weighs the tokens differently."""
    logits = model(batch["tokens"][:, :-1])
    weights, other = batch["weights"][:, 1:], 1.0 + batch["tokens"][:, 1:] % 3
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    z_loss = Mean((other * normaliser**2).sum(), other.sum())
    return cross_entropy(logits, batch["tokens"][:, 1:], weights) + 0.1 * z_loss


def build_without_dropout(rngs: nnx.Rngs) -> Bigram:
    return Bigram(0.0, rngs)


@cache
def by_hand(loss: LossFn) -> tuple[float, Arrays]:
    """Returns the loss and gradients of the undivided batch, by JAX and Flax only."""
    (batch,) = BIGRAM.batches(1)
    graphdef, params, rest = nnx.split(
        build_without_dropout(nnx.Rngs(0)), nnx.Param, ...
    )

    @jax.jit
    def value_and_grad(params: nnx.State, batch: Arrays) -> tuple[jax.Array, nnx.State]:
        def objective(params: nnx.State) -> jax.Array:
            model = nnx.merge(graphdef, params, rest, copy=True)
            means = as_mean(loss(model, batch), "")
            terms = [t.total / t.weight for t in means.terms]
            return jnp.sum(jnp.stack(terms))

        return jax.value_and_grad(objective)(params)

    value, grads = value_and_grad(params, batch)
    return float(value), to_host(nnx.to_pure_dict(grads))


@pytest.mark.xdist_group("means")
@pytest.mark.parametrize("plan", [ONE_DEVICE, PLANS["dp8"]], ids=["one", "dp8"])
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=DEEP), 4])
@pytest.mark.parametrize("loss", [masked_loss, loss_of_two_weights])
def test_accumulated_mean_matches_whole_batch(
    loss: LossFn, microbatches: int, plan: Plan
) -> None:
    (batch,) = BIGRAM.batches(1)
    counts = batch["weights"][:, 1:].sum(axis=1).reshape(-1, 4).sum(axis=0)
    assert len(set(counts)) == 4, "the microbatches have the same weight"
    trainer = Trainer(
        build_without_dropout,
        optax.trace(decay=0.0),  # the state is the gradient
        loss,
        strategy=plan.strategy(),
        num_microbatches=microbatches,
        devices=plan.devices(),
        loggers=(),
    )
    state, metrics = trainer.train_step(trainer.state, trainer.shard_batch(batch))
    expected_loss, expected_gradients = by_hand(loss)
    np.testing.assert_allclose(float(metrics["loss"]), expected_loss, rtol=1e-6)
    assert isinstance(state.opt_state, optax.TraceState)
    gradients = to_host(state.opt_state.trace)
    assert_gradients_close(gradients, expected_gradients, limit=1e-6)


@pytest.mark.xdist_group("means")
@pytest.mark.parametrize("plan", [pytest.param("dp8", marks=DEEP), "fsdp4_tp2"])
@pytest.mark.parametrize("loss", [masked_loss, token_loss])
def test_evaluation_averages_all_rows(loss: LossFn, plan: str) -> None:
    """Dropout is off, batches differ in size, scalar losses are weighted by rows."""
    (rows,) = BIGRAM.batches(1)
    ragged = [
        {name: x[part] for name, x in rows.items()}
        for part in (slice(0, 16), slice(16, 28), slice(28, 29), slice(29, 32))
    ]
    trainer = Trainer(
        BIGRAM.build,
        optax.sgd(0.1),
        loss,
        strategy=PLANS[plan].strategy(BIGRAM),
        devices=PLANS[plan].devices(),
        loggers=(),
    )
    found = trainer.evaluate(ragged)
    expected, _ = by_hand(loss)
    assert found.keys() == {"loss"}
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-6)
