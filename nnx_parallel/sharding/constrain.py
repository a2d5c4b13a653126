"""The active layout, which places a model that does not mention a mesh.

A step is traced inside ``using(layout)``. Outside of it, `constrain`, `use_params` and
`annotate` return their argument unchanged, and a model runs as plain NNX.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import starmap
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import (
    ParallelWarning,
    PlacementTreeError,
    SpecRankError,
    suggest,
    warn_user,
)
from nnx_parallel.mesh import explaining_axes, is_without_mesh, leaving_mesh
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model_specs import placing_specs
from nnx_parallel.sharding.names import LOGICAL_AXES, MeshAxes, as_tuple
from nnx_parallel.sharding.nnx_arrays import plain_variables
from nnx_parallel.sharding.placement import Placement
from nnx_parallel.sharding.specs import dim_axes, dividing_prefix, is_spec
from nnx_parallel.sharding.tree import constrain_tree


@dataclass(frozen=True, eq=False)
class _Annotations:
    """Placements of annotations by name, and the names that the trace has met."""

    placements: Mapping[str, Any]
    met: set[str] = field(default_factory=set)


# The layout and the annotations are part of the key of JAX's trace caches. So an inner
# `jax.jit`, or the body of a scan, is traced again under another layout.
_active = jax.make_user_context()
_bound = jax.make_user_context()
# The names for which claims on activations had an effect in the traced step.
_split: ContextVar[set[str] | None] = ContextVar("split", default=None)


@contextlib.contextmanager
def using(layout: Layout | None) -> Iterator[None]:
    """Makes ``layout`` active in this thread; with ``None``, no layout is active."""
    with _active(layout), placing_specs(layout):
        yield


def in_context(layout: Layout, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that its trace finds only the layout's mesh.

    A mesh that the caller has set has no effect. Specs of the model are translated
    (`sharding.model_specs`). Models of other libraries may also look for the mesh in
    JAX's context, for ``jax.shard_map`` and similar calls. It is set only if a trace
    without it fails.
    """

    @wraps(function)  # the program gets the function's name
    def traced(*args: Any) -> Any:
        with (
            leaving_mesh(layout.mesh),
            plain_variables(),
            placing_specs(layout),
            explaining_axes(),
        ):
            try:
                return function(*args)
            except (RuntimeError, ValueError) as error:
                if not is_without_mesh(error):
                    raise
            # The mesh is not set earlier, because jaxprs and programs depend on it.
            with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
                return function(*args)

    return traced


def active_layout() -> Layout | None:
    """Returns the layout that places the code being traced, or ``None``."""
    return _active.value


def active_platform() -> str:
    """Returns the platform of the devices that will run the code being traced.

    A mesh of described devices gives the platform in their description. Without a
    layout, JAX's default device gives the platform.

    Example:
        >>> active_platform()
        'cpu'
    """
    layout = _active.value
    default = getattr(jax.config, "jax_default_device", None)
    # `jax.devices` is the last resort, because it starts a backend. A mesh of devices
    # that are only described must work without a backend.
    device: Any = layout.mesh.devices.flat[0] if layout else default or jax.devices()[0]
    if isinstance(device, str):  # `jax_default_device` may name a platform
        return "gpu" if device == "cuda" else device
    is_rocm = "rocm" in getattr(device.client, "platform_version", "").lower()
    return "rocm" if is_rocm else device.platform


def active_mesh() -> Mesh | None:
    """Returns the mesh of the code being traced, or ``None``.

    Example:
        >>> active_mesh() is None
        True
    """
    layout = _active.value
    return None if layout is None else layout.mesh


def constrain(x: Any, *names: Any) -> Any:
    """Places an activation as the strategy wants it, given the names of its dims.

    Outside a strategy it returns ``x`` itself, unless ``jax.set_mesh`` has set a mesh
    with an axis that ``names`` names: then it constrains ``x`` to the axes of this
    mesh, and leaves dims with other names to the partitioner.

    The mesh has Auto axes, on which a constraint is a hint to XLA's partitioner. So,
    unlike with Explicit axes, the rest of the model need not mention a mesh. An axis
    that does not divide its dim is left out.

    Args:
        x: An activation.
        names: One entry for each dim: a logical axis, a tuple of mesh axes, or
            ``None``. Alternatively, a single placement for ``x``: rules, a spec, or a
            prefix tree of these. Then ``x`` may be any pytree, and an axis that does
            not divide its dim is an error.

    Raises:
        SpecRankError: If the number of names is not the number of dims.
        UnknownAxisError: If a name is neither a logical nor a mesh axis.
        PlacementTreeError: If the entry of a dim is a spec or a rule, or if names of
            dims are given for a pytree.

    Example:
        >>> constrain(jax.numpy.ones((8, 16)), "batch", "embed").shape
        (8, 16)
    """
    layout = _active.value
    if len(names) == 1 and not _is_name(names[0]):
        if layout is None:
            return _constrain_on_users_mesh(x, *names)
        place = partial(layout.translate, is_activation=True)
        placements = jax.tree.map(
            lambda entry: place(entry) if is_spec(entry) else entry,
            names[0],
            is_leaf=is_spec,
        )
        return constrain_tree(x, placements, layout.mesh)
    # Names are checked without an active strategy too, so that a mistake in a model
    # shows on one device.
    _check_activation(x, names)
    if layout is None:
        return _constrain_on_users_mesh(x, P(*names))
    return _constrain_by_names(x, names, activation_spec)


def _constrain_on_users_mesh(x: Any, spec: Any) -> Any:
    """Constrains arrays on the mesh of JAX's context, if it has axes of a spec.

    Args:
        x: A pytree of arrays.
        spec: Mesh axes or names for each dim. Any other placement is ignored, with a
            warning.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    parts = spec if is_spec(spec) else ()
    found = [axis for part in parts for axis in as_tuple(part) if axis in mesh.shape]
    if is_spec(spec) and not found:
        return x
    if not is_spec(spec) or any(kind != AxisType.Auto for kind in mesh.axis_types):
        warn_user(
            f"constrain({spec}) has no effect under the mesh {dict(mesh.shape)}: no "
            "strategy is active. It constrains by axes of a mesh whose axes are all "
            "AxisType.Auto; call jax.sharding.reshard for Explicit axes.",
            ParallelWarning,
        )
        return x

    def on_mesh(size: int, part: MeshAxes) -> Any:
        axes = tuple(axis for axis in as_tuple(part) if axis in mesh.shape)
        if part is not None and not axes:
            return P.UNCONSTRAINED  # only a strategy gives axes to this name
        return dividing_prefix(size, axes, mesh.shape) or None

    def place(leaf: jax.Array) -> jax.Array:
        dims = zip(leaf.shape, (*spec, *[None] * (leaf.ndim - len(spec))), strict=True)
        return jax.lax.with_sharding_constraint(leaf, P(*starmap(on_mesh, dims)))

    return jax.tree.map(place, x)


def _is_name(entry: Any) -> bool:
    """True for an entry that names one dim: a logical axis, mesh axes or ``None``."""
    # A tuple of strings is a name, because a tree of placements holds no strings.
    # The exact type is compared, because a spec may be a subclass of tuple.
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
    """Places a parameter at its use, without axes that split only activations."""
    return _constrain_by_names(x, names, Layout.used_spec)


def _constrain_by_names(
    x: jax.Array, names: tuple, spec_of: Callable[[Layout, tuple, tuple], P]
) -> jax.Array:
    layout = _active.value
    if layout is None:
        return x
    spec = spec_of(layout, x.shape, names)  # this checks the names in any case
    if layout.is_silent(names):
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(spec))


def activation_spec(layout: Layout, shape: Sequence[int], names: Sequence) -> P:
    """Returns `Layout.activation_spec`, and notes which claims it has used."""
    spec = layout.activation_spec(shape, names)
    for name, axes in zip(names, dim_axes(spec, len(shape)), strict=True):
        if not set(axes).isdisjoint(layout.activation_axes(name)):
            note_effect(name)
    return spec


def note_effect(name: str) -> None:
    """Notes that a claim has an effect: a dim's name, ``overlap`` or ``halves``."""
    if (split := _split.get()) is not None:
        split.add(name)


@contextlib.contextmanager
def noticing_idle_claims(layout: Layout) -> Iterator[None]:
    """Warns about claims that have no effect on the activations traced inside."""
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
                    f"{part.owner} should split activations along {name!r}, but splits "
                    "none: no activation has a dim of this name with a length that "
                    f"{size} divides. Call constrain(x, 'batch', {name!r}, 'embed') "
                    "after the embedding and each block, or use Dense and Embed of "
                    f"nnx_parallel.layers. Pad lengths that {size} does not divide.",
                    ParallelWarning,
                )
                return
        if part.overlap and "overlap" not in split:
            warn_user(
                f"{part.owner} overlaps the matmuls of Dense with their transfers, but "
                "the model has no Dense, so nothing overlaps. Use Dense of "
                "nnx_parallel.layers for the model's matmuls, or pass sequence=True.",
                ParallelWarning,
            )
        if part.halves and "halves" not in split:
            warn_user(
                f"{part.owner} runs a Stack on two halves of a device's rows, but "
                "finds no Stack that it can split, so nothing overlaps. Such a Stack "
                "runs outside of a Pipeline, has an even number of rows on each "
                "device, and has layers without dropout, state, masks and losses of "
                "experts. Otherwise use sequence=True.",
                ParallelWarning,
            )


def use_params(leaves: dict, placements: dict) -> dict:
    """Gathers parameters from their stored shards to their specs in the computation.

    Gradients are summed into the ``gradient`` specs. Under `saves_all_but_gathers` the
    backward pass gathers the parameters again.

    Args:
        leaves: Arrays by key.
        placements: The `Placement` of each array, by the same keys. An array without a
            placement does not change.

    Returns:
        The arrays by key; the argument itself if no layout is active.
    """
    layout = _active.value
    if layout is None:
        return leaves

    # Parameters are gathered at use and not before the step. A gathered array then
    # lives as long as the layer that uses it, and remat can drop it between the passes.
    def use(x: jax.Array, place: Placement | None) -> jax.Array:
        if place is None or not place.is_gathered:
            return x
        used, gradient = layout.sharding(place.used), layout.sharding(place.gradient)
        x = _gather(x, used, gradient)
        # The gradient of a lookup is summed in the `used` spec and cut afterwards.
        # Otherwise the partitioner would split the activations like the gradient
        # (docs/library-notes.md, "The partitioner").
        return jax.lax.with_sharding_constraint(x, used) if place.is_looked_up else x

    return {key: use(x, placements.get(key)) for key, x in leaves.items()}


def keep_stored(x: jax.Array, place: Placement) -> jax.Array:
    """Constrains an array to the spec in which it is stored, if a layout is active."""
    if (layout := _active.value) is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(place.stored))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, used: NamedSharding, gradient: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, used)


def _gather_backward(
    used: NamedSharding, gradient: NamedSharding, _: None, grad: jax.Array
) -> tuple[jax.Array]:
    # The transpose of a constraint is the same constraint. Without this rule every
    # device would sum the complete gradient before it is cut. There is no constraint to
    # `used` before this one: with it the TPU compiler writes an all-reduce and a slice,
    # and without it a ring that overlaps with the product
    # (docs/library-notes.md, "The partitioner").
    return (jax.lax.with_sharding_constraint(grad, gradient),)


_gather.defvjp(lambda x, *specs: (_gather(x, *specs), None), _gather_backward)


def saves_all_but_gathers(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy that keeps residuals except gathered parameters.

    A device then holds the gathered parameters of only the present layer. The policy
    keeps the input of a gather, which is a shard of the same parameter. It recognises
    a gather as a sharding constraint. Complex values are computed again too
    (`without_complex`).
    """
    if _makes_complex(primitive, avals, params):
        return False
    # JAX asks a policy about a custom_vjp call as one operation, and never about its
    # equations, not even a `checkpoint_name` (docs/library-notes.md, "Remat"). So the
    # gather is recognised by its body, not by a name.
    inner = params.get("call_jaxpr")
    within = [primitive] if inner is None else [eqn.primitive for eqn in inner.eqns]
    return any(str(p) != "sharding_constraint" for p in within)


def without_complex(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Changes a `jax.checkpoint` policy so that it does not keep complex values.

    JAX rounds the residuals that a policy keeps. It cannot round complex numbers, and
    raises a TypeError (docs/library-notes.md, "Remat").
    """

    def keeps(primitive: Any, *avals: Any, **params: Any) -> Any:
        if _makes_complex(primitive, avals, params):
            return False
        return policy(primitive, *avals, **params)

    return keeps


def _makes_complex(primitive: Any, avals: tuple, params: dict) -> bool:
    """True if an operation may have a complex output."""

    def is_complex(dtype: Any) -> bool:
        return jax.numpy.issubdtype(dtype, jax.numpy.complexfloating)

    if primitive.name in ("real", "imag", "abs", "eq", "ne"):
        return False
    dtypes = [x.dtype for x in avals if hasattr(x, "dtype")]
    dtypes += filter(None, map(params.get, ("new_dtype", "preferred_element_type")))
    made_from_real = primitive.name in ("complex", "fft", "eig")
    return made_from_real or any(map(is_complex, dtypes))


def check_names(names: tuple[str | None, ...]) -> None:
    """Refuses names for the dims of a new layer if one name occurs twice."""
    for name in names:
        if name is not None and names.count(name) > 1:
            free = [n for n in LOGICAL_AXES if n not in names]
            raise ValueError(
                f"The dims {names} name {name!r} twice.{suggest(name, free)} Give each "
                "dim of a parameter a different name, or None."
            )


def annotate(tree: Any, name: str) -> Any:
    """Names an intermediate pytree, so that the caller can place it by this name.

    Returns the tree, constrained by the entry for the name in ``sharded_jit(...,
    annotations={name: ...})``. If there is no entry, it returns the same object.

    Example:
        >>> x = {"hidden": [1.0, 2.0]}
        >>> annotate(x, "hidden") is x
        True
    """
    bound, mesh = _bound.value, active_mesh()
    if bound is None or mesh is None:
        return tree
    bound.met.add(name)
    return constrain_tree(tree, bound.placements.get(name), mesh, name)


@contextlib.contextmanager
def annotated(layout: Layout, placements: Mapping[str, Any]) -> Iterator[None]:
    """Makes a layout and its mesh active; warns about placements with unused names."""
    # Without annotations, functions on the same mesh share traces.
    bound = _Annotations(placements) if placements else None
    mesh = layout.mesh.abstract_mesh
    with _bound(bound), using(layout), jax.sharding.use_abstract_mesh(mesh):
        yield
    if bound and (idle := [name for name in placements if name not in bound.met]):
        warn_user(
            f"Annotations {idle} are not used. Names that the function gives with "
            f"annotate: {sorted(bound.met)}.",
            ParallelWarning,
        )
