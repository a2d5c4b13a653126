"""Muon has Optax's numbers and state, and each device does its share of the work.

`audit` counts FLOPs and bytes in the compiled update. `benchmarks.muon` computes the
minimum of both.
"""

import inspect
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from benchmarks.muon import (
    compile_update,
    config,
    least_cost,
    plan_gpt,
    ratios,
    update,
)
from nnx_parallel import (
    FSDP,
    Checkpoint,
    Composite,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
    audit,
)
from nnx_parallel.errors import OptimizerError
from nnx_parallel.layers import Experts
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.optimizers import by_matrix, muon, muon_dimension_numbers
from nnx_parallel.optimizers.matrices import pack
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.sharding.nnx_arrays import flatten_pure
from nnx_parallel.state import StatePlan
from tests.tpus import numbers_from

pytestmark = pytest.mark.long

NUM_STEPS = 20

# 14 kernel matrices of six shapes, which 8 devices cannot divide evenly.
LLAMA = GPTConfig.tiny_llama(
    vocab_size=64,
    seq_len=16,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
)
MIXTURE = replace(
    LLAMA, mlp_dim=None, experts=Experts(num_experts=4, top_k=2, mlp_dim=32)
)
FSDP4 = FSDP(4, min_size=0)
STRATEGIES: dict[str, tuple[GPTConfig, Strategy]] = {
    "dp": (LLAMA, DataParallel(8)),
    "fsdp": (LLAMA, FSDP(8, min_size=0)),
    "zero1": (LLAMA, FSDP(8, shard="optimizer", min_size=0)),
    "hsdp": (LLAMA, Composite(DataParallel(2), FSDP4)),
    "tp": (LLAMA, TensorParallel(2)),
    "tp_fsdp": (LLAMA, Composite(TensorParallel(2), FSDP4)),
    "pipeline": (LLAMA, Pipeline(2)),
    "pipeline_fsdp": (LLAMA, Composite(Pipeline(2), FSDP4)),
    "context_fsdp": (LLAMA, Composite(ContextParallel(2), FSDP4)),
    "expert": (MIXTURE, ExpertParallel(4)),
    "expert_fsdp": (MIXTURE, Composite(ExpertParallel(2), FSDP4)),
    "expert_tp_fsdp": (
        MIXTURE,
        Composite(ExpertParallel(2), TensorParallel(2), FSDP(2, min_size=0)),
    ),
}


def devices_of(strategy: Strategy) -> list[Any]:
    sizes = strategy.claims().axis_sizes.values()
    return jax.devices()[: math.prod(size or 1 for size in sizes)]


def train(plan: StatePlan, make_grads: Callable) -> tuple[Any, Any]:
    """Parameters and state after some steps with the given gradients."""

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, opt_state = carry
        grads = plan.constrain(make_grads(params, key), "optimizer")
        updates, opt_state = update(plan, grads, opt_state, params)
        moved: Any = optax.apply_updates(params, updates)
        params = plan.constrain(moved, "optimizer")
        return (params, opt_state), None

    def run(params: Any) -> tuple[Any, Any]:
        start = params, plan.tx.init(params)
        return jax.lax.scan(
            step, start, jax.random.split(jax.random.key(1), NUM_STEPS)
        )[0]

    params = jax.tree.map(
        lambda x: 0.1 * np.random.default_rng(x.size).standard_normal(x.shape),
        plan.abstract.params,
    )
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return jax.jit(run)(jax.device_put(params, plan.shardings.params))


def noisy(params: Any, key: jax.Array) -> Any:
    """Gradients towards zero, with noise."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    noise = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.map(
        lambda x, n: 0.1 * x + 0.01 * n, params, jax.tree.unflatten(structure, noise)
    )


@cache
def of_optax(config: GPTConfig) -> tuple[Any, Any]:
    """Parameters and state of `optax.contrib.muon` on one device."""
    settings = {"weight_decay": 0.1, "devices": jax.devices()[:1]}
    return train(
        plan_gpt(config, DataParallel(1), optax.contrib.muon, **settings), noisy
    )


MAIN = ("fsdp", "pipeline_fsdp", "expert_tp_fsdp")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in MAIN else pytest.mark.deep)
        for name in STRATEGIES
    ],
)
def test_twenty_steps_match_optax(name: str) -> None:
    config, strategy = STRATEGIES[name]
    settings = {"weight_decay": 0.1, "devices": devices_of(strategy)}
    ours = train(plan_gpt(config, strategy, muon, **settings), noisy)
    theirs = of_optax(config)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), ours, theirs)


@pytest.mark.parametrize("strategy", [FSDP(8), Composite(TensorParallel(2), FSDP(4))])
@pytest.mark.parametrize("num_layers", [8, 6])
def test_device_computes_and_sends_its_share(
    strategy: Strategy, num_layers: int
) -> None:
    found = ratios(plan_gpt(config(num_layers), strategy, muon))
    # With 6 layers, the busiest device has at least 48 units of whole matrices; the
    # mean is 45. See `test_six_gpt_layers_are_optimally_packed`.
    assert found.flops <= (1.05 if num_layers == 8 else 48 / 45)
    assert found.bytes <= 1.1
    if strategy == FSDP(8) and num_layers == 8:
        theirs = ratios(plan_gpt(config(8), strategy, optax.contrib.muon))
        assert theirs.flops > 1.4 * found.flops
        assert theirs.bytes > 10 * found.bytes


def test_stages_and_experts_exchange_nothing() -> None:
    """No collective of the update uses axes that split layers or experts."""
    for name in ("pipeline_fsdp", "expert_fsdp"):
        config, strategy = STRATEGIES[name]
        plan = plan_gpt(config, strategy, muon)
        report = audit(compile_update(plan))
        largest = max(report.collectives, key=lambda each: each.bytes)
        assert largest.kind == "all-to-all"
        assert largest.group_size == 4, name


def test_replicas_share_the_work() -> None:
    """Each of 8 replicas orthogonalizes an eighth of the matrices, and gathers all."""
    plan = plan_gpt(config(8), DataParallel(8), muon)
    report = audit(compile_update(plan))
    assert report.flops == least_cost(plan).flops
    assert report.count() == report.count("all-gather") == 1


ON_TPUS = """
from benchmarks.muon import compile_update, least_cost, plan_gpt
config = GPTConfig.tiny(num_layers=8, embed_dim=512, vocab_size=128, num_heads=4)
plan = plan_gpt(config, FSDP(8), muon, devices_of("v5p:2x2x2"))
report, least = audit(compile_update(plan)), least_cost(plan)
print(int(1000 * report.flops / least.flops), int(1000 * report.bytes() / least.bytes))
print(report.count("all-to-all"), report.count())
"""


@pytest.mark.deep
def test_tpu_program_has_two_exchanges() -> None:
    flops, sent, exchanges, collectives = numbers_from(ON_TPUS)
    assert flops <= 1050
    assert sent <= 1100
    assert exchanges == collectives == 2


def test_plain_and_sharded_checkpoints_interchange(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 64, (8, 9), dtype=np.int32)] * 3
    small = replace(LLAMA, num_layers=1, embed_dim=16)

    def trainer(make: Callable, strategy: Strategy, name: str) -> Trainer:
        return Trainer(
            lambda rngs: GPT(small, rngs=rngs),
            lambda model: make(
                1e-2, muon_weight_dimension_numbers=muon_dimension_numbers(model)
            ),
            next_token_loss,
            strategy=strategy,
            checkpoint=Checkpoint(tmp_path / name, every=2),
            loggers=(),
        )

    plain = trainer(optax.contrib.muon, DataParallel(8), "plain")
    plain.fit(tokens, 2)
    ours = trainer(muon, FSDP(8, min_size=0), "ours")
    ours.restore(directory=tmp_path / "plain")
    assert jax.tree.structure(ours.state) == jax.tree.structure(plain.state)
    momenta = (flatten_pure({"o": t.state.opt_state}) for t in (plain, ours))
    for before, after in zip(*(m.values() for m in momenta), strict=True):
        np.testing.assert_array_equal(before, after)
    losses = [t.fit(tokens, 3)["loss"][-1] for t in (plain, ours)]
    assert math.isclose(*losses, abs_tol=1e-5)
    back = trainer(optax.contrib.muon, DataParallel(8), "back")
    back.restore(directory=tmp_path / "ours")
    assert int(back.state.step) == 3
    params = (flatten_pure(t.state.params) for t in (ours, back))
    for before, after in zip(*(p.values() for p in params), strict=True):
        np.testing.assert_array_equal(before, after)


# Settings, on one device

PARAMS = {
    "stacked": jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 2, 4))),
    "plain": jnp.asarray(np.random.default_rng(1).standard_normal((6, 4))),
    "bias": jnp.ones(4),
}
NUMBERS = {
    "stacked": MuonDimensionNumbers((1,), (2, -1)),
    "plain": MuonDimensionNumbers(),
    "bias": None,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "rank 2": {"muon_weight_dimension_numbers": None},
    "a function": {"muon_weight_dimension_numbers": lambda params: NUMBERS},
    "dion": {"ns_coeffs": "dion"},
    "few steps": {"ns_steps": 2, "nesterov": False},
    "adaptive": {"adaptive": True, "consistent_rms": 0.2},
    "aol": {"preconditioning": "aol", "adam_learning_rate": 0.01},
    "schatten": {"preconditioning": "schatten", "mu_dtype": jnp.bfloat16},
    "spectral": {"preconditioning": "spectral", "weight_decay": 0.1},
    "schedule": {"learning_rate": optax.linear_schedule(0.1, 0.0, 3)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_match_optax(name: str) -> None:
    given = {
        "learning_rate": 0.1,
        "muon_weight_dimension_numbers": NUMBERS,
        **SETTINGS[name],
    }
    found = []
    for make in (muon, optax.contrib.muon):
        tx, params = make(**given), PARAMS
        state = tx.init(params)
        for _ in range(2):
            grads = jax.tree.map(lambda x: x + 0.5, params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        found.append((params, state))
    assert jax.tree.structure(found[0]) == jax.tree.structure(found[1])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *found)


def test_arguments_match_optax() -> None:
    ours, theirs = (
        {name: p.default for name, p in inspect.signature(f).parameters.items()}
        for f in (muon, optax.contrib.muon)
    )
    assert list(ours.items()) == list(theirs.items())


def test_matrices_are_sent_in_momentum_dtype() -> None:
    plan = plan_gpt(config(8), FSDP(8), muon, mu_dtype=jnp.bfloat16)
    grads = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), plan.abstract.params
    )
    traced = jax.make_jaxpr(partial(update, plan))(
        grads, plan.abstract.opt_state, plan.abstract.params
    )
    sent = re.findall(r"(\w+)\[[\d,]+\] = all_to_all", str(traced))
    assert sent == ["bf16", "bf16"]


def test_hyperparameters_can_be_injected() -> None:
    make = optax.inject_hyperparams(muon, static_args=("ns_steps", "ns_coeffs"))
    small = replace(LLAMA, num_layers=1)
    found = [
        train(plan_gpt(small, strategy, make, devices=devices_of(strategy)), noisy)
        for strategy in (DataParallel(1), FSDP(2, min_size=0))
    ]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), *found)


def polar(matrix: jax.Array) -> jax.Array:
    left, _, right = jnp.linalg.svd(matrix, full_matrices=False)
    return left @ right


def spectral_descent(
    rate: float, muon_weight_dimension_numbers: Any
) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(0.9),
        by_matrix(polar, muon_weight_dimension_numbers),
        optax.scale(-rate),
    )


def test_any_matrix_function_is_distributed() -> None:
    plan = plan_gpt(LLAMA, FSDP(8, min_size=0), spectral_descent)
    alone = plan_gpt(LLAMA, DataParallel(1), spectral_descent, jax.devices()[:1])
    found = [train(each, noisy)[0] for each in (plan, alone)]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-4), *found)
    report = audit(compile_update(plan))
    assert report.count("all-to-all") == report.count() == 2


def test_each_head_can_be_one_matrix() -> None:
    """Heads that are split by tensor parallelism are then not exchanged."""

    def numbers(model: nnx.Module) -> dict:
        found: Any = muon_dimension_numbers(model)
        found["blocks"]["layer"]["attention"] = {
            "query": {"kernel": MuonDimensionNumbers(1, 3), "bias": None},
            **dict.fromkeys(("key", "value", "out")),
        }
        return found

    def make(rate: float, muon_weight_dimension_numbers: Any) -> Any:
        del muon_weight_dimension_numbers
        chosen = numbers(model)
        chosen["blocks"]["layer"]["mlp"] = None
        return by_matrix(polar, chosen)

    model = abstract_model(lambda rngs: GPT(config(8), rngs=rngs), nnx.Rngs(0))
    plan = plan_gpt(config(8), TensorParallel(4), make, jax.devices()[:4])
    assert audit(compile_update(plan)).count() == 0


# Packing matrices onto devices


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("counts", [(3, 6), (1, 5), (4, 0), (2, 2)])
def test_work_is_balanced_over_devices(
    counts: tuple[int, int], num_devices: int
) -> None:
    works = [(18.0, 4), (6.0, 1)]
    packed = pack(works, counts, num_devices)
    assert tuple(map(sum, zip(*packed, strict=True))) == counts
    most = max(18 * wide + 6 * square for wide, square in packed)
    items = [18] * counts[0] + [6] * counts[1]
    best = min(
        max(
            sum(x for x, d in zip(items, where, strict=True) if d == device)
            for device in range(num_devices)
        )
        for where in itertools.product(range(num_devices), repeat=len(items))
    )
    # Graham's bound for packing the largest items first.
    assert best <= most <= best * (4 / 3 - 1 / (3 * num_devices))


def test_six_gpt_layers_are_optimally_packed() -> None:
    works, counts = [(18.0, 4), (6.0, 1)], (12, 24)
    loads = [18 * wide + 6 * square for wide, square in pack(works, counts, 8)]
    assert sum(loads) == 8 * 45
    # Loads of whole matrices are multiples of 6. If no device had 48, each would have
    # at most 42, and 8 * 42 is less than the total.
    assert max(loads) == 48
    assert sum(loads) > 8 * 42


# Errors


def test_invalid_dimension_numbers_raise() -> None:
    for numbers, found in (
        (MuonDimensionNumbers(0, 1), "rows from dims (0,) and columns from dims (1,)"),
        (MuonDimensionNumbers((), 0), "rows from dims () and columns from dims (0,)"),
        (
            MuonDimensionNumbers(0, -1),
            "rows from dims (0,) and columns from dims (-1,)",
        ),
    ):
        message = (
            f"`bias` with shape (4,) cannot be an array of matrices with {found}: rows "
            "and columns each need at least one separate dim from 0 to 0. All other "
            "dims enumerate matrices. muon_dimension_numbers(model) returns the "
            "numbers for a model. None excludes an array."
        )
        tree = {"bias": numbers, "plain": None, "stacked": None}
        for tx in (
            muon(0.1, muon_weight_dimension_numbers=tree),
            by_matrix(polar, tree),
        ):
            with pytest.raises(OptimizerError, match=re.escape(message)):
                tx.init(PARAMS)


def test_function_that_changes_shape_raises() -> None:
    tx = by_matrix(lambda matrix: matrix[:2])
    message = (
        "The function of by_matrix returned shape (2, 4) for a matrix of shape (6, 4). "
        "It must keep the shape."
    )
    with pytest.raises(OptimizerError, match=re.escape(message)):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
