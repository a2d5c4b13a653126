"""Jaxprs as programs to cut: which equations an output needs, and calls inlined."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
"""Primitives that only call a jaxpr, with the parameter that holds it."""


def is_jit(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is a call under ``jax.jit``."""
    return eqn.primitive.name in ("jit", "pjit")


ClosedJaxpr: Any = vars(jex)["ClosedJaxpr"]
"""In the types of jax 0.12 it is gone, in the module it is not."""

Env = Mapping[jex.Var, Any]


def trace(function: Callable, *args: Any) -> tuple[jex.Jaxpr, list, Any]:
    """The jaxpr of a function, its constants, and the tree of its outputs' shapes."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return closed.jaxpr, list(closed.consts), shapes


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
    kept = []
    for eqn in reversed(eqns):
        if any(var in wanted for var in eqn.outvars):
            kept.append(eqn)
            wanted.update(v for v in variables_in(eqn.invars) if v not in given)
    return kept[::-1]


def warn_of_effects(jaxpr: jex.Jaxpr) -> None:
    """Warns of calls that are lost where only what is `needed` is run.

    Warns:
        UserWarning: If the program prints or calls back into Python.
    """
    if jaxpr.effects:
        warnings.warn(
            "The loss, or a block of its Stack, prints or calls back into Python "
            "(jax.debug.print, callbacks). Under a Pipeline, and with FSDP's prefetch, "
            "only what the outputs need is run, in another order and partly twice: "
            "these calls are left out. Debug with DataParallel(1): the numbers are the "
            "same.",
            stacklevel=2,
        )


def inputs_of(
    eqns: Sequence[jex.JaxprEqn], outputs: Iterable[Any] = ()
) -> list[jex.Var]:
    """The variables that equations, and outputs beside them, take from outside."""
    made = {var for eqn in eqns for var in eqn.outvars}
    used = [v for eqn in eqns for v in variables_in(eqn.invars)]
    used += variables_in(outputs)
    return list(dict.fromkeys(v for v in used if v not in made))


def run(eqns: Sequence[jex.JaxprEqn], outputs: Sequence[Any], env: Env) -> list:
    """Evaluates equations on values; differentiable and traceable as JAX code is."""
    invars = inputs_of(eqns, outputs)
    effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns))
    jaxpr = jex.Jaxpr(
        constvars=[],
        invars=invars,
        outvars=list(outputs),
        eqns=list(eqns),
        effects=effects,
        debug_info=_debug_info(),
    )
    function = jex.jaxpr_as_fun(ClosedJaxpr(jaxpr, []))
    return list(function(*(env[var] for var in invars)))


def _debug_info() -> jex.DebugInfo:
    return jex.DebugInfo("jit", "part of a loss", None, None)


def inline(
    jaxpr: jex.Jaxpr, wanted: Callable[[jex.JaxprEqn], bool] = lambda eqn: True
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
            inner = _called(eqn) if wanted(eqn) else None
            if inner is not None:
                scope = dict(zip(inner.invars, map(rename, eqn.invars), strict=True))
                emit(inner, scope)
                results = [
                    atom if isinstance(atom, jex.Literal) else scope[atom]
                    for atom in inner.outvars
                ]
                names.update(zip(eqn.outvars, results, strict=True))
                continue
            outvars = [
                v if isinstance(v, jex.DropVar) else fresh(v.aval) for v in eqn.outvars
            ]
            names.update(zip(eqn.outvars, outvars, strict=True))
            invars = [rename(atom) for atom in eqn.invars]
            eqns.append(eqn.replace(invars=invars, outvars=outvars))

    names: dict[jex.Var, Any] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    emit(jaxpr, names)
    outvars = [v if isinstance(v, jex.Literal) else names[v] for v in jaxpr.outvars]
    # Not a new Jaxpr: that of jax 0.12 would count its constants among the inputs.
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=_debug_info())


def _called(eqn: jex.JaxprEqn) -> jex.Jaxpr | None:
    """The jaxpr that a plain call calls, if it closes over no constant."""
    key = CALLS.get(eqn.primitive.name)
    inner = None if key is None else eqn.params[key]
    if inner is None or getattr(inner, "consts", None):
        return None
    inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    return None if inner.constvars else inner


def derived(eqns: Sequence[jex.JaxprEqn], given: Iterable[jex.Var]) -> set[jex.Var]:
    """The variables that come from ``given`` alone, themselves among them."""
    found = set(given)
    for eqn in eqns:
        if set(variables_in(eqn.invars)) <= found:
            found.update(variables_in(eqn.outvars))
    return found


def walk(jaxpr: jex.Jaxpr) -> Iterator[tuple[jex.JaxprEqn, tuple[str, ...]]]:
    """Every equation, nested ones too, with the primitives that enclose it."""
    for eqn in jaxpr.eqns:
        yield eqn, ()
        for inner in subjaxprs(eqn):
            for found, path in walk(inner):
                yield found, (eqn.primitive.name, *path)
