"""A loss written for one device, run as a pipeline: its gradients, or its outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from nnx_parallel.metrics import Mean
from nnx_parallel.pipeline.buffers import Buffers, plan_buffers
from nnx_parallel.pipeline.check import check_layer
from nnx_parallel.pipeline.cut import Arrays, Cut, cut
from nnx_parallel.pipeline.executor import (
    Executor,
    Row,
    make_rows,
    make_slots,
    read_slot,
    write_slot,
)
from nnx_parallel.pipeline.keeping import Layers
from nnx_parallel.pipeline.order import Rounds, plan_rounds, reorder
from nnx_parallel.pipeline.stage import Stage, is_floating
from nnx_parallel.pipeline.table import Table
from nnx_parallel.precision import cast_floating
from nnx_parallel.sharding import Layout, using
from nnx_parallel.state import StatePlan

Function = Callable[[Arrays, Arrays, Any, Any], tuple[Any, Arrays]]
"""``(params, variables, batch, key) -> (outputs, variables after)``, flat dicts."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a pipelined function is run on.

    Attributes:
        params: Trained parameters, by path.
        variables: All other arrays of the model, by path.
        batch: Microbatches, along a leading dim.
        keys: A random key for each.
    """

    params: Arrays
    variables: Arrays
    batch: Any
    keys: jax.Array

    @property
    def num_microbatches(self) -> int:
        """Length of the leading dim."""
        return len(self.keys)

    def take(self, index: jax.Array) -> tuple[Any, jax.Array]:
        """One microbatch and its key."""
        index = jnp.maximum(index, 0)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False),
            (self.batch, self.keys),
        )


class PipelinedFunction:
    """A function of a model, cut at its stack and bound to a schedule.

    Args:
        plan: The model's structure and the place of every array.
        function: The function; it calls one `Stack` once.
        given: What it will be run on, or its shapes.
        table: The schedule.
    """

    def __init__(
        self, plan: StatePlan, function: Function, given: Given, table: Table
    ) -> None:
        options = plan.layout.pipeline
        assert options is not None
        self._plan = plan
        self._layout = plan.layout
        self._reduction = plan.precision.reduction
        self._given = given
        self._options = options
        self._rounds = plan_rounds(table.num_stages, table.num_chunks)
        self._table = table
        self._buffers: Buffers = plan_buffers(table)
        batch, key = jax.eval_shape(given.take, jnp.int32(0))
        self._edges = _edge_layout(plan.layout, batch)
        with using(self._edges):
            self._cut: Cut = cut(function, given.params, given.variables, batch, key)
        stash = "inputs" if table.is_forward_only else options.stash
        stage = Stage(self._cut.recorded, plan.precision.compute, stash)
        self._executor = Executor(
            stage, table, self._buffers, plan.layout.mesh, options.axis
        )
        every = frozenset(self._cut.stack_others)
        entering, _ = self._shapes(
            self._outside(given.params), self._outside(given.variables)
        )
        with using(plan.layout):
            jaxpr, self._state_keys = stage.trace_layer(
                self._all_layers(given, every), entering
            )
        check_layer(jaxpr, plan.layout.mesh, options.axis)

    # The parts of the model

    def _all_layers(self, given: Given, state_keys: frozenset) -> Layers:
        paths = self._cut.stack_params | self._cut.stack_others
        trained = {k: given.params[p] for k, p in paths.items() if p in given.params}
        others = {
            k: given.variables[p] for k, p in paths.items() if p in given.variables
        }
        state = {k: x for k, x in others.items() if k in state_keys}
        fixed = {k: x for k, x in others.items() if k not in state_keys}
        return Layers(trained, fixed, state)

    def _layers(self, given: Given) -> Layers:
        """The layers where the schedule runs them, gathered if once is enough."""
        layers = self._all_layers(given, self._state_keys)
        return self._reorder(self._gathered(layers), self._rounds)

    def _reorder(self, tree: Any, rounds: Rounds) -> Any:
        axis = self._options.axis
        return reorder(tree, rounds, self._layout.mesh, axis)

    def _gathered(self, layers: Layers) -> Layers:
        if self._options.gather == "microbatch":
            return layers

        def gather(arrays: dict) -> dict:
            arrays = dict(arrays)
            for key in arrays.keys() & self._cut.stack_params.keys():
                x = cast_floating(arrays[key], self._plan.precision.compute)
                place = self._plan.placements[self._cut.stack_params[key]]
                used = self._layout.sharding(place.used)
                arrays[key] = jax.lax.with_sharding_constraint(x, used)
            return arrays

        return Layers(gather(layers.trained), gather(layers.fixed), layers.state)

    def _outside(self, arrays: Arrays) -> Arrays:
        """The arrays that no layer of the stack holds."""
        inside = {
            *self._cut.stack_params.values(),
            *self._cut.stack_others.values(),
        }
        return {path: x for path, x in arrays.items() if path not in inside}

    # Outputs alone

    def outputs(self) -> Any:
        """The function's outputs, each with a leading dim of microbatches."""
        given, executor = self._given, self._executor
        variables = self._outside(given.variables)
        params = self._outside(given.params)
        layers = self._layers(given)
        entering, skips = self._shapes(params, variables)

        def tick(carry: Any, row: Row) -> tuple[Any, Any]:
            memory, flights = carry
            whole = row["whole"]
            fed, kept = self._enter(whole["enters"], params, variables)
            flights = self._keep(flights, whole["enters"], kept)
            with using(self._layout):
                _, memory, leaving = executor.forward(layers, memory, fed, row)
            held = self._recall(flights, whole["leaves"])

            def after() -> Any:
                batch, key = given.take(whole["leaves"])
                found = self._after(params, held[1], batch, key, held[0], leaving)
                return found[0]

            return (memory, flights), _cond(whole["leaves"] >= 0, after)

        carry = (executor.allocate(layers, entering), self._flights(skips, variables))
        rows = make_rows(self._table, self._buffers)
        _, outputs = jax.lax.scan(tick, carry, rows)
        return self._by_microbatch(outputs)

    def _by_microbatch(self, outputs: Any) -> Any:
        """Of what was found at every tick, what belongs to each microbatch."""
        last = self._table.num_chunks - 1
        slots = self._table.forward
        column = np.where(slots.chunk[:, -1] == last, slots.microbatch[:, -1], -1)
        ticks = [
            int(np.flatnonzero(column == m)[0])
            for m in range(self._table.num_microbatches)
        ]
        return jax.tree.map(lambda x: x[np.asarray(ticks)], outputs)

    # Gradients

    def gradients(
        self, objective: Callable[[Any, list], jax.Array]
    ) -> tuple[Arrays, Arrays, Any]:
        """Gradients of a sum over microbatches.

        Args:
            objective: ``(outputs, weights) -> scalar`` of one microbatch, with the
                weights of the whole batch.

        Returns:
            Gradients of the parameters by path, the variables after the step, and the
            outputs with a leading dim of microbatches.
        """
        weights = self._weights()
        tick = _TrainingTick(self, lambda outputs: objective(outputs, weights))
        rows = make_rows(self._table, self._buffers)
        with using(self._layout):
            carry, outputs = jax.lax.scan(tick, tick.start(), rows)
        return *tick.finish(carry), self._by_microbatch(outputs)

    def _weights(self) -> list:
        """The weight of each of the loss's terms over the whole batch.

        They come from the data alone, so that no layer has to be run for them.
        """
        given = self._given
        params, variables = (
            self._outside(given.params),
            self._outside(given.variables),
        )

        def weigh(early: Arrays, item: Any) -> tuple[Arrays, list]:
            batch, key = item
            with using(self._edges):
                found, early = self._cut.without_stack(
                    lambda means: [term.weight for term in _terms(means)],
                    params,
                    variables | early,
                    batch,
                    key,
                )
            return early, found

        early = {path: variables[path] for path in self._cut.early}
        _, weights = jax.lax.scan(weigh, early, (given.batch, given.keys))
        return [jnp.sum(jnp.asarray(w, jnp.float32), axis=0) for w in weights]

    # One microbatch

    def _enter(
        self, microbatch: jax.Array, params: Arrays, variables: Arrays
    ) -> tuple[list, Any]:
        """The part before the stack, for a microbatch that enters in this tick.

        Returns:
            What enters the stack; skips, the variables as they were, and early ones
            as they are.
        """
        early = {path: variables[path] for path in self._cut.early}

        def before() -> Any:
            batch, key = self._given.take(microbatch)
            entering, skips, after = self._before(params, variables, batch, key)
            return entering, skips, after

        def skip() -> Any:
            entering, skips, _ = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(before)
            )
            return entering, skips, early

        entering, skips, after = jax.lax.cond(microbatch >= 0, before, skip)
        return entering, (skips, early, after)

    def _before(
        self, params: Arrays, variables: Arrays, batch: Any, key: Any
    ) -> tuple[list, list, Arrays]:
        with using(self._edges):
            batch = self._spread(batch)
            entering, skips, early = self._cut.before(params, variables, batch, key)
        return entering, skips, early

    def _after(
        self,
        params: Arrays,
        variables: Arrays,
        batch: Any,
        key: Any,
        skips: list,
        leaving: list,
    ) -> tuple[Any, Arrays]:
        with using(self._edges):
            batch, leaving = self._spread((batch, leaving))
            return self._cut.after(params, variables, batch, key, skips, leaving)

    def _spread(self, tree: Any) -> Any:
        """Arrays of rows, split over the whole mesh."""

        def spread(x: jax.Array) -> jax.Array:
            names = ("batch", "seq")[: x.ndim] + (None,) * (x.ndim - 2)
            spec = self._edges.activation_spec(x.shape, names)
            free = [P.UNCONSTRAINED] * (x.ndim - len(spec))
            sharding = self._edges.sharding(P(*spec, *free))
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(spread, tree)

    # What is kept of a microbatch in flight

    def _shapes(self, params: Arrays, variables: Arrays) -> tuple[list, list]:
        batch, key = jax.eval_shape(self._given.take, jnp.int32(0))
        found = jax.eval_shape(self._before, params, variables, batch, key)
        return found[0], found[1]

    def _flights(self, skips: list, variables: Arrays) -> Any:
        count = self._buffers.num_flights
        early = {path: variables[path] for path in self._cut.early}
        return make_slots(count, (skips, early))

    def _slot(self, microbatch: jax.Array) -> jax.Array:
        slots = jnp.asarray(self._buffers.flight)
        return jnp.where(microbatch >= 0, slots[jnp.maximum(microbatch, 0)], -1)

    def _keep(self, flights: Any, microbatch: jax.Array, kept: Any) -> Any:
        skips, early, _ = kept
        return write_slot(flights, (skips, early), self._slot(microbatch))

    def _recall(self, flights: Any, microbatch: jax.Array) -> tuple[list, Arrays]:
        """The skips of a microbatch, and the variables as they were when it entered."""
        skips, early = read_slot(flights, self._slot(microbatch))
        return skips, self._outside(self._given.variables) | early


class _TrainingTick:
    """One tick of training: a scan's body, its start, and what comes of its end."""

    def __init__(
        self, pipelined: PipelinedFunction, objective: Callable[[Any], jax.Array]
    ) -> None:
        self._f = pipelined
        self._objective = objective
        given, cut_ = pipelined._given, pipelined._cut
        self._layers = pipelined._layers(given)
        self._params = pipelined._outside(given.params)
        self._variables = pipelined._outside(given.variables)
        self._entering, self._skips = pipelined._shapes(self._params, self._variables)
        self._early, self._late = cut_.early, cut_.late

    def start(self) -> dict[str, Any]:
        """The carry before the first tick."""
        f = self._f

        def zeros(arrays: dict, paths: dict | None = None) -> dict:
            found = {}
            for key, x in arrays.items():
                placement = f._plan.placements[paths[key] if paths else key]
                found[key] = jax.lax.with_sharding_constraint(
                    jnp.zeros(x.shape, f._reduction),
                    f._layout.sharding(placement.gradient),
                )
            return found

        def pick(paths: tuple) -> Arrays:
            return {path: self._variables[path] for path in paths}

        floats = [x for x in self._skips if is_floating(x)]
        count = f._buffers.num_flights
        return {
            "state": self._layers.state,
            "memory": f._executor.allocate(self._layers, self._entering),
            "flights": f._flights(self._skips, self._variables),
            "skip_grads": make_slots(count, floats),
            "early": pick(self._early),
            "late": pick(self._late),
            "layer_grads": zeros(self._layers.trained, f._cut.stack_params),
            "grads": zeros(self._params),
        }

    def __call__(self, carry: dict[str, Any], row: Row) -> tuple[dict, Any]:
        """Forward, the part after, backward, and the part before's own backward."""
        f, whole = self._f, row["whole"]
        variables = self._variables | carry["early"] | carry["late"]
        fed, kept = f._enter(whole["enters"], self._params, variables)
        carry = carry | {
            "flights": f._keep(carry["flights"], whole["enters"], kept),
            "early": kept[2],
        }
        layers = dataclasses.replace(self._layers, state=carry["state"])
        layers, memory, leaving = f._executor.forward(layers, carry["memory"], fed, row)
        carry |= {"state": layers.state}
        carry, outputs, fed = self._turn(carry, whole["leaves"], leaving)
        layer_grads, memory, returned = f._executor.backward(
            layers, memory, carry["layer_grads"], fed, row
        )
        carry |= {"memory": memory, "layer_grads": layer_grads}
        carry |= {"grads": self._leave(carry, whole["returns"], returned)}
        return carry, outputs

    def _turn(
        self, carry: dict, microbatch: jax.Array, leaving: list
    ) -> tuple[dict, Any, list]:
        """The part after the stack: its outputs and its gradients."""
        f = self._f
        skips, variables = f._recall(carry["flights"], microbatch)
        variables = variables | carry["late"]
        float_skips = [x for x in skips if is_floating(x)]
        floats = [x for x in self._entering if is_floating(x)]

        def run() -> Any:
            batch, key = f._given.take(microbatch)

            def objective(params: Arrays, given: list, leaving: list) -> Any:
                rest = iter(given)
                all_skips = [next(rest) if is_floating(x) else x for x in skips]
                outputs, late = f._after(
                    params, variables, batch, key, all_skips, leaving
                )
                return self._objective(outputs), (outputs, late)

            grads, (outputs, late) = jax.grad(objective, (0, 1, 2), has_aux=True)(
                self._params, float_skips, leaving
            )
            new, skip_grads, cotangents = grads
            return self._add(carry["grads"], new), skip_grads, cotangents, outputs, late

        def skip() -> Any:
            shapes = jax.eval_shape(run)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return carry["grads"], *zeros[1:4], carry["late"]

        grads, skip_grads, cotangents, outputs, late = jax.lax.cond(
            microbatch >= 0, run, skip
        )
        kept = write_slot(carry["skip_grads"], skip_grads, f._slot(microbatch))
        # Arguments of the blocks end with the last one: no gradient comes back.
        more = [jnp.zeros(x.shape, x.dtype) for x in floats[len(cotangents) :]]
        carry = carry | {"grads": grads, "skip_grads": kept, "late": late}
        return carry, outputs, [*cotangents, *more]

    def _leave(self, carry: dict, microbatch: jax.Array, returned: list) -> Arrays:
        """Gradients with those of the part before, whose own backward pass runs now."""
        f = self._f
        _, variables = f._recall(carry["flights"], microbatch)
        skip_grads = read_slot(carry["skip_grads"], f._slot(microbatch))

        def run() -> Arrays:
            batch, key = f._given.take(microbatch)

            def before(params: Arrays) -> list:
                entering, skips, _ = f._before(params, variables, batch, key)
                return [x for x in (*entering, *skips) if is_floating(x)]

            _, vjp = jax.vjp(before, self._params)
            (new,) = vjp([*f._spread(returned), *skip_grads])
            return self._add(carry["grads"], new)

        return jax.lax.cond(microbatch >= 0, run, lambda: carry["grads"])

    def _add(self, grads: Arrays, new: Arrays) -> Arrays:
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, new)

    def finish(self, carry: dict) -> tuple[Arrays, Arrays]:
        """Gradients of all parameters, and all variables, by path."""
        f, cut_ = self._f, self._f._cut
        paths = cut_.stack_params | cut_.stack_others
        layers = (carry["layer_grads"], carry["state"])
        layer_grads, state = f._reorder(layers, f._rounds.reversed())
        grads = carry["grads"] | {paths[key]: x for key, x in layer_grads.items()}
        variables = f._given.variables | carry["early"] | carry["late"]
        return grads, variables | {paths[key]: x for key, x in state.items()}


def _terms(means: Any) -> tuple[Mean, ...]:
    return means["loss"].terms


def _edge_layout(layout: Layout, batch: Any) -> Layout:
    """The layout of the parts around the stack: spread over the pipe axis too."""
    assert layout.pipeline is not None
    axis = layout.pipeline.axis
    axes = (*layout.batch_axes, axis)
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    whole = dataclasses.replace(layout, batch_axes=axes)
    if axis in str(whole.batch_spec(num_rows)):
        return whole
    logical = dict(layout.logical_axes) | {
        "seq": (axis, *layout.logical_axes.get("seq", ()))
    }
    return dataclasses.replace(layout, logical_axes=logical)


def _cond(predicate: jax.Array, run: Callable[[], Any]) -> Any:
    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))

    return jax.lax.cond(predicate, run, zeros)
