"""Scaled dot-product attention, with the fused kernel of the platform if there is one.

For XLA's partitioner, a fused kernel is one opaque operation, for which it would gather
all operands. But heads and rows of the batch are independent. So each device calls the
kernel, or attention in blocks, on its shard (`per_shard`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.collectives.ring import SequenceAxis
from nnx_parallel.errors import AttentionKernelError
from nnx_parallel.layers.attention.context import context_attention, split_sequence
from nnx_parallel.layers.attention.kernels import (
    FUSED,
    HEADS,
    AttentionCall,
    FusedKernel,
    Implementation,
    attention_in_blocks,
    for_each_device,
    plain_attention,
)
from nnx_parallel.mesh import free_axes
from nnx_parallel.sharding.constrain import (
    active_layout,
    active_platform,
    constrain,
)
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.specs import dim_axes

NAMES = ("batch", "seq", "heads", "head_dim")


def choose_kernel(
    call: AttentionCall,
    wanted: Implementation | None,
    split: SequenceAxis | None = None,
) -> FusedKernel | None:
    """Returns the requested or default kernel, or ``None`` for plain operations.

    The function raises the same errors as `attention`.
    """
    if wanted not in (None, *get_args(Implementation)):
        raise ValueError(
            f"Unknown attention implementation {wanted!r}. Valid values: "
            f"{list(get_args(Implementation))}, or None to choose by platform."
        )
    if wanted == "xla":
        return None
    layout = active_layout()
    platform = active_platform()
    if wanted is None:
        if split is None and layout is not None and splits_queries(layout, call.query):
            # A kernel would gather the queries, and every device would compute the
            # attention of all queries.
            return None
        if split is not None and split.exchange != "all_to_all":
            return None
        fitting = (
            kernel
            for kernel in FUSED.values()
            if platform in kernel.platforms
            and kernel.is_default(layout)
            and not any(kernel.refusals(call))
        )
        return next(fitting, None)
    kernel = FUSED[wanted]
    reasons = [*kernel.refusals(call)]
    if split is not None and split.exchange != "all_to_all":
        reasons.insert(
            0,
            f"exchange={split.exchange!r} of a split sequence; it needs complete "
            "sequences, which exchange='all_to_all' provides",
        )
    if platform not in kernel.platforms:
        runs_on = " or ".join(kernel.platforms)
        needs = f"it runs on {runs_on} and the devices are {platform}"
        reasons.insert(0, needs)
    if reasons:
        raise AttentionKernelError(
            f"implementation={wanted!r} cannot compute this attention: "
            f"{'; '.join(reasons)}. Pass implementation='xla', or None to use a kernel "
            "only where it fits."
        )
    return kernel


def splits_queries(layout: Layout, query: Array) -> bool:
    """Returns True if a mesh axis splits the sequence of the queries."""
    return bool(dim_axes(layout.activation_spec(query.shape, NAMES), query.ndim)[1])


def per_shard(
    kernel: Callable[[AttentionCall], Array],
    call: AttentionCall,
    *,
    splits_seq: bool = False,
) -> Array:
    """Runs a kernel on each device, on the device's shard of the rows and heads.

    With ``splits_seq``, queries that the layout splits along the sequence stay split,
    and the kernel also gets their positions. The kernel always gets all keys.
    """
    layout = active_layout()
    names = NAMES if splits_seq else HEADS
    if layout is None or layout.is_silent(names) or layout.mesh.size == 1:
        return kernel(call)
    free = free_axes(layout.mesh)
    if not free:
        return kernel(call)
    spec_of = layout.activation_spec if splits_seq else layout.used_spec
    axes = dim_axes(spec_of(call.query.shape, names), 4)
    if free & set(axes[1]):
        positions = tuple(jnp.arange(n)[None] for n in call.lengths)
        call = replace(call, positions=positions)
    return for_each_device(kernel, call, layout, axes)


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool = False,
    segments: Array | tuple[Array, Array] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Multiplies the softmax of scaled scores by values [1]; heads may be grouped [2].

    Heads are independent, so heads that are split over ``tensor`` need no
    communication. Under any strategy, a fused kernel runs on each device's rows and
    heads. It does not hold the scores in memory [3]. The backward pass runs the
    kernel's forward pass again, unless the remat policy keeps all activations.

    The implementation ``xla`` works in blocks if there are packed documents, windows,
    soft caps, sinks, or more than 2048 x 2048 scores. Like a kernel, it then makes no
    array of the size queries x keys, and the backward pass computes it again. It skips
    blocks in which no query sees a key.

    Args:
        query: ``(batch, seq, heads, head_dim)``.
        key: ``(batch, keys, kv_heads, head_dim)``; kv_heads divides heads.
        value: ``(batch, keys, kv_heads, value_dim)``.
        causal: True if position i sees only positions up to i.
        segments: int ``(batch, seq)``, the id of each token's document. A token sees
            only its document. 0 marks padding, which sees no token and is seen by no
            token; its output is 0. For cross-attention, pass a pair of arrays,
            ``(batch, seq)`` and ``(batch, keys)``.
        window: Number of keys that a query sees to the left of its position, and also
            to the right unless ``causal``. (Mistral's `sliding_window` is greater by
            one, because it also counts the query's position.)
        softcap: Bound of the scores, which become ``softcap * tanh(scores / softcap)``
            [4].
        sinks: ``(heads,)``, an additional logit for each head. It takes part in the
            softmax but has no value, so the weights of the keys become smaller [5].
        scale: Factor of the scores. ``None``: ``head_dim ** -0.5``.
        mask: bool ``(batch or 1, heads or 1, seq, keys)``, True if a query sees a key,
            unless another argument hides the key. In every implementation, a query that
            sees no key has the output 0, and no gradient flows through it.
        implementation: ``cudnn`` on NVIDIA GPUs, ``splash`` on TPUs, ``tokamax`` on
            both, or ``xla`` for plain operations. ``None``: the platform's kernel if it
            supports these arguments, otherwise ``xla``. No implementation lets a query
            see more keys than these arguments allow. A table in the documentation lists
            the arguments that each implementation supports.

    Returns:
        ``(batch, seq, heads, value_dim)``.

    Raises:
        ValueError: If the implementation is unknown, or an argument has a wrong shape,
            dtype or range.
        AttentionKernelError: If the requested implementation cannot compute this call,
            because of the platform, dtype, ``head_dim``, sequence length or an
            argument. The message gives the reason.

    Example:
        >>> x = jnp.ones((1, 6, 2, 8))
        >>> documents = jnp.array([[1, 1, 1, 2, 2, 0]])  # two, and padding
        >>> out = attention(x, x, x, causal=True, segments=documents)
        >>> out[0, :, 0, 0]
        Array([1., 1., 1., 1., 1., 0.], dtype=float32)

    References:
        [1] Vaswani et al., "Attention Is All You Need", 2017, section 3.2,
        https://arxiv.org/abs/1706.03762
        [2] Ainslie et al., "GQA", 2023, https://arxiv.org/abs/2305.13245
        [3] Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135
        [4] Gemma Team, "Gemma 2", 2024, section 2, https://arxiv.org/abs/2408.00118
        [5] Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
        2023, https://arxiv.org/abs/2309.17453
    """
    pair = segments
    if pair is not None and not isinstance(pair, tuple):
        pair = (pair, pair)
    call = AttentionCall(
        query=checkpoint_name(query, "query"),
        key=checkpoint_name(key, "key"),
        value=checkpoint_name(value, "value"),
        mask=mask,
        segments=pair,
        sinks=sinks,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
    )
    check_call(call)
    layout = active_layout()
    split = split_sequence(layout, call)
    kernel = choose_kernel(call, implementation, split)
    if layout is not None and split is not None:
        whole = attention_in_blocks if kernel is None else kernel.call
        out = context_attention(layout, call, whole)
    elif kernel is not None:
        out = per_shard(kernel.call, call)
    elif call.is_plain:  # XLA's partitioner splits plain operations
        out = plain_attention(_with_split_key_heads(call, layout))
    else:
        out = per_shard(attention_in_blocks, call, splits_seq=True)
    return constrain(out, *NAMES)


def _with_split_key_heads(call: AttentionCall, layout: Layout | None) -> AttentionCall:
    """Repeats key heads until they can be split over the same devices as queries.

    XLA's partitioner computes wrong gradients if 2 key heads have 4 shards of query
    heads, and the model splits the sequence over the same devices
    (docs/library-notes.md, "What the partitioner computes wrongly").
    """
    if layout is None or layout.is_silent(HEADS):
        return call
    heads = dim_axes(layout.used_spec(call.query.shape, HEADS), 4)[2]
    free = free_axes(layout.mesh)
    size = math.prod(layout.mesh.shape[axis] for axis in heads if axis in free)
    if call.key.shape[2] % size == 0:
        return call

    def placed(call: AttentionCall, *names: str | None) -> AttentionCall:
        key, value = (constrain(x, *names) for x in (call.key, call.value))
        return replace(call, key=key, value=value)

    # The sequence is gathered first, so that each device then takes its heads.
    gathered = placed(call, "batch", None, None, None)
    return placed(gathered.with_key_heads_for(size), *HEADS)


def check_call(call: AttentionCall) -> None:
    """Checks the arguments of `attention`.

    Raises:
        ValueError: If an argument has a wrong shape, dtype or range.
    """
    query, key, value = (jnp.shape(x) for x in (call.query, call.key, call.value))
    is_met = len(query) == len(key) == len(value) == 4 and key[:3] == value[:3]
    is_met = is_met and query[::3] == key[::3] and query[2] % key[2] == 0
    if not is_met:
        raise ValueError(
            f"Queries, keys and values of an attention have shapes {query}, {key} and "
            f"{value}; they must be (batch, seq, heads, head_dim), (batch, keys, "
            "kv_heads, head_dim) and (batch, keys, kv_heads, value_dim), and kv_heads "
            "must divide heads."
        )
    batch, heads, lengths = query[0], query[2], call.lengths
    if call.segments is not None:
        _check_segments(call.segments, batch, lengths)
    window, softcap = call.window, call.softcap
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(
            f"window is {window!r}; it must be None, for no limit, or an int of at "
            "least 1: the number of keys that a query sees on each side of its "
            "position."
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"softcap is {softcap!r}; it must be None, for no bound, or a number above "
            "0: the bound of the scores."
        )
    if call.sinks is not None and jnp.shape(call.sinks) != (heads,):
        raise ValueError(
            f"sinks has shape {jnp.shape(call.sinks)} for {heads} query heads; it must "
            f"be ({heads},), one number for each head."
        )
    if call.mask is not None:
        dims = zip(jnp.shape(call.mask), (batch, heads, *lengths), strict=False)
        is_met = jnp.ndim(call.mask) == 4 and all(n in (1, most) for n, most in dims)
        if not is_met or call.mask.dtype != bool:
            raise ValueError(
                f"The mask has shape {jnp.shape(call.mask)} and dtype "
                f"{call.mask.dtype}; it must be bool {(batch, heads, *lengths)}, where "
                "any dim may also be 1, to broadcast."
            )


def _check_segments(
    segments: tuple[Array, ...], batch: int, lengths: tuple[int, int]
) -> None:
    shapes = [(batch, length) for length in lengths]
    if len(segments) != 2 or (segments[0] is segments[1] and lengths[0] != lengths[1]):
        found = "one array" if len(segments) == 2 else f"{len(segments)} arrays"
        raise ValueError(
            f"Segments are {found}, for {lengths[0]} queries and {lengths[1]} keys; "
            f"cross-attention needs a pair of arrays, int {shapes[0]} and {shapes[1]}."
        )
    for side, ids, shape in zip(("queries", "keys"), segments, shapes, strict=True):
        if jnp.shape(ids) != shape:
            raise ValueError(
                f"Segments of {side} have shape {jnp.shape(ids)}; they must be int "
                f"{shape}, the id of each token's document."
            )
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                f"Segments of {side} have dtype {ids.dtype}; they must be integers, "
                "the ids of documents, and 0 for padding."
            )


def segment_positions(segments: Array) -> Array:
    """Computes positions that restart in each document of a packed row.

    Args:
        segments: int ``(batch, seq)``, the id of each token's document. The tokens of a
            document must be next to each other.

    Returns:
        int32 ``(batch, seq)``, the number of earlier tokens in the same document.

    Example:
        >>> segment_positions(jnp.array([[1, 1, 1, 2, 2, 0]]))
        Array([[0, 1, 2, 0, 1, 0]], dtype=int32)
    """
    index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def chunk_segments(
    shape: tuple[int, ...], length: int, segments: Array | None = None
) -> Array | None:
    """Computes segment ids of chunks, for attention that stays within a chunk.

    Each row is cut into chunks of ``length`` tokens. In a packed row, each document is
    cut separately, so its chunks do not depend on its place in the row.

    Args:
        shape: The shape of the tokens, ``(batch, seq)``.
        length: Number of tokens in a chunk.
        segments: int ``(batch, seq)``, the id of each token's document, or ``None``.

    Returns:
        int32 ``(batch, seq)``, the id of each token's chunk, and 0 for padding. If each
        row is a single chunk, the result is ``segments``.

    Example:
        >>> documents = jnp.array([[1, 1, 1, 2, 2, 0]])
        >>> chunk_segments((1, 6), 2, documents)
        Array([[1, 1, 2, 3, 3, 0]], dtype=int32)
    """
    if shape[1] <= length:
        return segments
    if segments is None:
        return jnp.broadcast_to(jnp.arange(shape[1]) // length + 1, shape)
    starts = segment_positions(segments) % length == 0
    ids = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    return jnp.where(segments == 0, 0, ids)
