"""The call of a `Stack` as one equation, by which a traced loss is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching

from nnx_parallel.errors import PipelineError
from nnx_parallel.layers.stack import StackCall
from nnx_parallel.sharding.arrays import is_inexact

stack_p = jex.Primitive("stack")
stack_p.multiple_results = True


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A `StackCall` whose arrays are the inputs of one equation.

    Attributes:
        call: The call; of its arrays only the shapes matter.
        params: Keys of its parameters, in the order of the equation's inputs.
        others: Keys of its other variables, likewise.
        tree: Structure of ``(x, args)``, whose arrays come last.
        statics: The leaves of ``(x, args)`` that are no arrays, by position.
        constants: Makes the leaves that come from no input of the loss, as tables and
            masks do, by position: each stage makes them for itself.
    """

    call: StackCall
    params: tuple
    others: tuple
    tree: Any
    statics: dict[int, Any]
    constants: Callable[[], dict[int, Any]] = dict

    def join(self, arrays: Sequence[Any]) -> tuple[Any, tuple]:
        """``(x, args)`` from the arrays that are neither static nor constant."""
        known = self.statics | self.constants()
        rest = iter(arrays)
        count = len(arrays) + len(known)
        leaves = [known[i] if i in known else next(rest) for i in range(count)]
        return jax.tree.unflatten(self.tree, leaves)

    @property
    def num_x(self) -> int:
        """Number of arrays in ``x``; those of the arguments follow."""
        return len(jax.tree.leaves(self.call.x))


def record(call: StackCall) -> tuple[Any, dict, None]:
    """A runner that leaves the layers to whoever cuts the trace."""
    call = dataclasses.replace(call, x=jax.tree.map(jnp.asarray, call.x))
    params, others = tuple(sorted(call.params)), tuple(sorted(call.others))
    leaves, tree = jax.tree.flatten((call.x, call.args))
    statics = {i: x for i, x in enumerate(leaves) if not isinstance(x, jax.Array)}
    recorded = RecordedCall(call, params, others, tree, statics)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    _check_arrays(jax.tree.leaves(call.x), arrays)
    outs = stack_p.bind(
        *(call.params[k] for k in params),
        *(call.others[k] for k in others),
        *arrays,
        recorded=recorded,
    )
    num_x = recorded.num_x
    x = jax.tree.unflatten(jax.tree.structure(call.x), outs[:num_x])
    return x, dict(zip(others, outs[num_x:], strict=True)), None


def _check_arrays(x: list, arrays: list) -> None:
    if not all(map(is_inexact, x)):
        raise PipelineError(
            f"The Stack's input has dtypes {[str(leaf.dtype) for leaf in x]}. Under a "
            "Pipeline it must be floating-point, for its gradient travels back: pass "
            "indices and masks as further arguments of the blocks."
        )
    if any(jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in arrays):
        raise PipelineError(
            "A random key is passed to the blocks of the Stack. Under a Pipeline pass "
            "jax.random.key_data(key), or let the blocks hold their own nnx.Rngs."
        )


@stack_p.def_abstract_eval
def _shapes(*avals: Any, recorded: RecordedCall) -> list:
    """``x`` and the other variables come out as they went in; `Stage` checks it."""
    first_other = len(recorded.params)
    first_x = first_other + len(recorded.others)
    return [*avals[first_x:][: recorded.num_x], *avals[first_other:first_x]]


def _refuse(transform: str) -> NoReturn:
    raise PipelineError(
        f"The Stack is called under {transform}. A pipeline cuts the loss at the "
        "Stack's call, which must stand in the loss or the model itself: not inside "
        "jax.vmap, jax.grad, jax.checkpoint, jax.lax.scan or jax.lax.cond. Move the "
        "transform into the block or around another part of the loss."
    )


def _refuse_batching(*_: Any, **__: Any) -> NoReturn:
    _refuse("jax.vmap")


def _refuse_jvp(*_: Any, **__: Any) -> NoReturn:
    _refuse("jax.grad or another derivative")


batching.primitive_batchers[stack_p] = _refuse_batching
ad.primitive_jvps[stack_p] = _refuse_jvp
