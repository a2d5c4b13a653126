"""A backward pass split into input gradients and weight gradients [1].

Each equation of the joint backward pass is run once: those that the input gradient
needs in the first part, the rest in the second.

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

from nnx_parallel.jaxprs import (
    derived,
    inline,
    inputs_of,
    needed,
    run,
    trace,
)


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """``backward(weights, kept) -> (input gradients, weight gradients)``, in two parts.

    Made by `split_backward` from shapes; both parts are pure functions of arrays.
    """

    jaxpr: jex.Jaxpr
    consts: list
    num_weights: int
    trees: tuple[Any, Any]
    first: list[jex.JaxprEqn]
    second: list[jex.JaxprEqn]
    pending: list[jex.Var]

    def run_input(self, weights: Any, kept: Any) -> tuple[Any, list]:
        """The input gradients, and what the second part needs beside the weights."""
        env = self._env(jax.tree.leaves((weights, kept)))
        outputs = self.jaxpr.outvars[: self.trees[0].num_leaves]
        found = run(self.first, [*outputs, *self.pending], env)
        grads = jax.tree.unflatten(self.trees[0], found[: len(outputs)])
        return grads, found[len(outputs) :]

    def run_weight(self, weights: Any, pending: list) -> Any:
        """The weight gradients."""
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        invars = self.jaxpr.invars[: self.num_weights]
        env |= dict(zip(invars, jax.tree.leaves(weights), strict=True))
        env |= dict(zip(self.pending, pending, strict=True))
        outputs = self.jaxpr.outvars[self.trees[0].num_leaves :]
        return jax.tree.unflatten(self.trees[1], run(self.second, outputs, env))

    def _env(self, leaves: list) -> dict:
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        return env | dict(zip(self.jaxpr.invars, leaves, strict=True))


def split_backward(
    backward: Callable[[Any, Any], tuple[Any, Any]], weights: Any, kept: Any
) -> SplitBackward:
    """Cuts a joint backward pass where the input gradient is complete.

    Args:
        backward: ``(weights, kept) -> (input gradients, weight gradients)``.
        weights: What is at hand again when the second part runs.
        kept: Everything else: residuals and the output's gradient.
    """
    jaxpr, consts, (inputs, grads) = trace(backward, weights, kept)
    jaxpr = inline(jaxpr)
    trees = jax.tree.structure(inputs), jax.tree.structure(grads)
    num_weights = len(jax.tree.leaves(weights))
    outputs, weight_outputs = (
        jaxpr.outvars[: trees[0].num_leaves],
        jaxpr.outvars[trees[0].num_leaves :],
    )
    first = needed(jaxpr.eqns, outputs)
    # What comes from the weights alone is computed again rather than kept.
    free = {*jaxpr.constvars, *jaxpr.invars[:num_weights]}
    made = {v for eqn in first for v in eqn.outvars} - derived(jaxpr.eqns, free)
    second = needed(jaxpr.eqns, weight_outputs, given=made)
    pending = [v for v in inputs_of(second, weight_outputs) if v not in free]
    return SplitBackward(jaxpr, consts, num_weights, trees, first, second, pending)
