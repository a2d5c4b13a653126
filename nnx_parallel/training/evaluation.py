"""Evaluation and prediction: their compiled steps, and the passes over the data.

Under a pipeline both run the forward half of the schedule, on microbatches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from nnx_parallel.metrics import Mean, split_loss_output
from nnx_parallel.precision import cast_floating
from nnx_parallel.sharding.tree import gather
from nnx_parallel.state import StatePlan, TrainState
from nnx_parallel.training.step import (
    Batch,
    LossFn,
    Metrics,
    StepOptions,
    call_loss,
    execution_of,
    make_train_step,
)


def make_eval_step(
    plan: StatePlan, loss: LossFn, options: StepOptions
) -> Callable[[dict, dict, jax.Array, int, Batch], dict[str, Mean]]:
    """The compiled evaluation: ``(params, variables, key, index, batch)`` to means.

    The model is in evaluation mode and its variables stay as they are. A plain scalar
    weighs by the batch's rows, a `Mean` by its weight. Each batch, by its index, draws
    random numbers of its own, the same in every evaluation. Under a pipeline the
    batch is split into microbatches, each like a batch of its own.
    """

    def means_of(model: nnx.Module, batch: Batch, key: jax.Array) -> dict[str, Mean]:
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        output = call_loss(plan, loss, model, batch, key)
        mean, metrics = split_loss_output(output, weight=num_rows)
        return {"loss": mean, **metrics}

    def eval_step(
        params: dict, variables: dict, key: jax.Array, index: int, batch: Batch
    ) -> dict[str, Mean]:
        return execution_of(plan).outputs(
            plan,
            means_of,
            (params, variables),
            batch,
            jax.random.fold_in(key, index),
            options.num_microbatches,
            # (microbatches, ...) -> (...): totals and weights of a Mean add up.
            join=lambda means: jax.tree.map(lambda x: jnp.sum(x, axis=0), means),
            # A loss without a Stack is an error under a pipeline, as it is in training.
            needs_stack=True,
        )

    return jax.jit(eval_step)


def make_predict_step(
    plan: StatePlan, function: Callable[[Any, Batch], Any], options: StepOptions
) -> Callable[[dict, dict, Batch], Any]:
    """The compiled prediction: ``(params, variables, batch)`` to outputs by row.

    Every output has the rows as its first dim: a pipeline splits and joins them.
    """

    def call(model: nnx.Module, batch: Batch, key: jax.Array) -> Any:
        return function(model, batch)

    def predict_step(params: dict, variables: dict, batch: Batch) -> Any:
        return execution_of(plan).outputs(
            plan,
            call,
            (params, variables),
            cast_floating(batch, plan.precision.inputs),
            # For the interface alone: `call` draws no random number.
            jax.random.key(0),
            options.num_microbatches,
            join=join_rows,
            needs_stack=False,
        )

    return jax.jit(predict_step)


_NUM_FUNCTIONS = 8
"""Functions of predictions whose programs are kept: one made for each call adds up."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Programs:
    """The compiled programs of a run; each is traced at its first call.

    Attributes:
        plan: The model's structure and the place of every array.
        loss: The user's loss.
        options: How a step is run.
        global_batch_size: Rows of every training batch, to be checked, or ``None``.
    """

    plan: StatePlan
    loss: LossFn
    options: StepOptions
    global_batch_size: int | None = None

    @cached_property
    def train_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The compiled update; it donates the state."""
        return make_train_step(self.plan, self.loss, self.options)

    @cached_property
    def _eval_step(self) -> Callable[..., dict[str, Mean]]:
        return make_eval_step(self.plan, self.loss, self.options)

    @cached_property
    def _predict_step(self) -> Callable[[Callable], Callable[..., Any]]:
        make = partial(make_predict_step, self.plan, options=self.options)
        return lru_cache(_NUM_FUNCTIONS)(make)

    @cached_property
    def _compiled_evals(self) -> set[tuple]:
        return set()

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
        """Mean loss and metrics over all rows.

        Args:
            state: The state whose model is evaluated.
            data: Batches.
            ema: Use the moving average of the parameters.
            watchdog: Ends the process if a batch takes too long; compilation does not
                count.
            stop_reason: Why this process wants to stop before the next batch, or
                ``None``. With several processes all of them then stop there.

        Returns:
            Values by name; nothing if it was stopped.
        """
        watchdog = watchdog or Watchdog(None)
        rearm = partial(watchdog.arm, int(state.step), "batch of the evaluation")
        arrays = (params_of(state, ema=ema), state.variables, state.key)
        total: dict[str, Mean] | None = None
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
        run = self._predict_step(function or _call_model)
        arrays = (params_of(state, ema=ema), state.variables)
        # To the host batch by batch: on the devices all outputs may not fit.
        parts = [gather(run(*arrays, batch)) for batch in self._batches(data)]
        if not parts:
            raise DataError("There is no batch to predict on: the data is empty.")
        return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

    def label_ranges(self, state: TrainState, batch: Batch) -> list[LabelRange]:
        """The labels that our losses find in a batch on the mesh, where they can."""
        # Compiled once more: the losses report their labels only if traced here.
        step = make_eval_step(self.plan, self.loss, self.options)
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
        batches = PrefetchIterator(
            data,
            place,
            # Evaluation takes batches of any number of rows.
            uniform=False,
            prefetch=2 if is_alone else 0,
            agreement=BatchAgreement("evaluation batch", stop_reason),
        )
        with batches:
            for item in batches:
                if (stop_reason() if is_alone else item.stop_reason) is not None:
                    yield None
                    return
                yield item.batch


def params_of(state: TrainState, *, ema: bool) -> dict[str, Any]:
    """The parameters or their moving average.

    Raises:
        ValueError: If there is no average.
    """
    if not ema:
        return state.params
    if state.ema is None:
        raise ValueError("This Trainer keeps no average. Pass ema_decay=0.999.")
    return state.ema


def _call_model(model: Any, batch: Batch) -> Any:
    return model(batch)
