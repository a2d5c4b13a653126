"""Warnings of models that train in another way than they seem to."""

from __future__ import annotations

import warnings

from flax import nnx

from nnx_parallel.layers import Remat
from nnx_parallel.sharding.arrays import dotted
from nnx_parallel.state import StatePlan


def warn_of_modes(plan: StatePlan, remat: Remat) -> None:
    """Warns of a model in evaluation mode, and of remat that acts on nothing."""
    if plan.is_evaluating:
        warnings.warn(
            "The model came in evaluation mode and is trained so: without dropout, its "
            "batch statistics frozen. Call model.train() before, if this is not meant.",
            stacklevel=3,
        )
    if remat != "none" and not plan.stack_remats:
        warnings.warn(
            f"remat={remat!r} acts on the blocks of a Stack, and this model "
            "has none: nothing is recomputed. Put its repeated blocks into a Stack, or "
            "use nnx.remat inside the model.",
            stacklevel=3,
        )


def warn_of_statistics(
    plan: StatePlan, model: nnx.Module, given: dict, after: dict
) -> None:
    """Warns of BatchNorm's statistics that the loss has left as they were."""
    still = [
        dotted((*path, name))
        for path, module in nnx.iter_modules(model)
        # Whoever builds it with use_running_average=True wants it frozen.
        if isinstance(module, nnx.BatchNorm) and not module.use_running_average
        for name in ("mean", "var")
        if after.get((*path, name)) is given.get((*path, name))
    ]
    if still and not plan.is_evaluating:
        shown = ", ".join(f"`{path}`" for path in still[:4])
        warnings.warn(
            f"The loss leaves {len(still)} batch statistics as they are: {shown}. In "
            "training mode BatchNorm updates them: call the model that the loss is "
            "given, not a copy, and without use_running_average=True.",
            stacklevel=2,
        )
