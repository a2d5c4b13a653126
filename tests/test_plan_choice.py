"""A plan's choice is the fastest of all compiled; formulas drop no winner."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import pytest

from nnx_parallel import FSDP
from nnx_parallel.plan import Assumptions, Candidate, Entry, Topology, plan
from nnx_parallel.plan.compiled import compile_here
from nnx_parallel.plan.parts import Parts
from nnx_parallel.plan.report import explain, order, simplest_first
from nnx_parallel.plan.roofline import Costs, StepTime, time_step
from nnx_parallel.plan.search import compile_best, plausible
from tests.plans import MODELS, STRATEGIES

CPUS, V5E, V5P = map(Topology.parse, ("cpu:8", "v5e:2x4", "v5p:2x2x2"))
COMPILED = 4  # of the best candidates by formulas, as in `plan`


@pytest.fixture
def optimized(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles TPU programs with all optimizations, as users and `plan` do."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    jax.config.update("jax_disable_most_optimizations", topology is CPUS)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def by_formulas(parts: Parts, topology: Topology) -> list[Entry]:
    """Estimates of all strategies by formulas, without reasons."""
    found = plan(parts, topology=topology, candidates=[*STRATEGIES.values()], compile=0)
    return [dataclasses.replace(entry, why="") for entry in found.entries]


def by_compiler(parts: Parts, guess: Entry, topology: Topology, cache: Path) -> Entry:
    """The candidate with the compiler's costs and time, as in `plan`."""
    assert guess.estimate is not None, guess.refused
    found = compile_here(parts, guess.candidate, topology, cache)
    assert not found.error
    costs = found.costs(guess.estimate)
    dtype = parts.compute_dtype
    time = time_step(costs, topology, guess.axis_sizes, dtype, Assumptions())
    return dataclasses.replace(guess, costs=costs, time=time)


def with_memory(topology: Topology, usable: float) -> Topology:
    hardware = topology.hardware
    small = dataclasses.replace(hardware, memory_bytes=usable / hardware.usable)
    return dataclasses.replace(topology, hardware=small)


def check_choice(
    guesses: Sequence[Entry], found: dict[Candidate, Entry], topology: Topology
) -> None:
    """The choice is the fastest of all that fit, and formulas do not drop it."""
    alive = plausible(guesses, topology)
    best = order([*found.values()], topology)[0]
    assert best.candidate in [entry.candidate for entry in alive]
    compiled = lambda some: [found[e.candidate] for e in some]  # noqa: E731
    tried = compile_best(alive, topology, COMPILED, compiled)
    assert order(tried, topology)[0].candidate == best.candidate


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::nnx_parallel.errors.ParallelWarning")
@pytest.mark.parametrize("topology", [CPUS, V5E, V5P], ids=lambda t: t.hardware.name)
@pytest.mark.parametrize("model", MODELS)
def test_choice_is_fastest_that_fits(
    model: str, topology: Topology, tmp_path: Path, optimized: None
) -> None:
    """Tries all memory, the memory of the median, and memory for two candidates."""
    if topology is not CPUS:
        pytest.importorskip("libtpu")
    # The stock model relies on rank promotion, as many models do.
    with jax.numpy_rank_promotion("allow"):
        parts = MODELS[model]()
        guesses = by_formulas(parts, topology)
        every = [by_compiler(parts, guess, topology, tmp_path) for guess in guesses]
    found = {entry.candidate: entry for entry in every}
    totals = sorted(entry.costs.total_bytes for entry in every if entry.costs)
    for usable in (1e9, totals[len(totals) // 2], totals[1]):
        check_choice(guesses, found, with_memory(topology, usable + 1))


def guessed(num: int, fast: float, slow: float, total: float = 1e9) -> Entry:
    """An estimate by formulas, identified by a number."""
    owned = {
        "parameters": 0.0,
        "optimizer state": 0.0,
        "other state": 0.0,
        "batch": 0.0,
    }
    costs = Costs(
        memory=owned | {"temporaries": total}, flops=1, model_flops=1, moved_bytes=1
    )
    time = StepTime(fast=fast, slow=slow, parts={"products": slow})
    return Entry(
        candidate=Candidate(strategy=FSDP(8), num_microbatches=num),
        axis_sizes={"fsdp": 8},
        estimate=costs,
        costs=costs,
        time=time,
        estimated_time=time,
    )


def as_compiled(guess: Entry, seconds: float, total: float = 1e9) -> Entry:
    assert guess.costs is not None
    owned = {**guess.costs.memory, "temporaries": total}
    costs = dataclasses.replace(guess.costs, memory=owned, is_compiled=True)
    time = StepTime(fast=seconds, slow=seconds, parts={"products": seconds})
    return dataclasses.replace(guess, costs=costs, time=time)


def numbers_compiled(
    guesses: Sequence[Entry], found: Sequence[Entry], count: int
) -> list[int]:
    by_candidate = {entry.candidate: entry for entry in found}
    compiled = lambda some: [by_candidate[e.candidate] for e in some]  # noqa: E731
    tried = compile_best(guesses, V5P, count, compiled)
    return [entry.candidate.num_microbatches for entry in tried]


GUESSES = [guessed(n, fast=n / 2, slow=8 * n) for n in (1, 2, 3, 4, 5)]


def test_accurate_formulas_need_no_more_compiles() -> None:
    found = [as_compiled(each, each.estimated_time.slow - 1) for each in GUESSES]  # pyright: ignore[reportOptionalMemberAccess]
    assert numbers_compiled(GUESSES, found, 2) == [1, 2]


def test_time_outside_range_compiles_more() -> None:
    # The first two take ten times their estimates, so their order means little. 20 s
    # correspond to an estimate of 2 s. Only one other candidate may take less at best.
    found = [as_compiled(e, t) for e, t in zip(GUESSES, (20, 40, 8, 9, 9), strict=True)]
    assert numbers_compiled(GUESSES, found, 2) == [1, 2, 3]


def test_no_fitting_candidate_compiles_more() -> None:
    large = 1e12
    found = [as_compiled(e, 1, large if i < 2 else 1e9) for i, e in enumerate(GUESSES)]
    assert numbers_compiled(GUESSES, found, 2) == [1, 2, 3, 4]


def test_explanations_compare_formulas_with_formulas() -> None:
    """Only the choice is compiled, and takes ten times its estimate."""
    best = as_compiled(GUESSES[1], 40)
    assert explain(GUESSES[3], best, V5P) == "2.00 x as slow: computes more"
    assert explain(guessed(9, 1, 16), best, V5P) == (
        "as fast by formulas; not compiled"
    )
    assert explain(GUESSES[0], best, V5P) == (
        "0.50 x the time by formulas; not compiled"
    )


def test_simplest_of_equally_fast_candidates_is_first() -> None:
    fastest = as_compiled(guessed(8, 1, 2), 1.0)
    simple, slow = as_compiled(guessed(2, 1, 2), 1.02), as_compiled(GUESSES[0], 1.04)
    guess = guessed(1, 0.9, 1.1)  # no compiler says so
    large = as_compiled(guessed(1, 1, 2), 1.01, 1e12)
    ranked, num_equal = simplest_first([fastest, simple, slow, guess, large], V5P)
    assert ranked == [simple, fastest, slow, guess, large]
    assert num_equal == 2
    assert simplest_first([], V5P) == ([], 0)
