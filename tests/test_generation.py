"""Generation: equal tokens under every strategy, padded prompts, stop tokens."""

import re
from dataclasses import replace
from functools import cache, partial
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
    ContextParallel,
    ExpertParallel,
    Pipeline,
    TensorParallel,
    Trainer,
)
from nnx_parallel.layers import Experts
from nnx_parallel.models import GPT, GPTConfig, generate, next_token_loss, pad_prompts
from nnx_parallel.models.generation import _Sampler  # pyright: ignore[reportPrivateUsage]
from tests.parity.models import SEQ_LEN
from tests.parity.strategies import ONE_DEVICE, PLANS, Plan

pytestmark = pytest.mark.long

CONFIG = GPTConfig.tiny_llama(
    vocab_size=64, seq_len=SEQ_LEN, embed_dim=64, num_heads=8, num_kv_heads=4
)


def decided(rngs: nnx.Rngs, config: GPTConfig = CONFIG) -> GPT:
    """A GPT with larger parameters, so that greedy choices are clear."""
    model = GPT(config, rngs=rngs)
    nnx.update(model, jax.tree.map(lambda x: 4 * x, nnx.state(model, nnx.Param)))
    return model


PROMPTS = [[int(t) for t in range(1, 1 + n)] for n in (4, 1, 3, 2, 4, 1, 2, 3)]
SAMPLING = {"max_new_tokens": 4, "temperature": 0.7, "top_k": 20, "top_p": 0.9}


def continued(model: Any, batch: Any) -> jax.Array:
    return generate(model, batch["prompt"], max_new_tokens=4, temperature=0)


def sampled(model: Any, batch: Any) -> jax.Array:
    return generate(model, **batch, key=jax.random.key(3), stop=(7,), **SAMPLING)


EXPERTS = replace(
    CONFIG, mlp_dim=None, experts=Experts(num_experts=4, top_k=2, mlp_dim=32)
)


def made_under(plan: Plan, function: Any, config: GPTConfig = CONFIG) -> np.ndarray:
    trainer = Trainer(
        partial(decided, config=config),
        optax.sgd(0.1),
        next_token_loss,
        strategy=plan.strategy(),
        devices=plan.devices(),
        loggers=(),
    )
    if function is sampled:
        return trainer.predict([pad_prompts(PROMPTS)], function)
    prompts = np.random.default_rng(0).integers(64, size=(8, 4)).astype(np.int32)
    return trainer.predict([{"prompt": prompts}], function)


@cache
def expected(function: Any, config: GPTConfig = CONFIG) -> np.ndarray:
    return made_under(ONE_DEVICE, function, config)


STAGES = {
    "pp2": Plan(make=lambda rules: Pipeline(2)),
    "pp2_fsdp2_tp2": Plan(
        make=lambda rules: Composite(
            Pipeline(2), FSDP(2, min_size=0), TensorParallel(2)
        )
    ),
}
MAIN = ("fsdp8", "tp2", "fsdp4_tp2", "pp2", "pp2_fsdp2_tp2")


@pytest.mark.parametrize(
    "plan",
    [
        name if name in MAIN else pytest.param(name, marks=pytest.mark.deep)
        for name in (*PLANS, *STAGES)
    ],
)
@pytest.mark.parametrize("function", [continued, sampled])
def test_generation_matches_one_device(function: Any, plan: str) -> None:
    found = made_under((PLANS | STAGES)[plan], function)
    assert found.shape == (8, 8)
    assert len(np.unique(expected(function)[:, 4:])) > 3
    np.testing.assert_array_equal(found, expected(function))


SPLIT: dict[str, tuple[Plan, GPTConfig]] = {
    "cp2": (Plan(make=lambda rules: ContextParallel(2)), CONFIG),
    "fsdp2_cp2": (
        Plan(make=lambda rules: Composite(FSDP(2, min_size=0), ContextParallel(2))),
        CONFIG,
    ),
    "ep2": (Plan(make=lambda rules: ExpertParallel(2)), EXPERTS),
    "ep4_tp2": (
        Plan(make=lambda rules: Composite(ExpertParallel(4), TensorParallel(2))),
        EXPERTS,
    ),
}


@pytest.mark.parametrize(
    ("plan", "config"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.deep] * ("_" in name))
        for name, case in SPLIT.items()
    ],
)
@pytest.mark.parametrize("function", [continued, sampled])
def test_generation_with_split_sequences_or_experts_matches_one_device(
    function: Any, plan: Plan, config: GPTConfig
) -> None:
    found = made_under(plan, function, config)
    wanted = expected(function, config)
    assert found.shape == (8, 8)
    assert len(np.unique(wanted[:, 4:])) > 3
    np.testing.assert_array_equal(found, wanted)


CONFIGS = {
    "rope": CONFIG,
    "learned": GPTConfig.tiny(vocab_size=64, seq_len=SEQ_LEN, embed_dim=64),
    "window": GPTConfig.tiny_llama(
        vocab_size=64, seq_len=SEQ_LEN, window=2, num_kv_heads=4
    ),
    "experts": GPTConfig.tiny_llama(
        vocab_size=64,
        seq_len=SEQ_LEN,
        mlp_dim=None,
        num_kv_heads=4,
        experts=Experts(num_experts=4, top_k=2, mlp_dim=32),
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_padded_prompts_continue_like_separate_prompts(config: GPTConfig) -> None:
    model = GPT(config, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: 4 * x, nnx.state(model, nnx.Param)))
    options: Any = {"max_new_tokens": 4, "temperature": 0, "pad": 9}
    prompts = PROMPTS[:4]
    batch: Any = pad_prompts(prompts, pad=63)
    rows = np.asarray(generate(model, **batch, **options))
    assert rows.shape == (4, 8)
    for row, prompt in zip(rows, prompts, strict=True):
        alone = generate(model, jnp.array([prompt]), **options)
        end = len(prompt) + 4
        np.testing.assert_array_equal(row[:end], alone[0])
        assert (row[end:] == 9).all()


def test_stop_token_ends_a_row() -> None:
    model = decided(nnx.Rngs(0))
    prompt = jnp.arange(6)[:, None]
    options: Any = {"max_new_tokens": 6, "temperature": 0}
    free = np.asarray(generate(model, prompt, **options))
    stop = int(free[0, 3])
    rows = np.asarray(generate(model, prompt, stop=(stop,), pad=1, **options))
    stopped = 0
    for row, whole in zip(rows, free, strict=True):
        (places,) = np.nonzero(whole[1:] == stop)
        end = 2 + places[0] if len(places) else len(whole)
        stopped += end < len(whole)
        np.testing.assert_array_equal(row[:end], whole[:end])
        assert (row[end:] == 1).all()
    assert stopped


@pytest.mark.parametrize(
    ("top_p", "shares"),
    [
        (0.4, [1, 0, 0, 0]),
        (0.6, [0.5 / 0.8, 0.3 / 0.8, 0, 0]),
        (0.9, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (1.0, [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_top_p_keeps_the_smallest_set(top_p: float, shares: list[float]) -> None:
    order = np.array([2, 0, 3, 1])  # the likeliest token need not be the first
    logits = np.log([0.5, 0.3, 0.15, 0.05])[np.argsort(order)]
    sampler = _Sampler(1.0, 4, top_p, (), 0)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (4000, 4))
    tokens, _ = sampler(rows, jax.random.key(0), jnp.zeros(4000, bool))
    found = np.bincount(np.asarray(tokens), minlength=4)[order] / 4000
    np.testing.assert_allclose(found, shares, atol=0.03)
    assert ((found == 0) == (np.array(shares) == 0)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1 (all tokens)"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0"),
        ({"stop": (3, 64)}, "stop has the token 64; tokens are from 0 to 63."),
        ({"pad": -1}, "pad has the token -1; tokens are from 0 to 63."),
        (
            {"lengths": jnp.array([1, 2])},
            "lengths is int32[2]; for a prompt of shape (1, 3)",
        ),
        ({"lengths": jnp.array([4])}, "lengths is [4]; each must be from 1 to 3, the"),
        ({"lengths": jnp.array([0])}, "lengths is [0]; each must be from 1 to 3, the"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    model = GPT(CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(
            model,
            jnp.ones((1, 3), int),
            max_new_tokens=2,
            key=jax.random.key(0),
            **options,
        )


def test_empty_prompt_raises() -> None:
    message = "The prompts have [2, 0] tokens. There must be a prompt, and each prompt"
    with pytest.raises(ValueError, match=re.escape(message)):
        pad_prompts([[1, 2], []])


def test_generating_with_another_model_raises() -> None:
    model: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    message = "generate got a Linear, but it needs a GPT or a Gemma3n, which has"
    with pytest.raises(TypeError, match=message):
        generate(model, jax.numpy.ones((1, 2), int), max_new_tokens=2)
