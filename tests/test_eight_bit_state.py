"""Optimizer state in 8 bits: the same numbers under every layout, fewer bytes.

Rounding is discontinuous, and the order of a float32 sum depends on the layout. So
layouts are compared in float64, where all of them must round to the same codes.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from functools import cache
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
    Backend,
    Checkpoint,
    Composite,
    DataParallel,
    Offload,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
    audit,
    by_layer,
    decay_mask,
    plan,
)
from nnx_parallel.errors import OptimizerError
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.optimizers import eight_bit_state, muon, muon_dimension_numbers
from nnx_parallel.optimizers.eight_bit_state import (
    EightBitState,
    block_sides,
    decode,
    encode,
)
from nnx_parallel.sharding.offload import HOST
from tests.parity.runs import compiling, to_host

pytestmark, deep = pytest.mark.long, pytest.mark.deep

VOCAB, SEQ_LEN, ROWS = 64, 16, 16
CONFIG = GPTConfig.tiny(
    vocab_size=VOCAB, seq_len=SEQ_LEN, num_layers=2, embed_dim=64, num_heads=4
)
# These options select code that computes in float64.
IN_FLOAT64 = dataclasses.replace(
    CONFIG, activation="swiglu", norm="rms", zero_centered_norm=True, sinks=True
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


def train(trainer: Trainer, num_steps: int) -> np.ndarray:
    batches = [tokens(step % 4) for step in range(num_steps)]
    return np.array(trainer.fit(batches, num_steps=num_steps)["loss"])


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


# The same numbers under every layout


@pytest.fixture
def float64() -> Iterator[None]:
    with compiling(optimized=False), jax.enable_x64(True):
        yield


LAYOUTS: dict[str, tuple[Strategy, dict[str, Any]]] = {
    "fsdp": (fsdp(4), {}),
    # A shard has 8 rows, half of a tile.
    "fsdp_cut": (fsdp(8), {}),
    "zero1": (fsdp(4, "optimizer"), {}),
    "tp": (TensorParallel(2), {}),
    "fsdp_tp": (Composite(fsdp(2), TensorParallel(2)), {}),
    "pipeline": (Composite(Pipeline(2), fsdp(2)), {"num_microbatches": 2}),
}


@cache
def on_one_device(num_microbatches: int) -> tuple[np.ndarray, Any]:
    trainer = make_trainer(
        DataParallel(1),
        config=IN_FLOAT64,
        precision=Precision(params="float64"),
        num_microbatches=num_microbatches,
    )
    losses = train(trainer, 20)
    return losses, [to_host(x) for x in (trainer.state.params, trainer.state.opt_state)]


def in_depth(names: Iterable[str], *quick: str) -> list[Any]:
    """Marks all names as deep, except the given ones."""
    marks = {name: () if name in quick else (deep,) for name in names}
    return [pytest.param(name, marks=found) for name, found in marks.items()]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", in_depth(LAYOUTS, "fsdp_cut", "tp", "pipeline"))
def test_layout_changes_no_code(name: str) -> None:
    strategy, options = LAYOUTS[name]
    trainer = make_trainer(
        strategy, config=IN_FLOAT64, precision=Precision(params="float64"), **options
    )
    losses = train(trainer, 20)
    expected, (params, state) = on_one_device(options.get("num_microbatches", 1))
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    for path, x in to_host(trainer.state.params).items():
        np.testing.assert_allclose(x, params[path], rtol=1e-6, atol=1e-9)
    found = to_host(trainer.state.opt_state)
    assert sum(x.dtype == np.uint8 for x in found.values()) >= 12
    for path, x in found.items():
        if x.dtype == np.uint8:
            np.testing.assert_array_equal(x, state[path], path)
    assert losses[-1] < losses[0]


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


def test_codes_need_no_communication_under_fsdp() -> None:
    """Shards contain complete tiles, so the step has the transfers of plain AdamW."""
    sent = []
    for optimizer in (ADAMW, optax.adamw(1e-2)):
        trainer = make_trainer(fsdp(4), optimizer)
        batch = trainer.shard_batch(tokens(0))
        step: Any = trainer.train_step
        report = audit(step.lower(trainer.state, batch).compile())
        sent.append((report.count(), report.bytes()))
    assert sent[0] == sent[1]


def test_offloaded_state_gives_same_losses() -> None:
    plain = make_trainer(fsdp(4))
    offloaded = make_trainer(fsdp(4), backend=Backend(offload=Offload()))
    np.testing.assert_allclose(train(offloaded, 4), train(plain, 4), rtol=1e-5)
    leaves = jax.tree.leaves(offloaded.state.opt_state)
    assert all(x.sharding.memory_kind == HOST for x in leaves if x.ndim)


# Training


def test_loss_is_within_a_percent_of_float32() -> None:
    """After 100 steps on a Markov chain, whose entropy the model approaches."""
    rng = np.random.default_rng(0)
    chain = rng.dirichlet(np.full(VOCAB, 0.05), size=VOCAB).cumsum(axis=1)
    rows = np.zeros((100, ROWS, SEQ_LEN + 1), np.int32)
    for i in range(1, SEQ_LEN + 1):
        draws = rng.uniform(size=rows.shape[:2])
        rows[:, :, i] = (draws[..., None] > chain[rows[:, :, i - 1]]).sum(axis=-1)
    rows = np.minimum(rows, VOCAB - 1)
    ends = []
    for optimizer in (optax.adamw(3e-3), eight_bit_state(optax.adamw(3e-3))):
        losses = make_trainer(DataParallel(1), optimizer).fit(list(rows), 100)["loss"]
        ends.append(float(np.mean(losses[-10:])))
        assert ends[-1] < 0.6 * losses[0]
    assert abs(ends[1] / ends[0] - 1) < 0.01


def labels(model: nnx.Module) -> Any:
    mask = decay_mask(model)
    return jax.tree.map(lambda decays: "matrix" if decays else "rest", mask)


def by_muon(model: nnx.Module) -> Any:
    return muon(0.02, muon_weight_dimension_numbers=muon_dimension_numbers(model))


# Each optimizer, and the number of its fields with codes.
OPTIMIZERS: dict[str, tuple[Any, int]] = {
    "adam": (eight_bit_state(optax.adam(1e-2)), 2),
    "lion": (eight_bit_state(optax.lion(1e-3)), 1),
    "momentum": (eight_bit_state(optax.sgd(0.1, momentum=0.9)), 1),
    "amsgrad": (eight_bit_state(optax.amsgrad(1e-2), block_size=64), 3),
    "masked": (lambda m: eight_bit_state(optax.adamw(1e-2, mask=decay_mask(m))), 2),
    "in_chain": (optax.chain(optax.clip_by_global_norm(0.5), ADAMW), 2),
    "around_chain": (
        eight_bit_state(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))),
        2,
    ),
    "injected": (
        eight_bit_state(
            optax.inject_hyperparams(optax.adam)(optax.constant_schedule(1e-2))
        ),
        2,
    ),
    "labels": (
        lambda model: optax.multi_transform(
            {"matrix": ADAMW, "rest": optax.sgd(0.1, momentum=0.9)}, labels(model)
        ),
        2,
    ),
    "accumulated": (
        eight_bit_state(optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)),
        2,
    ),
    "schedule_free": (
        eight_bit_state(optax.contrib.schedule_free_adamw(1e-2, b1=0.9)),
        1,
    ),
    "around_layers": (eight_bit_state(by_layer(optax.lamb(1e-2))), 2),
    "in_layers": (by_layer(ADAMW), 2),
    "muon": (lambda model: eight_bit_state(by_muon(model)), 3),
}


def is_ours(node: Any) -> bool:
    return isinstance(node, EightBitState)


@pytest.mark.parametrize(
    "name", in_depth(OPTIMIZERS, "masked", "in_layers", "muon", "schedule_free")
)
def test_optimizer_trains_with_codes(name: str) -> None:
    """Also with microbatches and a moving average; the scales have layers."""
    optimizer, num_fields = OPTIMIZERS[name]
    trainer = make_trainer(fsdp(4), optimizer, ema_decay=0.9, num_microbatches=2)
    losses = train(trainer, 6)
    assert np.isfinite(losses).all()
    arrays = to_host(trainer.state.opt_state)
    kernel = "blocks.layer.mlp.up.kernel"
    codes = [x for p, x in arrays.items() if p.endswith(kernel) and x.dtype == np.uint8]
    scales = [x for p, x in arrays.items() if p.endswith(kernel) and "scales." in p]
    nodes = jax.tree.leaves(trainer.state.opt_state, is_leaf=is_ours)
    assert sum(len(node.scales) for node in filter(is_ours, nodes)) == num_fields
    assert len(codes) == len(scales) >= 1
    side = 8 if name == "amsgrad" else 16
    for x, scale in zip(codes, scales, strict=True):
        assert x.any()
        assert scale.shape == (2, 64 // side, 256 // side)


def test_layers_of_a_stack_have_separate_blocks() -> None:
    trainer = make_trainer(fsdp(4))
    train(trainer, 2)
    state: Any = trainer.state.opt_state
    kernels: Any = state.inner[0].mu["blocks"]["layer"]["mlp"]["up"]["kernel"]
    scales: Any = state.scales["0.mu"]["blocks"]["layer"]["mlp"]["up"]["kernel"]
    moments = decode(kernels, scales)
    for layer in range(2):
        codes, scale = encode(moments[layer], (16, 16))
        np.testing.assert_array_equal(codes, kernels[layer])
        np.testing.assert_array_equal(scale, scales[layer])


# Checkpoints


@pytest.mark.bits
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(TensorParallel(2), id="tp"),
        pytest.param(Composite(Pipeline(2), fsdp(2)), id="pipeline", marks=deep),
        pytest.param(fsdp(8), id="fsdp8", marks=deep),
    ],
)
def test_state_is_restored_under_another_layout(
    strategy: Strategy, tmp_path: Path
) -> None:
    saved = make_trainer(fsdp(4), checkpoint=Checkpoint(tmp_path), ema_decay=0.9)
    train(saved, 3)
    options: Any = {"num_microbatches": 2} if "pipe" in strategy.axis_sizes else {}
    other = make_trainer(strategy, seed=1, ema_decay=0.9, **options)
    other.restore(directory=tmp_path)
    ours, theirs = (
        to_host(t.state.opt_state) | to_host(t.state.params) for t in (other, saved)
    )
    assert ours.keys() == theirs.keys()
    for path, x in theirs.items():
        assert x.tobytes() == ours[path].tobytes(), path
    train(other, 4)  # the restored state can be trained


@pytest.mark.bits
def test_stopped_run_resumes_with_same_bits(tmp_path: Path) -> None:
    batches = [tokens(step) for step in range(6)]
    whole = make_trainer(fsdp(4))
    expected = whole.fit(batches, num_steps=6)["loss"]
    stopped = make_trainer(fsdp(4), checkpoint=Checkpoint(tmp_path))
    first = stopped.fit(batches, num_steps=3)["loss"]
    resumed = make_trainer(fsdp(4), seed=1, checkpoint=Checkpoint(tmp_path))
    rest = resumed.fit(batches, num_steps=6)["loss"]
    np.testing.assert_array_equal([*first, *rest], expected)
    after, known = to_host(resumed.state.opt_state), to_host(whole.state.opt_state)
    for path, x in known.items():
        assert x.tobytes() == after[path].tobytes(), path


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
