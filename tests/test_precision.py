"""The dtypes in which arrays are stored, computed and summed."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Mean, Pipeline, Precision, Strategy, Trainer
from nnx_parallel.layers import Stack, cross_entropy, linear_cross_entropy
from nnx_parallel.precision import LossScale, cast_floating

BATCH = {
    "x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32),
    "labels": np.arange(8, dtype=np.int32),
}


pytestmark = pytest.mark.filterwarnings("ignore:The model has adapters of LoRA")


class Adapted(nnx.Module):
    """A frozen linear layer, a trained adapter, and running statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.base = nnx.Linear(4, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, rngs=rngs)
        self.adapter = nnx.LoRA(4, 2, 128, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.base(x)) + self.adapter(x)


def make_trainer(loss: Any, precision: Precision, **options: Any) -> Trainer:
    return Trainer(
        lambda rngs: Adapted(rngs=rngs),
        optax.sgd(0.1),
        loss,
        strategy=FSDP(min_size=0),
        precision=precision,
        loggers=(),
        **options,
    )


def squares(model: Any, batch: Any) -> jax.Array:
    return (model(batch["x"]).astype(jnp.float32) ** 2).mean()


def to_host(tree: Any) -> Any:
    floating = [
        x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jax.tree.map(np.asarray, floating)


def test_frozen_parameters_keep_params_dtype() -> None:
    precision = Precision(params=jnp.bfloat16)
    trainer = make_trainer(squares, precision, wrt=nnx.LoRAParam, ema_decay=0.9)
    trainer.fit([BATCH] * 2, 2)
    variables, _ = nnx.split_state(nnx.state(trainer.model), nnx.Param, ...)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype(jnp.bfloat16)}
    statistics = nnx.state(trainer.model, nnx.BatchStat)
    assert {x.dtype for x in jax.tree.leaves(statistics)} == {jnp.dtype(jnp.float32)}

    described, state = trainer.describe(), trainer.state
    dtypes = {row.info.path: row.info.dtype for row in described.rows}
    assert dtypes["base.kernel"] == dtypes["adapter.lora_a"] == jnp.bfloat16

    def bytes_per_device(*trees: Any) -> int:
        shards = [x.addressable_shards[0].data for x in jax.tree.leaves(trees)]
        return sum(x.nbytes for x in shards)

    assert described.params_bytes == bytes_per_device(variables)
    assert described.optimizer_bytes == bytes_per_device(state.opt_state)
    assert described.average_bytes == bytes_per_device(state.ema)
    assert described.gradients_bytes == described.average_bytes  # both are in float32
    assert "moving average" in described.summary()


def test_predict_casts_input_like_loss() -> None:
    seen = {}

    def loss(model: Any, batch: Any) -> jax.Array:
        seen["loss"] = batch["x"].dtype
        return squares(model, batch)

    def outputs(model: Any, batch: Any) -> jax.Array:
        seen["predict"] = batch["x"].dtype
        return model(batch["x"])

    trainer = make_trainer(loss, Precision(inputs=jnp.bfloat16))
    trainer.evaluate([BATCH])
    trainer.predict([BATCH], outputs)
    assert seen == {"loss": jnp.bfloat16, "predict": jnp.bfloat16}


@pytest.mark.parametrize("field", ["params", "compute", "reduction"])
def test_integer_dtype_raises(field: str) -> None:
    message = (
        f"Precision.{field} is int8; it must be a floating-point dtype: float32, "
        "bfloat16 or float16."
    )
    dtypes: dict[str, Any] = {field: jnp.int8}
    with pytest.raises(ValueError, match=re.escape(message)):
        Precision(**dtypes)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", jnp.bfloat16),
        ("bfloat16", jnp.bfloat16),
        ("fp16", jnp.float16),
        ("float16", jnp.float16),
        ("half", jnp.float16),
        ("fp32", jnp.float32),
        ("float32", jnp.float32),
        (np.dtype("float32"), jnp.float32),
        ("fp64", np.float64),
    ],
)
def test_dtype_may_be_given_by_name(name: Any, dtype: Any) -> None:
    assert Precision(compute=name) == Precision(compute=dtype)
    assert Precision(reduction=name).reduction == dtype
    if dtype is not np.float64:
        assert cast_floating({"x": jnp.ones(2)}, name)["x"].dtype == dtype


@pytest.mark.parametrize("name", ["bf17", "fp", "", 16, ["bf16"]])
def test_unknown_dtype_name_raises(name: Any) -> None:
    message = f"Precision.compute is {name!r}; it must be a floating-point dtype: float"
    with pytest.raises(ValueError, match=re.escape(message)):
        Precision(compute=name)


def test_subclass_may_have_other_fields() -> None:
    @dataclasses.dataclass(frozen=True)
    class Recipe(Precision):
        scale: float = 2.0

    assert Recipe(compute="bfloat16").compute == jnp.bfloat16


def test_casting_keeps_integers_and_keys() -> None:
    tree = {"x": jnp.ones(2), "n": jnp.arange(3), "key": jax.random.key(0), "s": "name"}
    cast = cast_floating(tree, jnp.float16)
    assert cast["x"].dtype == jnp.float16
    assert all(cast[name] is tree[name] for name in ("n", "key", "s"))


def test_mixed_bfloat16_keeps_float32_state() -> None:
    seen = {}

    def loss(model: Any, batch: Any) -> jax.Array:
        seen["kernel"] = model.base.kernel[...].dtype
        seen["lora"] = model.adapter.lora_a[...].dtype
        seen["mean"] = model.norm.mean[...].dtype
        seen["x"], seen["labels"] = batch["x"].dtype, batch["labels"].dtype
        seen["out"] = model.base(batch["x"]).dtype
        return model(batch["x"]).mean()

    precision = Precision(compute=jnp.bfloat16, inputs=jnp.bfloat16)
    trainer = make_trainer(loss, precision)
    state, metrics = trainer.train_step(trainer.state, trainer.shard_batch(BATCH))
    computed = dict.fromkeys(("kernel", "lora", "x", "out"), jnp.bfloat16)
    assert seen == {**computed, "mean": jnp.float32, "labels": jnp.int32}
    assert {x.dtype for x in to_host((state.params, state.variables))} == {
        np.dtype(np.float32)
    }
    assert metrics["loss"].dtype == jnp.float32
    assert state.loss_scale is None


def test_frozen_parameters_keep_every_bit() -> None:
    trainer = make_trainer(squares, Precision.mixed_bfloat16(), wrt=nnx.LoRAParam)
    before = to_host(trainer.state.variables["base"])
    trained = to_host(trainer.state.params)
    trainer.fit([BATCH] * 2, 2)
    after = to_host(trainer.state.variables["base"])
    assert any((x.astype(jnp.bfloat16) != x).any() for x in before)
    assert all((x == y).all() for x, y in zip(before, after, strict=True))
    changed = zip(trained, to_host(trainer.state.params), strict=True)
    assert any((x != y).any() for x, y in changed)


def test_bfloat16_parameters_have_bfloat16_optimizer_state() -> None:
    precision = Precision(params=jnp.bfloat16, compute=jnp.bfloat16)
    trainer = Trainer(
        lambda rngs: nnx.Linear(4, 8, rngs=rngs),
        optax.sgd(0.1, momentum=0.9),
        squares,
        precision=precision,
        ema_decay=0.9,
        loggers=(),
    )
    trainer.fit([BATCH] * 2, 2)
    state = trainer.state
    kept = to_host((state.params, state.opt_state))
    assert {str(x.dtype) for x in kept} == {"bfloat16"}
    # In bfloat16, small changes of an average would be rounded away.
    assert {str(x.dtype) for x in to_host(state.ema)} == {"float32"}


def test_default_precision_keeps_model_dtypes() -> None:
    seen = {}

    def loss(model: Any, batch: Any) -> jax.Array:
        seen["x"] = batch["x"].dtype
        return squares(model, batch)

    trainer = Trainer(
        lambda rngs: nnx.Linear(4, 8, param_dtype=jnp.bfloat16, rngs=rngs),
        optax.sgd(0.1),
        loss,
        loggers=(),
    )
    trainer.fit([BATCH], 1)
    assert {str(x.dtype) for x in to_host(trainer.state.params)} == {"bfloat16"}
    assert seen == {"x": jnp.float32}


def test_average_approaches_constant_bfloat16_parameters() -> None:
    precision = Precision(params=jnp.bfloat16)
    trainer = make_trainer(squares, precision, wrt=nnx.LoRAParam, ema_decay=0.99)
    start = to_host(trainer.state.params)
    trainer.state = dataclasses.replace(
        trainer.state, ema=jax.tree.map(lambda x: 0 * x, trainer.state.ema)
    )
    batch = trainer.shard_batch({name: 0 * x for name, x in BATCH.items()})
    for _ in range(4):
        trainer.state, _ = trainer.train_step(trainer.state, batch)
    for now, before, average in zip(
        to_host(trainer.state.params), start, to_host(trainer.state.ema), strict=True
    ):
        np.testing.assert_array_equal(now, before)
        expected = (1 - 0.99**4) * before.astype(np.float64)
        np.testing.assert_allclose(average, expected, rtol=1e-5)


@pytest.mark.parametrize("field", ["params", "compute"])
def test_float16_uses_loss_scale(field: str) -> None:
    dtypes: dict[str, Any] = {field: jnp.float16}
    trainer = make_trainer(squares, Precision(**dtypes))
    assert trainer.state.loss_scale is not None
    assert make_trainer(squares, Precision()).state.loss_scale is None


def overflow_where_asked(model: Any, batch: Any) -> jax.Array:
    """Finite in float32. In float16, large factors make its gradient overflow."""
    return (model(batch["x"]) * batch["factor"][:, None]).astype(jnp.float32).mean()


def with_factor(factor: float) -> dict:
    return {**BATCH, "factor": np.full(8, factor, np.float32)}


def test_overflow_skips_step_and_halves_scale() -> None:
    trainer = make_trainer(
        overflow_where_asked, Precision.mixed_float16(), ema_decay=0.5
    )
    good, bad = (trainer.shard_batch(with_factor(f)) for f in (1.0, 6e4))
    state, metrics = trainer.train_step(trainer.state, good)
    assert (float(metrics["skipped"]), float(metrics["loss_scale"])) == (0, 2**15)
    before = to_host((state.params, state.variables, state.opt_state, state.ema))

    state, metrics = trainer.train_step(state, bad)
    assert (float(metrics["skipped"]), float(metrics["loss_scale"])) == (1, 2**15)
    after = to_host((state.params, state.variables, state.opt_state, state.ema))
    assert all((x == y).all() for x, y in zip(before, after, strict=True))
    assert int(state.step) == 2
    assert state.loss_scale is not None
    assert float(state.loss_scale.scale) == 2**14

    state, metrics = trainer.train_step(state, good)
    assert (float(metrics["skipped"]), float(metrics["loss_scale"])) == (0, 2**14)
    changed = to_host((state.params, state.variables, state.opt_state, state.ema))
    assert any((x != y).any() for x, y in zip(after, changed, strict=True))


def test_gradients_do_not_depend_on_loss_scale() -> None:
    norms = []
    for precision in (Precision(), Precision.mixed_float16()):
        trainer = make_trainer(squares, precision)
        batch = trainer.shard_batch(BATCH)
        norms.append(float(trainer.train_step(trainer.state, batch)[1]["grad_norm"]))
    np.testing.assert_allclose(norms[1], norms[0], rtol=5e-3)


def test_loss_scale_doubles_and_stays_in_range() -> None:
    scale = LossScale.create(8.0)
    for _ in range(3):
        scale = scale.adjust(jnp.bool_(True), growth_interval=3)
    assert (float(scale.scale), int(scale.good_steps)) == (16.0, 0)
    scale = scale.adjust(jnp.bool_(True), growth_interval=3)
    scale = scale.adjust(jnp.bool_(False), growth_interval=3)
    assert (float(scale.scale), int(scale.good_steps)) == (8.0, 0)
    lowest = LossScale.create(1.0).adjust(jnp.bool_(False))
    highest = LossScale.create(2.0**24).adjust(jnp.bool_(True), growth_interval=1)
    assert (float(lowest.scale), float(highest.scale)) == (1.0, 2.0**24)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("strategy", [FSDP(2), Pipeline(2)], ids=["FSDP", "Pipeline"])
def test_float64_is_kept(strategy: Strategy, num_microbatches: int) -> None:
    """Losses, parameters, averages and evaluations match plain NNX in float64."""
    kinds: Any = {"param_dtype": jnp.float64, "dtype": jnp.float64}

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 8, **kinds, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + jnp.tanh(self.linear(x))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = Stack(Block, 2, rngs=rngs)
            self.head = nnx.Linear(8, 8, **kinds, rngs=rngs)

    def loss(model: Model, batch: dict) -> Mean:
        z, labels = model.blocks(batch["x"]), batch["y"]
        kernel = model.head.kernel[...]
        more = linear_cross_entropy(z[:, None], kernel, labels[:, None])
        return cross_entropy(model.head(z), labels, batch["w"], z_loss=0.1) + more

    # The context manager affects one thread only, but another thread reads the batches.
    jax.config.update("jax_enable_x64", True)
    try:
        rng = np.random.default_rng(0)
        batch = {"x": rng.normal(size=(16, 8)), "y": np.arange(16) % 8}
        batch["w"] = rng.integers(1, 4, size=16).astype(np.float64)
        trainer = Trainer(
            Model,
            optax.sgd(0.1),
            loss,
            strategy=strategy,
            devices=jax.devices()[:2],
            num_microbatches=num_microbatches,
            ema_decay=0.5,
            loggers=(),
        )
        model = Model(nnx.Rngs(0))  # has the same seed
        found = trainer.fit([batch] * 3, num_steps=3)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        expected = []
        for _ in range(3):
            value, grads = nnx.value_and_grad(lambda m: loss(m, batch).value)(model)
            expected.append((value, optax.tree.norm(nnx.to_pure_dict(grads))))
            optimizer.update(model, grads)
        losses = [*zip(found["loss"], found["grad_norm"], strict=True)]
        np.testing.assert_allclose(losses, expected, rtol=1e-13)
        both: list[Any] = [trainer.model, model]
        kernels = (m.blocks.layer.linear.kernel[...] for m in both)
        np.testing.assert_allclose(*kernels, rtol=1e-12)
        dtypes = {str(x.dtype) for x in jax.tree.leaves(trainer.state.ema)}
        assert dtypes == {"float64"}
        value = loss(model, batch).value
        np.testing.assert_allclose(
            trainer.evaluate([batch], ema=False)["loss"], value, rtol=1e-13
        )
    finally:
        jax.config.update("jax_enable_x64", False)
