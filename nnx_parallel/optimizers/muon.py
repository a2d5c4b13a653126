"""Optax transformations that apply functions to complete matrices, such as Muon.

The matrices are distributed over the devices (`optimizers.matrices`). Optax computes
everything else.
"""

import functools
import inspect
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from nnx_parallel.errors import OptimizerError, kind_of
from nnx_parallel.optimizers.matrices import map_matrices, matrix_dims
from nnx_parallel.sharding.names import path_of

Numbers = Any
"""The arrays that are matrices, and the dims that are their rows and columns. One of:

- a tree with `MuonDimensionNumbers` or ``None`` for each parameter;
- a prefix of such a tree;
- a function of the parameters that returns one of these;
- ``None`` for all arrays of rank 2.
"""

_PRECONDITIONING = ["frobenius", "spectral", "aol", "schatten"]


def by_matrix(
    function: Callable[[Array], Array], dimension_numbers: Numbers = None
) -> optax.GradientTransformation:
    """Makes a transformation that applies a function to every matrix of the updates.

    Use it to build optimizers that work on matrices. Under a strategy, the matrices are
    distributed over the devices so that their work is about equal. One all-to-all
    gathers the matrices, each device applies the function to its matrices without
    communication, and one all-to-all returns the shards of the results. Layers of a
    `Stack`, experts, and other dims that are neither rows nor columns enumerate
    matrices.

    Args:
        function: A function of a matrix ``(rows, columns)`` that keeps the shape. It is
            traced under ``jax.vmap``.
        dimension_numbers: A tree with `MuonDimensionNumbers` or ``None`` for each
            parameter, such as the result of `muon_dimension_numbers`, or a function of
            the parameters that returns such a tree. The updates of a parameter with
            ``None`` do not change. By default, the function is applied to all arrays of
            rank 2.

    Raises:
        OptimizerError: If the numbers are invalid for an array, or if the function
            changes the shape of a matrix.

    Example:
        Spectral descent replaces each update by the nearest orthogonal matrix.

        >>> import jax.numpy as jnp
        >>> import optax
        >>> from nnx_parallel.optimizers import by_matrix
        >>> def polar(matrix):
        ...     left, _, right = jnp.linalg.svd(matrix, full_matrices=False)
        ...     return left @ right
        >>> tx = optax.chain(optax.trace(0.95), by_matrix(polar), optax.scale(-0.02))
        >>> params = {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> updates["kernel"].shape
        (4, 2)
    """

    def init(params: optax.Params) -> optax.EmptyState:
        _check_dims(params, dimension_numbers)
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        leaves, structure = jax.tree.flatten(updates)
        numbers = _resolved(updates, dimension_numbers)
        chosen = [
            None if n is None else x for x, n in zip(leaves, numbers, strict=True)
        ]
        results = map_matrices(
            partial(_each, function),
            jax.tree.unflatten(structure, chosen),
            [n for n in numbers if n is not None],
        )
        return jax.tree.map(
            lambda x, mapped: x if mapped is None else mapped,
            updates,
            results,
            is_leaf=lambda x: x is None,
        ), state

    return optax.GradientTransformation(init, update)


def _each(function: Callable[[Array], Array], matrices: Array) -> Array:
    results = jax.vmap(function)(matrices)
    if jnp.shape(results) != matrices.shape:
        raise OptimizerError(
            f"The function of by_matrix returned shape {jnp.shape(results)[1:]} for a "
            f"matrix of shape {matrices.shape[1:]}. It must keep the shape."
        )
    return results.astype(matrices.dtype)


def _resolved(params: Any, numbers: Numbers) -> list[MuonDimensionNumbers | None]:
    """Returns the dimension numbers of each leaf."""
    if numbers is None:
        default = MuonDimensionNumbers()
        return [default if x.ndim == 2 else None for x in jax.tree.leaves(params)]
    found = numbers(params) if callable(numbers) else numbers
    for n in jax.tree.leaves(found, is_leaf=_is_numbers):
        if not _is_numbers(n):
            raise OptimizerError(
                f"A dimension number is {kind_of(n)}. Each must be a "
                f"MuonDimensionNumbers or None. {_FROM_MODEL}"
            )
    # One entry may stand for a subtree, because Optax accepts a prefix.
    try:
        tree = jax.tree.map(
            lambda n, below: jax.tree.map(lambda _: (n,), below),
            found,
            params,
            is_leaf=_is_numbers,
        )
    except ValueError as error:
        raise OptimizerError(_other_tree(found, params)) from error
    return [n for (n,) in jax.tree.structure(params).flatten_up_to(tree)]


_FROM_MODEL = "Use muon_dimension_numbers(model), with the same wrt as in the Trainer."


def _other_tree(numbers: Any, params: Any) -> str:
    """Describes how the trees of dimension numbers and of parameters differ."""
    ours, theirs = (
        {
            path_of(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf)
        }
        for tree, is_leaf in ((numbers, _is_numbers), (params, None))
    )
    alone = [
        f"{where}: {len(paths)}, such as {min(paths)}"
        for paths, where in (
            (ours - theirs, "entries without a trained parameter"),
            (theirs - ours, "trained parameters without an entry"),
        )
        if paths
    ]
    return (
        f"Dimension numbers do not match the parameters: {'; '.join(alone)}. Each "
        f"trained parameter needs an entry. {_FROM_MODEL}"
    )


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers)


def _check_dims(params: Any, numbers: Numbers) -> None:
    """Raises an error for invalid dimension numbers before the update is traced."""
    flat = jax.tree_util.tree_leaves_with_path(params)
    for (path, x), n in zip(flat, _resolved(params, numbers), strict=True):
        if n is not None:
            matrix_dims(path_of(path), x.shape, n)


@functools.wraps(optax.contrib.muon, assigned=())
def muon(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
    """Makes ``optax.contrib.muon`` [1], with its matrices distributed over devices.

    Arguments, results and state are the same as in Optax, so that `muon` can restore
    checkpoints of Optax's Muon, and vice versa. Only the placement of the computations
    differs.

    The Newton-Schulz iterations need complete matrices. With Optax's Muon, the
    partitioner splits each product, or computes it on every device. Here each device
    computes complete matrices, and all devices have about equal work. In [2] this is
    done for parameters that are replicated. One all-to-all gathers the matrices, all
    iterations run without communication, and one all-to-all returns the results. Both
    transfers are in the dtype of the momentum. The momentum and all other arrays stay
    in the same shards as the parameters.

    Args:
        *args: Positional arguments of `optax.contrib.muon`; the first is the learning
            rate.
        **kwargs: Keyword arguments of `optax.contrib.muon`. For a model, pass
            ``muon_weight_dimension_numbers=muon_dimension_numbers(model)``. The default
            takes all arrays of rank 2, which is wrong for a `Stack`, because a `Stack`
            adds a dim to each array.

    Raises:
        OptimizerError: If the numbers are invalid for an array or do not match the
            parameters, if a learning rate is neither a number nor a schedule, or if the
            preconditioning is unknown.
        TypeError: If Optax's function does not have an argument.

    Example:
        >>> from nnx_parallel.optimizers import muon, muon_dimension_numbers
        >>> optimizer = lambda model: muon(
        ...     0.02, muon_weight_dimension_numbers=muon_dimension_numbers(model)
        ... )

    References:
        [1] Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
        2024, https://kellerjordan.github.io/posts/muon
        [2] Liu et al., "Muon is Scalable for LLM Training", 2025, sections 2.2 and 2.3,
        https://arxiv.org/abs/2502.16982
    """
    plain = optax.contrib.muon(*args, **kwargs)  # raises for unknown names
    bound = inspect.signature(optax.contrib.muon).bind(*args, **kwargs)
    bound.apply_defaults()
    options = SimpleNamespace(**bound.arguments)
    if options.adam_learning_rate is None:
        options.adam_learning_rate = options.learning_rate
    _check_options(options)
    given = options.muon_weight_dimension_numbers

    def init(params: optax.Params) -> optax.OptState:
        _check_dims(params, given)
        return plain.init(params)

    def labels(params: Any) -> Any:
        kinds = ["adam" if n is None else "muon" for n in _resolved(params, given)]
        return jax.tree.unflatten(jax.tree.structure(params), kinds)

    parts: dict[Any, Any] = {
        "muon": optax.chain(
            _scale_by_muon(options),
            _scale_by_shape(given, options.consistent_rms),
            optax.add_decayed_weights(options.weight_decay, options.weight_decay_mask),
            optax.scale_by_learning_rate(options.learning_rate),
        ),
        "adam": optax.adamw(
            options.adam_learning_rate,
            b1=options.adam_b1,
            b2=options.adam_b2,
            eps=options.eps,
            eps_root=options.adam_eps_root,
            mu_dtype=options.mu_dtype,
            weight_decay=options.adam_weight_decay,
            nesterov=options.nesterov,
        ),
    }
    return optax.GradientTransformationExtraArgs(
        init, optax.partition(parts, labels).update
    )


def _check_options(options: SimpleNamespace) -> None:
    for name in ("learning_rate", "adam_learning_rate"):
        rate = getattr(options, name)
        # A traced number is a `jax.Array`, but in Python 3.11 `isinstance` is False for
        # a union that contains `jax.Array`.
        is_number = isinstance(rate, jax.Array) or isinstance(rate, ArrayLike)  # noqa: SIM101
        if not (callable(rate) or is_number):
            raise OptimizerError(
                f"muon got {name}={rate!r}. It must be a number, or an Optax schedule."
            )
    if options.preconditioning not in _PRECONDITIONING:
        raise OptimizerError(
            f"muon got preconditioning={options.preconditioning!r}. It must be one of "
            f"{_PRECONDITIONING}."
        )


def _ahead(options: SimpleNamespace, grads: Any, state: MuonState) -> tuple[Any, Any]:
    """Returns the input of the iterations, and the new average of the gradients."""
    beta, count = options.beta, optax.safe_increment(state.count)
    mean = optax.tree.update_moment(grads, state.mu, beta, 1)
    if not options.nesterov:
        return optax.tree.bias_correction(mean, beta, count), mean
    ahead = jax.tree.map(
        lambda m, g: beta * m + (1 - beta) * g,
        optax.tree.bias_correction(mean, beta, optax.safe_increment(count)),
        optax.tree.bias_correction(grads, beta, count),
    )
    return ahead, mean


def _iterate(
    options: SimpleNamespace, coefficients: ArrayLike, matrices: Array
) -> Array:
    """Orthogonalizes matrices of one shape by Newton-Schulz iterations."""
    # Optax exports its iterations only together with its momentum. With beta = 0, the
    # momentum is equal to the gradient.
    tx = scale_by_muon(
        ns_steps=options.ns_steps,
        beta=0.0,
        eps=options.eps,
        nesterov=False,
        preconditioning=options.preconditioning,
        weight_dimension_numbers=MuonDimensionNumbers(1, 2),
    )
    state = MuonState(jnp.int32(0), jnp.zeros_like(matrices), coefficients)
    return jnp.asarray(tx.update(matrices, state)[0])


def _scale_by_muon(options: SimpleNamespace) -> optax.GradientTransformation:
    """Makes the update of `optax.contrib.scale_by_muon`; `muon` makes the state."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        assert isinstance(state, MuonState)
        mean, mu = _ahead(options, updates, state)
        # Arrays without dimension numbers are masked here, so no number is None.
        numbers: Any = _resolved(mean, options.muon_weight_dimension_numbers)
        run = partial(_iterate, options, state.ns_coeffs)
        results = map_matrices(run, mean, numbers)
        if options.adaptive:
            results = jax.tree.map(
                lambda x, y: jnp.sum(x.conj() * y) * y, mean, results
            )
        mu = optax.tree.cast(mu, options.mu_dtype)
        count = optax.safe_increment(state.count)
        return results, MuonState(count, mu, state.ns_coeffs)

    return optax.GradientTransformation(optax.init_empty_state, update)


def _scale_by_shape(
    given: Numbers, consistent_rms: ArrayLike | None
) -> optax.GradientTransformation:
    """Scales each array by the shape of its matrices, as Optax's Muon does."""

    def scale(path: tuple, x: Array, numbers: MuonDimensionNumbers) -> Array:
        dims = matrix_dims(path_of(path), x.shape, numbers)
        rows, columns = (
            math.prod(x.shape[dim] for dim in of) for of in (dims.rows, dims.columns)
        )
        if consistent_rms is None:
            return jnp.sqrt(jnp.maximum(1, columns / rows)) * x
        return jnp.sqrt(jnp.maximum(rows, columns)) * consistent_rms * x

    def update(updates: Any, params: Any = None) -> Any:
        del params
        flat, structure = jax.tree_util.tree_flatten_with_path(updates)
        numbers: Any = _resolved(updates, given)
        scaled = [scale(*x, n) for x, n in zip(flat, numbers, strict=True)]
        return jax.tree.unflatten(structure, scaled)

    return optax.stateless(update)
