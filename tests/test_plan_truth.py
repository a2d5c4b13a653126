"""Formulas of a plan differ from compiled programs by a documented band."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from nnx_parallel import FSDP, Composite, DataParallel, GPipe, Pipeline, TensorParallel
from nnx_parallel.plan import Candidate, Topology
from nnx_parallel.plan.costs import Facts
from nnx_parallel.plan.estimate import Estimate
from nnx_parallel.training.step import StepOptions, make_train_step
from tests.plans import MODELS, PIPELINED, STRATEGIES

CPUS = Topology.parse("cpu:8")

MORE = {
    "dots": Candidate(strategy=FSDP(8), remat="dots"),
    "full": Candidate(strategy=FSDP(8), remat="full"),
    "dp8-full": Candidate(strategy=DataParallel(8), remat="full"),
    "tp2-dots": Candidate(strategy=STRATEGIES["tp2"], remat="dots"),
    "tp2-full": Candidate(strategy=STRATEGIES["tp2"], remat="full"),
    "microbatches": Candidate(strategy=FSDP(8), num_microbatches=2),
    "microbatches-dp8": Candidate(strategy=DataParallel(8), num_microbatches=2),
    "microbatches-zero2": Candidate(
        strategy=STRATEGIES["gradients"], num_microbatches=2
    ),
    "microbatches-full": Candidate(strategy=FSDP(8), num_microbatches=2, remat="full"),
    "zero2_tp": Candidate(
        strategy=Composite(FSDP(4, shard="gradients"), TensorParallel(2, sequence=True))
    ),
    "pipeline": Candidate(strategy=PIPELINED, num_microbatches=4),
    "pipeline-2": Candidate(strategy=PIPELINED, num_microbatches=2),
    "pipeline-dp": Candidate(
        strategy=Composite(Pipeline(2), DataParallel(4)), num_microbatches=4
    ),
    "pipeline-gpipe": Candidate(
        strategy=Composite(Pipeline(2, schedule=GPipe()), FSDP(4)), num_microbatches=4
    ),
    "pipeline-tp": Candidate(
        strategy=Composite(Pipeline(2), FSDP(2), TensorParallel(2)), num_microbatches=4
    ),
}
DEEP = ("gpt-fsdp8", "gpt-pipeline", "stock-fsdp8", "resnet-dp8", "gpt-zero2_tp")


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], Facts]:
    """Models that are already traced, by name and remat."""
    return {}


def every_configuration() -> Iterator:
    for model in MODELS:
        found = {n: Candidate(strategy=s) for n, s in STRATEGIES.items()}
        for name, candidate in (found | (MORE if model == "gpt" else {})).items():
            key = f"{model}-{name}"
            mark = pytest.mark.deep if key in DEEP else pytest.mark.slow
            yield pytest.param(model, candidate, id=key, marks=mark)


def bytes_of(facts: Facts, candidate: Candidate) -> tuple[float, dict[str, float], int]:
    """Bytes of one device by formulas, by owner, and by the compiler."""
    parts = facts.parts
    layout = candidate.strategy.layout()
    plan, batch = parts.on(layout), parts.batch_on(layout, candidate.num_microbatches)
    options = StepOptions(
        num_microbatches=candidate.num_microbatches, remat=candidate.remat
    )
    step: Any = make_train_step(plan, parts.loss, options)
    lowered = step.lower(plan.abstract, batch)
    memory = lowered.compile().memory_analysis()
    there = candidate.strategy.layout(candidate.strategy.make_mesh(CPUS.devices))
    costs = Estimate(facts, candidate, CPUS, parts.on(there)).costs
    compiled = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return costs.total_bytes, dict(costs.memory), compiled


@pytest.mark.filterwarnings("ignore::nnx_parallel.errors.ParallelWarning")
@pytest.mark.parametrize(("model", "candidate"), [*every_configuration()])
def test_formula_errors_are_within_documented_band(
    known: dict, model: str, candidate: Candidate
) -> None:
    # The stock model relies on rank promotion, as many models do.
    with jax.numpy_rank_promotion("allow"):
        key = model, candidate.remat
        if key not in known:
            parts = MODELS[model]()
            known[key] = Facts.of(parts, (candidate.remat,), "cpu")
        counted, owned, compiled = bytes_of(known[key], candidate)
    # docs/benchmarks.md, "Plans against a compiler"
    assert 0.95 < counted / compiled < 1.6, owned
