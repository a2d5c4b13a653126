"""Sends arrays from process to process, over sockets of the job.

JSON messages of the job pass through process 0 (`messages`). Arrays take gigabytes, so
they go directly from one process to another. A process that connects must know a key
that process 0 has sent over the job's authenticated sockets.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any, Self

from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.distributed.messages import (
    connect,
    greet,
    host_of,
    is_loopback,
    join,
    limit_reads,
    listen,
    receive,
    send,
    watch,
)
from nnx_parallel.distributed.runtime import STATE, process_count, process_index
from nnx_parallel.errors import ProcessError

_POLL_SECONDS = 0.05
# The client in messages.py notices a lost machine sooner, and ends this process.
_SILENCE_SECONDS = 60.0

Handler = Callable[
    [dict[str, Any], Connection], tuple[dict[str, Any], list[memoryview]]
]
"""Answers a request, whose arrays it reads from the connection."""


class Peers:
    """The connections of this process to the other processes of the job.

    All processes make one at the same time. Close it with `close`, or use it as a
    context manager.

    Args:
        handler: Answers the requests of other processes, on threads of this object. It
            gets the request and the connection, and returns a JSON object and arrays.
            If it raises ``OSError`` or ``ValueError``, the other process raises a
            `ProcessError` with the text.
        facts: A JSON value that all processes get from this process.

    Attributes:
        facts: The values of all processes, by process.
    """

    def __init__(self, handler: Handler, facts: Any) -> None:
        self._handler = handler
        self._connections: dict[int, Connection] = {}
        self._locks = [threading.Lock() for _ in range(process_count())]
        self._socket: socket.socket | None = None
        self._has_key = threading.Event()
        me, host, key = process_index(), "", secrets.token_hex(32)
        if (client := join()) is not None:
            # The other processes can reach this address, because process 0 can.
            with socket.socket(fileno=os.dup(client.connection.fileno())) as peer:
                host = peer.getsockname()[0]
            # A machine may resolve its own name to a loopback address. The others
            # resolve the name as they did to reach process 0.
            if is_loopback(host):
                host = host_of(STATE.coordinator_address or "")
            self._socket = listen(host if is_loopback(host) else "", backlog=64)
            self._start(self._accept)
        port = self._socket.getsockname()[1] if self._socket else 0
        found = allgather_object("peers", [host, port, key if me == 0 else "", facts])
        self._addresses = [(host, port) for host, port, *_ in found]
        self._key = bytes.fromhex(found[0][2])
        self.facts = [facts for *_, facts in found]
        self._has_key.set()

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        name = "nnx_parallel.peers"
        threading.Thread(target=target, args=args, name=name, daemon=True).start()

    def _accept(self) -> None:
        assert self._socket is not None
        while self._socket.fileno() >= 0:  # until it is closed
            try:
                peer, _ = self._socket.accept()
                watch(peer, _SILENCE_SECONDS)
                self._start(self._serve, peer)
            except OSError:  # for example too many open files
                time.sleep(_POLL_SECONDS)

    def _serve(self, peer: socket.socket) -> None:
        # An error may be caused by a stranger, or by a process that has died.
        with contextlib.suppress(Exception), peer:
            self._has_key.wait()
            connection = greet(peer, self._key)
            limit_reads(peer, 0)
            while True:
                request = receive(connection)
                try:
                    reply, arrays = self._handler(request, connection)
                except (OSError, ValueError) as error:
                    reply, arrays = {"error": f"{type(error).__name__}: {error}"}, []
                send(connection, reply | {"arrays": len(arrays)})
                for array in arrays:
                    connection.send_bytes(array)

    def ask(
        self,
        process: int,
        request: dict[str, Any],
        arrays: Iterable[memoryview] = (),
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Sends a request and arrays to a process.

        Args:
            process: Number of the process.
            request: A JSON object.
            arrays: Contiguous bytes that follow the request.

        Returns:
            The reply, and the arrays that followed it.

        Raises:
            ProcessError: If the process cannot be reached, or cannot answer.
        """
        with self._locks[process]:
            try:
                connection = self._connect(process)
                send(connection, request)
                for array in arrays:
                    connection.send_bytes(array)
                reply = receive(connection)
                found = [connection.recv_bytes() for _ in range(reply["arrays"])]
            except (OSError, EOFError, AuthenticationError) as error:
                self._connections.pop(process, None)
                raise ProcessError(
                    f"Process {process} cannot be reached: {error or 'it is gone'}."
                ) from error
        if "error" in reply:
            raise ProcessError(f"Process {process} cannot answer: {reply['error']}")
        return reply, found

    def _connect(self, process: int) -> Connection:
        """Returns the open connection to a process, or a new one."""
        found = self._connections.get(process)
        # A connection with something to read between two requests was closed.
        if found is not None and not found.poll():
            return found
        host, port = self._addresses[process]
        connection = self._connections[process] = connect(host, port, self._key)
        watch(connection, _SILENCE_SECONDS)
        return connection

    def close(self) -> None:
        """Closes all connections of this process."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._socket.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
