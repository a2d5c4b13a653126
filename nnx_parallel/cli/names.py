"""Finds the model, optimizer, loss and batch of a script by the names of its variables.

Such a script has no Trainer, but a plain NNX loop. It runs up to the first update of
its optimizer.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from nnx_parallel.errors import PlanError, kind_of, suggest
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.parts import Parts
from nnx_parallel.strategies.data_parallel import DataParallel
from nnx_parallel.training.trainer import Trainer

Scope = Mapping[str, Any]

_KINDS = {
    "model": "a model, or a class or function that takes rngs and returns one",
    "tx": "an Optax transformation or an nnx.Optimizer",
    "loss": "a function loss(model, batch)",
    "batch": "a pytree of arrays, whose dim 0 is the rows of the global batch",
}


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of variables in a script.

    Attributes:
        model: Name of the model, or of a function that takes ``rngs`` and builds it.
        tx: Name of an Optax transformation or an ``nnx.Optimizer``.
        loss: Name of a function ``loss(model, batch)``.
        batch: Name of a batch; ``None`` if its shapes are given.
    """

    model: str
    tx: str
    loss: str
    batch: str | None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Names | None:
        """Reads the options ``--model``, ``--tx``, ``--loss`` and ``--batch``.

        Returns:
            The names, or ``None`` for a script with a Trainer.

        Raises:
            PlanError: If some of the options are missing, or are not names.
        """
        given = {key: settings[key] for key in ("model", "tx", "loss")}
        if not any(given.values()):
            return None
        words = settings["batch"]
        missing = [f"--{key}" for key, name in given.items() if not name]
        if missing := [*missing, *["--batch"] * (not words)]:
            raise PlanError(
                "A script without a Trainer needs --model, --tx, --loss and --batch, "
                f"each with the name of a variable. Missing: {', '.join(missing)}."
            )
        is_named = len(words) == 1 and "=" not in words[0]
        names: dict[str, Any] = given | {"batch": words[0] if is_named else None}
        for key, name in names.items():
            if name and not name.isidentifier():
                raise PlanError(
                    f"--{key} {name!r} is not a name. It must be the name of a "
                    f"variable in the script: {_KINDS[key]}."
                )
        return cls(**names)

    def parts_in(
        self, scopes: Sequence[Scope], topology: Topology, batch: Any, script: str
    ) -> Parts:
        """Returns the parts of a step.

        Args:
            scopes: Variables of the script: global, then local, the outermost first.
            topology: The devices to plan for.
            batch: Shapes of a global batch; used if no name of a batch is given.
            script: Path of the script, for messages.

        Raises:
            PlanError: If a name is missing in the script, or its value is unsuitable.
        """
        model, tx, loss = (
            _value_of(key, getattr(self, key), scopes, script)
            for key in ("model", "tx", "loss")
        )
        if self.batch is not None:
            batch = _value_of("batch", self.batch, scopes, script)
        wrt: dict[str, Any] = {"wrt": tx.wrt} if isinstance(tx, nnx.Optimizer) else {}
        try:
            trainer = Trainer(
                model,
                getattr(tx, "tx", tx),
                loss,
                # A plan considers all strategies.
                strategy=DataParallel(1),
                devices=topology.devices[:1],
                loggers=(),
                **wrt,
            )
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"--model, --tx and --loss of '{script}' cannot be trained: {error}"
            ) from error
        return Parts.of(trainer, batch)


def scopes_of(module: Scope, error: BaseException | None, path: Path) -> list[Scope]:
    """Returns the script's global variables, and the local variables at an error."""
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    local = [f.f_locals for f, _ in frames if f.f_code.co_filename == str(path)]
    return [module, *local]


def _value_of(key: str, name: str, scopes: Sequence[Scope], script: str) -> Any:
    values = [scope[name] for scope in scopes if name in scope]
    if values and _is_suitable(key, values[0]):
        return values[0]
    known = {n: x for s in reversed(scopes) for n, x in s.items() if n[0] != "_"}
    valid = [n for n, x in known.items() if _is_proposed(key, x)]
    found = f"is {kind_of(values[0])}" if values else f"is not a variable of '{script}'"
    raise PlanError(
        f"--{key} {name!r} {found} when training begins. It must be {_KINDS[key]}."
        f"{suggest(name, valid)} Valid values: {valid}."
    )


def _is_suitable(key: str, value: Any) -> bool:
    match key:
        case "model":
            return isinstance(value, nnx.Module) or callable(value)
        case "tx":
            is_pair = hasattr(value, "init") and hasattr(value, "update")
            return is_pair or isinstance(value, nnx.Optimizer)
        case "loss":
            return callable(value)
    # Flax's modules are pytrees of arrays too.
    leaves = [] if isinstance(value, nnx.Module) else jax.tree.leaves(value)
    shapes = [getattr(x, "shape", ()) for x in leaves]
    return bool(shapes) and all(isinstance(x, tuple) and x for x in shapes)


def _is_proposed(key: str, value: Any) -> bool:
    """Returns True if the user probably means this value for an option."""
    match key:
        case "model":
            of = value if isinstance(value, type) else type(value)
            return issubclass(of, nnx.Module) and not issubclass(of, nnx.Optimizer)
        case "loss":
            return isinstance(value, types.FunctionType)
    return not isinstance(value, type) and _is_suitable(key, value)
