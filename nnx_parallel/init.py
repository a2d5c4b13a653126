"""Computes the initial arrays of a run, each directly in its shards.

A single program with all initializers of a deep model takes minutes to compile. So the
initializers are traced together, and the program is cut into parts that share only
random keys. Parts that differ only in their keys use the same compiled program. The
compile time then depends on the number of kinds of arrays in a model, not on the
model's depth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Sharding

from nnx_parallel.mesh import leaving_mesh
from nnx_parallel.programs import (
    ClosedJaxpr,
    Eqns,
    bind,
    inputs_of,
    needed,
    run,
    trace,
    variables_in,
)
from nnx_parallel.sharding.model import (
    ModelDef,
    ModelFn,
    Path,
    ReadsArrays,
    arrays_from,
    arrays_of,
    build_model,
    flatten,
    nest,
    placed_copies,
)
from nnx_parallel.sharding.nnx_arrays import is_inexact, plain_variables

_FEW = 64
"""Arrays of at most this many elements are computed again in each part."""

_CACHED_BYTES = 2**20
"""A program is cached for the next model if its constants have at most these bytes."""

Values = Mapping[jex.Var, Any]


def compute_in_shards(
    function: Callable, args: tuple, shardings: Any, *, owns_args: bool = False
) -> Any:
    """Computes each output of a function directly in its shards.

    Args:
        function: A function of pytrees of arrays; it is traced.
        args: The arguments of the function.
        shardings: The sharding of each output, as a tree like the outputs.
        owns_args: True if an output may share the memory of an argument. This happens
            if an argument is returned unchanged and already has the output's sharding.
            With False, each output gets new memory.
    """
    # Calls with several results are inlined, so that they can be cut into parts too. An
    # example is a user's jitted function that builds a block.
    traced = trace(function, *args, inlined=lambda eqn: len(eqn.outvars) > 1)
    if traced.effects:
        # The function has an effect, such as a print. No output depends on the effect,
        # so the parts would not contain it. The function stays one program.
        return jax.jit(function, out_shardings=shardings)(*args)
    outputs, structure = jax.tree.flatten(traced.outputs)
    places, of_args = jax.tree.leaves(shardings), bind(traced.inputs, args)
    found = _in_place(outputs, places, of_args) if owns_args else {}
    consts = {var: _from_device(x) for var, x in traced.consts.items()}
    eqns, known = _derive_keys(needed(traced.eqns, outputs), of_args | consts, consts)
    alike: dict[_Part, list[_Part]] = defaultdict(list)
    for part in _cut(eqns, outputs, places, known, consts, found):
        alike[part].append(part)
    # Kinds of parts that occur equally often, as in a block, share a program.
    programs: dict[int, list[list[_Part]]] = defaultdict(list)
    for parts in alike.values():
        programs[len(parts)].append(parts)
    for kinds in programs.values():
        program = _program(tuple(parts[0] for parts in kinds))
        for parts in zip(*kinds, strict=True):
            values = program([[known[v] for v in part.inputs] for part in parts])
            # Programs run one at a time, so that their temporaries do not add up.
            jax.block_until_ready(values)
            for part, results in zip(parts, values, strict=True):
                found.update(zip(part.indices, results, strict=True))
    return jax.tree.unflatten(structure, [found[i] for i in range(len(outputs))])


def first_arrays(
    source: nnx.Module | ModelFn | ReadsArrays,
    rngs: nnx.Rngs,
    shardings: Mapping[Path, Sharding],
) -> dict:
    """Returns the arrays of a model in nested dicts, each array with its sharding.

    The arrays of a built model are copied. ``rngs`` is not advanced.
    """
    if isinstance(source, nnx.Module):
        return nest(placed_copies(arrays_of(source), shardings))
    build, streams = arrays_from(cast(ModelFn, source), rngs)
    if isinstance(source, ReadsArrays):
        return _with_read(source, build, streams, shardings)
    # Random numbers do not depend on shardings (partitionable threefry), so each
    # strategy starts from the same weights.
    return compute_in_shards(build, (streams,), nest(shardings))


def _with_read(
    source: ReadsArrays,
    build: Callable[[dict], dict],
    streams: dict,
    shardings: Mapping[Path, Sharding],
) -> dict:
    """Lets the source read arrays from files, and computes the other arrays."""
    shapes = flatten(jax.eval_shape(build, streams))
    read = source.read_arrays(
        {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[path])
            for path, x in shapes.items()
        }
    )

    def rest(streams: dict) -> dict:
        made = flatten(build(streams))
        return {path: x for path, x in made.items() if path not in read}

    places = {path: s for path, s in shardings.items() if path not in read}
    return nest(read | compute_in_shards(rest, (streams,), places))


def build_and_read(
    source: ReadsArrays, rngs: nnx.Rngs, sharding: Sharding
) -> nnx.Module:
    """Builds a model from a source that reads arrays; all arrays get one sharding.

    ``rngs`` advances as if the source had computed the initial values of all arrays.
    """
    graphdef, state = nnx.split(rngs)

    def build(streams: dict) -> tuple[nnx.Module, nnx.Rngs]:
        with plain_variables():
            used = nnx.merge(graphdef, streams)
            return build_model(cast(ModelFn, source), used), used

    def advance(streams: dict) -> dict:
        return nnx.to_pure_dict(nnx.state(build(streams)[1]))

    streams = nnx.to_pure_dict(state)
    with leaving_mesh():
        model = nnx.eval_shape(lambda: build(streams)[0])
        nnx.pop(model, nnx.Intermediate)
        places = dict.fromkeys(arrays_of(model), sharding)
        arrays = first_arrays(source, rngs, places)
        places = jax.tree.map(lambda _: sharding, streams)
        nnx.replace_by_pure_dict(state, compute_in_shards(advance, (streams,), places))
    nnx.update(rngs, state)
    return ModelDef.of(model).merge(flatten(arrays))


@dataclass(frozen=True)
class _Part:
    """Some outputs, with the equations that compute them.

    Two parts are equal if they compute the same function of their inputs, with the same
    shardings.
    """

    signature: Hashable
    shardings: tuple[Sharding, ...]
    indices: tuple[int, ...] = field(compare=False)  # indices of the outputs
    eqns: Eqns = field(compare=False)
    consts: Values = field(compare=False)  # the signature contains their bits
    inputs: Sequence[jex.Var] = field(compare=False)
    outputs: Sequence[Any] = field(compare=False)


def _program(kinds: tuple[_Part, ...]) -> Callable[[list[list]], list[list]]:
    avals = [_aval(var) for kind in kinds for var in kind.consts]
    num_bytes = sum(aval.size * aval.dtype.itemsize for aval in avals)
    return (_compiled if num_bytes <= _CACHED_BYTES else _compiled.__wrapped__)(kinds)


# The cache also serves the next Trainer of the same model.
@lru_cache(maxsize=128)
def _compiled(kinds: tuple[_Part, ...]) -> Callable[[list[list]], list[list]]:
    def compute(inputs: list[list]) -> list[list]:
        return [
            run(
                kind.eqns,
                list(kind.outputs),
                {**kind.consts, **dict(zip(kind.inputs, values, strict=True))},
            )
            for kind, values in zip(kinds, inputs, strict=True)
        ]

    return jax.jit(compute, out_shardings=[list(kind.shardings) for kind in kinds])


def _in_place(outputs: list, places: list, values: Values) -> dict[int, jax.Array]:
    """Returns outputs that are known and already have their sharding, by index.

    If several outputs are the same value, only the first of them is returned.
    """
    indices: dict[jex.Var, int] = {}
    for index, atom in enumerate(outputs):
        if not isinstance(atom, jex.Literal) and atom in values:
            indices.setdefault(atom, index)
    return {
        index: x
        for var, index in indices.items()
        if isinstance(x := values[var], jax.Array)
        and not isinstance(x, Tracer)
        and x.sharding == places[index]
    }


def _from_device(x: Any) -> Any:
    """Converts a constant to an argument that programs on the mesh accept."""
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        # The user has put the array on one device, so programs on the mesh would reject
        # it.
        if x.committed and len(x.sharding.device_set) == 1 and not is_key:
            return np.asarray(x)
    return x


def _derive_keys(
    eqns: Eqns, known: Values, consts: Values
) -> tuple[Eqns, dict[jex.Var, Any]]:
    """Computes random keys and small arrays of integers before the programs run.

    The keys of a layer are derived from the layer's number. If the programs computed
    the keys, the programs of all layers would differ. Keys and integers are exact,
    whichever program computes them.

    Returns the remaining equations, and all known values.
    """
    exact = {v for v in known if _is_key(v) or (_is_exact(v) and v not in consts)}
    now, later = [], []
    for eqn in eqns:
        inputs = variables_in(eqn.invars)
        # Values that depend only on constants are left to the programs, where the
        # compiler computes them. Computed here, even the logarithm of an integer may
        # differ in the last bit.
        moves = bool(inputs) or any(map(_is_key, eqn.outvars))
        if moves and exact.issuperset(inputs) and all(map(_is_exact, eqn.outvars)):
            now.append(eqn)
            exact.update(eqn.outvars)
        else:
            later.append(eqn)
    made = [v for e in now for v in e.outvars if not isinstance(v, jex.DropVar)]
    return later, dict(known) | dict(zip(made, run(now, made, known), strict=True))


def _is_key(var: jex.Var) -> bool:
    return jnp.issubdtype(_aval(var).dtype, jax.dtypes.prng_key)


def _is_small(var: jex.Var) -> bool:
    return _aval(var).size <= _FEW


def _aval(var: jex.Var) -> Any:
    return var.aval  # always an array: others, such as tokens, need effects


def _is_exact(var: jex.Var) -> bool:
    """Returns True for keys, and for arrays of a few integers."""
    return _is_key(var) or (_is_small(var) and not is_inexact(var.aval))


def _is_constant(var: jex.Var, consts: Values) -> bool:
    """Returns True if a program may contain a variable's value as a constant."""
    x = consts.get(var)
    is_here = getattr(x, "is_fully_addressable", True)  # in this process
    return var in consts and is_here and not (_is_key(var) or isinstance(x, Tracer))


def _cut(
    eqns: Eqns,
    outputs: Sequence[Any],
    places: Sequence[Sharding],
    known: Values,
    consts: Values,
    found: Collection[int],
) -> list[_Part]:
    """Divides the outputs that are not in ``found`` into parts.

    The parts share no large value.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    root = _components(eqns, known)
    for index, atom in enumerate(outputs):
        if index not in found:
            var = None if isinstance(atom, jex.Literal) else root(atom)
            groups[index if var is None else var].append(index)
    made_by = {var: i for i, eqn in enumerate(eqns) for var in eqn.outvars}
    sign = _Signatures()
    parts = []
    for indices in groups.values():
        wanted = [outputs[i] for i in indices]
        chosen: set[int] = set()
        left = variables_in(wanted)
        while left:
            i = made_by.get(left.pop())
            if i is not None and i not in chosen:
                chosen.add(i)
                left += variables_in(eqns[i].invars)
        part_eqns = [eqns[i] for i in sorted(chosen)]
        used = inputs_of(part_eqns, wanted)
        # A constant that is itself an output becomes an input of the program.
        fixed = {v: consts[v] for v in used if part_eqns and _is_constant(v, consts)}
        inputs = [v for v in used if v not in fixed]
        parts.append(
            _Part(
                signature=sign(inputs, part_eqns, wanted, fixed),
                shardings=tuple(places[i] for i in indices),
                indices=tuple(indices),
                eqns=part_eqns,
                consts=fixed,
                inputs=inputs,
                outputs=wanted,
            )
        )
    return parts


def _components(eqns: Eqns, known: Values) -> Callable[[jex.Var], jex.Var | None]:
    """Returns a function that maps a variable to a representative of its component.

    Variables are in one component if equations connect them. The result is ``None`` for
    a variable that every part may compute again: a key, or a few numbers that are not
    random.
    """
    free = {v for v in known if _is_key(v) or _is_small(v)}
    parents: dict[jex.Var, jex.Var] = {}

    def root(var: jex.Var) -> jex.Var | None:
        if var in free:
            return None
        while (parent := parents.setdefault(var, var)) is not var:
            parents[var] = parents[parent]
            var = parent
        return var

    for eqn in eqns:
        inputs = variables_in(eqn.invars)
        is_cheap = all(map(_is_small, eqn.outvars))
        if is_cheap and free.issuperset(inputs) and not any(map(_is_key, inputs)):
            free.update(eqn.outvars)
        roots = [r for v in (*inputs, *eqn.outvars) if (r := root(v)) is not None]
        for var in roots:
            parents[var] = roots[0]
    return root


class _Signatures:
    """Makes signatures, which are equal only if equations compute the same values."""

    def __init__(self) -> None:
        self._of_jaxprs: dict[int, Hashable] = {}  # by id, within one trace

    def __call__(
        self,
        inputs: Iterable[jex.Var],
        eqns: Eqns,
        outputs: Iterable[Any],
        consts: Values = MappingProxyType({}),
    ) -> Hashable:
        """Returns the equations with variables numbered in the order of occurrence."""
        numbers = {var: number for number, var in enumerate(inputs)}

        def name(atom: Any) -> Hashable:
            if isinstance(atom, jex.Literal):
                # Bits are compared, because 0.0 and -0.0 are equal as numbers.
                return atom.aval, np.asarray(atom.val).tobytes()
            if atom in consts:
                return atom.aval, np.asarray(consts[atom]).tobytes()
            return numbers[atom]

        avals = tuple(var.aval for var in numbers)
        lines = []
        for eqn in eqns:
            arguments = tuple(map(name, eqn.invars))
            numbers |= {v: len(numbers) + i for i, v in enumerate(eqn.outvars)}
            line = (eqn.primitive, eqn.ctx, self._of_params(eqn), arguments)
            lines.append(line)
        return avals, tuple(lines), tuple(map(name, outputs))

    def _of_params(self, eqn: jex.JaxprEqn) -> Hashable:
        params = eqn.params
        if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            # Functions are left out: they are rules for derivatives, which are not
            # needed, and they are new objects in each trace.
            params = {k: v for k, v in params.items() if not callable(v)}
        return tuple((k, self._of_static(v)) for k, v in params.items())

    def _of_static(self, value: Any) -> Hashable:
        if isinstance(value, list | tuple):
            return tuple(map(self._of_static, value))
        if isinstance(value, jex.Jaxpr | ClosedJaxpr):  # the same class in jax 0.12
            if id(value) not in self._of_jaxprs:
                jaxpr = getattr(value, "jaxpr", value)
                inputs = (*jaxpr.constvars, *jaxpr.invars)
                consts = tuple(map(id, getattr(value, "consts", ())))
                signature = self(inputs, jaxpr.eqns, jaxpr.outvars)
                self._of_jaxprs[id(value)] = consts, signature
            return self._of_jaxprs[id(value)]
        try:
            hash(value)
        except TypeError:
            # The value is an array or a dict. The equations of a part refer to it, so
            # no other object can get its id.
            return id(value)
        return type(value), value  # with the type, because 1, 1.0 and True are equal
