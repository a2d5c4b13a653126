"""Optimizer state in 8 bits, with scales that no layout changes.

Each moment is stored as one byte per number, and one scale per block of numbers. A
block is defined by the shape of the global array, and its scale is a maximum, which the
order of numbers does not change. So all layouts compute the same scales, even if they
split a block.

Strategies split dims into large shards. A block is a tile of 16 by 16 numbers, so that
nearly all shards contain complete tiles, and a device computes their scales without
communication. A row of 256 numbers would be cut much more often: a dim of 4096 over
32 devices has shards of 128.

A block without negative numbers, such as a block of second moments, does not need a bit
for the sign, and has twice as many levels. The sign of the scale tells which code a
block uses.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from nnx_parallel.errors import OptimizerError, kind_of
from nnx_parallel.layers.quantised import per_block, spread
from nnx_parallel.precision import sum_dtype
from nnx_parallel.sharding.model import Path, flatten, nest
from nnx_parallel.sharding.names import path_of
from nnx_parallel.sharding.optimizer import (
    check_transformation,
    owner_of,
    stacked_params,
)

MOMENTS = ("mu", "nu", "nu_max", "trace", "exp_avg", "exp_avg_sq", "m", "m1", "n", "v")
"""Fields of Optax's states that hold averages of gradients or of their squares.

Other fields hold parameters, or sums in which rounding would lose small terms
(docs/library-notes.md, "Optax").
"""

_MIN_SIZE = 4096  # smaller arrays, such as biases, stay as they are
_MIN_BLOCK = 64  # a scale has 4 bytes, which is too much for fewer numbers


class EightBitState(NamedTuple):
    """The state of `eight_bit_state`.

    Attributes:
        inner: The optimizer's state. Moments are uint8 codes of the same shapes.
        scales: For each field with moments, scales by parameter. The shape of a scale
            is the number of blocks along each dim of the parameter.
    """

    inner: optax.OptState
    scales: dict[str, dict[str, Any]]


class _Moment(NamedTuple):
    """A moment that is stored in 8 bits: its field, parameter, block and dtype."""

    field: str
    path: Path
    sides: tuple[int, ...]
    dtype: Any


def eight_bit_state(
    optimizer: Any, *, block_size: int = 256, fields: Collection[str] = MOMENTS
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of an optimizer in 8 bits, with one scale per block [1].

    AdamW's state has 2.03 bytes for each parameter instead of 8. An update decodes the
    moments, runs the optimizer in its usual dtypes, and rounds the new moments to the
    nearest codes. The code is the dynamic tree of [1]. Its levels are dense near the
    largest number of a block, and reach down to a millionth of it. A block without
    negative numbers has 255 nonzero levels, down to a ten-millionth. In such a block a
    nonzero number never becomes 0, because Adam divides by the root of the second
    moment.

    A block is a tile of the global array, along its last dim and its largest other dim.
    So the numbers do not depend on the strategy, and a checkpoint can be restored under
    any other strategy. Codes and scales are split like the parameter. Devices exchange
    scales only if their shards cut tiles. Layers of a `Stack` have separate blocks.

    Arrays of fewer than 4096 numbers (per layer), arrays with blocks of fewer than 64
    numbers because of odd sizes, and all other fields of the state stay as they are.

    Args:
        optimizer: An Optax transformation.
        block_size: Numbers in a block: a power of two from 64 to 4096. A block is
            smaller if its sides would not divide the dims.
        fields: Names of the fields with moments. The default has the names in Optax's
            optimizers. Pass other names for an optimizer that you write.

    Returns:
        A transformation with an `EightBitState`.

    Raises:
        OptimizerError: If the optimizer is not an Optax transformation, keeps no
            moments or already has them in 8 bits, or if another argument is invalid.

    Example:
        >>> tx = eight_bit_state(optax.adamw(1e-3))
        >>> state = tx.init({"kernel": jnp.ones((64, 128))})
        >>> state.inner[0].mu["kernel"].dtype, state.scales["0.mu"]["kernel"].shape
        (dtype('uint8'), (4, 8))

    References:
        [1] Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021,
        https://arxiv.org/abs/2110.02861
    """
    given = check_transformation("eight_bit_state", optimizer, "optax.adamw(3e-4)")
    powers = [_MIN_BLOCK * 2**n for n in range(7)]
    if type(block_size) is not int or block_size not in powers:
        raise OptimizerError(
            f"eight_bit_state got block_size={block_size!r}. It must be one of "
            f"{powers}."
        )
    is_names = isinstance(fields, Collection) and not isinstance(fields, str)
    if not (is_names and all(isinstance(name, str) for name in fields)):
        raise OptimizerError(
            f"eight_bit_state got fields={fields!r}. It must be a collection of names, "
            'such as ("mu", "nu").'
        )
    tx = optax.with_extra_args_support(given)

    def moments(params: Any) -> dict[tuple, _Moment]:
        like = jax.eval_shape(tx.init, params)
        return _moments(like, _shapes(params), block_size, fields)

    def init(params: optax.Params) -> EightBitState:
        inner = tx.init(params)
        _check_state(inner, _shapes(params), fields)
        return _encode_state(inner, moments(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple:
        found = moments(updates if params is None else params)
        inner = _decode_state(state, found)
        updates, inner = tx.update(updates, inner, params, **extra)
        return updates, _encode_state(inner, found)

    return optax.GradientTransformationExtraArgs(init, update)


def _shapes(params: Any) -> dict[Path, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not all(keys and all(hasattr(k, "key") for k in keys) for keys, _ in leaves):
        raise OptimizerError(
            f"eight_bit_state got parameters in {kind_of(params)}. They must be in "
            "nested dicts, as in a Trainer."
        )
    return {tuple(k.key for k in keys): tuple(x.shape) for keys, x in leaves}


def _check_state(
    inner: Any, shapes: dict[Path, tuple[int, ...]], fields: Collection[str]
) -> None:
    """Raises an error if a state has no moments, or has them in 8 bits already."""

    def is_ours(node: Any) -> bool:
        return isinstance(node, EightBitState)

    if any(map(is_ours, jax.tree.leaves(inner, is_leaf=is_ours))):
        raise OptimizerError(
            "eight_bit_state got an optimizer that contains another eight_bit_state. "
            "Apply it once: to the complete optimizer, or to parts of it."
        )
    leaves = jax.tree_util.tree_leaves_with_path(inner)
    owned = [(keys, owner) for keys, _ in leaves if (owner := owner_of(keys, shapes))]
    names = {_field_of(*pair)[1] for pair in owned}
    if shapes and names.isdisjoint(fields):
        held = f"the fields {sorted(names)}" if names else "no array of a parameter"
        raise OptimizerError(
            f"eight_bit_state got an optimizer that keeps {held}. Moments are in the "
            f"fields {sorted(fields)}. If another field holds averages of gradients, "
            "pass its name in fields=. If there are none, leave eight_bit_state out."
        )


def _field_of(keys: tuple, owner: Path) -> tuple[str, str]:
    """Returns the path and the name of the field that holds a parameter's array."""
    of_field = keys[: -len(owner)]
    last = of_field[-1] if of_field else None
    return path_of(of_field), str(getattr(last, "name", getattr(last, "key", "")))


def _moments(
    like: Any, shapes: dict[Path, tuple], block_size: int, fields: Collection[str]
) -> dict[tuple, _Moment]:
    """Returns the moments to store in 8 bits, by path; ``like`` is the state."""
    stacked, found = stacked_params() or frozenset(), {}
    for keys, x in jax.tree_util.tree_leaves_with_path(like):
        owner = owner_of(keys, shapes)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        if owner is None or x.shape != shapes[owner] or not is_float:
            continue
        path, name = _field_of(keys, owner)
        sides = block_sides(x.shape, block_size, first=int(owner in stacked))
        if name in fields and sides:
            found[keys] = _Moment(path, owner, sides, x.dtype)
    return found


def block_sides(
    shape: Sequence[int], block_size: int, *, first: int = 0
) -> tuple[int, ...] | None:
    """Returns the size of a block along each dim; ``None`` for a small array.

    Args:
        shape: Shape of the array.
        block_size: Numbers in a block.
        first: The first dim that a block may span. It is 1 if dim 0 is the layers.

    Example:
        >>> block_sides((12, 768, 12, 64), 256, first=1), block_sides((50257, 768), 256)
        ((1, 16, 1, 16), (1, 256))
    """
    if math.prod(shape[first:]) < _MIN_SIZE:
        return None
    # A dim that is not chosen, such as heads or experts, may be split completely.
    *others, last = range(first, len(shape))
    dims = [last, *sorted(others, key=lambda dim: (shape[dim], dim))[-1:]]
    sides = [1] * len(shape)
    while math.prod(sides) < block_size:
        even = [dim for dim in dims if shape[dim] // sides[dim] % 2 == 0]
        if not even:
            break
        sides[min(even, key=lambda dim: sides[dim])] *= 2
    return tuple(sides) if math.prod(sides) >= _MIN_BLOCK else None


def _encode_state(inner: Any, moments: Mapping[tuple, _Moment]) -> EightBitState:
    scales: dict[str, dict[Path, Array]] = {}

    def one(keys: tuple, x: Any) -> Any:
        if (moment := moments.get(keys)) is None:
            return x
        codes, scale = encode(x, moment.sides)
        scales.setdefault(moment.field, {})[moment.path] = scale
        return codes

    inner = jax.tree_util.tree_map_with_path(one, inner)
    return EightBitState(inner, {field: nest(x) for field, x in scales.items()})


def _decode_state(state: EightBitState, moments: Mapping[tuple, _Moment]) -> Any:
    scales = {field: flatten(tree) for field, tree in state.scales.items()}

    def one(keys: tuple, x: Any) -> Any:
        if (moment := moments.get(keys)) is None:
            return x
        return decode(x, scales[moment.field][moment.path]).astype(moment.dtype)

    return jax.tree_util.tree_map_with_path(one, state.inner)


# `encode` does not use the primitives `max`, `min` and `sign`, because `state_kinds`
# recognizes optimizers by them.


def encode(x: Array, sides: tuple[int, ...]) -> tuple[Array, Array]:
    """Rounds an array to uint8 codes, with one scale per block.

    The scale is the largest absolute value. It is negative if the block has negative
    numbers. It is float64 for float64 arrays, and float32 otherwise. A block with an
    infinity or NaN is decoded to NaN.

    Args:
        x: The array.
        sides: Size of a block along each dim. It divides the dim.

    Example:
        >>> codes, scale = encode(jnp.array([[0.0, 0.5, 1.0, -4.0]]), (1, 2))
        >>> codes.tolist(), scale.tolist()
        ([[0, 255, 74, 255]], [[0.5, -4.0]])
    """
    wide = x.astype(sum_dtype(x))
    largest = per_block(jnp.max, jnp.abs(wide), sides)
    is_signed = per_block(jnp.min, wide, sides) < 0
    scale = jnp.where(is_signed, -largest, largest)
    whole = spread(scale, x.shape)
    share = jnp.abs(wide) / jnp.where(whole == 0, 1, jnp.abs(whole))
    share = jnp.where(share >= 0, share, 0)  # NaN has no code
    top = _num_levels(whole)
    steps, power = _decade(share, top, [10.0**-d for d in range(1, 8)])
    code = 2 * steps - 1 - jnp.round((1 - share * power) / 0.9 * steps)
    least = jnp.where((whole < 0) | (share == 0), 0, 1).astype(code.dtype)
    code = jnp.where(code < least, least, code)
    # 0 has one code, so that a moment that does not change keeps its code.
    is_negative = (wide < 0) & (code > 0)
    return jnp.where(is_negative, code + 128, code).astype(jnp.uint8), scale


def decode(codes: Array, scale: Array) -> Array:
    """Undoes `encode`, up to rounding. The result has the dtype of the scale."""
    whole, code = spread(scale, codes.shape), codes.astype(scale.dtype)
    is_negative = (whole < 0) & (code >= 128)
    code = jnp.where(is_negative, code - 128, code)
    top = _num_levels(whole)
    steps, power = _decade(code, top, [2 * top * 0.5**d - 1 for d in range(1, 8)])
    share = (1 - 0.9 * ((2 * steps - 1 - code) / steps)) / power
    share = jnp.where(code == 0, 0, share)
    return jnp.where(is_negative, -share, share) * jnp.abs(whole)


def _num_levels(scale: Array) -> Array:
    """Returns the number of levels from 0.1 to 1."""
    return jnp.where(scale < 0, 64, 128).astype(scale.dtype)


def _decade(x: Array, top: Array, limits: Sequence[Any]) -> tuple[Array, Array]:
    """Returns the number of levels in a number's decade, and the decade's power of 10.

    The highest decade has ``top`` levels, each lower decade has half as many, and the
    lowest has one. In a code, the position of the first bit tells the decade, and the
    bits behind it the level.

    Args:
        x: Numbers, or codes.
        top: The number of levels in the highest decade.
        limits: The largest number, or code, of each lower decade.
    """
    steps, power = top, jnp.ones_like(x)
    for decade, limit in enumerate(limits, 1):
        is_lower = x <= limit
        steps = jnp.where(is_lower, top * 0.5**decade, steps)
        power = jnp.where(is_lower, 10.0**decade, power)
    return steps, power
