"""One tick of training: forward, the part after the stack, backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from nnx_parallel.pipeline.edges import Edges, Flight, zeros_like
from nnx_parallel.pipeline.executor import Executor
from nnx_parallel.pipeline.keeping import Layers
from nnx_parallel.pipeline.memory_slots import make_slots, read_slot, write_slot
from nnx_parallel.pipeline.parts import Arrays
from nnx_parallel.pipeline.rows import Row
from nnx_parallel.pipeline.stage import is_floating

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

    def start(self, memory: dict, grads: Arrays, layer_grads: dict) -> Carry:
        """The carry before the first tick.

        Args:
            memory: Of the stages.
            grads: Zeros for the gradients of parameters outside the stack.
            layer_grads: The same of its layers.
        """
        edges = self._edges
        flights = edges.make_flights()
        floats = [x[0] for x in flights.skips if is_floating(x)]
        num_slots = self._executor.buffers.num_flights
        return {
            "state": self._layers.state,
            "memory": memory,
            "flights": flights,
            "skip_grads": make_slots(num_slots, floats),
            "early": edges.pick(edges.cut.early),
            "late": edges.pick(edges.cut.late),
            "layer_grads": layer_grads,
            "grads": grads,
        }

    def __call__(self, carry: Carry, row: Row) -> tuple[Carry, Any]:
        """All slots of a tick, in their order; emits the function's outputs."""
        edges, whole = self._edges, row["whole"]
        variables = edges.variables | carry["early"]
        fed, flight, early = edges.enter(whole["enters"], variables)
        flights = edges.keep(carry["flights"], whole["enters"], flight)
        layers = dataclasses.replace(self._layers, state=carry["state"])
        layers, memory, leaving = self._executor.forward(
            layers, carry["memory"], fed, row
        )
        carry = carry | {"flights": flights, "early": early, "state": layers.state}
        carry, outputs, fed = self._turn(carry, whole["leaves"], leaving)
        layer_grads, memory, returned = self._executor.backward(
            layers, memory, carry["layer_grads"], fed, row
        )
        grads = self._leave(carry, whole["returns"], returned)
        carry |= {"memory": memory, "layer_grads": layer_grads, "grads": grads}
        return carry, outputs

    def _turn(
        self, carry: Carry, microbatch: jax.Array, leaving: list
    ) -> tuple[Carry, Any, list]:
        """The part after the stack and its gradients, for who leaves the stack now.

        Returns:
            The carry, the outputs, and the gradients of what has left the stack.
        """
        edges = self._edges
        flight = edges.recall(carry["flights"], microbatch)

        def objective(params: Arrays, skips: list, leaving: list) -> Any:
            rest = iter(skips)
            skips = [next(rest) if is_floating(x) else x for x in flight.skips]
            outputs, late = edges.after(
                microbatch, params, carry["late"], Flight(skips, flight.early), leaving
            )
            return self._objective(outputs), (outputs, late)

        def run() -> Any:
            skips = [x for x in flight.skips if is_floating(x)]
            (new, *grads), (outputs, late) = jax.grad(
                objective, (0, 1, 2), has_aux=True
            )(edges.params, skips, leaving)
            return add(carry["grads"], new), late, *grads, outputs

        def skip() -> Any:
            _, _, *rest = zeros_like(jax.eval_shape(run))
            return carry["grads"], carry["late"], *rest

        with jax.named_scope("after"):
            grads, late, skip_grads, cotangents, outputs = jax.lax.cond(
                microbatch >= 0, run, skip
            )
        kept = write_slot(carry["skip_grads"], skip_grads, edges.slot(microbatch))
        # The arguments of the blocks end with the last one: no gradient comes back.
        floats = [x for x in edges.entering if is_floating(x)]
        ended = zeros_like(floats[len(cotangents) :])
        carry = carry | {"grads": grads, "skip_grads": kept, "late": late}
        return carry, outputs, [*cotangents, *ended]

    def _leave(self, carry: Carry, microbatch: jax.Array, returned: list) -> Arrays:
        """Gradients with those of the part before, whose backward pass runs now."""
        edges = self._edges
        flight = edges.recall(carry["flights"], microbatch)
        skip_grads = read_slot(carry["skip_grads"], edges.slot(microbatch))

        def before(params: Arrays) -> list:
            values = edges.before(microbatch, params, flight)
            return [x for x in values if is_floating(x)]

        def run() -> Arrays:
            _, vjp = jax.vjp(before, edges.params)
            (new,) = vjp([*edges.spread(returned), *skip_grads])
            return add(carry["grads"], new)

        with jax.named_scope("before_backward"):
            return jax.lax.cond(microbatch >= 0, run, lambda: carry["grads"])


def add(grads: Arrays, new: Arrays) -> Arrays:
    """Sums in the dtype of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, new)
