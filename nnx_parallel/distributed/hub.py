"""The place where the processes meet: a thread of process 0, beside the devices.

It collects one value from each process and hands all of them back, and it knows at once
when a process is gone: the operating system closes a dead process's connection, however
it died. Messages are JSON; strangers lack the key that process 0 has drawn.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
    wait,
)
from typing import Any

from nnx_parallel.distributed.addresses import listen
from nnx_parallel.distributed.faults import SILENT

JOIN_SECONDS = 300.0
"""How long processes wait for one another at the start."""

_LINGER_SECONDS = 2.0
_GREETING_SECONDS = 60
_LOOK_SECONDS = 0.05
_NOT_OURS = (ValueError, KeyError, TypeError)


class Hub:
    """Serves the processes of a run.

    Args:
        host: Interface to listen on; empty for all.
        count: Number of processes.
        key: What a connection must know.
        join_seconds: How long to wait for all processes; then those that have come
            are told who is missing.
    """

    def __init__(
        self, host: str, count: int, key: bytes, join_seconds: float = JOIN_SECONDS
    ) -> None:
        self._server = listen(host, backlog=count)
        self.port = int(self._server.getsockname()[1])
        self._count = count
        self._key = key
        self._join_seconds = join_seconds
        self._greeted: queue.SimpleQueue[tuple[Connection, int]] = queue.SimpleQueue()
        self._connections: dict[Connection, int] = {}
        self._rounds: dict[str, dict[int, Any]] = {}
        self._left: set[int] = set()
        self._is_over = False
        self._gathered = threading.Event()
        self._drained = threading.Event()
        threading.Thread(target=self._run, name="nnx_parallel.hub", daemon=True).start()

    def wait_for_all(self) -> None:
        """Waits until every process has joined, or the time to do so is over.

        Process 0 must not end before: an interpreter that does starts no thread to
        greet those that come later.
        """
        self._gathered.wait()

    def drain(self) -> None:
        """Waits until the others have heard of a loss and gone, but not for long."""
        self._drained.wait(_LINGER_SECONDS)

    def _run(self) -> None:
        try:
            self._gather()
        finally:
            self._gathered.set()
        while self._connections:
            for ready in wait(list(self._connections)):
                assert isinstance(ready, Connection)
                self._serve(ready)
        self._drained.set()

    def _gather(self) -> None:
        """Takes in the processes; strangers that say nothing keep nobody waiting."""
        deadline = time.monotonic() + self._join_seconds
        self._server.settimeout(_LOOK_SECONDS)
        while len(self._connections) < self._count and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # mostly: nobody has come just now
                peer, _ = self._server.accept()
                threading.Thread(target=self._greet, args=(peer,), daemon=True).start()
            while not self._greeted.empty():
                connection, process = self._greeted.get()
                self._connections[connection] = process
        self._server.close()
        missing = sorted({*range(self._count)} - {*self._connections.values()})
        if missing:
            self._lose(
                missing[0],
                f"it did not join within {self._join_seconds:.0f} s. Processes that "
                f"are missing: {missing}",
            )

    def _greet(self, peer: socket.socket) -> None:
        peer.settimeout(None)
        connection = Connection(peer.detach())
        try:
            _set_timeout(connection, _GREETING_SECONDS)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            process = int(_read(connection)["process"])
            _set_timeout(connection, 0)
        except (AuthenticationError, AssertionError, OSError, EOFError, *_NOT_OURS):
            connection.close()  # a stranger, or a process gone before it has begun
            return
        self._greeted.put((connection, process))

    def _serve(self, connection: Connection) -> None:
        process = self._connections[connection]
        try:
            message = _read(connection)
        except (EOFError, OSError, ValueError):
            del self._connections[connection]
            if self._connections.keys() and set(self._connections.values()) <= {0}:
                self._drained.set()
            if process not in self._left:
                self._lose(process, SILENT)
            return
        if message["op"] == "put":
            self._put(process, message["key"], message["value"])
        elif message["op"] == "missing":
            found = self._rounds.get(message["key"], {})
            missing = [p for p in range(self._count) if p not in found]
            _send(connection, _encode({"op": "missing", "processes": missing}))
        elif message["op"] == "fail":
            self._left.add(process)
            self._lose(process, message["reason"])
        elif message["op"] == "bye":
            self._left.add(process)
            self._check_left()

    def _put(self, process: int, key: str, value: Any) -> None:
        found = self._rounds.setdefault(key, {})
        found[process] = value
        if len(found) == self._count:
            del self._rounds[key]
            values = [found[p] for p in range(self._count)]
            if all(other == values[0] for other in values):
                values = values[:1]  # alike in every step, as a rule: kept short
            self._tell({"op": "all", "key": key, "values": values})
        self._check_left()

    def _check_left(self) -> None:
        """Nobody waits for a process that has ended in good order, but too early."""
        for found in self._rounds.values():
            for process in self._left - found.keys():
                # It hears so too: jax would have it wait for the others, and abort.
                self._lose(process, "it ended while others go on", told=True)
                return

    def _lose(self, process: int, reason: str, *, told: bool = False) -> None:
        if not self._is_over:
            self._is_over = True
            lost = {"op": "lost", "process": process, "reason": reason}
            self._tell(lost, besides=None if told else process)

    def _tell(self, message: dict[str, Any], besides: int | None = None) -> None:
        encoded = _encode(message)
        for connection, process in list(self._connections.items()):
            if process != besides:
                _send(connection, encoded)


def _set_timeout(connection: Connection, seconds: int) -> None:
    """Limits how long a read may wait; 0 lets it wait for ever."""
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as peer:
        limit = struct.pack("ll", seconds, 0)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        peer.setblocking(True)


def _read(connection: Connection) -> dict[str, Any]:
    message = json.loads(connection.recv_bytes())
    if not isinstance(message, dict):
        raise ValueError(f"Not a message: {message!r}.")
    return message


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _send(connection: Connection, encoded: bytes) -> None:
    try:
        connection.send_bytes(encoded)
    except OSError:
        return  # it is gone, and the next read will say so
