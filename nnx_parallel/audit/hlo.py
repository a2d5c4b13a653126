"""A reader for optimised HLO text, the last form of a program that XLA shows.

The text is a list of computations, each a list of instructions in an order in which
they could run. Every backend prints the same grammar, so one small reader serves CPU,
GPU and TPU. It keeps names, shapes, opcodes and operands; attributes stay text, which
those who need one search with `Instruction.attribute`.
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
_PARENTHESIS = re.compile(r"[()]")
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
        """Bytes of the elements, layout padding left out; a token has none."""
        return math.ceil(self.num_elements * _num_bits(self.dtype) / 8)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Its name, unique in its computation.
        opcode: What it does, such as `"dot"`.
        shapes: The arrays it yields; a tuple's leaves in order.
        operands: Names of its operands; of a constant or parameter, the text in
            parentheses.
        attributes: The text behind the operands.
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
        """The computation it calls, for a fusion, a call or an asynchronous start."""
        found = _CALLED.search(self.attributes)
        return found.group(1) if found else None

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations among which a conditional chooses."""
        found = _BRANCHES.search(self.attributes)
        if found:
            return tuple(_operand_name(name) for name in found.group(1).split(","))
        both = self.attribute("true_computation"), self.attribute("false_computation")
        return tuple(name for name in both if name is not None)

    def attribute(self, key: str) -> str | None:
        """The value of `key=value` up to the next comma, or a braced or quoted one."""
        value = r"\{[^}]*\}|\"[^\"]*\"|[^,\s]+"
        found = re.search(rf"(?:^|, ){key}=({value})", self.attributes)
        return found.group(1).strip('%{}"') if found else None

    def int_list(self, key: str) -> tuple[int, ...]:
        """The numbers of `key={1,2}`; none where the attribute is absent."""
        return tuple(int(n) for n in re.findall(r"-?\d+", self.attribute(key) or ""))


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A named list of instructions, one of which is the result.

    Attributes:
        name: Its name, unique in the module.
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
    """A compiled program.

    Attributes:
        computations: By name.
        entry: Name of the computation that runs first.
        num_devices: Devices that run the program together.
    """

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int


def parse(text: str) -> Module:
    """Reads the text of an optimised HLO module.

    Args:
        text: What `compiled.as_text()` returned.

    Returns:
        Its computations.

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
    header = text[: text.find("\n")]
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
            lines[-1] += line  # a kernel's metadata goes over several lines
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
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode = _OPCODE.match(text, end)
    assert opcode, f"no opcode in {text[:200]!r}"
    close = _closing(text, opcode.end() - 1)
    return Instruction(
        name=name,
        opcode=opcode.group(1),
        shapes=_parse_shapes(text[:end]),
        operands=tuple(_operands(text[opcode.end() : close - 1])),
        attributes=text[close:].lstrip(", "),
    )


def _closing(text: str, start: int) -> int:
    """The position behind the parenthesis that closes the one at `start`."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _operands(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for found in _SEPARATOR.finditer(text):
        if found.group() in "([{":
            depth += 1
        elif found.group() in ")]}":
            depth -= 1
        elif depth == 0:
            yield _operand_name(text[start : found.start()])
            start = found.end()
    if text.strip():
        yield _operand_name(text[start:])


def _operand_name(text: str) -> str:
    """`%a` of `f32[8]{0} %a`: some printers put each operand's type before it."""
    words = _COMMENT.sub("", text).split()
    return words[-1].lstrip("%") if words else ""


def _parse_shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype=dtype, dims=tuple(int(n) for n in re.findall(r"\d+", dims)))
        for dtype, dims in _SHAPE.findall(text)
    )


def _num_bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits.group(1)) if digits else 0
