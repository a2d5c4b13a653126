"""Follows the dims of arrays through a traced program.

Each dim is a sequence of factors, because a reshape splits a dim or joins several.
Operations show which factors are equal: an elementwise operation, a product, a
transposition, a loop. So if dims of two parameters are the same dim of the computation,
they have the same factor, wherever the parameters are in the model. Each operation that
acts on a dim is recorded as an `Event`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np

from nnx_parallel.programs import ELEMENTWISE, Fold, TracedFunction, carried_by_scan

Dim = tuple[int, ...]
"""The factors of a dim, the outermost first; ``()`` is a dim of size 1."""

Dims = tuple[Dim, ...]


class Event(NamedTuple):
    """Something that a program does with a dim.

    Attributes:
        kind: ``made``: a product with a parameter has the dim in its output.
            ``contracted``: a product with a parameter sums over the dim. ``stacked``: a
            product with a parameter is computed separately for each entry. ``shared``
            and ``paired``: like ``stacked`` and ``contracted``, but in a product of two
            activations. ``looked_up``: the batch chooses entries of a parameter.
            ``taken``: the batch chooses entries of an activation. ``reduced``: a sum, a
            maximum or a similar operation over the dim. ``sliced``: a loop takes one
            entry at a time from a parameter. ``residual``: a value and a function of
            the value are added. ``data``: the dim is a dim of the batch. ``split``: a
            reshape splits the dim from another dim. ``blocked``: any other operation,
            which needs neighbouring entries.
        dim: The dim.
        paths: The paths of the parameters that take part.
        note: The shapes before and after a reshape, or the name of an operation.
        width: For ``made``: the number of terms that the product sums per output.
    """

    kind: str
    dim: Dim
    paths: frozenset = frozenset()
    note: str = ""
    width: int = 0


@dataclass(frozen=True)
class DimValue:
    """The known facts about a value of the program.

    Attributes:
        dims: The factors of each dim.
        is_weight: True if the value does not depend on the batch.
        paths: If it is a weight: the paths of the parameters it was computed from.
        products: The products and lookups it was computed from, one bit for each.
    """

    dims: Dims = ()
    is_weight: bool = True
    paths: frozenset = frozenset()
    products: int = 0


class Factors:
    """The sizes of all factors, and a record of which factors are equal."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        # Maps a factor to an equal factor, or to two factors that replace it.
        self._parts: dict[int, Dim] = {}

    def new(self, size: int) -> Dim:
        """Returns a new dim."""
        if size <= 1:
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def size(self, dim: Dim) -> int:
        """Returns the size of a dim."""
        return math.prod(self._sizes[factor] for factor in dim)

    def resolve(self, dim: Iterable[int]) -> Dim:
        """Returns a dim in its present factors; equal factors have the same number."""
        found, left = [], [*dim][::-1]
        start = left[0] if len(left) == 1 else None
        while left:
            factor = left.pop()
            if factor in self._parts:
                left.extend(reversed(self._parts[factor]))
            else:
                found.append(factor)
        if start in self._parts:
            self._parts[start] = tuple(found)  # so that the next search is short
        return tuple(found)

    def split(self, factor: int, outer: int) -> Dim:
        """Replaces a factor with two factors; ``outer`` is the outer factor's size."""
        parts = self.new(outer) + self.new(self._sizes[factor] // outer)
        self._parts[factor] = parts
        return parts

    def unify(self, a: Dim, b: Dim) -> bool:
        """Makes two dims equal; returns False if their factors do not match."""
        a, b = self.resolve(a), self.resolve(b)
        while a and b:
            small, large = sorted((a[0], b[0]), key=lambda f: (self._sizes[f], f))
            if self._sizes[large] % self._sizes[small]:
                return False
            if self._sizes[large] > self._sizes[small]:
                rest = self.new(self._sizes[large] // self._sizes[small])
                self._parts[large] = (small, *rest)
            elif small != large:
                self._parts[large] = (small,)
            a, b = self.resolve(a)[1:], self.resolve(b)[1:]
        return not (a or b)

    def regroup(self, dims: Iterable[Dim], shape: Sequence[int]) -> Dims | None:
        """Returns the dims of a reshaped array, or ``None`` if no factors suit them."""
        left, found = self.resolve(f for dim in dims for f in dim), []
        for size in shape:
            taken: Dim = ()
            while (rest := size // max(1, self.size(taken))) > 1:
                if not left or size % self.size(taken):
                    return None
                if rest % self._sizes[left[0]]:
                    if self._sizes[left[0]] % rest:
                        return None
                    self.split(left[0], rest)
                    left = self.resolve(left)
                taken, left = (*taken, left[0]), left[1:]
            found.append(taken)
        return tuple(found)


class DimTrace(Fold):
    """Interprets a program: finds the dims of all values, and records the events.

    Attributes:
        factors: The factors of all dims.
        events: The events.
        values: The dims of all arrays of the program.
        flops: Number of floating-point operations of products with a parameter, over
            all iterations of loops. The keys are pairs of an equation's id and the
            parameter's path.
    """

    def __init__(self) -> None:
        self.factors = Factors()
        self.events: set[Event] = set()
        self.values: set[Dims] = set()
        self.flops: dict[tuple[int, Any], float] = {}
        self._bits: dict[int, int] = {}  # the bit of each product, by equation id
        self._trips = 1

    def fresh(self, shape: Sequence[int]) -> Dims:
        """Returns new dims, which are not equal to any other dim."""
        return tuple(map(self.factors.new, shape))

    def note(self, kind: str, dims: Iterable[Dim], *facts: Any) -> None:
        """Records an event for each dim; dims of size 1 have no events."""
        self.events.update(Event(kind, dim, *facts) for dim in dims if dim)

    def block(self, dims: Iterable[Dim], operation: str) -> None:
        """Records an operation that needs neighbouring entries of the dims."""
        self.note("blocked", dims, frozenset(), operation)

    def same(self, a: Sequence[Dim], b: Sequence[Dim]) -> None:
        """Makes the dims of two sequences equal, pair by pair."""
        for x, y in zip(a, b, strict=True):
            if x != y and not self.factors.unify(x, y):
                self.block((x, y), "reshape")

    def constant(self, *numbers: Any) -> DimValue:
        """Returns the value of a constant, with new dims."""
        (number,) = numbers
        return DimValue(self.fresh(np.shape(number)))

    def join(self, a: DimValue, b: DimValue) -> DimValue:
        """Makes the dims of two values equal."""
        if len(a.dims) == len(b.dims):
            self.same(a.dims, b.dims)
        return _made_from(a.dims, (a, b))

    def decided(self, value: DimValue, by: DimValue) -> DimValue:
        """Returns the value: the dims do not depend on a predicate."""
        del by
        return value

    def __call__(self, inputs: Iterable, *programs: Any) -> Any:
        """Maps the dims of the inputs to the values of the outputs."""
        inputs = [*inputs]
        self.values.update(value.dims for value in inputs)
        return super().__call__(inputs, *programs)

    def apply(self, inputs: list, *eqns: jex.JaxprEqn) -> list:
        """Applies the rule of an equation's primitive."""
        (eqn,) = eqns
        name = eqn.primitive.name
        outputs = self._scan(inputs, eqn) if name == "scan" else None
        if outputs is None and (outputs := self.nested(inputs, eqn)) is None:
            rule = _RULES.get(name, _elementwise if name in ELEMENTWISE else _unknown)
            found = rule(self, eqn, inputs)
            made = _made_from((), inputs, self._bits.get(id(eqn), 0))
            outputs = [replace(made, dims=dims) for dims in found]
        self.values.update(value.dims for value in outputs)
        return outputs

    def _scan(self, inputs: list, eqn: jex.JaxprEqn) -> list:
        first, end = carried_by_scan(eqn)
        length = eqn.params["length"]
        lead = self.factors.new(length)
        for value in inputs[end:]:
            self.same((lead,), value.dims[:1])
            self.note("sliced", value.dims[:1], value.paths if value.is_weight else ())
        slices = [replace(value, dims=value.dims[1:]) for value in inputs[end:]]
        self._trips *= length
        outputs = self.nested([*inputs[:end], *slices], eqn) or []
        self._trips //= max(1, length)
        stacked = outputs[end - first :]
        return outputs[: end - first] + [
            replace(value, dims=(lead, *value.dims)) for value in stacked
        ]

    def product(
        self, eqn: jex.JaxprEqn, ins: list, contracted: Dims, batch: Dims, free: list
    ) -> None:
        """Records a product of two values; ``free`` has the remaining dims of each."""
        self._bits.setdefault(id(eqn), 1 << len(self._bits))
        weights = [value.is_weight and bool(value.paths) for value in ins]
        are_weights = all(value.is_weight for value in ins)
        if are_weights or not any(weights):
            self.note("shared", () if are_weights else batch)
            self.note("paired", contracted)
            return
        index = weights.index(True)
        paths = ins[index].paths
        width = math.prod(map(self.factors.size, contracted))
        self.note("contracted", contracted, paths)
        self.note("stacked", batch, paths)
        self.note("made", free[index], paths, "", width)
        size = math.prod(_shape(eqn.outvars[0]))
        for path in paths:
            self.flops[id(eqn), path] = 2.0 * self._trips * width * size

    def look_up(self, eqn: jex.JaxprEqn, table: DimValue, dims: Iterable[Dim]) -> None:
        """Records that the batch chooses entries of a value along the dims."""
        if table.is_weight:
            self._bits.setdefault(id(eqn), 1 << len(self._bits))
        kind = "looked_up" if table.is_weight else "taken"
        self.note(kind, dims, table.paths)


def follow(traced: TracedFunction, paths: Sequence[Any]) -> tuple[DimTrace, list[Dims]]:
    """Follows the dims of a traced function's arguments.

    Args:
        traced: The function.
        paths: For each array in the function's arguments: the path of a parameter,
            ``"data"`` for an array of the batch, or ``None`` for any other array.

    Returns:
        The facts about the program, and the dims of each array.
    """
    found, inputs = DimTrace(), []
    variables = jax.tree.leaves(traced.inputs)
    for path, variable in zip(paths, variables, strict=True):
        dims = found.fresh(_shape(variable))
        is_weight = path is not None and path != "data"
        paths_of = frozenset({path}) if is_weight else frozenset[Any]()
        inputs.append(DimValue(dims, is_weight, paths_of))
        if path == "data":
            found.note("data", dims)
    found(inputs, traced)
    return found, [value.dims for value in inputs]


def _made_from(dims: Dims, values: Sequence[DimValue], products: int = 0) -> DimValue:
    is_weight = all(value.is_weight for value in values)
    paths = frozenset[Any]()
    for value in values:
        paths |= value.paths if is_weight else frozenset()
        products |= value.products
    return DimValue(dims, is_weight, paths, products)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))  # tokens have no shape


def _unknown(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    name = eqn.primitive.name
    outs = [trace.fresh(_shape(v)) for v in eqn.outvars]
    given = [dim for value in ins for dim in value.dims]
    trace.block(given, name)
    if any(given):  # random numbers are made from a key without dims
        for dims in outs:
            trace.block(dims, name)
    return outs


def _elementwise(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    if len(eqn.outvars) > 1:  # such as a barrier around several arrays
        return [value.dims for value in ins]
    # Scalars and dims of size 1 are broadcast. A dim of size 1 has no factors.
    ndim = len(_shape(eqn.outvars[0]))
    operands = [value for value in ins if len(value.dims) == ndim]
    found = []
    for dims in zip(*(value.dims for value in operands), strict=True):
        given = [dim for dim in dims if dim]
        for dim in given[1:]:
            trace.same(given[:1], (dim,))
        found.append(given[0] if given else ())
    if eqn.primitive.name in ("add", "add_any") and len(operands) == 2:
        a, b = sorted(operands, key=lambda v: v.products.bit_count())
        is_within = a.products & b.products == a.products != b.products
        if is_within and a.products and not a.is_weight:
            trace.note("residual", a.dims)
    return [tuple(found)]


def _reshape(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    before, shape = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    dims = trace.factors.regroup(ins[0].dims, shape)
    if dims is None:
        return _unknown(trace, eqn, ins)
    if len(shape) > len(before):
        whole = {trace.factors.resolve(dim) for dim in ins[0].dims}
        trace.note("split", {*dims} - whole, frozenset(), f"{before} to {shape}")
    return [dims]


def _transpose(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    return [tuple(ins[0].dims[d] for d in eqn.params["permutation"])]


def _broadcast(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    dims = [*trace.fresh(_shape(eqn.outvars[0]))]
    sizes = zip(eqn.params["broadcast_dimensions"], _shape(eqn.invars[0]), strict=True)
    for dim, (place, size) in zip(ins[0].dims, sizes, strict=True):
        if size == _shape(eqn.outvars[0])[place]:
            dims[place] = dim
    return [tuple(dims)]


def _without(dims: Dims, dropped: Iterable[int]) -> Dims:
    return tuple(dim for d, dim in enumerate(dims) if d not in {*dropped})


def _squeeze(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    return [_without(ins[0].dims, eqn.params["dimensions"])]


def _reduce(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    axes = eqn.params["axes"]
    trace.note("reduced", (ins[0].dims[d] for d in axes))
    return [_without(ins[0].dims, axes)] * len(eqn.outvars)


def _dot(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    sums, batches = eqn.params["dimension_numbers"]
    contracted, batch = (
        [tuple(v.dims[d] for d in dims) for v, dims in zip(ins, each, strict=True)]
        for each in (sums, batches)
    )
    trace.same(*contracted)
    trace.same(*batch)
    free = [_without(v.dims, (*sums[i], *batches[i])) for i, v in enumerate(ins)]
    trace.product(eqn, ins, contracted[0], batch[0], free)
    return [(*batch[0], *free[0], *free[1])]


def _convolve(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return _unknown(trace, eqn, ins)
    (x, kernel), dims = ins, [*trace.fresh(_shape(eqn.outvars[0]))]
    rows, features, *spatial = numbers.lhs_spec
    made, summed, *window = numbers.rhs_spec
    trace.block((x.dims[d] for d in spatial), "convolution")
    trace.block((kernel.dims[d] for d in window), "convolution")
    trace.block((dims[d] for d in numbers.out_spec[2:]), "convolution")
    trace.same((x.dims[features],), (kernel.dims[summed],))
    dims[numbers.out_spec[0]] = x.dims[rows]
    dims[numbers.out_spec[1]] = kernel.dims[made]
    free = [(x.dims[rows],), (kernel.dims[made],)]
    trace.product(eqn, ins, (x.dims[features],), (), free)
    return [tuple(dims)]


def _gather(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, indices = ins[:2]
    chosen, batch = numbers.collapsed_slice_dims, numbers.operand_batching_dims
    there = (indices.dims[d] for d in numbers.start_indices_batching_dims)
    trace.same(tuple(table.dims[d] for d in batch), tuple(there))
    if indices.is_weight:
        trace.block((table.dims[d] for d in chosen), "indexing")
    else:
        trace.look_up(eqn, table, (table.dims[d] for d in chosen))
    kept = [d for d in range(len(table.dims)) if d not in (*chosen, *batch)]
    shape = _shape(eqn.invars[0])
    full = iter([_part(trace, table.dims[d], shape[d], sizes[d], None) for d in kept])
    rest, count = iter(indices.dims[:-1]), len(_shape(eqn.outvars[0]))
    offsets = numbers.offset_dims
    return [tuple(next(full if d in offsets else rest) for d in range(count))]


def _part(trace: DimTrace, dim: Dim, size: int, part: int, start: int | None) -> Dim:
    """Returns the dim of a slice; ``start`` is ``None`` if it is not a constant."""
    if part == size:
        return dim
    # The slice may be one of several equal parts, such as the queries in the output of
    # a product that computes queries, keys and values.
    is_equal = start is not None and part and size % part == start % part == 0
    parts = trace.factors.regroup((dim,), (size // part, part)) if is_equal else None
    if parts is not None:
        trace.block(parts[:1], "slice")
        return parts[1]
    new = trace.factors.new(part)
    trace.block((dim, new), "slice")
    return new


def _slice(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    starts, strides = eqn.params["start_indices"], eqn.params["strides"]
    shapes = zip(
        ins[0].dims, _shape(eqn.invars[0]), _shape(eqn.outvars[0]), strict=True
    )
    return [
        tuple(
            _part(trace, dim, size, part, None if strides and strides[d] > 1 else start)
            for d, ((dim, size, part), start) in enumerate(
                zip(shapes, starts, strict=True)
            )
        )
    ]


def _split(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    sizes, axis, found = eqn.params["sizes"], eqn.params["axis"], []
    for i, size in enumerate(sizes):
        dims = [*ins[0].dims]
        dims[axis] = _part(trace, dims[axis], sum(sizes), size, sum(sizes[:i]))
        found.append(tuple(dims))
    return found


def _unstack(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    axis = eqn.params["axis"]
    trace.block((ins[0].dims[axis],), "unstack")
    return [_without(ins[0].dims, (axis,))] * len(eqn.outvars)


def _stack(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    axis = eqn.params["axis"]
    for value in ins[1:]:
        trace.same(ins[0].dims, value.dims)
    new = trace.factors.new(len(ins))
    trace.block((new,), "stack")
    return [(*ins[0].dims[:axis], new, *ins[0].dims[axis:])]


def _moved(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    """Keeps the dims that a dynamic slice or padding does not resize."""
    shapes = zip(
        ins[0].dims, _shape(eqn.invars[0]), _shape(eqn.outvars[0]), strict=True
    )
    return [tuple(_part(trace, dim, size, part, None) for dim, size, part in shapes)]


def _update(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    shapes = zip(*(_shape(atom) for atom in eqn.invars[:2]), strict=True)
    for x, y, (size, part) in zip(ins[0].dims, ins[1].dims, shapes, strict=True):
        if size == part:
            trace.same((x,), (y,))
        else:
            trace.block((x, y), "update of a slice")
    return [ins[0].dims]


def _concatenate(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    axis = eqn.params["dimension"]
    for value in ins[1:]:
        trace.same(_without(ins[0].dims, (axis,)), _without(value.dims, (axis,)))
    new = trace.factors.new(_shape(eqn.outvars[0])[axis])
    trace.block([*(value.dims[axis] for value in ins), new], "concatenation")
    dims = [*ins[0].dims]
    dims[axis] = new
    return [tuple(dims)]


def _ordered(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    """Keeps all dims: for cumulative sums, sorts and reversals along some dims."""
    params = eqn.params
    axis: Any = params.get("axis", params.get("dimension", params.get("dimensions")))
    for value in ins[1:]:
        trace.same(ins[0].dims, value.dims)
    axes = axis if isinstance(axis, tuple) else (axis,)
    trace.block((ins[0].dims[d] for d in axes), eqn.primitive.name)
    return [ins[0].dims] * len(eqn.outvars)


def _top_k(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    axis: int = eqn.params.get("axis", -1)
    dims = [*ins[0].dims]
    new = trace.factors.new(_shape(eqn.outvars[0])[axis])
    trace.block((dims[axis], new), "top_k")
    dims[axis] = new
    return [tuple(dims)] * 2


def _iota(trace: DimTrace, eqn: jex.JaxprEqn, ins: list) -> list[Dims]:
    return [trace.fresh(_shape(eqn.outvars[0]))]


Rule = Callable[[DimTrace, jex.JaxprEqn, list], list[Dims]]

_RULES: dict[str, Rule] = {
    name: rule
    for rule, names in {
        _elementwise: "complex conj",
        _reshape: "reshape",
        _transpose: "transpose",
        _broadcast: "broadcast_in_dim",
        _squeeze: "squeeze",
        _reduce: "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or "
        "reduce_xor argmax argmin",
        _dot: "dot_general",
        _convolve: "conv_general_dilated",
        _gather: "gather",
        _slice: "slice",
        _split: "split",
        _stack: "stack",
        _unstack: "unstack",
        _moved: "dynamic_slice pad",
        _update: "dynamic_update_slice",
        _concatenate: "concatenate",
        _ordered: "cumsum cumprod cummax cummin cumlogsumexp sort rev",
        _top_k: "top_k",
        _iota: "iota",
    }.items()
    for name in names.split()
}
