"""The arguments of a Trainer: classes that group the less common ones, and checks.

`check_arguments` finds natural mistakes, each with the valid spelling. All others are
found where an argument is read.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.distributed.runtime import Watchdog
from nnx_parallel.errors import grouped, kind_of, suggests_names
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

    ``loss(model, batch)`` or, if it draws random numbers, ``loss(model, batch, rngs)``.
    It returns a scalar or a `Mean`, or one of them with metrics: a dict, or any pytree,
    whose paths name them, of scalars, means, or a `Sum`.
    """

    def __call__(self, model: Any, batch: Any, /) -> LossOutput:
        """Computes the loss of a batch."""
        ...


@suggests_names
@dataclass(frozen=True, kw_only=True)
class SkipSteps:
    """Bad steps change nothing, and the run goes on with the next batch.

    A step is bad if its loss or the norm of its gradients is not finite, or if that
    norm is too large. Parameters, other variables, averages and the optimizer's state,
    its counts included, stay as they were; only the number of steps grows. The metric
    ``skipped`` is 1 for such a step, and the fit ends with a line that counts them.

    Attributes:
        limit: Number of bad steps in a row that are skipped; one more is a
            `NonFiniteLossError`.
        max_grad_norm: Largest norm of all gradients, before clipping, of a step that is
            not bad; ``None`` accepts every finite norm.

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
                "None to take every norm that is finite."
            )


OnNonFinite = Literal["raise", "skip"] | SkipSteps


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The loss and the parameters of evaluations; ``Trainer(evaluation=...)``.

    Attributes:
        loss: The loss of evaluations, if it is another function than the Trainer's.
            Both get the model in evaluation mode. A model that takes its mode as an
            argument, ``model(x, training=True)``, needs a loss here that passes False.
        params: The parameters that are evaluated, predicted with, called best, and in
            `Trainer.eval_model`: ``"params"``, the trained ones; ``"ema"``, their
            average; or a function of the `TrainState`. ``None`` takes the average if
            there is one; under ``optax.contrib.schedule_free`` and ``sam`` the
            parameters at which these should be evaluated; otherwise the trained ones.

    Raises:
        TypeError: If the loss is not a function.
        ValueError: If ``params`` is none of these.

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
                "loss(model, batch), as the loss is."
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
        on_non_finite: The effect of a step whose loss or gradients are not finite: it
            ends the fit (``"raise"``) or changes nothing (``"skip"``, or a `SkipSteps`
            with a limit). A batch whose loss has weight 0 changes nothing in any case.
        step_timeout: Seconds for a step, its data and ``on_step_end``, or for a batch
            of the fit's evaluation. Then the process prints all stacks and ends.
            Compilation, first batch, checkpoints and ``on_eval_end`` do not count.
        check_replicas_every: Steps between comparisons of devices' copies; 0: never.

    Raises:
        ValueError: If a value is invalid.

    Example:
        >>> Faults(step_timeout=600).check_replicas_every
        0
    """

    on_non_finite: OnNonFinite = "raise"
    step_timeout: float | None = None
    check_replicas_every: int = 0

    def __post_init__(self) -> None:
        found = self.on_non_finite
        if not (found in ("raise", "skip") or isinstance(found, SkipSteps)):
            raise ValueError(
                f"on_non_finite={found!r}. It must be 'raise', 'skip', or a SkipSteps, "
                "such as SkipSteps(limit=10, max_grad_norm=100.0)."
            )
        Watchdog(self.step_timeout)  # refuses an invalid time
        least = ", which compares nothing"
        check_count("check_replicas_every", self.check_replicas_every, 0, least)

    @property
    def skip(self) -> SkipSteps | None:
        """How bad steps are skipped; ``None`` if they end the run."""
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
        overfit_batches: Train on this many batches over and over; 0 takes all batches.
        profile: ``(start, stop)``: trace these steps with ``jax.profiler``.

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
        mesh: A mesh with the strategy's axes, all Auto, instead of the one that the
            strategy would make.
        offload: An `Offload`, which selects the arrays that wait in the host's memory.
        compiler_options: Options of XLA by name, over those that the library sets for
            TPUs and GPUs (`compiler_options`); ``None`` as a value removes one.
        warm_start: Directory of a `plan`, whose compiled step ``fit`` takes if it can.

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
        "a PathNames, such as TRANSFORMER_NAMES, or pairs of a regex and the names of "
        r"the dims: PathNames((r'up\.kernel', ('embed', 'mlp')))",
    ),
    "checkpoint": ((str, os.PathLike, Checkpoint), "a directory, or a Checkpoint"),
    "evaluation": (Evaluation, "an Evaluation, such as Evaluation(params='ema')"),
    "faults": (Faults, "a Faults, such as Faults(step_timeout=600)"),
    "debugging": (Debugging, "a Debugging, such as Debugging(fast_dev_run=True)"),
    "backend": (Backend, "a Backend, such as Backend(mesh=FSDP().make_mesh())"),
}
"""The valid types of each argument, and their description; ``None`` is always valid."""

_BACKEND_KINDS: dict[str, tuple[Any, str]] = {
    "mesh": (Mesh, "a jax.sharding.Mesh, such as FSDP().make_mesh()"),
    "offload": (Offload, "an Offload, such as Offload() for the optimizer's state"),
    "compiler_options": (
        Mapping,
        "a dict of XLA's options, such as {'xla_tpu_scoped_vmem_limit_kib': 65536}, "
        "whose values may be None to leave one of the library's out",
    ),
}
"""The same for `Backend`."""

_Elements = tuple[Callable[[object], bool], str, str]
"""A test of a list's element, the element's name, and an example of the list."""

_LISTS: dict[str, _Elements] = {
    "devices": (
        # Devices of a described TPU slice have a different class.
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
"""The lists among the Trainer's arguments."""


def check_arguments(
    model: object, optimizer: object, loss: object, arguments: Mapping[str, Any]
) -> None:
    """Refuses arguments that have the wrong type for a Trainer, by name.

    Args:
        model: The argument ``model``.
        optimizer: The optimizer.
        loss: The loss.
        arguments: All arguments of the Trainer, by name.

    Raises:
        TypeError: If an argument has the wrong type; the message gives the type that
            was found and the valid values.
        ValueError: If ``log_every`` is not a number of steps, or there are both devices
            and a mesh.
    """
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
    _check_model(model)
    _check_optimizer(optimizer)
    _check_kinds(arguments, _KINDS)
    for name, elements in _LISTS.items():
        _check_list(name, arguments[name], elements)
    backend = arguments["backend"]
    if arguments["devices"] is not None and backend is not None and backend.mesh:
        raise ValueError(
            "Trainer got devices= and Backend(mesh=). A mesh names its devices "
            "already: pass one of the two."
        )
    least = ", which logs every step; loggers=() logs nothing"
    check_count("log_every", arguments["log_every"], 1, least)


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
            f"{name} is {kind_of(value)}. It must be a list, also of a single "
            f"{kind}, such as {example}."
        )
    # An iterator is not inspected: it would be empty afterwards.
    for i, element in enumerate(value if isinstance(value, list | tuple) else ()):
        if inspect.isclass(element) or not is_valid(element):
            raise TypeError(
                f"{name}[{i}] is {kind_of(element)}. It must be a {kind}"
                f"{_if_called(element, is_valid)}."
            )


def _check_optimizer(optimizer: object) -> None:
    if isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            "optimizer is an nnx.Optimizer. The Trainer keeps the optimizer's state "
            "itself: pass the Optax transformation that it was made from."
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
        if inner:  # `update` of a transformation, or a schedule
            raise TypeError(
                f"optimizer is a function that optax.{name} returned. It must be a "
                "complete transformation; a schedule is the learning rate of one: "
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
    # Linen is looked up, not imported: a user with a Linen module has imported it.
    linen = getattr(sys.modules.get("flax.linen"), "Module", ())
    if isinstance(model, linen) or (
        inspect.isclass(model) and linen and issubclass(model, linen)
    ):
        raise TypeError(
            f"model is {kind_of(model)}, which Flax Linen has made. It must be an NNX "
            "module: nnx.bridge.ToNNX(model, rngs=rngs).lazy_init(x) makes one of it, "
            "and https://flax.readthedocs.io/en/latest/guides/linen_to_nnx.html says "
            "how to port it."
        )
    if not callable(model):
        raise TypeError(
            f"model is {kind_of(model)}. It must be an nnx.Module, or a function of "
            "random keys that builds one: lambda rngs: Net(rngs=rngs)."
        )


def _if_called(value: object, is_valid: Callable[[Any], bool]) -> str:
    """The remedy for a class in place of its instance."""
    if not inspect.isclass(value) or not is_valid(value):
        return ""
    return f". Call the class: {value.__name__}(...)"


def _is_transformation(value: object) -> bool:
    return hasattr(value, "init") and hasattr(value, "update")


def check_assignment(owner: object, name: str) -> None:
    """Refuses an assignment that a built Trainer would ignore.

    Raises:
        AttributeError: If the name belongs to an argument, or to a property without a
            setter.
    """
    kind = type(owner)
    found = inspect.getattr_static(kind, name, None)
    if isinstance(found, property) and found.fset is not None:
        return
    place = grouped(name)
    if place or name in inspect.signature(kind.__init__).parameters:
        given = "=".join(place) if place else f"{name}="
        raise AttributeError(
            f"`trainer.{name} = ...` would have no effect: a Trainer reads its "
            f"arguments when it is built. Pass {given} to Trainer(...)."
        )
    if found is not None or name in vars(owner):
        raise AttributeError(
            f"`trainer.{name}` is read-only. A custom loop assigns `trainer.state`."
        )
