"""Samples tokens from a `GPT`, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.models.gpt import GPT, Caches
from nnx_parallel.models.gpt_config import GPTConfig


def generate(
    model: GPT,
    prompt: jax.Array,
    *,
    max_new_tokens: int,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> jax.Array:
    """Continues prompts token by token, without dropout.

    The function is pure. In `jax.jit`, all keyword arguments except ``key`` must be
    static. The cache keeps the keys and values of earlier tokens, so each new token
    needs only one pass over the parameters and the cache.

    Args:
        model: The model, which is not changed.
        prompt: int ``(batch, prompt_len)``.
        max_new_tokens: Number of tokens to add.
        key: Random key for sampling; it is not needed at temperature 0.
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to sample from; ``None`` takes all.

    Returns:
        int ``(batch, prompt_len + max_new_tokens)``, the prompts with continuations.

    Raises:
        TypeError: If the model is not a `GPT`.
        ValueError: If an argument is out of range, or if a model with learned positions
            has fewer positions than tokens.

    Example:
        >>> from nnx_parallel.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig.tiny(), rngs=nnx.Rngs(0))
        >>> prompt = jnp.array([[1, 2, 3]])
        >>> generate(model, prompt, max_new_tokens=5, temperature=0).shape
        (1, 8)
    """
    if not isinstance(model, GPT):
        raise TypeError(
            f"generate got a {type(model).__name__}, but it needs a GPT, which has a "
            "cache of keys and values. Call another model in a loop, and append a "
            "token that you choose from the last logits."
        )
    top = model.config.vocab_size if top_k is None else top_k
    _check_sampling(model.config, max_new_tokens, key is not None, temperature, top)
    model.config.check_length(prompt.shape[1] + max_new_tokens)
    keys = jax.random.split(jax.random.key(0) if key is None else key, max_new_tokens)
    sample = partial(_sample, temperature=temperature, top_k=top)
    return _continue(model, prompt, keys, sample)


def _continue(
    model: GPT, prompt: jax.Array, keys: jax.Array, sample: Callable[..., jax.Array]
) -> jax.Array:
    graphdef, state = nnx.split(model)

    def next_token(
        tokens: jax.Array, start: int | jax.Array, cache: Caches, key: jax.Array
    ) -> tuple[jax.Array, Caches]:
        # A pass may change variables, such as counters. It runs on a copy of the model,
        # so that these traced values do not leave the scan.
        copy = nnx.merge(graphdef, state, copy=True)
        copy.eval()
        logits, cache = copy.decode(tokens, start, cache)
        return sample(logits, key).astype(prompt.dtype), cache

    def step(carry: tuple, slices: tuple) -> tuple:
        token, cache = carry
        start, key = slices
        token, cache = next_token(token[:, None], start, cache, key)
        return (token, cache), token

    (batch_size, prompt_len), num_new = prompt.shape, len(keys)
    cache = model.make_cache(batch_size, prompt_len + num_new)
    first, cache = next_token(prompt, 0, cache, keys[0])
    starts = prompt_len + jnp.arange(num_new - 1)
    _, rest = jax.lax.scan(step, (first, cache), (starts, keys[1:]))
    # (batch, prompt_len), (batch, 1), (batch, num_new - 1)
    return jnp.concatenate([prompt, first[:, None], rest.T], axis=1)


def _check_sampling(
    config: GPTConfig,
    max_new_tokens: int,
    has_key: bool,
    temperature: float,
    top_k: int,
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    if temperature < 0:
        raise ValueError(
            f"temperature is {temperature}; it must be at least 0 (greedy)."
        )
    if temperature > 0 and not has_key:
        raise ValueError(
            f"Sampling at temperature {temperature} needs a key. Pass "
            "key=jax.random.key(0), or temperature=0 to choose the likeliest token."
        )
    if not 1 <= top_k <= config.vocab_size:
        raise ValueError(
            f"top_k is {top_k}; it must be from 1 to {config.vocab_size}, the number "
            "of tokens in the vocabulary, or None for all tokens."
        )


def _sample(
    logits: jax.Array, key: jax.Array, temperature: float, top_k: int
) -> jax.Array:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)  # (batch,)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) / temperature
    if top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]  # (batch, 1)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits)
