"""Addresses of a run's processes, over IPv4 and IPv6."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
)


def host_of(address: str) -> str:
    """The host of an address with a port.

    Example:
        >>> host_of("[::1]:8080"), host_of("head:8080")
        ('::1', 'head')
    """
    return address.rpartition(":")[0].strip("[]")


def with_port(host: str, port: int) -> str:
    """A host's address with a port.

    Example:
        >>> with_port("::1", 8080), with_port("head", 8080)
        ('[::1]:8080', 'head:8080')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, as no other can reach it.

    Example:
        >>> is_loopback("::1"), is_loopback("10.0.0.1")
        (True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, backlog: int = 1) -> socket.socket:
    """A socket that listens on a free port.

    Args:
        host: Interface to listen on; empty for all, over IPv4 and IPv6.
        backlog: How many may knock at once.
    """
    if host:
        family, *_ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        return socket.create_server((host, 0), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # known to the kernel, but switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=backlog)


def connect(host: str, port: int, key: bytes) -> Connection:
    """A connection on which both sides have shown that they know the key."""
    peer = socket.create_connection((host, port))
    connection = Connection(peer.detach())
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection
