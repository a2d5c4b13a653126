"""Traces one layer together with its VJP, and chooses the residuals to keep.

The backward pass recomputes values that depend only on weights or on arguments that all
layers get. A backward pass can also be split into a part for the gradients of inputs
and a part for the gradients of weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

from nnx_parallel.programs import (
    bind,
    derived,
    inputs_of,
    is_call,
    needed,
    trace,
    variables_in,
    warn_of_effects,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layers:
    """The arrays of some layers, by key; each has a leading ``layers`` dim."""

    trained: dict  # parameters
    fixed: dict  # frozen parameters and variables that a forward pass does not change
    state: dict  # variables that a forward pass changes


class LayerWithResiduals:
    """One layer, traced together with its VJP, and the residuals to keep.

    The backward pass recomputes a value if it depends only on the layer's weights
    (casts, gathered shards), or on arguments that all layers get (masks). Otherwise
    a value of the first kind would be kept once per microbatch, and a value of the
    second kind once per layer.

    Args:
        block_vjp: A function that runs one layer: ``(layer, x, args) -> (x, state,
            vjp)``.
        layer: The arrays of one layer, or their shapes.
        x: The layer's input.
        args: The layer's arguments.
    """

    def __init__(
        self,
        block_vjp: Callable[[Layers, list, list], tuple[list, dict, Callable]],
        layer: Layers,
        x: list,
        args: list,
    ) -> None:
        # Checkpoints are not inlined, because their policies choose the residuals. The
        # leaves of the VJP, the third output, are the residuals.
        self._traced = traced = trace(
            block_vjp, layer, x, args, inlined=lambda eqn: eqn.primitive.name == "jit"
        )
        warn_of_effects(traced)
        layer, _, args = traced.inputs
        # A residual may be an input, but `jax.checkpoint` passes it through
        # `reduce_precision` (https://github.com/jax-ml/jax/pull/22244), so it is not
        # the same variable. So the code finds the variables from which each residual is
        # derived.
        free: set[jex.Var] = set()
        for given in ((layer.trained, layer.fixed), args):
            free |= derived(traced.eqns, [*traced.consts, *jax.tree.leaves(given)])
        residuals = dict.fromkeys(variables_in(jax.tree.leaves(traced.outputs[2])))
        self.saved: list[jex.Var] = [v for v in residuals if v not in free]

    def forward(self, layer: Layers, x: list, args: list) -> tuple[list, dict, list]:
        """Computes the output, the new state, and the residuals to keep."""
        wanted = (*self._traced.outputs[:2], self.saved)
        known = bind(self._traced.inputs, (layer, x, args))
        return self._traced.evaluate(wanted, known)

    def vjp(self, trained: dict, fixed: dict, args: list, saved: list) -> Callable:
        """Makes the VJP from the residuals, weights and arguments."""
        layer, _, of_args = self._traced.inputs
        at_hand = (layer.trained, layer.fixed, of_args, self.saved)
        known = bind(at_hand, (trained, fixed, args, saved))
        return self._traced.evaluate(self._traced.outputs[2], known)


class SplitBackward:
    """A backward pass that is split after the gradients of the inputs [1].

    The first part has the equations that the gradients of the inputs need, and the
    second part has all other equations. So each equation runs only once.
    Differentiating once with respect to the inputs and once with respect to the weights
    would repeat the products that both gradients need. It would take 6.2 times as long
    as a forward pass, instead of 3.0 times.

    Args:
        backward: The function ``(weights, kept) -> (input gradients, weight
            gradients)``.
        weights: Arrays, or their shapes, that are also available when the second part
            runs.
        kept: All other arrays, or their shapes: the residuals and the output's
            gradient.

    References:
        [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 2,
        https://arxiv.org/abs/2401.10241
    """

    def __init__(
        self, backward: Callable[[Any, Any], tuple[Any, Any]], weights: Any, kept: Any
    ) -> None:
        self._traced = traced = trace(backward, weights, kept, inlined=is_call)
        inputs, grads = map(jax.tree.leaves, traced.outputs)
        # Values that depend only on the weights are not kept, but recomputed.
        free = {*traced.consts, *jax.tree.leaves(traced.inputs[0])}
        first = needed(traced.eqns, inputs)
        made = {v for eqn in first for v in eqn.outvars} - derived(traced.eqns, free)
        second = needed(traced.eqns, grads, given=made)
        self._pending = [v for v in inputs_of(second, grads) if v not in free]

    def run_input(self, weights: Any, kept: Any) -> tuple[Any, list]:
        """Computes the input gradients, and the values that the second part needs."""
        wanted = (self._traced.outputs[0], self._pending)
        return self._traced.evaluate(wanted, bind(self._traced.inputs, (weights, kept)))

    def run_weight(self, weights: Any, pending: list) -> Any:
        """Computes the weight gradients."""
        known = bind((self._traced.inputs[0], self._pending), (weights, pending))
        return self._traced.evaluate(self._traced.outputs[1], known)
