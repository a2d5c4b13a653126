"""Products of named dims: `Dense`, `Embed`, and the `matmul` that both call.

The layout decides whether a product gathers its input or scatters its output, and
whether the communication overlaps with the product.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer
from jax.sharding import NamedSharding

from nnx_parallel.collectives.matmul import (
    column_parallel_matmuls,
    row_parallel_matmul,
)
from nnx_parallel.errors import EightBitError
from nnx_parallel.layers.eight_bit import RoundingKey, eight_bit_matmul
from nnx_parallel.layers.loss import observe_range
from nnx_parallel.layers.stack.scan import OVERLAPPED
from nnx_parallel.precision import EightBit
from nnx_parallel.sharding.constrain import (
    activation_spec,
    active_layout,
    check_names,
    constrain,
    constrain_param,
    note_effect,
)
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import DimAxes
from nnx_parallel.sharding.specs import dim_axes, to_spec

Names = tuple[str | None, ...]
_place = jax.lax.with_sharding_constraint

SEQ = 1
"""The dim of ``(batch, seq, *features)`` that sequence parallelism splits."""


def matmul(
    x: Array,
    w: Array,
    in_names: Names,
    out_names: Names,
    *,
    w_dims: tuple[int, ...] | None = None,
    recipe: EightBit | None = None,
    key: Array | None = None,
) -> Array:
    """Multiplies an activation by a parameter; returns ``(*leading, *out_dims)``.

    If the same mesh axis splits ``seq`` of the input and a dim of the output, the input
    is gathered. If the same axis splits a contracted dim and ``seq`` of the output, the
    sum over devices is scattered [1]. The forward pass keeps only the split input for
    the backward pass, which gathers it again. Under ``overlap``, the gather and the
    scatter run as rings during the product (`all_gather_matmul`,
    `matmul_reduce_scatter`), and partial sums travel in the dtype of the product.

    Args:
        x: ``(*leading, *in_dims)``. It is gathered or scattered only if the leading
            dims are ``batch`` and ``seq``.
        w: The parameter.
        in_names: Logical axes of the last dims of x, which are contracted.
        out_names: Logical axes of the dims of w that are not contracted.
        w_dims: The dims of w to contract; by default the first dims.
        recipe: The dtypes of products in 8 bits, or ``None``. With a recipe, ``w_dims``
            must be ``None``.
        key: Key for the rounding of the output's gradient (`eight_bit_matmul`).

    Raises:
        EightBitError: If products in 8 bits would overlap with their communication.

    Example:
        >>> matmul(jnp.ones((2, 8, 4)), jnp.ones((4, 6)), ("embed",), ("mlp",)).shape
        (2, 8, 6)

    References:
        [1] Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
        Models", 2022, section 4.2, https://arxiv.org/abs/2205.05198
    """
    contracting = _contracting(x, in_names, w_dims)
    layout = active_layout()
    split = _find_split(layout, x, w, in_names, out_names, contracting)
    if recipe is not None:
        if split is not None and layout is not None and layout.claims.overlap:
            raise EightBitError(
                f"overlap={layout.claims.overlap!r} sends shards during products. Such "
                "products do not run in 8 bits. Pass sequence=True without overlap to "
                "TensorParallel, or a Precision without 8-bit products."
            )
        y = eight_bit_matmul(x, w, len(in_names), recipe, split, key)
        return checkpoint_name(y, OVERLAPPED)
    if layout is None or split is None:
        return jnp.tensordot(x, w, axes=contracting)
    if layout.claims.overlap is None:
        return _partitioned(split, x, w)
    if split.gathers:
        return _gathered_products(layout, x, [(w, split)])[0]
    note_effect("overlap")
    y = row_parallel_matmul(
        x,
        w,
        split.axis,
        dim=SEQ,
        contracting=contracting,
        split=split.feature,
        mode=layout.claims.overlap,
        sum_dtype=jnp.result_type(x, w),
        mesh=layout.mesh,
    )
    # Remat policies that keep products keep this name, because a ring consists of many
    # small products.
    return checkpoint_name(y, OVERLAPPED)


def _contracting(
    x: Array, in_names: Names, w_dims: tuple[int, ...] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    num = len(in_names)
    # (*leading, *in_dims) by (*in_dims, *out_dims) -> (*leading, *out_dims)
    return tuple(range(x.ndim - num, x.ndim)), tuple(w_dims or range(num))


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A product whose input or output is split along ``seq``."""

    gathers: bool  # True: the input is split along `seq`; False: the output is split
    axis: str  # the mesh axis that splits `seq`
    # If the product gathers: the dim of w that the axis splits. If it scatters: the
    # index of the split dim in the list of contracted dims.
    feature: int
    contracting: tuple[tuple[int, ...], tuple[int, ...]]  # dims of x and of w
    input: NamedSharding
    output: NamedSharding
    gathered: NamedSharding  # the input or output with `seq` gathered

    def gather(self, x: Array) -> Array:
        """Gathers an array along ``seq``: the input, or the gradient of the output."""
        # The first constraint splits the array. With only the second constraint, the
        # partitioner would gather the array where it is computed, and keep it gathered.
        x = _place(x, self.input if self.gathers else self.output)
        return _place(x, self.gathered)


def _gathered_products(
    layout: Layout, x: Array, kernels: Sequence[tuple[Array, _Split]]
) -> list[Array]:
    """Multiplies one input by several kernels while one ring gathers the input."""
    note_effect("overlap")
    ws = [w for w, _ in kernels]
    ys = column_parallel_matmuls(
        x,
        [(w, split.feature, split.contracting) for w, split in kernels],
        kernels[0][1].axis,
        dim=SEQ,
        mode=layout.claims.overlap or "bulk",
        sum_dtype=jnp.result_type(x, *ws),
        mesh=layout.mesh,
    )
    return [checkpoint_name(y, OVERLAPPED) for y in ys]


def _find_split(
    layout: Layout | None,
    x: Array,
    w: Array,
    in_names: Names,
    out_names: Names,
    contracting: tuple[tuple[int, ...], tuple[int, ...]],
) -> _Split | None:
    """Returns the split of a product along ``seq`` under the layout, or ``None``."""
    if layout is None or x.ndim != 2 + len(in_names):
        return None
    w_kept = [d for d in range(w.ndim) if d not in contracting[1]]

    def axes_of(shape: tuple[int, ...], names: Names) -> DimAxes:
        spec = activation_spec(layout, shape, ("batch", "seq", *names))
        return dim_axes(spec, len(shape))

    in_axes = axes_of(x.shape, in_names)
    out_axes = axes_of((*x.shape[:2], *(w.shape[d] for d in w_kept)), out_names)
    for axis, gathers in product(layout.activation_axes("seq"), (True, False)):
        near, far = (in_axes, out_axes) if gathers else (out_axes, in_axes)
        over_axis = [d for d, axes in enumerate(far[2:]) if axes == (axis,)]
        if axis in near[SEQ] and over_axis:
            kept = tuple(a for a in near[SEQ] if a != axis)
            return _Split(
                gathers=gathers,
                axis=axis,
                feature=w_kept[over_axis[0]] if gathers else over_axis[0],
                contracting=contracting,
                input=layout.sharding(to_spec(in_axes)),
                output=layout.sharding(to_spec(out_axes)),
                gathered=layout.sharding(to_spec((near[0], kept, *near[2:]))),
            )
    return None


# XLA's partitioner splits this product. The product has a custom gradient, because
# JAX's gradient would keep the gathered input for the backward pass.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _partitioned(split: _Split, x: Array, w: Array) -> Array:
    return _partitioned_forward(split, x, w)[0]


def _partitioned_forward(split: _Split, x: Array, w: Array) -> tuple[Array, tuple]:
    gathered = split.gather(x) if split.gathers else x
    y = jnp.tensordot(gathered, w, axes=split.contracting)
    return _place(y, split.output), (x, w)


def _partitioned_backward(
    split: _Split, saved: tuple, dy: Array
) -> tuple[Array, Array]:
    x, w = saved
    x, dy = (split.gather(x), dy) if split.gathers else (x, split.gather(dy))
    _, vjp = jax.vjp(partial(jnp.tensordot, axes=split.contracting), x, w)
    dx, dw = vjp(dy)
    return _place(dx, split.input), dw


_partitioned.defvjp(_partitioned_forward, _partitioned_backward)


@jax.custom_vjp
def compute_gradient_once(y: Array) -> Array:
    """Returns the output of a product, and makes XLA compute its gradient only once.

    Two products use the gradient of ``y``: the product for the gradient of the kernel,
    and the product for the gradient of the input. Without this function, XLA may
    compute the gradient of ``y`` in both products, tile by tile, if it considers the
    elementwise operations cheap.

    Example:
        >>> float(jax.grad(lambda y: compute_gradient_once(y) ** 2)(3.0))
        6.0
    """
    return y


compute_gradient_once.defvjp(
    lambda y: (y, None), lambda _, grad: (jax.lax.optimization_barrier(grad),)
)


def name_products(products: Sequence[Array]) -> list[Array]:
    """Places products (batch, seq, mlp), and names them for the remat policy `Save`.

    The names are ``mlp_up`` and, for a second product, ``mlp_gate``.
    """
    placed = [constrain(y, "batch", "seq", "mlp") for y in products]
    return [*map(checkpoint_name, placed, ("mlp_up", "mlp_gate"))]


def named(initializer: Initializer, *names: str | None) -> Initializer:
    """Wraps an initializer so that the dims of its parameter have logical axes.

    The logical axes are stored in Flax's ``out_sharding`` metadata. ``eager_sharding``
    is False, because the mesh is not known when a model is built.
    """
    return nnx.with_partitioning(initializer, names, eager_sharding=False)


class Dense(nnx.Module):
    """A linear map from named dims to named dims.

    The kernel has shape ``(*in_dims, *out_dims)`` and is placed by its names. Under
    `TensorParallel`, a kernel from ``embed`` to ``mlp`` is split by columns, and a
    kernel from ``mlp`` to ``embed`` is split by rows, so that the pair communicates
    once [1]. Under sequence parallelism, the input is gathered along ``seq`` before the
    product, or the output is scattered after the product. The strategy decides whether
    this communication overlaps with the product (`matmul`).

    Args:
        in_dims: Names and sizes of the last dims of the input, which are contracted.
        out_dims: Names and sizes of the dims that replace them.
        rngs: Key for the kernel.
        use_bias: True to add a bias of shape ``out_dims``.
        kernel_init: Initializer; by default a normal with variance 1 / fan-in.

    Example:
        >>> query = Dense({"embed": 32}, {"heads": 4, "head_dim": 8}, rngs=nnx.Rngs(0))
        >>> query(jnp.ones((2, 16, 32))).shape
        (2, 16, 4, 8)

    References:
        [1] Shoeybi et al., "Megatron-LM", 2019, section 3,
        https://arxiv.org/abs/1909.08053
    """

    recipe: EightBit | None = None  # set by `set_recipe`
    rounding_key: RoundingKey | None = None  # set by `set_recipe`

    def __init__(
        self,
        in_dims: Mapping[str, int],
        out_dims: Mapping[str, int],
        *,
        rngs: nnx.Rngs,
        use_bias: bool = False,
        kernel_init: Initializer | None = None,
    ) -> None:
        self.in_names, self.out_names = tuple(in_dims), tuple(out_dims)
        names = (*in_dims, *out_dims)
        check_names(names)
        shape = (*in_dims.values(), *out_dims.values())
        fan_in = math.prod(in_dims.values())
        init = kernel_init or nnx.initializers.normal(fan_in**-0.5)
        kernel = named(init, *names)(rngs.params(), shape, jnp.float32)
        self.kernel = nnx.Param(kernel, num_in_dims=len(in_dims))
        self.bias = nnx.data(None)
        if use_bias:
            zeros = named(nnx.initializers.zeros_init(), *out_dims)
            shape = tuple(out_dims.values())
            self.bias = nnx.Param(zeros(rngs.params(), shape, jnp.float32))

    def __call__(self, x: Array) -> Array:
        """Contracts the last dims of ``x`` with the kernel.

        The shape changes from ``(*leading, *in_dims)`` to ``(*leading, *out_dims)``. If
        there are two leading dims, they are ``batch`` and ``seq``.
        """
        w, names = self.kernel[...], (self.in_names, self.out_names)
        key = None if self.rounding_key is None else self.rounding_key[...]
        y = matmul(x, w, *names, recipe=self.recipe, key=key)
        return _add_bias(self, y)


def project(x: Array, *layers: Dense) -> list[Array]:
    """Calls several `Dense` with one input: query, key and value, or up and gate.

    Under ``overlap``, layers that gather their input share one ring. The gradient of
    the input is then summed over the layers before it is sent, so it is sent only once.
    In all other cases, each layer is called separately.

    Example:
        >>> make = partial(Dense, {"embed": 4}, {"mlp": 8})
        >>> up, gate = make(rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(1))
        >>> [y.shape for y in project(jnp.ones((2, 3, 4)), up, gate)]
        [(2, 3, 8), (2, 3, 8)]
    """
    layout = active_layout()
    # A subclass, such as an adapted layer, may compute more than the product.
    is_plain = all(type(x) is Dense and x.recipe is None for x in layers)
    if layout is None or layout.claims.overlap is None or not is_plain:
        return [layer(x) for layer in layers]
    kernels = [layer.kernel[...] for layer in layers]
    splits = [
        _find_split(layout, x, w, each.in_names, each.out_names, axes)
        for w, each in zip(kernels, layers, strict=True)
        for axes in [_contracting(x, each.in_names)]
    ]
    found = [(w, s) for w, s in zip(kernels, splits, strict=True) if s and s.gathers]
    if len(found) < len(layers) or len({s.axis for _, s in found}) > 1:
        return [layer(x) for layer in layers]
    ys = _gathered_products(layout, x, found)
    return [_add_bias(layer, y) for layer, y in zip(layers, ys, strict=True)]


def _add_bias(layer: Dense, y: Array) -> Array:
    if layer.bias is None:
        return y
    bias = layer.bias[...]  # (*out_dims); reshaped to have leading dims of size 1
    return y + jnp.reshape(bias, (1,) * (y.ndim - bias.ndim) + bias.shape)


def look_up(table: Array, tokens: Array, vocab_name: str | None = "vocab") -> Array:
    """Returns rows of a table: ``(vocab, embed)`` to ``(batch, seq, embed)``.

    ``tokens`` is int ``(batch, seq)``. A token outside of the table gives NaN.
    """
    # Because of this constraint, the gradient of the table is first summed over rows of
    # the batch, and then split. Otherwise the partitioner would split the activations
    # in the same way as the gradient.
    # (vocab, embed) by (batch, seq) -> (batch, seq, embed)
    table = constrain_param(table, vocab_name, "embed")
    tokens = jnp.where(tokens < 0, table.shape[0], tokens.astype(jnp.int32))
    # Tokens are first gathered along `seq`. Otherwise, if one axis splits the rows of
    # the table and also `seq`, the lookup would gather the table. Tokens stay split
    # over an axis for long sequences, because such an axis never splits the table.
    layout = active_layout()
    seq = ("seq", *(layout.sequence_axes if layout else ()))
    tokens = constrain_param(tokens, "batch", seq)
    rows = jnp.take(table, tokens, axis=0, mode="fill")
    rows = constrain_param(rows, "batch", seq, "embed")
    return constrain(rows, "batch", "seq", "embed")


class Embed(nnx.Module):
    """A table with ``vocab`` rows of ``embed`` numbers, for lookup and for logits.

    Args:
        vocab_size: Number of rows.
        embed_dim: Number of columns.
        rngs: Key for the table.
        vocab_name: Logical axis of the rows; ``seq`` for learned positions.
        embedding_init: Initializer; by default a normal with standard deviation 0.02.

    Example:
        >>> embed = Embed(64, 8, rngs=nnx.Rngs(0))
        >>> hidden = embed(jnp.zeros((2, 5), jnp.int32))
        >>> hidden.shape, embed.attend(hidden).shape
        ((2, 5, 8), (2, 5, 64))
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        *,
        rngs: nnx.Rngs,
        vocab_name: str | None = "vocab",
        embedding_init: Initializer | None = None,
    ) -> None:
        self.vocab_name = vocab_name
        init = embedding_init or nnx.initializers.normal(0.02)
        make = named(init, vocab_name, "embed")
        table = make(rngs.params(), (vocab_size, embed_dim), jnp.float32)
        self.embedding = nnx.Param(table)

    def __call__(self, tokens: Array) -> Array:
        """Looks up rows of the table: int ``(batch, seq)`` to ``(batch, seq, embed)``.

        A token outside of the vocabulary gives NaN, so that the loss is not finite.
        """
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(
                f"Embed got tokens of dtype {tokens.dtype}. It takes integers, the "
                "numbers of rows: tokens.astype(np.int32)."
            )
        table, name = self.embedding[...], "tokens or positions"
        observe_range(tokens, table.shape[0], name=name, is_table=True)
        return look_up(table, tokens, self.vocab_name)

    def attend(self, x: Array) -> Array:
        """Computes logits from ``(batch, seq, embed)``: ``(batch, seq, vocab)``."""
        logits = matmul(x, self.embedding[...], ("embed",), ("vocab",), w_dims=(1,))
        return constrain(logits, "batch", "seq", "vocab")
