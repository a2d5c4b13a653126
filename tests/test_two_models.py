"""Two networks in one run: two optimizers in one step, teachers, adapters."""

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
    Precision,
    Strategy,
    Trainer,
)
from tests.parity.runs import to_host

STRATEGIES = [
    FSDP(min_size=0),
    pytest.param(Composite(DataParallel(2), FSDP(min_size=0)), marks=pytest.mark.deep),
]
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
NUM_STEPS = 3


def make_trainer(model: Any, optimizer: Any, loss: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "strategy": STRATEGIES[0],
        "devices": jax.devices()[:4],
        "loggers": (),
    }
    return Trainer(model, optimizer, loss, **(settings | options))


def assert_close(found: Any, expected: Any) -> None:
    left, right = (to_host(nnx.to_pure_dict(nnx.state(m))) for m in (found, expected))
    assert left.keys() == right.keys()
    for path, value in right.items():
        np.testing.assert_allclose(
            left[path], value, rtol=1e-5, atol=1e-6, err_msg=path
        )


class GAN(nnx.Module):
    """A generator with batch statistics, and a critic."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.generator = nnx.Sequential(
            # A bias before batch statistics has no gradient, and Adam would amplify its
            # rounding.
            nnx.Linear(4, 8, use_bias=False, rngs=rngs),
            nnx.BatchNorm(8, rngs=rngs),
            nnx.Linear(8, 4, rngs=rngs),
        )
        self.critic = nnx.Linear(4, 1, rngs=rngs)


def both_losses(model: Any, batch: Any) -> tuple[jax.Array, dict]:
    fake = model.generator(batch["noise"])
    graphdef, params = nnx.split(model.critic)
    frozen = nnx.merge(graphdef, jax.lax.stop_gradient(params))
    of_fake = model.critic(jax.lax.stop_gradient(fake))
    of_critic = (nnx.softplus(of_fake) + nnx.softplus(-model.critic(X))).mean()
    of_generator = nnx.softplus(-frozen(fake)).mean()
    return of_critic + of_generator, {"critic": of_critic, "generator": of_generator}


NOISE = [{"noise": X[::-1] * (i + 1)} for i in range(NUM_STEPS)]
TX = {"critic": optax.sgd(0.1), "generator": optax.adam(0.01)}


def plain_optimizers(model: GAN) -> dict[str, nnx.Optimizer]:
    return {name: nnx.Optimizer(model, tx, wrt=part(name)) for name, tx in TX.items()}


def part(name: str) -> Any:
    return nnx.All(nnx.Param, nnx.PathContains(name))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_optimizers_in_one_step_match_plain_nnx(strategy: Strategy) -> None:
    labels = {"critic": "critic", "generator": "generator"}
    optimizer = optax.multi_transform({**TX}, labels)
    trainer = make_trainer(GAN, optimizer, both_losses, strategy=strategy)
    model = GAN(nnx.Rngs(0))
    optimizers = plain_optimizers(model)
    for batch in NOISE:
        grads = nnx.grad(both_losses, has_aux=True)(model, batch)[0]
        for name, other in optimizers.items():
            other.update(model, nnx.State({name: grads[name]}))
    history = trainer.fit(NOISE, NUM_STEPS)
    np.testing.assert_allclose(
        history["critic"] + history["generator"], history["loss"]
    )
    assert_close(trainer.model, model)


class Pair(nnx.Module):
    """A student, and a teacher that is not trained."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.student = nnx.Linear(4, 8, rngs=rngs)
        self.teacher = nnx.Linear(4, 8, rngs=rngs)


def distill(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model.student(batch) - model.teacher(batch)).mean()


def follow(model: Any, batch: Any) -> jax.Array:
    """The teacher is the student's moving average; its inputs are disturbed."""
    targets = model.teacher(batch * 1.1)
    average = jax.tree.map(
        lambda old, new: 0.9 * old + 0.1 * new,
        nnx.state(model.teacher, nnx.Param),
        nnx.state(model.student, nnx.Param),
    )
    nnx.update(model.teacher, average)
    return jnp.square(model.student(batch) - targets).mean()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loss", [distill, follow])
def test_teachers_match_plain_nnx(loss: Any, strategy: Strategy) -> None:
    """One teacher is frozen, another follows the student; both are in the model."""
    wrt = part("student")
    trainer = make_trainer(Pair, optax.adam(0.1), loss, wrt=wrt, strategy=strategy)
    teacher = trainer.state.variables["teacher"]["kernel"]
    assert not teacher.sharding.is_fully_replicated  # sharded like trained parameters
    model = Pair(nnx.Rngs(0))
    before = np.asarray(model.teacher.kernel[...])
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=wrt)

    @nnx.jit
    def step(model: Pair, optimizer: nnx.Optimizer) -> jax.Array:
        diff = nnx.DiffState(0, wrt)
        value, grads = nnx.value_and_grad(loss, argnums=diff)(model, X)
        optimizer.update(model, grads)
        return value

    expected = [float(step(model, optimizer)) for _ in range(NUM_STEPS)]
    found = trainer.fit([X] * NUM_STEPS, NUM_STEPS)["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert_close(trainer.model, model)
    moved = np.asarray(trainer.state.variables["teacher"]["kernel"]) != before
    assert moved.any() == (loss is follow)


class Quantized(nnx.Module):
    """A frozen linear layer in 8 bits with a trained adapter, as in QLoRA."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        kernel = rngs.params.normal((4, 8))
        scale = jnp.abs(kernel).max(axis=0, keepdims=True) / 127
        self.quantized = nnx.Param(jnp.round(kernel / scale).astype(jnp.int8))
        self.scale = nnx.Param(scale)
        self.adapter = nnx.LoRA(4, 2, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        base = x @ self.quantized[...].astype(x.dtype) * self.scale[...]
        return base + self.adapter(x)


def regress(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch) - 1).mean()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_of_quantized_base_match_plain_nnx(strategy: Strategy) -> None:
    options: dict[str, Any] = {"wrt": nnx.LoRAParam, "strategy": strategy}
    trainer = make_trainer(Quantized, optax.adam(0.1), regress, **options)
    base = np.asarray(trainer.state.variables["quantized"])
    assert base.dtype == np.int8
    assert set(trainer.state.params["adapter"]) == {"lora_a", "lora_b"}
    model = Quantized(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)
    expected = []
    for _ in range(NUM_STEPS):
        diff = nnx.DiffState(0, nnx.LoRAParam)
        value, grads = nnx.value_and_grad(regress, argnums=diff)(model, X)
        optimizer.update(model, grads)
        expected.append(float(value))
    found = trainer.fit([X] * NUM_STEPS, NUM_STEPS)["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert_close(trainer.model, model)
    np.testing.assert_array_equal(trainer.state.variables["quantized"], base)
    mixed = make_trainer(
        Quantized,
        optax.adam(0.1),
        regress,
        precision=Precision.mixed_bfloat16(),
        **options,
    )
    losses = mixed.fit([X] * NUM_STEPS, NUM_STEPS)["loss"]
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
