"""Cross-entropy over a vocabulary that may be split over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nnx_parallel.layers.labels import observe_labels
from nnx_parallel.metrics import Mean


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    z_loss: float = 0.0,
) -> Mean:
    """Mean negative log-likelihood of integer labels.

    Written without a gather along ``vocab``, so that logits split over ``tensor``
    stay split: devices exchange one number per token for the maximum, the sum and the
    label's logit.

    Args:
        logits: ``(*leading, vocab)``, any floating-point dtype; summed in float32.
        labels: int ``(*leading)``, from 0 to vocab - 1. Another one gives NaN, unless
            its weight is 0.
        weights: ``(*leading)``; 0 leaves a label out. By default all count 1.
        z_loss: Weight of the squared log-normaliser, which keeps logits from
            drifting [1].

    Returns:
        The `Mean` in nats per label.

    Example:
        >>> loss = cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]))
        >>> print(f"{loss.value:.4f} of {loss.weight:.0f}")
        1.3863 of 2

    References:
        [1] Chowdhery et al., "PaLM", 2022, section 5,
        https://arxiv.org/abs/2204.02311
    """
    logits = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    labels = labels.astype(jnp.int32)
    observe_labels(labels, weights, logits.shape[-1])
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_label = classes == labels[..., None]
    losses = normaliser - jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    losses = jnp.where(is_class, losses, jnp.nan)
    if z_loss:
        losses += z_loss * normaliser**2
    if weights is None:
        return Mean(losses.sum(), jnp.float32(losses.size))
    weights = weights.astype(jnp.float32)
    losses = jnp.where(weights == 0, 0.0, losses * weights)
    return Mean(losses.sum(), weights.sum())
