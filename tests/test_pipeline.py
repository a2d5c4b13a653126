"""A pipeline supports all features of a plain step: remat, evaluation, generation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Interleaved,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    ZeroBubble,
)
from nnx_parallel.layers import Remat
from nnx_parallel.models import GPT, GPTConfig, generate, next_token_loss
from nnx_parallel.sharding.rules import ZeroKind
from tests.parity.models import GPT_SIZES, Arrays, token_batch
from tests.pipelines import assert_like_one_device, make_trainer

pytestmark = pytest.mark.deep

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
        ("full", "inputs"),
        pytest.param("dots", "policy", marks=pytest.mark.slow),
        pytest.param("none", "inputs", marks=pytest.mark.slow),
        pytest.param("dots", "inputs", marks=pytest.mark.slow),
        pytest.param("full", "policy", marks=pytest.mark.slow),
    ],
)
def test_remat_and_stash_match_one_device(remat: Remat, stash: Any) -> None:
    schedule = ZeroBubble() if remat != "none" else Interleaved(chunks=2)
    strategy = Composite(
        Pipeline(2, schedule, stash=stash), FSDP(2, min_size=0), TensorParallel(2)
    )
    assert_like_one_device(build_gpt, next_token_loss, strategy, tokens, remat=remat)


@pytest.mark.parametrize(
    ("shard", "gather"),
    [
        ("params", "step"),
        pytest.param("gradients", "microbatch", marks=pytest.mark.slow),
        pytest.param("params", "microbatch", marks=pytest.mark.slow),
        pytest.param("optimizer", "step", marks=pytest.mark.slow),
    ],
)
def test_fsdp_within_stage_matches_one_device(shard: ZeroKind, gather: Any) -> None:
    strategy = Composite(Pipeline(2, gather=gather), FSDP(4, shard=shard, min_size=0))
    assert_like_one_device(build_gpt, next_token_loss, strategy, tokens)


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
    # bfloat16 has 8 significant bits, so different orders of summation differ by
    # thousandths.
    np.testing.assert_allclose(first, second, rtol=2e-3)


def test_indivisible_rows_match_one_device() -> None:
    """Two rows cannot be split over four stages, so the sequence is split instead."""
    assert_like_one_device(build_gpt, next_token_loss, Pipeline(4), few_tokens)


# The Trainer


@pytest.fixture(scope="module")
def alone() -> tuple:
    return run_trainer(DataParallel(1))


def run_trainer(strategy: Strategy) -> tuple:
    """Returns losses of training and evaluation, predictions, and a continuation."""
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
    logits = trainer.predict([inputs[:3]])
    tables = trainer.predict([inputs], lambda model, x: model.embed(x))
    model: Any = trainer.model
    prompt = jnp.asarray(inputs[:2, :3])
    text = generate(model, prompt, max_new_tokens=4, temperature=0)
    return history["loss"], history["eval_loss"], averaged, logits, tables, text


@pytest.mark.parametrize(
    "strategy",
    [
        Pipeline(2, Interleaved(chunks=2)),
        pytest.param(Pipeline(3), marks=pytest.mark.deep),
        pytest.param(PP2_FSDP2_TP2, marks=pytest.mark.slow),
        pytest.param(Pipeline(4, ZeroBubble(), stash="inputs"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_evaluation_and_generation_match_one_device(
    strategy: Strategy, alone: tuple
) -> None:
    *numbers, text = run_trainer(strategy)
    *expected, expected_text = alone
    for found, wanted in zip(numbers, expected, strict=True):
        wanted = np.asarray(wanted)
        limit = 1e-5 * np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=limit)
    assert (np.asarray(text) == np.asarray(expected_text)).all()


def test_describe_shows_stages() -> None:
    table = str(PP2_FSDP2_TP2.describe(build_gpt))
    assert "'layers' -> pipe" in table


def test_repr_shows_non_default_arguments() -> None:
    assert repr(Pipeline(2)) == "Pipeline(size=2)"
    assert repr(Pipeline(2, ZeroBubble())) == "Pipeline(size=2, schedule=ZeroBubble())"
