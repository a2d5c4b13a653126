"""The jaxpr of a loss, and what each of its values depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

from nnx_parallel.pipeline.call import stack_p
from nnx_parallel.pipeline.jaxprs import needed, run, variables_in
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
        return 0 if isinstance(atom, jex.Literal) else self.bits[atom]

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


def dependencies(jaxpr: jex.Jaxpr, taken: dict) -> dict[jex.Var, int]:
    """What each variable depends on, as bits."""
    bits = dict.fromkeys(jaxpr.constvars, 0)
    bits |= dict.fromkeys(taken["params"].values(), PARAMS)
    bits |= dict.fromkeys(taken["variables"].values(), VARIABLES)
    bits |= dict.fromkeys((*taken["batch"], taken["key"]), BATCH)
    for eqn in jaxpr.eqns:
        mask = STACK if eqn.primitive is stack_p else 0
        for var in variables_in(eqn.invars):
            mask |= bits[var]
        bits |= dict.fromkeys(eqn.outvars, mask)
    return bits
