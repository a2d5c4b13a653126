"""The lock of a checkpoint directory: only one run at a time writes there.

The lock is a file that names the process that holds it. The file is created
exclusively. That is atomic on NFS too, where ``flock`` may work only within one
machine. While the process lives, it renews the file's modification time. The clocks of
two machines are never compared.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

import jax

from nnx_parallel.checkpoint.files import is_url, printable
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.distributed.runtime import write_error
from nnx_parallel.errors import CheckpointDirectoryError
from nnx_parallel.files import open_regular, parse_object

LOCK = "lock.json"

_RENEW_SECONDS = 10.0
_REMOVE_SECONDS = 5.0
_WATCH_SECONDS = 35.0  # a live process renews its lock three times in this time


class DirectoryLock:
    """Lock of a directory, held as long as this object is referenced.

    Attributes:
        path: Path of the lock's file.

    Raises:
        CheckpointDirectoryError: If a live process holds the lock. If the process is on
            this machine, the operating system is asked whether it is alive. If it is on
            another machine, the file is watched until it is renewed, for at most 35 s.
    """

    def __init__(self, directory: str) -> None:
        self.path = Path(directory, LOCK)
        machine, start = _identify(os.getpid())
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "script": sys.argv[0],
            "machine": machine,
            "start": start,
            "id": uuid.uuid4().hex,
        }
        self._content = json.dumps(owner).encode()
        while not _create(self.path, self._content):
            held = _read(self.path)
            if held is not None and _is_alive(self.path, held):
                raise CheckpointDirectoryError(
                    f"'{directory}' is in use by another run: {_spell(held)}. Two runs "
                    "would delete each other's checkpoints. Wait until it has ended, "
                    "stop it, or choose another directory; reading it "
                    "(trainer.restore, python -m nnx_parallel inspect) is safe."
                )
            if held is not None:
                _remove(self.path, held)
        stop = threading.Event()
        # The thread is a daemon and has no reference to `self`, so the lock is released
        # when the last reference to this object is dropped.
        threading.Thread(
            target=_keep_renewing,
            args=(self.path, self._content, stop),
            name="nnx_parallel.lock",
            daemon=True,
        ).start()
        weakref.finalize(self, _release, os.getpid(), self.path, self._content, stop)

    def check(self) -> None:
        """Raises ``CheckpointDirectoryError`` if another run has taken the lock."""
        try:
            is_held = _renew(self.path, self._content)
        except ValueError as error:
            raise CheckpointDirectoryError(
                f"This run's lock is lost: {error}"
            ) from None
        if not is_held:
            raise CheckpointDirectoryError(
                f"'{self.path}' is no longer held by this run, which was stopped for "
                "so long that another run took it for dead: "
                f"{_spell(_read(self.path))}. End one of the two runs."
            )


_held: weakref.WeakValueDictionary[str, DirectoryLock] = weakref.WeakValueDictionary()


def lock_directory(directory: str) -> DirectoryLock | None:
    """Returns the lock of a directory on process 0, and ``None`` on other processes.

    Process 0 holds the lock for all processes.

    All objects of one process that use the directory share the lock. A directory in an
    object store has no lock.

    Raises:
        CheckpointDirectoryError: On all processes, if another run holds it.
    """
    problem, lock = "", None
    if jax.process_index() == 0 and not is_url(directory):
        path = os.path.realpath(directory)
        try:
            lock = _held[path] = _held.get(path) or DirectoryLock(directory)
        except CheckpointDirectoryError as error:
            problem = str(error)
        except (OSError, ValueError) as error:
            problem = f"Cannot lock '{directory}': {str(error).rstrip('.')}."
    problem = allgather_object("lock of the directory", problem)[0]
    if problem:
        raise CheckpointDirectoryError(problem)
    return lock


def boot_id() -> str:
    """Returns an identifier of this boot of the machine, also inside of a container.

    Raises ``OSError`` if the system has none.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _identify(pid: int) -> tuple[str, str]:
    """Returns an id of this machine's boot, and the start time of one of its processes.

    The id is empty if the system does not provide it. The time is empty if the process
    has ended.
    """
    try:
        # A host's name does not identify a machine: each container may have a name, and
        # containers may share a name.
        boot = boot_id()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "", ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return machine, ""
    return machine, "" if fields[0] in "ZX" else fields[19]


def _create(path: Path, content: bytes) -> bool:
    """Creates the file; returns False if it exists already."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, content)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return True


def _read(path: Path) -> tuple[bytes, int] | None:
    """Reads a lock and the time of its last renewal; ``None`` if it is missing.

    Raises ``ValueError`` if the path is not a regular file, which no run would create.
    """
    try:
        # The file is opened, because a network file system may answer `stat` from its
        # cache.
        with open(path, "rb", opener=open_regular) as file:
            return file.read(4096), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _is_alive(path: Path, held: tuple[bytes, int]) -> bool:
    owner = _parse(held[0])
    # The start time is compared too: a new process may have the number of an ended one.
    machine, start = _identify(owner["pid"])
    if machine and machine == owner["machine"]:
        return start == owner["start"] != ""
    write_error(
        f"'{path}' is held by {_spell(held)}: watching for {_WATCH_SECONDS:g} s "
        "whether that process is alive."
    )
    deadline = time.monotonic() + _WATCH_SECONDS
    found = _read(path)
    while found == held and time.monotonic() < deadline:
        time.sleep(0.5)
        found = _read(path)
    return found not in (None, held)


def _remove(path: Path, held: tuple[bytes, int]) -> None:
    """Removes the lock of a dead process, unless another process has done so."""
    # Only one process at a time removes the lock. A second process would remove the new
    # lock that the first one creates next.
    guard = path.with_name(f"{LOCK}.removing")
    deadline = time.monotonic() + _REMOVE_SECONDS
    while not _create(guard, b""):
        if time.monotonic() > deadline:  # the process that made the guard was killed
            guard.unlink(missing_ok=True)
        time.sleep(0.01)
    try:
        found = _read(path)
        if found is not None and found[0] == held[0]:
            path.unlink()
    finally:
        guard.unlink(missing_ok=True)


def _renew(path: Path, content: bytes) -> bool:
    """Renews a lock, or creates a removed one; returns False if another holds it."""
    held = _read(path)
    if held is None:
        return _create(path, content)
    if held[0] == content:
        os.utime(path)
    return held[0] == content


def _keep_renewing(path: Path, content: bytes, stop: threading.Event) -> None:
    is_held = True
    while is_held and not stop.wait(_RENEW_SECONDS):
        # The lock survives a disk that is unavailable for a moment.
        with contextlib.suppress(OSError, ValueError):
            is_held = _renew(path, content)


def _release(pid: int, path: Path, content: bytes, stop: threading.Event) -> None:
    stop.set()
    with contextlib.suppress(OSError, ValueError):
        held = _read(path)
        # A forked child has a copy of the lock's object, but it must not release the
        # lock.
        if pid == os.getpid() and held is not None and held[0] == content:
            path.unlink()


def _parse(content: bytes) -> dict[str, Any]:
    """Returns the owner of a lock, with question marks for unreadable fields."""
    names = ("host", "pid", "since", "script", "machine", "start")
    owner: dict[str, Any] = dict.fromkeys(names, "?")
    with contextlib.suppress(ValueError):
        owner |= parse_object(content, LOCK)
    if not isinstance(owner["pid"], int):  # it becomes part of a path
        owner["pid"] = "?"
    return owner


def _spell(held: tuple[bytes, int] | None) -> str:
    owner = _parse(b"" if held is None else held[0])
    return printable(
        f"process {owner['pid']} on host '{owner['host']}', since {owner['since']} "
        f"({owner['script']})"
    )
