"""Scaled dot-product attention over named heads, by the platform's kernel.

A fused kernel is one opaque operation to the partitioner, which would gather its
operands whole. Heads and rows of the batch are independent, so each device calls it on
its own shard (`per_shard`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from nnx_parallel.errors import AttentionKernelError
from nnx_parallel.sharding.constrain import active_layout, constrain
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import dim_axes, to_spec

Implementation = Literal["xla", "cudnn", "splash"]
"""Implementations of attention.

- ``xla``: plain operations; scores of all pairs are held.
- ``cudnn``: NVIDIA's fused kernel, in float16 and bfloat16.
- ``splash``: a Pallas kernel for TPUs [1], for sequences of a multiple of 128.

References:
    [1] Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135
"""

Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]

SPLASH_BLOCK = 128
"""Sequences that the TPU's kernel takes are multiples of it."""


def jax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    causal: bool,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    """JAX's own: plain operations, or NVIDIA's kernel."""
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=causal, implementation=implementation
    )


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    causal: bool,
    interpret: bool = False,
) -> jax.Array:
    """The TPU's kernel; ``interpret`` runs it on any platform, slowly."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    assert mask is None  # `unfit` refuses one
    heads, seqs = query.shape[2], (query.shape[1], key.shape[1])
    one = splash.CausalMask(seqs) if causal else splash.FullMask(seqs)
    # Blocks of up to 512 that divide the sequences; the backward kernels need theirs.
    q, kv = (math.gcd(length, 4 * SPLASH_BLOCK) for length in seqs)
    kernel: Any = splash.make_splash_mha(
        splash.MultiHeadMask([one] * heads),
        block_sizes=splash.BlockSizes(
            block_q=q,
            block_kv=kv,
            block_q_dkv=q,
            block_kv_dkv=kv,
            block_q_dq=q,
            block_kv_dq=kv,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    # The kernel does not scale, and takes (heads, seq, head_dim) of one row: here
    # (batch, seq, heads, head_dim) -> (batch, heads, seq, head_dim) and back.
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    operands = (x.swapaxes(1, 2) for x in (query, key, value))
    return jax.vmap(kernel)(*operands).swapaxes(1, 2)


KERNELS: dict[str, Callable[..., jax.Array]] = {
    "xla": partial(jax_attention, implementation="xla"),
    "cudnn": partial(jax_attention, implementation="cudnn"),
    "splash": splash_attention,
}
HEADS = ("batch", None, "heads", None)
PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}


def choose_implementation(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None,
    wanted: Implementation | None,
) -> Implementation:
    """The implementation wanted, checked; by default the platform's, where it fits.

    Raises:
        ValueError: If there is none of that name.
        AttentionKernelError: If the platform lacks the kernel, or it cannot take the
            arrays.
    """
    if wanted not in (None, *get_args(Implementation)):
        raise ValueError(
            f"Unknown attention implementation {wanted!r}. Valid values: "
            f"{list(get_args(Implementation))}, or None for the platform's own."
        )
    layout = active_layout()
    platform = _platform(layout)
    if wanted is None:
        if layout is not None and splits_queries(layout, query):
            return "xla"  # queries would be gathered, and computed by each device
        if platform == "gpu" and not unfit("cudnn", query, key, mask):
            return "cudnn" if _is_ampere(layout) else "xla"
        fits = platform == "tpu" and not unfit("splash", query, key, mask)
        return "splash" if fits and _is_placed(layout) else "xla"
    if wanted == "xla":
        return wanted
    reasons = unfit(wanted, query, key, mask)
    if platform != PLATFORMS[wanted]:
        reasons.insert(
            0, f"it runs on {PLATFORMS[wanted]} and the devices are {platform}"
        )
    if reasons:
        raise AttentionKernelError(
            f"implementation={wanted!r} cannot compute this attention: "
            f"{'; '.join(reasons)}. Leave implementation=None to use it only where it "
            "fits, or take 'xla'."
        )
    return wanted


def _platform(layout: Layout | None) -> str:
    """The platform of the devices that the code being traced will run on."""
    if layout is not None:
        device: Any = layout.mesh.devices.flat[0]
    else:
        # Asked only here: a mesh of described devices needs no backend that starts.
        default = getattr(jax.config, "jax_default_device", None)
        device = default or jax.devices()[0]
    if isinstance(device, str):  # `jax_default_device` may name a platform
        return "gpu" if device == "cuda" else device
    is_rocm = "rocm" in getattr(device.client, "platform_version", "").lower()
    return "rocm" if is_rocm else device.platform


def splits_queries(layout: Layout, query: jax.Array) -> bool:
    """True if an axis splits the sequence, rather than rows and heads alone."""
    names = ("batch", "seq", "heads", "head_dim")
    return bool(dim_axes(layout.activation_spec(query.shape, names), query.ndim)[1])


def _is_ampere(layout: Layout | None) -> bool:
    """True if an NVIDIA GPU has the units that cuDNN's kernel needs."""
    device = jax.devices()[0] if layout is None else layout.mesh.devices.flat[0]
    return float(getattr(device, "compute_capability", 8.0)) >= 8.0


def _is_placed(layout: Layout | None) -> bool:
    """True if it is known which device has what; a Pallas kernel is not partitioned."""
    if layout is None:
        return jax.device_count() == 1
    return layout.mesh.size == 1 or not layout.is_silent(HEADS)


def unfit(
    implementation: str, query: jax.Array, key: jax.Array, mask: jax.Array | None
) -> list[str]:
    """Reasons why a fused kernel cannot take these arrays; empty if it can."""
    head_dim = query.shape[-1]
    reasons = []
    # Without NVIDIA's libraries JAX cannot even trace cuDNN's kernel: asked of the
    # arrays, not tried.
    if implementation == "cudnn":
        if query.dtype not in (jnp.float16, jnp.bfloat16):
            reasons.append(f"dtype {query.dtype}; it takes float16 or bfloat16")
        if head_dim % 8 or head_dim > 128:
            reasons.append(f"head_dim {head_dim}; it takes multiples of 8 up to 128")
        if mask is not None and (query.shape[1] % 2 or key.shape[1] % 2):
            lengths = f"{query.shape[1]} queries and {key.shape[1]} keys"
            reasons.append(f"a mask over {lengths}; with one it takes even numbers")
        return reasons
    for name, length in (("queries", query.shape[1]), ("keys", key.shape[1])):
        if length % SPLASH_BLOCK:
            reasons.append(f"{length} {name}; it takes multiples of {SPLASH_BLOCK}")
    if mask is not None:
        reasons.append("an array as mask; it takes causal=True or none")
    return reasons


def per_shard(
    kernel: Kernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
) -> jax.Array:
    """Calls a kernel for each device's rows and heads.

    Key heads that the axes of the query's heads do not divide are repeated until they
    do, so that every device has those that its query heads use.

    Args:
        kernel: ``(query, key, value, mask) -> output`` of arrays on one device.
        query: ``(batch, seq, heads, head_dim)``.
        key: ``(batch, keys, kv_heads, head_dim)``.
        value: Like ``key``.
        mask: bool ``(batch or 1, heads or 1, seq, keys)``, or ``None``.

    Returns:
        ``(batch, seq, heads, head_dim)``.
    """
    layout = active_layout()
    context = jax.sharding.get_abstract_mesh()
    manual = frozenset(context.manual_axes)
    if layout is None or layout.is_silent(HEADS):
        return kernel(query, key, value, mask)
    free = set(layout.mesh.axis_names) - manual
    if not free or layout.mesh.size == 1:
        return kernel(query, key, value, mask)
    axes = dim_axes(layout.used_spec(query.shape, HEADS), query.ndim)
    rows, _, heads, _ = (tuple(a for a in dim if a in free) for dim in axes)
    size = math.prod(layout.mesh.shape[axis] for axis in heads)
    repeats = size // math.gcd(key.shape[2], size)
    # (batch, keys, kv_heads, head_dim) -> (batch, keys, kv_heads * repeats, head_dim)
    key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    masks, mask_specs = [], []
    if mask is not None:  # its dims of size 1 are the same on all devices
        dims = zip(mask.shape, (rows, heads), strict=False)
        masks = [mask]
        mask_specs = [to_spec(tuple(a if size > 1 else () for size, a in dims))]
    spec = to_spec((rows, (), heads))
    region = jax.shard_map(
        lambda query, key, value, *masks: kernel(query, key, value, *masks or (None,)),
        # In a pipeline's stage, which is manual over `pipe`, the region nests.
        mesh=context if manual else layout.mesh,
        in_specs=(spec, spec, spec, *mask_specs),
        out_specs=spec,
        # All axes, those that split nothing here too: XLA's partitioner fails on
        # cuDNN's custom call where some are left automatic.
        axis_names=free,
        check_vma=False,
    )
    return region(query, key, value, *masks)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    mask: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
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
        ``(batch, seq, heads, head_dim)``.

    Raises:
        ValueError: If there is no such implementation.
        AttentionKernelError: If the one asked for cannot compute this: another
            platform, dtype or ``head_dim`` (cudnn), or sequence length or mask
            (splash).

    References:
        [1] Vaswani et al., "Attention Is All You Need", 2017, section 3.2,
        https://arxiv.org/abs/1706.03762
        [2] Ainslie et al., "GQA", 2023, https://arxiv.org/abs/2305.13245
        [3] Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135
    """
    chosen = choose_implementation(query, key, mask, implementation)
    kernel = partial(KERNELS[chosen], causal=causal)
    if chosen == "xla":  # plain operations, which the partitioner splits by itself
        out = kernel(query, key, value, mask)
    else:
        out = per_shard(kernel, query, key, value, mask)
    return constrain(out, "batch", "seq", "heads", "head_dim")
