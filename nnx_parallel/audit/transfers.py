"""The communication of a scheduled program, and how much of it matmuls overlap.

A TPU's optimised HLO is printed in the order in which it runs. A collective is hidden
if it is asynchronous and a matmul runs between its start and its end; else it is
exposed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from nnx_parallel.audit.collectives import (
    Collective,
    ReplicaGroups,
    read_collective,
)
from nnx_parallel.audit.flops import count_flops
from nnx_parallel.audit.hlo import Computation, Instruction, KnownValue, Module, parse


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A collective at its place in the schedule.

    Attributes:
        kind: One of the audit's kinds.
        bytes: Bytes that a device sends for it in all executions, by the best ring.
        is_hidden: True if a matmul runs between its start and its end.
        source: The JAX operation that it came from.
        groups: Positions of the devices that take part together, or `None`.
    """

    kind: str
    bytes: float
    is_hidden: bool
    source: str
    groups: ReplicaGroups | None = None


def compile_with_text(
    lowered: jax.stages.Lowered, options: Mapping[str, str] | None = None
) -> tuple[Any, str]:
    """A program for TPUs and its text, as the compiler itself writes it.

    jaxlib 0.10 cannot print all that the libtpu of today compiles.
    """
    with tempfile.TemporaryDirectory() as directory:
        options = {**(options or {}), "xla_dump_to": directory}
        compiled = lowered.compile(compiler_options=options)
        (file,) = Path(directory).glob("*.after_optimizations.txt")
        return compiled, file.read_text()


def read_transfers(text: str) -> list[Transfer]:
    """Every collective of a scheduled program among more than one device.

    Args:
        text: Optimised HLO of a backend that schedules it, with its loops' lengths.
    """
    return list(_Schedule(parse(text)).of_entry())


@dataclass(frozen=True)
class _Schedule:
    module: Module

    def of_entry(self) -> Iterator[Transfer]:
        return self.of(self.module.entry, 1, ())

    def of(
        self, name: str, count: int, arguments: tuple[KnownValue, ...]
    ) -> Iterator[Transfer]:
        computation = self.module.computations[name]
        values = self.module.evaluate(name, arguments)
        for instruction in computation.instructions.values():
            operands = tuple(values.get(operand) for operand in instruction.operands)
            if _is_spare(instruction):
                continue
            if instruction.opcode == "while":
                loop = self.module.read_loop(instruction, operands[0])
                trips = count * (loop.trip_count or 1)
                body = instruction.attribute("body") or ""
                yield from self.of(body, trips, (loop.invariants,))
            elif found := self._collective(computation, instruction):
                yield Transfer(
                    kind=found.kind,
                    bytes=count * sent_bytes(found),
                    is_hidden=self._is_hidden(computation, instruction),
                    source=found.source or instruction.source,
                    groups=found.groups,
                )
            elif instruction.opcode in ("call", "conditional"):
                called = instruction.called, *instruction.branches
                for each in filter(None, called):
                    yield from self.of(each, count, operands)

    def _collective(
        self, computation: Computation, instruction: Instruction
    ) -> Collective | None:
        """The collective that is, or that starts inside a fusion or an async start."""
        devices = self.module.num_devices
        if found := read_collective(computation, instruction, devices):
            return found
        if instruction.opcode not in ("fusion", "async-start"):
            return None
        inner = self.module.computations[instruction.called or ""]
        all_inside = (self._collective(inner, i) for i in inner.instructions.values())
        return next(filter(None, all_inside), None)

    def _is_hidden(self, computation: Computation, start: Instruction) -> bool:
        """True if a matmul comes before the first instruction that awaits it."""
        if not start.opcode.endswith("-start"):
            return False
        order = list(computation.instructions.values())
        first = order.index(start) + 1
        awaits = f"{start.opcode.removesuffix('-start')}-done"
        for instruction in order[first:]:
            if instruction.opcode == awaits and start.name in instruction.operands:
                return False
            if self._has_matmul(computation, instruction):
                return True
        return False

    def _has_matmul(self, computation: Computation, instruction: Instruction) -> bool:
        if count_flops(computation, instruction):
            return True
        if _is_spare(instruction):
            return False
        called = {
            "while": (instruction.attribute("body"),),
            "fusion": (instruction.called,),
            "call": (instruction.called,),
            "conditional": instruction.branches,  # one that is not always taken too
        }
        return any(
            self._has_matmul(inner, each)
            for name in called.get(instruction.opcode, ())
            for inner in (self.module.computations[name or ""],)
            for each in inner.instructions.values()
        )


def _is_spare(instruction: Instruction) -> bool:
    """True for the further rounds of experts, which balanced tokens do not need."""
    return instruction.source.endswith("more_rounds/while")


def sent_bytes(collective: Collective) -> float:
    """Bytes that each device of the group sends, by a ring that sends the least."""
    size, total = collective.group_size, collective.bytes_each
    share = (size - 1) / size
    if collective.kind == "collective-permute":
        return total
    return total * (2 * share if collective.kind == "all-reduce" else share)
