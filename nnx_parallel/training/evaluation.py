"""The compiled evaluation and prediction.

Under a pipeline both run the forward half of the schedule, on microbatches.

A training state and the compiled programs that act on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.data.agreement import BatchAgreement
from nnx_parallel.data.batches import join_rows, place_batch
from nnx_parallel.data.prefetch import PrefetchIterator
from nnx_parallel.errors import DataError
from nnx_parallel.layers.loss import LabelRange, observing_labels
from nnx_parallel.metrics import Mean, split_loss_output
from nnx_parallel.precision import cast_floating
from nnx_parallel.sharding.model import ModelFn
from nnx_parallel.sharding.names import flatten_pure, is_inexact
from nnx_parallel.sharding.tree import gather
from nnx_parallel.state import StatePlan, TrainState, init_state
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
            join=lambda means: jax.tree.map(lambda x: jnp.sum(x, axis=0), means),
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
            jax.random.key(0),
            options.num_microbatches,
            join=join_rows,
            needs_stack=False,
        )

    return jax.jit(predict_step)


_NUM_FUNCTIONS = 8
"""Functions of predictions whose programs are kept: one made anew each time adds up."""


@dataclass(frozen=True, kw_only=True)
class EvalGuard:
    """What watches over an evaluation.

    Attributes:
        start_clock: Called where the next batch should end in time, or anew.
        stop_clock: Called before a program is compiled.
        stop_reason: Why this process wants it to end before the next batch, or
            ``None``. With several processes it ends for all of them at once.
    """

    start_clock: Callable[[], None] = lambda: None
    stop_clock: Callable[[], None] = lambda: None
    stop_reason: Callable[[], str | None] = lambda: None


class Engine:
    """Holds the state of a run and the programs compiled for it.

    Args:
        plan: The model's structure and the place of every array.
        source: The model, or the function that builds it.
        loss: The user's loss.
        options: How a step is run.
        seed: Of the model and of every random stream.
        global_batch_size: Rows of every training batch, to be checked, or ``None``.
    """

    def __init__(
        self,
        plan: StatePlan,
        source: nnx.Module | ModelFn,
        loss: LossFn,
        options: StepOptions,
        seed: int,
        global_batch_size: int | None = None,
    ) -> None:
        self.plan = plan
        self._global_batch_size = global_batch_size
        self.options = options
        self._source = source
        self._loss = loss
        self._seed = seed
        self._state: TrainState | None = None
        self._is_fresh = True
        self._functions: dict[Callable, Callable] = {}
        self._eval_programs: set[tuple] = set()
        self.first_batch: Batch | None = None
        self.temporary_bytes: int | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the state is the first one: neither trained nor restored."""
        return self._is_fresh

    @property
    def state(self) -> TrainState:
        """The training state, built on first use."""
        if self._state is None:
            rngs = nnx.Rngs(self._seed)
            self._state = init_state(self.plan, self._source, rngs, self._seed)
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state
        self._is_fresh = False

    def start_from(self, state: TrainState) -> None:
        """Takes other values to begin with: the run is as fresh as it was."""
        self._state = state

    @cached_property
    def train_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The compiled update; it donates the state."""
        return make_train_step(self.plan, self._loss, self.options)

    @cached_property
    def _eval_step(self) -> Callable[..., dict[str, Mean]]:
        return make_eval_step(self.plan, self._loss, self.options)

    def shard_batch(self, batch: Batch) -> Batch:
        """Puts a batch on the mesh, checked to divide evenly."""
        return place_batch(
            batch,
            self.plan.layout,
            num_microbatches=self.options.num_microbatches,
            global_batch_size=self._global_batch_size,
        )

    def params(self, *, ema: bool) -> dict[str, Any]:
        """The parameters or their moving average.

        Raises:
            ValueError: If there is no average.
        """
        if not ema:
            return self.state.params
        if self.state.ema is None:
            raise ValueError("This Trainer keeps no average. Pass ema_decay=0.999.")
        return self.state.ema

    def model(self, *, ema: bool) -> nnx.Module:
        """The model with the present arrays, in evaluation mode."""
        arrays = self.params(ema=ema), self.state.variables
        return nnx.merge(self.plan.eval_graphdef, *arrays)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint says of the run, as JSON can hold it."""
        params = jax.tree.leaves(self.plan.abstract.params)
        return {
            "mesh": dict(self.plan.layout.mesh.shape),
            "model": self.plan.model_name,
            "optimizer": _optimizer_names(self.plan.abstract.opt_state),
            "num_params": sum(x.size for x in params),
            "num_microbatches": self.options.num_microbatches,
            "seed": self._seed,
        }

    def evaluate(
        self,
        data: Iterable[Batch],
        *,
        ema: bool = False,
        guard: EvalGuard | None = None,
    ) -> dict[str, float]:
        """Mean loss and metrics over all rows; nothing if the guard has it end early.

        Args:
            data: Batches.
            ema: Use the moving average of the parameters.
            guard: What watches over it.
        """
        guard = guard or EvalGuard()
        arrays = (self.params(ema=ema), self.state.variables, self.state.key)
        total: dict[str, Mean] | None = None
        guard.start_clock()
        for index, batch in enumerate(self._batches(data, guard)):
            if batch is None:
                return {}
            leaves, structure = jax.tree.flatten(batch)
            program = ema, structure, *map(jax.typeof, leaves)
            if program not in self._eval_programs:
                guard.stop_clock()
            # Fetched before the next is dispatched: programs that do not depend on one
            # another must not run at once, for each waits for all devices.
            means = jax.device_get(self._eval_step(*arrays, index, batch))
            self._eval_programs.add(program)
            guard.start_clock()
            total = means if total is None else _merge(total, means)
        if total is None:
            raise DataError("There is no batch to evaluate on: the data is empty.")
        return {name: float(mean.value) for name, mean in total.items()}

    def predict(
        self,
        data: Iterable[Batch],
        function: Callable[[Any, Batch], Any] | None = None,
        *,
        ema: bool = False,
    ) -> Any:
        """Outputs of ``function`` for all rows, as NumPy arrays."""
        run = self._compiled(function or _call_model)
        arrays = (self.params(ema=ema), self.state.variables)
        parts = [gather(run(*arrays, batch)) for batch in self._batches(data)]
        if not parts:
            raise DataError("There is no batch to predict on: the data is empty.")
        return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

    def non_finite_arrays(self) -> list[str]:
        """Paths of the parameters and variables that hold a NaN or an infinity."""
        arrays = flatten_pure(self.state.params) | flatten_pure(self.state.variables)
        floating = {path: x for path, x in arrays.items() if is_inexact(x)}
        is_finite = jax.jit(partial(jax.tree.map, lambda x: jnp.isfinite(x).all()))
        return [path for path, ok in is_finite(floating).items() if not ok]

    def label_ranges(self) -> list[LabelRange]:
        """The labels that our losses find in the fit's first batch, if it is known."""
        if self.first_batch is None or execution_of(self.plan).cuts_loss:
            return []
        arrays = (self.state.params, self.state.variables, self.state.key)
        with observing_labels() as seen:
            step = make_eval_step(self.plan, self._loss, self.options)
            jax.block_until_ready(step(*arrays, 0, self.first_batch))
        return seen

    def _compiled(self, function: Callable[[Any, Batch], Any]) -> Callable:
        step = self._functions.pop(function, None)
        if step is None:
            step = make_predict_step(self.plan, function, self.options)
        self._functions[function] = step  # the last one used stands last
        if len(self._functions) > _NUM_FUNCTIONS:
            del self._functions[next(iter(self._functions))]
        return step

    def _batches(
        self, data: Iterable[Batch], guard: EvalGuard | None = None
    ) -> Iterator[Batch]:
        """The batches on the mesh; ``None`` where the guard has them end."""
        guard = guard or EvalGuard()
        place = partial(place_batch, layout=self.plan.layout)
        is_alone = jax.process_count() == 1
        if is_alone:
            feed = PrefetchIterator(data, place, uniform=False)
        else:
            # A remainder is gathered, which must not meet another thread's program.
            agreement = BatchAgreement("evaluation batch", guard.stop_reason)
            feed = PrefetchIterator(
                data, place, uniform=False, prefetch=0, agreement=agreement
            )
        with feed:
            for item in feed:
                reason = guard.stop_reason() if is_alone else item.stop_reason
                if reason is not None:
                    yield None
                    return
                yield item.batch


def _optimizer_names(opt_state: Any) -> str:
    """The kinds of an optimizer's states, outermost first: what Optax lets be seen."""
    names: dict[str, None] = {}

    def visit(node: Any) -> bool:
        if hasattr(node, "_fields"):
            names[type(node).__name__] = None
        return False

    jax.tree.leaves(opt_state, is_leaf=visit)
    return ", ".join(name for name in names if name != "EmptyState")


def _call_model(model: Any, batch: Batch) -> Any:
    return model(batch)


def _merge(total: dict[str, Mean], means: dict[str, Mean]) -> dict[str, Mean]:
    """Adds totals and weights, on the host and in double precision."""
    return jax.tree.map(lambda a, b: np.float64(a) + np.float64(b), total, means)
