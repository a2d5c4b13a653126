"""Products with named dims: `Dense` and `Embed`.

Products of named dims: the layout says where they gather, scatter and overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer
from jax.sharding import NamedSharding

from nnx_parallel.collectives.matmul import column_parallel_matmul, row_parallel_matmul
from nnx_parallel.layers.remat import OVERLAPPED
from nnx_parallel.sharding.constrain import (
    active_layout,
    check_names,
    constrain,
    constrain_param,
)
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.specs import dim_axes, to_spec

SEQ = 1
"""The dim of ``(batch, seq, *features)`` that sequence parallelism splits."""


def matmul(
    x: jax.Array,
    w: jax.Array,
    in_names: Sequence[str | None],
    out_names: Sequence[str | None],
    *,
    w_dims: Sequence[int] | None = None,
) -> jax.Array:
    """The product of an activation and a parameter, as the active layout runs it.

    Where the layout splits ``seq`` of the input and a dim of the output over one axis,
    the input is gathered; where it splits a contracted dim and ``seq`` of the output,
    the sum over devices is scattered [1]. The forward pass keeps the input as it came,
    split: it is gathered again for the backward pass. Under ``overlap`` both run as
    rings beside the product (`all_gather_matmul`, `matmul_reduce_scatter`), whose sums
    travel in the dtype of the product.

    Args:
        x: ``(*leading, *in_dims)``. Only two leading dims, ``batch`` and ``seq``, are
            gathered or scattered.
        w: The parameter.
        in_names: Logical axes of the last dims of x, which are contracted.
        out_names: Logical axes of the other dims of w.
        w_dims: The dims of w to contract; by default its first.

    Returns:
        ``(*leading, *out_dims)``.

    Example:
        >>> matmul(jnp.ones((2, 8, 4)), jnp.ones((4, 6)), ("embed",), ("mlp",)).shape
        (2, 8, 6)

    References:
        [1] Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
        Models", 2022, section 4.2, https://arxiv.org/abs/2205.05198
    """
    num = len(in_names)
    x_dims = tuple(range(x.ndim - num, x.ndim))
    contracting = x_dims, tuple(range(num)) if w_dims is None else tuple(w_dims)
    layout = active_layout()
    split = _find_split(layout, x, w, in_names, out_names, contracting)
    if layout is None or split is None:
        return _plain(contracting, x, w)
    if layout.claims.overlap is None:
        return (_gathering if split.gathers else _scattering)(split, x, w)
    return _overlapping(layout, split, x, w)


Contracting = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A product whose input or output is split along ``seq``.

    Attributes:
        gathers: Whether the input is split along ``seq``; else the output is.
        axis: The mesh axis.
        feature: The feature dim over the same axis, counted in the output's features if
            it gathers, else in the contracted dims.
        contracting: Dims of x and of w.
        split: Where the side that is split along ``seq`` lives.
        whole: Where it lives once gathered.
        other: Where the other side lives.
    """

    gathers: bool
    axis: str
    feature: int
    contracting: Contracting
    split: NamedSharding
    whole: NamedSharding
    other: NamedSharding


def _find_split(
    layout: Layout | None,
    x: jax.Array,
    w: jax.Array,
    in_names: Sequence[str | None],
    out_names: Sequence[str | None],
    contracting: Contracting,
) -> _Split | None:
    if layout is None or x.ndim != 2 + len(in_names):
        return None
    features = [n for d, n in enumerate(w.shape) if d not in contracting[1]]
    out_shape = (*x.shape[:2], *features)
    leading = ("batch", "seq")
    in_axes = dim_axes(layout.activation_spec(x.shape, (*leading, *in_names)), x.ndim)
    out_axes = dim_axes(
        layout.activation_spec(out_shape, (*leading, *out_names)), len(out_shape)
    )
    for axis in layout.activation_axes("seq"):
        for gathers, near, far in (
            (True, in_axes, out_axes),
            (False, out_axes, in_axes),
        ):
            feature = [d for d, axes in enumerate(far[2:]) if axes == (axis,)]
            if axis in near[SEQ] and feature:
                kept = tuple(a for a in near[SEQ] if a != axis)
                whole = (near[0], kept, *near[2:])
                specs = (to_spec(axes) for axes in (near, whole, far))
                split, gathered, other = (layout.sharding(spec) for spec in specs)
                return _Split(
                    gathers=gathers,
                    axis=axis,
                    feature=feature[0],
                    contracting=contracting,
                    split=split,
                    whole=gathered,
                    other=other,
                )
    return None


def _overlapping(
    layout: Layout, found: _Split, x: jax.Array, w: jax.Array
) -> jax.Array:
    run = partial(
        column_parallel_matmul if found.gathers else row_parallel_matmul,
        axis=found.axis,
        dim=SEQ,
        contracting=found.contracting,
        mode=layout.claims.overlap or "ring",
        sum_dtype=jnp.result_type(x, w),
        mesh=layout.mesh,
    )
    if found.gathers:
        kept = [d for d in range(w.ndim) if d not in found.contracting[1]]
        y = run(x, w, w_dim=kept[found.feature])
    else:
        y = run(x, w, split=found.feature)
    return checkpoint_name(y, OVERLAPPED)


# What the partitioner runs: the gathered side is said, and that it is not to be kept.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathering(found: _Split, x: jax.Array, w: jax.Array) -> jax.Array:
    return _gathering_forward(found, x, w)[0]


def _gathering_forward(
    found: _Split, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple]:
    y = _plain(found.contracting, _gathered(found, x), w)
    return _place(y, found.other), (x, w)


def _gathering_backward(
    found: _Split, kept: tuple, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    dx = _transposed(found.contracting, dy, x, w)
    dw = _weights(found.contracting, _gathered(found, x), dy, w)
    return _place(dx, found.split), dw


_gathering.defvjp(_gathering_forward, _gathering_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattering(found: _Split, x: jax.Array, w: jax.Array) -> jax.Array:
    return _scattering_forward(found, x, w)[0]


def _scattering_forward(
    found: _Split, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple]:
    return _place(_plain(found.contracting, x, w), found.split), (x, w)


def _scattering_backward(
    found: _Split, kept: tuple, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    dy = _gathered(found, dy)
    dx = _transposed(found.contracting, dy, x, w)
    return _place(dx, found.other), _weights(found.contracting, x, dy, w)


_scattering.defvjp(_scattering_forward, _scattering_backward)


def _gathered(found: _Split, x: jax.Array) -> jax.Array:
    # Split first: it would else be made whole already where it comes from, and be kept.
    return _place(_place(x, found.split), found.whole)


def _place(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, sharding)


def _plain(contracting: Contracting, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tensordot(x, w, axes=contracting)


def _transposed(
    contracting: Contracting, dy: jax.Array, x: jax.Array, w: jax.Array
) -> jax.Array:
    """The gradient of x."""
    _, vjp = jax.vjp(lambda x: _plain(contracting, x, w), x)
    return vjp(dy)[0]


def _weights(
    contracting: Contracting, x: jax.Array, dy: jax.Array, w: jax.Array
) -> jax.Array:
    """The gradient of w."""
    _, vjp = jax.vjp(lambda w: _plain(contracting, x, w), w)
    return vjp(dy)[0]


def named(initializer: Initializer, *names: str | None) -> Initializer:
    """An initializer whose parameter carries the logical axes of its dims.

    They are Flax's own ``out_sharding`` metadata; ``eager_sharding=False`` because no
    mesh is known when a model is built.
    """
    return nnx.with_partitioning(initializer, names, eager_sharding=False)


class Dense(nnx.Module):
    """A linear map from named dims to named dims.

    The kernel has shape ``(*in_dims, *out_dims)`` and is placed by its names: under
    `TensorParallel` a kernel from ``embed`` to ``mlp`` is split by columns and one
    from ``mlp`` to ``embed`` by rows, so that the pair communicates once [1]. Under
    sequence parallelism its input is gathered along ``seq`` before the product, or its
    output scattered after it; the strategy says whether the two overlap (`matmul`).

    Args:
        in_dims: Names and sizes of the dims to contract, the input's last ones.
        out_dims: Names and sizes of the dims that replace them.
        rngs: Key for the kernel.
        use_bias: Whether to add a bias of shape ``out_dims``.
        kernel_init: Initializer; by default normal with variance 1 / fan-in.

    Example:
        >>> query = Dense({"embed": 32}, {"heads": 4, "head_dim": 8}, rngs=nnx.Rngs(0))
        >>> query(jnp.ones((2, 16, 32))).shape
        (2, 16, 4, 8)

    References:
        [1] Shoeybi et al., "Megatron-LM", 2019, section 3,
        https://arxiv.org/abs/1909.08053
    """

    def __init__(
        self,
        in_dims: Mapping[str, int],
        out_dims: Mapping[str, int],
        *,
        rngs: nnx.Rngs,
        use_bias: bool = False,
        kernel_init: Initializer | None = None,
    ) -> None:
        names = (*in_dims, *out_dims)
        check_names(names)
        shape = (*in_dims.values(), *out_dims.values())
        self.num_in_dims = len(in_dims)
        self.in_names = tuple(in_dims)
        self.out_names = tuple(out_dims)
        if kernel_init is None:
            fan_in = math.prod(in_dims.values())
            kernel_init = nnx.initializers.normal(fan_in**-0.5)
        self.kernel = nnx.Param(
            named(kernel_init, *names)(rngs.params(), shape, jnp.float32),
            num_in_dims=self.num_in_dims,
        )
        self.bias = nnx.data(None)
        if use_bias:
            zeros = named(nnx.initializers.zeros_init(), *out_dims)
            self.bias = nnx.Param(
                zeros(rngs.params(), tuple(out_dims.values()), jnp.float32)
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Contracts the last dims of ``x`` with the kernel.

        Args:
            x: ``(*leading, *in_dims)``; two leading dims are ``batch`` and ``seq``.

        Returns:
            ``(*leading, *out_dims)``.
        """
        y = matmul(x, self.kernel[...], self.in_names, self.out_names)
        if self.bias is None:
            return y
        bias = self.bias[...]
        return y + jnp.reshape(bias, (1,) * (y.ndim - bias.ndim) + bias.shape)


class Embed(nnx.Module):
    """A table of ``vocab`` rows of ``embed`` numbers, for lookup and for logits.

    Args:
        vocab_size: Rows.
        embed_dim: Columns.
        rngs: Key for the table.
        vocab_name: Logical axis of the rows; ``seq`` for learned positions.
        embedding_init: Initializer; by default normal with standard deviation 0.02.

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
        init = embedding_init or nnx.initializers.normal(0.02)
        self.vocab_name = vocab_name
        self.embedding = nnx.Param(
            named(init, vocab_name, "embed")(
                rngs.params(), (vocab_size, embed_dim), jnp.float32
            )
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks rows up: int ``(batch, seq)`` to ``(batch, seq, embed)``.

        A token outside the vocabulary gives NaN, and so a loss that is not finite.
        """
        # Constrained here, the gradient of the table is summed as rows of the batch
        # and cut afterwards; else its shards would pull the activations apart.
        table = constrain_param(self.embedding[...], self.vocab_name, "embed")
        tokens = jnp.where(tokens < 0, table.shape[0], tokens.astype(jnp.int32))
        rows = jnp.take(table, tokens, axis=0, mode="fill")
        # Whole along `seq` first: a table split by rows is else gathered for a lookup
        # whose rows are split as well.
        rows = constrain_param(rows, "batch", "seq", "embed")
        return constrain(rows, "batch", "seq", "embed")

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits against every row: ``(batch, seq, embed)`` to ``(..., vocab)``."""
        logits = matmul(x, self.embedding[...], ("embed",), ("vocab",), w_dims=(1,))
        return constrain(logits, "batch", "seq", "vocab")
