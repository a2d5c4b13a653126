"""Hyperparameters of an optimizer, where ``optax.inject_hyperparams`` shows them."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.sharding.optimizer import state_path
from nnx_parallel.state import StatePlan, TrainState


def warn_of_changes(plan: StatePlan, restored: TrainState) -> None:
    """Compares the hyperparameters of a restored state with those of the optimizer.

    They belong to the optimizer's state, so that those of the checkpoint are used.
    What a schedule sets changes by itself and is not compared.

    Args:
        plan: Holds the optimizer as the run has it now.
        restored: The state from a checkpoint.

    Warns:
        UserWarning: If one differs, with both values.
    """
    saved = _constants(restored.opt_state)
    if not saved:
        return

    def fresh() -> dict[str, jax.Array]:
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), plan.abstract.params
        )
        return _constants(plan.tx.init(zeros))

    # Compiled, for then the rest of the optimizer's state is never made.
    now = jax.device_get(jax.jit(fresh)())
    lines = [
        f"{path.rpartition('.')[2]}: {float(value):.6g} in the checkpoint, "
        f"{float(now[path]):.6g} in the optimizer now"
        for path, value in saved.items()
        if path in now and value.shape == () and float(value) != float(now[path])
    ]
    if lines:
        warnings.warn(
            f"Hyperparameters have changed since the checkpoint: {'; '.join(lines)}. "
            "Those of the checkpoint are used, for they are part of the optimizer's "
            "state: set them there, or restore(weights_only=True).",
            stacklevel=6,
        )


def _constants(opt_state: Any) -> dict[str, Any]:
    """Values under ``hyperparams`` that no schedule sets, by path."""
    leaves = [
        (state_path(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
    ]
    marker, scheduled = "hyperparams.", "hyperparams_states."
    by_schedule = {
        path.partition(scheduled)[0] + path.partition(scheduled)[2].partition(".")[0]
        for path, _ in leaves
        if scheduled in path
    }
    return {
        path: leaf
        for path, leaf in leaves
        if marker in path
        and path.partition(marker)[0] + path.partition(marker)[2] not in by_schedule
    }
