"""The communication of a program compiled for TPUs, which need not be there."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from nnx_parallel.audit.collectives import ReplicaGroups
from nnx_parallel.audit.report import audit


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A collective at its place in the schedule.

    Attributes:
        kind: One of the audit's kinds, or ``"unread"``.
        bytes: Bytes that a device sends for it in all executions, by the best ring.
        is_hidden: True if a product runs between its start and its end.
        source: The JAX operation that it came from.
        groups: Positions of the devices that take part together, or `None`.
    """

    kind: str
    bytes: float
    is_hidden: bool
    source: str
    groups: ReplicaGroups | None = None


def compile_with_text(lowered: jax.stages.Lowered) -> tuple[Any, str]:
    """A program for TPUs and its text, as the compiler itself writes it.

    jaxlib 0.10 cannot print all that the libtpu of today compiles.
    """
    with tempfile.TemporaryDirectory() as directory:
        compiled = lowered.compile(compiler_options={"xla_dump_to": directory})
        (file,) = Path(directory).glob("*.after_optimizations.txt")
        return compiled, file.read_text()


def read_transfers(text: str) -> list[Transfer]:
    """Every collective of a scheduled program among more than one device.

    Args:
        text: Optimised HLO of a backend that schedules it, with its loops' lengths.
    """
    report = audit(text)
    return [
        Transfer(
            kind=each.kind,
            bytes=each.sent_bytes,
            is_hidden=bool(each.is_hidden),
            source=each.source,
            groups=each.groups,
        )
        for each in (*report.collectives, *report.unread)
    ]
