"""A checkpoint of any strategy restores under any other, and the run continues."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
import pytest
from jax.sharding import Sharding

from nnx_parallel import (
    Checkpoint,
    Composite,
    ContextParallel,
    Trainer,
    TrainState,
)
from nnx_parallel.checkpoint.contents import to_groups
from tests.parity.models import CASES, Arrays
from tests.parity.runs import as_numpy
from tests.parity.strategies import ONE_DEVICE, PLANS, Plan, fsdp

LONG = Plan(make=lambda rules: Composite(ContextParallel(4), fsdp(2), rules=rules))
ALL_PLANS = {"one_device": ONE_DEVICE, **PLANS, "fsdp2_context4": LONG}
# Both models have stacked layers, named dims and dropout. The GPT has twice as many
# arrays.
PAIRS = [("mlp", plan) for plan in ("one_device", "fsdp8", "dp2_fsdp2_tp2")]
PAIRS += [pytest.param("gpt", plan, marks=pytest.mark.deep) for plan in ALL_PLANS]


def make_trainer(
    model: str, plan: Plan, directory: Path | None = None, *, seed: int = 0
) -> Trainer:
    return Trainer(
        CASES[model].build,
        optax.adamw(1e-2),
        CASES[model].loss,
        strategy=plan.strategy(),
        num_microbatches=2,
        seed=seed,
        ema_decay=0.9,
        checkpoint=directory and Checkpoint(directory),
        devices=plan.devices(),
        loggers=(),
    )


def all_arrays(state: TrainState) -> Arrays:
    """All arrays of a state, by group and path."""
    return {
        f"{group}: {path}": as_numpy(x)
        for group, arrays in to_groups(state).items()
        for path, x in arrays.items()
    }


def assert_same_bits(found: TrainState, expected: Arrays) -> None:
    arrays = all_arrays(found)
    assert arrays.keys() == expected.keys()
    different = [p for p in expected if arrays[p].tobytes() != expected[p].tobytes()]
    assert different == []


# Every pair of strategies


@pytest.fixture(scope="module")
def trained(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Arrays]:
    """A run of two steps on one device: its directory, and all of its arrays."""
    directory = tmp_path_factory.mktemp("trained")
    trainer = make_trainer(model, ONE_DEVICE, directory)
    trainer.fit(CASES[model].batches(2), num_steps=2)
    assert_is_trained(model, trainer.state)
    return directory, all_arrays(trainer.state)


def assert_is_trained(model: str, state: TrainState) -> None:
    """Checks that every part of the state differs from a new run's state."""
    before = all_arrays(make_trainer(model, ONE_DEVICE, seed=1).state)
    after = all_arrays(state)
    assert before.keys() == after.keys()
    assert {path.split(":")[0] for path in after} == {
        "model",
        "ema",
        "optimizer",
        "progress",
    }
    same = [p for p in after if after[p].tobytes() == before[p].tobytes()]
    assert same == []


@pytest.fixture(scope="module")
def targets(model: str) -> list[tuple[Trainer, dict[str, Sharding]]]:
    """Trainers for all strategies, with another seed, and their expected shardings."""
    trainers = [make_trainer(model, plan, seed=1) for plan in ALL_PLANS.values()]
    return [
        (
            trainer,
            {
                row.info.path: trainer.layout.sharding(row.placement.stored)
                for row in trainer.describe().rows
            },
        )
        for trainer in trainers
    ]


@pytest.mark.xdist_group("restore matrix")
@pytest.mark.parametrize(("model", "saved"), PAIRS, scope="module")
def test_restore_under_every_strategy_keeps_values(
    model: str,
    saved: str,
    trained: tuple[Path, Arrays],
    targets: list[tuple[Trainer, dict[str, Sharding]]],
    tmp_path: Path,
) -> None:
    source, expected = trained
    saver = make_trainer(model, ALL_PLANS[saved], tmp_path, seed=1)
    saver.restore(directory=source)
    saver.save()
    for trainer, stored in targets:
        trainer.restore(directory=tmp_path)
        assert trainer.step == 2
        assert_same_bits(trainer.state, expected)
        assert_lives_on(trainer, stored)
        for x in jax.tree.leaves(trainer.state):
            x.delete()  # the next restore cannot reuse these arrays


def assert_lives_on(trainer: Trainer, stored: dict[str, Sharding]) -> None:
    """Checks that arrays are placed by the strategy, not as they were saved."""
    groups = to_groups(trainer.state)
    for path, x in groups["model"].items():
        assert x.sharding.is_equivalent_to(stored[path], x.ndim), path
    devices = set(trainer.mesh.devices.flat)
    assert all(x.sharding.device_set == devices for x in jax.tree.leaves(groups))


# A run that was stopped


@dataclasses.dataclass
class Epochs:
    """Repeats four batches; a run of six steps is stopped in the first epoch."""

    batches: list[Arrays]

    def __iter__(self) -> Iterator[Arrays]:
        while True:
            yield from self.batches


class Rows:
    """Rows that Grain shuffles."""

    def __init__(self, batches: list[Arrays]) -> None:
        self._rows = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}

    def __len__(self) -> int:
        return len(next(iter(self._rows.values())))

    def __getitem__(self, index: int) -> Arrays:
        return {name: rows[index] for name, rows in self._rows.items()}


def shuffled_rows(batches: list[Arrays]) -> grain.IterDataset:
    """Epochs of four batches, each in another order."""
    rows = grain.MapDataset.source(Rows(batches)).seed(7).shuffle().repeat()
    return rows.to_iter_dataset().batch(32)


@pytest.mark.xdist_group("resume")
@pytest.mark.parametrize(
    ("model", "data"),
    [("mlp", shuffled_rows), pytest.param("gpt", Epochs, marks=pytest.mark.deep)],
)
def test_stopped_run_resumes(model: str, data: Any, tmp_path: Path) -> None:
    """The same strategy gives the same bits; another one is equal within rounding."""
    plan, other, batches = PLANS["fsdp4_tp2"], PLANS["dp8"], CASES[model].batches(4)
    whole = make_trainer(model, plan)
    expected = whole.fit(data(batches), num_steps=6)["loss"]

    stopped = make_trainer(model, plan, tmp_path)
    first = stopped.fit(data(batches), num_steps=3)["loss"]
    elsewhere = make_trainer(model, other, seed=1)
    elsewhere.restore(directory=tmp_path)
    resumed = make_trainer(model, plan, tmp_path, seed=1)
    rest = resumed.fit(data(batches), num_steps=6)["loss"]
    rest_elsewhere = elsewhere.fit(data(batches), num_steps=6)["loss"]

    np.testing.assert_array_equal(np.concatenate([first, rest]), expected)
    assert_same_bits(resumed.state, all_arrays(whole.state))
    np.testing.assert_allclose(rest_elsewhere, expected[3:], rtol=1e-5)
    assert len(set(expected)) == 6
