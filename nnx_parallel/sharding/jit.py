"""`sharded_jit`: ``jax.jit`` that takes rules where it takes shardings.

Rules need shapes, which are known at a call. So placements are resolved once for each
signature (structure, avals, static values) into a ``jax.jit`` with plain shardings.
"""

from __future__ import annotations

import collections
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.api_util import shaped_abstractify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import PlacementTreeError
from nnx_parallel.sharding.constrain import bound_annotations
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import check_axes, suggest
from nnx_parallel.sharding.resolve import (
    constrain_tree,
    has_rules,
    is_placeable,
    resolve_leaves,
)
from nnx_parallel.sharding.tree import HasLayout, layout_of

Program = Any  # what `jax.jit` returns
Signature = tuple[Any, ...]
Values = tuple[Any, ...]
Names = tuple[str, ...]

_NONE: tuple[Any, Program] = (None, None)  # no call by these keywords, no program
_Parameter = inspect.Parameter
_ONLY = _Parameter.POSITIONAL_ONLY


class _NewSignatureError(Exception):
    """A program was called with a signature that it was not resolved for."""


class Arguments:
    """The parameters of a function, static ones among them, and placements of each."""

    def __init__(self, fn: Callable[..., Any], static: Sequence[str]) -> None:
        try:
            self.signature = inspect.signature(fn)
        except (TypeError, ValueError):  # some functions in C have none
            self.signature = inspect.signature(lambda *args, **kwargs: None)
        self.static = tuple(static)
        by_kind: dict[Any, list[str]] = collections.defaultdict(list)
        for parameter in self.signature.parameters.values():
            by_kind[parameter.kind].append(parameter.name)
        # Python has positional-only parameters come first.
        self._positional = by_kind[_ONLY] + by_kind[_Parameter.POSITIONAL_OR_KEYWORD]
        self._dynamic = [name for name in self._positional if name not in static]
        self._var_positional = "".join(by_kind[_Parameter.VAR_POSITIONAL])
        self._var_keyword = "".join(by_kind[_Parameter.VAR_KEYWORD])

    def check_names(self, names: Iterable[str], option: str) -> None:
        """Refuses names given to an option that are no parameters."""
        known = self.signature.parameters
        for name in names:
            if name not in known and not self._var_keyword:
                raise ValueError(
                    f"{option} names {name!r}, which the function does not take."
                    f"{suggest(name, known)} Its parameters: {list(known)}."
                )

    def check_placements(self, placements: Any, option: str) -> None:
        """Refuses placements that fit no call."""
        if isinstance(placements, Mapping):
            self.check_names(placements, option)
            if static := [name for name in placements if name in self.static]:
                raise ValueError(
                    f"{option} places {static}, but static arguments are no arrays. "
                    f"Leave them out; dynamic are {self._dynamic}."
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

    def names(self, num_positional: int, keywords: Sequence[str]) -> tuple[str, ...]:
        """The name of each value of a call, those given by keyword last."""
        self.signature.bind(*range(num_positional), **dict.fromkeys(keywords))
        extra = range(num_positional - len(self._positional))
        names = [*self._positional[:num_positional], *(f"args_{i}" for i in extra)]
        return (*names, *keywords)

    def placements(
        self, placements: Any, names: Sequence[str], option: str
    ) -> dict[str, Any]:
        """The entry of an option for each dynamic argument of a call."""
        dynamic = [name for name in names if name not in self.static]
        if is_placeable(placements):
            return dict.fromkeys(dynamic, placements)
        known = self.signature.parameters
        var_positional = [n for n in names if n not in known and n.startswith("args_")]
        if not isinstance(placements, Mapping):
            # Keyword-only arguments have no place in an order.
            order = [*self._dynamic, *var_positional]
            for name in order[len(placements) :]:
                if name in names:
                    raise PlacementTreeError(
                        f"{option} has {len(placements)} entries, none for the "
                        f"argument `{name}`. Give one for each of {self._dynamic}, in "
                        "order, None to leave it to the compiler, or a mapping by name."
                    )
            placements = dict(zip(order, placements, strict=False))
        # ``*args`` and ``**kwargs`` speak for the values that they take.
        shared = {name: placements.get(self._var_keyword) for name in dynamic}
        shared |= dict.fromkeys(known)
        shared |= dict.fromkeys(var_positional, placements.get(self._var_positional))
        return {name: placements.get(name, shared[name]) for name in dynamic}


def sharded_jit(
    fn: Callable[..., Any] | None = None,
    mesh: Mesh | Layout | HasLayout | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    constrain_args: Any = None,
    annotations: Mapping[str, Any] | None = None,
    static_argnames: str | Iterable[str] = (),
    donate_argnames: str | Iterable[str] = (),
) -> Any:
    """Compiles any function over any pytrees, placed by rules on a mesh.

    ``jax.jit`` with rules: the compiled program, its traces and its dispatch are those
    of ``jax.jit`` with the shardings that the rules resolve to. A place for a
    sharding takes rules, a ``PartitionSpec``, a ``NamedSharding``, or ``None``, which
    leaves the choice to the compiler; each holds for everything below its place in the
    tree. New shapes, dtypes or structures are resolved at their first call.

    While ``fn`` is traced its mesh is active: `active_mesh` and JAX's own
    ``jax.sharding.get_abstract_mesh`` return it, `constrain` and `annotate` place.

    Args:
        fn: The function; left out, a decorator is returned.
        mesh: The mesh, or a strategy for the mesh and the names that `constrain` meets.
        in_shardings: Where arguments must lie; others are moved there if they lie on
            one device by default, and refused if they were put elsewhere. One entry
            for all arguments, a tuple with one for each that is not static, or a
            mapping by name.
        out_shardings: Where outputs are put: a prefix of what ``fn`` returns.
        constrain_args: As ``in_shardings``, but arguments may lie anywhere: the program
            moves them.
        annotations: Placements of what ``fn`` passes through `annotate`, by name.
        static_argnames: Arguments that are hashable values rather than arrays: a new
            value is a new program.
        donate_argnames: Arguments whose memory the outputs may take.

    Returns:
        A function that is called like ``fn``, also as a method, and has ``lower``,
        ``trace``, ``eval_shape`` and ``clear_cache`` as ``jax.jit`` has them.

    Raises:
        UnknownAxisError: If a spec names an axis that the mesh lacks.
        PlacementTreeError: If placements do not fit the arguments or outputs.
        IndivisibleDimError: If an axis does not divide a dim; at the call.
        SpecRankError: If a spec is longer than an array's rank; at the call.
        UnmatchedRuleError: If strict rules do not match an array; at the call.
        TypeError: If ``mesh`` is none, or an argument that is not static is no array.
        ValueError: If an argument is named that ``fn`` does not take.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_parallel import make_mesh
        >>> from nnx_parallel.sharding import FSDPRules
        >>> mesh = make_mesh({"fsdp": None})
        >>> @sharded_jit(mesh=mesh, in_shardings=(None, P("fsdp")), out_shardings=P())
        ... def mean(params, batch):
        ...     return (batch @ params["w"]).mean()
        >>> float(mean({"w": jnp.ones((4, 2))}, jnp.ones((8, 4))))
        4.0
    """
    options = {
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "constrain_args": constrain_args,
        "annotations": annotations,
        "static_argnames": _as_names(static_argnames),
        "donate_argnames": _as_names(donate_argnames),
    }
    if fn is None:
        return functools.partial(sharded_jit, mesh=mesh, **options)
    if isinstance(fn, Mesh | Layout | HasLayout) or not callable(fn):
        raise TypeError(
            f"sharded_jit got a {type(fn).__name__} for the function. Write "
            "sharded_jit(fn, mesh, ...), or @sharded_jit(mesh=mesh, ...) above it."
        )
    return ShardedFunction(fn, layout_of(mesh), options)  # pyright: ignore[reportArgumentType]


class ShardedFunction:
    """A function compiled by `sharded_jit`; call it as the function itself."""

    def __init__(self, fn: Callable[..., Any], layout: Layout, options: dict) -> None:
        functools.update_wrapper(self, fn)
        mesh = layout.mesh
        self._fn, self._layout = fn, layout
        self._arguments = Arguments(fn, options["static_argnames"])
        for option in ("static_argnames", "donate_argnames"):
            self._arguments.check_names(options[option], option)
        for option in ("in_shardings", "constrain_args"):
            self._arguments.check_placements(options[option], option)
        self._in = _on_mesh(options["in_shardings"], mesh, "in_shardings")
        self._out = _on_mesh(options["out_shardings"], mesh, "out_shardings")
        self._constraints = _on_mesh(options["constrain_args"], mesh, "constrain_args")
        annotations = dict(options["annotations"] or {})
        self._annotations = _on_mesh(annotations, mesh, "annotations")
        self._donated = options["donate_argnames"]
        self._programs: dict[Signature, Program] = {}
        self._last = self._steady = _NONE
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function."""
        # All of this counts: a dispatch takes a tenth of a millisecond.
        values, keywords = _by_position(args, kwargs) if kwargs else (args, ())
        form, program = self._steady
        # A look-up flattens the arguments, which `jax.jit` does again. A program that
        # was called twice in a row is tried without: it refuses other signatures when
        # JAX traces it for them. That costs a millisecond, so it needs to be rare.
        if form == keywords:
            try:
                return program(*values)
            except Exception:
                # JAX refuses some before the trace: those that shardings do not fit.
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
        """The program of a call, traced and lowered, to be inspected or compiled.

        Args:
            args: As in a call; ``jax.ShapeDtypeStruct`` does for an array.
            kwargs: The same; the compiled program is called with the same keywords.
        """
        values, keywords = _by_position(args, kwargs)
        lowered = self._find(values, keywords).lower(*values)
        # JAX takes from these how the compiled program is called.
        infos, _ = lowered.args_info
        named = [name for name in keywords if name not in self._arguments.static]
        at = len(infos) - len(named)
        lowered.args_info = infos[:at], dict(zip(named, infos[at:], strict=True))
        return lowered

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The jaxpr of a call; keywords are its last inputs, sorted by name."""
        values, keywords = _by_position(args, kwargs)
        return self._find(values, keywords).trace(*values)

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

    def _signature(self, values: Values, keywords: Names) -> Signature:
        """Key of a program: two calls with the same key share the program."""
        static: tuple[Any, ...] = ()
        if fixed := self._arguments.static:
            names = self._arguments.names(len(values) - len(keywords), keywords)
            pairs = list(zip(names, values, strict=True))
            static = tuple(value for name, value in pairs if name in fixed)
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

    def _find(self, values: Values, keywords: Names) -> Program:
        """The program of a call."""
        signature = self._signature(values, keywords)
        program = self._programs.get(signature)
        if program is None:
            # Two threads with a new signature trace it once.
            with self._lock:
                program = self._programs.get(signature)
                program = program or self._resolve(values, keywords)
                self._programs[signature] = program
        return program

    def _resolve(self, values: Values, keywords: Names) -> Program:
        arguments, mesh = self._arguments, self._layout.mesh
        names = arguments.names(len(values) - len(keywords), keywords)
        entries = arguments.placements(self._in, names, "in_shardings")
        in_shardings = tuple(
            _resolved(entries[name], value, mesh, name)
            for name, value in zip(names, values, strict=True)
            if name in entries
        )
        traced = self._traced(names, keywords)
        jit = functools.partial(
            jax.jit,
            static_argnums=[i for i, n in enumerate(names) if n in arguments.static],
            donate_argnums=[i for i, n in enumerate(names) if n in self._donated],
        )
        # No sharding at all leaves JAX free to choose by where the arguments lie.
        placed = jax.tree.leaves(in_shardings)
        options: dict[str, Any] = {"in_shardings": in_shardings} if placed else {}
        out = self._out
        if has_rules(out):
            # JAX keeps the trace by function and arguments: the program takes this one.
            out = _resolved(out, jit(traced).trace(*values).out_info, mesh, "output")
        return jit(traced, out_shardings=out, **options)

    def _traced(self, names: Names, keywords: Names) -> Callable[..., Any]:
        """The function by position alone, as it is traced: placed, its mesh active."""
        layout, mesh = self._layout, self._layout.mesh
        constraints = self._arguments.placements(
            self._constraints, names, "constrain_args"
        )
        checks_outputs = not has_rules(self._out)
        names_devices = bool(jax.tree.leaves((self._in, self._out, self._constraints)))
        resolved: list[Signature] = []

        def traced(*values: Any) -> Any:
            # The first trace is of the call that was resolved: only a program that has
            # run is ever tried. JAX traces a known signature again in another context.
            signature = self._signature(values, keywords)
            if signature != (resolved or [signature])[0]:
                raise _NewSignatureError
            resolved.append(signature)
            with (
                bound_annotations(layout, self._annotations),
                jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            ):
                placed = [
                    value
                    if constraints.get(name) is None
                    else constrain_tree(value, constraints[name], mesh, name)
                    for name, value in zip(names, values, strict=True)
                ]
                at = len(names) - len(keywords)
                by_name = dict(zip(keywords, placed[at:], strict=True))
                out = self._fn(*placed[:at], **by_name)
            if not names_devices:
                out = _on_devices(out, mesh)
            if checks_outputs:
                resolve_leaves(self._out, out, mesh, "output")
            return out

        parameters = [_Parameter(name, _ONLY) for name in names]
        # JAX names the program and, in its errors, the arguments by these.
        traced.__name__ = getattr(self._fn, "__name__", type(self._fn).__name__)
        traced.__signature__ = inspect.Signature(parameters)
        return traced


def _by_position(args: Values, kwargs: dict[str, Any]) -> tuple[Values, Names]:
    """All values of a call, and the names of those at the end, sorted."""
    # ``jax.jit`` refuses keywords where it is given shardings.
    keywords = tuple(sorted(kwargs))
    return (*args, *(kwargs[name] for name in keywords)), keywords


def _resolved(entry: Any, tree: Any, mesh: Mesh, name: str) -> Any:
    """Shardings of an argument: a whole tree by rules, else the checked prefix."""
    leaves = resolve_leaves(entry, tree, mesh, name)
    if not has_rules(entry):
        return entry
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _as_names(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _on_mesh(placements: Any, mesh: Mesh, option: str) -> Any:
    """The tree with every spec on the mesh, its axes checked."""

    def place(entry: Any) -> Any:
        if isinstance(entry, P):
            check_axes(option, entry, mesh)
            return NamedSharding(mesh, entry)
        return entry

    placements = tuple(placements) if isinstance(placements, list) else placements
    return jax.tree.map(place, placements, is_leaf=is_placeable)


def _on_devices(tree: Any, mesh: Mesh) -> Any:
    """The tree on the mesh's devices, its layout left open.

    JAX's active mesh is abstract. Where nothing else names a device, specs on it would
    be compiled for one device, and ignored.
    """

    def leave_open(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        spec = P(*[P.UNCONSTRAINED] * x.ndim)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(leave_open, tree)


def _aval(leaf: Any) -> Any:
    """Shape, dtype and weak type, by which JAX traces; the type of what has none."""
    try:
        # Arrays and tracers have one; making it costs more than the rest of a look-up.
        aval: Any = leaf.aval if hasattr(leaf, "aval") else shaped_abstractify(leaf)
    except TypeError:
        return type(leaf)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
