"""The layers of one stage: forward, backward, and the backward pass in two parts.

A backward pass split into input gradients and weight gradients [1].

Each equation of the joint backward pass is run once: those that the input gradient
needs in the first part, the rest in the second.

References:
    [1] Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 2,
    https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from nnx_parallel.errors import PipelineError
from nnx_parallel.layers.jaxprs import derived, inline, inputs_of, needed, run, trace
from nnx_parallel.layers.remat import apply_remat
from nnx_parallel.layers.residuals import KeepingForward, Layers, keeping_forward
from nnx_parallel.pipeline.cut import RecordedCall
from nnx_parallel.precision import cast_floating
from nnx_parallel.sharding.names import dotted

Stash = Literal["policy", "inputs"]


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


# ``(totals of all layers, gradients of one layer, its index) -> totals``. A layer's
# gradients are added as soon as they are there: the stage's would take as much again.
Add = Callable[[dict, dict, jax.Array], dict]


@dataclass(eq=False)
class Stage:
    """What runs the layers of one stage.

    Values that travel from stage to stage are lists of arrays: the layers' input and
    the arguments that every layer gets.

    Attributes:
        recorded: The stack's call.
        differentiated: Of each array that travels, whether it has a gradient.
        compute: dtype of the computation, or ``None``: as stored.
        stash: What is kept between forward and backward: what the remat ``policy``
            says, or the stage's ``inputs`` alone, from which the backward pass runs
            the stage again.
    """

    recorded: RecordedCall
    differentiated: tuple[bool, ...]
    compute: Any
    stash: Stash
    _keeping: KeepingForward | None = field(default=None, init=False)
    _split: SplitBackward | None = field(default=None, init=False)

    def with_gradients(self, travel: Sequence[Any]) -> list:
        """Of what travels, the arrays whose gradients travel back."""
        return list(compress(travel, self.differentiated))

    def forward(self, layers: Layers, travel: Sequence[Any]) -> tuple[list, dict, Any]:
        """Runs the layers.

        Returns:
            What travels on, the layers' state after it, and what is to be kept.
        """
        if self.stash == "inputs":
            travel_out, state = self._run(layers, travel)
            return travel_out, state, {"travel": list(travel), "state": layers.state}
        return self._forward_keeping(layers, travel)

    def backward(
        self, layers: Layers, kept: Any, grads: Sequence[Any], totals: dict, add: Add
    ) -> tuple[dict, list]:
        """The totals with the trained parameters' gradients, and those to send back."""

        def collect(totals: dict, new: dict, layer: jax.Array) -> tuple[dict, None]:
            return add(totals, new, layer), None

        given = (layers, kept, grads)
        grads, totals, _ = self._backward(*given, self._layer_backward, totals, collect)
        return totals, grads

    def backward_input(
        self, layers: Layers, kept: Any, grads: Sequence[Any]
    ) -> tuple[list, Any]:
        """Gradients of what travelled in, and what `backward_weight` needs."""

        def layer_backward(trained: dict, given: Any) -> tuple[Any, list]:
            self._split = split_backward(self._layer_backward, trained, given)
            return self._split.run_input(trained, given)

        def collect(_: None, pending: list, layer: jax.Array) -> tuple[None, list]:
            return None, pending

        grads, _, pending = self._backward(
            layers, kept, grads, layer_backward, None, collect
        )
        return grads, pending

    def backward_weight(
        self, layers: Layers, pending: Any, totals: dict, add: Add
    ) -> dict:
        """The totals with the gradients from what `backward_input` left."""
        assert self._split is not None
        split = self._split

        def step(totals: dict, xs: Any) -> tuple[dict, None]:
            layer, pending, index = self._cast(xs[0]), xs[1], xs[2]
            return add(totals, split.run_weight(layer.trained, pending), index), None

        xs = _numbered(_stateless(layers), pending)
        return jax.lax.scan(step, totals, xs)[0]

    def run(self, layers: Layers, travel: Sequence[Any]) -> list:
        """Runs the layers for their output alone."""
        return self._run(layers, travel)[0]

    def trace_layer(
        self, layers: Layers, travel: Sequence[Any]
    ) -> tuple[jex.Jaxpr, frozenset]:
        """One layer's jaxpr, and the keys of the variables that it changes.

        Args:
            layers: Shapes of all layers, every variable among the state.
            travel: Shapes of what travels.
        """
        layers = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layers
        )

        def layer(layers: Layers, travel: list) -> tuple[list, dict]:
            layers = self._cast(layers)
            active, others = self._partition(travel)
            rest = (layers.fixed, layers.state, others)
            return self._block(layers.trained, active, rest)

        jaxpr, _, (out, state) = trace(layer, layers, list(travel))
        before = len(layers.trained) + len(layers.fixed)
        given = jaxpr.invars[before : before + len(state)]
        after = jaxpr.outvars[len(out) :]
        keys = [
            key
            for key, a, b in zip(sorted(state), given, after, strict=True)
            if a is not b
        ]
        return jaxpr, frozenset(keys)

    # One layer

    def _partition(self, travel: Sequence[Any]) -> tuple[list, list]:
        """Arrays with gradients and those without, ``None`` in place of the others."""
        marked = list(zip(travel, self.differentiated, strict=True))
        active = [x if is_active else None for x, is_active in marked]
        others = [None if is_active else x for x, is_active in marked]
        return active, others

    def _block(self, trained: dict, active: Any, rest: Any) -> tuple[list, dict]:
        """One layer: its output's arrays and its state."""
        fixed, state, others = rest
        recorded, call = self.recorded, self.recorded.call
        held = trained | fixed | state
        params = {k: held[k] for k in recorded.params}
        variables = {k: held[k] for k in recorded.others}
        x, args = recorded.join(_merge(active, others))
        x, after, _ = call.block(params, variables, x, args, None)
        self._check(jax.tree.leaves(x), _merge(active, others))
        return jax.tree.leaves(x), {k: _like(after[k], state[k], k) for k in state}

    @property
    def _rematted(self) -> Callable[[dict, Any, Any], tuple[list, dict]]:
        """One layer that keeps what the remat policy says when it is differentiated."""
        remat = self.recorded.call.remat
        return apply_remat(self._block, remat, gathers=False, prevent_cse=False)

    def _check(self, out: list, travel: list) -> None:
        given = [(x.shape, x.dtype) for x in travel[: len(out)]]
        found = [(x.shape, x.dtype) for x in out]
        if found != given:
            raise PipelineError(
                f"A block of the Stack maps arrays of {given} to {found}. Its output "
                "must be like its input: the next block takes it."
            )

    def _layer_backward(self, trained: dict, given: Any) -> tuple[Any, dict]:
        fixed, saved, args, grads_x = given
        assert self._keeping is not None
        vjp = self._keeping.vjp(trained, fixed, args, saved)
        grads, entering = vjp(grads_x)
        num_x = self.recorded.num_x
        found = [x for x in entering if x is not None]
        return (found[:num_x], found[num_x:]), grads

    def _cast(self, layers: Layers) -> Layers:
        """Parameters in the dtype of the computation; gradients follow it."""
        computed = {*self.recorded.params, *layers.trained}

        def cast(arrays: dict) -> dict:
            return {
                key: cast_floating(x, self.compute) if key in computed else x
                for key, x in arrays.items()
            }

        return Layers(cast(layers.trained), cast(layers.fixed), layers.state)

    # Its layers

    def _run(self, layers: Layers, travel: Sequence[Any]) -> tuple[list, dict]:
        num_x = self.recorded.num_x
        args = list(travel[num_x:])

        def step(x: list, layer: Layers) -> tuple[list, dict]:
            layer = self._cast(layer)
            active, others = self._partition([*x, *args])
            rest = (layer.fixed, layer.state, others)
            return self._rematted(layer.trained, active, rest)

        x, state = jax.lax.scan(step, list(travel[:num_x]), layers)
        return [*x, *args], state

    def _forward_keeping(
        self, layers: Layers, travel: Sequence[Any]
    ) -> tuple[list, dict, Any]:
        num_x = self.recorded.num_x
        args = list(travel[num_x:])

        def step(x: list, layer: Layers) -> tuple[list, Any]:
            layer = self._cast(layer)
            if self._keeping is None:
                self._keeping = keeping_forward(self._block_vjp, layer, x, args)
            x, state, saved = self._keeping.run(layer, x, args)
            return x, (state, saved)

        x, (state, saved) = jax.lax.scan(step, list(travel[:num_x]), layers)
        return [*x, *args], state, {"layers": saved, "args": args}

    def _block_vjp(
        self, layer: Layers, x: list, args: list
    ) -> tuple[list, dict, Callable]:
        """One layer's output, its state, and its VJP."""
        active, others = self._partition([*x, *args])
        rest = (layer.fixed, layer.state, others)
        x, vjp, state = jax.vjp(
            lambda trained, active: self._rematted(trained, active, rest),
            layer.trained,
            active,
            has_aux=True,
        )
        return x, state, vjp

    def _backward(
        self,
        layers: Layers,
        kept: Any,
        grads: Sequence[Any],
        layer_backward: Callable[[dict, Any], tuple[Any, Any]],
        totals: Any,
        collect: Callable[[Any, Any, jax.Array], tuple[Any, Any]],
    ) -> tuple[list, Any, Any]:
        """From the last layer to the first.

        Args:
            layers: The layers.
            kept: From `forward`.
            grads: Gradients of what travelled on.
            layer_backward: One layer: gradients for the layer before, and its own.
            totals: What goes from layer to layer, or ``None``.
            collect: ``(totals, own, layer) -> (totals, what to stack)``.

        Returns:
            Gradients of what travelled in, the totals, and what was stacked.
        """
        kept = self._rerun(layers, kept)

        def step(carry: tuple[list, list, Any], xs: Any) -> tuple[Any, Any]:
            layer, saved, index = self._cast(xs[0]), xs[1], xs[2]
            grads_x, grads_args, totals = carry
            given = (layer.fixed, saved, kept["args"], grads_x)
            (grads_x, more), own = layer_backward(layer.trained, given)
            totals, stacked = collect(totals, own, index)
            return (grads_x, _add(grads_args, more), totals), stacked

        num_x = self.recorded.num_x
        (grads_x, grads_args, totals), stacked = jax.lax.scan(
            step,
            (list(grads[:num_x]), list(grads[num_x:]), totals),
            _numbered(_stateless(layers), kept["layers"]),
            reverse=True,
        )
        return [*grads_x, *grads_args], totals, stacked

    def _rerun(self, layers: Layers, kept: Any) -> Any:
        if self.stash == "policy":
            return kept
        layers = Layers(layers.trained, layers.fixed, kept["state"])
        return self._forward_keeping(layers, kept["travel"])[2]


def _like(new: jax.Array, old: jax.Array, key: Any) -> jax.Array:
    """A variable's new value in its dtype, as the plain step keeps it."""
    if new.shape != old.shape:
        raise PipelineError(
            f"A block of the Stack changed the shape of its variable `{dotted(key)}` "
            f"from {old.shape} to {new.shape}. Variables keep their shapes."
        )
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _merge(active: Sequence[Any], others: Sequence[Any]) -> list:
    return [b if a is None else a for a, b in zip(active, others, strict=True)]


def _stateless(layers: Layers) -> Layers:
    return Layers(layers.trained, layers.fixed, {})


def _numbered(layers: Layers, kept: Any) -> tuple[Layers, Any, jax.Array]:
    """What a scan over layers takes, with each layer's index."""
    count = len(jax.tree.leaves((layers, kept))[0])
    return layers, kept, jnp.arange(count)


def _add(a: list, b: list) -> list:
    return [x + y for x, y in zip(a, b, strict=True)]
