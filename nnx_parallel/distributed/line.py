"""A process's line to the others, beside the devices: words instead of arrays."""

from __future__ import annotations

import atexit
import json
import queue
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from nnx_parallel.distributed.addresses import connect, is_loopback
from nnx_parallel.distributed.faults import SILENT, end_by_loss, install
from nnx_parallel.distributed.hub import JOIN_SECONDS, Hub
from nnx_parallel.distributed.runtime import (
    coordinator,
    coordinator_host,
    process_count,
    process_index,
)
from nnx_parallel.errors import ProcessError

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
