"""Evaluation and prediction: their compiled steps, and the passes over the data.

The model is in evaluation mode and its variables stay as they are. Under a pipeline
both run the forward half of the schedule, each microbatch like a batch of its own.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.data.batches import BatchAgreement, join_rows, place_batch
from nnx_parallel.data.prefetch import PrefetchIterator
from nnx_parallel.distributed.runtime import Watchdog
from nnx_parallel.errors import DataError
from nnx_parallel.layers.loss import LabelRange
from nnx_parallel.metrics import split_loss_output
from nnx_parallel.precision import cast_floating
from nnx_parallel.sharding.tree import gather
from nnx_parallel.state import StatePlan, TrainState
from nnx_parallel.training.step import (
    Batch,
    LossFn,
    Means,
    Metrics,
    StepOptions,
    call_loss,
    execution_of,
    make_train_step,
)


@dataclass(frozen=True, eq=False)
class Programs:
    """The compiled programs of a run; each is traced at its first call."""

    plan: StatePlan
    loss: LossFn
    options: StepOptions
    global_batch_size: int | None = None  # rows that each training batch must have
    _compiled_evals: set[tuple] = field(default_factory=set, init=False)

    @cached_property
    def train_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The compiled update; it donates the state."""
        return make_train_step(self.plan, self.loss, self.options)

    def _make_eval_step(self) -> Callable[..., Means]:
        """The compiled evaluation: ``(params, variables, key, index, batch)`` to means.

        A plain scalar weighs by the batch's rows, a `Mean` by its weight. Each batch,
        by its index, draws random numbers of its own, the same in every evaluation.
        """
        plan, loss, count = self.plan, self.loss, self.options.num_microbatches

        def means_of(model: nnx.Module, batch: Batch, key: jax.Array) -> Means:
            num_rows = jax.tree.leaves(batch)[0].shape[0]
            output = call_loss(plan, loss, model, batch, key)
            mean, metrics = split_loss_output(output, weight=num_rows)
            return {"loss": mean, **metrics}

        def eval_step(
            params: dict, variables: dict, key: jax.Array, index: int, batch: Batch
        ) -> Means:
            return execution_of(plan).outputs(
                plan,
                means_of,
                (params, variables),
                batch,
                jax.random.fold_in(key, index),
                count,
                # (microbatches, ...) -> (...): totals and weights of a Mean add up.
                join=lambda means: jax.tree.map(lambda x: jnp.sum(x, axis=0), means),
                # A loss without a Stack is an error in a pipeline's training too.
                needs_stack=True,
            )

        return jax.jit(eval_step)

    _eval_step = cached_property(_make_eval_step)

    @cached_property
    def _predict_step(self) -> Callable[[Callable | None], Callable[..., Any]]:
        """A function's prediction: ``(params, variables, batch)`` to its outputs."""
        plan, count = self.plan, self.options.num_microbatches

        # Programs of functions that are made for each call must not add up.
        @lru_cache(maxsize=8)
        def make(function: Callable[[Any, Batch], Any] | None) -> Callable[..., Any]:
            def call(model: Any, batch: Batch, key: jax.Array) -> Any:
                return model(batch) if function is None else function(model, batch)

            def predict_step(params: dict, variables: dict, batch: Batch) -> Any:
                return execution_of(plan).outputs(
                    plan,
                    call,
                    (params, variables),
                    cast_floating(batch, plan.precision.inputs),
                    # For the interface alone: `call` draws no random number.
                    jax.random.key(0),
                    count,
                    join=join_rows,
                    needs_stack=False,
                )

            return jax.jit(predict_step)

        return make

    def shard_batch(self, batch: Batch) -> Batch:
        """Puts a training batch on the mesh, checked to divide evenly."""
        return place_batch(
            batch,
            self.plan.layout,
            num_microbatches=self.options.num_microbatches,
            global_batch_size=self.global_batch_size,
        )

    def evaluate(
        self,
        state: TrainState,
        data: Iterable[Batch],
        *,
        ema: bool = False,
        watchdog: Watchdog | None = None,
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> dict[str, float]:
        """Mean loss and metrics over all rows; nothing if it was stopped.

        The watchdog ends the process if a batch takes too long, compilation apart.
        ``stop_reason`` says why this process wants to stop before the next batch, or
        ``None``; all of several processes then stop there.
        """
        watchdog = watchdog or Watchdog(None)
        rearm = partial(watchdog.arm, int(state.step), "batch of the evaluation")
        arrays = (params_of(state, ema=ema), state.variables, state.key)
        total: Means | None = None
        rearm()
        for index, batch in enumerate(self._batches(data, stop_reason)):
            if batch is None:
                return {}
            leaves, structure = jax.tree.flatten(batch)
            program = ema, structure, *map(jax.typeof, leaves)
            if program not in self._compiled_evals:
                watchdog.disarm()  # compilation may take longer than any step
            # Fetched before the next is dispatched: independent programs with
            # collectives deadlock on simulated devices, which share a pool of threads
            # (docs/library-notes.md, "Simulated devices").
            means = jax.device_get(self._eval_step(*arrays, index, batch))
            self._compiled_evals.add(program)
            rearm()
            # In double precision: a float32 sum of many batches loses whole rows.
            means = jax.tree.map(np.float64, means)
            total = jax.tree.map(operator.add, total, means) if total else means
        if total is None:
            raise DataError("There is no batch to evaluate on: the data is empty.")
        return {name: float(mean.value) for name, mean in total.items()}

    def predict(
        self,
        state: TrainState,
        data: Iterable[Batch],
        function: Callable[[Any, Batch], Any] | None = None,
        *,
        ema: bool = False,
    ) -> Any:
        """Outputs of ``function`` for all rows, as NumPy arrays."""
        run = self._predict_step(function)
        arrays = (params_of(state, ema=ema), state.variables)
        # To the host batch by batch: on the devices all outputs may not fit.
        parts = [gather(run(*arrays, batch)) for batch in self._batches(data)]
        if not parts:
            raise DataError("There is no batch to predict on: the data is empty.")
        return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

    def label_ranges(self, state: TrainState, batch: Batch) -> list[LabelRange]:
        """The labels that our losses find in a batch on the mesh, where they can."""
        # Compiled once more: the losses report their labels only if traced here.
        step = self._make_eval_step()
        return execution_of(self.plan).observe_labels(
            lambda: step(state.params, state.variables, state.key, 0, batch)
        )

    def _batches(
        self,
        data: Iterable[Batch],
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> Iterator[Batch]:
        """The batches on the mesh; in place of one before which to stop, ``None``."""
        place = partial(place_batch, layout=self.plan.layout)
        is_alone = jax.process_count() == 1
        # With several processes nothing is read ahead: rows that do not divide are
        # gathered by a collective, which must not meet one of another thread.
        with PrefetchIterator(
            data,
            place,
            uniform=False,  # any number of rows
            prefetch=2 if is_alone else 0,
            agreement=BatchAgreement("evaluation batch", stop_reason),
        ) as batches:
            for item in batches:
                if (stop_reason() if is_alone else item.stop_reason) is not None:
                    yield None
                    return
                yield item.batch


def params_of(state: TrainState, *, ema: bool) -> dict[str, Any]:
    """The parameters, or their moving average; a `ValueError` if there is none."""
    if not ema:
        return state.params
    if state.ema is None:
        raise ValueError("This Trainer keeps no average. Pass ema_decay=0.999.")
    return state.ema
