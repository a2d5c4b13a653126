"""Products of activations and parameters in 8 bits, with scales that no layout changes.

Each token of an activation, and each output channel of a kernel, has one scale. It is
the largest absolute value over the dims that the product contracts, divided by the
largest number of the 8-bit dtype. The order of numbers does not change a maximum. So a
layout may split any dim, and all devices compute the same scales. Sums of int8 products
are int32, and exact for up to 130,000 terms. This is the recipe of SwitchBack [1],
except that each channel of a kernel has a scale.

The backward pass multiplies the gradient of the output by the scales of the channels,
so that its contraction over channels can use the 8-bit kernel of the forward pass. The
gradient of the kernel is a sum over tokens. Their scales differ, so this product runs
in the compute dtype. Scales for groups of tokens would depend on how a layout splits
tokens.

In the MX format [2], 32 contracted elements share a scale, which is a power of 2. An
element times its scale is exact in bfloat16, float32 and float64. So both operands are
multiplied by their scales in the compute dtype, and the product runs in this dtype.

References:
    [1] Wortsman et al., "Stable and low-precision training for large-scale
    vision-language models", 2023, section 2.2, https://arxiv.org/abs/2304.13013
    [2] Open Compute Project, "OCP Microscaling Formats (MX) Specification", version
    1.0, 2023, section 5
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

from nnx_parallel.errors import EightBitError
from nnx_parallel.precision import EightBit, sum_dtype

_TINY = 1e-30  # if all numbers of a group are smaller, they become 0
_place = jax.lax.with_sharding_constraint


class Quantised(NamedTuple):
    """An 8-bit array and its scales; ``values * scale`` approximates the array.

    Attributes:
        values: int8 or float8, in the array's shape.
        scale: The scales, with size 1 along the dims of a group. If groups are blocks
            (`quantise_mx`), the first of these dims has a scale for each block. Such a
            scale is a uint8 ``code``, which stands for ``2.0 ** (code - 127)``, or for
            NaN if it is 255.
    """

    values: Array
    scale: Array


class Kernel(NamedTuple):
    """A kernel in 8 bits.

    Attributes:
        forward: The kernel in groups along its inputs.
        backward: The kernel in blocks along its outputs, for the gradient of the input,
            or ``None`` if that product uses ``forward``.
    """

    forward: Quantised
    backward: Quantised | None = None


def quantise(
    x: Array,
    dims: tuple[int, ...],
    dtype: Any,
    axes: tuple[str, ...] = (),
    noise: Array | None = None,
) -> Quantised:
    """Rounds an array to 8 bits, with one scale for each group of numbers.

    The scale is float64 for float64 arrays, and float32 otherwise.

    A group with an infinity or NaN has a scale that is not finite, so the product is
    not finite.

    Args:
        x: The array.
        dims: The dims of a group; the scale has size 1 along them.
        dtype: int8 or a float8 dtype.
        axes: Manual mesh axes that split a group.
        noise: Uniform numbers in [0, 1), in the shape of x, for stochastic rounding;
            ``None`` rounds to the nearest number.

    Example:
        >>> values, scale = quantise(jnp.array([[1.0, -2.0], [0.0, 0.0]]), (1,), "int8")
        >>> values.tolist(), scale.shape
        ([[64, -127], [0, 0]], (2, 1))
    """
    most = _largest(dtype)
    wide = x.astype(sum_dtype(x))
    largest = jnp.max(jnp.abs(wide), axis=dims, keepdims=True)
    largest = jax.lax.pmax(largest, axes) if axes else largest
    is_tiny = largest < _TINY
    scale = jnp.where(is_tiny, 1.0, largest / most)
    scaled = wide * jnp.where(is_tiny, 0.0, most / largest)
    # The quotient of the largest number may round to slightly more than `most`.
    return Quantised(_cast(jnp.clip(scaled, -most, most), dtype, noise), scale)


def _largest(dtype: Any) -> float:
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)


def _cast(x: Array, dtype: Any, noise: Array | None) -> Array:
    """Rounds numbers within the range of an 8-bit dtype, and converts them.

    With noise, a number between two numbers of the dtype becomes one of them. The mean
    over all noise is the number itself. A number of the dtype does not change.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if noise is None:
        return (jnp.round(x) if is_integer else x).astype(dtype)
    step = jnp.ones((), x.dtype)
    if not is_integer:
        info = jnp.finfo(dtype)
        exponent = jnp.frexp(x)[1] - 1  # 0 for numbers from 1 to 2
        step = jnp.ldexp(step, jnp.maximum(exponent, info.minexp) - info.nmant)
    lower = jnp.floor(x / step)
    # This comparison is exact. A sum with the noise would be rounded.
    return ((lower + (noise < x / step - lower)) * step).astype(dtype)


def quantise_mx(
    x: Array,
    dims: tuple[int, ...],
    dtype: Any,
    block: int,
    noise: Array | None = None,
) -> Quantised:
    """Rounds an array to the MX format: each block has a scale that is a power of 2.

    A block consists of consecutive elements along ``dims``, in row-major order. Its
    scale is the smallest power of 2 with which no element saturates. A layout may split
    any dim, even within a block: devices then exchange the codes of such blocks.

    A block with an infinity or NaN becomes NaN.

    Args:
        x: The array. ``block`` must divide the product of the sizes of ``dims``.
        dims: The dims along which there are blocks.
        dtype: A float8 dtype.
        block: Number of elements of a block.
        noise: See `quantise`.

    Example:
        >>> x = jnp.array([[1.0, 448.0, 0.3, 449.0]])
        >>> values, codes = quantise_mx(x, (1,), jnp.float8_e4m3fn, 2)
        >>> values.tolist(), codes.tolist()
        ([[1.0, 448.0, 0.15625, 224.0]], [[127, 128]])
    """
    wide = x.astype(sum_dtype(x))
    codes = _codes_of(wide, _largest(dtype))
    # The maximum is taken over codes instead of elements: if a layout splits blocks,
    # devices exchange bytes instead of floats.
    kept = [d for d in range(x.ndim) if d not in dims]
    codes = jnp.moveaxis(codes, dims, range(-len(dims), 0))
    codes = codes.reshape([x.shape[d] for d in kept] + [-1, block])
    codes = jnp.expand_dims(jnp.max(codes, axis=-1), tuple(range(-1, -len(dims), -1)))
    codes = jnp.moveaxis(codes, range(-len(dims), 0), dims)
    of_element = _spread(codes, x.shape, dims)
    # The smallest scale is far larger than the smallest normal number.
    scaled = wide * jnp.ldexp(jnp.ones((), wide.dtype), 127 - of_element)
    scaled = jnp.where(of_element == 0, 0, scaled)  # see `_TINY`
    return Quantised(_cast(scaled, dtype, noise), codes)


def _codes_of(x: Array, most: float) -> Array:
    """Returns a code for each element: its smallest scale that avoids saturation.

    With this scale, the element is at most ``most``. The result is uint8 in the shape
    of ``x``. A logarithm could be wrong by one at powers of 2, and could differ between
    devices.
    """
    fraction, exponent = jnp.frexp(jnp.abs(x))  # 0.5 <= fraction < 1
    largest, offset = math.frexp(most)
    code = exponent - offset + (fraction > largest) + 127
    code = jnp.where(jnp.abs(x) < _TINY, 0, jnp.clip(code, 0, 254))
    return jnp.where(jnp.isfinite(x), code, 255).astype(jnp.uint8)


def _spread(codes: Array, shape: tuple[int, ...], dims: tuple[int, ...]) -> Array:
    """Repeats the code of each block for its elements; returns int32 ``shape``."""
    size = math.prod(shape[d] for d in dims) // codes.shape[dims[0]]
    codes = jnp.moveaxis(codes.astype(jnp.int32), dims, range(-len(dims), 0))
    codes = jnp.repeat(codes.reshape(*codes.shape[: -len(dims)], -1), size, axis=-1)
    codes = codes.reshape(*codes.shape[:-1], *(shape[d] for d in dims))
    return jnp.moveaxis(codes, range(-len(dims), 0), dims)


def _round(
    x: Array,
    dims: tuple[int, ...],
    dtype: Any,
    block: int | None,
    axes: tuple[str, ...] = (),
    noise: Array | None = None,
) -> Quantised:
    """Rounds an array with one scale per group or per block; see `quantise`."""
    if block is None:
        return quantise(x, dims, dtype, axes, noise)
    return quantise_mx(x, dims, dtype, block, noise)


def _exact(
    given: Quantised, dims: tuple[int, ...], block: int | None, dtype: Any
) -> Array:
    """Multiplies 8-bit values by their scales; the result is exact for blocks."""
    values, scale = given
    if block is None:
        # The scales are small, so a float16 product with them would lose digits.
        return (values.astype(scale.dtype) * scale).astype(dtype)
    if dtype == jnp.float16:
        raise EightBitError(
            "A product in the MX format computes in float16, in which the scales of "
            "small numbers are 0. Pass compute=jnp.bfloat16 or jnp.float32 to "
            "Precision.mxfp8, and no dtype=jnp.float16 to its layers."
        )
    codes = _spread(scale, values.shape, dims)
    scale = jnp.ldexp(jnp.ones((), jnp.float32), codes - 127)
    scale = jnp.where(codes == 255, jnp.nan, scale)
    return values.astype(dtype) * scale.astype(dtype)


def _operand(
    given: Quantised, dims: tuple[int, ...], block: int | None, dtype: Any
) -> Array:
    """Returns the operand of a product: 8-bit values, or with blocks exact values."""
    return given.values if block is None else _exact(given, dims, block, dtype)


QUANTISE = "nnx_parallel.quantise_kernel"
"""Name of `quantise_kernel` in a traced program.

`gather_late` runs this function on the stored shards of a kernel, and gathers the 8-bit
values afterwards.
"""


def _named(function: Callable) -> Callable:
    function.__name__ = QUANTISE
    return function


@partial(jax.jit, static_argnums=(1, 2, 3))
@_named
def quantise_kernel(
    w: Array, dims: tuple[int, ...], dtype: Any, block: int | None = None
) -> Quantised:
    """Rounds a kernel to 8 bits; no gradient flows through it."""
    return _round(jax.lax.stop_gradient(w), dims, dtype, block)


def round_kernel(
    w: Array, ins: tuple[int, ...], outs: tuple[int, ...], recipe: EightBit
) -> Kernel:
    """Rounds a kernel for the products of a recipe.

    Args:
        w: The kernel. A dim that is not in ``ins`` or ``outs`` enumerates experts.
        ins: The dims of the inputs.
        outs: The dims of the outputs.
        recipe: The dtypes of the products, and the blocks.
    """
    kind, block = recipe.forward, recipe.block
    found = quantise_kernel(w, ins, kind, block)
    if block is None or recipe.gradient is None:
        return Kernel(found)
    return Kernel(found, quantise_kernel(w, outs, kind, block))


_layers: ContextVar[set[str] | None] = ContextVar("layers in 8 bits", default=None)


@contextmanager
def noting_layers() -> Iterator[set[str]]:
    """Collects the paths of the layers whose products are traced in 8 bits."""
    found = set[str]()
    token = _layers.set(found)
    try:
        yield found
    finally:
        _layers.reset(token)


def note_layer(recipe: EightBit) -> None:
    """Notes that the layer with a recipe of `set_recipe` is traced."""
    if (found := _layers.get()) is not None and recipe.layers is not None:
        found.add(recipe.layers)


class RoundingKey(nnx.Variable):
    """A random key for the rounding of a layer's gradient in one step.

    `set_recipe` adds it to a model inside of a step. The state of a run does not
    contain it.
    """


class Split(Protocol):
    """A product whose input is gathered, or whose output is scattered, along `seq`."""

    @property
    def gathers(self) -> bool:
        """True if ``seq`` splits the input, and False if it splits the output."""
        ...

    @property
    def input(self) -> NamedSharding:
        """The sharding of the input."""
        ...

    @property
    def output(self) -> NamedSharding:
        """The sharding of the output."""
        ...

    def gather(self, x: Array) -> Array:
        """Gathers an array along ``seq``: the input, or the gradient of the output."""
        ...


class _Call(NamedTuple):
    recipe: EightBit
    num: int  # number of contracted dims
    split: Split | None
    dtype: Any  # dtype of the kernel


def eight_bit_matmul(
    x: Array,
    w: Array,
    num: int,
    recipe: EightBit,
    split: Split | None = None,
    key: Array | None = None,
    w_dims: tuple[int, ...] | None = None,
) -> Array:
    """Multiplies an activation by a kernel in 8 bits, with `recipe` for each product.

    Args:
        x: ``(*leading, *in_dims)``, where ``num`` is the number of in dims.
        w: ``(*in_dims, *out_dims)``, or with ``w_dims`` dims in another order.
        num: Number of contracted dims.
        recipe: The dtypes of the products.
        split: How the product gathers or scatters along ``seq``, or ``None``.
        key: Key for the rounding of the output's gradient. ``None`` rounds to the
            nearest number.
        w_dims: The dims of w to contract, in the order of in_dims; by default the
            first dims.

    Returns:
        ``(*leading, *out_dims)`` in the dtype to which x and w are promoted.

    Example:
        >>> from nnx_parallel import Precision
        >>> x, w = jnp.array([[1.0, 0.5]]), jnp.array([[1.0, 2.0], [0.5, 1.0]])
        >>> y = eight_bit_matmul(x, w, 1, Precision.int8().products)
        >>> bool(abs(y - x @ w).max() < 0.02)
        True
    """
    note_layer(recipe)
    # Qwix's `dot_general` quantises the kernel inside its call, so the kernel would be
    # gathered before the cast, and its gradient quantises the kernel a second time.
    if key is not None and key.ndim:
        raise EightBitError(
            f"`{recipe.layers}` has {key.shape} keys for stochastic rounding in one "
            "call: a scan over its layers does not divide arrays other than "
            "parameters. Scan all of its Variables, or use rounding='nearest'."
        )
    ins = w_dims or tuple(range(num))
    outs = tuple(d for d in range(w.ndim) if d not in ins)
    kernel = round_kernel(w, ins, outs, recipe)
    if w_dims is not None:
        # If w were transposed before the cast, it would be gathered before the cast.
        w, kernel = jax.tree.map(lambda a: a.transpose(*ins, *outs), (w, kernel))
    x = x.astype(jnp.result_type(x, w))  # an integer may be the input
    return _product(_Call(recipe, num, split, w.dtype), x, w, kernel, key)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    call: _Call, x: Array, w: Array, kernel: Kernel, key: Array | None
) -> Array:
    return _forward(call, x, w, kernel, key)[0]


# The forward pass does not use `w`. It is an argument so that it gets the gradient. If
# `w` is stored in shards, the compiler removes its gather, because nothing uses it.
def _forward(
    call: _Call, x: Array, w: Array, kernel: Kernel, key: Array | None
) -> tuple[Array, tuple]:
    del w
    num, split, recipe = call.num, call.split, call.recipe
    lead, scale = x.ndim - num, kernel.forward.scale
    ins, w_ins = tuple(range(lead, x.ndim)), tuple(range(num))
    rows = _round(x, ins, recipe.forward, recipe.block)
    if split is not None and split.gathers:
        rows = Quantised(*map(split.gather, rows))
    left = _operand(rows, ins, recipe.block, x.dtype)
    right = _operand(kernel.forward, w_ins, recipe.block, x.dtype)
    y = _dot(x.dtype, left, right, ins, w_ins)
    y = y if split is None else _place(y, split.output)
    if recipe.block is None:
        of_rows = _expand(rows.scale, lead, y.ndim - lead)
        y = y.astype(scale.dtype) * of_rows * _channels(scale, num, lead)
    saved = kernel.forward if kernel.backward is None else kernel.backward
    return y.astype(x.dtype), (x, saved, key)


def _backward(call: _Call, saved: tuple, dy: Array) -> tuple[Array, Array, None, None]:
    x, kernel, key = saved
    split, lead = call.split, x.ndim - call.num
    if split is not None:
        x, dy = (split.gather(x), dy) if split.gathers else (x, split.gather(dy))
    dx = _gradient_of_input(call, kernel, x.dtype, dy, key)
    dx = dx if split is None else _place(dx, split.input)
    tokens = tuple(range(lead))
    dw = jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())))
    return dx, dw.astype(call.dtype), None, None


def _gradient_of_input(
    call: _Call, kernel: Quantised, dtype: Any, dy: Array, key: Array | None
) -> Array:
    num, recipe, (values, scale) = call.num, call.recipe, kernel
    kept = tuple(range(num, values.ndim))
    lead = dy.ndim - len(kept)
    outs = tuple(range(lead, dy.ndim))
    if recipe.gradient is None:
        whole = _exact(kernel, tuple(range(num)), recipe.block, dtype)
        return _dot(dtype, dy.astype(dtype), whole, outs, kept).astype(dtype)
    if recipe.block is None:
        dy = dy.astype(scale.dtype) * _channels(scale, num, lead)
    # Each number of the noise depends on its position in the global array, so the noise
    # is the same under every layout.
    noise = None if key is None else jax.random.uniform(key, dy.shape, jnp.float32)
    rows = _round(dy, outs, recipe.gradient, recipe.block, noise=noise)
    left = _operand(rows, outs, recipe.block, dtype)
    right = _operand(kernel, kept, recipe.block, dtype)
    total = _dot(dtype, left, right, outs, kept)
    if recipe.block is None:
        total = total if call.split is None else _place(total, call.split.input)
        total = total.astype(scale.dtype) * _expand(rows.scale, lead, num)
    return total.astype(dtype)


_product.defvjp(_forward, _backward)


def _dot(
    dtype: Any, x: Array, w: Array, x_dims: tuple[int, ...], w_dims: tuple[int, ...]
) -> Array:
    dims = ((x_dims, w_dims), ((), ()))
    out = _dtype_of_sums(x, dtype)
    return jax.lax.dot_general(x, w, dims, preferred_element_type=out)


def _dtype_of_sums(x: Array, dtype: Any) -> Any:
    """Returns the dtype of a product's output. Devices add partial sums in it."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.int32
    # Sums of float8 numbers, which are not scaled yet, may exceed the largest float16.
    return jnp.float32 if dtype == jnp.float16 else dtype


def _expand(scale: Array, lead: int, num: int) -> Array:
    """Reshapes scales of rows to ``(*leading, 1, ...)`` with ``num`` dims of size 1."""
    return scale.reshape(*scale.shape[:lead], *(1,) * num)


def _channels(scale: Array, num: int, lead: int) -> Array:
    """Reshapes scales of channels to ``(1, ..., *out_dims)`` with ``lead`` ones."""
    return scale.reshape(*(1,) * lead, *scale.shape[num:])


class Grouped(NamedTuple):
    """A grouped product in 8 bits on a device that has a part of each expert.

    Attributes:
        recipe: The dtypes of the products.
        in_axes: Manual mesh axes that split the contracted dim.
        out_axes: Manual mesh axes that split the output channels.
    """

    recipe: EightBit
    in_axes: tuple[str, ...] = ()
    out_axes: tuple[str, ...] = ()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def eight_bit_ragged_dot(
    call: Grouped, rows: Array, kernel: Array, rounded: Kernel, sizes: Array
) -> Array:
    """Computes ``jax.lax.ragged_dot`` in 8 bits.

    Each row, and each output channel of an expert, has one scale, or one per block.

    Args:
        call: The dtypes, and the axes that split the dims.
        rows: ``(rows, in)``, sorted by expert.
        kernel: ``(experts, in, out)``. Only the gradient uses it.
        rounded: The kernel in 8 bits, from `round_kernel`.
        sizes: int ``(experts,)``, the number of rows of each expert.
    """
    return _ragged_forward(call, rows, kernel, rounded, sizes)[0]


def _ragged_forward(
    call: Grouped, rows: Array, kernel: Array, rounded: Kernel, sizes: Array
) -> tuple[Array, tuple]:
    recipe, scale = call.recipe, rounded.forward.scale
    found = _round(rows, (1,), recipe.forward, recipe.block, call.in_axes)
    left = _operand(found, (1,), recipe.block, rows.dtype)
    right = _operand(rounded.forward, (1,), recipe.block, rows.dtype)
    y = _ragged_dot(rows.dtype, left, right, sizes)
    if recipe.block is None:
        y = y.astype(scale.dtype) * found.scale * _scales_of(len(rows), scale, sizes)
    empty = jnp.zeros((0,), kernel.dtype)  # has the dtype of the gradient
    return y.astype(rows.dtype), (rows, rounded, sizes, empty)


def _scales_of(count: int, scale: Array, sizes: Array) -> Array:
    """Returns the scales ``(rows, out)`` of the experts of all rows."""
    # The expert of a row is the number of experts whose rows come before it.
    is_after = jnp.arange(count)[:, None] >= jnp.cumsum(sizes)[None]
    expert = jnp.sum(is_after, axis=1, dtype=jnp.int32)
    return jnp.take(scale[:, 0], expert, axis=0, mode="clip")


def _ragged_backward(
    call: Grouped, saved: tuple, dy: Array
) -> tuple[Array, Array, None, None]:
    rows, (forward, backward), sizes, empty = saved
    recipe, dtype, scale = call.recipe, rows.dtype, forward.scale
    if recipe.gradient is None:
        whole = _exact(forward, (1,), recipe.block, dtype)
        drows = _ragged_dot(dtype, dy.astype(dtype), _turned(whole), sizes)
    else:
        scaled = dy
        if recipe.block is None:
            scaled = dy.astype(scale.dtype) * _scales_of(len(rows), scale, sizes)
        found = _round(scaled, (1,), recipe.gradient, recipe.block, call.out_axes)
        operand = _operand(found, (1,), recipe.block, dtype)
        whole = _operand(backward or forward, (2,), recipe.block, dtype)
        drows = _ragged_dot(dtype, operand, _turned(whole), sizes)
        if recipe.block is None:
            drows = drows.astype(scale.dtype) * found.scale
    kernel = jax.ShapeDtypeStruct(forward.values.shape, dtype)
    pull = jax.linear_transpose(lambda k: jax.lax.ragged_dot(rows, k, sizes), kernel)
    return drows.astype(dtype), pull(dy)[0].astype(empty.dtype), None, None


eight_bit_ragged_dot.defvjp(_ragged_forward, _ragged_backward)


def _turned(kernel: Array) -> Array:
    return jnp.swapaxes(kernel, 1, 2)  # (experts, out, in)


def _ragged_dot(dtype: Any, rows: Array, kernel: Array, sizes: Array) -> Array:
    out = _dtype_of_sums(rows, dtype)
    return jax.lax.ragged_dot(rows, kernel, sizes, preferred_element_type=out)
