"""Unchanged public models train to the same numbers as with plain `nnx.jit`.

`make test` runs small models. `make test-deep` trains all models under FSDP, and
restores them on another mesh. All models under the other strategies are marked
``slow``.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.parity.checks import assert_all_below
from tests.strangers import runs
from tests.strangers.public.cases import PUBLIC

LIMIT = 2e-6
QUICK = {
    ("flax array leaves", "FSDP"),
    ("flax counter", "FSDP"),
    ("flax surgery", "FSDP"),
}

# Flax and this library warn about the authors' idioms, which these tests allow.
pytestmark = [
    pytest.mark.filterwarnings("ignore::nnx_parallel.errors.ParallelWarning"),
    pytest.mark.filterwarnings("ignore:Arrays in no Variable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _as_others_run_them() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


@cache
def plain(name: str) -> runs.Run:
    return runs.plain(PUBLIC[name])


def pairs() -> Iterator[Any]:
    for name in PUBLIC:
        for strategy in runs.STRATEGIES:
            mark = pytest.mark.deep if strategy == "FSDP" else pytest.mark.slow
            marks = [] if (name, strategy) in QUICK else [mark]
            yield pytest.param(name, strategy, marks=marks, id=f"{name}-{strategy}")


@pytest.mark.parametrize(("name", "strategy"), [*pairs()])
def test_public_model_trains_and_restores_unchanged(
    name: str, strategy: str, tmp_path: Path
) -> None:
    run, state = runs.trained(PUBLIC[name], strategy, tmp_path)
    assert runs.loss_difference(run, plain(name)) <= LIMIT
    assert_all_below(runs.array_differences(run, plain(name)), LIMIT)
    assert runs.same_bits(runs.restored(PUBLIC[name], tmp_path), state)
