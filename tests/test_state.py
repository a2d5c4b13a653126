"""The state of a run, and the step that updates it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, DataParallel, Mean, Trainer
from nnx_parallel.errors import LossError, StateStructureError
from nnx_parallel.sharding.nnx_arrays import flatten_pure
from nnx_parallel.state import TrainState
from nnx_parallel.training.step import takes_rngs
from tests.parity.runs import to_host

WIDTH = 16


class Net(nnx.Module):
    """Statistics and dropout between two linear layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(4, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.gelu(self.norm(self.up(x)))))


def squares(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make_batch(seed: int = 0, rows: int = 16) -> dict:
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def linear(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(4, 1, rngs=rngs)


def make_trainer(model: Any = linear, loss: Any = squares, **options: Any) -> Trainer:
    settings = {"optimizer": optax.sgd(0.1), "strategy": FSDP(min_size=0)} | options
    return Trainer(model, loss=loss, loggers=(), **settings)


def advance(trainer: Trainer, batch: dict | None = None) -> dict[str, float]:
    """Runs one step of a custom loop."""
    placed = trainer.shard_batch(make_batch() if batch is None else batch)
    trainer.state, metrics = trainer.train_step(trainer.state, placed)
    return {name: float(value) for name, value in metrics.items()}


class Phase(nnx.Module):
    """A complex linear map that returns the imaginary part."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        del rngs
        self.kernel = nnx.Param(jnp.full((4, 1), 1 + 2j, jnp.complex64))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x @ self.kernel[...]).imag


def test_complex_gradients_are_accumulated() -> None:
    found = []
    for microbatches in (1, 2):
        trainer = make_trainer(
            Phase, strategy=DataParallel(), num_microbatches=microbatches
        )
        advance(trainer)
        found.append(np.asarray(trainer.state.params["kernel"]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    assert (found[1].imag != 2).all()


# Outputs of a loss


# A count of rows is not a mean over rows, so it warns.
@pytest.mark.filterwarnings("ignore:num_microbatches=4.*'rows'")
def test_metrics_are_means_over_whole_batch() -> None:
    batch = make_batch()
    batch["weights"] = np.arange(16, dtype=np.float32)

    def loss(model: Any, batch: Any) -> tuple[Mean, dict]:
        errors = ((model(batch["x"]) - batch["y"]) ** 2)[:, 0]
        weights = batch["weights"]
        mean = Mean((errors * weights).sum(), weights.sum())
        return mean, {
            "plain": errors.mean(),
            "weighted": Mean((errors * weights).sum(), weights.sum()),
            "rows": jnp.int32(errors.shape[0]),
        }

    found = []
    for microbatches in (1, 4):
        options = {
            "num_microbatches": microbatches,
            "devices": jax.devices()[:2],
        }
        trainer = make_trainer(loss=loss, strategy=FSDP(2, min_size=0), **options)
        kernel = np.asarray(trainer.state.params["kernel"])
        bias = np.asarray(trainer.state.params["bias"])
        errors = ((batch["x"] @ kernel + bias[None] - batch["y"]) ** 2)[:, 0]
        found.append(advance(trainer, batch))
        assert found[-1]["rows"] == 16 / microbatches
    expected = np.average(errors, weights=batch["weights"])
    for metrics in found:
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
        np.testing.assert_allclose(metrics["weighted"], expected, rtol=1e-5)
        np.testing.assert_allclose(metrics["plain"], errors.mean(), rtol=1e-5)
    np.testing.assert_allclose(found[0]["grad_norm"], found[1]["grad_norm"], rtol=1e-5)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda errors: errors, "The loss has shape (16,) and dtype float32."),
        (lambda errors: 3, "The loss has dtype int32, which has no gradient."),
        (
            lambda errors: (errors.mean(), {}, {}),
            "The loss returned a tuple of (",
        ),
        (
            lambda errors: (errors.mean(), [{"errors": errors}]),
            "Metric 'aux.0.errors' has shape (16,) and dtype float32.",
        ),
        (
            lambda errors: (errors.mean(), {"mfu": errors.mean()}),
            "A metric is named 'mfu', which the run reports itself.",
        ),
        (
            lambda errors: (errors.mean(), {"errors": errors}),
            "Metric 'errors' has shape (16,) and dtype float32.",
        ),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_invalid_loss_raises_in_first_step(
    output: Any, message: str, microbatches: int
) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return output(((model(batch["x"]) - batch["y"]) ** 2)[:, 0])

    message = message.replace("16", str(16 // microbatches))
    trainer = make_trainer(
        loss=loss,
        num_microbatches=microbatches,
        strategy=FSDP(),
        devices=jax.devices()[:2],
    )
    with pytest.raises(LossError, match=re.escape(message)):
        trainer.fit([make_batch()], 1)


# Random numbers and statistics


def test_loss_rngs_differ_by_step_and_microbatch() -> None:
    def loss(model: Any, batch: Any, rngs: nnx.Rngs) -> tuple[jax.Array, dict]:
        noise = jax.random.uniform(rngs.noise())
        return squares(model, batch), {"noise": noise, "squared": noise**2}

    trainer = make_trainer(loss=loss, optimizer=optax.sgd(0.0))
    first, second = advance(trainer), advance(trainer)
    assert first["noise"] != second["noise"]
    assert first["loss"] == second["loss"]
    again = make_trainer(loss=loss)
    assert advance(again)["noise"] == first["noise"]
    other = make_trainer(loss=loss, seed=1)
    assert advance(other)["noise"] != first["noise"]
    split = make_trainer(loss=loss, num_microbatches=2)
    found = advance(split)
    assert found["squared"] > found["noise"] ** 2 + 1e-6


def test_only_parameter_named_rngs_receives_rngs() -> None:
    def scaled(model: Any, batch: Any, scale: float = 2.0) -> jax.Array:
        return scale * squares(model, batch)

    assert not takes_rngs(scaled)
    assert takes_rngs(lambda model, batch, rngs: None)
    assert takes_rngs(lambda model, batch, *, rngs=None: None)
    double = advance(make_trainer(loss=scaled))["loss"]
    np.testing.assert_allclose(double, 2 * advance(make_trainer())["loss"], rtol=1e-6)


def test_statistics_and_dropout_advance_per_microbatch() -> None:
    def means_seen(model: Any, batch: Any) -> tuple[jax.Array, dict]:
        loss = squares(model, batch)
        return loss, {"count": model.dropout.rngs.count[...].astype(jnp.float32)}

    for microbatches in (1, 2):
        trainer = make_trainer(
            Net,
            means_seen,
            optimizer=optax.sgd(0.0),
            num_microbatches=microbatches,
        )
        up = trainer.state.params["up"]
        kernel, bias = np.asarray(up["kernel"]), np.asarray(up["bias"])
        losses = [advance(trainer)["loss"] for _ in range(2)]
        assert losses[0] != losses[1]
        x = make_batch()["x"] @ kernel + bias[None]
        mean = np.zeros(WIDTH)
        for _ in range(2):
            for part in range(microbatches):
                mean = 0.9 * mean + 0.1 * x[part::microbatches].mean(0)
        found = flatten_pure(trainer.state.variables)
        np.testing.assert_allclose(found["norm.mean"], mean, rtol=1e-5, atol=1e-6)
        assert int(found["dropout.rngs.count"]) == 2 * microbatches


# Trained variables


def adapted(rngs: nnx.Rngs) -> nnx.Module:
    base = nnx.Linear(4, 1, rngs=rngs)
    return nnx.LoRA(4, 2, 1, base_module=base, rngs=rngs)


def test_parameters_outside_wrt_keep_every_bit() -> None:
    trainer = make_trainer(adapted, wrt=nnx.LoRAParam, optimizer=optax.adamw(0.1))
    before, trained = to_host(trainer.state.variables), to_host(trainer.state.params)
    assert set(before) == {"base_module.kernel", "base_module.bias"}
    assert set(trained) == {"lora_a", "lora_b"}
    for _ in range(3):
        advance(trainer)
    after = to_host(trainer.state.variables)
    assert all(after[path].tobytes() == before[path].tobytes() for path in before)
    assert (to_host(trainer.state.params)["lora_b"] != trained["lora_b"]).any()


def test_wrt_without_match_raises() -> None:
    message = (
        "selects no Variable of the model, so nothing would be trained. The model has "
        "Variables of kinds ['Param']."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(wrt=nnx.LoRAParam)


def test_passed_model_is_not_consumed() -> None:
    model = Net(nnx.Rngs(0))
    before = flatten_pure(nnx.to_pure_dict(nnx.state(model)))
    values = {path: np.asarray(key_words(x)) for path, x in before.items()}
    for strategy in (None, FSDP(min_size=0)):
        trainer = make_trainer(model, strategy=strategy)
        trainer.fit([make_batch()] * 2, 2)
        after = flatten_pure(nnx.to_pure_dict(nnx.state(model)))
        assert all(after[path] is x for path, x in before.items())
        assert all(
            np.asarray(key_words(x)).tobytes() == values[path].tobytes()
            for path, x in after.items()
        )


def key_words(x: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def test_step_counts_donates_and_keeps_placement() -> None:
    trainer = make_trainer(Net, optimizer=optax.adam(0.1), ema_decay=0.9)
    state = trainer.state
    shardings = jax.tree.map(lambda x: x.sharding, state)
    advance(trainer)
    assert trainer.step == 1
    kept = [x for x in jax.tree.leaves(state) if not x.is_deleted()]
    assert kept == []
    placed = jax.tree.map(
        lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim),
        trainer.state,
        shardings,
    )
    assert all(jax.tree.leaves(placed))


def test_ema_matches_hand_calculation() -> None:
    trainer = make_trainer(ema_decay=0.75)
    expected = to_host(trainer.state.params)
    for seed in range(3):
        advance(trainer, make_batch(seed))
        params = to_host(trainer.state.params)
        expected = {p: 0.75 * x + 0.25 * params[p] for p, x in expected.items()}
    assert trainer.state.ema is not None
    for path, x in to_host(trainer.state.ema).items():
        np.testing.assert_allclose(x, expected[path], rtol=1e-5)
    averaged = trainer.ema_model.kernel[...]  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_allclose(averaged, expected["kernel"], rtol=1e-5)


# Structure


class Changing(nnx.Module):
    """A model whose forward pass changes its structure."""

    def __init__(self, rngs: nnx.Rngs, change: str) -> None:
        self.linear = nnx.Linear(4, 1, rngs=rngs)
        self.count = nnx.BatchStat(jnp.zeros(3))
        self.change = change

    def __call__(self, x: jax.Array) -> jax.Array:
        match self.change:
            case "new":
                self.cache = nnx.Cache(jnp.zeros(2))
            case "shape":
                self.count.set_value(jnp.zeros(4))
            case "gone":
                del self.count
            case "sow":
                self.inputs = nnx.Intermediate(x)
            case "dtype":
                self.count.set_value(self.count[...].astype(jnp.bfloat16) + 1)
        return self.linear(x)


REMEDY = (
    " A model keeps the names and shapes of its Variables from step to step: create "
    "all of them in __init__. If a step computes other values, return them as metrics."
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("new", "`cache` is new."),
        ("shape", "`count` went from shape (3,) to (4,)."),
        ("gone", "`count` is gone."),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_changed_model_structure_raises(
    change: str, message: str, microbatches: int
) -> None:
    trainer = make_trainer(
        lambda rngs: Changing(rngs, change), num_microbatches=microbatches
    )
    message = f"The loss changed the model's structure: {message}{REMEDY}"
    with pytest.raises(StateStructureError, match=re.escape(message)):
        advance(trainer)


@pytest.mark.parametrize("change", ["sow", "dtype"])
def test_sown_values_are_dropped_and_dtypes_kept(change: str) -> None:
    trainer = make_trainer(lambda rngs: Changing(rngs, change))
    advance(trainer)
    advance(trainer)
    assert isinstance(trainer.state, TrainState)
    (count,) = jax.tree.leaves(trainer.state.variables)
    assert count.dtype == jnp.float32
    assert float(count[0]) == (2 if change == "dtype" else 0)
