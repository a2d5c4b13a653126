"""Natural mistakes in the arguments of a Trainer, each with the valid spelling.

Whatever else is wrong is found where the argument is read.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.precision import Precision
from nnx_parallel.sharding.path_names import PathNames
from nnx_parallel.strategies.base import Strategy
from nnx_parallel.training.callback import Callback

P = ParamSpec("P")
R = TypeVar("R")

_KINDS: dict[str, tuple[Any, str]] = {
    "eval_loss": (Callable, "a function loss(model, batch), as the loss is"),
    "strategy": (Strategy, "a Strategy, such as FSDP() or Composite(FSDP(), ...)"),
    "precision": (Precision, "a Precision, such as Precision.mixed_bfloat16()"),
    "mesh": (Mesh, "a jax.sharding.Mesh, such as FSDP().make_mesh()"),
    "names": (
        PathNames,
        "a PathNames, such as TRANSFORMER_NAMES, or pairs of a regex and the names of "
        r"the dims: PathNames((r'up\.kernel', ('embed', 'mlp')))",
    ),
    "checkpoint": ((str, os.PathLike, Checkpoint), "a directory, or a Checkpoint"),
}
"""What an argument must be, and how that is said; ``None`` is always valid."""

_LISTS: dict[str, tuple[Callable[[object], bool], str, str]] = {
    # Devices of a described TPU slice, which is not there, are of a class of their own.
    "devices": (lambda x: hasattr(x, "process_index"), "device", "jax.devices()[:8]"),
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
"""The same of lists: whether an element is valid, what it is called, an example."""

_OTHER_NAMES = {
    "epochs": "num_epochs",
    "max_epochs": "num_epochs",
    "steps": "num_steps",
    "max_steps": "num_steps",
    "train_steps": "num_steps",
    "num_train_epochs": "num_epochs",
    "drop_last": "last_batch",
    "drop_remainder": "last_batch",
    "accumulate_grad_batches": "num_microbatches",
    "gradient_accumulation_steps": "num_microbatches",
    "grad_accum": "num_microbatches",
    "gradient_accumulation": "num_microbatches",
    "batch_size": "global_batch_size",
    "val_data": "eval_data",
    "validation_data": "eval_data",
    "eval_dataset": "eval_data",
    "val_every": "eval_every",
    "tx": "optimizer",
    "loss_fn": "loss",
    "logger": "loggers",
    "dtype": "precision",
    "checkpoint_dir": "checkpoint",
    "output_dir": "checkpoint",
    "gradient_checkpointing": "remat",
}
"""Our names of what other libraries' trainers take."""

_KNOWN: dict[str, list[str]] = {}
"""Arguments by the name of what takes them, once `suggests_names` has seen it."""


def check_arguments(
    model: object, optimizer: object, loss: object, **arguments: object
) -> None:
    """Refuses arguments of another kind than a Trainer takes, by name.

    Raises:
        TypeError: With what was found and what is valid.
        ValueError: If two of them contradict each other.
    """
    if _is_transformation(loss) and callable(optimizer):
        raise TypeError(
            "loss is an Optax transformation and optimizer a function: they are "
            "exchanged. The order is Trainer(model, optimizer, loss)."
        )
    if not callable(loss):
        raise TypeError(
            f"loss is {_found(loss)}. It must be a function loss(model, batch), which "
            "returns a scalar or a Mean."
        )
    if arguments["devices"] is not None and arguments["mesh"] is not None:
        raise ValueError(
            "Trainer got devices= and mesh=. A mesh names its devices already: pass "
            "one of the two."
        )
    _check_model(model)
    if isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            "optimizer is an nnx.Optimizer. The Trainer keeps the optimizer's state "
            "itself: pass the Optax transformation that it was made of."
        )
    module = getattr(optimizer, "__module__", None) or ""
    if inspect.isfunction(optimizer) and module.partition(".")[0] == "optax":
        name, _, inner = optimizer.__qualname__.partition(".<locals>")
        if inner:  # `update` of a transformation, or a schedule
            raise TypeError(
                f"optimizer is a function that optax.{name} returned. It must be a "
                "whole transformation; a schedule is the learning rate of one: "
                "optax.adamw(schedule)."
            )
        if module.startswith("optax.schedules"):
            raise TypeError(
                f"optimizer is optax.{name}, which makes a schedule. Give what it "
                "returns to an optimizer, in place of the rate: optax.adamw(schedule)."
            )
        raise TypeError(
            f"optimizer is the function optax.{name}. Call it, with a learning rate: "
            f"optax.{name}(3e-4)."
        )
    for name, (kind, rule) in _KINDS.items():
        value = arguments[name]
        if value is not None and not isinstance(value, kind):
            called = _if_called(value, lambda x, kind=kind: issubclass(x, kind))
            raise TypeError(f"{name} is {_found(value)}. It must be {rule}{called}.")
    for name, (is_valid, kind, example) in _LISTS.items():
        value = arguments[name]
        if value is None:
            continue
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise TypeError(
                f"{name} is {_found(value)}. It must be a list, also of a single "
                f"{kind}, such as {example}."
            )
        # An iterator is not looked into: it would be empty afterwards.
        for i, element in enumerate(value if isinstance(value, list | tuple) else ()):
            if inspect.isclass(element) or not is_valid(element):
                raise TypeError(
                    f"{name}[{i}] is {_found(element)}. It must be a {kind}"
                    f"{_if_called(element, is_valid)}."
                )


def _check_model(model: object) -> None:
    if isinstance(model, nnx.Module):
        return
    # Looked up, not imported: who has a Linen module has imported it.
    linen = getattr(sys.modules.get("flax.linen"), "Module", ())
    if isinstance(model, linen) or (
        inspect.isclass(model) and linen and issubclass(model, linen)
    ):
        raise TypeError(
            f"model is {_found(model)}, which Flax Linen has made. It must be an NNX "
            "module: nnx.bridge.ToNNX(model, rngs=rngs).lazy_init(x) makes one of it, "
            "and https://flax.readthedocs.io/en/latest/guides/linen_to_nnx.html says "
            "how to port it."
        )
    if not callable(model):
        raise TypeError(
            f"model is {_found(model)}. It must be an nnx.Module, or a function of "
            "random keys that builds one: lambda rngs: Net(rngs=rngs)."
        )


def suggests_names(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose errors for arguments that it does not take name the valid ones.

    For a keyword: the nearest it has, or the method that has it.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters][1:]  # after `self`
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    title = function.__qualname__.removesuffix(".__init__")
    _KNOWN[title] = known

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if extra := args[len(positional) + 1 :]:
            raise TypeError(
                f"{title} takes {', '.join(positional)} by position, and got "
                f"{_found(extra[0])} after them. Pass all others by name, such as "
                f"{known[len(positional)]}=."
            )
        for name in kwargs:
            if name not in known:
                other = _OTHER_NAMES.get(name, name)
                near = difflib.get_close_matches(name, known, n=1)
                near = [other] if other in known else near
                homes = [home for home, names in _KNOWN.items() if other in names]
                remedy = f"Did you mean {near[0]}=?" if near else f"See help({title})."
                if homes and title not in homes:
                    remedy = f"{homes[0]} has: {other}=."
                raise TypeError(f"{title} has no argument {name!r}. {remedy}")
        return function(*args, **kwargs)

    return wrapped


def _found(value: object) -> str:
    """A value as an error names it."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if isinstance(value, str | int | float):
        return f"{value!r}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _if_called(value: object, is_valid: Callable[[Any], bool]) -> str:
    """The remedy for a class in place of its instance."""
    if not inspect.isclass(value) or not is_valid(value):
        return ""
    return f". Call the class: {value.__name__}(...)"


def _is_transformation(value: object) -> bool:
    return hasattr(value, "init") and hasattr(value, "update")
