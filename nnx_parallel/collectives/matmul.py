"""Products of shards that gather their input or scatter their output.

For code inside a region that is manual over the axis (``jax.shard_map``). The backward
pass of each is the other: it overlaps as well, and keeps no gathered array in between.

The same products of global arrays: each opens a region manual over one axis.

Other mesh axes stay automatic, so that a batch split over ``data`` or weights over
``pipe`` need no word. Inside a region that is manual over other axes they nest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.collectives.ring import Mode, Ring, check_mode
from nnx_parallel.errors import (
    CollectiveProductError,
    IndivisibleDimError,
    UnknownAxisError,
)

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
    sum_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """``all_gather(x) @ w``: each shard is multiplied while the next one travels [1].

    In sequence parallelism it leads into a block's products [2]. A device sends
    (n - 1) / n of the gathered ``x``. Of the forward pass it keeps the two shards. The
    gradient of ``x`` is a `matmul_reduce_scatter`; that of ``w`` needs the gathered
    ``x`` once more, which travels beside the former's products and is multiplied
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
    return _gathering(plan, x, w)


def matmul_reduce_scatter(
    x_shard: jax.Array,
    w_shard: jax.Array,
    axis: str,
    *,
    dim: int,
    contracting: Contracting = 1,
    mode: Mode = "ring",
    sum_dtype: jax.typing.DTypeLike | None = None,
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
        contracting: How many last dims of x are contracted with the first of w, or
            both's dims, as in ``jnp.tensordot``.
        mode: How sums travel.
        sum_dtype: dtype in which partial sums travel. By default at least float32;
            bfloat16 halves their bytes and rounds every hop.

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
        [1] Wang et al., "Overlap Communication with Dependent Computation via
        Decomposition in Large Deep Learning Models", ASPLOS 2023, section 3,
        https://doi.org/10.1145/3567955.3567959
        [2] Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
        Models", 2022, section 4.2, https://arxiv.org/abs/2205.05198
    """
    x, w, plan = _prepare(x_shard, w_shard, axis, dim, contracting, mode, sum_dtype)
    length, size = x.shape[plan.ring.dim], plan.ring.size
    if length % size:
        raise IndivisibleDimError(
            f"Cannot scatter dim {dim} of a product over the mesh axis {axis!r}: it "
            f"has size {length}, which {size} devices do not divide. Pad it to "
            f"{-(-length // size) * size}."
        )
    return _scattering(plan, x, w)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What of a product is no array.

    Attributes:
        ring: Who takes part, and the dim of x.
        num: Number of contracted dims, the last of x and the first of w.
        sum_dtype: dtype of partial sums on their way.
    """

    ring: Ring
    num: int
    sum_dtype: jax.typing.DTypeLike

    def product(
        self, x: jax.Array, w: jax.Array, dtype: jax.typing.DTypeLike | None = None
    ) -> jax.Array:
        return jnp.tensordot(x, w, axes=self.num, preferred_element_type=dtype)

    def transposed(
        self, dy: jax.Array, w: jax.Array, dtype: jax.typing.DTypeLike | None = None
    ) -> jax.Array:
        """``dy`` by the transpose of ``w``: the gradient of x before it is summed."""
        kept = w.ndim - self.num
        axes = [*range(dy.ndim - kept, dy.ndim)], [*range(self.num, w.ndim)]
        return jnp.tensordot(dy, w, axes=axes, preferred_element_type=dtype)

    def weights(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        """The gradient of w."""
        rows = [*range(x.ndim - self.num)]
        return jnp.tensordot(x, dy, axes=(rows, rows))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathering(plan: _Plan, x: jax.Array, w: jax.Array) -> jax.Array:
    return plan.ring.gather_through(x, lambda piece: plan.product(piece, w))[0]


def _gathering_forward(
    plan: _Plan, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple]:
    return _gathering(plan, x, w), (x, w)


def _gathering_backward(
    plan: _Plan, kept: tuple, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    dx, whole = plan.ring.scatter_sum_and_gather(
        lambda piece: plan.transposed(piece, w, plan.sum_dtype), dy, x
    )
    return dx.astype(x.dtype), plan.weights(whole, dy).astype(w.dtype)


_gathering.defvjp(_gathering_forward, _gathering_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattering(plan: _Plan, x: jax.Array, w: jax.Array) -> jax.Array:
    y = plan.ring.scatter_sum(lambda piece: plan.product(piece, w, plan.sum_dtype), x)
    return y.astype(jnp.result_type(x, w))


def _scattering_forward(
    plan: _Plan, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple]:
    return _scattering(plan, x, w), (x, w)


def _scattering_backward(
    plan: _Plan, kept: tuple, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    dx, dy = plan.ring.gather_through(dy, lambda piece: plan.transposed(piece, w))
    return dx.astype(x.dtype), plan.weights(x, dy).astype(w.dtype)


_scattering.defvjp(_scattering_forward, _scattering_backward)


def _prepare(
    x: jax.Array,
    w: jax.Array,
    axis: str,
    dim: int,
    contracting: Contracting,
    mode: Mode,
    sum_dtype: jax.typing.DTypeLike | None,
) -> tuple[jax.Array, jax.Array, _Plan]:
    """Contracted dims last in x and first in w, and all else in a plan."""
    check_mode(mode)
    _check_manual(axis)
    x_dims, w_dims = contracted_dims(x.shape, w.shape, contracting)
    kept = [d for d in range(x.ndim) if d not in x_dims]
    if not -x.ndim <= dim < x.ndim or dim % x.ndim not in kept:
        raise CollectiveProductError(
            f"dim={dim} of x with shape {x.shape}, whose dims {sorted(x_dims)} are "
            f"contracted. Choose a dim that is kept: one of {kept}."
        )
    others = [d for d in range(w.ndim) if d not in w_dims]
    if sum_dtype is None:
        sum_dtype = jnp.promote_types(jnp.result_type(x, w), jnp.float32)
    ring = Ring(axis=axis, dim=kept.index(dim % x.ndim), mode=mode)
    plan = _Plan(ring=ring, num=len(x_dims), sum_dtype=jnp.dtype(sum_dtype))
    x = jnp.transpose(x, (*kept, *x_dims))
    w = jnp.transpose(w, (*w_dims, *others))
    x, w = _varying(x, w, axis)
    return x, w, plan


def contracted_dims(
    x_shape: Sequence[int], w_shape: Sequence[int], contracting: Contracting
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of x and of w that are contracted, counted from the front.

    Raises:
        CollectiveProductError: If they do not exist, repeat, or differ in size.
    """
    x_ndim, w_ndim = len(x_shape), len(w_shape)
    if isinstance(contracting, int):
        x_dims = tuple(range(x_ndim - contracting, x_ndim))
        w_dims = tuple(range(contracting))
    else:
        x_dims, w_dims = (tuple(dims) for dims in contracting)
    is_inside = all(-x_ndim <= d < x_ndim for d in x_dims) and all(
        -w_ndim <= d < w_ndim for d in w_dims
    )
    x_dims = tuple(d % max(x_ndim, 1) for d in x_dims)
    w_dims = tuple(d % max(w_ndim, 1) for d in w_dims)
    are_distinct = len({*x_dims}) == len(x_dims) == len(w_dims) == len({*w_dims})
    sizes = [x_shape[d] for d in x_dims] if is_inside else []
    if not is_inside or not are_distinct or sizes != [w_shape[d] for d in w_dims]:
        raise CollectiveProductError(
            f"contracting={contracting!r} does not fit x of shape {tuple(x_shape)} and "
            f"w of shape {tuple(w_shape)}. Give the number of last dims of x and first "
            "dims of w, or a pair of lists of dims; their sizes must be equal in pairs."
        )
    return x_dims, w_dims


def _check_manual(axis: str) -> None:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if axis not in manual:
        raise UnknownAxisError(
            f"The code is not manual over the mesh axis {axis!r}; its manual axes: "
            f"{list(manual)}. Call it inside jax.shard_map(..., axis_names={{{axis!r}}}"
            "), or use column_parallel_matmul and row_parallel_matmul, which open such "
            "a region."
        )


def _varying(x: jax.Array, w: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Both as values that differ along the same manual axes.

    Where JAX keeps track of that (``check_vma``), gradients must differ as their
    arrays do; that of a cast is the sum over the axes that it adds.
    """
    every = _axes_varied(x) | _axes_varied(w) | {axis}
    return _vary(x, every), _vary(w, every)


def _vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    added = tuple(sorted(axes - _axes_varied(x)))
    return jax.lax.pcast(x, added, to="varying") if added else x


def _axes_varied(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


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
