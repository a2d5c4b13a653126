"""Reads optimised HLO text, the last form of a program that XLA prints.

Every backend prints the same grammar: a program is a list of computations, and a
computation is a list of instructions in an order in which they could run. Attributes
are kept as text, which `Instruction.attribute` searches.

A TPU's text does not state a loop's trip count. The count follows from the loop: a scan
or a `fori_loop` steps an integer until a condition fails. The integer scalars of the
body are evaluated twice, which shows which of them advance by a fixed step. The
condition is then evaluated at multiples of that step, which shows where the loop ends.
A value is `None`, "unknown", if it depends on an array, on an input of the program, or
on operations other than sums, comparisons and logic.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeAlias

_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-$]+)\s*\(.*\{\s*$")
_END = re.compile(r"\}\s*(,\s*execution_thread=.*)?$")
_INSTRUCTION = re.compile(r"\s+(ROOT\s+)?%?([\w.\-$]+) = ")
# The opcode is the first name between a space and a parenthesis. Types, even of tuples,
# do not contain such a name.
_OPCODE = re.compile(r"\s([\w\-$]+)\(")
_INTEGER_SCALAR = re.compile(r"\b[sup]\w*\[\]")  # s32[], u8[], pred[]
_COMMENT = re.compile(r"/\*.*?\*/")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SEPARATOR = re.compile(r"[()\[\]{},]")
_KNOWN_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_MAX_TRIPS = 2**40  # if a condition holds for longer, the trip count is unknown
_SAME = {"copy", "bitcast", "convert", "reshape", "opt-barrier"}
_ELEMENT = re.compile(r"%([\w.\-$]+)#(\d+)")
_COMPARISONS = ("LT", "LE", "GT", "GE", "EQ", "NE")
# Only linear operations are evaluated, so that a few iterations predict the others.
_OPERATIONS: Mapping[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "and": operator.and_,
    "or": operator.or_,
    **{name: getattr(operator, name.lower()) for name in _COMPARISONS},
}

KnownValue: TypeAlias = "int | tuple[KnownValue, ...] | None"
Known: TypeAlias = tuple[KnownValue, ...]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Element type and dims of an array on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements without the padding of a layout; 0 for a token."""
        digits = re.match(r"[a-z]+(\d+)", self.dtype)  # `token` has no digits
        bits = 8 if self.dtype == "pred" else int(digits[1]) if digits else 0
        return math.ceil(self.num_elements * bits / 8)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation: `%name = type opcode(operands), attributes`.

    A program has tens of thousands of instructions, and few of them are needed. So the
    details of an instruction are parsed on first use.

    Attributes:
        opcode: The operation, such as `"dot"`.
        type: The text before the opcode, such as `f32[8]{0}` or `(f32[8]{0}, s32[])`.
        rest: The text from the opening parenthesis on.
    """

    name: str
    opcode: str
    type: str
    rest: str

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays that it returns; for a tuple, its leaves in order."""
        return tuple(
            # A dim of dynamic size is printed as `<=8`.
            Shape(dtype=dtype, dims=tuple(map(int, re.findall(r"\d+", dims))))
            for dtype, dims in _SHAPE.findall(self.type)
        )

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of operands; for a constant or parameter, the text in parentheses."""
        return tuple(_operand_name(each) for each in self._split[0] if each.strip())

    @property
    def attributes(self) -> str:
        """The text after the operands."""
        return self._split[1]

    @cached_property
    def _split(self) -> tuple[list[str], str]:
        operands, end = _parenthesised(self.rest)
        return operands, self.rest[end:].lstrip(", ")

    @property
    def source(self) -> str:
        """The JAX operation that it came from; empty if the compiler does not say."""
        found = _OP_NAME.search(self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def called(self) -> str | None:
        """The computation that a fusion, a call or an asynchronous start calls."""
        if name := self.attribute("calls") or self.attribute("to_apply"):
            return name
        names = self.attribute("called_computations")  # the attribute of a custom call
        return _operand_name(names.split(",")[0]) if names else None

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations from which a conditional chooses."""
        if names := self.attribute("branch_computations"):
            return tuple(map(_operand_name, names.split(",")))
        # A conditional on a boolean names its two branches in separate attributes.
        both = self.attribute("true_computation"), self.attribute("false_computation")
        return tuple(name for name in both if name is not None)

    def attribute(self, key: str) -> str | None:
        """Returns the value of `key=value`: braced, quoted, or up to a comma."""
        value = r"\{[^}]*\}|\"[^\"]*\"|[^,\s]+"
        found = re.search(rf"(?:^|, ){key}=({value})", self.attributes)
        return found[1].strip('%{}"') if found else None


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Instructions by name, in program order; the value of `root` is the result."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Returns the arrays that an instruction of this computation reads."""
        defined = (self.instructions.get(name) for name in instruction.operands)
        return tuple(shape for each in defined if each for shape in each.shapes)

    # Cached, because the audit reads it for each collective of a TPU program.
    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """For each instruction's name, the instructions that read it."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in set(instruction.operands) & users.keys():
                users[operand].append(instruction)
        return users


class WhileLoop(NamedTuple):
    """The facts about a `while` that are known before it runs.

    Attributes:
        trip_count: Number of trips; `None` if it depends on data.
        invariants: The loop's state, with unknown values where it changes between
            iterations. It is used to read the loops inside the body.
    """

    trip_count: int | None
    invariants: Known


@dataclass(frozen=True, kw_only=True)
class Module:
    """A compiled program: its computations, the entry, and the number of devices."""

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int
    is_scheduled: bool = False  # True if printed in the order of execution

    def evaluate(self, name: str, arguments: Known) -> dict[str, KnownValue]:
        """Evaluates a computation's integer scalars; returns them by instruction.

        Parameters for which `arguments` has no value are unknown.
        """
        values: dict[str, KnownValue] = {}
        for instruction in self.computations[name].instructions.values():
            # Tuples are evaluated too: a loop's state is a tuple that contains the
            # counter.
            if _INTEGER_SCALAR.search(instruction.type):
                operands = tuple(map(values.get, instruction.operands))
                value = self._evaluate(instruction, operands, arguments)
                values[instruction.name] = value
        return values

    def _evaluate(
        self, instruction: Instruction, operands: Known, arguments: Known
    ) -> KnownValue:
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
                return self._result(instruction.called, operands)
            case "copy-start":  # returns (destination, source, token)
                return operands[0], operands[0], None
            case "copy-done":
                return _element(operands[0], 0)
            case opcode if opcode in _SAME:
                return operands[0]
        key = instruction.attribute("direction") or instruction.opcode
        # Comparisons return booleans, but only `and` and `or` take them as operands.
        kind = bool if key in ("and", "or") else int
        if key in _OPERATIONS and all(type(value) is kind for value in operands):
            return _OPERATIONS[key](*operands)
        return None

    def _result(self, name: str | None, arguments: Known) -> KnownValue:
        if name is None:
            return None
        return self.evaluate(name, arguments).get(self.computations[name].root)

    def read_loop(self, instruction: Instruction, initial: KnownValue) -> WhileLoop:
        """Reads a `while`, given the known part of its state before it runs."""
        states = [initial]
        for _ in range(2):
            states.append(self._result(instruction.attribute("body"), (states[-1],)))
        progressions = [
            _progression(*(_element(state, index) for state in states))
            for index in range(len(instruction.shapes))
        ]

        def goes_on(trips: int) -> KnownValue:
            state = tuple(p and p[0] + trips * p[1] for p in progressions)
            return self._result(instruction.attribute("condition"), (state,))

        # XLA states the trip count on CPU and GPU.
        known = _KNOWN_TRIP_COUNT.search(instruction.attributes)
        return WhileLoop(
            trip_count=int(known[1]) if known else _first_failure(goes_on),
            invariants=tuple(p[0] if p and p[1] == 0 else None for p in progressions),
        )


def _progression(
    first: KnownValue, second: KnownValue, third: KnownValue
) -> tuple[int, int] | None:
    """Returns a value's start and its constant step; `None` if the step changes."""
    if type(first) is int and type(second) is int and type(third) is int:
        step = second - first
        return (first, step) if third - second == step else None
    return None


def _first_failure(goes_on: Callable[[int], KnownValue]) -> int | None:
    """Returns the first trip at which a condition fails.

    The search assumes that the condition fails at every later trip too.
    """
    if goes_on(0) is None:
        return None
    # Doubling and then bisection take forty evaluations for a loop of a million steps.
    low, high = -1, 0
    while goes_on(high):
        low, high = high, 2 * high + 1
        if high > _MAX_TRIPS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if goes_on(middle) else (low, middle)
    return high


def _constant(operands: tuple[str, ...]) -> int | None:
    text = operands[0] if operands else ""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _element(value: KnownValue, index: int) -> KnownValue:
    return value[index] if isinstance(value, tuple) and index < len(value) else None


def parse(text: str) -> Module:
    """Parses optimised HLO, the text that `compiled.as_text()` returns.

    Raises:
        ValueError: If the text has no entry computation.
    """
    computations, entry = {}, None
    for header, lines in _split_computations(text):
        is_entry, name = header.groups()
        body, root = {}, ""
        for start, line in lines:
            is_root, key = start.groups()
            body[key] = _parse_instruction(key, line[start.end() :])
            root = key if is_root or not root else root
        body = _with_elements(body)
        computations[name] = Computation(name=name, instructions=body, root=root)
        entry = name if is_entry else entry
    if entry is None:
        raise ValueError(
            f"No `ENTRY` computation in a text that starts {text[:40]!r}. The audit "
            "reads optimised HLO: pass `jax.jit(f).lower(...).compile()` or the "
            "`as_text()` of that, not the text of a lowered or traced function."
        )
    found = re.search(r"^HloModule .*", text, re.MULTILINE)
    header = found[0] if found else ""  # `HloModule jit_step, ..., num_partitions=8`
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    num_devices = math.prod(map(int, sizes))
    return Module(
        computations=computations,
        entry=entry,
        num_devices=num_devices,
        is_scheduled="is_scheduled=true" in header,
    )


def _split_computations(
    text: str,
) -> Iterator[tuple[re.Match[str], list[tuple[re.Match[str], str]]]]:
    """Yields each computation's header, and each instruction's start and line."""
    header, lines = None, []
    for line in text.splitlines():
        if header is None:
            header = _COMPUTATION.match(line)
        elif start := _INSTRUCTION.match(line):
            lines.append((start, line))
        elif _END.match(line):
            yield header, lines
            header, lines = None, []
        elif lines:
            # The TPU compiler prints a Pallas kernel's metadata over several lines. One
            # of these lines begins with a brace.
            start, first = lines[-1]
            lines[-1] = start, first + line


def _parse_instruction(name: str, text: str) -> Instruction:
    # `f32[8]{0} add(%a, %b), metadata=...`, or `(f32[8]{0}, s32[]) while(%state), ...`
    opcode = _OPCODE.search(text)
    assert opcode, f"no opcode in {text[:200]!r}"
    type_, rest = text[: opcode.start()], text[opcode.end() - 1 :]
    return Instruction(name=name, opcode=opcode[1], type=type_, rest=rest)


def _with_elements(body: dict[str, Instruction]) -> dict[str, Instruction]:
    """Adds the `get-tuple-element`s that a compiler's dump abbreviates as `%x#1`."""
    named = (_ELEMENT.findall(each.rest) for each in body.values() if "#" in each.rest)
    indices: dict[str, set[int]] = {}
    for name, index in chain.from_iterable(named):
        indices.setdefault(name, set()).add(int(index))
    if not indices:
        return body
    found = {}
    for name, instruction in body.items():
        found[name] = instruction
        for index in sorted(indices.get(name, ())):
            found[f"{name}#{index}"] = Instruction(
                name=f"{name}#{index}",
                opcode="get-tuple-element",
                type=_parenthesised(instruction.type)[0][index],
                rest=f"(%{name}), index={index}",
            )
    return found


def _parenthesised(text: str) -> tuple[list[str], int]:
    """Returns the operands in a text's first parentheses, and the end index."""
    parts, depth, start = [], 0, 0
    for found in _SEPARATOR.finditer(text):
        bracket = found.group()
        if depth == 1 and bracket in ",)":
            parts.append(text[start + 1 : found.start()])
            start = found.start()
        depth += (bracket in "([{") - (bracket in ")]}")
        if depth == 0:
            return parts, found.end()
    return parts, len(text)


def _operand_name(text: str) -> str:
    """Returns `a` for `f32[8]{0} %a`; some printers put the type before an operand."""
    words = _COMMENT.sub("", text).split()
    return words[-1].lstrip("%") if words else ""
