"""What an update says of itself: its learning rate, and what was too small to keep."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def lost_updates(before: Any, updates: Any, after: Any) -> jax.Array | None:
    """The share of updates that a parameter of 16 bits or fewer was too coarse for.

    ``None`` if all parameters have more bits.
    """
    trees = zip(*map(jax.tree.leaves, (before, updates, after)), strict=True)
    coarse = [leaves for leaves in trees if leaves[0].dtype.itemsize <= 2]
    if not coarse:
        return None
    lost = sum(jnp.sum((u != 0) & (a == b), dtype=jnp.float32) for b, u, a in coarse)
    moved = sum(jnp.sum(u != 0, dtype=jnp.float32) for _, u, _ in coarse)
    return jnp.asarray(lost / jnp.maximum(moved, 1.0))


def learning_rate(opt_state: optax.OptState) -> jax.Array | None:
    """The learning rate of an optimizer under ``optax.inject_hyperparams``.

    Elsewhere it is a constant in the compiled step that nobody can read: ``None``.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        keys = [getattr(entry, "name", getattr(entry, "key", None)) for entry in path]
        if keys[-2:] == ["hyperparams", "learning_rate"]:
            return leaf
    return None
