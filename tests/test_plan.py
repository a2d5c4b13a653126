"""A plan's numbers match the step that it plans, and its choice is the best."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
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
    Pipeline,
    Player,
    Players,
    Precision,
    TensorParallel,
)
from nnx_parallel.audit.collectives import axes_of_groups
from nnx_parallel.errors import PlanError
from nnx_parallel.layers import Save, lora
from nnx_parallel.layers.attention.kernels import AttentionCall, splash_attention
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan import (
    HARDWARE,
    Assumptions,
    Candidate,
    Hardware,
    Topology,
    plan,
    render,
    save,
)
from nnx_parallel.plan.candidates import enumerate_candidates
from nnx_parallel.plan.costs import Facts, is_of_pairs
from nnx_parallel.plan.estimate import Estimate, state_bytes
from nnx_parallel.plan.parts import Parts
from nnx_parallel.plan.roofline import Costs, Traffic, time_step
from nnx_parallel.training.model_flops import (
    count_jaxpr_flops,
    count_model_flops,
    one_device,
)
from nnx_parallel.training.step import StepOptions, make_train_step
from nnx_parallel.training.trainer import Trainer
from tests.plans import MODELS, PIPELINED, STRATEGIES, gpt, shape

CPUS = Topology.parse("cpu:8")
GPUS = Topology.parse("h100:8")


@pytest.fixture(scope="module")
def parts() -> Parts:
    return gpt()


@pytest.fixture(scope="module")
def facts(parts: Parts) -> Facts:
    return Facts.of(parts, ("none", "dots", "full"), "cpu")


def memory_of(parts: Parts, candidate: Candidate) -> tuple[int, int, int]:
    """Returns bytes by formula, and compiled bytes without and with temporaries."""
    strategy, count = candidate.strategy, candidate.num_microbatches
    layout = strategy.layout()
    state, batch = parts.on(layout), parts.batch_on(layout, count)
    options = StepOptions(num_microbatches=count, remat=candidate.remat)
    step = make_train_step(state, parts.loss, options)
    lowered = step.lower(state.whole.abstract, batch)  # pyright: ignore[reportFunctionMemberAccess]
    memory = lowered.compile().memory_analysis()
    arguments = memory.argument_size_in_bytes
    counted = sum(state_bytes(state, batch).values())
    return counted, arguments, arguments + memory.temp_size_in_bytes


def every_model() -> Iterator:
    for model in MODELS:
        for name in STRATEGIES:
            is_cheap = (model, name) in {("gpt", "tp2"), ("stock", "gradients")}
            # A strategy splits the same arrays in all models. Other combinations are
            # slow.
            is_deep = model == "gpt" or name in ("fsdp8", "dp_tp")
            mark = pytest.mark.deep if is_deep else pytest.mark.slow
            marks = [] if is_cheap else [mark]
            yield pytest.param(model, name, id=f"{model}-{name}", marks=marks)


@pytest.mark.filterwarnings("ignore::nnx_parallel.errors.ParallelWarning")
@pytest.mark.parametrize(("model", "name"), [*every_model()])
def test_state_bytes_match_compiled_step(model: str, name: str) -> None:
    candidate = Candidate(strategy=STRATEGIES[name])
    # The stock model relies on rank promotion, as many models do.
    with jax.numpy_rank_promotion("allow"):
        counted, arguments, _ = memory_of(MODELS[model](), candidate)
    assert counted == arguments


def test_int8_is_twice_as_fast_as_bfloat16_on_v5p() -> None:
    v5p = HARDWARE["v5p"]
    assert v5p.peak("int8") == 2 * v5p.peak("bfloat16") == 918e12


def test_placement_matches_for_described_devices(parts: Parts) -> None:
    for strategy in (*STRATEGIES.values(), PIPELINED):
        here = parts.on(strategy.layout())
        there = parts.on(strategy.layout(strategy.make_mesh(CPUS.devices)))
        specs = [
            [x.sharding.spec for x in jax.tree.leaves(state.abstract)]
            for state in (here, there)
        ]
        assert specs[0] == specs[1], strategy


def test_strategy_of_trainer_does_not_affect_plan(parts: Parts) -> None:
    sharded = gpt(strategy=STRATEGIES["tp2"])
    layout = FSDP().layout()
    assert jax.tree.map(
        lambda x, y: x.sharding == y.sharding,
        parts.on(layout).abstract.params,
        sharded.on(layout).abstract.params,
    ) == jax.tree.map(lambda _: True, parts.on(layout).abstract.params)


def test_model_flops_are_six_per_parameter_and_token() -> None:
    config = GPTConfig.preset("llama3-8b")
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs), optax.sgd(0.1), next_token_loss, loggers=()
    )
    tokens = shape(8, config.seq_len + 1, dtype="int32")
    seq, layers = config.seq_len, config.num_layers
    products = config.num_params - config.vocab_size * config.embed_dim
    expected = 6 * products + 12 * layers * config.embed_dim * seq  # PaLM, appendix B
    parts = Parts.of(trainer, {"tokens": tokens})
    plan = parts.on(one_device())
    found = count_model_flops(plan, parts.loss, parts.batch) / (8 * seq)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("use_bias", [False, True])
def test_model_flops_of_experts_leave_out_their_biases(use_bias: bool) -> None:
    config = GPTConfig.tiny_experts(activation="clamped_swiglu")
    assert config.experts is not None
    experts = dataclasses.replace(config.experts, use_bias=use_bias)
    config = dataclasses.replace(config, experts=experts)
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs), optax.sgd(0.1), next_token_loss, loggers=()
    )
    parts = Parts.of(trainer, {"tokens": shape(8, 33, dtype="int32")})
    plan = parts.on(one_device())
    found = count_model_flops(plan, parts.loss, parts.batch)
    assert found == 8 * 32 * config.flops_per_token(32)


@pytest.mark.parametrize("base", [None, "nf4"])
def test_model_flops_leave_out_gradients_of_frozen_kernels(base: Any) -> None:
    width, rank, rows, layers = 32, 2, 8, 3

    def build(rngs: nnx.Rngs) -> nnx.Module:
        blocks = (nnx.Linear(width, width, rngs=rngs) for _ in range(layers))
        return nnx.Sequential(*blocks)

    trainer = Trainer(
        lora(build, targets="layers", rank=rank, base=base),
        optax.sgd(0.1),
        lambda model, x: jnp.mean(model(x) ** 2),
        wrt=nnx.LoRAParam,
        loggers=(),
    )
    parts = Parts.of(trainer, shape(rows, width))
    found = count_model_flops(parts.on(one_device()), parts.loss, parts.batch)
    kernels, factors = 2 * rows * width**2, 2 * rows * 2 * width * rank
    expected = layers * (2 * kernels + 3 * factors)
    if base:  # the gradient of the model's input is not counted
        expected -= kernels + factors / 2
    assert found == expected


def test_flops_count_loops_branches_and_convolutions() -> None:
    x = np.ones((4, 4), np.float32)

    def loop(x):
        return jax.lax.scan(lambda c, _: (c @ x, None), x, length=5)[0]

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)

    def unused(x):
        return jax.jit(lambda x: (x @ x, x + 1))(x)[1]

    image, kernel = jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 16))

    def convolve(image):
        return jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def kernel_for_tpus(x):  # attention in one block, with a loop in the kernel
        call = AttentionCall(query=x, key=x, value=x, causal=True)
        return splash_attention(call)

    once = 2 * 4**3
    heads = jnp.ones((1, 128, 2, 128))
    for function, value, expected in (
        (kernel_for_tpus, heads, 2 * 2 * 2 * 128**3),
        (loop, x, 5 * once),
        (branch, x, once),
        (unused, x, 0),
        (convolve, image, 2 * 6 * 6 * 16 * 27),
    ):
        assert count_jaxpr_flops(jax.make_jaxpr(function)(value).jaxpr) == expected


def test_remat_costs_flops_and_saves_memory(facts: Facts) -> None:
    none, dots, full = (facts.row(remat) for remat in ("none", "dots", "full"))
    (named,) = (Facts.of(facts.parts, [x], "cpu").row(x) for x in [Save("mlp_up")])
    assert none.flops < named.flops < full.flops
    order = (none, dots, named, full)
    kept = [sum(r.num_bytes for r in rows.residuals) for rows in order]
    assert kept == sorted(set(kept), reverse=True)


def test_sent_bytes_follow_placement(facts: Facts) -> None:
    def sent(strategy, source, topology=GPUS):
        state = facts.parts.on(strategy.layout(strategy.make_mesh(CPUS.devices)))
        costs = Estimate(facts, Candidate(strategy=strategy), topology, state).costs
        return sum(t.sent_bytes for t in costs.traffic if t.source == source)

    whole = sum(
        4 * x.size
        for x in jax.tree.leaves(facts.parts.on(FSDP().layout()).abstract.params)
    )
    # An all-reduce sends twice 7/8 of the gradients; a reduce-scatter sends them once
    # [ZeRO, 7].
    assert sent(DataParallel(8), "gradients") == whole * 2 * 7 / 8
    fsdp = FSDP(8, min_size=0)
    assert sent(fsdp, "gradients") == pytest.approx(whole * 7 / 8, 0.05)
    # XLA for CPUs has no reduce-scatter.
    assert sent(fsdp, "gradients", CPUS) == pytest.approx(whole * 14 / 8, 0.05)
    assert sent(fsdp, "weights") == pytest.approx(whole * 14 / 8, 0.05)
    assert sent(FSDP(8, shard="gradients"), "weights") == 0


def test_tpu_estimate_counts_copies_of_gathered_parameters(facts: Facts) -> None:
    def owned(shard, topology):
        strategy = FSDP(8, shard=shard)
        state = facts.parts.on(strategy.layout(strategy.make_mesh(CPUS.devices)))
        return Estimate(facts, Candidate(strategy=strategy), topology, state).costs

    tpus = Topology.parse("v5p:2x2x2")
    for shard, share in (("params", 0.0), ("gradients", 1.0), ("optimizer", 1.0)):
        tpu, gpu = (owned(shard, each).memory for each in (tpus, GPUS))
        copies = tpu["temporaries"] - gpu["temporaries"]
        # Arrays that FSDP does not split are updated without copies.
        assert copies == pytest.approx(share * tpu["parameters"], 0.02)


def test_candidates_are_divisible_and_placeable(parts: Parts) -> None:
    found = enumerate_candidates(parts, CPUS)
    assert len(found) == len(set(found))
    kinds = {type(part).__name__ for c in found for part in parts_in(c.strategy)}
    assert kinds == {"DataParallel", "FSDP", "TensorParallel", "Pipeline"}
    for strategy in {repr(c.strategy): c.strategy for c in found}.values():
        parts.on(strategy.layout(strategy.make_mesh(CPUS.devices)))


def parts_in(strategy):
    return strategy.parts if isinstance(strategy, Composite) else (strategy,)


def test_fixed_values_are_in_every_candidate(parts: Parts) -> None:
    kept = Save("mlp_up")
    fix = {"tensor": 2, "pipe": 1, "remat": kept, "microbatches": 2}
    found = enumerate_candidates(parts, CPUS, fix)
    assert found
    for each in found:
        assert each.strategy.make_mesh(CPUS.devices).shape["tensor"] == 2
        assert (each.remat, each.num_microbatches) == (kept, 2)
        assert "remat=Save('mlp_up')" in each.code


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        ({"tensr": 2}, "fix has 'tensr'. Did you mean 'tensor'?"),
        ({"remat": "some"}, "Valid values: ['none', 'dots', 'full'], Save(*names)"),
        ({"remat": None}, "fix has remat=None. Valid values: ['none', 'dots'"),
        ({"tensor": 0}, "fix has tensor=0. It must be an integer of at least 1."),
        (
            {"tensor": 3},
            "fix has tensor=3, which does not divide the 8 devices of cpu:8. Valid "
            "values: [1, 2, 4, 8].",
        ),
        (
            {"expert": 4},
            "fix has expert=4, and the model has 0 experts. Valid values: [1].",
        ),
        (
            {"pipe": 4},
            "fix has pipe=4, and the model has 2 layers in a Stack. Valid values: "
            "[1, 2].",
        ),
        ({"microbatches": 3}, "No strategy divides 32 rows over 8 devices of cpu:8"),
    ],
)
def test_invalid_fix_raises(parts: Parts, fix, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        plan(parts, topology=CPUS, fix=fix, compile=0)


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        (
            {"data": 4, "fsdp": 4},
            "{'data': 4, 'fsdp': 4}. The product of these sizes, 16,",
        ),
        (
            {"pipe": 2},
            "pipe=2, and the model has 0 layers in a Stack. Valid values: [1]",
        ),
        ({"tensor": 2}, "tensor=2, and the model has no dim with a name in ('heads',"),
    ],
)
def test_fixing_unusable_axis_raises(fix, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        enumerate_candidates(MODELS["stock"](), CPUS, fix)


def test_code_has_no_axis_of_size_one(parts: Parts) -> None:
    for fix in ({"pipe": 2}, {"tensor": 2}, {}):
        codes = [c.code for c in enumerate_candidates(parts, CPUS, fix)]
        assert codes
        assert not [code for code in codes if "size=1," in code or "size=1)" in code]
    alone = enumerate_candidates(parts, Topology.parse("cpu:1"))
    assert {c.strategy for c in alone} == {DataParallel(1)}


def test_small_model_shows_nonzero_figures(parts: Parts) -> None:
    found = plan(parts, topology="h100:8", candidates=[FSDP()], compile=0)
    memory, _, mfu, *_ = found.cells(found.entries[0])
    assert memory.endswith("MiB")
    assert not mfu.startswith("0%")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5q:4x4", "no hardware is called 'v5q'. Did you mean 'v5"),
        ("v5p", "is unknown. Write a slice of TPUs as 'v5p:4x4x4'"),
        ("h100:4x4", "give the number of h100 devices, at least 1: 'h100:16'"),
        (
            "v5p:2x2x3x2",
            "has 4 dims. A slice of v5p has at most 3, such as 'v5p:4x4x4'.",
        ),
        ("v6e:4x4x4", "has 3 dims. A slice of v6e has at most 2, such as 'v6e:4x4'."),
        ("v5p-7", "no slice of v5p has 3.5 chips. The number after the dash counts"),
        ("v6e-24", "no slice of v6e has 24 chips."),
        ("h100:12", "fast links join 8 devices of h100. Write 'h100:16'; or give the"),
        ("h100-8", "topology='h100-8' is unknown."),
    ],
)
def test_invalid_topology_raises(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Topology.parse(name)


# Slices as https://docs.cloud.google.com/tpu/docs/v5p lists them, and as MaxText does.
@pytest.mark.parametrize(
    ("name", "slice_name", "num_devices"),
    [
        ("v4-8", "v4:2x2x1", 4),
        ("v5p-32", "v5p:2x2x4", 16),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v5p-3072", "v5p:8x12x16", 1536),
        ("v5p-12288", "v5p:16x16x24", 6144),
        ("v5litepod-8", "v5e:2x4", 8),
        ("v5e-256", "v5e:16x16", 256),
        ("2*v6e-128", "2*v6e:8x16", 256),
        ("tpu7x-128", "v7x:4x4x4", 128),
    ],
)
def test_accelerator_types_name_slices(
    name: str, slice_name: str, num_devices: int
) -> None:
    topology = Topology.parse(name)
    assert topology == Topology.parse(slice_name)
    assert topology.num_devices == num_devices


def test_machines_and_network_can_differ_from_makers() -> None:
    assert Topology.parse("gb200:144").machine_size == 72
    given = Topology.parse("h100:12", machine_size=4, network_bandwidth=25e9)
    assert given.machine_size == 4
    # A ring over 8 devices leaves the machine: one adapter has 25 GB/s, four have 100.
    assert given.bandwidth(8, 1) == (25e9, 100e9)
    with pytest.raises(PlanError, match=r"machine_size=0 must be larger than 0\."):
        Topology.parse("h100:8", machine_size=0)


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x2x4", (False, False, False)),
        ("v7x:4x4x4", (True, True, True)),
        ("v6e:16x16", (True, True, False)),
        ("v5e:8x16", (False, True, False)),
    ],
)
def test_links_wrap_around_cubes_and_sides_of_16(name: str, wraps: tuple) -> None:
    assert Topology.parse(name).wraps == wraps


def test_describing_other_topologies_raises() -> None:
    message = "topology='h100:8' has no compiler that runs without devices."
    with pytest.raises(PlanError, match=re.escape(message)):
        Topology.parse("h100:8").described()


def test_custom_hardware_is_planned(parts: Parts) -> None:
    mine = dataclasses.replace(HARDWARE["h100"], name="mine", memory_bytes=1e5)
    topology = Topology.parse("mine:8", {"mine": mine})
    found = plan(parts, topology=topology, compile=0, candidates=DataParallel(8))
    assert found.best is None
    assert "does not fit" in found.entries[0].why
    assert "Nothing fits" in str(found)
    assert isinstance(mine, Hardware)


def test_plan_without_compiler_notes_only_formulas(parts: Parts) -> None:
    found = plan(parts, topology="h100:8", candidates=[FSDP(), DataParallel()])
    note = "only formulas: the compiler for h100 needs such a device in the machine"
    assert note in found.notes
    assert found.code == f"Trainer(..., {found.entries[0].candidate.code})"


def test_refused_candidates_show_error(parts: Parts) -> None:
    candidates = [FSDP(), Pipeline(3), Composite(Pipeline(8), FSDP(1))]
    found = plan(parts, topology=CPUS, compile=0, candidates=candidates)
    assert [e.candidate.strategy for e in found.entries[:1]] == [FSDP()]
    reasons = " ".join(e.refused for e in found.entries)
    assert "pipe=3" in reasons
    assert "2 layers" in reasons or "layers" in reasons


class Adversaries(nnx.Module):
    """Two networks that are trained in turns."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.critic = nnx.Linear(16, 16, rngs=rngs)
        self.generator = nnx.Linear(16, 16, rngs=rngs)


def test_players_are_planned_with_the_state_of_all() -> None:
    def judge(model: Any, batch: Any) -> jax.Array:
        return model.critic(model.critic(model.generator(batch["x"]))).mean()

    def follow(model: Any, batch: Any) -> jax.Array:
        return -model.generator(batch["x"]).mean()

    players = Players(
        critic=Player(optax.adam(1e-3), judge),
        generator=Player(optax.sgd(0.1, momentum=0.9), follow),
    )
    trainer, batch = Trainer(Adversaries, players, loggers=()), {"x": shape(64, 16)}
    strategy = FSDP(min_size=0)
    given: Any = {"topology": CPUS, "batch": batch, "compile": 0}
    found = plan(trainer, candidates=strategy, **given)
    assert found.notes[0].startswith("figures describe a step of the player 'critic'")
    assert found.num_params == 2 * (16 * 16 + 16)
    other = plan(trainer, player="generator", candidates=strategy, **given)
    costs: Any = [each.entries[0].costs for each in (found, other)]
    assert costs[0].flops > costs[1].flops
    assert costs[0].memory["optimizer state"] == costs[1].memory["optimizer state"]
    parts = Parts.of(trainer, batch).of_player("generator")
    counted, arguments, _ = memory_of(parts, Candidate(strategy=strategy))
    assert counted == arguments
    with pytest.raises(PlanError, match="Did you mean 'critic'"):
        plan(trainer, player="critics", **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": None}, "plan got no batch"),
        ({"batch": {"x": 3}}, "A leaf of batch= is 3"),
        ({"candidates": []}, "candidates=[] is empty"),
        ({"candidates": ["fsdp"]}, "Each must be a Candidate or a Strategy"),
        ({"compile": "none"}, "compile='none' must be an int of at least 0, or 'all'."),
        ({"compile": -1}, "compile=-1 must be an int of at least 0, or 'all'."),
        (
            {"player": "critic"},
            "player='critic' is unknown. The Trainer has one loss.",
        ),
        ({"compile": True}, "compile=True must be an int of at least 0, or 'all'."),
    ],
)
def test_invalid_plan_arguments_raise(arguments: dict, message: str) -> None:
    trainer = Trainer(
        lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        optax.sgd(0.1),
        lambda model, batch: model(batch["x"]).mean(),
    )
    given: dict[str, Any] = {"batch": {"x": shape(8, 4)}, "compile": 0} | arguments
    with pytest.raises(PlanError, match=re.escape(message)):
        plan(trainer, topology=CPUS, **given)
    with pytest.raises(PlanError, match="plan got a function"):
        plan(print_nothing, topology=CPUS, batch=given["batch"])  # pyright: ignore[reportArgumentType]


def print_nothing() -> None:
    """A function that is not a Trainer."""


def test_axes_of_groups_are_found() -> None:
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    assert axes_of_groups([(0, 1), (6, 7)], sizes) == ("tensor",)
    assert axes_of_groups([(0, 2, 4, 6)], sizes) == ("data", "fsdp")
    assert axes_of_groups(None, sizes) == ("data", "fsdp", "tensor")


def test_step_is_bounded_by_slowest_part() -> None:
    h100 = Topology.parse("h100:16")
    sent = Traffic(axes=("fsdp",), sent_bytes=45e9, hidden=(0.0, 1.0), source="weights")
    costs = Costs(
        memory={}, flops=989.4e12, model_flops=989.4e12, moved_bytes=0, traffic=(sent,)
    )
    full = (1.0, 1.0)
    exact = Assumptions(products=full, memory=full, links=full, network=full)
    inside = time_step(costs, h100, {"data": 2, "fsdp": 8}, "bfloat16", exact)
    assert (inside.fast, inside.slow) == pytest.approx((1.0, 1.1))
    # Between machines, a device has 50 GB/s, and a ring of 16 uses all network
    # adapters.
    across = time_step(costs, h100, {"fsdp": 16}, "bfloat16", exact)
    assert across.slow == pytest.approx(1.9)
    waiting = dataclasses.replace(costs, bubble=0.5, traffic=())
    assert time_step(waiting, h100, {}, "bfloat16", exact).fast == pytest.approx(2.0)


def test_plan_exports_table_json_and_page(parts: Parts, tmp_path) -> None:
    found = plan(parts, topology=CPUS, compile=0, fix={"pipe": 1, "tensor": 1})
    text = str(found)
    assert "27 candidates" in text
    assert text.endswith(found.code)
    save(found, tmp_path / "plan.json")
    read = json.loads((tmp_path / "plan.json").read_text())
    best = read["candidates"][0]
    assert sum(best["memory"].values()) <= read["usable_bytes"]
    assert best["mfu"][0] < best["mfu"][1]
    page = render(found)
    assert page.count("<figure>") == 1 + 2 * 4
    # The XML namespace of SVG does not cause a request.
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    with pytest.raises(PlanError, match=r"not as 'plan\.txt'"):
        save(found, tmp_path / "plan.txt")


def test_formulas_drop_only_hopeless_candidates(parts: Parts) -> None:
    def planned(memory_bytes: float):
        small = dataclasses.replace(HARDWARE["cpu"], memory_bytes=memory_bytes)
        topology = Topology(hardware=small, num_devices=8)
        given = [DataParallel(8), FSDP(8, min_size=0)]
        return plan(parts, topology=topology, compile=0, candidates=given)

    memory = {
        repr(e.candidate.strategy): dict(e.costs.memory)
        for e in planned(1e9).entries
        if e.costs
    }["DataParallel(size=8)"]
    names = ("parameters", "optimizer state", "other state", "batch")
    state = sum(memory[name] for name in names)
    rest = sum(memory.values()) - state
    assert planned(state).num_dropped == 1
    # Estimates may be twice too high, so nothing is dropped, and the table says that it
    # does not fit.
    doubtful = planned(state + 0.6 * rest)
    assert doubtful.num_dropped == 0
    whole = {repr(e.candidate.strategy): e for e in doubtful.entries}
    assert not whole["DataParallel(size=8)"].fits(doubtful.topology)


@pytest.mark.slow
def test_choice_is_fastest_compiled_candidate(parts: Parts, tmp_path) -> None:
    """The choice has the least estimated time, and formulas do not drop it."""
    fix = {"pipe": 1, "microbatches": 1, "remat": "none"}
    fix |= {"shard": "params", "sequence": True}
    few = plan(parts, topology=CPUS, fix=fix, compile=3, cache=tmp_path)
    found = plan(parts, topology=CPUS, fix=fix, compile="all", cache=tmp_path)
    assert all(e.costs is None or e.costs.is_compiled for e in found.entries)
    assert few.best is not None
    assert found.best is not None
    times = {e.candidate: e.time.middle for e in found.entries if e.time}
    assert times[few.best.candidate] <= 1.02 * min(times.values())
    again = plan(parts, topology=CPUS, fix=fix, compile=3, cache=tmp_path)
    assert again.code == few.code
    assert len(list(tmp_path.glob("*.json"))) >= len(times) - 1
    assert TensorParallel in {
        type(part) for c in times for part in parts_in(c.strategy)
    }


@pytest.mark.parametrize("wanted", [0, 1])
def test_grouped_gradients_count_as_products(wanted: int) -> None:
    rows, kernels = shape(64, 8), shape(4, 8, 32)

    def total(x: jax.Array, kernels: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, kernels, jnp.full(4, 16, jnp.int32)).sum()

    forward = jax.make_jaxpr(total)(rows, kernels).jaxpr
    assert count_jaxpr_flops(forward) == 2 * 64 * 8 * 32
    backward = jax.make_jaxpr(jax.grad(total, argnums=wanted))(rows, kernels).jaxpr
    assert count_jaxpr_flops(backward) == 2 * 64 * 8 * 32


def test_printing_loss_is_planned() -> None:
    """A print is an operation without a result."""

    def loss(model: Any, batch: Any) -> Any:
        value = next_token_loss(model, batch)
        jax.debug.callback(lambda _: None, value.value)
        return value

    config = GPTConfig.tiny()
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), loss, loggers=()
    )
    batch = {"tokens": np.zeros((16, 65), np.int32)}
    found = plan(
        trainer,
        topology="cpu:8",
        batch=batch,
        candidates=[Candidate(strategy=FSDP(8))],
        compile=0,
    )
    assert found.entries[0].fits(CPUS) in (True, False)


def test_hidden_states_as_wide_as_the_sequence_are_not_scores() -> None:
    config = GPTConfig.tiny_llama(num_layers=2, embed_dim=32, seq_len=32)
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.sgd(0.1),
        next_token_loss,
        loggers=(),
    )
    parts = Parts.of(trainer, {"tokens": shape(8, 33, dtype="int32")})
    full = Facts.of(parts, ["full"], "cpu").row("full")
    assert (full.positions, full.width) == (32, 32)
    if full.scores is not None:
        assert math.prod(full.scores.dims[:-2]) == config.num_heads
    assert not is_of_pairs((32, 32), 32)
    assert is_of_pairs((4, 32, 32), 32)


def test_chunk_of_the_loss_follows_the_split_of_the_vocabulary() -> None:
    config = GPTConfig.preset("llama3.1-8b", seq_len=8192)
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        precision=Precision.mixed_bfloat16(),
        loggers=(),
    )
    parts = Parts.of(trainer, {"tokens": shape(2, 8193, dtype="int32")})
    strategy = TensorParallel(8)
    layout = strategy.layout(strategy.make_mesh(GPUS.devices))
    candidate = Candidate(strategy=strategy, remat="full")
    facts = Facts.of(parts, ["full"], "gpu")
    found = Estimate(facts, candidate, GPUS, parts.on(layout)).loss_bytes
    # 2,092 tokens of 16,032 classes in 128 MiB, twice, and the head's gradient
    assert found == 2 * 2092 * 4 * 16032 + 4 * 4096 * 16032
