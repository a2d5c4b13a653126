"""Arguments of the Trainer: classes that group less common arguments, and checks.

`check_arguments` finds common mistakes and names the valid spelling of each. Other
mistakes are found where an argument is read.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.distributed.runtime import StepTimeout, Watchdog
from nnx_parallel.errors import grouped, kind_of, suggest, suggests_names
from nnx_parallel.metrics import Mean
from nnx_parallel.optimizers.muon import muon
from nnx_parallel.precision import Precision
from nnx_parallel.sharding.offload import Offload
from nnx_parallel.sharding.path_names import PathNames
from nnx_parallel.state import TrainState
from nnx_parallel.strategies.base import Strategy
from nnx_parallel.training.callback import Callback
from nnx_parallel.training.compilation import (
    check_compiler_options,
    check_warm_start,
)
from nnx_parallel.training.diagnostics import check_count

LossOutput = jax.Array | Mean | tuple[jax.Array | Mean, Any]
EvalParams = Literal["params", "ema"] | Callable[[TrainState], Any]
"""The trained parameters, their moving average, or a function of the state."""


class LossFn(Protocol):
    """A loss as users write it, for one device.

    Its signature is ``loss(model, batch)``, or ``loss(model, batch, rngs)`` if it draws
    random numbers. It returns a scalar or a `Mean`, or a tuple of either and metrics.
    The metrics are a dict or another pytree. Its leaves are scalars, `Mean` or `Sum`,
    and the path of a leaf is the metric's name. Instead of a tuple, the loss may return
    a dict of metrics in which ``"loss"`` is the loss.
    """

    def __call__(self, model: Any, batch: Any, /) -> LossOutput:
        """Computes the loss of a batch."""
        ...


@suggests_names
@dataclass(frozen=True, kw_only=True)
class SkipSteps:
    """Skips bad steps. The run continues with the next batch.

    A step is bad if its loss or the norm of its gradients is not finite, or if that
    norm is too large. Such a step does not change the parameters, other variables,
    averages or the optimizer's state, including its counts. Only the number of steps
    increases. The metric ``skipped`` is 1 for such a step, and the fit ends with a line
    that counts these steps.

    Attributes:
        limit: Number of bad steps in a row that are skipped. One more bad step raises a
            `NonFiniteLossError`. With `Players`, each player's steps are counted.
        max_grad_norm: A step is bad if the norm of all gradients, before clipping, is
            larger than this. ``None`` accepts every finite norm.

    Raises:
        ValueError: If the limit is not an integer of at least 1, or the norm is not
            positive.

    Example:
        >>> SkipSteps(max_grad_norm=100.0)
        SkipSteps(limit=10, max_grad_norm=100.0)
    """

    limit: int = 10
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        check_count("SkipSteps.limit", self.limit, 1, " step in a row")
        norm = self.max_grad_norm
        if norm is not None and not (isinstance(norm, int | float) and norm > 0):
            raise ValueError(
                f"SkipSteps.max_grad_norm={norm!r}. It must be a positive number, or "
                "None to accept every finite norm."
            )


OnNonFinite = Literal["raise", "skip"] | SkipSteps


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The loss and the parameters of evaluations; ``Trainer(evaluation=...)``.

    Attributes:
        loss: The loss of evaluations, if it differs from the Trainer's loss. Both
            losses get the model in evaluation mode. If a model takes its mode as an
            argument, ``model(x, training=True)``, give a loss here that passes False.
        params: The parameters that are used in evaluations, in predictions, for the
            best checkpoint and in `Trainer.eval_model`. ``"params"`` are the trained
            parameters, and ``"ema"`` their average. A function computes them from the
            `TrainState`. ``None`` takes the average if there is one. Under
            ``optax.contrib.schedule_free`` and ``sam``, ``None`` takes the parameters
            at which these optimizers should be evaluated. In all other cases ``None``
            takes the trained parameters.

    Raises:
        TypeError: If the loss is not a function.
        ValueError: If ``params`` is not one of these values.

    Example:
        >>> Evaluation(params="ema")
        Evaluation(loss=None, params='ema')
    """

    loss: LossFn | None = None
    params: EvalParams | None = None

    def __post_init__(self) -> None:
        if self.loss is not None and not callable(self.loss):
            raise TypeError(
                f"Evaluation.loss is {kind_of(self.loss)}. It must be a function "
                "loss(model, batch), like the Trainer's loss."
            )
        if not callable(self.params) and self.params not in (None, "params", "ema"):
            raise ValueError(
                f"Evaluation.params={self.params!r}. It must be 'params', 'ema', or a "
                "function of the TrainState that returns a tree like state.params."
            )


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Detection of faults, and the reaction to them; ``Trainer(faults=...)``.

    Attributes:
        on_non_finite: Reaction to a step with a loss or gradients that are not finite.
            ``"raise"`` ends the fit. With ``"skip"``, or a `SkipSteps` with a limit,
            the step changes nothing. A batch with a loss of weight 0 never changes
            anything.
        step_timeout: Limit in seconds. It applies to each step, including the wait for
            its data and ``on_step_end``, and to each batch of the fit's evaluation. If
            the limit is exceeded, the process prints all stacks and ends. Compilation,
            the first batch, checkpoints and ``on_eval_end`` do not count. The default,
            ``"auto"``, sets no limit for one process. For several processes, a step
            may take 20 times the median of the last 8 steps, or 600 s if that is
            longer. Batches of an evaluation, and the first two steps, may take 1,800 s.
            Under ``"auto"``, the process's waits for data and its ``on_step_end`` do
            not count. ``None`` sets no limit.
        check_replicas_every: Steps between comparisons of the devices' copies of
            replicated arrays; 0 means never.
        verify_every: Steps between replays; 0 means never. A replay computes the
            gradients of a step twice, and compares 32-bit hashes of each shard of
            parameters and gradients before the update. If they differ, a device is
            faulty or an operation is not deterministic: a `ReplayError` names the
            arrays and devices, and the run ends before a save. ``verify_every=100``
            costs about 1 % of the time. With `Players`, each player's steps are
            counted, so the steps of all players are replayed. A replayed step runs as
            two programs, which may round differently from the usual program.

    Raises:
        ValueError: If a value is invalid.

    Example:
        >>> Faults(step_timeout=600).check_replicas_every
        0
    """

    on_non_finite: OnNonFinite = "raise"
    step_timeout: StepTimeout = "auto"
    check_replicas_every: int = 0
    verify_every: int = 0

    def __post_init__(self) -> None:
        found = self.on_non_finite
        if not (found in ("raise", "skip") or isinstance(found, SkipSteps)):
            raise ValueError(
                f"on_non_finite={found!r}. It must be 'raise', 'skip', or a SkipSteps, "
                "such as SkipSteps(limit=10, max_grad_norm=100.0)."
            )
        Watchdog(self.step_timeout)  # raises an error if the time is invalid
        least = ", which compares nothing"
        check_count("check_replicas_every", self.check_replicas_every, 0, least)
        least = ", which replays nothing"
        check_count("verify_every", self.verify_every, 0, least)

    @property
    def skip(self) -> SkipSteps | None:
        """The rule that skips bad steps; ``None`` if a bad step ends the run."""
        found = self.on_non_finite
        if isinstance(found, SkipSteps):
            return found
        return SkipSteps() if found == "skip" else None


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Debugging:
    """Short runs and traces that show what a program does; ``Trainer(debugging=...)``.

    Attributes:
        fast_dev_run: Run two steps and one batch of evaluation, and write nothing.
        overfit_batches: Train only on this many batches, repeatedly; 0 takes all.
        profile: ``(start, stop)``, a range of steps to trace with ``jax.profiler``.

    Raises:
        ValueError: If a value is invalid.

    Example:
        >>> Debugging(fast_dev_run=True)
        Debugging(fast_dev_run=True, overfit_batches=0, profile=None)
    """

    fast_dev_run: bool = False
    overfit_batches: int = 0
    profile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        least = ", which takes all batches"
        check_count("overfit_batches", self.overfit_batches, 0, least)
        match self.profile:
            case None:
                pass
            case (int(start), int(stop)) if 0 <= start < stop:
                pass
            case found:
                raise ValueError(
                    f"profile={found!r} covers no step. Give two numbers of steps, "
                    "0 <= start < stop, such as (10, 15)."
                )


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Backend:
    """Mesh, host memory and compiler of a run; ``Trainer(backend=...)``.

    Attributes:
        mesh: A mesh that replaces the strategy's mesh. It must have the same axes.
            Explicit axes are used as Auto axes.
        offload: An `Offload`, which selects the arrays that are kept in host memory.
        compiler_options: Options of XLA by name. They override the options that the
            library sets for TPUs and GPUs (`compiler_options`); the value ``None``
            removes an option.
        warm_start: Directory of a `plan`. If possible, ``fit`` uses the step that the
            plan has compiled.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a name or a value cannot belong to an option of XLA.

    Example:
        >>> Backend(warm_start="plans/8b").mesh is None
        True
    """

    mesh: Mesh | None = None
    offload: Offload | None = None
    compiler_options: Mapping[str, bool | int | float | str | None] | None = None
    warm_start: str | os.PathLike | None = None

    def __post_init__(self) -> None:
        _check_kinds(vars(self), _BACKEND_KINDS)
        check_compiler_options(self.compiler_options)
        check_warm_start(self.warm_start)


_KINDS: dict[str, tuple[Any, str]] = {
    "strategy": (Strategy, "a Strategy, such as FSDP() or Composite(FSDP(), ...)"),
    "precision": (Precision, "a Precision, such as Precision.mixed_bfloat16()"),
    "names": (
        PathNames,
        "'auto' (with sample=batch), or a PathNames, such as TRANSFORMER_NAMES, or "
        r"pairs of a regex and the names of the dims: PathNames((r'up\.kernel', "
        "('embed', 'mlp')))",
    ),
    "checkpoint": ((str, os.PathLike, Checkpoint), "a directory, or a Checkpoint"),
    "evaluation": (Evaluation, "an Evaluation, such as Evaluation(params='ema')"),
    "faults": (Faults, "a Faults, such as Faults(step_timeout=600)"),
    "debugging": (Debugging, "a Debugging, such as Debugging(fast_dev_run=True)"),
    "backend": (Backend, "a Backend, such as Backend(mesh=FSDP().make_mesh())"),
}
"""The valid types of each argument and their description; ``None`` is always valid."""

_BACKEND_KINDS: dict[str, tuple[Any, str]] = {
    "mesh": (Mesh, "a jax.sharding.Mesh, such as FSDP().make_mesh()"),
    "offload": (Offload, "an Offload, such as Offload() for the optimizer's state"),
    "compiler_options": (
        Mapping,
        "a dict of XLA's options, such as {'xla_tpu_scoped_vmem_limit_kib': 65536}, "
        "where None removes an option that the library sets",
    ),
}
"""The valid types of each argument of `Backend`, and their description."""

_Elements = tuple[Callable[[object], bool], str, str]
"""A test of a list's element, the element's name, and an example of the list."""

_LISTS: dict[str, _Elements] = {
    "devices": (
        # Devices of a described TPU slice have another class, so a name is tested.
        lambda x: hasattr(x, "process_index"),
        "device",
        "jax.devices()[:8]",
    ),
    "loggers": (
        lambda x: hasattr(x, "log"),
        "Logger",
        "[ConsoleLogger()]; () for none",
    ),
    "callbacks": (
        lambda x: issubclass(x if inspect.isclass(x) else type(x), Callback),
        "Callback",
        "[SaveSamples()]",
    ),
}
"""The arguments of the Trainer that are lists."""


def check_arguments(model: object, arguments: Mapping[str, Any]) -> None:
    """Raises an error if an argument of a Trainer has the wrong type.

    Args:
        model: The argument ``model``.
        arguments: All arguments of the Trainer, by name.

    Raises:
        TypeError: If an argument has the wrong type; the message gives the type that
            was found and the valid values.
        ValueError: If ``log_every`` is not a number of steps, or if both devices and a
            mesh are given.
    """
    _check_model(model)
    is_auto = _is_auto(arguments["names"], arguments["sample"])
    _check_kinds({**arguments, **({"names": None} if is_auto else {})}, _KINDS)
    for name, elements in _LISTS.items():
        _check_list(name, arguments[name], elements)
    _check_hooks(arguments["callbacks"])
    backend = arguments["backend"]
    if arguments["devices"] is not None and backend is not None and backend.mesh:
        raise ValueError(
            "Trainer got devices= and Backend(mesh=). A mesh already has devices: pass "
            "only one of the two."
        )
    least = ", which logs every step; loggers=() logs nothing"
    check_count("log_every", arguments["log_every"], 1, least)


def _is_auto(names: Any, sample: Any) -> bool:
    """True for ``names="auto"``, which needs a sample; nothing else reads one."""
    is_auto = isinstance(names, str) and names == "auto"
    if is_auto and sample is None:
        raise ValueError(
            "names='auto' derives names from a trace of the loss, and the trace needs "
            "the shapes of a batch: pass sample=, a batch as fit takes it or its "
            "shapes, such as {'tokens': jax.ShapeDtypeStruct((8, 1025), 'int32')}."
        )
    if sample is not None and not is_auto:
        raise ValueError("sample= is only read with names='auto'. Leave it out.")
    return is_auto


def _check_kinds(
    arguments: Mapping[str, Any], kinds: Mapping[str, tuple[Any, str]]
) -> None:
    for name, (kind, rule) in kinds.items():
        value = arguments[name]
        if value is not None and not isinstance(value, kind):
            called = _if_called(value, lambda x, kind=kind: issubclass(x, kind))
            raise TypeError(f"{name} is {kind_of(value)}. It must be {rule}{called}.")


def _check_list(name: str, value: Any, elements: _Elements) -> None:
    if value is None:
        return
    is_valid, kind, example = elements
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(
            f"{name} is {kind_of(value)}. It must be a list, even for a single {kind}, "
            f"such as {example}."
        )
    # Elements of an iterator are not checked: the iterator would be empty afterwards.
    for i, element in enumerate(value if isinstance(value, list | tuple) else ()):
        if inspect.isclass(element) or not is_valid(element):
            raise TypeError(
                f"{name}[{i}] is {kind_of(element)}. It must be a {kind}"
                f"{_if_called(element, is_valid)}."
            )


_HOOKS = {name: x for name, x in vars(Callback).items() if name.startswith("on_")}
_OTHER_HOOKS = {
    "on_step_end": "on_train_batch_end on_batch_end on_log on_train_step",
    "on_fit_start": "on_train_begin on_train_start on_training_start",
    "on_fit_end": "on_train_end on_training_end",
    "on_eval_end": "on_validation_end on_validation_epoch_end on_evaluate on_test_end "
    "on_validation_batch_end",
}
"""Hooks of other libraries' callbacks, by our hook with the same purpose."""


def _check_hooks(callbacks: Any) -> None:
    """Raises an error for a hook that no fit would call, or with other arguments."""
    for i, callback in enumerate(
        callbacks if isinstance(callbacks, list | tuple) else ()
    ):
        for name in dir(type(callback)):
            others = [own for own, x in _OTHER_HOOKS.items() if name in x.split()]
            near = others or difflib.get_close_matches(name, _HOOKS, n=1, cutoff=0.9)
            where = f"callbacks[{i}], a {type(callback).__name__},"
            if near and name not in _HOOKS:
                raise TypeError(
                    f"{where} has the method {name}, which no fit calls. The hook is "
                    f"{near[0]}{inspect.signature(_HOOKS[near[0]])}. Hooks: "
                    f"{', '.join(_HOOKS)}."
                )
            if name in _HOOKS:
                signature = inspect.signature(getattr(callback, name))
                wanted = [*inspect.signature(_HOOKS[name]).parameters][1:]
                try:
                    signature.bind(*wanted)
                except TypeError as error:
                    raise TypeError(
                        f"{where} has {name}{signature}: {error}. A fit calls "
                        f"{name}({', '.join(wanted)})."
                    ) from None


def check_update(optimizer: object, loss: object) -> None:
    """Raises a `TypeError` if an optimizer or a loss has the wrong type."""
    if _is_transformation(loss) and callable(optimizer):
        raise TypeError(
            "loss is an Optax transformation and optimizer a function: they are "
            "swapped. The order is Trainer(model, optimizer, loss)."
        )
    if not callable(loss):
        raise TypeError(
            f"loss is {kind_of(loss)}. It must be a function loss(model, batch), which "
            "returns a scalar or a Mean."
        )
    if inspect.isfunction(loss) and loss.__module__.startswith("optax."):
        raise TypeError(
            f"loss is optax.{loss.__name__}, a function of arrays. Write a function "
            "loss(model, batch) that calls it with the outputs of the model and the "
            "labels, and returns the mean."
        )
    _check_optimizer(optimizer)


def _check_optimizer(optimizer: object) -> None:
    if isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            "optimizer is an nnx.Optimizer. The Trainer keeps the optimizer's state "
            "itself: pass the Optax transformation that it was made from."
        )
    if inspect.isclass(optimizer):
        raise TypeError(
            f"optimizer is the class {optimizer.__name__}. It must be an Optax "
            "transformation, as in Trainer(model, optax.adamw(3e-4), loss)."
        )
    every = getattr(optimizer, "_every_k_schedule", None)
    if isinstance(optimizer, optax.MultiSteps) and every and every(0) < 1:
        raise ValueError(
            f"optax.MultiSteps got every_k_schedule={every(0)}. It must be at least 1, "
            "the number of steps whose gradients are added up."
        )
    if optimizer is muon:
        raise TypeError(
            "optimizer is the function muon. Call it, with a learning rate: lambda "
            "model: muon(0.02, "
            "muon_weight_dimension_numbers=muon_dimension_numbers(model))."
        )
    module = getattr(optimizer, "__module__", None) or ""
    if inspect.isfunction(optimizer) and module.partition(".")[0] == "optax":
        name, _, inner = optimizer.__qualname__.partition(".<locals>")
        if inner:  # it is `update` of a transformation, or a schedule
            raise TypeError(
                f"optimizer is a function that optax.{name} returned. It must be a "
                "complete transformation; a schedule can be its learning rate: "
                "optax.adamw(schedule)."
            )
        if module.startswith("optax.schedules"):
            raise TypeError(
                f"optimizer is optax.{name}, which makes a schedule. Pass the schedule "
                "that it returns to an optimizer, as the learning rate: "
                "optax.adamw(schedule)."
            )
        raise TypeError(
            f"optimizer is the function optax.{name}. Call it, with a learning rate: "
            f"optax.{name}(3e-4)."
        )


def _check_model(model: object) -> None:
    if isinstance(model, nnx.Module):
        return
    if isinstance(model, nnx.Variable):  # it can be called if its value can
        raise TypeError(
            f"model is {kind_of(model)}. Pass the module that has this Variable."
        )
    # Linen is not imported here, because a Linen module has already imported it.
    linen = getattr(sys.modules.get("flax.linen"), "Module", ())
    if isinstance(model, linen) or (
        inspect.isclass(model) and linen and issubclass(model, linen)
    ):
        raise TypeError(
            f"model is {kind_of(model)}, which is from Flax Linen. It must be an NNX "
            "module: nnx.bridge.ToNNX(model, rngs=rngs).lazy_init(x) converts it, "
            "and https://flax.readthedocs.io/en/latest/guides/linen_to_nnx.html says "
            "how to port it."
        )
    if not callable(model):
        raise TypeError(
            f"model is {kind_of(model)}. It must be an nnx.Module, or a function of "
            "random keys that builds one: lambda rngs: Net(rngs=rngs)."
        )


def _if_called(value: object, is_valid: Callable[[Any], bool]) -> str:
    """Returns the remedy if a class was given instead of an instance of it."""
    if not inspect.isclass(value) or not is_valid(value):
        return ""
    return f". Call the class: {value.__name__}(...)"


def _is_transformation(value: object) -> bool:
    return hasattr(value, "init") and hasattr(value, "update")


def check_assignment(owner: object, name: str, kind: type) -> None:
    """Raises an error for an assignment that a built Trainer would ignore.

    Args:
        owner: The Trainer, which has been built.
        name: The attribute.
        kind: The class Trainer. A subclass may have further attributes.

    Raises:
        AttributeError: If the name belongs to an argument or to a property without a
            setter, or if a Trainer has no such attribute.
    """
    found = inspect.getattr_static(kind, name, None)
    if isinstance(found, property) and found.fset is not None:
        return
    place, arguments = grouped(name), inspect.signature(kind.__init__).parameters
    if place or name in arguments:
        given = "=".join(place) if place else f"{name}="
        raise AttributeError(
            f"`trainer.{name} = ...` would have no effect: a Trainer reads its "
            f"arguments when it is built. Pass {given} to Trainer(...)."
        )
    if found is not None or name in inspect.get_annotations(kind):
        raise AttributeError(
            f"`trainer.{name}` is read-only. A custom loop assigns `trainer.state`."
        )
    if type(owner) is kind:
        near = suggest(name, ["state", *arguments])
        raise AttributeError(
            f"A Trainer has no attribute {name!r}.{near} Options are arguments of "
            "Trainer(...), and a custom loop assigns `trainer.state`. Keep other "
            "values in variables, in a Callback, or in a subclass of Trainer."
        )
