"""Masks for optimizers of stacked layers, their updates, and hyperparameters.

A `Stack` keeps N kernels of shape (in, out) as one array (N, in, out), where an
optimizer that looks at ranks would take a bias for a matrix: ranks here are a layer's.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from nnx_parallel.errors import OptimizerError, warn_user
from nnx_parallel.sharding.model import nest
from nnx_parallel.sharding.names import array_info, path_of, variables_of
from nnx_parallel.sharding.optimizer import Optimizer
from nnx_parallel.state import StatePlan, TrainState


def decay_mask(model: nnx.Module, wrt: Any = nnx.Param) -> dict[str, Any]:
    """Which parameters weight decay applies to: matrices, not biases or scales.

    Args:
        model: The model, abstract or not.
        wrt: Filter of the Variables that are trained, as the Trainer has it.

    Returns:
        bool for each parameter, as the nested dict that Optax sees.

    Example:
        >>> import optax
        >>> from nnx_parallel import decay_mask
        >>> optimizer = lambda model: optax.adamw(3e-4, mask=decay_mask(model))
    """
    return _map_params(_decays, model, wrt)


def muon_dimension_numbers(model: nnx.Module, wrt: Any = nnx.Param) -> dict[str, Any]:
    """Which dims of each kernel Muon reads as rows and columns of a matrix.

    ``Dense`` knows its own in and out dims; another kernel counts if a layer of it has
    rank 2. Embeddings, biases and scales are left to Muon's Adam branch. Arguments are
    those of `decay_mask`.

    Returns:
        ``optax.contrib.MuonDimensionNumbers`` or ``None`` for each parameter.

    Example:
        >>> import optax
        >>> from nnx_parallel import muon_dimension_numbers
        >>> optimizer = lambda model: optax.contrib.muon(
        ...     0.02, muon_weight_dimension_numbers=muon_dimension_numbers(model)
        ... )
    """
    return _map_params(_muon_dims, model, wrt)


def _map_params(function: Callable, model: nnx.Module, wrt: Any) -> dict[str, Any]:
    flat = variables_of(model, wrt)
    return nest({path: function(path, variable) for path, variable in flat})


def _decays(path: tuple, variable: nnx.Variable) -> bool:
    info = array_info(path, variable)
    return len(info.shape) - info.is_stacked > 1 and path[-1] not in ("bias", "scale")


def _muon_dims(path: tuple, variable: nnx.Variable) -> MuonDimensionNumbers | None:
    info = array_info(path, variable)
    first, ndim = int(info.is_stacked), len(info.shape)
    num_in_dims = variable.get_metadata().get("num_in_dims")
    if num_in_dims is None:
        if ndim - first != 2 or path[-1] != "kernel":
            return None
        num_in_dims = 1
    # (layers, *in, *out), or without the first.
    inputs = tuple(range(first, first + num_in_dims))
    return MuonDimensionNumbers(inputs, tuple(range(first + num_in_dims, ndim)))


def update_with(
    tx: Optimizer, grads: Any, opt_state: optax.OptState, params: Any, **known: Any
) -> tuple[Any, optax.OptState]:
    """Updates and state of an optimizer, which is given what it takes of ``known``.

    Raises:
        OptimizerError: If it needs another argument.
    """
    try:
        update = optax.with_extra_args_support(tx).update
        return update(grads, opt_state, params, **known)
    except (TypeError, ValueError) as error:
        # `optax.chain` hands all of them to each part, and its signature hides which
        # of them a part takes: only the call tells (docs/library-notes.md, "Optax").
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown[1] in known:
            rest = {name: x for name, x in known.items() if name != unknown[1]}
            return update_with(tx, grads, opt_state, params, **rest)
        if not re.search(r"required keyword-only argument|_fn must be", str(error)):
            raise
        raise OptimizerError(
            f"The optimizer needs what a step cannot give it: {error}. It gets the "
            "gradients and, if it takes them, value= (the loss) and grad=. What "
            "computes the loss again within an update (value_fn=, grad_fn=), as line "
            "searches do, has no place in a sharded step: use it without, such as "
            "optax.lbfgs(1e-2, linesearch=None)."
        ) from error


def learning_rate(opt_state: optax.OptState) -> jax.Array | None:
    """The learning rate of an optimizer under ``optax.inject_hyperparams``.

    Elsewhere it is a constant inside the update that cannot be read: ``None``.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        if f".{path_of(path)}".endswith(".hyperparams.learning_rate"):
            return leaf
    return None


def warn_of_changes(plan: StatePlan, restored: TrainState) -> None:
    """Warns if hyperparameters of a restored state are not those of the optimizer.

    Those that a schedule sets change by themselves and are not compared.
    """
    saved = _constants(restored.opt_state)
    if not saved:
        return

    def fresh() -> dict[str, jax.Array]:
        zeros = jax.tree.map(jnp.zeros_like, plan.abstract.params)
        return _constants(plan.tx.init(zeros))

    # Compiled, for then the rest of the optimizer's state is never made.
    now = jax.device_get(jax.jit(fresh)())
    lines = [
        f"{path.rpartition('.')[2]}: {float(value):.6g} in the checkpoint, "
        f"{float(now[path]):.6g} in the optimizer now"
        for path, value in saved.items()
        if path in now and value.shape == () and float(value) != float(now[path])
    ]
    if lines:
        warn_user(
            f"Hyperparameters have changed since the checkpoint: {'; '.join(lines)}. "
            "Those of the checkpoint are used, for they are part of the optimizer's "
            "state: set them there, or restore(weights_only=True).",
        )


def _constants(opt_state: Any) -> dict[str, Any]:
    """Values under ``hyperparams`` that no schedule sets, by path."""
    constants, scheduled = {}, set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        name = path_of(path)
        # `inject_hyperparams` has `hyperparams.NAME`, and for one that a schedule sets
        # `hyperparams_states.NAME.count` too.
        owner, is_state, rest = name.partition("hyperparams_states.")
        if is_state:
            scheduled.add(f"{owner}hyperparams.{rest.partition('.')[0]}")
        elif "hyperparams." in name:
            constants[name] = leaf
    return {name: leaf for name, leaf in constants.items() if name not in scheduled}
