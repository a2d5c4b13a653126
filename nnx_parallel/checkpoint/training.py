"""A training state as the groups of a checkpoint, and back.

On disk the layout depends on no strategy: flat dicts of dotted path to array.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from nnx_parallel.sharding.arrays import flatten_pure
from nnx_parallel.sharding.optimizer import state_path
from nnx_parallel.state import TrainState

Groups = dict[str, dict[str, Any]]

_TREES = ("params", "variables", "ema")


def to_groups(state: TrainState) -> Groups:
    """The arrays of a state by group and dotted path.

    Also of an abstract state, for `Checkpointer.restore`.
    """
    groups = {
        name: flatten_pure(tree)
        for name in _TREES
        if (tree := getattr(state, name)) is not None
    }
    groups["optimizer"] = _by_path(state.opt_state)
    groups["progress"] = _by_path(_progress(state))
    return groups


def from_groups(abstract: TrainState, groups: Groups) -> TrainState:
    """The state with the arrays of some groups; all else as in ``abstract``."""
    trees: dict[str, Any] = {
        name: _fill(getattr(abstract, name), groups[name])
        for name in _TREES
        if name in groups
    }
    if "optimizer" in groups:
        trees["opt_state"] = _fill(abstract.opt_state, groups["optimizer"])
    if "progress" in groups:
        trees |= _fill(_progress(abstract), groups["progress"])
    return dataclasses.replace(abstract, **trees)


def _progress(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "key": state.key, "loss_scale": state.loss_scale}


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {state_path(path): leaf for path, leaf in leaves}


def _fill(tree: Any, flat: dict[str, Any]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda p, _: flat[state_path(p)], tree)
