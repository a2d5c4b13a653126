"""Every schedule on every mesh trains to the same numbers as one device.

The loss is weighted by token. ``make test`` runs one case, on a mesh of three axes.
``make test-deep`` runs each schedule on one mesh and each mesh with one schedule.
``make test-all`` runs the product with all models.
"""

import math
from dataclasses import dataclass
from itertools import product

import jax
import numpy as np
import pytest

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    GPipe,
    Interleaved,
    OneFOneB,
    Pipeline,
    Strategy,
    TensorParallel,
    ZeroBubble,
)
from nnx_parallel.schedules import Schedule, Table
from tests.parity.checks import (
    assert_parts,
    assert_placed,
    assert_same_numbers,
    axes_in_use,
)
from tests.parity.models import DEEP_CASES
from tests.parity.runs import compiling, described, measure, reference

MICROBATCHES = {2: 4, 4: 8}
"""Number of microbatches by stages, so large that every memory slot is reused."""


@dataclass(frozen=True)
class Lazy(Schedule):
    """A user's schedule: backward slots wait for two ticks, weight slots for more."""

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        stage, microbatch = np.ogrid[:num_stages, :num_microbatches]
        backward = 2 * num_stages - stage + microbatch
        return Table.from_ticks(
            num_stages,
            microbatch + stage,
            backward,
            backward + 1 + stage % 2,
            name="Lazy",
        )


SCHEDULES: dict[str, Schedule] = {
    "gpipe": GPipe(),
    "1f1b": OneFOneB(),
    "interleaved": Interleaved(chunks=2),
    "zero_bubble": ZeroBubble(),
    "own": Lazy(),
}
MESHES: dict[str, tuple[int, tuple[Strategy, ...]]] = {
    "pp2": (2, ()),
    "pp4": (4, ()),
    "pp2_fsdp2_tp2": (2, (FSDP(2, min_size=0), TensorParallel(2))),
    "pp2_dp4": (2, (DataParallel(4),)),
    "pp4_tp2": (4, (TensorParallel(2),)),
}
# Meshes that split all arrays of the layers evenly, with the number of parts.
LAYER_PARTS = {"pp2": 2, "pp4": 4, "pp2_dp4": 2}
PRODUCT = list(product(SCHEDULES, MESHES, DEEP_CASES))


def is_chosen(schedule: str, mesh: str, model: str) -> bool:
    """True for deep cases: each schedule, each mesh and each model at least once."""
    row, column = list(SCHEDULES).index(schedule), list(MESHES).index(mesh)
    is_on_diagonal = (row + 2 * column) % len(MESHES) == 0
    return is_on_diagonal and list(DEEP_CASES)[row % len(DEEP_CASES)] == model


def parametrized() -> list:
    """All combinations, marked deep or slow.

    Cases that share a reference run are in one group, so that one worker runs them.
    """
    cases = []
    for case in PRODUCT:
        group = pytest.mark.xdist_group(f"pipeline {case[2]} {MESHES[case[1]][0]}")
        depth = pytest.mark.deep if is_chosen(*case) else pytest.mark.slow
        cases.append(pytest.param(*case, marks=[group, depth]))
    return cases


def test_selection_covers_every_value() -> None:
    chosen = [combination for combination in PRODUCT if is_chosen(*combination)]
    assert len(chosen) == len({(c[0], c[1]) for c in chosen}) == len(SCHEDULES)
    for factor, values in enumerate((SCHEDULES, MESHES, DEEP_CASES)):
        counts = [sum(c[factor] == value for c in chosen) for value in values]
        assert min(counts) >= 1


@pytest.mark.parametrize(("schedule", "mesh", "model"), parametrized())
def test_training_matches_one_device(schedule: str, mesh: str, model: str) -> None:
    case = DEEP_CASES[model]
    size, others = MESHES[mesh]
    strategy = Composite(Pipeline(size, SCHEDULES[schedule]), *others)
    devices = jax.devices()[: math.prod(n or 1 for n in strategy.axis_sizes.values())]
    optimized = not is_chosen(schedule, mesh, model)
    microbatches = MICROBATCHES[size]
    expected = reference(model, microbatches, optimized=optimized, deep=True)
    with compiling(optimized=optimized):
        run = measure(case, strategy, devices, microbatches)
    assert_same_numbers(run, expected)

    description = described(case, strategy, devices)
    assert_placed(run.start, description)
    assert_placed(run.end, description)
    assert_parts(run.end.params["blocks"], LAYER_PARTS.get(mesh))
    assert axes_in_use(run) >= set(strategy.axis_sizes) - {"data"}
