"""Optimizers that see each layer of a `Stack` as a separate array.

A `Stack` keeps the arrays of N layers as one array. An optimizer that uses properties
of a complete array (its norm, its rank, its rows and columns) would treat all layers as
one array. `by_layer` shows such an optimizer each layer separately, and
`warn_of_stacked_updates` warns if an optimizer needs `by_layer`.
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonState

from nnx_parallel.errors import OptimizerError, warn_user
from nnx_parallel.optimizers.steps import update_with
from nnx_parallel.programs import (
    Fold,
    Origins,
    TracedFunction,
    is_call,
    names_in,
    needed,
    trace,
)
from nnx_parallel.sharding.model import Path, flatten, nest
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.optimizer import (
    Optimizer,
    check_transformation,
    knowing_layers,
    stacked_params,
)
from nnx_parallel.state import StatePlan


def by_layer(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it sees each layer of a `Stack` as a separate array.

    For any Optax transformation, the updates equal the updates of the same layers in a
    list. This matters for trust ratios (``optax.lamb``, ``lars``, ``fromage``),
    factored moments (``adafactor``), norms of arrays (``novograd``,
    ``adaptive_grad_clip``, ``clip_by_block_rms``), and masks by rank. Sums over the
    complete tree, as in ``clip_by_global_norm``, include all layers of all arrays, with
    or without `by_layer`. The state has the optimizer's structure, with a leading
    ``layers`` dim for each stacked array. It is sharded and saved like any other state.

    A transformation that treats each array separately is mapped with ``jax.vmap``. A
    transformation that combines arrays, or draws random numbers, is traced once for
    each layer, which takes longer. Keep such a transformation outside of `by_layer` if
    the result is the same, as in
    ``optax.chain(optax.clip_by_global_norm(1.0), by_layer(optax.lamb(1e-3)))``. `muon`
    handles layers without `by_layer`.

    Args:
        optimizer: An Optax transformation. Masks and labels that are trees have one
            entry for each stacked array, as in the result of `decay_mask`.

    Raises:
        OptimizerError: If the argument is not an Optax transformation, or if the
            optimizer is used outside a Trainer, where the stacked arrays are not known.

    Example:
        >>> import numpy as np
        >>> from flax import nnx
        >>> from nnx_parallel import Trainer
        >>> from nnx_parallel.layers import Stack
        >>> model = lambda rngs: Stack(lambda r: nnx.Linear(4, 4, rngs=r), 3, rngs=rngs)
        >>> loss = lambda model, batch: ((model(batch) - 1) ** 2).mean()
        >>> trainer = Trainer(model, by_layer(optax.lamb(1e-2)), loss, loggers=())
        >>> history = trainer.fit([np.ones((16, 4), np.float32)] * 2, num_steps=2)
    """
    optimizer = check_transformation("by_layer", optimizer, "optax.lamb(1e-3)")
    # Inside, no array has layers.
    tx: Any = knowing_layers(optax.with_extra_args_support(optimizer), frozenset())

    def init(params: Any) -> Any:
        stacked = _known_stacked()
        if not _sizes(params, stacked):
            return tx.init(params)
        slim = jax.eval_shape(tx.init, _slim(params, stacked))
        if _is_per_array(tx, params, params, {}, stacked):
            return _mapped(tx.init, (params,), slim, stacked)
        return _stack(tx.init(_listed(params, stacked)), slim, stacked)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        stacked = _known_stacked()
        if not _sizes(updates, stacked):
            return tx.update(updates, state, params, **extra)

        def run(updates: Any, state: Any, params: Any, extra: Any) -> Any:
            return tx.update(updates, state, params, **extra)

        if _is_per_array(tx, updates, params, extra, stacked):
            args = updates, state, params, extra
            return _mapped(run, args, (updates, state), stacked)
        lists = [_listed(x, stacked) for x in (updates, params, extra)]
        like = jax.eval_shape(tx.init, jax.eval_shape(lambda: lists[0]))
        found, new = run(lists[0], _unstack(state, like, stacked), *lists[1:])
        return _stack(found, updates, stacked), _stack(new, state, stacked)

    return optax.GradientTransformationExtraArgs(init, update)


def _known_stacked() -> frozenset[Path]:
    if (stacked := stacked_params()) is None:
        raise OptimizerError(
            "by_layer is used outside a Trainer, so it does not know which arrays "
            "belong to a Stack. Pass it to Trainer(optimizer=...). It may be a part of "
            "optax.chain or optax.multi_transform."
        )
    return stacked


def _is_stacked(keys: tuple, stacked: frozenset[Path]) -> bool:
    return tuple(getattr(key, "key", None) for key in keys) in stacked


def _sizes(tree: Any, stacked: frozenset[Path]) -> list[int]:
    """Returns the distinct numbers of layers in a tree like the parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return sorted({x.shape[0] for keys, x in leaves if _is_stacked(keys, stacked)})


def _slim(tree: Any, stacked: frozenset[Path]) -> Any:
    """Replaces the shapes of stacked arrays by the shapes of one layer."""

    def one(keys: tuple, x: Any) -> Any:
        return x[0] if _is_stacked(keys, stacked) else x

    return jax.eval_shape(partial(jax.tree_util.tree_map_with_path, one), tree)


def _listed(tree: Any, stacked: frozenset[Path], most: int | None = None) -> Any:
    """Replaces each stacked array by a dict of its layers, by index.

    With ``most``, each dict has at most this number of layers.
    """

    def split(keys: tuple, x: Any) -> Any:
        if not _is_stacked(keys, stacked):
            return x
        return {index: x[index] for index in range(x.shape[0])[:most]}

    return jax.tree_util.tree_map_with_path(split, tree)


def _owner(keys: tuple, paths: Collection[Path]) -> tuple[Path, int] | None:
    """Finds the parameter to which an array of a state belongs.

    Returns the parameter's path, and the index in ``keys`` where the path ends. Unlike
    `owner_of`, this function allows more keys after the path: SM3 has an array for each
    dim of a parameter.
    """
    names = tuple(getattr(key, "key", None) for key in keys)
    for start, end in itertools.combinations(range(len(names) + 1), 2):
        if names[start:end] in paths:
            return names[start:end], end
    return None


def _is_per_array(
    tx: optax.GradientTransformationExtraArgs,
    updates: Any,
    params: Any,
    extra: Mapping[str, Any],
    stacked: frozenset[Path],
) -> bool:
    """Returns True if each update depends only on its own array, without randomness."""
    # Two layers are enough to show whether layers depend on each other.
    updates, params, extra = jax.eval_shape(
        lambda *trees: [_listed(tree, stacked, 2) for tree in trees],
        *(updates, params, extra),
    )

    def run(updates: Any, state: Any, params: Any, extra: Any) -> Any:
        return tx.update(updates, state, params, **extra), tx.init(updates)

    state = jax.eval_shape(tx.init, updates)
    traced = trace(run, updates, state, params, extra)
    if _draws(traced):
        return False
    leaves = jax.tree_util.tree_leaves_with_path
    paths = {tuple(key.key for key in keys) for keys, _ in leaves(updates)}

    def owner(keys: tuple) -> Path | None:
        found = _owner(keys, paths)
        return found and found[0]

    origins = [frozenset({owner(keys)}) for keys, _ in leaves(traced.inputs)]
    found = leaves(Origins()(origins, traced))
    return all(origin <= {None, owner(keys)} for keys, origin in found)


def _draws(traced: TracedFunction) -> bool:
    """Returns True if a function draws random numbers."""
    names = names_in(traced.eqns)
    return any(name.startswith(("random_", "threefry")) for name in names)


def _mapped(
    function: Callable[..., Any], args: tuple, like: Any, stacked: frozenset[Path]
) -> Any:
    """Maps a function over the layers of stacked arrays.

    There is one ``jax.vmap`` for each distinct number of layers. It maps only the
    arrays of stacks that have this number of layers.

    Args:
        function: The function of arrays of one layer.
        args: The arguments of the function, with stacked arrays.
        like: The result, or a tree with the structure of the result.
        stacked: The paths of stacked arrays.
    """
    sizes = {
        tuple(key.key for key in keys): x.shape[0]
        for keys, x in jax.tree_util.tree_leaves_with_path(args[0])
        if _is_stacked(keys, stacked)
    }

    def axes(tree: Any, size: int) -> Any:
        def axis(keys: tuple, _: Any) -> int | None:
            owner = _owner(keys, sizes)
            return 0 if owner and sizes[owner[0]] == size else None

        return jax.tree_util.tree_map_with_path(axis, tree)

    for size in sorted(set(sizes.values())):
        function = jax.vmap(function, axes(args, size), axes(like, size))
    return function(*args)


def _stack(tree: Any, like: Any, stacked: frozenset[Path]) -> Any:
    """Undoes `_listed`: stacks the layers; ``like`` has the result's structure."""
    layers: dict[tuple, list] = {}
    for keys, x in jax.tree_util.tree_leaves_with_path(tree):
        owner = _owner(keys, stacked)
        path = keys if owner is None else keys[: owner[1]] + keys[owner[1] + 1 :]
        layers.setdefault(path, []).append(x)

    def join(keys: tuple, _: Any) -> Any:
        found = layers[keys]
        return found[0] if _owner(keys, stacked) is None else jnp.stack(found)

    return jax.tree_util.tree_map_with_path(join, like)


def _unstack(tree: Any, like: Any, stacked: frozenset[Path]) -> Any:
    """Undoes `_stack` for a state; ``like`` has the result's structure."""
    found = dict(jax.tree_util.tree_leaves_with_path(tree))

    def take(keys: tuple, _: Any) -> Any:
        if (owner := _owner(keys, stacked)) is None:
            return found[keys]
        end = owner[1]
        return found[keys[:end] + keys[end + 1 :]][keys[end].key]

    return jax.tree_util.tree_map_with_path(take, like)


_MOST = 128
"""Largest dim of the small arrays that `warn_of_stacked_updates` compares.

It is 128 because Adafactor does not factor smaller dims.
"""

_TOLERANCE = 1e-4
"""Smallest difference that is reported, as a share of an array's largest update.

Rounding causes far smaller differences.
"""


def warn_of_stacked_updates(plan: StatePlan) -> None:
    """Warns if an optimizer updates stacked layers differently from a list of layers.

    NumPy computes the updates of both, so that nothing is compiled. The comparison uses
    small arrays of two layers, with one array for each name and shape.

    There is no warning if an optimizer draws random numbers, because its updates cannot
    be compared. There is also no warning for matrices that Muon updates: their
    dimension numbers describe the stacked array, and Muon treats layers as a batch.
    """
    muons = _by_muon(plan.abstract.opt_state)
    shapes = {
        path: _small(x.shape, is_stacked=plan.placements[path].is_stacked)
        for path, x in flatten(plan.abstract.params).items()
    }
    stacked = [path for path in shapes if plan.placements[path].is_stacked]
    judged = [path for path in stacked if path not in muons]
    few = {(path[-1], shapes[path]): path for path in reversed(judged)}
    # A mask that is a tree matches only the tree of all parameters. So a trial with a
    # few parameters may fail, and is then repeated with all parameters.
    for paths in (few.values(), shapes) if judged else ():
        chosen = {path: shapes[path] for path in paths}
        try:
            found = _stacked_differences(plan.tx, chosen, frozenset(stacked), judged)
        except Exception:
            continue
        if found:
            path, share = max(found.items(), key=lambda item: item[1])
            warn_user(
                "The optimizer updates the layers of a Stack differently from a list "
                "of the same layers: with test values, an update of "
                f"`{dotted(path)}` differs by {share:.0%}. The optimizer uses a "
                "property of a complete array (its norm, its rank, its factors), but "
                "a Stack keeps all layers in one array. Use by_layer(optimizer), which "
                "shows the optimizer each layer separately. For masks by rank, there "
                "is also decay_mask(model).",
            )
        return


def _by_muon(opt_state: Any) -> set[Path]:
    """Returns the paths of parameters that have a momentum of Muon in the state."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, MuonState))
    states = [node for node in nodes if isinstance(node, MuonState)]
    return {
        tuple(key.key for key in keys)
        for state in states
        for keys, _ in jax.tree_util.tree_leaves_with_path(state.mu)
    }


def _small(shape: tuple[int, ...], *, is_stacked: bool) -> tuple[int, ...]:
    """Reduces a shape to two layers, and to at most two dims longer than 4."""
    layers, dims = shape[:is_stacked], shape[is_stacked:]
    largest = sorted(range(len(dims)), key=lambda i: -dims[i])[:2]
    sizes = [min(n, _MOST if i in largest else 4) for i, n in enumerate(dims)]
    return (*(min(n, 2) for n in layers), *sizes)


def _stacked_differences(
    tx: Optimizer,
    shapes: Mapping[Path, tuple[int, ...]],
    stacked: frozenset[Path],
    judged: Collection[Path],
) -> dict[Path, float]:
    """Returns the differences of updates that are not equal, by parameter.

    A difference is a share of the largest update in the array.
    """
    rng = np.random.default_rng(0)
    params, directions = {}, {}
    for path, shape in shapes.items():
        # The layers have values of different magnitudes, so that their norms differ.
        scales = 1 + 7 * np.arange(shape[0]) if path in stacked else np.ones(())
        scales = scales.reshape(scales.shape + (1,) * (len(shape) - scales.ndim))
        for group, sizes in ((params, scales), (directions, scales[::-1])):
            group[path] = np.asarray(rng.normal(size=shape) * sizes, np.float32)
    trees = nest(params), nest(directions)
    paths = [path for path in judged if path in shapes]
    as_stack = _Trial(tx, trees, lambda updates: [updates[path] for path in paths])
    as_list = _Trial(
        tx,
        tuple(_listed(tree, stacked) for tree in trees),
        lambda updates: [
            [updates[*path, index] for index in range(shapes[path][0])]
            for path in paths
        ],
    )
    found: dict[Path, float] = {}
    if as_stack.draws or as_list.draws:
        return found
    for scale in (1e-3, 1.0, 1e3):  # gradients below and above usual clipping limits
        for ours, theirs in zip(as_stack.run(scale), as_list.run(scale), strict=True):
            for path, x, layers in zip(paths, ours, theirs, strict=True):
                own = np.stack(layers)
                share = np.max(np.abs(x - own)) / max(np.max(np.abs(own)), 1e-30)
                if share > _TOLERANCE:
                    found[path] = max(found.get(path, 0.0), float(share))
    return found


class _Trial:
    """An optimizer's updates of small arrays, traced once and computed with NumPy."""

    def __init__(
        self, tx: Optimizer, trees: tuple[Any, ...], take: Callable[[dict], list]
    ) -> None:
        params, directions = trees

        def init(params: Any) -> Any:
            return tx.init(params)

        def update(grads: Any, state: Any, params: Any) -> Any:
            value = jnp.float32(1)
            new, state = update_with(tx, grads, state, params, value=value, grad=grads)
            return take(flatten(new)), state

        self._init = trace(init, params)
        traced = trace(update, directions, self._init.shapes, params, inlined=is_call)
        self.draws = _draws(self._init) or _draws(traced)
        # Updates that are not compared are left out, because some of them, such as
        # Muon's, are slow.
        eqns = needed(traced.eqns, jax.tree.leaves(traced.outputs))
        self._update = replace(traced, eqns=eqns)
        self._params, self._directions = (
            [np.float64(x) for x in jax.tree.leaves(tree)] for tree in trees
        )

    def run(self, scale: float) -> list[Any]:
        """Returns the updates of two steps, from the first with any nonzero update.

        At the start of a warm-up, all updates are 0.
        """
        compute = _Compute()
        state = compute(self._params, self._init)
        found: list[Any] = []
        for step in range(16):
            # The gradients of consecutive steps differ, so that moments affect the
            # update.
            factor = scale if step % 2 == 0 else -scale / 2
            grads = [factor * x for x in self._directions]
            inputs = [*grads, *jax.tree.leaves(state), *self._params]
            updates, state = compute(inputs, self._update)
            if found or any(np.any(x) for x in jax.tree.leaves(updates)):
                found.append(updates)
            if len(found) == 2:
                break
        return found


class _Compute(Fold):
    """Computes values with NumPy, or with JAX for operations outside `_NUMPY`."""

    def constant(self, *numbers: Any) -> np.ndarray:
        (number,) = numbers
        return _array(number, np.result_type(number))

    def apply(self, inputs: list, *eqns: jex.JaxprEqn) -> list:
        (eqn,) = eqns
        name, params = eqn.primitive.name, eqn.params
        if name in _SAME_NUMBERS:
            results = [inputs[0].reshape(eqn.outvars[0].aval.shape)]  # pyright: ignore[reportAttributeAccessIssue]
        elif name in _NUMPY:
            with np.errstate(all="ignore"):
                results = [_NUMPY[name](*inputs, **params)]
        elif name == "cond":
            last = len(params["branches"]) - 1
            results = self(inputs[1:], params["branches"][np.clip(inputs[0], 0, last)])
        elif name in _BY_JAX or (results := self.nested(inputs, eqn)) is None:
            atoms: Any = zip(inputs, eqn.invars, strict=True)
            args = [jnp.asarray(x, atom.aval.dtype) for x, atom in atoms]
            results = eqn.primitive.bind(*args, **params)
            results = results if eqn.primitive.multiple_results else [results]
        atoms = zip(results, eqn.outvars, strict=True)
        return [_array(x, atom.aval.dtype) for x, atom in atoms]


def _array(value: Any, dtype: Any) -> np.ndarray:
    # In double precision, the order of a sum has almost no effect on the result.
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return np.asarray(value, np.float64 if is_float else dtype)


def _broadcast(
    x: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_: Any
) -> Any:
    new = tuple(d for d in range(len(shape)) if d not in broadcast_dimensions)
    return np.broadcast_to(np.expand_dims(x, new), shape)


def _dot(
    x: np.ndarray, y: np.ndarray, *, dimension_numbers: Any, **_: Any
) -> np.ndarray:
    (contracted, others), (batch, of_y) = dimension_numbers
    x_dims, y_dims = [*range(x.ndim)], [*range(x.ndim, x.ndim + y.ndim)]
    for x_dim, y_dim in zip((*contracted, *batch), (*others, *of_y), strict=True):
        y_dims[y_dim] = x_dim
    free = [d for d in x_dims if d not in (*contracted, *batch)]
    rest = [d for d in y_dims if d >= x.ndim]
    return np.einsum(x, x_dims, y, y_dims, [*batch, *free, *rest])


def _reduce(function: Callable) -> Callable:
    return lambda x, *, axes, **_: function(x, axis=tuple(axes))


def _plain(function: Callable) -> Callable:
    return lambda *xs, **_: function(*xs)


_BY_JAX = ("scan", "while", "shard_map")
_SAME_NUMBERS = (
    *("copy", "copy_p", "convert_element_type", "stop_gradient"),
    *("reshape", "squeeze", "expand_dims"),
)

_NUMPY: dict[str, Callable[..., Any]] = {
    **{
        name: _plain(getattr(np, other))
        for other, names in {
            "abs": "abs", "add": "add add_any", "subtract": "sub", "multiply": "mul",
            "sqrt": "sqrt", "square": "square", "sign": "sign", "exp": "exp",
            "log": "log", "maximum": "max", "minimum": "min", "negative": "neg",
            "power": "pow", "less": "lt", "less_equal": "le", "greater": "gt",
            "greater_equal": "ge", "equal": "eq", "not_equal": "ne",
            "isfinite": "is_finite", "logical_not": "not", "logical_and": "and",
            "logical_or": "or", "tanh": "tanh", "cos": "cos", "sin": "sin",
        }.items()
        for name in names.split()
    },
    "div": _plain(lambda x, y: x / y if x.dtype.kind == "f" else x // y),
    "rsqrt": _plain(lambda x: 1 / np.sqrt(x)),
    "integer_pow": lambda x, *, y, **_: x**y,
    "broadcast_in_dim": _broadcast,
    "transpose": lambda x, *, permutation, **_: x.transpose(permutation),
    "select_n": lambda which, *cases: np.choose(which, cases),
    "dot_general": _dot,
    "reduce_sum": _reduce(np.sum),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
}  # fmt: skip
"""NumPy functions for primitives in optimizers; JAX runs all other primitives."""
