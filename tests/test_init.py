"""Initial arrays: the values are those of one program, made by few small programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Composite, DataParallel, Strategy, TensorParallel
from nnx_parallel.init import compute_in_shards
from nnx_parallel.layers import Stack, named
from nnx_parallel.sharding.model import abstract_model, arrays_from
from nnx_parallel.sharding.optimizer import Optimizer
from nnx_parallel.state import StatePlan, init_state, plan_state
from tests.parity.checks import assert_same_bits
from tests.parity.runs import to_host

WIDTH = 64


class Block(nnx.Module):
    """Kernels of different initializers, a bias, and a random stream for dropout."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        names = named(nnx.initializers.lecun_normal(), "embed", "mlp")
        self.up = nnx.Linear(width, 2 * width, kernel_init=names, rngs=rngs)
        self.down = nnx.Linear(
            2 * width, width, kernel_init=nnx.initializers.orthogonal(), rngs=rngs
        )
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Everything(nnx.Module):
    """All ways in which a function of ``rngs`` may make arrays."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(WIDTH, WIDTH, rngs=rngs)
        self.tied = self.embed
        self.blocks = nnx.List([Block(WIDTH, rngs) for _ in range(3)])
        self.stack = Stack(lambda rngs: Block(WIDTH, rngs), 2, rngs=rngs)
        self.recurrent = nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs)
        # The next arrays come from: several slices of one array; a custom derivative;
        # one scale per layer; a loop; a decomposition with two results; integers.
        whole = jax.random.normal(rngs.params(), (2, WIDTH, WIDTH))
        self.halves = nnx.List([nnx.Param(half) for half in whole])
        self.mean = nnx.Variable(whole.mean())
        scales = jnp.linspace(0.1, 1.0, 3)
        self.scaled = nnx.List(
            [
                nnx.Param(jax.nn.relu(scales[i] * kernel(rngs.params())))
                for i in range(3)
            ]
        )
        self.summed = nnx.Param(
            jax.lax.fori_loop(0, 3, lambda _, x: x + x.T, kernel(rngs.params()))
        )
        q, r = jnp.linalg.qr(kernel(rngs.params()))
        self.q, self.r = nnx.Param(q), nnx.Param(r)
        self.table = nnx.Variable(
            jax.random.randint(rngs.params(), (8, WIDTH), 0, 1000)
        )
        self.key, self.scale = nnx.Variable(rngs.params()), nnx.Param(jnp.log(1 / 0.07))
        self.numbers = nnx.Param(jnp.asarray(NUMBERS)[1])
        # The compiler folds these constants; a program would compute other bits.
        rates = jnp.log(jnp.arange(1, WIDTH + 1, dtype=jnp.float32))
        self.rates = nnx.Param(jnp.tile(rates, (WIDTH, 1)))
        self.integer_rates = nnx.Param(jnp.tanh(jnp.arange(16) / 7))
        self.waves = nnx.Variable(jnp.sin(jnp.asarray(NUMBERS[0])))
        self.pair = nnx.List(list(map(nnx.Param, pair(rngs.params()))))


NUMBERS = np.random.default_rng(0).normal(size=(2, WIDTH, WIDTH)).astype(np.float32)


def kernel(key: jax.Array) -> jax.Array:
    return jax.random.truncated_normal(key, -2, 2, (WIDTH, WIDTH))


@jax.jit
def pair(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    first, second = jax.random.split(key)
    return kernel(first), kernel(second)


def plan_of(
    build: Callable, strategy: Strategy, tx: Optimizer, num_devices: int = 8
) -> StatePlan:
    mesh = strategy.make_mesh(jax.devices()[:num_devices])
    model = abstract_model(build, nnx.Rngs(0))
    return plan_state(model, strategy.layout(mesh), tx, ema_decay=0.9)


def as_one_program(plan: StatePlan, build: Callable) -> Any:
    """The state that one program computes, which defines the values."""
    make_arrays, streams = arrays_from(build, nnx.Rngs(0))
    compute = jax.jit(
        lambda streams, seed: plan.build(make_arrays(streams), seed),
        out_shardings=plan.shardings,
    )
    return compute(streams, 3)


@pytest.mark.parametrize(
    ("strategy", "num_devices"),
    [
        (Composite(TensorParallel(2), FSDP(min_size=0)), 8),
        pytest.param(DataParallel(), 1, marks=pytest.mark.deep),
    ],
    ids=["tensor-fsdp", "one"],
)
def test_values_match_one_program(strategy: Strategy, num_devices: int) -> None:
    plan = plan_of(Everything, strategy, optax.adamw(1e-3), num_devices)
    found = init_state(plan, Everything, nnx.Rngs(0), 3)
    expected = as_one_program(plan, Everything)
    assert_same_bits(to_host(found), to_host(expected))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.sharding, jax.typeof(x)) == (y.sharding, jax.typeof(y))
    buffers = [
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(found)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        for shard in x.addressable_shards
    ]
    assert len(set(buffers)) == len(buffers)  # a step donates each buffer


def deep(num_layers: int) -> Callable[[nnx.Rngs], nnx.Module]:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        blocks = [Block(WIDTH + 8, rngs) for _ in range(num_layers)]
        return nnx.Sequential(nnx.Embed(8, WIDTH + 8, rngs=rngs), *blocks)

    return build


@contextmanager
def counting_programs() -> Iterator[list[float]]:
    """Collects the duration of every compilation, in seconds."""
    found: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_deeper_model_compiles_no_more_programs() -> None:
    few, many = (plan_of(deep(n), FSDP(), optax.adamw(1e-3)) for n in (3, 5))
    with counting_programs() as first:
        init_state(few, deep(3), nnx.Rngs(0), 0)
    assert 3 < len(first) < 40
    with counting_programs() as second:
        init_state(many, deep(5), nnx.Rngs(0), 0)
        init_state(few, deep(3), nnx.Rngs(1), 1)
    assert second == []


def test_prints_in_build_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        jax.debug.print("built")
        return nnx.Linear(8, 8, rngs=rngs)

    FSDP(min_size=0).init(build, 0)
    jax.effects_barrier()
    assert "built" in capfd.readouterr().out


def test_model_may_hold_array_on_another_device() -> None:
    numbers = jax.device_put(np.arange(16.0), jax.devices()[3])
    placed = FSDP(min_size=0).init(lambda _: nnx.Dict(x=nnx.Param(numbers)), 0)
    (x,) = jax.tree.leaves(nnx.state(placed))
    np.testing.assert_array_equal(x, np.arange(16.0))
    assert len(x.sharding.device_set) == 8


def test_arrays_of_built_model_become_state() -> None:
    sharding = FSDP().layout().sharding(jax.sharding.PartitionSpec("fsdp"))
    x, y = (jax.device_put(jnp.full(8, value), sharding) for value in (1.0, 2.0))

    def function(x: jax.Array, y: jax.Array) -> tuple:
        return x, x, y, jnp.zeros_like(y)

    places = (sharding,) * 4
    found = compute_in_shards(function, (x, y), places, owns_args=True)
    assert found[0] is x
    assert found[2] is y
    copied = compute_in_shards(function, (x, y), places)
    for same in (*copied, found[1]):
        same.delete()
    np.testing.assert_array_equal(x, np.ones(8))
    np.testing.assert_array_equal(y, np.full(8, 2.0))
