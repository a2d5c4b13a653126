"""`audit` and its `Report`, to read as a table or to assert on in a test."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nnx_parallel.audit.collectives import KINDS, Collective
from nnx_parallel.audit.cost import Conditional, measure
from nnx_parallel.audit.hlo import parse

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Report:
    """Computation, communication and memory of one run of a program on one device.

    Attributes:
        flops: Floating-point operations of dots and convolutions, and of Pallas kernels
            that state theirs; a multiplication and an addition count two.
        collectives: Every collective instruction among more than one device.
        conditionals: Every conditional. The other attributes count its most expensive
            branch, by FLOPs and then by bytes in collectives.
        unknown_loops: Loops whose trip count depends on data; their bodies are counted
            once.
        custom_calls: Executions, by target, of kernels whose FLOPs are not known and
            not counted.
        opcodes: Instructions by opcode in the whole text, loops not multiplied: two
            programs that differ here are not the same.
        temporary_bytes: Scratch memory, `None` for a text.
        argument_bytes: Memory of the arguments, `None` for a text.
        output_bytes: Memory of the results, donated arguments included, `None` for a
            text.
    """

    flops: float
    collectives: tuple[Collective, ...]
    conditionals: tuple[Conditional, ...]
    unknown_loops: tuple[str, ...]
    custom_calls: Counter[str]
    opcodes: Counter[str]
    temporary_bytes: int | None
    argument_bytes: int | None
    output_bytes: int | None

    def count(self, kind: str | None = None) -> int:
        """Executions per run of the collectives of a kind, or of all.

        Args:
            kind: One of `KINDS`, such as `"all-gather"`.

        Raises:
            ValueError: If there is no such kind.
        """
        return sum(each.count for each in self._of_kind(kind))

    def bytes(self, kind: str | None = None) -> int:
        """Bytes per device and run of the collectives of a kind, or of all.

        Those of the data, as in `Collective.bytes_each`, loops multiplied out.

        Args:
            kind: One of `KINDS`, such as `"all-gather"`.

        Raises:
            ValueError: If there is no such kind.
        """
        return sum(each.bytes for each in self._of_kind(kind))

    def table(self) -> str:
        """Totals, then a line for each group of equal collectives."""
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
                each.source,
            )
            for each, count in sorted(alike.items(), key=lambda item: item[0].kind)
        ]
        return "\n".join((*self._totals(), "", *_aligned(rows)))

    def __str__(self) -> str:
        """The table."""
        return self.table()

    def _of_kind(self, kind: str | None) -> tuple[Collective, ...]:
        if kind is not None and kind not in KINDS:
            raise ValueError(
                f"No collective is called {kind!r}. Kinds: {', '.join(KINDS)}."
            )
        return tuple(c for c in self.collectives if kind in (None, c.kind))

    def _totals(self) -> Iterator[str]:
        memory = {
            "temporaries": self.temporary_bytes,
            "arguments": self.argument_bytes,
            "outputs": self.output_bytes,
        }
        yield f"FLOPs per device: {_readable(self.flops, '')}"
        for name, size in memory.items():
            if size is not None:
                yield f"{name}: {_readable(size, 'B')}"
        for source in self.unknown_loops:
            yield f"loop of unknown length, counted once: {source}"
        for each in self.conditionals:
            yield f"conditional, most expensive branch counted: {each.source}"
        if calls := ", ".join(f"{k} x {n}" for k, n in self.custom_calls.items()):
            yield f"kernels of unknown FLOPs: {calls}"


def audit(
    compiled: "jax.stages.Compiled | str",
    *,
    taken: Mapping[str, float] | None = None,
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

    Returns:
        FLOPs, collectives, memory and opcodes, per device.

    Raises:
        ValueError: If a text is not optimised HLO, or no conditional has a scope.

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
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    memory = None if isinstance(compiled, str) else compiled.memory_analysis()
    module = parse(text or "")
    taken = taken or {}
    cost = measure(module, taken)
    scopes = {each.scope for each in cost.conditionals}
    if missing := taken.keys() - scopes:
        raise ValueError(
            f"taken= names the scopes {sorted(missing)}, but the conditionals are in "
            f"{sorted(scopes)}. Put jax.named_scope directly around the jax.lax.cond."
        )
    return Report(
        **vars(cost),  # whose fields have the same names
        opcodes=Counter(
            instruction.opcode
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
        ),
        temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
        argument_bytes=getattr(memory, "argument_size_in_bytes", None),
        output_bytes=getattr(memory, "output_size_in_bytes", None),
    )


def _readable(number: float, unit: str) -> str:
    """1,500 as `1.50 k`."""
    # Decimal, as bandwidths and FLOPs per second are given; memory elsewhere is in KiB.
    thousands = max(0, math.floor(math.log10(number) / 3)) if number else 0
    digits = 2 if thousands else 0
    scaled = number / 1000**thousands
    return f"{scaled:.{digits}f} {' kMGTPE'[thousands].strip()}{unit}".strip()


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
