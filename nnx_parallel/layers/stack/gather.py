"""Parameters that a loss scans by itself, gathered one layer at a time.

A model scanned by Flax or JAX hands the parameters of all its layers to one loop. Here
the loss is traced, and a stored parameter passes through casts, calls and loops
unchanged until an equation computes with it. It is gathered there; in the body of a
loop, only one layer is gathered. Only places change, never values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

from nnx_parallel.programs import (
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
"""Placements of the values that are not gathered yet."""


def gather_late(
    function: Callable, places: Mapping[Path, Placement], *, is_kept: bool = False
) -> Callable:
    """A function of ``(params, variables, *rest)`` that gathers parameters on use.

    The arrays at ``places`` are passed as they are stored. Arrays that are gathered
    outside of loops are gathered again for the backward pass, unless ``is_kept``.
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
    """Settings to run the equations of a loss, of a loop's body, or of a checkpoint."""

    keeps: bool  # True: others choose the values that the backward pass keeps
    prevent_cse: bool  # the argument of `jax.checkpoint`

    def run(self, eqns: Eqns, outs: Sequence, env: dict, places: Places) -> list:
        """Computes the outputs; ``env`` has the values of the inputs."""
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
        """Computes ``eqns`` and adds the values that are used later."""
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

        # Gathered parameters are never kept, because all layers would add up.
        if stored and not self.keeps:
            policy, prevent_cse = saves_all_but_gathers, self.prevent_cse
            compute = jax.checkpoint(compute, policy=policy, prevent_cse=prevent_cse)
        env.update(zip(wanted, compute([env[v] for v in taken]), strict=True))


def _read(atom: Any, known: Mapping[jex.Var, Any]) -> Any:
    """The value of an atom, which is a variable or a literal."""
    return atom.val if isinstance(atom, jex.Literal) else known.get(atom)


def _run_cast(eqn: jex.JaxprEqn, env: dict, places: Places) -> tuple[list, Places]:
    # The cast comes before the gather: half the bytes in bfloat16.
    (place,), (out,) = places.values(), eqn.outvars
    return run([eqn], [out], env), {out: place}


def _run_checkpoint(
    eqn: jex.JaxprEqn, env: dict, places: Places
) -> tuple[list, Places]:
    policy = eqn.params["policy"]

    def keeps(*args: Any, **params: Any) -> Any:
        return saves_all_but_gathers(*args, **params) and policy(*args, **params)

    jaxpr = ClosedJaxpr(next(jex.jaxprs_in_params(eqn.params)), [])
    # The model's policy applies, and the gather is inside: so its result is never kept.
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
    # A slice has one dim less; values that all iterations share are gathered once,
    # before the loop.
    whole = {v for v, is_slice in ranks if not isinstance(v, jex.Literal) | is_slice}
    sliced = {v: place.of_layer() for v, place in places.items() if v not in whole}
    shared = {v: place for v, place in places.items() if v not in sliced}
    env = env | use_params({v: env[v] for v in shared}, shared)
    level = _Level(keeps=False, prevent_cse=False)
    body = jax.make_jaxpr(_body(body, _inner(eqn, sliced), level))(*map(_shape, within))
    # The rest of the loop does not change: constants, carried and scanned values.
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
    # It constrains the values that `nnx.jit` inside the loss returns: they count as
    # assigned, and are not gathered by it.
    "sharding_constraint": _run_cast,
    "remat2": _run_checkpoint,
    "checkpoint": _run_checkpoint,
    "scan": _run_scan,
}
