"""A plan's choice is the fastest of all compiled; its formulas drop no winner."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import pytest

from nnx_parallel.audit.report import audit
from nnx_parallel.plan import HARDWARE, Assumptions, Candidate, Entry, Topology
from nnx_parallel.plan.compiled import Compiled, traffic_by_axes
from nnx_parallel.plan.costs import Facts
from nnx_parallel.plan.formulas import Estimate
from nnx_parallel.plan.report import order
from nnx_parallel.plan.roofline import Costs, time_step
from nnx_parallel.plan.search import plausible, to_compile
from nnx_parallel.training.step import StepOptions, make_train_step
from tests.plans import MODELS, STRATEGIES

CPUS = Topology.parse("cpu:8")
COMPILED = 4  # of the best by formulas, as `plan` does


def compile_here(facts: Facts, candidate: Candidate) -> Compiled:
    """As `plan` compiles, but in this process."""
    parts, count = facts.parts, candidate.num_microbatches
    layout = candidate.strategy.layout()
    state = parts.on(layout)
    options = StepOptions(num_microbatches=count, remat=candidate.remat)
    step: Any = make_train_step(state, parts.loss, options)
    compiled = step.lower(state.abstract, parts.batch_on(layout, count)).compile()
    memory, sizes = compiled.memory_analysis(), dict(layout.mesh.shape)
    report = audit(compiled)
    sent = (*report.collectives, *report.unread)
    return Compiled(
        memory={
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": 0,
        },
        flops=report.flops,
        traffic=traffic_by_axes(sent, sizes),
        num_collectives=report.count(),
        seconds={},
    )


def entry_of(facts: Facts, candidate: Candidate, costs: Costs, estimate: Costs):
    sizes = dict(candidate.strategy.make_mesh(CPUS.devices).shape)
    time = time_step(costs, CPUS, sizes, facts.parts.compute_dtype, Assumptions())
    return Entry(
        candidate=candidate,
        axis_sizes=sizes,
        estimate=estimate,
        costs=costs,
        time=time,
    )


def both(facts: Facts, candidate: Candidate) -> tuple[Entry, Entry]:
    """A candidate by formulas, and compiled."""
    layout = candidate.strategy.layout(candidate.strategy.make_mesh(CPUS.devices))
    guess = Estimate(facts, candidate, CPUS, facts.parts.on(layout)).costs
    found = compile_here(facts, candidate).costs(guess)
    return tuple(entry_of(facts, candidate, c, guess) for c in (guess, found))  # pyright: ignore[reportReturnType]


def check_choice(
    guesses: list[Entry], found: Mapping[Candidate, Entry], usable: float
) -> None:
    """With so much memory of a device the choice is the fastest that fits."""
    hardware = HARDWARE["cpu"]
    memory = usable / hardware.usable
    small = dataclasses.replace(hardware, memory_bytes=memory)
    topology = Topology(hardware=small, num_devices=8)
    alive = plausible(guesses, topology)
    best = order([*found.values()], topology)[0]
    assert best.candidate in [entry.candidate for entry in alive]
    tried = [found[e.candidate] for e in to_compile(alive, topology, COMPILED)]
    assert order(tried, topology)[0].candidate == best.candidate


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::nnx_parallel.errors.ParallelWarning")
@pytest.mark.parametrize("model", MODELS)
def test_the_choice_is_the_fastest_that_fits(model: str) -> None:
    """For each model with all memory, with the median, and with that of two."""
    with jax.numpy_rank_promotion("allow"):
        facts = Facts.of(MODELS[model](), ("none",), "cpu")
        candidates = [Candidate(strategy=s) for s in STRATEGIES.values()]
        pairs = [both(facts, candidate) for candidate in candidates]
    guesses = [guess for guess, _ in pairs]
    found = {entry.candidate: entry for _, entry in pairs}
    totals = sorted(entry.costs.total_bytes for entry in found.values() if entry.costs)
    for usable in (1e9, totals[len(totals) // 2], totals[1]):
        check_choice(guesses, found, usable + 1)
