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

_LOCAL_NAMES = ("localhost", "ip6-localhost", "ip6-loopback")

_CONNECT_SECONDS = 20.0
"""For each address of a host: the next may answer where one does not."""


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
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, as no other can reach it.

    Example:
        >>> is_loopback("::1"), is_loopback("::ffff:127.0.0.1"), is_loopback("10.0.0.1")
        (True, True, False)
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in _LOCAL_NAMES
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listen(host: str, backlog: int = 1) -> socket.socket:
    """A socket that listens on a free port.

    Args:
        host: Interface to listen on; empty for all, over IPv4 and IPv6.
        backlog: How many may knock at once.

    Raises:
        OSError: If the host has no address on which this machine can listen.
    """
    host = host.strip("[]")
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # known to the kernel, but switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    if not host:
        return socket.create_server(("", 0), backlog=backlog)
    failure: OSError | None = None
    for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(address[:2], family=family, backlog=backlog)
        except OSError as error:
            failure = error
    raise failure or OSError(f"'{host}' has no address.")


def connect(host: str, port: int, key: bytes) -> Connection:
    """A connection on which both sides have shown that they know the key.

    Raises:
        OSError: If none of the host's addresses answers.
    """
    peer = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
    peer.settimeout(None)  # `Connection` reads and writes without
    connection = Connection(peer.detach())
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection
