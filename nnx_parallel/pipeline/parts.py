"""The jaxpr of a loss, and what each of its values depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.extend.core as jex

from nnx_parallel.jaxprs import needed, run, subjaxprs, variables_in, walk
from nnx_parallel.pipeline.call import RecordedCall, stack_p
from nnx_parallel.sharding.model import Path

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
