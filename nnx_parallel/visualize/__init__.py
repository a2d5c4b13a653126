"""Draws the shards on each device, and the slots of each pipeline stage."""

from typing import Any

import jax
from jax.core import Tracer

from nnx_parallel.drawing import Picture as Picture
from nnx_parallel.schedules.table import Table
from nnx_parallel.sharding.names import path_of
from nnx_parallel.visualize.arrays import ShardMap, array_picture, tree_picture
from nnx_parallel.visualize.describe import Description
from nnx_parallel.visualize.schedules import schedule_picture
from nnx_parallel.visualize.traced import visualize_traced


def visualize(thing: Any, **costs: Any) -> Picture:
    """Draws the blocks of arrays on each device, or the slots of each stage.

    Args:
        thing: An array, a pytree of arrays such as a model or a state, the `Table` of a
            schedule, the description that ``strategy.describe`` returns, or a traced
            array. Arrays must have a sharding, and may be ``jax.ShapeDtypeStruct``. If
            an array has more than two dims, the picture shows all sharded dims. If
            fewer than two dims are sharded, it also shows the largest of the other
            dims. The caption names the dims.

            An array that is traced, inside a loss or another compiled function, has no
            sharding yet. It is printed once, when the compiler has chosen its sharding.
            In code that is manual over mesh axes, such as a stage of a pipeline or the
            body of ``jax.shard_map``, the shape of one block is printed, with the
            names of these axes. Under a `Pipeline`, only values in the blocks of the
            `Stack` are printed.

        costs: ``forward``, ``backward_input`` and ``backward_weight`` of a schedule, as
            in `Table.simulate`.

    Returns:
        A picture. ``print`` and rich draw it in the terminal, a notebook shows it, and
        it has ``svg`` and ``save(path)``. The label of a block lists the devices that
        hold this block of the array. In a schedule, the cell ``F3`` is the forward pass
        of microbatch 3. ``B`` is the backward pass, and ``W`` is the part of the
        backward pass for the weights. A small digit is the index of the chunk. Coloured
        schedules are drawn to scale.

    Raises:
        TypeError: If an array has no sharding, if there is no array, or if costs are
            given for anything but a schedule.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> from nnx_parallel import OneFOneB, make_mesh
        >>> from nnx_parallel.sharding import shard
        >>> mesh = make_mesh({"fsdp": 4, "tensor": 2})
        >>> print(visualize(shard(np.ones(4096), P("tensor"), mesh)))
        array
        4096 float32 · P('tensor') · 8 KiB on each of 8 devices
        ┌────────────┬────────────┐
        │ 0, 2, 4, 6 │ 1, 3, 5, 7 │
        └────────────┴────────────┘
        columns: dim 0 of 4096 in 2 over tensor · devices of a block hold the same copy
        >>> print(visualize(OneFOneB().table(num_stages=2, num_microbatches=3)))
        1F1B: 2 stages, 3 microbatches · bubble 25.0% · peak memory 3 stage inputs
        stage 0  F0 F1 ·  F2 B0 ·  B1 B2
        stage 1  ·  F0 B0 F1 B1 F2 B2 ·
    """
    if isinstance(thing, Tracer):
        return visualize_traced(thing)
    if isinstance(thing, Table):
        return schedule_picture(thing, **costs)
    if costs:
        raise TypeError(
            f"visualize got costs {list(costs)} for a {type(thing).__name__}. Only the "
            "Table of a schedule has costs."
        )
    if isinstance(thing, Description):
        return thing.picture()
    # Arrays are recognised by their attributes, because a `jax.ShapeDtypeStruct` is
    # drawn like an array.
    if hasattr(thing, "shape") and hasattr(thing, "sharding"):
        return array_picture(ShardMap(thing))
    leaves = jax.tree_util.tree_leaves_with_path(thing)
    # For JAX, an object that is not a pytree, such as a Trainer, is a leaf with an
    # empty path.
    if not leaves or (not leaves[0][0] and not hasattr(thing, "shape")):
        raise TypeError(
            f"A {type(thing).__name__} without arrays cannot be drawn. Pass an array "
            "with a sharding, a model such as trainer.model, a pytree of such arrays, "
            "the Table of a schedule, or the result of strategy.describe."
        )
    maps = [
        # The key path of a Variable's array ends with `.value`, which is not part of
        # its name.
        ShardMap(leaf, path_of(keys).removesuffix(".value") or "array")
        for keys, leaf in leaves
    ]
    return tree_picture(type(thing).__name__, maps)
