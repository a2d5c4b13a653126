"""`sharded_jit`: ``jax.jit`` with rules, which are resolved once shapes are known."""

import inspect
import math
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from functools import partial, update_wrapper
from inspect import Parameter, Signature
from typing import Any

import jax
import jax.extend.core as jex
from jax.api_util import shaped_abstractify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import PlacementTreeError, suggest
from nnx_parallel.sharding.constrain import annotated
from nnx_parallel.sharding.donation import Donating
from nnx_parallel.sharding.names import as_tuple
from nnx_parallel.sharding.partitioner import correct
from nnx_parallel.sharding.tree import (
    MeshLike,
    constrain_tree,
    has_rules,
    is_placeable,
    layout_of,
    on_mesh,
    resolve_leaves,
    resolve_prefix,
)

Names = tuple[str, ...]

_NONE: tuple[Any, Any] = (None, None)  # keywords without a call, and no program
_OTHER_SIGNATURE = "The program was resolved for another signature."
_PLACEMENTS = ("in_shardings", "out_shardings", "constrain_args", "annotations")


class Arguments:
    """The parameters of a function, static ones among them, and placements of each."""

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any]) -> None:
        try:
            self._signature = inspect.signature(fn)
        except (TypeError, ValueError):  # some functions in C have none
            self._signature = inspect.signature(lambda *args, **kwargs: None)
        self.known = self._signature.parameters
        # A function has at most one ``*args`` and one ``**kwargs``.
        by_kind = {parameter.kind: name for name, parameter in self.known.items()}
        self._var_positional = by_kind.get(Parameter.VAR_POSITIONAL, "")
        self._var_keyword = by_kind.get(Parameter.VAR_KEYWORD, "")
        in_order = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = [n for n, p in self.known.items() if p.kind in in_order]
        self.static = self._select(options, "static_argnames", "static_argnums")
        self.donated = self._select(options, "donate_argnames", "donate_argnums")
        self._dynamic = [name for name in self._positional if name not in self.static]

    def _select(self, options: Mapping[str, Any], by_name: str, by_index: str) -> Names:
        """The parameters that a pair of options selects."""
        names, indices = as_tuple(options[by_name]), options[by_index]
        self.check_names(names, by_name)
        count = len(self._positional)
        for i in (indices,) if isinstance(indices, int) else indices or ():
            if not -count <= i < (math.inf if self._var_positional else count):
                raise ValueError(
                    f"{by_index} has {i}, but the function takes {count} positional "
                    f"arguments: {self._positional}."
                )
            names += (self._positional[i] if i < count else f"args_{i - count}",)
        return names

    def check_names(self, names: Iterable[str], option: str) -> None:
        """Refuses names in an option that are not parameters of the function."""
        for name in names:
            if name not in self.known and not self._var_keyword:
                raise ValueError(
                    f"{option} names {name!r}, which the function does not take."
                    f"{suggest(name, self.known)} Its parameters: {list(self.known)}."
                )

    def check_placements(self, placements: Any, option: str) -> None:
        """Refuses placements that cannot fit any call."""
        if isinstance(placements, Mapping):
            self.check_names(placements, option)
            if static := [name for name in placements if name in self.static]:
                raise ValueError(
                    f"{option} places {static}, but static arguments are not arrays. "
                    f"Leave them out; the dynamic arguments are {self._dynamic}."
                )
        elif isinstance(placements, tuple | list):
            if len(placements) > len(self._dynamic) and not self._var_positional:
                raise PlacementTreeError(
                    f"{option} has {len(placements)} entries for the arguments "
                    f"{self._dynamic}. Give one for each that is not static, in order, "
                    "or a mapping by name."
                )
        elif not is_placeable(placements):
            raise PlacementTreeError(
                f"{option} is a {type(placements).__name__}. Pass one rule, spec or "
                "sharding for all arguments, a tuple with one for each, or a mapping "
                "by name."
            )

    def names(self, values: tuple, keywords: Names) -> Names:
        """The name of each value of a call: ``args_0`` for the first of ``*args``."""
        count = len(values) - len(keywords)
        self._signature.bind(*values[:count], **dict.fromkeys(keywords))
        extra = range(count - len(self._positional))
        return (*self._positional[:count], *(f"args_{i}" for i in extra), *keywords)

    def placements(self, placements: Any, names: Names, option: str) -> dict[str, Any]:
        """The entry of an option for each dynamic argument of a call."""
        dynamic = [name for name in names if name not in self.static]
        if is_placeable(placements):
            return dict.fromkeys(dynamic, placements)
        extra = [n for n in names if n not in self.known and n.startswith("args_")]
        if not isinstance(placements, Mapping):
            # Keyword-only arguments have no place in an order.
            order = [*self._dynamic, *extra]
            if missing := [n for n in order[len(placements) :] if n in names]:
                raise PlacementTreeError(
                    f"{option} has {len(placements)} entries, none for the argument "
                    f"`{missing[0]}`. Give one for each of {self._dynamic}, in order, "
                    "None to leave it to the compiler, or a mapping by name."
                )
            placements = dict(zip(order, placements, strict=False))
        # ``*args`` and ``**kwargs`` speak for the values that they take.
        owners = {n: self._var_keyword for n in dynamic if n not in self.known}
        owners |= dict.fromkeys(extra, self._var_positional)
        return {n: placements.get(n, placements.get(owners.get(n))) for n in dynamic}


def sharded_jit(
    fn: Callable[..., Any] | None = None,
    mesh: MeshLike | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    constrain_args: Any = None,
    annotations: Mapping[str, Any] | None = None,
    static_argnames: str | Iterable[str] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    donate_argnums: int | Iterable[int] = (),
) -> Any:
    """Compiles any function over any pytrees, placed by rules on a mesh.

    The compiled program, its traces and its dispatch equal ``jax.jit``'s with the
    shardings that the rules resolve to. Each place of a sharding takes rules, a
    ``PartitionSpec``, a ``NamedSharding`` or ``None`` (the compiler chooses) for all
    below it in the tree; a call with new shapes, dtypes or structures resolves them
    (`resolve_shardings`). The result is called like ``fn``, also as a method, and has
    ``lower``, ``trace``, ``eval_shape`` and ``clear_cache`` as ``jax.jit`` has them.
    While ``fn`` is traced, `active_mesh` and ``jax.sharding.get_abstract_mesh`` return
    its mesh, and `constrain` and `annotate` place.

    Args:
        fn: The function; left out, a decorator is returned.
        mesh: The mesh, or a strategy for the mesh and the names that `constrain` meets.
        in_shardings: Placements of arguments: one entry for all, a tuple with one for
            each that is not static, or a mapping by name. Arguments without an explicit
            place are moved there; arguments that were put elsewhere are refused.
        out_shardings: Placements of outputs: a prefix of the result of ``fn``.
        constrain_args: Like ``in_shardings``, for arguments that may lie anywhere.
        annotations: Placements of the values that ``fn`` passes to `annotate`, by name.
        static_argnames: Hashable arguments: a new value is a new program.
        donate_argnames: Arguments whose memory the outputs may take.
        static_argnums: Static arguments by position.
        donate_argnums: Donated arguments by position.

    Raises:
        DonatedArrayError: If a call donates an array that is gone, or passes it twice.
        UnknownAxisError: If a spec names an axis that the mesh lacks.
        PlacementTreeError: If placements do not fit the arguments or outputs.
        TypeError: If ``mesh`` is not a mesh, or a non-static argument is not an array.
        ValueError: If an argument is named that ``fn`` does not take.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"fsdp": None})
        >>> @sharded_jit(mesh=mesh, in_shardings=(None, P("fsdp")), out_shardings=P())
        ... def mean(params, batch):
        ...     return (batch @ params["w"]).mean()
        >>> float(mean({"w": jax.numpy.ones((4, 2))}, jax.numpy.ones((8, 4))))
        4.0
    """
    # The copy comes first: a loop over ``locals()`` fails under a debugger or profiler.
    options = dict(locals())
    del options["fn"]
    if fn is None:
        return partial(sharded_jit, **options)
    if isinstance(fn, MeshLike) or not callable(fn):
        raise TypeError(
            f"sharded_jit got a {type(fn).__name__} for the function. Write "
            "sharded_jit(fn, mesh, ...), or @sharded_jit(mesh=mesh, ...) above it."
        )
    return ShardedFunction(fn, options)


class ShardedFunction:
    """A function compiled by `sharded_jit`; call it as the function itself."""

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]) -> None:
        update_wrapper(self, fn)
        self._fn, self._layout = fn, layout_of(options["mesh"])
        self._arguments = Arguments(fn, options)
        for option in ("in_shardings", "constrain_args"):
            self._arguments.check_placements(options[option], option)
        # This comes before the tree: a mapping that is not a dict is a leaf to JAX.
        options["annotations"] = dict(options["annotations"] or {})
        placed = (on_mesh(options[n], self._layout.mesh, n) for n in _PLACEMENTS)
        self._in, self._out, self._constraints, self._annotations = placed
        self._programs: dict[tuple, Any] = {}
        self._last = self._steady = _NONE
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function: every line counts in a dispatch of a tenth of a ms."""
        values, keywords = _by_position(args, kwargs) if kwargs else (args, ())
        form, program = self._steady
        # A look-up flattens the arguments, and `jax.jit` does so again. A program that
        # was called twice in a row is tried without a look-up: it refuses other
        # signatures when JAX traces it for them. That costs a millisecond, so it needs
        # to be rare.
        if form == keywords:
            try:
                return program(*values)
            except Exception:
                # JAX refuses some signatures before the trace, if shardings do not fit.
                if self._programs.get(self._signature(values, keywords)) is program:
                    raise
        program = self._find(values, keywords)
        out = program(*values)
        last, self._last = self._last, (keywords, program)
        self._steady = last if last == self._last else _NONE
        return out

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The method of an instance, which is then the first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The lowered program of a call; arrays may be ``jax.ShapeDtypeStruct``."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The jaxpr of a call; its last inputs are keywords, sorted by name."""
        values, keywords = _by_position(args, kwargs)
        traced = self._find(values, keywords).trace(*values)
        if named := [name for name in keywords if name not in self._arguments.static]:
            # The next stages read from this tree how they are called: without it
            # keywords would be positions, in alphabetical order
            # (docs/library-notes.md, "Tracing and compiling").
            infos, _ = traced.args_info
            at = len(infos) - len(named)
            tree = infos[:at], dict(zip(named, infos[at:], strict=True))
            traced._in_tree = jax.tree.structure(tree)
        return traced

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a call as ``jax.ShapeDtypeStruct``; nothing is compiled."""
        values, keywords = _by_position(args, kwargs)
        return self._find(values, keywords).eval_shape(*values)

    def clear_cache(self) -> None:
        """Drops every program: the next call resolves, traces and compiles again."""
        with self._lock:
            for program in self._programs.values():
                program.clear_cache()
            self._programs.clear()
            self._last = self._steady = _NONE

    def _signature(self, values: tuple, keywords: Names) -> tuple:
        """Key of a program: structure, avals and static values of its calls."""
        static: tuple = ()
        if fixed := self._arguments.static:
            names = self._arguments.names(values, keywords)
            pairs = list(zip(names, values, strict=True))
            # Types are part of the key, as in JAX, because True, 1 and 1.0 are equal.
            static = tuple((type(x), x) for name, x in pairs if name in fixed)
            values = tuple(value for name, value in pairs if name not in fixed)
        try:
            hash(static)
        except TypeError as error:
            raise ValueError(
                f"A static argument among {fixed} cannot be hashed: {error}. Static "
                "values are hashable: functions, strings, numbers, tuples of these, "
                "frozen dataclasses."
            ) from None
        leaves, tree = jax.tree.flatten(values)
        return keywords, tree, tuple(map(_aval, leaves)), static

    def _find(self, values: tuple, keywords: Names) -> Any:
        key = self._signature(values, keywords)
        program = self._programs.get(key)
        if program is None:
            with self._lock:  # two threads with a new signature trace it once
                program = self._programs.get(key) or self._resolve(values, keywords)
                self._programs[key] = program
        return program

    def _resolve(self, values: tuple, keywords: Names) -> Any:
        """The ``jax.jit`` of a call by position, with shardings in place of rules."""
        arguments, mesh = self._arguments, self._layout.mesh
        names = arguments.names(values, keywords)
        entries = arguments.placements(self._in, names, "in_shardings")
        in_shardings = tuple(
            resolve_prefix(entries[name], value, mesh, name)
            for name, value in zip(names, values, strict=True)
            if name in entries
        )
        constraints = arguments.placements(self._constraints, names, "constrain_args")
        names_devices = jax.tree.leaves((self._in, self._out, self._constraints))
        at = len(names) - len(keywords)
        first: tuple = ()

        def traced(*values: Any) -> Any:
            nonlocal first
            # The first trace belongs to the call that was resolved. JAX traces a known
            # signature again in another context.
            signature = self._signature(values, keywords)
            first = first or signature
            if signature != first:
                raise LookupError(_OTHER_SIGNATURE)
            with annotated(self._layout, self._annotations):
                placed = [
                    constrain_tree(value, constraints.get(name), mesh, name)
                    for name, value in zip(names, values, strict=True)
                ]
                by_name = dict(zip(keywords, placed[at:], strict=True))
                out = self._fn(*placed[:at], **by_name)
            if not names_devices:
                out = jax.tree.map(lambda x: _on_devices(x, mesh), out)
            if not has_rules(self._out):
                resolve_leaves(self._out, out, mesh, "output")
            return out

        _name_as(traced, self._fn, names)
        static = [i for i, name in enumerate(names) if name in arguments.static]
        donated = [i for i, name in enumerate(names) if name in arguments.donated]
        numbers = {"static_argnums": static, "donate_argnums": donated}
        jit = partial(jax.jit, traced, **numbers)
        # Without a trace, under `jax.disable_jit`, nothing is partitioned.
        if mesh.size > 1 and not jax.config.jax_disable_jit:
            # JAX keeps it by function and arguments: the program takes this trace.
            trace = jit().trace(*values)
            corrected = correct(self._layout, trace.jaxpr, is_complete=False)
            if corrected is not trace.jaxpr:
                known = keywords, first, static
                run = self._run_corrected(corrected, trace.out_tree, *known)
                _name_as(run, self._fn, names)
                jit = partial(jax.jit, run, **numbers)
        out_shardings = self._out
        # Only rules need shapes, which `jax.disable_jit` does not trace.
        if has_rules(out_shardings):
            # JAX keeps it by function and arguments: the program takes this trace.
            shapes = jit().trace(*values).out_info
            out_shardings = resolve_prefix(out_shardings, shapes, mesh, "output")
        # Without any sharding JAX chooses by the places of the arguments.
        if jax.tree.leaves(in_shardings):
            jit = partial(jit, in_shardings=in_shardings)
        program = jit(out_shardings=out_shardings)
        return Donating(program, names, donated) if donated else program

    def _run_corrected(
        self,
        corrected: Any,
        out_tree: Any,
        keywords: Names,
        first: tuple,
        static: list[int],
    ) -> Callable[..., Any]:
        """A function that runs a corrected program for the signature of its trace."""

        def run(*values: Any) -> Any:
            if self._signature(values, keywords) != first:
                raise LookupError(_OTHER_SIGNATURE)
            given = [v for i, v in enumerate(values) if i not in static]
            out = jex.jaxpr_as_fun(corrected)(*jax.tree.leaves(given))
            return jax.tree.unflatten(out_tree, out)

        return run


def _name_as(traced: Any, fn: Callable[..., Any], names: Names) -> None:
    """Gives a traced function the names that JAX's errors and programs mention."""
    traced.__name__ = getattr(fn, "__name__", type(fn).__name__)
    only = Parameter.POSITIONAL_ONLY
    try:
        signature = Signature([Parameter(name, only) for name in names])
    except ValueError:  # ``**kwargs`` may have any string, or another argument's name
        signature = inspect.signature(traced)  # (*values)
    traced.__signature__ = signature
    # An error in the trace then shows a line of the user's function.
    traced.__wrapped__ = fn


def _by_position(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, Names]:
    """All values of a call, and the names of those at the end, sorted."""
    # ``jax.jit`` refuses keywords if it is given shardings.
    keywords = tuple(sorted(kwargs))
    return (*args, *(kwargs[name] for name in keywords)), keywords


def _on_devices(x: Any, mesh: Mesh) -> Any:
    """An output on the mesh's devices, its layout left open."""
    if not isinstance(x, jax.Array):
        return x
    # JAX's active mesh is abstract. If nothing else names a device, specs on it would
    # be compiled for one device, and ignored.
    sharding = NamedSharding(mesh, P(*[P.UNCONSTRAINED] * x.ndim))
    return jax.lax.with_sharding_constraint(x, sharding)


def _aval(leaf: Any) -> Any:
    """Shape, dtype and weak type, by which JAX traces; or the leaf's type."""
    try:
        # Arrays and tracers have an aval; to make one costs more than the rest of a
        # look-up.
        aval: Any = leaf.aval if hasattr(leaf, "aval") else shaped_abstractify(leaf)
    except TypeError:
        return type(leaf)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
