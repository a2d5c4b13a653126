"""`sharded_jit`: ``jax.jit`` for which rules may stand where shardings do.

Arguments of a function: their names, and which placement belongs to which.

Programs behind `sharded_jit`: placements resolved once for each signature.

Rules need shapes, which are known at a call. So each way of calling the function has a
`CallForm`, which resolves them once per signature (structure, shapes, dtypes, static
values) into a ``jax.jit`` with plain shardings; that finds its compiled program by
itself from then on. A call of another signature is noticed where JAX starts to trace,
so that known ones pay for no look-up. Rules for outputs are resolved from the trace
that the compiler takes as well: it is the same function under both.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
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


_MANY_CHANGES = 16
"""To try a program and find that it is another's turn costs about a millisecond."""

Program = Any  # what `jax.jit` returns
Signature = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is compiled, and where everything lives."""

    fn: Callable[..., Any]
    layout: Layout
    arguments: Arguments
    in_placements: Any
    out_placements: Any
    constraints: Any
    annotations: Mapping[str, Any]
    donated: tuple[str, ...]

    @property
    def names_devices(self) -> bool:
        """Whether any placement tells the compiler which devices the mesh has."""
        placements = self.in_placements, self.out_placements, self.constraints
        return bool(jax.tree.leaves(placements))


class _UnknownSignatureError(Exception):
    """A program was called with a signature that it was not resolved for."""


class CallForm:
    """One way to call the function: so many values by position, these by keyword.

    Attributes:
        latest: The program of the latest call. It refuses other signatures when JAX
            traces it for them, so it may be tried first; ``None`` once calls have
            changed between programs so often that trying costs more than looking up.
    """

    def __init__(
        self,
        task: Task,
        num_positional: int,
        keywords: tuple[str, ...],
        lock: threading.RLock,
    ) -> None:
        self.latest: Program | None = None
        self._changes = 0
        arguments = task.arguments
        self._task, self._lock = task, lock
        self._num_positional, self._keywords = num_positional, keywords
        self._names = arguments.names(num_positional, keywords)
        self._static = self._indices(arguments.static)
        self._dynamic = [
            i for i in range(len(self._names)) if i not in set(self._static)
        ]
        self._known: dict[Signature, Program] = {}
        self._programs: dict[Any, tuple[Program, set[Signature]]] = {}

    def _indices(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self._names) if name in set(names))

    def runs(self, values: tuple[Any, ...], program: Program) -> bool:
        """Whether values like these are resolved to run in a program."""
        return self._known.get(self._signature(values)) is program

    def program(self, values: tuple[Any, ...]) -> Program:
        """The program for values like these, its placements resolved."""
        signature = self._signature(values)
        if signature not in self._known:
            with self._lock:
                if signature not in self._known:
                    self._known[signature] = self._resolve(values, signature)
        program = self._known[signature]
        if program is not self.latest:
            self._changes += 1
            self.latest = program if self._changes < _MANY_CHANGES else None
        return program

    def _signature(self, values: tuple[Any, ...]) -> Signature:
        leaves, treedef = jax.tree.flatten([values[i] for i in self._dynamic])
        static = tuple(values[i] for i in self._static)
        try:
            hash(static)
        except TypeError as error:
            raise ValueError(
                f"A static argument among {self._task.arguments.static} cannot be "
                f"hashed: {error}. Static values are hashable: functions, strings, "
                "numbers, tuples of these, frozen dataclasses."
            ) from None
        return treedef, tuple(map(_kind, leaves)), static

    def _resolve(self, values: tuple[Any, ...], signature: Signature) -> Program:
        in_shardings = tuple(self._in_sharding(i, values[i]) for i in self._dynamic)
        out_by_rules = has_rules(self._task.out_placements)
        leaves, treedef = jax.tree.flatten(in_shardings, is_leaf=is_placeable)
        key = signature if out_by_rules else (treedef, tuple(leaves))
        if key not in self._programs:
            admitted = {signature}
            traced = self._traced(admitted)
            program = self._compiled(traced, values, in_shardings, out_by_rules)
            self._programs[key] = program, admitted
        program, admitted = self._programs[key]
        admitted.add(signature)
        return program

    def _in_sharding(self, index: int, value: Any) -> Any:
        """Shardings of one argument: a whole tree by rules, else the prefix as is."""
        name = self._names[index]
        task = self._task
        entry = task.arguments.placement_of(name, task.in_placements, "in_shardings")
        leaves = resolve_leaves(entry, value, task.layout.mesh, name)
        if not has_rules(entry):
            return entry
        return jax.tree.unflatten(jax.tree.structure(value), leaves)

    def _compiled(
        self,
        traced: Callable[..., Any],
        values: tuple[Any, ...],
        in_shardings: tuple[Any, ...],
        out_by_rules: bool,
    ) -> Program:
        jit = functools.partial(
            jax.jit,
            static_argnums=self._static,
            donate_argnums=self._indices(self._task.donated),
        )
        placed = jax.tree.leaves(in_shardings)
        options: dict[str, Any] = {"in_shardings": in_shardings} if placed else {}
        out = self._task.out_placements
        if out_by_rules:
            # JAX keeps the trace by function and arguments: the program takes this one.
            shapes = jit(traced).trace(*values).out_info
            leaves = resolve_leaves(out, shapes, self._task.layout.mesh, "output")
            out = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
        return jit(traced, out_shardings=out, **options)

    def _traced(self, admitted: set[Signature]) -> Callable[..., Any]:
        task, mesh = self._task, self._task.layout.mesh
        checks_outputs = not has_rules(task.out_placements)

        def traced(*values: Any) -> Any:
            if self._signature(values) not in admitted:
                raise _UnknownSignatureError
            with (
                bound_annotations(task.layout, task.annotations),
                jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            ):
                values = self._constrained(values)
                by_name = dict(
                    zip(self._keywords, values[self._num_positional :], strict=True)
                )
                out = task.fn(*values[: self._num_positional], **by_name)
            if not task.names_devices:
                out = _on_devices(out, mesh)
            if checks_outputs:
                resolve_leaves(task.out_placements, out, mesh, "output")
            return out

        kind = inspect.Parameter.POSITIONAL_ONLY
        parameters = [inspect.Parameter(name, kind) for name in self._names]
        traced.__name__ = getattr(task.fn, "__name__", type(task.fn).__name__)
        traced.__signature__ = inspect.Signature(parameters)
        return traced

    def _constrained(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        task, constrained = self._task, list(values)
        for i in self._dynamic:
            name = self._names[i]
            entry = task.arguments.placement_of(
                name, task.constraints, "constrain_args"
            )
            if entry is not None:
                mesh = task.layout.mesh
                constrained[i] = constrain_tree(values[i], entry, mesh, name)
        return tuple(constrained)


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


def _kind(leaf: Any) -> Any:
    """Shape and dtype of an array, in JAX's own dtypes; the type of anything else."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        return type(leaf)
    return aval.shape, aval.dtype


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
        A function that is called like ``fn`` and has ``lower(*args, **kwargs)``.

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
    return ShardedFunction(_task(fn, layout_of(mesh), **options))  # pyright: ignore[reportArgumentType]


def _task(fn: Callable[..., Any], layout: Layout, **options: Any) -> Task:
    """What to compile, its options checked as far as they can be before a call."""
    arguments = Arguments(fn, options["static_argnames"])
    for option in ("static_argnames", "donate_argnames"):
        arguments.check_names(options[option], option)
    for option in ("in_shardings", "constrain_args"):
        arguments.check_placements(options[option], option)
    return Task(
        fn=fn,
        layout=layout,
        arguments=arguments,
        in_placements=_on_mesh(options["in_shardings"], layout.mesh, "in_shardings"),
        out_placements=_on_mesh(options["out_shardings"], layout.mesh, "out_shardings"),
        constraints=_on_mesh(options["constrain_args"], layout.mesh, "constrain_args"),
        annotations=_on_mesh(
            dict(options["annotations"] or {}), layout.mesh, "annotations"
        ),
        donated=options["donate_argnames"],
    )


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


class ShardedFunction:
    """A function compiled by `sharded_jit`; call it as the function itself."""

    def __init__(self, task: Task) -> None:
        functools.update_wrapper(self, task.fn)
        self._task = task
        self._forms: dict[Any, CallForm] = {}
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function."""
        if kwargs:
            names = sorted(kwargs)
            values = (*args, *(kwargs[name] for name in names))
            form = self._forms.get((len(args), *names))
        else:
            names, values, form = (), args, self._forms.get(len(args))
        if form is None:
            form = self._form(len(args), *names)
        elif (program := form.latest) is not None:
            try:
                return program(*values)
            except Exception:
                if form.runs(values, program):
                    raise
        return form.program(values)(*values)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program of a call, traced and lowered, to be inspected or compiled.

        Args:
            args: As in a call; ``jax.ShapeDtypeStruct`` may stand for an array.
            kwargs: The same.
        """
        names = sorted(kwargs)
        values = (*args, *(kwargs[name] for name in names))
        return self._form(len(args), *names).program(values).lower(*values)

    def _form(self, num_positional: int, *keywords: str) -> CallForm:
        """The form of a call, made if it is the first."""
        key = (num_positional, *keywords) if keywords else num_positional
        with self._lock:
            if key not in self._forms:
                form = CallForm(self._task, num_positional, keywords, self._lock)
                self._forms[key] = form
            return self._forms[key]
