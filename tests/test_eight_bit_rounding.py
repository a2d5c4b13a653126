"""Stochastic rounding of gradients: the same numbers under every layout and restart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_parallel import (
    Composite,
    DataParallel,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import EightBitError
from nnx_parallel.layers import Dense
from nnx_parallel.layers.eight_bit import quantise, quantise_mx
from nnx_parallel.layers.recipe import RoundingKey, describe_products, set_recipe
from nnx_parallel.precision import EightBit
from tests.parity.runs import compiling, to_host
from tests.test_eight_bit_blocks import (
    EMBED,
    Block,
    ExpertBlock,
    Net,
    batch_of,
    fsdp,
    make_trainer,
    train,
)

pytestmark = pytest.mark.long
deep = pytest.mark.deep

INT8 = EightBit(forward="int8", gradient="int8", rounding="stochastic")
MXFP8 = EightBit(
    forward="float8_e4m3fn",
    gradient="float8_e5m2",
    block=32,
    rounding="stochastic",
)


@pytest.fixture
def float64() -> Iterator[None]:
    with compiling(optimized=False), jax.enable_x64(True):
        yield


def in_float64(recipe: EightBit) -> Precision:
    return Precision(params="float64", products=recipe)


@cache
def on_one_device(recipe: EightBit) -> tuple[np.ndarray, dict]:
    return train(make_trainer(in_float64(recipe), DataParallel(1)))


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [
        pytest.param(INT8, fsdp(4), id="fsdp"),
        pytest.param(
            INT8,
            Composite(fsdp(2), TensorParallel(2, sequence=True)),
            id="fsdp_sequence",
        ),
        pytest.param(MXFP8, TensorParallel(2), id="blocks_tp", marks=deep),
    ],
)
@pytest.mark.usefixtures("float64")
def test_layouts_round_to_same_numbers(recipe: EightBit, strategy: Strategy) -> None:
    losses, gradients = train(make_trainer(in_float64(recipe), strategy))
    expected, expected_gradients = on_one_device(recipe)
    np.testing.assert_allclose(losses, expected, rtol=1e-7)
    largest = max(np.abs(x).max() for x in expected_gradients.values())
    for path, x in expected_gradients.items():
        assert np.abs(gradients[path] - x).max() <= 1e-7 * largest, path


@pytest.mark.parametrize(
    ("dtype", "smallest", "block"),
    [
        ("int8", 1, None),
        ("float8_e4m3fn", 2.0**-9, None),
        ("float8_e5m2", 2.0**-16, None),
        ("float8_e4m3fn", 2.0**-9, 32),
    ],
)
def test_mean_of_roundings_is_exact(
    dtype: str, smallest: float, block: int | None
) -> None:
    rng, count = np.random.default_rng(0), 10_000
    # Some numbers are smaller than the smallest number of the dtype.
    x = rng.normal(size=(2, 32)) * 10.0 ** -rng.integers(0, 5, (2, 32))
    x = x.astype(np.float32)

    def of(noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        given = jnp.asarray(x)
        if block is None:
            values, scale = quantise(given, (1,), jnp.dtype(dtype), noise=noise)
        else:
            values, codes = quantise_mx(given, (1,), jnp.dtype(dtype), block, noise)
            scale = 2.0 ** (codes.astype(jnp.float32) - 127)
        return values.astype(jnp.float32) * scale, scale

    noise = jax.random.uniform(jax.random.key(0), (count, *x.shape))
    found, scale = jax.jit(jax.vmap(of))(noise)
    found, scale = np.asarray(found, np.float64), np.asarray(scale[0])
    # Products with scales are rounded to float32.
    tiny = 1e-6 * np.maximum(np.abs(x), scale * smallest)
    step = np.maximum(found.max(axis=0) - found.min(axis=0), scale * smallest)
    assert (np.abs(found - x) <= step + tiny).all()
    # The standard deviation of one rounding is at most half a step.
    error = np.abs(found.mean(axis=0) - x)
    assert (error <= 5 * step / 2 / count**0.5 + tiny).all()
    nearest, _ = of(None)
    assert (np.abs(nearest - x) > error).mean() > 0.8


def test_representable_numbers_do_not_change() -> None:
    every = jnp.arange(256, dtype=jnp.uint8)
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8):
        x = jax.lax.bitcast_convert_type(every, dtype).astype(jnp.float32)
        x = x[jnp.isfinite(x) & (x >= -127 if dtype == jnp.int8 else True)]
        noise = jax.random.uniform(jax.random.key(0), x.shape).at[:8].set(0)
        values, scale = quantise(x, (0,), dtype, noise=noise)
        assert scale.tolist() == [1.0]
        np.testing.assert_array_equal(np.asarray(values, np.float32), x)


class Pair(nnx.Module):
    """Two stock layers and a stack; only the first is rounded at random."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.net = Net(Block, rngs)
        self.first = nnx.Linear(EMBED, EMBED, rngs=rngs)
        self.second = Dense({"embed": EMBED}, {"mlp": EMBED}, rngs=rngs)


def test_each_step_and_layer_has_a_key() -> None:
    def keys(seed: int) -> dict[Any, np.ndarray]:
        model = Pair(nnx.Rngs(0))
        set_recipe(model, replace_layers(INT8, ""), jax.random.key(seed))
        state = nnx.state(model, RoundingKey)
        return {
            path: np.asarray(jax.random.key_data(x[...]))
            for path, x in nnx.to_flat_state(state)
        }

    found, other = keys(0), keys(1)
    shapes = {x.shape[:-1] for x in found.values()}
    assert shapes == {(), (2,)}
    every = [x.reshape(-1, 2) for x in (*found.values(), *other.values())]
    every = [tuple(key) for keys in every for key in keys]
    assert len(set(every)) == len(every) == 2 * (2 + 2 * 2)


def replace_layers(recipe: EightBit, layers: str) -> EightBit:
    return EightBit(
        forward=recipe.forward,
        gradient=recipe.gradient,
        layers=layers,
        rounding="stochastic",
    )


@pytest.mark.bits
def test_resumed_run_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    def run(num_steps: int, directory: Any, precision: Precision) -> Any:
        trainer = make_trainer(
            precision, fsdp(2), checkpoint=directory, num_microbatches=2
        )
        losses = trainer.fit([batch_of(i) for i in range(4)], num_steps)["loss"]
        return losses, to_host(trainer.state.params)

    at_random = Precision.int8(rounding="stochastic", compute=None)
    losses, params = run(4, tmp_path / "whole", at_random)
    run(2, tmp_path / "parts", at_random)
    rest, resumed = run(4, tmp_path / "parts", at_random)
    np.testing.assert_array_equal(rest[-2:], losses[-2:])
    for path, x in params.items():
        assert x.tobytes() == resumed[path].tobytes(), path
    nearest, _ = run(4, tmp_path / "nearest", Precision.int8(compute=None))
    assert nearest[0] == losses[0]
    assert (nearest[2:] != losses[2:]).all()


def test_stock_layers_round_at_random() -> None:
    def gradient(rounding: Any, seed: int) -> jax.Array:
        model, x = nnx.Linear(32, 64, rngs=nnx.Rngs(0)), jnp.ones((4, 32))
        recipe = EightBit(forward="int8", gradient="int8", layers="", rounding=rounding)
        set_recipe(model, recipe, jax.random.key(seed))
        return jax.grad(lambda x: jnp.sum(jnp.sin(model(x))))(x)

    nearest = gradient("nearest", 0)
    first, again, other = (gradient("stochastic", seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    for left, right in ((nearest, first), (first, other)):
        assert (left != right).any()
        np.testing.assert_allclose(left, right, atol=0.05)


def test_description_names_rounding() -> None:
    text = describe_products(Net(Block, nnx.Rngs(0)), INT8, "cpu")
    assert text.endswith(". Gradients are rounded at random, except in experts")
    assert repr(INT8).endswith("layers=None, rounding='stochastic')")
    assert repr(MXFP8).endswith("layers=None, block=32, rounding='stochastic')")
    assert "rounding" not in repr(Precision.int8().products)


def start(block: Any, strategy: Strategy) -> Trainer:
    trainer = make_trainer(Precision(products=INT8), strategy, block)
    trainer.describe()
    return trainer


def test_layers_without_keys_raise() -> None:
    message = "layers=None selects only experts: ['blocks.layer.mixture']. The order"
    with pytest.raises(EightBitError, match=re.escape(message)):
        start(ExpertBlock, DataParallel(1))
    message = "the stages of a Pipeline get no keys. Pass rounding='nearest'"
    with pytest.raises(EightBitError, match=re.escape(message)):
        start(Block, Pipeline(2))


def test_invalid_rounding_raises() -> None:
    wrong: Any = "up"
    message = "rounding='up' is invalid; valid values are ('nearest', 'stochastic')."
    with pytest.raises(ValueError, match=re.escape(message)):
        Precision.int8(rounding=wrong)
    for make in (Precision.fp8, Precision.mxfp8):
        with pytest.raises(ValueError, match="gradient=None does not round them"):
            make(gradient=None, rounding="stochastic")
