"""What a Trainer is asked for, checked before anything is built."""

from __future__ import annotations

import contextlib
import inspect
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.data import check_data, is_one_shot
from nnx_parallel.errors import DataError, LossError
from nnx_parallel.mesh import Device
from nnx_parallel.sharding.arrays import dotted, variables_of

_LEAST = {
    "num_microbatches": (1, "does not split the batch"),
    "log_every": (1, "logs every step; loggers=() logs nothing"),
    "overfit_batches": (0, "takes all batches"),
    "check_replicas_every": (0, "compares nothing"),
}


def check_arguments(
    devices: Sequence[Device] | None,
    mesh: Mesh | None,
    ema_decay: float | None,
    callbacks: object,
    seed: int,
    **counts: int,
) -> None:
    """Refuses arguments of a Trainer that contradict one another or mean nothing.

    Args:
        devices: As the Trainer's.
        mesh: The same.
        ema_decay: The same.
        callbacks: The same.
        seed: The same.
        counts: Numbers of something, by the name of the argument.

    Raises:
        ValueError: Says which, and what is valid.
    """
    if devices is not None and mesh is not None:
        raise ValueError(
            "Trainer got devices= and mesh=. A mesh names its devices already: pass "
            "one of the two."
        )
    for name, count in counts.items():
        least, meaning = _LEAST[name]
        if not _is_integer(count) or count < least:
            raise ValueError(
                f"{name}={count!r}. It must be an integer of at least {least}, which "
                f"{meaning}."
            )
    if not _is_integer(seed) or not -(2**31) <= seed < 2**31:
        raise ValueError(
            f"seed={seed!r}. It must be an integer of 32 bits: from {-(2**31)} to "
            f"{2**31 - 1}."
        )
    if not isinstance(callbacks, Iterable):
        raise ValueError(
            f"callbacks is a {type(callbacks).__name__}. It must be a list of "
            "callbacks, of one too."
        )
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(
            f"ema_decay={ema_decay}. It must be at least 0 and below 1, such as 0.999."
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_model(model: object, loss: Callable) -> None:
    """Refuses a model that cannot be trained as it comes.

    Raises:
        ValueError: If its arrays were donated.
        LossError: If the loss holds on to the model itself.
    """
    if not isinstance(model, nnx.Module):
        return
    for path, variable in variables_of(model):
        is_variable = isinstance(variable, nnx.Variable)  # else refused a moment later
        value = variable.get_value() if is_variable else variable
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
    code = inner.__code__
    found = [(n, inner.__globals__[n]) for n in code.co_names if n in inner.__globals__]
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it gets its value further down
            found.append((name, cell.cell_contents))
    return found


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


def check_num_steps(num_steps: object) -> None:
    """Refuses a length of a fit that is no number of steps.

    Raises:
        ValueError: If it is not an integer of at least 0.
    """
    if not _is_integer(num_steps) or num_steps < 0:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(
            f"num_steps={num_steps!r}. It must be an integer of at least 0: all "
            "updates of the run, those before included."
        )


def check_evaluation(eval_data: object, eval_every: int | None) -> None:
    """Refuses an evaluation in a fit that cannot be made as asked for.

    Raises:
        DataError: If the data is no iterable of batches, or empty, or an iterator,
            which one evaluation would use up.
        ValueError: If ``eval_every`` is no number of steps, or there is no data.
    """
    if eval_every is not None and (not _is_integer(eval_every) or eval_every < 0):
        raise ValueError(
            f"eval_every={eval_every!r}. It must be an integer of at least 0; 0 and "
            "None evaluate at the end alone."
        )
    if eval_data is None and eval_every:
        raise ValueError(
            f"eval_every={eval_every} without eval_data, so that nothing would be "
            "evaluated. Pass eval_data=, or leave eval_every out."
        )
    if eval_data is None:
        return
    check_data(eval_data)
    if isinstance(eval_data, Iterator):
        raise DataError(
            "eval_data is an iterator, which one evaluation would use up. Pass a list, "
            "or an object whose __iter__ starts anew."
        )
    # Of several processes one alone may have none: they say so together, later.
    is_empty = isinstance(eval_data, list | tuple) and not eval_data
    if is_empty and jax.process_count() == 1:
        raise DataError("eval_data is empty. Pass batches, or leave it out.")
