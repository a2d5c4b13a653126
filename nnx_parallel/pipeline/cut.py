"""A loss cut at its `Stack`: the part before, the stack, the part after.

The loss is traced once, as one jaxpr. An equation belongs to the part before if the
stack's inputs depend on it, and to the part after if the outputs do. What both need is
computed in both when it depends on the parameters alone (a cast, a gathered table) or
on none of them (masks, labels); else it is kept from the one to the other (a skip
connection).

The call of a `Stack` as one equation, by which a traced loss is cut.

The jaxpr of a loss, and what each of its values depends on.

What a pipelined function is, and what it is run on.

Where a traced function calls its stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NoReturn

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching

from nnx_parallel.errors import PipelineError
from nnx_parallel.layers.jaxprs import (
    inline,
    inputs_of,
    needed,
    run,
    subjaxprs,
    trace,
    variables_in,
    walk,
    warn_of_effects,
)
from nnx_parallel.layers.stack import StackCall, using_runner
from nnx_parallel.sharding.model import Path, flatten
from nnx_parallel.sharding.names import dotted, is_inexact

stack_p = jex.Primitive("stack")
stack_p.multiple_results = True


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A `StackCall` whose arrays are the inputs of one equation.

    Attributes:
        call: The call; of its arrays only the shapes matter.
        params: Keys of its parameters, in the order of the equation's inputs.
        others: Keys of its other variables, likewise.
        tree: Structure of ``(x, args)``, whose arrays come last.
        statics: The leaves of ``(x, args)`` that are no arrays, by position.
        constants: Makes the leaves that come from no input of the loss, as tables and
            masks do, by position: each stage makes them for itself.
    """

    call: StackCall
    params: tuple
    others: tuple
    tree: Any
    statics: dict[int, Any]
    constants: Callable[[], dict[int, Any]] = dict

    def join(self, arrays: Sequence[Any]) -> tuple[Any, tuple]:
        """``(x, args)`` from the arrays that are neither static nor constant."""
        known = self.statics | self.constants()
        rest = iter(arrays)
        count = len(arrays) + len(known)
        leaves = [known[i] if i in known else next(rest) for i in range(count)]
        return jax.tree.unflatten(self.tree, leaves)

    @property
    def num_x(self) -> int:
        """Number of arrays in ``x``; those of the arguments follow."""
        return len(jax.tree.leaves(self.call.x))


def record(call: StackCall) -> tuple[Any, dict, None]:
    """A runner that leaves the layers to whoever cuts the trace."""
    call = dataclasses.replace(call, x=jax.tree.map(jnp.asarray, call.x))
    params, others = tuple(sorted(call.params)), tuple(sorted(call.others))
    leaves, tree = jax.tree.flatten((call.x, call.args))
    statics = {i: x for i, x in enumerate(leaves) if not isinstance(x, jax.Array)}
    recorded = RecordedCall(call, params, others, tree, statics)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    _check_arrays(jax.tree.leaves(call.x), arrays)
    outs = stack_p.bind(
        *(call.params[k] for k in params),
        *(call.others[k] for k in others),
        *arrays,
        recorded=recorded,
    )
    num_x = recorded.num_x
    x = jax.tree.unflatten(jax.tree.structure(call.x), outs[:num_x])
    return x, dict(zip(others, outs[num_x:], strict=True)), None


def _check_arrays(x: list, arrays: list) -> None:
    if not all(map(is_inexact, x)):
        raise PipelineError(
            f"The Stack's input has dtypes {[str(leaf.dtype) for leaf in x]}. Under a "
            "Pipeline it must be floating-point, for its gradient travels back: pass "
            "indices and masks as further arguments of the blocks."
        )
    if any(jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in arrays):
        raise PipelineError(
            "A random key is passed to the blocks of the Stack. Under a Pipeline pass "
            "jax.random.key_data(key), or let the blocks hold their own nnx.Rngs."
        )


@stack_p.def_abstract_eval
def _shapes(*avals: Any, recorded: RecordedCall) -> list:
    """``x`` and the other variables come out as they went in; `Stage` checks it."""
    first_other = len(recorded.params)
    first_x = first_other + len(recorded.others)
    return [*avals[first_x:][: recorded.num_x], *avals[first_other:first_x]]


def _refuse(transform: str) -> NoReturn:
    raise PipelineError(
        f"The Stack is called under {transform}. A pipeline cuts the loss at the "
        "Stack's call, which must stand in the loss or the model itself: not inside "
        "jax.vmap, jax.grad, jax.checkpoint, jax.lax.scan or jax.lax.cond. Move the "
        "transform into the block or around another part of the loss."
    )


def _refuse_batching(*_: Any, **__: Any) -> NoReturn:
    _refuse("jax.vmap")


def _refuse_jvp(*_: Any, **__: Any) -> NoReturn:
    _refuse("jax.grad or another derivative")


batching.primitive_batchers[stack_p] = _refuse_batching
ad.primitive_jvps[stack_p] = _refuse_jvp


PARAMS, VARIABLES, BATCH, STACK = 1, 2, 4, 8
"""What a value depends on, as bits."""

Arrays = dict[Path, Any]


@dataclass(frozen=True, eq=False)
class Parts:
    """The jaxpr of a function, and where it is cut.

    Attributes:
        eqns: Its equations without the stack's call.
        bits: What each variable depends on.
        consts: Constants by variable.
        params: Variable of each parameter, by path.
        variables: Variable of each other array of the model, by path.
        batch: Variables of the microbatch's leaves.
        key: Variable of the random key.
        entering: The arrays that enter the stack.
        leaving: The arrays of its output.
        skips: Values kept from the part before for the part after.
        outputs: The function's outputs.
        variables_out: The model's other arrays after it, by path.
    """

    eqns: list[jex.JaxprEqn]
    bits: dict[jex.Var, int]
    consts: dict[jex.Var, Any]
    params: dict[Path, jex.Var]
    variables: dict[Path, jex.Var]
    batch: list[jex.Var]
    key: jex.Var
    entering: list
    leaving: list[jex.Var]
    skips: list[jex.Var]
    outputs: list
    variables_out: dict[Path, Any]

    def depends(self, atom: Any) -> int:
        """What a value depends on, as bits."""
        return bits_of(atom, self.bits)

    def env(self, params: Arrays, variables: Arrays, batch: Any, key: Any) -> dict:
        """The function's arguments by variable."""
        env = dict(self.consts)
        env |= {var: params[p] for p, var in self.params.items() if p in params}
        env |= {v: variables[p] for p, v in self.variables.items() if p in variables}
        env |= dict(zip(self.batch, jax.tree.leaves(batch), strict=True))
        env[self.key] = key
        return env

    def evaluate(self, env: dict, wanted: Sequence[Any]) -> list:
        """Some values, from others that are known."""
        return run(needed(self.eqns, wanted, env), wanted, env)

    def constants(self, atoms: dict[Any, Any]) -> dict[Any, Any]:
        """Some values that come from nothing, by any key."""
        found = self.evaluate(dict(self.consts), list(atoms.values()))
        return dict(zip(atoms, found, strict=True))


def is_bound_to_a_mesh(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation, or one inside it, names axes of the mesh."""
    inner = (e for jaxpr in subjaxprs(eqn) for e, _ in walk(jaxpr))
    return any(e.primitive.name in _BOUND_TO_A_MESH for e in (eqn, *inner))


def bits_of(atom: Any, bits: dict[jex.Var, int]) -> int:
    """What a value depends on; a number that is written out on nothing."""
    return 0 if isinstance(atom, jex.Literal) else bits[atom]


def dependencies(jaxpr: jex.Jaxpr, inputs: dict) -> dict[jex.Var, int]:
    """What each variable depends on, as bits."""
    bits = dict.fromkeys(jaxpr.constvars, 0)
    bits |= dict.fromkeys(inputs["params"].values(), PARAMS)
    bits |= dict.fromkeys(inputs["variables"].values(), VARIABLES)
    bits |= dict.fromkeys((*inputs["batch"], inputs["key"]), BATCH)
    for eqn in jaxpr.eqns:
        mask = STACK if eqn.primitive is stack_p else 0
        for var in variables_in(eqn.invars):
            mask |= bits[var]
        bits |= dict.fromkeys(eqn.outvars, mask)
    return bits


_BOUND_TO_A_MESH = ("sharding_constraint", "shard_map", "reshard", "mesh_cast")


def split_constants(
    eqns: Sequence[jex.JaxprEqn],
    atoms: Sequence[Any],
    recorded: RecordedCall,
    bits: dict[jex.Var, int],
) -> tuple[list, dict[int, Any]]:
    """What enters the stack from outside, and arguments that come from nothing.

    The second by position among the leaves of the call. The stack's input always
    enters, and so does what has been given a place on the mesh: a stage, which is
    manual over one of its axes, could not repeat that.
    """

    def is_constant(atom: Any) -> bool:
        return not bits_of(atom, bits) and not any(
            is_bound_to_a_mesh(eqn) for eqn in needed(eqns, [atom])
        )

    positions = (i for i in count() if i not in recorded.statics)
    entering, constant = [], {}
    for index, (position, atom) in enumerate(zip(positions, atoms, strict=False)):
        if index >= recorded.num_x and is_constant(atom):
            constant[position] = atom
        else:
            entering.append(atom)
    return entering, constant


Function = Callable[[Arrays, Arrays, Any, Any], tuple[Any, Arrays]]
"""``(params, variables, batch, key) -> (outputs, variables after)``, flat dicts."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a pipelined function is run on.

    Attributes:
        params: Trained parameters, by path.
        variables: All other arrays of the model, by path.
        batch: Microbatches, along a leading dim.
        keys: A random key for each.
    """

    params: Arrays
    variables: Arrays
    batch: Any
    keys: jax.Array

    @classmethod
    def of(
        cls, params: Any, variables: Any, microbatches: Any, key: jax.Array
    ) -> Given:
        """From nested arrays; each microbatch gets a key of its own.

        One microbatch alone is the whole batch and takes the key as it is.
        """
        count = jax.tree.leaves(microbatches)[0].shape[0]
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(count))
        return cls(
            params=flatten(params),
            variables=flatten(variables),
            batch=microbatches,
            keys=keys if count > 1 else key[None],
        )

    def take(self, index: jax.Array) -> tuple[Any, jax.Array]:
        """One microbatch and its key."""
        index = jnp.maximum(index, 0)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False),
            (self.batch, self.keys),
        )


def calls_stack(function: Callable, *args: Any) -> bool:
    """Whether a function of arrays calls a `Stack`."""
    with using_runner(record):
        jaxpr, _, _ = trace(function, *args)
    return any(eqn.primitive is stack_p for eqn, _ in walk(jaxpr))


def holds_stack(eqn: jex.JaxprEqn) -> bool:
    """Whether a stack is called inside an equation."""
    return any(e.primitive is stack_p for j in subjaxprs(eqn) for e, _ in walk(j))


def find_stack(jaxpr: jex.Jaxpr) -> int:
    """The position of the one equation that calls a stack.

    Raises:
        PipelineError: If there is none or more than one, or if it is in a transform.
    """
    calls = [i for i, e in enumerate(jaxpr.eqns) if e.primitive is stack_p]
    nested = [path for e, path in walk(jaxpr) if e.primitive is stack_p and path]
    if nested:
        raise PipelineError(
            f"The Stack is called inside {' inside '.join(reversed(nested[0]))}. A "
            "pipeline cuts the loss at the Stack's call, which must stand in the loss "
            "or the model itself. Move the transform into the block or around another "
            "part of the loss; remat= says what a block keeps."
        )
    if len(calls) != 1:
        found = "no Stack" if not calls else f"a Stack {len(calls)} times"
        raise PipelineError(
            f"The loss calls {found}. A Pipeline spreads the layers of one Stack over "
            "its stages: put the repeated blocks into one nnx_parallel.layers.Stack "
            "and call it once in the loss, or use FSDP or TensorParallel instead."
        )
    return calls[0]


@dataclass(frozen=True, eq=False)
class Cut:
    """A function cut at its stack.

    Attributes:
        recorded: The stack's call, its constants with it.
        stack_params: Path of each of the stack's trained or frozen parameters, by key.
        stack_others: Path of each of its other variables, by key.
        shared: Paths of the stack's arrays that the parts around it use as well.
        early: Paths of variables that the part before the stack changes.
        late: Paths of variables that the part after it changes.
        skips: Shapes of the values kept from the part before for the part after.
        outputs: Shapes of the function's first result, as a tree.
        differentiated: Of each array that enters the stack, whether its gradient is
            wanted: that of the stack's input always is, for it passes through all
            layers; that of an argument if it comes from the parameters.
    """

    recorded: RecordedCall
    stack_params: dict[Any, Path]
    stack_others: dict[Any, Path]
    shared: frozenset[Path]
    early: tuple[Path, ...]
    late: tuple[Path, ...]
    skips: tuple[jax.ShapeDtypeStruct, ...]
    outputs: Any
    differentiated: tuple[bool, ...]
    _parts: Parts

    def before(
        self, params: Arrays, variables: Arrays, batch: Any, key: Any
    ) -> tuple[list, list, Arrays]:
        """The arrays that enter the stack, the skips, and the early variables."""
        parts = self._parts
        env = parts.env(params, variables, batch, key)
        early = [parts.variables_out[path] for path in self.early]
        found = parts.evaluate(env, (*parts.entering, *parts.skips, *early))
        num_entering, num_skips = len(parts.entering), len(parts.skips)
        entering, rest = found[:num_entering], found[num_entering:]
        skips, early = rest[:num_skips], rest[num_skips:]
        return entering, skips, dict(zip(self.early, early, strict=True))

    def after(
        self,
        params: Arrays,
        variables: Arrays,
        batch: Any,
        key: Any,
        skips: Sequence[Any],
        leaving: Sequence[Any],
    ) -> tuple[Any, Arrays]:
        """The function's first result, and the late variables."""
        parts = self._parts
        env = parts.env(params, variables, batch, key)
        env |= dict(zip(parts.skips, skips, strict=True))
        env |= dict(zip(parts.leaving, leaving, strict=True))
        late = [parts.variables_out[path] for path in self.late]
        found = parts.evaluate(env, (*parts.outputs, *late))
        outputs = jax.tree.unflatten(
            jax.tree.structure(self.outputs), found[: len(parts.outputs)]
        )
        return outputs, dict(zip(self.late, found[len(parts.outputs) :], strict=True))

    def without_stack(
        self,
        select: Callable[[Any], list],
        params: Arrays,
        variables: Arrays,
        batch: Any,
        key: Any,
    ) -> tuple[list, Arrays]:
        """Outputs that do not depend on the stack, and the early variables.

        Raises:
            PipelineError: If one of them does.
        """
        parts = self._parts
        tree = jax.tree.structure(self.outputs)
        wanted = select(jax.tree.unflatten(tree, parts.outputs))
        late = {parts.variables[path] for path in self.late}
        if any(parts.depends(atom) & STACK for atom in wanted) or (
            late & set(inputs_of(needed(parts.eqns, wanted), wanted))
        ):
            raise PipelineError(
                "The weight of the loss depends on the output of the Stack, of this "
                "microbatch or an earlier one. Under a Pipeline the weights of a Mean "
                "must come from the batch: they are summed over all microbatches "
                "before the first one is run."
            )
        env = parts.env(params, variables, batch, key)
        early = [parts.variables_out[path] for path in self.early]
        found = parts.evaluate(env, (*wanted, *early))
        return found[: len(wanted)], dict(
            zip(self.early, found[len(wanted) :], strict=True)
        )


def cut(
    function: Callable[[Arrays, Arrays, Any, Any], tuple[Any, Arrays]],
    params: Arrays,
    variables: Arrays,
    batch: Any,
    key: Any,
) -> Cut:
    """Traces a function and cuts it at its one call of a `Stack`.

    Args:
        function: ``(params, variables, batch, key) -> (outputs, variables after)``.
            Parameters and variables are flat dicts by path.
        params: Shapes of the parameters.
        variables: Shapes of the other variables.
        batch: Shapes of one microbatch.
        key: A random key, or its shape.

    Raises:
        PipelineError: If the stack is not called exactly once, or inside a transform,
            or if its parameters or variables are not used as they are stored.
    """
    args = (params, variables, batch, key)
    with using_runner(record):
        jaxpr, consts, shapes = trace(function, *args)
    warn_of_effects(jaxpr)
    jaxpr = inline(jaxpr, holds_stack)
    index = find_stack(jaxpr)
    outputs, variables_out = shapes
    inputs = _name_inputs(jaxpr, params, variables, batch)
    num_outputs = len(jax.tree.leaves(outputs))
    eqn = jaxpr.eqns[index]
    recorded: RecordedCall = eqn.params["recorded"]
    num_state = len(recorded.params) + len(recorded.others)
    bits = dependencies(jaxpr, inputs)
    entering, constant = split_constants(
        jaxpr.eqns, eqn.invars[num_state:], recorded, bits
    )
    parts = Parts(
        eqns=[e for e in jaxpr.eqns if e is not eqn],
        bits=bits,
        consts=dict(zip(jaxpr.constvars, consts, strict=True)),
        entering=entering,
        leaving=eqn.outvars[: recorded.num_x],
        skips=[],
        outputs=jaxpr.outvars[:num_outputs],
        variables_out=dict(
            zip(sorted(variables_out), jaxpr.outvars[num_outputs:], strict=True)
        ),
        **inputs,
    )
    recorded = dataclasses.replace(
        recorded, constants=partial(parts.constants, constant)
    )
    return _finish(parts, eqn, recorded, outputs)


def _name_inputs(
    jaxpr: jex.Jaxpr, params: Arrays, variables: Arrays, batch: Any
) -> dict[str, Any]:
    """The jaxpr's input variables, as `Parts` holds them."""
    names = iter(jaxpr.invars)
    return {
        "params": {path: next(names) for path in sorted(params)},
        "variables": {path: next(names) for path in sorted(variables)},
        "batch": [next(names) for _ in jax.tree.leaves(batch)],
        "key": next(names),
    }


def _finish(
    parts: Parts, eqn: jex.JaxprEqn, recorded: RecordedCall, outputs: Any
) -> Cut:
    paths: dict[Any, Path] = {
        var: path for path, var in (parts.params | parts.variables).items()
    }
    num_params = len(recorded.params)
    num_state = num_params + len(recorded.others)
    for atom in eqn.invars[:num_state]:
        if atom not in paths:
            raise PipelineError(
                "The loss calls the Stack with parameters or variables that it has "
                "changed before. Under a Pipeline each stage runs the layers that it "
                "holds: call the Stack with its own, and change them inside the blocks."
            )
    stack_params = {
        key: paths[v] for key, v in zip(recorded.params, eqn.invars, strict=False)
    }
    others = zip(recorded.others, eqn.invars[num_params:], strict=False)
    stack_others = {key: paths[v] for key, v in others}
    _check_state_flows(parts, eqn, recorded, stack_others)
    changed = [
        path
        for path, atom in parts.variables_out.items()
        if atom is not parts.variables[path] and path not in stack_others.values()
    ]
    late = _late(parts, changed)
    early = [p for p in changed if p not in late]
    _check_late(parts, late)
    outside = [*parts.entering, *parts.outputs]
    outside += [parts.variables_out[path] for path in changed]
    used = set(inputs_of(needed(parts.eqns, outside, parts.leaving), outside))
    inside = (*stack_params.values(), *stack_others.values())
    arrays = parts.params | parts.variables
    skips = _skips(parts, late)
    parts.skips.extend(skips)
    return Cut(
        recorded=recorded,
        stack_params=stack_params,
        stack_others=stack_others,
        shared=frozenset(path for path in inside if arrays[path] in used),
        early=tuple(early),
        late=tuple(late),
        skips=tuple(map(_shape_of, skips)),
        outputs=outputs,
        differentiated=tuple(
            is_inexact(atom.aval)
            and (i < recorded.num_x or bool(parts.depends(atom) & PARAMS))
            for i, atom in enumerate(parts.entering)
        ),
        _parts=parts,
    )


def _check_state_flows(
    parts: Parts,
    eqn: jex.JaxprEqn,
    recorded: RecordedCall,
    stack_others: dict[Any, Path],
) -> None:
    """The layers' variables must leave as the stack left them, used by nobody else."""
    after = dict(zip(recorded.others, eqn.outvars[recorded.num_x :], strict=True))
    uses = {v for e in parts.eqns for v in variables_in(e.invars)}
    uses |= set(variables_in(parts.outputs))
    for key, var in after.items():
        path = stack_others[key]
        leaves_as_is = parts.variables_out.get(path, var) is var
        if var in uses or not leaves_as_is:
            raise PipelineError(
                f"The loss reads or assigns `{dotted(path)}`, a variable of the "
                "Stack's layers, after the Stack has run. Under a Pipeline it stays "
                "on its stage: return what the loss needs as an output of the blocks."
            )


def _late(parts: Parts, changed: list[Path]) -> list[Path]:
    """The variables whose new values need the stack, at once or through others."""
    late = [p for p in changed if parts.depends(parts.variables_out[p]) & STACK]
    while True:
        known = {parts.variables[path] for path in late}
        more = []
        for path in changed:
            atom = parts.variables_out[path]
            used = inputs_of(needed(parts.eqns, [atom]), [atom])
            if path not in late and known & set(used):
                more.append(path)
        if not more:
            return late
        late += more


def _check_late(parts: Parts, late: list[Path]) -> None:
    entering = needed(parts.eqns, parts.entering)
    used = {v for e in entering for v in variables_in(e.invars)}
    for path in late:
        if parts.variables[path] in used:
            raise PipelineError(
                f"`{dotted(path)}` is read before the Stack and changed by what comes "
                "after it. Microbatches overlap in a Pipeline, so that its value would "
                "depend on the schedule: keep one variable for each part."
            )


def _skips(parts: Parts, late: list[Path]) -> list[jex.Var]:
    """Values of the part before that the part after needs and must not recompute."""
    before = needed(parts.eqns, parts.entering)
    made = {var for eqn in before for var in eqn.outvars}
    outputs = [*parts.outputs, *(parts.variables_out[path] for path in late)]
    kept = {var for var in made if _must_be_kept(parts.bits[var])}
    after = needed(parts.eqns, outputs, given={*kept, *parts.leaving})
    used = {v for e in after for v in variables_in(e.invars)}
    used |= set(variables_in(outputs))
    return [var for var in parts.bits if var in used & kept]


def _must_be_kept(bits: int) -> bool:
    return bool(bits & PARAMS) and bool(bits & (BATCH | VARIABLES))


def _shape_of(var: jex.Var) -> jax.ShapeDtypeStruct:
    aval: Any = var.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
