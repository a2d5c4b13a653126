"""Finds mistakes of a traced loss that leave it finite, but train something else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from nnx_parallel.programs import (
    ELEMENTWISE,
    TracedFunction,
    needed,
    reached,
    variables_in,
)
from nnx_parallel.sharding.names import path_of
from nnx_parallel.sharding.nnx_arrays import is_inexact

_FLAT = frozenset(("stop_gradient", "round", "floor", "ceil", "sign"))
"""Primitives whose derivative is 0."""


@dataclass(frozen=True, eq=False)
class LossChecks:
    """Checks of a loss; each gives the texts of its warnings.

    Attributes:
        program: The loss and its `Mean` as a function of ``(params, variables, batch,
            key)``.
        num_rows: Number of rows of the batch.
        is_shared: True if other losses train the same model, as with `Players`.
    """

    program: TracedFunction
    num_rows: int
    is_shared: bool = False

    def texts(self) -> Iterator[str]:
        """Yields the text of each mistake."""
        yield from self._without_gradient()
        yield from self._outside_data()
        yield from sorted({*self._pairs()})
        yield from self._double_softmax()
        yield from self._mean_of_mean()
        yield from sorted({*self._integer_inputs()})

    @cached_property
    def _after_params(self) -> set[jex.Var]:
        params = jax.tree.leaves(self.program.inputs[0])
        return reached(self.program.eqns, params)

    @cached_property
    def _after_batch(self) -> set[jex.Var]:
        return reached(self.program.eqns, jax.tree.leaves(self.program.inputs[2]))

    @cached_property
    def _maker(self) -> dict[jex.Var, jex.JaxprEqn]:
        return {var: eqn for eqn in self.program.eqns for var in eqn.outvars}

    def _made(self, atom: Any) -> jex.JaxprEqn | None:
        return None if isinstance(atom, jex.Literal) else self._maker.get(atom)

    def _without_gradient(self) -> Iterator[str]:
        wanted = {*variables_in([self.program.outputs[0]])}
        for eqn in reversed(self.program.eqns):
            if eqn.primitive.name not in _FLAT and not wanted.isdisjoint(eqn.outvars):
                wanted.update(v for v in variables_in(eqn.invars) if is_inexact(v.aval))
        params = jax.tree.leaves_with_path(self.program.inputs[0])
        still = [path_of(keys) for keys, var in params if var not in wanted]
        if len(still) == len(params):
            yield (
                "The loss has no gradient with respect to any trained parameter, so "
                "nothing is trained: it is a constant, or depends on the parameters "
                "only through argmax, comparisons, rounding or stop_gradient. Compute "
                "it from the outputs of the model that the loss is given, as in a "
                "cross-entropy of logits. Return an accuracy as a metric: loss, "
                "{'accuracy': accuracy}."
            )
        elif still and not self.is_shared:
            shown = ", ".join(f"`{path}`" for path in still[:4])
            yield (
                f"The loss has no gradient with respect to {len(still)} trained "
                f"parameters: {shown}. The model does not use them, or only through "
                "stop_gradient, argmax or rounding. Use them, or remove them, or leave "
                "them out of wrt=: a weight decay would still change them."
            )

    def _outside_data(self) -> Iterator[str]:
        found = {*variables_in(jax.tree.leaves(self.program.outputs))}
        key = reached(self.program.eqns, jax.tree.leaves(self.program.inputs[3]))
        if found.intersection(self._after_batch | key):
            return
        shapes = [jnp.shape(x) for x in self.program.consts.values()]
        if shape := next((x for x in shapes if x[:1] == (self.num_rows,)), None):
            yield (
                "The loss does not use the batch, but an array from outside, of shape "
                f"{shape}: every step computes with the same data. Use the second "
                "argument of the loss: loss(model, batch)."
            )

    def _pairs(self) -> Iterator[str]:
        """Finds ``(rows, 1)`` against ``(rows,)``, which gives ``(rows, rows)``."""
        count, params = self.num_rows, self._after_params
        for eqn in self.program.eqns:
            is_square = _shape(eqn.outvars[0]) == (count, count)
            if eqn.primitive.name not in ELEMENTWISE or not is_square:
                continue
            inputs = variables_in(eqn.invars)
            columns = [x for x in inputs if _shape(x) == (count, 1)]
            makers = [self._made(x) for x in inputs if _shape(x) == (1, count)]
            rows = [x for e in makers if e for x in variables_in(e.invars)]
            if count == 1 or not columns or [*map(_shape, rows)] != [(count,)]:
                continue
            pair = columns[0], rows[0]
            given = [x for x in pair if x in self._after_batch and x not in params]
            is_mixed = len(given) == len(params.intersection(pair)) == 1
            if is_mixed and self._is_column(pair[0]):
                yield self._pair_text(given[0])

    def _is_column(self, atom: Any) -> bool:
        """Tests that an array has its last dim from a product, or from the batch.

        Code that adds a dim of size 1 to an array ``(rows,)`` asks for all pairs.
        """
        eqn = self._made(atom)
        if eqn is None:
            return True
        if eqn.primitive.name in ELEMENTWISE or eqn.primitive.name in _WRAPPERS:
            inputs = variables_in(eqn.invars)
            return any(self._is_column(x) for x in inputs if len(_shape(x)) == 2)
        return eqn.primitive.name not in ("broadcast_in_dim", "reshape")

    def _pair_text(self, given: jex.Var) -> str:
        n, name = self.num_rows, name_in_batch(self.program, given)
        shapes = [f"({n}, 1)", f"({n},)"]
        own, other = shapes if len(_shape(given)) == 2 else reversed(shapes)
        fix = "{}[:, 0]" if own == shapes[0] else "{}[:, None]"
        return (
            f"The loss combines values of shape {own} from {name} with values of shape "
            f"{other} that the model computes. Broadcasting gives ({n}, {n}): each row "
            "is combined with every other row, so the result is finite but wrong. Give "
            f"both the same shape, for instance with {fix.format(name)}."
        )

    def _double_softmax(self) -> Iterator[str]:
        users: dict[Any, list[jex.JaxprEqn]] = {}
        for eqn in self.program.eqns:
            for var in variables_in(eqn.invars):
                users.setdefault(var, []).append(eqn)
        for eqn in self.program.eqns:
            top = self._made(eqn.invars[0]) if eqn.primitive.name == "div" else None
            if top is None or top.primitive.name != "exp":
                continue
            uses = {e.primitive.name: e for e in users.get(eqn.outvars[0], ())}
            shifted = uses.get("sub")
            if "reduce_max" not in uses or shifted is None:
                continue
            # The second softmax subtracts the maximum, and takes exponentials.
            after = users.get(shifted.outvars[0], ())
            if any(e.primitive.name == "exp" for e in after):
                yield (
                    "The loss applies a softmax to the results of a softmax, so its "
                    "gradients are small and it cannot reach 0. A cross-entropy takes "
                    "logits: leave out the softmax before it."
                )
                return

    def _integer_inputs(self) -> Iterator[str]:
        """Finds integers of the batch that a layer multiplies with its weights."""
        names = {
            var: f"batch{jax.tree_util.keystr(keys)}"
            for keys, var in jax.tree.leaves_with_path(self.program.inputs[2])
            if jnp.issubdtype(var.aval.dtype, jnp.integer)
        }
        params = jax.tree.leaves_with_path(self.program.inputs[0])
        paths = {var: path_of(keys) for keys, var in params}
        for eqn in self.program.eqns if names else ():
            if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
                continue
            sources = [*map(self._copied, eqn.invars)]
            found = [x for x in sources if x in names]
            weights = [x for x in sources if x in paths]
            if not found or not weights:
                continue
            dtype = found[0].aval.dtype
            text = (
                f"{names[found[0]]} is {dtype}, and the layer with the weights "
                f"`{paths[weights[0]]}` multiplies these integers as they are. "
            )
            if dtype == jnp.uint8 and found[0].aval.ndim > 2:
                text += (
                    "Pixels from 0 to 255 make most models diverge. Scale them in the "
                    "data or in the loss: x.astype(jnp.float32) / 255."
                )
            else:
                text += (
                    "If they are tokens or classes, their order has no meaning: give "
                    "the model an nnx.Embed, or use jax.nn.one_hot(x, num_classes). If "
                    "they are flags or quantities, make them floats in the data."
                )
            yield text

    def _copied(self, atom: Any) -> Any:
        """Returns the array that an atom copies, maybe in another shape or dtype."""
        while (eqn := self._made(atom)) and eqn.primitive.name in _COPIES:
            atom = eqn.invars[0]
        return None if isinstance(atom, jex.Literal) else atom

    def _constant(self, var: jex.Var) -> Any:
        value = self.program.consts.get(var)
        return value if value is not None and jnp.size(value) == 1 else None

    def _mean_of_mean(self) -> Iterator[str]:
        for term in self.program.outputs[1].terms:
            is_literal = isinstance(term.weight, jex.Literal)
            weight = term.weight.val if is_literal else self._constant(term.weight)
            eqn = self._made(term.total)
            if eqn is None or eqn.primitive.name != "div" or weight == 1:
                continue
            inner, divisor = self._made(eqn.invars[0]), getattr(eqn.invars[1], "val", 0)
            if inner is None or inner.primitive.name != "reduce_sum":
                continue
            if divisor == math.prod(_shape(inner.invars[0])) > 1:
                yield (
                    "The total of the loss's Mean is a mean already, so it is divided "
                    "by a count twice. Give the sum and its weight: Mean(losses.sum(), "
                    "losses.size), or return losses.mean()."
                )


_COPIES = (
    *("convert_element_type", "reduce_precision", "copy", "copy_p"),
    *("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim"),
    *("slice", "rev", "pad", "sharding_constraint"),
)
"""Primitives whose result has the values of their first operand."""

_WRAPPERS = ("custom_jvp_call", "custom_vjp_call")


def name_in_batch(program: TracedFunction, atom: Any) -> str:
    """Returns the name of the first array of a batch that a value depends on."""
    leaves = jax.tree.leaves_with_path(program.inputs[2])
    steps = needed(program.eqns, [atom])
    used = {atom, *(v for eqn in steps for v in variables_in(eqn.invars))}
    names = (f"batch{jax.tree_util.keystr(keys)}" for keys, x in leaves if x in used)
    return next(names, "an index")


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())
