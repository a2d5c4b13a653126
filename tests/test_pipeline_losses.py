"""A loss with any use of one stack trains in a pipeline as on one device."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    GPipe,
    Interleaved,
    Mean,
    OneFOneB,
    Pipeline,
    Precision,
    Strategy,
    ZeroBubble,
)
from nnx_parallel.errors import ParallelWarning
from nnx_parallel.layers import Stack
from nnx_parallel.layers.stack.stack import using_runner
from nnx_parallel.pipeline.cut import PartitionedJaxpr, record
from nnx_parallel.programs import trace
from nnx_parallel.schedules import Schedule
from nnx_parallel.sharding import constrain
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.model import flatten, nest
from nnx_parallel.state import plan_state
from tests.pipelines import assert_like_one_device, make_trainer

pytestmark = pytest.mark.deep

NUM_LAYERS = 4


class Plain(nnx.Module):
    """A model that consists of a stack of linear layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stack = Stack(lambda rngs: nnx.Linear(16, 16, rngs=rngs), 4, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        return self.stack(batch["inputs"])


class Block(nnx.Module):
    """A block with dropout, batch statistics, and further arguments."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array, side: jax.Array, mask: jax.Array) -> jax.Array:
        hidden = self.dropout(nnx.silu(self.linear(self.norm(x)) * side))
        return x + jnp.where(mask[:, None] > 0, hidden, 0.5 * hidden)


class Skipping(nnx.Module):
    """A stack with a skip connection around it, a side input, and batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.side = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.stack = Stack(Block, NUM_LAYERS, rngs=rngs)
        self.last_norm = nnx.BatchNorm(16, rngs=rngs)
        self.last_dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        x = self.dropout(self.norm(self.first(batch["inputs"])))
        y = self.stack(x, nnx.tanh(self.side(batch["inputs"])), batch["labels"] % 2)
        y = self.last_norm(self.last_dropout(y + x))
        return self.head(y)


def make_rows(num_rows: int = 32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(num_rows, 16)).astype(np.float32)
    return {"inputs": inputs, "labels": rng.integers(0, 4, num_rows)}


def skipping_loss(model: Skipping, batch: Any) -> tuple[Mean, dict[str, Any]]:
    logits = model(batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    weights = (batch["labels"] > 0).astype(jnp.float32)
    right = (logits.argmax(-1) == batch["labels"]).astype(jnp.float32)
    loss = Mean((losses * weights).sum(), weights.sum())
    extra = Mean((logits**2).sum(), jnp.float32(logits.size))
    return loss + 1e-2 * extra, {"accuracy": right.mean()}


@pytest.mark.parametrize(
    "strategy",
    [
        Composite(Pipeline(2, ZeroBubble()), DataParallel(4)),
        Pipeline(2, Interleaved(chunks=2), stash="inputs"),
        pytest.param(Composite(Pipeline(2), DataParallel(2)), marks=pytest.mark.slow),
        pytest.param(Pipeline(4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_skips_and_statistics_match_one_device(strategy: Strategy) -> None:
    """Takes two steps, because statistics and masks of the first affect the second."""
    metrics = assert_like_one_device(
        Skipping, skipping_loss, strategy, make_rows, steps=2
    )
    assert 0 < metrics["accuracy"] < 1


def test_float16_loss_scaling_trains() -> None:
    trainer = make_trainer(
        Skipping,
        skipping_loss,
        Composite(Pipeline(2), DataParallel(2)),
        precision=Precision.mixed_float16(),
        optimizer=optax.adamw(1e-3),
    )
    history = trainer.fit([make_rows()] * 6, num_steps=6)
    assert history["loss"][-1] < history["loss"][0]
    assert history["skipped"].sum() < 3


def squares(model: Any, batch: Any) -> jax.Array:
    return (model(batch) ** 2).mean()


# Small losses and models


@pytest.mark.parametrize(
    "num_microbatches", [1, pytest.param(8, marks=pytest.mark.slow)]
)
def test_any_microbatch_count_matches_one_device(num_microbatches: int) -> None:
    strategy = Composite(Pipeline(4), DataParallel(2))
    assert_like_one_device(
        Plain, squares, strategy, make_rows, num_microbatches=num_microbatches
    )


def test_single_stage_warns() -> None:
    message = (
        "Pipeline(size=1) has one stage: nothing is spread or pipelined. Give it at "
        "least 2 stages, or leave it out."
    )
    with pytest.warns(ParallelWarning, match=re.escape(message)):
        assert_like_one_device(Plain, squares, Pipeline(1), make_rows)


def noisy_loss(model: Any, batch: Any, rngs: nnx.Rngs) -> jax.Array:
    """Multiplies the loss by random numbers, and adds others to the input."""
    inputs = batch["inputs"] + jax.random.normal(rngs.noise(), batch["inputs"].shape)
    outputs = model({"inputs": inputs})
    return (outputs**2).mean() * (1.0 + 0.1 * jax.random.normal(rngs.noise(), ()))


def test_loss_rngs_match_one_device() -> None:
    assert_like_one_device(Plain, noisy_loss, Pipeline(2), make_rows)


def test_frozen_layers_match_one_device() -> None:
    """Only the biases are trained; other parameters of each layer get no gradient."""

    def is_bias(path: tuple, _: Any) -> bool:
        return path[-1] == "bias"

    strategy = Composite(Pipeline(2, ZeroBubble()), FSDP(2, min_size=0))
    wrt = nnx.All(nnx.Param, is_bias)
    assert_like_one_device(Plain, squares, strategy, make_rows, wrt=wrt)


def decayed_loss(model: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """A loss that also uses the layers' parameters outside of the blocks."""
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    norm = sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in params)
    out = model(batch)
    return (out**2).mean() + 1e-3 * norm, {"kernels": norm}


@pytest.mark.parametrize(
    "strategy",
    [
        Composite(Pipeline(2, Interleaved(chunks=2)), FSDP(2, min_size=0)),
        pytest.param(Pipeline(4, ZeroBubble()), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weight_decay_loss_matches_one_device(strategy: Strategy) -> None:
    assert_like_one_device(Skipping, decayed_loss, strategy, make_rows)


class Adaptive(nnx.Module):
    """Variables before the stack that depend on one after it, and NumPy input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stack = Stack(lambda rngs: nnx.Linear(16, 16, rngs=rngs), 4, rngs=rngs)
        self.last = nnx.Variable(jnp.float32(1))
        self.total = nnx.Variable(jnp.float32(0))

    def __call__(self, batch: Any) -> jax.Array:
        self.total[...] = self.total[...] + self.last[...]
        y = self.stack(batch["inputs"])
        self.last[...] = (y**2).mean()
        return y


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=str)
def test_chained_variables_match_one_device(schedule: Schedule) -> None:
    assert_like_one_device(Adaptive, squares, Pipeline(2, schedule), make_rows, steps=2)


class Mixed(nnx.Module):
    """A block with a variable in another dtype than its output."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.mean = nnx.Variable(jnp.bfloat16(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean.set_value(x.mean())  # float32
        return self.linear(x) + self.mean[...].astype(x.dtype)


def build_mixed(rngs: nnx.Rngs) -> nnx.Module:
    model = Adaptive(rngs)
    model.stack = Stack(Mixed, 4, rngs=rngs)
    return model


def test_variables_keep_their_dtype() -> None:
    assert_like_one_device(build_mixed, squares, Pipeline(2), make_rows)


class Rotating(nnx.Module):
    """A block that takes angles, a bias and noise as arguments."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(
        self, x: jax.Array, angles: jax.Array, bias: jax.Array, noise: jax.Array
    ) -> jax.Array:
        return x + self.linear(x) * jnp.cos(angles) + bias * noise


class Positional(nnx.Module):
    """A stack with arguments that are constant, parameters, and data."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.bias = nnx.Param(jnp.ones(16))
        self.stack = Stack(Rotating, 4, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        x = batch["inputs"]
        angles = jnp.arange(16, dtype=jnp.float32)[None]
        return self.stack(x, angles, 2 * self.bias[...][None], jnp.tanh(x))


def test_constant_arguments_have_no_gradient() -> None:
    layout = Pipeline(2).layout(Pipeline(2).make_mesh(jax.devices()[:2]))
    plan = plan_state(Positional(nnx.Rngs(0)), layout, optax.sgd(1.0))
    shapes: Any = {
        path: jnp.zeros(x.shape) for path, x in flatten(plan.abstract.params).items()
    }

    def loss(params: Any, variables: Any, batch: Any, key: Any) -> Any:
        model = plan.merge(nest(params), {}, training=True, cast_stacked=False)
        return squares(model, batch), {}

    with using(layout), using_runner(record):
        traced = trace(loss, shapes, {}, make_rows(), jax.random.key(0))
    found = PartitionedJaxpr(traced)
    # Each stage computes the constant angles. Of the other inputs, the first is data
    # that passes through all layers, the bias is a parameter, and the noise has no
    # gradient.
    assert list(found.constants) == [1]
    assert found.differentiated == (True, True, False)
    assert_like_one_device(Positional, squares, Pipeline(2, ZeroBubble()), make_rows)


class Placed(nnx.Module):
    """A stack with a constant mask that is constrained to a placement on the mesh."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stack = Stack(Masked, 4, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        x = batch["inputs"]
        mask = constrain(jnp.full(x.shape, 0.5), "batch", "embed")
        return self.stack(x, mask)


class Masked(nnx.Module):
    """A block that scales its input by an argument."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return x + self.linear(x * mask)


def test_constrained_argument_matches_one_device() -> None:
    strategy = Composite(Pipeline(2), DataParallel(2))
    assert_like_one_device(Placed, squares, strategy, make_rows)


class Spectral(nnx.Module):
    """Complex values: one skips the stack, another is an argument of its blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.angles = nnx.Param(jnp.linspace(0.0, 1.0, 16))
        self.stack = Stack(Turning, 4, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        x = self.first(batch["inputs"])
        spectrum = jnp.fft.fft(x)
        y = self.stack(x, jnp.exp(1j * self.angles[...])[None])
        return y + jnp.fft.ifft(spectrum * 1j).real


class Turning(nnx.Module):
    """A block that adds the rotated input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: jax.Array, turn: jax.Array) -> jax.Array:
        return self.linear(x) + (x * turn).real


def test_gradients_flow_through_complex_numbers() -> None:
    assert_like_one_device(Spectral, squares, Pipeline(2, ZeroBubble()), make_rows)
