"""A model generates the same tokens under every strategy."""

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import Trainer
from nnx_parallel.models import GPT, GPTConfig, generate, next_token_loss
from tests.parity.models import SEQ_LEN
from tests.parity.strategies import ONE_DEVICE, PLANS, Plan

CONFIG = GPTConfig.tiny_llama(
    vocab_size=64, seq_len=SEQ_LEN, embed_dim=64, num_heads=8, num_kv_heads=4
)


def decided(rngs: nnx.Rngs) -> GPT:
    """A GPT with larger parameters, so that greedy choices are clear."""
    model = GPT(CONFIG, rngs=rngs)
    nnx.update(model, jax.tree.map(lambda x: 4 * x, nnx.state(model, nnx.Param)))
    return model


def continued(model: Any, prompt: jax.Array) -> jax.Array:
    return generate(model, prompt, max_new_tokens=4, temperature=0)


def made_under(plan: Plan) -> np.ndarray:
    trainer = Trainer(
        decided,
        optax.sgd(0.1),
        next_token_loss,
        strategy=plan.strategy(),
        devices=plan.devices(),
        loggers=(),
    )
    prompts = np.random.default_rng(0).integers(64, size=(8, 4)).astype(np.int32)
    return trainer.predict([prompts], continued)


@cache
def expected() -> np.ndarray:
    return made_under(ONE_DEVICE)


@pytest.mark.deep
@pytest.mark.parametrize("plan", PLANS)
def test_generation_matches_one_device(plan: str) -> None:
    found = made_under(PLANS[plan])
    assert found.shape == (8, 8)
    assert len(np.unique(expected()[:, 4:])) > 3
    np.testing.assert_array_equal(found, expected())


def test_generating_with_another_model_raises() -> None:
    model: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    message = "generate got a Linear, but it needs a GPT, which has a cache"
    with pytest.raises(TypeError, match=message):
        generate(model, jax.numpy.ones((1, 2), int), max_new_tokens=2)
