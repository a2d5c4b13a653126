"""Which arrays have a leading dim of layers, said by the name ``layers`` of that dim.

A `Stack` knows its own. What `nnx.vmap` has built has one dim more than Flax's modules
make.
"""

from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

from flax import nnx

Path = tuple[Hashable, ...]

# Arrays that Flax's modules make, and their dims.
_NUM_DIMS = (
    (nnx.Linear, "kernel", 2),
    (nnx.Embed, "embedding", 2),
    (nnx.LayerNorm, "scale", 1),
    (nnx.RMSNorm, "scale", 1),
    (nnx.BatchNorm, "scale", 1),
)


# Not `Stack` itself, which is later in the order of imports.
@runtime_checkable
class HasLayers(Protocol):
    """A module whose arrays have a leading dim of layers."""

    def name_layers(self) -> None:
        """Names that dim in the metadata of its arrays."""
        ...


def name_dim(variable: nnx.Variable) -> None:
    """Names dim 0 of an array ``layers``, where it is not yet so."""
    names = tuple(variable.get_metadata().get("out_sharding") or ())
    if names[:1] != ("layers",):
        # With a name for each dim already, that of dim 0 is None.
        ndim = getattr(variable.get_value(), "ndim", None)
        names = ("layers", *names[names[:1] == (None,) and len(names) == ndim :])
    # No mesh is known yet, on which Flax could place it now.
    variable.set_metadata(out_sharding=names, eager_sharding=False)


def name_layers(model: nnx.Module) -> None:
    """Names the dims of layers in an abstract model, where that is not yet so."""
    # `nnx.update` and `nnx.merge` take the metadata of what they are given: names that
    # a user has stacked or loaded lack the layers (docs/library-notes.md, "Flax NNX").
    stacks = stacks_of(model)
    for stack in stacks.values():
        stack.name_layers()
    arrays: dict[Path, nnx.Variable] = {
        path: leaf
        for path, leaf in nnx.to_flat_state(nnx.state(model))
        if isinstance(leaf, nnx.Variable) and not is_inside(path, stacks)
    }
    for path, module in nnx.iter_modules(model):
        for kind, name, ndim in _NUM_DIMS:
            array = arrays.get((*path, name)) if isinstance(module, kind) else None
            if array is not None and len(array.get_value().shape) == ndim + 1:
                _name_vmapped(arrays, path, array.get_value().shape[0])


def stacks_of(model: nnx.Module) -> dict[Path, HasLayers]:
    """The stacks of a model by path."""
    return {p: m for p, m in nnx.iter_modules(model) if isinstance(m, HasLayers)}


def is_inside(path: Path, stacks: dict[Path, HasLayers]) -> bool:
    """True if an array is one of a stack's."""
    return any(path[: len(stack)] == stack for stack in stacks)


def _name_vmapped(arrays: dict[Path, nnx.Variable], path: Path, count: int) -> None:
    """Names dim 0 of the largest module around a path whose arrays all have it."""

    def below(root: Path) -> list[nnx.Variable]:
        return [v for p, v in arrays.items() if p[: len(root)] == root]

    def is_vmapped(variable: nnx.Variable) -> bool:
        shape = getattr(variable.get_value(), "shape", ())
        names: Any = variable.get_metadata().get("out_sharding") or ()
        # One whose every dim has a name of the user's is as the user says.
        is_free = len(names) < len(shape) or names[0] in (None, "layers")
        return shape[:1] == (count,) and is_free

    while path and all(map(is_vmapped, below(path[:-1]))):
        path = path[:-1]
    for variable in filter(is_vmapped, below(path)):
        name_dim(variable)
