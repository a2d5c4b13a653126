"""The arrays of an NNX model: Variables, their metadata, and the names of dims."""

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import ModelError, SpecRankError, kind_of
from nnx_parallel.sharding.names import ArrayInfo, MeshAxes, as_tuple, dotted, path_of


class Constant(nnx.Variable):
    """An array that a module holds outside of Variables."""


class Weight(Constant, nnx.Param):
    """An array outside of Variables that the user's filter selects for training."""


@contextlib.contextmanager
def plain_variables() -> Iterator[None]:
    """Makes new Variables plain: Flax does not place them, whatever modes are set.

    With eager sharding, Flax would place a Variable that has names, and would need a
    mesh with axes of these names. The arrays of hijax and ref Variables are not part
    of a state.
    """
    with nnx.use_eager_sharding(False), nnx.var_defaults(hijax=False, ref=False):
        yield


def check_variables(model: nnx.Module) -> None:
    """Refuses Variables in the modes hijax and ref, and values that are not arrays.

    Raises:
        ModelError: If there are such Variables; the message names the first.
    """
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.Intermediate):
            _check_value(path, leaf)
        if isinstance(leaf, nnx.Variable) and (leaf.hijax or leaf.ref):
            raise ModelError(
                f"The Variable `{dotted(path)}` has hijax={leaf.hijax}, ref={leaf.ref}."
                " A step carries the arrays of a model as its state, so Variables must "
                "have hijax=False and ref=False. Pass a function that builds the "
                "model, on which nnx.var_defaults has no effect; or build the model "
                "inside nnx.var_defaults(hijax=False, ref=False)."
            )


def _check_value(path: tuple[Hashable, ...], variable: nnx.Variable) -> None:
    for value in jax.tree.leaves(variable.get_value()):
        if not (hasattr(value, "dtype") or isinstance(value, int | float | complex)):
            raise ModelError(
                f"`{dotted(path)}`, {kind_of(variable)}, holds {kind_of(value)}, which "
                "is not an array. Keep text and other settings in plain attributes of "
                f"the module, without {type(variable).__name__}(...)."
            )


def drop_meshes(model: nnx.Module) -> None:
    """Removes meshes from the metadata of Variables: the mesh is the strategy's."""
    # `nnx.eval_shape` would place the shapes on such a mesh, and fails if the names are
    # a NamedSharding (docs/library-notes.md, "Flax NNX").
    for _, leaf in nnx.to_flat_state(nnx.state(model)):
        if isinstance(leaf, nnx.Variable) and leaf.get_metadata().get("mesh"):
            leaf.set_metadata(mesh=None)


def variables_of(
    model: object, wrt: Any = ...
) -> Iterator[tuple[tuple[Hashable, ...], nnx.Variable]]:
    """Yields the path and Variable of every array of a model; a shared array only once.

    If a Variable holds a pytree, each array in it is yielded with a separate path, in a
    Variable of the same class and metadata. An array outside of Variables is yielded as
    a `Constant`. Sown values are left out, because they are not state.

    Args:
        model: The model.
        wrt: A filter for Variables, as in NNX.
    """
    for path, leaf in nnx.to_flat_state(nnx.state(model, wrt)):
        if not isinstance(leaf, nnx.Intermediate):
            yield from inner_variables(path, leaf)


def inner_variables(
    path: tuple[Hashable, ...], leaf: Any
) -> Iterator[tuple[tuple[Hashable, ...], nnx.Variable]]:
    """Yields the paths and Variables of the arrays in one leaf of NNX's graph."""
    if not isinstance(leaf, nnx.Variable):
        yield path, Constant(leaf)
    elif holds_one_array(leaf):
        yield path, leaf
    else:
        placements = leaf.get_metadata().get("placement")
        arrays = jax.tree.leaves_with_path(leaf.get_value())
        for index, (keys, x) in enumerate(arrays):
            variable = leaf.replace(x)
            if placements:
                variable.set_metadata(placement=placements[index])
            yield (*path, *map(_entry, keys)), variable


def holds_one_array(variable: nnx.Variable) -> bool:
    """False if a Variable holds ``None``, or a pytree with arrays inside."""
    return jax.tree_util.all_leaves([variable.get_value()])


def _entry(key: Any) -> Hashable:
    """Converts one entry of a JAX key path to a dict key, an index or a name."""
    names = ("key", "idx", "name")  # entries of dicts, sequences, dataclasses
    return next(getattr(key, name) for name in names if hasattr(key, name))


def array_info(path: tuple[Hashable, ...], variable: nnx.Variable) -> ArrayInfo:
    """Describes the array of a Variable for rules; refuses more names than dims."""
    value = variable.get_value()
    names = names_of(variable) or None
    if names:
        if len(names) > value.ndim:
            raise SpecRankError(
                f"`{dotted(path)}` has shape {value.shape} but {len(names)} names "
                f"{names}. Give one name, or None, for each of its {value.ndim} dims."
            )
        # As in a PartitionSpec, names of the last dims may be left out.
        names += (None,) * (value.ndim - len(names))
    return ArrayInfo(
        path=dotted(path),
        shape=tuple(value.shape),
        dtype=value.dtype,
        names=names,
        kind=type(variable).__name__,
        is_param=isinstance(variable, nnx.Param),
        flops=variable.get_metadata().get("flops", 0.0),
    )


# Arrays that Flax's modules make, and the number of their dims.
_NUM_DIMS = (
    (nnx.Linear, "kernel", 2),
    (nnx.Embed, "embedding", 2),
    (nnx.LayerNorm, "scale", 1),
    (nnx.RMSNorm, "scale", 1),
    (nnx.BatchNorm, "scale", 1),
)


# This is a protocol, because this package must not import `Stack` from `layers`.
@runtime_checkable
class HasLayers(Protocol):
    """A module with a leading dim of layers in its arrays."""

    def name_layers(self) -> None:
        """Names the leading dim in the metadata of the module's arrays."""
        ...


def name_dim(variable: nnx.Variable) -> None:
    """Gives dim 0 of an array the name ``layers``, unless it already has this name."""
    names = names_of(variable)
    if names[:1] != ("layers",):
        # If there is an entry for every dim, the first entry may be None; then it is
        # replaced.
        ndim = getattr(variable.get_value(), "ndim", None)
        names = ("layers", *names[names[:1] == (None,) and len(names) == ndim :])
    # Flax cannot place the array now, since the mesh is not known yet.
    variable.set_metadata(out_sharding=names, eager_sharding=False)


def name_layers(model: nnx.Module) -> None:
    """Adds the name ``layers`` where arrays of an abstract model lack it."""
    # `nnx.update` and `nnx.merge` replace metadata by the metadata of their arguments.
    # Arrays that a user stacked or loaded have no name for the layers
    # (docs/library-notes.md, "Flax NNX").
    stacks = stacks_of(model)
    for stack in stacks.values():
        stack.name_layers()
    arrays: dict[tuple[Hashable, ...], nnx.Variable] = {
        path: leaf
        for path, leaf in nnx.to_flat_state(nnx.state(model))
        if isinstance(leaf, nnx.Variable) and not is_inside(path, stacks)
    }
    for path, module in nnx.iter_modules(model):
        for kind, name, ndim in _NUM_DIMS:
            array = arrays.get((*path, name)) if isinstance(module, kind) else None
            if array is not None and len(array.get_value().shape) == ndim + 1:
                _name_vmapped(arrays, path, array.get_value().shape[0])


@runtime_checkable
class FollowsNames(Protocol):
    """A module that names some arrays after others, such as adapters after a kernel."""

    def follow_names(self) -> None:
        """Renames these arrays after the names of the other arrays have changed."""


def follow_names(model: nnx.Module) -> None:
    """Renames the arrays of `FollowsNames` modules after names have changed."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, FollowsNames):
            module.follow_names()


def stacks_of(model: nnx.Module) -> dict[tuple[Hashable, ...], HasLayers]:
    """Returns the stacks of a model by path."""
    return {p: m for p, m in nnx.iter_modules(model) if isinstance(m, HasLayers)}


def is_inside(
    path: tuple[Hashable, ...], stacks: dict[tuple[Hashable, ...], HasLayers]
) -> bool:
    """True if an array is inside a stack."""
    return any(path[: len(stack)] == stack for stack in stacks)


def _name_vmapped(
    arrays: dict[tuple[Hashable, ...], nnx.Variable],
    path: tuple[Hashable, ...],
    count: int,
) -> None:
    """Names dim 0 of all arrays that were made by one ``nnx.vmap``.

    These are the arrays of the largest module around ``path`` in which every array has
    a dim 0 of length ``count`` that is free for the name.
    """

    def below(root: tuple[Hashable, ...]) -> list[nnx.Variable]:
        return [v for p, v in arrays.items() if p[: len(root)] == root]

    def is_vmapped(variable: nnx.Variable) -> bool:
        shape = getattr(variable.get_value(), "shape", ())
        names = names_of(variable)
        # Names do not change if the user has named every dim.
        is_free = len(names) < len(shape) or names[0] in (None, "layers")
        return shape[:1] == (count,) and is_free

    while path and all(map(is_vmapped, below(path[:-1]))):
        path = path[:-1]
    for variable in filter(is_vmapped, below(path)):
        name_dim(variable)


def names_of(variable: nnx.Variable) -> tuple[MeshAxes, ...]:
    """Returns the names of dims in a Variable's metadata, from names or a sharding."""
    # Flax keeps the names of nnx.with_partitioning under this key: as a tuple, a spec,
    # a sharding with a spec, or a format with a sharding.
    found = variable.get_metadata().get("out_sharding")
    found = getattr(found, "sharding", found)
    names = as_tuple(getattr(found, "spec", found))
    return tuple(None if name is P.UNCONSTRAINED else name for name in names)


def flatten_pure(tree: Any) -> dict[str, jax.Array]:
    """Returns the arrays of a pytree as one flat dict by dotted path."""
    return {path_of(keys): leaf for keys, leaf in jax.tree.leaves_with_path(tree)}


def is_inexact(x: Any) -> bool:
    """True for floating-point and complex numbers, through which gradients flow."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
