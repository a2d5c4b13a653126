"""One layer traced together with its VJP, and the residuals that it keeps.

Values that come only from weights or from arguments of all layers are computed again in
the backward pass, which can also be cut into a part for inputs and a part for weights.
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
    """The arrays of some layers, each dict by key, with a leading ``layers`` dim."""

    trained: dict  # parameters
    fixed: dict  # frozen parameters and variables that a forward pass does not change
    state: dict  # variables that a forward pass changes


class LayerWithResiduals:
    """One layer, traced together with its VJP, and the residuals to keep.

    Values that come only from the layer's weights (casts, gathered shards), or from the
    arguments that all layers get (masks), are computed again in the backward pass:
    otherwise they would be kept once per microbatch, or once per layer.

    Args:
        block_vjp: ``(layer, x, args) -> (x, state, vjp)``.
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
        # `jax.checkpoint` passes a residual that is an input through
        # `reduce_precision`, https://github.com/jax-ml/jax/pull/22244, so that it
        # cannot be recognised by identity: instead, find the variables from which it
        # is derived.
        free: set[jex.Var] = set()
        for given in ((layer.trained, layer.fixed), args):
            free |= derived(traced.eqns, [*traced.consts, *jax.tree.leaves(given)])
        residuals = dict.fromkeys(variables_in(jax.tree.leaves(traced.outputs[2])))
        self.saved: list[jex.Var] = [v for v in residuals if v not in free]

    def forward(self, layer: Layers, x: list, args: list) -> tuple[list, dict, list]:
        """The output, the new state, and the residuals to keep."""
        wanted = (*self._traced.outputs[:2], self.saved)
        known = bind(self._traced.inputs, (layer, x, args))
        return self._traced.evaluate(wanted, known)

    def vjp(self, trained: dict, fixed: dict, args: list, saved: list) -> Callable:
        """The VJP, from the kept residuals and the arrays that are still available."""
        layer, _, of_args = self._traced.inputs
        at_hand = (layer.trained, layer.fixed, of_args, self.saved)
        known = bind(at_hand, (trained, fixed, args, saved))
        return self._traced.evaluate(self._traced.outputs[2], known)


class SplitBackward:
    """A joint backward pass cut where the input gradient is complete [1].

    Each equation runs once: the first part has the equations that the input gradients
    need, the second part has the rest. Differentiating twice, for the inputs and for
    the weights, would compute the products that both need twice: 6.2 times a forward
    pass instead of 3.0.

    Args:
        backward: ``(weights, kept) -> (input gradients, weight gradients)``.
        weights: The arrays that are available again when the second part runs, or their
            shapes.
        kept: All other arrays: residuals and the output's gradient.

    References:
        [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 2,
        https://arxiv.org/abs/2401.10241
    """

    def __init__(
        self, backward: Callable[[Any, Any], tuple[Any, Any]], weights: Any, kept: Any
    ) -> None:
        self._traced = traced = trace(backward, weights, kept, inlined=is_call)
        inputs, grads = map(jax.tree.leaves, traced.outputs)
        # Values that come only from the weights are computed again rather than kept.
        free = {*traced.consts, *jax.tree.leaves(traced.inputs[0])}
        first = needed(traced.eqns, inputs)
        made = {v for eqn in first for v in eqn.outvars} - derived(traced.eqns, free)
        second = needed(traced.eqns, grads, given=made)
        self._pending = [v for v in inputs_of(second, grads) if v not in free]

    def run_input(self, weights: Any, kept: Any) -> tuple[Any, list]:
        """The input gradients, and the values that the second part needs."""
        wanted = (self._traced.outputs[0], self._pending)
        return self._traced.evaluate(wanted, bind(self._traced.inputs, (weights, kept)))

    def run_weight(self, weights: Any, pending: list) -> Any:
        """The weight gradients."""
        known = bind((self._traced.inputs[0], self._pending), (weights, pending))
        return self._traced.evaluate(self._traced.outputs[1], known)
