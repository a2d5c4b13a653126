"""Placement of optimizer state: each array follows the parameter that it belongs to."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import OptimizerError, kind_of
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import Path
from nnx_parallel.sharding.nnx_arrays import array_info, variables_of
from nnx_parallel.sharding.offload import HOST
from nnx_parallel.sharding.placement import Placement
from nnx_parallel.sharding.specs import dim_axes, dividing_prefix, to_spec

Optimizer = optax.GradientTransformation | optax.GradientTransformationExtraArgs


def optimizer_specs(
    abstract_state: optax.OptState,
    shapes: dict[Path, tuple[int, ...]],
    placements: dict[Path, Placement],
    layout: Layout,
) -> optax.OptState:
    """Returns the tree of an Optax state with the spec of every array.

    The state of a transformation contains trees that are like the tree of parameters,
    complete or with some parts masked. An array belongs to a parameter if the
    array's path ends with the parameter's path:

    - An array of the parameter's shape has the parameter's ``optimizer`` spec.
    - An array of the parameter's rank, such as the scales of blocks, has the axes of
      the dims at the same positions.
    - An array of another rank, such as Adafactor's factors of rows and columns, has the
      axes of the parameter's dims with matching sizes.
    - Counters and other arrays that belong to no parameter are replicated.

    Args:
        abstract_state: ``jax.eval_shape(tx.init, params)``.
        shapes: Shape of each parameter, by its path in the parameters' nested dict.
        placements: Placement of each parameter, by the same paths.
        layout: The layout. Axes that do not divide a dim are left out.
    """

    # A masked part is an `optax.MaskedNode`: a node without leaves, which stays as it
    # is.
    def spec(path: tuple, leaf: Any) -> P:
        owner = owner_of(path, shapes)
        if owner is None:
            return P()
        shape = shapes[owner]
        axes = dim_axes(placements[owner].optimizer, len(shape))
        kept: list[tuple[str, ...]] = []
        start = 0  # dims match in order; an array of Adafactor has only some of them
        for dim, size in enumerate(leaf.shape):
            matches = [d for d in range(start, len(shape)) if shape[d] == size]
            if len(leaf.shape) == len(shape):
                matches = [dim]
            of_dim = axes[matches[0]] if matches else ()
            start = matches[0] + 1 if matches else start
            kept.append(dividing_prefix(size, of_dim, layout.mesh.shape))
        return to_spec(kept)

    return jax.tree_util.tree_map_with_path(spec, abstract_state)


def optimizer_shardings(
    abstract_state: optax.OptState,
    shapes: dict[Path, tuple[int, ...]],
    placements: dict[Path, Placement],
    layout: Layout,
    *,
    on_host: bool = False,
) -> optax.OptState:
    """Returns the sharding of every array of an Optax state, from `optimizer_specs`.

    With ``on_host``, arrays that belong to a parameter are in the host's memory.
    Single numbers, counters and hyperparameters stay on the devices.
    """
    specs = optimizer_specs(abstract_state, shapes, placements, layout)

    def sharding(path: tuple, leaf: Any, spec: P) -> NamedSharding:
        found = layout.sharding(spec)
        is_moved = on_host and leaf.ndim > 0 and owner_of(path, shapes) is not None
        return found.with_memory_kind(HOST) if is_moved else found

    return jax.tree_util.tree_map_with_path(sharding, abstract_state, specs)


def owner_of(path: tuple, shapes: dict[Path, tuple[int, ...]]) -> Path | None:
    """Returns the parameter whose path is the end of ``path``, or ``None``.

    ``path`` is the path of an array in an optimizer's state.
    """
    # Optax's masks, chains and partitions only add keys before a parameter's path
    # (docs/library-notes.md, "Optax").
    keys = tuple(getattr(entry, "key", None) for entry in path)
    endings = (keys[start:] for start in range(len(keys)))
    return next((ending for ending in endings if ending in shapes), None)


def as_transformation(optimizer: Any, model: Any) -> Optimizer:
    """Converts the argument ``optimizer`` to an Optax transformation.

    Args:
        optimizer: A transformation, an ``optax.MultiSteps``, or a function that takes
            the abstract model and returns one of them.
        model: The abstract model.

    Raises:
        TypeError: If ``optimizer`` is anything else.
    """
    if isinstance(optimizer, Callable) and not isinstance(optimizer, tuple):
        with contextlib.suppress(ValueError):  # a function in C may have no signature
            signature = inspect.signature(optimizer)
            try:
                signature.bind(model)
            except TypeError as error:
                raise TypeError(
                    f"optimizer is a function with the signature {signature}, and is "
                    f"called with the abstract model: {error}. Write lambda model: "
                    "optax.adamw(...)."
                ) from None
        optimizer = optimizer(model)
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if isinstance(optimizer, optax.GradientTransformation):
        stacked = (p for p, x in variables_of(model) if array_info(p, x).is_stacked)
        return knowing_layers(optimizer, frozenset(stacked))
    remedy = (
        " The transformation of an nnx.Optimizer is its `tx`."
        if hasattr(optimizer, "tx")
        else ""
    )
    raise TypeError(
        f"optimizer is of type {type(optimizer).__name__}. Pass an Optax "
        "transformation such as optax.adamw(3e-4), optax.MultiSteps(...), or a "
        f"function of the abstract model that returns one.{remedy}"
    )


def check_transformation(
    owner: str, optimizer: Any, example: str
) -> optax.GradientTransformation:
    """Returns the optimizer that a wrapper such as ``by_layer`` got.

    Args:
        owner: Name of the wrapper, for the error.
        optimizer: A transformation, or an ``optax.MultiSteps``.
        example: A call that is right, for the error.

    Raises:
        OptimizerError: If ``optimizer`` is anything else.
    """
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    raise OptimizerError(
        f"{owner} got {kind_of(optimizer)}. It must be an Optax transformation, such "
        f"as {owner}({example}). If the optimizer needs the model, write lambda model: "
        f"{owner}(optax.adamw(3e-4, mask=decay_mask(model)))."
    )


_stacked: ContextVar[frozenset[Path] | None] = ContextVar("stacked", default=None)


def stacked_params() -> frozenset[Path] | None:
    """Returns the paths of all stacked arrays while a run traces its optimizer.

    Elsewhere it returns ``None``.
    """
    return _stacked.get()


@contextlib.contextmanager
def _told(stacked: frozenset[Path]) -> Iterator[None]:
    # This is a function of the module and not a closure over the ContextVar, because a
    # plan sends the optimizer to another process, and a ContextVar cannot be sent.
    token = _stacked.set(stacked)
    try:
        yield
    finally:
        _stacked.reset(token)


def knowing_layers(tx: Optimizer, stacked: frozenset[Path]) -> Optimizer:
    """Wraps a transformation so that `stacked_params` is known inside of it."""

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **known: Any) -> Any:
            with _told(stacked):
                return function(*args, **known)

        return call

    return tx._replace(init=inside(tx.init), update=inside(tx.update))
