"""The Trainer: a model, an optimizer, a loss, and a strategy for all the rest."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.callbacks import Callback, Hooks
from nnx_parallel.checkpoint import Checkpoint, Storage
from nnx_parallel.data import Position, is_one_shot
from nnx_parallel.engine import Engine
from nnx_parallel.errors import DataError, NonFiniteLossError
from nnx_parallel.layers import Remat, check_remat
from nnx_parallel.loggers import Logger, LoggerGroup, default_loggers
from nnx_parallel.loop import Loop, repeat_first
from nnx_parallel.mesh import Device
from nnx_parallel.precision import Precision
from nnx_parallel.profiling import Profile, Tracer
from nnx_parallel.recorder import History, Recorder
from nnx_parallel.sharding.model import ModelFn, abstract_model
from nnx_parallel.state import TrainState, plan_state
from nnx_parallel.step import Batch, LossFn, Metrics, StepOptions
from nnx_parallel.strategies import DataParallel, Strategy
from nnx_parallel.strategies.describe import Description, describe_model


class Trainer:
    """Trains an NNX model under a strategy: the step, the loop, the checkpoints.

    Changing ``strategy`` and nothing else moves a run from one device to many; the
    losses stay equal.

    Args:
        model: A function from ``nnx.Rngs`` to a model, which is then built already
            sharded; or a built model, whose arrays are copied.
        optimizer: An Optax transformation, or a function of the abstract model that
            returns one (for masks and dimension numbers that depend on it).
        loss: ``loss(model, batch)`` or ``loss(model, batch, rngs)``: a scalar or
            `Mean`, or one with a dict of metrics.
        strategy: Where everything lives; by default `DataParallel` over all devices.
        num_microbatches: Parts into which each batch is split; their gradients are
            accumulated.
        seed: Of the model's parameters and of every random stream.
        wrt: Filter of the Variables that are trained.
        precision: The dtypes.
        remat: What is kept for the backward pass, where the model does not say.
        ema_decay: Keep an exponential moving average of the parameters.
        checkpoint: A directory, or a `Checkpoint` with more to say; ``None`` saves
            nothing. ``fit`` resumes from it by itself.
        devices: The devices to use; by default all.
        mesh: A mesh to use instead, with the strategy's axes, all Auto.
        loggers: Where metrics go; by default the console, and ``metrics.jsonl`` in
            the checkpoint's directory.
        callbacks: Hooks of the fit.
        log_every: Steps between logged metrics.
        profile: ``(start, stop)``: trace these steps with ``jax.profiler``.
        fast_dev_run: Two steps and one batch of evaluation, nothing written: to see
            that all parts fit.
        overfit_batches: Train on this many batches over and over.

    Raises:
        MeshShapeError: If the strategy's sizes do not multiply to the devices.
        ParallelError: Whatever else a strategy finds wrong with the model, by name.

    Example:
        >>> import numpy as np
        >>> import optax
        >>> def loss(model, batch):
        ...     return ((model(batch["x"]) - batch["y"]) ** 2).mean()
        >>> trainer = Trainer(
        ...     model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        ...     optimizer=optax.sgd(0.1),
        ...     loss=loss,
        ...     loggers=(),
        ... )
        >>> x = np.ones((16, 4), np.float32)
        >>> history = trainer.fit([{"x": x, "y": x[:, :1]}] * 5, num_steps=5)
        >>> bool(history["loss"][-1] < history["loss"][0])
        True
    """

    def __init__(
        self,
        model: nnx.Module | ModelFn,
        optimizer: Any,
        loss: LossFn,
        *,
        strategy: Strategy | None = None,
        num_microbatches: int = 1,
        seed: int = 0,
        wrt: Any = nnx.Param,
        precision: Precision | None = None,
        remat: Remat = "none",
        ema_decay: float | None = None,
        checkpoint: Checkpoint | str | os.PathLike | None = None,
        devices: Sequence[Device] | None = None,
        mesh: Mesh | None = None,
        loggers: Sequence[Logger] | None = None,
        callbacks: Sequence[Callback] = (),
        log_every: int = 1,
        profile: tuple[int, int] | None = None,
        fast_dev_run: bool = False,
        overfit_batches: int = 0,
    ) -> None:
        check_remat(remat)
        _check_arguments(devices, mesh, num_microbatches, ema_decay)
        self.strategy = strategy or DataParallel()
        self.layout = self.strategy.layout(mesh or self.strategy.make_mesh(devices))
        self._optimizer = optimizer
        self._wrt = wrt
        self._log_every = log_every
        self._fast_dev_run = fast_dev_run
        self._overfit_batches = overfit_batches
        self._source = model
        self._seed = seed
        plan = plan_state(
            abstract_model(self._source, nnx.Rngs(self._seed)),
            self.layout,
            optimizer,
            wrt=wrt,
            precision=precision,
            ema_decay=ema_decay,
        )
        options = StepOptions(num_microbatches=num_microbatches, remat=remat)
        self._engine = Engine(plan, model, loss, options, seed)
        checkpoint = None if fast_dev_run else checkpoint
        description = {"strategy": repr(self.strategy), **self._engine.describe()}
        self._storage = Storage(checkpoint, description)
        self._position = Position()
        self._tracer = Tracer(
            None if profile is None or fast_dev_run else Profile(*profile),
            self._storage.local_directory,
        )
        self._loggers = loggers
        self._hooks = Hooks(self, callbacks)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.layout.mesh

    @property
    def state(self) -> TrainState:
        """The training state, built on first use. A step donates and replaces it.

        A loop of your own hands the new one back, for all else that the Trainer does:
        ``trainer.state, metrics = trainer.train_step(trainer.state, batch)``.
        """
        return self._engine.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._engine.state = state

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        return int(self.state.step)

    @property
    def model(self) -> nnx.Module:
        """The model with its present arrays, global and sharded, in evaluation mode.

        The arrays are those of `state`: the next step donates them, and with them this
        model. Ask again after it, or copy.
        """
        return self._engine.model(ema=False)

    @property
    def ema_model(self) -> nnx.Module:
        """`model` with the moving average of the parameters.

        Raises:
            ValueError: If the Trainer keeps none.
        """
        return self._engine.model(ema=True)

    @property
    def train_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The compiled step, for a loop of your own: ``(state, batch)`` to the same.

        It is pure but for donating the state; take batches from `shard_batch`.
        """
        return self._engine.train_step

    def shard_batch(self, batch: Batch) -> Batch:
        """Puts a host batch on the mesh as `train_step` takes it.

        Raises:
            BatchShapeError: If its rows do not divide over devices and microbatches.
        """
        return self._engine.shard_batch(batch)

    def describe(self) -> Description:
        """Where every array lives and why, with bytes per device."""
        model = abstract_model(self._source, nnx.Rngs(self._seed))
        return describe_model(model, self.layout, self._optimizer, self._wrt)

    def fit(
        self,
        data: Iterable[Batch],
        num_steps: int,
        *,
        eval_data: Iterable[Batch] | None = None,
        eval_every: int | None = None,
    ) -> History:
        """Trains until ``num_steps`` updates are done in all, those before included.

        Starts from the newest checkpoint if there is one and nothing has been trained
        yet. A checkpoint is saved as its options say, and at the end.

        Args:
            data: Batches: pytrees of NumPy arrays that hold the global batch.
            num_steps: Total number of updates of the run.
            eval_data: Batches to evaluate on, iterated anew each time.
            eval_every: Steps between evaluations; ``None`` evaluates at the end.

        Returns:
            Metrics by name, an entry for each step done in this call.

        Raises:
            NonFiniteLossError: If a loss is not finite; names what went bad.
            DataExhaustedError: If the data ends before ``num_steps``.
            BatchShapeError: If a batch does not divide, or changes its shape.
        """
        _check_eval_data(eval_data)
        logger = LoggerGroup(self._make_loggers())
        recorder = Recorder(logger, self._hooks.step_end, log_every=self._log_every)
        try:
            resumed = self._resume()
            self._storage.check_ahead(self.step)
            if self._fast_dev_run:
                num_steps = min(num_steps, self.step + 2)
                eval_data = eval_data and list(itertools.islice(eval_data, 1))
            if self._overfit_batches:
                data = repeat_first(data, self._overfit_batches)
            logger.start(first_step=self.step, num_steps=num_steps)
            if resumed:
                logger.message(resumed)
            self._hooks.fit_start()
            if self.step < num_steps:
                self._loop(recorder, eval_data, eval_every).run(data, num_steps)
            else:
                logger.message(f"All {num_steps} steps are done: nothing to train.")
            if self._hooks.wants_stop:
                reason = self._hooks.stop_reason
                logger.message(f"Stopped at step {self.step}: {reason}")
            history = recorder.history()
            self._storage.wait()
            self._hooks.fit_end(history)
        except NonFiniteLossError as error:
            raise NonFiniteLossError(f"{error} {self._diagnosis()}") from None
        finally:
            with self._storage:
                logger.finish()
        return history

    def _loop(
        self,
        recorder: Recorder,
        eval_data: Iterable[Batch] | None,
        eval_every: int | None,
    ) -> Loop:
        return Loop(
            engine=self._engine,
            storage=self._storage,
            position=self._position,
            recorder=recorder,
            tracer=self._tracer,
            hooks=self._hooks,
            eval_data=eval_data,
            eval_every=eval_every,
        )

    def stop(self, reason: str) -> None:
        """Ends the fit after the step in work, evaluated and saved as the last one."""
        self._hooks.stop_reason = reason

    def evaluate(self, data: Iterable[Batch], *, ema: bool = False) -> dict[str, float]:
        """Mean loss and metrics over all rows, the model in evaluation mode.

        A remainder that the devices do not divide runs unpadded. Plain scalars weigh
        by rows, a `Mean` by its weight.

        Args:
            data: Batches, of any number of rows each.
            ema: Use the moving average of the parameters.

        Raises:
            DataError: If there is no batch.
        """
        return self._engine.evaluate(data, ema=ema)

    def predict(
        self,
        data: Iterable[Batch],
        function: Callable[[Any, Batch], Any] | None = None,
        *,
        ema: bool = False,
    ) -> Any:
        """Outputs for all rows, the model in evaluation mode.

        Args:
            data: Batches.
            function: ``function(model, batch)`` to a pytree of arrays with the rows
                along dim 0; by default ``model(batch)``. It is compiled once for each
                function object and shape.
            ema: Use the moving average of the parameters.

        Returns:
            The outputs of all batches, concatenated, as NumPy arrays.

        Raises:
            DataError: If there is no batch.
        """
        return self._engine.predict(data, function, ema=ema)

    def save(self) -> None:
        """Saves the present state under its step, and waits until it is on disk.

        Raises:
            CheckpointNotFoundError: If the Trainer has no checkpoint directory.
            CheckpointError: If this step or a later one is saved already.
        """
        try:
            position = self._position.to_json()
            self._storage.save(self.state, self.step, position, {}, once=False)
        finally:
            self._storage.close()

    def restore(
        self,
        step: int | Literal["best"] | None = None,
        *,
        directory: str | os.PathLike | None = None,
        weights_only: bool = False,
    ) -> None:
        """Replaces the state by a saved one, whatever strategy has saved it.

        Args:
            step: A saved step; ``"best"`` by ``Checkpoint(keep_best=...)``; ``None``
                for the latest.
            directory: Where from; by default the Trainer's own directory.
            weights_only: Restore parameters and other variables alone; optimizer,
                step and data stay as they are.

        Raises:
            CheckpointNotFoundError: If there is no such step.
            CheckpointMismatchError: If an array differs; each is listed, and nothing
                has changed.
        """
        where = self._storage.options if directory is None else Checkpoint(directory)
        storage = Storage(where, {}, read_only=True)
        try:
            if weights_only:
                self._engine.state = storage.restore_weights(self.state, step)
            else:
                self._take(storage, step)
        finally:
            storage.close()

    def _resume(self) -> str | None:
        if not self._engine.is_fresh or not self._storage.resumes():
            return None
        self._take(self._storage, None)
        return f"Resumed from step {self.step} in '{self._storage.directory}'."

    def _take(self, storage: Storage, step: int | Literal["best"] | None) -> None:
        state, position = storage.restore(self._engine.plan.abstract, step)
        self._engine.state = state
        self._position = Position.from_json(position)

    def _make_loggers(self) -> Sequence[Logger]:
        if self._loggers is not None and not self._fast_dev_run:
            return self._loggers
        return default_loggers(self._storage.local_directory)

    def _diagnosis(self) -> str:
        """What the state holds that is not finite, and the way back."""
        bad = self._engine.non_finite_arrays()
        saved = self._storage.latest_step
        way_back = "no checkpoint" if saved is None else f"a checkpoint of step {saved}"
        kept = f"Nothing was saved from the bad step on; there is {way_back}."
        if not bad:
            return (
                f"All arrays are finite at step {self.step}, the last one done. {kept} "
                "Look at the batch of the bad step, and at what the loss does with it."
            )
        shown = ", ".join(f"`{path}`" for path in bad[:5])
        return (
            f"Not finite at step {self.step}, the last one done: {shown} ({len(bad)} "
            f"arrays). {kept} Lower the learning rate, clip with "
            "optax.clip_by_global_norm, or look at the batches of these steps."
        )


def _check_arguments(
    devices: Sequence[Device] | None,
    mesh: Mesh | None,
    num_microbatches: int,
    ema_decay: float | None,
) -> None:
    if devices is not None and mesh is not None:
        raise ValueError(
            "Trainer got devices= and mesh=. A mesh names its devices already: pass "
            "one of the two."
        )
    if num_microbatches < 1:
        raise ValueError(
            f"num_microbatches={num_microbatches}. It must be at least 1, which does "
            "not split the batch."
        )
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(
            f"ema_decay={ema_decay}. It must be at least 0 and below 1, such as 0.999."
        )


def _check_eval_data(eval_data: object) -> None:
    if eval_data is not None and is_one_shot(eval_data):
        raise DataError(
            "eval_data is an iterator, which one evaluation would use up. Pass a list, "
            "or an object whose __iter__ starts anew."
        )
