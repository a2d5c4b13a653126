"""One run at a time writes to a directory; the lock of a dead process is replaced."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from nnx_parallel.checkpoint import CheckpointManager, CheckpointReader, lock
from nnx_parallel.checkpoint.lock import LOCK, DirectoryLock
from nnx_parallel.errors import CheckpointDirectoryError, CheckpointSaveError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which is alive."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def write_lock(directory: Path, pid: int, **changes: Any) -> bytes:
    """Writes the lock of a process, and returns its content."""
    machine, start = lock._identify(pid)  # pyright: ignore[reportPrivateUsage]
    owner = {
        "host": socket.gethostname(),
        "pid": pid,
        "since": "2026-01-02 03:04:05 UTC",
        "script": "train.py",
        "machine": machine,
        "start": start,
    }
    directory.mkdir(exist_ok=True)
    content = json.dumps(owner | changes).encode()
    (directory / LOCK).write_bytes(content)
    return content


def owner_of(directory: Path) -> int:
    return json.loads((directory / LOCK).read_text())["pid"]


def test_directory_in_use_raises(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save_groups(1, {"params": {"w": jnp.ones(2)}}, {})
    content = write_lock(tmp_path, other.pid)
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    message = (
        f"'{tmp_path}' is in use by another run: process {other.pid} on host "
        f"'{socket.gethostname()}', since 2026-01-02 03:04:05 UTC (train.py)."
    )
    with pytest.raises(CheckpointDirectoryError, match=re.escape(message)):
        _ = CheckpointManager(tmp_path).latest_step
    assert unfinished.is_dir()
    assert (tmp_path / LOCK).read_bytes() == content
    assert CheckpointReader(tmp_path).steps == [1]
    assert (tmp_path / LOCK).read_bytes() == content


def test_lock_of_dead_process_is_taken(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    write_lock(tmp_path, other.pid)
    other.kill()
    other.wait()
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_step is None
        assert owner_of(tmp_path) == os.getpid()
    assert os.listdir(tmp_path) == []


def test_lock_with_reused_pid_is_taken(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    write_lock(tmp_path, other.pid, start="1")
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_step is None
        assert owner_of(tmp_path) == os.getpid()


@pytest.mark.parametrize("content", [{"machine": "another"}, None])
def test_lock_of_another_machine_is_watched(
    tmp_path: Path, content: dict | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_WATCH_SECONDS", 3.0)
    write_lock(tmp_path, 1, **(content or {}))
    if content is None:  # created but not yet written
        (tmp_path / LOCK).write_bytes(b"")
    timer = threading.Timer(0.7, os.utime, [tmp_path / LOCK])
    timer.start()
    with pytest.raises(CheckpointDirectoryError, match="is in use by another run"):
        _ = CheckpointManager(tmp_path).latest_step
    timer.join()
    monkeypatch.setattr(lock, "_WATCH_SECONDS", 0.6)
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_step is None
        assert owner_of(tmp_path) == os.getpid()


def test_held_lock_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_RENEW_SECONDS", 0.05)
    held = DirectoryLock(str(tmp_path))
    os.utime(held.path, (0, 0))
    deadline = time.monotonic() + 10
    while held.path.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    held.path.unlink()  # as if by another run that took it for stale
    while not held.path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_managers_of_one_process_share_lock(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as first:
        assert first.latest_step is None
        with CheckpointManager(tmp_path) as second:
            assert second.latest_step is None
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_run_with_lost_lock_stops_saving(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save_groups(1, {"params": {"w": jnp.ones(2)}}, {})
        manager.wait()
        content = write_lock(tmp_path, 1, machine="another")
        message = "is no longer held by this run, which was stopped for so long"
        with pytest.raises(CheckpointSaveError, match=message):
            manager.save_groups(2, {"params": {"w": jnp.ones(2)}}, {})
    assert (tmp_path / LOCK).read_bytes() == content
    assert not (tmp_path / "2").exists()


def test_only_one_contender_takes_dead_lock(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    for _ in range(20):
        write_lock(tmp_path, other.pid, start="1")
        assert sorted(take_at_once(8, tmp_path)) == [False] * 7 + [True]


def take_at_once(count: int, directory: Path) -> list[bool]:
    """Returns for each thread whether it got the lock. All hold locks to the end."""
    barrier, taken = threading.Barrier(count), []

    def take(_: int) -> bool:
        barrier.wait()
        try:
            taken.append(DirectoryLock(str(directory)))
        except CheckpointDirectoryError:
            return False
        return True

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(take, range(count)))
