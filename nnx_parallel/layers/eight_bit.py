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

References:
    [1] Wortsman et al., "Stable and low-precision training for large-scale
    vision-language models", 2023, section 2.2, https://arxiv.org/abs/2304.13013
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from nnx_parallel.precision import EightBit, sum_dtype

_TINY = 1e-30  # if all numbers of a group are smaller, they become 0
_place = jax.lax.with_sharding_constraint


class Quantised(NamedTuple):
    """An 8-bit array and its scales; ``values * scale`` approximates the array."""

    values: Array
    scale: Array


def quantise(
    x: Array, dims: tuple[int, ...], dtype: Any, axes: tuple[str, ...] = ()
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

    Example:
        >>> values, scale = quantise(jnp.array([[1.0, -2.0], [0.0, 0.0]]), (1,), "int8")
        >>> values.tolist(), scale.shape
        ([[64, -127], [0, 0]], (2, 1))
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    wide = x.astype(sum_dtype(x))
    largest = jnp.max(jnp.abs(wide), axis=dims, keepdims=True)
    largest = jax.lax.pmax(largest, axes) if axes else largest
    is_tiny = largest < _TINY
    scale = jnp.where(is_tiny, 1.0, largest / most)
    scaled = wide * jnp.where(is_tiny, 0.0, most / largest)
    # The quotient of the largest number may round to slightly more than `most`.
    scaled = jnp.clip(jnp.round(scaled) if is_integer else scaled, -most, most)
    return Quantised(scaled.astype(dtype), scale)


QUANTISE = "nnx_parallel.quantise_kernel"
"""Name of `quantise_kernel` in a traced program.

`gather_late` runs this function on the stored shards of a kernel, and gathers the 8-bit
values afterwards.
"""


def _named(function: Callable) -> Callable:
    function.__name__ = QUANTISE
    return function


@partial(jax.jit, static_argnums=(1, 2))
@_named
def quantise_kernel(w: Array, dims: tuple[int, ...], dtype: Any) -> Quantised:
    """Rounds a kernel to 8 bits; no gradient flows through it."""
    return quantise(jax.lax.stop_gradient(w), dims, dtype)


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
    x: Array, w: Array, num: int, recipe: EightBit, split: Split | None = None
) -> Array:
    """Multiplies an activation by a kernel in 8 bits, with `recipe` for each product.

    Args:
        x: ``(*leading, *in_dims)``, where ``num`` is the number of in dims.
        w: ``(*in_dims, *out_dims)``.
        num: Number of contracted dims.
        recipe: The dtypes of the products.
        split: How the product gathers or scatters along ``seq``, or ``None``.

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
    kernel = quantise_kernel(w, tuple(range(num)), recipe.forward)
    x = x.astype(jnp.result_type(x, w))  # an integer may be the input
    return _product(_Call(recipe, num, split, w.dtype), x, w, *kernel)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: _Call, x: Array, w: Array, values: Array, scale: Array) -> Array:
    return _forward(call, x, w, values, scale)[0]


# The forward pass does not use `w`. It is an argument so that it gets the gradient. If
# `w` is stored in shards, the compiler removes its gather, because nothing uses it.
def _forward(
    call: _Call, x: Array, w: Array, values: Array, scale: Array
) -> tuple[Array, tuple]:
    del w
    num, split = call.num, call.split
    lead = x.ndim - num
    ins = tuple(range(lead, x.ndim))
    rows = quantise(x, ins, call.recipe.forward)
    if split is not None and split.gathers:
        rows = Quantised(*map(split.gather, rows))
    total = _dot(x.dtype, rows.values, values, ins, tuple(range(num)))
    total = total if split is None else _place(total, split.output)
    of_rows = _expand(rows.scale, lead, values.ndim - num)
    y = total.astype(scale.dtype) * of_rows * _channels(scale, num, lead)
    return y.astype(x.dtype), (x, values, scale)


def _backward(call: _Call, saved: tuple, dy: Array) -> tuple[Array, Array, None, None]:
    x, values, scale = saved
    num, split = call.num, call.split
    lead = x.ndim - num
    outs, kept = tuple(range(lead, dy.ndim)), tuple(range(num, values.ndim))
    if split is not None:
        x, dy = (split.gather(x), dy) if split.gathers else (x, split.gather(dy))
    if call.recipe.gradient is None:
        # The scales are small, so a float16 product of them with `dy` would lose
        # digits.
        kernel = (values.astype(scale.dtype) * scale).astype(x.dtype)
        total = _dot(x.dtype, dy.astype(x.dtype), kernel, outs, kept)
    else:
        scaled = dy.astype(scale.dtype) * _channels(scale, num, lead)
        rows = quantise(scaled, outs, call.recipe.gradient)
        total = _dot(x.dtype, rows.values, values, outs, kept)
        total = total if split is None else _place(total, split.input)
        total = total.astype(scale.dtype) * _expand(rows.scale, lead, num)
    dx = total.astype(x.dtype)
    dx = dx if split is None else _place(dx, split.input)
    tokens = tuple(range(lead))
    dw = jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())))
    return dx, dw.astype(call.dtype), None, None


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
    call: Grouped, rows: Array, kernel: Array, rounded: Quantised, sizes: Array
) -> Array:
    """Computes ``jax.lax.ragged_dot`` in 8 bits.

    A row, and an output channel of an expert, have one scale each.

    Args:
        call: The dtypes, and the axes that split the dims.
        rows: ``(rows, in)``, sorted by expert.
        kernel: ``(experts, in, out)``. Only the gradient uses it.
        rounded: The kernel in 8 bits, with a scale ``(experts, 1, out)``.
        sizes: int ``(experts,)``, the number of rows of each expert.
    """
    return _ragged_forward(call, rows, kernel, rounded, sizes)[0]


def _ragged_forward(
    call: Grouped, rows: Array, kernel: Array, rounded: Quantised, sizes: Array
) -> tuple[Array, tuple]:
    values, scale = rounded
    found = quantise(rows, (1,), call.recipe.forward, call.in_axes)
    total = _ragged_dot(rows.dtype, found.values, values, sizes)
    y = total.astype(scale.dtype) * found.scale * _scales_of(len(rows), scale, sizes)
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
    rows, (values, scale), sizes, empty = saved
    if call.recipe.gradient is None:
        whole = (values.astype(scale.dtype) * scale).astype(rows.dtype)
        turned = jnp.swapaxes(whole, 1, 2)  # (experts, out, in)
        drows = _ragged_dot(rows.dtype, dy.astype(rows.dtype), turned, sizes)
    else:
        scaled = dy.astype(scale.dtype) * _scales_of(len(rows), scale, sizes)
        found = quantise(scaled, (1,), call.recipe.gradient, call.out_axes)
        turned = jnp.swapaxes(values, 1, 2)
        total = _ragged_dot(rows.dtype, found.values, turned, sizes)
        drows = total.astype(scale.dtype) * found.scale
    kernel = jax.ShapeDtypeStruct(values.shape, rows.dtype)
    pull = jax.linear_transpose(lambda k: jax.lax.ragged_dot(rows, k, sizes), kernel)
    return drows.astype(rows.dtype), pull(dy)[0].astype(empty.dtype), None, None


eight_bit_ragged_dot.defvjp(_ragged_forward, _ragged_backward)


def _ragged_dot(dtype: Any, rows: Array, kernel: Array, sizes: Array) -> Array:
    out = _dtype_of_sums(rows, dtype)
    return jax.lax.ragged_dot(rows, kernel, sizes, preferred_element_type=out)
