"""A jaxpr as operations, with what XLA makes of each: fused, or an array in memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.extend.core as jex

from nnx_parallel.plan.moments import Kind, Size
from nnx_parallel.precision import array_bytes
from nnx_parallel.sharding.model import Path
from nnx_parallel.sharding.names import ArrayInfo
from nnx_parallel.strategies.tensor_parallel import TENSOR_NAMES

_VIEWS = {
    "reshape", "squeeze", "expand_dims", "optimization_barrier", "name",
    "sharding_constraint", "copy", "copy_p", "stop_gradient",
    "bitcast_convert_type", "mesh_cast", "layout_constraint",
}  # fmt: skip
# The result takes the first operand's memory, if nothing else reads that later.
IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"}
# Gradients that these make start as zeros, which are there before the forward pass.
ZEROED = {*IN_PLACE, "scan"}
REDUCTIONS = {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod",
    "argmax", "argmin",
}  # fmt: skip
HEAVY = {
    "dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot", "scan",
    "while", "cond", "pallas_call", "sort", "top_k", "cumsum", "cumlogsumexp", "cummax",
    "reduce_window_sum", "reduce_window_max", "select_and_scatter_add", "custom_call",
    "select_and_gather_add", "reduce_window", "random_bits", "threefry2x32", "ffi_call",
    "all_gather", "psum", "ppermute", "all_to_all", "shard_map",
}  # fmt: skip
# Made again for each reader rather than kept.
FREE = {"broadcast_in_dim", "iota", "convert_element_type", "slice", "transpose"}


@dataclass(eq=False)
class Value:
    """A value of the program."""

    aval: Any
    own: Size
    label: tuple[Kind, Path] | None = None  # the weight or gradient that it is
    path: Path = ()  # of the parameter whose values it has in another order
    uses: set[int] = field(default_factory=set)  # of operations that are not fused
    is_read_whole: bool = False  # by an operation that does not fuse
    is_kept: bool = False  # as an array, by the caller
    is_written: bool = False  # into a stack of the loop, at once
    is_array: bool = False
    start: int = 0

    @property
    def end(self) -> int:
        """The last operation that reads it."""
        return max(self.uses, default=self.start)

    @property
    def size(self) -> Size:
        """What decides its bytes on a device."""
        if self.label is None:
            return self.own
        kind, path = self.label
        return replace(self.own, kind=kind, path=path, dims=(), is_stacked=False)


@dataclass(eq=False)
class Op:
    """An operation."""

    name: str
    ins: list[Value]
    outs: list[Value]
    bodies: list[Body] = field(default_factory=list)
    copies: list[Value] = field(default_factory=list)  # operands in another order
    turned: list[Value] = field(default_factory=list)  # weights of a loop's layers

    @property
    def is_view(self) -> bool:
        """True if its result is its operand, in the same memory."""
        if not self.ins or not self.outs:  # one that prints has none
            return False
        out = self.outs[0].aval
        is_matrix = self.name == "transpose" and len(out.shape) < 3
        # Over dims of size 1.
        is_same = self.name in REDUCTIONS and out.size == self.ins[0].aval.size
        return self.name in _VIEWS or is_matrix or is_same

    @property
    def fuses(self) -> bool:
        """True if it can be computed where its result is read."""
        return self.name not in HEAVY and len(self.outs) == 1


@dataclass(eq=False)
class Body:
    """What a program or a loop does; ``carry`` pairs what it gets with what it gives.

    ``passed`` are pairs of an outer value and the body's for it.
    """

    ops: list[Op]
    outputs: list[Any]
    carry: list[tuple[Value, Any]] = field(default_factory=list)
    gradients: list[tuple[Value, Any]] = field(default_factory=list)
    is_over_layers: bool = False


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """What a gradient's jaxpr does not say of itself.

    Attributes:
        num_rows: Rows of the batch, a prime that is no other size.
        infos: The parameters by path: the jaxpr's first inputs and, as gradients, its
            outputs.
        stacked: Paths of those whose dim 0 enumerates layers.
        platform: Of the devices.
    """

    num_rows: int
    infos: Mapping[Path, ArrayInfo]
    stacked: Collection[Path]
    platform: str


class Reader:
    """Reads a jaxpr, of which more is ``known``, as operations and values."""

    def __init__(self, known: GradientFacts) -> None:
        self._num_rows, self._stacked = known.num_rows, {*known.stacked}
        self._infos = known.infos
        self._shapes = {info.shape for info in known.infos.values()}
        self._platform = known.platform
        self.again: int | None = None  # where a step recomputes what it has not kept
        self.hidden: tuple[int, int] | None = None  # of what layers pass on: `RowCosts`

    def value(self, aval: Any, *, is_stack: bool = False) -> Value:
        """A value of a shape; ``is_stack``: dim 0 enumerates layers."""
        shape = getattr(aval, "shape", ())
        num_bytes = array_bytes(shape, aval.dtype) if hasattr(aval, "dtype") else 0
        at = next((i for i, n in enumerate(shape) if n and not n % self._num_rows), -1)
        if at < 0:
            # Of what is made in several parts the first dims are theirs: here of one.
            dims = shape[next((i for i, n in enumerate(shape) if n > 1), 0) :]
            dims = dims if dims in self._shapes else ()
            return Value(aval, Size(kind="fixed", num_bytes=num_bytes, dims=dims))
        merged = shape[at] // self._num_rows
        before = shape[1 if is_stack else 0 : at]
        size = Size(
            kind="rows",
            num_bytes=num_bytes / self._num_rows,
            dims=(*before, *((merged,) if merged > 1 else ()), *shape[at + 1 :]),
            is_stacked=is_stack,
        )
        return Value(aval, size)

    def read(self, jaxpr: Any, env: dict[Any, Any]) -> Body:
        """The operations of a jaxpr, whose inputs have values already."""
        ops: list[Op] = []
        return Body(ops, self._emit(jaxpr, env, ops))

    def _emit(self, jaxpr: Any, env: dict[Any, Any], ops: list[Op]) -> list[Any]:
        """Adds a jaxpr's operations; its outputs, ``None`` for literals."""

        def read(atoms: Iterable[Any]) -> list[Any]:
            return [None if isinstance(a, jex.Literal) else env.get(a) for a in atoms]

        for eqn in jaxpr.eqns:
            name, ins = eqn.primitive.name, read(eqn.invars)
            inner = list(jex.jaxprs_in_params(eqn.params))
            if inner and name not in HEAVY and len(inner[0].invars) == len(ins):
                body = inner[0]
                within = {v: self.value(v.aval) for v in body.constvars}
                within |= dict(zip(body.invars, ins, strict=True))
                if eqn.params.get("prevent_cse") is True:
                    self.again = len(ops)
                outs: list[Any] = self._emit(body, within, ops)
            elif name == "scan":
                outs = self._scan(eqn, inner[0], ins, ops)
            elif name == "optimization_barrier" and None not in ins:
                outs = ins
                for value in ins:
                    value.is_read_whole = True
            else:
                outs = [self.value(v.aval) for v in eqn.outvars]
                given = [v for v in ins if v is not None]
                self._follow_rows(given, outs)
                if outs:
                    self._name(eqn, ins, outs[0])
                if given and name in (*_VIEWS, "transpose", "convert_element_type"):
                    outs[0].label = self._cast(given[0].label, name)
                bodies = []
                if name in ("while", "cond"):
                    for body in inner:
                        held = (*body.constvars, *body.invars)
                        within = {v: self.value(v.aval) for v in held}
                        bodies.append(self.read(body, within))
                op = Op(name, given, outs, bodies)
                ops.append(op)
                if name == "dot_general" and self._platform == "cpu":
                    sides = zip(ins, *_dims_of(eqn), strict=True)
                    op.copies = [v for v, *d in sides if v and _is_copied(v, *d)]
            env.update(zip(eqn.outvars, outs, strict=True))
        return read(jaxpr.outvars)

    def _follow_rows(self, ins: Iterable[Value], outs: Iterable[Value]) -> None:
        """Gives rows to what was padded, so that its shape does not tell them."""
        sources = [v for v in ins if v.own.kind == "rows"]
        most = max((v.aval.size for v in sources), default=0)
        for value in outs:
            size = getattr(value.aval, "size", 0)
            if most and value.own.kind == "fixed" and size > most / 2:
                value.own = self._of_all_rows(value.own)

    def _name(self, eqn: Any, ins: Sequence[Value | None], out: Value) -> None:
        """Names the last dim of rows as the weight does that makes it, or passes it on.

        A dim of the model's width is else not told from others of its size.
        """
        given = [v for v in ins if v is not None]
        if eqn.primitive.name == "rev" and given:  # for the gradient of its input
            out.path = given[0].path or (given[0].label or ("", ()))[1]
        same = (v.own.name for v in given if v.aval.shape == out.aval.shape)
        name = next(filter(None, same), "")
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            name = self._made_by(eqn, ins[1])
        if name in TENSOR_NAMES and out.own.kind == "rows":
            out.own = replace(out.own, name=name)

    def _made_by(self, eqn: Any, weight: Value | None) -> Any:
        """Name of the last dim of a product with a weight, if it has one."""
        path = weight and (weight.path or (weight.label or ("", ()))[1])
        info = self._infos.get(path or ())
        shape = weight.aval.shape if weight else ()
        if info is None or info.names is None or info.shape[-len(shape) :] != shape:
            return ""
        names, numbers = info.names[-len(shape) :], eqn.params["dimension_numbers"]
        if eqn.primitive.name == "conv_general_dilated":
            return names[numbers.rhs_spec[0]]
        used = {dim for _, dims in numbers for dim in dims}
        return next((n for i, n in [*enumerate(names)][::-1] if i not in used), "")

    def _of_all_rows(self, size: Size) -> Size:
        return Size(kind="rows", num_bytes=size.num_bytes / self._num_rows)

    @staticmethod
    def _cast(label: tuple[Kind, Path] | None, name: str) -> Any:
        if label and label[0] == "weight" and name == "convert_element_type":
            return "cast", label[1]
        return label

    def _scan(self, eqn: Any, body: Any, ins: list[Any], ops: list[Op]) -> list[Any]:
        # What it is mapped over has one dim less inside; so has what it stacks. By
        # name the numbers are in no two versions of JAX.
        first = len(ins) - _num_sliced(eqn.invars, body.invars)
        num_carry = len(eqn.outvars) - _num_sliced(eqn.outvars, body.outvars)
        consts = first - num_carry
        labels = [v.label if v is not None else None for v in ins]
        is_stack = any(x and x[1] in self._stacked for x in labels[first:])
        outs = [
            self.value(v.aval, is_stack=is_stack and i >= num_carry)
            for i, v in enumerate(eqn.outvars)
        ]
        # Over chunks of tokens, whose dims do not tell the rows.
        if any(v and v.own.kind == "rows" and not v.own.dims for v in ins[first:]):
            for value in outs[num_carry:]:
                if value.own.kind == "fixed":
                    value.own = self._of_all_rows(value.own)
        inputs = [self.value(v.aval) for v in body.invars]
        for value, label in zip(inputs[:consts], labels, strict=False):
            value.label = label
        for value, label in zip(inputs[first:], labels[first:], strict=True):
            if label and label[1] in self._stacked:
                value.label = "layer", label[1]
        passed = [v.own.dims for v in inputs[consts:first] if v.own.kind == "rows"]
        if is_stack and self.hidden is None and any(passed):
            dims = max(passed, key=math.prod)
            self.hidden = math.prod(dims[:-1]), dims[-1]
        env = {v: self.value(v.aval) for v in body.constvars}
        env |= dict(zip(body.invars, inputs, strict=True))
        # Slices of what the loop is mapped over are made where they are read.
        found = Body([Op("slice", [], [v]) for v in inputs[first:]], [])
        found.outputs = self._emit(body, env, found.ops)
        found.carry = [*zip(inputs[consts:first], found.outputs, strict=False)]
        found.gradients = [*zip(outs, found.outputs, strict=True)]
        found.is_over_layers = is_stack
        op = Op("scan", [v for v in ins if v is not None], outs, [found])
        op.turned = [
            v for v in ins[first:] if v and v.label and v.label[1] in self._stacked
        ]
        ops.append(op)
        return outs


def _num_sliced(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(
        len(a.aval.shape) > len(b.aval.shape) for a, b in zip(outer, inner, strict=True)
    )


def _dims_of(eqn: Any) -> tuple[Any, Any]:
    """Contracted dims of both operands of a product, and their batch dims."""
    contracted, batch = eqn.params["dimension_numbers"]
    return contracted, batch


def _is_copied(value: Value, contracted: Sequence[int], batch: Sequence[int]) -> bool:
    """True if an operand is no batch of matrices as it lies in memory."""
    rank, rest = len(value.aval.shape), len(batch)
    if [*batch] != [*range(rest)]:
        return True
    inner = sorted(contracted)
    is_row = inner == [*range(rest, rest + len(inner))]
    return not is_row and inner != [*range(rank - len(inner), rank)]
