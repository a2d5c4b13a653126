"""`TextSamples`: the texts of a callback equal a call of `generate`."""

import json
import re
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Composite, TensorParallel, TextSamples, Trainer
from nnx_parallel.models import GPT, GPTConfig, generate, next_token_loss

pytestmark = pytest.mark.long

PROMPTS = ["ab", "abcdef", "c"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0}
go_on = nnx.jit(generate, static_argnames=tuple(OPTIONS))


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode("latin-1")


def make(**options: Any) -> TextSamples:
    both = {"every": 4, "encode": encode, "decode": decode} | OPTIONS | options
    return TextSamples(both.pop("prompts", PROMPTS), **both)


def fit(sample: TextSamples, directory: Path | None = None) -> Trainer:
    """Learns the alphabet, which comes round again after the letter z."""
    letters = ord("a") + (np.arange(8)[:, None] + np.arange(17)) % 26
    trainer = Trainer(
        lambda rngs: GPT(GPTConfig.tiny(), rngs=rngs),
        optax.adam(1e-2),
        next_token_loss,
        strategy=Composite(TensorParallel(2), FSDP()),
        callbacks=(sample,),
        checkpoint=directory,
        loggers=None if directory else (),
    )
    trainer.fit([letters.astype(np.int32)] * 8, num_steps=8)
    return trainer


def test_texts_continue_prompts_and_reach_loggers(tmp_path: Path) -> None:
    sample = make()
    trainer = fit(sample, tmp_path)
    for prompt, text in zip(PROMPTS, sample.texts, strict=True):
        model = cast("GPT", trainer.model)
        expected = go_on(model, jnp.array([encode(prompt)]), **OPTIONS)
        assert text == decode(expected[0].tolist())
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    found = [line["message"] for line in lines if "Sample" in line.get("message", "")]
    assert len(found) == 2 * len(PROMPTS)
    ends = [f"Sample at step 8: {text}" for text in sample.texts]
    assert found[len(PROMPTS) :] == ends


def test_first_and_stop_tokens_are_left_out() -> None:
    plain = make(prompts=["ab"], start=ord("z"))
    fit(plain)
    (text,) = plain.texts
    assert text.startswith("ab")
    assert len(text) == 2 + OPTIONS["max_new_tokens"]
    stopped = make(prompts=["ab"], start=ord("z"), stop=encode(text[3]))
    fit(stopped)
    assert stopped.texts == [text[: text.index(text[3], 2)]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_p": 2.0}, "top_p is 2.0"),
        (
            {"encode": lambda text: [300]},
            "A prompt of TextSamples has the token 300, but the model has 256 tokens, "
            "from 0 to 255.",
        ),
        ({"encode": lambda text: [-1]}, "TextSamples has the token -1, but the model"),
    ],
)
def test_invalid_sample_raises_before_first_step(change: dict, message: str) -> None:
    sample = make(**change)
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(sample)
    assert sample.texts == []


def test_sampling_does_not_change_training() -> None:
    with_samples, without = (fit(make(every=every)) for every in (1, 100))
    states = (jax.tree.leaves(x.state.params) for x in (with_samples, without))
    for found, expected in zip(*states, strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "TextSamples(every=0): it must be an int of at least 1."),
        ({"prompts": "ab"}, "TextSamples('ab'): the prompts are a list of texts."),
        ({"prompts": ["a", ""]}, "The prompts have [1, 0] tokens. There must be a"),
    ],
)
def test_invalid_samples_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)
