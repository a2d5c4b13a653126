"""Placement of a whole model: annotate it, build it sharded, move its state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
from flax import nnx

from nnx_parallel.sharding.arrays import array_info, variables_of
from nnx_parallel.sharding.layout import Layout, Placement
from nnx_parallel.sharding.rules import PathRules

Path = tuple[Hashable, ...]
ModelFn = Callable[[nnx.Rngs], nnx.Module]


def abstract_model(source: nnx.Module | ModelFn, rngs: nnx.Rngs) -> nnx.Module:
    """The model with shapes for arrays; nothing is allocated.

    Args:
        source: The model, or the function that builds it.
        rngs: Random streams for the function; they are not advanced.
    """
    if isinstance(source, nnx.Module):
        return abstract_copy(*nnx.split(source))
    model_fn: ModelFn = source
    graphdef, state = nnx.split(rngs)
    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(lambda: model_fn(nnx.merge(graphdef, state, copy=True)))


def abstract_copy(graphdef: nnx.GraphDef, state: nnx.State) -> nnx.Module:
    """A split model with shapes for arrays, its metadata free to be changed."""
    pure = jax.tree.map(_shape_of, nnx.to_pure_dict(state))
    with nnx.use_eager_sharding(False):
        return nnx.merge(graphdef, pure)


def _shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def annotate(model: nnx.Module, layout: Layout) -> dict[Path, Placement]:
    """Writes each array's `Placement` into its Variable's metadata.

    It travels in the graphdef, so that a `Stack` knows where its own arrays live.

    Args:
        model: An abstract model; its metadata is changed.
        layout: The layout.

    Returns:
        The placements by path.

    Warns:
        UserWarning: If a path rule matches no array.
    """
    placements = {}
    for path, variable in variables_of(model):
        placements[path] = layout.place(array_info(path, variable))
        variable.set_metadata(placement=placements[path], eager_sharding=False)
    _warn_unmatched(placements, layout)
    return placements


def _warn_unmatched(placements: dict[Path, Placement], layout: Layout) -> None:
    reasons = {placement.reason for placement in placements.values()}
    pairs = [p for r in layout.rules if isinstance(r, PathRules) for p in r.pairs]
    idle = [regex for regex, _ in pairs if f"path rule {regex!r}" not in reasons]
    if idle:
        warnings.warn(
            f"Path rules {idle} match no array, or an earlier rule takes them all. "
            "strategy.describe(model) lists every path.",
            stacklevel=4,
        )


def map_placements(
    state: nnx.State, layout: Layout, function: Callable[[Placement, Layout], Any]
) -> nnx.State:
    """A state of the same tree whose leaves are ``function(placement, layout)``."""
    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state(
        [
            (path, variable.replace(function(_place(path, variable, layout), layout)))
            for path, variable in flat
        ]
    )


def _place(path: Path, variable: nnx.Variable, layout: Layout) -> Placement:
    return layout.place(array_info(path, variable))


def build_sharded(
    model_fn: ModelFn, rngs: nnx.Rngs, abstract: nnx.Module, layout: Layout
) -> dict:
    """Runs ``model_fn`` under jit with each array made in its place.

    Args:
        model_fn: Builds the model.
        rngs: Its random streams; they are not advanced.
        abstract: Its annotated abstract model.
        layout: The layout.

    Returns:
        The state as a nested dict of global arrays.
    """
    shardings = pure_shardings(abstract, layout)
    graphdef, state = nnx.split(rngs)

    @partial(jax.jit, out_shardings=shardings)
    def build(state: dict) -> dict:
        with nnx.use_eager_sharding(False):
            model = model_fn(nnx.merge(graphdef, state))
        return nnx.to_pure_dict(nnx.state(model))

    return build(nnx.to_pure_dict(state))


def pure_shardings(abstract: nnx.Module, layout: Layout) -> dict:
    """The stored shardings of an annotated model as a nested dict."""
    flat = {
        path: layout.sharding(variable.get_metadata()["placement"].stored)
        for path, variable in variables_of(abstract)
    }
    return nest(flat)


def place_state(state: nnx.State, shardings: nnx.State) -> nnx.State:
    """Copies each array to its sharding; donating it leaves the source whole."""
    return jax.tree.map(
        lambda x, sharding: jax.device_put(x, sharding, may_alias=False),
        state,
        shardings,
    )


def nest(flat: dict[Path, Any]) -> dict:
    """A flat dict by path as nested dicts."""
    return nnx.traversals.unflatten_mapping(flat)


def flatten(nested: dict) -> dict[Path, Any]:
    """Nested dicts as one flat dict by path."""
    return dict(nnx.traversals.flatten_mapping(nested))
