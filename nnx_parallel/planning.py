"""From an abstract model to the plan of its training state, and to the state itself."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.pipeline.check import check_model
from nnx_parallel.precision import Precision, cast_floating
from nnx_parallel.sharding import Layout
from nnx_parallel.sharding.arrays import variables_of
from nnx_parallel.sharding.model import (
    ModelFn,
    annotate,
    arrays_from,
    flatten,
    nest,
    placed_arrays,
    stored_shardings,
)
from nnx_parallel.sharding.optimizer import as_transformation, optimizer_specs
from nnx_parallel.state import MODES, LossScale, StatePlan, TrainState


def _decide_modes(model: nnx.Module) -> None:
    """Puts modules that came without a mode into training; others keep theirs."""
    for _, module in nnx.iter_modules(model):
        for name in MODES:
            if getattr(module, name, True) is None:
                setattr(module, name, False)


def plan_state(
    model: nnx.Module,
    layout: Layout,
    optimizer: object,
    *,
    wrt: Any = nnx.Param,
    precision: Precision | None = None,
    ema_decay: float | None = None,
) -> StatePlan:
    """Decides the place of every array of a training state from shapes alone.

    Args:
        model: The abstract model; placements are written into its metadata.
        layout: The strategy's answers over the mesh.
        optimizer: An Optax transformation or a function of the abstract model.
        wrt: Filter of the Variables to train.
        precision: The dtypes; float16 computation adds a loss scale.
        ema_decay: Decay of a moving average of the parameters, or ``None``.

    Raises:
        ValueError: If ``wrt`` selects nothing.
    """
    precision = precision or Precision()
    tx = as_transformation(optimizer, model)
    check_model(model, layout)
    placements = annotate(model, layout)
    _decide_modes(model)
    graphdef, trained, others = nnx.split(model, wrt, ...)
    model.eval()
    eval_graphdef = nnx.split(model)[0]
    trained_paths = frozenset(path for path, _ in nnx.to_flat_state(trained))
    _check_trained(model, wrt, trained_paths)
    is_param = [p for p, v in variables_of(model) if isinstance(v, nnx.Param)]
    plan = StatePlan(
        model_name=type(model).__name__,
        layout=layout,
        graphdef=graphdef,
        eval_graphdef=eval_graphdef,
        placements=placements,
        param_paths=frozenset(is_param) | trained_paths,
        trained_paths=trained_paths,
        abstract=None,  # pyright: ignore[reportArgumentType]
        tx=tx,
        precision=precision,
        ema_decay=ema_decay,
    )
    arrays = nnx.to_pure_dict(trained), nnx.to_pure_dict(others)
    return dataclasses.replace(plan, abstract=_abstract_state(plan, *arrays))


def _check_trained(model: nnx.Module, wrt: Any, trained_paths: frozenset) -> None:
    if not trained_paths:
        kinds = sorted({type(v).__name__ for _, v in variables_of(model)})
        raise ValueError(
            f"wrt={wrt} selects no Variable of the model, so nothing would be trained. "
            f"The model has Variables of kinds {kinds}."
        )


def _abstract_state(plan: StatePlan, params: dict, variables: dict) -> TrainState:
    state = jax.eval_shape(partial(_build_state, plan), params, variables, 0)
    stored = stored_shardings(plan.placements, plan.layout)
    shapes = {path: tuple(x.shape) for path, x in flatten(params).items()}
    specs = optimizer_specs(state.opt_state, shapes, plan.placements, plan.layout)
    whole = plan.layout.sharding(P())

    def placed(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(_with_sharding, tree, shardings)

    def like_model(tree: dict) -> dict:
        return placed(tree, nest({path: stored[path] for path in flatten(tree)}))

    return dataclasses.replace(
        jax.tree.map(partial(_with_sharding, sharding=whole), state),
        params=like_model(state.params),
        variables=like_model(state.variables),
        ema=None if state.ema is None else like_model(state.ema),
        opt_state=placed(
            state.opt_state,
            jax.tree.map(
                plan.layout.sharding, specs, is_leaf=lambda s: isinstance(s, P)
            ),
        ),
    )


def _with_sharding(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


_LOSS_STREAM = 0x1055
"""Sets the loss's random stream apart from the model's, which has the same seed."""


def _average(params: dict) -> dict:
    """A moving average at its start: float32, for bfloat16 has no room to move."""
    dtype = jnp.float32
    return jax.tree.map(
        lambda x: jnp.array(x, jnp.promote_types(x.dtype, dtype)), params
    )


def _build_state(
    plan: StatePlan, params: dict, variables: dict, seed: jax.Array | int
) -> TrainState:
    params = cast_floating(params, plan.precision.params)
    variables = nest(
        {
            path: cast_floating(x, plan.precision.params)
            if path in plan.param_paths
            else x
            for path, x in flatten(variables).items()
        }
    )
    return TrainState(
        step=jnp.int32(0),
        params=params,
        variables=variables,
        opt_state=plan.tx.init(params),
        key=jax.random.fold_in(jax.random.key(seed), _LOSS_STREAM),
        ema=_average(params) if plan.ema_decay is not None else None,
        loss_scale=LossScale.create() if plan.precision.needs_loss_scale else None,
    )


def init_state(
    plan: StatePlan, source: nnx.Module | ModelFn, rngs: nnx.Rngs, seed: int
) -> TrainState:
    """Builds the state, every array in its place from the start.

    Args:
        plan: Where it all goes.
        source: The model, or the function that builds it. A model's arrays are
            copied, so that training leaves them as they are.
        rngs: Random streams for the function.
        seed: Seed of the state's own key.
    """

    def build(arrays: dict, seed: jax.Array | int) -> TrainState:
        flat = flatten(arrays)
        params = nest({path: flat[path] for path in plan.trained_paths})
        variables = nest({p: x for p, x in flat.items() if p not in plan.trained_paths})
        return _build_state(plan, params, variables, seed)

    if isinstance(source, nnx.Module):
        shardings = stored_shardings(plan.placements, plan.layout)
        arrays = placed_arrays(source, rngs, shardings)
        jitted = jax.jit(build, out_shardings=plan.shardings, donate_argnums=0)
        return jitted(arrays, seed)
    # With a function, model and optimizer are one program: it compiles faster than two.
    make_arrays, streams = arrays_from(source, rngs)

    def build_all(streams: dict, seed: jax.Array | int) -> TrainState:
        return build(make_arrays(streams), seed)

    return jax.jit(build_all, out_shardings=plan.shardings)(streams, seed)
