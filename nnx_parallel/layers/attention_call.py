"""The arguments of attention, and how a mesh divides them among its devices."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from nnx_parallel.layers.score_blocks import Pattern, Tokens
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import to_spec

AT_ONCE = 2048
"""Most queries, and most keys, whose scores plain operations hold all at once.

With more of them, the scores and their softmax, which are kept for the backward pass,
are most of a layer's memory: 262 MiB at 2048 x 2048 with 4 heads, and 29 MiB in blocks.
On CPU, blocks are also faster from 1024 on. GPUs and TPUs were not timed.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The arguments of `attention`; in a region of shards, one shard's arguments."""

    query: Array  # (batch, seq, heads, head_dim)
    key: Array  # (batch, keys, kv_heads, head_dim)
    value: Array  # (batch, keys, kv_heads, value_dim)
    mask: Array | None = None  # bool (batch or 1, heads or 1, seq, keys)
    # For queries and for keys, int (batch, seq); self-attention has one array twice.
    segments: tuple[Array, Array] | None = None
    # For queries and for keys, int (1, seq); ``None``: both are in order from 0.
    positions: tuple[Array, Array] | None = None
    sinks: Array | None = None  # (heads,)
    causal: bool = field(default=False, metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})
    scale: float | None = field(default=None, metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of queries and of keys."""
        return self.query.shape[1], self.key.shape[1]

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def pattern(self) -> Pattern:
        """The static arguments, for `blockwise_attention`."""
        return Pattern(
            scale=self.factor,
            causal=self.causal,
            window=(self.window, self.window),
            softcap=self.softcap,
        )

    @property
    def tokens(self) -> tuple[Tokens, Tokens]:
        """Positions and segments of queries and keys, for `blockwise_attention`."""
        own, other = self.positions or (jnp.arange(n)[None] for n in self.lengths)
        segments = self.segments or (None, None)
        return Tokens(own, segments[0]), Tokens(other, segments[1])

    @property
    def is_plain(self) -> bool:
        """True if plain operations can compute it, with all scores at once."""
        queries, keys = self.lengths
        special = (self.segments, self.positions, self.window, self.softcap, self.sinks)
        return (
            queries * keys <= AT_ONCE**2
            and all(given is None for given in special)
            and self.value.shape == self.key.shape
        )

    def with_key_heads_for(self, size: int) -> "AttentionCall":
        """The call with key heads repeated until a number of devices divides them."""
        key, value = (repeat_heads(x, size) for x in (self.key, self.value))
        return replace(self, key=key, value=value)


def specs_of(
    call: AttentionCall, rows: tuple, seq: tuple, heads: tuple, keys: tuple = ()
) -> AttentionCall:
    """The spec of each array of a call: axes of its rows, queries, heads and keys."""
    # A mask's dims of size 1 are the same on all devices.
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
    """Calls a function on each device with its part of a call of attention.

    If the axes of the query's heads do not divide the key heads, these are repeated
    until they do, so that every device has the key heads that its query heads use.

    Args:
        run: The function; it returns ``(batch, seq, heads, value_dim)`` for its part.
        call: The whole call.
        layout: The active layout; axes that are automatic here become manual.
        axes: Axes of each dim of the query; axes that are already manual do not count.
        keys: Axes of the keys' sequence.
    """
    context = jax.sharding.get_abstract_mesh()
    free = free_axes(layout)
    rows, seq, heads, _ = (tuple(a for a in dim if a in free) for dim in axes)
    call = call.with_key_heads_for(math.prod(layout.mesh.shape[a] for a in heads))
    specs = specs_of(call, rows, seq, heads, keys)
    region = jax.shard_map(
        run,
        # In a pipeline's stage, which is manual over `pipe`, the region nests.
        mesh=context if context.manual_axes else layout.mesh,
        in_specs=(specs,),
        out_specs=specs.query,
        # All axes become manual, also the ones that split nothing here: XLA's
        # partitioner fails on cuDNN's custom call if some are left automatic.
        axis_names=free,
        check_vma=False,
    )
    return region(call)


def free_axes(layout: Layout) -> set[str]:
    """Axes of the mesh that are not manual in the present context."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return set(layout.mesh.axis_names) - set(manual)


def repeat_heads(x: Array, size: int) -> Array:
    """Repeats heads of ``(batch, keys, kv_heads, dim)`` until a size divides them."""
    return jnp.repeat(x, size // math.gcd(x.shape[2], size), axis=2)
