"""Split experts: the numbers of a loop over tokens; each device has its share."""

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Checkpoint,
    Composite,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    OneFOneB,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
    ZeroBubble,
    errors,
)
from nnx_parallel.layers import Experts, MoE
from nnx_parallel.layers.experts.moe import Load, RouterState
from nnx_parallel.mesh import Device
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from tests.parity.checks import assert_placed, assert_same_bits, assert_same_numbers
from tests.parity.models import Case, token_batch
from tests.parity.runs import Run, described, measure, to_host

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
MIXTURE = Experts(num_experts=8, top_k=2, mlp_dim=64)
MIXTURES = {
    "deepseek": replace(
        MIXTURE,
        shared_dim=64,
        scores="sigmoid",
        scale=1.5,
        num_groups=4,
        top_groups=2,
        bias_rate=0.01,
        balance_loss=0.01,
        z_loss=0.001,
    ),
    "switch": replace(
        MIXTURE,
        top_k=1,
        normalise=False,
        bias_rate=0.01,
        balance_loss=0.01,
        balance_over="batch",
    ),
    "capacity": replace(
        MIXTURE, bias_rate=0.01, capacity_factor=1.0, balance_loss=0.01
    ),
    "dropless": replace(MIXTURE, bias_rate=0.01),
}
OTHER_MIXTURES = {
    "biased": replace(
        MIXTURE, use_bias=True, shared_dim=64, shared_gate=True, bias_rate=0.01
    ),
    "llama4": replace(
        MIXTURE,
        shared_dim=64,
        scores="sigmoid",
        normalise=False,
        scales_inputs=True,
        bias_rate=0.01,
    ),
}
# Added to the biases of later experts. With 0, tokens go to all experts; with 100, all
# tokens go to the same experts ("switch": to one expert).
SKEWS = {"uniform": 0.0, "skewed": 2.0, "one": 100.0}


class TokenByToken(MoE):
    """The mixture as in its papers: a loop sends each token through its experts.

    Only the choice of experts is shared with `MoE`. `tests/test_moe.py` compares that
    choice with another loop.
    """

    def _run(
        self,
        x: jax.Array,
        scores: jax.Array,
        alongside: jax.Array | None,
        segments: jax.Array | None,
    ) -> tuple[jax.Array, Load]:
        del alongside
        assert segments is None
        mixture = self.experts
        bias = None if self.bias is None else self.bias[...]
        capacity = mixture.capacity(x.shape[1])
        gate: Any = self.gate
        has_biases, is_scaled = mixture.use_bias, mixture.scales_inputs

        def token(taken: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
            x, chosen, weights = inputs
            y = jnp.zeros_like(x)
            for j in range(mixture.top_k):
                expert = chosen[j]
                taken = taken.at[expert].add(1)
                is_kept = capacity is None or taken[expert] <= capacity
                weight = weights[j] * is_kept
                rows, weight = (x * weight, 1) if is_scaled else (x, weight)
                up, middle = rows @ self.up[expert], rows @ gate[expert]
                if has_biases:
                    up += self.up_bias[expert]
                    middle += self.gate_bias[expert]
                out = self.activate(up, middle) @ self.down[expert]
                out = out + self.down_bias[expert] if has_biases else out
                y += weight * out
            return taken, y

        def row(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax.lax.scan(token, jnp.zeros(mixture.num_experts, int), inputs)

        counts, y = jax.vmap(row)(x, *mixture.choose(scores, bias))
        return y, Load(counts)


class Skewed(GPT):
    """A GPT whose routers prefer later experts, by biases without a gradient."""

    def __init__(
        self, config: GPTConfig, skew: float, rngs: nnx.Rngs, *, loops: bool = False
    ) -> None:
        super().__init__(config, rngs=rngs)
        block: Any = self.blocks.layer
        bias = block.mlp.bias  # (layers, experts)
        preferred = skew * jnp.arange(bias.shape[-1], dtype=jnp.float32)
        bias.set_value(bias[...] + preferred[None])
        if loops:
            block.mlp.__class__ = TokenByToken  # keeps the parameters


def case_of(
    mixture: str, skew: str, dropout: float = 0.1, *, loops: bool = False
) -> Case:
    config = GPTConfig.tiny_llama(
        vocab_size=64,
        seq_len=16,
        num_layers=2,
        embed_dim=64,
        mlp_dim=None,
        num_heads=4,
        num_kv_heads=4,
        dropout=dropout,
        experts=(MIXTURES | OTHER_MIXTURES)[mixture],
    )
    return Case(
        build=lambda rngs: Skewed(config, SKEWS[skew], rngs, loops=loops),
        loss=next_token_loss,
        make_batch=token_batch,
    )


SIZES = (1, 2, 4, 8)
MICROBATCHES = (1, 4)
PARTNERS: dict[str, Strategy] = {
    "fsdp": FSDP(2, min_size=0),
    "tp": TensorParallel(2),
    "pp": Pipeline(2, OneFOneB()),
}
MESHES: dict[str, tuple[Strategy, ...]] = {
    f"ep{size}_{name}": (ExpertParallel(size), partner)
    for size in SIZES
    for name, partner in PARTNERS.items()
}
# The expert axis of size 8 also splits the batch of 32 rows and FSDP's arrays.
MESHES["ep8_fsdp"] = (ExpertParallel(8), FSDP(1, min_size=0))
WIDE = ("ep8_tp", "ep8_pp")
"""Meshes of 16 devices, which a child process simulates."""
OTHER_MESHES: dict[str, tuple[Strategy, ...]] = {
    "ep8": (ExpertParallel(8),),
    "fsdp": (FSDP(4, min_size=0),),
    "tp": (TensorParallel(2),),
    "pp2": (Pipeline(2, OneFOneB()),),
    "ep2_fsdp2_prefetch": (
        ExpertParallel(2),
        FSDP(2, min_size=0, prefetch="first"),
    ),
    "ep4_dp2": (ExpertParallel(4), DataParallel(2)),
    "ep2_tp2_sequence": (ExpertParallel(2), TensorParallel(2, sequence=True)),
    "ep2_cp2": (ExpertParallel(2), ContextParallel(2)),
    "ep2_cp2_fsdp2": (ExpertParallel(2), ContextParallel(2), FSDP(2, min_size=0)),
    "ep2_pp2_fsdp2": (
        ExpertParallel(2),
        Pipeline(2, ZeroBubble()),
        FSDP(2, min_size=0),
    ),
    "ep2_pp2_tp2": (
        ExpertParallel(2),
        Pipeline(2, OneFOneB(), stash="inputs"),
        TensorParallel(2),
    ),
}
FEW = [("deepseek", "skewed", "ep2_fsdp", 1)]
# In FEW, PAIRS and WIDE_PAIRS together, each pair of values of any two factors occurs.
# The factors are size, partner, number of microbatches, routing and mixture.
PAIRS = [
    ("capacity", "uniform", "ep2_pp", 4),
    ("capacity", "one", "ep1_fsdp", 1),
    ("deepseek", "uniform", "ep1_fsdp", 1),
    ("switch", "skewed", "ep1_pp", 1),
    ("dropless", "one", "ep1_tp", 4),
    ("switch", "skewed", "ep2_fsdp", 4),
    ("dropless", "one", "ep2_tp", 1),
    ("dropless", "uniform", "ep4_fsdp", 4),
    ("deepseek", "one", "ep4_pp", 4),
    ("switch", "uniform", "ep4_tp", 1),
    ("capacity", "skewed", "ep4_tp", 4),
    ("switch", "one", "ep8_fsdp", 4),
    ("capacity", "uniform", "ep8_fsdp", 4),
]
WIDE_PAIRS = [
    ("dropless", "skewed", "ep8_pp", 1),
    ("deepseek", "uniform", "ep8_tp", 1),
]
OTHERS = [
    ("deepseek", "one", "ep2_fsdp2_prefetch", 1),
    ("dropless", "one", "ep2_tp2_sequence", 1),
    ("deepseek", "uniform", "ep2_cp2_fsdp2", 1),
    ("switch", "one", "ep2_pp2_fsdp2", 4),
    ("deepseek", "uniform", "ep2_pp2_tp2", 4),
    ("biased", "skewed", "ep2_tp2_sequence", 1),
    ("biased", "uniform", "ep2_pp2_tp2", 4),
    ("llama4", "skewed", "ep2_tp2_sequence", 1),
]
# Cases with axes that other cases above also have.
SLOW_OTHERS = [
    ("capacity", "one", "ep8", 1),
    ("switch", "uniform", "ep4_dp2", 1),
    ("capacity", "skewed", "ep2_cp2", 1),
    ("deepseek", "skewed", "pp2", 4),
    ("capacity", "skewed", "fsdp", 1),
    ("dropless", "uniform", "tp", 1),
]
PRODUCT = list(itertools.product(MIXTURES, SKEWS, MESHES, MICROBATCHES))
REST = [
    case
    for case in PRODUCT
    if case not in (*FEW, *PAIRS, *WIDE_PAIRS) and case[2] not in WIDE
]


def devices_of(strategy: Strategy) -> Sequence[Device]:
    return jax.devices()[: math.prod(n or 1 for n in strategy.axis_sizes.values())]


@cache
def looped(mixture: str, skew: str, microbatches: int, dropout: float = 0.1) -> Run:
    """The run on one device, whose experts process one token after the other."""
    case = case_of(mixture, skew, dropout, loops=True)
    return measure(case, DataParallel(1), jax.devices()[:1], microbatches)


def biases(run: Run) -> dict[str, np.ndarray]:
    found = {p: x for p, x in run.variables.items() if p.endswith("mlp.bias")}
    assert found
    return found


def check_training(mixture: str, skew: str, mesh: str, microbatches: int) -> None:
    """Compares 20 steps with a loop over tokens: gradients, losses, biases."""
    strategy = Composite(*(MESHES | OTHER_MESHES)[mesh])
    case, devices = case_of(mixture, skew), devices_of(strategy)
    run = measure(case, strategy, devices, microbatches)
    expected = looped(mixture, skew, microbatches)
    assert_same_numbers(run, expected)
    assert_same_bits(biases(run), biases(expected))
    start = run.initial["variables.blocks.layer.mlp.bias"]
    assert np.abs(biases(run)["blocks.layer.mlp.bias"] - start).max() > 0.015
    description = described(case, strategy, devices)
    assert_placed(run.start, description)
    assert_placed(run.end, description)


@pytest.mark.parametrize(
    ("mixture", "skew", "mesh", "microbatches"),
    [
        *FEW,
        # Cases with the same loop over tokens are adjacent, so its program is compiled
        # once.
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in sorted((*PAIRS, *OTHERS), key=lambda case: (case[0], case[3]))
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (*SLOW_OTHERS, *REST)
        ),
    ],
)
def test_training_matches_loop_over_tokens(mixture, skew, mesh, microbatches):
    check_training(mixture, skew, mesh, microbatches)


CHILD = """
import json, sys
import jax
from nnx_parallel import simulate_devices
simulate_devices(16)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
from tests.test_expert_parallel import check_training
for case in json.loads(sys.argv[1]):
    print("training", case, flush=True)
    check_training(*case)
print("done")
"""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(WIDE_PAIRS, id="pairs", marks=pytest.mark.deep),
        *(
            pytest.param(
                [case for case in PRODUCT if (case[2], case[0]) == (mesh, mixture)],
                id=f"{mesh}-{mixture}",
                marks=pytest.mark.slow,
            )
            for mesh in WIDE
            for mixture in MIXTURES
        ),
    ],
)
def test_training_on_sixteen_devices_matches_loop(cases):
    command = [sys.executable, "-W", "error", "-c", CHILD, json.dumps(cases)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


def test_deep_cases_cover_every_pair():
    """Changes of the lists must not lose a pair."""

    def pairs(cases: Sequence[tuple[str, str, str, int]]) -> set:
        values = [(a, b, *mesh.split("_"), n) for a, b, mesh, n in cases]
        return {
            (i, j, case[i], case[j])
            for case in values
            for i, j in itertools.combinations(range(5), 2)
        }

    assert pairs([*FEW, *PAIRS, *WIDE_PAIRS]) == pairs(PRODUCT)
    assert len(PRODUCT) == 4 * 3 * 12 * 2


@pytest.mark.deep
def test_bias_does_not_depend_on_microbatches():
    one, four = (
        biases(looped("dropless", "uniform", n, dropout=0.0)) for n in MICROBATCHES
    )
    assert_same_bits(one, four)


@pytest.mark.deep
def test_biases_restore_under_another_strategy(tmp_path):
    """The restored biases have the same bits, and the run continues."""
    case = case_of("dropless", "skewed", 0.0)
    batches = case.batches(4)

    def fit(strategy: Strategy, num_steps: int, path: Path | None) -> Trainer:
        trainer = Trainer(
            case.build,
            optax.adamw(1e-3),
            case.loss,
            strategy=strategy,
            devices=devices_of(strategy),
            checkpoint=None if path is None else Checkpoint(path, every=2),
            loggers=(),
        )
        trainer.fit(batches, num_steps)
        return trainer

    def bits(trainer: Trainer) -> dict[str, np.ndarray]:
        found = to_host(trainer.state.variables)
        return {path: x for path, x in found.items() if path.endswith("mlp.bias")}

    fit(Composite(ExpertParallel(4), FSDP(2)), 2, tmp_path)
    resumed = fit(Composite(ExpertParallel(2), DataParallel(2)), 4, tmp_path)
    whole = fit(DataParallel(1), 4, None)
    assert_same_bits(bits(resumed), bits(whole))


# Near ties


ROWS, SEQ = 32, 8


class Recorded(MoE):
    """A mixture that keeps the scores of its most recent tokens."""

    seen: Any

    def _observe(
        self, scores: jax.Array, load: Load, segments: jax.Array | None
    ) -> None:
        super()._observe(scores, load, segments)
        self.seen.set_value(jax.lax.stop_gradient(scores))


class NearTies(GPT):
    """A GPT of one layer with two experts whose scores differ by rounding only."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        experts = replace(MIXTURE, num_experts=4)
        config = GPTConfig.tiny_experts(num_layers=1, vocab_size=64, experts=experts)
        super().__init__(config, rngs=rngs)
        block: Any = self.blocks.layer
        router = block.mlp.router  # (1, embed, experts)
        nudge = 1 + 1e-7 * jax.random.normal(jax.random.key(1), router.shape[:2])
        router.set_value(router[...].at[..., 2].set(router[..., 1] * nudge))
        block.mlp.__class__ = Recorded
        block.mlp.seen = RouterState(jnp.zeros((1, ROWS, SEQ, 4)))


def loss_by_row(model: GPT, tokens: jax.Array) -> tuple[jax.Array, dict]:
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    rows = losses.mean(1)
    return rows.mean(), {f"row{i}": rows[i] for i in range(ROWS)}


def rows_and_scores(strategy: Strategy) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row, and the router's scores of each token."""
    trainer = Trainer(
        NearTies,
        optax.sgd(0.1),
        loss_by_row,
        strategy=strategy,
        devices=devices_of(strategy),
        loggers=(),
    )
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, SEQ + 1))
    batch = trainer.shard_batch(tokens.astype(np.int32))
    state, metrics = trainer.train_step(trainer.state, batch)
    seen = to_host(state.variables)["blocks.layer.mlp.seen"][0]
    return np.array([float(metrics[f"row{i}"]) for i in range(ROWS)]), seen


def test_equal_routing_matches_one_device():
    """Rounding may swap two nearly equal scores, and then other experts are used.

    The scores agree. Rows have the same loss if their tokens have the same experts. A
    token has other experts only if its second and third score are tied.
    """
    expected, scores = rows_and_scores(DataParallel(1))
    strategy = Composite(ExpertParallel(2), TensorParallel(2), FSDP(2, min_size=0))
    found, others = rows_and_scores(strategy)
    np.testing.assert_allclose(others, scores, atol=1e-6)
    best, best_others = (np.sort(jax.lax.top_k(x, 2)[1]) for x in (scores, others))
    is_other = (best != best_others).any(-1)  # (rows, seq)
    second, third = np.moveaxis(np.sort(scores)[..., 1:3], -1, 0)[::-1]
    assert (second - third)[is_other].max() < 1e-6
    errors = np.abs(found - expected) / expected
    assert errors[~is_other.any(1)].max() < 1e-6
    assert errors[is_other.any(1)].max() > 1e-5


class TestPlaces:
    def test_fsdp_splits_other_parameters_over_expert_axis(self):
        strategy = Composite(ExpertParallel(4), FSDP(2, min_size=0))
        table = strategy.describe(case_of("deepseek", "uniform").build)
        place = {row.info.path: row.placement for row in table.rows}
        up = place["blocks.layer.mlp.up"]
        assert up.stored == up.optimizer == P(None, "expert", "fsdp")
        assert up.used == P(None, "expert")
        query = place["blocks.layer.attention.query.kernel"]
        assert query.stored == P(None, ("fsdp", "expert"))
        assert query.used == P()
        assert place["blocks.layer.mlp.bias"].stored == P()

    def test_rows_are_split_over_expert_axis(self):
        strategy = Composite(ExpertParallel(4), FSDP(2))
        assert strategy.layout().batch_spec(16) == P(("fsdp", "expert"))

    def test_describe_tells_exchange_of_tokens(self):
        summary = ExpertParallel(8).describe(case_of("deepseek", "uniform").build)
        assert (
            "exchanged: tokens of `blocks.layer.mlp` over expert=8 by 'gather' (CPUs "
            "have no ragged all-to-all)"
        ) in summary.summary().splitlines()

    def test_tensor_parallelism_splits_each_expert(self):
        strategy = Composite(ExpertParallel(4), TensorParallel(2))
        table = strategy.describe(case_of("deepseek", "uniform").build)
        place = {row.info.path: row.placement for row in table.rows}
        assert place["blocks.layer.mlp.down"].used == P(None, "expert", "tensor")


# Errors


def check(strategy: Strategy, config: GPTConfig) -> None:
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    strategy.check(model, strategy.make_mesh(devices_of(strategy)))


@pytest.mark.parametrize(
    ("strategy", "config", "message"),
    [
        (
            ExpertParallel(2),
            GPTConfig.tiny(),
            "GPT has no experts: ExpertParallel splits the experts of "
            "nnx_parallel.layers.MoE, and dims that are named 'expert'. Without them "
            "its axis only splits the batch. Take DataParallel(2) or FSDP(2) instead; "
            "or name the dim of experts: names='auto', or PathNames((r'up$', "
            "('expert', 'embed', 'mlp'))).",
        ),
        (
            ExpertParallel(3),
            GPTConfig.tiny_experts(),
            "`blocks.layer.mlp` has 8 experts, which expert=3 devices cannot share "
            "evenly. The size of ExpertParallel can be one of [1, 2, 4, 8].",
        ),
        (
            ExpertParallel(2, "ragged"),
            GPTConfig.tiny_experts(),
            "ExpertParallel(exchange='ragged') cannot run on CPUs, for which JAX has ",
        ),
    ],
)
def test_unsupported_experts_raise(strategy, config, message):
    with pytest.raises(errors.ExpertsError, match=re.escape(message)):
        check(strategy, config)


def test_unknown_exchange_raises():
    message = "ExpertParallel(exchange='ring'): valid values are ['gather', 'ragged']"
    with pytest.raises(ValueError, match=re.escape(message)):
        ExpertParallel(2, "ring")  # pyright: ignore[reportArgumentType]
