"""Evaluation and prediction: their compiled steps, and their loops over the data.

The model is in evaluation mode, and its variables do not change. Under a pipeline, an
evaluation and a prediction run the schedule's forward slots, and treat each microbatch
as a separate batch.
"""

import contextlib
import operator
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nnx_parallel.data.batches import BatchAgreement, check_batch, place_batch
from nnx_parallel.data.prefetch import PrefetchIterator
from nnx_parallel.data.rows import count_rows, join_rows
from nnx_parallel.distributed.runtime import Watchdog
from nnx_parallel.errors import (
    BatchShapeError,
    DataError,
    LossError,
    ParallelWarning,
    warn_user,
)
from nnx_parallel.layers.loss import LabelRange
from nnx_parallel.layers.stack.scan import Level, Remat
from nnx_parallel.layers.stack.stack import Stack, run_one_layer, using_runner
from nnx_parallel.metrics import result_of, split_loss_output
from nnx_parallel.sharding.model import MODES, arrays_of, flatten
from nnx_parallel.sharding.names import dotted, path_of
from nnx_parallel.sharding.nnx_arrays import variables_of
from nnx_parallel.sharding.offload import HOST
from nnx_parallel.sharding.tree import gather
from nnx_parallel.state import StatePlan, TrainState
from nnx_parallel.training.arguments import EvalParams, Evaluation, LossFn
from nnx_parallel.training.auto_remat import (
    AutoStep,
    Search,
    argument_bytes,
    shapes_key,
    start_best,
)
from nnx_parallel.training.compilation import (
    Program,
    accepted_options,
    jit_step,
    start_program,
)
from nnx_parallel.training.diagnostics import agree_on_program, check_loss
from nnx_parallel.training.lookups import Lookups, warn_of_labels
from nnx_parallel.training.loss_checks import LossChecks
from nnx_parallel.training.model_flops import TracedLoss, on_one_device
from nnx_parallel.training.players import Players, StepByTurns
from nnx_parallel.training.step import (
    Batch,
    Means,
    Metrics,
    StepOptions,
    call_loss,
    check_padding,
    execution_of,
    make_split_step,
    make_train_step,
    warn_of_modes,
)

_AVERAGING = (optax.contrib.ScheduleFreeState, optax.contrib.SAMState)


@dataclass(frozen=True, eq=False)
class Judged:
    """The parameters that are used to evaluate, predict, export and rank checkpoints.

    Attributes:
        plan: The placement of every array.
        given: The field ``params`` of `Evaluation`.
    """

    plan: StatePlan
    given: EvalParams | None = None

    def __post_init__(self) -> None:
        plan, choice = self.plan, self.choice
        if isinstance(choice, str):
            if choice == "ema":
                params_of(plan.abstract, ema=True)  # fails if no average is kept
            return
        given = jax.eval_shape(choice, plan.abstract)
        found, wanted = _shapes_of(given), _shapes_of(plan.abstract.params)
        if problems := [
            f"`{path}` has shape {found.get(path)} instead of {wanted.get(path)}"
            for path in (wanted | found)
            if found.get(path) != wanted.get(path)
        ]:
            raise ValueError(
                f"Evaluation.params: {'; '.join(problems)}. The function must return a "
                "tree like state.params, with the same paths and shapes."
            )

    @cached_property
    def choice(self) -> EvalParams:
        """The field ``params``. The actual choice replaces ``None``."""
        if self.given is not None:
            return self.given
        if self.plan.ema_decay is not None:
            return "ema"
        is_derived = any(_averaging_states(self.plan.abstract.opt_state))
        return derived_params if is_derived else "params"

    @property
    def description(self) -> str:
        """The choice as text."""
        match self.choice:
            case "params":
                return "the trained parameters"
            case "ema":
                return f"the moving average, ema_decay={self.plan.ema_decay:g}"
            case choice if choice is derived_params:
                states = _averaging_states(self.plan.abstract.opt_state)
                kinds = dict.fromkeys(type(state).__name__ for state in states)
                return f"parameters from the optimizer's {', '.join(kinds)}"
            case choice:
                name = getattr(choice, "__qualname__", "a function")
                return f"Evaluation(params={name})"

    def __call__(self, state: TrainState) -> dict[str, Any]:
        """Returns these parameters, with the shardings of the trained parameters."""
        if isinstance(self.choice, str):
            return params_of(state, ema=self.choice == "ema")
        return self._derive(state)

    @cached_property
    def _derive(self) -> Callable[[TrainState], dict[str, Any]]:
        choice, plan = self.choice, self.plan
        assert callable(choice)

        def derive(state: TrainState) -> Any:
            def bring(x: jax.Array, there: Any) -> jax.Array:
                is_on_host = there.memory_kind == HOST
                return jax.device_put(x, jax.memory.Space.Device) if is_on_host else x

            opt_state = jax.tree.map(bring, state.opt_state, plan.shardings.opt_state)
            return choice(replace(state, opt_state=opt_state))

        return jit_step(plan.layout, derive, out_shardings=plan.shardings.params)


def derived_params(state: TrainState) -> dict[str, Any]:
    """Returns the parameters at which an optimizer should be evaluated.

    For most optimizers these are the trained parameters.
    ``optax.contrib.schedule_free`` differs, because it trains at another point.
    ``optax.contrib.sam`` differs, because every second state has adversarial
    parameters.
    """
    params = state.params
    for found in _averaging_states(state.opt_state):
        is_free = isinstance(found, optax.contrib.ScheduleFreeState)
        # Parameters are found by path, because the parameters of other optimizers are
        # masked out, and a mask may replace an entire subtree.
        kept = _by_path(found.z if is_free else found.cache)
        new = {p: x for p, x in _by_path(params).items() if p in kept}
        if is_free:
            unmasked = found._replace(z=kept)
            new = optax.contrib.schedule_free_eval_params(unmasked, new)
        else:
            is_true = found.steps_since_sync == 0
            new = {p: jnp.where(is_true, x, kept[p]) for p, x in new.items()}
        params = jax.tree_util.tree_map_with_path(
            lambda keys, x, new=new: new.get(path_of(keys), x), params
        )
    return params


def _averaging_states(opt_state: Any) -> Iterator[Any]:
    """Yields states of optimizers that evaluate other parameters, outermost first."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, _AVERAGING))
    for state in leaves:
        if isinstance(state, _AVERAGING):
            # In its opaque mode, SAM does not keep adversarial parameters.
            if getattr(state, "cache", ()) is not None:
                yield state
            yield from _averaging_states(tuple(state))


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_of(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(tree)}


def _shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    return {path: jnp.shape(x) for path, x in _by_path(tree).items()}


class _Known:
    """A dict key for a function: compares by equality, or by identity if unhashable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._key = function if isinstance(function, Hashable) else id(function)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self._key == other._key


@dataclass(frozen=True, eq=False)
class Programs:
    """The compiled programs of a run; each is traced at its first call.

    With `Players`, ``loss`` is ``None``, and each player has its programs in `turns`.
    """

    plan: StatePlan
    loss: LossFn | None
    options: StepOptions
    global_batch_size: int | None = None  # rows that each training batch must have
    evaluation: Evaluation = field(default_factory=Evaluation)
    players: Players | None = None
    rank: Callable[[Batch, str], Mapping[Remat, float]] | None = None  # for "auto"
    _compiled_evals: set[tuple] = field(default_factory=set, init=False)
    _traced_evals: set[_Known] = field(default_factory=set, init=False)
    _examined: dict[tuple, "_Examined"] = field(default_factory=dict, init=False)
    _by_code: dict[Any, set[_Known]] = field(default_factory=dict, init=False)
    # The choices of "auto" by the shapes of a batch.
    _chosen: dict[tuple, "_Chosen"] = field(default_factory=dict, init=False)
    is_auto: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # A choice replaces "auto" in the options, so it is remembered here.
        object.__setattr__(self, "is_auto", self.options.remat == "auto")

    @cached_property
    def turns(self) -> dict[str, "Programs"]:
        """The programs of each player. Without players, the only name is empty."""
        if self.players is None:
            return {"": self}
        return {
            name: replace(self, plan=self.plan.view(name), loss=loss, players=None)
            for name, loss in self.players.losses.items()
        }

    @property
    def losses(self) -> dict[str, LossFn | None]:
        """All losses by name; ``eval_loss`` may be ``None``."""
        losses = {
            f"loss {name}".strip(): each.loss for name, each in self.turns.items()
        }
        return losses | {"eval_loss": self.evaluation.loss}

    def at(self, step: int) -> "Programs":
        """Returns the programs that train after ``step`` updates."""
        return self.turns[self.players.turn(step)] if self.players else self

    @cached_property
    def train_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """The compiled update; it donates the state."""
        if self.players is not None:
            return StepByTurns(self.players, lambda name: self.turns[name].train_step)
        if self.is_auto:
            return AutoStep(self._step_for)
        return make_train_step(self.plan, self._own_loss, self.options)

    @property
    def _own_loss(self) -> LossFn:
        assert self.loss is not None, "only the programs of a player have a loss"
        return self.loss

    @cached_property
    def split_step(self) -> tuple[Any, Any]:
        """The step as two programs, as `make_split_step` returns it."""
        return make_split_step(self.plan, self._own_loss, self.options)

    def start(
        self,
        state: TrainState,
        batch: Batch,
        warm_start: str | os.PathLike | None = None,
    ) -> tuple[Callable[..., Any], Program]:
        """Compiles the step, or reads it from a plan. All processes must call this.

        With ``remat="auto"``, the step chooses a policy again for batches with other
        shapes.

        Returns:
            The step, and the program that it runs.
        """
        if self.is_auto:
            return self.train_step, self.choose(state, batch, warm_start).program
        # A later call of the step finds this result in jax's caches, so the step is
        # traced and compiled only once.
        step: Any = self.train_step
        lowered = step.lower(state, batch)
        agree_on_program(lowered)
        options, _ = self.compiler_options
        program = start_program(lowered, self.plan.layout.mesh, warm_start, options)
        return (step.running(program.compiled) if program.is_read else step), program

    def trace(self, state: TrainState, batch: Batch) -> None:
        """Traces the step, to raise its errors before anything is compiled."""
        remat = self._levels[-1] if self.options.remat == "auto" else None
        programs = self._with_remat(remat) if remat else self
        step: Any = programs.train_step
        step.trace(state, batch)

    def choose(
        self,
        state: TrainState,
        batch: Batch,
        warm_start: str | os.PathLike | None = None,
    ) -> "_Chosen":
        """Chooses the policy of ``"auto"`` that keeps the most values and fits.

        All processes must call this. The choice for the shapes of a batch is made once.
        Afterwards the options have the chosen policy.
        """
        key = shapes_key(batch)
        if (chosen := self._chosen.get(key)) is None:
            chosen = self._chosen[key] = self._search(state, batch, warm_start)
        if self.options != chosen.programs.options:
            object.__setattr__(self, "options", chosen.programs.options)
            vars(self).pop("split_step", None)  # it has the policy of another choice
        return chosen

    def _search(
        self, state: TrainState, batch: Batch, warm_start: str | os.PathLike | None
    ) -> "_Chosen":
        assert self.rank is not None, "a Trainer sets it"
        if not self._chosen:
            warn_of_modes(self.plan, "auto")
        known = [each.programs for each in self._chosen.values()]
        made: dict[Remat, Programs] = {each.options.policy: each for each in known}

        def start(remat: Remat) -> tuple[Callable[..., Any], Program]:
            made.setdefault(remat, self._with_remat(remat))
            return made[remat].start(state, batch, warm_start)

        search = Search(
            rank=partial(self.rank, batch, self.plan.player),
            levels=self._levels,
            device=self.plan.layout.mesh.local_devices[0],
            arguments=argument_bytes((state, batch)),
        )
        best = start_best(search, start)
        step, program = best.started
        program = replace(program, note=f"{best.note} {program.note}".strip())
        return _Chosen(made[best.remat], step, program, best.fits)

    def _step_for(self, state: TrainState, batch: Batch) -> Callable[..., Any]:
        """Returns the step for a batch; warns of a new choice that does not fit."""
        is_new = shapes_key(batch) not in self._chosen
        chosen = self.choose(state, batch)
        if is_new and not chosen.fits:
            warn_user(chosen.program.note, ParallelWarning)
        return chosen.step

    def _with_remat(self, remat: Remat) -> "Programs":
        return replace(self, options=replace(self.options, remat=remat))

    @property
    def _levels(self) -> list[Remat]:
        """The levels of remat that can differ, the one that keeps the most first."""
        stacks = [m for m in self.plan.modules if isinstance(m, Stack)]
        if not any(stack.remat is None for stack in stacks):
            return ["none"]
        offload = self.plan.offload
        is_on_host = offload is not None and offload.activations
        # Under "none", inputs of blocks are not kept separately.
        return [x for x in get_args(Level) if x != "none" or not is_on_host]

    def model_flops(self, batch: Batch, wrt: Any) -> float | None:
        """Returns the model's FLOPs for a batch (`count_model_flops`).

        Returns ``None`` if one device could not run the loss. It also does so with
        `Players`, because their losses need different FLOPs.
        """
        return None if self.players is not None else self._examine(batch, wrt).flops

    def warn_of_loss(self, batch: Batch, wrt: Any) -> None:
        """Warns of mistakes that leave the loss finite, such as wrong labels.

        All processes must call this, while no other program runs.
        """
        for name, programs in self.turns.items():
            found = programs._examine(batch, wrt[name] if self.players else wrt)
            for text in found.texts:
                warn_user(text, ParallelWarning)
            if found.lookups is not None:
                warn_of_labels(found.lookups, batch)

    def _examine(self, batch: Batch, wrt: Any) -> "_Examined":
        """Examines the loss in one trace. The FLOPs of a player are not counted."""
        leaves, structure = jax.tree.flatten(batch)
        shapes = structure, *map(jax.typeof, leaves)
        if shapes not in self._examined:
            self._examined[shapes] = found = _Examined()
            with contextlib.suppress(Exception):  # the loss may name a mesh axis
                plan = on_one_device(self.plan, wrt)
                traced = TracedLoss.of(plan, self._own_loss, batch)
                given = traced.program, count_rows(batch), bool(self.plan.player)
                with contextlib.suppress(Exception):  # no check may end a run
                    found.texts = [*LossChecks(*given).texts()]
                lookups = Lookups(traced.program)
                found.lookups = lookups if lookups.found else None
                if not self.plan.player:
                    found.flops = traced.count_flops()
        return self._examined[shapes]

    @cached_property
    def judged(self) -> Judged:
        """The parameters that evaluations and predictions use."""
        return Judged(self.plan, self.evaluation.params)

    def _params(self, state: TrainState, ema: bool | None) -> dict[str, Any]:
        return self.judged(state) if ema is None else params_of(state, ema=ema)

    @property
    def compiler_options(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The accepted compiler options, and the compiler's errors about the others."""
        given = self.options.compiler_options
        return accepted_options(self.plan.layout.mesh, given)

    def check_padding(self, state: TrainState, batch: Batch, weights: str) -> None:
        """Raises an error if rows of weight 0 in a batch would change the loss."""
        check_padding(self.plan, self._own_loss, state, batch, weights)

    # The cache is limited, because a user may make a new function for each call.
    @cached_property
    def _eval_step(self) -> Callable[[_Known], Callable[..., Means]]:
        return lru_cache(maxsize=8)(partial(self._make_step, is_loss=True))

    @cached_property
    def _predict_step(self) -> Callable[[_Known], Callable[..., Any]]:
        return lru_cache(maxsize=8)(partial(self._make_step, is_loss=False))

    def _make_step(self, known: _Known, *, is_loss: bool) -> Callable[..., Any]:
        """Returns a compiled function for a loss or a prediction.

        The arguments are ``(params, variables, key, draws, batch)``. A loss gives
        means: a plain scalar is weighted by the batch's rows, a `Mean` by its weight.
        Random numbers depend on ``draws``, a tuple of numbers that includes the batch's
        index. So each batch draws different numbers, but every evaluation draws the
        same numbers.
        """
        plan, count = self.plan, self.options.num_microbatches

        def outputs_of(model: nnx.Module, batch: Batch, key: jax.Array) -> Any:
            name = "the loss" if is_loss else "the function of predict"
            given = plan.precision, known.function, model, batch, key
            output = call_loss(*given, name)
            if not is_loss:
                _check_rows(output, count_rows(batch))
                return output
            mean, metrics = split_loss_output(output, weight=count_rows(batch))
            return {"loss": mean, **metrics}

        def add_up(means: Means) -> Means:
            # (microbatches, ...) -> (...), because totals and weights are summed.
            return jax.tree.map(lambda x: jnp.sum(x, axis=0), means)

        def step(
            params: dict,
            variables: dict,
            key: jax.Array,
            draws: tuple[int, ...],
            batch: Batch,
        ) -> Any:
            for number in draws:
                key = jax.random.fold_in(key, number)
            return execution_of(plan).outputs(
                plan,
                outputs_of,
                (params, variables),
                batch,
                key,
                count,
                join=add_up if is_loss else join_rows,
                # A loss without a Stack is an error, as in a pipeline's training.
                needs_stack=is_loss,
            )

        return jit_step(plan.layout, step, self.options.compiler_options)

    def shard_batch(self, batch: Batch) -> Batch:
        """Puts a training batch on the mesh, after a check that it divides evenly."""
        check_batch(batch)
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
        loss: LossFn | None = None,
        ema: bool | None = None,
        watchdog: Watchdog | None = None,
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> dict[str, Any]:
        """Returns mean loss and metrics over all rows, or an empty dict if stopped.

        A mean is NaN if all its weights are 0.

        The watchdog ends the process if a batch takes too long; compilation does not
        count. ``stop_reason`` returns a reason to stop before the next batch, or
        ``None``. If one process has a reason, all processes stop before this batch.
        """
        watchdog = watchdog or Watchdog(None)
        losses = self._losses(loss)
        self._warn_of_copies(losses.values(), "evaluate")
        rearm = partial(watchdog.arm, int(state.step), "batch of the evaluation")
        arrays = (self._params(state, ema), state.variables, state.key)
        total, found = list[Any](), Means()
        rearm()
        batches = watchdog.reading(self._batches(data, stop_reason))
        for index, batch in enumerate(batches):
            if batch is None:
                return {}
            leaves, structure = jax.tree.flatten(batch)
            found = Means()
            for prefix, known in losses.items():
                program = known, ema, structure, *map(jax.typeof, leaves)
                if program not in self._compiled_evals:
                    watchdog.disarm()  # compilation may take longer than any step
                    self._warn_of_training(known, *arrays, batch)
                # The result is fetched before the next program is dispatched:
                # independent programs with collectives deadlock on simulated devices,
                # which share a pool of threads (docs/library-notes.md, "Simulated
                # devices").
                means = jax.device_get(self._eval_step(known)(*arrays, (index,), batch))
                found |= {prefix + name: x for name, x in means.items()}
                self._compiled_evals.add(program)
                rearm()
            # The sum is in double precision, because a float32 sum of many batches
            # loses entire rows. The leaves are added, because the trees may differ: the
            # function `then` of a Sum may be a new object in the trace of each shape.
            sums = [np.float64(x) for x in jax.tree.leaves(found)]
            total = [*map(operator.add, total, sums)] if total else sums
        if not total:
            raise DataError("No batch to evaluate on: the data is empty.")
        found = jax.tree.unflatten(jax.tree.structure(found), total)
        if not all(found[f"{prefix}loss"].counts for prefix in losses):
            warn_user(
                "The evaluation's loss is NaN: the weights of its Mean are 0 in every "
                "batch. Give it batches with rows that count.",
                ParallelWarning,
            )
        results = {name: result_of(x) for name, x in found.items()}
        return jax.tree.map(_to_number, results)

    def _losses(self, loss: LossFn | None) -> dict[str, _Known]:
        """Returns the losses to evaluate, by the prefix of their metrics' names."""
        if chosen := loss or self.evaluation.loss or self.loss:
            return {"": _Known(chosen)}
        assert self.players is not None
        losses = self.players.losses
        return {f"{name}/": _Known(each) for name, each in losses.items()}

    def _warn_of_copies(self, functions: Iterable[_Known], call: str) -> None:
        """Warns once about a function that the user makes again for each call."""
        for known in functions:
            if (code := getattr(known.function, "__code__", None)) is None:
                continue
            copies = self._by_code.setdefault(code, set())
            if known in copies or len(copies) > 2:
                continue
            copies.add(known)
            if len(copies) == 3:
                where = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
                warn_user(
                    f"{call} has compiled {code.co_name!r} ({where}) for the third "
                    "time: each call makes a new function. Define it once, outside of "
                    "the loop, and pass values that change in the batch.",
                    ParallelWarning,
                )

    def _warn_of_training(
        self, known: _Known, params: dict, variables: dict, key: jax.Array, batch: Batch
    ) -> None:
        """Warns once per function about modules that still behave as in training."""
        if known in self._traced_evals:
            return
        self._traced_evals.add(known)
        found = training_in(self.plan, known.function, params, variables, batch, key)
        if found:
            shown = ", ".join(f"`{path}`" for path in found[:4])
            warn_user(
                f"The evaluation changes {len(found)} variables as training does: "
                f"{shown}. Dropout or batch statistics act in it: the model is called "
                "in training mode, such as model(x, training=True), which overrides "
                "model.eval(). Pass a function that calls it in evaluation mode: "
                "Trainer(evaluation=Evaluation(loss=...)), evaluate(loss=...), or a "
                "function to predict.",
                ParallelWarning,
            )

    def predict(
        self,
        state: TrainState,
        data: Iterable[Batch],
        function: Callable[..., Any] | None = None,
        *,
        seed: int = 0,
        ema: bool | None = None,
    ) -> Any:
        """Returns the outputs of ``function`` for all rows, as NumPy arrays."""
        known = _Known(function or _apply)
        check_loss(known.function, "function")
        self._warn_of_copies([known], "predict")
        run = self._predict_step(known)
        arrays = (self._params(state, ema), state.variables, state.key)
        parts = []
        for index, batch in enumerate(self._batches(data)):
            self._warn_of_training(known, *arrays, batch)
            # Outputs are moved to the host after each batch, because all of them may
            # not fit on the devices.
            parts.append(gather(run(*arrays, (seed, index), batch)))
            _check_joins(parts[0], parts[-1], index)
        if not parts:
            raise DataError("No batch to predict on: the data is empty.")
        return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

    def label_ranges(
        self, state: TrainState, batch: Batch, wrt: Any
    ) -> list[LabelRange]:
        """Returns the ranges of the labels and tokens in a batch.

        The library's losses and tables report them. Lookups in other losses and models
        are found in their traces.
        """
        # The step is traced again here, because losses report their labels only while
        # this function listens.
        found = list[LabelRange]()
        for name, programs in self.turns.items():
            step = programs._make_step(_Known(programs._own_loss), is_loss=True)
            arguments = state.params, state.variables, state.key, (0,), batch
            found += execution_of(self.plan).observe_labels(partial(step, *arguments))
            trained = wrt[name] if self.players else wrt
            lookups = programs._examine(batch, trained).lookups
            with contextlib.suppress(Exception):  # the search must not hide the error
                wrong = lookups.wrong(batch) if lookups else ()
                # The causes of NaN come first.
                found += [x for x, _ in sorted(wrong, key=lambda pair: not pair[1])]
        return found

    def _batches(
        self,
        data: Iterable[Batch],
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> Iterator[Batch]:
        """Yields the batches on the mesh, and ``None`` if the run stops."""
        place = partial(place_batch, layout=self.plan.layout)
        is_alone = jax.process_count() == 1
        # With several processes, no batch is read ahead. If the rows cannot be divided
        # evenly, a collective gathers them, and another thread must not run a
        # collective at the same time.
        with PrefetchIterator(
            data,
            place,
            uniform=False,  # batches may have different numbers of rows
            prefetch=2 if is_alone else 0,
            agreement=BatchAgreement("evaluation batch", stop_reason),
        ) as batches:
            for item in batches:
                if (stop_reason() if is_alone else item.stop_reason) is not None:
                    yield None
                    return
                yield item.batch


@dataclass
class _Examined:
    """Results of a trace of the loss; empty if one device could not run the loss."""

    flops: float | None = None
    lookups: Lookups | None = None
    texts: list[str] = field(default_factory=list)  # of warnings


@dataclass(frozen=True)
class _Chosen:
    """A choice of ``remat="auto"``: its programs, and its started step."""

    programs: Programs
    step: Callable[..., Any]
    program: Program
    fits: bool


def _apply(model: Any, batch: Batch) -> Any:
    try:
        return model(batch)
    except Exception as error:
        if isinstance(batch, Mapping | tuple | list):
            found = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
            error.add_note(
                f"predict called model(batch) with a whole batch: {found}. Pass a "
                "function: predict(data, lambda model, batch: model(...))."
            )
        raise


def _output_name(keys: Any) -> str:
    return f" `{path_of(keys)}`" if keys else ""


def _check_rows(outputs: Any, num_rows: int) -> None:
    for keys, x in jax.tree.leaves_with_path(outputs):
        if jnp.ndim(x) == 0 or x.shape[0] != num_rows:
            found = (
                f"shape {x.shape}, for {num_rows} rows" if jnp.ndim(x) else "no rows"
            )
            raise LossError(
                f"The output{_output_name(keys)} of predict's function has {found}. "
                "Outputs of all batches are joined along dim 0, which must be the "
                "rows. For means over all rows use evaluate(loss=...)."
            )


def _check_joins(first: Any, other: Any, index: int) -> None:
    """Raises an error if two batches' outputs differ in more than the rows."""
    if jax.tree.structure(first) != jax.tree.structure(other):
        raise BatchShapeError(
            f"predict's function gave {jax.tree.structure(first)} for batch 0, and "
            f"{jax.tree.structure(other)} for batch {index}. Outputs of all batches "
            "are joined: give the same structure for each."
        )
    pairs = zip(jax.tree.leaves_with_path(first), jax.tree.leaves(other), strict=True)
    for (keys, x), y in pairs:
        if x.shape[1:] != y.shape[1:]:
            raise BatchShapeError(
                f"The output{_output_name(keys)} of predict's function has shape "
                f"{x.shape} for batch 0, and {y.shape} for batch {index}. Outputs of "
                "all batches are joined along dim 0, so the other dims must be equal: "
                "pad the batches to one length, or predict each length by itself."
            )


def _to_number(value: Any) -> Any:
    """Returns a scalar as a float, which can be logged, and an array as an array."""
    return np.asarray(value) if np.ndim(value) else float(value)


def training_in(
    plan: StatePlan,
    loss: LossFn,
    params: dict,
    variables: dict,
    batch: Batch,
    key: jax.Array,
) -> list[str]:
    """Returns paths of variables that a loss or prediction changes as training does.

    Such variables are batch statistics, and counters of dropout's random streams. The
    function is only traced: nothing runs, and no result is kept.
    """
    model = plan.eval_model.merge(flatten(params) | flatten(variables))
    modules = dict(nnx.iter_modules(model))
    watched = [p for p, v in variables_of(model) if _is_of_training(p, v, modules)]
    if not watched:
        return []
    changed: list[str] = []

    def watch(model: nnx.Module, batch: Batch, key: jax.Array) -> None:
        given = arrays_of(model)  # compared by identity: the loss assigns new arrays
        call_loss(plan.precision, loss, model, batch, key)
        after = arrays_of(model)
        changed.extend(
            dotted(path) for path in watched if after.get(path) is not given[path]
        )

    # A model computes the same result under every strategy, so any runner will do.
    with using_runner(run_one_layer):
        evaluate = partial(plan.evaluate, watch)
        jax.eval_shape(evaluate, params, variables, batch, key)
    return changed


def _is_of_training(path: tuple, variable: nnx.Variable, modules: dict) -> bool:
    if isinstance(variable, nnx.BatchStat):
        return True
    # Only streams of dropout count, because some models also sample in evaluation. A
    # stream is `owner.rngs`, and its counter is `owner.rngs.count`.
    is_dropout = variable.get_metadata().get("tag") == "dropout"
    has_mode = any(hasattr(modules.get(path[:-2]), name) for name in MODES)
    return isinstance(variable, nnx.RngCount) and (is_dropout or has_mode)


def params_of(state: TrainState, *, ema: bool) -> dict[str, Any]:
    """Returns the parameters, or their average.

    Raises a `ValueError` if the state has no average.
    """
    if not ema:
        return state.params
    if state.ema is None:
        raise ValueError("This Trainer keeps no average. Pass ema_decay=0.999.")
    return state.ema
