"""Updates of optimizers, masks for stacked layers, and hyperparameters.

A `Stack` keeps N kernels of shape (in, out) as one array (N, in, out), and N biases as
an array (N, out). An optimizer that checks the rank would treat these biases as a
matrix. In this module, "rank" means the rank of an array in one layer.
"""

import contextlib
import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from itertools import chain, takewhile
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from nnx_parallel.errors import OptimizerError, ParallelWarning, kind_of, warn_user
from nnx_parallel.optimizers.matrices import placing_updates
from nnx_parallel.optimizers.offload import offloaded_update
from nnx_parallel.programs import (
    TracedFunction,
    is_call,
    needed,
    reached,
    trace,
    variables_in,
)
from nnx_parallel.sharding.model import Path, flatten, nest
from nnx_parallel.sharding.names import ArrayInfo, path_of
from nnx_parallel.sharding.nnx_arrays import array_info, variables_of
from nnx_parallel.sharding.optimizer import Optimizer, knowing_layers, owner_of
from nnx_parallel.state import StatePlan, TrainState


def decay_mask(model: nnx.Module, wrt: Any = nnx.Param) -> dict[str, Any]:
    """Chooses the parameters for weight decay: matrices, but not biases or scales.

    Args:
        model: The model, which may be abstract.
        wrt: Filter of the trained Variables, as for the Trainer.

    Returns:
        A bool for each parameter, in a nested dict with the structure that Optax sees.

    Raises:
        OptimizerError: If the argument is not a model.

    Example:
        >>> import optax
        >>> from nnx_parallel.optimizers import decay_mask
        >>> optimizer = lambda model: optax.adamw(3e-4, mask=decay_mask(model))
    """
    return _map_params(_decays, model, wrt, "optax.adamw(3e-4, mask=decay_mask(model))")


def muon_dimension_numbers(model: nnx.Module, wrt: Any = nnx.Param) -> dict[str, Any]:
    """Finds the dims of each kernel that are rows and columns of a matrix for Muon.

    The kernel of a ``Dense`` records its input and output dims. The kernel of another
    layer is a matrix if it has rank 2. Muon's Adam branch updates embeddings, biases
    and scales. The arguments are the same as for `decay_mask`.

    Returns:
        ``optax.contrib.MuonDimensionNumbers`` or ``None`` for each parameter.

    Raises:
        OptimizerError: If the argument is not a model.

    Example:
        >>> import optax
        >>> from nnx_parallel.optimizers import muon_dimension_numbers
        >>> optimizer = lambda model: optax.contrib.muon(
        ...     0.02, muon_weight_dimension_numbers=muon_dimension_numbers(model)
        ... )
    """
    example = "muon(0.02, muon_weight_dimension_numbers=muon_dimension_numbers(model))"
    return _map_params(_muon_dims, model, wrt, example)


def _map_params(
    function: Callable, model: nnx.Module, wrt: Any, example: str
) -> dict[str, Any]:
    if not isinstance(model, nnx.Module):
        name = re.search(r"(\w+)\(model\)", example)
        assert name is not None
        raise OptimizerError(
            f"{name[1]} got {kind_of(model)}. It takes a model. Give the Trainer a "
            f"function of the model: optimizer=lambda model: {example}."
        )
    flat = variables_of(model, wrt)
    return nest({path: function(path, variable) for path, variable in flat})


def _decays(path: tuple, variable: nnx.Variable) -> bool:
    info = array_info(path, variable)
    return len(info.shape) - _num_leading(info) > 1 and path[-1] not in (
        "bias",
        "scale",
    )


def _num_leading(info: ArrayInfo) -> int:
    """Returns the number of leading dims that enumerate layers and experts."""
    first = int(info.is_stacked)
    return first + ("expert" in (info.names or ())[first : first + 1])


def _muon_dims(path: tuple, variable: nnx.Variable) -> MuonDimensionNumbers | None:
    info = array_info(path, variable)
    first, ndim = _num_leading(info), len(info.shape)
    num_in_dims = variable.get_metadata().get("num_in_dims")
    if num_in_dims is None:
        if ndim - first != 2 or path[-1] != "kernel":
            return None
        num_in_dims = 1
    # Dims are (layers, experts, *in, *out); layers and experts may be missing.
    inputs = tuple(range(first, first + num_in_dims))
    return MuonDimensionNumbers(inputs, tuple(range(first + num_in_dims, ndim)))


def update_in_place(
    plan: StatePlan, grads: Any, opt_state: optax.OptState, params: Any, **known: Any
) -> tuple[Any, optax.OptState]:
    """Calls `update_with` for a plan's optimizer, with known placements of updates."""
    shapes = {path: x.shape for path, x in flatten(params).items()}
    with placing_updates(plan.layout, shapes, plan.placements):
        return update_with(plan.tx, grads, opt_state, params, **known)


def update_with(
    tx: Optimizer, grads: Any, opt_state: optax.OptState, params: Any, **known: Any
) -> tuple[Any, optax.OptState]:
    """Computes the updates and the new state of an optimizer.

    The optimizer gets those of the ``known`` values that it accepts as arguments.

    Raises:
        OptimizerError: If the optimizer needs an argument that is not in ``known``.
    """
    try:
        update = optax.with_extra_args_support(tx).update
        return update(grads, opt_state, params, **known)
    except (TypeError, ValueError) as error:
        # `optax.chain` passes all values to each part, and its signature does not show
        # which values a part accepts. Only a call shows this (docs/library-notes.md,
        # "Optax").
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown[1] in known:
            rest = {name: x for name, x in known.items() if name != unknown[1]}
            return update_with(tx, grads, opt_state, params, **rest)
        if not re.search(r"required keyword-only argument|_fn must be", str(error)):
            raise
        raise OptimizerError(
            f"The optimizer needs arguments that a step cannot give: {error}. An "
            "optimizer gets the gradients. It also gets value= (the loss) and grad= if "
            "it accepts these arguments. A sharded step cannot compute the loss again "
            "within an update (value_fn=, grad_fn=), as line searches do. Use the "
            "optimizer without a line search, such as optax.lbfgs(1e-2, "
            "linesearch=None)."
        ) from error


def final_gradients(plan: StatePlan, state: TrainState, grads: dict) -> dict:
    """Converts gradients to the optimizer's dtype, and removes the loss scale.

    The results have the placement of gradients.
    """
    dtype_of = plan.precision.gradient_dtype
    grads = jax.tree.map(lambda g: g.astype(dtype_of(g.dtype)), grads)
    if (loss_scale := state.loss_scale) is not None:
        grads = jax.tree.map(lambda g: g / loss_scale.scale, grads)
    return plan.constrain(grads, "gradient")


def optimize(
    plan: StatePlan,
    state: TrainState,
    params: dict,
    grads: dict,
    metrics: dict[str, jax.Array],
    is_kept: jax.Array | None,
) -> tuple[dict, optax.OptState]:
    """Updates parameters and optimizer state, which keep their dtypes.

    If there are parameters of 16 bits or fewer, ``lost_updates`` is added to
    ``metrics``. If ``is_kept`` is false, the optimizer's state does not change.
    ``None`` means true.
    """
    before = plan.constrain(params, "optimizer")
    # An offloaded optimizer converts gradients part by part, so that a device does not
    # hold all of them twice.
    if not plan.offloads_optimizer:
        grads = final_gradients(plan, state, grads)
    is_coarse = any(x.dtype.itemsize <= 2 for x in jax.tree.leaves(before))

    def update(before: dict, opt_state: Any, grads: dict, *values: jax.Array) -> tuple:
        loss, is_kept = (*values, None)[:2]
        if plan.offloads_optimizer:
            grads = final_gradients(plan, state, grads)
        grads = plan.constrain(grads, "optimizer")
        updates, new = update_in_place(
            plan, grads, opt_state, before, value=loss, grad=grads
        )
        after: Any = optax.apply_updates(before, updates)
        # Optax promotes some arrays, for example a bfloat16 moment by a float32 rate.
        # If a dtype changed, the next call would compile the step again.
        new = jax.tree.map(lambda x, old: x.astype(old.dtype), new, opt_state)
        if is_kept is not None:
            new = where(is_kept, new, opt_state)
        return after, new, updates if is_coarse else {}

    run = (
        partial(offloaded_update, plan)
        if plan.offloads_optimizer
        else lambda f, *x: f(*x)
    )
    values = [metrics["loss"]] if is_kept is None else [metrics["loss"], is_kept]
    after, opt_state, updates = run(update, before, state.opt_state, grads, *values)
    if is_coarse and (lost := lost_updates(before, updates, after)) is not None:
        metrics["lost_updates"] = lost
    # Parameters are updated in the shards of the optimizer state (ZeRO), and then moved
    # to their stored placement.
    return plan.constrain(after, "stored"), opt_state


def where(condition: jax.Array, new: Any, old: Any) -> Any:
    """Selects one of two trees of the same structure."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def lost_updates(before: Any, updates: Any, after: Any) -> jax.Array | None:
    """Returns the share of updates that are lost by rounding in 16-bit parameters.

    Parameters with fewer bits count too. Returns ``None`` if there are no such
    parameters.
    """
    trees = zip(*map(jax.tree.leaves, (before, updates, after)), strict=True)
    coarse = [leaves for leaves in trees if leaves[0].dtype.itemsize <= 2]
    if not coarse:
        return None
    lost = sum(jnp.sum((u != 0) & (a == b), dtype=jnp.float32) for b, u, a in coarse)
    nonzero = sum(jnp.sum(u != 0, dtype=jnp.float32) for _, u, _ in coarse)
    return jnp.asarray(lost / jnp.maximum(nonzero, 1.0))


def learning_rates(
    tx: Any, before: optax.OptState, after: optax.OptState
) -> dict[str, jax.Array]:
    """Returns the learning rates of a step, by the names of their metrics.

    A rate is read from ``optax.inject_hyperparams``, or computed from a schedule that
    an optimizer of Optax got as its learning rate, or from the only
    ``optax.scale_by_schedule`` at the end of a chain. A constant rate cannot be read. A
    single rate is ``learning_rate``. If there are several, each name has the label of
    ``optax.multi_transform``, or a number, as in ``learning_rate/muon``.

    Args:
        tx: The optimizer.
        before: Its state before the step, with the counts of the schedules.
        after: Its state after the step.
    """
    found: dict[str, jax.Array] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(after):
        if f".{path_of(keys)}".endswith(".hyperparams.learning_rate"):
            found[path_of(keys)] = leaf

    def is_count(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    nodes = jax.tree_util.tree_leaves_with_path(before, is_leaf=is_count)
    counts = [(path_of(keys), node.count) for keys, node in nodes if is_count(node)]
    links = _links(getattr(tx, "update", None))
    schedules = _schedules_in_chain(links, set()) or []
    # The states and the schedules have the same order. If an optimizer hides some of
    # the schedules, it is unknown which schedule belongs to which state.
    if len(counts) == len(schedules):
        for (path, count), schedule in zip(counts, schedules, strict=True):
            if schedule is not None:
                # `by_layer` keeps an equal count for each layer.
                found[path] = jnp.asarray(schedule(jnp.ravel(count)[0]))
    if len(found) == 1 and "inner_states." not in next(iter(found)):
        return dict(zip(["learning_rate"], found.values(), strict=True))
    labels = [
        path.rpartition("inner_states.")[2].partition(".")[0]
        if "inner_states." in path
        else str(index)
        for index, path in enumerate(found)
    ]
    if len(set(labels)) < len(labels):
        labels = [str(index) for index in range(len(found))]
    names = [f"learning_rate/{label}" for label in labels]
    return dict(zip(names, found.values(), strict=True))


_KNOWN_LINK = re.compile(
    r"(scale|identity|set_to_zero|trace|ema|clip\w*|adaptive_grad_clip|zero_nans|"
    r"add_decayed_weights|centralize|"
    r"scale_by_(?!schedule|\w*search|lbfgs|polyak)\w+)\.<locals>\.update_fn"
)
"""Functions in the namespace ``optax`` that keep the signs of gradients, and ``scale``.

Others, such as ``optax.contrib.scale_by_cocob``, may include the learning rate.
"""


def warn_of_direction(tx: Any) -> None:
    """Warns of an optimizer that does not go down the gradient.

    Only chains of Optax with constant rates are understood.

    Raises:
        OptimizerError: If the learning rate is a text.
    """
    links = [y for x in _links(getattr(tx, "update", None)) for y in _without_mask(x)]
    names = [getattr(link, "__qualname__", "") for link in links]
    makers = [name.partition(".")[0] for name in names]
    held = [*zip(makers, map(_closure_of, links), strict=True)]
    rates: list[Any] = [
        known.get("step_size") for maker, known in held if maker == "scale"
    ]
    if any(isinstance(rate, str) for rate in rates):
        raise OptimizerError(
            "The optimizer's learning rate is a text. It must be a number or a "
            "schedule, as in optax.adamw(3e-4)."
        )
    is_known = all(map(_KNOWN_LINK.fullmatch, names)) and {*makers} <= {*dir(optax)}
    if not is_known or not all(isinstance(x, int | float) for x in rates):
        return
    decays = [known.get("weight_decay") for _, known in held]
    decay = max([0, *(x for x in decays if isinstance(x, int | float))])
    text, rate = "", math.prod(rates)
    if 0 in rates or "set_to_zero" in makers:
        text = "The learning rate is 0, so nothing is trained."
    elif not rates and not {*makers} <= {"identity", "trace"}:  # they collect gradients
        text = (
            f"The optimizer has no learning rate (it is {', '.join(makers)}). It adds "
            "gradients to the parameters, so the loss goes up."
        )
    elif len(rates) == 1 and rate > 0:
        text = (
            f"The learning rate is {-rate:g}. With a negative learning rate, the loss "
            "goes up."
        )
    elif abs(decay * rate) >= 1:
        text = (
            f"The weight decay {decay:g} times the learning rate {abs(rate):g} is "
            f"{abs(decay * rate):g}. Each step subtracts this multiple of a parameter "
            "from it, so it must be far below 1; usual decays are 0.01 to 0.1."
        )
    if text:
        remedy = "optax.chain(..., optax.scale_by_learning_rate(3e-4))"
        warn_user(f"{text} Take optax.adamw(3e-4), or {remedy}.", ParallelWarning)


def _without_mask(link: Any) -> list[Any]:
    """Returns the weight decays inside a mask, and any other function as it is."""
    if _is_made_by("masked", link):
        inner = _links(_closure_of(link)["inner"].update)
        if all(_is_made_by("add_decayed_weights", x) for x in inner):
            return inner
    return [link]


def _schedules(part: Any, seen: set[int]) -> list[Callable | None] | None:
    """Returns the schedule of each ``optax.scale_by_schedule`` inside an optimizer.

    The list has ``None`` for a schedule that is not a learning rate. Optax keeps
    schedules and inner optimizers only in the closures of its functions. The result is
    ``None`` if several variables hold optimizers, as in ``optax.contrib.sam``, because
    the order of their states is then unknown.
    """
    if isinstance(part, list | tuple):
        return _joined([_schedules(inner, seen) for inner in part])
    if isinstance(part, dict):
        try:
            keys = sorted(part)  # as JAX orders states
        except TypeError:  # keys of different types
            return None
        return _schedules([part[key] for key in keys], seen)
    if isinstance(part, partial):
        return _schedules([part.func, *part.args, *part.keywords.values()], seen)
    if inspect.ismethod(part):  # of `optax.MultiSteps`, for example
        return _schedules([part.__func__, *vars(part.__self__).values()], seen)
    if not inspect.isfunction(part) or id(part) in seen:
        return []
    seen.add(id(part))
    held = _closure_of(part)
    if _is_made_by("chain", part):
        return _schedules_in_chain(_links(part), seen)
    if _is_made_by("scale_by_schedule", part):
        step_size = held.get("step_size_fn")
        is_rate = "scale_by_learning_rate." in getattr(step_size, "__qualname__", "")
        return [_closure_of(step_size).get("learning_rate") if is_rate else None]
    found = [_schedules(value, seen) for value in held.values()]
    return None if sum(each != [] for each in found) > 1 else _joined(found)


def _is_made_by(name: str, update: Any) -> bool:
    """Returns True if a function of Optax has made an update function."""
    return getattr(update, "__qualname__", "") == f"{name}.<locals>.update_fn"


def _links(update: Any) -> list[Any]:
    """Returns the update functions of a chain in order, also of chains inside it."""
    name = getattr(update, "__qualname__", "")
    if name == "with_extra_args_support.<locals>.update":
        return _links(_closure_of(update)["tx"].update)
    if name.startswith(f"{knowing_layers.__name__}."):
        return _links(_closure_of(update)["function"])
    if _is_made_by("chain", update):
        return [x for inner in _closure_of(update)["update_fns"] for x in _links(inner)]
    return [update]


def _schedules_in_chain(
    links: list[Any], seen: set[int]
) -> list[Callable | None] | None:
    found = [_schedules(link, seen) for link in links]
    owners = [i for i, schedules in enumerate(found) if schedules != []]
    # If there is only one schedule, it is a learning rate even outside of
    # `scale_by_learning_rate`: chain(scale_by_adam(), scale_by_schedule(s), scale(-1)).
    if len(owners) == 1 and found[owners[0]] == [None]:
        found[owners[0]] = [_rate_of(links, owners[0])]
    return _joined(found)


def _rate_of(links: list[Any], index: int) -> Callable | None:
    """Returns the learning rate of a chain with ``optax.scale_by_schedule`` at a place.

    The rate is the factor by which the chain multiplies the result of the last link
    that is not a scale. It is unknown if such a link comes after the schedule. A factor
    that is not negative is not a learning rate.
    """
    is_plain = _is_made_by("scale_by_schedule", links[index])
    schedule = _closure_of(links[index]).get("step_size_fn") if is_plain else None
    factors = [_constant_scale(link) for link in links]
    after, before = factors[index + 1 :], factors[:index]
    if schedule is None or None in after:
        return None
    adjacent = takewhile(lambda factor: factor is not None, reversed(before))
    factor = math.prod(filter(None, [*adjacent, *after]))

    def rate(count: Any) -> Any:
        return -factor * schedule(count)

    # A schedule with a warm-up may begin at 0.
    with jax.ensure_compile_time_eval(), contextlib.suppress(Exception):
        some = [float(rate(jnp.int32(count))) for count in (0, 1)]
        return rate if min(some) >= 0 and max(some) > 0 else None
    return None


def _constant_scale(update: Any) -> float | None:
    """Returns the number of ``optax.scale``; ``None`` for other transformations."""
    is_scale = _is_made_by("scale", update)
    factor = _closure_of(update).get("step_size") if is_scale else None
    return float(factor) if isinstance(factor, int | float) else None


def _joined(lists: list[list[Callable | None] | None]) -> list[Callable | None] | None:
    known = [each for each in lists if each is not None]
    return list(chain.from_iterable(known)) if len(known) == len(lists) else None


def _closure_of(function: Any) -> dict[str, Any]:
    """Returns the variables of outer functions that a function uses."""
    held = dict[str, Any]()
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable has no value yet
            held[name] = cell.cell_contents
    return held


def warn_of_changes(plan: StatePlan, restored: TrainState) -> None:
    """Warns if hyperparameters of a restored state differ from the optimizer's.

    Hyperparameters that a schedule sets are not compared, because they change during a
    run.
    """
    saved = _constants(restored.opt_state)
    if not saved:
        return

    def fresh() -> dict[str, jax.Array]:
        zeros = jax.tree.map(jnp.zeros_like, plan.abstract.params)
        return _constants(plan.tx.init(zeros))

    # The function is compiled, so that the rest of the optimizer's state is not
    # computed.
    now = jax.device_get(jax.jit(fresh)())
    lines = [
        f"{path.rpartition('.')[2]}: {float(value):.6g} in the checkpoint, "
        f"{float(now[path]):.6g} in the optimizer now"
        for path, value in saved.items()
        if path in now and value.shape == () and float(value) != float(now[path])
    ]
    if lines:
        warn_user(
            f"Hyperparameters have changed since the checkpoint: {'; '.join(lines)}. "
            "The checkpoint's values are used, because they are part of the "
            "optimizer's state. To use new values, set them in the restored state, or "
            "call restore(weights_only=True).",
        )


def _constants(opt_state: Any) -> dict[str, Any]:
    """Returns the hyperparameters that no schedule sets, by path."""
    constants, scheduled = {}, set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        name = path_of(path)
        # `inject_hyperparams` has `hyperparams.NAME`, and also
        # `hyperparams_states.NAME.count` for a hyperparameter that a schedule sets.
        owner, is_state, rest = name.partition("hyperparams_states.")
        if is_state:
            scheduled.add(f"{owner}hyperparams.{rest.partition('.')[0]}")
        elif "hyperparams." in name:
            constants[name] = leaf
    return {name: leaf for name, leaf in constants.items() if name not in scheduled}


_OF_MAXIMA = {"max", "min", "sign"}
"""Operations by which a moment differs from a plain average."""


def state_kinds(plan: StatePlan) -> dict[str, str]:
    """Returns the kind of each array that an optimizer keeps for parameters, by field.

    A kind is the name of the state's type. But Optax uses the same type for moments
    with different meanings: Adamax keeps a maximum in the state of Adam. So a kind also
    lists the operations maximum, minimum and sign, if the new value of the field is
    computed by them from the previous value.
    """
    params = flatten(plan.abstract.params)
    shapes = {path: x.shape for path, x in params.items()}
    fields: dict[str, tuple[str, Path]] = {}  # by field, the type and one parameter
    for keys, _ in jax.tree_util.tree_leaves_with_path(plan.abstract.opt_state):
        if owner := owner_of(keys, shapes):
            field, kind = _field_of(plan.abstract.opt_state, keys)
            fields.setdefault(field, (kind, owner))
    few = nest({owner: params[owner] for _, owner in fields.values()})
    try:
        traced, states = _trace_states(plan.tx, few)
    except Exception:
        # A mask that is a tree matches only the tree of all parameters.
        traced, states = _trace_states(plan.tx, plan.abstract.params)
    before, after = jax.tree.leaves(traced.inputs[1]), jax.tree.leaves(traced.outputs)
    indices: dict[str, int] = {}
    for index, (keys, _) in enumerate(jax.tree_util.tree_leaves_with_path(states)):
        indices.setdefault(_field_of(states, keys)[0], index)
    kinds = {}
    for field, (kind, _) in fields.items():
        index = indices[field]
        passed = reached(traced.eqns, [before[index]])
        through = {
            eqn.primitive.name
            for eqn in needed(traced.eqns, [after[index]])
            if not passed.isdisjoint(variables_in(eqn.invars))
        }
        found = sorted(through & _OF_MAXIMA)
        kinds[field] = f"{kind} ({', '.join(found)})" if found else kind
    return kinds


def _trace_states(tx: Optimizer, params: Any) -> tuple[TracedFunction, Any]:
    """Traces the update of an optimizer's state; also returns the state's shapes."""
    state = jax.eval_shape(tx.init, params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return update_with(tx, grads, state, params, value=jnp.float32(0), grad=grads)[
            1
        ]

    return trace(update, params, state, params, inlined=is_call), state


def _field_of(state: Any, keys: tuple) -> tuple[str, str]:
    """Returns the innermost named-tuple field that holds an array, and its type."""
    node, field, kind = state, "", type(state).__name__
    for depth, key in enumerate(keys):
        if hasattr(node, "_fields"):
            field, kind = path_of(keys[: depth + 1]), type(node).__name__
        if isinstance(key, jax.tree_util.GetAttrKey):
            node = getattr(node, key.name)
        else:
            node = node[key.key if hasattr(key, "key") else key.idx]
    return field, kind
