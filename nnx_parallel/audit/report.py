"""The audit's answer, to read as a table or to assert on in a test."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nnx_parallel.audit.collectives import KINDS, Collective
from nnx_parallel.audit.hlo import parse
from nnx_parallel.audit.walk import Conditional, measure

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one run of a compiled program does on one device.

    Attributes:
        flops: Floating-point operations of dots and convolutions, and of Pallas kernels
            that state theirs; a multiplication and an addition count two.
        collectives: Every collective instruction among more than one device.
        conditionals: Every conditional. The dearest branch, by FLOPs and then by bytes
            in collectives, is what the other attributes count.
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
        """Executions of the collectives of a kind, or of all.

        Args:
            kind: One of `KINDS`, such as `"all-gather"`.

        Returns:
            Executions per run of the program, loops multiplied out.

        Raises:
            ValueError: If there is no such kind.
        """
        return sum(each.count for each in self._of_kind(kind))

    def bytes(self, kind: str | None = None) -> int:
        """Bytes of the collectives of a kind, or of all; see `Collective.bytes_each`.

        Args:
            kind: One of `KINDS`, such as `"all-gather"`.

        Returns:
            Bytes per device and run of the program, loops multiplied out.

        Raises:
            ValueError: If there is no such kind.
        """
        return sum(each.bytes for each in self._of_kind(kind))

    def table(self) -> str:
        """A summary: totals, then one line for all collectives that are alike."""
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

    def _totals(self) -> list[str]:
        memory = {
            "temporaries": self.temporary_bytes,
            "arguments": self.argument_bytes,
            "outputs": self.output_bytes,
        }
        lines = [f"FLOPs per device: {_readable(self.flops, '')}"]
        lines += [
            f"{k}: {_readable(n, 'B')}" for k, n in memory.items() if n is not None
        ]
        lines += [
            f"loop of unknown length, counted once: {s}" for s in self.unknown_loops
        ]
        lines += [
            f"conditional, dearest branch counted: {each.source}"
            for each in self.conditionals
        ]
        calls = ", ".join(f"{k} x {n}" for k, n in self.custom_calls.items())
        return [*lines, f"kernels not looked into: {calls}"] if calls else lines


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
        taken: Share of the executions in which a conditional takes its dearest branch,
            by the `jax.named_scope` directly around it. FLOPs are then those of the
            mean; collectives stay those of the dearest branch.

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
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    memory = None if isinstance(compiled, str) else compiled.memory_analysis()
    module = parse(text or "")
    taken = taken or {}
    cost = measure(module, taken)
    _check_scopes(taken, cost.conditionals)
    return Report(
        flops=cost.flops,
        collectives=cost.collectives,
        conditionals=cost.conditionals,
        unknown_loops=cost.unknown_loops,
        custom_calls=cost.custom_calls,
        opcodes=Counter(
            instruction.opcode
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
        ),
        temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
        argument_bytes=getattr(memory, "argument_size_in_bytes", None),
        output_bytes=getattr(memory, "output_size_in_bytes", None),
    )


def _check_scopes(
    taken: Mapping[str, float], conditionals: tuple[Conditional, ...]
) -> None:
    scopes = {each.scope for each in conditionals}
    if missing := taken.keys() - scopes:
        raise ValueError(
            f"taken= names the scopes {sorted(missing)}, but conditionals stand under "
            f"{sorted(scopes)}. Put jax.named_scope directly around the jax.lax.cond."
        )


def _readable(number: float, unit: str) -> str:
    """1,500 as `1.50 k`."""
    thousands = max(0, math.floor(math.log10(number) / 3)) if number else 0
    digits = 2 if thousands else 0
    scaled = number / 1000**thousands
    return f"{scaled:.{digits}f} {' kMGTPE'[thousands].strip()}{unit}".strip()


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
