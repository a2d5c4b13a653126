"""Named places inside a function, bound by whoever compiles it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jax.sharding import Mesh

from nnx_parallel.sharding.context import active_layout, using
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.trees import constrain_tree

_bound: ContextVar[tuple[Mapping[str, Any], set[str]] | None] = ContextVar(
    "annotations", default=None
)


def active_mesh() -> Mesh | None:
    """The mesh that the code being traced is placed on, if any.

    Example:
        >>> active_mesh() is None
        True
    """
    layout = active_layout()
    return None if layout is None else layout.mesh


def annotate(tree: Any, name: str) -> Any:
    """Gives an intermediate value a name that the caller may place.

    Args:
        tree: A pytree of arrays.
        name: The name.

    Returns:
        The tree, constrained to what ``sharded_jit(..., annotations={name: ...})`` says
        about the name; the same object where nothing is said.

    Note:
        JAX remembers the traces of inner ``jax.jit`` functions, and with them the
        placement of the first caller on a mesh.

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
    if name not in placements:
        return tree
    return constrain_tree(tree, placements[name], mesh, name)


@contextlib.contextmanager
def bound_annotations(layout: Layout, placements: Mapping[str, Any]) -> Iterator[None]:
    """Makes a layout active together with the places of its names.

    Warns:
        UserWarning: If a name is never met.
    """
    met: set[str] = set()
    token = _bound.set((placements, met))
    try:
        with using(layout):
            yield
    finally:
        _bound.reset(token)
    idle = [name for name in placements if name not in met]
    if idle:
        warnings.warn(
            f"Annotations {idle} are never met. Names that the function gives with "
            f"annotate: {sorted(met)}.",
            stacklevel=4,
        )
