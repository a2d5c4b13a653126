"""Samples tokens from a language model, with a cache of keys and values.

References:
    [1] Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section
    3.1 (top-p sampling), https://arxiv.org/abs/1904.09751
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from nnx_parallel.errors import kind_of, suggests_names
from nnx_parallel.models.gemma3n import Gemma3n
from nnx_parallel.models.gpt import GPT

Decoder = GPT | Gemma3n
"""Models with a cache of keys and values."""


@suggests_names
def generate(
    model: Decoder,
    prompt: jax.Array,
    *,
    max_new_tokens: int,
    lengths: jax.Array | None = None,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
    pad: int = 0,
) -> jax.Array:
    """Continues prompts token by token, without dropout.

    The function is pure. In `jax.jit`, all keyword arguments except ``key`` and
    ``lengths`` must be static. The cache keeps the keys and values of earlier tokens,
    so each new token needs only one pass over the parameters and the cache. The number
    of passes is always ``max_new_tokens``, because shapes are static.

    Args:
        model: The model, which is not changed.
        prompt: int ``(batch, prompt_len)``.
        max_new_tokens: Number of tokens to add.
        lengths: int ``(batch,)``, the number of tokens of each prompt, at least 1.
            Padding follows a shorter prompt, and `pad_prompts` adds it. ``None``: all
            prompts have ``prompt_len`` tokens.
        key: Random key for sampling; it is not needed at temperature 0.
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to sample from; ``None`` takes all.
        top_p: Sample from the smallest set of likeliest tokens with at least this total
            probability [1], after ``temperature`` and ``top_k``; 1 takes all.
        stop: Tokens that end a row. The row keeps the stop token.
        pad: Token that fills a row after its end.

    Returns:
        int ``(batch, prompt_len + max_new_tokens)``, the prompts with continuations. A
        shorter prompt continues right after its last token.

    Raises:
        TypeError: If the model is neither a `GPT` nor a `Gemma3n`, or if an argument
            has the wrong type.
        ValueError: If the prompt or an argument is out of range, or if a model with
            learned positions has fewer positions than tokens.

    Example:
        >>> from nnx_parallel.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig.tiny(), rngs=nnx.Rngs(0))
        >>> prompt = jnp.array([[1, 2, 3]])
        >>> generate(model, prompt, max_new_tokens=5, temperature=0).shape
        (1, 8)
    """
    if not isinstance(model, Decoder):
        raise TypeError(
            f"generate got {kind_of(model)}, but it needs a GPT or a Gemma3n, "
            "which has a cache of keys and values. Call another model in a loop, and "
            "append a token that you choose from the last logits. The model of a "
            "Trainer is trainer.eval_model."
        )
    vocab = model.config.vocab_size
    top = vocab if top_k is None else top_k
    if isinstance(stop, int):
        raise TypeError(f"stop is {stop}; it must be a sequence, such as ({stop},).")
    _check_kinds(temperature, top_p, (max_new_tokens, top, pad, *stop), key)
    _check_prompt(prompt, vocab)
    sampler = _Sampler(temperature, top, top_p, tuple(stop), pad)
    sampler.check(vocab, has_key=key is not None)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    lengths = None if lengths is None else jnp.asarray(lengths)
    _check_lengths(prompt, lengths)
    keys = jax.random.split(jax.random.key(0) if key is None else key, max_new_tokens)
    new = _continue(model, prompt, lengths, keys, sampler)
    if lengths is None:
        return jnp.concatenate([prompt, new], axis=1)
    return _joined(prompt, new, lengths, pad)


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, pad: int = 0
) -> dict[str, np.ndarray]:
    """Returns a batch of prompts of unequal lengths, for `generate`.

    Args:
        prompts: The tokens of each prompt, at least one.
        pad: Token that follows shorter prompts.

    Returns:
        ``prompt``, int32 ``(batch, prompt_len)``, and ``lengths``, int32 ``(batch,)``.

    Raises:
        TypeError: If a prompt is not a sequence of tokens.
        ValueError: If there is no prompt, or if a prompt is empty.

    Example:
        >>> pad_prompts([[5, 6, 7], [8]])["prompt"].tolist()
        [[5, 6, 7], [8, 0, 0]]
    """
    for tokens in prompts:
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise TypeError(
                f"A prompt is {kind_of(tokens)}. Each prompt must be a list of tokens: "
                "pad_prompts([[5, 6, 7], [8]]). A tokenizer encodes text."
            )
    lengths = [len(tokens) for tokens in prompts]
    if not all(lengths) or not lengths:
        raise ValueError(
            f"The prompts have {lengths} tokens. There must be a prompt, and each "
            "prompt must have at least 1 token, such as one that begins a document."
        )
    batch = np.full((len(prompts), max(lengths)), pad, np.int32)
    for row, tokens in zip(batch, prompts, strict=True):
        row[: len(tokens)] = tokens
    return {"prompt": batch, "lengths": np.array(lengths, np.int32)}


def _joined(
    prompt: jax.Array, new: jax.Array, lengths: jax.Array, pad: int
) -> jax.Array:
    """Puts new tokens ``(batch, num_new)`` directly behind prompts of any length."""
    num_new = new.shape[1]
    padded = jnp.pad(prompt, ((0, 0), (0, num_new)))  # (batch, total_len)
    slots = jnp.arange(padded.shape[1])[None, :]
    index = slots - lengths[:, None]  # of a new token
    placed = jnp.take_along_axis(new, jnp.clip(index, 0, num_new - 1), axis=1)
    placed = jnp.where(index < num_new, placed, pad)
    return jnp.where(index < 0, padded, placed).astype(prompt.dtype)


def _continue(
    model: Decoder,
    prompt: jax.Array,
    lengths: jax.Array | None,
    keys: jax.Array,
    sampler: _Sampler,
) -> jax.Array:
    """Returns the new tokens, int ``(batch, len(keys))``."""
    graphdef, state = nnx.split(model)

    def decode(*args: Any, **options: Any) -> tuple[jax.Array, Any]:
        # A pass may change variables, such as counters. It runs on a copy of the model,
        # so that these traced values do not leave the scan.
        copy = nnx.merge(graphdef, state, copy=True)
        copy.eval()
        return copy.decode(*args, **options)

    def step(carry: tuple, slices: tuple) -> tuple:
        token, is_done, cache = carry
        index, key = slices
        logits, cache = decode(token[:, None], end + index, cache)
        token, is_done = sampler(logits, key, is_done)
        return (token.astype(prompt.dtype), is_done, cache), token

    (batch_size, prompt_len), num_new = prompt.shape, len(keys)
    end = prompt_len if lengths is None else jnp.asarray(lengths)
    cache = model.make_cache(batch_size, prompt_len + num_new)
    logits, cache = decode(prompt, 0, cache, lengths=lengths)
    first, is_done = sampler(logits, keys[0], jnp.zeros(batch_size, bool))
    first = first.astype(prompt.dtype)
    carry = first, is_done, cache
    _, rest = jax.lax.scan(step, carry, (jnp.arange(num_new - 1), keys[1:]))
    # (batch, 1), (batch, num_new - 1)
    return jnp.concatenate([first[:, None], rest.T.astype(prompt.dtype)], axis=1)


def _check_kinds(
    temperature: object, top_p: object, integers: tuple, key: object
) -> None:
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} is {kind_of(value)}; it must be a number.")
    names = ("max_new_tokens", "top_k", "pad", *(("stop",) * len(integers)))
    for name, value in zip(names, integers, strict=False):
        if not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} has {kind_of(value)}; it must be an integer.")
    if key is not None and not isinstance(key, jax.Array):
        raise TypeError(f"key is {kind_of(key)}; it must be jax.random.key(0).")


def _check_prompt(prompt: Any, vocab: int) -> None:
    """Checks the shape of the prompt and, outside of a trace, its tokens."""
    shape, dtype = getattr(prompt, "shape", None), getattr(prompt, "dtype", None)
    is_int = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    if shape is None or len(shape) != 2 or not is_int or 0 in shape:
        found = kind_of(prompt) if shape is None else f"{dtype}{list(shape)}"
        raise ValueError(
            f"The prompt is {found}. It must be tokens, an array of integers of shape "
            "(batch, prompt_len) with at least 1 token, such as jnp.array([[1, 2]]). "
            "A tokenizer encodes text; pad_prompts makes an array of lists."
        )
    if not isinstance(prompt, Tracer) and getattr(prompt, "is_fully_addressable", True):
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= vocab:
            raise ValueError(
                f"The prompt has tokens from {low} to {high}; tokens of this model are "
                f"from 0 to {vocab - 1}. Use the tokenizer that belongs to the model."
            )


def _check_lengths(prompt: jax.Array, lengths: jax.Array | None) -> None:
    """Checks the shape of the lengths and, outside of a trace, their values."""
    if lengths is None:
        return
    is_int = jnp.issubdtype(lengths.dtype, jnp.integer)
    if not is_int or lengths.shape != prompt.shape[:1]:
        raise ValueError(
            f"lengths is {lengths.dtype}{list(lengths.shape)}; for a prompt of shape "
            f"{prompt.shape} it must be integers of shape {prompt.shape[:1]}."
        )
    is_traced = isinstance(lengths, Tracer)
    if not is_traced and not ((lengths >= 1) & (lengths <= prompt.shape[1])).all():
        raise ValueError(
            f"lengths is {lengths.tolist()}; each must be from 1 to {prompt.shape[1]}, "
            "the padded length of the prompts."
        )


@dataclass(frozen=True)
class _Sampler:
    """Chooses the next token of each row, with arguments of `generate`."""

    temperature: float
    top_k: int
    top_p: float
    stop: tuple[int, ...]
    pad: int

    def __call__(
        self, logits: jax.Array, key: jax.Array, is_done: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns int ``(batch,)`` tokens, and the rows that have ended.

        ``logits`` is ``(batch, vocab)``, and ``is_done`` is bool ``(batch,)``.
        """
        token = self._choose(logits, key)
        token = jnp.where(is_done, self.pad, token)
        if not self.stop:
            return token, is_done
        return token, is_done | jnp.isin(token, jnp.array(self.stop))

    def _choose(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1)  # (batch,)
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        logits = wide / self.temperature
        if self.top_k >= logits.shape[-1] and self.top_p >= 1:
            return jax.random.categorical(key, logits)
        # Sorted, so that of equal logits no more are kept than asked for.
        ordered, tokens = jax.lax.top_k(logits, self.top_k)  # (batch, top_k)
        shares = jax.nn.softmax(ordered, axis=-1)
        is_kept = jnp.cumsum(shares, axis=-1) - shares < self.top_p
        kept = jnp.where(is_kept, ordered, -jnp.inf)
        index = jax.random.categorical(key, kept)[:, None]
        return jnp.take_along_axis(tokens, index, axis=-1)[:, 0]

    def check(self, vocab: int, *, has_key: bool) -> None:
        """Raises the errors of `generate` for a vocabulary of this size."""
        if self.temperature < 0:
            raise ValueError(
                f"temperature is {self.temperature}; it must be at least 0 (greedy)."
            )
        if self.temperature > 0 and not has_key:
            raise ValueError(
                f"Sampling at temperature {self.temperature} needs a key. Pass "
                "key=jax.random.key(0), or temperature=0 to choose the likeliest token."
            )
        if not 1 <= self.top_k <= vocab:
            raise ValueError(
                f"top_k is {self.top_k}; it must be from 1 to {vocab}, the number "
                "of tokens in the vocabulary, or None for all tokens."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p is {self.top_p}; it must be above 0 and at most 1 (all tokens)."
            )
        for name, tokens in (("stop", self.stop), ("pad", (self.pad,))):
            if bad := [token for token in tokens if not 0 <= token < vocab]:
                raise ValueError(
                    f"{name} has the token {bad[0]}; tokens are from 0 to {vocab - 1}."
                )
