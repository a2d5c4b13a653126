"""The Trainer, which trains a model with an optimizer and a loss under a strategy."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial, wraps
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar

from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.checkpoint.manager import CheckpointManager
from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.data.batches import data_share
from nnx_parallel.data.rows import LastBatch
from nnx_parallel.distributed.agreement import meet
from nnx_parallel.distributed.runtime import print_once, raising_interrupts
from nnx_parallel.drawing import as_html
from nnx_parallel.errors import ParallelWarning, kind_of, suggests_names, warn_user
from nnx_parallel.layers.stack.scan import Remat
from nnx_parallel.loggers.console import ConsoleLogger
from nnx_parallel.loggers.logger import Logger
from nnx_parallel.mesh import Device, leaving_mesh
from nnx_parallel.precision import Precision
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import ModelFn, as_source
from nnx_parallel.sharding.model_specs import building_on
from nnx_parallel.sharding.nnx_arrays import plain_variables
from nnx_parallel.sharding.path_names import PathNames
from nnx_parallel.state import TrainState, plan_state
from nnx_parallel.strategies.base import Strategy
from nnx_parallel.strategies.data_parallel import DataParallel
from nnx_parallel.training.arguments import (
    Backend,
    Debugging,
    Evaluation,
    Faults,
    LossFn,
    check_arguments,
    check_assignment,
)
from nnx_parallel.training.auto_remat import rank_remats
from nnx_parallel.training.callback import Callback
from nnx_parallel.training.diagnostics import (
    ShownStep,
    check_length,
    check_model,
    check_seed,
    names_of,
    show_as_users,
)
from nnx_parallel.training.evaluation import Programs, params_of
from nnx_parallel.training.history import History
from nnx_parallel.training.loop import Loop
from nnx_parallel.training.naming import named_model
from nnx_parallel.training.players import (
    Players,
    by_player,
    check_ranking,
    warn_of_unowned,
)
from nnx_parallel.training.run_state import RunState, describe_run, frozen_paths
from nnx_parallel.training.step import Batch, Metrics, StepOptions
from nnx_parallel.training.verification import Verification, Verifier
from nnx_parallel.visualize.describe import Description, warn_idle_parts

_METHODS = {
    **dict.fromkeys(("train", "train_model"), "fit(data, num_steps=...)"),
    **dict.fromkeys(("test", "validate", "eval"), "evaluate(data)"),
    **dict.fromkeys(
        ("load", "load_checkpoint", "load_state_dict"),
        "restore() for a checkpoint, or load_weights(path) for weights",
    ),
    **dict.fromkeys(("save_checkpoint", "save_model"), "save()"),
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint"),
        "fit(...), which resumes from the newest step in Trainer(checkpoint=...)",
    ),
    **dict.fromkeys(("predict_step", "forward"), "predict(data, function)"),
    "summary": "describe()",
    "train_on_batch": "train_step(trainer.state, trainer.shard_batch(batch)), which "
    "returns the new state and the metrics. Assign the state to trainer.state",
}
"""Methods of other libraries' trainers, and ours with the same purpose."""

_WEIGHTS = "from nnx_parallel.weights import"

_REMEDIES = {name: f"Call trainer.{call}." for name, call in _METHODS.items()} | {
    "compile": "Its step is compiled at the first call of fit. Pass the optimizer and "
    "the loss to the Trainer: Trainer(model, optimizer, loss).",
    "save_pretrained": f"Write {_WEIGHTS} save_pretrained, and call "
    "save_pretrained(directory, trainer.eval_model).",
    "push_to_hub": f"Write {_WEIGHTS} push_to_hub, and call "
    "push_to_hub('org/model', trainer.eval_model).",
    "state_dict": "Read trainer.state, which has parameters, optimizer state and step, "
    "or nnx.state(trainer.model) for the weights.",
}
"""Methods of other libraries' trainers, and what to do here instead."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _in_own_context(
    method: Callable[Concatenate["Trainer", _P], _R],
) -> Callable[Concatenate["Trainer", _P], _R]:
    """Wraps a method so that the caller's mesh and Variable modes have no effect."""

    @wraps(method)
    def run(self: "Trainer", *args: _P.args, **kwargs: _P.kwargs) -> _R:
        # When the constructor starts, there is no layout yet.
        layout = vars(self).get("layout")
        mesh = layout and layout.mesh
        try:
            with leaving_mesh(mesh), plain_variables():
                return method(self, *args, **kwargs)
        except Exception as error:
            show_as_users(error)
            raise

    return run


class Trainer:
    """Trains an NNX model under a strategy: runs steps, evaluates, saves checkpoints.

    To move a run from one device to many, change only ``strategy``; the losses stay
    equal. Everything runs on the Trainer's mesh, even inside ``jax.set_mesh`` of
    another mesh. The axes of the Trainer's mesh are Auto. Specs in the model
    (``out_sharding=``, ``reshard``, ``with_sharding_constraint``) become constraints on
    the Trainer's mesh.

    Args:
        model: A function, or a class, that takes ``nnx.Rngs`` and returns a model; the
            model is then built already sharded. It can also be a built model
            or the ``(graphdef, state)`` of a model. The arrays of a built model are
            copied. If the loss assigns values to Variables of the model, the values are
            kept, even if the Variables are trained. An array outside of Variables is a
            constant, as in plain NNX, unless ``wrt`` selects it.
        optimizer: An Optax transformation, or a function that takes the abstract model
            and returns a transformation (for masks and dimension numbers). It can also
            be `Players`, each with a loss and an optimizer; then leave ``loss`` out.
        loss: ``loss(model, batch)`` or ``loss(model, batch, rngs)``. It returns a
            scalar or a `Mean`, or a tuple ``(loss, metrics)`` of such a loss and a dict
            of scalars, `Mean` or `Sum`. A plain scalar counts as a mean over the rows.
            Arrays beside the loss, as in ``(loss, logits)``, are left out, with a
            warning.
        strategy: Placement of all arrays; by default `DataParallel` over all devices.
        devices: The devices to use; by default all devices.
        num_microbatches: Number of parts into which a step divides its batch, to add up
            their gradients. A loss that compares rows, such as a contrastive loss, sees
            only the rows in the same microbatch.
        global_batch_size: Number of rows, over all processes, that each training batch
            must have.
        seed: Seed of the parameters and of every random stream; 32 bits.
        wrt: Filter of the Variables that are trained.
        names: Names of the model's dims, for a model that has no names. ``"auto"``
            derives them from the traced loss; a `PathNames` gives them by path. Names
            in the model and rules of the strategy take precedence.
        sample: For ``names="auto"``: a batch such as `fit` takes, or the shapes of a
            batch (``jax.ShapeDtypeStruct``). The values are not used.
        precision: The dtypes of parameters, computation and gradients.
        remat: The values that a `Stack` recomputes in the backward pass: ``"none"``,
            ``"dots"``, ``"full"``, ``layers.Save(*names)``, or a policy of
            ``jax.checkpoint_policies``. ``"auto"`` compiles the first step two or three
            times, and keeps as many values as fit into the memory of a device. It
            chooses again for batches with other shapes. A model that sets its remat
            ignores this.
        ema_decay: Decay of an exponential moving average of the parameters. If a decay
            is given, the average is used to evaluate, predict and rank checkpoints.
        checkpoint: A directory or a `Checkpoint`, from which ``fit`` resumes
            automatically. ``None`` saves nothing.
        loggers: Loggers of the metrics; by default the console, and ``metrics.jsonl``
            in the checkpoint's directory.
        log_every: Steps between logged metrics.
        callbacks: Hooks of the fit.
        evaluation: The loss and the parameters of evaluations.
        faults: Detection of bad losses, hanging steps, unequal copies of arrays, and
            steps that are not reproducible.
        debugging: Short runs and traces.
        backend: Mesh, offload to host memory, and options of the compiler.

    Raises:
        MeshShapeError: If the strategy's sizes do not multiply to the number of
            devices.
        ParallelError: If the strategy cannot place the model; the message says why.

    Example:
        >>> import numpy as np
        >>> import optax
        >>> def loss(model, batch):
        ...     return ((model(batch["x"]) - batch["y"]) ** 2).mean()
        >>> model = lambda rngs: nnx.Linear(4, 1, rngs=rngs)
        >>> trainer = Trainer(model, optax.sgd(0.1), loss, loggers=())
        >>> x = np.ones((16, 4), np.float32)
        >>> history = trainer.fit([{"x": x, "y": x[:, :1]}] * 5, num_steps=5)
        >>> bool(history["loss"][-1] < history["loss"][0])
        True
    """

    layout: Layout

    @_in_own_context
    @suggests_names
    def __init__(
        self,
        model: nnx.Module | ModelFn | tuple[nnx.GraphDef, nnx.State],
        optimizer: Any,
        loss: LossFn | None = None,
        *,
        strategy: Strategy | None = None,
        devices: Sequence[Device] | None = None,
        num_microbatches: int = 1,
        global_batch_size: int | None = None,
        seed: int = 0,
        wrt: Any = nnx.Param,
        names: PathNames | Literal["auto"] | None = None,
        sample: Batch | None = None,
        precision: Precision | None = None,
        remat: Remat | Literal["auto"] = "none",
        ema_decay: float | None = None,
        checkpoint: Checkpoint | str | os.PathLike | None = None,
        loggers: Sequence[Logger] | None = None,
        log_every: int = 1,
        callbacks: Sequence[Callback] = (),
        evaluation: Evaluation | None = None,
        faults: Faults | None = None,
        debugging: Debugging | None = None,
        backend: Backend | None = None,
    ) -> None:
        # The dict is copied at once, because a debugger may add names to `locals()`.
        # Arguments are checked before anything is compiled.
        arguments = dict(locals())
        source = as_source(model)
        players, optimizer, losses, wrt = by_player(optimizer, loss, wrt)
        check_arguments(source, arguments)
        evaluation, faults = evaluation or Evaluation(), faults or Faults()
        debugging, backend = debugging or Debugging(), backend or Backend()
        check_model(source, *losses, evaluation.loss)
        self._source, seed = source, check_seed(seed)
        callbacks = tuple(callbacks)  # an iterator would be empty after the first hook
        check_ranking(players, checkpoint, callbacks)
        options = StepOptions(
            num_microbatches=num_microbatches,
            remat=remat,
            compiler_options=backend.compiler_options,
            skip=faults.skip,
        )
        # The rest of this method uses only shapes. The first use of `state` makes the
        # arrays.
        self.strategy = strategy = strategy or DataParallel()
        mesh = backend.mesh or strategy.make_mesh(devices)
        self.layout = layout = strategy.layout(mesh)
        with raising_interrupts(), building_on(layout):
            kinds = {"wrt": wrt, "precision": precision}
            given: Any = source, seed, names, losses, sample, layout
            # `plan` derives names again, because they depend on the layout.
            shapes, self._unnamed = named_model(*given, **kinds)
            strategy.check(shapes, layout.mesh)
            kinds |= {"ema_decay": ema_decay, "offload": backend.offload}
            plan = plan_state(shapes, layout, optimizer, **kinds)
            warn_idle_parts(shapes, layout, plan.placements)
            warn_of_unowned(players, plan)
        parts: Any = plan, loss, options, global_batch_size, evaluation, players
        self._programs = programs = Programs(*parts, rank=partial(rank_remats, self))
        judged = programs.judged
        # A trial run must neither resume a real run nor save steps.
        where = None if debugging.fast_dev_run else checkpoint
        count, is_saved = options.num_microbatches, where is not None
        run = describe_run(plan, self.strategy, count, seed, is_saved=is_saved)
        run["eval_params"] = judged.description
        if players:
            run["players"] = players.steps
        checkpoints = CheckpointManager(where, run, frozen=frozen_paths(plan))
        self._run = RunState(plan, source, seed, checkpoints, judged, callbacks, wrt)
        shows = loggers is None or any(isinstance(x, ConsoleLogger) for x in loggers)
        self._run.report = print_once if shows else str
        self._new_loop = partial(
            Loop,
            run=self._run,
            programs=programs,
            loggers=loggers,
            callbacks=callbacks,
            log_every=log_every,
            faults=faults,
            debugging=debugging,
            warm_start=backend.warm_start,
        )
        self._verifier = Verifier(self._run, programs, strategy, backend.warm_start)
        self._loop: Loop | None = None

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and hasattr(self, "_loop"):  # construction is over
            check_assignment(self, name, Trainer)
        super().__setattr__(name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises an error that names the methods."""
        raise TypeError(
            "A Trainer cannot be called. To train, call trainer.fit(data, "
            "num_steps=...). For outputs, call trainer.predict(data) or "
            "trainer.model(x). For one step, call trainer.train_step(trainer.state, "
            "trainer.shard_batch(batch))."
        )

    def __getattr__(self, name: str) -> Any:
        """Raises an error that names our method for a method of another library."""
        if name in _REMEDIES:
            raise AttributeError(f"A Trainer has no method {name!r}. {_REMEDIES[name]}")
        # If a property has failed, this raises its error again.
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        facts = self._run.facts()
        model, mesh, step = (f"{key} {facts[key]}" for key in ("model", "mesh", "step"))
        return f"Trainer({self.strategy!r}, {model}, {mesh}, {step})"

    def _repr_html_(self) -> str:
        return as_html((), [*self._run.facts().items()], title="Trainer")

    @property
    def mesh(self) -> Mesh:
        """The mesh on which everything runs."""
        return self.layout.mesh

    @property
    def data_share(self) -> tuple[int, int]:
        """``(index, count)``: the part of each batch's rows that this process loads.

        It is ``(0, 1)`` with one process. Processes that hold the same rows, such as
        the processes of one tensor-parallel group, have the same index.
        """
        return data_share(self.layout)

    @property
    @_in_own_context
    def state(self) -> TrainState:
        """The training state. A step donates and replaces it.

        On first use the state is read from the newest step in the Trainer's
        ``checkpoint`` directory, and the console reports this. If the directory has no
        step, the state is built. So `model`, `evaluate` and `predict` see the state
        from which a `fit` would continue.

        A custom loop assigns the new state, so that the Trainer can continue from it:
        ``trainer.state, metrics = trainer.train_step(trainer.state, batch)``.
        """
        return self._run.state

    @state.setter
    @_in_own_context
    def state(self, state: TrainState) -> None:
        self._run.state = state

    @property
    @_in_own_context
    def step(self) -> int:
        """Number of optimizer updates done."""
        return self._run.step

    @property
    @_in_own_context
    def model(self) -> nnx.Module:
        """The model with its current arrays, global and sharded, in evaluation mode.

        The arrays belong to `state`. The next step donates them, and this model loses
        them. Read `model` again after a step, or copy the model before the step. If you
        assign values to the model's Variables before the next step, these values are
        trained, evaluated and saved, except for random streams.

        A call of the model is plain NNX: a spec in it (``out_sharding=``) finds no
        mesh, and JAX raises an error. Call such a model in a function of `predict`.
        """
        return self._run.model("params")

    @property
    @_in_own_context
    def ema_model(self) -> nnx.Module:
        """`model` with the moving average; raises a `ValueError` if there is none."""
        params_of(self.state, ema=True)  # raises an error if there is no average
        return self._run.model("ema")

    @property
    @_in_own_context
    def eval_model(self) -> nnx.Module:
        """`model` with the parameters that are evaluated, for export or sampling.

        By default this is `ema_model` if the Trainer keeps an average, and `model` if
        not. If a function of `Evaluation` computes the parameters, assigning values to
        these parameters raises an error.
        """
        return self._run.model("eval")

    @property
    @_in_own_context
    def train_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """The compiled step, ``(state, batch) -> (state, metrics)``, for custom loops.

        The step is pure, except that it donates the state. Its batches must come from
        `shard_batch`. A state that an earlier step has donated raises a
        `DonatedArrayError`.

        With `Players`, the step number in the state decides which player's step runs.
        Reading this number waits for the previous step. ``(state, batch, "critic")``
        runs a step of a given player. ``lower`` and ``trace`` take the same arguments.
        """
        return self._shown_step

    @cached_property
    def _shown_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        return ShownStep(self._programs.train_step)

    @property
    def players(self) -> Players | None:
        """The players, or ``None`` if there is one loss."""
        return self._programs.players

    @_in_own_context
    def shard_batch(self, batch: Batch) -> Batch:
        """Puts a host batch on the mesh, for `train_step`.

        Raises:
            BatchShapeError: If the rows cannot be divided evenly over devices and
                microbatches.
        """
        return self._programs.shard_batch(batch)

    @_in_own_context
    def describe(self) -> Description:
        """Returns the placement of every array, with reasons and bytes per device."""
        return self._run.describe()

    @_in_own_context
    @suggests_names
    def fit(
        self,
        data: Iterable[Batch],
        num_steps: int | None = None,
        *,
        num_epochs: int | None = None,
        eval_data: Iterable[Batch] | None = None,
        eval_every: int | None = None,
        last_batch: LastBatch | None = None,
    ) -> History:
        """Trains until the run has done ``num_steps`` updates or ``num_epochs`` passes.

        The total includes updates of earlier fits. If nothing has been trained yet and
        there is a checkpoint, the fit starts from the newest checkpoint. The fit saves
        at the intervals of the `Checkpoint`, and at the end.

        Args:
            data: Batches: pytrees of NumPy arrays with this process's share of the
                global batch (`data_share`); with one process this is the entire batch.
                A later fit may get the same data again: if the first batch is the same,
                the fit continues at the next unused batch. If the first batch differs,
                the fit begins at the start of the data. After a restart, the data must
                be the same.
            num_steps: Total number of updates of the run.
            num_epochs: Total number of passes over the data, instead of ``num_steps``;
                the ``len()`` of the data must be its number of batches.
            eval_data: Batches to evaluate on; each evaluation uses all of them.
            eval_every: Steps between evaluations; ``None`` evaluates only at the end.
            last_batch: Treatment of a last batch with fewer rows. ``"drop"`` leaves it
                out. ``None`` also leaves it out, but warns. A `Pad` adds rows to it,
                and ``"error"`` raises an error. Evaluations use all rows.

        Returns:
            Metrics by name, with one entry for each step done in this call.

        Raises:
            SystemExit: After a SIGTERM, once the current step is saved. The code is
                143, ``distributed.PREEMPTED``, or 1 without checkpoints.
            KeyboardInterrupt: After Ctrl-C, once the current step is saved; a second
                Ctrl-C ends the fit at once. If nothing catches it, a script ends with
                code 130 and no traceback; in a notebook the Trainer can still be used.
            DisagreementError: If processes are about to run different programs.
            NonFiniteLossError: If a loss, or a state to be saved, is not finite. The
                message names the arrays that are not finite. `Faults` can skip such
                steps.
            ValueError: If ``num_steps`` or ``eval_every`` is not a number of steps.
            DataError: If data cannot be iterated over, has no length, or lasts for only
                one pass.
            DataExhaustedError: If the data ends before ``num_steps``.
            BatchShapeError: If the rows of a batch cannot be divided evenly over
                devices and microbatches, or if the shape of batches changes.
        """
        self._run.begin("fit")
        # The loop is an attribute, because a callback may call `stop` during the fit.
        self._loop = self._new_loop(
            trainer=self,
            data=data,
            num_steps=check_length(num_steps, num_epochs),
            num_epochs=num_epochs,
            eval_data=eval_data,
            eval_every=eval_every,
            last_batch=last_batch,
        )
        try:
            return self._loop.fit()
        finally:
            self._loop = None  # the loop would keep the evaluation's data in memory

    def stop(self, reason: str) -> None:
        """Ends the fit after the current step, which is evaluated and saved."""
        if self._loop is not None:  # otherwise no fit is running
            self._loop.stop(reason)

    def log(self, metrics: Mapping[str, float] | str) -> None:
        """Sends numbers or a text to the loggers of the running fit.

        This method is for callbacks. The numbers belong to the current `step`, and do
        not enter the history. All processes may call it, but only process 0 logs.
        Without a running fit it does nothing.

        Args:
            metrics: Scalars by name, or a text.
        """
        if self._loop is not None:
            self._loop.log(metrics)

    @_in_own_context
    def evaluate(
        self,
        data: Iterable[Batch],
        *,
        loss: LossFn | None = None,
        ema: bool | None = None,
    ) -> dict[str, Any]:
        """Returns the mean loss and metrics over all rows, in evaluation mode.

        A last batch of fewer rows runs without padding. Plain scalars are weighted by
        the number of rows, and a `Mean` by its weight. A `Sum` is added up.

        Args:
            data: Batches; they may have different numbers of rows.
            loss: The loss to compute. The default is the Trainer's ``Evaluation.loss``
                or, if that is not given, the Trainer's loss. With `Players` the default
                is the losses of all players, with names such as ``critic/loss``. A loss
                is compiled once for each function object and shape.
            ema: True uses the moving average, False the trained parameters; ``None``
                follows the Trainer's `Evaluation`.

        Returns:
            Floats by name; the loss is ``"loss"``. A `Sum` of arrays gives an array.

        Raises:
            DataError: If the data has no batches.

        Warns:
            ParallelWarning: If dropout or batch statistics act as in training.
        """
        check_model(self._source, loss)
        self._run.begin("evaluate")
        return self._programs.evaluate(self.state, data, loss=loss, ema=ema)

    @_in_own_context
    def predict(
        self,
        data: Iterable[Batch],
        function: Callable[..., Any] | None = None,
        *,
        seed: int = 0,
        ema: bool | None = None,
    ) -> Any:
        """Returns outputs for all rows, in evaluation mode. Warns like `evaluate`.

        Args:
            data: Batches.
            function: ``function(model, batch)``, which returns a pytree of arrays with
                the rows along dim 0; by default ``model(batch)``. If it has a third
                parameter ``rngs``, it gets random streams. It is compiled once per
                function object and shape. The programs of the last 8
                functions are kept.
            seed: Seed of the random streams.
            ema: True uses the moving average, False the trained parameters; ``None``
                follows the Trainer's `Evaluation`.

        Returns:
            The outputs of all batches, concatenated, as NumPy arrays.

        Raises:
            DataError: If the data has no batches.
            LossError: If an output has no rows.
        """
        if callable(data) and not callable(function):
            raise TypeError(
                f"The data of predict is {kind_of(data)}. The order is predict(data, "
                "function)."
            )
        seed = check_seed(seed)
        for name in names_of(self._source, function):
            warn_user(
                f"The function of predict uses the model as {name!r} from outside, "
                "where it has the weights from before training. Use the first "
                "argument of the function: function(model, batch).",
                ParallelWarning,
            )
        self._run.begin("predict")
        return self._programs.predict(self.state, data, function, seed=seed, ema=ema)

    @_in_own_context
    def verify(self, batch: Batch) -> Verification:
        """Compares a step from the current state with other ways to compute this step.

        With `Players` the step belongs to the player whose turn it is. The state does
        not change. The step is compared with a second run of the same program; with a
        run of its two halves; with the step without the library's compiler options and
        overlap; and with the step on one device, or on the fewest devices with enough
        memory. The difference of an array, relative to its magnitude, may be a multiple
        of the effect of one rounding. `verify` measures this effect.

        Args:
            batch: A host batch, as `fit` takes it. If `fit` gets
                ``last_batch=Pad(name)``, the batch must have the weights:
                ``Pad(name).fill(batch, 0)`` adds them.

        Returns:
            The report: for each array, the difference between the programs.

        Raises:
            VerificationError: If an array differs. The message names the first such
                array and, if one was found, a line that avoids the fault. The attribute
                ``report`` of the error is the report.
        """
        self._run.begin("verify")
        return self._verifier(batch)

    @_in_own_context
    @suggests_names
    def save(self) -> None:
        """Saves the current state under its step, and waits until it is on disk.

        Raises:
            CheckpointNotFoundError: If the Trainer has no checkpoint directory.
            CheckpointError: If this step or a later step is saved already.
            NonFiniteLossError: If a parameter is not finite.
        """
        self._run.begin("save")
        with self._run.checkpoints:  # the end of this block waits for the save
            self._run.save(once=False)

    @_in_own_context
    def restore(
        self,
        step: int | Literal["best"] | None = None,
        *,
        directory: str | os.PathLike | Checkpoint | None = None,
        weights_only: bool = False,
        rewind: bool = False,
    ) -> None:
        """Replaces the state with a saved state, which any strategy may have saved.

        A state from another directory is only a starting point: once this run has saved
        checkpoints, the same program resumes from them.

        Args:
            step: A saved step. ``"best"`` takes the best step, by the metric in
                ``Checkpoint(keep_best=...)`` of the run that saved the step. ``None``
                takes the latest step.
            directory: The directory to read; by default the Trainer's checkpoint
                directory. Pass a `Checkpoint` with another ``keep_best`` to rank the
                steps by that metric.
            weights_only: Restore only parameters and other variables; the optimizer
                state, the step and the data position do not change. `load_weights`
                reads weights that another program has saved.
            rewind: Continue from this step of the Trainer's directory. Later steps are
                moved to the folder ``rewound-STEP-ID`` in this directory, together with
                a copy of ``metrics.jsonl``.

        Raises:
            CheckpointNotFoundError: If the step does not exist.
            CheckpointMismatchError: If an array has another path, shape or dtype in the
                checkpoint. The message names such arrays. The state is unchanged.
            CheckpointError: If a callback restores more than weights during a fit.
            CheckpointDirectoryError: If another run writes to the directory to rewind.
        """
        meet("restore")
        self._run.restore(step, directory, weights_only=weights_only, rewind=rewind)

    @_in_own_context
    def load_weights(self, path: str | os.PathLike, *, only: Any = None) -> None:
        """Replaces weights with the weights of a plain Orbax checkpoint.

        The checkpoint was saved by another program, with `StandardCheckpointer`, a
        `CheckpointManager` (pass the directory of one step), or Orbax's v1 functions.
        It holds
        ``nnx.state(model)``, a part of this state, or the state as a pure dict
        (``nnx.to_pure_dict``). Each device reads only its shards. Floating-point arrays
        are cast to the model's dtypes. Optimizer, step and data do not change. A moving
        average starts from the new parameters.

        Args:
            path: Directory of the checkpoint.
            only: Filter of the Variables to read; by default all except random streams.
                The checkpoint must have all of them, with the same shapes. Other
                Variables do not change. For example, pass ``nnx.Param`` if the
                checkpoint has no batch statistics.

        Raises:
            CheckpointMismatchError: If an array differs, or is only in the model or
                only in the checkpoint. The message names such arrays, and nothing
                has changed.
            CheckpointReadError: If the directory is not a plain checkpoint.
        """
        meet("load_weights")
        self._run.load_weights(path, only or nnx.Not(nnx.RngState))
