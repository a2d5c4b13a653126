"""Models and layers that a pipeline cannot run, found before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.extend.core as jex
from flax import nnx

from nnx_parallel.errors import PipelineError
from nnx_parallel.layers.jaxprs import subjaxprs, variables_in
from nnx_parallel.layers.stack import Stack
from nnx_parallel.sharding.names import dotted


def check_stages(model: nnx.Module, num_stages: int, num_chunks: int) -> None:
    """Checks that a model's one `Stack` divides into stages.

    Args:
        model: The model, concrete or abstract.
        num_stages: Stages of the pipeline.
        num_chunks: Chunks of layers that each stage holds.

    Raises:
        PipelineError: If the model has no stack or several, or its number of layers
            is no multiple of stages times chunks.
    """
    stacks = {
        dotted(path): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Stack)
    }
    if len(stacks) != 1:
        found = f"Stacks {sorted(stacks)}" if stacks else "no Stack"
        raise PipelineError(
            f"{type(model).__name__} has {found}. A Pipeline spreads the layers of one "
            "nnx_parallel.layers.Stack over its stages: put the model's repeated "
            "blocks into one Stack, and other repeated blocks into plain modules; or "
            "use FSDP or TensorParallel, which need none."
        )
    (path, stack), *_ = stacks.items()
    count, parts = stack.num_layers, num_stages * num_chunks
    if count % parts:
        valid = [n for n in range(1, count + 1) if count % (n * num_chunks) == 0]
        multiples = [count // parts * parts or parts, (count // parts + 1) * parts]
        raise PipelineError(
            f"`{path}` has {count} layers, which {num_stages} stages of {num_chunks} "
            f"chunks cannot share evenly. With {count} layers and {num_chunks} chunks "
            f"the number of stages can be {valid or 'none'}; with {parts} parts the "
            f"number of layers can be {sorted(set(multiples))}."
        )


def check_layer(jaxpr: jex.Jaxpr, mesh: jax.sharding.Mesh, axis: str) -> None:
    """Checks the jaxpr of one layer for what would end the process.

    In a region that is manual over ``pipe`` and automatic over other axes, XLA's
    partitioner aborts at a gather or scatter whose indices are computed.

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
