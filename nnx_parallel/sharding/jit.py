"""`sharded_jit`: ``jax.jit`` for which rules may stand where shardings do."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.sharding.arguments import Arguments
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.programs import CallForm, Task
from nnx_parallel.sharding.trees import (
    HasLayout,
    checked_axes,
    is_placeable,
    layout_of,
)


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
            return NamedSharding(mesh, checked_axes(entry, mesh, option))
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
