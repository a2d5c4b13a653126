"""A loss written for one device, run as a pipeline: its gradients, or its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.pipeline.buffers import plan_buffers
from nnx_parallel.pipeline.check import check_layer
from nnx_parallel.pipeline.cut import Arrays
from nnx_parallel.pipeline.edges import Edges, Function, Given, zeros_like
from nnx_parallel.pipeline.executor import Executor, Row, make_rows
from nnx_parallel.pipeline.keeping import Layers
from nnx_parallel.pipeline.order import plan_rounds, reorder
from nnx_parallel.pipeline.stage import Stage
from nnx_parallel.pipeline.table import Table
from nnx_parallel.pipeline.training import TrainingTick
from nnx_parallel.precision import cast_floating
from nnx_parallel.sharding import using
from nnx_parallel.sharding.model import Path
from nnx_parallel.state import StatePlan


class PipelinedFunction:
    """A function of a model, cut at its stack and bound to a schedule.

    Args:
        plan: The model's structure and the place of every array.
        function: The function; it calls one `Stack` once.
        given: What it is run on.
        table: The schedule.

    Raises:
        PipelineError: If the function cannot be cut, or a stage would end the process.
    """

    def __init__(
        self, plan: StatePlan, function: Function, given: Given, table: Table
    ) -> None:
        options = plan.layout.pipeline
        assert options is not None
        self._plan = plan
        self._options = options
        self._given = given
        self._table = table
        self._rounds = plan_rounds(table.num_stages, table.num_chunks)
        buffers = plan_buffers(table)
        self._rows: Row = make_rows(table, buffers)
        self._edges = Edges(function, given, plan.layout, buffers)
        cut = self._edges.cut
        self._inside = cut.stack_params | cut.stack_others
        stash = "inputs" if table.is_forward_only else options.stash
        stage = Stage(cut.recorded, plan.precision.compute, stash)
        mesh = plan.layout.mesh
        with using(plan.layout):
            jaxpr, self._state_keys = stage.trace_layer(
                self._split(frozenset(cut.stack_others)), self._edges.entering
            )
        check_layer(jaxpr, mesh, options.axis)
        self._executor = Executor(stage, table, buffers, mesh, options.axis)

    def outputs(self) -> Any:
        """The function's outputs, each with a leading dim of microbatches."""
        edges, executor, layers = self._edges, self._executor, self._layers()
        late = edges.pick(edges.cut.late)

        def tick(carry: Any, row: Row) -> tuple[Any, Any]:
            memory, flights = carry
            whole = row["whole"]
            fed, flight, _ = edges.enter(whole["enters"], edges.variables)
            flights = edges.keep(flights, whole["enters"], flight)
            with using(self._plan.layout):
                _, memory, leaving = executor.forward(layers, memory, fed, row)
            flight = edges.recall(flights, whole["leaves"])

            def after() -> Any:
                args = (edges.params, late, flight, leaving)
                return edges.after(whole["leaves"], *args)[0]

            with jax.named_scope("after"):
                outputs = jax.lax.cond(
                    whole["leaves"] >= 0,
                    after,
                    lambda: zeros_like(jax.eval_shape(after)),
                )
            return (memory, flights), outputs

        carry = (executor.allocate(layers, edges.entering), edges.make_flights())
        return self._by_microbatch(jax.lax.scan(tick, carry, self._rows)[1])

    def gradients(
        self,
        objective: Callable[[Any, list], jax.Array],
        weights: Callable[[Any], list],
    ) -> tuple[Arrays, Arrays, Any]:
        """Gradients of a sum over microbatches.

        Args:
            objective: ``(outputs, weights) -> scalar`` of one microbatch, with the
                weights of the whole batch.
            weights: The weights of a microbatch among the outputs; they come from the
                data alone.

        Returns:
            Gradients of the parameters by path, the variables after the step, and the
            outputs with a leading dim of microbatches.
        """
        edges, layers = self._edges, self._layers()
        totals = edges.weights(weights)
        tick = TrainingTick(
            edges, self._executor, layers, lambda outputs: objective(outputs, totals)
        )
        memory = self._executor.allocate(layers, edges.entering)
        carry = tick.start(
            memory, self._zeros(edges.params), self._zeros(layers.trained)
        )
        with using(self._plan.layout):
            carry, outputs = jax.lax.scan(tick, carry, self._rows)
        stacked = (carry["layer_grads"], carry["state"])
        layer_grads, state = self._reorder(stacked, self._rounds.reversed())
        grads = carry["grads"] | {self._inside[k]: x for k, x in layer_grads.items()}
        variables = self._given.variables | carry["early"] | carry["late"]
        variables |= {self._inside[k]: x for k, x in state.items()}
        return grads, variables, self._by_microbatch(outputs)

    def _zeros(self, arrays: dict) -> dict:
        """Where gradients are summed, in the specs and the dtype of gradients."""
        layout, found = self._plan.layout, {}
        for key, x in arrays.items():
            path: Path = self._inside.get(key, key)  # pyright: ignore[reportAssignmentType]
            placement = self._plan.placements[path]
            found[key] = jax.lax.with_sharding_constraint(
                jnp.zeros(x.shape, self._plan.precision.reduction),
                layout.sharding(placement.gradient),
            )
        return found

    def _by_microbatch(self, outputs: Any) -> Any:
        """Of what was found at every tick, what belongs to each microbatch."""
        leaves = np.asarray(self._rows["whole"]["leaves"])
        ticks = np.argsort(np.where(leaves < 0, len(leaves), leaves), kind="stable")
        ticks = ticks[: self._table.num_microbatches]
        return jax.tree.map(lambda x: x[ticks], outputs)

    # The layers

    def _layers(self) -> Layers:
        """The layers where the schedule runs them, gathered if once is enough."""
        layers = self._split(self._state_keys)
        if self._options.gather == "step":
            trained, fixed = self._gather(layers.trained), self._gather(layers.fixed)
            layers = Layers(trained, fixed, layers.state)
        return self._reorder(layers, self._rounds)

    def _split(self, state_keys: frozenset) -> Layers:
        given, inside = self._given, self._inside
        arrays = given.params | given.variables
        is_trained = {key: path in given.params for key, path in inside.items()}
        return Layers(
            trained={k: arrays[p] for k, p in inside.items() if is_trained[k]},
            fixed={
                k: arrays[p]
                for k, p in inside.items()
                if not is_trained[k] and k not in state_keys
            },
            state={k: arrays[inside[k]] for k in state_keys},
        )

    def _gather(self, arrays: dict) -> dict:
        """Parameters as the computation uses them, in its dtype."""
        plan, gathered = self._plan, dict(arrays)
        for key in arrays.keys() & self._edges.cut.stack_params.keys():
            x = cast_floating(arrays[key], plan.precision.compute)
            used = plan.layout.sharding(plan.placements[self._inside[key]].used)
            gathered[key] = jax.lax.with_sharding_constraint(x, used)
        return gathered

    def _reorder(self, tree: Any, rounds: Any) -> Any:
        return reorder(tree, rounds, self._plan.layout.mesh, self._options.axis)
