"""A reader for optimised HLO text, the last form of a program that XLA prints.

The text is a list of computations, each a list of instructions in an order in which
they could run. Every backend prints the same grammar, so one reader serves CPU, GPU and
TPU. It parses names, shapes, opcodes and operands; attributes stay text, in which
`Instruction.attribute` searches.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-$]+)\s*\(.*\{\s*$")
_END = re.compile(r"\}\s*(,\s*execution_thread=.*)?$")
_INSTRUCTION = re.compile(r"\s+(ROOT\s+)?%?([\w.\-$]+) = ")
_OPCODE = re.compile(r"\s*([\w\-$]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(r"(?:^|, )(?:calls|to_apply)=%?([\w.\-$]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SEPARATOR = re.compile(r"[()\[\]{},]")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Element type and dims of one array, as one device holds it."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, without the padding of a layout; 0 for a token."""
        return math.ceil(self.num_elements * _num_bits(self.dtype) / 8)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Unique in its computation.
        opcode: The operation, such as `"dot"`.
        shapes: The arrays it yields; the leaves of a tuple in order.
        operands: Names of its operands; of a constant or parameter, the text in
            parentheses.
        attributes: The text after the operands.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def source(self) -> str:
        """The JAX operation it came from; empty when the compiler does not say."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""

    @property
    def called(self) -> str | None:
        """The computation that a fusion, a call or an asynchronous start calls."""
        found = _CALLED.search(self.attributes)
        return found.group(1) if found else None

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations among which a conditional chooses."""
        if found := _BRANCHES.search(self.attributes):
            return tuple(map(_operand_name, found.group(1).split(",")))
        # A conditional on a boolean names its two branches apart.
        both = self.attribute("true_computation"), self.attribute("false_computation")
        return tuple(name for name in both if name is not None)

    def attribute(self, key: str) -> str | None:
        """The value of `key=value` up to the next comma, or a braced or quoted one."""
        value = r"\{[^}]*\}|\"[^\"]*\"|[^,\s]+"
        found = re.search(rf"(?:^|, ){key}=({value})", self.attributes)
        return found.group(1).strip('%{}"') if found else None

    def int_list(self, key: str) -> tuple[int, ...]:
        """The numbers of `key={1,2}`; empty where the attribute is absent."""
        return tuple(int(n) for n in re.findall(r"-?\d+", self.attribute(key) or ""))


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A named list of instructions, one of which is the result.

    Attributes:
        name: Unique in the module.
        instructions: By name, in program order.
        root: Name of the instruction whose value is the result.
    """

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """The arrays that an instruction of this computation reads."""
        defined = (self.instructions.get(name) for name in instruction.operands)
        return tuple(shape for each in defined if each for shape in each.shapes)

    # Asked for each collective of a TPU's program: the scan over all is done once.
    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """For each instruction's name, the instructions that read it."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in set(instruction.operands) & users.keys():
                users[operand].append(instruction)
        return {name: tuple(found) for name, found in users.items()}


@dataclass(frozen=True, kw_only=True)
class Module:
    """A compiled program: computations by name, the first to run, the device count."""

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int


def parse(text: str) -> Module:
    """Parses optimised HLO, the text that `compiled.as_text()` returns.

    Raises:
        ValueError: If the text has no entry computation.
    """
    computations, entry = {}, None
    for name, is_entry, lines in _split_computations(text):
        computations[name] = _parse_computation(name, lines)
        entry = name if is_entry else entry
    if entry is None:
        raise ValueError(
            f"No `ENTRY` computation in a text that starts {text[:40]!r}. The audit "
            "reads optimised HLO: pass `jax.jit(f).lower(...).compile()` or the "
            "`as_text()` of that, not the text of a lowered or traced function."
        )
    header = text[: text.find("\n")]  # `HloModule jit_step, ..., num_partitions=8, ...`
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    return Module(
        computations=computations, entry=entry, num_devices=math.prod(map(int, sizes))
    )


def _split_computations(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    header, lines = None, []
    for line in text.splitlines():
        if header is None:
            header = _COMPUTATION.match(line)
        elif _END.match(line):
            yield header.group(2), bool(header.group(1)), lines
            header, lines = None, []
        elif lines and not _INSTRUCTION.match(line):
            # The TPU compiler prints a Pallas kernel's metadata over several lines, one
            # of which begins with a brace.
            lines[-1] += line
        else:
            lines.append(line)


def _parse_computation(name: str, lines: list[str]) -> Computation:
    instructions, root = {}, ""
    for line in lines:
        start = _INSTRUCTION.match(line)
        if start is None:
            continue
        instruction = _parse_instruction(start.group(2), line[start.end() :])
        instructions[instruction.name] = instruction
        if start.group(1) or not root:
            root = instruction.name
    return Computation(name=name, instructions=instructions, root=root)


def _parse_instruction(name: str, text: str) -> Instruction:
    # `f32[8]{0} add(%a, %b), metadata=...`, or `(f32[8]{0}, s32[]) while(%state), ...`
    end = _parenthesised(text, 0)[1] if text.startswith("(") else text.index(" ")
    opcode = _OPCODE.match(text, end)
    assert opcode, f"no opcode in {text[:200]!r}"
    operands, close = _parenthesised(text, opcode.end() - 1)
    return Instruction(
        name=name,
        opcode=opcode.group(1),
        shapes=_parse_shapes(text[:end]),
        operands=tuple(_operand_name(each) for each in operands if each.strip()),
        attributes=text[close:].lstrip(", "),
    )


def _parenthesised(text: str, start: int) -> tuple[list[str], int]:
    """Operands in the parentheses at `start`, and the index where these end."""
    parts, depth = [], 0
    for found in _SEPARATOR.finditer(text, start):
        bracket = found.group()
        if depth == 1 and bracket in ",)":
            parts.append(text[start + 1 : found.start()])
            start = found.start()
        depth += (bracket in "([{") - (bracket in ")]}")
        if depth == 0:
            return parts, found.end()
    return parts, len(text)


def _operand_name(text: str) -> str:
    """`%a` of `f32[8]{0} %a`: some printers put each operand's type before it."""
    words = _COMMENT.sub("", text).split()
    return words[-1].lstrip("%") if words else ""


def _parse_shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        # A dim of dynamic size is printed `<=8`.
        Shape(dtype=dtype, dims=tuple(int(n) for n in re.findall(r"\d+", dims)))
        for dtype, dims in _SHAPE.findall(text)
    )


def _num_bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.match(r"[a-z]+(\d+)", dtype)  # none in `token`
    return int(digits.group(1)) if digits else 0
