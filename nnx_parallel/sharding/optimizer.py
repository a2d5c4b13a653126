"""Where an optimizer's state lives, for any Optax transformation.

Transformations keep trees like the parameters' inside their state, whole or with parts
masked out. An array of the state belongs to the parameter whose path ends its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from nnx_parallel.sharding.layout import Layout, Placement
from nnx_parallel.sharding.model import Path
from nnx_parallel.sharding.specs import DimAxes, dim_axes, dividing_prefix, to_spec

Optimizer = optax.GradientTransformation | optax.GradientTransformationExtraArgs


def optimizer_specs(
    abstract_state: optax.OptState,
    shapes: dict[Path, tuple[int, ...]],
    placements: dict[Path, Placement],
    layout: Layout,
) -> optax.OptState:
    """The spec of every array of an optimizer state, as the same tree.

    Args:
        abstract_state: ``jax.eval_shape(tx.init, params)``.
        shapes: Shape of each parameter, by its path in the parameters' nested dict.
        placements: Placement of each parameter, by the same paths.
        layout: The layout, for divisibility.

    Returns:
        ``optimizer`` specs of the parameters. A state of another shape (the row and
        column factors of Adafactor) follows the dims whose sizes match; counters and
        all that belongs to no parameter are replicated.
    """

    # A part that a mask leaves out is an `optax.MaskedNode`: a node without leaves,
    # which stays as it is.
    def spec(path: tuple, leaf: Any) -> P:
        owner = owner_of(path, shapes)
        if owner is None:
            return P()
        axes = dim_axes(placements[owner].optimizer, len(shapes[owner]))
        return _follow(leaf.shape, shapes[owner], axes, layout)

    return jax.tree_util.tree_map_with_path(spec, abstract_state)


def owner_of(path: tuple, shapes: dict[Path, tuple[int, ...]]) -> Path | None:
    """The parameter whose path ends that of an array of the state, if one does."""
    # Holds for every transformation of Optax: masks, chains and partitions only put
    # keys in front. See docs/library-notes.md, "Optax".
    keys = tuple(getattr(entry, "key", None) for entry in path)
    for start in range(len(keys)):
        if keys[start:] in shapes:
            return keys[start:]
    return None


def _follow(
    shape: Sequence[int], param_shape: Sequence[int], axes: DimAxes, layout: Layout
) -> P:
    """The axes of the parameter's dims that occur, in order, in another shape."""
    kept: list[tuple[str, ...]] = []
    start = 0  # Adafactor keeps one dim of a matrix in one array, the other in another
    for size in shape:
        matches = [d for d in range(start, len(param_shape)) if param_shape[d] == size]
        if not matches:
            kept.append(())
            continue
        start = matches[0] + 1
        kept.append(dividing_prefix(size, axes[matches[0]], layout.mesh.shape))
    return to_spec(tuple(kept))


def as_transformation(optimizer: Any, model: Any) -> Optimizer:
    """The Optax transformation behind what a user passes as ``optimizer``.

    Args:
        optimizer: A transformation; ``optax.MultiSteps``; or a function from the
            abstract model to one of them.
        model: The abstract model.

    Raises:
        TypeError: If it is none of these.
    """
    if isinstance(optimizer, Callable) and not isinstance(optimizer, tuple):
        optimizer = optimizer(model)
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}. Pass an Optax transformation "
            "such as optax.adamw(3e-4), optax.MultiSteps(...), or a function of the "
            "abstract model that returns one."
        )
    return optimizer
