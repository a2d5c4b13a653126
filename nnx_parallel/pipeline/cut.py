"""A loss cut at its `Stack` into a prologue, the layers, and an epilogue.

The loss is traced once, as a jaxpr in which the stack's call is a single equation. An
equation belongs to the prologue if the stack's inputs depend on it, and to the epilogue
if the outputs do. What both need is computed in both when it depends on the parameters
alone (a cast, a gathered table) or on none of them (masks, labels); otherwise the
prologue keeps it for the epilogue (a skip connection).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.extend.core as jex

from nnx_parallel.errors import PipelineError
from nnx_parallel.layers.jaxprs import (
    TracedFunction,
    bind,
    inputs_of,
    needed,
    trace,
    variables_in,
    walk,
    warn_of_effects,
)
from nnx_parallel.layers.stack import using_runner
from nnx_parallel.pipeline.primitive import RecordedCall, record, stack_p
from nnx_parallel.pipeline.stage import Block
from nnx_parallel.sharding.model import Path
from nnx_parallel.sharding.names import dotted, is_inexact

Arrays = dict[Path, Any]

Function = Callable[[Arrays, Arrays, Any, Any], tuple[Any, Arrays]]
"""``(params, variables, batch, key) -> (outputs, variables after)``, flat dicts."""


def calls_stack(function: Callable, *args: Any) -> bool:
    """True if a function of arrays calls a `Stack`."""
    with using_runner(record):
        traced = trace(function, *args)
    return any(eqn.primitive is stack_p for eqn, _ in walk(traced))


def _holds_stack(eqn: jex.JaxprEqn) -> bool:
    inner = (e for j in jex.jaxprs_in_params(eqn.params) for e, _ in walk(j))
    return any(e.primitive is stack_p for e in inner)


def _find_stack(traced: TracedFunction) -> jex.JaxprEqn:
    """The one equation that calls a stack."""
    calls = [eqn for eqn in traced.eqns if eqn.primitive is stack_p]
    nested = [path for e, path in walk(traced) if e.primitive is stack_p and path]
    # Inside a loop, a branch or a transform there is no place to cut the loss.
    if nested:
        raise PipelineError(
            f"The Stack is called inside {' inside '.join(reversed(nested[0]))}. A "
            "pipeline cuts the loss at the Stack's call, which must be in the loss "
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


class Source(enum.IntFlag):
    """The inputs of a loss that a value depends on."""

    # From no input, as tables and masks are: each stage can make its own.
    NONE = 0
    PARAMS = enum.auto()
    VARIABLES = enum.auto()
    BATCH = enum.auto()  # the random key of the microbatch too
    STACK = enum.auto()


@dataclass(frozen=True, eq=False, kw_only=True)
class PartitionedJaxpr:
    """A function cut at its stack: a prologue, the layers, an epilogue.

    Attributes:
        traced: ``(params, variables, batch, key) -> (outputs, variables after)``,
            without the equation that calls the stack.
        block: One layer of the stack.
        layer_paths: Path of each of the stack's arrays, by the layer's key.
        shared: Paths of the stack's arrays that prologue or epilogue use as well.
        entering: The arrays that enter the stack.
        constants: The leaves of the call's ``(x, args)`` that each stage makes for
            itself, by position.
        leaving: The arrays of the stack's output.
        skips: Values kept from the prologue for the epilogue.
        prologue_changes: New value of each variable that the prologue changes, by path.
        epilogue_changes: The same of the epilogue.
    """

    traced: TracedFunction
    block: Block
    layer_paths: dict[Any, Path]
    shared: frozenset[Path]
    entering: list
    constants: dict[int, Any]
    leaving: list[jex.Var]
    skips: list[jex.Var]
    prologue_changes: Arrays
    epilogue_changes: Arrays

    @property
    def output_shapes(self) -> Any:
        """Shapes of the function's first result."""
        return self.traced.shapes[0]

    def prologue(
        self, params: Arrays, variables: Arrays, batch: Any, key: Any
    ) -> tuple[list, list, Arrays]:
        """The arrays that enter the stack, the skips, and the changed variables."""
        known = self._known(params, variables, batch, key)
        wanted = (self.entering, self.skips, self.prologue_changes)
        return self.traced.evaluate(wanted, known)

    def epilogue(
        self,
        params: Arrays,
        variables: Arrays,
        batch: Any,
        key: Any,
        skips: Sequence[Any],
        leaving: Sequence[Any],
    ) -> tuple[Any, Arrays]:
        """The function's first result, and the changed variables."""
        known = self._known(params, variables, batch, key)
        known |= bind((self.skips, self.leaving), (skips, leaving))
        return self.traced.evaluate(
            (self.traced.outputs[0], self.epilogue_changes), known
        )

    def without_stack(
        self,
        select: Callable[[Any], list],
        params: Arrays,
        variables: Arrays,
        batch: Any,
        key: Any,
    ) -> tuple[list, Arrays]:
        """Outputs that do not depend on the stack, and the prologue's variables.

        Raises:
            PipelineError: If one of them does.
        """
        wanted = select(self.traced.outputs[0])
        inputs = set(inputs_of(needed(self.traced.eqns, wanted), wanted))
        variables_in_epilogue = {
            self.traced.inputs[1][path] for path in self.epilogue_changes
        }
        # The weights are summed before the first epilogue has run.
        if inputs & {*self.leaving, *variables_in_epilogue}:
            raise PipelineError(
                "The weight of the loss depends on the output of the Stack, of this "
                "microbatch or an earlier one. Under a Pipeline the weights of a Mean "
                "must come from the batch: they are summed over all microbatches "
                "before the first one is run."
            )
        known = self._known(params, variables, batch, key)
        # The next microbatch's weights may read what this prologue changes.
        return self.traced.evaluate((wanted, self.prologue_changes), known)

    def _known(self, params: Arrays, variables: Arrays, batch: Any, key: Any) -> dict:
        """The arguments by variable; arrays that stay inside the stack are left out."""
        of_params, of_variables, *rest = self.traced.inputs
        known = {var: params[p] for p, var in of_params.items() if p in params}
        known |= {v: variables[p] for p, v in of_variables.items() if p in variables}
        return known | bind(rest, [batch, key])


def cut(
    function: Function, params: Arrays, variables: Arrays, batch: Any, key: Any
) -> PartitionedJaxpr:
    """Traces a function and cuts it at its one call of a `Stack`.

    Args:
        function: The function.
        params: Shapes of the parameters.
        variables: Shapes of the other variables.
        batch: Shapes of one microbatch.
        key: A random key, or its shape.

    Raises:
        PipelineError: If the stack is not called exactly once, or inside a transform,
            or if its parameters or variables are not used as they are stored.
    """
    with using_runner(record):
        # A call around the stack (jit, checkpoint) is opened, so that its equation is
        # one of the loss itself; all others stay as they are.
        traced = trace(function, params, variables, batch, key, inlined=_holds_stack)
    warn_of_effects(traced)
    eqn = _find_stack(traced)
    # Without its equation the stack's outputs are inputs of the epilogue.
    sources = _find_sources(traced)
    traced = dataclasses.replace(traced, eqns=[e for e in traced.eqns if e is not eqn])

    call: RecordedCall = eqn.params["recorded"]
    keys = [*sorted(call.call.params), *sorted(call.call.others)]
    layer_paths = _find_paths(traced, keys, eqn.invars)
    # These change on their stages alone, never in the prologue or the epilogue.
    states = {layer_paths[key] for key in call.call.others}
    _check_state_flows(traced, layer_paths, call, eqn)
    entering, constants = _split_constants(
        traced, call, eqn.invars[len(keys) :], sources
    )
    leaving = eqn.outvars[: call.num_x]
    early, late = _changes(traced, sources, entering, states)

    _, of_variables, *_ = traced.inputs
    # A parameter tied to one inside the stack, or a variable that the loss reads too.
    outside = [*entering, *jax.tree.leaves((traced.outputs[0], early, late))]
    used = set(inputs_of(needed(traced.eqns, outside, leaving), outside))
    arrays = traced.inputs[0] | of_variables
    return PartitionedJaxpr(
        traced=traced,
        block=Block(
            run=partial(call.run_layer, partial(traced.evaluate, constants, {})),
            params=frozenset(call.call.params),
            trained=frozenset(k for k, path in layer_paths.items() if path in params),
            differentiated=tuple(
                is_inexact(atom.aval)
                # The gradient of x passes through all layers; that of an argument is
                # wanted if it comes from the parameters.
                and (i < call.num_x or bool(_source(atom, sources) & Source.PARAMS))
                for i, atom in enumerate(entering)
            ),
            remat=call.call.remat,
        ),
        layer_paths=layer_paths,
        shared=frozenset(p for p in layer_paths.values() if arrays[p] in used),
        entering=entering,
        constants=constants,
        leaving=leaving,
        skips=_find_skips(traced, sources, entering, leaving, late),
        prologue_changes=early,
        epilogue_changes=late,
    )


def _find_sources(traced: TracedFunction) -> dict[jex.Var, Source]:
    """The inputs that each variable depends on, in the order of the equations."""
    params, variables, *batch = traced.inputs
    sources = dict.fromkeys(traced.consts, Source.NONE)
    for source, inputs in (
        (Source.PARAMS, params),
        (Source.VARIABLES, variables),
        (Source.BATCH, batch),
    ):
        sources |= dict.fromkeys(jax.tree.leaves(inputs), source)
    for eqn in traced.eqns:
        # Equations are in topological order: the sources of all inputs are known.
        found = Source.STACK if eqn.primitive is stack_p else Source.NONE
        for atom in eqn.invars:
            found |= _source(atom, sources)
        sources |= dict.fromkeys(eqn.outvars, found)
    return sources


def _source(atom: Any, sources: dict[jex.Var, Source]) -> Source:
    return Source.NONE if isinstance(atom, jex.Literal) else sources[atom]


def _find_paths(
    traced: TracedFunction, keys: list, atoms: Sequence[Any]
) -> dict[Any, Path]:
    """The path in the model of each array that the stack is called with, by key."""
    of_params, of_variables, *_ = traced.inputs
    paths = {var: path for path, var in (of_params | of_variables).items()}
    # By identity: an array that the loss has changed is another variable.
    found = {key: paths.get(atom) for key, atom in zip(keys, atoms, strict=False)}
    if None in found.values():
        raise PipelineError(
            "The loss calls the Stack with parameters or variables that it has "
            "changed before. Under a Pipeline each stage runs the layers that it "
            "holds: call the Stack with its own, and change them inside the blocks."
        )
    return found  # pyright: ignore[reportReturnType]


def _check_state_flows(
    traced: TracedFunction,
    layer_paths: dict[Any, Path],
    call: RecordedCall,
    eqn: jex.JaxprEqn,
) -> None:
    """The layers' variables must leave as the stack left them, used by nothing else."""
    outputs, after = traced.outputs
    # The stack's own equation is not among these: `cut` has taken it out.
    uses = {v for e in traced.eqns for v in variables_in(e.invars)}
    uses |= set(variables_in(jax.tree.leaves(outputs)))
    own = eqn.outvars[call.num_x :]  # in the order of the keys
    for key, var in zip(sorted(call.call.others), own, strict=True):
        path = layer_paths[key]
        if var in uses or after.get(path, var) is not var:
            raise PipelineError(
                f"The loss reads or assigns `{dotted(path)}`, a variable of the "
                "Stack's layers, after the Stack has run. Under a Pipeline it stays "
                "on its stage: return what the loss needs as an output of the blocks."
            )


# Primitives that name axes of the mesh.
_BOUND_TO_A_MESH = ("sharding_constraint", "shard_map", "reshard", "mesh_cast")


def _is_bound_to_a_mesh(eqn: jex.JaxprEqn) -> bool:
    inner = (e for j in jex.jaxprs_in_params(eqn.params) for e, _ in walk(j))
    return any(e.primitive.name in _BOUND_TO_A_MESH for e in (eqn, *inner))


def _split_constants(
    traced: TracedFunction,
    call: RecordedCall,
    atoms: Sequence[Any],
    sources: dict[jex.Var, Source],
) -> tuple[list, dict[int, Any]]:
    """The arrays that enter the stack, and arguments that come from no input.

    Tables and masks are cheaper to make on each stage than to send. The stack's input
    always enters, and so does what has been given a place on the mesh: a stage, which
    is manual over one of its axes, could not repeat that.
    """
    # Positions count all leaves of (x, args), and the equation has arrays alone.
    positions = (i for i in count() if i not in call.statics)
    entering, constants = [], {}
    for index, (position, atom) in enumerate(zip(positions, atoms, strict=False)):
        is_constant = (
            index >= call.num_x
            and not _source(atom, sources)
            and not any(map(_is_bound_to_a_mesh, needed(traced.eqns, [atom])))
        )
        if is_constant:
            constants[position] = atom
        else:
            entering.append(atom)
    return entering, constants


def _changes(
    traced: TracedFunction,
    sources: dict[jex.Var, Source],
    entering: list,
    states: set[Path],
) -> tuple[Arrays, Arrays]:
    """New values of the variables that the prologue and the epilogue change.

    A variable belongs to the epilogue if its new value needs the stack, at once or
    through others that do.
    """
    before, after = traced.inputs[1], traced.outputs[1]
    # A variable that nothing changes leaves the trace as the one that came in.
    changed = {
        path: atom
        for path, atom in after.items()
        if atom is not before[path] and path not in states
    }
    reads = {
        path: set(inputs_of(needed(traced.eqns, [atom]), [atom]))
        for path, atom in changed.items()
    }
    # A value may need the stack through a variable of an earlier microbatch.
    late = {p for p, atom in changed.items() if _source(atom, sources) & Source.STACK}
    while more := {
        p for p in changed.keys() - late if reads[p] & {before[q] for q in late}
    }:
        late |= more
    used = set(inputs_of(needed(traced.eqns, entering), entering))
    # Sorted, so that all processes name the same variable.
    for path in sorted(late):
        if before[path] in used:
            raise PipelineError(
                f"`{dotted(path)}` is read before the Stack and changed by what comes "
                "after it. Microbatches overlap in a Pipeline, so that its value would "
                "depend on the schedule: keep one variable for each part."
            )
    return (
        {path: x for path, x in changed.items() if path not in late},
        {path: x for path, x in changed.items() if path in late},
    )


def _find_skips(
    traced: TracedFunction,
    sources: dict[jex.Var, Source],
    entering: list,
    leaving: list[jex.Var],
    epilogue_changes: Arrays,
) -> list[jex.Var]:
    """Values of the prologue that the epilogue needs and must not compute again."""
    # Only what the prologue computes anyway; all else is the epilogue's own.
    made = {v for eqn in needed(traced.eqns, entering) for v in eqn.outvars}
    kept = {var for var in made if _must_be_kept(sources[var])}
    outputs = jax.tree.leaves((traced.outputs[0], epilogue_changes))
    epilogue = needed(traced.eqns, outputs, given={*kept, *leaving})
    used = {v for eqn in epilogue for v in variables_in(eqn.invars)}
    used |= set(variables_in(outputs))
    # In the order of the equations: sets would give each process another program.
    return [var for var in sources if var in used & kept]


def _must_be_kept(source: Source) -> bool:
    """Values of the parameters alone cost little; of no parameter, nothing."""
    return Source.PARAMS in source and bool(source & (Source.BATCH | Source.VARIABLES))
