"""What would kill the process if it stood in a stage, found before compiling.

In a region that is manual over ``pipe`` and automatic over other axes, XLA's
partitioner aborts the process at a gather or scatter whose indices are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.extend.core as jex

from nnx_parallel.errors import PipelineError
from nnx_parallel.pipeline.jaxprs import subjaxprs, variables_in


def check_layer(jaxpr: jex.Jaxpr, mesh: jax.sharding.Mesh, axis: str) -> None:
    """Checks the jaxpr of one layer.

    Args:
        jaxpr: The layer as a function of its arrays.
        mesh: The mesh.
        axis: The axis of stages; over the others the stage is partitioned by XLA.

    Raises:
        PipelineError: If it gathers or scatters by computed indices on a mesh that has
            other axes.
    """
    others = [name for name, size in mesh.shape.items() if name != axis and size > 1]
    if not others:
        return
    found = _computed_indices(jaxpr, [True] * len(jaxpr.invars))
    if found:
        raise PipelineError(
            f"A block of the Stack indexes an array by computed indices (JAX's "
            f"{sorted(set(found))}, as x[indices], jnp.take or x.at[indices].set make "
            f"them). Inside a pipeline stage that is also split over {others}, XLA's "
            "partitioner ends the process on it. Write it as a product with "
            "jax.nn.one_hot(indices, size), look it up before the Stack and pass the "
            "result as an argument of the blocks, or use Pipeline alone."
        )


def _computed_indices(jaxpr: jex.Jaxpr, computed: Sequence[bool]) -> list[str]:
    """Names of the gathers and scatters whose indices depend on an input."""
    marked = {
        v for v, is_computed in zip(jaxpr.invars, computed, strict=True) if is_computed
    }
    found: list[str] = []
    for eqn in jaxpr.eqns:
        flags = [not isinstance(a, jex.Literal) and a in marked for a in eqn.invars]
        name = eqn.primitive.name
        if (name == "gather" or name.startswith("scatter")) and flags[1]:
            found.append(name)
        for inner in subjaxprs(eqn):
            same = len(inner.invars) == len(flags)
            found += _computed_indices(
                inner, flags if same else [any(flags)] * len(inner.invars)
            )
        if any(flags):
            marked.update(variables_in(eqn.outvars))
    return found
