"""Updates, part by part, an optimizer that has its state in host memory.

Without parts, the complete state would be on the device at the end of each step, as
without offloading. The reason is that XLA starts all copies as early as it can, and
drops optimization barriers that would delay them. So the update is traced, and its
elementwise operations run in a loop over layers. Each iteration copies one layer of
every array to the device, and back. The loop limits the memory, because XLA runs one
iteration at a time. Within an iteration, one array is copied to the host while the next
array is copied to the device.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from nnx_parallel.errors import OffloadError
from nnx_parallel.layers.stack.scan import Remat
from nnx_parallel.layers.stack.stack import Stack
from nnx_parallel.precision import array_bytes
from nnx_parallel.programs import (
    Eqns,
    TracedFunction,
    bind,
    inputs_of,
    needed,
    trace,
    variables_in,
)
from nnx_parallel.sharding.model import Path, flatten
from nnx_parallel.sharding.offload import HOST
from nnx_parallel.sharding.optimizer import owner_of
from nnx_parallel.sharding.specs import dim_axes
from nnx_parallel.state import StatePlan

_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host

_SLICE_BYTES = 2**22
"""Bytes of a part of a device's shard, for an array that is not in a `Stack`.

The link to the host needs about a tenth of a millisecond for one part, which is long
enough to reach the full rate."""

_LANES = 128
"""Lanes of a TPU's vector registers; narrower arrays have dim 0 along the lanes."""

_ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type"),
    *("copy", "copy_p", "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor"),
    *("ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt"),
    *("max", "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_precision", "rem"),
    *("round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub", "tanh"),
    "xor",
}
"""Operations that compute each element from the operands' elements at the same index.
"""

_SAME = ("sharding_constraint", "optimization_barrier")
"""Operations that may change the placement of the operand, but not its value."""


@dataclass(frozen=True)
class _Slices:
    """The division of an array along dim 0 into shards, and of shards into parts.

    All parts have the same size.
    """

    num_shards: int
    num_parts: int

    def take(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Returns one part, ``(shards, rows, ...)``."""
        x = self._split(x)
        rows = x.shape[1] // self.num_parts
        return jax.lax.dynamic_slice_in_dim(x, index * rows, rows, axis=1)

    def put(self, x: jax.Array, index: jax.Array, part: jax.Array) -> jax.Array:
        """Returns the array with one part replaced."""
        start = index * part.shape[1]
        new = jax.lax.dynamic_update_slice_in_dim(self._split(x), part, start, axis=1)
        return new.reshape(x.shape)

    def _split(self, x: jax.Array) -> jax.Array:
        # No mesh axis splits dim 1 of the result. Parts are slices along dim 1, so that
        # slicing needs no communication.
        return x.reshape(self.num_shards, x.shape[0] // self.num_shards, *x.shape[1:])


@dataclass(frozen=True, eq=False)
class _Array:
    """A parameter and its optimizer state, with an elementwise update."""

    slices: _Slices
    eqns: Eqns
    inputs: list[jex.Var]  # inputs of the parameter's shape
    outputs: list[jex.Var]  # outputs of the parameter's shape
    places: list[jex.Var | None]  # for each output, the input that it replaces

    def update(
        self, index: jax.Array, held: list, known: Mapping, on_host: Collection
    ) -> list:
        """Computes one part of all outputs, and returns ``held`` with this part.

        Args:
            index: The index of the part.
            held: The outputs, with all earlier parts computed.
            known: Values of the program's variables.
            on_host: Variables with values in host memory.
        """
        known = {**known, **dict(zip(self.places, held, strict=True))}
        env = {
            var: _to(_DEVICE, self.slices.take(known[var], index), var in on_host)
            for var in self.inputs
        }
        shape = env[self.inputs[0]].shape
        for eqn in self.eqns:
            values = [_value(atom, env, known) for atom in eqn.invars]
            if eqn.primitive.name in _SAME:
                results = values
            elif eqn.primitive.name == "broadcast_in_dim":  # the operand is a scalar
                results = [jnp.broadcast_to(values[0], shape)]
            else:
                results = [eqn.primitive.bind(*values, **eqn.params)]
            env |= dict(zip(eqn.outvars, results, strict=True))
        return [
            self.slices.put(x, index, _to(_HOST, env[var], place in on_host))
            for x, var, place in zip(held, self.outputs, self.places, strict=True)
        ]


def offloaded_update(
    plan: StatePlan, function: Callable[..., Any], params: dict, state: Any, *rest: Any
) -> tuple[dict, Any, dict]:
    """Calls ``function(params, state, *rest)`` with a state in the host's memory.

    Args:
        plan: The placements of all arrays.
        function: A function that returns the new parameters, the new state, and a dict
            of additional arrays by parameter, which may be empty.
        params: Trained parameters on the devices.
        state: The optimizer's state, in the memory in which the step receives it.
        rest: Gradients, the loss, and other arguments on the devices.

    Returns:
        The results of the function. Each array of the state is in the same kind of
        memory as before.
    """
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state, *rest)
    )
    traced = trace(function, *args, inlined=lambda eqn: eqn.primitive.name == "jit")
    given = traced.consts | bind(traced.inputs, (params, state, *rest))
    leaves = jax.tree.leaves(plan.abstract.opt_state)
    are_on_host = [leaf.sharding.memory_kind == HOST for leaf in leaves]
    variables = jax.tree.leaves(traced.inputs[1])
    on_host = {
        v for v, is_there in zip(variables, are_on_host, strict=True) if is_there
    }
    arrays = _sliced_arrays(plan, traced, on_host)

    # Values that no loop computes are computed before the loops. They need the
    # remaining arrays of the state, which are copied to the device without parts.
    unsliced = on_host.difference(v for array in arrays for v in array.inputs)
    given |= {v: jax.device_put(given[v], _DEVICE) for v in unsliced}
    outside = _outside(traced, arrays)
    given |= dict(zip(outside, traced.evaluate(outside, given), strict=True))

    loops: dict[_Slices, list[_Array]] = defaultdict(list)
    for array in arrays:
        loops[array.slices].append(array)
    for together in loops.values():
        given |= _run_loop(together, given, on_host)

    new, state, more = jax.tree.map(lambda atom: _value(atom, given), traced.outputs)
    new_leaves, structure = jax.tree.flatten(state)
    # This does nothing for arrays that are already on the host.
    pairs = zip(new_leaves, are_on_host, strict=True)
    state = jax.tree.unflatten(structure, [_to(_HOST, x, there) for x, there in pairs])
    return new, state, more


def _run_loop(
    arrays: list[_Array], given: Mapping, on_host: Collection
) -> dict[jex.Var, jax.Array]:
    """Computes the outputs of arrays that have the same division into parts."""
    starts = [
        [
            jnp.zeros(var.aval.shape, var.aval.dtype) if place is None else given[place]  # pyright: ignore[reportAttributeAccessIssue]
            for var, place in zip(array.outputs, array.places, strict=True)
        ]
        for array in arrays
    ]

    def step(index: jax.Array, held: list[list]) -> list[list]:
        pairs = zip(arrays, held, strict=True)
        return [array.update(index, x, given, on_host) for array, x in pairs]

    ends = jax.lax.fori_loop(0, arrays[0].slices.num_parts, step, starts)
    pairs = zip(arrays, ends, strict=True)
    return {v: x for a, xs in pairs for v, x in zip(a.outputs, xs, strict=True)}


def _sliced_arrays(
    plan: StatePlan, traced: TracedFunction, on_host: set[jex.Var]
) -> list[_Array]:
    """Returns the parameters that can be updated part by part, with their state."""
    before, after = (flatten(x[0]) for x in (traced.inputs, traced.outputs))
    shapes = {path: tuple(var.aval.shape) for path, var in before.items()}
    pairs: dict[Path, list[tuple[Any, jex.Var | None]]] = defaultdict(list)
    inputs = jax.tree_util.tree_leaves_with_path(traced.inputs[1])
    outputs = jax.tree.leaves(traced.outputs[1])
    for (keys, var), out in zip(inputs, outputs, strict=True):
        owner = owner_of(keys, shapes)
        if var in on_host and owner and var.aval.shape == shapes[owner]:
            pairs[owner].append((out, var))
    found = {}
    for path, of_state in pairs.items():
        more = flatten(traced.outputs[2]).get(path)
        of_params = [(after[path], before[path]), *([(more, None)] if more else [])]
        atoms, places = zip(*of_params, *of_state, strict=True)
        shape, slices = shapes[path], _slices_of(plan, path, before[path].aval)
        if slices and all(x.aval.shape == shape for x in atoms):
            eqns = _elementwise(traced.eqns, variables_in(atoms), shape)
            inputs = [v for v in inputs_of(eqns, atoms) if v.aval.shape == shape]  # pyright: ignore[reportAttributeAccessIssue]
            found[path] = _Array(slices, eqns, inputs, list(atoms), list(places))
    # If a computation outside of the loops needs an array of the state, the parameter
    # of this array is not updated in parts.
    while found:
        outside = _outside(traced, found.values())
        used = set(inputs_of(needed(traced.eqns, outside), outside))
        unsliced = [
            path
            for path, array in found.items()
            if not used.isdisjoint(on_host.intersection(array.places))
        ]
        if not unsliced:
            break
        found = {path: array for path, array in found.items() if path not in unsliced}
    return [*found.values()]


def _outside(traced: TracedFunction, arrays: Iterable[_Array]) -> list[jex.Var]:
    """Returns the variables to compute before the loops.

    These are the results that no loop computes, and the inputs of the loops.
    """
    inside = {v for array in arrays for v in array.outputs}
    atoms = variables_in(jax.tree.leaves(traced.outputs))
    wanted = [v for v in atoms if v not in inside]
    wanted += [v for array in arrays for v in inputs_of(array.eqns, array.outputs)]
    given = {*traced.consts, *jax.tree.leaves(traced.inputs)}
    return [v for v in dict.fromkeys(wanted) if v not in given]


def _elementwise(eqns: Eqns, outputs: Iterable[jex.Var], shape: tuple) -> Eqns:
    """Returns the equations that compute outputs element by element.

    The search goes backwards from each output, and stops at operations that are not
    elementwise.
    """
    wanted, found = set(outputs), []
    for eqn in reversed(eqns):
        operands = variables_in(eqn.invars)
        name = eqn.primitive.name
        is_of_like = all(v.aval.shape in ((), shape) for v in (*operands, *eqn.outvars))  # pyright: ignore[reportAttributeAccessIssue]
        is_of_one = name == "broadcast_in_dim" and not any(
            v.aval.shape  # pyright: ignore[reportAttributeAccessIssue]
            for v in operands
        )
        is_kind = name in _ELEMENTWISE or name in _SAME or is_of_one
        if is_kind and is_of_like and not wanted.isdisjoint(eqn.outvars):
            found.append(eqn)
            wanted.update(v for v in operands if v.aval.shape == shape)  # pyright: ignore[reportAttributeAccessIssue]
    return found[::-1]


def _slices_of(plan: StatePlan, path: Path, aval: Any) -> _Slices | None:
    """Returns the division of a parameter into parts.

    Returns ``None`` if the parameter is small or cannot be divided.
    """
    place, shape = plan.placements[path], aval.shape
    if not shape:
        return None
    sharding = plan.layout.sharding(place.optimizer)
    axes = dim_axes(place.optimizer, len(shape))[0]
    num_shards = math.prod(plan.layout.mesh.shape[axis] for axis in axes)
    rows = shape[0] // num_shards
    if place.is_stacked and len(shape) > 2:
        return _Slices(num_shards, rows) if rows > 1 else None
    shard = sharding.shard_shape(shape)
    least = -(-array_bytes(shard, aval.dtype) // _SLICE_BYTES)
    if least == 1:
        return None
    counts = [n for n in range(least, 4 * least + 1) if rows % n == 0]
    if shard[-1] < _LANES:
        # Dim 0 of this array lies along the lanes, and libtpu writes host memory only
        # in complete tiles of lanes (otherwise UNIMPLEMENTED, "Updating the lane
        # dimension"). So larger parts are tried too.
        counts += [n for n in range(least - 1, 1, -1) if rows % n == 0]
        counts = [n for n in counts if rows // n % _LANES == 0]
    # Tiles of a TPU's memory have 8 rows.
    counts = [n for n in counts if rows // n % 8 == 0] or counts
    return _Slices(num_shards, counts[0]) if counts else None


def _to(space: Any, x: jax.Array, is_moved: bool) -> jax.Array:
    return jax.device_put(x, space) if is_moved else x


def _value(atom: Any, *known: Mapping) -> Any:
    if isinstance(atom, jex.Literal):
        return atom.val
    return next(values[atom] for values in known if atom in values)


def check_offload(plan: StatePlan, remat: Remat) -> None:
    """Checks that a step keeps block inputs, if they are to be offloaded.

    Raises:
        OffloadError: If the step does not keep block inputs, or if a pipeline or
            prefetching keeps them in its own way.
    """
    if plan.offload is None or plan.offload.activations is None:
        return
    start = "Offload(activations='block_inputs') moves the inputs of "
    stacks = [module for module in plan.modules if isinstance(module, Stack)]
    if not stacks:
        raise OffloadError(
            f"{start}a Stack's blocks, but this model has no Stack. Put its blocks "
            "into a Stack, or leave activations out."
        )
    if all((stack.remat or remat) == "none" for stack in stacks):
        raise OffloadError(
            f"{start}blocks, which are kept only with remat, but remat is 'none'. Pass "
            "remat='full' or remat='dots' to the Trainer, or leave activations out."
        )
    is_cut = plan.layout.claims.execution is not None
    if is_cut or plan.layout.prefetches:
        owner = "a Pipeline" if is_cut else "FSDP(prefetch='first')"
        raise OffloadError(
            f"{start}blocks, but {owner} keeps these inputs in its own way. Leave one "
            "of the two out."
        )
