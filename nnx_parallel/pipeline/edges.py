"""The parts of a loss around its stack, one microbatch at a time.

They run outside the region that is manual over ``pipe``, split over the whole mesh.

What a tick runs only if some stage needs it.

Memory slots: values of one shape, written and read by index.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from nnx_parallel.pipeline.cut import Arrays, Cut, Function, Given, cut
from nnx_parallel.schedules.buffers import Buffers
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.rules import as_tuple


def zeros_like(tree: Any) -> Any:
    """Zeros of some shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def zeros_of(run: Callable[[], Any]) -> Any:
    """Zeros of the shapes that a function gives; it is not run."""
    return zeros_like(jax.eval_shape(run))


def run_if(predicate: jax.Array, run: Callable[[], Any], *, scope: str) -> Any:
    """What a function gives, or zeros of its shapes, under a named scope."""
    with jax.named_scope(scope):
        return jax.lax.cond(predicate, run, lambda: zeros_of(run))


def make_slots(count: int, tree: Any) -> Any:
    """Zeros for ``count`` values like those of a tree, and for one that nobody reads.

    What a stage without a slot of its own computes is written there: to keep the old
    value instead it would have to be read, and XLA copies a whole buffer that is read
    and written at once.
    """
    return jax.tree.map(lambda x: jnp.zeros((count + 1, *x.shape), x.dtype), tree)


def read_slot(slots: Any, slot: jax.Array) -> Any:
    """The value in a slot; anything if the slot is -1."""
    index = jnp.maximum(slot, 0)
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), slots
    )


def write_slot(slots: Any, value: Any, slot: jax.Array) -> Any:
    """The slots with a value in one of them, unless the slot is -1."""

    def write(x: jax.Array, new: jax.Array) -> jax.Array:
        index = jnp.where(slot >= 0, slot, x.shape[0] - 1)
        return jax.lax.dynamic_update_index_in_dim(x, new, index, axis=0)

    return jax.tree.map(write, slots, value)


class Chunks:
    """The chunks of layers that a stage holds, one after the other.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def take(self, layers: Any, chunk: jax.Array) -> Any:
        """The layers of one chunk; of any if it is -1."""
        if self._count == 1:
            return layers

        def take(x: jax.Array) -> jax.Array:
            size = x.shape[0] // self._count
            return jax.lax.dynamic_slice_in_dim(x, jnp.maximum(chunk, 0) * size, size)

        return jax.tree.map(take, layers)

    def put(self, layers: Any, new: Any, chunk: jax.Array) -> Any:
        """The layers with one chunk replaced, unless the chunk is -1."""

        def put(x: jax.Array, part: jax.Array, old: jax.Array) -> jax.Array:
            part = jnp.where(chunk >= 0, part, old)
            start = jnp.maximum(chunk, 0) * part.shape[0]
            return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=0)

        return jax.tree.map(put, layers, new, self.take(layers, chunk))

    def adder(self, chunk: jax.Array) -> Callable[[Any, Any, jax.Array], Any]:
        """``(totals of all layers, values of one, its index in the chunk) -> totals``.

        Adds in the totals' dtype, in place; nothing if the chunk is -1.
        """

        def add(totals: Any, new: Any, layer: jax.Array) -> Any:
            def add_one(x: jax.Array, part: jax.Array) -> jax.Array:
                size = x.shape[0] // self._count
                index = jnp.maximum(chunk, 0) * size + layer
                old = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
                part = jnp.where(chunk >= 0, part.astype(x.dtype), 0)
                return jax.lax.dynamic_update_index_in_dim(x, old + part, index, axis=0)

            return jax.tree.map(add_one, totals, new)

        return add


@dataclass(frozen=True)
class Flight:
    """What is kept of a microbatch while it is in the pipeline.

    Attributes:
        skips: Values of the part before the stack that the part after it needs.
        early: Variables that the part before changes, as they were before it.
    """

    skips: list
    early: Arrays


jax.tree_util.register_dataclass(Flight)


class Edges:
    """The part before a stack and the part after it.

    Args:
        function: The function to cut; it calls one `Stack` once.
        given: What it is run on.
        layout: The layout of the step.
        buffers: Memory slots of the schedule.
        axis: Mesh axis of the stages.
    """

    def __init__(
        self,
        function: Function,
        given: Given,
        layout: Layout,
        buffers: Buffers,
        axis: str,
    ) -> None:
        batch, key = jax.eval_shape(given.take, jnp.int32(0))
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        self._layout = spread_over_stages(layout, axis, num_rows)
        with using(self._layout):
            self.cut: Cut = cut(function, given.params, given.variables, batch, key)
        self._given = given
        self._buffers = buffers
        self.params = self._outside(given.params)
        self.variables = self._outside(given.variables)
        found = jax.eval_shape(self._before, self.params, self.variables, batch, key)
        self.entering: list = found[0]
        self._skips: list = found[1]

    def _outside(self, arrays: Arrays) -> Arrays:
        """The arrays that the parts around the stack use."""
        cut = self.cut
        inside = {*cut.stack_params.values(), *cut.stack_others.values()} - cut.shared
        return {path: x for path, x in arrays.items() if path not in inside}

    def pick(self, paths: tuple) -> Arrays:
        """Some of the variables, as they are before the step."""
        return {path: self.variables[path] for path in paths}

    # One microbatch

    def enter(
        self, microbatch: jax.Array, variables: Arrays
    ) -> tuple[list, Flight, Arrays]:
        """The part before the stack, for a microbatch that enters now, or -1.

        Returns:
            What enters the stack, what is to be kept, and the early variables.
        """
        early = {path: variables[path] for path in self.cut.early}

        def before() -> tuple[list, list, Arrays]:
            batch, key = self._given.take(microbatch)
            return self._before(self.params, variables, batch, key)

        def skip() -> tuple[list, list, Arrays]:
            entering, skips, _ = zeros_of(before)
            return entering, skips, early

        with jax.named_scope("before"):
            entering, skips, after = jax.lax.cond(microbatch >= 0, before, skip)
        return entering, Flight(skips, early), after

    def before(
        self, microbatch: jax.Array, params: Arrays, flight: Flight
    ) -> tuple[list, list]:
        """What a microbatch has given to the stack, and its skips, once more."""
        batch, key = self._given.take(microbatch)
        variables = self.variables | flight.early
        entering, skips, _ = self._before(params, variables, batch, key)
        return entering, skips

    def with_gradients(self, entering: Sequence[Any]) -> list:
        """Of what enters the stack, the arrays whose gradients come back."""
        return list(compress(entering, self.cut.differentiated))

    def after(
        self,
        microbatch: jax.Array,
        params: Arrays,
        late: Arrays,
        flight: Flight,
        leaving: list,
    ) -> tuple[Any, Arrays]:
        """The part after the stack: the function's outputs and the late variables."""
        batch, key = self._given.take(microbatch)
        variables = self.variables | flight.early | late
        with using(self._layout):
            batch, leaving = self.spread((batch, leaving))
            return self.cut.after(params, variables, batch, key, flight.skips, leaving)

    def _before(
        self, params: Arrays, variables: Arrays, batch: Any, key: Any
    ) -> tuple[list, list, Arrays]:
        with using(self._layout):
            return self.cut.before(params, variables, self.spread(batch), key)

    def spread(self, tree: Any) -> Any:
        """Arrays of rows, split over the whole mesh."""

        def constrain(x: jax.Array) -> jax.Array:
            names = ("batch", "seq")[: x.ndim] + (None,) * (x.ndim - 2)
            spec = self._layout.activation_spec(x.shape, names)
            free = [P.UNCONSTRAINED] * (x.ndim - len(spec))
            sharding = self._layout.sharding(P(*spec, *free))
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(constrain, tree)

    # Microbatches in flight

    def make_flights(self) -> Flight:
        """Memory for the microbatches that are in the pipeline at once."""
        flight = Flight(self._skips, self.pick(self.cut.early))
        return make_slots(self._buffers.num_flights, flight)

    def keep(self, flights: Flight, microbatch: jax.Array, flight: Flight) -> Flight:
        """The memory with a microbatch that enters now."""
        return write_slot(flights, flight, self.slot(microbatch))

    def recall(self, flights: Flight, microbatch: jax.Array) -> Flight:
        """What was kept of a microbatch."""
        return read_slot(flights, self.slot(microbatch))

    def slot(self, microbatch: jax.Array) -> jax.Array:
        """The memory slot of a microbatch, or -1."""
        slots = jnp.asarray(self._buffers.flight)
        return jnp.where(microbatch >= 0, slots[jnp.maximum(microbatch, 0)], -1)

    # The whole batch

    def weights(self, select: Callable[[Any], list]) -> list:
        """Sums of outputs that come from the data alone, over all microbatches.

        Args:
            select: The outputs to sum, of the function's.
        """

        def weigh(early: Arrays, item: Any) -> tuple[Arrays, list]:
            batch, key = item
            variables = self.variables | early
            with using(self._layout):
                found, early = self.cut.without_stack(
                    select, self.params, variables, batch, key
                )
            return early, found

        early = self.pick(self.cut.early)
        items = (self._given.batch, self._given.keys)
        _, weights = jax.lax.scan(weigh, early, items)
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
