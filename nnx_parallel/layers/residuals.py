"""A layer's forward pass that hands out what its backward pass needs.

What comes from the layer's own weights alone (casts, gathered shards), or from the
arguments that all layers get (masks), is computed again in the backward pass: it would
else be kept once per microbatch, or once per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

from nnx_parallel.layers.jaxprs import (
    derived,
    inline,
    is_jit,
    needed,
    run,
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
class KeepingForward:
    """A layer's forward pass as a jaxpr whose last outputs are its residuals.

    Made by `keeping_forward`.

    Attributes:
        saved: The residuals to keep.
    """

    jaxpr: jex.Jaxpr
    consts: list
    vjp_tree: Any
    num_x: int
    state_keys: list
    residuals: list
    saved: list[jex.Var]

    def run(self, layer: Layers, x: list, args: list) -> tuple[list, dict, list]:
        """The output, the state after it, and what is to be kept."""
        outputs = self.jaxpr.outvars[: self.num_x + len(self.state_keys)]
        env = self._env(layer, x, args)
        wanted = [*outputs, *self.saved]
        found = run(needed(self.jaxpr.eqns, wanted, env), wanted, env)
        count = len(outputs)
        state = dict(zip(self.state_keys, found[self.num_x : count], strict=True))
        return found[: self.num_x], state, found[count:]

    def vjp(self, trained: dict, fixed: dict, args: list, saved: list) -> Callable:
        """The VJP, from what was kept and what is still at hand."""
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        known = jax.tree.leaves((trained, fixed, args))
        env |= dict(zip(self._known(len(known)), known, strict=True))
        env |= dict(zip(self.saved, saved, strict=True))
        leaves = run(needed(self.jaxpr.eqns, self.residuals, env), self.residuals, env)
        return jax.tree.unflatten(self.vjp_tree, leaves)

    def _known(self, count: int) -> list[jex.Var]:
        """The first inputs: trained, fixed, arguments; then state and x."""
        return self.jaxpr.invars[:count]

    def _env(self, layer: Layers, x: list, args: list) -> dict:
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        leaves = jax.tree.leaves((layer.trained, layer.fixed, args, layer.state, x))
        return env | dict(zip(self.jaxpr.invars, leaves, strict=True))


def keeping_forward(
    block_vjp: Callable[[Layers, list, list], tuple[list, dict, Callable]],
    layer: Layers,
    x: list,
    args: list,
) -> KeepingForward:
    """Traces a layer's forward pass and finds what is to be kept.

    Args:
        block_vjp: ``(layer, x, args) -> (x, state, vjp)``.
        layer: The arrays of one layer.
        x: Its input.
        args: Its arguments.
    """
    trees = []

    def forward(trained: dict, fixed: dict, args: list, state: dict, x: list) -> Any:
        x, state, vjp = block_vjp(Layers(trained, fixed, state), x, args)
        leaves, tree = jax.tree.flatten(vjp)
        trees.append(tree)
        return x, state, leaves

    parts = (layer.trained, layer.fixed, args, layer.state, x)
    jaxpr, consts, (out, state, _) = trace(forward, *parts)
    warn_of_effects(jaxpr)
    jaxpr = inline(jaxpr, is_jit)
    residuals = jaxpr.outvars[len(out) + len(state) :]
    weights = jax.tree.leaves((layer.trained, layer.fixed))
    free = derived(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars[: len(weights)]])
    shared = jaxpr.invars[len(weights) :][: len(args)]
    free |= derived(jaxpr.eqns, [*jaxpr.constvars, *shared])
    saved = [v for v in dict.fromkeys(variables_in(residuals)) if v not in free]
    return KeepingForward(
        jaxpr, consts, trees[-1], len(out), sorted(state), residuals, saved
    )
