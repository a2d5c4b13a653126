"""Reads weights from plain checkpoints, which Orbax wrote without this library."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.checkpoint.contents import group_differences
from nnx_parallel.checkpoint.files import is_url
from nnx_parallel.checkpoint.orbax_compat import (
    describe_plain,
    load_plain,
    reading,
    root_cause,
)
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
)
from nnx_parallel.sharding.model import flatten, nest
from nnx_parallel.sharding.names import dotted


def read_weights(
    path: str | os.PathLike, wanted: Mapping[str, Any], known: Collection[str]
) -> dict[str, jax.Array]:
    """Returns the arrays that a model needs from a plain checkpoint.

    ``wanted`` maps each path to the shape, dtype and sharding to read its array with.
    Arrays at other paths in ``known`` are ignored; any other array is an error. All
    processes call this function. If one raises, all raise.

    Raises:
        CheckpointNotFoundError: If the directory does not exist.
        CheckpointReadError: If it is not a plain checkpoint.
        CheckpointMismatchError: If shapes differ, or if a path is only in the
            checkpoint or only in the model.
    """
    where = str(path) if is_url(str(path)) else str(Path(path).absolute())
    problem, found = None, dict[str, jax.Array]()
    try:
        with reading(f"'{where}'"):
            found = _read(where, wanted, known)
    except Exception as error:
        problem = error
    problems = allgather_object("plain checkpoint", problem and str(problem))
    if problem is not None:
        raise problem
    if bad := [f"On process {i}: {text}" for i, text in enumerate(problems) if text]:
        raise CheckpointReadError("\n".join(bad))
    return found


def _read(
    where: str, wanted: Mapping[str, Any], known: Collection[str]
) -> dict[str, jax.Array]:
    if where.endswith(".safetensors"):
        raise CheckpointReadError(
            f"'{where}' is a file of safetensors, and load_weights reads Orbax "
            "checkpoints. Give the Trainer a model that reads it: "
            "model=GPT.from_pretrained(folder), or weights.Pretrained(build, path)."
        )
    if not is_url(where) and not Path(where).is_dir():
        raise CheckpointNotFoundError(f"Directory '{where}' does not exist.")
    try:
        found = flatten(describe_plain(where))
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise CheckpointReadError(
            f"'{where}' is not a plain Orbax checkpoint: {root_cause(error)} Give the "
            "directory that ocp.StandardCheckpointer or ocp.v1.save has written, or "
            "one step of a CheckpointManager. For the directory of a Trainer use "
            "restore(directory=..., weights_only=True)."
        ) from error
    leaves = {keys: x for keys, x in found.items() if hasattr(x, "shape")}
    # A Variable is saved as a node with one array, `kernel.value`. In a pure dict, the
    # node is the array itself (docs/library-notes.md, "Orbax: reading").
    keys = {
        name if (name := dotted(k)) in known else name.removesuffix(".value"): k
        for k in leaves
    }
    stored = {
        name: _as_asked(leaves[k], wanted.get(name))
        for name, k in keys.items()
        if name in wanted or name not in known
    }
    if lines := list(group_differences(stored, wanted)):
        raise CheckpointMismatchError(
            f"The checkpoint in '{where}' differs from the model:\n  "
            + "\n  ".join(lines)
            + "\nNothing has changed. Build the same model, or read only some of its "
            "arrays, for example with load_weights(path, only=nnx.Param)."
        )
    asked = {
        keys[name]: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in wanted.items()
    }
    read = flatten(load_plain(where, nest(asked)))
    return {name: read[keys[name]] for name in wanted}


def _as_asked(leaf: Any, wanted: Any) -> jax.ShapeDtypeStruct:
    """Returns an array's shape on disk with the dtype to read; only floats are cast."""
    dtypes = [x.dtype for x in (wanted, leaf) if x is not None]
    are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    # Orbax casts while it reads the array.
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtypes[0 if are_floats else -1])
