"""Jaxprs as programs to cut: which equations an output needs, and calls inlined."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

# In the types of jax 0.12 it is gone, in the module it is not.
ClosedJaxpr: Any = vars(jex)["ClosedJaxpr"]

Env = Mapping[jex.Var, Any]


def is_jit(eqn: jex.JaxprEqn) -> bool:
    """True if an equation is a call under ``jax.jit``."""
    return eqn.primitive.name == "jit"


def is_call(eqn: jex.JaxprEqn) -> bool:
    """True if an equation only calls a jaxpr (``remat2`` is ``jax.checkpoint``)."""
    return eqn.primitive.name in ("jit", "closed_call", "remat2")


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """A function of arrays as equations, any of whose values can be computed alone.

    Attributes:
        eqns: The equations.
        consts: The arrays that the function closes over, by variable.
        inputs: The arguments, with a variable in place of each array.
        outputs: The results, with a variable or literal in place of each array.
        shapes: The results, with a `jax.ShapeDtypeStruct` in place of each array.
        effects: Effects of the whole, such as prints.
    """

    eqns: Sequence[jex.JaxprEqn]
    consts: dict[jex.Var, Any]
    inputs: tuple
    outputs: Any
    shapes: Any
    effects: Collection[Any]

    def __call__(self, *args: Any) -> Any:
        """The results, from every equation."""
        atoms, tree = jax.tree.flatten(self.outputs)
        env = self.consts | bind(self.inputs, args)
        return jax.tree.unflatten(tree, run(self.eqns, atoms, env))

    def evaluate(self, wanted: Any, known: Env) -> Any:
        """A tree of values from known ones, by the equations that it needs alone."""
        atoms, tree = jax.tree.flatten(wanted)
        env = self.consts | dict(known)
        eqns = needed(self.eqns, atoms, env)
        return jax.tree.unflatten(tree, run(eqns, atoms, env))


def trace(
    function: Callable,
    *args: Any,
    inlined: Callable[[jex.JaxprEqn], bool] = lambda eqn: False,
) -> TracedFunction:
    """Traces a function of pytrees of arrays.

    Args:
        function: The function.
        args: Its arguments, or their shapes.
        inlined: Which calls to replace by what they call.
    """
    # Avals, not values: arguments may be shapes, and none is computed with.
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr = inline(closed.jaxpr, inlined)
    return TracedFunction(
        eqns=jaxpr.eqns,
        consts=dict(zip(jaxpr.constvars, closed.consts, strict=True)),
        inputs=jax.tree.unflatten(jax.tree.structure(args), jaxpr.invars),
        outputs=jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.outvars),
        shapes=shapes,
        effects=jaxpr.effects,
    )


def bind(variables: Any, values: Any) -> dict[jex.Var, Any]:
    """The values of two trees of one structure by the variables in their places."""
    leaves = jax.tree.leaves(variables), jax.tree.leaves(values)
    return dict(zip(*leaves, strict=True))


def subjaxprs(eqn: jex.JaxprEqn) -> list[jex.Jaxpr]:
    """The jaxprs inside an equation."""
    found = jax.tree.leaves(
        list(eqn.params.values()),
        is_leaf=lambda x: isinstance(x, (jex.Jaxpr, ClosedJaxpr)),
    )
    return [
        x.jaxpr if isinstance(x, ClosedJaxpr) else x
        for x in found
        if isinstance(x, (jex.Jaxpr, ClosedJaxpr))
    ]


def walk(
    program: jex.Jaxpr | TracedFunction,
) -> Iterator[tuple[jex.JaxprEqn, tuple[str, ...]]]:
    """Every equation, nested ones too, with the primitives that enclose it."""
    for eqn in program.eqns:
        yield eqn, ()
        for inner in subjaxprs(eqn):
            for found, path in walk(inner):
                yield found, (eqn.primitive.name, *path)


def variables_in(atoms: Iterable[Any]) -> list[jex.Var]:
    """The variables among atoms, without literals."""
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]


def needed(
    eqns: Sequence[jex.JaxprEqn],
    outputs: Iterable[Any],
    given: Collection[jex.Var] = (),
) -> list[jex.JaxprEqn]:
    """The equations that outputs depend on, in order, where ``given`` are known."""
    wanted = set(variables_in(outputs)) - set(given)
    found = []
    # Backwards: an equation is used by later ones alone, so that one pass will do.
    for eqn in reversed(eqns):
        if any(var in wanted for var in eqn.outvars):
            found.append(eqn)
            wanted.update(v for v in variables_in(eqn.invars) if v not in given)
    return found[::-1]


def inputs_of(
    eqns: Sequence[jex.JaxprEqn], outputs: Iterable[Any] = ()
) -> list[jex.Var]:
    """The variables that equations, and outputs next to them, take from outside."""
    made = {var for eqn in eqns for var in eqn.outvars}
    used = [v for eqn in eqns for v in variables_in(eqn.invars)]
    used += variables_in(outputs)
    # In order: a set would give each process another program.
    return list(dict.fromkeys(v for v in used if v not in made))


def derived(eqns: Sequence[jex.JaxprEqn], given: Iterable[jex.Var]) -> set[jex.Var]:
    """The variables that come from ``given`` alone, themselves among them."""
    found = set(given)
    for eqn in eqns:
        # An equation without inputs, such as iota, comes from nothing else either.
        if set(variables_in(eqn.invars)) <= found:
            found.update(variables_in(eqn.outvars))
    return found


def warn_of_effects(traced: TracedFunction) -> None:
    """Warns of calls that are lost where only what is `needed` is run.

    Warns:
        UserWarning: If the program prints or calls back into Python.
    """
    if traced.effects:
        warnings.warn(
            "The loss, or a block of its Stack, prints or calls back into Python "
            "(jax.debug.print, callbacks). Under a Pipeline, and with FSDP's prefetch, "
            "only what the outputs need is run, in another order and partly twice: "
            "these calls are left out. Debug with DataParallel(1): the numbers are the "
            "same.",
            stacklevel=2,
        )


def run(eqns: Sequence[jex.JaxprEqn], outputs: Sequence[Any], env: Env) -> list:
    """Evaluates equations on values; differentiable and traceable as JAX code is."""
    # Only what is used: a jaxpr's inputs must be values of this trace, and a caller may
    # not know those of equations that are left out.
    invars = inputs_of(eqns, outputs)
    jaxpr = jex.Jaxpr(
        constvars=[],
        invars=invars,
        outvars=list(outputs),
        eqns=list(eqns),
        effects=frozenset[Any]().union(*(eqn.effects for eqn in eqns)),
        debug_info=_debug_info(),
    )
    function = jex.jaxpr_as_fun(ClosedJaxpr(jaxpr, []))
    return list(function(*(env[var] for var in invars)))


def _debug_info() -> jex.DebugInfo:
    return jex.DebugInfo("jit", "part of a loss", None, None)


def inline(
    jaxpr: jex.Jaxpr, wanted: Callable[[jex.JaxprEqn], bool] = is_call
) -> jex.Jaxpr:
    """The same program with calls replaced by the equations that they call.

    Args:
        jaxpr: The program.
        wanted: Which calls to replace.
    """
    fresh = jex.gensym()
    eqns: list[jex.JaxprEqn] = []

    def emit(body: jex.Jaxpr, names: dict[jex.Var, Any]) -> None:
        def rename(atom: Any) -> Any:
            return atom if isinstance(atom, jex.Literal) else names.get(atom, atom)

        for eqn in body.eqns:
            invars = [rename(atom) for atom in eqn.invars]
            inner = _called(eqn) if wanted(eqn) else None
            if inner is not None:
                scope = dict(zip(inner.invars, invars, strict=True))
                emit(inner, scope)
                outvars = [
                    atom if isinstance(atom, jex.Literal) else scope[atom]
                    for atom in inner.outvars
                ]
            else:
                # A jaxpr that is called twice has its variables once: each copy of its
                # equations needs variables of its own.
                outvars = [
                    v if isinstance(v, jex.DropVar) else fresh(v.aval)
                    for v in eqn.outvars
                ]
                eqns.append(eqn.replace(invars=invars, outvars=outvars))
            names.update(zip(eqn.outvars, outvars, strict=True))

    names: dict[jex.Var, Any] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    emit(jaxpr, names)
    outvars = [v if isinstance(v, jex.Literal) else names[v] for v in jaxpr.outvars]
    # Not a new Jaxpr: that of jax 0.12 would count its constants among the inputs.
    # docs/library-notes.md, "Tracing and compiling"
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=_debug_info())


def _called(eqn: jex.JaxprEqn) -> jex.Jaxpr | None:
    """The jaxpr that a plain call calls, if it closes over no constant."""
    if not is_call(eqn):
        return None
    inner = next(
        x for x in eqn.params.values() if isinstance(x, jex.Jaxpr | ClosedJaxpr)
    )
    if getattr(inner, "consts", None):
        return None
    inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    return None if inner.constvars else inner
