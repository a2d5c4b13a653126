"""A loss cut at its `Stack`: the part before, the stack, the part after.

The loss is traced once, as one jaxpr. An equation belongs to the part before if the
stack's inputs depend on it, and to the part after if the outputs do. What both need is
computed in both when it depends on the parameters alone (a cast, a gathered table) or
on none of them (masks, labels); else it is kept from the one to the other (a skip
connection).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex

from nnx_parallel.errors import PipelineError
from nnx_parallel.jaxprs import (
    inline,
    inputs_of,
    needed,
    trace,
    variables_in,
    warn_of_effects,
)
from nnx_parallel.layers.stack import using_runner
from nnx_parallel.pipeline.call import RecordedCall, record
from nnx_parallel.pipeline.find import find_stack, holds_stack
from nnx_parallel.pipeline.parts import (
    BATCH,
    PARAMS,
    STACK,
    VARIABLES,
    Arrays,
    Parts,
    dependencies,
    split_constants,
)
from nnx_parallel.sharding.arrays import dotted, is_inexact
from nnx_parallel.sharding.model import Path


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
