"""The active layout: how a model that mentions no mesh is placed on one.

A step is traced inside ``using(layout)``. Outside, `constrain`, `use_params` and
`annotate` return their argument unchanged: a model runs as plain NNX.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import (
    ParallelWarning,
    PlacementTreeError,
    SpecRankError,
    suggest,
    warn_user,
)
from nnx_parallel.mesh import explaining_axes, is_without_mesh
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import LOGICAL_AXES, MeshAxes
from nnx_parallel.sharding.placement import Placement
from nnx_parallel.sharding.specs import dim_axes, is_spec
from nnx_parallel.sharding.tree import constrain_tree

# Placements of annotations by name, and the names that were met.
_Bound = tuple[Mapping[str, Any], set[str]]

_active: ContextVar[Layout | None] = ContextVar("layout", default=None)
# The names that claims on activations have split in the step that is traced.
_split: ContextVar[set[str] | None] = ContextVar("split", default=None)
_bound: ContextVar[_Bound | None] = ContextVar("annotations", default=None)


@contextlib.contextmanager
def using(layout: Layout | None) -> Iterator[None]:
    """Makes ``layout`` active in this thread; ``None`` makes none active."""
    token = _active.set(layout)
    try:
        yield
    finally:
        _active.reset(token)


def in_context(layout: Layout, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is traced in the context that other libraries' models expect.

    These find the mesh where JAX keeps it: ``with_sharding_constraint`` with a bare
    spec, ``jax.shard_map`` and others. A trace that needs no mesh is made without one.
    """

    @wraps(function)  # the program gets the function's name
    def traced(*args: Any) -> Any:
        # Otherwise Flax places each new Variable with names, on a mesh with axes like
        # them.
        with nnx.use_eager_sharding(False), explaining_axes():
            try:
                return function(*args)
            except (RuntimeError, ValueError) as error:
                if not is_without_mesh(error):
                    raise
            # Only then is it set: jaxprs, and so the programs, depend on the context.
            with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
                return function(*args)

    return traced


def active_layout() -> Layout | None:
    """The layout that places the code being traced, if any."""
    return _active.get()


def active_mesh() -> Mesh | None:
    """The mesh that the code being traced is placed on, if any.

    Example:
        >>> active_mesh() is None
        True
    """
    layout = _active.get()
    return None if layout is None else layout.mesh


def constrain(x: Any, *names: Any) -> Any:
    """Gives an activation the place that the strategy has for its dims.

    Outside a strategy it returns ``x`` itself. A constraint is a hint to XLA's
    partitioner, on Auto axes: a model need not be written for a mesh, as explicit axes
    would have it, and an axis that does not divide its dim is left out.

    Args:
        x: An activation.
        names: The logical axis of each of its dims, a tuple of mesh axes, or ``None``.
            Or one placement: rules or a spec, or a prefix tree of these; ``x`` may then
            be any pytree, and an axis that does not divide its dim is an error.

    Note:
        JAX remembers traces: an inner ``jax.jit``, or a body of ``jax.lax.scan`` that
        is defined once at the top of a file, keeps its first trace.
        Define such functions where they are used.

    Raises:
        SpecRankError: If there is not one name for each dim.
        UnknownAxisError: If a name is neither a logical nor a mesh axis.
        PlacementTreeError: If a dim is given a spec or a rule, or a pytree is given
            names.

    Example:
        >>> constrain(jax.numpy.ones((8, 16)), "batch", "embed").shape
        (8, 16)
    """
    layout = _active.get()
    if len(names) == 1 and not _is_name(names[0]):
        if layout is None:
            return x
        place = partial(layout.translate, is_activation=True)
        placements = jax.tree.map(
            lambda entry: place(entry) if is_spec(entry) else entry,
            names[0],
            is_leaf=is_spec,
        )
        return constrain_tree(x, placements, layout.mesh)
    # Names are checked without an active strategy too: a wrong model is wrong on one
    # device as on many.
    _check_activation(x, names)
    return _constrain_by_names(x, names, activation_spec)


def _is_name(entry: Any) -> bool:
    """True if it names one dim: a logical axis, mesh axes, or nothing."""
    # A tree of placements holds no strings, so that a tuple of them is not one. A spec
    # may be a tuple to Python.
    parts = entry if type(entry) is tuple else (entry,)
    return entry is None or all(isinstance(part, str) for part in parts)


def _check_activation(x: Any, names: tuple) -> None:
    if not hasattr(x, "ndim") or not all(map(_is_name, names)):
        raise PlacementTreeError(
            f"constrain got {names} for a {type(x).__name__}. One array takes a name, "
            "a tuple of mesh axes, or None for each of its dims; an array or a pytree "
            "takes one placement, such as P('fsdp', None) or rules."
        )
    if len(names) != x.ndim:
        raise SpecRankError(
            f"constrain got {len(names)} names {names} for an array of shape "
            f"{x.shape}. Give one name, or None, for each of its {x.ndim} dims."
        )


def constrain_param(x: jax.Array, *names: MeshAxes) -> jax.Array:
    """A parameter at its use, placed without axes that split only activations."""
    return _constrain_by_names(x, names, Layout.used_spec)


def _constrain_by_names(
    x: jax.Array, names: tuple, spec_of: Callable[[Layout, tuple, tuple], P]
) -> jax.Array:
    layout = _active.get()
    if layout is None:
        return x
    spec = spec_of(layout, x.shape, names)  # also where none is set: it checks names
    if layout.is_silent(names):
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(spec))


def activation_spec(layout: Layout, shape: Sequence[int], names: Sequence) -> P:
    """`Layout.activation_spec` of names in a model or a loss: they count as used."""
    spec = layout.activation_spec(shape, names)
    for name, axes in zip(names, dim_axes(spec, len(shape)), strict=True):
        if not set(axes).isdisjoint(layout.activation_axes(name)):
            note_effect(name)
    return spec


def note_effect(name: str) -> None:
    """Notes a claim on activations that has an effect: a dim's name or ``overlap``."""
    if (split := _split.get()) is not None:
        split.add(name)


@contextlib.contextmanager
def noticing_idle_claims(layout: Layout) -> Iterator[None]:
    """Warns of claims on activations that do not split any activation traced within."""
    token = _split.set(split := set())
    try:
        yield
    finally:
        _split.reset(token)
    for part in layout.claims.parts or (layout.claims,):
        for name in part.activations:
            size = math.prod(layout.mesh.shape[a] for a in layout.activation_axes(name))
            if size > 1 and name not in split:
                warn_user(
                    f"{part.owner} splits activations along {name!r}, but splits none: "
                    f"the model names no such dim of a length that {size} divides. "
                    f"Name it where they are computed, constrain(x, 'batch', {name!r}, "
                    "'embed') after the embedding and each block, or use Dense and "
                    "Embed of nnx_parallel.layers; pad lengths that do not divide.",
                    ParallelWarning,
                )
                return
        if part.overlap and "overlap" not in split:
            warn_user(
                f"{part.owner} overlaps the matmuls of Dense with their transfers, and "
                "the model has none: nothing overlaps. Use Dense of "
                "nnx_parallel.layers for its matmuls, or sequence=True.",
                ParallelWarning,
            )
        if part.halves and "halves" not in split:
            warn_user(
                f"{part.owner} runs a Stack on two halves of a device's rows, and "
                "finds none that it can split: nothing overlaps. It needs an even "
                "number of rows on each device, and layers without dropout, state, "
                "masks or losses of experts, in no Pipeline. Otherwise use "
                "sequence=True.",
                ParallelWarning,
            )


def use_params(leaves: dict, placements: dict) -> dict:
    """Gathers parameters from their stored shards, as the computation uses them.

    Their gradients are summed into the ``gradient`` specs. Under
    `saves_all_but_gathers` they are gathered again for the backward pass. Arrays have
    the same keys as their `Placement`; an array without one does not change.
    """
    layout = _active.get()
    if layout is None:
        return leaves

    # They are gathered at use and not before the step: a gathered array then lives as
    # long as the layer that uses it, and remat can drop it between the passes.
    def use(x: jax.Array, place: Placement | None) -> jax.Array:
        if place is None or not place.is_gathered:
            return x
        used, gradient = layout.sharding(place.used), layout.sharding(place.gradient)
        x = _gather(x, used, gradient)
        # The gradient of a lookup is summed in the spec of its use and cut afterwards;
        # otherwise its shards pull the activations apart
        # (docs/library-notes.md, "The partitioner").
        return jax.lax.with_sharding_constraint(x, used) if place.is_looked_up else x

    return {key: use(x, placements.get(key)) for key, x in leaves.items()}


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, used: NamedSharding, gradient: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, used)


def _gather_backward(
    used: NamedSharding, gradient: NamedSharding, _: None, grad: jax.Array
) -> tuple[jax.Array]:
    # The transpose of a constraint is the same constraint: without another rule
    # the gradient would be summed whole on every device before it is cut. A constraint
    # to `used` does not come first: with it the TPU compiler writes an all-reduce and a
    # slice, and without it a ring that overlaps with the product
    # (docs/library-notes.md, "The partitioner").
    return (jax.lax.with_sharding_constraint(grad, gradient),)


_gather.defvjp(lambda x, *specs: (_gather(x, *specs), None), _gather_backward)


def saves_all_but_gathers(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: keep real residuals except gathered parameters.

    So a device only holds the gathered parameters of the present layer. The input of a
    gather, which is a sharding constraint, is kept: it has the same values, as a
    parameter's shard. Complex values are computed again (`without_complex`).
    """
    if _makes_complex(primitive, avals, params):
        return False
    # A policy is asked about a custom_vjp call as one operation and never about its
    # equations, not even a `checkpoint_name` (docs/library-notes.md, "Remat"). So the
    # gather is recognised by its body, not by a name.
    inner = params.get("call_jaxpr")
    within = [primitive] if inner is None else [eqn.primitive for eqn in inner.eqns]
    return any(str(p) != "sharding_constraint" for p in within)


def without_complex(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The same `jax.checkpoint` policy, except that complex values are not kept.

    JAX rounds residuals that a policy keeps, and has no such operation for complex
    numbers: it raises a TypeError (docs/library-notes.md, "Remat").
    """

    def keeps(primitive: Any, *avals: Any, **params: Any) -> Any:
        if _makes_complex(primitive, avals, params):
            return False
        return policy(primitive, *avals, **params)

    return keeps


def _makes_complex(primitive: Any, avals: tuple, params: dict) -> bool:
    """True if an operation may have a complex output; False only if it has none."""

    def is_complex(dtype: Any) -> bool:
        return jax.numpy.issubdtype(dtype, jax.numpy.complexfloating)

    if primitive.name in ("real", "imag", "abs", "eq", "ne"):
        return False
    dtypes = [x.dtype for x in avals if hasattr(x, "dtype")]
    dtypes += filter(None, map(params.get, ("new_dtype", "preferred_element_type")))
    made_from_real = primitive.name in ("complex", "fft", "eig")
    return made_from_real or any(map(is_complex, dtypes))


def check_names(names: tuple[str | None, ...]) -> None:
    """Refuses a layer with two dims of one name, when it is built."""
    for name in names:
        if name is not None and names.count(name) > 1:
            free = [n for n in LOGICAL_AXES if n not in names]
            raise ValueError(
                f"The dims {names} name {name!r} twice.{suggest(name, free)} Give each "
                "dim of a parameter a different name, or None."
            )


def annotate(tree: Any, name: str) -> Any:
    """Gives an intermediate pytree a name that the caller may place.

    Returns the tree, constrained as ``sharded_jit(..., annotations={name: ...})`` says
    for the name, or the same object if the name is not listed. An inner ``jax.jit``
    keeps its trace, and with it the placement of its first caller on a mesh.

    Example:
        >>> x = {"hidden": [1.0, 2.0]}
        >>> annotate(x, "hidden") is x
        True
    """
    bound, mesh = _bound.get(), active_mesh()
    if bound is None or mesh is None:
        return tree
    placements, met = bound
    met.add(name)
    return constrain_tree(tree, placements.get(name), mesh, name)


@contextlib.contextmanager
def annotated(layout: Layout, placements: Mapping[str, Any]) -> Iterator[None]:
    """Makes a layout and its mesh active; warns of placements with unknown names."""
    met: set[str] = set()
    token = _bound.set((placements, met))
    try:
        with using(layout), jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
            yield
    finally:
        _bound.reset(token)
    if idle := [name for name in placements if name not in met]:
        warn_user(
            f"Annotations {idle} are not used. Names that the function gives with "
            f"annotate: {sorted(met)}.",
            ParallelWarning,
        )
