"""Compares blocks that were built one by one, and stacks their arrays."""

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.errors import StackError
from nnx_parallel.sharding.model import ModelDef, Path
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import inner_variables, variables_of


def check_blocks(blocks: Sequence[nnx.Module], period: int) -> None:
    """Checks that blocks can be layers of one stack, in groups of ``period``.

    Raises:
        StackError: If the period does not divide the number of blocks, if blocks share
            a Variable, or if they differ in anything but the values of their arrays.
    """
    for i, block in enumerate(blocks):
        if not isinstance(block, nnx.Module):
            raise StackError(
                f"Element {i} of the blocks is a {type(block).__name__}, not an "
                "nnx.Module."
            )
    if not blocks or period < 1 or len(blocks) % period:
        raise StackError(
            f"Cannot stack {len(blocks)} blocks with period {period}: there must be at "
            "least 1 block, and their number must be a multiple of the period."
        )
    _check_unshared(blocks, period)
    for i, block in enumerate(blocks):
        if found := _difference(blocks[i % period], block):
            raise StackError(
                f"Blocks {i % period} and {i} of the stack differ: {found}. All layers "
                "run the same program, so blocks may differ only in the values of "
                f"their arrays. {_remedy(blocks)}"
            )


def find_blocks(model: nnx.Module) -> tuple[Path, int]:
    """Finds the longest list of blocks that can be one stack.

    Returns its path and length, or ``()`` and 0 if there is no such list.
    """
    lists: dict[Path, dict[int, nnx.Module]] = defaultdict(dict)
    for path, module in nnx.iter_modules(model):
        if path and isinstance(index := path[-1], int):
            lists[path[:-1]][index] = module
    found: list[tuple[Path, int]] = []
    for path, blocks in lists.items():
        # If an index is missing, an entry of the list is not a module, but for example
        # a function in a Sequential.
        if len(blocks) > 1 and set(blocks) == set(range(len(blocks))):
            with suppress(StackError):
                check_blocks([blocks[i] for i in range(len(blocks))], period=1)
                found.append((path, len(blocks)))
    return max(found, key=lambda each: each[1], default=((), 0))


def _remedy(blocks: Sequence[nnx.Module]) -> str:
    count = len(blocks)
    for period in (p for p in range(2, count) if count % p == 0):
        pairs = ((blocks[i % period], block) for i, block in enumerate(blocks))
        if not any(_difference(*pair) for pair in pairs):
            return f"The blocks repeat with period {period}: pass period={period}."
    return (
        "If a number differs, keep it in an nnx.Variable, because Variables are "
        "stacked. If no layer reads an attribute that differs, give it the same value "
        "in all blocks. Do not stack blocks of different kinds."
    )


def _check_unshared(blocks: Sequence[nnx.Module], period: int) -> None:
    # Blocks of the same group may share a Variable, because the group's graphdef has it
    # only once.
    owners: dict[int, int] = {}
    for i, block in enumerate(blocks):
        for path, variable in variables_of(block):
            # A plain `nnx.Variable` does not change, so its copies stay equal.
            if type(variable) is nnx.Variable:
                continue
            owner = owners.setdefault(id(variable), i)
            if owner // period != i // period:
                raise StackError(
                    f"Blocks {owner} and {i} of the stack share the Variable "
                    f"`{dotted(path)}`. Each stacked block would silently train a "
                    "separate copy. Give each block its own Variable, or keep the "
                    "shared module outside the stack and pass its output to the blocks "
                    "as an argument."
                )


def _difference(first: nnx.Module, other: nnx.Module) -> str:
    """Describes the first difference of two blocks; returns "" if they are equal."""
    if first is other:
        return ""
    ours, theirs = map(_parts, (first, other))
    for path in dict.fromkeys((*ours, *theirs)):
        if path not in ours or path not in theirs:
            return f"only one of the two has `{dotted(path)}`"
        one, two = ours[path], theirs[path]
        if not _is_same(one, two):
            where = f"`{dotted(path)}`" if path else "the block"
            return f"{where} is {one!r} in the first and {two!r} in the second"
    return ""


def _parts(block: nnx.Module) -> dict[tuple, Any]:
    """Returns comparable values for modules, Variables and attributes, by path."""
    parts = {}
    for path, node in nnx.iter_graph(block):
        name = str(path[-1]) if path else ""
        # Initializers may differ, because a model may scale them by depth. They have
        # already run.
        if not name.startswith("_pytree__") and not name.endswith("_init"):
            parts[path] = _part(node)
    return parts


def _part(node: Any) -> Any:
    if isinstance(node, nnx.Variable):
        names = node.get_metadata().get("out_sharding")
        return (type(node).__name__, _types(node.get_value()), names)
    if isinstance(node, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return _types(node)
    return type(node).__name__ if isinstance(node, nnx.Pytree) else node


def _types(tree: Any) -> Any:
    """Replaces each array of a tree by a string, such as "float32[2, 4]"."""
    return jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)


def _is_same(one: Any, two: Any) -> bool:
    """Returns True if two static values have the same effect when a block runs."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, types.FunctionType):
        # A lambda in __init__ is a different object in each block.
        return one.__code__ is two.__code__ and _is_same(_bound(one), _bound(two))
    if isinstance(one, functools.partial):
        one, two = ((f.func, f.args, f.keywords) for f in (one, two))
    if isinstance(one, dict):
        one, two = (tuple(sorted(d.items(), key=str)) for d in (one, two))
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_is_same, one, two))
    if isinstance(one, jax.Array | np.ndarray):
        return np.array_equal(one, two)
    # If a function closes over a module, the module is its block. Blocks are compared
    # separately.
    return isinstance(one, nnx.Pytree) or bool(one == two)


def _bound(function: types.FunctionType) -> tuple:
    """Returns the defaults of a function, and the values that it closes over."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__defaults__, function.__kwdefaults__, cells


def stack_blocks(blocks: Sequence[nnx.Module]) -> nnx.Module:
    """Stacks equal modules into one module. Its arrays have a leading dim."""
    every = [_arrays(block) for block in blocks]
    stacked = {p: _of_arrays(jnp.stack, [x[p] for x in every]) for p in every[0]}
    return _like(blocks[0], stacked)


def unstack_block(stacked: nnx.Module, index: int) -> nnx.Module:
    """Returns one of the stacked modules; its arrays do not have the dim ``layers``."""
    arrays = _arrays(stacked).items()
    block = _like(stacked, {p: _of_arrays(lambda x: x[index], x) for p, x in arrays})
    for _, leaf in nnx.to_flat_state(nnx.state(block)):
        if isinstance(leaf, nnx.Variable):
            names = leaf.get_metadata().get("out_sharding") or ()
            leaf.set_metadata(out_sharding=tuple(names)[1:] or None)
    return block


def _arrays(module: nnx.Module) -> dict[Path, Any]:
    leaves = nnx.to_flat_state(nnx.state(module))
    every = (inner_variables(path, leaf) for path, leaf in leaves)
    return {p: variable.get_value() for inner in every for p, variable in inner}


def _like(module: nnx.Module, arrays: dict[Path, Any]) -> nnx.Module:
    """Returns a copy of a module with other arrays, which are not placed."""
    # With eager sharding, Flax would place the arrays by the module's names, but the
    # arrays have one dim more or less.
    with nnx.use_eager_sharding(False):
        new = ModelDef.of(module).merge(arrays)
    for _, leaf in nnx.to_flat_state(nnx.state(new)):
        if isinstance(leaf, nnx.Variable):
            leaf.set_metadata(placement=None)
    return new


def _of_arrays(function: Callable, arrays: Any) -> Any:
    """Calls a function of arrays; for abstract arrays, computes only the shapes."""
    is_abstract = isinstance(jax.tree.leaves(arrays)[0], jax.ShapeDtypeStruct)
    return jax.eval_shape(function, arrays) if is_abstract else function(arrays)
