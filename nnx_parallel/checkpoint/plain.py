"""Plain checkpoints: what Orbax alone has written, read as weights of a model."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.checkpoint.contents import group_differences
from nnx_parallel.checkpoint.options import is_url
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
from nnx_parallel.sharding.model import nest
from nnx_parallel.sharding.names import path_of

Arrays = Mapping[str, Any]
"""Arrays, or their shapes, by dotted path."""


def read_weights(
    path: str | os.PathLike, wanted: Arrays, known: Collection[str]
) -> dict[str, jax.Array]:
    """The arrays of a plain checkpoint that a model asks for, placed like its own.

    All processes call it; an error of one is an error on all.

    Args:
        path: The checkpoint's directory, or a URL.
        wanted: Arrays with the shape, dtype and sharding to read, by dotted path.
        known: All paths of the model: the checkpoint may hold these too.

    Raises:
        CheckpointNotFoundError: If there is nothing.
        CheckpointReadError: If it is no plain checkpoint.
        CheckpointMismatchError: If shapes differ, or a path is in one place alone.
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


def _read(where: str, wanted: Arrays, known: Collection[str]) -> dict[str, jax.Array]:
    if not is_url(where) and not Path(where).is_dir():
        raise CheckpointNotFoundError(f"There is no directory '{where}'.")
    try:
        leaves = jax.tree_util.tree_leaves_with_path(describe_plain(where))
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise CheckpointReadError(
            f"'{where}' is no plain Orbax checkpoint: {root_cause(error)} Give the "
            "directory that ocp.StandardCheckpointer or ocp.v1.save has written, or "
            "one step of a CheckpointManager. For the directory of a Trainer use "
            "restore(directory=..., weights_only=True)."
        ) from error
    # A Variable is saved as a node with one array, `kernel.value`; in a pure dict it is
    # the array itself.
    there = {}
    for keys, leaf in leaves:
        name = path_of(keys)
        name = name if name in known else name.removesuffix(".value")
        there[name] = tuple(key.key for key in keys), leaf
    stored = {
        name: _as_asked(leaf, wanted.get(name))
        for name, (_, leaf) in there.items()
        if name in wanted or name not in known
    }
    if lines := list(group_differences(stored, wanted)):
        raise CheckpointMismatchError(
            f"The checkpoint in '{where}' differs from the model:\n  "
            + "\n  ".join(lines)
            + "\nNothing has changed. Build the same model, or read a part of it, such "
            "as load_weights(path, only=nnx.Param)."
        )
    paths = {name: there[name][0] for name in wanted}
    tree = nest(
        {
            paths[name]: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in wanted.items()
        }
    )
    read = load_plain(where, tree)
    by_keys = {path_of(k): x for k, x in jax.tree_util.tree_leaves_with_path(read)}
    return {name: by_keys[".".join(map(str, keys))] for name, keys in paths.items()}


def _as_asked(leaf: Any, wanted: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array on disk; a float's dtype is the one asked for."""
    dtype = leaf.dtype
    if wanted is not None and jnp.issubdtype(dtype, jnp.floating):
        # Orbax casts while it reads.
        is_float = jnp.issubdtype(wanted.dtype, jnp.floating)
        dtype = wanted.dtype if is_float else dtype
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)
