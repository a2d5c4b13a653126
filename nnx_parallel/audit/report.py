"""`audit`, its `Report`, and the walk that adds up the costs of instructions."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain

import jax

from nnx_parallel.audit.collectives import KINDS, Collective, read_collective
from nnx_parallel.audit.flops import count_flops
from nnx_parallel.audit.hlo import (
    Computation,
    Instruction,
    Known,
    KnownValue,
    Module,
    parse,
)
from nnx_parallel.drawing import aligned, as_html
from nnx_parallel.errors import ProgramTextError

# Custom calls by which XLA allocates and awaits buffers; no kernels.
_BOOKKEEPING = {
    "AllocateBuffer",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
}
_CALLS = ("while", "conditional", "fusion", "call", "async-start")
# A mixture of experts takes rows beyond a device's share in further rounds. A count is
# that of balanced tokens, unless `trips` says otherwise.
_TRIPS = {"more_rounds": 0}
# `jax.lax.ragged_dot`, by its name on TPUs, and those of `MoE` on all platforms.
_GROUPED = re.compile(r"ragged[-_]dot|grouped_products")


@dataclass(frozen=True, kw_only=True)
class Conditional:
    """A conditional, of whose branches the most expensive is counted.

    Attributes:
        source: The JAX operation that it came from.
        branch_flops: FLOPs per device of each branch, executed once.
        count: Executions per run of the program, loops multiplied out.
    """

    source: str
    branch_flops: tuple[float, ...]
    count: int

    @property
    def scope(self) -> str:
        """The innermost `jax.named_scope` around it; empty if there is none."""
        return _scope(self.source)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The share of a `Report` that a piece of a program contributes, on one device."""

    flops: float = 0.0
    grouped_flops: float = 0.0
    grouped_products: int = 0
    collectives: tuple[Collective, ...] = ()
    conditionals: tuple[Conditional, ...] = ()
    unknown_loops: tuple[str, ...] = ()
    custom_calls: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Cost") -> "Cost":
        """The cost of doing both; all fields are sums."""
        return Cost(**{k: v + getattr(other, k) for k, v in vars(self).items()})

    def times(self, n: int) -> "Cost":
        """The cost of doing the same `n` times."""
        if n == 0:
            return Cost(unknown_loops=self.unknown_loops)
        collectives = (replace(c, count=c.count * n) for c in self.collectives)
        conditionals = (replace(c, count=c.count * n) for c in self.conditionals)
        return replace(
            self,
            flops=self.flops * n,
            grouped_flops=self.grouped_flops * n,
            grouped_products=self.grouped_products * n,
            collectives=tuple(collectives),
            conditionals=tuple(conditionals),
            custom_calls=Counter({k: m * n for k, m in self.custom_calls.items()}),
        )


@dataclass(frozen=True)
class _Walk:
    module: Module
    taken: Mapping[str, float]
    trips: Mapping[str, int]

    def computation(self, name: str, arguments: Known) -> Cost:
        computation = self.module.computations[name]
        values = self.module.evaluate(name, arguments)
        costs = (
            self._instruction(computation, each, values)
            for each in computation.instructions.values()
        )
        return sum(filter(None, costs), start=Cost())

    def _instruction(
        self,
        computation: Computation,
        instruction: Instruction,
        values: Mapping[str, KnownValue],
    ) -> Cost | None:
        if found := read_collective(computation, instruction, self.module.num_devices):
            return Cost(collectives=(found,))
        if flops := count_flops(computation, instruction):
            is_grouped = bool(_GROUPED.search(instruction.source))
            return Cost(
                flops=flops,
                grouped_flops=flops * is_grouped,
                grouped_products=int(is_grouped),
            )
        if instruction.opcode == "custom-call":
            target = instruction.attribute("custom_call_target") or ""
            return Cost(custom_calls=Counter({target} - _BOOKKEEPING))
        if instruction.opcode not in _CALLS:
            return None
        operands = tuple(map(values.get, instruction.operands))
        match instruction.opcode:
            case "while":
                return self._loop(instruction, operands[0])
            case "conditional":
                return self._conditional(instruction, operands[1:])
        return self._call(instruction, operands)

    def _call(self, instruction: Instruction, operands: Known) -> Cost:
        assert instruction.called, f"{instruction.name} calls nothing"
        cost = self.computation(instruction.called, operands)
        # Inside a fusion the compiler often leaves the source out, and only the wrapper
        # says that a collective is asynchronous.
        collectives = []
        for each in cost.collectives:
            is_async = each.asynchronous or instruction.opcode == "async-start"
            source = each.source or instruction.source
            collectives.append(replace(each, source=source, asynchronous=is_async))
        return replace(cost, collectives=tuple(collectives))

    def _loop(self, instruction: Instruction, initial: KnownValue) -> Cost:
        loop = self.module.read_loop(instruction, initial)
        scope, trips = _scope(instruction.source), loop.trip_count
        if trips is None:
            trips = {**_TRIPS, **self.trips}.get(scope, 1)
        body, condition = (
            self.computation(instruction.attribute(key) or "", (loop.invariants,))
            for key in ("body", "condition")
        )
        cost = body.times(trips) + condition.times(trips + 1)  # fails the last time
        if loop.trip_count is None and scope not in self.trips:
            cost += Cost(unknown_loops=(instruction.source or instruction.name,))
        return cost

    def _conditional(self, instruction: Instruction, arguments: Known) -> Cost:
        branches = [
            self.computation(name, (argument,))
            for name, argument in zip(instruction.branches, arguments, strict=True)
        ]
        # An upper bound, unless `taken` says how often it is the one that runs.
        most = max(
            branches, key=lambda c: (c.flops, sum(x.bytes for x in c.collectives))
        )
        flops = tuple(cost.flops for cost in branches)
        found = Conditional(source=instruction.source, branch_flops=flops, count=1)
        share = self.taken.get(found.scope, 1.0)
        mean = share * most.flops + (1 - share) * min(flops)
        return replace(most, flops=mean) + Cost(conditionals=(found,))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Computation, communication and memory of one run of a program on one device.

    Attributes:
        flops: Floating-point operations of dots and convolutions, and of Pallas kernels
            that state theirs; a multiplication and an addition count two.
        grouped_flops: Those of grouped products among them. On TPUs, of all rows that
            they have room for: the kernel takes tiles of rows, and skips those after
            the last group's. On CPUs each group multiplies all rows, and is counted so.
        grouped_products: Their number, `jax.lax.ragged_dot` of TPUs and those of
            `nnx_parallel.layers.MoE`. On CPUs one may take several dots.
        collectives: Every collective instruction among more than one device.
        conditionals: Every conditional. The other attributes count its most expensive
            branch, by FLOPs and then by bytes in collectives.
        unknown_loops: Loops whose trip count depends on data; bodies are counted once,
            and not at all in the rounds of `MoE` that balanced tokens do not need.
        custom_calls: Executions, by target, of kernels of unknown, uncounted FLOPs.
        opcodes: Instructions by opcode in the whole text, loops not multiplied: two
            programs that differ here are not the same.
        temporary_bytes: Scratch memory; like the next two, `None` for a text.
        argument_bytes: Memory of the arguments.
        output_bytes: Memory of the results, donated arguments included.
    """

    flops: float
    grouped_flops: float
    grouped_products: int
    collectives: tuple[Collective, ...]
    conditionals: tuple[Conditional, ...]
    unknown_loops: tuple[str, ...]
    custom_calls: Counter[str]
    opcodes: Counter[str]
    temporary_bytes: int | None
    argument_bytes: int | None
    output_bytes: int | None

    def count(self, kind: str | None = None) -> int:
        """Executions per run of the collectives of a kind in `KINDS`, or of all.

        Raises:
            ValueError: If there is no such kind.
        """
        return sum(each.count for each in self._of_kind(kind))

    def bytes(self, kind: str | None = None) -> int:
        """Bytes per device and run of the same collectives as in `count`.

        Those of the data, as in `Collective.bytes_each`, loops multiplied out.
        """
        return sum(each.bytes for each in self._of_kind(kind))

    def table(self) -> str:
        """Totals, then a line for each group of equal collectives."""
        return "\n".join((*self._totals(), "", aligned(self._rows())))

    def _rows(self) -> list[tuple[str, ...]]:
        # Layers outside of a loop send the same: their groups and counts are merged.
        alike = Counter()
        for each in self.collectives:
            alike[replace(each, count=1, groups=None)] += each.count
        rows = [("collective", "count", "each", "total", "group", "source")]
        rows += [
            (
                each.kind + (" (async)" if each.asynchronous else ""),
                str(count),
                _readable(each.bytes_each, "B"),
                _readable(each.bytes_each * count, "B"),
                str(each.group_size),
                # A collective of many arrays has the names of all, in one text.
                each.source[:100] + "..." * (len(each.source) > 100),
            )
            for each, count in sorted(alike.items(), key=lambda item: item[0].kind)
        ]
        return rows

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        sent = f"{self.count()} collectives of {_readable(self.bytes(), 'B')}"
        return f"<{_readable(self.flops, '')} FLOPs, {sent} on each device>"

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        return as_html(header, rows, title=repr(self)[1:-1], notes=self._totals())

    def _of_kind(self, kind: str | None) -> tuple[Collective, ...]:
        if kind is not None and kind not in KINDS:
            known = ", ".join(KINDS)
            raise ValueError(f"No collective is called {kind!r}. Kinds: {known}.")
        return tuple(c for c in self.collectives if kind in (None, c.kind))

    def _totals(self) -> Iterator[str]:
        yield f"FLOPs per device: {_readable(self.flops, '')}"
        if self.grouped_products:
            flops = _readable(self.grouped_flops, "")
            yield f"of these in {self.grouped_products} grouped products: {flops}"
        memory = (self.temporary_bytes, self.argument_bytes, self.output_bytes)
        names = ("temporaries", "arguments", "outputs")
        for name, size in zip(names, memory, strict=True):
            if size is not None:
                yield f"{name}: {_readable(size, 'B')}"
        for source in self.unknown_loops:
            counted = "counted once" if _TRIPS.get(_scope(source), 1) else "not counted"
            yield f"loop of unknown length, {counted}: {source}"
        for each in self.conditionals:
            yield f"conditional, most expensive branch counted: {each.source}"
        if calls := ", ".join(f"{k} x {n}" for k, n in self.custom_calls.items()):
            yield f"kernels of unknown FLOPs: {calls}"


def audit(
    compiled: jax.stages.Compiled | str,
    *,
    taken: Mapping[str, float] | None = None,
    trips: Mapping[str, int] | None = None,
) -> Report:
    """Counts what a compiled program computes and sends.

    Nothing is run. Unlike XLA's own `cost_analysis`, the body of a loop counts once for
    each iteration.

    Args:
        compiled: `jax.jit(f).lower(...).compile()`, or the text of optimised HLO, for
            any backend.
        taken: Share of the executions in which a conditional takes its most expensive
            branch, by the `jax.named_scope` directly around it. FLOPs are then those of
            the mean; collectives stay those of the most expensive branch.
        trips: How often loops run whose length depends on data, by the
            `jax.named_scope` directly around each.

    Raises:
        ValueError: If a text is not optimised HLO, or no conditional or loop has such a
            scope.
        ProgramTextError: If this jaxlib cannot print the program, whose compiler is
            newer; the message says how to get its text.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> def layers(x):
        ...     return jax.lax.scan(lambda x, _: (x @ x, None), x, length=16)[0]
        >>> report = audit(jax.jit(layers).lower(jnp.ones((8, 8))).compile())
        >>> report.flops == 16 * 2 * 8**3
        True
        >>> report.count("all-gather")
        0
    """
    # `cost_analysis` counts the body of a loop once, and knows no collectives.
    is_text = isinstance(compiled, str)
    module = parse(compiled if is_text else _text_of(compiled))
    memory = None if is_text else compiled.memory_analysis()
    taken, trips = taken or {}, trips or {}
    cost = _Walk(module, taken, trips).computation(module.entry, ())
    scopes = {each.scope for each in cost.conditionals}
    if missing := taken.keys() - scopes:
        raise ValueError(
            f"taken= names the scopes {sorted(missing)}, but the conditionals are in "
            f"{sorted(scopes)}. Put jax.named_scope directly around the jax.lax.cond."
        )
    if trips:
        _check_trips(module, trips)
    all_instructions = (c.instructions.values() for c in module.computations.values())
    opcodes = Counter(each.opcode for each in chain.from_iterable(all_instructions))
    return Report(
        **vars(cost),  # whose fields have the same names
        opcodes=opcodes,
        temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
        argument_bytes=getattr(memory, "argument_size_in_bytes", None),
        output_bytes=getattr(memory, "output_size_in_bytes", None),
    )


def flops_of(compiled: jax.stages.Compiled) -> float:
    """The `Report.flops` of a compiled program alone, which takes half of the time."""
    module = parse(_text_of(compiled))
    return _Walk(module, {}, {}).computation(module.entry, ()).flops


def _check_trips(module: Module, trips: Mapping[str, int]) -> None:
    """Refuses names of scopes around no loop of unknown length."""
    found = _Walk(module, {}, {}).computation(module.entry, ()).unknown_loops
    scopes = set(map(_scope, found))
    if missing := trips.keys() - scopes:
        raise ValueError(
            f"trips= names the scopes {sorted(missing)}, but the loops of unknown "
            f"length are in {sorted(scopes)}. Put jax.named_scope directly around the "
            "jax.lax.while_loop."
        )


def _scope(source: str) -> str:
    """The innermost `jax.named_scope` around a JAX operation, or empty."""
    return source.rpartition("/")[0].rpartition("/")[2]


def _text_of(compiled: jax.stages.Compiled) -> str:
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        # libtpu 0.0.52 writes an `async-update` of several operands for what it gives
        # to its sparse cores, which jaxlib 0.10 does not know.
        raise ProgramTextError(
            f"jaxlib {version('jaxlib')} cannot print this program: its compiler is "
            f"newer ({str(error).splitlines()[0]}). Update jax; or compile with "
            "`compile(compiler_options={'xla_dump_to': DIRECTORY})` and pass `audit` "
            "the text of the file there whose name ends in `after_optimizations.txt`."
        ) from error


def _readable(number: float, unit: str) -> str:
    """1,500 as `1.50 k`."""
    # Decimal, as bandwidths and FLOPs per second are given; memory elsewhere is in KiB.
    thousands = max(0, math.floor(math.log10(number) / 3)) if number else 0
    scaled = f"{number / 1000**thousands:.{2 if thousands else 0}f}"
    return f"{scaled} {' kMGTPE'[thousands].strip()}{unit}".strip()
