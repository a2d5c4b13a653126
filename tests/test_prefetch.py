"""FSDP gathers a stack's next layer while the present layer runs.

The numbers match one device, and at most two layers are gathered at a time. In each
loop, the gather of a layer and the products of another do not wait for each other.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.layers import Dense, Remat, Stack
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.programs import derived, inline, needed, walk
from nnx_parallel.sharding import using
from nnx_parallel.sharding.model import place_model
from nnx_parallel.training.step import StepOptions, make_train_step
from tests.parity.checks import assert_gradients_close, assert_same_numbers
from tests.parity.models import GPT_SIZES, WIDTH, gpt
from tests.parity.runs import measure, to_host
from tests.parity.strategies import ONE_DEVICE
from tests.steps import compile_gpt, plan_step

REMATS: tuple[Remat, ...] = ("none", "dots", "full")
LAYERS = 3


def fsdp(mode: Literal["first"] | None, size: int = 4, min_size: int = 0) -> FSDP:
    return FSDP(size, min_size=min_size, prefetch=mode)


class Block(nnx.Module):
    """A block with dropout, statistics, a frozen parameter, and a stored variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = Dense({"embed": 8}, {"mlp": 16}, rngs=rngs, use_bias=True)
        self.down = Dense({"mlp": 16}, {"embed": 8}, rngs=rngs)
        self.frozen = nnx.Param(jax.random.normal(rngs.params(), (8, 8)), frozen=True)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.power = nnx.BatchStat(jnp.zeros(()))

    def __call__(
        self, x: jax.Array, shift: jax.Array, row: jax.Array, scale: float
    ) -> jax.Array:
        x = x + self.norm(x) @ self.frozen[...] + shift[None]
        self.power[...] = jnp.mean(x**2)
        picked = jax.nn.one_hot(row, 8)[None]
        return x + scale * self.dropout(self.down(jax.nn.gelu(self.up(x)))) + picked


class Model(nnx.Module):
    def __init__(self, remat: Remat, rngs: nnx.Rngs) -> None:
        self.shift = nnx.Param(jnp.full((8,), 0.1))
        self.blocks = Stack(Block, LAYERS, remat=remat, rngs=rngs)


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    """A loss that depends on parameters through the output and through a variable."""
    y = model.blocks(batch["x"], model.shift[...], jnp.int32(3), 0.5)
    layer: Any = model.blocks.layer
    return jnp.mean((y - batch["y"]) ** 2) + 0.1 * layer.power[...].sum()


def is_trained(_: Any, variable: Any) -> bool:
    is_frozen = getattr(variable, "frozen", False)
    return isinstance(variable, nnx.Param) and not is_frozen


def one_step(strategy: Strategy, remat: Remat, microbatches: int) -> tuple:
    """Returns a step's loss and gradients, and the variables that are not trained."""
    sizes = strategy.axis_sizes.values()
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(16, 8)).astype(np.float32) for name in "xy"}
    trainer = Trainer(
        lambda rngs: Model(remat, rngs),
        optax.trace(decay=0.0),  # the state is the gradient
        loss,
        strategy=strategy,
        num_microbatches=microbatches,
        wrt=is_trained,
        devices=jax.devices()[: math.prod(n or 1 for n in sizes)],
        loggers=(),
    )
    state, metrics = trainer.train_step(trainer.state, trainer.shard_batch(batch))
    assert isinstance(state.opt_state, optax.TraceState)
    gradients = to_host(state.opt_state.trace)
    return float(metrics["loss"]), gradients, to_host(state.variables)


@pytest.mark.parametrize(
    ("strategy", "remat", "microbatches"),
    [
        (fsdp("first"), "none", 1),
        (fsdp("first"), "full", 1),
        pytest.param(fsdp("first"), "none", 2, marks=pytest.mark.deep),
        pytest.param(
            Composite(DataParallel(2), fsdp("first", 2), TensorParallel(2)),
            "dots",
            2,
            marks=pytest.mark.deep,
        ),
    ],
    ids=["kept", "full", "microbatches", "composite"],
)
def test_training_step_matches_one_device(strategy, remat, microbatches):
    """Covers gradients through a variable, layer arguments, frozen parameters."""
    expected = one_step(DataParallel(1), remat, microbatches)
    found = one_step(strategy, remat, microbatches)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert_gradients_close(found[1], expected[1])
    assert found[2].keys() == expected[2].keys()
    for path, value in expected[2].items():
        np.testing.assert_allclose(found[2][path], value, rtol=1e-5, atol=1e-6)


COMPOSITES: dict[str, Strategy] = {
    "tp": Composite(fsdp("first"), TensorParallel(2)),
    "tp_ring": Composite(fsdp("first"), TensorParallel(2, overlap="ring")),
    "dp": Composite(DataParallel(2), fsdp("first")),
}
SLOW = [
    *(("first", fsdp("first", 8), remat, 1) for remat in REMATS),
    *((name, s, "none", n) for (name, s), n in product(COMPOSITES.items(), (1, 4))),
    *((name, s, "dots", 4) for name, s in COMPOSITES.items()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "remat", "microbatches"), [s[1:] for s in SLOW])
def test_gpt_training_matches_one_device(strategy, remat, microbatches):
    sizes = GPT_SIZES | {"num_layers": 3, "remat": remat, "mlp_dim": 2 * WIDTH}
    case = gpt(GPTConfig.tiny_llama(**sizes, num_heads=8, num_kv_heads=4))
    expected = measure(
        case, ONE_DEVICE.strategy(case), ONE_DEVICE.devices(), microbatches
    )
    assert_same_numbers(measure(case, strategy, jax.devices(), microbatches), expected)


# Compiled programs


CONFIG = GPTConfig.tiny(seq_len=32, embed_dim=128, vocab_size=64, remat="full")
LAYER_BYTES = 12 * CONFIG.embed_dim**2 * 4
ROWS = 8


def growth(mode: Literal["first"] | None, config: GPTConfig) -> float:
    """Returns the temporary bytes that each further layer adds."""
    few, many = (
        compile_gpt(replace(config, num_layers=n), fsdp(mode), ROWS) for n in (2, 6)
    )
    return (many.memory.temp_size_in_bytes - few.memory.temp_size_in_bytes) / 4


@pytest.mark.slow
@pytest.mark.parametrize("remat", REMATS)
def test_prefetch_adds_no_memory_per_layer(remat: Remat):
    """Prefetch does not increase the temporary bytes that each layer adds."""
    config = replace(CONFIG, remat=remat)
    assert growth("first", config) <= 1.01 * growth(None, config)


@pytest.mark.parametrize(
    "remat", ["full", pytest.param("none", marks=pytest.mark.deep)]
)
def test_first_kernel_of_next_layer_is_gathered(remat: Remat):
    """Prefetch gathers one query kernel once more, and no other kernel.

    Without remat, the backward pass also gathers the two norm scales of each layer. The
    step without prefetch keeps these scales after the forward pass.
    """
    config = replace(CONFIG, num_layers=6, remat=remat, norm="rms", use_bias=False)
    plain, first = (compile_gpt(config, fsdp(mode), ROWS) for mode in (None, "first"))
    more = first.report.bytes("all-gather") - plain.report.bytes("all-gather")
    query, scale = 4 * CONFIG.embed_dim**2, 4 * CONFIG.embed_dim
    scales = 1 if remat == "full" else 1 + 2 * 6
    assert more == query + scales * scale
    held = first.memory.temp_size_in_bytes - plain.memory.temp_size_in_bytes
    assert held <= 2 * query
    assert first.report.flops == plain.report.flops


def test_gather_and_products_are_independent():
    """Checks both passes. Without prefetch, the products would wait for the gather."""
    loops = list(layer_loops())
    assert len(loops) == 2  # one forward, one backward
    for body in loops:
        products = [eqn for eqn in body.eqns if has_product(eqn)]
        (*_, barrier) = (e for e in body.eqns if "barrier" in e.primitive.name)
        # The gathered kernel depends only on the layer's index and on arrays that exist
        # before the loop.
        scalars = [v for v in body.invars if shape_of(v) == ()]
        free = derived(body.eqns, [*body.constvars, *scalars, *stored(body)])
        ahead = free.intersection(barrier.invars)
        assert ahead
        assert products
        inputs = [v for eqn in products for v in eqn.invars]
        assert ahead.isdisjoint(
            v for eqn in needed(body.eqns, inputs) for v in eqn.outvars
        )


def layer_loops() -> Iterator[jex.Jaxpr]:
    """Yields the bodies of the scans over layers in a training step."""
    config = replace(CONFIG, num_layers=LAYERS, use_bias=False)
    plan = plan_step(lambda rngs: GPT(config, rngs=rngs), fsdp("first", min_size=1024))
    step: Any = make_train_step(plan, next_token_loss, StepOptions())
    tokens = {"tokens": jax.ShapeDtypeStruct((ROWS, config.seq_len + 1), np.int32)}
    for eqn, _ in walk(step.trace(plan.abstract, tokens).jaxpr.jaxpr):
        if eqn.primitive.name == "scan" and eqn.params["length"] == LAYERS:
            yield inline(next(jex.jaxprs_in_params(eqn.params)))


def shape_of(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def stored(body: jex.Jaxpr) -> list[jex.Var]:
    """The inputs of a loop that have an entry for each layer."""
    shapes = {v: shape_of(v) for v in body.invars}
    return [v for v, shape in shapes.items() if shape[1:] and shape[0] == LAYERS]


def has_product(eqn: jex.JaxprEqn) -> bool:
    inner = [e for j in jex.jaxprs_in_params(eqn.params) for e, _ in walk(j)]
    return any(e.primitive.name == "dot_general" for e in [eqn, *inner])


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"prefetch": "ring"},
            "FSDP(prefetch='ring'): the valid value is 'first', or None to gather each "
            "layer when it runs. Gathering whole layers ahead was slower",
        ),
        (
            {"prefetch": "first", "shard": "gradients"},
            "FSDP(shard='gradients', prefetch='first'): parameters are not sharded, so "
            "there is nothing to gather. Leave prefetch out, or take shard='params'.",
        ),
    ],
)
def test_invalid_prefetch_arguments_raise(arguments: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        FSDP(**arguments)


class Telling(nnx.Module):
    """A block that prints."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.mean())
        return self.linear(x)


def test_omitted_prints_warn():
    strategy = fsdp("first")
    layout = strategy.layout(strategy.make_mesh(jax.devices()[:4]))
    model = Stack(Telling, LAYERS, rngs=nnx.Rngs(0))
    place_model(model, layout)
    text = "The prints and callbacks are left out"
    with using(layout), pytest.warns(UserWarning, match=text):
        jax.eval_shape(model, jnp.ones((4, 8)))
