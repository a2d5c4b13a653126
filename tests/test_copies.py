"""Copies in memory: what a run resumes from, and what it never reads."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Backend,
    Callback,
    Checkpoint,
    Composite,
    DataParallel,
    Offload,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.checkpoint import copies
from nnx_parallel.checkpoint.checksum import digest
from nnx_parallel.checkpoint.contents import to_groups
from nnx_parallel.checkpoint.copies import (
    free_in_container,
    overlap,
    read_layout,
    shape_of,
    slices,
)
from nnx_parallel.checkpoint.memory import RUN, MemoryCopies, find_neighbours
from nnx_parallel.errors import (
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointMismatchError,
    NonFiniteLossError,
)
from nnx_parallel.layers.dense import named

pytestmark = pytest.mark.long

STEPS, EVERY, DEATH = 12, 4, 9
COPIED, SAVED = 8, 6  # the newest copy and checkpoint before the death
LAYOUTS: dict[str, Callable[[], Strategy]] = {
    "fsdp": lambda: FSDP(4, min_size=0),
    "tensor": lambda: TensorParallel(2),
    "both": lambda: Composite(FSDP(2, min_size=0), TensorParallel(2)),
    "data": lambda: DataParallel(2),
}


class Model(nnx.Module):
    """An MLP with dropout, whose random state is a part of the training state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        up, down = (
            named(nnx.initializers.lecun_normal(), *names)
            for names in (("embed", "mlp"), ("mlp", "embed"))
        )
        self.up = nnx.Linear(8, 16, kernel_init=up, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(16, 8, kernel_init=down, rngs=rngs)


def loss(model: Any, batch: Any) -> jax.Array:
    hidden = model.dropout(nnx.relu(model.up(batch["x"])))
    return ((model.down(hidden) - batch["x"]) ** 2).mean()


BATCHES = [
    {"x": rows}
    for rows in np.random.default_rng(0).normal(size=(STEPS, 8, 8)).astype(np.float32)
]


class Death(Callback):
    """Ends a fit as a crash would, without a save."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == self.step:
            raise RuntimeError("the process dies")


class Run:
    """Runs that share a directory of checkpoints and a directory in memory."""

    def __init__(self, root: Path) -> None:
        self.root, self.messages = root, list[str]()
        self.directory, self.memory = root / "run", root / "memory"

    def trainer(
        self, layout: str = "fsdp", death: int | None = None, **options: Any
    ) -> Trainer:
        strategy = LAYOUTS[layout]()
        count = int(np.prod([size or 1 for size in strategy.axis_sizes.values()]))
        given = {"every": 100, "memory_every": EVERY, "memory_directory": self.memory}
        given |= options.pop("checkpoint", {})
        given["memory_directory"] = str(given["memory_directory"])
        return Trainer(
            options.pop("model", lambda rngs: Model(rngs)),
            options.pop("optimizer", optax.adam(1e-2)),
            loss,
            strategy=strategy,
            devices=jax.devices()[:count],
            ema_decay=0.9,
            callbacks=options.pop("callbacks", (Death(death),)),
            checkpoint=Checkpoint(self.directory, **given),
            loggers=(),
            **options,
        )

    def fit(self, layout: str = "fsdp", **options: Any) -> tuple[int, Trainer]:
        """Trains to the end; returns the step that it began with."""
        trainer = self.trainer(layout, **options)
        history = trainer.fit(BATCHES, STEPS)
        return STEPS - len(history["loss"]), trainer

    def die(self, layout: str = "fsdp", **options: Any) -> None:
        with pytest.raises(RuntimeError, match="the process dies"):
            self.trainer(layout, death=DEATH, **options).fit(BATCHES, STEPS)

    def files(self, pattern: str = "*") -> list[Path]:
        return sorted(x for x in self.memory.rglob(pattern) if x.is_file())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture(scope="module")
def death(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run that died at step 9, and its files: a save of step 6, a copy of step 8."""
    root = tmp_path_factory.mktemp("dead")
    run, kept = Run(root / "run"), root / "kept"
    run.die(checkpoint={"every": SAVED, "asynchronous": False})
    shutil.copytree(run.root, kept)
    return run, kept


@pytest.fixture
def dead(death: tuple[Run, Path]) -> Run:
    """The run as it died."""
    run, kept = death
    shutil.rmtree(run.root)
    shutil.copytree(kept, run.root)
    return run


def arrays(trainer: Trainer) -> list[bytes]:
    state = trainer.state
    leaves = jax.tree.leaves((state.params, state.ema, state.opt_state))
    return [np.asarray(x).tobytes() for x in leaves]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_resumes_from_memory_under_each_layout(layout: str, run: Run) -> None:
    whole = Run(run.root / "whole")
    _, expected = whole.fit()
    run.die()
    assert not list(run.directory.glob("[0-9]*"))  # nothing is on storage
    first, found = run.fit(layout)
    assert first == COPIED
    if layout == "fsdp":
        assert arrays(found) == arrays(expected)
    else:
        for path in ("params", "ema"):
            a, b = (jax.tree.leaves(getattr(x.state, path)) for x in (found, expected))
            for one, other in zip(a, b, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"frozen": "checksum"}], ids=["saved", "named"]
)
def test_frozen_parameters(options: dict[str, Any], run: Run) -> None:
    """Parameters that are only named by checksum are not in the copies."""
    given = {"wrt": nnx.All(nnx.Param, nnx.PathContains("down")), "checkpoint": options}
    whole = Run(run.root / "whole")
    _, expected = whole.fit(**given)
    run.die(**given)
    arrays_of = json.loads(run.files("*.json")[0].read_text())["header"]["arrays"]
    assert ("up.kernel" in arrays_of["model"]) == (not options)
    first, found = run.fit(**given)
    assert first == COPIED
    assert arrays(found) == arrays(expected)


def test_state_in_host_memory_is_copied(run: Run) -> None:
    whole = Run(run.root / "whole")
    given: dict[str, Any] = {"backend": Backend(offload=Offload(optimizer=True))}
    _, expected = whole.fit(**given)
    run.die(**given)
    first, found = run.fit(**given)
    assert first == COPIED
    assert arrays(found) == arrays(expected)


def test_newer_of_memory_and_storage_is_read(dead: Run) -> None:
    assert dead.fit()[0] == COPIED
    assert not dead.files()  # nothing is left after the last save


def test_storage_is_read_if_it_is_newer(dead: Run) -> None:
    dead.trainer(checkpoint={"memory_every": None}).fit(BATCHES, 10)
    first, _ = dead.fit(checkpoint={"every": 5})
    assert first == 10


DAMAGES: dict[str, Callable[[Run], Any]] = {
    "a bit of an array": lambda run: flip(run.files("*.data")[0], 70),
    "the last bit": lambda run: flip(run.files("*.data")[0], end_of_parts(run) - 1),
    "a digit of the index": lambda run: digit(run.files("*.json")[0]),
    "half of the arrays": lambda run: halve(run.files("*.data")[0]),
    "half of the index": lambda run: halve(run.files("*.json")[0]),
    "no arrays": lambda run: run.files("*.data")[0].unlink(),
    "a link": lambda run: link(run.files("*.data")[0]),
    "another version": lambda run: edit(run.files("*.json")[0], {"version": 0}),
    "another run": lambda run: (run.directory / RUN).write_text('{"run": "another"}'),
    "no run": lambda run: (run.directory / RUN).unlink(),
    "files of others": lambda run: run.files("*.data")[0].chmod(0o666),
    "an index of others": lambda run: run.files("*.json")[0].chmod(0o622),
    "another step": lambda run: rename(run.files("*.json")[0], "8-", "11-"),
}


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def end_of_parts(run: Run) -> int:
    index = json.loads(run.files("*.json")[0].read_text())
    number, (start, _) = max(index["places"].items(), key=lambda item: item[1][0])
    return start + read_layout(index["layout"]).sizes[int(number)]


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def digit(path: Path) -> None:
    path.write_text(re.sub(r'"saved": \d+', '"saved": 5', path.read_text()))


def edit(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def link(path: Path) -> None:
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def rename(path: Path, old: str, new: str) -> None:
    for each in path.parent.iterdir():
        each.rename(each.with_name(each.name.replace(old, new)))


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_or_foreign_copy_is_not_read(name: str, dead: Run) -> None:
    DAMAGES[name](dead)
    trainer = dead.trainer()
    text = str(trainer._run.resume())  # pyright: ignore[reportPrivateUsage]
    assert trainer.step == SAVED
    # A copy of another run is not this run's loss.
    assert "is not used" in text
    assert f"Resumed from step {SAVED} in '{dead.directory}'." in text


def test_no_bit_flip_is_read(dead: Run) -> None:
    index, data = dead.files("*.json")[0], dead.files("*.data")[0]
    stored = json.loads(index.read_text())
    sizes = read_layout(stored["layout"]).sizes
    parts = [(start, sizes[int(i)]) for i, (start, _) in stored["places"].items()]
    rng = np.random.default_rng(0)
    for path in [index] * 30 + [data] * 30:
        position = int(rng.integers(path.stat().st_size))
        is_used = path == index or any(a <= position < a + n for a, n in parts)
        flip(path, position)
        copies = MemoryCopies(str(dead.directory), str(dead.memory), EVERY)
        found = copies.find(SAVED, SAVED)
        copies.abandon()
        assert (found is None) == is_used, (path.suffix, position)
        flip(path, position)


def test_copy_is_not_read_after_checkpoints_were_removed(dead: Run) -> None:
    shutil.rmtree(dead.directory / str(SAVED))
    assert dead.fit()[0] == 0


def test_fresh_run_does_not_read_copies(dead: Run) -> None:
    shutil.rmtree(dead.directory / str(SAVED))
    edit_saved(dead)
    first, _ = dead.fit(checkpoint={"resume": False})
    assert first == 0


def edit_saved(run: Run) -> None:
    """Makes the copy look as if nothing had been on storage."""
    path = run.files("*.json")[0]
    index = json.loads(path.read_text()) | {"saved": -1}
    path.write_text(json.dumps(index | {"digest": digest(index)}))


def test_rewound_run_does_not_read_later_copies(dead: Run) -> None:
    trainer = dead.trainer()
    trainer.restore(SAVED, rewind=True)
    assert dead.fit()[0] == SAVED


def test_copy_of_another_timeline_is_not_read(dead: Run) -> None:
    """A start without copies goes on from step 6 to 7; the copy of step 8 is old."""
    dead.trainer(checkpoint={"memory_every": None}).fit(BATCHES, SAVED + 1)
    assert dead.fit()[0] == SAVED + 1


def test_refused_fresh_run_does_not_forget_the_copy(dead: Run) -> None:
    with pytest.raises(CheckpointError, match="resume=False asks for a fresh run"):
        dead.fit(checkpoint={"resume": False})
    assert dead.fit()[0] == COPIED


def test_weights_of_a_new_run_are_replaced_by_the_copy(run: Run) -> None:
    run.die()
    trainer = run.trainer()
    assert trainer.step == 0  # nothing is on storage, so the script assigns weights
    model: Any = trainer.model
    model.up.kernel[...] = 0 * model.up.kernel[...]
    assert trainer.fit(BATCHES, STEPS)["step"][0] == COPIED + 1


def test_copies_go_on_after_their_files_were_deleted(run: Run) -> None:
    class Deletes(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == EVERY + 1:
                shutil.rmtree(run.memory)
            names.append({x.name.partition("-")[0] for x in run.files("*.json")})

    names: list[set[str]] = []
    trainer = run.trainer(callbacks=(Deletes(),), checkpoint={"memory_every": 2})
    with pytest.warns(UserWarning, match=r"Step \d+ could not be copied into memory"):
        trainer.fit(BATCHES, STEPS)
    assert names[-1] & {"8", "10"}


def test_unset_variable_in_directory_raises(run: Run) -> None:
    given = {"memory_directory": f"{run.memory}/$NOT_SET"}
    with pytest.raises(CheckpointDirectoryError, match=r"\$NOT_SET' is not set"):
        run.fit(checkpoint=given)


def test_other_model_raises(dead: Run) -> None:
    def model(rngs: nnx.Rngs) -> nnx.Module:
        found = Model(rngs)
        found.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)
        return found

    message = "The copy of step 8 in memory differs from the requested arrays"
    with pytest.raises(CheckpointMismatchError, match=message):
        dead.fit(model=model)
    assert len(dead.files("*.data")) == 1  # nothing is deleted


def test_memory_is_as_stated(run: Run) -> None:
    class Sizes(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            # A file may get another name meanwhile.
            sizes = {}
            for path in run.files("*.data") + run.files("*.part"):
                with contextlib.suppress(FileNotFoundError):
                    sizes[path.stat().st_ino] = path.stat().st_size
            taken.append(sum(sizes.values()))
            copies = trainer._run.checkpoints._open_copies()
            stated.append(copies.bytes_of(to_groups(trainer._run.plan.abstract)))

    taken, stated = [], []
    trainer = run.trainer(checkpoint={"memory_every": 1}, callbacks=(Sizes(),))
    trainer.fit(BATCHES, STEPS)
    assert [max(taken)] == stated[0] == stated[-1]


def test_state_that_is_not_finite_is_not_copied(run: Run) -> None:
    with pytest.raises(NonFiniteLossError, match=r"Step 4: not finite.*not saved"):
        run.fit(optimizer=optax.sgd(lambda step: jnp_nan_after(step)))
    assert not run.files("*.json")


def jnp_nan_after(step: Any) -> Any:
    return jax.numpy.where(step < EVERY - 1, 0.1, np.nan)


def test_finished_run_is_saved_from_memory(dead: Run) -> None:
    trainer = dead.trainer()
    trainer.fit(BATCHES, COPIED)
    assert (dead.directory / str(COPIED)).is_dir()
    assert not dead.files()


def test_too_little_memory_raises(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # A checkpoint fits, but two copies do not.
    free = shutil.disk_usage(run.root)._replace(free=6000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(CheckpointDirectoryError, match=r"has only 5.859 KiB.*shm-size"):
        run.fit()


@pytest.mark.parametrize(
    ("groups", "base", "limit", "used", "cached"),
    [
        ("0::/pod/train", "", "max", "current", ["inactive_file", "active_file"]),
        (
            "5:cpu:/x\n4:memory,io:/pod/train",
            "memory",
            "limit_in_bytes",
            "usage_in_bytes",
            ["total_inactive_file", "total_active_file"],
        ),
    ],
)
def test_limits_of_container_are_read(
    tmp_path: Path, groups: str, base: str, limit: str, used: str, cached: list[str]
) -> None:
    file, root = tmp_path / "groups", tmp_path / "root" / base
    file.write_text(groups + "\n")
    limits = {"": "9000", "pod": "5000", "pod/train": "max"}
    for name, most in limits.items():
        (root / name).mkdir(parents=True)
        (root / name / f"memory.{limit}").write_text(f"{most}\n")
        (root / name / f"memory.{used}").write_text("3000\n")
        (root / name / "memory.stat").write_text(
            "anon 7\n" + "".join(f"{x} 100\n" for x in cached)
        )
    expected = [5000 - 3000 + 200, 9000 - 3000 + 200]
    assert [*free_in_container(file, tmp_path / "root")] == expected
    # The names may be those on the host, where the container cannot look.
    file.write_text(groups.replace("pod/train", "docker/17") + "\n")
    assert [*free_in_container(file, tmp_path / "root")] == expected[1:]


@pytest.mark.parametrize(
    ("kind", "limits", "expected"),
    [("tmpfs", [7000, 6000], 6000), ("tmpfs", [], 10**6), ("ext4", [6000], 10**6)],
)
def test_limits_of_container_count_for_files_in_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    limits: list[int],
    expected: int,
) -> None:
    where, mounts = tmp_path.stat().st_dev, tmp_path / "mountinfo"
    device = f"{os.major(where)}:{os.minor(where)}"
    mounts.write_text(f"30 25 {device} / /shm rw,relatime shared:4 - {kind} x rw\n")
    monkeypatch.setattr(copies, "free_in_container", lambda: iter(limits))
    free = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert copies.free_bytes(tmp_path, mounts) == expected


def test_directory_that_others_can_open_raises(run: Run) -> None:
    directory = run.memory / f"nnx_parallel-{os.getuid()}"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.raises(CheckpointDirectoryError, match=r"can be opened by other users"):
        run.fit()


@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_invalid_intervals_raise(value: Any) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"memory_every={value}")):
        Checkpoint("/tmp/run", memory_every=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"memory_every": 10, "every": 10},
            "must be less than every=10: a copy in mem",
        ),
        ({"memory_every": True}, "memory_every=True) must be a whole number"),
        ({"memory_directory": None}, "memory_directory=None) must be the path of a lo"),
        ({"memory_directory": "gs://a/b"}, "must be the path of a local directory"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint("/tmp/run", **options)


def test_directory_is_absolute() -> None:
    found = Checkpoint("run", memory_every=1, memory_directory="shm")
    assert found.memory_directory == os.path.abspath("shm")
    home = Checkpoint("run", memory_directory="~/shm").memory_directory
    assert home == os.path.expanduser("~/shm")
    assert Checkpoint("run", memory_directory="$A/x").memory_directory == "$A/x"


def test_neighbours_are_on_other_machines() -> None:
    assert find_neighbours([["a", 1], ["b", 1], ["c", 1]]) == [1, 2, 0]
    # Two directories on one machine are no machines, but better than none.
    assert find_neighbours([["a", 1], ["a", 2], ["b", 1]]) == [2, 2, 0]
    assert find_neighbours([["a", 1], ["a", 2]]) == [1, 0]
    assert find_neighbours([["a", 1], ["a", 1], ["b", 1]]) == [2, 2, 0]
    assert find_neighbours([["a", 1]]) == [None]


def test_parts_of_one_division_fill_parts_of_another() -> None:
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(12, 10))
    for _ in range(20):
        found, wanted = (
            [((a, b), (c, d)) for a, b in cuts(rng, 12) for c, d in cuts(rng, 10)]
            for _ in range(2)
        )
        for target in wanted:
            read = np.full(shape_of(target), np.nan)
            for part in found:
                if (both := overlap(target, part)) is not None:
                    source = whole[slices(part, ((0, 12), (0, 10)))]
                    read[slices(both, target)] = source[slices(both, part)]
            np.testing.assert_array_equal(
                read, whole[slices(target, ((0, 12), (0, 10)))]
            )


def cuts(rng: np.random.Generator, size: int) -> list[tuple[int, int]]:
    inner = sorted(rng.choice(np.arange(1, size), rng.integers(0, 4), replace=False))
    edges = [0, *map(int, inner), size]
    return list(itertools.pairwise(edges))
