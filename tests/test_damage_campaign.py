"""Damages hundreds of saved runs, reads each again, and counts the outcomes.

`NNX_PARALLEL_DAMAGES=700 pytest -m deep -s tests/test_damage_campaign.py` makes 1,400.
"""

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import Checkpoint, Trainer
from nnx_parallel.checkpoint import CheckpointManager, CheckpointReader
from nnx_parallel.checkpoint.contents import to_groups
from nnx_parallel.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    CheckpointReadError,
)
from tests.checkpoints import abstract, bits

pytestmark = pytest.mark.deep

NUM_DAMAGES = int(os.environ.get("NNX_PARALLEL_DAMAGES", "70"))
HANGS_AFTER_SECONDS = 60
NAMED = (CheckpointReadError, CheckpointFormatError, CheckpointNotFoundError)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run with two checkpoints, and the abstract state to read them with."""
    directory = tmp_path_factory.mktemp("run")
    trainer = Trainer(
        model=lambda rngs: nnx.Sequential(
            nnx.Linear(8, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        ),
        optimizer=optax.adam(0.1),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        checkpoint=Checkpoint(directory, every=2),
        loggers=(),
    )
    trainer.fit([{"x": np.full((8, 8), i + 1, np.float32)} for i in range(4)], 4)
    return directory, abstract(to_groups(trainer.state))


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def blank(path: Path, rng: random.Random) -> None:
    """Writes zeros over a block, as on a disk block that was never written."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def delete(path: Path, rng: random.Random) -> None:
    victim = rng.choice([path, path.parent])  # the parent may be the whole step
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()


def exchange(path: Path, rng: random.Random) -> None:
    """Swaps a file with its counterpart in the other step, or with another file."""
    step = next(x for x in path.parents if x.name == "4")
    same = step.parent / "2" / path.relative_to(step)
    other = (
        same if same.is_file() and rng.random() < 0.7 else rng.choice(files_of(step))
    )
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def exchange_parts(path: Path, rng: random.Random) -> None:
    """Replaces a directory, up to the whole step, with that of the other step."""
    run = next(x for x in path.parents if x.name == "4").parent
    part = rng.choice([x for x in path.parents if run in x.parents])
    shutil.rmtree(part)
    source = run / "2" / part.relative_to(run / "4")
    shutil.copytree(source if source.is_dir() else run / "2", part)


def files_of(step: Path) -> list[Path]:
    return [x for x in sorted(step.rglob("*")) if x.is_file() and x.stat().st_size]


DAMAGES = [flip, flip, flip, truncate, blank, empty, delete, exchange, exchange_parts]


def damaged_runs(run: Path, scratch: Path) -> Iterator[tuple[Path, str]]:
    rng = random.Random(0)
    for index in range(NUM_DAMAGES):
        directory = scratch / str(index)
        shutil.copytree(run, directory)
        damage = DAMAGES[index % len(DAMAGES)]
        path = rng.choice(files_of(directory / "4"))
        name = f"{damage.__name__} {path.relative_to(directory)}"
        damage(path, rng)
        yield directory, name
        shutil.rmtree(directory)


def outcome(read: Callable[[], list[bytes]], newest: Any, previous: Any) -> str:
    """Describes the outcome of reading a damaged run in one to three words."""
    found: list[str] = []

    def look() -> None:
        try:
            values = read()
        except NAMED:
            found.append("named error")
        except Exception as error:
            found.append(f"raw error: {type(error).__name__}: {error}")
        else:
            word = "fell back" if values == previous else "silently wrong"
            found.append("equal" if values == newest else word)

    reader = threading.Thread(target=look, daemon=True)
    reader.start()
    reader.join(HANGS_AFTER_SECONDS)
    return found[0] if found else "hung"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("on_damage", ["error", "previous"])
def test_every_damage_is_detected_or_named(
    on_damage: Any, run: tuple[Path, Any], tmp_path: Path
) -> None:
    directory, wanted = run

    def read(where: Path, step: int | None = None) -> list[bytes]:
        options = Checkpoint(where, on_damage=on_damage)
        if step is not None:
            return bits(CheckpointReader(options).restore(wanted, step)[0])
        with CheckpointManager(options) as manager:
            found = manager.saved.restore_newest(wanted, quarantines=True)
        if found is None:
            raise CheckpointNotFoundError("none")
        return bits(found[0][0])

    newest, previous = read(directory, 4), read(directory, 2)
    outcomes: Counter[str] = Counter()
    bad = []
    for damaged, name in damaged_runs(directory, tmp_path):
        result = outcome(lambda where=damaged: read(where), newest, previous)
        outcomes[result.partition(":")[0]] += 1
        if result not in {"equal", "fell back", "named error"}:
            bad.append(f"{name}: {result}")
        # If a step has no files left, a fallback is allowed: it may never have been
        # saved.
        elif (
            result == "fell back"
            and on_damage == "error"
            and "4" in os.listdir(damaged)
        ):
            bad.append(f"{name}: passed over in silence")
    print(f"{on_damage}: {dict(outcomes)}")  # noqa: T201
    assert not bad, bad
    assert outcomes["fell back" if on_damage == "previous" else "named error"] > 0
