"""Candidates of a plan: precision, offload, any stack, and the traffic of experts."""

import dataclasses
import re

import jax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Backend,
    Composite,
    ExpertParallel,
    Offload,
    OneFOneB,
    Pipeline,
    Precision,
    TensorParallel,
)
from nnx_parallel.collectives.ring import TokenExchange
from nnx_parallel.errors import PlanError
from nnx_parallel.layers import Stack
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan import HARDWARE, Candidate, Topology, plan
from nnx_parallel.plan.candidates import MIXED, enumerate_candidates
from nnx_parallel.plan.costs import Facts
from nnx_parallel.plan.estimate import Estimate
from nnx_parallel.plan.parts import Parts
from nnx_parallel.strategies.base import Strategy
from tests.plans import ROWS, gpt, parts_of, shape

CPUS, GPUS = Topology.parse("cpu:8"), Topology.parse("h100:8")


class TwoStacks(nnx.Module):
    """An encoder of 6 layers and a decoder of 3."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = lambda rngs: nnx.Linear(16, 16, rngs=rngs)  # noqa: E731
        self.encoder = Stack(make, 6, rngs=rngs)
        self.decoder = Stack(make, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decoder(self.encoder(x))


def two_stacks() -> Parts:
    def loss(model: TwoStacks, batch: dict[str, jax.Array]) -> jax.Array:
        return (model(batch["x"]) ** 2).mean()

    return parts_of(TwoStacks, loss, {"x": shape(ROWS, 16)})


def linear(precision: Precision | None = None) -> Parts:
    def loss(model: nnx.Linear, batch: dict[str, jax.Array]) -> jax.Array:
        return (model(batch["x"]) ** 2).mean()

    build = lambda rngs: nnx.Linear(256, 256, rngs=rngs)  # noqa: E731
    return parts_of(build, loss, {"x": shape(ROWS, 256)}, precision=precision)


@pytest.fixture(scope="module")
def mixture() -> tuple[GPTConfig, Facts]:
    config = GPTConfig.tiny_experts(num_layers=2)
    tokens = shape(ROWS, config.seq_len + 1, dtype="int32")
    build = lambda rngs: GPT(config, rngs=rngs)  # noqa: E731
    parts = parts_of(build, next_token_loss, {"tokens": tokens})
    return config, Facts.of(parts, ("none",), "cpu")


def pipelines(parts: Parts, topology: Topology, **fix: object) -> set[Pipeline]:
    found = enumerate_candidates(parts, topology, {"data": 1, **fix})
    strategies = [part for c in found for part in parts_in(c.strategy)]
    return {s for s in strategies if isinstance(s, Pipeline)}


def parts_in(strategy: Strategy) -> tuple[Strategy, ...]:
    return strategy.parts if isinstance(strategy, Composite) else (strategy,)


def test_pipelines_cover_any_and_uneven_stacks() -> None:
    parts = two_stacks()
    found = {(p.size, p.stack) for p in pipelines(parts, CPUS, schedule="1f1b")}
    # 6 layers over 4 stages are 2, 2, 1 and 1, so a quarter of the time is bubble.
    assert found == {(2, None), (4, None), (2, "decoder")}
    (own,) = pipelines(parts, CPUS, schedule="1f1b", stack="decoder", pipe=2)
    assert own.stack == "decoder"
    with pytest.raises(PlanError, match=re.escape("['encoder', 'decoder']")):
        enumerate_candidates(parts, CPUS, {"stack": "middle"})
    planned = plan(parts, topology=CPUS, compile=0, fix={"pipe": 2, "fsdp": 4})
    assert not [e.refused for e in planned.entries if e.refused]


def test_uneven_pipeline_costs_bubble_and_memory() -> None:
    parts = two_stacks()
    facts = Facts.of(parts, ("none",), "cpu")

    def costs(size: int):
        strategy = Composite(Pipeline(size), FSDP(8 // size, min_size=0))
        candidate = Candidate(strategy=strategy, num_microbatches=4)
        layout = strategy.layout(strategy.make_mesh(CPUS.devices))
        return Estimate(facts, candidate, CPUS, parts.on(layout)).costs

    table = OneFOneB().table(4, 4)
    assert costs(4).bubble == pytest.approx(table.simulate(num_layers=6).bubble)
    assert costs(4).bubble > table.simulate().bubble
    names = {t.source for t in costs(4).traffic if t.axes == ("pipe",)}
    assert {"weights", "activations"} <= names


def test_halves_are_tried_only_if_fixed(mixture: tuple[GPTConfig, Facts]) -> None:
    def overlaps(**fix: object) -> set[str | None]:
        parts = mixture[1].parts
        found = enumerate_candidates(parts, CPUS, {"tensor": 2, "pipe": 1, **fix})
        each = {part for c in found for part in parts_in(c.strategy)}
        return {s.overlap for s in each if isinstance(s, TensorParallel)}

    assert overlaps() == {None, "ring"}
    assert overlaps(sequence="halves") == {"halves"}
    with pytest.raises(PlanError, match="No strategy divides"):
        overlaps(sequence="halves", pipe=2)  # a stage does not split rows


@pytest.mark.parametrize(
    ("precision", "topology", "expected"),
    [
        (None, GPUS, {None, MIXED}),
        (None, CPUS, {None}),
        (Precision.mixed_bfloat16(), GPUS, {None}),
        (Precision(compute="float32"), GPUS, {None}),
    ],
)
def test_bfloat16_is_tried_without_explicit_precision(
    precision: Precision | None, topology: Topology, expected: set
) -> None:
    fix = {"fsdp": 8, "remat": "none"}
    parts = linear(precision)
    found = enumerate_candidates(parts, topology, fix)
    assert {c.precision for c in found} == expected
    own = enumerate_candidates(parts, topology, fix | {"precision": "own"})
    assert {c.precision for c in own} == {None}


def test_choice_of_another_precision_is_noted() -> None:
    fix = {"fsdp": 8, "shard": "params", "microbatches": 1}
    found = plan(linear(), topology=GPUS, fix=fix, compile=0)
    assert found.code.endswith("precision=Precision.mixed_bfloat16())")
    assert any("sets no precision" in note for note in found.notes)
    mixed, own = found.entries
    assert (mixed.dtype, own.dtype) == ("bfloat16", "float32")
    assert mixed.costs is not None
    assert own.costs is not None
    assert mixed.costs.memory["parameters"] == own.costs.memory["parameters"]
    assert mixed.costs.sent_bytes < own.costs.sent_bytes


def test_state_is_offloaded_if_it_does_not_fit() -> None:
    parts, fix = linear(), {"fsdp": 8, "shard": "params"}

    def planned(memory_bytes: float, **more: object):
        small = dataclasses.replace(HARDWARE["cpu"], memory_bytes=memory_bytes)
        topology = Topology(hardware=small, num_devices=8)
        return plan(parts, topology=topology, fix=fix | more, compile=0)

    roomy = planned(1e9)
    assert not [e for e in roomy.entries if e.candidate.offload]
    small = min(e.costs.total_bytes for e in roomy.entries if e.costs)
    usable = HARDWARE["cpu"].usable
    tight = planned((small - 1e4) / usable)
    assert tight.best is not None
    assert tight.best.candidate.offload == Offload()
    assert tight.best.costs is not None
    assert tight.best.costs.host_bytes == 2 * 4 * (256 * 256 / 8 + 256)
    assert tight.best.time is not None
    assert tight.best.time.parts["host"] > 0
    assert "backend=Backend(offload=Offload(optimizer=True" in tight.code
    assert any("between a device and its host" in note for note in tight.notes)
    never = planned((small - 1e4) / usable, offload=False)
    assert never.best is None


def test_offload_of_trainer_is_kept() -> None:
    parts = gpt(backend=Backend(offload=Offload()))
    assert parts.offload == Offload()
    found = enumerate_candidates(parts, CPUS, {"fsdp": 8})
    assert {c.offload for c in found} == {Offload()}


@pytest.mark.parametrize(
    ("topology", "own", "exchange", "copies"),
    [
        (CPUS, None, "gather", 4),
        (GPUS, None, "ragged", 2),  # each token has two experts
        (GPUS, "gather", "gather", 4),
    ],
)
def test_expert_traffic_follows_exchange(
    mixture: tuple[GPTConfig, Facts],
    topology: Topology,
    own: TokenExchange | None,
    exchange: str,
    copies: int,
) -> None:
    config, facts = mixture
    strategy = Composite(ExpertParallel(4, exchange=own), FSDP(2))
    state = facts.parts.on(strategy.layout(strategy.make_mesh(topology.devices)))
    estimate = Estimate(facts, Candidate(strategy=strategy), topology, state)
    (sent,) = (t for t in estimate.costs.traffic if t.source.startswith("tokens"))
    assert sent.source == f"tokens ({exchange})"
    # Sent and returned, forward and backward, in two layers, in float32.
    hidden = ROWS / 8 * config.seq_len * config.embed_dim * 4
    assert sent.sent_bytes == pytest.approx(4 * 2 * hidden * copies * 3 / 4)
