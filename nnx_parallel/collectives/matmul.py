"""Products of two arrays that gather one of them or scatter their sum on the way.

``all_gather_matmul`` and ``matmul_reduce_scatter`` are for code that is manual over the
axis (``jax.shard_map``). The backward pass of each is the other: it overlaps as well,
and keeps no gathered array in between. ``column_parallel_matmul`` and
``row_parallel_matmul`` are the same of global arrays, in a region manual over that one
axis: other mesh axes stay automatic, so that a batch split over ``data`` or weights
over ``pipe`` need nothing said. Inside a region that is manual over other axes they
nest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from numpy.lib.array_utils import normalize_axis_tuple

from nnx_parallel.collectives.ring import (
    Mode,
    Ring,
    check_divides,
    on_shards,
    region_mesh_of,
)
from nnx_parallel.errors import CollectiveProductError, UnknownAxisError

Contracting = int | tuple[Sequence[int], Sequence[int]]
"""As the ``axes`` of ``jnp.tensordot``: a number of dims, or those of x and of w."""


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
    """``all_gather(x) @ w``: each shard is multiplied while the next one travels [1].

    In sequence parallelism it leads into a block's products [2]. A device sends
    (n - 1) / n of the gathered ``x``. Of the forward pass it keeps the two shards. The
    gradient of ``x`` is a `matmul_reduce_scatter`; that of ``w`` needs the gathered
    ``x`` once more, which travels during the former's products and is multiplied
    in one piece: other axes that split the batch then sum it once, not once a hop.

    Args:
        x_shard: This device's part along ``dim``, with the dims to contract.
        w_shard: This device's weights, whole along the dims to contract.
        axis: The manual mesh axis.
        dim: The dim of ``x_shard`` to gather, one that is kept.
        contracting: How many last dims of x are contracted with the first of w, or
            both's dims, as in ``jnp.tensordot``.
        mode: How shards travel.
        sum_dtype: dtype in which the partial sums of the gradient of ``x`` travel. By
            default at least float32; bfloat16 halves their bytes and rounds every hop.

    Returns:
        The kept dims of x, ``dim`` times as long as in ``x_shard`` by the axis size,
        then those of ``w_shard``.

    Raises:
        UnknownAxisError: If the code is not manual over ``axis``.
        CollectiveProductError: If dims do not fit.
        ValueError: If there is no such mode.

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
        Decomposition in Large Deep Learning Models", ASPLOS 2023, section 3,
        https://doi.org/10.1145/3567955.3567959
        [2] Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
        Models", 2022, section 4.2, https://arxiv.org/abs/2205.05198
    """
    x, w, plan = _prepare(x_shard, w_shard, axis, dim, contracting, mode, sum_dtype)
    return _gathering(*plan)(x, w)


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
    """``reduce_scatter(x @ w)``: sums travel while the next shard is multiplied [1].

    In sequence parallelism it leads out of a block's products [2]. A device sends
    (n - 1) / n of the whole output. Of the forward pass it keeps its two inputs. The
    gradient of ``x`` is an `all_gather_matmul`, and what it gathers is multiplied with
    ``x`` for the gradient of ``w``.

    Args:
        x_shard: This device's part of the contracted dims, whole along ``dim``.
        w_shard: This device's part of the contracted dims.
        axis: The manual mesh axis.
        dim: The dim of ``x_shard`` that the output is split along, one that is kept.
        contracting: As in `all_gather_matmul`.
        mode: How sums travel.
        sum_dtype: dtype in which partial sums travel, as in `all_gather_matmul`.

    Returns:
        This device's shard along ``dim``: the kept dims of x, then those of w.

    Raises:
        UnknownAxisError: If the code is not manual over ``axis``.
        IndivisibleDimError: If the axis does not divide ``dim``.
        CollectiveProductError: If dims do not fit.
        ValueError: If there is no such mode.

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
        [1], [2] As of `all_gather_matmul`.
    """
    x, w, plan = _prepare(x_shard, w_shard, axis, dim, contracting, mode, sum_dtype)
    size = jax.lax.axis_size(axis)
    # The product has the other dims of x_shard, of which it scatters one.
    check_divides(axis, size, ("a product of x_shard", x_shard, dim % x_shard.ndim))
    return _scattering(*plan)(x, w)


def _gathering(ring: Ring, num: int, sum_dtype: DTypeLike) -> Callable:
    """``all_gather(x) @ w``, from the first ``num`` dims of w and the last of x.

    The gradient is written out: JAX's transpose of a ring keeps all that passed by, and
    has the hops wait for products.
    """

    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        # (*kept, *contracted) by (*contracted, *others)
        return ring.gather_through(x, lambda x: jnp.tensordot(x, w, num))[0]

    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple]:
        return product(x, w), (x, w)

    def backward(saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        dx, whole = ring.scatter_sum_and_gather(
            lambda dy: _x_gradient(dy, w, num, sum_dtype), dy, x
        )
        # One product of the whole x, not one a hop: other axes that split the batch
        # then sum the gradient of w once.
        return dx.astype(x.dtype), _w_gradient(whole, dy, num).astype(w.dtype)

    product.defvjp(forward, backward)
    return product


def _scattering(ring: Ring, num: int, sum_dtype: DTypeLike) -> Callable:
    """``reduce_scatter(x @ w)``, from the first ``num`` dims of w and the last of x."""

    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        # (*kept, *contracted) by (*contracted, *others), one shard of x at a time
        def partial_sum(x: jax.Array) -> jax.Array:
            return jnp.tensordot(x, w, num, preferred_element_type=sum_dtype)

        return ring.scatter_sum(partial_sum, x).astype(jnp.result_type(x, w))

    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple]:
        return product(x, w), (x, w)

    def backward(saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        dx, dy = ring.gather_through(dy, lambda dy: _x_gradient(dy, w, num))
        return dx.astype(x.dtype), _w_gradient(x, dy, num).astype(w.dtype)

    product.defvjp(forward, backward)
    return product


def _x_gradient(
    dy: jax.Array, w: jax.Array, num: int, dtype: DTypeLike | None = None
) -> jax.Array:
    """``(*kept, *others)`` by ``(*contracted, *others)``, before it is summed."""
    others = w.ndim - num
    axes = [*range(dy.ndim - others, dy.ndim)], [*range(num, w.ndim)]
    return jnp.tensordot(dy, w, axes=axes, preferred_element_type=dtype)


def _w_gradient(x: jax.Array, dy: jax.Array, num: int) -> jax.Array:
    """``(*kept, *contracted)`` by ``(*kept, *others)``."""
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
    """Arrays ``(*kept, *contracted)`` and ``(*contracted, *others)``, and the plan."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if axis not in manual:
        raise UnknownAxisError(
            f"The code is not manual over the mesh axis {axis!r}; its manual axes: "
            f"{list(manual)}. Call it inside jax.shard_map(..., axis_names={{{axis!r}}}"
            "), or use column_parallel_matmul and row_parallel_matmul, which open such "
            "a region."
        )
    dims = _find_dims(x, w, contracting)
    kept = dims.x_kept.index(_kept_dim("x", x, dims.x_kept, "dim", dim))
    if sum_dtype is None:
        # A sum that is rounded at every hop loses what one reduction would keep.
        sum_dtype = jnp.promote_types(jnp.result_type(x, w), jnp.float32)
    ring = Ring(axis=axis, dim=kept, mode=mode)
    # (*kept, *contracted) and (*contracted, *others)
    x = jnp.transpose(x, (*dims.x_kept, *dims.x))
    w = jnp.transpose(w, (*dims.w, *dims.w_kept))
    # Where JAX tracks along which axes values differ (`check_vma`), a gradient must
    # differ as its array does; that of this cast is the sum over the axes that it adds.
    varied = [jax.typeof(a).manual_axis_type.varying for a in (x, w)]
    every = varied[0] | varied[1] | {axis}
    for_x, for_w = (tuple(sorted(every - own)) for own in varied)
    x = jax.lax.pcast(x, for_x, to="varying") if for_x else x
    w = jax.lax.pcast(w, for_w, to="varying") if for_w else w
    return x, w, (ring, len(dims.x), jnp.dtype(sum_dtype))


class _Dims(NamedTuple):
    """The dims of a product, counted from the front.

    Attributes:
        x: Contracted dims of x.
        w: Contracted dims of w, in the same order.
        x_kept: The other dims of x.
        w_kept: The other dims of w.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    x_kept: list[int]
    w_kept: list[int]


def _find_dims(x: jax.Array, w: jax.Array, contracting: Contracting) -> _Dims:
    axes = contracting
    if isinstance(axes, int):
        axes = range(x.ndim - axes, x.ndim), range(axes)
    x_dims = w_dims = ()
    try:
        x_dims = normalize_axis_tuple(tuple(axes[0]), x.ndim)
        w_dims = normalize_axis_tuple(tuple(axes[1]), w.ndim)
        fits = [x.shape[d] for d in x_dims] == [w.shape[d] for d in w_dims]
    except ValueError:  # a dim that does not exist, or that repeats
        fits = False
    if not fits:
        raise CollectiveProductError(
            f"contracting={contracting!r} does not fit x of shape {x.shape} and "
            f"w of shape {w.shape}. Give the number of last dims of x and first "
            "dims of w, or a pair of lists of dims; their sizes must be equal in pairs."
        )
    x_kept, w_kept = (
        [d for d in range(a.ndim) if d not in dims]
        for a, dims in ((x, x_dims), (w, w_dims))
    )
    return _Dims(x_dims, w_dims, x_kept, w_kept)


def _kept_dim(
    name: str, array: jax.Array, kept: list[int], label: str, dim: int
) -> int:
    """``dim`` counted from the front, once it is known to be kept."""
    if not -array.ndim <= dim < array.ndim or dim % array.ndim not in kept:
        contracted = [d for d in range(array.ndim) if d not in kept]
        raise CollectiveProductError(
            f"{label}={dim} of {name} with shape {array.shape}, whose dims "
            f"{contracted} are contracted. Choose a dim that is kept: one of {kept}."
        )
    return dim % array.ndim


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
    """`all_gather_matmul` of global arrays: ``x @ w``, split along w's ``w_dim``.

    Args:
        x: Global; split over the axis along ``dim``, or brought there.
        w: Global; split over the axis along ``w_dim``, or brought there.
        axis: The mesh axis.
        dim: A dim of x that is kept.
        w_dim: A dim of w that is kept.
        contracting: As in `all_gather_matmul`, like ``mode`` and ``sum_dtype``.
        mode: How shards of x travel.
        sum_dtype: dtype in which the sums of its gradient travel.
        mesh: The mesh; in a region that is manual over other axes, that of the region.

    Returns:
        The kept dims of x, then those of w: global, split where ``w_dim`` went.

    Raises:
        UnknownAxisError: If there is no mesh, or none with the axis, or the code is
            manual over it already.
        IndivisibleDimError: If the axis does not divide a dim that it splits.
        CollectiveProductError: If dims do not fit.
        ValueError: If there is no such mode.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"data": 2, "tensor": 4})
        >>> x, w = jnp.ones((2, 16, 4)), jnp.ones((4, 8))
        >>> column_parallel_matmul(x, w, "tensor", dim=1, w_dim=1, mesh=mesh).shape
        (2, 16, 8)
    """
    dims = _find_dims(x, w, contracting)
    dim = _kept_dim("x", x, dims.x_kept, "dim", dim)
    w_dim = _kept_dim("w", w, dims.w_kept, "w_dim", w_dim)
    out_dim = len(dims.x_kept) + dims.w_kept.index(w_dim)
    settings = {"contracting": contracting, "mode": mode, "sum_dtype": sum_dtype}
    # x split along dim, w along w_dim -> (*kept of x, *kept of w) split along out_dim
    product = partial(all_gather_matmul, axis=axis, dim=dim, **settings)
    region_mesh = region_mesh_of(axis, mesh, ("x", x, dim), ("w", w, w_dim))
    return on_shards(product, region_mesh, axis, (dim, w_dim), out_dim)(x, w)


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
    """`matmul_reduce_scatter` of global arrays: ``x @ w``, split along x's ``dim``.

    Args:
        x: Global; split over the axis along one contracted dim, or brought there.
        w: Global; split over the axis along the same, or brought there.
        axis: The mesh axis.
        dim: A dim of x that is kept.
        contracting: As in `all_gather_matmul`, like ``mode`` and ``sum_dtype``.
        split: Which of the contracted dims is split.
        mode: How sums travel.
        sum_dtype: dtype in which they travel.
        mesh: As in `column_parallel_matmul`.

    Returns:
        The kept dims of x, then those of w: global, split along ``dim``.

    Raises:
        UnknownAxisError: As `column_parallel_matmul`, like the other errors.
        IndivisibleDimError: If the axis does not divide a dim that it splits.
        CollectiveProductError: If dims do not fit.
        ValueError: If there is no such mode.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"data": 2, "tensor": 4})
        >>> x, w = jnp.ones((2, 16, 8)), jnp.ones((8, 4))
        >>> row_parallel_matmul(x, w, "tensor", dim=1, mesh=mesh).shape
        (2, 16, 4)
    """
    dims = _find_dims(x, w, contracting)
    dim = _kept_dim("x", x, dims.x_kept, "dim", dim)
    if not 0 <= split < len(dims.x):
        raise CollectiveProductError(
            f"split={split}, but {len(dims.x)} dims are contracted. Choose one of "
            f"{list(range(len(dims.x)))}."
        )
    out_dim = dims.x_kept.index(dim)
    settings = {"contracting": contracting, "mode": mode, "sum_dtype": sum_dtype}
    # x and w split along a contracted dim -> (*kept of x, *kept of w) along out_dim
    product = partial(matmul_reduce_scatter, axis=axis, dim=dim, **settings)
    x_dim, w_dim = dims.x[split], dims.w[split]
    region_mesh = region_mesh_of(axis, mesh, ("x", x, dim), ("x", x, x_dim))
    return on_shards(product, region_mesh, axis, (x_dim, w_dim), out_dim)(x, w)
