"""Cuts a loss at its `Stack` into a prologue, the layers, and an epilogue.

The loss is traced once, to a jaxpr in which the stack's call is a single equation. An
equation belongs to the prologue if the stack's inputs depend on it, and to the epilogue
if the loss's outputs depend on it other than through the stack. A value that both need
is computed in both if it depends only on the parameters (a cast, a gathered table) or
on no parameter (masks, labels). Otherwise the prologue keeps the value for the epilogue
(a skip connection).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, NoReturn

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching

from nnx_parallel.errors import PipelineError
from nnx_parallel.layers.stack.scan import StackCall, run_layers
from nnx_parallel.programs import (
    TracedFunction,
    bind,
    inputs_of,
    names_in,
    needed,
    reached,
    variables_in,
    walk,
    warn_of_effects,
)
from nnx_parallel.sharding.constrain import use_params
from nnx_parallel.sharding.model import Path
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import is_inexact

Arrays = dict[Path, Any]

# The primitive has no lowering rule, because the cut removes it before anything is
# compiled. Its inputs are the layers' parameters, the layers' other variables, and the
# arrays of ``(x, args)``, each in the order of `jax.tree.leaves`. Its outputs are the
# new x and the layers' other variables.
stack_p = jex.Primitive("stack")
stack_p.multiple_results = True

# Primitives that name axes of the mesh.
_ON_A_MESH = {"sharding_constraint", "shard_map", "reshard", "mesh_cast"}


def record(call: StackCall) -> tuple[Any, dict, None]:
    """Runs a stack. A stack that runs in stages becomes one equation of the trace."""
    if not any(place.is_staged for place in call.placements.values()):
        return run_layers(call)
    places = {path: place.in_stage() for path, place in call.placements.items()}
    call = replace(call, placements=places)
    call = replace(call, x=jax.tree.map(jnp.asarray, call.x))
    x, leaves = jax.tree.leaves(call.x), jax.tree.leaves((call.x, call.args))
    arrays = [a for a in leaves if isinstance(a, jax.Array)]
    if any(jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in arrays):
        raise PipelineError(
            "A random key or an nnx.Rngs is passed to the blocks of the Stack. Under a "
            "Pipeline pass jax.random.key_data(key), or let the blocks hold nnx.Rngs."
        )
    if not all(map(is_inexact, x)):
        raise PipelineError(
            f"The Stack's input has dtypes {[str(leaf.dtype) for leaf in x]}. Under a "
            "Pipeline it must be floating-point, because its gradient is sent back: "
            "pass indices and masks as further arguments of the blocks."
        )
    if call.has_out:
        raise PipelineError(
            "The blocks of the Stack return a value of each layer besides their output "
            "(stack.scan). A Pipeline sends only the output: make the value a part of "
            "it, as in stack((x, total)), whose blocks return (x, total + value)."
        )
    # Under `vmap` or `grad` the primitive's rule raises an error. `_find_stack` finds
    # other primitives, such as `scan` and `cond`, that contain the equation.
    layer_arrays = jax.tree.leaves((call.params, call.others))
    outs = stack_p.bind(*layer_arrays, *arrays, call=call)
    return *jax.tree.unflatten(jax.tree.structure((call.x, call.others)), outs), None


# The layers are not traced here; errors in a layer appear when a stage traces it.
@stack_p.def_abstract_eval
def _shapes(*avals: Any, call: StackCall) -> list:
    first_x = len(call.params) + len(call.others)
    x = avals[first_x:][: len(jax.tree.leaves(call.x))]
    return [*x, *avals[len(call.params) : first_x]]


def _refuse(transform: str, *_: Any, **__: Any) -> NoReturn:
    raise PipelineError(
        f"The Stack is called under {transform}. A pipeline cuts the loss at the "
        "Stack's call, which must be in the loss or the model itself: not inside "
        "jax.vmap, jax.grad, jax.checkpoint, jax.lax.scan or jax.lax.cond. Move the "
        "transform into the block or around another part of the loss."
    )


batching.primitive_batchers[stack_p] = partial(_refuse, "jax.vmap")
ad.primitive_jvps[stack_p] = partial(_refuse, "jax.grad or another derivative")


def calls_stack(traced: TracedFunction) -> bool:
    """Returns True if a function, traced with `record`, calls a `Stack`."""
    return any(eqn.primitive is stack_p for eqn, _ in walk(traced))


def _find_stack(traced: TracedFunction) -> jex.JaxprEqn:
    """Returns the only equation that calls a stack."""
    calls = [eqn for eqn in traced.eqns if eqn.primitive is stack_p]
    nested = [path for e, path in walk(traced) if e.primitive is stack_p and path]
    # The loss cannot be cut inside a loop, a branch or a transform.
    if nested:
        raise PipelineError(
            f"The Stack is called inside {' inside '.join(reversed(nested[0]))}. A "
            "pipeline cuts the loss at the Stack's call, which must be in the loss or "
            "the model itself. Move the transform into the block or around another "
            "part of the loss; remat= chooses the values that a block keeps."
        )
    if len(calls) != 1:
        found = "no Stack" if not calls else f"a Stack {len(calls)} times"
        raise PipelineError(
            f"The loss calls {found}. A Pipeline spreads the layers of one Stack over "
            "its stages: put the repeated blocks into one nnx_parallel.layers.Stack "
            "and call it once in the loss, without a separate slice for each layer "
            "(scanned=, stack.scan with xs); or use FSDP or TensorParallel instead."
        )
    return calls[0]


class PartitionedJaxpr:
    """A traced function, cut at its stack into a prologue, the layers, an epilogue.

    Args:
        traced: The function ``(params, variables, batch, key) -> (outputs, new
            variables)``, traced with `record`. Parameters and variables are flat dicts
            by path.

    Attributes:
        call: The call of the stack. Only the shapes of its arrays are used.
        traced: The function, without the equation that calls the stack.
        layer_paths: Path of each of the stack's arrays, by the layer's key.
        entering: The arrays that enter the stack.
        constants: The leaves of the call's ``(x, args)`` that each stage computes
            itself, by position.
        leaving: The arrays of the stack's output.
        prologue_changes: New value of each variable that the prologue changes, by path.
        epilogue_changes: New value of each variable that the epilogue changes, by path.
        skips: Values that the prologue keeps for the epilogue.
        shared: Paths of the stack's arrays that the prologue or the epilogue also uses.
        trained: Keys of a layer's arrays that are trained.
        differentiated: A boolean for each entering array: True if it has a cotangent.

    Raises:
        PipelineError: If the stack is not called exactly once, or is called inside a
            transform, or if the loss changes its parameters or variables.
    """

    def __init__(self, traced: TracedFunction) -> None:
        warn_of_effects(traced)
        eqn = _find_stack(traced)
        self.call: StackCall = eqn.params["call"]
        # The stack's equation is removed, so its outputs become inputs of the epilogue.
        eqns = [e for e in traced.eqns if e is not eqn]
        self.traced = replace(traced, eqns=eqns)
        of_params, of_variables, *of_data = traced.inputs
        check_unassigned(path for path in traced.outputs[1] if path in of_params)
        self._inputs: Arrays = of_params | of_variables
        from_params = reached(eqns, of_params.values())
        from_data = reached(eqns, jax.tree.leaves((of_variables, of_data)))

        num_x = len(jax.tree.leaves(self.call.x))
        self.leaving: list[jex.Var] = eqn.outvars[:num_x]
        self.layer_paths = self._find_paths(eqn.invars)
        self._check_state_flows(eqn.outvars[num_x:])
        self.entering, self.constants = self._split_constants(
            eqn.invars[len(self.layer_paths) :], from_params | from_data
        )
        self.prologue_changes, self.epilogue_changes = self._split_changes(eqn.outvars)
        self.skips = self._find_skips(from_params & from_data)
        # Shared arrays are parameters that the loss also uses outside the stack, such
        # as tied parameters, and variables of the stack that the loss reads.
        changes = self.prologue_changes | self.epilogue_changes
        used = self._uses((self.entering, traced.outputs[0], changes))
        paths = self.layer_paths.items()
        self.shared = frozenset(path for _, path in paths if self._inputs[path] in used)
        self.trained = frozenset(key for key, path in paths if path in of_params)
        # The gradient of x passes through all layers. The gradient of an argument is
        # needed only if the argument depends on the parameters.
        self.differentiated = tuple(
            is_inexact(atom.aval) and (i < num_x or _is_in(atom, from_params))
            for i, atom in enumerate(self.entering)
        )

    def with_cotangents(self, activations: Sequence[Any]) -> list:
        """Returns those activations that have a cotangent, which is sent back."""
        return list(compress(activations, self.differentiated))

    def prologue(self, arrays: Arrays, item: Any) -> tuple[list, list, Arrays]:
        """Computes the arrays that enter the stack, the skips, and changed variables.

        ``arrays`` need not contain the stack's arrays. ``item`` is a microbatch and its
        key.
        """
        wanted = (self.entering, self.skips, self.prologue_changes)
        return self.traced.evaluate(wanted, self._known(arrays, item))

    def epilogue(
        self, arrays: Arrays, item: Any, skips: Sequence[Any], leaving: Sequence[Any]
    ) -> tuple[Any, Arrays]:
        """Returns the function's first result, and the changed variables."""
        known = bind((self.skips, self.leaving), (skips, leaving))
        wanted = (self.traced.outputs[0], self.epilogue_changes)
        return self.traced.evaluate(wanted, self._known(arrays, item) | known)

    def without_stack(
        self, select: Callable[[Any], list], arrays: Arrays, item: Any
    ) -> tuple[list, Arrays]:
        """Computes selected outputs without the stack, and the prologue's variables.

        Raises:
            PipelineError: If a selected output depends on the stack.
        """
        wanted = select(self.traced.outputs[0])
        late = {self._inputs[path] for path in self.epilogue_changes}
        # The weights are summed before any stack or epilogue runs.
        if self._uses(wanted) & {*self.leaving, *late}:
            raise PipelineError(
                "The weight of the loss depends on the output of the Stack, for this "
                "microbatch or an earlier one. Under a Pipeline the weights of a Mean "
                "must come from the batch: they are summed over all microbatches "
                "before the first one is run."
            )
        # The weights of the next microbatch may depend on variables that this prologue
        # changes.
        known = self._known(arrays, item)
        return self.traced.evaluate((wanted, self.prologue_changes), known)

    def _known(self, arrays: Arrays, item: Any) -> dict:
        """Returns the values of the arguments, by variable of the jaxpr."""
        known = {v: arrays[path] for path, v in self._inputs.items() if path in arrays}
        return known | bind(self.traced.inputs[2:], item)

    def _uses(self, wanted: Any) -> set[jex.Var]:
        """Returns the inputs and the stack's outputs that a tree depends on."""
        atoms = jax.tree.leaves(wanted)
        return set(inputs_of(needed(self.traced.eqns, atoms), atoms))

    def run_layer(self, arrays: dict, activations: list) -> tuple[list, dict]:
        """Runs one layer, given its arrays by key and the arrays that enter the stack.

        Returns:
            The arrays of ``x``, and the layer's variables by key.
        """
        # The constants are computed here, because JAX does not allow a stage to use
        # values of another trace.
        made, rest = self.traced.evaluate(self.constants, {}), iter(activations)
        call = self.call
        leaves, tree = jax.tree.flatten((call.x, call.args))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, jax.Array):
                leaves[i] = made[i] if i in made else next(rest)
        x, args = jax.tree.unflatten(tree, leaves)
        params, others = ({k: arrays[k] for k in g} for g in (call.params, call.others))
        params = use_params(params, call.placements)
        x, others, _ = call.block(params, others, x, args, None)
        return jax.tree.leaves(x), others

    def _find_paths(self, atoms: Sequence[Any]) -> dict[Any, Path]:
        """Finds the path of each of the stack's arrays in the model, by key."""
        keys = [*sorted(self.call.params), *sorted(self.call.others)]
        paths = {var: path for path, var in self._inputs.items()}
        # Arrays are found by their variable in the jaxpr. An array that the loss has
        # changed has a different variable.
        found = {key: paths.get(atom) for key, atom in zip(keys, atoms, strict=False)}
        if None in found.values():
            raise PipelineError(
                "The loss changes parameters or variables of the Stack before it calls "
                "the Stack. Under a Pipeline each stage runs the layers as it stores "
                "them: call the Stack with the stored arrays, and change them inside "
                "the blocks."
            )
        return found  # pyright: ignore[reportReturnType]

    def _check_state_flows(self, own: list[jex.Var]) -> None:
        """Checks that only the stack uses and changes the layers' variables."""
        outputs, after = self.traced.outputs
        uses = {v for e in self.traced.eqns for v in variables_in(e.invars)}
        uses |= set(variables_in(jax.tree.leaves(outputs)))
        for key, var in zip(sorted(self.call.others), own, strict=True):
            path = self.layer_paths[key]
            if var in uses or after.get(path, var) is not var:
                raise PipelineError(
                    f"The loss reads or assigns `{dotted(path)}`, a variable of the "
                    "Stack's layers, after the Stack has run. Under a Pipeline the "
                    "variable stays on its stage: let the blocks return the value that "
                    "the loss needs as a part of their output."
                )

    def _split_constants(
        self, atoms: Sequence[Any], from_inputs: set[jex.Var]
    ) -> tuple[list, dict[int, Any]]:
        """Returns arrays that enter the stack, and arguments that each stage computes.

        It is cheaper to compute tables and masks on each stage than to send them. The
        stack's input always enters. An argument with a constraint on the mesh also
        enters, because a stage is manual over one axis of the mesh and cannot repeat
        the constraint.
        """
        eqns = self.traced.eqns
        # Positions count all leaves of (x, args). The equation's inputs are only those
        # leaves that are arrays.
        leaves = enumerate(jax.tree.leaves((self.call.x, self.call.args)))
        positions = [i for i, leaf in leaves if isinstance(leaf, jax.Array)]
        placed = dict(zip(positions, atoms, strict=True))
        constants = {
            i: atom
            for i, atom in [*placed.items()][len(self.leaving) :]
            if not _is_in(atom, from_inputs)
            and not any(_ON_A_MESH & names_in([e]) for e in needed(eqns, [atom]))
        }
        return [placed[i] for i in positions if i not in constants], constants

    def _split_changes(self, of_stack: list[jex.Var]) -> tuple[Arrays, Arrays]:
        """Returns the new values of variables from the prologue and from the epilogue.

        A variable belongs to the epilogue if its new value depends on the stack,
        directly or through other variables.
        """
        before, after = self._inputs, self.traced.outputs[1]
        # The layers' variables change only on their stages, never in the prologue or
        # the epilogue.
        states = {self.layer_paths[key] for key in self.call.others}
        early = {
            path: atom
            for path, atom in after.items()
            # An unchanged variable is the same object before and after the trace.
            if atom is not before[path] and path not in states
        }
        uses = {path: self._uses(atom) for path, atom in early.items()}
        late, needs = {}, set(of_stack)
        # A value may need the stack through a variable of an earlier microbatch.
        while more := [path for path in early if uses[path] & needs]:
            late |= {path: early.pop(path) for path in more}
            needs |= {before[path] for path in more}
        used = self._uses(self.entering)
        # The paths are sorted, so that all processes name the same variable.
        for path in sorted(late):
            if before[path] in used:
                raise PipelineError(
                    f"`{dotted(path)}` is read before the Stack and changed after it. "
                    "Microbatches overlap in a Pipeline, so the value before the Stack "
                    "would depend on the schedule: use one variable before the Stack "
                    "and another one after it."
                )
        return early, late

    def _find_skips(self, costly: set[jex.Var]) -> list[jex.Var]:
        """Returns the prologue's values that are kept for the epilogue.

        The epilogue computes other values again: values that depend only on parameters
        are cheap, and values that do not depend on a parameter cost nothing.
        """
        # Only values that the prologue itself needs are kept. The epilogue computes all
        # others.
        prologue = needed(self.traced.eqns, self.entering)
        made = (v for eqn in prologue for v in eqn.outvars)
        # The values are in the order of the equations, because a set would give each
        # process a different program.
        kept = dict.fromkeys(v for v in made if v in costly)
        outputs = jax.tree.leaves((self.traced.outputs[0], self.epilogue_changes))
        used = set(inputs_of(needed(self.traced.eqns, outputs, given=kept), outputs))
        return [var for var in kept if var in used]


def check_unassigned(paths: Iterable[Path]) -> None:
    """Refuses a loss or a block that assigns trained parameters."""
    if assigned := ", ".join(f"`{dotted(path)}`" for path in paths):
        raise PipelineError(
            f"The model assigns trained parameters while it runs: {assigned}. Under a "
            "Pipeline other microbatches are in flight, which would use the old or the "
            "new values, depending on the schedule. Assign parameters between steps, "
            "keep changing values in an nnx.Variable of another kind, or use FSDP or "
            "TensorParallel, which run one microbatch after the other."
        )


def _is_in(atom: Any, variables: set[jex.Var]) -> bool:
    return not isinstance(atom, jex.Literal) and atom in variables
