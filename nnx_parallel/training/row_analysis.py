"""Finds out from the traced program how a loss depends on the rows of its batch.

The loss is traced for two batches. The second batch has twice the rows of the first,
and both programs are read side by side. If the size of a dim doubles, the dim contains
rows. If a constant doubles, it counts rows. A primitive without a rule here gives an
unknown value. Nothing is reported about a loss that depends on unknown values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from nnx_parallel.metrics import Mean
from nnx_parallel.programs import (
    ELEMENTWISE,
    Fold,
    TracedFunction,
    carried_by_scan,
)

Kind = Literal["constant", "row", "sum", "joint", "unknown"]
Degrees = frozenset[float | None]


@dataclass(frozen=True)
class RowValue:
    """The known facts about a value of the program.

    Attributes:
        kind: A ``constant`` does not depend on the rows of the batch. In a ``row``
            value, each entry depends on one row. A ``sum`` is linear in sums over rows.
            A ``joint`` value is a quotient, a root or another function of such sums,
            which is never a mean. Any other value is ``unknown``.
        degrees: Exponents of the number of rows. The value is a sum of terms, and each
            term is proportional to the number of rows, raised to one of these
            exponents. A sum over rows has degree 1, and a mean has degree 0. ``None``
            is an unknown exponent. The value 0 has no terms, and so no degrees.
        dims: The dims that contain the rows of the batch.
        pairs: True if the value was computed from comparisons or products of pairs of
            rows.
    """

    kind: Kind = "constant"
    degrees: Degrees = frozenset({0})
    dims: frozenset[int] = frozenset()
    pairs: bool = False


ROWS = RowValue("row", dims=frozenset({0}))
SHARED = RowValue()
_UNKNOWN = frozenset({None})
_ZERO: Degrees = frozenset()

_COMPARISONS = "eq ne lt le gt ge is_finite not and or xor sign"
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}


def find_changes(
    traces: Sequence[TracedFunction], inputs: Sequence[RowValue], num_microbatches: int
) -> list[str]:
    """Returns warnings about values that certainly depend on microbatches.

    Args:
        traces: Two traces of a function that returns means by name, and new variables.
            The second trace has twice as many rows.
        inputs: The known facts about each array of the arguments.
        num_microbatches: Number of microbatches in a step.

    Raises:
        ValueError: If the two traces differ in more than numbers and shapes.
    """
    means, _ = _Rows()(inputs, *traces)
    found: dict[str, list[str]] = {"size": [], "joint": [], "pairs": []}
    for name, mean in means.items():
        title = "The loss" if name == "loss" else f"The metric {name!r}"
        for term in mean.terms if isinstance(mean, Mean) else ():
            total: Any = term.total
            weight: Any = term.weight
            # The total and the weight must grow with the same power of the number of
            # rows.
            is_known = len(weight.degrees) == 1 and None not in weight.degrees
            if is_known and total.degrees - weight.degrees - {None}:
                found["size"].append(title)
            elif total.kind == "joint":
                found["joint"].append(title)
            if total.pairs:
                found["pairs"].append(title)
    start = f"num_microbatches={num_microbatches} changes the numbers. "
    return [
        start + "; ".join(dict.fromkeys(titles)) + _TEXTS[key]
        for key, titles in found.items()
        if titles
    ]


_TEXTS = {
    "size": " depends on the number of rows, as a sum over rows does. A plain scalar "
    "is taken for a mean over rows, and the values of the microbatches are averaged: a "
    "sum would be divided by num_microbatches. Return Mean(losses.sum(), "
    "weights.sum()), or losses.mean().",
    "joint": " is a quotient, a root or another function of sums over the batch. Each "
    "microbatch has different sums, and the mean of such values is not the value of "
    "the whole batch. Return a quotient as Mean(total, weight), which adds both up "
    "over the microbatches, or use num_microbatches=1.",
    "pairs": " compares rows with other rows, as contrastive losses do. Each row is "
    "compared only with rows of its microbatch, so it has fewer negatives. Use "
    "num_microbatches=1 with a strategy other than Pipeline, such as FSDP, and remat "
    "to save memory; or accept the smaller groups and filter this warning.",
}


@dataclass(frozen=True)
class _Call:
    """A pair of equations, and the known facts about their inputs."""

    eqn: jex.JaxprEqn
    other: jex.JaxprEqn
    ins: list[RowValue]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    def growth(self, index: int = 0, *, of_input: bool = False) -> list[float | None]:
        """Returns, for each dim, the p with which its size grows as ``num_rows**p``.

        It is ``None`` if there is no such p.
        """
        a, b = (
            _shape((e.invars if of_input else e.outvars)[index])
            for e in (self.eqn, self.other)
        )
        if len(a) != len(b):
            return [None] * len(a)
        return [_power(x, y) for x, y in zip(a, b, strict=True)]

    def out(self, value: RowValue, index: int = 0) -> RowValue:
        """Returns the value, with only those dims that grow with the number of rows."""
        grows = self.growth(index)
        dims = frozenset(d for d in value.dims if d < len(grows) and grows[d] == 1)
        is_lost = value.kind == "row" and len(dims) < len(value.dims)
        return replace(value, kind="unknown" if is_lost else value.kind, dims=dims)


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())  # tokens have no shape


def _power(a: float, b: float) -> float | None:
    """Returns the power p for which ``b = a * 2**p``, because the rows double."""
    if a == b:
        return 0
    if not a or not b or a * b < 0 or not math.isfinite(a * b):
        return None
    power = math.log2(b / a)
    # float32 constants are rounded, so the power is rounded to the nearest half.
    nearest = round(2 * power) / 2
    return nearest if abs(power - nearest) < 1e-6 and abs(nearest) <= 2 else None


def _constant(a: Any, b: Any) -> RowValue:
    """Returns the facts about a constant, given its values in both traces."""
    if a is b:
        return SHARED
    sizes = [np.size(x) for x in (a, b)]
    dtypes = [jnp.result_type(x) for x in (a, b)]
    kinds = (jnp.integer, jnp.floating, jnp.bool_)
    is_real = all(any(jnp.issubdtype(d, k) for k in kinds) for d in dtypes)
    is_array = any(isinstance(x, jax.Array) for x in (a, b))
    # A large constant may be spread over several processes, so it is not read.
    if not is_real or max(sizes) > (1 if is_array else 2**16):
        return RowValue(degrees=_UNKNOWN)
    low, high = (np.unique(np.asarray(x, np.float64)) for x in (a, b))
    if np.array_equal(low, high):  # the same numbers, perhaps repeated more often
        return RowValue(degrees=frozenset({0}) if low.any() else _ZERO)
    is_uniform = low.size == high.size == 1
    power = _power(float(low[0]), float(high[0])) if is_uniform else None
    return RowValue(degrees=frozenset({power}))


def _unknown(call: _Call) -> RowValue:
    """Returns the facts about the output of a primitive without a rule."""
    is_constant = all(v.kind == "constant" for v in call.ins)
    powers = [p for i in range(len(call.eqn.outvars)) for p in call.growth(i)]
    is_fixed = is_constant and all(v.degrees <= {0} for v in call.ins)
    is_fixed = is_fixed and all(power == 0 for power in powers)
    return RowValue(
        "constant" if is_constant else "unknown",
        frozenset({0}) if is_fixed else _UNKNOWN,
        # `_Call.out` removes the dims that do not grow.
        frozenset(range(len(powers)) if any(v.dims for v in call.ins) else ()),
        any(v.pairs for v in call.ins),
    )


def _curved(degrees: Degrees) -> Degrees:
    """Returns the degrees of an unknown function of a value."""
    return degrees | {0} if degrees <= {0} else _UNKNOWN


def _times(a: Degrees, b: Degrees, sign: int = 1) -> Degrees:
    if not a or not b:  # a factor is zero
        return _ZERO
    if sign < 0 and len(b) > 1:
        return _UNKNOWN
    return frozenset(
        None if x is None or y is None else x + sign * y for x in a for y in b
    )


def _grown(degrees: Degrees, powers: Sequence[float | None]) -> Degrees:
    """Returns the degrees of a sum over dims that grow with these powers."""
    for power in powers:
        degrees = _times(degrees, frozenset({power}))
    return degrees


def _joined(a: RowValue, b: RowValue) -> RowValue:
    """Returns the facts about a value that is one of two values."""
    first, second = (a, b) if a.kind != "constant" else (b, a)
    is_same = second.kind == "constant" or (first.kind, first.dims) == (
        second.kind,
        second.dims,
    )
    degrees = a.degrees | b.degrees
    if a.degrees and b.degrees and a.degrees != b.degrees:
        degrees = _UNKNOWN
    pairs = a.pairs or b.pairs
    kind: Kind = first.kind if is_same else "unknown"
    return RowValue(kind, degrees, first.dims if is_same else frozenset(), pairs)


def _meeting(values: Sequence[RowValue]) -> RowValue:
    """Returns dims, pairs and kind of the result of a linear elementwise operation."""
    dims = frozenset[int]().union(*(v.dims for v in values))
    crossed = any(v.dims - w.dims and w.dims - v.dims for v in values for w in values)
    pairs = crossed or any(v.pairs for v in values)
    # A constant has no dims of rows. It is broadcast over the rows of the other value.
    others = [v for v in values if v.kind != "constant"]
    kind: Kind = others[0].kind if others else "constant"
    are_alike = len({(v.kind, v.dims) for v in others}) <= 1
    if not are_alike or (len(others) > 1 and kind != "row" and dims):
        kind = "unknown"
    return RowValue(kind, _ZERO, dims, pairs)


def _joint(call: _Call) -> Kind:
    """Returns the kind of a function of sums: ``joint``, or ``unknown`` for arrays."""
    return "joint" if _shape(call.eqn.outvars[0]) == () else "unknown"


def _linear(call: _Call) -> list[RowValue]:
    return call.ins[: len(call.eqn.outvars)]


def _add(call: _Call) -> RowValue:
    a, b = call.ins
    met = _meeting(call.ins)
    kinds = {a.kind, b.kind}
    if "joint" in kinds and not met.dims:
        met = replace(met, kind="joint")
    degrees = a.degrees | b.degrees
    # A small literal that is added to a divisor only keeps it away from zero.
    for x, atom in ((a, call.eqn.invars[1]), (b, call.eqn.invars[0])):
        if isinstance(atom, jex.Literal) and np.ndim(atom.val) == 0:
            tiny = abs(atom.val) <= 1e-3
            degrees = x.degrees if tiny and x.degrees else degrees
    return replace(met, degrees=degrees)


def _multiply(call: _Call) -> RowValue:
    a, b = call.ins
    met = replace(_meeting(call.ins), degrees=_times(a.degrees, b.degrees))
    kinds = {a.kind, b.kind}
    if kinds == {"joint", "row"} and a.dims and b.dims:
        return replace(met, kind="joint")
    if kinds in ({"sum"}, {"joint"}):
        return replace(met, kind=_joint(call))
    return met


def _divide(call: _Call) -> RowValue:
    a, b = call.ins
    degrees = _times(a.degrees, b.degrees, -1)
    met = replace(_meeting(call.ins), degrees=degrees)
    if b.kind == "constant" or {a.kind, b.kind} <= {"constant", "row"}:
        return met
    if b.kind == "sum" and a.kind in ("sum", "joint", "row"):
        return replace(met, kind="joint")
    is_known = b.kind in ("sum", "joint") and a.kind != "unknown"
    return replace(met, kind=_joint(call) if is_known else "unknown")


def _bend(call: _Call) -> RowValue:
    """Returns the facts about a nonlinear elementwise function."""
    met = _meeting(call.ins)
    degrees = frozenset({0.0}).union(*(_curved(v.degrees) for v in call.ins))
    if None in degrees:
        degrees = _UNKNOWN
    if met.kind in ("sum", "joint"):
        kind = "unknown" if call.name in _COMPARISONS.split() else _joint(call)
        met = replace(met, kind=kind)
    return replace(met, degrees=degrees)


def _raise_to(call: _Call) -> RowValue:
    power = _POWERS.get(call.name) or call.eqn.params["y"]
    degrees = call.ins[0].degrees
    is_known = len(degrees) < 2 and None not in degrees
    scaled = frozenset(power * d for d in degrees if d is not None)
    return replace(_bend(call), degrees=scaled if is_known else _UNKNOWN)


def _limit(call: _Call) -> RowValue:
    """Returns the facts about a clipped value. A clipped sum still counts as a sum."""
    found = [v for v in call.ins if v.kind != "constant"]
    return found[0] if len(found) == 1 else _bend(call)


def _select(call: _Call) -> RowValue:
    which, *cases = call.ins
    met = _meeting(cases)
    found = reduce(_joined, cases)
    pairs = _meeting(call.ins).pairs
    is_row = which.kind in ("constant", "row") and met.kind in ("constant", "row")
    dims = met.dims | which.dims
    kind: Kind = met.kind
    if dims and not is_row:
        kind = "unknown"
    elif dims:
        kind = "row"
    return RowValue(kind, found.degrees, dims, pairs)


def _reduce(call: _Call) -> RowValue:
    (value,) = call.ins
    axes = call.eqn.params["axes"]
    grows = call.growth(of_input=True)
    kept = [d for d in range(len(grows)) if d not in axes]
    dims = frozenset(i for i, d in enumerate(kept) if d in value.dims)
    over_rows = bool(value.dims.intersection(axes))
    kind: Kind = value.kind
    if call.name == "reduce_sum":
        if over_rows and kind in ("row", "joint"):
            is_whole = not dims and not value.pairs
            kind = ("sum" if kind == "row" else kind) if is_whole else "unknown"
        degrees = _grown(value.degrees, [grows[d] for d in axes])
    else:
        if over_rows or kind in ("sum", "joint"):
            kind = "unknown"
        is_order = call.name in ("reduce_max", "reduce_min")
        is_safe = is_order or all(grows[d] == 0 for d in axes)
        degrees = value.degrees if is_order else _curved(value.degrees)
        degrees = degrees if is_safe else _UNKNOWN
    return RowValue(kind, degrees, dims, value.pairs)


def _move(call: _Call) -> RowValue:
    value, params = call.ins[0], call.eqn.params
    arrays = call.ins
    if call.name in ("dynamic_slice", "pad", "dynamic_update_slice"):
        arrays = call.ins[: 1 + (call.name != "dynamic_slice")]
    for more in arrays[1:]:
        value = _joined(value, more)
    if call.name == "transpose":
        order = params["permutation"]
        dims = {i for i, d in enumerate(order) if d in value.dims}
    elif call.name == "broadcast_in_dim":
        dims = {params["broadcast_dimensions"][d] for d in value.dims}
    elif call.name in ("reshape", "squeeze", "expand_dims"):
        # Dims keep their order, so the first dim with rows remains the first.
        ins, outs = (
            [d for d, power in enumerate(grows) if power != 0]
            for grows in (call.growth(of_input=True), call.growth())
        )
        places = dict(zip(ins, outs, strict=False)) if len(ins) == len(outs) else {}
        dims = {places[d] for d in value.dims if d in places}
        if len(dims) < len(value.dims):
            value = replace(value, kind="unknown")
    else:
        return value
    return replace(value, dims=frozenset(dims))


def _order(call: _Call) -> RowValue:
    """Returns the facts about an operation along one dim, such as a cumulative sum."""
    params, grows = call.eqn.params, call.growth(of_input=True)
    axis = params.get("axis", params.get("dimension", -1))
    return _bend(call) if grows[axis] == 0 else _unknown(call)


def _gather(call: _Call) -> RowValue:
    operand, indices = call.ins[:2]
    kinds = {operand.kind, indices.kind}
    # Whatever the indices are, the result contains only numbers of the operand.
    degrees, pairs = operand.degrees, operand.pairs or indices.pairs
    if kinds == {"constant"}:
        return RowValue(degrees=degrees)
    dims = [d for d, power in enumerate(call.growth()) if power == 1]
    is_row = kinds <= {"constant", "row"} and len(dims) == 1
    return RowValue("row" if is_row else "unknown", degrees, frozenset(dims), pairs)


def _iota(call: _Call) -> RowValue:
    grows = call.growth()[call.eqn.params["dimension"]]
    return RowValue(degrees=frozenset({0}) if grows == 0 else _UNKNOWN)


def _contract(call: _Call) -> RowValue:
    """Returns the facts about `dot_general`; its output has the batch dims first."""
    a, b = call.ins
    contracted, batch = call.eqn.params["dimension_numbers"]
    sizes = call.growth(of_input=True), call.growth(1, of_input=True)
    free = [
        [d for d in range(len(sizes[i])) if d not in (*contracted[i], *batch[i])]
        for i in range(2)
    ]
    # `origins` has, for each dim of the output, the dims of a and b that it comes from.
    shared = [*zip(*batch, strict=True)]
    origins = [*shared, *((d, None) for d in free[0]), *((None, d) for d in free[1])]
    dims = frozenset(
        i for i, (x, y) in enumerate(origins) if x in a.dims or y in b.dims
    )
    over = [a.dims.intersection(contracted[0]), b.dims.intersection(contracted[1])]
    crossed = bool(a.dims.intersection(free[0]) and b.dims.intersection(free[1]))
    had_pairs = a.pairs or b.pairs
    # In attention, the scores of all pairs are multiplied by the pairs' rows. That
    # gives a value for each row, which is no longer about pairs.
    pairs = crossed or (had_pairs and not all(over))
    degrees = _times(a.degrees, b.degrees)
    degrees = _grown(degrees, [sizes[0][d] for d in contracted[0]])
    is_aligned = all((x in a.dims) == (y in b.dims) for x, y in shared)
    kind = _product_kind(call.ins, over, is_aligned, dims)
    return RowValue("unknown" if crossed or had_pairs else kind, degrees, dims, pairs)


def _product_kind(
    values: list[RowValue], over: list[frozenset], is_aligned: bool, dims: frozenset
) -> Kind:
    """Returns the kind of a product that sums ``over`` rows and keeps ``dims``."""
    kinds = {v.kind for v in values}
    if kinds == {"row"}:
        is_sum = all(over)
        if not is_sum and (any(over) or not is_aligned):
            return "unknown"
    elif "constant" in kinds:
        is_sum = any(over)
    else:
        return "unknown"
    given: list[Kind] = [v.kind for v in values if v.kind != "constant"]
    kind: Kind = given[0] if given else "constant"
    if kind == "row" and is_sum:
        return "unknown" if dims else "sum"
    return kind


def _convolve(call: _Call) -> RowValue:
    x, kernel = call.ins
    numbers = call.eqn.params["dimension_numbers"]
    grows = call.growth(of_input=True)
    rest = [grows[d] for d in numbers.lhs_spec[1:]]
    is_plain = kernel.kind == "constant" and not any(rest)
    if not is_plain or x.dims - {numbers.lhs_spec[0]}:
        return _unknown(call)
    dims = frozenset({numbers.out_spec[0]}) if x.dims else frozenset[int]()
    return RowValue(x.kind, _times(x.degrees, kernel.degrees), dims, x.pairs)


def _pool(call: _Call) -> RowValue:
    grows = call.growth(of_input=True)
    window = call.eqn.params["window_dimensions"]
    if any(power != 0 and size > 1 for power, size in zip(grows, window, strict=True)):
        return _unknown(call)
    return _bend(call)


_RULES: dict[str, Callable[[_Call], RowValue | list[RowValue]]] = {
    name: rule
    for rule, names in {
        # Other rules replace this one for some of the primitives.
        _bend: f"{' '.join(sorted(ELEMENTWISE))} random_bits random_seed random_wrap "
        "random_unwrap random_fold_in random_split random_clone threefry2x32",
        _linear: "neg convert_element_type copy copy_p real imag reduce_precision name "
        "pcast pvary optimization_barrier sharding_constraint mesh_cast "
        "layout_constraint reshard stop_gradient",
        _add: "add sub add_any",
        _multiply: "mul",
        _divide: "div",
        _raise_to: "sqrt rsqrt square integer_pow",
        _limit: "max min clamp",
        _select: "select_n",
        _reduce: "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or "
        "reduce_xor argmax argmin",
        _move: "reshape squeeze expand_dims transpose broadcast_in_dim slice rev pad "
        "concatenate split dynamic_slice dynamic_update_slice",
        _order: "cumsum cumprod cummax cummin cumlogsumexp sort top_k",
        _gather: "gather",
        _iota: "iota",
        _contract: "dot_general",
        _convolve: "conv_general_dilated",
        _pool: "reduce_window_sum reduce_window_max reduce_window_min",
    }.items()
    for name in names.split()
}


class _Rows(Fold):
    """Reads two traces side by side and finds a `RowValue` for each variable."""

    def constant(self, *numbers: Any) -> RowValue:
        return _constant(*numbers)

    def unlike(self) -> RowValue:
        return RowValue("unknown", _UNKNOWN)

    def join(self, a: RowValue, b: RowValue) -> RowValue:
        return _joined(a, b)

    def decided(self, value: RowValue, by: RowValue) -> RowValue:
        del by  # the facts hold whichever branch runs
        return value

    def apply(self, inputs: list, *eqns: jex.JaxprEqn) -> list:
        eqn, other = eqns
        call = _Call(eqn, other, inputs)
        if eqn.primitive is not other.primitive:
            raise ValueError("The two traces have different equations.")
        if call.name == "scan":
            return self._scan(call)
        outputs = None if call.name == "while" else self.nested(inputs, *eqns)
        if outputs is not None:
            return outputs
        found = _RULES.get(call.name, _unknown)(call)
        outputs = found if isinstance(found, list) else [found] * len(eqn.outvars)
        return [call.out(value, i) for i, value in enumerate(outputs)]

    def _scan(self, call: _Call) -> list[RowValue]:
        first, end = carried_by_scan(call.eqn)
        grows = call.eqn.params["length"] != call.other.params["length"]
        carry, xs = call.ins[first:end], call.ins[end:]
        if grows:
            carry = [RowValue("unknown", _UNKNOWN, v.dims, v.pairs) for v in carry]
        # Each iteration of the loop gets a slice, which lacks the leading dim.
        parts = [replace(v, dims=frozenset(d - 1 for d in v.dims - {0})) for v in xs]
        inputs = [*call.ins[:first], *carry, *parts]
        outputs = self.nested(inputs, call.eqn, call.other) or []
        rows = {0} if grows and any(0 in v.dims for v in xs) else set[int]()
        return outputs[: len(carry)] + [
            replace(v, dims=frozenset({d + 1 for d in v.dims} | rows))
            for v in outputs[len(carry) :]
        ]
