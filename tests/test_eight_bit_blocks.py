"""Products in the MX format: blocks of 32 elements with scales that are powers of 2.

`test_eight_bit.py` explains why layouts are compared in float64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache, partial
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
    ExpertParallel,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
    audit,
)
from nnx_parallel.errors import EightBitError
from nnx_parallel.layers import Dense, Experts, MoE, Stack
from nnx_parallel.layers.eight_bit import eight_bit_matmul, quantise_mx
from nnx_parallel.layers.recipe import describe_products, layers_in_eight_bits
from nnx_parallel.precision import EightBit
from tests.parity.runs import compiling, to_host

pytestmark = pytest.mark.long
deep = pytest.mark.deep

ROWS, SEQ_LEN, EMBED = 8, 4, 64


class Block(nnx.Module):
    """Two products: blocks of 32 are parts of a head, and of `embed`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        heads = {"heads": 2, "head_dim": 32}
        self.up = Dense({"embed": EMBED}, heads, rngs=rngs)
        self.down = Dense(heads, {"embed": EMBED}, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class ExpertBlock(nnx.Module):
    """A mixture of experts."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        experts = Experts(num_experts=4, top_k=2, mlp_dim=64, balance_loss=0.0)
        self.mixture = MoE(EMBED, experts, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mixture(x)[0]


class Net(nnx.Module):
    """A stack of two blocks."""

    def __init__(self, block: Any, rngs: nnx.Rngs) -> None:
        self.blocks = Stack(block, 2, rngs=rngs)


def loss(model: Any, batch: Any) -> jax.Array:
    return ((model.blocks(batch["x"]) - batch["y"]) ** 2).mean()


def batch_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (ROWS, SEQ_LEN, EMBED)
    return {name: rng.normal(size=shape) for name in ("x", "y")}


def make_trainer(
    precision: Precision, strategy: Strategy, block: Any = Block, **options: Any
) -> Trainer:
    sizes = strategy.axis_sizes.values()
    return Trainer(
        lambda rngs: Net(block, rngs),
        optax.chain(optax.trace(decay=0.0), optax.sgd(0.5, momentum=0.9)),
        loss,
        strategy=strategy,
        devices=jax.devices()[: math.prod(size or 1 for size in sizes)],
        precision=precision,
        loggers=(),
        **options,
    )


def train(trainer: Trainer, num_steps: int = 20) -> tuple[np.ndarray, dict]:
    """The losses of some steps, and the gradients of the first step."""
    losses, gradients, state = [], {}, trainer.state
    for step in range(num_steps):
        batch = trainer.shard_batch(batch_of(step % 2))
        state, metrics = trainer.train_step(state, batch)
        losses.append(float(metrics["loss"]))
        if step == 0:
            recorded: Any = state.opt_state
            gradients = to_host(recorded[0].trace)
    return np.array(losses), gradients


def in_float64(gradient: str | None = "float8_e4m3fn") -> Precision:
    recipe = EightBit(forward="float8_e4m3fn", gradient=gradient, block=32)
    return Precision(params="float64", products=recipe)


@pytest.fixture
def float64() -> Iterator[None]:
    with compiling(optimized=False), jax.enable_x64(True):
        yield


@cache
def on_one_device(block: Any, count: int) -> tuple[np.ndarray, dict]:
    trainer = make_trainer(in_float64(), DataParallel(1), block, num_microbatches=count)
    return train(trainer)


def fsdp(size: int) -> FSDP:
    return FSDP(size, min_size=0)


@pytest.mark.parametrize(
    ("block", "strategy"),
    [
        # Each device stores 16 of the elements of `embed`: half a block.
        pytest.param(Block, fsdp(4), id="fsdp_splits_blocks"),
        pytest.param(
            Block,
            Composite(fsdp(2), TensorParallel(2, sequence=True)),
            id="fsdp_sequence",
        ),
        pytest.param(Block, Composite(fsdp(2), Pipeline(2)), id="pipeline", marks=deep),
        pytest.param(
            ExpertBlock,
            Composite(ExpertParallel(2), TensorParallel(2)),
            id="experts_tp",
            marks=deep,
        ),
    ],
)
@pytest.mark.usefixtures("float64")
def test_layouts_round_to_same_numbers(block: Any, strategy: Strategy) -> None:
    count = 2 if "pipe" in strategy.axis_sizes else 1
    trainer = make_trainer(in_float64(), strategy, block, num_microbatches=count)
    losses, gradients = train(trainer)
    expected, expected_gradients = on_one_device(block, count)
    np.testing.assert_allclose(losses, expected, rtol=1e-7)
    assert losses[-1] < 0.9 * losses[0]
    largest = max(np.abs(x).max() for x in expected_gradients.values())
    for path, x in expected_gradients.items():
        assert np.abs(gradients[path] - x).max() <= 1e-7 * largest, path


def rounded(x: np.ndarray, dims: int, dtype: str = "float8_e4m3fn") -> np.ndarray:
    """Rounds an array to the MX format, in blocks along its last dims."""
    kind = jnp.dtype(dtype)
    most = float(jnp.finfo(kind).max)
    flat = x.reshape(-1, 32).astype(np.float64)
    assert math.prod(x.shape[-dims:]) % 32 == 0
    largest = np.abs(flat).max(axis=1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(largest / most))
    return ((flat / scale).astype(kind).astype(np.float64) * scale).reshape(x.shape)


@partial(jax.jit, static_argnums=0)
def products_of(product: Any, x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple:
    """The result of a product, and the gradients of its operands."""
    y, pull = jax.vjp(product, x, w)
    return y, *pull(dy)


@pytest.mark.parametrize("gradient", ["float8_e4m3fn", "float8_e5m2", None])
def test_products_match_written_recipe(gradient: str | None) -> None:
    products = in_float64(gradient).products
    assert products is not None
    rng = np.random.default_rng(0)
    # Blocks of very different sizes.
    x = rng.normal(size=(4, 6, 4, 16)) * 10.0 ** rng.integers(-6, 6, (4, 6, 4, 1))
    w = rng.normal(size=(4, 16, 2, 32))
    dy = rng.normal(size=(4, 6, 2, 32)) * 10.0 ** rng.integers(-9, 1, (4, 6, 1, 1))
    x, w, dy = (a.astype(np.float32) for a in (x, w, dy))
    y, dx, dw = products_of(partial(eight_bit_matmul, num=2, recipe=products), x, w, dy)

    def close(found: Any, expected: np.ndarray, sizes: np.ndarray) -> None:
        """Compares sums relative to the sums of the terms' sizes."""
        np.testing.assert_array_less(np.abs(found - expected), 1e-6 * sizes)

    kernel = np.transpose(rounded(np.transpose(w, (2, 3, 0, 1)), 2), (2, 3, 0, 1))
    rows = rounded(x, 2)
    close(y, np.tensordot(rows, kernel, 2), np.tensordot(abs(rows), abs(kernel), 2))
    if gradient is not None:
        dy_rows, kernel = rounded(dy, 2, gradient), rounded(w, 2)
    else:
        dy_rows = dy
    product = "bsno,heno->bshe"
    sizes = np.einsum(product, abs(dy_rows), abs(kernel))
    close(dx, np.einsum(product, dy_rows, kernel), sizes)
    product = "bshe,bsno->heno"
    sizes = np.einsum(product, abs(x), abs(dy), dtype=np.float64)
    close(dw, np.einsum(product, x, dy, dtype=np.float64), sizes)


def test_blocks_at_limits_of_format() -> None:
    x = np.zeros((6, 32), np.float32)
    x[1, 3] = np.nan
    x[2, 3] = np.inf
    x[3, :2] = 448, 1
    x[4, :2] = np.nextafter(np.float32(448), np.float32(500)), 1
    x[5, :2] = 1e-31, 3e38  # the first becomes 0
    values, codes = quantise_mx(jnp.asarray(x), (1,), "float8_e4m3fn", 32)
    assert codes[:, 0].tolist() == [0, 255, 255, 127, 128, 247]
    assert values[3:5, :2].astype(float).tolist() == [[448, 1], [224, 0.5]]
    recipe = in_float64().products
    assert recipe is not None
    y = eight_bit_matmul(jnp.asarray(x), jnp.eye(32), 1, recipe)
    assert np.isnan(y[1:3]).any(axis=1).all()
    np.testing.assert_array_equal(y[np.array([0, 3, 4])], [*x[[0, 3]], x[3]])
    np.testing.assert_allclose(y[5, 1], 3e38, rtol=1 / 16)


def test_values_of_blocks_are_exact_in_bfloat16() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 64)) * 10.0 ** rng.integers(-20, 20, (64, 1)))
    recipe = in_float64(None).products
    assert recipe is not None
    eye = jnp.eye(64, dtype=jnp.bfloat16)
    y = eight_bit_matmul(x.astype(jnp.bfloat16), eye, 1, recipe)
    expected = rounded(np.asarray(x.astype(jnp.bfloat16), np.float64), 1)
    np.testing.assert_array_equal(np.asarray(y, np.float64), expected)


def gathers(strategy: Strategy) -> dict[int, int]:
    """Number of all-gathers of a compiled step, by their bytes."""
    trainer = make_trainer(Precision.mxfp8(compute=None), strategy)
    step: Any = trainer.train_step
    compiled = step.lower(trainer.state, trainer.shard_batch(batch_of(0))).compile()
    found: dict[int, int] = {}
    for each in audit(compiled).collectives:
        if each.kind == "all-gather":
            found[each.bytes_each] = found.get(each.bytes_each, 0) + each.count
    return found


def test_gathers_send_8_bits_for_each_weight() -> None:
    # XLA's CPU compiler gathers float8 as float16.
    weights = EMBED * 64
    # Each of two layers gathers two kernels in each direction, and a scale for 32
    # weights. In one direction FSDP splits blocks of `down`: then the scales come from
    # a maximum over devices, without a gather.
    assert gathers(fsdp(2)) == {2 * weights: 2 * 2 * 2, weights // 32: 2 * 3}


def test_description_names_blocks() -> None:
    model, recipe = Net(Block, nnx.Rngs(0)), Precision.mxfp8().products
    assert recipe is not None
    text = describe_products(model, recipe, "TPU7x")
    assert text.startswith("8 bits in blocks of 32: forward products float8_e4m3fn * ")
    assert text.endswith("8-bit numbers, so only gathers are faster")


def test_dims_without_complete_blocks_raise() -> None:
    def check(layer: nnx.Module, message: str, gradient: str | None = None) -> None:
        recipe = EightBit(
            forward="float8_e4m3fn", gradient=gradient, layers="", block=32
        )
        with pytest.raises(EightBitError, match=re.escape(message)):
            layers_in_eight_bits(layer, recipe)

    rngs, rule = nnx.Rngs(0), "A block of the MX format has 32 elements"
    check(nnx.Linear(40, 8, rngs=rngs), f"it has 40 inputs. {rule}")
    layer = Dense({"heads": 2, "head_dim": 24}, {"embed": 32}, rngs=rngs)
    check(layer, f"it has 48 inputs. {rule}")
    linear = nnx.LinearGeneral(32, (3, 8), rngs=rngs)
    check(linear, f"it has 24 outputs. {rule}", "float8_e4m3fn")
    experts = Experts(num_experts=4, top_k=2, mlp_dim=48)
    check(MoE(64, experts, rngs=rngs), f"it has 48 hidden elements. {rule}")


def test_axis_that_splits_blocks_of_experts_raises() -> None:
    strategy = Composite(ExpertParallel(2), TensorParallel(4))
    trainer = make_trainer(Precision.mxfp8(compute=None), strategy, ExpertBlock)
    message = (
        "split the 64 elements of `mlp` of the experts `blocks.layer.mixture` into 4 "
        "shards, and so split blocks of 32 elements, which share a scale. mlp_dim must "
        "be a multiple of 128"
    )
    with pytest.raises(EightBitError, match=re.escape(message)):
        trainer.train_step(trainer.state, trainer.shard_batch(batch_of(0)))


@pytest.mark.parametrize(("forward", "block"), [("int8", 32), ("float8_e4m3fn", 16)])
def test_invalid_blocks_raise(forward: str, block: int) -> None:
    message = f"EightBit(forward='{forward}', block={block}): blocks of the MX format"
    with pytest.raises(ValueError, match=re.escape(message)):
        EightBit(forward=forward, gradient=None, block=block)


def test_half_precision_raises() -> None:
    x = jnp.ones((2, 32), jnp.float16)
    recipe = Precision.mxfp8().products
    assert recipe is not None
    with pytest.raises(EightBitError, match="computes in float16, in which the scales"):
        jax.eval_shape(
            lambda w: eight_bit_matmul(x, w, 1, recipe), jnp.eye(32, dtype=x.dtype)
        )
