"""Cross-entropy over a vocabulary that may be split over devices.

`cross_entropy` takes logits. `linear_cross_entropy` takes hidden states, so that the
logits of only one chunk of tokens exist at a time. Both compute a token's loss in
`_token_losses`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from nnx_parallel.metrics import Mean
from nnx_parallel.precision import sum_dtype
from nnx_parallel.sharding.constrain import activation_spec, active_layout
from nnx_parallel.sharding.specs import dim_axes


class LabelRange(NamedTuple):
    """The smallest and largest label in one call of a loss, without labels of weight 0.

    Lookups in tables (`Embed`) are observed too. There, the labels are tokens or
    positions, as ``name`` says, and the classes are the rows of the table.
    """

    lowest: int
    highest: int
    num_classes: int
    name: str = "labels"
    is_table: bool = False

    @property
    def is_valid(self) -> bool:
        """True if every label is a class."""
        return self.lowest >= 0 and self.highest < self.num_classes


_observed: ContextVar[list[LabelRange] | None] = ContextVar("labels", default=None)


@contextmanager
def observing_labels() -> Iterator[list[LabelRange]]:
    """Collects the ranges of labels of all losses that are traced and run in a block.

    The ranges help to diagnose a loss that is not finite. Normal steps do not collect
    them, because the collection needs callbacks.
    """
    seen: list[LabelRange] = []
    token = _observed.set(seen)
    try:
        yield seen
        jax.effects_barrier()
    finally:
        _observed.reset(token)


def observe_range(
    labels: Array,
    num_classes: int,
    weights: Array | None = None,
    name: str = "labels",
    *,
    is_table: bool = False,
) -> None:
    """Reports labels, or tokens that are looked up, to `observing_labels`."""
    if (seen := _observed.get()) is None:
        return
    if weights is not None:
        labels = jnp.where(weights == 0, 0, labels)

    def observe(low: Array, high: Array) -> None:
        seen.append(LabelRange(int(low), int(high), num_classes, name, is_table))

    jax.debug.callback(observe, labels.min(), labels.max())


def cross_entropy(
    logits: Array, labels: Array, weights: Array | None = None, *, z_loss: float = 0.0
) -> Mean:
    """Computes the mean negative log-likelihood of integer labels.

    Logits are not gathered along ``vocab``, so logits that are split over ``tensor``
    stay split. Devices exchange three numbers per token: the maximum, the sum of
    exponentials and the label's logit.

    Args:
        logits: ``(*leading, vocab)``, any floating-point dtype. Sums are computed in
            float64 for float64 logits, and in float32 for other logits.
        labels: int ``(*leading)``, from 0 to vocab - 1. Any other label gives NaN,
            unless its weight is 0.
        weights: ``(*leading)``, the weight of each label; 0 excludes a label. The
            default is 1.
        z_loss: Weight of the squared log-normaliser, which keeps logits from drifting
            [1].

    Returns:
        The loss, a `Mean` in nats per label.

    Example:
        >>> loss = cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]))
        >>> print(f"{loss.value:.4f} of {loss.weight:.0f}")
        1.3863 of 2

    References:
        [1] Chowdhery et al., "PaLM", 2022, section 5,
        https://arxiv.org/abs/2204.02311
    """
    logits = logits.astype(sum_dtype(logits))
    labels = labels.astype(jnp.int32)
    observe_range(labels, logits.shape[-1], weights)
    losses, normaliser, _, _ = _token_losses(logits, labels)
    if z_loss:
        losses += z_loss * normaliser**2
    if weights is None:
        return Mean(losses.sum(), float(losses.size))
    weights = weights.astype(losses.dtype)
    return Mean(_weighted_sum(losses, weights), weights.sum())


def _token_losses(logits: Array, labels: Array) -> tuple[Array, Array, Array, Array]:
    """Computes losses of tokens, and the values that their gradient needs.

    Args:
        logits: ``(*leading, vocab)``, in float32 or float64.
        labels: int32 ``(*leading)``.

    Returns:
        Four arrays: the losses in nats, ``(*leading)``, which are NaN for labels that
        are not classes; the log-normalisers, ``(*leading)``; a bool for each label,
        ``(*leading)``, True if the label is a class; and a bool for each logit,
        ``(*leading, vocab)``, True if the logit belongs to the label.
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    # Each label is compared with all classes. An indexed lookup of the label's logit
    # along a split `vocab` would gather all logits on every device.
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_label = classes == labels[..., None]
    losses = normaliser - jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    # A label that is not a class matches no logit. Without this line its loss would
    # silently be the log-normaliser.
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    losses = jnp.where(is_class, losses, jnp.nan)
    return losses, normaliser, is_class, is_label


def _weighted_sum(losses: Array, weights: Array) -> Array:
    # `losses * weights` is not sufficient: labels of weight 0 may be invalid and have
    # the loss NaN, and NaN times 0 is NaN.
    return jnp.where(weights == 0, 0.0, losses * weights).sum()


CHUNK_BYTES = 2**27
"""Minimum of the default size of a chunk's float32 logits on a device: 128 MiB."""

LOGITS = "nnx_parallel.logits"
"""Checkpoint name of the logits of a chunk, which should not equal a name of a user."""


def default_chunk_size(embed: int, vocab: int, splits: int) -> int:
    """Returns the default number of tokens of a chunk on each device.

    Args:
        embed: Width of the hidden states.
        vocab: Number of classes.
        splits: Number of devices that split the classes.
    """
    # Each chunk reads and writes the kernel's gradient of 4 * embed * vocab bytes, so
    # small chunks of a large vocabulary are slow. With chunks of 128 MiB, this traffic
    # takes 5 % of the cycles of Llama 3 8B on v5p, and 11 % of Qwen3 4B on v6e.
    return max(CHUNK_BYTES // (4 * vocab // splits), embed // 4)


def linear_cross_entropy(
    hidden: Array,
    kernel: Array,
    labels: Array,
    weights: Array | None = None,
    *,
    vocab_dim: int = 1,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> Mean:
    """Computes `cross_entropy` of ``hidden @ kernel`` without holding all logits.

    The forward pass computes logits, their softmax and the gradients of ``hidden`` and
    ``kernel``, for one chunk of tokens after the other. The backward pass only scales
    the gradients, so that no product is computed twice [1]. A device holds the logits
    of one chunk of its tokens, and its parts of the two gradients. The gradient of
    ``kernel`` is in float32 while it is summed.

    For any split of the batch, the kernel is gathered once, and its gradient is summed
    over devices once. Logits that are split over ``vocab`` stay split, and devices
    exchange three numbers per token [2]. If one axis splits both ``seq`` and ``vocab``,
    hidden states are gathered chunk by chunk.

    Args:
        hidden: ``(batch, seq, embed)``.
        kernel: ``(embed, vocab)``, or ``(vocab, embed)`` like a tied table.
        labels: int ``(batch, seq)``, as in `cross_entropy`.
        weights: ``(batch, seq)``, as in `cross_entropy`.
        vocab_dim: The index of the dim ``vocab`` of ``kernel``.
        z_loss: Weight of the squared log-normaliser.
        softcap: Bound c of the logits, which become ``c * tanh(logits / c)``.
        chunk_size: Number of tokens of a chunk on each device. By default, the float32
            logits of a chunk take 128 MiB on each device, or a quarter of the size of
            the kernel's float32 gradient if that is larger.

    Returns:
        The loss, a `Mean` in nats per label. It can be differentiated once, in reverse
        mode.

    Raises:
        ValueError: If the shapes do not match, if ``chunk_size`` is below 1, or if
            ``softcap`` is not above 0.

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
    _check_shapes(hidden, kernel, labels, weights, vocab_dim)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be above 0, or None.")
    labels = labels.astype(jnp.int32)
    observe_range(labels, kernel.shape[vocab_dim], weights)
    dtype = sum_dtype(hidden, kernel)
    weight: Array | float = float(labels.size)
    if weights is None:
        weights = jnp.ones(labels.shape, dtype)
    else:
        weights = weights.astype(dtype)
        weight = weights.sum()
    plan = _ChunkPlan(hidden, kernel, vocab_dim % 2, (z_loss, softcap), chunk_size)
    hidden, labels, weights = map(plan.split, (hidden, labels, weights))
    total: Any = _chunked(plan, kernel, (hidden, labels, weights))
    return Mean(total, weight)


Chunk = tuple[Array, Array, Array]
"""Hidden states, labels and weights of a chunk, or of all chunks, stacked."""


class _ChunkPlan:
    """The division of tokens into chunks of ``(rows, parts, tokens)``.

    The mesh divides the batch into rows, and the sequence into parts.
    """

    def __init__(
        self,
        hidden: Array,
        kernel: Array,
        vocab_dim: int,
        shaped: tuple[float, float | None],  # z_loss and softcap
        chunk_size: int | None,
    ) -> None:
        layout = active_layout()
        # If the layout splits none of these dims, a constraint could only prevent XLA
        # from splitting an array.
        if layout is not None and layout.is_silent(("batch", "seq", "embed", "vocab")):
            layout = None
        self.vocab_dim, self.kernel_dtype = vocab_dim, kernel.dtype
        self.sum_dtype = sum_dtype(hidden, kernel)
        (self.z_loss, self.softcap), self.layout = shaped, layout
        self.rows = self.parts = splits = gathered = 1
        self.token_spec = P()  # spec of (rows, parts) when logits are computed
        vocab = kernel.shape[vocab_dim]
        if layout is not None:
            sizes, names = layout.mesh.shape, ("batch", "seq", "embed")
            axes = dim_axes(activation_spec(layout, hidden.shape, names), 3)
            self.rows, self.parts = (math.prod(sizes[a] for a in d) for d in axes[:2])
            logits = layout.activation_spec((self.rows, vocab), ("batch", "vocab"))
            splits = math.prod(sizes[a] for a in dim_axes(logits, 2)[1])
            shape, names = (self.rows, self.parts, vocab), ("batch", "seq", "vocab")
            self.token_spec = P(*layout.activation_spec(shape, names)[:2])
            kept = dim_axes(self.token_spec, 2)[1]
            gathered = self.parts // math.prod(sizes[a] for a in kept)
        tokens = hidden.shape[0] * hidden.shape[1] // (self.rows * self.parts)
        if chunk_size is None:
            embed = kernel.shape[1 - vocab_dim]
            chunk_size = default_chunk_size(embed, vocab, splits)
        # If an axis splits both the sequence and `vocab`, parts are gathered for the
        # product. Each part then contributes a share of a chunk.
        chunk_size = max(chunk_size // gathered, 1)
        self.num_chunks = -(-tokens // chunk_size)
        # `kernel_dims` are the dims of the kernel's gradient while it is summed, as
        # letters of an einsum. The carry of a scan cannot hold sums that still have to
        # be reduced over devices. So if tokens are split when logits are computed, each
        # group of tokens has a separate gradient, along a leading dim `g` or `p`. These
        # gradients are summed over devices only once, after the last chunk.
        spec = self.token_spec if self.num_chunks > 1 else P()
        parts = [n for n, axes in zip("gp", spec, strict=False) if axes]
        self.kernel_dims = "".join(parts) + ("ev" if vocab_dim else "ve")

    def split(self, x: Array) -> Array:
        """Cuts ``(batch, seq, ...)`` into ``(chunks, rows, parts, tokens, ...)``.

        The dim of tokens is padded with 0. Each chunk has tokens of all devices, so
        that no token has to move to another device.
        """
        x = rearrange(x, "(g b) (p s) ... -> g p (b s) ...", g=self.rows, p=self.parts)
        padding = [(0, 0)] * x.ndim
        padding[2] = (0, -x.shape[2] % self.num_chunks)
        x = rearrange(
            jnp.pad(x, padding), "g p (c t) ... -> c g p t ...", c=self.num_chunks
        )
        return self.place(x, None, "batch", "seq", *[None] * (x.ndim - 3))

    def place(self, x: Array, *names: str | None) -> Array:
        """Places an array by its names; rows are ``batch`` and parts are ``seq``."""
        if self.layout is None:
            return x
        spec = self.layout.activation_spec(x.shape, names)
        return jax.lax.with_sharding_constraint(x, self.layout.sharding(spec))

    def gather(self, x: Array) -> Array:
        """Gathers hidden states ``(rows, parts, tokens, embed)`` for the product."""
        if self.layout is None:
            return x
        return jax.lax.with_sharding_constraint(
            x, self.layout.sharding(self.token_spec)
        )

    def scan(self, function: Callable, start: Any, chunks: Chunk) -> tuple[Any, Any]:
        """Calls `jax.lax.scan` over the chunks; calls the function for a single chunk.

        Without a loop, the gradient of the kernel needs no float32 carry.
        """
        if self.num_chunks > 1:
            return jax.lax.scan(function, start, chunks)
        carry, outputs = function(start, jax.tree.map(lambda x: x[0], chunks))
        return carry, jax.tree.map(lambda x: x[None], outputs)

    def losses(self, kernel: Array, given: Chunk) -> tuple[Array, Array]:
        """Computes losses, and the derivatives of their weighted sum by the logits."""
        x, labels, weights = given
        axes = ((3,), (1 - self.vocab_dim,))
        x = self.gather(x)
        logits = jnp.tensordot(x, kernel, axes, preferred_element_type=self.sum_dtype)
        # (rows, parts, tokens, vocab)
        logits = self.place(logits, "batch", "seq", None, "vocab")
        # `plan` finds the size of a chunk by this name.
        logits = checkpoint_name(logits, LOGITS)
        if self.softcap:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        losses, normaliser, is_class, is_label = _token_losses(logits, labels)
        scale = jnp.where(is_class, weights, 0.0)[..., None]
        softmax = jnp.exp(logits - normaliser[..., None])
        # Derivatives with respect to the logits: d(normaliser) = softmax, and
        # d(normaliser**2) = 2 normaliser * softmax.
        slope = jnp.where(is_label, softmax - 1, softmax)
        if self.z_loss:
            losses += self.z_loss * normaliser**2
            slope += 2 * self.z_loss * normaliser[..., None] * softmax
        if self.softcap:  # the derivative of tanh is 1 - tanh**2
            slope *= 1 - (logits / self.softcap) ** 2
        return losses, scale * slope


# The gradient is computed in the forward pass, chunk by chunk, because JAX's gradient
# would keep the logits of every chunk, or compute them again.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(plan: _ChunkPlan, kernel: Array, chunks: Chunk) -> Array:
    """Computes the weighted sum of all losses."""

    def chunk(_: None, given: Chunk) -> tuple[None, Array]:
        return None, plan.losses(kernel, given)[0]

    _, losses = plan.scan(chunk, None, chunks)  # (chunks, rows, parts, tokens)
    return _weighted_sum(losses, chunks[2])


def _chunked_forward(
    plan: _ChunkPlan, kernel: Array, chunks: Chunk
) -> tuple[Array, tuple]:
    """Computes the weighted sum of all losses and its gradients, chunk by chunk."""
    hidden, _, weights = chunks
    dims = plan.kernel_dims

    def chunk(dw: Array, given: Chunk) -> tuple[Array, tuple]:
        losses, slope = plan.losses(kernel, given)
        dlogits = slope.astype(hidden.dtype)  # (rows, parts, tokens, vocab)
        dx = jnp.tensordot(dlogits, kernel, ((3,), (plan.vocab_dim,)))
        dx = plan.place(dx.astype(hidden.dtype), "batch", "seq", None, None)
        x = plan.gather(given[0])  # (rows, parts, tokens, embed)
        more = jnp.einsum(
            f"gpte,gptv->{dims}", x, dlogits, preferred_element_type=plan.sum_dtype
        )
        if plan.num_chunks > 1:  # otherwise this is the final gradient
            names = {"g": "batch", "p": "seq", "v": "vocab", "e": None}
            more = plan.place(dw + more, *(names[dim] for dim in dims))
        return more, (dx, losses)

    sizes = {"g": plan.rows, "p": plan.parts}
    shape = (*(sizes[dim] for dim in dims[:-2]), *kernel.shape)
    dw, (dx, losses) = plan.scan(chunk, jnp.zeros(shape, plan.sum_dtype), chunks)
    # This sum is not scaled yet, and could exceed the range of float16.
    dtype = jnp.float32 if kernel.dtype == jnp.float16 else kernel.dtype
    dw = dw.astype(dtype).sum(range(len(dims) - 2))
    return _weighted_sum(losses, weights), (dx, dw, losses, weights)


def _chunked_backward(plan: _ChunkPlan, saved: tuple, scale: Array) -> tuple:
    dx, dw, losses, weights = saved
    dweights = jnp.where(weights == 0, 0.0, losses * scale)
    dw = (dw * scale).astype(dw.dtype).astype(plan.kernel_dtype)
    dx = (dx * scale).astype(dx.dtype)
    # Only the optimizer uses `dw`. Without this barrier, the compiler would keep the
    # complete gradient in float32 until the end of the backward pass.
    dw, dx = jax.lax.optimization_barrier((dw, dx))
    return dw, (dx, None, dweights)


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _check_shapes(
    hidden: Array, kernel: Array, labels: Array, weights: Array | None, vocab_dim: int
) -> None:
    if kernel.ndim != 2 or vocab_dim not in (-2, -1, 0, 1):
        raise ValueError(
            f"The kernel has shape {kernel.shape} with vocab_dim={vocab_dim}; it must "
            "be (embed, vocab), or (vocab, embed) with vocab_dim=0."
        )
    embed = kernel.shape[1 - vocab_dim % 2]
    if hidden.ndim != 3 or hidden.shape[-1] != embed:
        raise ValueError(
            f"Hidden states have shape {hidden.shape}; for a kernel of shape "
            f"{kernel.shape} with vocab_dim={vocab_dim} they must be (batch, seq, "
            f"{embed})."
        )
    for name, x in (("Labels", labels), ("Weights", weights)):
        if x is not None and x.shape != hidden.shape[:2]:
            raise ValueError(
                f"{name} have shape {x.shape}; for hidden states of shape "
                f"{hidden.shape} they must be {hidden.shape[:2]}."
            )
