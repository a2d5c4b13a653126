"""Which labels a loss has seen: asked once it is not finite, to say why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class LabelRange:
    """The labels of one call of a loss, those of weight 0 left out.

    Attributes:
        lowest: The least.
        highest: The greatest.
        num_classes: How many classes the logits have.
    """

    lowest: int
    highest: int
    num_classes: int

    @property
    def is_valid(self) -> bool:
        """Whether every label is a class."""
        return self.lowest >= 0 and self.highest < self.num_classes


_observed: ContextVar[list[LabelRange] | None] = ContextVar("labels", default=None)


@contextmanager
def observing_labels() -> Iterator[list[LabelRange]]:
    """Collects the labels of the losses that are traced and run within."""
    seen: list[LabelRange] = []
    token = _observed.set(seen)
    try:
        yield seen
        jax.effects_barrier()
    finally:
        _observed.reset(token)


def observe_labels(
    labels: jax.Array, weights: jax.Array | None, num_classes: int
) -> None:
    """Tells `observing_labels` of a loss's labels; otherwise nothing.

    Args:
        labels: int, of any shape.
        weights: Of the same shape, or ``None``.
        num_classes: How many classes there are.
    """
    seen = _observed.get()
    if seen is None:
        return
    if weights is not None:
        labels = jnp.where(weights == 0, 0, labels)
    jax.debug.callback(
        lambda low, high: seen.append(LabelRange(int(low), int(high), num_classes)),
        labels.min(),
        labels.max(),
    )
