"""The call of a `Stack` as one equation, at which a traced loss is cut.

A primitive of its own has no rule of lowering, and none of transformation: the cut
removes it before anything is compiled, and a call under a transform is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching

from nnx_parallel.errors import PipelineError
from nnx_parallel.layers.scan import StackCall
from nnx_parallel.sharding.names import is_inexact

stack_p = jex.Primitive("stack")
stack_p.multiple_results = True  # x, then the variables of all layers


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A `StackCall` whose arrays are the inputs of one equation.

    The inputs are its parameters, its other variables, and the arrays of ``(x, args)``,
    each in the order of `jax.tree.leaves`.

    Attributes:
        call: The call; of its arrays only the shapes matter.
        tree: Structure of ``(x, args)``.
        statics: The leaves of ``(x, args)`` that are no arrays, by position.
    """

    call: StackCall
    tree: Any
    statics: dict[int, Any]

    @property
    def num_x(self) -> int:
        """Number of arrays in ``x``; those of the arguments follow."""
        return len(jax.tree.leaves(self.call.x))

    def run_layer(
        self, constants: Callable[[], dict[int, Any]], held: dict, arrays: list
    ) -> tuple[list, dict]:
        """Runs one layer.

        Args:
            constants: Makes the leaves of ``(x, args)`` that enter from nowhere.
            held: The layer's arrays by key.
            arrays: The other leaves of ``(x, args)`` that are no statics.

        Returns:
            The arrays of ``x`` and the layer's variables by key.
        """
        # Made inside the stage: values of another trace could not be used there.
        known = self.statics | constants()
        rest = iter(arrays)
        leaves = [
            known[i] if i in known else next(rest) for i in range(self.tree.num_leaves)
        ]
        x, args = jax.tree.unflatten(self.tree, leaves)
        params, others = (
            {k: held[k] for k in group}
            for group in (self.call.params, self.call.others)
        )
        x, others, _ = self.call.block(params, others, x, args, None)
        found, given = jax.tree.structure(x), jax.tree.structure(self.call.x)
        if found != given:
            raise PipelineError(
                f"A block of the Stack maps {given} to {found}. Its output must be "
                "like its input: the next block takes it."
            )
        return jax.tree.leaves(x), others


def record(call: StackCall) -> tuple[Any, dict, None]:
    """A runner that leaves one equation in place of the layers."""
    call = dataclasses.replace(call, x=jax.tree.map(jnp.asarray, call.x))
    leaves, tree = jax.tree.flatten((call.x, call.args))
    statics = {i: x for i, x in enumerate(leaves) if not isinstance(x, jax.Array)}
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    _check_arrays(jax.tree.leaves(call.x), arrays)
    # `vmap` and `grad` ask a primitive for its rule when they meet it; what only holds
    # the equation (`scan`, `cond`) is found in the jaxpr, by `cut`.
    outs = stack_p.bind(
        *jax.tree.leaves((call.params, call.others)),
        *arrays,
        recorded=RecordedCall(call, tree, statics),
    )
    return *jax.tree.unflatten(jax.tree.structure((call.x, call.others)), outs), None


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


# The layers are not traced here: one that is wrong is found where a stage traces it.
@stack_p.def_abstract_eval
def _shapes(*avals: Any, recorded: RecordedCall) -> list:
    """``x`` and the other variables come out as they went in; `Stage` checks it."""
    first_other = len(recorded.call.params)
    first_x = first_other + len(recorded.call.others)
    return [*avals[first_x:][: recorded.num_x], *avals[first_other:first_x]]


def _refuse(transform: str, *_: Any, **__: Any) -> NoReturn:
    raise PipelineError(
        f"The Stack is called under {transform}. A pipeline cuts the loss at the "
        "Stack's call, which must be in the loss or the model itself: not inside "
        "jax.vmap, jax.grad, jax.checkpoint, jax.lax.scan or jax.lax.cond. Move the "
        "transform into the block or around another part of the loss."
    )


batching.primitive_batchers[stack_p] = partial(_refuse, "jax.vmap")
ad.primitive_jvps[stack_p] = partial(_refuse, "jax.grad or another derivative")
