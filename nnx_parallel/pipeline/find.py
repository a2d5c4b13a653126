"""Where a traced function calls its stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.extend.core as jex

from nnx_parallel.errors import PipelineError
from nnx_parallel.jaxprs import subjaxprs, trace, walk
from nnx_parallel.layers.stack import using_runner
from nnx_parallel.pipeline.call import record, stack_p


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
