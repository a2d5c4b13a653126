"""Scaled dot-product attention over named heads, by the platform's kernel.

A fused kernel is one opaque operation to the partitioner, which would gather its
operands whole. Heads and rows of the batch are independent, so each device calls it on
its own shard (`per_shard`).
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from nnx_parallel.errors import AttentionKernelError
from nnx_parallel.sharding.constrain import active_layout, constrain
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import dim_axes, to_spec

Implementation = Literal["xla", "cudnn", "splash"]
"""Implementations of attention.

- ``xla``: plain operations, which the partitioner splits; all scores are held.
- ``cudnn``: NVIDIA's fused kernel, in float16 and bfloat16.
- ``splash``: a Pallas kernel for TPUs, for sequences of a multiple of 128.
"""

HEADS = ("batch", None, "heads", None)
SPLASH_BLOCK = 128
"""Sequences that the TPU's kernel takes are multiples of it."""


class FusedKernel(NamedTuple):
    """A kernel that computes attention in one operation."""

    platform: str
    call: Callable[..., Array]  # (query, key, value, *, mask, is_causal) -> output
    # Reasons why it cannot take (query, key, mask); none if it can.
    refusals: Callable[[Array, Array, Array | None], Iterator[str]]
    is_default: Callable[[Layout | None], bool]  # taken unasked, where it fits


plain_attention = partial(jax.nn.dot_product_attention, implementation="xla")
cudnn_attention = partial(jax.nn.dot_product_attention, implementation="cudnn")


def cudnn_refusals(query: Array, key: Array, mask: Array | None) -> Iterator[str]:
    """Reasons why cuDNN's kernel cannot take these arrays."""
    # Without NVIDIA's libraries JAX cannot even trace the kernel: asked of the arrays,
    # not tried.
    head_dim = query.shape[-1]
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        yield f"dtype {query.dtype}; it takes float16 or bfloat16"
    if head_dim % 8 or head_dim > 128:
        yield f"head_dim {head_dim}; it takes multiples of 8 up to 128"
    if mask is not None and (query.shape[1] % 2 or key.shape[1] % 2):
        lengths = f"{query.shape[1]} queries and {key.shape[1]} keys"
        yield f"a mask over {lengths}; with one it takes even numbers"


def splash_refusals(query: Array, key: Array, mask: Array | None) -> Iterator[str]:
    """Reasons why the TPU's kernel cannot take these arrays."""
    for name, length in (("queries", query.shape[1]), ("keys", key.shape[1])):
        if length % SPLASH_BLOCK:
            yield f"{length} {name}; it takes multiples of {SPLASH_BLOCK}"
    if mask is not None:
        yield "an array as mask; it takes causal=True or none"


def splash_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: None,
    is_causal: bool,
    interpret: bool = False,
) -> Array:
    """The TPU's kernel; ``interpret`` runs it on any platform, slowly."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    heads, seqs = query.shape[2], (query.shape[1], key.shape[1])
    one = splash.CausalMask(seqs) if is_causal else splash.FullMask(seqs)
    # Blocks of up to 512 that divide the sequences; the backward kernels need theirs.
    q, kv = (math.gcd(length, 4 * SPLASH_BLOCK) for length in seqs)
    blocks: dict[str, Any] = {f"block_q{of}": q for of in ("", "_dkv", "_dq")}
    blocks |= {f"block_kv{of}": kv for of in ("", "_dkv", "_dq")}
    kernel: Any = splash.make_splash_mha(
        splash.MultiHeadMask([one] * heads),
        block_sizes=splash.BlockSizes(**blocks),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    # The kernel does not scale, and takes (heads, seq, head_dim) of one row: here
    # (batch, seq, heads, head_dim) -> (batch, heads, seq, head_dim) and back.
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    operands = (x.swapaxes(1, 2) for x in (query, key, value))
    return jax.vmap(kernel)(*operands).swapaxes(1, 2)


def _is_ampere(layout: Layout | None) -> bool:
    """True if an NVIDIA GPU has the units that cuDNN's kernel needs."""
    device = jax.devices()[0] if layout is None else layout.mesh.devices.flat[0]
    return float(getattr(device, "compute_capability", 8.0)) >= 8.0


def _is_placed(layout: Layout | None) -> bool:
    """True if it is known which device has what; a Pallas kernel is not partitioned."""
    if layout is None:
        return jax.device_count() == 1
    return layout.mesh.size == 1 or not layout.is_silent(HEADS)


FUSED = {
    "cudnn": FusedKernel("gpu", cudnn_attention, cudnn_refusals, _is_ampere),
    "splash": FusedKernel("tpu", splash_attention, splash_refusals, _is_placed),
}


def choose_kernel(
    query: Array, key: Array, mask: Array | None, wanted: Implementation | None
) -> FusedKernel | None:
    """The kernel wanted, by default the platform's; ``None`` for plain operations.

    It raises the errors of `attention`.
    """
    if wanted not in (None, *get_args(Implementation)):
        raise ValueError(
            f"Unknown attention implementation {wanted!r}. Valid values: "
            f"{list(get_args(Implementation))}, or None for the platform's own."
        )
    if wanted == "xla":
        return None
    layout = active_layout()
    platform = _platform(layout)
    if wanted is None:
        if layout is not None and splits_queries(layout, query):
            return None  # queries would be gathered, and computed by each device
        fitting = (
            kernel
            for kernel in FUSED.values()
            if kernel.platform == platform
            and kernel.is_default(layout)
            and not any(kernel.refusals(query, key, mask))
        )
        return next(fitting, None)
    kernel = FUSED[wanted]
    reasons = [*kernel.refusals(query, key, mask)]
    if kernel.platform != platform:
        needs = f"it runs on {kernel.platform} and the devices are {platform}"
        reasons.insert(0, needs)
    if reasons:
        raise AttentionKernelError(
            f"implementation={wanted!r} cannot compute this attention: "
            f"{'; '.join(reasons)}. Leave implementation=None to use it only where it "
            "fits, or take 'xla'."
        )
    return kernel


def _platform(layout: Layout | None) -> str:
    """The platform of the devices that the code being traced will run on."""
    default = getattr(jax.config, "jax_default_device", None)
    # `jax.devices` last: a mesh of described devices needs no backend that starts.
    device: Any = layout.mesh.devices.flat[0] if layout else default or jax.devices()[0]
    if isinstance(device, str):  # `jax_default_device` may name a platform
        return "gpu" if device == "cuda" else device
    is_rocm = "rocm" in getattr(device.client, "platform_version", "").lower()
    return "rocm" if is_rocm else device.platform


def splits_queries(layout: Layout, query: Array) -> bool:
    """True if an axis splits the sequence, rather than rows and heads alone."""
    names = ("batch", "seq", "heads", "head_dim")
    return bool(dim_axes(layout.activation_spec(query.shape, names), query.ndim)[1])


def per_shard(
    kernel: Callable, query: Array, key: Array, value: Array, mask: Array | None
) -> Array:
    """Calls a kernel for each device's rows and heads of the arrays of `attention`.

    Key heads that the axes of the query's heads do not divide are repeated until they
    do, so that every device has those that its query heads use.
    """
    layout = active_layout()
    context = jax.sharding.get_abstract_mesh()
    manual = set(context.manual_axes)
    free = set() if layout is None else set(layout.mesh.axis_names) - manual
    if layout is None or not free or layout.is_silent(HEADS) or layout.mesh.size == 1:
        return kernel(query, key, value, mask=mask)
    axes = dim_axes(layout.used_spec(query.shape, HEADS), query.ndim)
    rows, _, heads, _ = (tuple(a for a in dim if a in free) for dim in axes)
    size = math.prod(layout.mesh.shape[axis] for axis in heads)
    repeats = size // math.gcd(key.shape[2], size)
    # (batch, keys, kv_heads, head_dim) -> (batch, keys, kv_heads * repeats, head_dim)
    key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    # Dims of size 1 of a mask are the same on all devices.
    dims = zip(() if mask is None else mask.shape, (rows, heads), strict=False)
    mask_spec = to_spec(tuple(a if size > 1 else () for size, a in dims))
    spec = to_spec((rows, (), heads))
    region = jax.shard_map(
        lambda query, key, value, mask: kernel(query, key, value, mask=mask),
        # In a pipeline's stage, which is manual over `pipe`, the region nests.
        mesh=context if manual else layout.mesh,
        in_specs=(spec, spec, spec, mask_spec),
        out_specs=spec,
        # All axes, those that split nothing here too: XLA's partitioner fails on
        # cuDNN's custom call where some are left automatic.
        axis_names=free,
        check_vma=False,
    )
    return region(query, key, value, mask)


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool = False,
    mask: Array | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Softmax of scaled scores, times values [1]; heads may be grouped [2].

    Heads are independent: split over ``tensor``, they need no communication. A fused
    kernel runs on each device's rows and heads, under any strategy, and holds no scores
    [3]; whatever the remat policy, it is computed again for the backward pass unless
    everything is kept.

    Args:
        query: ``(batch, seq, heads, head_dim)``.
        key: ``(batch, keys, kv_heads, head_dim)``; kv_heads divides heads.
        value: Like ``key``.
        causal: Whether position i sees positions up to i only.
        mask: bool ``(batch or 1, heads or 1, seq, keys)``, True where seen.
        implementation: ``cudnn`` on NVIDIA GPUs, ``splash`` on TPUs, or ``xla``: plain
            operations, which the partitioner splits. ``None``: the platform's kernel
            where it takes these arrays, else ``xla``.

    Returns:
        Like ``query``.

    Raises:
        ValueError: If there is no such implementation.
        AttentionKernelError: If the one asked for cannot compute this: another
            platform, dtype or ``head_dim`` (cudnn), sequence length or mask (splash).

    References:
        [1] Vaswani et al., "Attention Is All You Need", 2017, section 3.2,
        https://arxiv.org/abs/1706.03762
        [2] Ainslie et al., "GQA", 2023, https://arxiv.org/abs/2305.13245
        [3] Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135
    """
    kernel = choose_kernel(query, key, mask, implementation)
    if kernel is None:  # plain operations, which the partitioner splits by itself
        out = plain_attention(query, key, value, mask=mask, is_causal=causal)
    else:
        run = partial(kernel.call, is_causal=causal)
        out = per_shard(run, query, key, value, mask)
    return constrain(out, "batch", "seq", "heads", "head_dim")
