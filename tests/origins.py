"""Traces a value of a compiled program back to its sources, through loops and calls."""

from __future__ import annotations

from collections.abc import Iterator

from nnx_parallel.audit.hlo import Computation, Instruction, Module

Place = tuple[str, str, int | None]
"""A computation, an instruction in it, and an index into its tuple; `None` for all."""


def origins(module: Module, computation: str, name: str) -> set[str]:
    """Opcodes of all instructions that a value is computed from.

    The set contains ``parameter`` only if the value depends on an argument of the
    program.
    """
    found, seen = set(), set()
    waiting: list[Place] = [(computation, name, None)]
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        inside = module.computations[place[0]]
        instruction = inside.instructions[place[1]]
        waiting += _before(module, inside, instruction, place[2])
        is_argument = inside.name == module.entry
        if instruction.opcode != "parameter" or is_argument:
            found.add(instruction.opcode)
    return found


def _before(
    module: Module, inside: Computation, instruction: Instruction, index: int | None
) -> Iterator[Place]:
    """Places whose values an instruction uses directly."""
    operands = instruction.operands
    match instruction.opcode:
        case "constant":
            return
        case "parameter":
            yield from _given(module, inside.name, int(operands[0]), index)
        case "get-tuple-element":
            element = int(instruction.attribute("index") or 0)
            yield inside.name, operands[0], element
        case "tuple" if index is not None:
            yield inside.name, operands[index], None
        case "while":
            body = module.computations[instruction.attribute("body") or ""]
            yield inside.name, operands[0], index
            yield body.name, body.root, index
        case "fusion" | "call":
            called = module.computations[instruction.called or ""]
            yield called.name, called.root, index
        case "conditional":
            yield inside.name, operands[0], None
            for branch in instruction.branches:
                yield branch, module.computations[branch].root, index
        case _:
            for operand in operands:
                yield inside.name, operand, None


def _given(
    module: Module, called: str, number: int, index: int | None
) -> Iterator[Place]:
    """Places whose values the callers of a computation pass as one parameter."""
    for outer in module.computations.values():
        for caller in outer.instructions.values():
            if called in (caller.attribute("body"), caller.attribute("condition")):
                yield outer.name, caller.name, index
            elif called in caller.branches:
                branch = caller.branches.index(called)
                yield outer.name, caller.operands[1 + branch], index
            elif called == caller.called:
                yield outer.name, caller.operands[number], index
