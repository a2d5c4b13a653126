"""Sockets between processes: JSON over TCP, for processes that know a key."""

import contextlib
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from multiprocessing import connection as mpc
from multiprocessing.connection import Connection
from typing import Any

_CONNECT_SECONDS = 20.0  # per address of a host: another of them may answer


def connect(host: str, port: int, key: bytes) -> Connection:
    """A connection on which both sides have proved that they know the key."""
    # `multiprocessing.connection.Client` would try only IPv4.
    with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as peer:
        return handshake(peer, key, mpc.answer_challenge, mpc.deliver_challenge)


def host_of(address: str) -> str:
    """Host of an address with a port.

    Example:
        >>> host_of("[::1]:8080"), host_of("head:8080")
        ('::1', 'head')
    """
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """True if a host is this machine, under a name that no other machine can reach.

    Example:
        >>> is_loopback("::1"), is_loopback("::ffff:127.0.0.1"), is_loopback("10.0.0.1")
        (True, True, False)
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", "ip6-localhost", "ip6-loopback")
    # `is_loopback` of a mapped address is wrong before Python 3.13.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listen(host: str, backlog: int = 1) -> socket.socket:
    """A socket that listens on a free port of a host; an empty host means all."""
    host = host.strip("[]")
    serve = partial(socket.create_server, backlog=backlog)
    if not host:
        # IPv6 may be unknown to the kernel, or known and switched off.
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
    """A connection over a socket on which both sides prove that they know the key."""
    # `Connection` reads the descriptor itself, which must block: a timeout of the
    # socket, or `socket.setdefaulttimeout`, leaves it non-blocking.
    peer.settimeout(None)
    connection = Connection(os.dup(peer.fileno()))  # closed with its last reference
    for step in steps:
        step(connection, key)
    return connection


def limit_reads(peer: socket.socket, seconds: int) -> None:
    """Limits how long a read may wait, also of a copied descriptor; 0 lifts it."""
    # A timeout set with Python would leave the descriptor non-blocking.
    limit = struct.pack("ll", seconds, 0)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Sends a message that JSON can hold; does nothing if the other side is gone."""
    with contextlib.suppress(OSError):  # closed: the next read of it reports the loss
        connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Waits for a message."""
    return json.loads(connection.recv_bytes())
