"""Mixture of experts: a router sends each token to a few of many MLPs [1].

The computation is defined for one device. Each expert has one row for each token that
chose it, and the products of all experts run at once (`layers.experts.dispatch`). No
token is dropped, unless the mixture has a capacity. If a strategy splits the experts,
the strategy also decides how tokens reach them. The results are the same as on one
device.

References:
    [1] Shazeer et al., "Outrageously Large Neural Networks", 2017, section 2,
    https://arxiv.org/abs/1701.06538
"""

import math
from functools import partial
from typing import Any, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec as P

from nnx_parallel.collectives.ring import TokenExchange
from nnx_parallel.errors import (
    EightBitError,
    ExpertsError,
    kind_of,
    suggests_names,
    warn_user,
)
from nnx_parallel.layers.activations import ACTIVATIONS, Activate, Activation
from nnx_parallel.layers.attention.dot_product import segment_positions
from nnx_parallel.layers.dense import Dense, name_products, named, project
from nnx_parallel.layers.eight_bit import Kernel, Quantised
from nnx_parallel.layers.experts.dispatch import (
    Biases,
    ExpertMLPs,
    InEightBits,
    Kernels,
    Rounded,
    Routed,
    TokenAxes,
    gathered,
    sort_by_expert,
)
from nnx_parallel.layers.experts.ragged import ragged
from nnx_parallel.layers.experts.routing import (
    Experts,
    is_equal,
    is_int,
    normalised,
    require,
)
from nnx_parallel.mesh import free_axes, manual_region
from nnx_parallel.metrics import Mean
from nnx_parallel.precision import EightBit, sum_dtype
from nnx_parallel.sharding.constrain import activation_spec, active_layout, constrain
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.specs import dim_axes, to_spec

INTO, OUT_OF = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")


class RouterState(nnx.Variable):
    """Statistics and bias of a router, which are not trained by gradients."""


class RouterBias(RouterState):
    """The bias of each expert, if it is one of the model's weights in files."""


class Load(NamedTuple):
    """The number of tokens that chose each expert. Padding chooses no expert.

    Attributes:
        counts: int ``(batch, experts)``, the number in each row.
        of_documents: int ``(batch, seq, experts)``, the number in each token's
            document. ``None`` if rows have no segments.
        dropped: int ``(batch,)``, the number of choices above the capacity of a
            document. ``None`` without a capacity or without segments.
    """

    counts: Array
    of_documents: Array | None = None
    dropped: Array | None = None


@suggests_names
class MoE(nnx.Module):
    """A mixture of experts, which takes the place of an MLP.

    In training mode, the layer counts the tokens of each expert. Once per step, after
    all microbatches, the Trainer calls `finish_step`. A custom training loop must call
    it too.

    Args:
        embed_dim: Width of input and output.
        experts: The mixture.
        rngs: Keys for the parameters.
        activation: The nonlinearity of the experts.
        kernel_init: Initializer of the router and of the experts' first kernels. The
            default is a normal with variance 1 / fan-in.
        out_init: Initializer of the experts' last kernels, with the same default.

    Raises:
        ExpertsError: If an argument has a wrong type, or the width or the activation is
            invalid.

    Example:
        >>> mixture = Experts(num_experts=4, top_k=2, mlp_dim=16)
        >>> moe = MoE(8, mixture, rngs=nnx.Rngs(0))
        >>> y, losses = moe(jnp.ones((2, 6, 8)))
        >>> y.shape, losses.shape, moe.counts[...].sum().item()
        ((2, 6, 8), (2, 6), 24)
    """

    recipe: EightBit | None = None  # set by `set_recipe`

    def __init__(
        self,
        embed_dim: int,
        experts: Experts,
        *,
        rngs: nnx.Rngs,
        activation: Activation = "swiglu",
        kernel_init: Initializer | None = None,
        out_init: Initializer | None = None,
    ) -> None:
        _check_arguments(embed_dim, experts, rngs, activation, kernel_init, out_init)
        num, width = experts.num_experts, experts.mlp_dim
        self.experts = experts
        self.deterministic = False
        normal = nnx.initializers.normal
        into = kernel_init or normal(embed_dim**-0.5)
        out = out_init or normal(width**-0.5)
        # The dim of experts has no name, so that the router is replicated.
        make = named(into, "embed", None)
        self.router = nnx.Param(make(rngs.params(), (embed_dim, num), jnp.float32))

        def kernel(init: Initializer, names: tuple[str, str, str]) -> nnx.Param:
            sizes = {"expert": num, "embed": embed_dim, "mlp": width}
            shape = tuple(sizes[name] for name in names)
            values = named(init, *names)(rngs.params(), shape, jnp.float32)
            return nnx.Param(values, num_in_dims=1)

        self.up = kernel(into, INTO)
        is_gated = activation != "gelu"
        self.gate = kernel(into, INTO) if is_gated else nnx.data(None)
        self.down = kernel(out, OUT_OF)
        self.activate = ACTIVATIONS[activation]
        self._add_biases()
        self.shared = nnx.data(None)
        if experts.shared_dim:
            self.shared = SharedExpert(
                embed_dim,
                experts.shared_dim,
                rngs=rngs,
                is_gated=is_gated,
                activate=self.activate,
                kernel_init=into,
                out_init=out_init or normal(experts.shared_dim**-0.5),
            )
        self.shared_gate = nnx.data(None)
        if experts.shared_gate:
            gate = named(_of_vector(into), "embed")
            self.shared_gate = nnx.Param(gate(rngs.params(), (embed_dim,), jnp.float32))
        kind = RouterBias if experts.choice_bias else RouterState
        self.bias = kind(jnp.zeros(num)) if experts.has_bias else nnx.data(None)
        self.counts = RouterState(jnp.zeros(num, jnp.int32))
        self.dropped = RouterState(jnp.int32(0))
        self.entropy = RouterState(jnp.float32(0))  # summed over tokens

    def _add_biases(self) -> None:
        """Sets the biases of the router, ``(experts,)``, and of the kernels."""

        def make(kernel: Any, *names: str | None) -> Any:
            if kernel is None or not self.experts.use_bias:
                return nnx.data(None)
            shape = (*kernel.shape[:-2], kernel.shape[-1])
            zeros = named(nnx.initializers.zeros_init(), *names)
            return nnx.Param(zeros(jax.random.key(0), shape, jnp.float32))

        self.router_bias = make(self.router, None)
        self.up_bias = make(self.up, "expert", "mlp")
        self.gate_bias = make(self.gate, "expert", "mlp")
        self.down_bias = make(self.down, "expert", "embed")

    def __call__(
        self,
        x: Array,
        *,
        counts_tokens: bool = True,
        segments: Array | None = None,
    ) -> tuple[Array, Array]:
        """Computes outputs, and each token's part of the balance loss and the z-loss.

        Args:
            x: ``(batch, seq, embed)``.
            counts_tokens: True if these tokens count for the bias and the metrics.
            segments: int ``(batch, seq)``, the id of each token's document. For balance
                and capacity, each document is treated like a sequence. 0 marks padding,
                which goes to no expert and is not counted.

        Returns:
            The outputs, with the shape of x, and the losses, float32 ``(batch, seq)``,
            which are 0 for padding. Average the losses over all tokens that are not
            padding, and add this mean to the model's loss.

        Raises:
            ExpertsError: If x or segments have a wrong shape.
        """
        mixture, embed = self.experts, self.router.shape[0]
        shape = getattr(x, "shape", None)
        if shape is None or len(shape) != 3 or shape[2] != embed:
            found = kind_of(x) if shape is None else f"x of shape {shape}"
            raise ExpertsError(
                f"MoE({embed}) got {found}; it must be (batch, seq, {embed}), because "
                "capacities and losses are computed per sequence."
            )
        if segments is not None:
            _check_segments(segments, shape[:2])
        # The product is in float32. Otherwise rounding would decide between experts
        # with almost equal scores. Under a `Precision`, the kernel may have another
        # dtype.
        dtype = sum_dtype(x)
        logits = x.astype(dtype) @ self.router[...].astype(dtype)
        if self.router_bias is not None:
            bias = self.router_bias[...].astype(dtype)
            logits += jnp.broadcast_to(bias, logits.shape)
        logits = constrain(logits, "batch", "seq", None)
        is_softmax = mixture.scores == "softmax"
        scores = jax.nn.softmax(logits) if is_softmax else jax.nn.sigmoid(logits)
        hidden = None if self.shared is None else self.shared.hidden(x)
        y, load = self._run(x, scores, hidden, segments)
        if counts_tokens and not self.deterministic:
            self._observe(scores, load, segments)
        if self.shared is not None and hidden is not None:
            out = self.shared.down(hidden)
            if self.shared_gate is not None:
                logit = x.astype(dtype) @ self.shared_gate[...].astype(dtype)
                out *= jax.nn.sigmoid(logit)[..., None].astype(out.dtype)
            y = y + out
        losses = self._losses(logits, scores, load)
        if segments is not None:
            losses = jnp.where(segments != 0, losses, 0)
        return constrain(y, "batch", "seq", "embed"), losses

    def finish_step(self) -> dict[str, Array | Mean]:
        """Updates the bias from the tokens of a step, and resets the counts.

        The method also works for stacked layers. Their arrays have a leading dim.

        Returns:
            A dict of metrics. ``expert_load`` is a scalar: the number of tokens of the
            busiest expert divided by the mean over experts, in the layer where this
            ratio is largest. ``router_entropy`` is a `Mean` over layers, in nats.
            ``dropped_share`` is the share of choices that were dropped; it is present
            only with a capacity. ``expert_loads``, ``router_entropies`` and
            ``dropped_shares`` are arrays ``(layers,)`` with the value of each layer.
        """
        counts = self.counts[...]  # (..., experts)
        num, total = counts.shape[-1], jnp.sum(counts, axis=-1, keepdims=True)
        if self.bias is not None and self.experts.bias_rate:
            # Integers are compared, because floats would be rounded. The total is
            # divided by `num`, because count * num may exceed 32 bits.
            mean, rest = total // num, total % num
            below = (counts < mean) | ((counts == mean) & (rest > 0))
            sign = (counts > mean).astype(jnp.float32) - below
            self.bias.set_value(self.bias[...] - self.experts.bias_rate * sign)
        tokens = jnp.maximum(total[..., 0], 1).astype(jnp.float32)
        loads = jnp.max(counts, axis=-1).astype(jnp.float32) * num / tokens
        entropies = self.entropy[...] * self.experts.top_k / tokens
        of_layers = {"expert_loads": loads, "router_entropies": entropies}
        found: dict[str, Array | Mean] = {
            "expert_load": jnp.max(loads),
            "router_entropy": Mean(jnp.sum(entropies), jnp.sum(total > 0)),
        }
        if self.experts.capacity_factor is not None:
            dropped = self.dropped[...].astype(jnp.float32)
            found["dropped_share"] = Mean(jnp.sum(dropped), jnp.sum(total))
            of_layers["dropped_shares"] = dropped / tokens
        # A single layer has no dim of layers.
        found |= {name: x.reshape(-1) for name, x in of_layers.items()}
        for state in (self.counts, self.dropped, self.entropy):
            state.set_value(jnp.zeros_like(state[...]))
        return found

    def describe_exchange(self, layout: Layout) -> str:
        """Describes how tokens reach the experts; "" if no strategy splits experts."""
        if (claim := layout.claims.experts) is None:
            return ""
        how, why = claim.choose(layout.mesh, self.experts.top_k)
        return f"over {claim.axis}={layout.mesh.shape[claim.axis]} by {how!r} ({why})"

    def _biases(self) -> Biases | None:
        if self.up_bias is None or self.down_bias is None:
            return None
        gate = None if self.gate_bias is None else self.gate_bias[...]
        return Biases(self.up_bias[...], gate, self.down_bias[...])

    def _observe(self, scores: Array, load: Load, segments: Array | None) -> None:
        shares = jax.lax.stop_gradient(normalised(scores))
        terms = shares * jnp.log(jnp.maximum(shares, 1e-30))
        if segments is not None:
            terms = jnp.where((segments != 0)[..., None], terms, 0)
        entropy = -jnp.sum(terms)
        self.entropy.set_value(self.entropy[...] + entropy)
        self.counts.set_value(self.counts[...] + jnp.sum(load.counts, axis=0))
        if (capacity := self.experts.capacity(scores.shape[1])) is not None:
            above = load.dropped
            if above is None:
                above = jnp.maximum(load.counts - capacity, 0)
            self.dropped.set_value(self.dropped[...] + jnp.sum(above))

    def _losses(self, logits: Array, scores: Array, load: Load) -> Array:
        mixture = self.experts
        losses = jnp.zeros(logits.shape[:2], jnp.float32)
        if mixture.balance_loss:
            counts = load.counts  # (batch, experts)
            if mixture.balance_over == "batch":
                counts = jnp.sum(counts, axis=0, keepdims=True)
            elif load.of_documents is not None:
                counts = load.of_documents  # (batch, seq, experts)
            total = jnp.sum(counts, axis=-1, keepdims=True)
            if load.of_documents is not None:  # the total of padding is 0
                total = jnp.maximum(total, 1)
            # If all experts have equally many tokens, each share is 1. Shares are
            # floats, because count * num_experts may exceed 32 bits.
            share = counts.astype(jnp.float32) * mixture.num_experts / total
            share = share[:, None] if share.ndim == 2 else share
            found = jnp.sum(share * normalised(scores), axis=-1)
            losses += mixture.balance_loss * found
        if mixture.z_loss:
            losses += mixture.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
        return constrain(losses, "batch", "seq")

    def _run(
        self,
        x: Array,
        scores: Array,
        alongside: Array | None,
        segments: Array | None,
    ) -> tuple[Array, Load]:
        """Computes outputs of the routed experts, and the load of each expert.

        ``alongside``, ``(batch, seq, mlp)``, is the result of another computation,
        which can hide an exchange of rows.
        """
        bias = None if self.bias is None else self.bias[...]
        gate = None if self.gate is None else self.gate[...]
        kernels = Kernels(self.up[...], gate, self.down[...], self._biases())
        run = partial(
            _run_shard,
            self.experts,
            self.activate,
            self.recipe,
            x.shape[1],
        )
        rounded = self.recipe and Rounded.of(kernels, self.recipe)
        layout = active_layout()
        free = free_axes(layout.mesh) if layout else set()
        if layout is None or all(layout.mesh.shape[a] == 1 for a in free):
            given = kernels, rounded, None, segments
            return run(TokenAxes(), None, x, scores, bias, *given)
        tokens, of_kernels, axes = _specs_of(layout, x, kernels, free)
        exchange = _exchange_of(layout, axes, self.experts)
        if exchange != "ragged":
            alongside = None
        of_rows: Any = P(*tokens[:1])
        of_tokens: Any = tokens
        of_alongside = _spec_of(layout, alongside, free)
        of_rounded = None
        if rounded and self.recipe:
            shards = math.prod(layout.mesh.shape[a] for a in axes.mlp)
            _check_blocks(self.recipe, self.experts.mlp_dim, axes.mlp, shards)
            of_rounded = _specs_in_8_bits(of_kernels, rounded)
        region = manual_region(
            partial(run, axes, exchange),
            layout.mesh,
            (
                *(tokens, tokens, P(), of_kernels),
                *(of_rounded, of_alongside, tokens),
            ),
            (tokens, Load(of_rows, of_tokens, of_rows)),
        )
        return region(x, scores, bias, kernels, rounded, alongside, segments)


def _of_vector(init: Initializer) -> Any:
    """Returns an initializer of vectors, which draws them as one column."""
    return lambda key, shape, dtype: init(key, (*shape, 1), dtype)[:, 0]


def _check_arguments(
    embed_dim: object,
    experts: object,
    rngs: object,
    activation: object,
    kernel_init: object,
    out_init: object,
) -> None:
    """Checks the arguments of `MoE`; an error names the argument that is invalid."""
    is_width = is_int(embed_dim) and embed_dim >= 1
    require("MoE.embed_dim", embed_dim, is_width, "an int of at least 1")
    mixture = "an Experts, such as Experts(num_experts=8, top_k=2, mlp_dim=64)"
    require("MoE.experts", experts, isinstance(experts, Experts), mixture)
    keys = "an nnx.Rngs, such as nnx.Rngs(0)"
    require("MoE.rngs", rngs, isinstance(rngs, nnx.Rngs), keys)
    valid = get_args(Activation)
    require("MoE.activation", activation, activation in valid, f"one of {valid}")
    function = "an initializer, such as nnx.initializers.normal(0.02), or None"
    for name, init in (("kernel_init", kernel_init), ("out_init", out_init)):
        require(f"MoE.{name}", init, init is None or callable(init), function)


def _check_segments(segments: object, shape: tuple[int, ...]) -> None:
    """Raises an error unless segments have one integer for each token."""
    found, dtype = getattr(segments, "shape", None), getattr(segments, "dtype", None)
    if found != shape or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        is_array = found is not None and dtype is not None
        shown = f"{dtype} {found}" if is_array else kind_of(segments)
        raise ExpertsError(
            f"MoE got segments {shown}; they must be int {shape}, the id of each "
            "token's document, and 0 for padding."
        )


def warn_of_lost_losses(moe: MoE) -> None:
    """Warns in a training step that the loss lacks the mixture's own losses."""
    # Outside of a step, the caller may need only the logits.
    if active_layout() is not None and not moe.deterministic:
        warn_user(
            "The loss does not include the losses of the experts, "
            "Experts(balance_loss, z_loss), because it is computed from logits. Use "
            "next_token_loss, or add the mean of the losses that "
            "GPT.hidden_and_losses returns, or set both weights to 0."
        )


def _specs_of(
    layout: Layout, x: Array, kernels: Kernels, free: set[str]
) -> tuple[P, Any, TokenAxes]:
    """Returns the specs of tokens and of kernels over the free axes, and the axes."""
    axes_of = partial(_free_axes, free)
    # Neither tokens nor kernels are split along `embed`.
    batch, seq, _ = axes_of(activation_spec(layout, x.shape, ("batch", "seq", "embed")))
    expert, _, mlp = axes_of(layout.used_spec(kernels.up.shape, INTO))
    into, out_of = to_spec((expert, (), mlp)), to_spec((expert, mlp, ()))
    gate: Any = None if kernels.gate is None else into
    specs: Any = [into, gate, out_of]
    if kernels.biases is not None:
        of_hidden: Any = to_spec((expert, mlp))
        of_gate: Any = None if gate is None else of_hidden
        specs.append(Biases(of_hidden, of_gate, cast(Any, to_spec((expert,)))))
    axes = TokenAxes(batch=batch, seq=seq, expert=expert, mlp=mlp)
    return to_spec((batch, seq)), Kernels(*specs), axes


def _check_blocks(
    recipe: EightBit, mlp_dim: int, axes: tuple[str, ...], shards: int
) -> None:
    """Raises an error if a device would have only a part of a block.

    Each device rounds its rows by itself, so it needs complete blocks.
    """
    if recipe.block and mlp_dim % (recipe.block * shards):
        raise EightBitError(
            f"The mesh axes {list(axes)} split the {mlp_dim} elements of `mlp` of the "
            f"experts `{recipe.layers}` into {shards} shards, and so split blocks of "
            f"{recipe.block} elements, which share a scale. mlp_dim must be a multiple "
            f"of {recipe.block * shards}; or leave these experts out of layers=."
        )


def _specs_in_8_bits(kernels: Any, rounded: Rounded) -> Any:
    """Returns the specs of kernels in 8 bits, given the specs of the kernels."""

    def of_one(spec: P | None, kernel: Kernel | None) -> Any:
        if spec is None or kernel is None:
            return None
        in_blocks = jnp.issubdtype(kernel.forward.scale.dtype, jnp.unsignedinteger)
        expert, _, out = dim_axes(spec, 3)
        of_scale = spec if in_blocks else to_spec((expert, (), out))
        both = Quantised(cast(Any, spec), cast(Any, of_scale))
        return Kernel(both, kernel.backward and both)

    return Rounded(*map(of_one, (kernels.up, kernels.gate, kernels.down), rounded))


def _spec_of(layout: Layout, hidden: Array | None, free: set[str]) -> P:
    """Returns the spec of an MLP's hidden values over the free axes."""
    if hidden is None:
        return P()
    spec = activation_spec(layout, hidden.shape, ("batch", "seq", "mlp"))
    return to_spec(_free_axes(free, spec))


def _free_axes(free: set[str], spec: P) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(a for a in dim if a in free) for dim in dim_axes(spec, 3))


def _run_shard(
    mixture: Experts,
    activate: Activate,
    recipe: EightBit | None,
    seq_len: int,
    axes: TokenAxes,
    exchange: TokenExchange | None,
    x: Array,
    scores: Array,
    bias: Array | None,
    kernels: Kernels,
    rounded: Rounded | None,
    alongside: Array | None,
    segments: Array | None,
) -> tuple[Array, Load]:
    """Computes the outputs of a device's tokens, and the load of each expert."""
    chosen, weights = mixture.choose(scores, bias)
    if segments is not None:
        is_real = (segments != 0)[..., None]
        chosen = jnp.where(is_real, chosen, mixture.num_experts)
    is_chosen = is_equal(chosen, mixture.num_experts)
    local = jnp.sum(is_chosen, axis=(1, 2), dtype=jnp.int32)
    counts, earlier = local, jnp.zeros_like(local)
    if axes.seq:
        every = jax.lax.all_gather(local, axes.seq)  # (devices, batch, experts)
        counts = jnp.sum(every, axis=0)
        is_earlier = jnp.arange(len(every)) < jax.lax.axis_index(axes.seq)
        earlier = jnp.sum(every * is_earlier[:, None, None], axis=0)
    load, found = Load(counts), None
    if segments is not None:
        found = _Documents.find(chosen, segments, mixture.num_experts, axes.seq)
        load = Load(counts, found.counts)
    if mixture.capacity_factor is not None:
        ranks = _ranks(chosen, mixture.num_experts, earlier)
        is_in = _is_in_capacity(mixture, seq_len, ranks, chosen, found)
        if found is not None:
            lost = (chosen < mixture.num_experts) & ~is_in
            dropped = jnp.sum(lost, axis=(1, 2), dtype=jnp.int32)
            dropped = jax.lax.psum(dropped, axes.seq) if axes.seq else dropped
            load = load._replace(dropped=dropped)
        chosen = jnp.where(is_in, chosen, mixture.num_experts)
    experts = ExpertMLPs(
        kernels=kernels.for_sum(axes.mlp),
        activate=activate,
        in_8_bits=recipe
        and rounded
        and InEightBits(recipe=recipe, axes=axes.mlp, rounded=rounded),
    )
    routed = Routed(x, chosen, weights.astype(x.dtype))
    run = partial(gathered, experts, axes)
    if exchange == "ragged":
        run = partial(ragged, experts, axes, alongside=alongside)
    if not mixture.scales_inputs:
        return run(routed), load
    y = run(routed.with_scaled_inputs())  # (batch, seq * top_k, embed)
    return jnp.sum(y.reshape(*chosen.shape, -1), axis=2), load


class _Documents(NamedTuple):
    """Counts for the document of each token.

    Attributes:
        counts: int ``(batch, seq, experts)``, how many tokens of the document chose
            each expert.
        before: int ``(batch, seq, experts)``, how many earlier tokens of the row,
            before the document, chose each expert.
        lengths: int ``(batch, seq)``, the number of tokens in the document.
    """

    counts: Array
    before: Array
    lengths: Array

    @classmethod
    def find(
        cls, chosen: Array, segments: Array, num_experts: int, axes: tuple[str, ...]
    ) -> "_Documents":
        """Counts a device's choices by document; ``axes`` are mesh axes of the rows."""
        num_tokens = chosen.shape[1]
        if axes:  # a document may extend over several devices
            gather = partial(jax.lax.all_gather, axis_name=axes, axis=1, tiled=True)
            chosen, segments = gather(chosen), gather(segments)
        index = jnp.arange(segments.shape[1])[None]
        position = segment_positions(segments)
        further = segment_positions(segments[:, ::-1])[:, ::-1]
        each = jnp.sum(is_equal(chosen, num_experts), axis=2, dtype=jnp.int32)
        total = jnp.cumsum(each, axis=1)
        first, last = ((index + n)[..., None] for n in (-position, further))
        before = jnp.take_along_axis(total - each, first, axis=1)
        counts = jnp.take_along_axis(total, last, axis=1) - before
        found = cls(counts, before, position + further + 1)
        if not axes:
            return found
        start = jax.lax.axis_index(axes) * num_tokens
        part = partial(jax.lax.dynamic_slice_in_dim, slice_size=num_tokens, axis=1)
        return jax.tree.map(lambda x: part(x, start), found)


def _is_in_capacity(
    mixture: Experts,
    seq_len: int,
    ranks: Array,
    chosen: Array,
    documents: _Documents | None,
) -> Array:
    """Returns bool ``(batch, seq, top_k)``, False for choices of a full expert."""
    if documents is None:
        return ranks < (mixture.capacity(seq_len) or 0)
    ranks -= jnp.take_along_axis(documents.before, chosen, -1, mode="clip")
    most = [mixture.capacity(n) or 0 for n in range(seq_len + 1)]
    return ranks < jnp.array(most)[documents.lengths][..., None]


def _ranks(chosen: Array, num_experts: int, earlier: Array) -> Array:
    """Counts, for each choice, the earlier choices of the same expert in the sequence.

    ``earlier``, ``(batch, experts)``, is the number of choices of each expert by
    earlier tokens on other devices.
    """

    def of_row(chosen: Array, earlier: Array) -> Array:
        order = sort_by_expert(chosen, num_experts, chosen.size)
        starts = jnp.cumsum(order.sizes) - order.sizes
        return order.row - starts[chosen] + earlier[chosen]

    return jax.vmap(of_row)(chosen, earlier)


def _exchange_of(
    layout: Layout, axes: TokenAxes, mixture: Experts
) -> TokenExchange | None:
    """Returns the exchange of tokens, or ``None`` if tokens need no exchange."""
    claim = layout.claims.experts
    if claim is None or not axes.can_send:
        return None
    return claim.choose(layout.mesh, mixture.top_k)[0]


class SharedExpert(nnx.Module):
    """An MLP that processes every token, in addition to the chosen experts."""

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        *,
        rngs: nnx.Rngs,
        is_gated: bool,
        activate: Activate,
        kernel_init: Initializer,
        out_init: Initializer,
    ) -> None:
        embed, mlp = {"embed": embed_dim}, {"mlp": mlp_dim}
        into = partial(Dense, embed, mlp, rngs=rngs, kernel_init=kernel_init)
        self.up = into()
        self.gate = into() if is_gated else None
        self.down = Dense(mlp, embed, rngs=rngs, kernel_init=out_init)
        self.activate = activate

    def __call__(self, x: Array) -> Array:
        """Maps ``(batch, seq, embed)`` to ``(batch, seq, embed)``."""
        return self.down(self.hidden(x))

    def hidden(self, x: Array) -> Array:
        """Maps ``(batch, seq, embed)`` to the hidden values ``(batch, seq, mlp)``."""
        layers = [self.up] if self.gate is None else [self.up, self.gate]
        return self.activate(*name_products(project(x, *layers)))
