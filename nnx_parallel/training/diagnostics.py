"""Checks before a run and during it, and errors that say how to fix the cause.

Every ``agree_on`` function raises `DisagreementError` on all processes. The error names
the process that differs, the field and both values. An error of the memory allocator is
explained with changes that would make the run fit.
"""

import contextlib
import hashlib
import inspect
import numbers
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from nnx_parallel.data.prefetch import check_data
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
    ParallelError,
    ParallelWarning,
    hide_own_frames,
    kind_of,
    suggest,
    warn_user,
)
from nnx_parallel.layers.loss import LabelRange
from nnx_parallel.precision import array_bytes
from nnx_parallel.sharding.checksum import (
    Place,
    raise_if_copies_differ,
    start_hashes,
)
from nnx_parallel.sharding.model import Path
from nnx_parallel.sharding.names import dotted, path_of
from nnx_parallel.sharding.nnx_arrays import flatten_pure, is_inexact, variables_of
from nnx_parallel.sharding.offload import HOST
from nnx_parallel.sharding.rules import hash_code
from nnx_parallel.state import StatePlan, TrainState


def check_count(name: str, value: object, least: int, meaning: str) -> int:
    """Returns a count as `int`.

    Raises a `ValueError` if the count is not an integer of at least ``least``. The
    error adds ``meaning`` to this rule.
    """
    if not _is_integer(value) or value < least:
        raise ValueError(
            f"{name}={value!r}. It must be an integer of at least {least}{meaning}."
        )
    return int(value)


def check_length(num_steps: object, num_epochs: object) -> int:
    """Returns the number of steps of a fit, or 0 if it is given in epochs.

    Raises a `ValueError` unless exactly one of the two numbers is given.
    """
    if num_steps is not None and num_epochs is not None:
        found = f"num_steps={num_steps!r} and num_epochs={num_epochs!r}"
    elif num_steps is None and num_epochs is None:
        found = "neither num_steps nor num_epochs"
    elif num_epochs is None:
        rule = ": all updates of the run, including earlier ones"
        return check_count("num_steps", num_steps, 0, rule)
    else:
        rule = ": all passes over the data, including earlier ones"
        return 0 * check_count("num_epochs", num_epochs, 1, rule)
    raise ValueError(
        f"fit got {found}. It takes one of them: num_steps, the number of updates, or "
        "num_epochs, the number of passes over data with a length."
    )


def check_evaluation(data: object, every: object) -> int | None:
    """Checks a fit's evaluation data; returns the steps between evaluations."""
    if every is not None:
        rule = "; 0 and None evaluate only at the end"
        every = check_count("eval_every", every, 0, rule)
    if data is None:
        if every:
            raise ValueError(
                f"eval_every={every} without eval_data: nothing would be evaluated. "
                "Pass eval_data=, or leave eval_every out."
            )
        return every
    check_data(data)
    if isinstance(data, Iterator):
        raise DataError(
            "eval_data is an iterator, which one evaluation would use up. Pass a list, "
            "or an object whose __iter__ starts over."
        )
    # With several processes, the others may have data. Later, all processes report the
    # missing data together.
    if isinstance(data, list | tuple) and not data and jax.process_count() == 1:
        raise DataError("eval_data is empty. Pass batches, or leave it out.")
    return every


def check_seed(seed: object) -> int:
    """Returns a seed as `int`; raises a `ValueError` unless it is a 32-bit integer."""
    least, most = -(2**31), 2**31 - 1
    if not _is_integer(seed) or not least <= seed <= most:
        # The text of a key or an nnx.Rngs would fill the screen.
        found = seed if isinstance(seed, int | float | str) else type(seed)
        raise ValueError(
            f"seed={found!r}. It must be an integer of 32 bits: from {least} to {most}."
        )
    return int(seed)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_loss(function: Callable, name: str = "loss") -> None:
    """Raises an error if a function's parameters do not fit its arguments."""
    if not callable(function):
        raise TypeError(
            f"The {name} is {kind_of(function)}. It must be a function {name}(model, "
            "batch)."
        )
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a function in C may have no signature
    if [*signature.parameters][1:2] == ["model"]:
        raise LossError(
            f"The loss has the signature {signature}, but the model is its first "
            "argument. Write loss(model, batch)."
        )
    keywords = {"rngs": None} if "rngs" in signature.parameters else {}
    try:
        signature.bind(None, None, **keywords)
    except TypeError as error:
        raise LossError(
            f"The {name} has the signature {signature} and cannot be called with a "
            f"model and a batch: {error}. Write {name}(model, batch), or {name}(model, "
            "batch, rngs), which also gets an nnx.Rngs: rngs() returns a new key. Bind "
            "other arguments with functools.partial."
        ) from None


def shapes_of(tree: Any) -> str:
    """Formats a batch as in ``{x: f32[16,9], y: i32[16]}``; at most 8 arrays."""
    if isinstance(tree, Mapping):
        inner = [f"{name}: {shapes_of(x)}" for name, x in tree.items()]
        ends = "{}"
    elif isinstance(tree, tuple | list):
        inner, ends = [*map(shapes_of, tree)], "()"
    elif hasattr(tree, "shape") and hasattr(tree, "dtype"):
        # float32 becomes f32, as in the texts of JAX.
        kind = re.sub(r"^(bf|f|u|i|c)[a-z]*(?=\d)", r"\1", str(tree.dtype))
        return f"{kind}[{','.join(map(str, tree.shape))}]"
    else:
        return type(tree).__name__
    more = ["..."] if len(inner) > 8 else []
    return f"{ends[0]}{', '.join([*inner[:8], *more])}{ends[1]}"


class _CallNote(str):
    """A note about the call of a user's function."""


@contextlib.contextmanager
def noting_call(name: str, model: nnx.Module, batch: Any) -> Iterator[None]:
    """Adds a note to any error in a user's function.

    The note has the shapes of the batch, the layer in which the error occurred, and a
    remedy for common mistakes.
    """
    try:
        yield
    except Exception as error:
        call = f"in {name}, batch {shapes_of(batch)}, model {type(model).__name__}"
        # A half-built layer may raise further errors, which must not hide this one.
        with contextlib.suppress(Exception):
            call += _layer_of(error, model)
        with contextlib.suppress(Exception):
            if remedy := _remedy_of_call(error, name, model, batch):
                call += f". {remedy}"
        error.add_note(_CallNote(call))
        raise


def _layer_of(error: Exception, model: nnx.Module) -> str:
    """Describes the innermost layer in which the error was raised, or returns ""."""
    paths = {id(module): path for path, module in nnx.iter_modules(model)}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for layer in (frame.f_locals.get("self") for frame in reversed(frames)):
        if path := paths.get(id(layer)):
            params = {
                dotted(p): v.get_value()
                for p, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))
            }
            shapes = f", {kind_of(layer)} of {shapes_of(params)}"
            return f", layer `{dotted(path)}`" + shapes * bool(params)
    return ""


def _remedy_of_call(error: Exception, name: str, model: nnx.Module, batch: Any) -> str:
    text, kind = str(error), type(batch).__name__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(batch, Mapping) and (found := _remedy_of_dict(error, frames, batch)):
        return found
    if isinstance(batch, tuple | list) and text.startswith(f"{kind} indices must be"):
        return f"The batch is a {kind}: unpack it, as in x, y = batch."
    named = re.escape(type(model).__name__)
    is_swapped = re.match(f"'{named}' object is not subscriptable", text)
    if is_swapped or text == f"'{kind}' object is not callable":
        call = f"{name.removeprefix('the ')}(model, batch)"
        return f"The model is the first argument, and the batch the second: {call}."
    if re.search(rf"(operand|Value).*'{named}['( ]", text):
        return (
            "The first argument of loss(model, batch) is the model, not its outputs: "
            "outputs = model(batch['x'])."
        )
    for type_, remedy in _TRACED.items():
        if isinstance(error, type_):
            return f"{name.capitalize()} is traced once, without values. {remedy}"
    if "Tracer.__format__" in text:
        return "A traced value has no text: print with jax.debug.print('{}', value)."
    return _remedy_in_optax(frames) or _remedy_of_layer(text, frames)


_TRACED: dict[type[Exception], str] = {
    jax.errors.TracerBoolConversionError: "if, while, and, or and bool() need values: "
    "choose with jnp.where(condition, a, b) or jax.lax.cond.",
    jax.errors.TracerArrayConversionError: "NumPy needs values: compute with jnp in "
    "place of np, and leave out np.asarray.",
    jax.errors.TracerIntegerConversionError: "range() and indices of Python lists "
    "need values: use sizes such as x.shape[0], jnp.take, or jax.lax.fori_loop.",
    jax.errors.NonConcreteBooleanIndexError: "The shape of the result would depend on "
    "values: keep all rows and mask them, as in jnp.where(mask, x, 0).",
    jax.errors.ConcretizationTypeError: "float(), int(), .item() and shapes need "
    "values: compute with jnp, mask with jnp.where, or give a fixed size=.",
}
"""Remedies for operations that need values. A subclass comes before its base."""


def _remedy_of_dict(error: Exception, frames: list, batch: Mapping) -> str:
    """Returns the remedy for a batch that is not used like a dict."""
    text, names = str(error), f"Its names: {[*batch]}."
    key = error.args[0] if isinstance(error, KeyError) and error.args else batch
    if isinstance(key, str | int) and key not in batch:
        return f"The batch has no {key!r}.{suggest(str(key), map(str, batch))} {names}"
    kind = re.escape(type(batch).__name__)
    if found := re.fullmatch(rf"'{kind}' object has no attribute '(\w+)'", text):
        return f"The batch is a dict: write batch[{found[1]!r}]. {names}"
    is_local = any(x is batch for x in frames[-1].f_locals.values())
    if is_local and "values to unpack" in text:
        return (
            f"The batch is a dict: read its arrays by name, as in batch['x']. {names}"
        )
    # A model may take a dict, but a layer of Flax takes arrays.
    layers = [f for f in frames if f.f_globals.get("__name__", "").startswith("flax.")]
    if any(x is batch for frame in layers for x in frame.f_locals.values()):
        return f"The model got the whole batch: model(batch['x']). {names}"
    return ""


def _remedy_in_optax(frames: list) -> str:
    """Describes the arguments of the function of Optax that raised the error."""
    for frame in frames:
        module, called = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("optax.losses") and not called.startswith("_"):
            arrays = {k: x for k, x in frame.f_locals.items() if hasattr(x, "shape")}
            text = f"optax.{called} got {shapes_of(arrays)}."
            if "cross_entropy" in called and "labels" in arrays:
                text += (
                    " softmax_cross_entropy_with_integer_labels takes labels that are "
                    "integers, one for each row of logits: y.astype(np.int32), "
                    "y[:, 0] or one_hot.argmax(-1). softmax_cross_entropy takes labels "
                    "of the shape of the logits: jax.nn.one_hot(y, num_classes)."
                )
            return text
    return ""


def _remedy_of_layer(text: str, frames: list) -> str:
    """Returns the shape or dtype of the input that a layer needs."""
    for frame in reversed(frames):
        layer = frame.f_locals.get("self")
        if not isinstance(layer, nnx.Module):
            continue
        if isinstance(layer, nnx.Embed) and "integer" in text:
            return "It takes integers: give it tokens, such as x.astype(np.int32)."
        size = getattr(layer, "in_features", None)
        if size is None or not re.search("contracting|feature|dim|shape", text):
            return ""
        size = size if isinstance(size, int) else tuple(size)[-1]
        return (
            f"It takes arrays whose last dim is {size}: change the data, or "
            "in_features of the layer."
        )
    return ""


def show_as_users(error: Exception) -> None:
    """Makes an error in a user's function, or a `ParallelError`, easier to read.

    The note of `noting_call` moves to the end, behind the notes that JAX adds. The
    traceback leaves out this library's frames, as JAX leaves out its frames, unless
    ``jax_traceback_filtering`` (``JAX_TRACEBACK_FILTERING``) is ``"off"``.
    """
    notes = getattr(error, "__notes__", [])
    notes.sort(key=lambda note: isinstance(note, _CallNote))
    is_of_user = any(isinstance(note, _CallNote) for note in notes)
    config: Any = jax.config  # jax 0.10 does not declare the setting
    hides = config.jax_traceback_filtering != "off"
    if hides and (is_of_user or isinstance(error, ParallelError)):
        hide_own_frames(error)


def _shown(function: Callable) -> Callable:
    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except Exception as error:
            show_as_users(error)
            raise

    return call


class ShownStep:
    """A compiled step for custom loops; its errors are shown by `show_as_users`.

    Attributes:
        lower: Function that lowers the step, as ``jax.jit`` does.
        trace: Function that traces the step, as ``jax.jit`` does.
    """

    def __init__(self, step: Any) -> None:
        self._step = step
        self.lower, self.trace = _shown(step.lower), _shown(step.trace)

    def __call__(self, *args: Any) -> Any:
        """Runs the step."""
        if len(args) > 1 and not isinstance(args[0], TrainState):
            raise TypeError(
                f"The first argument of the step is {kind_of(args[0])}. It must be the "
                "state: state, metrics = trainer.train_step(state, batch)."
            )
        # A call through `_shown` would leave this frame in the traceback.
        try:
            return self._step(*args)
        except Exception as error:
            show_as_users(error)
            raise

    def __getattr__(self, name: str) -> Any:
        """Returns other attributes of the step."""
        return getattr(self._step, name)


@contextlib.contextmanager
def watching_wrapped(model: nnx.Module) -> Iterator[None]:
    """Raises an error if the loss calls no method that a wrapper has replaced.

    Qwix quantizes only the code inside one method, which it overrides in a subclass
    that it makes for the model. A loss that calls another method would silently train
    in full precision (docs/library-notes.md, "Qwix").
    """
    wrapper, called = type(model), set()
    home = sys.modules.get(wrapper.__module__)
    is_named = "<locals>" in wrapper.__qualname__ or hasattr(home, wrapper.__name__)
    if is_named or wrapper.__name__ != wrapper.__bases__[0].__name__:
        yield
        return

    def noting(method: Callable) -> Callable:
        @wraps(method)
        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            called.add(method)
            return method(self, *args, **keywords)

        return call

    methods = {n: f for n, f in vars(wrapper).items() if inspect.isfunction(f)}
    noted = {name: noting(method) for name, method in methods.items()}
    watched = type(wrapper.__name__, (wrapper,), noted)
    object.__setattr__(model, "__class__", watched)
    yield
    object.__setattr__(model, "__class__", wrapper)
    if methods and not called:
        raise LossError(
            f"A wrapper has replaced {sorted(methods)} of {wrapper.__name__}, as "
            "Qwix's quantize_model does, but the loss calls none of these methods: the "
            "wrapper would have no effect. Wrap the method that the loss calls, "
            "as in qwix.quantize_model(model, provider, ..., methods=('hidden',))."
        )


def check_model(model: object, *losses: Callable | None) -> None:
    """Raises an error if a model was donated, or if a loss refers to this model."""
    given = [loss for loss in losses if loss is not None]
    for loss in given:
        check_loss(loss)
    if not isinstance(model, nnx.Module):
        return
    for path, variable in variables_of(model):
        value = variable.get_value()
        if isinstance(value, jax.Array) and value.is_deleted():
            raise ValueError(
                f"`{dotted(path)}` of the model was donated to a step, and is gone. "
                "Read trainer.model again after each step, or build a new model."
            )
    for name in (name for loss in given for name in names_of(model, loss)):
        raise LossError(
            f"The loss uses the model as {name!r} from outside, where it is not "
            "trained: its gradient would be 0. Use the first argument of the loss "
            "instead: loss(model, batch)."
        )


def names_of(model: object, function: Callable | None) -> list[str]:
    """Returns the names by which a function uses a built model from outside."""
    held = _held_by(function) if isinstance(model, nnx.Module) and function else []
    return [name for name, x in held if x is model]


def _held_by(function: Callable) -> list[tuple[str, object]]:
    """Returns globals and closed-over values that a function uses, by name."""
    inner = inspect.unwrap(getattr(function, "func", function))
    if not inspect.isfunction(inner):
        return []
    with contextlib.suppress(ValueError):  # a variable has no value yet
        found = inspect.getclosurevars(inner)
        return [*found.globals.items(), *found.nonlocals.items()]
    return []


def warn_of_attributes(
    before: Mapping[Path, Any], after: Mapping[Path, Any], where: str
) -> None:
    """Warns of changed `plain_attributes`, because compiled steps ignore changes."""
    paths = dict.fromkeys((*before, *after))
    if changed := [f"`{dotted(p)}`" for p in paths if before.get(p) != after.get(p)]:
        warn_user(
            f"Attributes that are not arrays have changed in {where}: "
            f"{', '.join(changed)}. That has no effect: a step is compiled once, with "
            "the values from before. Keep changing values in an nnx.Variable, or build "
            "a new Trainer.",
            ParallelWarning,
        )


def agree_on_run(
    plan: StatePlan,
    losses: Mapping[str, Callable | None],
    settings: dict[str, Any],
    step: int,
) -> None:
    """Checks that all processes will continue the same run from the same step."""
    if jax.process_count() == 1:
        return
    places = [f"{d.process_index}:{d.id}" for d in plan.layout.mesh.devices.flat]
    # The versions matter: another version may lower the same step differently.
    fields = {f"version of {name}": found for name, found in versions().items()}
    fields |= {name: loss and hash_code(loss) for name, loss in losses.items()}
    fields |= settings | {
        "devices in the mesh's order": " ".join(places),
        "step to start from": step,
        "optimizer": str(jax.tree.structure(plan.abstract.opt_state)),
    }
    for path, x in jax.tree_util.tree_leaves_with_path(plan.abstract):
        fields[path_of(path)] = f"{x.dtype}{list(x.shape)} {x.sharding.spec}"
    check_consistent("run", fields)


def agree_on_program(lowered: jax.stages.Lowered) -> None:
    """Checks that all processes have lowered the same step."""
    if jax.process_count() == 1:
        return
    # The lowered program is compared, before anything is compiled. Processes with
    # different programs would deadlock in compilation or in the first collective.
    text = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:12]
    check_consistent(
        "compiled step (model, loss or optimizer differ in their code or constants)",
        {"program": text},
    )


def agree_on_batch(batch: Any) -> None:
    """Checks that all processes have placed parts of the same global batch.

    Warns if two processes gave the same rows as different parts.
    """
    if jax.process_count() == 1:
        return
    fields, rows, digest = {}, set(), hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        name = f"batch{jax.tree_util.keystr(path)}"
        fields[name] = f"{x.dtype}{list(x.shape)} (global)"
        # The shards are sorted by rows, because the order of devices differs between
        # processes.
        for shard in sorted(x.addressable_shards, key=lambda s: str(s.index)):
            rows.add(str(shard.index[:1]))
            digest.update(np.asarray(shard.data).tobytes())
    check_consistent("first batch", fields)
    mine = [sorted(rows), digest.hexdigest()]
    found = allgather_object("rows of the first batch", mine)
    for process, (part, value) in enumerate(found):
        for other, (other_part, other_value) in enumerate(found[:process]):
            if part == other_part and value != other_value:
                raise DisagreementError(
                    f"Processes {other} and {process} hold the same part of the batch "
                    "but gave different rows. Processes whose trainer.data_share is "
                    "equal must read the same data in the same order."
                )
            # Equal rows in different parts are not an error, because data may repeat.
            # Only the pair of processes 0 and 1 is reported, not each pair.
            if part != other_part and value == other_value and process == 1:
                warn_user(
                    f"Processes {other} and {process} gave the same rows as different "
                    "parts of the first batch. Each process must give only its share, "
                    "which trainer.data_share = (index, count) describes.",
                )


def check_replicas(state: Any, step: int) -> None:
    """Checks that all copies of the same part of an array have the same bits.

    Each device hashes its shards, and only the hashes are sent. All processes call
    this, and all raise a `ReplicaError` that names the arrays and the devices.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    # Arrays on one device have no copies. Other kinds of shardings are not compared.
    leaves = [leaf for leaf in leaves if isinstance(leaf[1].sharding, NamedSharding)]
    found = start_hashes([x for _, x in leaves])()
    places = [Place(path_of(path), x.sharding, x.shape) for path, x in leaves]
    raise_if_copies_differ(
        zip(places, found, strict=True),
        partial(allgather_object, "replicas"),
        f" at step {step}",
    )


@jax.jit
def _are_sound(
    finite: dict[str, jax.Array], numbers: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Tests that ``finite`` arrays are finite, and that ``numbers`` have no NaN."""
    sound = {path: jnp.isfinite(x).all() for path, x in finite.items()}
    return sound | {path: ~jnp.isnan(x).any() for path, x in numbers.items()}


def broken_arrays(state: TrainState) -> list[str]:
    """Returns the paths of arrays with values that make further training impossible.

    All processes call this. Parameters, their averages and their moments must be
    finite. Other variables, such as a mask, may be infinite but not NaN. The same holds
    for scalars in the optimizer's state, such as the best value so far.
    """
    moments = {f"opt_state.{p}": x for p, x in flatten_pure(state.opt_state).items()}
    averages = {f"ema.{p}": x for p, x in flatten_pure(state.ema or {}).items()}
    arrays = flatten_pure(state.params) | flatten_pure(state.variables)
    arrays |= averages | moments
    numbers = flatten_pure(state.variables) | {
        path: x for path, x in moments.items() if not x.ndim
    }
    kinds: tuple[dict[str, jax.Array], ...] = ({}, {})
    sound: dict[str, Any] = {}
    for path, x in arrays.items():
        if is_inexact(x):
            kind = kinds[path in numbers]
            if x.sharding.memory_kind != HOST:
                kind[path] = x
                continue
            # Offloaded arrays are moved one at a time, because all of them may not fit.
            x = jax.device_put(x, x.sharding.with_memory_kind("device"))
            only = _are_sound(*({path: x} if k is kind else {} for k in kinds))
            sound |= jax.device_get(only)
    sound |= jax.device_get(_are_sound(*kinds))
    return [path for path in arrays if not sound.get(path, True)]


def _bad_values_in(batch: Any) -> str:
    """Describes the first array that has NaN, else infinity; empty if there is none."""
    for kind, test in (("NaN", jnp.isnan), ("infinite values", jnp.isinf)):
        for keys, x in jax.tree.leaves_with_path(batch):
            if is_inexact(x) and x.ndim:
                # (rows, ...) -> (rows,)
                counts = test(x).sum(axis=tuple(range(1, x.ndim)))
                if count := int(counts.sum()):
                    row = int(jnp.argmax(counts > 0))
                    name = f"batch{jax.tree_util.keystr(keys)}"
                    return f"{count:,} {kind} in {name}, the first in row {row}"
    return ""


def explain_non_finite(
    state: TrainState, saved_step: int | None, labels: list[LabelRange], batch: Any
) -> str:
    """Returns text that names the cause of a loss that is not finite.

    The cause is NaN or an invalid label in ``batch``, the batch of the bad step. If
    there is none, the text names arrays that are not finite.
    """
    step = int(state.step)
    saved = f"a checkpoint of step {saved_step}"
    if saved_step is None:
        saved = "no checkpoint"
    kept = f"Nothing was saved from the bad step on; there is {saved}."
    # Labels come first, because an invalid label is the cause of the non-finite arrays.
    if found := next((found for found in labels if not found.is_valid), None):
        last = found.num_classes - 1
        has = f"The step's batch has {found.name} from {found.lowest} to "
        if found.is_table:
            return (
                f"{has}{found.highest}, but the model's table has {last + 1} rows: "
                f"valid tokens are 0 to {last}. Use the tokenizer that belongs to the "
                f"model, or make the table larger. {kept}"
            )
        if found.name != "labels":
            return (
                f"{has}{found.highest}, and the loss looks it up in {last + 1} "
                f"entries, such as logits: valid values are 0 to {last}. {kept}"
            )
        return (
            f"{has}{found.highest}, but the logits have {last + 1} classes: valid "
            f"labels are 0 to {last}. To leave out a label, give it the weight 0. "
            f"{kept}"
        )
    broken = broken_arrays(state)
    # Averages and moments are not named if parameters are not finite, because the
    # parameters are the cause.
    shown = [x for x in broken if not x.startswith(("ema.", "opt_state."))] or broken
    bad = [f"`{path}`" for path in shown]
    arrays = f"All arrays are finite at step {step}, the last step done."
    if bad:
        arrays = (
            f"Not finite at step {step}, the last step done: {', '.join(bad[:5])} "
            f"({len(bad)} arrays)."
        )
    if found := _bad_values_in(batch):
        mask = ", unless they are a mask" * ("infinite" in found)
        return (
            f"The step's batch has {found}. Remove them from the data{mask}, or leave "
            f"such steps out with SkipSteps. {arrays} {kept}"
        )
    if not bad:
        return (
            f"{arrays} {kept} Check the batch of the bad step, and how the loss uses "
            "it."
        )
    return (
        f"{arrays} {kept} Lower the learning rate, clip with "
        "optax.clip_by_global_norm, or look at the batches of these steps."
    )


_advisers: list[Callable[[Any, Any, str], str]] = []


def advise_with(adviser: Callable[[Any, Any, str], str]) -> None:
    """Sets the function that finds changes with which a run would fit into memory.

    The function gets the Trainer, the first batch and the error's text. The plan module
    sets it.
    """
    _advisers[:] = [adviser]


def is_out_of_memory(error: Exception) -> bool:
    """Returns True if a program needs more memory than a device has."""
    # The status is only in the text, because all errors of XLA have the same class.
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The numbers in a TPU compiler's error about a step that does not fit.

    Attributes:
        used: Bytes that the step needs.
        limit: Bytes that a program gets.
        has_arguments: True if ``used`` includes the step's arguments.
    """

    used: float
    limit: float
    has_arguments: bool

    @classmethod
    def of(cls, text: str) -> "Refusal | None":
        """Reads the numbers; ``None`` if the error does not have them."""
        number = r"([\d.]+)([KMGT])"
        # This text reports only the temporaries.
        exceeded = re.search(rf"\({number}\) exceeds available HBM \({number}\)", text)
        older = re.search(rf"Used {number} of {number} hbm", text)
        if (found := exceeded or older) is None:
            return None
        used, unit, limit, other = found.groups()
        return cls(
            used=float(used) * _UNITS[unit],
            limit=float(limit) * _UNITS[other],
            has_arguments=exceeded is None,
        )


@contextlib.contextmanager
def explaining_memory(
    plan: StatePlan,
    num_microbatches: int,
    temporary_bytes: int | None,
    run: tuple[Any, Any] | None = None,
) -> Iterator[None]:
    """Turns an error of the allocator into a `DeviceMemoryError` with remedies.

    ``temporary_bytes`` is the size of the compiled step's temporaries on each device,
    if it is known. ``run`` is the Trainer and its first batch.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        text = str(error)
        reason = text.strip().splitlines()[0]
        advice = _advice(plan, num_microbatches, temporary_bytes)
        if run is not None and run[1] is not None:
            # A failure of the adviser must not hide the original error.
            with contextlib.suppress(Exception):
                advice = "\n".join(adviser(*run, text) for adviser in _advisers)
        raise DeviceMemoryError(f"Out of device memory: {reason}\n{advice}") from error


def _advice(plan: StatePlan, num_microbatches: int, temporary: int | None) -> str:
    state, num_devices = plan.abstract, plan.layout.mesh.size
    trees = jax.tree.leaves(state.params), jax.tree.leaves(state.opt_state)
    params, optimizer = (
        sum(array_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in arrays)
        for arrays in trees
    )
    total_bytes = sum(array_bytes(x.shape, x.dtype) for x in chain(*trees))
    text = (
        f"On each device: parameters {params:,} bytes, as many or more for gradients, "
        f"optimizer state {optimizer:,} bytes.\n"
    )
    half = ""
    if temporary is not None:
        text += f"Gradients and activations of the step: {temporary:,} bytes.\n"
        half = f", by up to {temporary // 2:,} bytes"
    text += (
        f"Less for activations: num_microbatches={2 * num_microbatches}{half}; or "
        "remat='full'."
    )
    # With FSDP each device would hold its share of all bytes, and no replicas.
    if (saved := params + optimizer - total_bytes // num_devices) > 0:
        text += (
            f"\nLess for the state: strategy=FSDP() over {num_devices} devices, by "
            f"{saved:,} bytes on each."
        )
    return text
