"""The same products of global arrays: each opens a region manual over one axis.

Other mesh axes stay automatic, so that a batch split over ``data`` or weights over
``pipe`` need no word. Inside a region that is manual over other axes they nest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.collectives.products import (
    Contracting,
    all_gather_matmul,
    contracted_dims,
    matmul_reduce_scatter,
)
from nnx_parallel.collectives.ring import Mode, Ring, check_mode
from nnx_parallel.errors import (
    CollectiveProductError,
    IndivisibleDimError,
    UnknownAxisError,
)


def column_parallel_matmul(
    x: jax.Array,
    w: jax.Array,
    axis: str,
    *,
    dim: int,
    w_dim: int,
    contracting: Contracting = 1,
    mode: Mode = "ring",
    sum_dtype: jax.typing.DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """``x @ w`` from x split along ``dim`` to an output split along w's ``w_dim``.

    `all_gather_matmul` on the shards: x is gathered on its way.

    Args:
        x: Global; split over the axis along ``dim``, or brought there.
        w: Global; split over the axis along ``w_dim``, or brought there.
        axis: The mesh axis.
        dim: A dim of x that is kept.
        w_dim: A dim of w that is kept.
        contracting: As in `all_gather_matmul`.
        mode: As in `all_gather_matmul`.
        sum_dtype: As in `all_gather_matmul`.
        mesh: The mesh; in a region that is manual over other axes, that of the region.

    Returns:
        The kept dims of x, then those of w: global, split where ``w_dim`` went.

    Raises:
        UnknownAxisError: If there is no mesh, or none with the axis, or the code is
            manual over it already.
        IndivisibleDimError: If the axis does not divide a dim that it splits.
        CollectiveProductError: If dims do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"data": 2, "tensor": 4})
        >>> x, w = jnp.ones((2, 16, 4)), jnp.ones((4, 8))
        >>> column_parallel_matmul(x, w, "tensor", dim=1, w_dim=1, mesh=mesh).shape
        (2, 16, 8)
    """
    x_dims, w_dims = contracted_dims(x.shape, w.shape, contracting)
    dim, kept_x = _kept_dim("x", x, x_dims, "dim", dim)
    w_dim, kept_w = _kept_dim("w", w, w_dims, "w_dim", w_dim)
    out_dim = len(kept_x) + kept_w.index(w_dim)
    function = partial(
        all_gather_matmul,
        axis=axis,
        dim=dim,
        contracting=(x_dims, w_dims),
        mode=mode,
        sum_dtype=sum_dtype,
    )
    mesh_ = _mesh_of(axis, mesh)
    _check_divides(mesh_, axis, ("x", x, dim), ("w", w, w_dim))
    specs = (_on(axis, dim), _on(axis, w_dim))
    return _over(function, mesh_, axis, specs, _on(axis, out_dim), mode)(x, w)


def row_parallel_matmul(
    x: jax.Array,
    w: jax.Array,
    axis: str,
    *,
    dim: int,
    contracting: Contracting = 1,
    split: int = 0,
    mode: Mode = "ring",
    sum_dtype: jax.typing.DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """``x @ w`` from a contracted dim that is split to an output split along ``dim``.

    `matmul_reduce_scatter` on the shards: the sum over devices is scattered.

    Args:
        x: Global; split over the axis along one contracted dim, or brought there.
        w: Global; split over the axis along the same, or brought there.
        axis: The mesh axis.
        dim: A dim of x that is kept.
        contracting: As in `matmul_reduce_scatter`.
        split: Which of the contracted dims is split.
        mode: As in `matmul_reduce_scatter`.
        sum_dtype: As in `matmul_reduce_scatter`.
        mesh: The mesh; in a region that is manual over other axes, that of the region.

    Returns:
        The kept dims of x, then those of w: global, split where ``dim`` went.

    Raises:
        UnknownAxisError: If there is no mesh, or none with the axis, or the code is
            manual over it already.
        IndivisibleDimError: If the axis does not divide a dim that it splits.
        CollectiveProductError: If dims do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"data": 2, "tensor": 4})
        >>> x, w = jnp.ones((2, 16, 8)), jnp.ones((8, 4))
        >>> row_parallel_matmul(x, w, "tensor", dim=1, mesh=mesh).shape
        (2, 16, 4)
    """
    x_dims, w_dims = contracted_dims(x.shape, w.shape, contracting)
    dim, kept_x = _kept_dim("x", x, x_dims, "dim", dim)
    if not 0 <= split < len(x_dims):
        raise CollectiveProductError(
            f"split={split}, but {len(x_dims)} dims are contracted. Choose one of "
            f"{list(range(len(x_dims)))}."
        )
    function = partial(
        matmul_reduce_scatter,
        axis=axis,
        dim=dim,
        contracting=(x_dims, w_dims),
        mode=mode,
        sum_dtype=sum_dtype,
    )
    mesh_ = _mesh_of(axis, mesh)
    _check_divides(mesh_, axis, ("x", x, dim), ("x", x, x_dims[split]))
    specs = (_on(axis, x_dims[split]), _on(axis, w_dims[split]))
    out_spec = _on(axis, kept_x.index(dim))
    return _over(function, mesh_, axis, specs, out_spec, mode)(x, w)


def gather_hops(
    x: jax.Array,
    axis: str,
    *,
    dim: int,
    mode: Mode = "ring",
    mesh: Mesh | None = None,
) -> list[jax.Array]:
    """The hops of an all-gather, which a compiler can run beside other work.

    A device sends ``(n - 1) / n`` of the array's bytes.

    Args:
        x: Global; split over the axis along ``dim``, or brought there.
        axis: The mesh axis, of size n.
        dim: A dim of x.
        mode: ``ring`` or ``bidirectional``.
        mesh: The mesh; in a region that is manual over other axes, that of the region.

    Returns:
        What each device has seen after each hop, for `join_hops`: global arrays split
        over the axis along ``dim``, together n times x.

    Raises:
        UnknownAxisError: If there is no mesh, or none with the axis, or the code is
            manual over it already.
        IndivisibleDimError: If the axis does not divide the dim.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"data": 2, "fsdp": 4})
        >>> hops = gather_hops(jnp.ones((6, 8)), "fsdp", dim=1, mesh=mesh)
        >>> len(hops), join_hops(hops, "fsdp", dim=1, mesh=mesh).shape
        (4, (6, 8))
    """
    mesh_ = _mesh_of(axis, mesh)
    _check_divides(mesh_, axis, ("x", x, dim))
    ring = Ring(axis=axis, dim=dim, mode=mode)
    spec = _on(axis, dim)
    return _over(ring.hops, mesh_, axis, (spec,), spec, mode)(x)


def join_hops(
    hops: list[jax.Array],
    axis: str,
    *,
    dim: int,
    mode: Mode = "ring",
    mesh: Mesh | None = None,
) -> jax.Array:
    """The gathered array from what `gather_hops` gave; it sends nothing.

    Args:
        hops: What `gather_hops` returned.
        axis: As there.
        dim: As there.
        mode: As there.
        mesh: As there.

    Returns:
        x, whole on all of the axis's devices.
    """
    ring = Ring(axis=axis, dim=dim, mode=mode)
    join = _over(ring.join, _mesh_of(axis, mesh), axis, (_on(axis, dim),), P(), mode)
    return join(hops)


def _over(
    function: Callable,
    mesh: Mesh | AbstractMesh,
    axis: str,
    in_specs: tuple[P, ...],
    out_spec: P,
    mode: Mode,
) -> Callable:
    check_mode(mode)
    region = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_spec,
        axis_names={axis},
        check_vma=False,
    )
    # Outside a trace JAX runs no region that leaves axes automatic.
    return jax.jit(region, inline=True)


def _on(axis: str, dim: int) -> P:
    return P(*[None] * dim, axis)


def _kept_dim(
    name: str, array: jax.Array, contracted: tuple[int, ...], label: str, dim: int
) -> tuple[int, list[int]]:
    kept = [d for d in range(array.ndim) if d not in contracted]
    if not -array.ndim <= dim < array.ndim or dim % array.ndim not in kept:
        raise CollectiveProductError(
            f"{label}={dim} of {name} with shape {array.shape}, whose dims "
            f"{sorted(contracted)} are contracted. Choose a dim that is kept: one of "
            f"{kept}."
        )
    return dim % array.ndim, kept


def _mesh_of(axis: str, mesh: Mesh | None) -> Mesh | AbstractMesh:
    """The mesh to open a region over: the enclosing region's, else the one given."""
    context = jax.sharding.get_abstract_mesh()
    found = context if context.manual_axes or mesh is None else mesh
    if axis in context.manual_axes:
        raise UnknownAxisError(
            f"The code is manual over {axis!r} already. Call all_gather_matmul, "
            "matmul_reduce_scatter or jax.lax.all_gather on the shards."
        )
    if axis not in found.shape:
        raise UnknownAxisError(
            f"No mesh axis {axis!r} here. Axes: {list(found.axis_names)}. Pass mesh= "
            "with the axis, or call under jax.set_mesh(mesh)."
        )
    return found


def _check_divides(
    mesh: Mesh | AbstractMesh, axis: str, *splits: tuple[str, jax.Array, int]
) -> None:
    for name, array, dim in splits:
        size = mesh.shape[axis]
        if array.shape[dim] % size:
            raise IndivisibleDimError(
                f"Cannot split dim {dim} of {name} with shape {array.shape} over the "
                f"mesh axis {axis!r} of size {size}: it does not divide "
                f"{array.shape[dim]}. Pad the dim to "
                f"{-(-array.shape[dim] // size) * size}."
            )
