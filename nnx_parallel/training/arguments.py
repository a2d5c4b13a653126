"""Natural mistakes in the arguments of a Trainer, each with the valid spelling.

All other mistakes are found where the argument is read.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.errors import kind_of
from nnx_parallel.optimizers.muon import muon
from nnx_parallel.precision import Precision
from nnx_parallel.sharding.offload import Offload
from nnx_parallel.sharding.path_names import PathNames
from nnx_parallel.strategies.base import Strategy
from nnx_parallel.training.callback import Callback

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
    "offload": (Offload, "an Offload, such as Offload() for the optimizer's state"),
    "compiler_options": (
        Mapping,
        "a dict of XLA's options, such as {'xla_tpu_scoped_vmem_limit_kib': 65536}, "
        "whose values may be None to leave one of the library's out",
    ),
    "checkpoint": ((str, os.PathLike, Checkpoint), "a directory, or a Checkpoint"),
}
"""The valid types of each argument, and their description; ``None`` is always valid."""

_LISTS: dict[str, tuple[Callable[[object], bool], str, str]] = {
    # Devices of a described TPU slice, which does not exist here, have a different
    # class.
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
"""For each list: a test of an element, the element's name, and an example."""


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
        ValueError: If two of them contradict each other.
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
    if arguments["devices"] is not None and arguments["mesh"] is not None:
        raise ValueError(
            "Trainer got devices= and mesh=. A mesh names its devices already: pass "
            "one of the two."
        )
    _check_model(model)
    _check_optimizer(optimizer)
    for name, (kind, rule) in _KINDS.items():
        value = arguments[name]
        if value is not None and not isinstance(value, kind):
            called = _if_called(value, lambda x, kind=kind: issubclass(x, kind))
            raise TypeError(f"{name} is {kind_of(value)}. It must be {rule}{called}.")
    for name, (is_valid, kind, example) in _LISTS.items():
        value = arguments[name]
        if value is None:
            continue
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
    if name in inspect.signature(kind.__init__).parameters:
        raise AttributeError(
            f"`trainer.{name} = ...` would have no effect: a Trainer reads its "
            f"arguments when it is built. Pass {name}= to Trainer(...)."
        )
    if found is not None or name in vars(owner):
        raise AttributeError(
            f"`trainer.{name}` is read-only. A custom loop assigns `trainer.state`."
        )
