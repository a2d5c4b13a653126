"""When a save is reported, its files, directories and names are on the disk."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from flax import nnx

from nnx_parallel import Checkpoint
from nnx_parallel.checkpoint import CheckpointManager
from nnx_parallel.durable import sync, sync_tree
from nnx_parallel.weights import save_pretrained
from tests.checkpoints import META, make_groups


class Trace:
    """The order in which this process syncs and renames.

    Attributes:
        renames: Old name, new name and unsynced paths of each directory's rename,
            except for directories inside a step. Unsynced paths are searched below
            the directory. Before a deletion, they are also searched in the parent
            directory and in all of its steps.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.renames: list[tuple[str, str, list[str]]] = []
        # The change time of each file at its last sync.
        self._changed: dict[tuple[int, int], int] = {}
        self._fsync, self._rename = os.fsync, os.rename
        patch.setattr(os, "fsync", self._note_sync)
        patch.setattr(os, "rename", self._note_rename)

    def _note_sync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._fsync(descriptor)
        self._changed[found.st_dev, found.st_ino] = found.st_ctime_ns

    def _note_rename(self, source: str | Path, target: str | Path) -> None:
        source, parent = Path(source), Path(target).parent
        if "orbax-checkpoint-tmp" not in parent.name:
            unsynced = self.unsynced(source)
            if parent == source.parent and Path(target).name.startswith("deleted-"):
                unsynced += self.unsynced(parent, deep=False)
                unsynced += self.unsynced(*parent.glob("[0-9]*"))
            self.renames.append((source.name, Path(target).name, unsynced))
        self._rename(source, target)

    def unsynced(self, *directories: Path, deep: bool = True) -> list[str]:
        """Files and directories that have changed since their last sync."""
        return [
            str(path)
            for directory in directories
            for path in (directory, *(directory.rglob("*") if deep else ()))
            if self._changed.get((path.stat().st_dev, path.stat().st_ino))
            != path.stat().st_ctime_ns
        ]


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    return Trace(monkeypatch)


@pytest.mark.parametrize(
    ("asynchronous", "keep_last"), [(True, 1), (False, 1), (True, None)]
)
def test_step_is_synced_before_older_one_is_deleted(
    trace: Trace, tmp_path: Path, asynchronous: bool, keep_last: int | None
) -> None:
    run = tmp_path / "runs" / "new"
    options = Checkpoint(run, keep_last=keep_last, asynchronous=asynchronous)
    reports: list[list[str]] = []

    def report(text: str) -> None:
        step = text.split()[2]
        unsynced = trace.unsynced(run / step)
        # The run's directory counts only if no older step was deleted in it.
        parents = [run] * (keep_last is None) + [run.parent, tmp_path]
        reports.append(unsynced + trace.unsynced(*parents, deep=False))

    with CheckpointManager(options) as manager:
        manager.report = report
        for step in (1, 2, 3):
            manager.save_groups(step, make_groups(step), META, metrics={"loss": 0.5})
            manager.wait()
    assert reports == [[], [], []]
    # Each step is complete when it gets its name. The older step is deleted afterwards.
    names = [(old, new.partition("-")[0]) for old, new, _ in trace.renames]
    commits = [(f"{step}.orbax-checkpoint-tmp", f"{step}") for step in (1, 2, 3)]
    deletions = [(f"{step}", "deleted") for step in (1, 2)] if keep_last else []
    assert sorted(names) == sorted([*commits, *deletions])
    for step, deletion in enumerate(deletions, start=2):
        assert names.index(commits[step - 1]) < names.index(deletion)
    assert [unsynced for *_, unsynced in trace.renames if unsynced] == []


def test_exported_weights_are_synced_before_rename(
    trace: Trace, tmp_path: Path
) -> None:
    folder = tmp_path / "exports" / "linear"
    names = [("kernel", "weight", "i o -> o i"), ("bias", "bias", "o -> o")]
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    save_pretrained(folder, model, names=names, config={"model_type": "linear"})
    assert trace.unsynced(folder, tmp_path) == []
    assert trace.renames == [(".linear.partial", "linear", [])]


def failing(number: int) -> Callable[[int], None]:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


def test_unsynced_save_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    with CheckpointManager(Checkpoint(tmp_path, keep_last=1)) as manager:
        manager.report = reports.append
        manager.save_groups(1, make_groups(1), META)
        manager.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing(errno.EIO))
            manager.save_groups(2, make_groups(2), META)
            with pytest.raises(RuntimeError, match=r"step 2 in .* failed: OSError"):
                manager.wait()
        assert len(reports) == 1
        assert manager.saved.steps == [1]


def test_only_directories_may_fail_to_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))  # as on some network disks
    sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        sync_tree(tmp_path)
