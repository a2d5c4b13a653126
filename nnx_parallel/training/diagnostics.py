"""What a Trainer is asked for, checked before anything is built.

What processes compare before the first step of a fit.

Copies of an array that should be equal, compared: silent corruption has a name.

A device without enough memory: what lies on it, and which knob helps.

What went wrong, from the state that a run has left.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import numbers
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from nnx_parallel.checkpoint.checksum import device_hashes
from nnx_parallel.checkpoint.manager import CheckpointManager
from nnx_parallel.data.prefetch import check_data, is_one_shot
from nnx_parallel.distributed.agreement import (
    allgather_object,
    check_consistent,
    versions,
)
from nnx_parallel.errors import (
    DataError,
    DeviceMemoryError,
    DisagreementError,
    LossError,
    ReplicaError,
)
from nnx_parallel.mesh import Device
from nnx_parallel.sharding.names import dotted, variables_of
from nnx_parallel.sharding.optimizer import state_path
from nnx_parallel.sharding.rules import hash_code
from nnx_parallel.state import StatePlan
from nnx_parallel.training.evaluation import Engine

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


def agree_on_run(
    plan: StatePlan, loss: Callable, settings: dict[str, Any], step: int
) -> None:
    """Checks that all processes are about to continue the same run.

    Args:
        plan: The model's structure and the place of every array.
        loss: The user's loss.
        settings: What else must be the same, by name, as JSON can hold it.
        step: The step from which the fit starts.

    Raises:
        DisagreementError: On all processes; it names the process, the field and both
            values.
    """
    if jax.process_count() == 1:
        return
    mesh = plan.layout.mesh
    places = [f"{d.process_index}:{d.id}" for d in mesh.devices.flat]
    arrays = jax.tree_util.tree_leaves_with_path(plan.abstract)
    fields = {
        **{f"version of {name}": found for name, found in versions().items()},
        **settings,
        "devices in the mesh's order": " ".join(places),
        "step to start from": step,
        "loss": hash_code(loss),
        "optimizer": str(jax.tree.structure(plan.abstract.opt_state)),
        **{
            state_path(path): f"{x.dtype}{list(x.shape)} {x.sharding.spec}"
            for path, x in arrays
        },
    }
    check_consistent("run", fields)


def agree_on_program(lowered: jax.stages.Lowered) -> None:
    """Checks that all processes are about to run the same program.

    Args:
        lowered: The step, not yet compiled.

    Raises:
        DisagreementError: On all processes.
    """
    if jax.process_count() == 1:
        return
    text = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:12]
    check_consistent(
        "compiled step (model, loss or optimizer differ in their code or constants)",
        {"program": text},
    )


def agree_on_batch(batch: Any) -> None:
    """Checks that all processes hold their parts of one global batch.

    Args:
        batch: The first batch, placed.

    Raises:
        DisagreementError: On all processes.

    Warns:
        UserWarning: If two processes have given the same rows as different parts of
            the batch.
    """
    if jax.process_count() == 1:
        return
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    check_consistent(
        "first batch",
        {
            f"batch{jax.tree_util.keystr(path)}": f"{x.dtype}{list(x.shape)} (global)"
            for path, x in leaves
        },
    )
    _compare_rows(batch)


def _compare_rows(batch: Any) -> None:
    digest = hashlib.sha256()
    rows: set[str] = set()
    for x in jax.tree.leaves(batch):
        for shard in sorted(x.addressable_shards, key=lambda s: str(s.index)):
            rows.add(str(shard.index[:1]))
            digest.update(np.asarray(shard.data).tobytes())
    found = allgather_object(
        "rows of the first batch", [sorted(rows), digest.hexdigest()]
    )
    for process, (part, value) in enumerate(found):
        for other, (other_part, other_value) in enumerate(found[:process]):
            if part == other_part and value != other_value:
                raise DisagreementError(
                    f"Processes {other} and {process} hold the same part of the batch "
                    "but gave different rows. Processes whose trainer.data_share is "
                    "equal must read the same data in the same order."
                )
            if part != other_part and value == other_value and process == 1:
                warnings.warn(
                    f"Processes {other} and {process} gave the same rows as different "
                    "parts of the first batch. Each process gives its share: the part "
                    "that trainer.data_share = (index, count) names.",
                    stacklevel=2,
                )


Hashes = dict[str, dict[str, list[tuple[str, int]]]]


def check_replicas(state: Any, step: int) -> None:
    """Checks that all devices that hold the same part of an array hold the same bits.

    Each device hashes its shards; nothing but the hashes is sent. With several
    processes all of them call it.

    Args:
        state: A pytree of global arrays.
        step: The step, for the message.

    Raises:
        ReplicaError: On all processes, if copies differ. It names the arrays and the
            devices.
    """
    leaves = [
        (state_path(path), x)
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if isinstance(x.sharding, NamedSharding)
    ]
    found = device_hashes([x for _, x in leaves])
    mine = {
        path: _by_part(x, hashes)
        for (path, x), hashes in zip(leaves, found, strict=True)
    }
    lines: list[str] = []
    for path, copies in _merge(allgather_object("replicas", mine)).items():
        lines += [f"`{path}`{line}" for line in _odd_ones(copies)]
    if lines:
        raise ReplicaError(
            f"Copies of {len(lines)} arrays differ at step {step}:\n  "
            + "\n  ".join(lines[:20])
            + "\nThe memory or the arithmetic of these devices is at fault, or "
            "processes have trained apart. Go back to the last checkpoint, without "
            "these devices: `python -m nnx_parallel inspect DIR --verify` says whether "
            "it is whole."
        )


def _by_part(x: jax.Array, hashes: dict[int, int]) -> dict[str, list[tuple[str, int]]]:
    """Devices of this process and their hashes, by the part of the array they hold."""
    parts: dict[str, list[tuple[str, int]]] = {}
    for shard in x.addressable_shards:
        name = f"{shard.device} (process {shard.device.process_index})"
        part = str([(s.start, s.stop) for s in shard.index])
        parts.setdefault(part, []).append((name, hashes[shard.device.id]))
    return parts


def _merge(shares: list[Hashes]) -> Hashes:
    merged: Hashes = {}
    for share in shares:
        for path, parts in share.items():
            for part, copies in parts.items():
                merged.setdefault(path, {}).setdefault(part, []).extend(copies)
    return merged


def _odd_ones(parts: dict[str, list[tuple[str, int]]]) -> list[str]:
    lines = []
    for part, copies in parts.items():
        counts = Counter(value for _, value in copies)
        if len(counts) == 1:
            continue
        common, count = counts.most_common(1)[0]
        odd = [name for name, value in copies if value != common]
        if 2 * count > len(copies):
            lines.append(f"{part}: {', '.join(odd)} differ from {count} others")
        else:
            names = ", ".join(name for name, _ in copies)
            lines.append(f"{part}: {names} do not agree")
    return lines


@contextlib.contextmanager
def explaining_memory(
    plan: StatePlan, num_microbatches: int, temporary_bytes: int | None
) -> Iterator[None]:
    """Turns an error of the allocator into one that says what lies where.

    Args:
        plan: The place of every array.
        num_microbatches: Of the step.
        temporary_bytes: Of the compiled step on each device, or ``None``.

    Raises:
        DeviceMemoryError: If a device has run out of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
            raise
        reason = text.strip().splitlines()[0]
        advice = _advice(plan, num_microbatches, temporary_bytes)
        raise DeviceMemoryError(f"Out of device memory: {reason}\n{advice}") from error


def _advice(plan: StatePlan, num_microbatches: int, temporary: int | None) -> str:
    state = plan.abstract
    params, optimizer = _shard_bytes(state.params), _shard_bytes(state.opt_state)
    whole = _bytes(state.params) + _bytes(state.opt_state)
    num_devices = plan.layout.mesh.size
    lines = [
        f"On each device: parameters {params:,} bytes, as many or more for gradients, "
        f"optimizer state {optimizer:,} bytes."
    ]
    if temporary is not None:
        lines.append(f"Gradients and activations of the step: {temporary:,} bytes.")
    twice = 2 * num_microbatches
    half = "" if temporary is None else f", by up to {temporary // 2:,} bytes"
    lines.append(
        f"Less for activations: num_microbatches={twice}{half}; or remat='full'."
    )
    saved = params + optimizer - whole // num_devices
    if saved > 0:
        lines.append(
            f"Less for the state: strategy=FSDP() over {num_devices} devices, by "
            f"{saved:,} bytes on each."
        )
    return "\n".join(lines)


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _shard_bytes(tree: Any) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def explain_non_finite(engine: Engine, storage: CheckpointManager) -> str:
    """What the state holds that is not finite, and the way back."""
    step = int(engine.state.step)
    bad = engine.non_finite_arrays()
    saved = storage.latest_step
    way_back = "no checkpoint" if saved is None else f"a checkpoint of step {saved}"
    kept = f"Nothing was saved from the bad step on; there is {way_back}."
    wrong = [found for found in engine.label_ranges() if not found.is_valid]
    if wrong:
        found = wrong[0]
        return (
            f"The first batch has labels from {found.lowest} to {found.highest}, but "
            f"the logits have {found.num_classes} classes: valid labels are 0 to "
            f"{found.num_classes - 1}. Give labels to leave out a weight of 0. {kept}"
        )
    if not bad:
        return (
            f"All arrays are finite at step {step}, the last one done. {kept} "
            "Look at the batch of the bad step, and at what the loss does with it."
        )
    shown = ", ".join(f"`{path}`" for path in bad[:5])
    return (
        f"Not finite at step {step}, the last one done: {shown} ({len(bad)} "
        f"arrays). {kept} Lower the learning rate, clip with "
        "optax.clip_by_global_norm, or look at the batches of these steps."
    )
