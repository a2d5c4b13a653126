"""How often a loop runs, found by running the program's integer scalars.

XLA writes a loop's trip count beside it on CPU and GPU but not on TPU. There, and
wherever else it is missing, the count follows from the loop itself: a scan or a
`fori_loop` steps an integer until a condition fails. Evaluating only the scalars of the
body twice shows which of them advance by a fixed step; the condition, evaluated at
multiples of that step, shows where the loop ends. Anything that hangs on an array, on
an input of the program or on more than sums is `None`, "unknown", and so is what is
computed from it.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from nnx_parallel.audit.hlo import Computation, Instruction, Module, Shape

Value: TypeAlias = "int | tuple[Value, ...] | None"

_KNOWN_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_MAX_TRIPS = 2**40
_SAME = {"copy", "bitcast", "convert", "reshape", "opt-barrier"}
_ARITHMETIC: Mapping[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_LOGIC: Mapping[str, Callable[..., bool]] = {
    "and": operator.and_,
    "or": operator.or_,
}


def evaluate(
    module: Module, computation: Computation, arguments: tuple[Value, ...]
) -> dict[str, Value]:
    """Runs the integer scalars of a computation.

    Args:
        module: The program, for the computations that this one calls.
        computation: What to run.
        arguments: Values of its parameters; parameters beyond them are unknown.

    Returns:
        The value of each instruction by name: an integer, a tuple, or `None`.
    """
    values: dict[str, Value] = {}
    for name, instruction in computation.instructions.items():
        if any(map(_is_integer_scalar, instruction.shapes)):
            values[name] = _evaluate(module, instruction, values, arguments)
    return values


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What is known of a `while` before it runs.

    Attributes:
        trip_count: How often its body runs, or `None` when that depends on data.
        invariants: Its state with all that changes between iterations unknown, so that
            loops inside the body can be read in turn.
    """

    trip_count: int | None
    invariants: tuple[Value, ...]


def read_loop(module: Module, instruction: Instruction, initial: Value) -> Loop:
    """Reads a `while`.

    Args:
        module: The program.
        instruction: The `while`.
        initial: What is known of the state before the first iteration.

    Returns:
        Its trip count and the invariant part of its state.
    """
    states = [initial]
    for _ in range(2):
        states.append(_call(module, instruction.attribute("body"), (states[-1],)))
    progress = [
        _progress([_element(state, index) for state in states])
        for index in range(len(instruction.shapes))
    ]

    def goes_on(trips: int) -> Value:
        state = tuple(p and p[0] + trips * p[1] for p in progress)
        return _call(module, instruction.attribute("condition"), (state,))

    known = _KNOWN_TRIP_COUNT.search(instruction.attributes)
    return Loop(
        trip_count=int(known.group(1)) if known else _first_failure(goes_on),
        invariants=tuple(p[0] if p and p[1] == 0 else None for p in progress),
    )


def _progress(values: list[Value]) -> tuple[int, int] | None:
    """Start and step of a value that advances evenly over its first iterations."""
    first, second, third = values
    if not (_is_int(first) and _is_int(second) and _is_int(third)):
        return None
    is_even = third - second == second - first
    return (first, second - first) if is_even else None


def _first_failure(goes_on: Callable[[int], Value]) -> int | None:
    """The smallest number at which a condition fails, if it then fails for good."""
    if goes_on(0) is None:
        return None
    low, high = -1, 0
    while goes_on(high):
        low, high = high, 2 * high + 1
        if high > _MAX_TRIPS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if goes_on(middle) else (low, middle)
    return high


def _evaluate(
    module: Module,
    instruction: Instruction,
    values: Mapping[str, Value],
    arguments: tuple[Value, ...],
) -> Value:
    operands = tuple(values.get(name) for name in instruction.operands)
    match instruction.opcode:
        case "constant":
            return _constant(instruction.operands)
        case "parameter":
            return _element(arguments, int(instruction.operands[0]))
        case "tuple":
            return operands
        case "get-tuple-element":
            return _element(operands[0], int(instruction.attribute("index") or 0))
        case "fusion" | "call":
            return _call(module, instruction.called, operands)
        case "copy-start":
            return operands[0], operands[0], None
        case "copy-done":
            return _element(operands[0], 0)
        case opcode if opcode in _SAME:
            return operands[0]
    return _arithmetic(instruction, operands)


def _arithmetic(instruction: Instruction, operands: tuple[Value, ...]) -> Value:
    """Only what is linear, so that a few iterations foretell the others."""
    key = instruction.attribute("direction") or instruction.opcode
    if key in _ARITHMETIC and all(map(_is_int, operands)):
        return _ARITHMETIC[key](*operands)
    if key in _LOGIC and all(isinstance(value, bool) for value in operands):
        return _LOGIC[key](*operands)
    return None


def _call(module: Module, name: str | None, arguments: tuple[Value, ...]) -> Value:
    if name is None:
        return None
    computation = module.computations[name]
    return evaluate(module, computation, arguments).get(computation.root)


def _constant(operands: tuple[str, ...]) -> int | None:
    text = operands[0] if operands else ""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _element(value: Value, index: int) -> Value:
    if isinstance(value, tuple) and index < len(value):
        return value[index]
    return None


def _is_int(value: Value) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_integer_scalar(shape: Shape) -> bool:
    return shape.dims == () and shape.dtype[0] in "sup"
