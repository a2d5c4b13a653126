"""A training state as the groups of a checkpoint, and back.

On disk the layout depends on no strategy: flat dicts of dotted path to array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from nnx_parallel.checkpoint.contents import Groups
from nnx_parallel.sharding.names import flatten_pure, path_of
from nnx_parallel.state import TrainState


def to_groups(state: TrainState) -> dict[str, dict[str, Any]]:
    """The arrays of a state, concrete or abstract, by group and dotted path.

    All arrays of the model form one group, whichever of them this run trains, so that
    a run which trains others finds them.
    """
    groups = {
        "model": flatten_pure(state.params) | flatten_pure(state.variables),
        "optimizer": _by_path(state.opt_state),
        "progress": _by_path(_progress(state)),
    }
    return groups if state.ema is None else groups | {"ema": flatten_pure(state.ema)}


def from_groups(abstract: TrainState, groups: Groups) -> TrainState:
    """The state with the arrays of some groups; the rest as in ``abstract``."""
    trees: dict[str, Any] = {}
    if "model" in groups:
        for name in ("params", "variables"):
            trees[name] = _fill(getattr(abstract, name), groups["model"])
    if "ema" in groups:
        trees["ema"] = _fill(abstract.ema, groups["ema"])
    if "optimizer" in groups:
        trees["opt_state"] = _fill(abstract.opt_state, groups["optimizer"])
    if "progress" in groups:
        trees |= _fill(_progress(abstract), groups["progress"])
    return dataclasses.replace(abstract, **trees)


def with_weights(state: TrainState, groups: Groups) -> TrainState:
    """The state with a model's arrays, from which its moving average starts too."""
    restored = from_groups(state, groups)
    if state.ema is None:
        return restored
    # Copies: a step donates the parameters and the average.
    ema = jax.tree.map(
        lambda x, old: x.astype(old.dtype, copy=True), restored.params, state.ema
    )
    return dataclasses.replace(restored, ema=ema)


def _progress(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "key": state.key, "loss_scale": state.loss_scale}


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_of(path): leaf for path, leaf in leaves}


def _fill(tree: Any, flat: Mapping[str, Any]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda p, _: flat[path_of(p)], tree)
