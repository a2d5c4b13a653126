"""Products in 8 bits: the same numbers under every layout.

Rounding to 8 bits is discontinuous. A float32 sum whose order depends on the layout
changes the seventh digit of an activation, and this sometimes changes an 8-bit number.
In float64 this practically never happens. So these tests compare layouts in float64,
where all of them must round to the same 8-bit numbers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cache
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
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
    audit,
)
from nnx_parallel.errors import CheckpointMismatchError, EightBitError, RuleError
from nnx_parallel.layers import Experts
from nnx_parallel.layers.eight_bit import (
    Grouped,
    eight_bit_matmul,
    eight_bit_ragged_dot,
    quantise_kernel,
    round_kernel,
)
from nnx_parallel.layers.recipe import describe_products, layers_in_eight_bits
from nnx_parallel.models import (
    GPT,
    GPTConfig,
    ViT,
    ViTConfig,
    classification_loss,
    next_token_loss,
)
from nnx_parallel.precision import EightBit
from tests.parity.runs import compiling, to_host

pytestmark = pytest.mark.long

ROWS, SEQ_LEN, VOCAB = 16, 16, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "seq_len": SEQ_LEN,
    "num_layers": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "activation": "swiglu",
    # These options select code that computes in float64.
    "norm": "rms",
    "zero_centered_norm": True,
    "sinks": True,
}
IN_BLOCKS: dict[str, Any] = SIZES | {"embed_dim": 64}
CONFIGS = {
    "gpt": GPTConfig(**SIZES),
    "blocks": GPTConfig(**IN_BLOCKS),
    "blocks_experts": GPTConfig(
        **IN_BLOCKS,
        experts=Experts(num_experts=4, top_k=2, mlp_dim=64),
    ),
    "experts": GPTConfig(
        **SIZES, experts=Experts(num_experts=4, top_k=2, mlp_dim=32, shared_dim=32)
    ),
}
RECIPES = {
    "int8": Precision.int8(compute=None),
    "fp8": Precision.fp8(compute=None),
    "int8_forward": Precision.int8(gradient=False, compute=None),
    "mxfp8": Precision.mxfp8(compute=None),
    "none": Precision(),
}


@pytest.fixture
def float64() -> Iterator[None]:
    with compiling(optimized=False), jax.enable_x64(True):
        yield


def tokens(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, VOCAB, (ROWS, SEQ_LEN + 1), dtype=np.int32)}


def make_trainer(
    precision: Precision,
    strategy: Strategy,
    model: str = "gpt",
    *,
    num_microbatches: int = 1,
    **options: Any,
) -> Trainer:
    sizes = strategy.axis_sizes.values()
    return Trainer(
        lambda rngs: GPT(CONFIGS[model], rngs=rngs),
        options.pop(
            "optimizer",
            optax.chain(optax.trace(decay=0.0), optax.sgd(0.1, momentum=0.9)),
        ),
        next_token_loss,
        strategy=strategy,
        devices=jax.devices()[: math.prod(size or 1 for size in sizes)],
        precision=precision,
        num_microbatches=num_microbatches,
        loggers=(),
        **options,
    )


def train(trainer: Trainer, num_steps: int = 6) -> tuple[np.ndarray, dict]:
    """The losses of some steps, and the gradients of the first step."""
    losses, gradients = [], {}
    state = trainer.state
    for step in range(num_steps):
        batch = trainer.shard_batch(tokens(step % 2))
        state, metrics = trainer.train_step(state, batch)
        losses.append(float(metrics["loss"]))
        if step == 0:
            recorded: Any = state.opt_state
            gradients = to_host(recorded[0].trace)
    return np.array(losses), gradients


@cache
def on_one_device(recipe: str, model: str, num_microbatches: int) -> tuple:
    precision = dataclasses.replace(RECIPES[recipe], params="float64")
    options: Any = {"num_microbatches": num_microbatches}
    return train(make_trainer(precision, DataParallel(1), model, **options))


def fsdp(size: int) -> FSDP:
    return FSDP(size, min_size=0)


deep = pytest.mark.deep
LAYOUTS = {
    "fsdp": fsdp(4),
    "fsdp8": fsdp(8),
    "fsdp_tp": Composite(fsdp(2), TensorParallel(2)),
    "fsdp_sequence": Composite(fsdp(2), TensorParallel(2, sequence=True)),
    "context": Composite(fsdp(2), ContextParallel(2)),
    "pipeline": Composite(fsdp(2), Pipeline(2)),
    "experts": Composite(fsdp(2), ExpertParallel(2)),
    "experts_tp": Composite(ExpertParallel(2), TensorParallel(2)),
}


@pytest.mark.parametrize(
    ("recipe", "model", "layout"),
    [
        ("int8", "gpt", "fsdp"),
        ("int8", "gpt", "fsdp_sequence"),
        ("int8", "gpt", "pipeline"),
        ("int8", "experts", "experts_tp"),
        pytest.param("fp8", "gpt", "fsdp_sequence", marks=deep),
        pytest.param("int8_forward", "gpt", "fsdp_sequence", marks=deep),
        pytest.param("int8", "gpt", "fsdp_tp", marks=deep),
        pytest.param("int8", "gpt", "context", marks=deep),
        pytest.param("int8", "experts", "experts", marks=deep),
        pytest.param("fp8", "experts", "experts_tp", marks=deep),
        pytest.param("mxfp8", "blocks", "fsdp8", marks=deep),
        pytest.param("mxfp8", "blocks", "fsdp_sequence", marks=deep),
        pytest.param("mxfp8", "blocks_experts", "experts_tp", marks=deep),
    ],
)
@pytest.mark.usefixtures("float64")
def test_layouts_round_to_same_numbers(recipe: str, model: str, layout: str) -> None:
    count = 4 if layout == "pipeline" else 1
    precision = dataclasses.replace(RECIPES[recipe], params="float64")
    strategy = LAYOUTS[layout]
    trainer = make_trainer(precision, strategy, model, num_microbatches=count)
    losses, gradients = train(trainer)
    expected, expected_gradients = on_one_device(recipe, model, count)
    np.testing.assert_allclose(losses, expected, rtol=1e-7)
    largest = max(np.abs(x).max() for x in expected_gradients.values())
    for path, x in expected_gradients.items():
        assert np.abs(gradients[path] - x).max() <= 1e-7 * largest, path


def vit_gradients(strategy: Strategy, count: int) -> dict:
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_classes=16,
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        mlp_dim=64,
    )
    rng = np.random.default_rng(0)
    batch = {
        "inputs": rng.normal(size=(8, 8, 8, 3)).astype(np.float32),
        "labels": rng.integers(0, 16, 8, dtype=np.int32),
    }
    trainer = Trainer(
        lambda rngs: ViT(config, rngs=rngs),
        optax.chain(optax.trace(decay=0.0), optax.sgd(0.1)),
        classification_loss,
        strategy=strategy,
        devices=jax.devices()[:count],
        precision=RECIPES["int8"],
        loggers=(),
    )
    state, _ = trainer.train_step(trainer.state, trainer.shard_batch(batch))
    recorded: Any = state.opt_state
    return to_host(recorded[0].trace)


def test_vision_transformer_rounds_to_same_numbers() -> None:
    with compiling(optimized=False):
        expected = vit_gradients(DataParallel(1), 1)
        found = vit_gradients(TensorParallel(2), 2)
    largest = max(np.abs(x).max() for x in expected.values())
    errors = {p: np.abs(found[p] - x).max() / largest for p, x in expected.items()}
    assert max(errors.values()) < 1e-5, errors


def rounded(x: np.ndarray, axes: tuple[int, ...], dtype: str) -> np.ndarray:
    """Rounds an array to 8 bits with one scale for each group, and converts it back."""
    kind = jnp.dtype(dtype)
    most = float((jnp.iinfo if dtype == "int8" else jnp.finfo)(kind).max)
    largest = np.abs(x).max(axis=axes, keepdims=True)
    scaled = np.clip(x * (most / largest), -most, most)
    scaled = np.round(scaled) if dtype == "int8" else scaled.astype(kind)
    return scaled.astype(np.float64) * (largest / most)


@pytest.mark.parametrize("recipe", ["int8", "fp8", "int8_forward"])
def test_products_match_written_recipe(recipe: str) -> None:
    products = RECIPES[recipe].products
    assert products is not None
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6, 16)).astype(np.float32)
    w = rng.normal(size=(16, 3, 8)).astype(np.float32)
    dy = rng.normal(size=(4, 6, 3, 8)).astype(np.float32)
    y, pull = jax.vjp(lambda x, w: eight_bit_matmul(x, w, 1, products), x, w)
    dx, dw = pull(jnp.asarray(dy))

    kernel = rounded(w, (0,), products.forward)
    expected = np.tensordot(rounded(x, (2,), products.forward), kernel, 1)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    # The scales of the kernel's channels are folded into the gradient.
    most = 127 if recipe.startswith("int8") else 448
    scale = np.abs(w).max(axis=0) / most
    grads = dy * scale
    if products.gradient is not None:
        grads = rounded(grads, (2, 3), products.gradient)
    expected = np.einsum("bsno,eno->bse", grads, kernel / scale)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5)
    expected = np.einsum("bse,bsno->eno", x, dy)
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["int8", "fp8", "int8_forward", "mxfp8"])
def test_grouped_products_match_products_of_each_expert(recipe: str) -> None:
    products = RECIPES[recipe].products
    assert products is not None
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(12, 32)).astype(np.float32)
    kernel = rng.normal(size=(3, 32, 64)).astype(np.float32)
    sizes = np.array([5, 0, 4], np.int32)  # the last rows belong to no expert

    def grouped(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        values = round_kernel(kernel, (1,), (2,), products)
        return eight_bit_ragged_dot(Grouped(products), rows, kernel, values, sizes)

    def one_by_one(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        first = eight_bit_matmul(rows[:5], kernel[0], 1, products)
        last = eight_bit_matmul(rows[5:9], kernel[2], 1, products)
        return jnp.concatenate([first, last, jnp.zeros((3, 64))])

    dy = rng.normal(size=(12, 64)).astype(np.float32)
    found, expected = (
        jax.jit(lambda *x, f=f: (f(*x), *jax.vjp(f, *x)[1](dy)))(rows, kernel)
        for f in (grouped, one_by_one)
    )
    for each, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-5)


def test_group_with_nan_or_zeros() -> None:
    products = RECIPES["int8"].products
    assert products is not None
    x = jnp.array([[0.0, 0.0], [jnp.nan, 1.0], [jnp.inf, 1.0], [2.0, 1.0]])
    y = eight_bit_matmul(x, jnp.eye(2), 1, products)
    assert y[0].tolist() == [0, 0]
    assert not jnp.isfinite(y[1:3]).any()
    # The scale is 2 / 127, and 1 is rounded to 64 of it.
    np.testing.assert_allclose(y[3], [2, 64 * 2 / 127], rtol=1e-6)


def gathered_bytes(precision: Precision, model: str = "gpt") -> dict[int, int]:
    """Number of all-gathers of a compiled step under FSDP, by their bytes."""
    trainer = make_trainer(precision, fsdp(4), model, optimizer=optax.sgd(0.1))
    batch = trainer.shard_batch(tokens(0))
    step: Any = trainer.train_step
    compiled = step.lower(trainer.state, batch).compile()
    found: dict[int, int] = {}
    for each in audit(compiled).collectives:
        if each.kind == "all-gather":
            found[each.bytes_each] = found.get(each.bytes_each, 0) + each.count
    return found


def test_gathers_send_8_bits() -> None:
    # On CPUs XLA computes and sends bfloat16 as float32, so the plain step is float32.
    plain, found = gathered_bytes(RECIPES["none"]), gathered_bytes(RECIPES["int8"])
    layers = CONFIGS["gpt"].num_layers
    # Query, key, value and out have 32 * 32 weights; up, gate and down 32 * mlp_dim.
    mlp = 32 * CONFIGS["gpt"].sizes["mlp"]
    # Each kernel is gathered in the forward and in the backward pass.
    assert found[32 * 32] == 2 * 4 * layers
    assert found[mlp] == 2 * 3 * layers
    assert plain[4 * mlp] == 2 * 3 * layers
    assert 4 * mlp not in found


def test_gathers_of_experts_send_8_bits() -> None:
    found = gathered_bytes(RECIPES["int8"], "experts")
    layers, experts = CONFIGS["experts"].num_layers, 4
    assert found[experts * 32 * 32] == 2 * 3 * layers  # up, gate and down
    assert 4 * experts * 32 * 32 not in found


def test_8_bits_change_losses_a_little() -> None:
    losses = {}
    with compiling(optimized=False):
        for recipe in ("none", "int8", "fp8"):
            trainer = make_trainer(RECIPES[recipe], DataParallel(1))
            losses[recipe], _ = train(trainer, 2)
    for recipe in ("int8", "fp8"):
        change = np.abs(losses[recipe] / losses["none"] - 1)
        assert (change > 1e-7).all(), change
        assert (change < 1e-2).all(), change


class Stock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)


def stock_loss(model: Any, batch: Any) -> jax.Array:
    return (model.head(model.attention(batch["x"])) ** 2).mean()


def stock_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(8, 4, 16)).astype(np.float32)}


def make_stock_trainer(precision: Precision, strategy: Strategy, count: int) -> Trainer:
    return Trainer(
        lambda rngs: Stock(rngs),
        optax.sgd(0.1),
        stock_loss,
        strategy=strategy,
        devices=jax.devices()[:count],
        precision=precision,
        loggers=(),
    )


def train_stock(layers: str | None, strategy: Strategy, count: int) -> tuple:
    precision = Precision.int8(layers, compute=None)
    trainer = make_stock_trainer(precision, strategy, count)
    shards = trainer.shard_batch(stock_batch())
    step: Any = trainer.train_step
    text = step.lower(trainer.state, shards).as_text()
    _, metrics = trainer.train_step(trainer.state, shards)
    return float(metrics["loss"]), text.count("xi8>) -> tensor")


def test_stock_layers_run_in_8_bits() -> None:
    loss, products = train_stock("attention", DataParallel(1), 1)
    assert products == 4 + 1  # only the input of `out` has a gradient
    sharded, _ = train_stock("attention", fsdp(4), 4)
    assert sharded == pytest.approx(loss, rel=1e-5)


def test_resumed_run_is_bit_for_bit_the_same(tmp_path: Any) -> None:
    def run(num_steps: int, directory: Any) -> Any:
        trainer = make_trainer(
            Precision.int8(), fsdp(2), optimizer=optax.adamw(1e-3), checkpoint=directory
        )
        return trainer.fit([tokens(i) for i in range(4)], num_steps)["loss"]

    whole = run(4, tmp_path / "whole")
    run(2, tmp_path / "parts")
    np.testing.assert_array_equal(run(4, tmp_path / "parts")[-2:], whole[-2:])
    other = make_trainer(
        Precision(), fsdp(2), optimizer=optax.adamw(1e-3), checkpoint=tmp_path / "parts"
    )
    with pytest.raises(
        CheckpointMismatchError,
        match="computes without 8-bit products",
    ):
        other.fit([tokens(0)], 6)


def test_evaluation_runs_in_8_bits_and_model_of_user_does_not() -> None:
    eight, plain = (
        make_stock_trainer(precision, DataParallel(1), 1)
        for precision in (Precision.int8("", compute=None), Precision())
    )
    batch = stock_batch()
    expected = plain.evaluate([batch])["loss"]
    assert stock_loss(eight.model, batch) == pytest.approx(expected, rel=1e-6)
    found = eight.evaluate([batch])["loss"]
    assert 1e-4 < abs(found / expected - 1) < 1e-1
    assert found == pytest.approx(train_stock("", DataParallel(1), 1)[0], rel=1e-6)


def test_describe_shows_dtypes_of_products() -> None:
    notes = make_trainer(Precision.fp8("mlp"), DataParallel(1)).describe().notes
    assert notes == (
        "8 bits: forward products float8_e4m3fn * float8_e4m3fn, gradients of inputs "
        "float8_e4m3fn * float8_e4m3fn, gradients of kernels in the compute dtype: "
        "`blocks.layer.mlp.down`, `blocks.layer.mlp.gate`, `blocks.layer.mlp.up`",
    )


def test_description_names_tpus_that_compute_in_wider_dtype() -> None:
    model, recipe = GPT(CONFIGS["gpt"], rngs=nnx.Rngs(0)), Precision.fp8().products
    assert recipe is not None
    slow = "computes float8_e4m3fn products in a wider dtype, so they are not faster"
    assert slow in describe_products(model, recipe, "TPU v6 lite")
    assert slow not in describe_products(model, recipe, "TPU7x")
    assert slow not in describe_products(model, recipe, "NVIDIA H100")


def test_layers_that_match_nothing_raise() -> None:
    with pytest.raises(EightBitError, match=re.escape("layers='mlpp' selects no la")):
        make_trainer(Precision.int8("mlpp"), DataParallel(1))
    with pytest.raises(EightBitError, match="None selects all layers inside of a St"):
        train_stock(None, DataParallel(1), 1)
    with pytest.raises(RuleError, match="which Python's re refuses"):
        make_trainer(Precision.fp8("("), DataParallel(1))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dot_general": jnp.dot}, "it has a dot_general or dot_general_cls already"),
        ({"dot_general_cls": lambda: jnp.dot}, "it has a dot_general or dot_general"),
        ({"batch_axis": {0: 2}}, "it uses batch_axis"),
    ],
)
def test_layers_with_other_products_raise(options: dict, reason: str) -> None:
    layer = nnx.LinearGeneral(4, 4, rngs=nnx.Rngs(0), **options)
    recipe = EightBit(forward="int8", gradient=None, layers="")
    with pytest.raises(EightBitError, match=f"`` cannot run in 8 bits: {reason}"):
        layers_in_eight_bits(layer, recipe)


@pytest.mark.parametrize("layers", ["head", ""])
def test_selected_layer_that_loss_does_not_call_raises(layers: str) -> None:
    """The loss of a GPT reads the kernel of the head, and never calls the head."""
    untied = dataclasses.replace(CONFIGS["gpt"], tied=False)
    trainer = Trainer(
        lambda rngs: GPT(untied, rngs=rngs),
        optax.sgd(0.1),
        next_token_loss,
        precision=Precision.int8(layers),
        devices=jax.devices()[:1],
        loggers=(),
    )
    batch = trainer.shard_batch(tokens(0))
    message = f"layers='{layers}' selects ['head'], but the loss does not call"
    with pytest.raises(EightBitError, match=re.escape(message)):
        trainer.train_step(trainer.state, batch)


def test_integers_are_promoted_to_dtype_of_kernel() -> None:
    kernel = jnp.array([[1.0, 0.3], [0.5, -0.2]])
    x, recipe = jnp.array([[1, 2], [3, 0]]), Precision.int8().products
    assert recipe is not None
    found = eight_bit_matmul(x, kernel, 1, recipe)
    np.testing.assert_allclose(found, x @ kernel, atol=0.03)


@pytest.mark.parametrize(
    "precision", [Precision.int8(gradient=False), Precision.fp8(gradient=None)]
)
def test_small_gradients_in_float16_keep_their_digits(precision: Precision) -> None:
    rng, recipe = np.random.default_rng(0), precision.products
    assert recipe is not None
    x, w, dy = (
        jnp.asarray(rng.normal(size=shape) * size, jnp.float16)
        for shape, size in (((8, 32), 1.0), ((32, 16), 0.02), ((8, 16), 1e-3))
    )
    _, pull = jax.vjp(lambda x: eight_bit_matmul(x, w, 1, recipe), x)
    values, scale = quantise_kernel(w, (0,), recipe.forward)
    kernel = values.astype(jnp.float32) * scale
    expected = dy.astype(jnp.float32) @ kernel.T
    (found,) = pull(dy)
    np.testing.assert_allclose(found, expected, rtol=0.01, atol=1e-7)


def test_invalid_values_raise() -> None:
    with pytest.raises(ValueError, match="gradient='int8' is invalid"):
        Precision.fp8(gradient="int8")
    wrong: Any = "bfloat16"
    with pytest.raises(ValueError, match="it must be True or False"):
        Precision.int8(gradient=wrong)
    with pytest.raises(ValueError, match="must be an EightBit or None"):
        Precision(products=wrong)
    assert Precision.fp8(gradient=jnp.float8_e5m2) == Precision.fp8(
        gradient="float8_e5m2"
    )


def test_overlapping_products_raise() -> None:
    strategy = TensorParallel(2, overlap="ring")
    trainer = make_trainer(Precision.int8(), strategy)
    with pytest.raises(EightBitError, match="Such products do not run in 8 bits"):
        trainer.train_step(trainer.state, trainer.shard_batch(tokens(0)))
