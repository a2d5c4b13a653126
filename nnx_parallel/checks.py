"""What a Trainer is asked for, checked before anything is built."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.data import is_one_shot
from nnx_parallel.errors import DataError, LossError
from nnx_parallel.mesh import Device
from nnx_parallel.sharding.arrays import dotted, variables_of


def check_arguments(
    devices: Sequence[Device] | None,
    mesh: Mesh | None,
    num_microbatches: int,
    ema_decay: float | None,
) -> None:
    """Refuses arguments of a Trainer that contradict one another or mean nothing.

    Raises:
        ValueError: Says which, and what is valid.
    """
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


def check_model(model: object, loss: Callable) -> None:
    """Refuses a model that cannot be trained as it comes.

    Raises:
        ValueError: If its arrays were donated.
        LossError: If the loss holds on to the model itself.
    """
    if not isinstance(model, nnx.Module):
        return
    for path, variable in variables_of(model):
        value = variable.get_value()
        if isinstance(value, jax.Array) and value.is_deleted():
            raise ValueError(
                f"`{dotted(path)}` of the model was donated to a step, and is gone. "
                "Take trainer.model anew after each step, or build a new model."
            )
    held = [name for name, value in _held_by(loss) if value is model]
    if held:
        raise LossError(
            f"The loss uses the model as {held[0]!r} from outside, where it is not "
            "trained: its gradient would be 0. Use the model that it is given as its "
            "first argument: loss(model, batch)."
        )


def _held_by(function: Callable) -> list[tuple[str, object]]:
    """What a function takes from around it, by name."""
    inner = inspect.unwrap(getattr(function, "func", function))
    if not inspect.isfunction(inner):
        return []
    found = inspect.getclosurevars(inner)
    return [*found.nonlocals.items(), *found.globals.items()]


def check_resumable(data: object) -> None:
    """Warns of data that a resumed run could not find its place in.

    Warns:
        UserWarning: If it is a generator or another plain iterator.
    """
    if is_one_shot(data):
        warnings.warn(
            f"The run saves checkpoints, but its data is a one-shot iterator "
            f"({type(data).__name__}), whose position cannot be saved: a resumed run "
            "skips as many batches as were used, which is right only if the iterator "
            "then starts at its beginning. Pass an object whose `__iter__` starts "
            "again, or a Grain dataset.",
            stacklevel=5,
        )


def check_eval_data(eval_data: object) -> None:
    """Refuses data that a single evaluation would use up.

    Raises:
        DataError: If it is an iterator.
    """
    if eval_data is not None and is_one_shot(eval_data):
        raise DataError(
            "eval_data is an iterator, which one evaluation would use up. Pass a list, "
            "or an object whose __iter__ starts anew."
        )
