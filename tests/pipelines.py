"""Gradients of one step, by any strategy, to be compared leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from nnx_parallel import DataParallel, Precision, Strategy, Trainer
from nnx_parallel.layers import Remat
from nnx_parallel.sharding.arrays import flatten_pure
from tests.parity.checks import assert_gradients_close
from tests.parity.runs import compiling, to_host

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
    """A Trainer of plain gradient descent on as many devices as the strategy needs."""
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
    """Gradients by path, the variables after the step by path, and the metrics."""
    before = to_host(trainer.state.params)
    with compiling(optimized=False):
        state, metrics = trainer.train_step(trainer.state, trainer.shard_batch(batch))
    trainer.state = state
    after = to_host(state.params)
    grads = {path: before[path] - after[path] for path in before}
    return grads, to_host(state.variables), jax.device_get(metrics)


def assert_like_one_device(
    build: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[..., Any],
    strategy: Strategy,
    batch: Any,
    *,
    steps: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Same gradients, variables and metrics; returns the last step's metrics."""
    expected = make_trainer(build, loss, **options)
    found = make_trainer(build, loss, strategy, **options)
    metrics: dict[str, Any] = {}
    for _ in range(steps):
        grads, variables, metrics = one_step(expected, batch)
        own_grads, own_variables, own_metrics = one_step(found, batch)
        assert max(np.abs(g).max() for g in grads.values()) > 1e-3
        # One unit of the last place of a parameter is the noise of the difference.
        assert_gradients_close(own_grads, grads, limit=1e-5)
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
