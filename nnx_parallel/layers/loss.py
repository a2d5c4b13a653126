"""Cross-entropy over a vocabulary that may be split over devices.

Which labels a loss has seen: asked once it is not finite, to say why.

Cross-entropy from hidden states: logits exist for a chunk of tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from nnx_parallel.metrics import Mean
from nnx_parallel.sharding.constrain import active_layout
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.specs import dim_axes


@dataclass(frozen=True)
class LabelRange:
    """The labels of one call of a loss, those of weight 0 left out.

    Attributes:
        lowest: The least.
        highest: The greatest.
        num_classes: How many classes the logits have.
    """

    lowest: int
    highest: int
    num_classes: int

    @property
    def is_valid(self) -> bool:
        """Whether every label is a class."""
        return self.lowest >= 0 and self.highest < self.num_classes


_observed: ContextVar[list[LabelRange] | None] = ContextVar("labels", default=None)


@contextmanager
def observing_labels() -> Iterator[list[LabelRange]]:
    """Collects the labels of the losses that are traced and run within."""
    seen: list[LabelRange] = []
    token = _observed.set(seen)
    try:
        yield seen
        jax.effects_barrier()
    finally:
        _observed.reset(token)


def observe_labels(
    labels: jax.Array, weights: jax.Array | None, num_classes: int
) -> None:
    """Tells `observing_labels` of a loss's labels; otherwise nothing.

    Args:
        labels: int, of any shape.
        weights: Of the same shape, or ``None``.
        num_classes: How many classes there are.
    """
    seen = _observed.get()
    if seen is None:
        return
    if weights is not None:
        labels = jnp.where(weights == 0, 0, labels)
    jax.debug.callback(
        lambda low, high: seen.append(LabelRange(int(low), int(high), num_classes)),
        labels.min(),
        labels.max(),
    )


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    z_loss: float = 0.0,
) -> Mean:
    """Mean negative log-likelihood of integer labels.

    Written without a gather along ``vocab``, so that logits split over ``tensor``
    stay split: devices exchange one number per token for the maximum, the sum and the
    label's logit.

    Args:
        logits: ``(*leading, vocab)``, any floating-point dtype; summed in float32.
        labels: int ``(*leading)``, from 0 to vocab - 1. Another one gives NaN, unless
            its weight is 0.
        weights: ``(*leading)``; 0 leaves a label out. By default all count 1.
        z_loss: Weight of the squared log-normaliser, which keeps logits from
            drifting [1].

    Returns:
        The `Mean` in nats per label.

    Example:
        >>> loss = cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]))
        >>> print(f"{loss.value:.4f} of {loss.weight:.0f}")
        1.3863 of 2

    References:
        [1] Chowdhery et al., "PaLM", 2022, section 5,
        https://arxiv.org/abs/2204.02311
    """
    logits = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    labels = labels.astype(jnp.int32)
    observe_labels(labels, weights, logits.shape[-1])
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_label = classes == labels[..., None]
    losses = normaliser - jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    losses = jnp.where(is_class, losses, jnp.nan)
    if z_loss:
        losses += z_loss * normaliser**2
    if weights is None:
        return Mean(losses.sum(), jnp.float32(losses.size))
    weights = weights.astype(jnp.float32)
    losses = jnp.where(weights == 0, 0.0, losses * weights)
    return Mean(losses.sum(), weights.sum())


CHUNK_BYTES = 2**27
"""Float32 logits of a chunk on one device, unless the caller says."""


def linear_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    vocab_dim: int = 1,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> Mean:
    """`cross_entropy` of ``hidden @ kernel``, without ever holding all of its logits.

    Logits, their softmax and both gradients are computed for one chunk of tokens after
    the other, forward, so that the backward pass only scales: no product is computed
    twice [1]. A device holds the logits of one chunk of its own tokens, its part of
    the gradient of ``hidden`` and of that of ``kernel``, in float32 while it is added
    to. Whatever splits the batch, the kernel is gathered once and its gradient summed
    once. Logits split over ``vocab`` stay split: devices exchange three numbers per
    token [2]. Hidden states split along ``seq`` are gathered by the chunk.

    Args:
        hidden: ``(batch, seq, embed)``.
        kernel: ``(embed, vocab)``, or ``(vocab, embed)`` as of a tied table.
        labels: int ``(batch, seq)``, from 0 to vocab - 1. Another one gives NaN, unless
            its weight is 0.
        weights: ``(batch, seq)``; 0 leaves a label out. By default all count 1.
        vocab_dim: The dim of ``kernel`` that is ``vocab``.
        z_loss: Weight of the squared log-normaliser.
        chunk_size: Tokens of a chunk on each device; by default as many as have 128 MiB
            of logits there.

    Returns:
        The `Mean` in nats per label. It is differentiable once, in reverse mode.

    Raises:
        ValueError: If shapes do not fit, or ``chunk_size`` is below 1.

    Example:
        >>> hidden, kernel = jnp.zeros((2, 8, 4)), jnp.ones((4, 16))
        >>> labels = jnp.zeros((2, 8), jnp.int32)
        >>> loss = linear_cross_entropy(hidden, kernel, labels, chunk_size=4)
        >>> print(f"{loss.value:.4f} of {loss.weight:.0f}")
        2.7726 of 16

    References:
        [1] Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024,
        section 3.2, https://arxiv.org/abs/2410.10989
        [2] Shoeybi et al., "Megatron-LM", 2019, section 3,
        https://arxiv.org/abs/1909.08053
    """
    _check_shapes(hidden, kernel, labels, weights, vocab_dim, chunk_size)
    labels = labels.astype(jnp.int32)
    observe_labels(labels, weights, kernel.shape[vocab_dim])
    if weights is None:
        weights, weight = jnp.ones(labels.shape, jnp.float32), jnp.float32(labels.size)
    else:
        weights = weights.astype(jnp.float32)
        weight = weights.sum()
    plan = _make_plan(hidden, kernel, vocab_dim % 2, z_loss, chunk_size)
    total: Any = _chunked(
        plan,
        _split_tokens(plan, hidden),
        kernel,
        _split_tokens(plan, labels),
        _split_tokens(plan, weights),
    )
    return Mean(total, weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """How tokens are divided. In a chunk they are ``(rows, parts, tokens)``.

    Attributes:
        rows: Parts of the batch, as many as the mesh makes of it.
        parts: Parts of the sequence, likewise.
        num_chunks: Chunks of the tokens of each part of each row.
        vocab_dim: The dim of the kernel that is ``vocab``.
        kernel_dtype: The kernel's, and so that of its gradient.
        z_loss: Weight of the squared log-normaliser.
        layout: What is active where the loss is called.
    """

    rows: int
    parts: int
    num_chunks: int
    vocab_dim: int
    kernel_dtype: DTypeLike
    z_loss: float
    layout: Layout | None

    def place(self, x: jax.Array, *names: str | None) -> jax.Array:
        """An array by the names of its dims; ``batch`` and ``seq`` are the parts."""
        if self.layout is None:
            return x
        spec = self.layout.activation_spec(x.shape, names)
        return jax.lax.with_sharding_constraint(x, self.layout.sharding(spec))

    def logits(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """``(rows, parts, tokens, vocab)``, float32."""
        axes = ((3,), (1 - self.vocab_dim,))
        y = jnp.tensordot(x, kernel, axes, preferred_element_type=jnp.float32)
        return self.place(y, "batch", "seq", None, "vocab")

    def gather(self, x: jax.Array, num_logits: int) -> jax.Array:
        """Hidden states ``(rows, parts, tokens, embed)`` as the product needs them."""
        if self.layout is None:
            return x
        spec = self.logits_spec(x.shape, num_logits)
        return jax.lax.with_sharding_constraint(x, self.layout.sharding(spec))

    def logits_spec(self, shape: tuple[int, ...], num_logits: int) -> P:
        """How tokens are split beside their logits, where ``vocab`` comes first."""
        assert self.layout is not None
        names = ("batch", "seq", None, "vocab")
        spec = self.layout.activation_spec((*shape[:3], num_logits), names)
        return P(*spec[:3])


def _make_plan(
    hidden: jax.Array,
    kernel: jax.Array,
    vocab_dim: int,
    z_loss: float,
    chunk_size: int | None,
) -> _Plan:
    layout = active_layout()
    if layout is not None and layout.is_silent(("batch", "seq", "embed", "vocab")):
        layout = None
    rows = parts = splits = 1
    vocab = kernel.shape[vocab_dim]
    if layout is not None:
        names = ("batch", "seq", "embed")
        axes = dim_axes(layout.activation_spec(hidden.shape, names), 3)
        rows, parts = (math.prod(layout.mesh.shape[a] for a in d) for d in axes[:2])
        logits = layout.activation_spec((rows, vocab), ("batch", "vocab"))
        splits = math.prod(layout.mesh.shape[a] for a in dim_axes(logits, 2)[1])
    # Of a sequence whose parts are gathered for the product, each gives its share.
    whole = parts if splits > 1 else 1
    tokens = hidden.shape[0] * hidden.shape[1] // (rows * parts)
    if chunk_size is None:
        chunk_size = CHUNK_BYTES // (4 * vocab // splits)
    chunk_size = max(chunk_size // whole, 1)
    return _Plan(
        rows=rows,
        parts=parts,
        num_chunks=-(-tokens // chunk_size),
        vocab_dim=vocab_dim,
        kernel_dtype=kernel.dtype,
        z_loss=z_loss,
        layout=layout,
    )


def _split_tokens(plan: _Plan, x: jax.Array) -> jax.Array:
    """``(batch, seq, ...)`` to ``(chunks, rows, parts, tokens, ...)``, padded with 0.

    No token leaves its device.
    """
    batch, seq, *rest = x.shape
    rows, parts, chunks = plan.rows, plan.parts, plan.num_chunks
    x = x.reshape(rows, batch // rows, parts, seq // parts, *rest)
    x = jnp.moveaxis(x, 2, 1).reshape(rows, parts, -1, *rest)
    size = -(-x.shape[2] // chunks)
    padding = [(0, 0)] * x.ndim
    padding[2] = (0, size * chunks - x.shape[2])
    x = jnp.pad(x, padding).reshape(rows, parts, chunks, size, *rest)
    x = jnp.moveaxis(x, 2, 0)
    return plan.place(x, None, "batch", "seq", None, *[None] * len(rest))


Chunk = tuple[jax.Array, jax.Array, jax.Array]
"""Hidden states, labels and weights of a chunk."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(
    plan: _Plan,
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """The weighted sum of all losses, and nothing else."""

    def chunk(_: None, given: Chunk) -> tuple[None, jax.Array]:
        return None, _losses(plan, kernel, given)[0]

    _, losses = _over_chunks(plan, chunk, None, (hidden, labels, weights))
    return _weighted(losses, weights)


def _forward(
    plan: _Plan,
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, tuple]:
    """The sum and, chunk by chunk, its gradients.

    Each part of the tokens that is split while it meets its logits adds to a gradient
    of the kernel of its own; they are summed over devices once, at the end.
    """
    kept = _kept_parts(plan, hidden.shape[1:], kernel)
    order = "ev" if plan.vocab_dim else "ve"

    def chunk(dw: jax.Array, given: Chunk) -> tuple[jax.Array, tuple]:
        losses, slope = _losses(plan, kernel, given)
        dlogits = slope.astype(hidden.dtype)
        w_axes = ((3,), (plan.vocab_dim,))
        dx = jnp.tensordot(dlogits, kernel, w_axes).astype(hidden.dtype)
        dx = plan.place(dx, "batch", "seq", None, None)
        x = plan.gather(given[0], kernel.shape[plan.vocab_dim])
        more = jnp.einsum(
            f"gpte,gptv->{kept}{order}", x, dlogits, preferred_element_type=jnp.float32
        )
        names = {"g": "batch", "p": "seq", "v": "vocab", "e": None}
        if plan.num_chunks == 1:  # it goes where the gradient is wanted
            return more, (dx, losses)
        return plan.place(dw + more, *(names[n] for n in f"{kept}{order}")), (
            dx,
            losses,
        )

    sizes = {"g": plan.rows, "p": plan.parts}
    shape = (*(sizes[n] for n in kept), *kernel.shape)
    start, given = jnp.zeros(shape, jnp.float32), (hidden, labels, weights)
    dw, (dx, losses) = _over_chunks(plan, chunk, start, given)
    # float16 has no room for a sum that no loss scale has made smaller yet.
    dtype = jnp.float32 if kernel.dtype == jnp.float16 else kernel.dtype
    dw = dw.astype(dtype).sum(range(len(kept)))
    return _weighted(losses, weights), (dx, dw, losses, weights)


def _kept_parts(plan: _Plan, shape: tuple[int, ...], kernel: jax.Array) -> str:
    """Letters of the dims of parts whose gradients of the kernel are kept apart."""
    if plan.layout is None or plan.num_chunks == 1:
        return ""
    spec = plan.logits_spec(shape, kernel.shape[plan.vocab_dim])
    return "".join(n for n, axes in zip("gp", spec, strict=False) if axes)


def _backward(plan: _Plan, kept: tuple, scale: jax.Array) -> tuple:
    dx, dw, losses, weights = kept
    dweights = jnp.where(weights == 0, 0.0, losses * scale)
    dw = _scaled(dw, scale).astype(plan.kernel_dtype)
    return _scaled(dx, scale), dw, None, dweights


_chunked.defvjp(_forward, _backward)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x * scale).astype(x.dtype)


def _over_chunks(
    plan: _Plan, function: Callable, start: Any, chunks: Any
) -> tuple[Any, Any]:
    if plan.num_chunks > 1:
        return jax.lax.scan(function, start, chunks)
    carry, outputs = function(start, jax.tree.map(lambda x: x[0], chunks))
    return carry, jax.tree.map(lambda x: x[None], outputs)


def _weighted(losses: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.where(weights == 0, 0.0, losses * weights).sum()


def _losses(
    plan: _Plan, kernel: jax.Array, given: Chunk
) -> tuple[jax.Array, jax.Array]:
    """Loss of each token, and the gradient of the weighted sum by the logits."""
    x, labels, weights = given
    x = plan.gather(x, kernel.shape[plan.vocab_dim])
    logits = plan.logits(x, kernel)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 3)
    is_label = classes == labels[..., None]
    losses = normaliser - jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    losses = jnp.where(is_class, losses, jnp.nan)
    scale = jnp.where(is_class, weights, 0.0)[..., None]
    softmax = jnp.exp(logits - normaliser[..., None])
    slope = jnp.where(is_label, softmax - 1, softmax)
    if plan.z_loss:
        losses += plan.z_loss * normaliser**2
        slope += 2 * plan.z_loss * normaliser[..., None] * softmax
    return losses, scale * slope


def _check_shapes(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    vocab_dim: int,
    chunk_size: int | None,
) -> None:
    if kernel.ndim != 2 or vocab_dim not in (-2, -1, 0, 1):
        raise ValueError(
            f"A kernel of shape {kernel.shape} with vocab_dim={vocab_dim}; it must be "
            "(embed, vocab), or (vocab, embed) with vocab_dim=0."
        )
    embed = kernel.shape[1 - vocab_dim % 2]
    if hidden.ndim != 3 or hidden.shape[-1] != embed:
        raise ValueError(
            f"Hidden states of shape {hidden.shape} for a kernel of shape "
            f"{kernel.shape} with vocab_dim={vocab_dim}; they must be (batch, seq, "
            f"{embed})."
        )
    for name, x in (("Labels", labels), ("Weights", weights)):
        if x is not None and x.shape != hidden.shape[:2]:
            raise ValueError(
                f"{name} of shape {x.shape} for hidden states of shape {hidden.shape}; "
                f"each token has its own: {hidden.shape[:2]}."
            )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1.")
