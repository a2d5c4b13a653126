"""Sends small values and reports of losses between processes, without devices.

A thread of process 0 collects one value from each process and sends all values to each
process. The thread notices the death of a process at once, because the operating system
closes the socket of a process in whatever way it dies. A machine that vanishes closes
no socket, but it no longer answers the probes that the other machines send. Messages
are JSON over TCP. A process that connects must know a key that process 0 publishes in
JAX's key-value store.

Without this module, JAX's coordination service (with a heartbeat of 10 s, the reason in
its key-value store, and `os._exit` in ``sys.excepthook``) also ends all processes in
time, but often in C++, before Python can print the reason. The table shows the seconds
from the fault until the last process ended. There were two processes on CPU, with jax
0.12.0.1 and 0.10.2.

    fault                     JAX's service              this module
    killed in a collective    1.1, an error of Gloo      0.1, printed
    killed while idle         9 to 10, aborts            0.1, printed
    process 0 killed          0.1 to 0.3, aborts         0.1 to 0.2, printed
    an exception              1.0, printed               0.1, printed
    ``sys.exit`` too early    5 to 6, aborts             next exchange, printed
    a hang, watchdog of 2 s   3.0, printed               2.1, printed
    a machine vanishes        9 to 10, aborts            10, printed
    exchange of a value       1.4 to 3 ms                0.2 to 0.5 ms

With a ``missed_heartbeat_callback`` in Python, JAX aborts with ``std::bad_cast``. With
``jax_enable_recoverability``, only the death of process 0 aborts the other processes.
"""

import atexit
import contextlib
import errno
import inspect
import ipaddress
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from multiprocessing import connection as mpc
from multiprocessing.connection import Connection
from typing import Any

from nnx_parallel.distributed.runtime import (
    STATE,
    end_by_error,
    end_by_loss,
    install,
    place_of,
    process_count,
    process_index,
    write_error,
)
from nnx_parallel.errors import DisagreementError, ProcessError

_CONNECT_SECONDS = 20.0  # for each address of a host; another address may answer


def connect(host: str, port: int, key: bytes) -> Connection:
    """Connects to a port; both sides prove that they know the key."""
    # `multiprocessing.connection.Client` would try only IPv4.
    with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as peer:
        return handshake(peer, key, mpc.answer_challenge, mpc.deliver_challenge)


def host_of(address: str) -> str:
    """Returns the host of an address with a port.

    Example:
        >>> host_of("[::1]:8080"), host_of("head:8080")
        ('::1', 'head')
    """
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Returns True if a host name means the machine on which it is resolved.

    Example:
        >>> is_loopback("::1"), is_loopback("::ffff:127.0.0.1"), is_loopback("10.0.0.1")
        (True, True, False)
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", "ip6-localhost", "ip6-loopback")
    # Before Python 3.13, `is_loopback` is wrong for IPv4 addresses mapped to IPv6.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listen(host: str, backlog: int = 1) -> socket.socket:
    """Makes a socket that listens on a free port of a host; "" means all interfaces."""
    host = host.strip("[]")
    serve = partial(socket.create_server, backlog=backlog)
    if not host:
        # The kernel may not know IPv6, or may have it switched off.
        with contextlib.suppress(OSError, ValueError):
            return serve(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return serve(("", 0))
    failure = OSError(f"'{host}' has no address.")
    for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            return serve(address[:2], family=family)
        except OSError as error:
            failure = error
    raise failure


def handshake(
    peer: socket.socket, key: bytes, *steps: Callable[[Connection, bytes], None]
) -> Connection:
    """Makes a connection over a socket; both sides prove that they know the key."""
    # `Connection` reads the descriptor directly, so reads from the descriptor must
    # block. A timeout of the socket, or `socket.setdefaulttimeout`, would make the
    # descriptor non-blocking.
    peer.settimeout(None)
    # The copy of the descriptor is closed with the last reference to the connection.
    connection = Connection(os.dup(peer.fileno()))
    for step in steps:
        step(connection, key)
    return connection


def greet(peer: socket.socket, key: bytes) -> Connection:
    """Makes a connection over a socket that a process of the job has opened.

    Its reads are limited, because a stranger that sends nothing would otherwise block
    the thread for the whole run.
    """
    limit_reads(peer, _GREETING_SECONDS)
    return handshake(peer, key, mpc.deliver_challenge, mpc.answer_challenge)


def limit_reads(peer: socket.socket, seconds: int) -> None:
    """Limits how long reads of the socket or its copies may wait; 0 means no limit."""
    # A timeout that is set by `settimeout` would make the descriptor non-blocking.
    limit = struct.pack("ll", seconds, 0)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def watch(connection: Connection | socket.socket, seconds: float) -> None:
    """Makes reads fail if the other machine does not answer for some seconds.

    The operating system answers for its processes, so a busy process counts as alive.
    It counts as silent only if its buffer is full and it reads nothing for this time.
    """
    probes = 4
    pause = min(max(1, round(seconds / (probes + 1))), 2**15 - 1)
    options = {
        "TCP_KEEPIDLE": pause,
        "TCP_KEEPALIVE": pause,  # the same on macOS
        "TCP_KEEPINTVL": pause,
        "TCP_KEEPCNT": probes,
        # While sent bytes are unconfirmed, the system sends no probes.
        "TCP_USER_TIMEOUT": min(round(1000 * seconds), 2**31 - 1),
    }
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # each system lacks some of them
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Sends a JSON message; does nothing if the other side is gone."""
    # If the connection is closed, the next read reports the loss.
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Waits for a message."""
    return json.loads(connection.recv_bytes())


HEARTBEAT_SECONDS = 10
"""Default time after which a machine that does not answer counts as lost."""

_JOIN_SECONDS = 300.0  # all processes must have started by then
_DRAIN_SECONDS = 2.0
_GREETING_SECONDS = 60
_POLL_SECONDS = 0.05
_KEY = "nnx_parallel/server"
# After this time, the waiting and the missing processes print where they are.
_NOTICE_SECONDS = 20.0
_SAME_CALLS = (
    "All processes must make the same calls, in the same order: code under `if "
    "jax.process_index() == 0` may print or plot, but not fit, evaluate, predict, save "
    "or restore."
)


class Server:
    """Exchanges values between the processes of a run, on process 0.

    Args:
        host: Interface to listen on; "" means all interfaces.
        count: Number of processes.
        key: Secret that a process must know to connect.
        join_seconds: Time after which missing processes are reported as lost.

    Attributes:
        port: Port on which the server listens until all processes have joined.
        joined: Event that is set when all processes have joined, or when
            ``join_seconds`` are over.
        drained: Event that is set when all other processes have ended.
    """

    def __init__(
        self, host: str, count: int, key: bytes, join_seconds: float = _JOIN_SECONDS
    ) -> None:
        self._socket = listen(host, backlog=count)
        self.port = int(self._socket.getsockname()[1])
        self._count = count
        self._key = key
        self._join_seconds = join_seconds
        self._clients: dict[Connection, int] = {}  # process by connection
        self._greeted: queue.SimpleQueue[tuple[Connection, int]] = queue.SimpleQueue()
        self._exchanges: dict[str, dict[int, Any]] = {}  # incomplete exchanges, by key
        # By process: the key for which its main thread waits, and the thread's place.
        self._waits: dict[int, tuple[str, str]] = {}
        self._finished: set[int] = set()  # processes that have announced their end
        self._has_lost = False
        self.joined = threading.Event()
        self.drained = threading.Event()
        _start("nnx_parallel.server", self._run)

    def _run(self) -> None:
        try:
            self._accept_all()
        finally:
            self.joined.set()
        while self._clients:
            for ready in mpc.wait(list(self._clients)):
                assert isinstance(ready, Connection)
                self._serve(ready)
        self.drained.set()

    def _accept_all(self) -> None:
        deadline = time.monotonic() + self._join_seconds
        self._socket.settimeout(_POLL_SECONDS)
        while len(self._clients) < self._count and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # for example a timeout
                peer, _ = self._socket.accept()
                # Each connection has its own thread, so that strangers, such as port
                # scanners that connect and send nothing, do not delay a process.
                _start("nnx_parallel.greeting", self._authenticate, peer)
            while not self._greeted.empty():
                connection, process = self._greeted.get()
                self._clients[connection] = process
        self._socket.close()
        missing = sorted({*range(self._count)} - {*self._clients.values()})
        if missing:
            reason = f"it did not join within {self._join_seconds:.0f} s"
            text = f"{reason}. Missing processes: {missing}"
            self._report_loss(missing[0], text)

    def _authenticate(self, peer: socket.socket) -> None:
        # An error may be caused by a stranger, or by a process that died.
        with contextlib.suppress(Exception), peer:
            connection = greet(peer, self._key)
            process = int(receive(connection)["process"])
            limit_reads(peer, 0)
            # Only the server's thread may write `_clients`, because that thread
            # iterates over it.
            self._greeted.put((connection, process))

    def _serve(self, connection: Connection) -> None:
        process = self._clients[connection]
        try:
            message = receive(connection)
        except (EOFError, OSError, ValueError) as error:
            del self._clients[connection]
            if set(self._clients.values()) == {0}:
                self.drained.set()
            if process not in self._finished:
                self._report_loss(process, _silence(error))
            return
        match message:
            case {"op": "put", "key": key, "value": value}:
                if place := message.get("place"):
                    self._waits[process] = key, place
                self._put(process, key, value)
            case {"op": "missing", "key": key}:
                found = self._exchanges.get(key, {})
                missing = [p for p in range(self._count) if p not in found]
                send(connection, {"op": "missing", "key": key, "processes": missing})
                text = f"Process {process} waits in {self._spell(process, key)}"
                for other, number in self._clients.items():
                    if number in missing:
                        send(other, message | {"op": "awaited", "text": text})
            case {"op": "watch", "seconds": seconds}:
                with contextlib.suppress(OSError):  # the connection may be broken
                    watch(connection, seconds)
            case {"op": "end", "reason": reason}:
                self._finished.add(process)
                if reason is not None:
                    self._report_loss(process, reason)
                self._check_finished()

    def _put(self, process: int, key: str, value: Any) -> None:
        found = self._exchanges.setdefault(key, {})
        found[process] = value
        if len(found) == self._count:
            del self._exchanges[key]
            self._waits = {p: x for p, x in self._waits.items() if x[0] != key}
            values = [found[p] for p in range(self._count)]
            if all(other == values[0] for other in values):
                # In most exchanges, including the exchange of every step, all values
                # are equal. Only one of them is sent to each process, so that the bytes
                # grow linearly with the number of processes.
                values = values[:1]
            self._broadcast({"op": "all", "key": key, "values": values})
        else:
            self._check_waits()
        self._check_finished()

    def _check_waits(self) -> None:
        """Reports main threads that wait for each other in different exchanges."""
        for (p, (key, _)), (q, (other, _)) in combinations(self._waits.items(), 2):
            # Another thread of the process may already have sent the value.
            if p not in self._exchanges[other] and q not in self._exchanges[key]:
                found = ", ".join(
                    f"process {i} is in {self._spell(i, k)}"
                    for i, (k, _) in sorted(self._waits.items())
                )
                text = f"The processes wait for each other: {found}. {_SAME_CALLS}"
                self._broadcast({"op": "apart", "text": text})
                return

    def _spell(self, process: int, key: str) -> str:
        """Describes the exchange in which a process waits, by the script's call."""
        name, place = key.rpartition(" ")[0], self._waits.get(process, ("", ""))
        return place[1] if place[0] == key else f"'{name}'"

    def _check_finished(self) -> None:
        """Reports a process that finished while others wait for its value."""
        for key, found in self._exchanges.items():
            for process in self._finished - found.keys():
                other = min(found)
                where = f"process {other} waits for it in {self._spell(other, key)}"
                self._report_loss(process, f"it ended too early: {where}")

    def _report_loss(self, process: int, reason: str | None) -> None:
        if not self._has_lost:  # the first loss is the cause of the others
            self._has_lost = True
            # The message also goes to the lost process. It can read the message if it
            # called `sys.exit` and waits in JAX's shutdown barrier. A process that is
            # already ending ignores the message.
            self._broadcast({"op": "lost", "process": process, "reason": reason})

    def _broadcast(self, message: dict[str, Any]) -> None:
        for connection in list(self._clients):
            send(connection, message)


@dataclass(eq=False)
class Client:
    """The connection of a process to the server.

    Attributes:
        connection: An authenticated connection.
        server: The server on process 0; ``None`` on all other processes.
        on_lost: Function that ends this process. Its arguments are the number of the
            lost process, its exit message, and `drain`.
        steps_begun: Number of steps that the fits of this process have begun.
    """

    connection: Connection
    server: Server | None
    on_lost: Callable[[int, str | None, Callable[[], None]], None] = end_by_loss

    def __post_init__(self) -> None:
        self.set_heartbeat(HEARTBEAT_SECONDS)
        self._sending = threading.Lock()
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._replies: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._has_ended = False
        self.steps_begun = 0
        _start("nnx_parallel.client", self._listen)

    def set_heartbeat(self, seconds: float) -> None:
        """Sets the time after which process 0, or this process, counts as lost."""
        watch(self.connection, seconds)
        send(self.connection, {"op": "watch", "seconds": seconds})

    def reserve(self, name: str) -> str:
        """Returns the key of a name's next exchange.

        All processes must reserve the exchanges of a name in the same order.
        """
        self._counts[name] += 1
        return f"{name} {self._counts[name]}"

    def allgather(self, key: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Sends a value and returns the values of all processes, by process.

        Exchanges of several keys may run at the same time, on any threads.

        Raises:
            ProcessError: If some processes did not take part in time. The message lists
                them.
            DisagreementError: If main threads wait for each other in different
                exchanges.
        """
        # The reply may already have arrived; `setdefault` is atomic.
        replies = self._replies.setdefault(key, queue.SimpleQueue())
        is_main = threading.current_thread() is threading.main_thread()
        place = place_of(inspect.currentframe()) if is_main else ""
        self._send({"op": "put", "key": key, "value": value, "place": place})
        try:
            reply = self._await(key, place, replies, timeout_seconds)
        finally:
            self._replies.pop(key, None)
        values = reply["values"]
        return values * process_count() if len(values) == 1 else values

    def _await(
        self,
        key: str,
        place: str,
        replies: queue.SimpleQueue[dict[str, Any]],
        timeout_seconds: float,
    ) -> dict[str, Any]:
        """Waits for the values of a key, and asks which processes are missing."""
        name, waited, pause = key.rpartition(" ")[0], 0.0, _NOTICE_SECONDS
        question = {"op": "missing", "key": key, "steps": self.steps_begun}
        question["is_main"] = bool(place)
        while True:
            pause = min(pause, timeout_seconds - waited)
            try:
                reply = replies.get(timeout=pause)
            except queue.Empty:
                self._send(question)
                reply = replies.get(timeout=timeout_seconds)
            if reply["op"] == "all":
                return reply
            if reply["op"] == "apart":
                raise DisagreementError(reply["text"])
            waited, pause = waited + pause, 10 * pause
            who = reply["processes"]
            if waited >= timeout_seconds:
                raise ProcessError(
                    f"Processes {who} did not take part in '{name}' within "
                    f"{timeout_seconds:.0f} s. All processes must run the same script; "
                    "find out why these processes did not take part."
                )
            write_error(
                f"This process has waited for {waited:.0f} s in {place or repr(name)} "
                f"for processes {who}; their output says where they are. If they are "
                "only slow, nothing is wrong."
            )

    def announce_end(self, reason: str | None = None) -> None:
        """Announces that this process ends, and the reason if it ends by an error."""
        self._has_ended = True
        self._send({"op": "end", "reason": reason})

    def end(self, reason: str | None = None) -> None:
        """Announces that this process ends now, without JAX's shutdown barrier."""
        self.announce_end(reason)
        self.drain()

    def drain(self) -> None:
        """On process 0, waits a short time for the other processes to end."""
        # When process 0 ends, JAX's coordination service ends, and its clients abort
        # the other processes before they can print a line.
        if self.server is not None:
            self.server.drained.wait(_DRAIN_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:  # any thread may send
            send(self.connection, message)

    def _listen(self) -> None:
        while True:
            try:
                message = receive(self.connection)
            except (EOFError, OSError) as error:
                if not self._has_ended:
                    self.on_lost(0, _silence(error), self.drain)
                return
            if message["op"] == "lost":
                self.on_lost(message["process"], message["reason"], self.drain)
            elif message["op"] == "apart":
                for replies in list(self._replies.values()):
                    replies.put(message)
            elif message["op"] == "awaited":
                self._answer(message)
            else:
                key = message["key"]
                self._replies.setdefault(key, queue.SimpleQueue()).put(message)

    def _answer(self, message: dict[str, Any]) -> None:
        """Prints where this process is, because another process waits for it."""
        # Python has no public function for the frames of other threads.
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        place = place_of(frames.get(threading.main_thread().ident or 0))
        text = f"{message['text']} for this process, which is in {place}."
        # If this process has begun more steps than the waiting process, it has passed
        # the exchange and will not take part in it.
        if message["is_main"] and self.steps_begun > message["steps"]:
            end_by_error(f"{text} {_SAME_CALLS}", DisagreementError)
        write_error(text)


def _silence(error: BaseException) -> str | None:
    """Returns a reason if a connection failed because a machine does not answer."""
    codes = errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH
    if isinstance(error, OSError) and error.errno in codes:
        return "its machine does not answer (off, or without network)"
    return None


@cache
def join() -> Client | None:
    """Returns this process's client, or ``None`` if there is only one process.

    The first call connects the client to the server. All processes must make that call.

    Raises:
        ProcessError: If process 0 does not start its server.
    """
    if process_count() == 1:
        return None
    store: Any = STATE.client
    host = host_of(STATE.coordinator_address or "")
    server: Server | None = None
    if process_index() == 0:
        secret = secrets.token_bytes(32)
        # If all processes are on one machine, other machines cannot reach the server.
        server = Server(host if is_loopback(host) else "", process_count(), secret)
        store.key_value_set(_KEY, f"{server.port} {secret.hex()}")
    try:
        found = store.blocking_key_value_get(_KEY, int(_JOIN_SECONDS * 1000))
    except Exception as error:
        raise ProcessError(
            f"Process 0 did not start its server within {_JOIN_SECONDS:.0f} s: "
            f"{error}. All processes must call nnx_parallel.initialize()."
        ) from error
    port, key = found.split()
    connection = connect(host, int(port), bytes.fromhex(key))
    send(connection, {"process": process_index()})
    client = Client(connection, server)
    install(client.end)
    atexit.register(client.announce_end)
    if server is not None:
        # An interpreter that is shutting down cannot start threads, but a process that
        # joins late needs a thread that authenticates it.
        server.joined.wait()
    return client


def _start(name: str, target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()
