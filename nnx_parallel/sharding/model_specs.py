"""Specs that a model passes to JAX: ``out_sharding=``, ``reshard``, bare constraints.

A model for Explicit axes names mesh axes in its computation. A strategy's mesh has Auto
axes, for which JAX refuses such names, and the mesh may not have axes of these names.
Therefore the names are translated to axes of the layout's mesh while a layout places a
model, by the same rules as names in the model's metadata. Equations keep the translated
specs as parameters, and `constrain_output` turns them into constraints before XLA
compiles them.

``None`` in ``out_sharding=`` or ``reshard`` leaves the dim to the strategy, so
``P(None, None)`` has no effect. The model says only that *its* axes do not split the
dim, and it cannot know the axes of the strategy: a constraint to a replicated dim would
gather the batch on each device. JAX does the same for the Auto axes of a mesh that has
both types. In ``with_sharding_constraint``, ``None`` replicates the dim, as in JAX.

JAX has no hook for this translation. But all functions of JAX read their specs by two
private functions, which are equal in the supported versions of JAX. Both are replaced
once. If no layout is active, the replacements call the original functions. If a newer
JAX lacks one of the two, specs are not translated, and a spec that JAX refuses raises a
`VersionError`.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
from jax._src import pjit, sharding_impls
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import MeshAxisTypeError, VersionError
from nnx_parallel.mesh import (
    SUPPORTED,
    free_axes,
    is_without_mesh,
    leaving_mesh,
    mesh_here,
)
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import as_tuple
from nnx_parallel.sharding.specs import (
    check_axes,
    dim_axes,
    dividing_prefix,
    splits_rows,
)

# The layout is part of the key of JAX's trace caches. So an inner `jax.jit`, or a body
# of a scan, is traced again under another layout.
_layout = jax.make_user_context()

_SPEC, _CONSTRAINT = "canonicalize_sharding", "_create_sharding_for_array"
_read_spec: Any = getattr(sharding_impls, _SPEC, None)
_read_constraint: Any = getattr(pjit, _CONSTRAINT, None)


@contextlib.contextmanager
def placing_specs(layout: Layout | None) -> Iterator[None]:
    """Makes a context that translates the specs of traced code to a layout's mesh."""
    _replace_readers()
    with _layout(layout):
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if (_read_spec and _read_constraint) or not _refuses_spec(error):
                raise
            newest = ".".join(map(str, SUPPORTED["jax"][1]))
            raise VersionError(
                f"The model passes a spec to JAX, but jax {jax.__version__} reads "
                "specs in a way that nnx_parallel does not know. Install "
                f"'jax<{newest}', or remove the specs from the model. JAX's error: "
                f"{error}"
            ) from error


def _refuses_spec(error: Exception) -> bool:
    """True if JAX raised the error because it has read an untranslated spec."""
    return is_without_mesh(error) or "that are of type Auto" in str(error)


@contextlib.contextmanager
def building_on(layout: Layout) -> Iterator[None]:
    """Makes a context to build models for a layout, whichever mesh the caller set."""
    with leaving_mesh(), placing_specs(layout):
        yield


@functools.cache
def _replace_readers() -> None:
    # Modules of JAX import the function by name, so it is replaced in each of them. A
    # module that is imported later finds the replacement in `sharding_impls`.
    for module in [*sys.modules.values()] if _read_spec else ():
        names = getattr(module, "__dict__", {})
        if names.get(_SPEC) is _read_spec:
            names[_SPEC] = _read_translated
    if _read_constraint:
        setattr(pjit, _CONSTRAINT, _read_translated_constraint)


def _read_translated(sharding: Any, api_name: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces JAX's reader of ``out_sharding=`` and of the specs of ``reshard``."""
    layout = _active_for(sharding)
    if layout is None:
        return _read_spec(sharding, api_name, *args, **kwargs)
    if _is_on(layout, sharding):
        return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)
    spec = getattr(sharding, "spec", sharding)
    spec = translate(layout, spec, api_name)
    if api_name != "reshard" and not any(spec):
        return None
    return NamedSharding(mesh_here(layout.mesh).abstract_mesh, spec)


def _read_translated_constraint(mesh: Any, x: Any, name: str, api_name: str) -> Any:
    """Replaces JAX's reader of the specs of ``with_sharding_constraint``."""
    layout = _active_for(x) if api_name == "with_sharding_constraint" else None
    if layout is None or _is_on(layout, x):
        return _read_constraint(mesh, x, name, api_name)
    spec = getattr(x, "spec", x)
    return layout.sharding(translate(layout, spec, api_name))


def _active_for(x: Any) -> Layout | None:
    """Returns the layout that translates a spec or sharding, or ``None``."""
    layout = _layout.value
    is_empty = isinstance(x, NamedSharding) and x.mesh.empty
    if layout is None or is_empty or not isinstance(x, P | NamedSharding):
        return None
    if explicit := jax.sharding.get_abstract_mesh().explicit_axes:
        if not layout.claims.axis_sizes:  # a bare mesh: JAX places the axes itself
            return None
        raise MeshAxisTypeError(
            f"The model makes the mesh axes {list(explicit)} Explicit. The axes of a "
            "Trainer's mesh stay Auto: call the function without "
            "jax.sharding.explicit_axes. Its out_sharding= and reshard then place its "
            "results."
        )
    return layout


def _is_on(layout: Layout, x: Any) -> bool:
    """True for a sharding on a mesh with the layout's axes: it needs no translation."""
    return isinstance(x, NamedSharding) and x.mesh.shape == layout.mesh.shape


def translate(layout: Layout, spec: P, function: str) -> P:
    """Translates the names in a model's spec to free axes of a layout's mesh.

    A name is a mesh axis, a logical axis, or a name in the `LogicalRules` of the
    strategy. The usual names of data-parallel axes stand for the axes of the batch if
    the mesh does not have them. If several dims name an axis, only the first gets it.

    Raises:
        UnknownAxisError: If a name is unknown; the message has the rule to write.
    """
    mesh, claims = layout.mesh, layout.claims
    if not claims.axis_sizes:  # a bare mesh has no rules
        check_axes(function, spec, mesh)
    free, entries = free_axes(mesh), []
    for entry in spec:
        if entry is P.UNCONSTRAINED:
            entries.append(entry)
            continue
        is_known = not claims.logical.keys().isdisjoint(as_tuple(entry))
        if splits_rows(mesh, entry) and not is_known:
            axes = claims.batch
        else:
            axes = layout.axes_of(entry, f"{spec}` in `{function}")
        axes = tuple(axis for axis in axes if axis in free)
        free -= {*axes}
        entries.append(axes or None)
    return P(*entries)


def spec_in(eqn: jex.JaxprEqn) -> tuple[str, P] | None:
    """Returns the name and spec of the first parameter with mesh axes, or ``None``.

    JAX applies specs of Explicit axes itself, so they are left out.
    """
    is_unused = all(isinstance(var, jex.DropVar) for var in eqn.outvars)
    if is_unused or eqn.primitive.name == "sharding_constraint":
        return None
    return next(
        (
            (name, value.spec)
            for name, value in eqn.params.items()
            if isinstance(value, NamedSharding)
            and any(value.spec)
            and not value.mesh.explicit_axes
        ),
        None,
    )


def constrain_output(layout: Layout, x: jax.Array, spec: P) -> jax.Array:
    """Constrains the dims of an equation's output that its spec names.

    The compiler may still choose the sharding of the other dims, and of dims that the
    named axes do not divide.
    """
    if x.ndim < len(spec):
        return x
    free, entries = free_axes(layout.mesh), []
    for size, axes in zip(x.shape, dim_axes(spec, x.ndim), strict=True):
        kept = tuple(axis for axis in axes if axis in free)
        kept = dividing_prefix(size, kept, layout.mesh.shape)
        entries.append(kept or P.UNCONSTRAINED)
    if all(entry is P.UNCONSTRAINED for entry in entries):
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(P(*entries)))
