"""The parts of a loss around its stack, run for one microbatch at a time.

They run outside the region that is manual over ``pipe``, spread over the whole mesh.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from nnx_parallel.pipeline.cut import Arrays, Function, cut
from nnx_parallel.pipeline.memory import (
    make_slots,
    read_slot,
    write_slot,
    zeros_like,
    zeros_of,
)
from nnx_parallel.schedules.table import Buffers
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import flatten
from nnx_parallel.sharding.names import as_tuple, is_inexact


@dataclass(frozen=True, kw_only=True)
class PipelineInputs:
    """The arguments of a pipelined function.

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

    @classmethod
    def of(
        cls, params: Any, variables: Any, microbatches: Any, key: jax.Array
    ) -> PipelineInputs:
        """From nested arrays; each microbatch gets a key of its own.

        One microbatch alone is the whole batch and takes the key as it is.
        """
        count = jax.tree.leaves(microbatches)[0].shape[0]
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(count))
        # fold_in by index, as where microbatches are accumulated: the same masks.
        return cls(
            params=flatten(params),
            variables=flatten(variables),
            batch=microbatches,
            keys=keys if count > 1 else key[None],
        )

    def take(self, index: jax.Array) -> tuple[Any, jax.Array]:
        """One microbatch and its key; any if the index is -1."""
        return read_slot((self.batch, self.keys), index)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InFlight:
    """Values kept of a microbatch while it is in the pipeline.

    Attributes:
        skips: Values of the prologue that the epilogue needs.
        variables: Variables that the prologue changes, as they were before it.
    """

    skips: list
    variables: Arrays


class PrologueEpilogue:
    """The parts of a function before and after its stack.

    Args:
        function: The function to cut; it calls one `Stack` once.
        inputs: Its arguments.
        layout: The layout of the step.
        buffers: Memory slots of the schedule.
        axis: Mesh axis of the stages.

    Attributes:
        cut: The function, cut.
        params: The trained parameters that these parts use, by path.
        variables: The other arrays that they use.
        entering: Shapes of the arrays that enter the stack.
    """

    def __init__(
        self,
        function: Function,
        inputs: PipelineInputs,
        layout: Layout,
        buffers: Buffers,
        axis: str,
    ) -> None:
        batch, key = jax.eval_shape(inputs.take, jnp.int32(0))
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        self._layout = spread_over_stages(layout, axis, num_rows)
        with using(self._layout):
            self.cut = cut(function, inputs.params, inputs.variables, batch, key)
        self._inputs = inputs
        self._buffers = buffers
        # The stack's arrays would be inputs of each condition, but for the shared ones.
        inside = {*self.cut.layer_paths.values()} - self.cut.shared
        self.params, self.variables = (
            {path: x for path, x in arrays.items() if path not in inside}
            for arrays in (inputs.params, inputs.variables)
        )
        self.entering, self._skips, _ = jax.eval_shape(
            self._prologue, self.params, self.variables, batch, key
        )

    def pick(self, paths: Any) -> Arrays:
        """Some of the variables, as they are before the step."""
        return {path: self.variables[path] for path in paths}

    # One microbatch

    def enter(
        self, microbatch: jax.Array, variables: Arrays
    ) -> tuple[list, InFlight, Arrays]:
        """The prologue of a microbatch that enters now, or -1.

        Returns:
            The arrays that enter the stack, what is to be kept, and the variables that
            the prologue changes.
        """
        # For `go_back`, which runs the prologue again on the variables as they were.
        before = {path: variables[path] for path in self.cut.prologue_changes}

        def run() -> tuple[list, list, Arrays]:
            batch, key = self._inputs.take(microbatch)
            return self._prologue(self.params, variables, batch, key)

        # Not zeros for the variables: a tick without a microbatch leaves them.
        def skip() -> tuple[list, list, Arrays]:
            entering, skips, _ = zeros_of(run)
            return entering, skips, before

        with jax.named_scope("before"):
            entering, skips, after = jax.lax.cond(microbatch >= 0, run, skip)
        return entering, InFlight(skips, before), after

    def leave(
        self,
        microbatch: jax.Array,
        objective: Callable[[Any], jax.Array],
        kept: InFlight,
        leaving: list,
        start: tuple[Arrays, Arrays],
    ) -> tuple[Arrays, Arrays, list, list, Any]:
        """The epilogue and its gradients, of a microbatch that leaves now, or -1.

        Args:
            microbatch: Index of the microbatch.
            objective: The scalar of the outputs whose gradient is summed.
            kept: What was kept of the microbatch.
            leaving: The output of the stack.
            start: The gradients so far, and the variables that the epilogue changes.

        Returns:
            The gradients, the variables, the gradients of floating skips, the
            cotangents of the stack's output, and the function's outputs.
        """
        grads, variables = start

        def epilogue(params: Arrays, floats: list, leaving: list) -> Any:
            rest = iter(floats)
            skips = [next(rest) if is_inexact(x) else x for x in kept.skips]
            outputs, changed = self.epilogue(
                microbatch, params, variables, InFlight(skips, kept.variables), leaving
            )
            return objective(outputs), (outputs, changed)

        def run() -> tuple:
            # Integers have no cotangent: `epilogue` closes over them.
            floats = [x for x in kept.skips if is_inexact(x)]
            value, vjp, (outputs, changed) = jax.vjp(
                epilogue, self.params, floats, leaving, has_aux=True
            )
            new, *cotangents = vjp(jnp.ones_like(value))
            return _add(grads, new), changed, *cotangents, outputs

        def skip() -> tuple:
            return grads, variables, *zeros_of(run)[2:]

        # The index comes from the table: the predicate is equal on all devices, and the
        # gradients pass through untouched in ticks in which no microbatch leaves.
        with jax.named_scope("after"):
            return jax.lax.cond(microbatch >= 0, run, skip)

    def pad(self, cotangents: list) -> list:
        """Cotangents of all activations, from those of the stack's output.

        The arguments of the blocks end with the last one: none come back for them.
        """
        active = self.cut.block.with_cotangents(self.entering)
        return [*cotangents, *zeros_like(active[len(cotangents) :])]

    def go_back(
        self,
        microbatch: jax.Array,
        kept: InFlight,
        skip_grads: list,
        cotangents: list,
        grads: Arrays,
    ) -> Arrays:
        """Gradients with those of the prologue, of a microbatch that is back, or -1.

        The prologue is run again: its residuals would be kept as long as the skips.
        """

        def prologue(params: Arrays) -> list:
            entering, skips = self.prologue(microbatch, params, kept)
            floats = [x for x in skips if is_inexact(x)]
            return [*self.cut.block.with_cotangents(entering), *floats]

        def run() -> Arrays:
            _, vjp = jax.vjp(prologue, self.params)
            (new,) = vjp([*self.spread(cotangents), *skip_grads])
            return _add(grads, new)

        with jax.named_scope("before_backward"):
            return jax.lax.cond(microbatch >= 0, run, lambda: grads)

    def prologue(
        self, microbatch: jax.Array, params: Arrays, kept: InFlight
    ) -> tuple[list, list]:
        """The arrays that enter the stack, and the skips."""
        batch, key = self._inputs.take(microbatch)
        variables = self.variables | kept.variables
        return self._prologue(params, variables, batch, key)[:2]

    def epilogue(
        self,
        microbatch: jax.Array,
        params: Arrays,
        variables: Arrays,
        kept: InFlight,
        leaving: list,
    ) -> tuple[Any, Arrays]:
        """The function's outputs, and the variables that the epilogue changes."""
        batch, key = self._inputs.take(microbatch)
        variables = self.variables | kept.variables | variables
        with using(self._layout):
            batch, leaving = self.spread((batch, leaving))
            return self.cut.epilogue(params, variables, batch, key, kept.skips, leaving)

    def _prologue(
        self, params: Arrays, variables: Arrays, batch: Any, key: Any
    ) -> tuple[list, list, Arrays]:
        with using(self._layout):
            return self.cut.prologue(params, variables, self.spread(batch), key)

    def spread(self, tree: Any) -> Any:
        """Arrays of rows, split over the whole mesh, the stages too."""

        def constrain(x: jax.Array) -> jax.Array:
            # (batch, seq, ...): what comes out of the stages is on `pipe` in one piece,
            # and would be computed on every stage.
            names = ("batch", "seq")[: x.ndim] + (None,) * (x.ndim - 2)
            spec = self._layout.activation_spec(x.shape, names)
            free = [P.UNCONSTRAINED] * (x.ndim - len(spec))
            sharding = self._layout.sharding(P(*spec, *free))
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(constrain, tree)

    # In-flight microbatches

    def make_in_flight(self) -> InFlight:
        """Memory for the microbatches that are in the pipeline at once."""
        one = InFlight(self._skips, self.pick(self.cut.prologue_changes))
        return make_slots(self._buffers.num_flights, one)

    def keep(self, memory: InFlight, microbatch: jax.Array, new: InFlight) -> InFlight:
        """The memory with a microbatch that enters now."""
        return write_slot(memory, new, self.slot(microbatch))

    def recall(self, memory: InFlight, microbatch: jax.Array) -> InFlight:
        """The values kept of a microbatch."""
        return read_slot(memory, self.slot(microbatch))

    def slot(self, microbatch: jax.Array) -> jax.Array:
        """The memory slot of a microbatch, or -1."""
        # (microbatches,)
        slots = jnp.asarray(self._buffers.flight)
        return jnp.where(microbatch >= 0, slots[jnp.maximum(microbatch, 0)], -1)

    # The whole batch

    def sum_weights(self, select: Callable[[Any], list]) -> list:
        """Sums of outputs that come from the data alone, over all microbatches.

        Args:
            select: The outputs to sum, of the function's.
        """

        def weigh(changed: Arrays, item: Any) -> tuple[Arrays, list]:
            with using(self._layout):
                found, changed = self.cut.without_stack(
                    select, self.params, self.variables | changed, *item
                )
            return changed, found

        start = self.pick(self.cut.prologue_changes)
        items = (self._inputs.batch, self._inputs.keys)
        _, weights = jax.lax.scan(weigh, start, items)
        return [jnp.sum(jnp.asarray(w, jnp.float32), axis=0) for w in weights]


def spread_over_stages(layout: Layout, axis: str, num_rows: int) -> Layout:
    """The layout of the parts around the stack: over the axis of stages too.

    It splits the rows, or the sequence where it does not divide the rows.
    """
    claims = layout.claims
    # The axis comes last whatever the mesh's order: each device then takes a part of
    # the rows that it holds already, and none are sent.
    batch = (*claims.batch, axis)
    if num_rows % math.prod(layout.mesh.shape[name] for name in batch) == 0:
        spread = dataclasses.replace(claims, batch=batch)
    else:
        seq = (axis, *as_tuple(claims.logical.get("seq")))
        logical = {**claims.logical, "seq": seq}
        spread = dataclasses.replace(claims, logical=logical)
    return dataclasses.replace(layout, claims=spread)


def _add(grads: Arrays, new: Arrays) -> Arrays:
    """Sums in the dtype of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, new)
