"""What a tick runs only if some stage needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def zeros_like(tree: Any) -> Any:
    """Zeros of some shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def zeros_of(run: Callable[[], Any]) -> Any:
    """Zeros of the shapes that a function gives; it is not run."""
    return zeros_like(jax.eval_shape(run))


def run_if(predicate: jax.Array, run: Callable[[], Any], *, scope: str) -> Any:
    """What a function gives, or zeros of its shapes, under a named scope."""
    with jax.named_scope(scope):
        return jax.lax.cond(predicate, run, lambda: zeros_of(run))
