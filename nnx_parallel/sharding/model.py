"""Places the arrays of a model by their shapes, so that it can be built in shards."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import filterfalse
from types import CellType, ModuleType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from nnx_parallel.errors import ModelError, ParallelWarning, warn_user
from nnx_parallel.mesh import leaving_mesh
from nnx_parallel.programs import reached, trace, variables_in
from nnx_parallel.sharding.layout import NO_REASON, Layout
from nnx_parallel.sharding.names import LOGICAL_AXES, ArrayInfo, as_tuple, dotted
from nnx_parallel.sharding.nnx_arrays import (
    Constant,
    Weight,
    array_info,
    check_variables,
    drop_meshes,
    follow_names,
    holds_one_array,
    inner_variables,
    is_inexact,
    is_inside,
    name_layers,
    names_of,
    plain_variables,
    stacks_of,
    variables_of,
)
from nnx_parallel.sharding.placement import Placement, place_array
from nnx_parallel.sharding.rules import (
    RULE_REASONS,
    check_logical_rules,
    warn_idle,
)

MODES = ("deterministic", "use_running_average")
"""Attributes by which modules distinguish evaluation from training."""

_EMPTY = CellType()  # the cell of a variable that has no value yet

Path = tuple[Hashable, ...]
ModelFn = Callable[[nnx.Rngs], nnx.Module]

nest = nnx.traversals.unflatten_mapping
"""Converts a flat dict by path to nested dicts."""

flatten = nnx.traversals.flatten_mapping
"""Converts nested dicts to one flat dict by path."""


@runtime_checkable
class ReadsArrays(Protocol):
    """A function that builds a model and reads some of its arrays from files."""

    def read_arrays(self, arrays: Mapping[Path, jax.ShapeDtypeStruct]) -> dict:
        """Reads the arrays that are stored in files.

        Args:
            arrays: The shape, dtype and sharding of each array, by path.

        Returns:
            The arrays from files in these shardings, by path.
        """
        ...


@dataclass(frozen=True)
class ModelDef:
    """The structure of a model, without its arrays.

    Attributes:
        graphdef: NNX's graphdef.
        state: The Variables, with their metadata and the structure of their values.
    """

    graphdef: nnx.GraphDef
    state: nnx.State

    @classmethod
    def of(cls, model: nnx.Module) -> ModelDef:
        """Returns the structure of a model that has no sown values."""
        graphdef, state = nnx.split(model)
        return cls(graphdef, state)

    def merge(self, arrays: Mapping[Path, Any]) -> nnx.Module:
        """Builds the model with the arrays, in new Variables."""
        # Nested dicts of arrays do not work: NNX takes a value that is a dict for a
        # module.
        state = map_arrays(lambda path, _: arrays[path], self.state)
        return unwrap_constants(nnx.merge(self.graphdef, state))

    def copy(self) -> nnx.Module:
        """Builds an abstract model. Callers may change its metadata."""
        return nnx.merge(self.graphdef, self.state, copy=True)

    @cached_property
    def infos(self) -> tuple[ArrayInfo, ...]:
        """Descriptions of the model's arrays."""
        return tuple(array_info(path, v) for path, v in variables_of(self.copy()))


def map_arrays(
    function: Callable[[Path, nnx.Variable], Any], state: nnx.State
) -> nnx.State:
    """Returns the state with ``function(path, variable)`` in place of each array."""
    leaves = {}
    for path, leaf in nnx.to_flat_state(state):
        is_variable = isinstance(leaf, nnx.Variable)
        tree = jax.tree.structure(leaf.get_value() if is_variable else leaf)
        value = tree.unflatten(function(p, v) for p, v in inner_variables(path, leaf))
        leaves[path] = leaf.replace(value) if is_variable else value
    return nnx.from_flat_state(leaves)


def arrays_of(model: nnx.Module) -> dict[Path, Any]:
    """Returns the arrays of a model by path."""
    # A forward pass may have replaced a constant by a tracer. Flax would treat the
    # tracer as static, and it would escape from the trace.
    for _, module in nnx.iter_modules(model):
        for name, value in [*vars(module).items()]:
            if isinstance(value, Tracer):
                setattr(module, name, nnx.data(value))
    return {path: variable.get_value() for path, variable in variables_of(model)}


def update_arrays(model: nnx.Module, arrays: Mapping[Path, Any]) -> None:
    """Replaces the given arrays of a model, in its Variables."""
    # Other Variables are left alone, because NNX refuses a change to a Variable that
    # belongs to an outer trace.
    changed = {
        path: leaf
        for path, leaf in nnx.to_flat_state(nnx.state(model))
        if any(inner in arrays for inner, _ in inner_variables(path, leaf))
    }
    state = nnx.from_flat_state(changed)
    nnx.update(model, map_arrays(lambda p, v: arrays.get(p, v.get_value()), state))


def abstract_model(
    source: nnx.Module | ModelFn,
    rngs: nnx.Rngs,
    names: Callable[[nnx.Module], object] | None = None,
    wrt: Any = nnx.Param,
) -> nnx.Module:
    """Returns the model with ``jax.ShapeDtypeStruct`` for arrays; allocates nothing.

    Args:
        source: A model, or a function that builds one.
        rngs: Random streams for the function; they are not advanced.
        names: A function that writes names of dims into the model's metadata.
        wrt: Filter of trained Variables; it may also select arrays outside of them.

    Raises:
        ModelError: If an array outside of Variables is drawn from ``rngs`` and not
            trained, or if two arrays have the same dotted path.
    """
    if isinstance(source, nnx.Module):
        for text, remedy in _hidden_arrays(source):
            warn_user(
                f"{text} Flax does not look into such an object: these values are "
                f"constants, and are not trained, sharded or saved. {remedy}.",
                ParallelWarning,
            )

        def shape(path: Path, variable: nnx.Variable) -> jax.ShapeDtypeStruct:
            x = variable.get_value()
            return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))

        check_variables(source)
        with plain_variables():
            # The attributes and metadata of a copy may be changed.
            copied = wrap_constants(nnx.merge(*nnx.split(source), copy=True))
            graphdef, state = nnx.split(copied)
            model = nnx.merge(graphdef, map_arrays(shape, state))
    else:
        graphdef, state = nnx.split(rngs)

        def build() -> nnx.Module:
            return build_model(source, nnx.merge(graphdef, state, copy=True))

        # If the context had a mesh, Flax would add shardings to the shapes, by the
        # names of their dims.
        with leaving_mesh(), plain_variables():
            model = nnx.eval_shape(build)
    name_layers(model)
    _check_names(model)
    # Values that earlier passes have sown are dropped, because every further pass would
    # add to them.
    nnx.pop(model, nnx.Intermediate)
    _mark_weights(model, wrt)
    _check_constants(model, source, rngs)
    if names is not None:
        names(model)
    follow_names(model)
    return model


def set_default_modes(model: nnx.Module) -> nnx.Module:
    """Puts modules without a mode into training mode; returns the model."""
    for _, module in nnx.iter_modules(model):
        for name in MODES:
            if getattr(module, name, True) is None:
                setattr(module, name, False)
    return model


def as_source(model: Any) -> Any:
    """Merges a ``(graphdef, state)`` pair; returns anything else unchanged."""
    match model:
        case (nnx.GraphDef() as graphdef, *states):
            # Without a copy the model would share the state's Variables.
            return nnx.merge(graphdef, *states, copy=True)
    return model


def build_model(model_fn: ModelFn, rngs: nnx.Rngs) -> nnx.Module:
    """Calls a function, a class or a partial with random streams to build a model.

    Raises:
        TypeError: If ``model_fn`` cannot be called with only ``rngs``, or does not
            return a model.
    """
    # A `ReadsArrays` builds only shapes here. It reads its files later, when the
    # shardings are known.
    build: Callable[..., Any] = getattr(model_fn, "build_shapes", model_fn)
    signature, remedy = _signature(model_fn), "Pass lambda rngs: Model(..., rngs=rngs)."
    # Flax's layers take `rngs` only by name.
    by_name = signature is not None and "rngs" in signature.parameters
    args, keywords = ((), {"rngs": rngs}) if by_name else ((rngs,), {})
    try:
        if signature is not None:
            signature.bind(*args, **keywords)
    except TypeError as error:
        raise TypeError(
            f"model={model_fn} cannot be called with only rngs: {error}. {remedy}"
        ) from None
    try:
        model = build(*args, **keywords)
    except (AttributeError, TypeError) as error:
        if re.search(
            "has no attribute '(params|dropout)'|missing .*'rngs'", str(error)
        ):
            error.add_note(
                "A layer needs the nnx.Rngs that model= is called with: "
                "model=lambda rngs: Net(rngs=rngs), and nnx.Linear(4, 4, rngs=rngs)."
            )
        raise
    if not isinstance(model, nnx.Module):
        found = type(model).__name__
        raise TypeError(
            f"model={model_fn} returns a {found}, not an nnx.Module. {remedy}"
        )
    check_variables(model)
    drop_meshes(model)
    wrap_constants(model)
    for text, remedy in _hidden_arrays(model):
        raise ModelError(
            f"{text} Flax does not look into such an object, and the model is built in "
            f"a trace, after which the array is gone. {remedy}; or pass a model that "
            "is built."
        )
    return model


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    call = function if isinstance(function, partial) else partial(function)
    target: Any = call.func
    # NNX's metaclass hides the parameters of its classes.
    if isinstance(target, type):
        call = partial(getattr(target, "__init__"), None, *call.args, **call.keywords)  # noqa: B009
    try:
        return inspect.signature(call)
    except ValueError:
        return None  # some functions in C have no signature


def wrap_constants(model: nnx.Module) -> nnx.Module:
    """Puts each array outside of Variables into a `Constant`; returns the model.

    In an abstract model Flax finds Variables, but not a bare array that is in a dict or
    was made under a trace.
    """
    kinds = jax.Array | np.ndarray
    _map_attributes(model, lambda x: Constant(x) if isinstance(x, kinds) else x)
    return model


def unwrap_constants(model: nnx.Module) -> nnx.Module:
    """Undoes `wrap_constants`, so that the model's code finds plain arrays."""
    _map_attributes(model, lambda x: x.get_value() if isinstance(x, Constant) else x)
    return model


def _map_attributes(model: nnx.Module, function: Callable[[Any], Any]) -> None:
    """Applies a function to all attributes of all modules, pytrees leaf by leaf."""

    def convert(value: Any) -> Any:
        leaves, tree = _parts(value)
        new = [function(x) for x in leaves]
        is_new = any(a is not b for a, b in zip(new, leaves, strict=True))
        return tree.unflatten(new) if is_new else value

    for _, module in [*nnx.iter_modules(model)]:
        for name, value in [*vars(module).items()]:
            if (new := convert(value)) is not value:
                setattr(module, name, nnx.data(new))


def _parts(value: Any) -> tuple[list, Any]:
    """Returns the leaves of an attribute, and its tree structure."""
    try:
        return jax.tree.flatten(value, is_leaf=_is_part_of_graph)
    except ValueError:  # a dict with unsortable keys holds settings, not arrays
        return jax.tree.flatten(value, is_leaf=lambda _: True)


def _is_part_of_graph(value: object) -> bool:
    return isinstance(value, nnx.Variable | nnx.Pytree)


def _hidden_arrays(model: nnx.Module) -> Iterator[tuple[str, str]]:
    """Yields a sentence and a remedy for each object that hides arrays from Flax.

    Such an object is a closure, a partial, a bound method or an object of another
    class. It hides modules and Variables, and arrays of the current trace.
    """
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            for holder in filterfalse(_is_part_of_graph, _parts(value)[0]):
                code = getattr(getattr(holder, "func", holder), "__code__", None)
                line = code and f" ({code.co_filename}:{code.co_firstlineno})"
                for inner, found in _contents(holder):
                    remedy = f"Make it an attribute of the module, self.{inner} = ..."
                    if found is module:
                        remedy = "Write a method of the module"
                    yield (
                        f"`{dotted((*path, name))}` is a {type(holder).__name__}"
                        f"{line or ''} with {_name_hidden(inner, found)}.",
                        f"{remedy}, or an nnx.Variable",
                    )


def _name_hidden(name: str, found: Any) -> str:
    if not isinstance(found, nnx.Module):
        return f"an array that __init__ has made, {name!r}"
    params = variables_of(found, nnx.Param)
    shown = ", ".join(f"`{dotted(p)}` {v.get_value().shape}" for p, v in params)
    return f"the {type(found).__name__} {name!r} that __init__ has made: {shown}"


def _contents(holder: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yields modules, Variables and traced arrays in an object, by name."""
    if isinstance(holder, type | ModuleType):
        return
    named = [*getattr(holder, "__dict__", {}).items()]
    if isinstance(holder, partial):
        named += [(f"args_{i}", x) for i, x in enumerate(holder.args)]
        named += [*holder.keywords.items(), ("func", holder.func)]
    named.append(("self", getattr(holder, "__self__", None)))
    names = getattr(getattr(holder, "__code__", None), "co_freevars", ())
    cells = getattr(holder, "__closure__", None) or ()
    named += [
        (name, cell.cell_contents)
        for name, cell in zip(names, cells, strict=False)
        if cell != _EMPTY
    ]
    for name, value in named:
        for x in _parts(value)[0]:
            if isinstance(x, nnx.Module | nnx.Variable | Tracer):
                yield name, x
            elif callable(x) and depth:
                yield from _contents(x, depth - 1)


def plain_attributes(model: nnx.Module) -> dict[Path, Any]:
    """Returns numbers, strings and flags of modules, which are constants of a step."""
    return {
        (*path, name): value
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and name not in MODES
    }


def _check_names(model: nnx.Module) -> None:
    names = Counter(dotted(path) for path, _ in variables_of(model))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ModelError(
            f"Several arrays of the model are called {twice}. The parts of a path are "
            "joined with dots: use names without dots, or other names."
        )


def _mark_weights(model: nnx.Module, wrt: Any) -> None:
    """Replaces each floating-point `Constant` that a filter selects by a `Weight`."""
    is_trained = nnx.filterlib.to_predicate(wrt)
    weights: dict[int, Weight] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        if isinstance(leaf, Constant) and is_inexact(x := leaf.get_value()):
            weight = Weight(x)
            # Plain NNX passes the array to the filter. Later calls in this library pass
            # the Weight.
            if is_trained(path, x) and is_trained(path, weight):
                weights[id(leaf)] = weight
    _map_attributes(model, lambda x: weights.get(id(x), x))


def _check_constants(
    model: nnx.Module, source: nnx.Module | ModelFn, rngs: nnx.Rngs
) -> None:
    """Refuses, or warns about, weights that are outside of Variables by mistake.

    As in plain NNX, an array outside of Variables is a constant, unless the filter of
    trained arrays selects it. Integers and single numbers are accepted. Floating-point
    arrays that a function draws from its ``rngs`` are weights, and raise a
    `ModelError`, unless they are marked as constants. All other arrays could be weights
    or constants, and give a warning.
    """
    bare = [
        path
        for path, variable in variables_of(model)
        if type(variable) is Constant
        and (value := variable.get_value()).shape
        and is_inexact(value)
    ]
    is_built = isinstance(source, nnx.Module)
    if drawn := [] if is_built or not bare else _drawn(source, rngs, bare):
        raise ModelError(
            f"The model has randomly initialized arrays in no Variable: {drawn}. They "
            "would silently not be trained. Wrap each where it is made: nnx.Param(x) "
            "if it is trained, nnx.Variable(x) if it is a constant."
        )
    if bare:
        warn_user(
            f"Arrays in no Variable are constants and not trained: "
            f"{[dotted(path) for path in bare]}. nnx.Param(x) would train one; "
            "nnx.Variable(x) marks it as a constant, and silences this warning."
        )


def _drawn(model_fn: ModelFn, rngs: nnx.Rngs, paths: list[Path]) -> list[str]:
    """Returns the dotted paths of those arrays that depend on the random streams."""
    build, streams = arrays_from(model_fn, rngs)

    def wanted(streams: dict) -> list:
        arrays = flatten(build(streams))
        return [arrays[path] for path in paths]

    traced = trace(wanted, streams)
    random = reached(traced.eqns, jax.tree.leaves(traced.inputs))
    return [
        dotted(path)
        for path, x in zip(paths, traced.outputs, strict=True)
        if not random.isdisjoint(variables_in([x]))
    ]


def place_model(model: nnx.Module, layout: Layout) -> dict[Path, Placement]:
    """Places each array of an abstract model; returns the placements by path.

    The placements are also written into the model's metadata. The graphdef contains the
    metadata, so a `Stack` knows where its arrays live. Warns about path rules that
    match no array.
    """
    run, found = layout.claims.execution, {}
    staged = run.find_staged(model, layout.mesh) if run else None
    named = {n for _, v in variables_of(model) for n in names_of(v)}
    flat = {axis for names in named for axis in as_tuple(names)}
    check_logical_rules(layout.claims.rules, {*flat, *LOGICAL_AXES, *layout.mesh.shape})
    for p, v in variables_of(model):
        found[p] = (v, place_array(p, array_info(p, v), staged, layout.place))
    reasons = {placement.reason for _, placement in found.values()}
    stacks, placements = stacks_of(model), {}
    tables = {
        (*path, "embedding")
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.Embed)
    }
    for path, (variable, place) in found.items():
        reason = place.reason
        if isinstance(variable, Constant):
            reason = f"in no Variable: {reason or 'whole'}"
        is_by_rule = reason.startswith(RULE_REASONS)
        if (evidence := variable.get_metadata().get("evidence")) and not is_by_rule:
            known = "" if reason == NO_REASON else reason
            reason = "; ".join(filter(None, (known, evidence)))
        if place.is_stacked and place.is_gathered and not is_inside(path, stacks):
            reason += "; dim 0: layers, gathered one by one where a loop scans them"
        placements[path] = replace(
            place,
            reason=reason,
            # Dims are (vocab, embed). If only rows are split, the activations do not
            # change.
            is_looked_up=path in tables and place.gradient[1:] != place.used[1:],
        )
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        if isinstance(leaf, nnx.Variable):
            own = tuple(placements[p] for p, _ in inner_variables(path, leaf))
            placement = own[0] if holds_one_array(leaf) else own
            # With eager sharding, Flax would place the array by its names, on the mesh
            # of the context, when the model is merged.
            leaf.set_metadata(placement=placement, eager_sharding=False)
    warn_idle(
        layout.claims.rules, reasons, "strategy.describe(model) lists every path."
    )
    return placements


def stored_specs(state: nnx.State, layout: Layout) -> nnx.State:
    """Returns the tree of a state with the spec in which each array is stored."""
    return map_arrays(lambda p, v: layout.place(array_info(p, v)).stored, state)


def stored_shardings(
    placements: dict[Path, Placement], layout: Layout
) -> dict[Path, NamedSharding]:
    """Returns the sharding in which each array is stored, by path."""
    return {p: layout.sharding(place.stored) for p, place in placements.items()}


def placed_copies(
    arrays: dict[Path, Any], shardings: Mapping[Path, Sharding]
) -> dict[Path, jax.Array]:
    """Copies arrays to their shardings; the copies may be donated."""
    if jax.process_count() > 1:
        # All processes have the same values. A compiled copy lets each process place
        # its shards of them.
        return jax.jit(dict, out_shardings=shardings)(arrays)
    # `may_alias=False` is not enough: the device that holds the source reuses it as its
    # shard of a replicated array, and donating that array deletes the source
    # (docs/library-notes.md, "Arrays and buffers").
    return {p: jax.device_put(_copy(x), shardings[p]) for p, x in arrays.items()}


def _copy(x: jax.typing.ArrayLike) -> Any:
    return x.copy() if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x)


def arrays_from(
    model_fn: ModelFn, rngs: nnx.Rngs
) -> tuple[Callable[[dict], dict], dict]:
    """Makes a pure function that builds a model's arrays from random streams.

    Returns:
        The function, and its argument: the streams of ``rngs``, which are not advanced.
        The function takes and returns nested dicts.
    """
    graphdef, state = nnx.split(rngs)

    def build(state: dict) -> dict:
        with plain_variables():
            model = build_model(model_fn, nnx.merge(graphdef, state))
        return nest(arrays_of(model))

    return build, nnx.to_pure_dict(state)
