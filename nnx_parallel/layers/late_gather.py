"""Parameters that a loss scans by itself, gathered one layer at a time.

A model scanned by Flax or JAX hands the parameters of all its layers to one loop. Here
the loss is traced, and a stored parameter passes through casts, calls and loops as it
is, until an equation computes with it: there it is gathered, in the body of a loop one
layer of it. Only places change, never values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

from nnx_parallel.layers.jaxprs import (
    ClosedJaxpr,
    Eqns,
    bind,
    inputs_of,
    run,
    trace,
    variables_in,
)
from nnx_parallel.sharding.constrain import saves_all_but_gathers, use_params
from nnx_parallel.sharding.model import Path, flatten
from nnx_parallel.sharding.placement import Placement

Places = dict[jex.Var, Placement]
"""Where values live that are not gathered yet."""


def gather_late(
    function: Callable, places: Mapping[Path, Placement], *, is_kept: bool = False
) -> Callable:
    """A function of ``(params, variables, *rest)`` that gathers where it computes.

    The arrays at ``places`` are given as they are stored. What is gathered outside of
    loops is gathered again for the backward pass, unless it ``is_kept``.
    """
    if not places:
        return function

    def gathering(params: dict, variables: dict, *rest: Any) -> Any:
        traced = trace(function, params, variables, *rest, inlined=_is_inlined)
        env = traced.consts | bind(traced.inputs, (params, variables, *rest))
        by_path = flatten(traced.inputs[0]) | flatten(traced.inputs[1])
        stored = {by_path[path]: place for path, place in places.items()}
        outs, tree = jax.tree.flatten(traced.outputs)
        level = _Level(keeps=is_kept, prevent_cse=True)
        return tree.unflatten(level.run(traced.eqns, outs, env, stored))

    return gathering


def _is_inlined(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name in ("jit", "closed_call")


@dataclass(frozen=True)
class _Level:
    """How the equations of a loss, of a loop's body, or of a checkpoint are run."""

    keeps: bool  # leaves to others what the backward pass keeps
    prevent_cse: bool  # as in `jax.checkpoint`

    def run(self, eqns: Eqns, outs: Sequence, env: dict, places: Places) -> list:
        """The outputs; ``env`` has the values of the inputs."""
        env, places, plain = dict(env), dict(places), []
        for i, eqn in enumerate(eqns):
            takes = not places.keys().isdisjoint(variables_in(eqn.invars))
            inner = _RUNNERS.get(eqn.primitive.name) if takes else None
            if inner is None:
                plain.append(eqn)
                continue
            self._compute(plain, inputs_of(eqns[i:], outs), env, places)
            plain = []
            passed = {v: places[v] for v in variables_in(eqn.invars) if v in places}
            found, still = inner(eqn, env, passed)
            env.update(zip(eqn.outvars, found, strict=True))
            places.update(still)
        self._compute(plain, variables_in(outs), env, places)
        return [_read(atom, env) for atom in outs]

    def _compute(
        self, eqns: Eqns, later: Sequence[jex.Var], env: dict, places: Places
    ) -> None:
        """Adds the values of ``eqns`` that are used later."""
        if not eqns:
            return
        taken = inputs_of(eqns)
        stored = [v for v in taken if v in places]
        made = {v for eqn in eqns for v in eqn.outvars}
        wanted = [v for v in later if v in made]

        def compute(values: list) -> list:
            known = dict(zip(taken, values, strict=True))
            gathered = use_params({v: known[v] for v in stored}, places)
            return run(eqns, wanted, known | gathered)

        # Gathered parameters are never kept: they would be those of all layers.
        if stored and not self.keeps:
            policy, prevent_cse = saves_all_but_gathers, self.prevent_cse
            compute = jax.checkpoint(compute, policy=policy, prevent_cse=prevent_cse)
        env.update(zip(wanted, compute([env[v] for v in taken]), strict=True))


def _read(atom: Any, known: Mapping[jex.Var, Any]) -> Any:
    """An atom's value; a literal has its own."""
    return atom.val if isinstance(atom, jex.Literal) else known.get(atom)


def _run_cast(eqn: jex.JaxprEqn, env: dict, places: Places) -> tuple[list, Places]:
    # Cast before it is gathered: half the bytes in bfloat16.
    (place,), (out,) = places.values(), eqn.outvars
    return run([eqn], [out], env), {out: place}


def _run_checkpoint(
    eqn: jex.JaxprEqn, env: dict, places: Places
) -> tuple[list, Places]:
    policy = eqn.params["policy"]

    def keeps(*args: Any, **params: Any) -> Any:
        return saves_all_but_gathers(*args, **params) and policy(*args, **params)

    jaxpr = ClosedJaxpr(next(jex.jaxprs_in_params(eqn.params)), [])
    # With the policy of the model, and gathered within: so never kept.
    body = jax.checkpoint(
        _body(jaxpr, _inner(eqn, places), _Level(keeps=True, prevent_cse=False)),
        policy=policy and keeps,
        prevent_cse=eqn.params["prevent_cse"],
    )
    return body(*(_read(atom, env) for atom in eqn.invars)), {}


def _run_scan(eqn: jex.JaxprEqn, env: dict, places: Places) -> tuple[list, Places]:
    body = eqn.params["jaxpr"]
    within: Any = next(jex.jaxprs_in_params(eqn.params)).invars
    pairs: Any = zip(eqn.invars, within, strict=True)
    ranks = [(v, v.aval.ndim > w.aval.ndim) for v, w in pairs]
    # A slice has one dim less; what all iterations share is gathered once, before.
    whole = {v for v, is_slice in ranks if not isinstance(v, jex.Literal) | is_slice}
    sliced = {v: place.of_layer() for v, place in places.items() if v not in whole}
    shared = {v: place for v, place in places.items() if v not in sliced}
    env = env | use_params({v: env[v] for v in shared}, shared)
    level = _Level(keeps=False, prevent_cse=False)
    body = jax.make_jaxpr(_body(body, _inner(eqn, sliced), level))(*map(_shape, within))
    # All else of the loop as it was: what is constant, carried, or scanned.
    eqn = eqn.replace(params=eqn.params | {"jaxpr": body})
    return run([eqn], eqn.outvars, env), {}


def _inner(eqn: jex.JaxprEqn, places: Places) -> list[Placement | None]:
    """The placement of each input of an equation that is not gathered yet."""
    return [None if isinstance(v, jex.Literal) else places.get(v) for v in eqn.invars]


def _body(jaxpr: Any, inner: list[Placement | None], level: _Level) -> Callable:
    """A jaxpr as a function of its inputs, some of which are placed as ``inner``."""
    function = jex.jaxpr_as_fun(jaxpr)
    traced = trace(function, *map(_shape, jaxpr.in_avals), inlined=_is_inlined)
    places = {v: p for v, p in zip(traced.inputs, inner, strict=True) if p}

    def body(*values: Any) -> list:
        env = traced.consts | bind(traced.inputs, values)
        return level.run(traced.eqns, list(traced.outputs), env, places)

    return body


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    aval = getattr(value, "aval", value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


_RUNNERS = {
    "convert_element_type": _run_cast,
    # Of what `nnx.jit` inside the loss hands back: it counts as assigned, and is whole
    # no more than it was.
    "sharding_constraint": _run_cast,
    "remat2": _run_checkpoint,
    "checkpoint": _run_checkpoint,
    "scan": _run_scan,
}
