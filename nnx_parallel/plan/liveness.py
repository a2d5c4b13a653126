"""Which values of a traced gradient are in memory at once: its live ranges, on paper.

A compiler fuses: a value that an elementwise operation makes is an array in memory
only if a product, a loop or a kernel reads it, or if it has several readers. The rows
that come out are counts of arrays by `Size`; what a size is in bytes depends on the
strategy, and is for `formulas` to say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax.extend.core as jex

from nnx_parallel.plan.moments import Timeline, pruned
from nnx_parallel.plan.program import (
    FREE,
    HEAVY,
    IN_PLACE,
    REDUCTIONS,
    ZEROED,
    Body,
    GradientFacts,
    Op,
    Reader,
    Value,
)


class Liveness:
    """The moments of a gradient's jaxpr, of which more is ``known``."""

    def __init__(self, known: GradientFacts) -> None:
        self._paths, self._stacked = [*known.infos], {*known.stacked}
        self._known = known
        self._is_cpu = known.platform == "cpu"
        self._again: int | None = None
        self.hidden: tuple[int, int] | None = None

    def timeline(self, jaxpr: jex.Jaxpr) -> Timeline:
        """The moments of the whole gradient."""
        reader = Reader(self._known)
        env = {v: reader.value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
        for var, path in zip(jaxpr.invars, self._paths, strict=False):
            env[var].label = "weight", path
        given = [*env.values()]
        whole = reader.read(jaxpr, env)
        self._again, self.hidden = reader.again, reader.hidden
        for value, path in zip(whole.outputs, self._paths, strict=False):
            if value is not None and value.label is None:
                value.label = "gradient", path
        self._label_gradients(whole)
        return Timeline.of(self._rows_of(whole, self._weights(given, whole)))

    def _label_gradients(self, body: Body) -> None:
        """Labels what becomes a gradient, from the last operation to the first."""
        for op in reversed(body.ops):
            label = op.outs[0].label if len(op.outs) == 1 else None
            passes = op.is_view or op.name in (
                "transpose", "convert_element_type", "add_any", "add"
            )  # fmt: skip
            if passes and label and label[0] in ("gradient", "layer gradient"):
                for value in op.ins:
                    is_same = math.prod(value.aval.shape) == math.prod(
                        op.outs[0].aval.shape
                    )
                    if value.label is None and is_same:
                        value.label = label
            for inner in op.bodies:
                for outer, value in inner.gradients:
                    if value is None or value.label or not outer.label:
                        continue
                    kind, path = outer.label
                    if kind == "gradient" and inner.is_over_layers:
                        kind = "layer gradient"
                    if kind in ("gradient", "layer gradient"):
                        value.label = kind, path
                self._label_gradients(inner)

    # Live ranges

    def _weights(self, given: Iterable[Value], body: Body) -> list[Value]:
        """What may be gathered where it is used: the weights, and their casts."""
        outs = [op.outs[0] for op in body.ops if len(op.outs) == 1]
        return [
            v for v in (*given, *outs) if v.label and v.label[0] in ("weight", "cast")
        ]

    def _rows_of(self, body: Body, weights: Sequence[Value] = ()) -> list[Counter]:
        """Counts at each operation of a program or of a loop's body."""
        self._fuse(body)
        births, deaths = self._ranges(body)
        extra = self._extra(body, weights)
        rows: list[Counter] = []
        live: Counter = Counter()
        for i, op in enumerate(body.ops):
            live.update(v.size for v in births[i])
            now = live + extra[i]
            if op.name not in HEAVY or op.name in ("scan", "while"):
                # Written over what dies here.
                dying = Counter(v.size for v in deaths[i] if v.start < i)
                now -= dying & Counter(v.size for v in births[i])
            inner = [row for b in op.bodies for row in self._rows_of(b)]
            rows += [now + row for row in pruned(inner)] if inner else [now]
            live.subtract(Counter(v.size for v in deaths[i]))
            live = +live
        return [*rows, self._last(body)]

    def _ranges(self, body: Body) -> tuple[list[list[Value]], list[list[Value]]]:
        """The arrays that each operation makes, and those that it reads last."""
        ops, last = body.ops, max(0, len(body.ops) - 1)
        births: list[list[Value]] = [[] for _ in ops]
        deaths: list[list[Value]] = [[] for _ in ops]
        carried = {id(out): given for given, out in body.carry if out is not None}
        arrays = ((i, v) for i, op in enumerate(ops) for v in op.outs if v.is_array)
        for i, value in arrays:
            op = ops[i]
            value.start = min(value.uses, default=i) if op.name == "slice" else i
            if value.size.kind == "gradient" and op.name in ZEROED:
                value.start = 0
            end = max(value.end, value.start)
            if value.is_written and end < len(ops) and value.uses:
                # It is copied into its stack once its last reader has been read.
                readers = [u for o in ops[end].outs for u in o.uses if u < len(ops)]
                end = min(readers, default=end)
            if (given := carried.get(id(value))) is not None:
                # The loop has its memory: it needs more only while the value before it
                # is read.
                end = given.end
                if end < i or (end == i and op.fuses):
                    continue
            births[min(value.start, last)].append(value)
            deaths[min(end, last)].append(value)
        return births, deaths

    def _extra(self, body: Body, weights: Sequence[Value]) -> list[Counter]:
        """What operations need besides their operands and results."""
        ops, extra = body.ops, self._wholes(body)
        made = {id(v): i for i, op in enumerate(ops) for v in op.outs}
        for i, op in enumerate(ops):
            for value in op.copies:
                # Nothing orders them either, if the forward pass has kept the operand.
                is_kept = made.get(id(value), 0) < (self._again or 0) <= i
                for at in range(self._again or i if is_kept else i, i + 1):
                    extra[at][value.size] += 1
            for size in (v.size for v in op.outs if v.is_array):
                if size.kind == "gradient" and size.path not in self._stacked:
                    # Whole, until devices have summed their parts.
                    for at in range(0 if op.name in ZEROED else i, i + 1):
                        extra[at][replace(size, kind="unsummed")] += 1
            for value in op.turned:
                extra[i][replace(value.size, kind="turned")] = 1
        for value in weights:
            positions = {i for i in value.uses if not self._is_sliced(value, ops, i)}
            later = [i for i in positions if self._again and i >= self._again]
            if self._again and later:
                # Nothing orders these gathers: all may run as soon as the first.
                positions |= {*range(self._again, max(later) + 1)}
            for i in positions:
                extra[i][replace(value.size, kind="weight")] = 1
        return extra

    def _wholes(self, body: Body) -> list[Counter]:
        """Operands and results of products that are whole, if positions are split.

        Each gathers its own operand, and its result is whole until it is summed.
        """
        extra: list[Counter] = [Counter() for _ in (*body.ops, None)]
        late, first = {id(given) for given, _ in body.carry}, {}
        for i, op in enumerate(body.ops):
            if op.name in HEAVY or any(id(v) in late for v in op.ins):
                late |= {id(v) for v in op.outs}
            if op.name != "dot_general":
                continue
            for value in (v for v in op.ins if v.size.kind == "rows"):
                start = first.setdefault(id(value), i) if self._is_cpu else i
                if self._is_cpu and body.is_over_layers and id(value) not in late:
                    start = 0  # nothing orders these gathers
                for at in range(start, i + 1):
                    extra[at][replace(value.size, kind="whole")] += 1
            if (out := op.outs[0].size).kind == "rows":
                extra[i][replace(out, kind="whole")] += 1 + self._is_cpu
        return extra

    @staticmethod
    def _last(body: Body) -> Counter:
        """The end: sums over devices are one, from and to memory of their own."""
        row: Counter = Counter()
        looped = [v for op in body.ops if op.name == "scan" for v in op.outs]
        for value in body.outputs:
            is_there = any(value is v for v in looped) and not body.is_over_layers
            if value is None or is_there:
                continue
            if value.size.kind in ("gradient", "layer gradient"):
                row[replace(value.size, kind="combined")] += 2
        for value in (v for op in body.ops for v in op.outs if v.is_array):
            if value.end >= len(body.ops) and value.size.kind != "layer gradient":
                row[value.size] += 1
        return row

    def _is_added(self, op: Op) -> bool:
        """True if a product is a part of the operation that reads it, as on TPUs."""
        out, is_cpu = op.outs[0], self._is_cpu
        is_product = op.name in ("dot_general", "conv_general_dilated") and not is_cpu
        is_read = out.is_read_whole or out.is_kept or out.is_written
        return is_product and len(out.uses) == 1 and not is_read

    def _is_sliced(self, value: Value, ops: Sequence[Op], at: int) -> bool:
        """True if a weight is gathered layer by layer, in the loop that reads it."""
        is_loop = at < len(ops) and any(b.is_over_layers for b in ops[at].bodies)
        return is_loop and bool(value.label) and value.label[1] in self._stacked

    def _fuse(self, body: Body) -> None:
        """Finds the arrays in memory, and which operations read them."""
        ops, carried = body.ops, {id(out) for _, out in body.carry}
        for position, value in enumerate(body.outputs):
            if value is None:
                continue
            if id(value) in carried:
                value.is_kept = True
                value.uses.add(len(ops))
            elif body.gradients and position >= len(body.carry):
                value.is_written = True
            else:
                value.uses.add(len(ops))
        for i, op in reversed([*enumerate(ops)]):
            if op.is_view:
                source, out = op.ins[0], op.outs[0]
                source.uses |= out.uses
                source.is_read_whole |= out.is_read_whole
                source.is_kept |= out.is_kept
                source.is_written |= out.is_written
                continue
            if not any(out.uses or out.is_written for out in op.outs):
                continue
            at, out = {i}, op.outs[0]
            if self._is_added(op):
                at = out.uses
            elif not op.fuses or op.name in REDUCTIONS or op.name in IN_PLACE:
                for out in op.outs:
                    out.is_array = bool(out.uses or out.is_written)
            else:
                is_shared = len(out.uses) + out.is_written > 1
                is_shared &= op.name not in FREE
                # What `jax.checkpoint` keeps passes through it, and is not made again.
                is_saved = op.name == "reduce_precision"
                out.is_array = out.is_read_whole or out.is_kept or is_shared
                out.is_array |= is_saved
                if not out.is_array:
                    at = out.uses | ({i} if out.is_written else set())
            for value in op.ins:
                value.uses |= at
                value.is_read_whole |= not op.fuses
