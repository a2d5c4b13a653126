"""What the plain step has, a pipeline has: any loss with one stack, any policy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models import GPT, GPTConfig, generate, next_token_loss
from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    GPipe,
    Interleaved,
    Mean,
    OneFOneB,
    Pipeline,
    Precision,
    Schedule,
    Strategy,
    TensorParallel,
    ZeroBubble,
)
from nnx_parallel.layers import Remat, Stack
from nnx_parallel.sharding.layout import ZeroKind
from tests.parity.models import GPT_SIZES, Arrays, token_batch
from tests.pipelines import assert_like_one_device, make_trainer

NUM_LAYERS = 4
GPT_CONFIG = GPTConfig.tiny(**(GPT_SIZES | {"num_layers": NUM_LAYERS}))
TOKENS = token_batch(np.random.default_rng(0))


def tokens() -> Arrays:
    return TOKENS


def few_tokens() -> Arrays:
    return {name: x[:8] for name, x in TOKENS.items()}


PP2_FSDP2_TP2 = Composite(Pipeline(2), FSDP(2, min_size=0), TensorParallel(2))


def build_gpt(rngs: nnx.Rngs) -> GPT:
    return GPT(GPT_CONFIG, rngs=rngs)


# Policies


@pytest.mark.parametrize(
    ("remat", "stash"),
    [
        ("none", "policy"),
        ("dots", "policy"),
        ("full", "inputs"),
        pytest.param("none", "inputs", marks=pytest.mark.slow),
        pytest.param("dots", "inputs", marks=pytest.mark.slow),
        pytest.param("full", "policy", marks=pytest.mark.slow),
    ],
)
def test_what_is_kept_changes_no_number(remat: Remat, stash: Any) -> None:
    schedule = ZeroBubble() if remat != "none" else Interleaved(chunks=2)
    strategy = Composite(
        Pipeline(2, schedule, stash=stash), FSDP(2, min_size=0), TensorParallel(2)
    )
    assert_like_one_device(build_gpt, next_token_loss, strategy, tokens, remat=remat)


@pytest.mark.parametrize(
    ("shard", "gather"),
    [
        ("params", "step"),
        ("gradients", "microbatch"),
        pytest.param("params", "microbatch", marks=pytest.mark.slow),
        pytest.param("optimizer", "step", marks=pytest.mark.slow),
    ],
)
def test_each_kind_of_fsdp_inside_a_stage(shard: ZeroKind, gather: Any) -> None:
    strategy = Composite(Pipeline(2, gather=gather), FSDP(4, shard=shard, min_size=0))
    assert_like_one_device(build_gpt, next_token_loss, strategy, tokens)


@pytest.mark.parametrize(
    "num_microbatches", [1, pytest.param(8, marks=pytest.mark.slow)]
)
def test_any_number_of_microbatches(num_microbatches: int) -> None:
    strategy = Composite(Pipeline(4), DataParallel(2))
    assert_like_one_device(
        build_gpt,
        next_token_loss,
        strategy,
        tokens,
        num_microbatches=num_microbatches,
    )


def test_one_stage() -> None:
    assert_like_one_device(build_gpt, next_token_loss, Pipeline(1), tokens)


@pytest.mark.slow
def test_mixed_precision_accumulates_in_float32() -> None:
    losses = {}
    for strategy in (DataParallel(1), PP2_FSDP2_TP2):
        trainer = make_trainer(
            build_gpt,
            next_token_loss,
            strategy,
            precision=Precision.mixed_bfloat16(),
            optimizer=optax.adamw(1e-3),
        )
        history = trainer.fit([TOKENS] * 4, num_steps=4)
        losses[str(strategy)] = history["loss"]
        dtypes = {x.dtype for x in jax.tree.leaves(trainer.state.params)}
        assert dtypes == {jnp.dtype("float32")}
    first, second = losses.values()
    # bfloat16 has 8 bits: two orders of summation differ by parts of a thousandth.
    np.testing.assert_allclose(first, second, rtol=2e-3)


# Losses and models


class Block(nnx.Module):
    """A block with dropout, batch statistics, a side input and a mask."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array, side: jax.Array, mask: jax.Array) -> jax.Array:
        hidden = self.dropout(nnx.silu(self.linear(self.norm(x)) * side))
        return x + jnp.where(mask[:, None] > 0, hidden, 0.5 * hidden)


class Skipping(nnx.Module):
    """A stack with a skip connection around it, a side input, and statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.side = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.stack = Stack(Block, NUM_LAYERS, rngs=rngs)
        self.last_norm = nnx.BatchNorm(16, rngs=rngs)
        self.last_dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        x = self.dropout(self.norm(self.first(batch["inputs"])))
        y = self.stack(x, nnx.tanh(self.side(batch["inputs"])), batch["labels"] % 2)
        y = self.last_norm(self.last_dropout(y + x))
        return self.head(y)


def make_rows(num_rows: int = 32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(num_rows, 16)).astype(np.float32)
    return {"inputs": inputs, "labels": rng.integers(0, 4, num_rows)}


def skipping_loss(model: Skipping, batch: Any) -> tuple[Mean, dict[str, Any]]:
    logits = model(batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    weights = (batch["labels"] > 0).astype(jnp.float32)
    right = (logits.argmax(-1) == batch["labels"]).astype(jnp.float32)
    loss = Mean((losses * weights).sum(), weights.sum())
    extra = Mean((logits**2).sum(), jnp.float32(logits.size))
    return loss + 1e-2 * extra, {"accuracy": right.mean()}


@pytest.mark.parametrize(
    "strategy",
    [
        Composite(Pipeline(2, ZeroBubble()), DataParallel(4)),
        Pipeline(2, Interleaved(chunks=2), stash="inputs"),
        pytest.param(Composite(Pipeline(2), DataParallel(2)), marks=pytest.mark.slow),
        pytest.param(Pipeline(4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_skips_side_inputs_statistics_and_metrics(strategy: Strategy) -> None:
    """Of two steps, for the first one's statistics and masks reach the second."""
    metrics = assert_like_one_device(
        Skipping, skipping_loss, strategy, make_rows, steps=2
    )
    assert 0 < metrics["accuracy"] < 1


def test_loss_scaling_of_float16() -> None:
    trainer = make_trainer(
        Skipping,
        skipping_loss,
        Composite(Pipeline(2), DataParallel(2)),
        precision=Precision.mixed_float16(),
        optimizer=optax.adamw(1e-3),
    )
    history = trainer.fit([make_rows()] * 6, num_steps=6)
    assert history["loss"][-1] < history["loss"][0]
    assert history["skipped"].sum() < 3


def noisy_loss(model: GPT, batch: Any, rngs: nnx.Rngs) -> Mean:
    """The model's embedding is disturbed by the loss's own random numbers."""
    loss = next_token_loss(model, batch)
    noise = jax.random.normal(rngs.noise(), ())
    return loss * (1.0 + 0.1 * noise)


def test_random_numbers_of_the_loss() -> None:
    assert_like_one_device(build_gpt, noisy_loss, Pipeline(2), tokens)


def test_frozen_layers() -> None:
    """Only the norms are trained: the rest of each layer gets no gradient."""

    def is_norm(path: tuple, _: Any) -> bool:
        return any("norm" in str(part) for part in path)

    strategy = Composite(Pipeline(2, ZeroBubble()), FSDP(2, min_size=0))
    wrt = nnx.All(nnx.Param, is_norm)
    assert_like_one_device(build_gpt, next_token_loss, strategy, tokens, wrt=wrt)


def decayed_loss(model: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The layers' parameters count outside the blocks too."""
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    norm = sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in params)
    out = model(batch)
    return (out**2).mean() + 1e-3 * norm, {"kernels": norm}


@pytest.mark.parametrize(
    "strategy",
    [
        Composite(Pipeline(2, Interleaved(chunks=2)), FSDP(2, min_size=0)),
        pytest.param(Pipeline(4, ZeroBubble()), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_loss_of_the_layers_parameters(strategy: Strategy) -> None:
    assert_like_one_device(Skipping, decayed_loss, strategy, make_rows)


class Adaptive(nnx.Module):
    """Variables before the stack that follow one after it, and NumPy input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stack = Stack(lambda rngs: nnx.Linear(16, 16, rngs=rngs), 4, rngs=rngs)
        self.last = nnx.Variable(jnp.float32(1))
        self.total = nnx.Variable(jnp.float32(0))

    def __call__(self, batch: Any) -> jax.Array:
        self.total[...] = self.total[...] + self.last[...]
        y = self.stack(batch["inputs"])
        self.last[...] = (y**2).mean()
        return y


def squares(model: Any, batch: Any) -> jax.Array:
    return (model(batch) ** 2).mean()


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=str)
def test_a_variable_that_follows_one_after_the_stack(schedule: Schedule) -> None:
    assert_like_one_device(Adaptive, squares, Pipeline(2, schedule), make_rows, steps=2)


class Mixed(nnx.Module):
    """A block whose variable has another dtype than what it computes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.mean = nnx.Variable(jnp.bfloat16(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean.set_value(x.mean())  # float32
        return self.linear(x) + self.mean[...].astype(x.dtype)


def build_mixed(rngs: nnx.Rngs) -> nnx.Module:
    model = Adaptive(rngs)
    model.stack = Stack(Mixed, 4, rngs=rngs)
    return model


def test_variables_keep_their_dtype() -> None:
    assert_like_one_device(build_mixed, squares, Pipeline(2), make_rows)


def test_rows_that_do_not_divide_over_the_stages() -> None:
    """Two rows a microbatch on four stages: the sequence is split around the stack."""
    assert_like_one_device(build_gpt, next_token_loss, Pipeline(4), few_tokens)


# The Trainer


@pytest.fixture(scope="module")
def alone() -> tuple:
    return run_trainer(DataParallel(1))


def run_trainer(strategy: Strategy) -> tuple:
    """Losses of training and evaluation, predictions, and a continuation."""
    trainer = make_trainer(
        build_gpt,
        next_token_loss,
        strategy,
        optimizer=optax.sgd(0.05, momentum=0.9),
        ema_decay=0.5,
    )
    odd = {name: x[:5] for name, x in TOKENS.items()}
    history = trainer.fit(
        [TOKENS] * 4, num_steps=4, eval_data=[TOKENS, odd], eval_every=2
    )
    averaged = trainer.evaluate([TOKENS, odd], ema=True)["loss"]
    inputs = TOKENS["tokens"][:, :-1].astype(np.int32)
    logits = trainer.predict([inputs, inputs[:3]])
    tables = trainer.predict([inputs], lambda model, x: model.embed(x))
    model: Any = trainer.model
    prompt = jnp.asarray(inputs[:2, :3])
    text = generate(model, prompt, max_new_tokens=4, temperature=0)
    return history["loss"], history["eval_loss"], averaged, logits, tables, text


@pytest.mark.parametrize(
    "strategy",
    [
        Composite(Pipeline(2, Interleaved(chunks=2)), TensorParallel(2)),
        pytest.param(PP2_FSDP2_TP2, marks=pytest.mark.slow),
        pytest.param(Pipeline(4, ZeroBubble(), stash="inputs"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_evaluation_prediction_and_generation(strategy: Strategy, alone: tuple) -> None:
    *numbers, text = run_trainer(strategy)
    *expected, expected_text = alone
    for found, wanted in zip(numbers, expected, strict=True):
        wanted = np.asarray(wanted)
        limit = 1e-5 * np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=limit)
    assert (np.asarray(text) == np.asarray(expected_text)).all()


def test_describe_shows_the_stages() -> None:
    table = str(PP2_FSDP2_TP2.describe(build_gpt))
    assert "'layers' -> pipe" in table


def test_a_strategy_says_what_differs_from_its_defaults() -> None:
    assert repr(Pipeline(2)) == "Pipeline(size=2)"
    assert repr(Pipeline(2, ZeroBubble())) == "Pipeline(size=2, schedule=ZeroBubble())"
