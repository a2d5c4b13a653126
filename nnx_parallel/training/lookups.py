"""Finds labels and tokens of a batch that are outside of the array they index.

JAX raises no error for such an index. Some lookups then give NaN. Others count from the
end of the array, or clamp the index, or give a row of zeros: the loss stays finite, and
the training is silently wrong.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from nnx_parallel.errors import ParallelWarning, warn_user
from nnx_parallel.layers.loss import LabelRange
from nnx_parallel.programs import (
    TracedFunction,
    bind,
    reached,
    variables_in,
)
from nnx_parallel.sharding.nnx_arrays import is_inexact
from nnx_parallel.training.loss_checks import name_in_batch

_MODE = jax.lax.GatherScatterMode

_RESHAPES = frozenset(
    (
        *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "copy_p"),
        *("stop_gradient", "sharding_constraint", "convert_element_type"),
    )
)
"""Primitives that keep the values and the order of an array's entries."""

_NESTED = frozenset(
    ("scan", "while", "cond", "shard_map", "custom_jvp_call", "custom_vjp_call")
)


@dataclass(frozen=True, eq=False)
class _Lookup:
    """A lookup whose index depends only on the batch.

    Attributes:
        eqn: The equation that computes the result.
        index: The index as the user computes it, before JAX wraps negative values.
        column: The column of ``index`` if its rows are indices of several dims.
        size: The number of valid values.
        is_table: True if the array that is looked up does not depend on the batch.
        fills: True if an index out of range gives NaN.
    """

    eqn: jex.JaxprEqn
    index: Any
    column: int | None
    size: int
    is_table: bool
    fills: bool

    def values(self, index: jax.Array) -> jax.Array:
        """Returns the values of the index in the order of its entries."""
        return (index if self.column is None else index[..., self.column]).reshape(-1)

    def gives_nan(self, values: jax.Array) -> jax.Array:
        """Tests whether a lookup of each value of the index gives NaN."""
        beyond = (values < -self.size) | (values >= self.size)
        return beyond & self.fills

    def is_silent(self, values: jax.Array) -> jax.Array:
        """Tests whether each value is out of range and its lookup gives a number."""
        is_bad = (values < 0) | (values >= self.size)
        return is_bad & ~self.gives_nan(values)


class _Mask(NamedTuple):
    """A value of the batch that may leave out entries of a lookup's result.

    Attributes:
        var: The value; ``None`` if it cannot be compared with the index.
        kind: The name of the primitive that applies the mask.
        used: For a selection, the cases that the result of the lookup reaches.
    """

    var: Any
    kind: str = ""
    used: tuple[int, ...] = ()

    def leaves_out(self, value: jax.Array) -> jax.Array:
        """Tests whether the mask removes each entry from the loss."""
        value = value.reshape(-1)
        if self.kind == "select_n":
            return ~jnp.isin(value.astype(jnp.int32), jnp.array(self.used))
        if self.kind == "add":  # such as -1e9, which is added to attention's scores
            return value < -1000
        return value == 0


@dataclass(frozen=True, eq=False)
class Lookups:
    """The lookups in a traced loss whose indices depend only on the batch.

    Attributes:
        program: The loss as a function of ``(params, variables, batch, key)``.
    """

    program: TracedFunction

    @property
    def _of_batch(self) -> Any:
        return self.program.inputs[2]

    @cached_property
    def _after_batch(self) -> set[jex.Var]:
        """The variables that depend on the batch."""
        return reached(self.program.eqns, jax.tree.leaves(self._of_batch))

    @cached_property
    def _only_batch(self) -> set[jex.Var]:
        """The variables that depend on the batch, and on no other argument."""
        inputs = jax.tree.leaves(self.program.inputs)
        others = {*inputs}.difference(jax.tree.leaves(self._of_batch))
        return self._after_batch - reached(self.program.eqns, others)

    @cached_property
    def _maker(self) -> dict[jex.Var, jex.JaxprEqn]:
        """The equation that computes each variable."""
        return {var: eqn for eqn in self.program.eqns for var in eqn.outvars}

    def _origin(self, atom: Any) -> Any:
        """Returns the integers from which reshapes and casts made an atom."""
        while (eqn := self._made(atom)) and eqn.primitive.name in _RESHAPES:
            operand = eqn.invars[0]
            if isinstance(operand, jex.Literal) or is_inexact(operand.aval):
                break
            atom = operand
        return atom

    def _made(self, atom: Any) -> jex.JaxprEqn | None:
        return None if isinstance(atom, jex.Literal) else self._maker.get(atom)

    def _unwrapped(self, atom: Any) -> Any:
        """Returns x for ``where(x < 0, x + size, x)``, or ``None``."""
        eqn = self._made(atom)
        if eqn is None or eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
            return None
        which, x, wrapped = eqn.invars
        test, shift = self._made(which), self._made(wrapped)
        if test is None or shift is None:
            return None
        is_wrap = test.primitive.name == "lt" and shift.primitive.name == "add"
        is_wrap &= test.invars[0] is x and shift.invars[0] is x
        return self._origin(x) if is_wrap else None

    @cached_property
    def found(self) -> list[_Lookup]:
        """The lookups, in the order of the program."""
        return [x for eqn in self.program.eqns for x in self._in(eqn)]

    def _in(self, eqn: jex.JaxprEqn) -> Iterator[_Lookup]:
        if eqn.primitive.name == "gather":
            yield from self._in_gather(eqn)
        scopes = str(eqn.source_info.name_stack)
        if eqn.primitive.name == "eq" and "one_hot" in scopes:
            yield from self._in_one_hot(eqn)

    def _in_gather(self, eqn: jex.JaxprEqn) -> Iterator[_Lookup]:
        array, indices = eqn.invars
        if isinstance(indices, jex.Literal):
            return
        table: Any = array.aval
        mode = eqn.params["mode"]
        dims = eqn.params["dimension_numbers"].start_index_map
        for i, dim in enumerate(dims):
            atom, column = self._column(indices, i, len(dims))
            raw = self._unwrapped(atom)
            # A lookup that asks for clamped indices has no wrapped indices.
            if raw is None and mode == _MODE.CLIP:
                continue
            index = atom if raw is None else raw
            if self._only_batch.intersection(variables_in([index])):
                yield _Lookup(
                    eqn=eqn,
                    index=index,
                    column=column,
                    size=table.shape[dim] + 1 - eqn.params["slice_sizes"][dim],
                    is_table=not self._after_batch.intersection(variables_in([array])),
                    fills=mode == _MODE.FILL_OR_DROP and is_inexact(array.aval),
                )

    def _column(self, indices: Any, i: int, count: int) -> tuple[Any, int | None]:
        """Returns the indices of one dim: an array, and its column or ``None``."""
        if count == 1:
            return self._origin(indices), None
        eqn = self._made(indices)
        if eqn is None or eqn.primitive.name != "concatenate":
            return indices, i
        operands: list[Any] = eqn.invars  # they are joined along the last dim
        for operand in operands:
            width = operand.aval.shape[-1]
            if i < width:
                is_alone = width == 1
                return (self._origin(operand), None) if is_alone else (operand, i)
            i -= width
        return indices, i

    def _in_one_hot(self, eqn: jex.JaxprEqn) -> Iterator[_Lookup]:
        labels, classes = map(self._origin, eqn.invars)
        maker = self._made(classes)
        if maker is None or maker.primitive.name != "iota":
            return
        size = classes.aval.shape[maker.params["dimension"]]
        if self._only_batch.intersection(variables_in([labels])):
            yield _Lookup(
                eqn=eqn,
                index=labels,
                column=None,
                size=size,
                is_table=False,
                fills=False,
            )

    def _masks(self, lookup: _Lookup) -> Iterator[_Mask]:
        """Yields the values of the batch that are combined with a lookup's result."""
        after = reached(self.program.eqns, lookup.eqn.outvars)
        shape = _squeezed(lookup.index.aval.shape)
        for eqn in self.program.eqns:
            name = eqn.primitive.name
            inputs = variables_in(eqn.invars)
            others = [x for x in inputs if x in self._only_batch and x not in after]
            if eqn is lookup.eqn or not others or after.isdisjoint(inputs):
                continue
            if name in _NESTED:
                yield _Mask(None)
            elif name == "select_n" and others[0] is eqn.invars[0]:
                cases = enumerate(eqn.invars[1:])
                used = tuple(
                    i for i, x in cases if after.intersection(variables_in([x]))
                )
                yield _Mask(self._shaped(others[0], shape), name, used)
            elif name in ("mul", "and", "dot_general"):
                yield from self._factors(others, shape, name)
            elif name == "add":
                found = (self._shaped(x, shape) for x in others)
                yield from (_Mask(x, name) for x in found if x is not None)

    def _factors(
        self, others: Sequence[Any], shape: tuple[int, ...], name: str
    ) -> Iterator[_Mask]:
        for x in others:
            if x.aval.size > 1 or not shape:  # a number scales the entire loss
                yield _Mask(self._shaped(x, shape), name)

    def _shaped(self, atom: Any, shape: tuple[int, ...]) -> Any:
        """Returns the array of a shape that reshapes turn into an atom, or ``None``."""
        while _squeezed(atom.aval.shape) != shape:
            eqn = self._made(atom)
            if eqn is None or eqn.primitive.name not in _RESHAPES:
                return None
            atom = eqn.invars[0]
            if isinstance(atom, jex.Literal):
                return None
        return atom

    @cached_property
    def _read(self) -> Any:
        """The compiled function that counts wrong values of each lookup."""
        index = [x.index for x in self.found]

        @jax.jit
        def read(batch: Any) -> list[list[jax.Array]]:
            found = self.program.evaluate(index, bind(self._of_batch, batch))
            flat = [x.values(y) for x, y in zip(self.found, found, strict=True)]
            return [
                [y.min(), y.max(), x.gives_nan(y).any(), x.is_silent(y).any()]
                for x, y in zip(self.found, flat, strict=True)
            ]

        return read

    def wrong(self, batch: Any) -> Iterator[tuple[LabelRange, bool]]:
        """Yields the range of each index with wrong values that count in the loss.

        The bool is True if the lookup gives NaN. All processes must call this, while no
        other program runs.
        """
        if not self.found:
            return
        seen = set()
        facts = jax.device_get(self._read(batch))
        for lookup, (low, high, is_nan, is_silent) in zip(
            self.found, facts, strict=True
        ):
            key = lookup.index, lookup.size
            name = name_in_batch(self.program, lookup.index)
            if key in seen or not (is_nan or is_silent):
                continue
            if is_nan or self._counts(lookup, batch):
                seen.add(key)
                given = int(low), int(high), lookup.size, name, lookup.is_table
                yield LabelRange(*given), bool(is_nan)

    def _counts(self, lookup: _Lookup, batch: Any) -> bool:
        """Returns True if the masks leave a silent value of a lookup in the loss."""
        masks = [*self._masks(lookup)]
        known = [mask for mask in masks if mask.var is not None]
        has_unknown = len(known) < len(masks)
        if has_unknown and not lookup.is_table:
            return False

        @jax.jit
        def count(batch: Any) -> jax.Array:
            wanted = lookup.index, [mask.var for mask in known]
            index, values = self.program.evaluate(wanted, bind(self._of_batch, batch))
            index = lookup.values(index)
            wrong = lookup.is_silent(index)
            if has_unknown:  # such as a mask of attention, which hides padding
                wrong &= index >= 0
            for mask, value in zip(known, values, strict=True):
                wrong &= ~mask.leaves_out(value)
            return wrong.any()

        return bool(count(batch))


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def warn_of_labels(lookups: Lookups, batch: Any) -> None:
    """Warns of labels and tokens out of range that leave the loss finite."""
    wrong: list[tuple[LabelRange, bool]] = []
    with contextlib.suppress(Exception):  # the search must not end a run
        wrong = [*lookups.wrong(batch)]
    for found, gives_nan in wrong:
        if gives_nan:
            continue  # the loss is NaN, and its error names the labels
        last = found.num_classes - 1
        if found.is_table:
            place = f"a table of the model with {last + 1} rows"
            fix = (
                "Use the tokenizer that belongs to the model, or make the table "
                "larger. Give padding a token of the table, and mask its loss."
            )
        else:
            place = f"{last + 1} entries, such as logits"
            fix = (
                "To leave out a label, mask its loss: jnp.where(label >= 0, loss, 0). "
                "If labels begin at 1, subtract 1."
            )
        warn_user(
            f"The first batch has {found.name} from {found.lowest} to {found.highest}, "
            f"and the loss looks it up in {place}: valid values are 0 to {last}. The "
            "loss is finite but wrong: JAX counts a negative index from the end, and "
            "takes the last entry for an index that is too large; one_hot gives zeros. "
            f"{fix}",
            ParallelWarning,
        )
