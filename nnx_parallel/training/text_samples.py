"""`TextSamples`, a callback that logs texts of a language model during training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from nnx_parallel.models.generation import generate, pad_prompts
from nnx_parallel.training.callback import Callback
from nnx_parallel.training.recorder import Values


class TextSamples(Callback):
    """Continues prompts during a fit, and logs the texts.

    The texts go to the loggers: the console, ``metrics.jsonl`` and others. The random
    key is the same each time, so the texts change only with the model. The first sample
    of a fit compiles a function, and the training waits for each sample.

    Args:
        prompts: Texts to continue.
        every: Steps between samples. The state may be up to two steps newer.
        encode: Function from a text to its tokens.
        decode: Function from tokens to their text.
        start: Token that precedes every prompt, such as one that begins a document;
            ``None`` for no such token.
        stop: Tokens that end a text.
        max_new_tokens: Number of tokens to add.
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to sample from; ``None`` takes all.
        top_p: Probability of the set of likeliest tokens to sample from.
        seed: Seed of the random key.

    Attributes:
        texts: The newest texts, with their prompts; empty before the first sample.

    Raises:
        ValueError: If ``every`` is not a positive number of steps, or if a prompt has
            no tokens. The start of a fit raises the errors of `models.generate`, and a
            ValueError if a prompt has a token outside the vocabulary.

    Example:
        >>> sample = TextSamples(["def ", "class "], every=100,
        ...     encode=lambda text: list(text.encode()),
        ...     decode=lambda tokens: bytes(tokens).decode(errors="replace"))
        >>> sample.texts
        []
    """

    def __init__(
        self,
        prompts: Sequence[str],
        *,
        every: int,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[list[int]], str],
        start: int | None = None,
        stop: Sequence[int] = (),
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        if isinstance(prompts, str):
            raise ValueError(
                f"TextSamples({prompts!r}): the prompts are a list of texts."
            )
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"TextSamples(every={every!r}): it must be an int of at least 1."
            )
        first = [] if start is None else [start]
        self._batch = pad_prompts([[*first, *encode(text)] for text in prompts])
        self._num_first, self._stop = len(first), frozenset(stop)
        self.every, self._decode = every, decode
        self.texts: list[str] = []

        def run(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
            return generate(
                model,
                batch["prompt"],
                lengths=batch["lengths"],
                max_new_tokens=max_new_tokens,
                key=jax.random.key(seed),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop=tuple(stop),
            )

        # One function object, so that it is compiled once.
        self._run, self._max_new_tokens = run, max_new_tokens

    def on_fit_start(self, trainer: Any) -> None:
        """Checks that the model can continue the prompts, before the first step."""
        model = trainer.model
        nnx.eval_shape(self._run, model, self._batch)
        size, tokens = model.config.vocab_size, self._batch["prompt"]
        for token in tokens[(tokens < 0) | (tokens >= size)][:1]:
            raise ValueError(
                f"A prompt of TextSamples has the token {token}, but the model has "
                f"{size} tokens, from 0 to {size - 1}. Use the model's tokenizer."
            )

    def on_step_end(self, trainer: Any, step: int, metrics: Values) -> None:
        """Samples every ``every`` steps, from the newest state."""
        if step % self.every:
            return
        # Each of several processes passes all prompts, and the first copy is used.
        rows = trainer.predict([self._batch], self._run)
        ends = self._batch["lengths"] + self._max_new_tokens
        self.texts = [
            self._decode(self._cut([int(token) for token in row[:end]], end))
            for row, end in zip(rows, ends, strict=False)
        ]
        for text in self.texts:
            trainer.log(f"Sample at step {trainer.step}: {text}")

    def _cut(self, tokens: list[int], end: int) -> list[int]:
        """Returns a row without its first token, its stop token and its padding."""
        new = end - self._max_new_tokens
        for i in range(new, end):
            if tokens[i] in self._stop:
                return tokens[self._num_first : i]
        return tokens[self._num_first :]
