"""A layer traced with its residuals, and a backward pass in two parts.

What comes from the layer's own weights alone (casts, gathered shards), or from the
arguments that all layers get (masks), is computed again in the backward pass: it would
otherwise be kept once per microbatch, or once per layer.

A backward pass may be split into input gradients and weight gradients [1]. Each
equation of the joint one is run once: those that the input gradients need in the first
part, the rest in the second.

References:
    [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 2,
    https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

from nnx_parallel.layers.jaxprs import (
    TracedFunction,
    bind,
    derived,
    inputs_of,
    is_call,
    is_jit,
    needed,
    trace,
    variables_in,
    warn_of_effects,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layers:
    """The arrays of some layers, each dict by key, with a leading ``layers`` dim.

    Attributes:
        trained: Trained parameters.
        fixed: Frozen parameters and variables that a forward pass leaves as they are.
        state: Variables that it changes.
    """

    trained: dict
    fixed: dict
    state: dict


@dataclass(frozen=True, eq=False)
class LayerWithResiduals:
    """One layer, traced together with its VJP, made by `trace_residuals`.

    Attributes:
        traced: ``(trained, fixed, args, state, x) -> (x, state, vjp)``, where the
            leaves of ``vjp`` are the residuals.
        saved: The residuals to keep from the forward to the backward pass.
    """

    traced: TracedFunction
    saved: list[jex.Var]

    def forward(self, layer: Layers, x: list, args: list) -> tuple[list, dict, list]:
        """The output, the state after it, and the residuals to keep."""
        arrays = (layer.trained, layer.fixed, args, layer.state, x)
        out, state, _ = self.traced.outputs
        known = bind(self.traced.inputs, arrays)
        return self.traced.evaluate((out, state, self.saved), known)

    def vjp(self, trained: dict, fixed: dict, args: list, saved: list) -> Callable:
        """The VJP, from the kept residuals and what is still at hand."""
        at_hand = (*self.traced.inputs[:3], self.saved)
        known = bind(at_hand, (trained, fixed, args, saved))
        return self.traced.evaluate(self.traced.outputs[2], known)


def trace_residuals(
    block_vjp: Callable[[Layers, list, list], tuple[list, dict, Callable]],
    layer: Layers,
    x: list,
    args: list,
) -> LayerWithResiduals:
    """Traces a layer with its VJP and finds the residuals to keep.

    Args:
        block_vjp: ``(layer, x, args) -> (x, state, vjp)``.
        layer: The arrays of one layer, or their shapes.
        x: Its input.
        args: Its arguments.
    """

    def forward(trained: dict, fixed: dict, args: list, state: dict, x: list) -> tuple:
        return block_vjp(Layers(trained, fixed, state), x, args)

    parts = (layer.trained, layer.fixed, args, layer.state, x)
    # Checkpoints are not inlined: their policies say what is a residual.
    traced = trace(forward, *parts, inlined=is_jit)
    warn_of_effects(traced)
    # `jax.checkpoint` passes a residual that is an input through `reduce_precision`,
    # https://github.com/jax-ml/jax/pull/22244, so that it cannot be recognised by
    # identity: ask what a residual is derived from.
    weights = jax.tree.leaves(traced.inputs[:2])
    free = derived(traced.eqns, [*traced.consts, *weights])
    free |= derived(traced.eqns, [*traced.consts, *jax.tree.leaves(traced.inputs[2])])
    residuals = variables_in(jax.tree.leaves(traced.outputs[2]))
    return LayerWithResiduals(
        traced, [v for v in dict.fromkeys(residuals) if v not in free]
    )


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """``backward(weights, kept) -> (input gradients, weight gradients)``, in two parts.

    Attributes:
        traced: The joint backward pass.
        pending: Values that the second part needs besides the weights.
    """

    traced: TracedFunction
    pending: list[jex.Var]

    def run_input(self, weights: Any, kept: Any) -> tuple[Any, list]:
        """The input gradients, and the values pending for the second part."""
        known = bind(self.traced.inputs, (weights, kept))
        return self.traced.evaluate((self.traced.outputs[0], self.pending), known)

    def run_weight(self, weights: Any, pending: list) -> Any:
        """The weight gradients."""
        known = bind((self.traced.inputs[0], self.pending), (weights, pending))
        return self.traced.evaluate(self.traced.outputs[1], known)


def split_backward(
    backward: Callable[[Any, Any], tuple[Any, Any]], weights: Any, kept: Any
) -> SplitBackward:
    """Cuts a joint backward pass where the input gradient is complete.

    Differentiating twice, once for the inputs and once for the weights, would compute
    the products that both need twice: 6.2 times a forward pass instead of 3.0.

    Args:
        backward: ``(weights, kept) -> (input gradients, weight gradients)``.
        weights: What is at hand again when the second part runs, or its shapes.
        kept: Everything else: residuals and the output's gradient.
    """
    traced = trace(backward, weights, kept, inlined=is_call)
    inputs, grads = map(jax.tree.leaves, traced.outputs)
    # What comes from the weights alone is computed again rather than kept.
    free = {*traced.consts, *jax.tree.leaves(traced.inputs[0])}
    first = needed(traced.eqns, inputs)
    made = {v for eqn in first for v in eqn.outvars} - derived(traced.eqns, free)
    second = needed(traced.eqns, grads, given=made)
    pending = [v for v in inputs_of(second, grads) if v not in free]
    return SplitBackward(traced, pending)
