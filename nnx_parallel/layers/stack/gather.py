"""Gathers a parameter, which is stored in shards, wherever a loss uses it.

The loss is traced. A parameter stays in shards through casts, slices, calls and loops,
until an equation computes with it. The parameter is gathered just before that equation.
In the body of a loop over layers, only one layer is gathered. This changes the
placement of arrays, but never their values.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import PartitionSpec as P

from nnx_parallel.layers.eight_bit import QUANTISE
from nnx_parallel.programs import (
    ClosedJaxpr,
    Eqns,
    bind,
    carried_by_scan,
    inputs_of,
    names_in,
    run,
    trace,
    variables_in,
)
from nnx_parallel.sharding.constrain import (
    active_layout,
    keep_stored,
    saves_all_but_gathers,
    use_params,
)
from nnx_parallel.sharding.model import Path, flatten
from nnx_parallel.sharding.nnx_arrays import is_inexact
from nnx_parallel.sharding.placement import Placement
from nnx_parallel.sharding.specs import dim_axes, dividing_prefix, to_spec

Places = dict[jex.Var, Placement]
"""Placements of the values that are not gathered yet."""

_CHECKPOINTS = {"remat2", "checkpoint"}
_LOOPS = {"scan", "while", "cond"}

_keeping_all_else = partial(jax.checkpoint, policy=saves_all_but_gathers)
"""A checkpoint that keeps all values except gathered parameters."""


def gather_late(function: Callable, places: Mapping[Path, Placement]) -> Callable:
    """Wraps a function of ``(params, variables, *rest)`` to gather parameters at use.

    The backward pass gathers parameters again. All other values that the function's
    checkpoints do not drop are kept for it. There is one exception: if layers are
    stacked and have checkpoints, parameters outside of the layers are kept gathered.

    Args:
        function: The function, written for gathered parameters.
        places: The placements of the arrays that the new function takes in shards.
    """
    if not places:
        return function

    def gathering(params: dict, variables: dict, *rest: Any) -> Any:
        traced = trace(function, params, variables, *rest, inlined=_is_inlined)
        by_path = flatten(traced.inputs[0]) | flatten(traced.inputs[1])
        stored = {by_path[path]: place for path, place in places.items()}
        outs, tree = jax.tree.flatten(traced.outputs)
        names = names_in(traced.eqns)
        has_layers = any(place.is_stacked for place in places.values())
        layout = active_layout()
        prefetches = has_layers and layout is not None and layout.prefetches
        # A checkpoint around the function would replace the policies of the checkpoints
        # and the prefetching layers inside it (docs/library-notes.md, "Remat").
        is_wrapped = names.isdisjoint(_CHECKPOINTS) and not prefetches
        checkpoint = None if is_wrapped or has_layers else _keeping_all_else

        def compute(*args: Any) -> Any:
            env = traced.consts | bind(traced.inputs, args)
            return tree.unflatten(_run(traced.eqns, outs, env, stored, checkpoint))

        compute = _keeping_all_else(compute) if is_wrapped else compute
        return compute(params, variables, *rest)

    return gathering


def _is_inlined(eqn: jex.JaxprEqn) -> bool:
    is_call = eqn.primitive.name in ("jit", "closed_call")
    return is_call and not _quantises(eqn)


def _quantises(eqn: jex.JaxprEqn) -> bool:
    return eqn.params.get("name") == QUANTISE


def _run(
    eqns: Eqns,
    outs: Sequence,
    env: Mapping,
    places: Places,
    checkpoint: Callable | None,
) -> list:
    """Runs equations, and gathers parameters where they are used.

    Args:
        eqns: The equations.
        outs: Variables and literals. Their values are returned.
        env: The values of the inputs.
        places: The placements of inputs that are not gathered yet.
        checkpoint: A function that wraps computations with gathered parameters in a
            checkpoint. ``None`` if gathered parameters may be kept for the backward
            pass, or if a checkpoint around all equations drops them.
    """
    env, places, plain = dict(env), dict(places), []
    for i, eqn in enumerate(eqns):
        passed = {v: places[v] for v in variables_in(eqn.invars) if v in places}
        name = eqn.primitive.name
        moved = _place_after(eqn, *passed.values()) if len(passed) == 1 else None
        is_loop = name in _LOOPS and any(p.is_stacked for p in passed.values())
        is_checkpoint = name in _CHECKPOINTS and bool(passed)
        if moved is None and not (is_loop or is_checkpoint):
            plain.append(eqn)
            continue
        # If the operand of a cast is known, the equations in `plain` need not be
        # computed yet, and later equations can be computed together with them.
        if moved is None or not env.keys() >= {*variables_in(eqn.invars)}:
            later = inputs_of(eqns[i:], outs)
            _compute(plain, later, env, places, checkpoint)
            plain = []
        if moved is not None:
            found = run([eqn], eqn.outvars, env)
            if _quantises(eqn):
                # Without this constraint, the partitioner would gather the kernel
                # before it rounds it to 8 bits.
                of_scale = _place_of_scale(moved, found[1].shape)
                found = [keep_stored(found[0], moved), keep_stored(found[1], of_scale)]
                places[eqn.outvars[1]] = of_scale
            places[eqn.outvars[0]] = moved
        elif is_loop:
            _gather(passed, env, places)
            found = _run_loop(eqn, env, _places_of(eqn.invars, places))
        else:
            found = _run_checkpoint(eqn, env, _places_of(eqn.invars, places))
        env.update(zip(eqn.outvars, found, strict=True))
    _compute(plain, variables_in(outs), env, places, checkpoint)
    return run([], outs, env)


def _compute(
    eqns: Eqns,
    later: Sequence[jex.Var],
    env: dict,
    places: Places,
    checkpoint: Callable | None,
) -> None:
    """Computes ``eqns``, and adds the results that are in ``later`` to ``env``."""
    taken = inputs_of(eqns)
    if checkpoint is None:
        _gather(taken, env, places)
    # Stacked layers are not gathered here, even if an equation uses all of them.
    stored = {v: places[v] for v in taken if v in places and not places[v].is_stacked}
    made = {v for eqn in eqns for v in eqn.outvars}
    wanted = [v for v in later if v in made]

    def compute(values: list) -> list:
        known = dict(zip(taken, values, strict=True))
        gathered = use_params({v: known[v] for v in stored}, stored)
        return run(eqns, wanted, known | gathered)

    if stored and checkpoint is not None:
        # Gathered parameters are not kept for the backward pass, because all of them
        # together would be as large as the model.
        compute = checkpoint(compute)
    env.update(zip(wanted, compute([env[v] for v in taken]), strict=True))


def _gather(variables: Iterable[jex.Var], env: dict, places: Places) -> None:
    """Gathers values once for all later uses; stacked layers stay in shards."""
    found = {v: places[v] for v in variables if v in places}
    found = {v: place for v, place in found.items() if not place.is_stacked}
    env.update(use_params({v: env[v] for v in found}, found))
    for v in found:
        del places[v]


def _place_after(eqn: jex.JaxprEqn, place: Placement) -> Placement | None:
    """Returns the output's placement, or ``None`` if ``eqn`` needs the parameter."""
    match eqn.primitive.name:
        case "convert_element_type":
            # The cast comes first, so that the gather sends half the bytes in bfloat16.
            # Integers, such as the codes of a kernel, become wider by a cast.
            pair: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
            given, made = (x.dtype for x in pair)
            is_wider = made.itemsize > given.itemsize
            return None if is_wider and not is_inexact(given) else place
        case "sharding_constraint":
            # Such a constraint is on parameters that an `nnx.jit` inside the loss
            # returns, because they count as assigned. It does not gather them.
            is_kept = eqn.params["sharding"].spec == place.stored == place.gradient
            return place if is_kept else None
        case "jit" if _quantises(eqn):
            return place
        case "squeeze" if place.is_stacked and eqn.params["dimensions"] == (0,):
            return place.of_layer()
    # The output stays in shards if it still has the dim of layers, for example after
    # slices of layers and elementwise operations such as adding noise.
    avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    dims, outs = {x.shape[1:] for x in avals if x.ndim}, avals[len(eqn.invars) :]
    is_of_layers = len(dims) == 1 and [x.ndim > 0 for x in outs] == [True]
    return place if place.is_stacked and is_of_layers else None


def _place_of_scale(place: Placement, shape: tuple[int, ...]) -> Placement:
    """Returns the placement of a kernel's scales.

    Mesh axes that do not divide a dim of the scales are left out.
    """
    if (layout := active_layout()) is None:
        return place
    sizes = layout.mesh.shape

    def fit(spec: P) -> P:
        dims = zip(shape, dim_axes(spec, len(shape)), strict=True)
        return to_spec([dividing_prefix(size, axes, sizes) for size, axes in dims])

    return place.map(fit)


def _places_of(atoms: Sequence, places: Places) -> list[Placement | None]:
    return [None if isinstance(a, jex.Literal) else places.get(a) for a in atoms]


def _run_checkpoint(eqn: jex.JaxprEqn, env: dict, given: list) -> list:
    policy = eqn.params["policy"]

    def keeps(*args: Any, **params: Any) -> Any:
        return saves_all_but_gathers(*args, **params) and policy(*args, **params)

    jaxpr = ClosedJaxpr(next(jex.jaxprs_in_params(eqn.params)), [])
    # The parameters are gathered inside the model's checkpoint, and the policy never
    # keeps them gathered.
    body = jax.checkpoint(
        _body(jaxpr, given, None),
        policy=policy and keeps,
        prevent_cse=eqn.params["prevent_cse"],
    )
    return body(*run([], eqn.invars, env))


def _run_loop(eqn: jex.JaxprEqn, env: dict, given: list) -> list:
    """Runs a loop or a condition, and gathers layers inside its bodies."""
    is_scan = eqn.primitive.name == "scan"
    # Within a loop, XLA cannot merge operations of the backward and forward passes.
    checkpoint = partial(_keeping_all_else, prevent_cse=False) if is_scan else None

    def rewrite(inner: list[Placement | None], jaxpr: Any) -> Any:
        body = _body(jaxpr, inner, checkpoint)
        return jax.make_jaxpr(body)(*map(_shape, jaxpr.in_avals))

    # Only the bodies change; constants, carried and scanned values stay the same.
    bodies = {
        key: jax.tree.map(partial(rewrite, inner), eqn.params[key])
        for key, inner in _places_inside(eqn, given).items()
    }
    return run([eqn.replace(params=eqn.params | bodies)], eqn.outvars, env)


def _places_inside(eqn: jex.JaxprEqn, given: list) -> dict[str, list]:
    """Returns the placements of each body's inputs, by the body's parameter name."""
    if eqn.primitive.name == "cond":
        return {"branches": given[1:]}
    # A carried value changes from step to step, so it is not a stored parameter.
    if eqn.primitive.name == "scan":
        first, end = carried_by_scan(eqn)
        slices = [place and place.of_layer() for place in given[end:]]
        return {"jaxpr": [*given[:first], *[None] * (end - first), *slices]}
    first = eqn.params["cond_nconsts"]
    last = first + eqn.params["body_nconsts"]
    carried = [None] * (len(given) - last)
    consts = {"cond_jaxpr": given[:first], "body_jaxpr": given[first:last]}
    return {key: [*places, *carried] for key, places in consts.items()}


def _body(
    jaxpr: Any, inner: list[Placement | None], checkpoint: Callable | None
) -> Callable:
    """Makes a function that computes a jaxpr, and gathers parameters at use.

    ``inner`` lists the placement of each input, or ``None`` if it is not in shards.
    """
    function = jex.jaxpr_as_fun(jaxpr)
    traced = trace(function, *map(_shape, jaxpr.in_avals), inlined=_is_inlined)
    places = {v: p for v, p in zip(traced.inputs, inner, strict=True) if p}

    def body(*values: Any) -> list:
        env = traced.consts | bind(traced.inputs, values)
        return _run(traced.eqns, list(traced.outputs), env, places, checkpoint)

    return body


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
