"""Rows of a batch as microbatches, and back."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from nnx_parallel.state import StatePlan

Batch = Any


def split_rows(plan: StatePlan, batch: Batch, num_microbatches: int) -> Batch:
    """A batch as microbatches along a new leading dim.

    Microbatch m holds rows m, m + M, m + 2M, ...: whatever the number of devices, each
    keeps its own rows, and none has to be sent.
    """

    def split(x: jax.Array) -> jax.Array:
        rows = x.shape[0] // num_microbatches
        return x.reshape(rows, num_microbatches, *x.shape[1:]).swapaxes(0, 1)

    return constrain_rows(plan, jax.tree.map(split, batch), 1)


def constrain_rows(plan: StatePlan, batch: Batch, dim: int) -> Batch:
    """A batch split over the batch axes, its rows along one dim."""

    def constrain(x: jax.Array) -> jax.Array:
        spec = P(*(None,) * dim, *plan.layout.batch_spec(x.shape[dim]))
        return jax.lax.with_sharding_constraint(x, plan.layout.sharding(spec))

    return jax.tree.map(constrain, batch)


def join_rows(outputs: Any) -> Any:
    """The rows that `split_rows` has split, in their first order."""
    return jax.tree.map(
        lambda x: x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:]),
        outputs,
    )
