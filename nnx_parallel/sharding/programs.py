"""Programs behind `sharded_jit`: placements resolved once for each signature.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.sharding.annotations import bound_annotations
from nnx_parallel.sharding.arguments import Arguments
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.trees import (
    constrain_tree,
    has_rules,
    is_placeable,
    resolve_leaves,
)

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
