"""Every strategy trains every model to the numbers of one device.

``make test`` runs every value and every pair of values of models, strategies and
microbatches; ``make test-all`` their full product, with all of the compiler's
optimizations.
"""

from itertools import product

import jax
import numpy as np
import pytest
from flax import nnx

from tests.parity.models import CASES, Arrays
from tests.parity.pairs import all_pairs, pairs_met
from tests.parity.runs import Run, compiling, measure, promised_shardings, reference
from tests.parity.strategies import PLANS

MICROBATCHES = (1, 4)
PRODUCT = list(product(CASES, PLANS, MICROBATCHES))
CHOSEN = all_pairs(CASES, PLANS, MICROBATCHES)


def parametrized() -> list:
    """The product; what is not chosen is slow. One worker runs what shares a run."""
    return [
        pytest.param(
            *combination,
            marks=[
                pytest.mark.xdist_group(f"parity {combination[0]} {combination[2]}"),
                *([] if combination in CHOSEN else [pytest.mark.slow]),
            ],
        )
        for combination in PRODUCT
    ]


def test_every_pair_is_chosen() -> None:
    assert pairs_met(CHOSEN) == pairs_met(PRODUCT)
    assert len(CHOSEN) < 0.6 * len(PRODUCT)


@pytest.mark.parametrize(("model", "plan", "microbatches"), parametrized())
def test_same_numbers_as_one_device(model: str, plan: str, microbatches: int) -> None:
    case, strategy = CASES[model], PLANS[plan].strategy(CASES[model])
    devices = PLANS[plan].devices()
    optimized = (model, plan, microbatches) not in CHOSEN
    expected = reference(model, microbatches, optimized=optimized)
    with compiling(optimized=optimized):
        run = measure(case, strategy, devices, microbatches)

    assert_training(expected)
    assert_same_bits(run.initial, expected.initial)
    assert_gradients_close(run.gradients, expected.gradients)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(run.sgd_losses, expected.sgd_losses, rtol=1e-5)
    assert_params_close(run.params, expected.params)
    assert_params_close(run.variables, expected.variables)

    promised = promised_shardings(case, strategy, devices)
    assert_placed(run.start, promised)
    assert_placed(run.end, promised)
    assert_parts(run.end.params, PLANS[plan].params_parts)
    assert_parts(run.end.opt_state, PLANS[plan].optimizer_parts)
    assert axes_in_use(run) >= set(strategy.axis_sizes) - {"data"}


def assert_training(run: Run) -> None:
    """The losses fall, so that what is compared is training."""
    for losses in (run.losses, run.sgd_losses):
        assert losses[-4:].mean() < 0.9 * losses[:4].mean()


def assert_same_bits(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    different = [p for p in expected if found[p].tobytes() != expected[p].tobytes()]
    assert different == []


def assert_gradients_close(found: Arrays, expected: Arrays) -> None:
    """Each leaf to 1e-5 of the largest gradient of the tree."""
    assert found.keys() == expected.keys()
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    assert largest > 0
    errors = {p: np.abs(found[p] - expected[p]).max() / largest for p in expected}
    assert_all_below(errors, 1e-5)


def assert_params_close(found: Arrays, expected: Arrays) -> None:
    """Each leaf to 1e-5 of its own largest entry, or of 0.1 where that is more."""
    assert found.keys() == expected.keys()
    errors = {
        path: np.abs(found[path].astype(np.float64) - leaf).max()
        / max(np.abs(leaf).max(), 0.1)
        for path, leaf in expected.items()
    }
    assert_all_below(errors, 1e-5)


def assert_all_below(errors: dict[str, float], limit: float) -> None:
    # A NaN is not below the limit.
    above = {path: error for path, error in errors.items() if not error <= limit}
    assert above == {}


def assert_placed(state: object, promised: object) -> None:
    def is_placed(x: jax.Array, sharding: jax.sharding.Sharding) -> bool:
        return x.sharding.is_equivalent_to(sharding, x.ndim)

    placed = jax.tree_util.tree_map(is_placed, state, promised)
    leaves = jax.tree_util.tree_leaves_with_path(placed)
    assert [path for path, is_right in leaves if not is_right] == []


def assert_parts(tree: object, parts: int | None) -> None:
    """Every device holds one part in so many of all arrays but scalars."""
    if parts is None:
        return
    arrays = [x for x in jax.tree.leaves(tree) if x.ndim]
    total = sum(x.nbytes for x in arrays)
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    assert held * parts == total


def axes_in_use(run: Run) -> set[str]:
    """The mesh axes that split some array of the state."""
    entries = [
        entry
        for leaf in jax.tree.leaves(run.end)
        for entry in leaf.sharding.spec
        if entry is not None
    ]
    return {a for e in entries for a in ((e,) if isinstance(e, str) else e)}
