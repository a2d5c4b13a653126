"""Implementations of attention, and the reasons why one cannot compute a call.

No implementation lets a query see more keys than the arguments allow.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.errors import AttentionKernelError
from nnx_parallel.layers.attention.blocks import (
    OUTPUT,
    Pattern,
    Tokens,
    blockwise_attention,
)
from nnx_parallel.mesh import free_axes, manual_region
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.specs import to_spec

AT_ONCE = 2048
"""Plain operations hold up to ``AT_ONCE ** 2`` scores of a head at once.

The scores and their softmax are kept for the backward pass. With longer sequences they
would be most of a layer's memory: 262 MiB at 2048 x 2048 with 4 heads, compared with
29 MiB in blocks. On CPU, attention in blocks is also faster from 1024 tokens on. GPUs
and TPUs were not timed.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The arguments of `attention`. In a manual region, arrays are shards."""

    query: Array  # (batch, seq, heads, head_dim)
    key: Array  # (batch, keys, kv_heads, head_dim)
    value: Array  # (batch, keys, kv_heads, value_dim)
    mask: Array | None = None  # bool (batch or 1, heads or 1, seq, keys)
    # Ids of the queries' and keys' documents, int (batch, seq); in self-attention both
    # are the same array.
    segments: tuple[Array, Array] | None = None
    # Positions of queries and of keys, int (1, seq); None if both count from 0.
    positions: tuple[Array, Array] | None = None
    sinks: Array | None = None  # (heads,)
    causal: bool = field(default=False, metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})
    scale: float | None = field(default=None, metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, int]:
        """Returns the number of queries and the number of keys."""
        return self.query.shape[1], self.key.shape[1]

    @property
    def factor(self) -> float:
        """Returns the factor of the scores."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def pattern(self) -> Pattern:
        """Returns the static arguments for `blockwise_attention`."""
        return Pattern(
            scale=self.factor,
            causal=self.causal,
            window=(self.window, self.window),
            softcap=self.softcap,
        )

    @property
    def tokens(self) -> tuple[Tokens, Tokens]:
        """Returns positions and segments for `blockwise_attention`."""
        own, other = self.positions or (jnp.arange(n)[None] for n in self.lengths)
        segments = self.segments or (None, None)
        return Tokens(own, segments[0]), Tokens(other, segments[1])

    @property
    def is_plain(self) -> bool:
        """True if plain operations can compute the call, with all scores at once."""
        queries, keys = self.lengths
        special = (self.segments, self.positions, self.window, self.softcap, self.sinks)
        return (
            queries * keys <= AT_ONCE**2
            and all(given is None for given in special)
            and self.value.shape == self.key.shape
        )

    def with_key_heads_for(self, size: int) -> "AttentionCall":
        """Repeats key heads until ``size``, a number of devices, divides them."""
        key, value = (repeat_heads(x, size) for x in (self.key, self.value))
        return replace(self, key=key, value=value)


def specs_of(
    call: AttentionCall, rows: tuple, seq: tuple, heads: tuple, keys: tuple = ()
) -> AttentionCall:
    """Returns the call with a spec in place of each array.

    The other arguments are the mesh axes of rows, queries, heads and keys.
    """
    # A mask's dims of size 1 are not split.
    sizes = (1, 1, 1, 1) if call.mask is None else call.mask.shape
    dims = zip(sizes, (rows, heads, seq, keys), strict=True)
    of_mask = to_spec(tuple(a if size > 1 else () for size, a in dims))
    specs: dict[str, Any] = {
        "query": to_spec((rows, seq, heads)),
        "key": to_spec((rows, keys, heads)),
        "value": to_spec((rows, keys, heads)),
        "mask": of_mask,
        "segments": (to_spec((rows, seq)), to_spec((rows, keys))),
        "positions": (to_spec(((), seq)), to_spec(((), keys))),
        "sinks": to_spec((heads,)),
    }
    given = {n: spec for n, spec in specs.items() if getattr(call, n) is not None}
    return replace(call, **given)


def for_each_device(
    run: Callable[[AttentionCall], Array],
    call: AttentionCall,
    layout: Layout,
    axes: Sequence[tuple[str, ...]],
    keys: tuple[str, ...] = (),
) -> Array:
    """Calls a function on each device with the device's part of a call of attention.

    If the mesh axes that split the query heads do not divide the number of key heads,
    key heads are repeated until they do. So every device has the key heads that its
    query heads use.

    Args:
        run: A function of a call with shards. It returns
            ``(batch, seq, heads, value_dim)``.
        call: The call with global arrays.
        layout: The active layout. Axes that are automatic become manual for ``run``.
        axes: Mesh axes of each dim of the query. Axes that are already manual are
            ignored.
        keys: Mesh axes of the keys' sequence.
    """
    free = free_axes(layout.mesh)
    rows, seq, heads, _ = (tuple(a for a in dim if a in free) for dim in axes)
    call = call.with_key_heads_for(math.prod(layout.mesh.shape[a] for a in heads))
    specs = specs_of(call, rows, seq, heads, keys)
    # All axes become manual, even those that split no dim here, because XLA's
    # partitioner fails on cuDNN's custom call if an axis is automatic.
    return manual_region(run, layout.mesh, (specs,), specs.query)(call)


def repeat_heads(x: Array, size: int) -> Array:
    """Repeats heads of ``(batch, keys, kv_heads, dim)`` until ``size`` divides them."""
    return jnp.repeat(x, size // math.gcd(x.shape[2], size), axis=2)


Implementation = Literal["xla", "cudnn", "splash", "tokamax"]
"""Implementations of attention.

- ``xla``: plain operations. For short sequences, all scores are in memory at once. Long
  sequences are computed in blocks.
- ``cudnn``: NVIDIA's fused kernel, in float16 and bfloat16.
- ``splash``: a Pallas kernel for TPUs, for sequence lengths that are multiples of 128.
- ``tokamax``: Tokamax's Pallas kernels for GPUs and TPUs, from the extra ``kernels``.
  They run only on request.
"""

HEADS = ("batch", None, "heads", None)
SPLASH_BLOCK = 128
"""For the TPU's kernel, sequence lengths must be multiples of this number."""


def plain_attention(call: AttentionCall, implementation: Any = "xla") -> Array:
    """Calls JAX's attention; ``xla`` uses plain operations and holds all scores."""
    window = None if call.window is None else (call.window, 0)
    call, sees = _let_all_see(call)
    out = jax.nn.dot_product_attention(
        call.query,
        call.key,
        call.value,
        mask=call.mask,
        is_causal=call.causal,
        scale=call.scale,
        local_window_size=window,
        implementation=implementation,
    )
    out = out if sees is None else jnp.where(sees, out, 0)
    return checkpoint_name(out, OUTPUT)


def _let_all_see(call: AttentionCall) -> tuple[AttentionCall, Array | None]:
    """Changes a mask so that each query sees a key, for kernels that need this.

    For a query that sees no key, the softmax of these kernels gives the mean of all
    values, or NaN. So the new mask hides no key from this query, and the caller must
    set its output to 0, which also stops its gradients (docs/library-notes.md,
    "Attention").

    Returns:
        The call, and a bool array ``(batch or 1, seq or 1, heads or 1, 1)``, which is
        False for a query that saw no key. Without a mask, the same call and ``None``.
    """
    if call.mask is None:
        return call, None
    pattern = call.pattern.sees(*call.tokens)
    seen = call.mask if pattern is None else call.mask & pattern[:, None]
    sees = jnp.any(seen, axis=-1, keepdims=True)  # (batch, heads, seq, 1)
    return replace(call, mask=call.mask | ~sees), sees.swapaxes(1, 2)


def attention_in_blocks(call: AttentionCall) -> Array:
    """Computes a call with any arguments, with the scores of one block in memory."""
    return blockwise_attention(
        call.pattern,
        call.query,
        call.key,
        call.value,
        *call.tokens,
        call.sinks,
        call.mask,
    )


class FusedKernel(NamedTuple):
    """A kernel that computes attention in one operation."""

    platforms: tuple[str, ...]
    call: Callable[[AttentionCall], Array]
    # Yields the reasons why the kernel cannot compute a call.
    refusals: Callable[[AttentionCall], Iterator[str]]
    is_default: Callable[[Layout | None], bool]  # True: used without a request


def cudnn_attention(call: AttentionCall) -> Array:
    """Computes attention with NVIDIA's kernel."""
    return plain_attention(call, "cudnn")


def cudnn_refusals(call: AttentionCall) -> Iterator[str]:
    """Yields the reasons why cuDNN's kernel cannot compute a call."""
    # The arrays are checked here and not by tracing the kernel, because JAX can trace
    # it only with NVIDIA's libraries.
    query, key, value = call.query, call.key, call.value
    head_dim = query.shape[-1]
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        yield f"dtype {query.dtype}; it takes float16 or bfloat16"
    if head_dim % 8 or head_dim > 128:
        yield f"head_dim {head_dim}; it takes multiples of 8 up to 128"
    if value.shape != key.shape:
        width = value.shape[-1]
        yield f"values of width {width}; it takes {head_dim}, the keys' width"
    queries, keys = call.lengths
    if call.mask is not None and (queries % 2 or keys % 2):
        lengths = f"{queries} queries and {keys} keys"
        yield f"a mask over {lengths}; with a mask it takes even numbers"
    if call.segments is not None:
        # The kernel has a layout for packed rows, but only JAX's private modules can
        # select it. jax.nn takes lengths of rows (docs/library-notes.md, "Attention").
        yield "segments; it takes rows of one document"
    if call.window is not None and (not call.causal or queries != keys):
        yield f"window={call.window}; it needs causal=True and self-attention"
    if call.window is not None and call.mask is not None:
        yield "a window and a mask; it takes only one of the two"
    yield from _unsupported(call, "softcap", "sinks")


def splash_refusals(call: AttentionCall) -> Iterator[str]:
    """Yields the reasons why the TPU's kernel cannot compute a call."""
    for name, length in zip(("queries", "keys"), call.lengths, strict=True):
        if length % SPLASH_BLOCK:
            yield f"{length} {name}; it takes multiples of {SPLASH_BLOCK}"
    if call.mask is not None:
        yield "an array as mask; it takes causal=True or no mask"
    # With a pair, some query may see no key, and its output would be the mean of all
    # values.
    if call.segments is not None and call.segments[0] is not call.segments[1]:
        yield "a pair of segments; it takes one array, for self-attention"
    yield from _late_queries(call)


def _late_queries(call: AttentionCall) -> Iterator[str]:
    """Yields a reason if the window of some queries may contain no key."""
    queries, keys = call.lengths
    if call.window is not None and queries > keys:
        lengths = f"{queries} queries and {keys} keys"
        yield f"a window over {lengths}; it takes at most {keys} queries"


def _unsupported(call: AttentionCall, *names: str) -> Iterator[str]:
    for name in names:
        if getattr(call, name) is not None:
            yield f"{name}, which it does not support"


def splash_attention(call: AttentionCall, *, interpret: bool = False) -> Array:
    """Computes attention with the TPU's kernel.

    With ``interpret``, JAX interprets the kernel, slowly, on any platform.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    lengths, query = call.lengths, call.query
    # Blocks have up to 512 tokens, and their size divides the sequence. The backward
    # kernels need block sizes too.
    q, kv = (math.gcd(length, 4 * SPLASH_BLOCK) for length in lengths)
    blocks: dict[str, Any] = {f"block_q{of}": q for of in ("", "_dkv", "_dq")}
    blocks |= {f"block_kv{of}": kv for of in ("", "_dkv", "_dq")}
    kernel: Any = splash.make_splash_mha(
        splash.MultiHeadMask([_splash_mask(call)] * query.shape[2]),
        block_sizes=splash.BlockSizes(**blocks),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=call.softcap,
        residual_checkpoint_name=OUTPUT,
        interpret=interpret,
    )
    # The kernel does not scale scores, and takes (heads, seq, head_dim) for one row. So
    # (batch, seq, heads, head_dim) becomes (batch, heads, seq, head_dim) and back.
    query = query * jnp.asarray(call.factor, query.dtype)
    operands = (x.swapaxes(1, 2) for x in (query, call.key, call.value))
    ids = None if call.segments is None else splash.SegmentIds(*call.segments)
    in_axes = (0, 0, 0, None if ids is None else 0, None)
    out = jax.vmap(kernel, in_axes)(*operands, ids, call.sinks).swapaxes(1, 2)
    if call.segments is None:
        return out
    # In the kernel, padding sees padding. Its output is set to 0, so that it sees
    # nothing and has no gradient.
    return jnp.where((call.segments[0] != 0)[:, :, None, None], out, 0)


def _splash_mask(call: AttentionCall) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if call.window is not None:
        window = (call.window, 0 if call.causal else call.window)
        return splash.LocalMask(call.lengths, window, offset=0)
    mask = splash.CausalMask if call.causal else splash.FullMask
    return mask(call.lengths)


def tokamax_attention(
    call: AttentionCall, implementation: Any = ("mosaic", "triton")
) -> Array:
    """Computes attention with the first kernel of Tokamax that supports the operands.

    Tokamax needs Python 3.12. ``implementation`` lists its kernels in the order in
    which it tries them.

    Raises:
        AttentionKernelError: If no kernel supports these operands on this device.
    """
    # Tokamax is imported by name, so that types can be checked without the package.
    tokamax = importlib.import_module("tokamax")

    right = 0 if call.causal else call.window
    window: Any = None if call.window is None else (call.window, right)
    call, sees = _let_all_see(call)
    try:
        out = tokamax.dot_product_attention(
            call.query,
            call.key,
            call.value,
            mask=call.mask,
            scale=call.factor,
            is_causal=call.causal,
            local_window_size=window,
            logits_soft_cap=call.softcap,
            implementation=implementation,
        )
    except (NotImplementedError, ExceptionGroup) as error:
        each = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        reasons = "; ".join(str(reason) for reason in each)
        raise AttentionKernelError(
            f"implementation='tokamax' has no kernel for this attention: {reasons}. "
            "Pass implementation=None, or 'xla'."
        ) from error
    out = out if sees is None else jnp.where(sees, out, 0)
    return checkpoint_name(out, OUTPUT)


def tokamax_refusals(call: AttentionCall) -> Iterator[str]:
    """Yields the reasons why Tokamax's kernels cannot compute a call."""
    if importlib.util.find_spec("tokamax") is None:
        yield (
            "it needs Python 3.12 and the package tokamax, which is not installed "
            "(pip install 'nnx-parallel[kernels]')"
        )
    if call.segments is not None:
        # Tokamax would need a mask array of the size queries x keys, which is too large
        # for packed rows.
        yield "segments; it takes rows of one document"
    yield from _late_queries(call)
    yield from _unsupported(call, "sinks")


def _is_never(_: Layout | None) -> bool:
    """Returns False: no measurement shows that Tokamax is faster than other kernels."""
    return False


def _is_ampere(layout: Layout | None) -> bool:
    """Returns True if an NVIDIA GPU is recent enough for cuDNN's kernel."""
    device = jax.devices()[0] if layout is None else layout.mesh.devices.flat[0]
    return float(getattr(device, "compute_capability", 8.0)) >= 8.0


def _is_placed(layout: Layout | None) -> bool:
    """Returns True if placements are known; XLA cannot partition a Pallas kernel."""
    if layout is None:
        return jax.device_count() == 1
    return layout.mesh.size == 1 or not layout.is_silent(HEADS)


FUSED = {
    "cudnn": FusedKernel(("gpu",), cudnn_attention, cudnn_refusals, _is_ampere),
    "splash": FusedKernel(("tpu",), splash_attention, splash_refusals, _is_placed),
    "tokamax": FusedKernel(
        ("gpu", "tpu"), tokamax_attention, tokamax_refusals, _is_never
    ),
}
