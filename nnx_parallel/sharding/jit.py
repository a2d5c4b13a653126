"""`sharded_jit`: ``jax.jit`` that takes rules where it takes shardings.

Rules need shapes, which are known at a call. So placements are resolved once for each
signature (structure, avals, static values) into a ``jax.jit`` with plain shardings.
"""

from __future__ import annotations

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
from nnx_parallel.sharding.resolve import (
    constrain_tree,
    has_rules,
    is_placeable,
    resolve_leaves,
)
from nnx_parallel.sharding.specs import check_axes, suggest
from nnx_parallel.sharding.tree import HasLayout, layout_of

Program = Any  # what `jax.jit` returns
Signature = tuple[Any, ...]

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


class Arguments:
    """The parameters of a function, and how its calls spell them.

    Attributes:
        signature: Its signature; ``(*args, **kwargs)`` for one that has none.
        static: Names of the static parameters.
    """

    def __init__(self, fn: Callable[..., Any], static: Sequence[str]) -> None:
        try:
            self.signature = inspect.signature(fn)
        except (TypeError, ValueError):
            self.signature = inspect.signature(lambda *args, **kwargs: None)
        self.static = tuple(static)
        parameters = self.signature.parameters.values()
        self._kinds = {parameter.kind for parameter in parameters}
        self._positional = [p.name for p in parameters if p.kind in _POSITIONAL]
        self._dynamic = [name for name in self._positional if name not in static]

    def check_names(self, names: Sequence[str], option: str) -> None:
        """Checks that names given to an option are parameters.

        Raises:
            ValueError: If one is not.
        """
        known = self.signature.parameters
        takes_any = inspect.Parameter.VAR_KEYWORD in self._kinds
        for name in () if takes_any else names:
            if name not in known:
                raise ValueError(
                    f"{option} names {name!r}, which the function does not take."
                    f"{suggest(name, known)} Its parameters: {list(known)}."
                )

    def check_placements(self, placements: Any, option: str) -> None:
        """Checks what can be checked before the first call.

        Raises:
            ValueError: If a mapping names no parameter.
            PlacementTreeError: If there are more entries than arguments, or it is
                nothing that places.
        """
        if isinstance(placements, Mapping):
            self.check_names(list(placements), option)
            static = [name for name in placements if name in self.static]
            if static:
                raise ValueError(
                    f"{option} places {static}, but static arguments are no arrays. "
                    f"Leave them out; dynamic are {self._dynamic}."
                )
        elif isinstance(placements, tuple | list):
            takes_any = inspect.Parameter.VAR_POSITIONAL in self._kinds
            if len(placements) > len(self._dynamic) and not takes_any:
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
        """The name of each value of a call, those given by keyword last.

        Raises:
            TypeError: If the function cannot be called like that.
        """
        self.signature.bind(*range(num_positional), **dict.fromkeys(keywords))
        extra = range(num_positional - len(self._positional))
        names = [*self._positional[:num_positional], *(f"args_{i}" for i in extra)]
        return (*names, *keywords)

    def placement_of(self, name: str, placements: Any, option: str) -> Any:
        """What an option says about one dynamic argument.

        Raises:
            PlacementTreeError: If a tuple has no entry for it.
        """
        if is_placeable(placements):
            return placements
        if isinstance(placements, Mapping):
            extra = self.signature.parameters.get(name) is None
            fallback = self._starred(name) if extra else None
            return placements.get(name, placements.get(fallback))
        index = self._index(name)
        if index is None:
            return None
        if index >= len(placements):
            raise PlacementTreeError(
                f"{option} has {len(placements)} entries, none for the argument "
                f"`{name}`. Give one for each of {self._dynamic}, in order, None to "
                "leave it to the compiler, or a mapping by name."
            )
        return placements[index]

    def _index(self, name: str) -> int | None:
        if name in self._dynamic:
            return self._dynamic.index(name)
        if name not in self.signature.parameters and name.startswith("args_"):
            return len(self._dynamic) + int(name.removeprefix("args_"))
        return None

    def _starred(self, name: str) -> str | None:
        """Name of the ``*args`` or ``**kwargs`` that an extra argument goes to."""
        kind = (
            inspect.Parameter.VAR_POSITIONAL
            if name.startswith("args_")
            else inspect.Parameter.VAR_KEYWORD
        )
        found = [p.name for p in self.signature.parameters.values() if p.kind is kind]
        return found[0] if found else None

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """The dynamic values of a call, and the static ones with where they stand."""
        at = [i for i, name in enumerate(self._positional) if name in self.static]
        static = [(i, args[i]) for i in at if i < len(args)]
        static += [(name, kwargs[name]) for name in self.static if name in kwargs]
        args = tuple(x for i, x in enumerate(args) if i not in at)
        kwargs = {name: x for name, x in kwargs.items() if name not in self.static}
        return args, kwargs, tuple(static)


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
    of ``jax.jit`` with the shardings that the rules resolve to. Wherever a sharding may
    stand there may be rules, a ``PartitionSpec``, a ``NamedSharding``, or ``None``,
    which leaves the choice to the compiler; each holds for everything below its place
    in the tree. Shapes or structures that are new are resolved anew.

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
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function."""
        program, values, _ = self._find(args, kwargs)
        return program(*values)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The method of an instance, which is then the first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program of a call, traced and lowered, to be inspected or compiled.

        Args:
            args: As in a call; ``jax.ShapeDtypeStruct`` may stand for an array.
            kwargs: The same; the compiled program is called with the same keywords.
        """
        program, values, tree = self._find(args, kwargs)
        lowered = program.lower(*values)
        # Leaves by position, keywords sorted, are in the order of (args, kwargs).
        lowered.args_info = tree.unflatten(jax.tree.leaves(lowered.args_info))
        return lowered

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The jaxpr of a call; it takes keywords by position, sorted, after ``args``.

        Args:
            args: As in `lower`.
            kwargs: The same.
        """
        program, values, _ = self._find(args, kwargs)
        return program.trace(*values)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """What a call returns, as ``jax.ShapeDtypeStruct``; nothing is compiled.

        Args:
            args: As in `lower`.
            kwargs: The same.
        """
        program, values, _ = self._find(args, kwargs)
        return program.eval_shape(*values)

    def clear_cache(self) -> None:
        """Drops every program: the next call resolves, traces and compiles again."""
        with self._lock:
            for program in self._programs.values():
                program.clear_cache()
            self._programs.clear()

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Program, tuple[Any, ...], Any]:
        """The program of a call, its values by position, and their dynamic tree."""
        dynamic, static = (args, kwargs), ()
        if self._arguments.static:
            *dynamic, static = self._arguments.split(args, kwargs)
        leaves, tree = jax.tree.flatten(tuple(dynamic))
        signature = tree, tuple([_aval(x) for x in leaves]), static
        # ``jax.jit`` refuses keywords where it is given shardings.
        keywords = tuple(sorted(kwargs))
        values = (*args, *(kwargs[name] for name in keywords)) if kwargs else args
        try:
            program = self._programs.get(signature)
        except TypeError as error:
            raise ValueError(
                f"A static argument among {self._arguments.static} cannot be hashed: "
                f"{error}. Static values are hashable: functions, strings, numbers, "
                "tuples of these, frozen dataclasses."
            ) from None
        if program is None:
            # Two threads with a new signature trace it once.
            with self._lock:
                program = self._programs.get(signature)
                if program is None:
                    program = self._resolve(values, len(args), keywords)
                    self._programs[signature] = program
        return program, values, tree

    def _resolve(
        self, values: tuple[Any, ...], num_positional: int, keywords: tuple[str, ...]
    ) -> Program:
        names = self._arguments.names(num_positional, keywords)
        static = [i for i, name in enumerate(names) if name in self._arguments.static]
        donated = [i for i, name in enumerate(names) if name in self._donated]
        in_shardings = tuple(
            self._in_sharding(name, value)
            for i, (name, value) in enumerate(zip(names, values, strict=True))
            if i not in static
        )
        traced = self._traced(names, num_positional)
        jit = functools.partial(jax.jit, static_argnums=static, donate_argnums=donated)
        placed = jax.tree.leaves(in_shardings)
        options: dict[str, Any] = {"in_shardings": in_shardings} if placed else {}
        out = self._out
        if has_rules(out):
            # JAX keeps the trace by function and arguments: the program takes this one.
            shapes = jit(traced).trace(*values).out_info
            leaves = resolve_leaves(out, shapes, self._layout.mesh, "output")
            out = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
        return jit(traced, out_shardings=out, **options)

    def _in_sharding(self, name: str, value: Any) -> Any:
        """Shardings of one argument: a whole tree by rules, else the prefix as is."""
        entry = self._arguments.placement_of(name, self._in, "in_shardings")
        leaves = resolve_leaves(entry, value, self._layout.mesh, name)
        if not has_rules(entry):
            return entry
        return jax.tree.unflatten(jax.tree.structure(value), leaves)

    def _traced(
        self, names: tuple[str, ...], num_positional: int
    ) -> Callable[..., Any]:
        """The function by position alone, as it is traced: placed, its mesh active."""
        layout, mesh = self._layout, self._layout.mesh
        checks_outputs = not has_rules(self._out)
        placements = self._in, self._out, self._constraints
        names_devices = bool(jax.tree.leaves(placements))

        def traced(*values: Any) -> Any:
            with (
                bound_annotations(layout, self._annotations),
                jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            ):
                placed = list(map(self._constrained, names, values))
                keywords = zip(
                    names[num_positional:], placed[num_positional:], strict=True
                )
                out = self._fn(*placed[:num_positional], **dict(keywords))
            if not names_devices:
                out = _on_devices(out, mesh)
            if checks_outputs:
                resolve_leaves(self._out, out, mesh, "output")
            return out

        kind = inspect.Parameter.POSITIONAL_ONLY
        parameters = [inspect.Parameter(name, kind) for name in names]
        traced.__name__ = getattr(self._fn, "__name__", type(self._fn).__name__)
        traced.__signature__ = inspect.Signature(parameters)
        return traced

    def _constrained(self, name: str, value: Any) -> Any:
        if name in self._arguments.static:
            return value
        entry = self._arguments.placement_of(name, self._constraints, "constrain_args")
        if entry is None:
            return value
        return constrain_tree(value, entry, self._layout.mesh, name)


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
    # Arrays and tracers have one; making it costs more than the rest of a look-up.
    aval: Any = getattr(leaf, "aval", None)
    if aval is None:
        try:
            aval = shaped_abstractify(leaf)
        except TypeError:
            return type(leaf)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
