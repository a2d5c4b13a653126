"""Matrix products that gather an operand or scatter their output while they run.

The backward pass of a product that gathers is a product that scatters, and vice versa.
Communication overlaps with computation in both passes. The forward pass does not keep
gathered arrays for the backward pass.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, reduce
from operator import add
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from numpy.lib.array_utils import normalize_axis_tuple

from nnx_parallel.collectives.ring import Mode, Ring, check_divides, on_shards
from nnx_parallel.errors import CollectiveProductError, UnknownAxisError

Contracting = int | tuple[Sequence[int], Sequence[int]]
"""The ``axes`` of ``jnp.tensordot``: a number of dims, or the dims of x and of w."""


def all_gather_matmul(
    x_shard: jax.Array,
    w_shard: jax.Array,
    axis: str,
    *,
    dim: int,
    contracting: Contracting = 1,
    mode: Mode = "ring",
    sum_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Computes ``all_gather(x) @ w``; shards travel while others are multiplied [1].

    Call it in code that is manual over the axis (``jax.shard_map``). Sequence
    parallelism uses it for the first products of a block [2]. On an axis of size n, a
    device sends (n - 1) / n of the gathered ``x``. The forward pass keeps only
    ``x_shard`` and ``w_shard`` for the backward pass. The gradient of ``x`` is a
    `matmul_reduce_scatter`. The gradient of ``w`` needs the gathered ``x`` again. So
    the shards of ``x`` travel once more, during the products for the gradient of ``x``,
    and the gradient of ``w`` is one product with the gathered ``x``.

    Args:
        x_shard: This device's shard of x along ``dim``. Contracted dims are complete.
        w_shard: This device's weights. Contracted dims are complete.
        axis: The manual mesh axis.
        dim: The dim of ``x_shard`` to gather; it must not be contracted.
        contracting: Number of last dims of x that are contracted with the first dims of
            w, or a pair with the contracted dims of each, as in ``jnp.tensordot``.
        mode: How the shards travel (`Mode`).
        sum_dtype: dtype in which the partial sums of the gradient of ``x`` travel. The
            default is float32, or the dtype of the arguments if it is wider. bfloat16
            halves the bytes and rounds at every hop.

    Returns:
        An array with the dims of x that are not contracted, followed by the dims of
        ``w_shard`` that are not contracted. The gathered dim is longer than in
        ``x_shard`` by a factor of the axis size.

    Raises:
        UnknownAxisError: If the code is not manual over ``axis``.
        CollectiveProductError: If the contracted dims do not match, or if ``dim`` is
            contracted or does not exist.
        ValueError: If the mode is unknown.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from nnx_parallel import make_mesh
        >>> product = jax.jit(jax.shard_map(
        ...     lambda x, w: all_gather_matmul(x, w, "tensor", dim=0),
        ...     mesh=make_mesh({"tensor": 8}),
        ...     in_specs=(P("tensor"), P(None, "tensor")),
        ...     out_specs=P(None, "tensor"),
        ... ))
        >>> product(jnp.ones((16, 4)), jnp.ones((4, 8))).shape
        (16, 8)

    References:
        [1] Wang et al., "Overlap Communication with Dependent Computation via
        Decomposition in Large Deep Learning Models", ASPLOS 2023, sections 3
        and 5, https://doi.org/10.1145/3567955.3567959
        [2] Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
        Models", 2022, section 4.2, https://arxiv.org/abs/2205.05198
    """
    given = x_shard, [w_shard], axis, dim, [contracting], mode, sum_dtype
    return _gathered_matmuls(*given)[0]


def _gathered_matmuls(
    x_shard: jax.Array,
    w_shards: Sequence[jax.Array],
    axis: str,
    dim: int,
    contracting: Sequence[Contracting],
    mode: Mode,
    sum_dtype: DTypeLike | None,
) -> list[jax.Array]:
    """Computes `all_gather_matmul` of one x with several w; gathers x only once."""
    given = zip(w_shards, contracting, strict=True)
    found = [_prepare(x_shard, w, axis, dim, c, mode, sum_dtype) for w, c in given]
    return _gathering(*found[0][2])(found[0][0], [w for _, w, _ in found])


def matmul_reduce_scatter(
    x_shard: jax.Array,
    w_shard: jax.Array,
    axis: str,
    *,
    dim: int,
    contracting: Contracting = 1,
    mode: Mode = "ring",
    sum_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Computes ``reduce_scatter(x @ w)``; sums travel during the next product [1].

    Sequence parallelism uses it for the last product of a block [2]. On an axis of size
    n, a device sends (n - 1) / n of the complete output. The forward pass keeps only
    ``x_shard`` and ``w_shard`` for the backward pass. The gradient of ``x`` is an
    `all_gather_matmul`, which gathers the gradient of the output. The product of this
    gathered array with ``x`` is the gradient of ``w``.

    The function also raises the errors of `all_gather_matmul`.

    Args:
        x_shard: This device's shard of x along a contracted dim.
        w_shard: This device's shard of w along the same contracted dim.
        axis: The manual mesh axis.
        dim: The dim of x along which the output is split. It must not be contracted,
            and must be complete in ``x_shard``.
        contracting: As in `all_gather_matmul`.
        mode: As in `all_gather_matmul`.
        sum_dtype: dtype in which the partial sums of the output travel.

    Returns:
        This device's shard of the output along ``dim``. It has the dims of x that are
        not contracted, followed by the dims of w that are not contracted.

    Raises:
        IndivisibleDimError: If the axis does not divide ``dim``.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from nnx_parallel import make_mesh
        >>> product = jax.jit(jax.shard_map(
        ...     lambda x, w: matmul_reduce_scatter(x, w, "tensor", dim=0),
        ...     mesh=make_mesh({"tensor": 8}),
        ...     in_specs=(P(None, "tensor"), P("tensor")),
        ...     out_specs=P("tensor"),
        ... ))
        >>> product(jnp.ones((16, 8)), jnp.ones((8, 4))).shape
        (16, 4)

    References:
        [1], [2]: see `all_gather_matmul`.
    """
    x, w, plan = _prepare(x_shard, w_shard, axis, dim, contracting, mode, sum_dtype)
    size = jax.lax.axis_size(axis)
    # The product has the dims of x_shard that are not contracted; `dim` is scattered.
    check_divides(axis, size, ("a product of x_shard", x_shard, dim % x_shard.ndim))
    return _scattering(*plan)(x, w)


def column_parallel_matmul(
    x: jax.Array,
    w: jax.Array,
    axis: str,
    *,
    dim: int,
    w_dim: int,
    contracting: Contracting = 1,
    mode: Mode = "ring",
    sum_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Computes ``x @ w`` of global arrays by `all_gather_matmul`.

    The axis splits x along ``dim``, and w along ``w_dim``. It also splits the dim of
    the output that comes from ``w_dim``. Neither dim may be contracted. Arrays that are
    placed differently are moved.

    The product runs in a region that is manual only over ``axis``. All other mesh axes
    stay automatic, so no argument is needed for a batch that is split over ``data``, or
    for weights that are split over ``pipe``. A call inside a region that is manual over
    other axes uses the mesh of that region instead of ``mesh``.

    The other arguments and errors are the same as for `all_gather_matmul`.

    Returns:
        The global array. It has the dims of x that are not contracted, followed by the
        dims of w that are not contracted. The dim that comes from ``w_dim`` is split.

    Raises:
        UnknownAxisError: If there is no mesh, if the mesh lacks the axis, or if the
            code is already manual over the axis.
        IndivisibleDimError: If the axis does not divide a dim that it splits.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"data": 2, "tensor": 4})
        >>> x, w = jnp.ones((2, 16, 4)), jnp.ones((4, 8))
        >>> column_parallel_matmul(x, w, "tensor", dim=1, w_dim=1, mesh=mesh).shape
        (2, 16, 8)
    """
    of_w = [(w, w_dim, contracting)]
    run = column_parallel_matmuls
    return run(x, of_w, axis, dim=dim, mode=mode, sum_dtype=sum_dtype, mesh=mesh)[0]


def column_parallel_matmuls(
    x: jax.Array,
    kernels: Sequence[tuple[jax.Array, int, Contracting]],
    axis: str,
    *,
    dim: int,
    mode: Mode = "ring",
    sum_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> list[jax.Array]:
    """Computes `column_parallel_matmul` of one x with several w.

    x is gathered only once. The gradient of x is summed over the products before it is
    scattered, so it is scattered only once.

    Args:
        x: The global array.
        kernels: Tuples of a w, its ``w_dim`` and its ``contracting``. All must contract
            the same dims of x.
        axis: The mesh axis.
        dim: The dim of x that the axis splits.
        mode: How the shards travel (`Mode`).
        sum_dtype: dtype in which the partial sums of the gradient of x travel.
        mesh: The mesh.

    Returns:
        The products with each w, in order.
    """
    sides = [_operands(x, w, contracting) for w, _, contracting in kernels]
    dim, kept = sides[0][0].kept_dim("dim", dim), sides[0][0].kept
    w_dims = [
        side.kept_dim("w_dim", w_dim)
        for (_, side), (_, w_dim, _) in zip(sides, kernels, strict=True)
    ]
    # x split along dim, w along w_dim -> (*kept of x, *kept of w) split along out_dim
    out_dims = [
        len(kept) + side.kept.index(w_dim)
        for (_, side), w_dim in zip(sides, w_dims, strict=True)
    ]
    ws, contracting = [w for w, _, _ in kernels], [each for _, _, each in kernels]

    def products(x: jax.Array, *ws: jax.Array) -> list[jax.Array]:
        return _gathered_matmuls(x, ws, axis, dim, contracting, mode, sum_dtype)

    of_ws = [("w", w, d) for w, d in zip(ws, w_dims, strict=True)]
    splits, dims = [("x", x, dim), *of_ws], (dim, *w_dims)
    return on_shards(products, axis, mesh, dims, out_dims, *splits)(x, *ws)


def row_parallel_matmul(
    x: jax.Array,
    w: jax.Array,
    axis: str,
    *,
    dim: int,
    contracting: Contracting = 1,
    split: int = 0,
    mode: Mode = "ring",
    sum_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Computes ``x @ w`` of global arrays by `matmul_reduce_scatter`.

    The axis splits x and w along one contracted dim: the dim at index ``split`` in the
    list of contracted dims. It splits the output along ``dim``, a dim of x that is not
    contracted. Partial sums of the output travel in ``sum_dtype``. The other arguments
    and errors are the same as for `column_parallel_matmul`.

    Returns:
        The global array. It has the dims of x that are not contracted, followed by the
        dims of w that are not contracted, and is split along ``dim``.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"data": 2, "tensor": 4})
        >>> x, w = jnp.ones((2, 16, 8)), jnp.ones((8, 4))
        >>> row_parallel_matmul(x, w, "tensor", dim=1, mesh=mesh).shape
        (2, 16, 4)
    """
    x_side, w_side = _operands(x, w, contracting)
    dim, count = x_side.kept_dim("dim", dim), len(x_side.contracted)
    if not 0 <= split < count:
        raise CollectiveProductError(
            f"split={split}, but {count} dims are contracted. Choose one of "
            f"{list(range(count))}."
        )
    settings = {"contracting": contracting, "mode": mode, "sum_dtype": sum_dtype}
    product = partial(matmul_reduce_scatter, axis=axis, dim=dim, **settings)
    # x and w, split along a contracted dim -> (*kept of x, *kept of w), split along dim
    x_dim, w_dim = x_side.contracted[split], w_side.contracted[split]
    out_dim, splits = x_side.kept.index(dim), (("x", x, dim), ("x", x, x_dim))
    return on_shards(product, axis, mesh, (x_dim, w_dim), out_dim, *splits)(x, w)


def _gathering(ring: Ring, num: int, sum_dtype: DTypeLike) -> Callable:
    """Returns a function ``(x, ws)`` that computes ``all_gather(x) @ w`` for each w.

    Each product contracts the last ``num`` dims of x and the first ``num`` dims of w.
    """

    def products(x: jax.Array, ws: list[jax.Array]) -> list[jax.Array]:
        def of_shard(x: jax.Array) -> list[jax.Array]:
            # (*kept, *contracted) by (*contracted, *others)
            return [jnp.tensordot(x, w, num) for w in ws]

        return ring.gather_through(of_shard, x)[0]

    def gradient(x: jax.Array, ws: list[jax.Array], dys: list[jax.Array]) -> tuple:
        # Each product contributes to the gradient of x. The contributions are added
        # before they travel, so that the gradient is sent only once.
        def partial_sum(dys: list[jax.Array]) -> jax.Array:
            pairs = zip(dys, ws, strict=True)
            return reduce(add, (_x_gradient(dy, w, num, sum_dtype) for dy, w in pairs))

        dx, gathered = ring.scatter_sum_and_gather(partial_sum, dys, x)
        # There is one product with the gathered x, not one per hop. So the gradient of
        # w is summed only once over the other mesh axes that split the batch.
        pairs = zip(ws, dys, strict=True)
        dws = [_w_gradient(gathered, dy, num).astype(w.dtype) for w, dy in pairs]
        return dx.astype(x.dtype), dws

    return _with_gradient(products, gradient)


def _scattering(ring: Ring, num: int, sum_dtype: DTypeLike) -> Callable:
    """Returns a function ``(x, w)`` that computes ``reduce_scatter(x @ w)``.

    The product contracts the last ``num`` dims of x and the first ``num`` dims of w.
    """

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        # (*kept, *contracted) by (*contracted, *others), one shard of x at a time
        def partial_sum(x: jax.Array) -> jax.Array:
            return jnp.tensordot(x, w, num, preferred_element_type=sum_dtype)

        return ring.scatter_sum(partial_sum, x).astype(jnp.result_type(x, w))

    def gradient(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple:
        dx, dy = ring.gather_through(partial(_x_gradient, w=w, num=num), dy)
        return dx.astype(x.dtype), _w_gradient(x, dy, num).astype(w.dtype)

    return _with_gradient(product, gradient)


def _with_gradient(product: Callable, gradient: Callable[..., tuple]) -> Callable:
    """Gives a product of x and w the gradient ``gradient(x, w, dy)``.

    JAX's automatic transpose of a ring would keep every shard that passes by, and its
    hops would wait for products.
    """
    function = jax.custom_vjp(product)
    function.defvjp(
        lambda x, w: (function(x, w), (x, w)), lambda saved, dy: gradient(*saved, dy)
    )
    return function


def _x_gradient(
    dy: jax.Array, w: jax.Array, num: int, dtype: DTypeLike | None = None
) -> jax.Array:
    """Multiplies dy ``(*kept, *others)`` by w ``(*contracted, *others)``.

    The result is this device's part of a sum over devices.
    """
    others = [*range(num - w.ndim, 0)]  # the last dims of dy and of w
    return jnp.tensordot(dy, w, (others, others), preferred_element_type=dtype)


def _w_gradient(x: jax.Array, dy: jax.Array, num: int) -> jax.Array:
    """Multiplies x ``(*kept, *contracted)`` by dy ``(*kept, *others)``."""
    kept = [*range(x.ndim - num)]
    return jnp.tensordot(x, dy, axes=(kept, kept))


def _prepare(
    x: jax.Array,
    w: jax.Array,
    axis: str,
    dim: int,
    contracting: Contracting,
    mode: Mode,
    sum_dtype: DTypeLike | None,
) -> tuple[jax.Array, jax.Array, tuple[Ring, int, DTypeLike]]:
    """Checks the arguments of a product, and transposes its arrays.

    Returns x ``(*kept, *contracted)``, w ``(*contracted, *others)``, and a tuple with
    the ring, the number of contracted dims, and the dtype of the partial sums.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if axis not in manual:
        raise UnknownAxisError(
            f"The code is not manual over the mesh axis {axis!r}; its manual axes: "
            f"{list(manual)}. Call the function inside jax.shard_map(..., axis_names="
            f"{{{axis!r}}}), or use column_parallel_matmul and row_parallel_matmul, "
            "which open such a region."
        )
    x_side, w_side = _operands(x, w, contracting)
    ring = Ring(
        axis=axis, dim=x_side.kept.index(x_side.kept_dim("dim", dim)), mode=mode
    )
    if sum_dtype is None:
        # A sum that is rounded at every hop loses bits that one reduction would keep.
        sum_dtype = jnp.promote_types(jnp.result_type(x, w), jnp.float32)
    x = jnp.transpose(x, (*x_side.kept, *x_side.contracted))
    w = jnp.transpose(w, (*w_side.contracted, *w_side.kept))
    # JAX may track the axes along which values differ (`check_vma`). A gradient must
    # then vary over the same axes as its array. So casts add the missing axes to the
    # types of x and w. The gradient of a cast is a sum over the axes that it adds.
    varied = [jax.typeof(a).manual_axis_type.varying for a in (x, w)]
    every = varied[0] | varied[1] | {axis}
    for_x, for_w = (tuple(sorted(every - axes)) for axes in varied)
    x = jax.lax.pcast(x, for_x, to="varying") if for_x else x
    w = jax.lax.pcast(w, for_w, to="varying") if for_w else w
    return x, w, (ring, len(x_side.contracted), jnp.dtype(sum_dtype))


class _Operand(NamedTuple):
    """One operand of a product; its contracted dims are non-negative numbers."""

    name: str
    shape: tuple[int, ...]
    contracted: tuple[int, ...]

    @property
    def kept(self) -> list[int]:
        return [d for d in range(len(self.shape)) if d not in self.contracted]

    def kept_dim(self, label: str, dim: int) -> int:
        """Returns ``dim`` as a non-negative number; raises for a contracted dim."""
        ndim = len(self.shape)
        if not -ndim <= dim < ndim or dim % ndim not in self.kept:
            raise CollectiveProductError(
                f"{label}={dim} is invalid for {self.name} with shape {self.shape}, "
                f"whose dims {sorted(self.contracted)} are contracted. Choose a dim "
                f"that is not contracted: one of {self.kept}."
            )
        return dim % ndim


def _operands(
    x: jax.Array, w: jax.Array, contracting: Contracting
) -> tuple[_Operand, _Operand]:
    axes = contracting
    if isinstance(axes, int):
        axes = range(x.ndim - axes, x.ndim), range(axes)
    with suppress(ValueError):  # a dim that does not exist, or that repeats
        x_dims = normalize_axis_tuple(tuple(axes[0]), x.ndim)
        w_dims = normalize_axis_tuple(tuple(axes[1]), w.ndim)
        if [x.shape[d] for d in x_dims] == [w.shape[d] for d in w_dims]:
            return _Operand("x", x.shape, x_dims), _Operand("w", w.shape, w_dims)
    raise CollectiveProductError(
        f"contracting={contracting!r} does not fit x of shape {x.shape} and "
        f"w of shape {w.shape}. Give a number n, to contract the last n dims of x with "
        "the first n dims of w, or a pair of lists of dims. Contracted dims must have "
        "equal sizes in x and w."
    )
