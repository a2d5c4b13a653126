"""The place where the processes meet: a thread of process 0, beside the devices.

It collects one value from each process and hands all of them back, and it knows at once
when a process is gone: the operating system closes a dead process's connection, however
it died. Messages are JSON; strangers lack the key that process 0 has drawn.

A process's line to the others, beside the devices: words instead of arrays.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
    wait,
)
from typing import Any

from nnx_parallel.distributed.addresses import connect, is_loopback, listen
from nnx_parallel.distributed.faults import SILENT, end_by_loss, install
from nnx_parallel.distributed.runtime import (
    coordinator,
    coordinator_host,
    process_count,
    process_index,
)
from nnx_parallel.errors import ProcessError

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


_KEY = "nnx_parallel/line"


class Line:
    """One process's connection to the `Hub`.

    Args:
        connection: The connection, already greeted.
        hub: The hub, on process 0.
        on_lost: Called on a thread of its own with the number of a lost process and
            the reason; it ends this process.
    """

    def __init__(
        self,
        connection: Connection,
        hub: Hub | None,
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._connection = connection
        self._hub = hub
        self._on_lost = on_lost
        self._sending = threading.Lock()
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._answers: dict[str, queue.SimpleQueue[list[Any]]] = {}
        self._missing: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self._is_leaving = False
        threading.Thread(
            target=self._listen, name="nnx_parallel.line", daemon=True
        ).start()

    def reserve(self, name: str) -> str:
        """The key of the next exchange of a name: all reserve in the same order."""
        self._counts[name] += 1
        return f"{name} {self._counts[name]}"

    def exchange(self, key: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Gives a value and returns those of all processes, by process.

        Args:
            key: Of `reserve`. Different ones may go on at once, on any threads.
            value: What JSON can hold.
            timeout_seconds: How long to wait for the others.

        Raises:
            ProcessError: If some did not take part in time; it names them.
        """
        answer = self._answers.setdefault(key, queue.SimpleQueue())
        self._send({"op": "put", "key": key, "value": value})
        try:
            values = answer.get(timeout=timeout_seconds)
            return values * process_count() if len(values) == 1 else values
        except queue.Empty:
            self._send({"op": "missing", "key": key})
            missing = self._missing.get(timeout=timeout_seconds)
            name, _, _ = key.rpartition(" ")
            raise ProcessError(
                f"Processes {missing} did not take part in '{name}' within "
                f"{timeout_seconds:.0f} s. All processes run the same script; look at "
                "what these wait for."
            ) from None
        finally:
            self._answers.pop(key, None)

    def fail(self, reason: str) -> None:
        """Tells the others why this process ends; on process 0 lets them go first."""
        self._is_leaving = True
        self._send({"op": "fail", "reason": reason})
        if self._hub is not None:
            self._hub.drain()

    def drain(self) -> None:
        """On process 0: waits a moment for the others to have heard of a loss."""
        if self._hub is not None:
            self._hub.drain()

    def leave(self) -> None:
        """Says that this process ends in good order."""
        self._is_leaving = True
        self._send({"op": "bye"})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            return  # process 0 is gone: the listening thread ends this one

    def _listen(self) -> None:
        while True:
            try:
                message = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                if not self._is_leaving:
                    self._on_lost(0, SILENT)
                return
            if message["op"] == "all":
                key = message["key"]
                self._answers.setdefault(key, queue.SimpleQueue()).put(
                    message["values"]
                )
            elif message["op"] == "missing":
                self._missing.put(message["processes"])
            elif message["op"] == "lost":
                self._on_lost(message["process"], message["reason"])


@cache
def join() -> Line | None:
    """This process's line, opened on first use; ``None`` with one process.

    From then on the process ends when another is lost, and tells the others when it
    ends with an error of its own. All processes must call it.

    Raises:
        ProcessError: If process 0 does not open its hub.
    """
    if process_count() == 1:
        return None
    hub, port, key = _meet()
    connection = connect(coordinator_host(), port, key)
    connection.send_bytes(json.dumps({"process": process_index()}).encode())
    line = Line(
        connection, hub, lambda process, why: end_by_loss(process, why, line.drain)
    )
    install(line.fail)
    atexit.register(line.leave)
    if hub is not None:
        hub.wait_for_all()
    return line


def _meet() -> tuple[Hub | None, int, bytes]:
    if process_index() == 0:
        key = secrets.token_bytes(32)
        host = coordinator_host()
        hub = Hub(host if is_loopback(host) else "", process_count(), key)
        coordinator().key_value_set(_KEY, f"{hub.port} {key.hex()}")
        return hub, hub.port, key
    try:
        found = coordinator().blocking_key_value_get(_KEY, int(JOIN_SECONDS * 1000))
    except Exception as error:
        raise ProcessError(
            f"Process 0 did not open its hub within {JOIN_SECONDS:.0f} s: {error}. "
            "All processes must call nnx_parallel.initialize()."
        ) from error
    port, key = found.split()
    return None, int(port), bytes.fromhex(key)
