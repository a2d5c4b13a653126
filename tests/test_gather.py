"""Gathers of a Stack's layers, one by one, wherever a traced loss calls the Stack."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_parallel import FSDP, Strategy, audit
from nnx_parallel.layers import Stack
from nnx_parallel.programs import walk
from tests.parity.checks import assert_gradients_close
from tests.pipelines import ONE_DEVICE, make_trainer, one_step
from tests.steps import QUICKLY, plan_step

LAYERS, WIDTH = 4, 16
BATCH = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
KERNEL = 4 * WIDTH**2  # bytes of one layer's kernel


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        def make_block(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

        self.stack = Stack(make_block, LAYERS, rngs=rngs)


def in_branch(model: Model, x: jax.Array) -> jax.Array:
    y = jax.lax.cond(x.shape[0] * x[0, 0] < 1e6, model.stack, lambda x: x, x)
    return (y**2).mean()


def in_loop(model: Model, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return model.stack(x), None

    return (jax.lax.scan(step, x, None, length=2)[0] ** 2).mean()


def by_index(model: Model, x: jax.Array) -> jax.Array:
    layer: Any = model.stack.layer
    for i in range(LAYERS):
        x = x @ layer.kernel[i]
    return (x**2).mean()


def with_changed_layers(model: Model, x: jax.Array) -> jax.Array:
    layer: Any = model.stack.layer
    layer.kernel[...] = 1.5 * layer.kernel[...]
    return (model.stack(x) ** 2).mean()


def with_norms(model: Model, x: jax.Array) -> jax.Array:
    """Uses the kernels of all layers, which are not gathered."""
    layer: Any = model.stack.layer
    return (model.stack(x) ** 2).mean() + 0.01 * jnp.sum(layer.kernel[...] ** 2)


Loss = Callable[[Model, jax.Array], jax.Array]
LOSSES = (in_branch, in_loop, by_index, with_changed_layers, with_norms)


def gathers(run: Any, *arguments: Any) -> Counter:
    """Counts a program's all-gathers by their bytes."""
    found = Counter()
    for each in audit(run.lower(*arguments).compile(QUICKLY)).collectives:
        if each.kind == "all-gather":
            found[each.bytes_each] += each.count
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_layers_are_gathered_one_by_one(loss: Loss) -> None:
    trainer = make_trainer(Model, loss, FSDP(4, min_size=0), num_microbatches=1)
    found = gathers(trainer.train_step, trainer.state, trainer.shard_batch(BATCH))
    assert max(found) == KERNEL
    calls = 2 if loss is in_loop else 1
    # Each call gathers once in the forward pass, and at most once in the backward pass.
    assert LAYERS * calls <= found[KERNEL] <= 2 * LAYERS * calls


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_match_one_device(loss: Loss) -> None:
    def train(strategy: Strategy) -> tuple:
        return one_step(make_trainer(Model, loss, strategy, num_microbatches=1), BATCH)

    expected, found = train(ONE_DEVICE), train(FSDP(4, min_size=0))
    assert_gradients_close(found[0], expected[0])


def in_while(model: Model, x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: (x**2).mean() > 1e3, model.stack, x)


def test_evaluation_gathers_in_while_loop() -> None:
    plan = plan_step(Model, FSDP(4, min_size=0))
    arrays = plan.abstract.params, plan.abstract.variables
    jaxpr = jax.make_jaxpr(partial(plan.evaluate, in_while))(*arrays, BATCH)
    (loop,) = (e for e, _ in walk(jaxpr.jaxpr) if e.primitive.name == "while")
    assert "sharding_constraint" in str(loop.params["body_jaxpr"])


class Unrolled(nnx.Module):
    """Layers outside of a Stack; some are checkpointed."""

    def __init__(self, rngs: nnx.Rngs, checkpointed: tuple[int, ...] = ()) -> None:
        self.layers = nnx.List(
            nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(LAYERS)
        )
        self.checkpointed = checkpointed

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(layer: nnx.Module, x: jax.Array) -> jax.Array:
            return jnp.tanh(layer(x))

        for i, layer in enumerate(self.layers):
            x = (nnx.remat(run) if i in self.checkpointed else run)(layer, x)
        return x


@pytest.mark.parametrize(
    ("strategy", "checkpointed"),
    [
        (FSDP(4, min_size=0), ()),
        (FSDP(4, min_size=0, prefetch="first"), ()),
        (FSDP(4, min_size=0), (1,)),
    ],
    ids=["plain", "prefetch", "one checkpoint"],
)
def test_unrolled_layers_are_gathered_again_backward(
    strategy: Strategy, checkpointed: tuple[int, ...]
) -> None:
    trainer = make_trainer(
        partial(Unrolled, checkpointed=checkpointed),
        lambda model, x: (model(x) ** 2).mean(),
        strategy,
        num_microbatches=1,
    )
    found = gathers(trainer.train_step, trainer.state, trainer.shard_batch(BATCH))
    # The first layer's input needs no gradient, so backward does not gather its kernel.
    assert found == {KERNEL: 2 * LAYERS - 1}
