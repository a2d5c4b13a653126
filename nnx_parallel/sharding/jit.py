"""`sharded_jit`: ``jax.jit`` with rules, which become shardings when it is called."""

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

_NONE: tuple[Any, Any] = (None, None)  # keywords and program before the first call
_OTHER_SIGNATURE = "The program was resolved for another signature."
_PLACEMENTS = ("in_shardings", "out_shardings", "constrain_args", "annotations")


_CONFIG: Any = jax.config  # its type in jax 0.10 lacks a flag


class Arguments:
    """The parameters of a function: static ones, donated ones, and placements."""

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any]) -> None:
        try:
            self._signature = inspect.signature(fn)
        except (TypeError, ValueError):  # some functions in C have none
            self._signature = inspect.signature(lambda *args, **kwargs: None)
        self.known = self._signature.parameters
        # A function has at most one ``*args`` and one ``**kwargs``: selected by kind.
        by_kind = {parameter.kind: name for name, parameter in self.known.items()}
        self._var_positional = by_kind.get(Parameter.VAR_POSITIONAL, "")
        self._var_keyword = by_kind.get(Parameter.VAR_KEYWORD, "")
        in_order = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = [n for n, p in self.known.items() if p.kind in in_order]
        self.static = self._select(options, "static_argnames", "static_argnums")
        self.donated = self._select(options, "donate_argnames", "donate_argnums")
        self._dynamic = [name for name in self._positional if name not in self.static]

    def _select(self, options: Mapping[str, Any], by_name: str, by_index: str) -> Names:
        """Returns the parameters that a pair of options selects."""
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
                    f"{self._dynamic}. Give one entry for each argument that is not "
                    "static, in order, or a mapping by name."
                )
        elif not is_placeable(placements):
            raise PlacementTreeError(
                f"{option} is a {type(placements).__name__}. Pass one rule, spec or "
                "sharding for all arguments, a tuple with one for each, or a mapping "
                "by name."
            )

    def names(self, values: tuple, keywords: Names) -> Names:
        """Names each value of a call; the first value of ``*args`` is ``args_0``."""
        count = len(values) - len(keywords)
        self._signature.bind(*values[:count], **dict.fromkeys(keywords))
        extra = range(count - len(self._positional))
        return (*self._positional[:count], *(f"args_{i}" for i in extra), *keywords)

    def placements(self, placements: Any, names: Names, option: str) -> dict[str, Any]:
        """Returns the entry of an option for each dynamic argument of a call."""
        dynamic = [name for name in names if name not in self.static]
        if is_placeable(placements):
            return dict.fromkeys(dynamic, placements)
        extra = [n for n in names if n not in self.known and n.startswith("args_")]
        if not isinstance(placements, Mapping):
            # Keyword-only arguments are not in this order.
            order = [*self._dynamic, *extra]
            if missing := [n for n in order[len(placements) :] if n in names]:
                raise PlacementTreeError(
                    f"{option} has {len(placements)} entries, none for the argument "
                    f"`{missing[0]}`. Give one entry for each of {self._dynamic}, in "
                    "order (None leaves it to the compiler), or a mapping by name."
                )
            placements = dict(zip(order, placements, strict=False))
        # An entry for ``*args`` or ``**kwargs`` applies to every value that it takes.
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
    """Compiles a function of any pytrees, placed by rules on a mesh.

    A placement is a tree. Its leaves are rules, a ``PartitionSpec``, a
    ``NamedSharding``, or ``None`` to let the compiler choose. Each leaf applies to all
    arrays below it in the argument or output. A call with new shapes, dtypes or
    structures converts rules to shardings (`resolve_shardings`). The program, its
    traces and its dispatch are the same as with ``jax.jit`` and these shardings.

    The result is called like ``fn``, also as a method. Like the result of ``jax.jit``,
    it has ``lower``, ``trace``, ``eval_shape`` and ``clear_cache``. While ``fn`` is
    traced, `active_mesh` and ``jax.sharding.get_abstract_mesh`` return the mesh, and
    `constrain` and `annotate` take effect.

    Args:
        fn: The function. Without it a decorator is returned.
        mesh: The mesh, or a strategy that has a mesh and maps the names in `constrain`.
        in_shardings: Placements of arguments: one entry for all of them, a tuple with
            one entry for each argument that is not static, or a mapping by name. An
            argument that is not committed to devices is moved to its place; an argument
            that is committed elsewhere is refused.
        out_shardings: Placements of outputs: a prefix of the result of ``fn``.
        constrain_args: Like ``in_shardings``, but an argument may be committed anywhere
            and is moved inside the program.
        annotations: Placements of the values that ``fn`` passes to `annotate`, by name.
        static_argnames: Hashable arguments; each new value compiles a new program.
        donate_argnames: Arguments whose memory the outputs may take.
        static_argnums: Static arguments by position.
        donate_argnums: Donated arguments by position.

    Raises:
        DonatedArrayError: If a call donates an array that was deleted, or passes a
            donated array twice.
        UnknownAxisError: If a spec names an axis that the mesh lacks.
        PlacementTreeError: If placements do not fit the arguments or outputs.
        TypeError: If ``mesh`` is not a mesh, or a non-static argument is not an array.
        ValueError: If an option names an argument that ``fn`` does not take.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"fsdp": None})
        >>> @sharded_jit(mesh=mesh, in_shardings=(None, P("fsdp")), out_shardings=P())
        ... def mean(params, batch):
        ...     return (batch @ params["w"]).mean()
        >>> float(mean({"w": jax.numpy.ones((4, 2))}, jax.numpy.ones((8, 4))))
        4.0
    """
    # The dict is copied before anything else, because a loop over ``locals()`` fails
    # under a debugger or profiler.
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
    """A function compiled by `sharded_jit`, called like the function itself."""

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]) -> None:
        update_wrapper(self, fn)
        self._fn, self._layout = fn, layout_of(options["mesh"])
        self._arguments = Arguments(fn, options)
        for option in ("in_shardings", "constrain_args"):
            self._arguments.check_placements(options[option], option)
        # A mapping that is not a dict is a leaf to JAX, so `on_mesh` needs a dict.
        options["annotations"] = dict(options["annotations"] or {})
        placed = (on_mesh(options[n], self._layout.mesh, n) for n in _PLACEMENTS)
        self._in, self._out, self._constraints, self._annotations = placed
        self._programs: dict[tuple, Any] = {}
        self._last = self._steady = _NONE
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function; adds little to a dispatch, which takes about 0.1 ms."""
        values, keywords = _by_position(args, kwargs) if kwargs else (args, ())
        form, program = self._steady
        # A look-up flattens the arguments, and `jax.jit` flattens them again. So a
        # program that was called twice in a row is tried without a look-up. If the
        # signature has changed, JAX traces the program again, and the trace raises an
        # error. That costs a millisecond, so it must be rare.
        if form == keywords:
            try:
                return program(*values)
            except Exception:
                # JAX may refuse another signature even before the trace, if shardings
                # do not fit. So the look-up decides whether the error belongs to this
                # signature.
                if self._programs.get(self._signature(values, keywords)) is program:
                    raise
        program = self._find(values, keywords)
        out = program(*values)
        last, self._last = self._last, (keywords, program)
        self._steady = last if last == self._last else _NONE
        return out

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the function to an instance, which becomes the first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the program of a call; arrays may be ``jax.ShapeDtypeStruct``."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces a call; the last inputs of its jaxpr are keywords, sorted by name."""
        values, keywords = _by_position(args, kwargs)
        traced = self._find(values, keywords).trace(*values)
        if named := [name for name in keywords if name not in self._arguments.static]:
            # The next stages read the form of a call from this tree. Without it they
            # would take keywords by position, in alphabetical order
            # (docs/library-notes.md, "Tracing and compiling").
            infos, _ = traced.args_info
            at = len(infos) - len(named)
            tree = infos[:at], dict(zip(named, infos[at:], strict=True))
            traced._in_tree = jax.tree.structure(tree)
        return traced

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns outputs as ``jax.ShapeDtypeStruct``, without compiling anything."""
        values, keywords = _by_position(args, kwargs)
        return self._find(values, keywords).eval_shape(*values)

    def clear_cache(self) -> None:
        """Drops every program; the next call resolves, traces and compiles again."""
        with self._lock:
            for program in self._programs.values():
                program.clear_cache()
            self._programs.clear()
            self._last = self._steady = _NONE

    def _signature(self, values: tuple, keywords: Names) -> tuple:
        """Returns a program's key: structure, avals and static values of its calls."""
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
                "values must be hashable: functions, strings, numbers, tuples of "
                "these, frozen dataclasses."
            ) from None
        leaves, tree = jax.tree.flatten(values)
        return keywords, tree, tuple(map(_aval, leaves)), static

    def _find(self, values: tuple, keywords: Names) -> Any:
        key = self._signature(values, keywords)
        program = self._programs.get(key)
        if program is None:
            with self._lock:  # so that two threads trace a new signature only once
                program = self._programs.get(key) or self._resolve(values, keywords)
                self._programs[key] = program
        return program

    def _resolve(self, values: tuple, keywords: Names) -> Any:
        """Makes the ``jax.jit`` for a call, with shardings in place of rules.

        The program takes all values by position.
        """
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
            # The first trace is made by the call for which rules were resolved. Later
            # traces, in another context, must have the same signature.
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
        # Under `jax.disable_jit` there is no trace, and nothing is partitioned.
        if mesh.size > 1 and not _CONFIG.jax_disable_jit:
            # JAX keeps traces by function and arguments: the program reuses this trace.
            trace = jit().trace(*values)
            corrected = correct(self._layout, trace.jaxpr, is_complete=False)
            if corrected is not trace.jaxpr:
                known = keywords, first, static
                run = self._run_corrected(corrected, trace.out_tree, *known)
                _name_as(run, self._fn, names)
                jit = partial(jax.jit, run, **numbers)
        out_shardings = self._out
        # Only rules need the shapes of outputs. `jax.disable_jit` does not trace them.
        if has_rules(out_shardings):
            # JAX keeps traces by function and arguments: the program reuses this trace.
            shapes = jit().trace(*values).out_info
            out_shardings = resolve_prefix(out_shardings, shapes, mesh, "output")
        # If no argument has a sharding, JAX keeps their present placements.
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
        """Returns a function that runs a corrected program.

        It raises a `LookupError` for a signature that was not traced.
        """

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
    except ValueError:  # a key of ``**kwargs`` is not an identifier, or occurs twice
        signature = inspect.signature(traced)  # (*values)
    traced.__signature__ = signature
    # With this, an error in the trace shows a line of the user's function.
    traced.__wrapped__ = fn


def _by_position(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, Names]:
    """Puts all values of a call in order, keywords last and sorted by name.

    Returns the values, and the names of the keywords.
    """
    # ``jax.jit`` with shardings refuses calls with keywords.
    keywords = tuple(sorted(kwargs))
    return (*args, *(kwargs[name] for name in keywords)), keywords


def _on_devices(x: Any, mesh: Mesh) -> Any:
    """Puts an output on the devices of a mesh, with a sharding that XLA chooses."""
    if not isinstance(x, jax.Array):
        return x
    # JAX's active mesh is abstract. If nothing else names devices, JAX would compile
    # the program for one device, and ignore the specs on that mesh.
    sharding = NamedSharding(mesh, P(*[P.UNCONSTRAINED] * x.ndim))
    return jax.lax.with_sharding_constraint(x, sharding)


def _aval(leaf: Any) -> Any:
    """Returns an array's shape, dtype and weak type; the type of any other leaf."""
    try:
        # Arrays and tracers have an aval already. Making a new aval costs more than the
        # rest of a look-up.
        aval: Any = leaf.aval if hasattr(leaf, "aval") else shaped_abstractify(leaf)
    except TypeError:
        return type(leaf)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
