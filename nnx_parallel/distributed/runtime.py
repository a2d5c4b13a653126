"""This process among the others: its number, its addresses, its lines of output."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
from typing import Any

# `jax.process_index()` and `jax.process_count()` start a backend, after which
# `jax.distributed.initialize` refuses to run. JAX's own state is read instead, by this
# module alone.
from jax._src import distributed, xla_bridge

TAGGED = "NNX_PARALLEL_TAGGED"
"""Set by a launcher that tags the lines of its processes itself, to its process id."""

_LOCAL_NAMES = ("localhost", "ip6-localhost", "ip6-loopback")


def process_index() -> int:
    """Number of this process."""
    return distributed.global_state.process_id or 0


def process_count() -> int:
    """Number of processes."""
    return distributed.global_state.num_processes or 1


def coordination_client() -> Any:
    """Client of JAX's coordination service, or ``None`` before it is started."""
    return distributed.global_state.client


def coordinator_address() -> str:
    """``host:port`` of process 0, as all processes reach it."""
    return distributed.global_state.coordinator_address or "127.0.0.1:0"


def has_backend() -> bool:
    """True if JAX has counted its devices, after which none can be added."""
    return bool(xla_bridge.backends_are_initialized())


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
        return host in _LOCAL_NAMES
    # `is_loopback` of a mapped address is wrong before Python 3.13.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listen(host: str, backlog: int = 1) -> socket.socket:
    """A socket that listens on a free port.

    Args:
        host: Interface to listen on; empty for all, over IPv4 and IPv6.
        backlog: Connections that may wait to be accepted.

    Raises:
        OSError: If the host has no address on which this machine can listen.
    """
    host = host.strip("[]")
    if not host:
        # IPv6 may be unknown to the kernel, or known and switched off.
        with contextlib.suppress(OSError, ValueError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
        return socket.create_server(("", 0), backlog=backlog)
    failure = OSError(f"'{host}' has no address.")
    for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(address[:2], family=family, backlog=backlog)
        except OSError as error:
            failure = error
    raise failure


def print_once(*values: Any, **options: Any) -> None:
    """Prints on process 0 alone; takes the arguments of ``print``.

    Example:
        >>> print_once("loss", 0.5)
        loss 0.5
    """
    if process_index() == 0:
        print(*values, **options)  # noqa: T201


def tag() -> str:
    """Prefix of each line of this process; empty if a launcher adds its own."""
    if process_count() == 1 or os.environ.get(TAGGED):
        return ""
    return f"[process {process_index()}] "


def write_error(text: str) -> None:
    """Writes tagged lines to standard error in one piece, after flushing stdout."""
    # One write: lines of processes that share a terminal do not interleave.
    lines = "".join(f"{tag()}{line}\n" for line in text.splitlines())
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        if stream is sys.stderr:
            stream.write(lines)
        stream.flush()  # `os._exit`, which often follows, flushes nothing


def tag_logging() -> None:
    """Adds the process's tag to the message of every record of ``logging``."""
    # The factory of records reaches handlers that other libraries install later; a
    # formatter or filter reaches only those that exist.
    make_record = logging.getLogRecordFactory()

    def make_tagged_record(*args: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*args, **options)
        # The message is a %-format, to which the arguments are applied afterwards.
        record.msg = f"{tag().replace('%', '%%')}{record.msg}"
        return record

    logging.setLogRecordFactory(make_tagged_record)
