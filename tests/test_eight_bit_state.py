"""Optimizer state in 8 bits: the nearest levels, fewer bytes, clear errors."""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_parallel import (
    FSDP,
    Strategy,
    Trainer,
    by_layer,
    plan,
)
from nnx_parallel.errors import OptimizerError
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.optimizers import eight_bit_state
from nnx_parallel.optimizers.eight_bit_state import (
    block_sides,
    decode,
    encode,
)
from tests.parity.runs import to_host

VOCAB, SEQ_LEN, ROWS = 64, 16, 16
CONFIG = GPTConfig.tiny(
    vocab_size=VOCAB, seq_len=SEQ_LEN, num_layers=2, embed_dim=64, num_heads=4
)
ADAMW = eight_bit_state(optax.adamw(1e-2))


def fsdp(size: int, shard: Any = "params") -> FSDP:
    return FSDP(size, shard=shard, min_size=0)


def tokens(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, (ROWS, SEQ_LEN + 1), dtype=np.int32)


def make_trainer(
    strategy: Strategy, optimizer: Any = ADAMW, config: Any = CONFIG, **options: Any
) -> Trainer:
    sizes = strategy.axis_sizes.values()
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optimizer,
        next_token_loss,
        strategy=strategy,
        devices=jax.devices()[: math.prod(size or 1 for size in sizes)],
        loggers=(),
        **options,
    )


# The code


def levels(*, signed: bool) -> np.ndarray:
    """The numbers that a block with the largest number 1 can have, from section 2.2.

    Decade d has 64 / 2**d levels with a sign, and 128 / 2**d levels without.
    """
    found = [0.0]
    for decade in range(7 if signed else 8):
        count = (64 if signed else 128) // 2**decade
        shares = 0.1 + 0.9 * np.arange(1, count + 1) / count
        found += (10.0**-decade * shares).tolist()
    return np.array([-x for x in found[1:]] + found if signed else found)


def tiles(x: np.ndarray, sides: tuple[int, int]) -> Iterator[np.ndarray]:
    for row in range(0, x.shape[0], sides[0]):
        for column in range(0, x.shape[1], sides[1]):
            yield x[row : row + sides[0], column : column + sides[1]]


def array_of(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 96))
    x = x * 10.0 ** rng.uniform(-9, 0, x.shape) if "wide" in kind else x
    x = np.square(x) if "squares" in kind else x
    return np.asarray(x * 3e-5, np.float32)


@pytest.mark.parametrize("kind", ["plain", "wide", "squares", "wide squares"])
@pytest.mark.parametrize("sides", [(16, 16), (1, 32), (64, 1)])
def test_numbers_are_rounded_to_nearest_level(
    kind: str, sides: tuple[int, int]
) -> None:
    x = array_of(kind)
    codes, scale = jax.jit(encode, static_argnums=1)(x, sides)
    assert (codes.shape, codes.dtype) == (x.shape, np.uint8)
    assert (scale.shape, scale.dtype) == ((64 // sides[0], 96 // sides[1]), np.float32)
    signed = "squares" not in kind
    known = levels(signed=signed)
    assert len(known) == (255 if signed else 256)
    least = known[known > 0].min()
    found = np.asarray(decode(codes, scale), np.float64)
    for number, (ours, block) in enumerate(
        zip(tiles(found, sides), tiles(x, sides), strict=True)
    ):
        largest = np.abs(block).max()
        assert np.ravel(scale)[number] == (-largest if signed else largest)
        shares = np.float64(block) / largest
        distances = np.abs(shares[..., None] - known).min(axis=-1)
        # Below half of the least level, numbers without a sign become the least level.
        tiny = np.abs(shares) < 0.6 * least
        bound = np.where(tiny, least, distances)
        bound += 1e-5 * np.maximum(np.abs(shares), least)
        assert (np.abs(ours / largest - shares) <= bound).all()
        if not signed:
            assert ((ours > 0) == (block > 0)).all()


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_kept(signed: bool) -> None:
    codes = jnp.arange(256, dtype=jnp.uint8)[None]
    codes = codes.at[0, 128].set(0) if signed else codes  # 128 would be -0
    for size in (1.0, 3.7e-9, 2.3e7):
        scale = jnp.full((1, 1), -size if signed else size, jnp.float32)
        numbers = decode(codes, scale)
        expected = np.unique(levels(signed=signed))
        np.testing.assert_allclose(
            np.unique(numbers), np.float32(expected * size), rtol=2e-6, atol=0
        )
        again, same = encode(numbers, (1, 256))
        np.testing.assert_array_equal(again, codes)
        np.testing.assert_array_equal(same, scale)


def test_codes_are_kept_if_numbers_do_not_change() -> None:
    x = jnp.asarray(array_of("wide"))
    codes, scale = encode(x, (16, 16))
    again, same = encode(decode(codes, scale), (16, 16))
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(same, scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_block_with_non_finite_number_is_nan(bad: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 3] = bad
    codes, scale = encode(jnp.asarray(x), (1, 64))
    assert not np.isfinite(scale[1]).any()
    found = np.asarray(decode(codes, scale))
    np.testing.assert_array_equal(found[0], 1)
    assert np.isnan(found[1]).all()


def test_zeros_and_low_precision_are_kept() -> None:
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        codes, scale = encode(jnp.zeros((16, 16), dtype), (16, 16))
        assert not codes.any()
        assert not scale.any()
        assert scale.dtype == jnp.float32
        assert not decode(codes, scale).any()


def test_block_sides_divide_dims() -> None:
    assert block_sides((768, 3072), 256) == (16, 16)
    assert block_sides((768, 3072), 64) == (8, 8)
    assert block_sides((768, 3072), 4096) == (64, 64)
    assert block_sides((32, 128, 4096), 256) == (1, 16, 16)  # heads, head_dim, embed
    assert block_sides((4096, 128, 128), 256) == (16, 1, 16)
    assert block_sides((4, 24, 1000), 256, first=1) == (1, 8, 8)
    assert block_sides((8192,), 256) == (256,)
    assert block_sides((16, 4095), 256, first=1) is None  # small in each layer
    assert block_sides((4095, 4097), 256) is None  # odd in both dims


# Placement and bytes


def test_state_has_a_quarter_of_the_bytes_on_each_device() -> None:
    trainer = make_trainer(fsdp(4))
    plain = make_trainer(fsdp(4), optax.adamw(1e-2))
    params = to_host(trainer.state.params)
    large = {p: x for p, x in params.items() if x.size // (1 + ("blocks" in p)) >= 4096}
    small = sum(x.nbytes for p, x in params.items() if p not in large)
    large_size = sum(x.size for x in large.values())
    leaves = jax.tree.leaves(trainer.state.opt_state)
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    # One byte for each number, and four for each block of 256; and the counter.
    expected = 2 * (large_size * (1 + 4 / 256) + small) / 4 + 4
    assert held == expected
    assert trainer.describe().optimizer_bytes == held
    assert held < 0.28 * plain.describe().optimizer_bytes
    (row,) = (
        row
        for row in trainer.describe().optimizer_rows
        if row.path == "inner.0.nu.embed.embedding"
    )
    assert (row.shape, row.bytes_per_device) == ((64, 64), 64 * 64 // 4)


def test_plan_counts_the_bytes() -> None:
    found = [
        plan(
            make_trainer(fsdp(4), optimizer),
            topology="h100:4",
            batch=tokens(0),
            candidates=fsdp(4),
            compile=0,
        )
        for optimizer in (ADAMW, optax.adamw(1e-2))
    ]
    costs: list[Any] = [x.best and x.best.costs for x in found]
    ours, plain = (each.memory["optimizer state"] for each in costs)
    assert ours == make_trainer(fsdp(4)).describe().optimizer_bytes
    assert ours < 0.28 * plain


# Errors

PARAMS = {"kernel": np.ones((64, 64), np.float32)}


@pytest.mark.parametrize("size", [0, -64, 32, 100, 8192, 256.0, True, "256", None])
def test_invalid_block_size_raises(size: Any) -> None:
    message = (
        f"eight_bit_state got block_size={size!r}. It must be one of [64, 128, 256, "
        "512, 1024, 2048, 4096]."
    )
    with pytest.raises(OptimizerError, match=re.escape(message)):
        eight_bit_state(optax.adam(1e-3), block_size=size)


@pytest.mark.parametrize("fields", ["mu", [1], None, 3])
def test_invalid_fields_raise(fields: Any) -> None:
    message = f"eight_bit_state got fields={fields!r}. It must be a collection of names"
    with pytest.raises(OptimizerError, match=re.escape(message)):
        eight_bit_state(optax.adam(1e-3), fields=fields)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [(optax.adamw, "a function"), (3e-4, "0.0003"), (None, "a NoneType")],
)
def test_invalid_optimizer_raises(wrong: Any, kind: str) -> None:
    message = f"eight_bit_state got {kind}. It must be an Optax transformation, such as"
    with pytest.raises(OptimizerError, match=re.escape(message)):
        eight_bit_state(wrong)


@pytest.mark.parametrize(
    "inner", [ADAMW, optax.chain(optax.clip(1.0), ADAMW), by_layer(ADAMW)]
)
def test_two_applications_raise(inner: Any) -> None:
    message = "eight_bit_state got an optimizer that contains another eight_bit_state."
    with pytest.raises(OptimizerError, match=re.escape(message)):
        make_trainer(fsdp(4), eight_bit_state(inner))


def test_optimizer_without_moments_raises() -> None:
    message = "eight_bit_state got an optimizer that keeps no array of a parameter."
    with pytest.raises(OptimizerError, match=re.escape(message)):
        eight_bit_state(optax.sgd(0.1)).init(PARAMS)
    adagrad = optax.adagrad(0.1)
    message = "that keeps the fields ['sum_of_squares']. Moments are in the fields ['ex"
    with pytest.raises(OptimizerError, match=re.escape(message)):
        eight_bit_state(adagrad).init(PARAMS)
    state: Any = eight_bit_state(adagrad, fields=["sum_of_squares"]).init(PARAMS)
    assert jax.tree.leaves(state.inner)[0].dtype == np.uint8


def test_parameters_outside_dicts_raise() -> None:
    message = "eight_bit_state got parameters in a list. They must be in nested dicts"
    with pytest.raises(OptimizerError, match=re.escape(message)):
        ADAMW.init([PARAMS["kernel"]])
