"""Gradients of one step under any strategy, for comparison leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from nnx_parallel import DataParallel, Precision, Strategy, Trainer
from nnx_parallel.layers import Remat
from nnx_parallel.sharding.nnx_arrays import flatten_pure
from tests.parity.checks import assert_gradients_close
from tests.parity.runs import to_host

ONE_DEVICE = DataParallel(1)


def make_trainer(
    build: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[..., Any],
    strategy: Strategy = ONE_DEVICE,
    *,
    num_microbatches: int = 4,
    remat: Remat = "none",
    precision: Precision | None = None,
    **more: Any,
) -> Trainer:
    """A Trainer with plain SGD on as many devices as the strategy needs.

    An axis without a given size has size 1.
    """
    count = math.prod(size or 1 for size in strategy.axis_sizes.values())
    return Trainer(
        build,
        more.pop("optimizer", optax.sgd(1.0)),
        loss,
        strategy=strategy,
        num_microbatches=num_microbatches,
        devices=jax.devices()[:count],
        remat=remat,
        precision=precision or Precision(),
        loggers=(),
        **more,
    )


def one_step(trainer: Trainer, batch: Any) -> tuple[dict, dict, dict]:
    """Runs a step; returns gradients and variables, both by path, and the metrics."""
    before = to_host(trainer.state.params)
    state, metrics = trainer.train_step(trainer.state, trainer.shard_batch(batch))
    trainer.state = state
    after = to_host(state.params)
    grads = {path: before[path] - after[path] for path in before}
    return grads, to_host(state.variables), jax.device_get(metrics)


@cache
def on_one_device(
    build: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[..., Any],
    make_batch: Callable[[], Any],
    steps: int,
    num_microbatches: int,
    wrt: Any,
) -> list[tuple[dict, dict, dict]]:
    """The results of `one_step` on one device, for each of the steps."""
    trainer = make_trainer(build, loss, num_microbatches=num_microbatches, wrt=wrt)
    return [one_step(trainer, make_batch()) for _ in range(steps)]


def assert_like_one_device(
    build: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[..., Any],
    strategy: Strategy,
    make_batch: Callable[[], Any],
    *,
    steps: int = 1,
    num_microbatches: int = 4,
    wrt: Any = nnx.Param,
    remat: Remat = "none",
) -> dict[str, Any]:
    """Compares gradients, variables and metrics; returns the last step's metrics."""
    expected = on_one_device(build, loss, make_batch, steps, num_microbatches, wrt)
    found = make_trainer(
        build,
        loss,
        strategy,
        num_microbatches=num_microbatches,
        wrt=wrt,
        remat=remat,
    )
    metrics: dict[str, Any] = {}
    for grads, variables, metrics in expected:
        own_grads, own_variables, own_metrics = one_step(found, make_batch())
        assert max(np.abs(g).max() for g in grads.values()) > 1e-3
        assert_gradients_close(own_grads, grads)
        assert own_variables.keys() == variables.keys()
        for path, x in variables.items():
            np.testing.assert_allclose(
                own_variables[path], x, rtol=1e-5, atol=1e-6, err_msg=path
            )
        assert own_metrics.keys() == metrics.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(own_metrics[name], value, rtol=1e-5)
    placed = flatten_pure(found.state.params)
    assert any("pipe" in str(x.sharding) for x in placed.values())
    return metrics
