"""One tick of training: forward, the part after the stack, backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.keeping import Layers
from nnx_parallel.pipeline.conditional import zeros_like, zeros_of
from nnx_parallel.pipeline.edges import Edges, Flight
from nnx_parallel.pipeline.executor import Executor
from nnx_parallel.pipeline.memory_slots import make_slots, read_slot, write_slot
from nnx_parallel.pipeline.parts import Arrays
from nnx_parallel.pipeline.rows import Row
from nnx_parallel.sharding.arrays import is_inexact

Carry = dict[str, Any]


class TrainingTick:
    """The body of a scan over ticks.

    Args:
        edges: The parts around the stack.
        executor: Runs the stages.
        layers: The layers, as they are before the step.
        objective: The scalar of one microbatch whose gradient is summed.
    """

    def __init__(
        self,
        edges: Edges,
        executor: Executor,
        layers: Layers,
        objective: Callable[[Any], jax.Array],
    ) -> None:
        self._edges = edges
        self._executor = executor
        self._layers = layers
        self._objective = objective

    def start(
        self, memory: dict, outputs: Any, grads: Arrays, layer_grads: dict
    ) -> Carry:
        """The carry before the first tick.

        Args:
            memory: Of the stages.
            outputs: Memory for the function's outputs.
            grads: Zeros for the gradients of parameters outside the stack.
            layer_grads: The same of its layers.
        """
        edges = self._edges
        flights = edges.make_flights()
        floats = [x[0] for x in flights.skips if is_inexact(x)]
        num_slots = self._executor.buffers.num_flights
        return {
            "state": self._layers.state,
            "memory": memory,
            "outputs": outputs,
            "flights": flights,
            "skip_grads": make_slots(num_slots, floats),
            "early": edges.pick(edges.cut.early),
            "late": edges.pick(edges.cut.late),
            "layer_grads": layer_grads,
            "grads": grads,
        }

    def __call__(self, carry: Carry, row: Row) -> tuple[Carry, None]:
        """All slots of a tick, in their order."""
        edges, whole = self._edges, row["whole"]
        variables = edges.variables | carry["early"]
        fed, flight, early = edges.enter(whole["enters"], variables)
        flights = edges.keep(carry["flights"], whole["enters"], flight)
        layers = dataclasses.replace(self._layers, state=carry["state"])
        layers, memory, leaving = self._executor.forward(
            layers, carry["memory"], fed, row
        )
        carry = carry | {"flights": flights, "early": early, "state": layers.state}
        carry, fed = self._turn(carry, whole["leaves"], leaving)
        layer_grads, memory, returned = self._executor.backward(
            layers, memory, carry["layer_grads"], fed, row
        )
        grads = self._leave(carry, whole["returns"], returned)
        carry |= {"memory": memory, "layer_grads": layer_grads, "grads": grads}
        return carry, None

    def _turn(
        self, carry: Carry, microbatch: jax.Array, leaving: list
    ) -> tuple[Carry, list]:
        """The part after the stack and its gradients, for who leaves the stack now.

        Returns:
            The carry, and the gradients of what has left the stack.
        """
        edges = self._edges
        flight = edges.recall(carry["flights"], microbatch)

        def objective(params: Arrays, skips: list, leaving: list) -> Any:
            rest = iter(skips)
            skips = [next(rest) if is_inexact(x) else x for x in flight.skips]
            outputs, late = edges.after(
                microbatch, params, carry["late"], Flight(skips, flight.early), leaving
            )
            return self._objective(outputs), (outputs, late)

        def run() -> Any:
            skips = [x for x in flight.skips if is_inexact(x)]
            value, vjp, (outputs, late) = jax.vjp(
                objective, edges.params, skips, leaving, has_aux=True
            )
            new, *grads = vjp(jnp.ones_like(value))
            return add(carry["grads"], new), late, *grads, outputs

        def skip() -> Any:
            _, _, *rest = zeros_of(run)
            return carry["grads"], carry["late"], *rest

        with jax.named_scope("after"):
            grads, late, skip_grads, cotangents, outputs = jax.lax.cond(
                microbatch >= 0, run, skip
            )
        kept = write_slot(carry["skip_grads"], skip_grads, edges.slot(microbatch))
        # The arguments of the blocks end with the last one: no gradient comes back.
        active = edges.with_gradients(edges.entering)
        ended = zeros_like(active[len(cotangents) :])
        outputs = write_slot(carry["outputs"], outputs, microbatch)
        carry = carry | {"grads": grads, "skip_grads": kept, "late": late}
        return carry | {"outputs": outputs}, [*cotangents, *ended]

    def _leave(self, carry: Carry, microbatch: jax.Array, returned: list) -> Arrays:
        """Gradients with those of the part before, whose backward pass runs now."""
        edges = self._edges
        flight = edges.recall(carry["flights"], microbatch)
        skip_grads = read_slot(carry["skip_grads"], edges.slot(microbatch))

        def before(params: Arrays) -> list:
            entering, skips = edges.before(microbatch, params, flight)
            skips = [x for x in skips if is_inexact(x)]
            return [*edges.with_gradients(entering), *skips]

        def run() -> Arrays:
            _, vjp = jax.vjp(before, edges.params)
            (new,) = vjp([*edges.spread(returned), *skip_grads])
            return add(carry["grads"], new)

        with jax.named_scope("before_backward"):
            return jax.lax.cond(microbatch >= 0, run, lambda: carry["grads"])


def add(grads: Arrays, new: Arrays) -> Arrays:
    """Sums in the dtype of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, new)
