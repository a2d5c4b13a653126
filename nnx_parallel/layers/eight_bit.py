"""Products of activations and parameters in 8 bits, the same under every layout.

Each token of an activation, and each output channel of a kernel, has one scale. It is
the largest absolute value over the dims that the product contracts, divided by the
largest number of the 8-bit dtype. A maximum does not depend on the order, so a layout
may split any dim: all devices find the same scales and the same 8-bit numbers. Sums of
int8 products are int32, and exact. The recipe is SwitchBack's [1], with a scale for
each channel of the kernel.

The backward pass multiplies the gradient of the output by the scales of the channels,
so that its contraction over channels can use the 8-bit kernel of the forward pass. The
gradient of the kernel is a sum over tokens, whose scales differ. It is computed in the
dtype of the computation. Scales for groups of tokens would depend on how a layout
splits tokens.

References:
    [1] Wortsman et al., "Stable and low-precision training for large-scale
    vision-language models", 2023, section 2.2, https://arxiv.org/abs/2304.13013
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from nnx_parallel.precision import EightBit, sum_dtype

_TINY = 1e-30  # a group of smaller numbers is rounded to zeros
_place = jax.lax.with_sharding_constraint


class Quantised(NamedTuple):
    """An 8-bit array, and scales that broadcast against it; ``values * scale`` is x."""

    values: Array
    scale: Array


def quantise(
    x: Array, dims: tuple[int, ...], dtype: Any, axes: tuple[str, ...] = ()
) -> Quantised:
    """Rounds an array to 8 bits, with one scale for each group of numbers.

    The scale is float32, or float64 if the array is.

    A group with an infinity or NaN has a scale that is not finite, so that the product
    is not finite either.

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


# `gather_late` knows this function by its name: it runs it on the stored shards of a
# kernel, and gathers the 8-bit values afterwards.
@partial(jax.jit, static_argnums=(1, 2))
def quantise_kernel(w: Array, dims: tuple[int, ...], dtype: Any) -> Quantised:
    """Rounds a kernel to 8 bits; no gradient flows through it."""
    return quantise(jax.lax.stop_gradient(w), dims, dtype)


class Split(Protocol):
    """A product whose input is gathered, or whose output is scattered, along `seq`."""

    @property
    def gathers(self) -> bool:
        """True if the input is split along ``seq``, and False if the output is."""
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
    dtype: Any  # of the kernel


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
        ``(*leading, *out_dims)`` in the dtype of x.

    Example:
        >>> from nnx_parallel import Precision
        >>> x, w = jnp.array([[1.0, 0.5]]), jnp.array([[1.0, 2.0], [0.5, 1.0]])
        >>> y = eight_bit_matmul(x, w, 1, Precision.int8().products)
        >>> bool(abs(y - x @ w).max() < 0.02)
        True
    """
    # Qwix's `dot_general` quantises the kernel inside its call, so the kernel would be
    # gathered before the cast, and its gradient quantises the kernel a second time.
    kernel = quantise_kernel(w, tuple(range(num)), recipe.forward)
    return _product(_Call(recipe, num, split, w.dtype), x, w, *kernel)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: _Call, x: Array, w: Array, values: Array, scale: Array) -> Array:
    return _forward(call, x, w, values, scale)[0]


# The forward pass does not use `w`. It is an argument so that it gets the gradient. If
# `w` is stored in shards, the compiler removes its gather, which has no use.
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
    scaled = dy.astype(scale.dtype) * _channels(scale, num, lead)
    if call.recipe.gradient is None:
        whole = scaled.astype(x.dtype), values.astype(x.dtype)
        total = _dot(x.dtype, *whole, outs, kept)
    else:
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
    """Returns the dtype of a product's output, in which devices add their parts."""
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
        kernel: ``(experts, in, out)``; it only gets the gradient.
        rounded: The kernel in 8 bits, with a scale ``(experts, 1, out)``.
        sizes: int ``(experts,)``, the number of rows of each expert.
    """
    return _ragged_forward(call, rows, kernel, rounded, sizes)[0]


def _ragged_forward(
    call: Grouped, rows: Array, kernel: Array, rounded: Quantised, sizes: Array
) -> tuple[Array, tuple]:
    values, scale = rounded
    found = quantise(rows, (1,), call.recipe.forward, call.in_axes)
    # The expert of a row is the number of experts whose rows come before it.
    is_after = jnp.arange(len(rows))[:, None] >= jnp.cumsum(sizes)[None]
    expert = jnp.sum(is_after, axis=1, dtype=jnp.int32)
    of_rows = jnp.take(scale[:, 0], expert, axis=0, mode="clip")  # (rows, out)
    total = _ragged_dot(rows.dtype, found.values, values, sizes)
    y = total.astype(scale.dtype) * found.scale * of_rows
    empty = jnp.zeros((0,), kernel.dtype)  # has the dtype of the gradient
    return y.astype(rows.dtype), (rows, values, of_rows, sizes, empty)


def _ragged_backward(
    call: Grouped, saved: tuple, dy: Array
) -> tuple[Array, Array, None, None]:
    rows, values, of_rows, sizes, empty = saved
    scaled = dy.astype(of_rows.dtype) * of_rows
    turned = jnp.swapaxes(values, 1, 2)  # (experts, out, in)
    if call.recipe.gradient is None:
        whole = scaled.astype(rows.dtype), turned.astype(rows.dtype)
        drows = _ragged_dot(rows.dtype, *whole, sizes)
    else:
        found = quantise(scaled, (1,), call.recipe.gradient, call.out_axes)
        total = _ragged_dot(rows.dtype, found.values, turned, sizes)
        drows = total.astype(of_rows.dtype) * found.scale
    kernel = jax.ShapeDtypeStruct(values.shape, rows.dtype)
    pull = jax.linear_transpose(lambda k: jax.lax.ragged_dot(rows, k, sizes), kernel)
    return drows.astype(rows.dtype), pull(dy)[0].astype(empty.dtype), None, None


eight_bit_ragged_dot.defvjp(_ragged_forward, _ragged_backward)


def _ragged_dot(dtype: Any, rows: Array, kernel: Array, sizes: Array) -> Array:
    out = _dtype_of_sums(rows, dtype)
    return jax.lax.ragged_dot(rows, kernel, sizes, preferred_element_type=out)
