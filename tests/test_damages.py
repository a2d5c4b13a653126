"""Damaged files never restore wrong values: they are harmless, or raise an error."""

import contextlib
import errno
import gc
import os
import pickle
import random
import re
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Checkpoint, Trainer
from nnx_parallel.checkpoint import CheckpointManager, CheckpointReader, files
from nnx_parallel.checkpoint.orbax_compat import is_transient, reading
from nnx_parallel.data import DataState
from nnx_parallel.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointUnavailableError,
    DataError,
    ParallelError,
)
from tests.checkpoints import (
    META,
    abstract,
    bits,
    damage,
    make_groups,
    rewrite_header,
)

NUM_FLIPS = 150

# Orbax abandons asyncio tasks whose files could not be read.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collects the futures that Orbax never awaits, so that errors end in this test."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    with CheckpointManager(Checkpoint(directory)) as manager:
        manager.save_groups(7, make_groups(), META, metrics={"loss": 0.5})
    return directory


def flips(step: Path, count: int) -> Iterator[tuple[str, Any]]:
    """Yields flips of single bits, in each file in turn."""
    rng = random.Random(0)
    files = [f for f in sorted(step.rglob("*")) if f.is_file() and f.stat().st_size]
    for index in range(count):
        file = files[index % len(files)]
        position = rng.randrange(file.stat().st_size)
        yield str(file.relative_to(step)), (position, 1 << rng.randrange(8))


def cuts(step: Path) -> Iterator[tuple[str, Any]]:
    """Yields cuts: each file halved, emptied or deleted, and each directory deleted."""
    for path in sorted(step.rglob("*")):
        name = str(path.relative_to(step))
        if path.is_file():
            yield from ((name, "half"), (name, "empty"))
        yield name, "delete"


@pytest.mark.faults
def test_damaged_files_never_restore_other_values(saved: Path, tmp_path: Path) -> None:
    wanted, expected = abstract(make_groups()), bits(make_groups())
    damages = [*flips(saved / "7", NUM_FLIPS), *cuts(saved / "7")]
    outcomes: Counter[str] = Counter()
    for index, (name, how) in enumerate(damages):
        directory = tmp_path / str(index)
        shutil.copytree(saved, directory)
        damage(directory / "7", name, how)
        try:
            found, meta = CheckpointReader(directory).restore(wanted)
        except (CheckpointReadError, CheckpointNotFoundError) as error:
            outcomes[type(error).__name__] += 1
        else:
            assert bits(found) == expected, (name, how)
            assert meta == META, (name, how)
            outcomes["harmless"] += 1
        shutil.rmtree(directory)
    assert sum(outcomes.values()) >= 150
    assert outcomes["CheckpointDamagedError"] > 0, outcomes
    assert outcomes["CheckpointReadError"] > 0, outcomes


def make_trainer(checkpoint: Any) -> Trainer:
    return Trainer(
        model=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        optimizer=optax.adam(0.1),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        strategy=FSDP(min_size=0),
        checkpoint=checkpoint,
        loggers=(),
    )


BATCHES = [{"x": np.full((8, 8), i + 1, np.float32)} for i in range(6)]


def train(directory: Path, num_steps: int, **options: Any) -> Trainer:
    trainer = make_trainer(Checkpoint(directory, every=2, **options))
    trainer.fit(BATCHES, num_steps)
    return trainer


def spoil_values(step: Path) -> None:
    """Replaces the largest array with the same array of another intact checkpoint."""
    other = step.parent / "2"
    for path in ("model", "optimizer"):
        shutil.rmtree(step / path)
        shutil.copytree(other / path, step / path)


def test_damaged_newest_step_names_arrays(tmp_path: Path) -> None:
    train(tmp_path, 4)
    spoil_values(tmp_path / "4")
    with pytest.raises(CheckpointDamagedError) as caught:
        train(tmp_path, 6)
    text = str(caught.value)
    assert f"Checkpoint 4 in '{tmp_path}' is damaged: " in text
    assert re.search(r"model: `kernel` has checksum \w{8} instead of \w{8}", text)
    assert re.search(r"optimizer: `0.mu.kernel` has checksum", text)
    assert "progress" not in text
    assert "Other steps: [2]. Checkpoint(..., on_damage='previous') quarantines" in text


@pytest.mark.parametrize(
    "damaged", ["header", "field", "values", "directory", "fingerprints"]
)
def test_fallback_restores_newest_intact_step(damaged: str, tmp_path: Path) -> None:
    expected = train(tmp_path / "whole", 6)
    run = tmp_path / "run"
    train(run, 4)
    metadata = run / "4" / "_CHECKPOINT_METADATA"
    if damaged == "values":
        spoil_values(run / "4")
    elif damaged == "header":
        damage(run / "4", metadata.name, "half")
    elif damaged == "field":
        metadata.write_text(metadata.read_text().replace("init_time", "ini|_time"))
    else:
        part = "optimizer" if damaged == "directory" else damaged
        shutil.rmtree(run / "4" / part)
    resumed = train(run, 6, on_damage="previous")
    assert bits(resumed.state.params) == bits(expected.state.params)
    assert len(list(run.glob("damaged-4-*"))) == 1
    assert {p.name for p in run.iterdir() if p.name.isdigit()} == {"2", "4", "6"}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::RuntimeWarning")
def test_transient_error_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 4)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    with CheckpointManager(Checkpoint(tmp_path, on_damage="previous")) as manager:
        stored = manager.saved.describe(4)
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            stored.groups,
        )
        told: list[str] = []

        def restore(max_files: int) -> None:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, before[1]))
                manager.saved.reload()
                manager.saved.restore(wanted, 4)
            except CheckpointUnavailableError as error:
                told.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            gc.collect()

        with monkeypatch.context() as patch:
            # Garbage collection of incomplete event loops raises errors, and pytest's
            # hook would open files to report them.
            patch.setattr(sys, "unraisablehook", lambda _: None)
            for spare in range(16):  # each number makes it fail at another place
                restore(first_free + spare)
        assert len(told) > 1
        assert all("This is not damage, and nothing was changed" in x for x in told)
        manager.saved.restore_newest(wanted, quarantines=True)
    assert not list(tmp_path.glob("damaged-*"))
    assert (tmp_path / "4").is_dir()


def test_object_store_step_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "file").touch()
    monkeypatch.setattr(files, "is_url", lambda text: True)
    moved = Path(files.quarantine(str(tmp_path), 4))
    assert moved.name.startswith("damaged-4-")
    assert (moved / "file").is_file()
    assert not (tmp_path / "4").exists()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (PermissionError("no"), True),
        (TimeoutError(), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 GiB"), True),
        (ValueError("Error opening file [OS error 24: EMFILE Too many]"), True),
        (FileNotFoundError("gone"), False),
        (EOFError("short"), False),
        (ValueError("DATA_LOSS: checksum"), False),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shape"), False),
    ],
)
def test_transient_errors_are_recognized(error: Exception, passes: bool) -> None:
    outer = ValueError("wrapped")
    outer.__cause__ = error
    assert is_transient(outer) == passes


def told(error: Exception) -> Exception:
    """The error that reading raises in place of an error of Orbax."""
    with pytest.raises(ParallelError) as caught, reading("step 4", [4]):
        raise error
    return caught.value


def test_errors_are_transient_when_files_run_out() -> None:
    error = RuntimeError("random_device: device not available")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/dev/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 20, before[1]))
        short = told(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert isinstance(short, CheckpointUnavailableError)
    assert isinstance(told(error), CheckpointReadError)


def test_all_steps_damaged_raises(tmp_path: Path) -> None:
    train(tmp_path, 2)
    shutil.rmtree(tmp_path / "2" / "model")
    message = "No step in the directory is intact. Choose another directory"
    with pytest.raises(CheckpointDamagedError, match=re.escape(message)):
        train(tmp_path, 4, on_damage="previous")


def test_checksums_of_another_save_raise(tmp_path: Path) -> None:
    with CheckpointManager(Checkpoint(tmp_path)) as manager:
        manager.save_groups(1, make_groups(), META)
        manager.save_groups(2, make_groups(), META | {"seed": 4})
        manager.wait()
        file = Path("fingerprints") / "fingerprints.json"
        shutil.copy(tmp_path / "1" / file, tmp_path / "2" / file)
        message = "Its checksums were saved with another header."
        with pytest.raises(CheckpointReadError, match=re.escape(message)):
            manager.saved.describe(2)


class Hostile:
    def __reduce__(self) -> Any:
        return (open, ("executed", "w"))


def test_loading_executes_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = pickle.dumps(Hostile())
    files = [f for f in sorted((saved / "7").rglob("*")) if f.is_file()]
    for index, file in enumerate(files):
        directory = tmp_path / str(index)
        shutil.copytree(saved, directory)
        (directory / file.relative_to(saved)).write_bytes(program)
        with contextlib.suppress(CheckpointReadError, CheckpointNotFoundError):
            found, _ = CheckpointReader(directory).restore(abstract(make_groups()))
            assert bits(found) == bits(make_groups())
    assert not (tmp_path / "executed").exists()


def test_group_name_outside_directory_raises(saved: Path, tmp_path: Path) -> None:
    def rename(header: dict) -> None:
        for part in ("sizes", "keys", "arrays"):
            header[part]["../../outside"] = header[part].pop("model")

    directory = tmp_path / "run"
    shutil.copytree(saved, directory)
    shutil.copytree(saved / "7" / "model", tmp_path / "outside")
    rewrite_header(directory / "7", rename)
    message = "A group is named '../../outside', which is not a Python identifier."
    with pytest.raises(CheckpointReadError, match=re.escape(message)):
        CheckpointReader(directory).describe()


@pytest.mark.parametrize(
    "position",
    [
        {"first_step": "7"},
        {"states": {"0": 1}},
        {"first_step": [1]},
        {"num_steps": "8"},
        {"pass_rows": None},
        {"marks": [[1, 2, 3]]},
    ],
)
def test_invalid_data_position_raises(position: dict) -> None:
    message = (
        "It must hold the integers first_step and num_steps, and the lists states "
        "and marks."
    )
    with pytest.raises(DataError, match=re.escape(message)):
        DataState.from_json(position)


def test_package_never_unpickles() -> None:
    package = Path(__file__).parents[1] / "nnx_parallel"
    pattern = (
        r"\b(pickle|cloudpickle|dill|marshal|shelve|allow_pickle|eval|exec)\b\s*[.(=]"
    )
    found = [
        f"{file.relative_to(package)}: {line.strip()}"
        for file in sorted(package.rglob("*.py"))
        for line in file.read_text().splitlines()
        if re.search(pattern, line) and ".eval()" not in line
    ]
    # `plan` runs the user's script, and sends pickles to its child process over a pipe.
    assert found == [
        "cli/script.py: exec(code, vars(module))",
        "plan/compiled.py: sent = cloudpickle.dumps((parts, candidate, topology, "
        "str(where)))",
        "plan/compiled.py: parts, candidate, topology, cache = "
        "cloudpickle.loads(sys.stdin.buffer.read())",
    ]
