"""Assigned parameters: in the forward pass, or from outside on the Trainer's model."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Callback,
    DataParallel,
    Pipeline,
    Precision,
    Trainer,
)
from nnx_parallel.errors import (
    ParallelWarning,
    PipelineError,
    StackError,
    StateStructureError,
)
from nnx_parallel.layers import Stack

# Before Flax 0.12.12, the scales of WeightNorm were outside of Variables.
pytestmark = pytest.mark.filterwarnings("ignore:Arrays in no Variable")

WIDTH = 8
TX = optax.sgd(0.02, momentum=0.9)


class Clipped(nnx.Module):
    """A linear layer whose weights are clipped before they are used [1].

    References:
        [1] Arjovsky et al., "Wasserstein GAN", 2017, algorithm 1,
        https://arxiv.org/abs/1701.07875
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        params: Any = (self.linear.kernel, self.linear.bias)
        for param in params:
            param[...] = jnp.clip(param[...], -0.2, 0.2)
        return self.linear(x)


class Codebook(nnx.Module):
    """Returns the nearest codes; each code moves to the mean of its rows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.codes = nnx.Param(jax.random.normal(rngs.params(), (4, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        codes = self.codes[...]
        distances = ((x[:, None] - codes[None]) ** 2).sum(-1)  # (rows, codes)
        chosen = jax.nn.one_hot(distances.argmin(-1), 4)
        counts = chosen.sum(0)[:, None]
        means = chosen.T @ x / jnp.maximum(counts, 1)
        moved = 0.9 * codes + 0.1 * jax.lax.stop_gradient(means)
        self.codes[...] = jnp.where(counts > 0, moved, codes)
        return x + chosen @ codes


LAYERS: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "spectral norm": lambda rngs: nnx.SpectralNorm(
        nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs
    ),
    "weight norm": lambda rngs: nnx.WeightNorm(
        nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs
    ),
    "clipped": Clipped,
    "codebook": Codebook,
}


def build(*names: str) -> Callable[[nnx.Rngs], nnx.Module]:
    """Builds a model of these layers, after a first layer that assigns nothing."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        layers = [LAYERS[name](rngs) for name in names]
        return nnx.Sequential(nnx.Linear(4, WIDTH, rngs=rngs), *layers)

    return make


def squares(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]).sum(-1) - batch["y"]) ** 2).mean()


def make_batches(count: int = 4, rows: int = 8) -> list[dict]:
    x = np.random.default_rng(0).normal(size=(count, rows, 4)).astype(np.float32)
    return [{"x": part, "y": part.sum(1)} for part in x]


def plain(
    model: nnx.Module, loss: Any, batches: list[dict], num_microbatches: int = 1
) -> list[float]:
    """The losses in plain NNX, with one microbatch after another."""
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        values, sums = [], None
        for index in range(num_microbatches):
            part = jax.tree.map(lambda x, i=index: x[i::num_microbatches], batch)
            value, grads = nnx.value_and_grad(loss)(model, part)
            values.append(value)
            sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
        grads = jax.tree.map(lambda x: x / num_microbatches, sums)
        optimizer.update(model, grads)
        return jnp.stack(values).mean()

    return [float(step(model, optimizer, batch)) for batch in batches]


def make_trainer(model: Any, strategy: Any = None, **options: Any) -> Trainer:
    settings = {"optimizer": TX, "loss": squares, "loggers": ()} | options
    return Trainer(model, strategy=strategy or FSDP(min_size=0), **settings)


ALONE = {"strategy": DataParallel(), "devices": jax.devices()[:1]}


# Assignments in the forward pass.


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "place", [pytest.param(ALONE, marks=pytest.mark.deep), {}], ids=["alone", "FSDP"]
)
def test_assignments_in_forward_pass_match_plain_nnx(name: str, place: dict) -> None:
    batches = make_batches()
    model = build(name)(nnx.Rngs(0))
    expected = plain(model, squares, batches)
    trainer = make_trainer(build(name), **place)
    history = trainer.fit(batches, len(batches))
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)
    found = nnx.to_flat_state(nnx.state(trainer.model, nnx.Param))
    wanted = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, variable in found:
        value = wanted[path].get_value()
        atol = 1e-5 * max(0.1, float(abs(value).max()))
        np.testing.assert_allclose(variable.get_value(), value, rtol=0, atol=atol)
        own: Any = trainer.state.params
        for part in path:
            own = own[part]
        assert variable.get_value().sharding == own.sharding


def test_assignments_carry_over_between_microbatches() -> None:
    batches = make_batches()
    make = build("spectral norm", "codebook")
    expected = plain(make(nnx.Rngs(0)), squares, batches, num_microbatches=4)
    trainer = make_trainer(make, **ALONE, num_microbatches=4)
    found = trainer.fit(batches, len(batches))["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


class ClippedBlock(nnx.Module):
    """A residual block that clips its weights."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.clipped = Clipped(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.clipped(x))


class Deep(nnx.Module):
    """Clipped blocks in a `Stack`, or called one after the other."""

    def __init__(self, rngs: nnx.Rngs, *, stacked: bool = True) -> None:
        self.first = nnx.Linear(4, WIDTH, rngs=rngs)
        self.blocks: Any = Stack(ClippedBlock, 2, rngs=rngs)
        if not stacked:
            stack, self.blocks = self.blocks, nnx.List([])
            for index in range(2):
                graphdef, state = nnx.split(stack.layer)
                layer = jax.tree.map(lambda x, i=index: x[i], state)
                self.blocks.append(nnx.merge(graphdef, layer))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        if isinstance(self.blocks, Stack):
            return self.blocks(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    "remat", ["none", pytest.param("full", marks=pytest.mark.deep)]
)
def test_stack_blocks_may_assign_parameters(remat: Any) -> None:
    batches = make_batches()
    expected = plain(Deep(nnx.Rngs(0), stacked=False), squares, batches)
    trainer = make_trainer(Deep, remat=remat)
    found = trainer.fit(batches, len(batches))["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_prefetching_stack_refuses_assignments() -> None:
    trainer = make_trainer(Deep, FSDP(min_size=0, prefetch="first"))
    message = "assigns its parameters: ['clipped.linear.bias', 'clipped.linear.ker"
    with pytest.raises(StackError, match=re.escape(message)):
        trainer.fit(make_batches(1), 1)


class Around(nnx.Module):
    """Blocks that assign nothing, before or after a layer that does."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, rngs=rngs)
        self.last = nnx.WeightNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.blocks(x))


@pytest.mark.parametrize(
    ("model", "path"),
    [(Deep, "blocks.layer.clipped.linear.bias"), (Around, "last.layer_instance.kern")],
    ids=["blocks", "epilogue"],
)
def test_pipeline_refuses_assignments_before_compiling(model: Any, path: str) -> None:
    options = {"num_microbatches": 2, "devices": jax.devices()[:2]}
    trainer = make_trainer(model, Pipeline(2), **options)
    batch = make_batches(1)[0]
    message = f"assigns trained parameters while it runs: `{path}"
    with pytest.raises(PipelineError, match=re.escape(message)):
        trainer.fit([batch], 1)
    # An evaluation may assign, and discards the assignments.
    loss = make_trainer(model, **ALONE).evaluate([batch])["loss"]
    np.testing.assert_allclose(trainer.evaluate([batch])["loss"], loss, rtol=1e-5)


def test_evaluation_discards_assignments() -> None:
    trainer = make_trainer(build(*LAYERS))
    before = jax.device_get(nnx.state(trainer.model, nnx.Param))
    trainer.evaluate(make_batches(1))
    trainer.predict([make_batches(1)[0]["x"]])
    after = jax.device_get(nnx.state(trainer.model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_overflow_undoes_assignments() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        return squares(model, batch) * jnp.where(batch["y"].sum() > 1e3, jnp.inf, 1)

    batch = make_batches(1)[0]
    bad = batch | {"y": batch["y"] + 1e6}
    precision = Precision(compute="float16")
    trainer = make_trainer(build("clipped"), loss=loss, precision=precision)
    before = jax.device_get(trainer.state.params)
    trainer.state, metrics = trainer.train_step(trainer.state, trainer.shard_batch(bad))
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, trainer.state.params)


def test_assignment_of_another_shape_raises() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        model.bias.set_value(jnp.zeros(3))
        return squares(model, batch)

    trainer = make_trainer(lambda rngs: nnx.Linear(4, 1, rngs=rngs), loss=loss)
    message = "`bias` went from shape (1,) to (3,)"
    with pytest.raises(StateStructureError, match=re.escape(message)):
        trainer.fit(make_batches(1), 1)


# Assignments from outside, on the model of a Trainer.


def linear(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(4, 1, rngs=rngs)


def loss_at(kernel: np.ndarray, batch: dict, bias: float = 0.0) -> float:
    return float(np.mean((batch["x"] @ kernel[:, 0] + bias - batch["y"]) ** 2))


def test_assigned_weights_are_trained_on(tmp_path: Path) -> None:
    batch = make_batches(1)[0]
    options = {
        "checkpoint": str(tmp_path),
        "devices": jax.devices()[:4],
    }
    trainer = make_trainer(linear, ema_decay=0.9, **options)
    kernel = jnp.full((4, 1), 2.0)
    model: Any = trainer.model
    model.kernel.set_value(kernel)
    # The assigned weights are placed on the mesh, then evaluated, trained and saved.
    # The user's array is copied.
    expected = loss_at(np.full((4, 1), 2.0), batch)
    np.testing.assert_allclose(trainer.evaluate([batch])["loss"], expected, rtol=1e-5)
    model.bias = nnx.Param(np.ones(1))
    expected = loss_at(np.full((4, 1), 2.0), batch, bias=1.0)
    sharding = trainer.state.params["kernel"].sharding
    assert sharding.spec == jax.sharding.PartitionSpec("fsdp")
    found = trainer.fit([batch], 1)["loss"]
    np.testing.assert_allclose(found, [expected], rtol=1e-5)
    assert not kernel.is_deleted()
    # The model of the averages is separate.
    average: Any = trainer.ema_model
    nnx.update(average, jax.tree.map(jnp.zeros_like, nnx.state(average)))
    assert trainer.state.ema is not None
    assert not np.any(trainer.state.ema["kernel"])
    assert np.any(trainer.state.params["kernel"])
    assert trainer.model is trainer.model


def test_sampling_between_steps_keeps_random_streams() -> None:
    def make(rngs: nnx.Rngs) -> nnx.Module:
        layers = nnx.Linear(4, WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        return nnx.Sequential(*layers)

    batches, found = make_batches(2), []
    for samples in (False, True):
        trainer = make_trainer(make)
        trainer.fit(batches[:1], 1)
        if samples:
            model = trainer.model
            model.train()
            nnx.jit(lambda model, x: model(x))(model, batches[0]["x"])
        found.append(trainer.fit(batches, 2)["loss"][-1])
    assert found[0] == found[1]


def test_late_or_misshaped_assignment_raises() -> None:
    batches = make_batches(2)
    trainer = make_trainer(linear)
    model: Any = trainer.model
    trainer.fit(batches, 1)
    model.kernel.set_value(jnp.ones((4, 1)))
    with pytest.raises(
        StateStructureError, match=r"earlier step: `kernel`\. The steps"
    ):
        trainer.evaluate(batches)
    trainer.evaluate(batches)
    present: Any = trainer.model
    present.kernel.set_value(jnp.ones((3, 1)))
    message = "`kernel` has shape (3, 1) instead of (4, 1). The arrays of a run keep"
    with pytest.raises(StateStructureError, match=re.escape(message)):
        trainer.fit(batches, 2)


@pytest.mark.parametrize(
    ("change", "paths"),
    [
        (lambda model: setattr(model, "bias", None), "['bias']"),
        (lambda model: setattr(model, "new", linear(nnx.Rngs(0))), "['new.bias', 'new"),
    ],
)
def test_added_or_removed_parameter_raises(change: Any, paths: str) -> None:
    trainer = make_trainer(linear)
    change(trainer.model)
    message = f"Parameters of trainer.model were removed or added: {paths}"
    with pytest.raises(StateStructureError, match=re.escape(message)):
        trainer.evaluate(make_batches(1))


class Counting(nnx.Module):
    """Counts its calls in an attribute. Plain NNX would trace it again at each call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.dropout = linear(rngs), nnx.Dropout(0.1, rngs=rngs)
        self.calls = 0

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        return self.dropout(self.linear(x)) * self.calls


def test_changed_static_attributes_warn() -> None:
    batches = make_batches(1)
    trainer = make_trainer(Counting)
    message = "Attributes that are not arrays have changed in the loss: `calls`. That"
    with pytest.warns(ParallelWarning, match=re.escape(message)):
        trainer.fit(batches, 1)
    model: Any = trainer.model
    model.train()  # the Trainer does not use this mode of the model
    model.eval()
    model.dropout.rate = 0.5
    with pytest.warns(ParallelWarning, match=r"in trainer\.model: `dropout\.rate`"):
        trainer.evaluate(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning appears only once
        trainer.evaluate(batches)


def test_stale_model_raises() -> None:
    batches = make_batches(2)
    trainer = make_trainer(lambda rngs: nnx.BatchNorm(4, rngs=rngs), ema_decay=0.9)
    old: Any = trainer.model
    kept = [old, trainer.ema_model]
    copied: Any = jax.tree.map(jnp.copy, old)
    expected = copied(batches[0]["x"])
    trainer.fit(batches, 1)

    def assign(model: Any) -> None:
        model.scale[...] = 1.0

    uses: list[Callable] = [
        lambda model: model(batches[0]["x"]),
        nnx.jit(lambda model: model(batches[0]["x"])),
        lambda model: nnx.jit(lambda model: model.scale + 1)(model),
        lambda model: model.scale.mean(),
        lambda model: jax.device_get(nnx.state(model)),
        assign,
    ]
    for model in kept:
        for use in uses:
            with pytest.raises(RuntimeError, match="Array has been deleted"):
                use(model)
    # A copy, a fresh `trainer.model`, and the fit work as before.
    np.testing.assert_array_equal(copied(batches[0]["x"]), expected)
    present: Any = trainer.model
    assert np.isfinite(present(batches[0]["x"])).all()
    trainer.fit(batches, 2)


def test_fit_keeps_arrays_of_passed_model() -> None:
    model: Any = linear(nnx.Rngs(0))
    trainer = make_trainer(model)
    trainer.fit(make_batches(1), 1)
    first: Any = linear(nnx.Rngs(0))
    np.testing.assert_array_equal(model.kernel[...], first.kernel[...])
    trained: Any = trainer.model
    assert (trained.kernel[...] != first.kernel[...]).any()


class Clipping(Callback):
    """Clips the weights from outside during the fit."""

    def __init__(self) -> None:
        self.kernels: dict[int, np.ndarray] = {}

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        del step, metrics  # a hook runs later than the step that it reports
        model: Any = trainer.model
        model.kernel[...] = jnp.clip(model.kernel[...], -0.01, 0.01)
        model.bias[...] = jnp.zeros(1)
        self.kernels[trainer.step] = np.asarray(model.kernel[...])


def test_callback_may_assign_between_steps() -> None:
    batches, clipping = make_batches(6), Clipping()
    trainer = make_trainer(linear, callbacks=[clipping])
    losses = trainer.fit(batches, 6)["loss"]
    steps = [step for step in clipping.kernels if step < 6]
    assert len(steps) >= 3
    expected = [loss_at(clipping.kernels[step], batches[step]) for step in steps]
    np.testing.assert_allclose(losses[steps], expected, rtol=1e-5)
    kernel: Any = trainer.state.params["kernel"]
    np.testing.assert_array_equal(kernel, clipping.kernels[6])


@pytest.mark.parametrize("where", ["before", "between"])
def test_assigned_weights_restart_average_before_training(where: str) -> None:
    batch, kernel = make_batches(1)[0], np.full((4, 1), 2.0, np.float32)
    trainer = make_trainer(linear, ema_decay=0.75)
    if where == "between":
        trainer.fit([batch], 1)
    averaged: Any = trainer.ema_model
    start = np.asarray(averaged.kernel.get_value())
    model: Any = trainer.model
    model.kernel.set_value(jnp.asarray(kernel))
    expected = kernel if where == "before" else start
    assert trainer.state.ema is not None
    np.testing.assert_array_equal(trainer.state.ema["kernel"], expected)
    np.testing.assert_array_equal(averaged.kernel.get_value(), expected)
    trainer.fit([batch] * 2, trainer.step + 1)
    trained = np.asarray(trainer.state.params["kernel"])
    expected = 0.75 * expected + 0.25 * trained
    np.testing.assert_allclose(trainer.state.ema["kernel"], expected, rtol=1e-5)
