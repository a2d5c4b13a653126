"""Checks that compare a run with the same run on one device."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from nnx_parallel import TrainState
from nnx_parallel.checkpoint.contents import to_groups
from nnx_parallel.visualize.describe import Description
from tests.parity.models import Arrays
from tests.parity.runs import Run


def assert_same_numbers(run: Run, expected: Run) -> None:
    """Compares start, gradients, losses, and all arrays after 20 steps."""
    assert_training(expected)
    assert_same_bits(run.initial, expected.initial)
    assert_gradients_close(run.gradients, expected.gradients)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(run.sgd_losses, expected.sgd_losses, rtol=1e-5)
    assert_params_close(run.params, expected.params)
    assert_params_close(run.variables, expected.variables)


def assert_training(run: Run) -> None:
    """Checks that the losses fall, so that real training is compared."""
    for losses in (run.losses, run.sgd_losses):
        assert losses[-4:].mean() < 0.9 * losses[:4].mean()


def assert_same_bits(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    different = [p for p in expected if found[p].tobytes() != expected[p].tobytes()]
    assert different == []


def assert_gradients_close(
    found: Arrays, expected: Arrays, limit: float = 1e-5
) -> None:
    """Compares gradients; each leaf's limit is 1e-5 of the tree's largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    assert largest > 0
    errors = {p: np.abs(found[p] - expected[p]).max() / largest for p in expected}
    assert_all_below(errors, limit)


def assert_each_gradient_close(
    found: Arrays, expected: Arrays, limit: float = 2e-5
) -> None:
    """Compares gradients; each leaf's limit is 2e-5 of the leaf's largest value."""
    assert found.keys() == expected.keys()
    largest = {path: np.abs(leaf).max() for path, leaf in expected.items()}
    assert all(size > 0 for size in largest.values()), largest
    errors = {p: np.abs(found[p] - x).max() / largest[p] for p, x in expected.items()}
    assert_all_below(errors, limit)


def assert_params_close(found: Arrays, expected: Arrays) -> None:
    """Compares each leaf to 1e-5 of its largest entry or, if that is more, of 0.1."""
    assert found.keys() == expected.keys()
    errors = {
        path: np.abs(found[path].astype(np.float64) - leaf).max()
        / max(np.abs(leaf).max(), 0.1)
        for path, leaf in expected.items()
    }
    assert_all_below(errors, 1e-5)


def assert_all_below(errors: dict[str, float], limit: float) -> None:
    # Written with `not`, so that NaN errors count too.
    above = {path: error for path, error in errors.items() if not error <= limit}
    assert above == {}


def assert_placed(state: TrainState, description: Description) -> None:
    """Checks that arrays are placed as described; others must be on all devices."""
    specs = {
        "model": {r.info.path: r.placement.stored for r in description.rows},
        "optimizer": {row.path: row.spec for row in description.optimizer_rows},
    }
    groups = to_groups(state)
    for group, expected in specs.items():
        assert groups[group].keys() == expected.keys()
    misplaced = [
        (group, path, x.sharding)
        for group, arrays in groups.items()
        for path, x in arrays.items()
        if not x.sharding.is_equivalent_to(
            description.layout.sharding(specs.get(group, {}).get(path, P())), x.ndim
        )
    ]
    assert misplaced == []


def assert_parts(tree: object, parts: int | None) -> None:
    """Checks that every device holds 1 in ``parts`` bytes of non-scalar arrays."""
    if parts is None:
        return
    arrays = [x for x in jax.tree.leaves(tree) if x.ndim]
    total = sum(x.nbytes for x in arrays)
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    assert held * parts == total


def axes_in_use(run: Run) -> set[str]:
    """The mesh axes that split at least one array of the state."""
    entries = [
        entry
        for leaf in jax.tree.leaves(run.end)
        for entry in leaf.sharding.spec
        if entry is not None
    ]
    return {a for e in entries for a in ((e,) if isinstance(e, str) else e)}
