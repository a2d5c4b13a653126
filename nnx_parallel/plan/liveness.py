"""Which values of a traced gradient are in memory at once: its live ranges, on paper.

A compiler fuses: a value that an elementwise operation makes is an array in memory
only if a product, a loop or a kernel reads it, or if computing it twice is expensive.
The rows that come out are counts of arrays by `Size`; what a size is in bytes depends
on the strategy, and is for `formulas` to say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax.extend.core as jex
import numpy as np

from nnx_parallel.precision import array_bytes
from nnx_parallel.sharding.model import Path

Kind = Literal[
    "rows", "weight", "layer", "cast", "gradient", "layer gradient", "unsummed",
    "combined", "turned", "fixed",
]  # fmt: skip

_VIEWS = {
    "reshape", "squeeze", "expand_dims", "optimization_barrier", "name",
    "sharding_constraint", "copy", "copy_p", "stop_gradient",
    "bitcast_convert_type", "mesh_cast", "layout_constraint",
}  # fmt: skip
# The result takes the first operand's memory, if nothing else reads that later.
_IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"}
# Gradients that these make start as zeros, which are there before the forward pass.
_ZEROED = {*_IN_PLACE, "scan"}
_REDUCTIONS = {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod",
    "argmax", "argmin",
}  # fmt: skip
_HEAVY = {
    "dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot", "scan",
    "while", "cond", "pallas_call", "sort", "top_k", "cumsum", "cumlogsumexp", "cummax",
    "reduce_window_sum", "reduce_window_max", "select_and_scatter_add", "custom_call",
    "select_and_gather_add", "reduce_window", "random_bits", "threefry2x32", "ffi_call",
    "all_gather", "psum", "ppermute", "all_to_all", "shard_map",
}  # fmt: skip
# Made again for each reader rather than kept.
_FREE = {"broadcast_in_dim", "iota", "convert_element_type", "slice", "transpose"}
# Computed twice only if a single reader is behind it.
_EXPENSIVE = {
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "erf", "erf_inv", "logistic", "pow",
    "div", "sqrt", "rsqrt", "sin", "cos", "gather", "integer_pow", "cbrt", "rem",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Size:
    """What decides the bytes of a value on a device.

    Attributes:
        kind: Of the batch's ``rows``; a ``weight`` where it is used, or one ``layer``
            of it, or its ``cast`` as it is stored; a ``gradient``, or one layer's
            before it is summed; anything else is ``fixed``.
        num_bytes: All of it, or those of one row.
        dims: Of rows: its shape without those of layers and rows.
        path: Of the parameter.
        is_stacked: True if rows are kept for each layer of a stack.
    """

    kind: Kind
    num_bytes: float
    dims: tuple[int, ...] = ()
    path: Path = ()
    is_stacked: bool = False


Row = Mapping[Size, int]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Moments of a program that may be its peak.

    Attributes:
        sizes: The sizes of its values.
        counts: How many of each are live: (moments, sizes).
    """

    sizes: tuple[Size, ...]
    counts: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Timeline:
        """Those of rows that no other row exceeds in everything."""
        rows = _pruned(rows)
        sizes = tuple(dict.fromkeys(size for row in rows for size in row))
        at = {size: i for i, size in enumerate(sizes)}
        counts = np.zeros((len(rows), len(sizes)))
        for i, row in enumerate(rows):
            for size, count in row.items():
                counts[i, at[size]] = count
        return cls(sizes, counts)

    def peak(self, local_bytes: Sequence[float]) -> np.ndarray:
        """Counts at the moment of most bytes, by the bytes of each size."""
        return self.counts[int(np.argmax(self.counts @ np.asarray(local_bytes)))]


def _pruned(rows: Iterable[Row]) -> list[Counter]:
    kept: list[Counter] = []
    # The longest first: it may exceed many.
    unique = {frozenset(row.items()): row for row in rows}.values()
    for row in sorted(unique, key=lambda r: -sum(r.values())):
        new = Counter(dict(row))
        if not any(new <= other for other in kept):
            kept.append(new)
    return kept or [Counter()]


@dataclass(eq=False)
class _Value:
    """A value of the program."""

    aval: Any
    own: Size
    label: tuple[Kind, Path] | None = None  # the weight or gradient that it is
    uses: set[int] = field(default_factory=set)  # of operations that are not fused
    is_read_whole: bool = False  # by an operation that does not fuse
    is_kept: bool = False  # as an array, by the caller
    is_written: bool = False  # into a stack of the loop, at once
    is_array: bool = False
    start: int = 0

    @property
    def end(self) -> int:
        return max(self.uses, default=self.start)

    @property
    def size(self) -> Size:
        if self.label is None:
            return self.own
        kind, path = self.label
        return replace(self.own, kind=kind, path=path, dims=(), is_stacked=False)


@dataclass(eq=False)
class _Op:
    name: str
    ins: list[_Value]
    outs: list[_Value]
    bodies: list[_Body] = field(default_factory=list)
    copies: Counter = field(default_factory=Counter)  # of operands, in another order
    turned: list[_Value] = field(default_factory=list)  # weights of a loop's layers

    @property
    def is_view(self) -> bool:
        if not self.ins:
            return False
        out = self.outs[0].aval
        is_matrix = self.name == "transpose" and len(out.shape) < 3
        # Over dims of size 1.
        is_same = self.name in _REDUCTIONS and out.size == self.ins[0].aval.size
        return self.name in _VIEWS or is_matrix or is_same

    @property
    def fuses(self) -> bool:
        return self.name not in _HEAVY and len(self.outs) == 1


@dataclass(eq=False)
class _Body:
    """What a program or a loop does; ``carry`` pairs what it gets with what it gives.

    ``passed`` are pairs of an outer value and the body's for it.
    """

    ops: list[_Op]
    outputs: list[Any]
    carry: list[tuple[_Value, Any]] = field(default_factory=list)
    gradients: list[tuple[_Value, Any]] = field(default_factory=list)
    is_over_layers: bool = False


class Liveness:
    """The moments of a gradient's jaxpr.

    Args:
        num_rows: Rows of the batch, a prime that is no other size.
        paths: Those of the parameters, which are the jaxpr's first inputs and, as
            gradients, its outputs.
        stacked: Those whose dim 0 enumerates layers.
        platform: Of the devices.
    """

    def __init__(
        self,
        num_rows: int,
        paths: Sequence[Path],
        stacked: Collection[Path],
        platform: str,
    ) -> None:
        self._platform = platform
        self._again: int | None = None  # where a step recomputes what it has not kept
        self._num_rows, self._paths, self._stacked = num_rows, paths, {*stacked}

    def timeline(self, jaxpr: jex.Jaxpr) -> Timeline:
        """The moments of the whole gradient."""
        env = {v: self._value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
        for var, path in zip(jaxpr.invars, self._paths, strict=False):
            env[var].label = "weight", path
        given = [*env.values()]
        whole = self._read(jaxpr, env)
        for value, path in zip(whole.outputs, self._paths, strict=False):
            if value is not None and value.label is None:
                value.label = "gradient", path
        self._label_gradients(whole)
        return Timeline.of(self._rows_of(whole, self._weights(given, whole)))

    # Reading the program

    def _value(self, aval: Any, *, is_stack: bool = False) -> _Value:
        shape = getattr(aval, "shape", ())
        num_bytes = array_bytes(shape, aval.dtype) if hasattr(aval, "dtype") else 0
        at = next((i for i, n in enumerate(shape) if n and not n % self._num_rows), -1)
        if at < 0:
            return _Value(aval, Size(kind="fixed", num_bytes=num_bytes))
        merged = shape[at] // self._num_rows
        before = shape[1 if is_stack else 0 : at]
        size = Size(
            kind="rows",
            num_bytes=num_bytes / self._num_rows,
            dims=(*before, *((merged,) if merged > 1 else ()), *shape[at + 1 :]),
            is_stacked=is_stack,
        )
        return _Value(aval, size)

    def _read(self, jaxpr: Any, env: dict[Any, Any]) -> _Body:
        ops: list[_Op] = []
        return _Body(ops, self._emit(jaxpr, env, ops))

    def _emit(self, jaxpr: Any, env: dict[Any, Any], ops: list[_Op]) -> list[Any]:
        """Adds a jaxpr's operations; its outputs, ``None`` for literals."""

        def read(atoms: Iterable[Any]) -> list[Any]:
            return [None if isinstance(a, jex.Literal) else env.get(a) for a in atoms]

        for eqn in jaxpr.eqns:
            name, ins = eqn.primitive.name, read(eqn.invars)
            inner = list(jex.jaxprs_in_params(eqn.params))
            if inner and name not in _HEAVY and len(inner[0].invars) == len(ins):
                body = inner[0]
                within = {v: self._value(v.aval) for v in body.constvars}
                within |= dict(zip(body.invars, ins, strict=True))
                if eqn.params.get("prevent_cse") is True:
                    self._again = len(ops)
                outs: list[Any] = self._emit(body, within, ops)
            elif name == "scan":
                outs = self._scan(eqn, inner[0], ins, ops)
            else:
                outs = [self._value(v.aval) for v in eqn.outvars]
                given = [v for v in ins if v is not None]
                self._follow_rows(given, outs)
                if given and name in (*_VIEWS, "transpose", "convert_element_type"):
                    outs[0].label = self._cast(given[0].label, name)
                bodies = []
                if name in ("while", "cond"):
                    for body in inner:
                        held = (*body.constvars, *body.invars)
                        within = {v: self._value(v.aval) for v in held}
                        bodies.append(self._read(body, within))
                op = _Op(name, given, outs, bodies)
                ops.append(op)
                if name == "dot_general" and self._platform == "cpu":
                    sides = zip(ins, *_dims_of(eqn), strict=True)
                    op.copies.update(
                        v.size for v, *d in sides if v and _is_copied(v, *d)
                    )
            env.update(zip(eqn.outvars, outs, strict=True))
        return read(jaxpr.outvars)

    def _follow_rows(self, ins: Iterable[_Value], outs: Iterable[_Value]) -> None:
        """Gives rows to what was padded, so that its shape does not tell them."""
        sources = [v for v in ins if v.own.kind == "rows"]
        most = max((v.aval.size for v in sources), default=0)
        for value in outs:
            size = getattr(value.aval, "size", 0)
            if most and value.own.kind == "fixed" and size > most / 2:
                value.own = self._of_all_rows(value.own)

    def _of_all_rows(self, size: Size) -> Size:
        return Size(kind="rows", num_bytes=size.num_bytes / self._num_rows)

    @staticmethod
    def _cast(label: tuple[Kind, Path] | None, name: str) -> Any:
        if label and label[0] == "weight" and name == "convert_element_type":
            return "cast", label[1]
        return label

    def _scan(self, eqn: Any, body: Any, ins: list[Any], ops: list[_Op]) -> list[Any]:
        # What it is mapped over has one dim less inside; so has what it stacks. By
        # name the numbers are in no two versions of JAX.
        first = len(ins) - _num_sliced(eqn.invars, body.invars)
        num_carry = len(eqn.outvars) - _num_sliced(eqn.outvars, body.outvars)
        consts = first - num_carry
        labels = [v.label if v is not None else None for v in ins]
        is_stack = any(x and x[1] in self._stacked for x in labels[first:])
        outs = [
            self._value(v.aval, is_stack=is_stack and i >= num_carry)
            for i, v in enumerate(eqn.outvars)
        ]
        if eqn.params["length"] >= self._num_rows:  # over chunks of tokens, say
            for value in outs[num_carry:]:
                if value.own.kind == "fixed":
                    value.own = self._of_all_rows(value.own)
        inputs = [self._value(v.aval) for v in body.invars]
        for value, label in zip(inputs[:consts], labels, strict=False):
            value.label = label
        for value, label in zip(inputs[first:], labels[first:], strict=True):
            if label and label[1] in self._stacked:
                value.label = "layer", label[1]
        env = {v: self._value(v.aval) for v in body.constvars}
        env |= dict(zip(body.invars, inputs, strict=True))
        # Slices of what the loop is mapped over are made where they are read.
        found = _Body([_Op("slice", [], [v]) for v in inputs[first:]], [])
        found.outputs = self._emit(body, env, found.ops)
        found.carry = [*zip(inputs[consts:first], found.outputs, strict=False)]
        found.gradients = [*zip(outs, found.outputs, strict=True)]
        found.is_over_layers = is_stack
        op = _Op("scan", [v for v in ins if v is not None], outs, [found])
        op.turned = [
            v for v in ins[first:] if v and v.label and v.label[1] in self._stacked
        ]
        ops.append(op)
        return outs

    def _label_gradients(self, body: _Body) -> None:
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

    def _weights(self, given: Iterable[_Value], body: _Body) -> list[_Value]:
        """What may be gathered where it is used: the weights, and their casts."""
        outs = [op.outs[0] for op in body.ops if len(op.outs) == 1]
        return [
            v for v in (*given, *outs) if v.label and v.label[0] in ("weight", "cast")
        ]

    def _rows_of(self, body: _Body, weights: Sequence[_Value] = ()) -> list[Counter]:
        ops = body.ops
        self._fuse(body)
        for value in (v for op in ops for v in op.outs):
            value.start = 0
        made = [v for op in ops for v in op.outs if v.is_array]
        births: list[list[_Value]] = [[] for _ in ops]
        deaths: list[list[_Value]] = [[] for _ in (*ops, None)]
        carried = {id(out): given for given, out in body.carry if out is not None}
        for i, op in enumerate(ops):
            for value in op.outs:
                if not value.is_array:
                    continue
                value.start = min(value.uses, default=i) if op.name == "slice" else i
                if value.size.kind == "gradient" and op.name in _ZEROED:
                    value.start = 0
                end = max(value.end, value.start)
                if value.is_written and end < len(ops) and value.uses:
                    # It is copied into its stack once its last reader has been read.
                    readers = [u for o in ops[end].outs for u in o.uses if u < len(ops)]
                    end = min(readers, default=end)
                if (given := carried.get(id(value))) is not None:
                    # The loop has its memory: it needs more only while the value
                    # before it is read.
                    end = given.end
                    if end < i or (end == i and op.fuses):
                        continue
                births[min(value.start, len(ops) - 1)].append(value)
                deaths[min(end, len(ops) - 1)].append(value)
        gathers: list[Counter] = [Counter() for _ in (*ops, None)]
        for i, op in enumerate(ops):
            for out in op.outs:
                size = out.size
                is_summed = size.kind == "gradient" and size.path not in self._stacked
                if not (out.is_array and is_summed):
                    continue
                # Whole, until devices have summed their parts.
                for at in range(0 if op.name in _ZEROED else i, i + 1):
                    gathers[at][replace(size, kind="unsummed")] += 1
        for value in weights:
            positions = {i for i in value.uses if not self._is_sliced(value, ops, i)}
            later = [i for i in positions if self._again and i >= self._again]
            if self._again and later:
                # Nothing orders these gathers: all may run as soon as the first.
                positions |= {*range(self._again, max(later) + 1)}
            for i in positions:
                gathers[i][replace(value.size, kind="weight")] = 1
        for i, op in enumerate(ops):
            for value in op.turned:
                gathers[i][replace(value.size, kind="turned")] = 1
        rows, live = [], Counter()
        for i, op in enumerate(ops):
            live.update(v.size for v in births[i])
            now = live + gathers[i] + op.copies
            if op.name not in _HEAVY or op.name in ("scan", "while"):
                # Written over what dies here.
                dying = Counter(v.size for v in deaths[i] if v.start < i)
                now -= dying & Counter(v.size for v in births[i])
            inner = [row for b in op.bodies for row in self._rows_of(b)]
            rows += [now + row for row in _pruned(inner)] if inner else [now]
            live.subtract(Counter(v.size for v in deaths[i]))
            live = +live
        # Sums over devices are combined into one, to and from memory of its own.
        combined = Counter()
        for value in body.outputs:
            if value is not None and value.size.kind in ("gradient", "layer gradient"):
                combined[replace(value.size, kind="combined")] += 2
        for op in ops if not body.is_over_layers else ():
            for value in op.outs if op.name == "scan" else ():
                combined.pop(replace(value.size, kind="combined"), None)
        last = Counter(
            v.size
            for v in made
            if v.end >= len(ops) and v.size.kind != "layer gradient"
        )
        return [*rows, last + combined]

    def _is_added(self, op: _Op) -> bool:
        """True if a product is a part of the operation that reads it, as on TPUs."""
        out, is_cpu = op.outs[0], self._platform == "cpu"
        is_product = op.name in ("dot_general", "conv_general_dilated") and not is_cpu
        is_read = out.is_read_whole or out.is_kept or out.is_written
        return is_product and len(out.uses) == 1 and not is_read

    def _is_sliced(self, value: _Value, ops: Sequence[_Op], at: int) -> bool:
        """True if a weight is gathered layer by layer, in the loop that reads it."""
        is_loop = at < len(ops) and any(b.is_over_layers for b in ops[at].bodies)
        return is_loop and bool(value.label) and value.label[1] in self._stacked

    def _fuse(self, body: _Body) -> None:
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
            elif not op.fuses or op.name in _REDUCTIONS or op.name in _IN_PLACE:
                for out in op.outs:
                    out.is_array = bool(out.uses or out.is_written)
            else:
                is_shared = len(out.uses) + out.is_written > 1
                is_shared &= op.name not in _FREE
                # What `jax.checkpoint` keeps passes through it, and is not made again.
                is_saved = op.name == "reduce_precision"
                out.is_array = out.is_read_whole or out.is_kept or is_shared
                out.is_array |= is_saved
                if not out.is_array:
                    at = out.uses | ({i} if out.is_written else set())
            for value in op.ins:
                value.uses |= at
                value.is_read_whole |= not op.fuses


def _num_sliced(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(
        len(a.aval.shape) > len(b.aval.shape) for a, b in zip(outer, inner, strict=True)
    )


def _dims_of(eqn: Any) -> tuple[Any, Any]:
    """Contracted dims of both operands of a product, and their batch dims."""
    contracted, batch = eqn.params["dimension_numbers"]
    return contracted, batch


def _is_copied(value: _Value, contracted: Sequence[int], batch: Sequence[int]) -> bool:
    """True if an operand is no batch of matrices as it lies in memory."""
    rank, rest = len(value.aval.shape), len(batch)
    if [*batch] != [*range(rest)]:
        return True
    inner = sorted(contracted)
    is_row = inner == [*range(rest, rest + len(inner))]
    return not is_row and inner != [*range(rank - len(inner), rank)]
