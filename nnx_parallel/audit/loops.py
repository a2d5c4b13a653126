"""How often a loop runs, found by evaluating the program's integer scalars.

XLA writes a loop's trip count beside it on CPU and GPU but not on TPU. There, and
wherever else it is missing, the count follows from the loop itself: a scan or a
`fori_loop` steps an integer until a condition fails. Evaluating only the scalars of the
body twice shows which of them advance by a fixed step; the condition, evaluated at
multiples of that step, shows where the loop ends. Whatever depends on an array, on an
input of the program or on more than sums is `None`, "unknown".
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from nnx_parallel.audit.hlo import Computation, Instruction, Module, Shape

KnownValue: TypeAlias = "int | tuple[KnownValue, ...] | None"

_KNOWN_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_MAX_TRIPS = 2**40  # beyond it a condition is taken to hold forever
_SAME = {"copy", "bitcast", "convert", "reshape", "opt-barrier"}
# Nothing but what is linear, so that a few iterations foretell the others.
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
    module: Module, computation: Computation, arguments: tuple[KnownValue, ...]
) -> dict[str, KnownValue]:
    """The values of a computation's integer scalars, by instruction.

    Parameters for which `arguments` has no value are unknown.
    """
    values: dict[str, KnownValue] = {}
    for name, instruction in computation.instructions.items():
        # Tuples too: a loop's state is one, with its counter among the arrays.
        if any(map(_is_integer_scalar, instruction.shapes)):
            values[name] = _evaluate(module, instruction, values, arguments)
    return values


@dataclass(frozen=True, kw_only=True)
class WhileLoop:
    """A `while` as far as it is known before it runs.

    Attributes:
        trip_count: How often its body runs; `None` when that depends on data.
        invariants: Its state, unknown where it changes between iterations; with it
            the loops inside the body can be read in turn.
    """

    trip_count: int | None
    invariants: tuple[KnownValue, ...]


def read_loop(
    module: Module, instruction: Instruction, initial: KnownValue
) -> WhileLoop:
    """Reads a `while` from what is known of its state before the first iteration."""
    states = [initial]
    for _ in range(2):
        states.append(_call(module, instruction.attribute("body"), (states[-1],)))
    progressions = [
        _progression([_element(state, index) for state in states])
        for index in range(len(instruction.shapes))
    ]

    def goes_on(trips: int) -> KnownValue:
        state = tuple(p and p[0] + trips * p[1] for p in progressions)
        return _call(module, instruction.attribute("condition"), (state,))

    # As XLA states it on CPU and GPU.
    known = _KNOWN_TRIP_COUNT.search(instruction.attributes)
    return WhileLoop(
        trip_count=int(known.group(1)) if known else _first_failure(goes_on),
        invariants=tuple(p[0] if p and p[1] == 0 else None for p in progressions),
    )


def _progression(values: list[KnownValue]) -> tuple[int, int] | None:
    """Start and step of a value that advances evenly over its first iterations."""
    first, second, third = values
    if not (_is_int(first) and _is_int(second) and _is_int(third)):
        return None
    is_even = third - second == second - first
    return (first, second - first) if is_even else None


def _first_failure(goes_on: Callable[[int], KnownValue]) -> int | None:
    """The smallest number at which a condition fails, if it then fails for good."""
    if goes_on(0) is None:
        return None
    # Doubling, then bisection: a loop of a million steps takes forty evaluations.
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
    values: Mapping[str, KnownValue],
    arguments: tuple[KnownValue, ...],
) -> KnownValue:
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
        case "copy-start":  # yields destination, source, and a token
            return operands[0], operands[0], None
        case "copy-done":
            return _element(operands[0], 0)
        case opcode if opcode in _SAME:
            return operands[0]
    key = instruction.attribute("direction") or instruction.opcode
    # Comparisons yield booleans, on which only logic is evaluated.
    if key in _ARITHMETIC and all(map(_is_int, operands)):
        return _ARITHMETIC[key](*operands)
    if key in _LOGIC and all(isinstance(value, bool) for value in operands):
        return _LOGIC[key](*operands)
    return None


def _call(
    module: Module, name: str | None, arguments: tuple[KnownValue, ...]
) -> KnownValue:
    if name is None:
        return None
    computation = module.computations[name]
    return evaluate(module, computation, arguments).get(computation.root)


def _constant(operands: tuple[str, ...]) -> int | None:
    text = operands[0] if operands else ""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _element(value: KnownValue, index: int) -> KnownValue:
    if isinstance(value, tuple) and index < len(value):
        return value[index]
    return None


def _is_int(value: KnownValue) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_integer_scalar(shape: Shape) -> bool:
    # s32, u8, pred
    return shape.dims == () and shape.dtype[0] in "sup"
