"""The loss of a language model."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from nnx_parallel.layers import linear_cross_entropy
from nnx_parallel.metrics import Mean
from nnx_parallel.models.gpt import GPT


def next_token_loss(model: GPT, batch: jax.Array | Mapping[str, jax.Array]) -> Mean:
    """Cross-entropy of each token given the tokens before it.

    Logits are computed for a chunk of tokens at a time, and never exist all at once.

    Args:
        model: The model.
        batch: int ``(batch, seq + 1)``, or a mapping that holds this array as
            ``tokens``. The first token is never predicted. The mapping may also have
            ``weights`` of the same shape: 0 leaves a token out of the loss, but later
            tokens still see it. For packed documents it has ``segments``, int of the
            same shape, as `GPT` takes them: no token is predicted from another
            document, and padding is not predicted.

    Returns:
        The `Mean` in nats per predicted token, with the losses that balance experts.

    Raises:
        ValueError: If tokens are not of shape (batch, seq + 1), or if weights or
            segments have another shape than tokens.

    Example:
        >>> from flax import nnx
        >>> from nnx_parallel.models import GPTConfig
        >>> model = GPT(GPTConfig.tiny(), rngs=nnx.Rngs(0))
        >>> loss = nnx.jit(next_token_loss)(model, jnp.zeros((2, 17), jnp.int32))
        >>> float(loss.weight)
        32.0
    """
    if not isinstance(batch, Mapping):
        batch = {"tokens": batch}
    tokens, weights = batch["tokens"], batch.get("weights")
    segments = batch.get("segments")
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(
            f"Tokens of shape {tokens.shape}; they must be (batch, seq + 1), the input "
            "and the last label, with seq at least 1."
        )
    for name, of_each in (("Weights", weights), ("Segments", segments)):
        if of_each is not None and of_each.shape != tokens.shape:
            raise ValueError(
                f"{name} of shape {of_each.shape} for tokens of shape {tokens.shape}; "
                "each token has one, the first one too."
            )
    weights, seen = None if weights is None else weights[:, 1:], None
    if segments is not None:
        is_next = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        # The last token of a document predicts nothing, and no other token sees it. A
        # row has no input for it if the document ends the row: it is padding in both.
        seen = jnp.where(is_next, segments[:, :-1], 0)
        weights = is_next if weights is None else jnp.where(is_next, weights, 0)
    hidden, losses = model.hidden_and_losses(tokens[:, :-1], seen)
    kernel, vocab_dim = model.head_kernel
    loss = linear_cross_entropy(
        hidden,
        kernel,
        tokens[:, 1:],
        weights,
        vocab_dim=vocab_dim,
        z_loss=model.config.z_loss,
        softcap=model.config.logit_softcap,
    )
    if losses is None:
        return loss
    if weights is None:
        return loss + Mean(jnp.sum(losses), float(losses.size))
    weights = weights.astype(losses.dtype)
    return loss + Mean(jnp.sum(losses * weights), jnp.sum(weights))
