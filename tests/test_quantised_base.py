"""LoRA on frozen kernels in 4 or 8 bits: numbers, training, files and checkpoints."""

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import ModelError
from nnx_parallel.layers import Dense, Stack, lora, merge_lora
from nnx_parallel.layers.quantised import (
    NF4,
    Base,
    block_of,
    dequantise,
    quantise_blocks,
)
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding import TRANSFORMER_NAMES
from nnx_parallel.weights import (
    Pretrained,
    load_adapters,
    save_adapters,
    save_pretrained,
    save_safetensors,
)
from tests.folders import GOLDENS, check_equal, content, make_trainer
from tests.parity.checks import assert_same_bits, assert_same_numbers
from tests.parity.models import CASES, Arrays, Case
from tests.parity.runs import Run, compiling, measure, to_host
from tests.test_lora import trained
from tests.test_lora_parity import easy_batch

pytestmark = pytest.mark.long

BASES: tuple[Base, ...] = get_args(Base)
EACH_BASE = pytest.mark.parametrize("base", BASES)
LLAMA = GOLDENS / "llama"
TARGETS = "attention|mlp"
TOKENS = np.concatenate([np.load(LLAMA / "logits.npz")["tokens"]] * 4)


def values_of(x: Any, base: Base, dim: int, size: int) -> np.ndarray:
    """Rounds to the nearest levels; written in NumPy from the paper's equations."""
    turned = np.moveaxis(np.asarray(x), dim, -1)
    blocks = turned.reshape(*turned.shape[:-1], -1, size)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    share = blocks / np.where(largest == 0, np.float32(1), largest)
    table = np.array(NF4, np.float32)
    if base == "int8":
        table = np.arange(-127, 128, dtype=np.float32) * np.float32(1 / 127)
    level = table[np.abs(share[..., None] - table).argmin(axis=-1)]
    return np.moveaxis((level * largest).reshape(turned.shape), -1, dim)


def test_nf4_has_published_levels() -> None:
    """The levels of appendix E of QLoRA, and the formula of section 3."""
    published = """
        -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453
        -0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0
        0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
        0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""
    assert [*NF4] == [*map(float, published.split())]
    end, quantile = 0.9677083, NormalDist().inv_cdf
    upper = [quantile(p) for p in np.linspace(end, 0.5, 9)[:-1]]
    lower = [-quantile(p) for p in np.linspace(end, 0.5, 8)[:-1]]
    levels = np.array(sorted([*upper, 0.0, *lower])) / max(upper)
    np.testing.assert_allclose(NF4, levels, atol=1e-6)


@EACH_BASE
@pytest.mark.parametrize(
    ("shape", "dim", "size"), [((3, 128, 6), 1, 64), ((4, 48), 1, 16)]
)
def test_values_match_numpy_and_round_to_themselves(
    base: Base, shape: tuple[int, ...], dim: int, size: int
) -> None:
    x = jax.random.normal(jax.random.key(0), shape).at[0].set(0.0)
    codes, bits = quantise_blocks(x, base, dim, size)
    assert codes.nbytes * (2 if base == "nf4" else 1) == x.size
    assert bits.size * size == x.size
    found = jax.jit(dequantise)(codes, bits)
    np.testing.assert_array_equal(found, values_of(x, base, dim, size))
    np.testing.assert_array_equal(found, dequantise(codes, bits))
    half = max(np.diff(NF4)) / 2 if base == "nf4" else 1 / 254
    scale = np.repeat(np.asarray(bits).view(np.float32), size, axis=dim)
    assert (np.abs(found - x) <= half * scale * (1 + 1e-5)).all()
    again = quantise_blocks(found, base, dim, size)
    np.testing.assert_array_equal(again[0], codes)
    np.testing.assert_array_equal(again[1], bits)


@EACH_BASE
def test_values_that_are_not_finite_stay_so(base: Base) -> None:
    for bad in (np.inf, np.nan):
        x = jnp.ones((16, 2)).at[3, 0].set(bad)
        values = dequantise(*quantise_blocks(x, base, 0, 16))
        assert not np.isfinite(values[3, 0])
        np.testing.assert_array_equal(values[:, 1], 1.0)


class OneLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


@EACH_BASE
def test_run_counts_parameters_and_not_codes(base: Base) -> None:
    trainer: Any = Trainer(
        lora(OneLayer, targets="layer", rank=4, base=base),
        optax.sgd(0.1),
        lambda model, batch: (model(batch) ** 2).mean(),
        wrt=nnx.LoRAParam,
        loggers=(),
    )
    total, trained = 64 * 64 + 64 + 2 * 4 * 64, 2 * 4 * 64
    expected = f"{total:,} parameters, {trained} of them trained"
    assert expected in trainer._repr_html_()


LAYERS: dict[str, tuple[Callable[[nnx.Rngs], Any], tuple[int, ...], int, int]] = {
    "dense": (
        lambda rngs: Dense(
            {"heads": 2, "head_dim": 32}, {"embed": 24}, rngs=rngs, use_bias=True
        ),
        *((2, 5, 2, 32), 0, 2),
    ),
    "linear": (lambda rngs: nnx.Linear(96, 32, rngs=rngs), (2, 96), 0, 1),
    "odd input": (lambda rngs: nnx.Linear(9, 128, rngs=rngs), (2, 9), 0, 1),
    "general": (
        lambda rngs: nnx.LinearGeneral((3, 16), (2, 4), axis=(1, -1), rngs=rngs),
        *((2, 3, 5, 16), 0, 2),
    ),
    "stack": (
        lambda rngs: Stack(lambda rngs: nnx.Linear(64, 64, rngs=rngs), 3, rngs=rngs),
        *((2, 64), 1, 1),
    ),
}


@EACH_BASE
@pytest.mark.parametrize("name", LAYERS)
def test_layer_computes_with_values_of_codes(base: Base, name: str) -> None:
    build, shape, lead, num_in = LAYERS[name]
    layer, x = build(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), shape)
    adapted = lora(layer, targets="", rank=2, base=base)
    owner = layer.layer if name == "stack" else layer
    kernel = owner.kernel.get_value()
    block = block_of(kernel.shape, lead, num_in)
    assert block is not None
    owner.kernel.set_value(jnp.asarray(values_of(kernel, base, *block)))
    y, vjp = jax.vjp(layer, x)
    np.testing.assert_allclose(adapted(x), y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        jax.vjp(adapted, x)[1](y)[0], vjp(y)[0], rtol=1e-5, atol=1e-5
    )
    model = trained(adapted)
    merged = merge_lora(model)
    np.testing.assert_allclose(merged(x), model(x), rtol=1e-5, atol=1e-5)
    assert jax.tree.structure(nnx.state(merged)) == jax.tree.structure(nnx.state(layer))


def test_backward_pass_keeps_codes_instead_of_kernel() -> None:
    layer, x = nnx.Linear(128, 96, rngs=nnx.Rngs(0)), jnp.ones((2, 128))

    def kept(base: Base | None) -> set:
        _, vjp = jax.vjp(lora(layer, targets="", rank=2, base=base), x)
        return {(r.shape, str(r.dtype)) for r in jax.tree.leaves(vjp)}

    assert ((128, 96), "float32") in kept(None)
    for base in BASES:
        assert ((128, 96), "float32") not in kept(base)


STRATEGIES: dict[str, Strategy] = {
    "alone": DataParallel(1),
    "fsdp": FSDP(8, min_size=0),
    "tensor": TensorParallel(2),
    "both": Composite(TensorParallel(2), FSDP(4, min_size=0)),
    "pipeline": Composite(Pipeline(2), TensorParallel(2), FSDP(2, min_size=0)),
}


def case_of(base: Base) -> Case:
    build = lora(
        CASES["llama"].build, targets="attention|mlp|head", rank=16, alpha=32, base=base
    )
    loss = CASES["llama"].loss
    return Case(build=build, loss=loss, make_batch=easy_batch, wrt=nnx.LoRAParam)


@cache
def run(base: Base, strategy: str) -> Run:
    placed = STRATEGIES[strategy]
    devices = jax.devices()[: math.prod(n or 1 for n in placed.axis_sizes.values())]
    with compiling(optimized=False):
        return measure(case_of(base), placed, devices, 2)


QUICK = {("nf4", "pipeline")}


@pytest.mark.bits
@pytest.mark.parametrize(
    ("base", "strategy"),
    [
        pytest.param(b, s, marks=() if (b, s) in QUICK else pytest.mark.deep)
        for b in BASES
        for s in STRATEGIES
        if s != "alone"
    ],
)
def test_training_matches_one_device(base: Base, strategy: str) -> None:
    expected, found = run(base, "alone"), run(base, strategy)
    # The start, with codes and scales, is equal bit for bit.
    assert_same_numbers(found, expected)
    assert all("lora_" in path for path in found.params)
    codes = {path: x for path, x in found.initial.items() if "kernel_" in path}
    assert {x.dtype.kind for x in codes.values()} <= {"u", "i"}
    end = to_host({"variables": found.end.variables})
    assert_same_bits({path: end[path] for path in codes}, codes)


def arrays_of(model: nnx.Module) -> Arrays:
    return to_host(nnx.to_pure_dict(nnx.state(model)))


@EACH_BASE
def test_folder_is_quantised_in_shards(base: Base) -> None:
    whole: Any = GPT.from_pretrained(LLAMA)(nnx.Rngs(0))
    expected = arrays_of(lora(whole, targets=TARGETS, base=base))
    source = lora(GPT.from_pretrained(LLAMA), targets=TARGETS, base=base)
    found = arrays_of(make_trainer(source, "tp", wrt=nnx.LoRAParam).model)
    fixed = {path: x for path, x in found.items() if "lora" not in path}
    assert_same_bits(fixed, {path: expected[path] for path in fixed})
    kernels = [
        x for p, x in arrays_of(whole).items() if re.search(TARGETS + ".*kernel", p)
    ]
    stored = sum(x.nbytes for path, x in fixed.items() if "kernel_" in path)
    # A block of this small model has 32 or 16 numbers, which share a scale of 32 bits.
    bits = 8 * stored / sum(x.size for x in kernels if x.ndim > 2)
    code = 4 if base == "nf4" else 8
    assert code + 32 / 32 <= bits <= code + 32 / 16


def test_merged_and_separate_adapters_are_written(tmp_path: Path) -> None:
    base = GPT.from_pretrained(LLAMA)
    source: Any = lora(base, targets=TARGETS, rank=2, base="nf4")
    model: Any = trained(source(nnx.Rngs(0)))
    mine, merged = arrays_of(model), merge_lora(model)
    save_pretrained(tmp_path / "merged", merged, source=LLAMA)
    assert content(tmp_path / "merged").keys() == content(LLAMA).keys()
    again: Any = GPT.from_pretrained(tmp_path / "merged")(nnx.Rngs(0))
    assert_same_bits(arrays_of(again), arrays_of(merged))
    logits = nnx.jit(model)(TOKENS[:1])
    np.testing.assert_allclose(nnx.jit(again)(TOKENS[:1]), logits, atol=1e-5)
    # Only the adapters, for PEFT. The base is read and quantised again.
    save_adapters(tmp_path / "adapters", model, base=LLAMA.name)
    read = load_adapters(base, tmp_path / "adapters", base="nf4")
    other = make_trainer(read, "tp", wrt=nnx.LoRAParam).model
    assert_same_bits(arrays_of(other), mine)
    save_adapters(tmp_path / "again", other, base=LLAMA.name)
    check_equal(content(tmp_path / "again"), content(tmp_path / "adapters"))
    # One file with codes, scales and factors.
    save_safetensors(tmp_path / "all.safetensors", model)
    whole = Pretrained(source, tmp_path / "all.safetensors")(nnx.Rngs(1))
    assert_same_bits(arrays_of(whole), mine)


def small_trainer(strategy: Strategy, base: Base = "nf4", **options: Any) -> Trainer:
    config = GPTConfig.tiny_llama(num_layers=2, embed_dim=32, vocab_size=64)
    return Trainer(
        lora(lambda rngs: GPT(config, rngs=rngs), targets=TARGETS, base=base),
        optax.sgd(0.1),
        next_token_loss,
        strategy=strategy,
        wrt=nnx.LoRAParam,
        loggers=(),
        **options,
    )


def test_checkpoint_restores_under_other_strategy(tmp_path: Path) -> None:
    first = small_trainer(
        STRATEGIES["pipeline"], checkpoint=tmp_path, num_microbatches=2
    )
    first.save()
    second = small_trainer(STRATEGIES["both"], seed=1)
    mine, start = arrays_of(first.model), arrays_of(second.model)
    path = "blocks.layer.mlp.up.kernel_codes"
    assert not np.array_equal(mine[path], start[path])
    second.restore(directory=tmp_path)
    assert_same_bits(arrays_of(second.model), mine)


@EACH_BASE
def test_fsdp_gathers_codes(base: Base) -> None:
    trainer = small_trainer(FSDP(min_size=0), base)
    step: Any = trainer.train_step
    program = step.lower(trainer.state, trainer.shard_batch(TOKENS)).compile().as_text()
    gathered = re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather\(", program)
    # Seven kernels and their scales, in the forward pass and in the backward pass.
    code = "u8" if base == "nf4" else "s8"
    assert (gathered.count(code), gathered.count("s32")) == (14, 14)


def test_stock_names_reach_codes() -> None:
    class Stock(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up_proj = nnx.Linear(32, 64, rngs=rngs)
            self.down_proj = nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down_proj(jax.nn.gelu(self.up_proj(x)))

    seen = []

    def loss(model: Any, batch: jax.Array) -> jax.Array:
        seen.append(model.up_proj.kernel[...].dtype)
        return (model(batch) ** 2).mean()

    trainer = Trainer(
        lora(Stock, targets="proj", rank=2, base="nf4"),
        optax.sgd(0.1),
        loss,
        strategy=Composite(TensorParallel(2), FSDP(min_size=0)),
        names=TRANSFORMER_NAMES,
        precision=Precision.mixed_bfloat16(),
        wrt=nnx.LoRAParam,
        loggers=(),
    )
    trainer.fit([np.ones((8, 32), np.float32)], num_steps=1)
    assert seen[-1] == jnp.bfloat16
    rows = {row.info.path: row for row in trainer.describe().rows}
    down = [rows[f"down_proj.kernel_{part}"] for part in ("codes", "scale")]
    # An axis splits the codes along the dim of the blocks. Scales have one block there.
    assert [row.placement.used for row in down] == [P("tensor"), P()]
    assert [(row.info.shape, str(row.info.dtype)) for row in down] == [
        ((32, 32), "uint8"),
        ((1, 32), "int32"),
    ]


class TestErrors:
    def test_invalid_base_raises(self) -> None:
        text = "lora(base='fp4'): it must be 'nf4', 'int8' or None."
        with pytest.raises(ValueError, match=re.escape(text)):
            lora(nnx.Linear, targets="", base="fp4")  # pyright: ignore

    @pytest.mark.parametrize(
        ("shape", "dtype"), [((24, 40), "float32"), ((32, 32), "int8")]
    )
    def test_unfit_kernel_raises(self, shape: tuple[int, int], dtype: Any) -> None:
        layer = nnx.Linear(*shape, rngs=nnx.Rngs(0))
        layer.kernel.set_value(layer.kernel.get_value().astype(dtype))
        text = f"`` has a kernel of shape {shape} and dtype {dtype}, which lora(base=)"
        with pytest.raises(ModelError, match=re.escape(text)):
            lora(layer, targets="", base="nf4")

    def test_training_codes_raises(self) -> None:
        with pytest.raises(ModelError, match=r"kernel_codes` is trained and has dtype"):
            Trainer(
                lora(lambda rngs: nnx.Linear(16, 4, rngs=rngs), targets="", base="nf4"),
                optax.sgd(0.1),
                next_token_loss,
                loggers=(),
            ).fit([np.ones((8, 16), np.float32)], num_steps=1)
