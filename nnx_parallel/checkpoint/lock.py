"""The lock of a checkpoint directory: one run at a time writes there.

A file names the process that holds it. It is created exclusively, which is atomic on
NFS too, where ``flock`` may hold on one machine alone; and its time is renewed as long
as that process lives. No clocks of two machines are compared.
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
_WATCH_SECONDS = 35.0  # a process that lives renews its lock three times meanwhile


class DirectoryLock:
    """Lock of a directory, held as long as this object is referenced.

    Attributes:
        path: The file.

    Raises:
        CheckpointDirectoryError: If a process that lives holds it. One on this machine
            is looked up; another's file is watched for 35 s, unless it is renewed.
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
                    "stop it, or choose another directory; to read alone "
                    "(trainer.restore, python -m nnx_parallel inspect) is fine."
                )
            if held is not None:
                _remove(self.path, held)
        stop = threading.Event()
        # A daemon that knows no `self`: the lock is given back with its last reference.
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
                f"'{self.path}' is no longer this run's, which was stopped for so long "
                f"that another took it for dead: {_spell(_read(self.path))}. End one "
                "of the two."
            )


_held: weakref.WeakValueDictionary[str, DirectoryLock] = weakref.WeakValueDictionary()


def lock_directory(directory: str) -> DirectoryLock | None:
    """The lock of a directory, held by process 0 for all; ``None`` on the others.

    All that one process opens in a directory shares it. An object store has none.

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


def _identify(pid: int) -> tuple[str, str]:
    """This machine, as long as it runs, and when a process of it started.

    The first is empty where nothing tells, the second if the process has ended.
    """
    try:
        # A host's name says too little: containers have one each, or share one.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "", ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return machine, ""
    return machine, "" if fields[0] in "ZX" else fields[19]


def _create(path: Path, content: bytes) -> bool:
    """Makes the file if there is none; false if there is."""
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
    """Content of a lock and when it was renewed; ``None`` if it is missing.

    Raises ``ValueError`` if something else has its name: no run has locked by that.
    """
    try:
        # Opened: the times alone may come from the cache of a network file system.
        with open(path, "rb", opener=open_regular) as file:
            return file.read(4096), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _is_alive(path: Path, held: tuple[bytes, int]) -> bool:
    owner = _parse(held[0])
    # With its start: the number of a process that has ended may be another's by now.
    machine, start = _identify(owner["pid"])
    if machine and machine == owner["machine"]:
        return start == owner["start"] != ""
    write_error(
        f"'{path}' is held by {_spell(held)}: watching for {_WATCH_SECONDS:g} s "
        "whether that process lives."
    )
    deadline = time.monotonic() + _WATCH_SECONDS
    found = _read(path)
    while found == held and time.monotonic() < deadline:
        time.sleep(0.5)
        found = _read(path)
    return found not in (None, held)


def _remove(path: Path, held: tuple[bytes, int]) -> None:
    """Removes a lock whose process is dead, unless another was quicker."""
    # One at a time: the second would remove the lock that the first makes then.
    guard = path.with_name(f"{LOCK}.removing")
    deadline = time.monotonic() + _REMOVE_SECONDS
    while not _create(guard, b""):
        if time.monotonic() > deadline:  # killed before the last line below
            guard.unlink(missing_ok=True)
        time.sleep(0.01)
    try:
        found = _read(path)
        if found is not None and found[0] == held[0]:
            path.unlink()
    finally:
        guard.unlink(missing_ok=True)


def _renew(path: Path, content: bytes) -> bool:
    """Renews a lock, or makes it again if it was removed; false if it is another's."""
    held = _read(path)
    if held is None:
        return _create(path, content)
    if held[0] == content:
        os.utime(path)
    return held[0] == content


def _keep_renewing(path: Path, content: bytes, stop: threading.Event) -> None:
    is_held = True
    while is_held and not stop.wait(_RENEW_SECONDS):
        # A disk that is away for a moment takes no lock away.
        with contextlib.suppress(OSError, ValueError):
            is_held = _renew(path, content)


def _release(pid: int, path: Path, content: bytes, stop: threading.Event) -> None:
    stop.set()
    with contextlib.suppress(OSError, ValueError):
        held = _read(path)
        # A forked child has the lock's object too.
        if pid == os.getpid() and held is not None and held[0] == content:
            path.unlink()


def _parse(content: bytes) -> dict[str, Any]:
    """The owner of a lock; question marks where it is not yet written, or not ours."""
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
