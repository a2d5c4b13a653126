"""Gemma 3n's language model: several residual streams, and inputs for each layer.

The streams are one array (batch, seq, streams, embed). Each layer predicts the new
value of every stream, and computes the first stream with attention and an MLP. The
difference between the computed and the predicted first stream corrects all streams [2].
A low-rank branch runs in parallel with attention [3]. Last, a layer adds its embedding
of the token.

References:
    [1] Google DeepMind, "Gemma 3n model overview", 2025,
    https://ai.google.dev/gemma/docs/gemma-3n (the facts are from the model's code in
    Hugging Face transformers)
    [2] Baykal et al., "Alternating Updates for Efficient Transformers", 2023, section
    3, https://arxiv.org/abs/2301.13310
    [3] Menghani et al., "LAuReL: Learned Augmented Residual Layer", 2024, section 2,
    https://arxiv.org/abs/2411.07501
    [4] Devvrit et al., "MatFormer", 2023, https://arxiv.org/abs/2310.07707
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.layers import (
    Dense,
    Embed,
    Stack,
    active_remat,
    apply_remat,
    compute_gradient_once,
    name_products,
    named,
    project,
    segment_positions,
)
from nnx_parallel.layers.activations import ACTIVATIONS
from nnx_parallel.layers.attention import attention
from nnx_parallel.layers.dense import look_up, matmul
from nnx_parallel.models.cache import (
    Cache,
    Start,
    last_token,
    positions_from,
    write_cache,
)
from nnx_parallel.models.gemma3n_config import FAMILIES, Gemma3nConfig
from nnx_parallel.models.gpt_config import LayerKind
from nnx_parallel.models.rotary import frequencies, rotate
from nnx_parallel.sharding import constrain
from nnx_parallel.weights.family import Published

Pairs = dict[LayerKind, Cache]
"""Keys and values for layers of each kind, or an empty mapping."""
Carry = tuple[jax.Array, Pairs]
"""The streams, and the newest keys and values, which are kept for later layers."""
Caches = tuple[Cache | tuple[()], ...]
"""A cache for each stack; empty for layers that have no keys and values."""

_TINY = 1e-30
"""Lower bound inside square roots, whose gradient is infinite at 0."""

_normal = nnx.initializers.normal


def _norm(config: Gemma3nConfig, size: int, name: str, *, rngs: nnx.Rngs) -> Any:
    """Returns an RMSNorm, which computes in float32."""
    scale_init = named(nnx.initializers.ones_init(), name)
    epsilon = config.norm_epsilon
    return nnx.RMSNorm(size, epsilon=epsilon, scale_init=scale_init, rngs=rngs)


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class AltUp(nnx.Module):
    """The coefficients that predict and correct residual streams [2].

    Attributes:
        deterministic: True in evaluation, where coefficients are not clipped.
    """

    def __init__(self, config: Gemma3nConfig, *, rngs: nnx.Rngs) -> None:
        count, embed = config.num_streams, config.embed_dim
        self.norm = _norm(config, embed, "embed", rngs=rngs)
        self.modes = Dense(
            {"embed": embed}, {"latent": count}, rngs=rngs, kernel_init=_normal(0.02)
        )

        def make(*sizes: int) -> nnx.Param:
            init = named(_normal(0.02), *[None] * len(sizes))
            return nnx.Param(init(rngs.params(), sizes, jnp.float32))

        self.prediction = make(count, count, count)  # (to, from, mode)
        self.correction = make(count, count)  # (to, mode)
        ones = named(nnx.initializers.ones_init(), "embed")
        self.scale = nnx.Param(ones(rngs.params(), (embed,), jnp.float32))
        self.clip, self.deterministic = config.coefficient_clip, False

    def predict(self, streams: jax.Array) -> jax.Array:
        """Adds linear combinations of the streams (batch, seq, streams, embed)."""
        # The gradient passes the bound, as in transformers.
        value = self.prediction[...]
        weights = value + jax.lax.stop_gradient(self._clipped(self.prediction) - value)
        mixed = jnp.einsum("bsk,tfk->bstf", self._modes(streams[:, :, 0]), weights)
        # This is a sum of products. A matmul of such small matrices would be slow, and
        # imprecise on TPUs.
        return streams + (mixed[..., None] * streams[:, :, None]).sum(3)

    def correct(self, predicted: jax.Array, x: jax.Array) -> jax.Array:
        """Corrects each stream by a multiple of the error of the first stream.

        The error is the difference between ``x``, (batch, seq, embed), and the first
        stream of ``predicted``, (batch, seq, streams, embed).
        """
        weights = self._clipped(self.correction)
        factors = jnp.einsum("bsk,tk->bst", self._modes(x), weights) + 1.0
        error = x - predicted[:, :, 0]
        return predicted + factors[..., None] * error[:, :, None]

    def _modes(self, x: jax.Array) -> jax.Array:
        """Returns numbers between -1 and 1 for each token, (batch, seq, streams)."""
        modes = self.modes(self.norm(x) * x.shape[-1] ** -1.0)
        return jnp.tanh(_widened(modes)).astype(x.dtype)

    def _clipped(self, param: nnx.Param) -> jax.Array:
        if self.clip is None or self.deterministic:
            return param[...]
        return jnp.clip(param[...], -self.clip, self.clip)


class Attention(nnx.Module):
    """Causal self-attention, with keys and values of the layer or of an earlier one."""

    def __init__(
        self, config: Gemma3nConfig, *, has_pairs: bool, rngs: nnx.Rngs
    ) -> None:
        dense = partial(Dense, rngs=rngs, kernel_init=_normal(0.02))
        norm = partial(_norm, config, config.head_dim, "head_dim", rngs=rngs)
        embed, width = {"embed": config.embed_dim}, {"head_dim": config.head_dim}
        heads = {"heads": config.num_heads, **width}
        kv_heads = {"kv_heads": config.num_kv_heads, **width}
        self.query, self.query_norm = dense(embed, heads), norm()
        self.key = dense(embed, kv_heads) if has_pairs else None
        self.value = dense(embed, kv_heads) if has_pairs else None
        self.key_norm = norm() if has_pairs else None
        self.value_norm = nnx.RMSNorm(  # has no parameters
            config.head_dim, epsilon=config.norm_epsilon, use_scale=False, rngs=rngs
        )
        scale = (2 * config.num_layers) ** -0.5
        self.out = dense(heads, embed, kernel_init=_normal(0.02 * scale))
        # A variable, because all layers of a stack run the same program.
        self.is_local = nnx.Variable(jnp.array(False))
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        start: Start,
        kept: Pairs,
        pairs: Pairs,
        cache: Cache | tuple[()] | None,
        segments: jax.Array | None,
    ) -> tuple[jax.Array, Pairs, Cache | tuple[()] | None]:
        """Computes attention for the tokens of ``x``, with positions from ``start``.

        ``kept`` holds the newest keys and values of each kind of layer. A layer that
        does not compute keys and values uses ``pairs``. Returns an array with the shape
        of ``x``, ``kept`` with the keys and values of this layer, and the new cache.
        """
        positions = positions_from(start, x.shape[1])
        is_local = self.is_local[...]
        if self.key is None or self.value is None or self.key_norm is None:
            query = self.query(x)
        else:
            # (batch, seq, embed) -> (batch, seq, heads or kv_heads, head_dim)
            query, key, value = project(x, self.query, self.key, self.value)
            key = self._rotate(self.key_norm(key), positions)
            pair = key, self.value_norm(value).astype(x.dtype)
            names = ("batch", "seq", "kv_heads", "head_dim")
            pair = constrain(pair[0], *names), constrain(pair[1], *names)
            is_own: dict[LayerKind, Any] = {"local": is_local, "global": ~is_local}
            kept = {
                kind: jax.tree.map(partial(jnp.where, is_own[kind]), pair, old)
                for kind, old in kept.items()
            }
            if cache:
                pair = cache = write_cache(cache, *pair, start)
            pairs = {"local": pair, "global": pair}
        query = self._rotate(self.query_norm(query), positions)
        query = constrain(query, "batch", "seq", "heads", "head_dim")
        if cache is None:
            whole = {"causal": True, "segments": segments}
            near = whole | {"window": self.config.window}
        else:
            near, whole = self._masks(pairs, positions)
        branches = self._attend("local", near), self._attend("global", whole)
        return self.out(jax.lax.cond(is_local, *branches, query, pairs)), kept, cache

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates (batch, seq, heads, head_dim) by the angles of this kind of layer."""
        config = self.config
        whole = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        near = frequencies(config.head_dim, config.local_rope_theta)
        return rotate(x, positions, jnp.where(self.is_local[...], near, whole))

    def _attend(self, kind: LayerKind, rules: dict[str, Any]) -> Callable:
        """Returns a function of queries and pairs for one kind of layer."""
        # The norms of queries and keys replace the scale.
        options = {"scale": 1.0, "implementation": self.config.attention}
        return lambda query, pairs: attention(query, *pairs[kind], **options, **rules)

    def _masks(self, pairs: Pairs, positions: jax.Array) -> tuple[dict, dict]:
        """Returns the masks of local and global layers for queries at ``positions``."""
        keys = jnp.arange(pairs["local"][0].shape[1])[None, None, :]
        queries = jnp.atleast_2d(positions)[..., None]  # (1 or batch, seq, 1)
        seen = keys <= queries
        near = seen & (keys >= queries - self.config.window)
        return {"mask": near[:, None]}, {"mask": seen[:, None]}


class MLP(nnx.Module):
    """A gated MLP; if it is sparse, a token uses only its largest gates."""

    def __init__(
        self, config: Gemma3nConfig, width: int, sparsity: float, *, rngs: nnx.Rngs
    ) -> None:
        embed, mlp = {"embed": config.embed_dim}, {"mlp": width}
        dense = partial(Dense, rngs=rngs)
        self.up = dense(embed, mlp, kernel_init=_normal(0.02))
        self.gate = dense(embed, mlp, kernel_init=_normal(0.02))
        scale = (2 * config.num_layers) ** -0.5
        self.down = dense(mlp, embed, kernel_init=_normal(0.02 * scale))
        # A hidden feature becomes 0 unless its gate exceeds the mean of the token's
        # gates by this number of standard deviations: the quantile `sparsity` of a
        # normal distribution, as in the published model.
        self.cutoff = NormalDist().inv_cdf(sparsity) if sparsity else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, seq, embed) to the same shape; hidden is (batch, seq, mlp)."""
        up, gate = name_products(project(x, self.up, self.gate))
        if self.cutoff is not None:
            wide = _widened(gate)
            mean, square = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
            deviation = jnp.sqrt(jnp.maximum(square, _TINY))
            gate = jax.nn.relu(wide - (mean + deviation * self.cutoff)).astype(x.dtype)
        return self.down(ACTIVATIONS["geglu"](compute_gradient_once(up), gate))


class Block(nnx.Module):
    """One layer: attention, MLP, low-rank branch, input of the layer, and streams.

    Args:
        config: Shape of the model.
        number: Number of the layer, or of the first layer of a stack of equal layers.
        rngs: Keys for the parameters.
    """

    def __init__(self, config: Gemma3nConfig, number: int, *, rngs: nnx.Rngs) -> None:
        norm = partial(_norm, config, config.embed_dim, "embed", rngs=rngs)
        dense = partial(Dense, rngs=rngs, kernel_init=_normal(0.02))
        embed, rank = {"embed": config.embed_dim}, {"latent": config.laurel_dim}
        self.altup = AltUp(config, rngs=rngs)
        has_pairs = number < config.first_shared
        self.attention_norm, self.attention_post_norm = norm(), norm()
        self.attention = Attention(config, has_pairs=has_pairs, rngs=rngs)
        self.laurel_in, self.laurel_out = dense(embed, rank), dense(rank, embed)
        self.laurel_norm = norm()
        width, sparsity = config.mlp_dim[number], config.sparsity[number]
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        self.mlp = MLP(config, width, sparsity, rngs=rngs)
        latent = {"latent": config.layer_input_dim}
        self.input_gate, self.input_out = dense(embed, latent), dense(latent, embed)
        self.input_norm = norm()
        self.place = nnx.Variable(jnp.array(0))  # index of the layer in its stack

    def __call__(
        self,
        carry: Carry,
        inputs: jax.Array,
        start: Start,
        cache: Cache | tuple[()] | None = None,
        *,
        segments: jax.Array | None = None,
        pairs: Pairs,
    ) -> Carry | tuple[Carry, Cache | tuple[()]]:
        """Maps streams (batch, seq, streams, embed) to the same shape.

        ``inputs``, (batch, seq, layers, latent), are the inputs of all layers of the
        stack. If a cache is given, the block also returns the new cache.
        """
        streams, kept = carry
        predicted = self.altup.predict(streams)
        first = predicted[:, :, 0]
        normed = self.attention_norm(first)
        low = constrain(self.laurel_in(normed), "batch", "seq", "latent")
        laurel = normed + self.laurel_norm(self.laurel_out(low))
        attended, kept, cache = self.attention(
            normed, start, kept, pairs, cache, segments
        )
        attended = checkpoint_name(attended, "attention_out")
        x = first + self.attention_post_norm(attended)
        x = constrain((x + laurel) * 0.5**0.5, "batch", "seq", "embed")
        normed = compute_gradient_once(self.mlp_norm(x))
        x = constrain(x + self.mlp_post_norm(self.mlp(normed)), "batch", "seq", "embed")
        streams = self._add_input(self.altup.correct(predicted, x), inputs)
        carry = constrain(streams, "batch", "seq", None, "embed"), kept
        return carry if cache is None else (carry, cache)

    def _add_input(self, streams: jax.Array, inputs: jax.Array) -> jax.Array:
        """Adds the gated input of this layer to all streams except the first."""
        own = jax.lax.dynamic_index_in_dim(inputs, self.place[...], 2, keepdims=False)
        gate = self.input_gate(streams[:, :, 0] * self.altup.scale[...][None, None])
        gate = jax.nn.gelu(constrain(gate, "batch", "seq", "latent"))
        added = self.input_norm(self.input_out(gate * own))[:, :, None]
        is_later = jnp.arange(streams.shape[2])[:, None] > 0
        return streams + jnp.where(is_later[None, None], added, 0)


class LayerInputs(nnx.Module):
    """Computes the inputs of all layers from tokens and their embeddings.

    Each layer has an embedding of the tokens and a projection of the usual embedding.
    They are computed for one layer at a time, so that FSDP gathers the table of only
    one layer.
    """

    def __init__(self, config: Gemma3nConfig, *, rngs: nnx.Rngs) -> None:
        count, latent = config.num_layers, config.layer_input_dim

        def make(rows: str, size: int) -> nnx.Param:
            names = ("layers", rows, "embed" if rows == "vocab" else "latent")
            init = named(_normal(0.02), *names)
            return nnx.Param(init(rngs.params(), (count, size, latent), jnp.float32))

        self.table = make("vocab", config.layer_vocab_size)
        self.kernel = make("embed", config.embed_dim)
        self.norm = _norm(config, latent, "latent", rngs=rngs)
        self.config = config

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the inputs of all layers, (batch, seq, layers, latent).

        ``tokens`` is int (batch, seq), and ``x`` is (batch, seq, embed). The last dim
        of the result has the width ``layer_input_dim``.
        """
        config = self.config
        known = jnp.where(tokens < config.layer_vocab_size, tokens, 0)

        def step(_: None, arrays: tuple) -> tuple[None, jax.Array]:
            table, kernel = arrays
            rows = look_up(table, known) * config.layer_input_dim**0.5
            projected = matmul(x, kernel, ("embed",), ("latent",))
            normed = self.norm(projected * config.embed_dim**-0.5)
            return None, constrain((normed + rows) * 0.5**0.5, "batch", "seq", "latent")

        step = apply_remat(step, config.remat or active_remat())
        arrays = self.table[...], self.kernel[...]
        inputs = jnp.moveaxis(jax.lax.scan(step, None, arrays)[1], 0, 2)
        return constrain(inputs, "batch", "seq", None, "latent")


class Gemma3n(Published):
    """Gemma 3n's language model [1], which maps tokens to logits of the next token.

    Consecutive layers with equal shapes are one `Stack` (``runs``). `Pipeline` divides
    the stack with the most parameters, and runs the others before and after its stages.
    Models with MLPs of different widths, made by mixing MatFormer's nested models [4],
    have more stacks. `next_token_loss` and `generate` take this model too.

    Args:
        config: Shape of the model.
        rngs: Keys for the parameters.

    Example:
        >>> model = Gemma3n(Gemma3nConfig.tiny(), rngs=nnx.Rngs(0))
        >>> nnx.jit(Gemma3n.__call__)(model, jnp.zeros((2, 16), jnp.int32)).shape
        (2, 16, 256)
    """

    families = FAMILIES
    config_type = Gemma3nConfig

    def __init__(self, config: Gemma3nConfig, *, rngs: nnx.Rngs) -> None:
        embed, later = config.embed_dim, range(1, config.num_streams)
        self.config = config
        self.embed = Embed(config.vocab_size, embed, rngs=rngs)
        self.inputs = LayerInputs(config, rngs=rngs)

        def mix(_: int) -> Dense:  # `TensorParallel` splits the columns
            return Dense({"embed": embed}, {"mlp": embed}, rngs=rngs)

        self.expand, self.merge = nnx.List(map(mix, later)), nnx.List(map(mix, later))
        self.runs = nnx.List([self._stack(run, rngs) for run in config.runs])
        self.norm = _norm(config, embed, "embed", rngs=rngs)

    def _stack(self, run: range, rngs: nnx.Rngs) -> Stack:
        config = self.config
        make = partial(Block, config, run.start)
        stack = Stack([make], len(run), rngs=rngs, remat=config.remat)
        block: Any = stack.layer
        is_local = [config.layer_kinds[i] == "local" for i in run]
        block.attention.is_local.set_value(jnp.array(is_local))
        block.place.set_value(jnp.arange(len(run)))
        return stack

    def __call__(
        self, tokens: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """Returns the logits of each next token, ``(batch, seq, vocab)``.

        Args:
            tokens: int ``(batch, seq)``.
            segments: int ``(batch, seq)``, the id of each token's document; 0 marks
                padding.
        """
        return self._logits(self.hidden_and_losses(tokens, segments)[0])

    def hidden_and_losses(
        self, tokens: jax.Array, segments: jax.Array | None = None
    ) -> tuple[jax.Array, None]:
        """Returns the input of the head, ``(batch, seq, embed)``, and ``None``."""
        start = 0 if segments is None else segment_positions(segments)
        return self._run(tokens, start, segments=segments)[0], None

    @property
    def head_kernel(self) -> tuple[jax.Array, int]:
        """The head's parameter, which is the embedding, and the index of ``vocab``."""
        return self.embed.embedding[...], 0

    def decode(
        self,
        tokens: jax.Array,
        start: int | jax.Array,
        cache: Caches,
        *,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches]:
        """Returns the logits of the token that follows, and the cache, as `GPT.decode`.

        Args:
            tokens: int ``(batch, seq)``, the tokens that follow the tokens in the
                cache.
            start: Number of tokens in the cache, an int or int ``(batch,)``.
            cache: Keys and values of the earlier tokens, from `make_cache`.
            lengths: int ``(batch,)``, the number of tokens of each row, without the
                padding that follows; ``None`` if there is no padding.
        """
        x, cache = self._run(tokens, start, caches=cache)
        last = last_token(x, lengths)
        return self._logits(last)[:, 0], cache

    def make_cache(self, batch_size: int, total_len: int) -> Caches:
        """Returns an empty cache for each stack.

        It is a pair of arrays ``(layers, batch, total_len, kv_heads, head_dim)``, or
        empty for layers that use the keys and values of an earlier layer.
        """
        config, dtype = self.config, self.embed.embedding.get_value().dtype
        sizes = (batch_size, total_len, config.num_kv_heads, config.head_dim)

        def empty(run: range) -> Cache | tuple[()]:
            if run.start >= config.first_shared:
                return ()
            zeros = jnp.zeros((len(run), *sizes), dtype)
            zeros = constrain(zeros, "layers", "batch", None, "kv_heads", "head_dim")
            return zeros, zeros

        return tuple(map(empty, config.runs))

    def _run(
        self,
        tokens: jax.Array,
        start: Start,
        *,
        segments: jax.Array | None = None,
        caches: Caches | None = None,
    ) -> tuple[jax.Array, Caches]:
        """Runs all layers; returns the input of the head, and the new caches."""
        config, new = self.config, []
        x = self.embed(tokens) * config.embed_dim**0.5
        inputs = self.inputs(tokens, x)
        pairs: Pairs = {}
        carry = self._expand(x), self._no_pairs(x) if caches is None else {}
        for i, (run, stack) in enumerate(zip(config.runs, self.runs, strict=True)):
            if run.start == config.first_shared:
                pairs = carry[1] if caches is None else self._find_pairs(new)
                carry = carry[0], {}
            args = carry, inputs[:, :, run.start : run.stop], start
            if caches is None:
                carry = stack(*args, segments=segments, pairs=pairs)
            else:
                carry, cache = stack(*args, scanned=caches[i], pairs=pairs)
                new.append(cache)
        return self.norm(self._merge(carry[0])), tuple(new)

    def _expand(self, x: jax.Array) -> jax.Array:
        """Returns streams (batch, seq, streams, embed) for embeddings."""
        others = [self._scaled(y, x) for y in project(x, *self.expand)]
        return constrain(jnp.stack([x, *others], axis=2), "batch", "seq", None, "embed")

    def _merge(self, streams: jax.Array) -> jax.Array:
        """Returns the mean of the streams, (batch, seq, embed)."""
        first = streams[:, :, 0]
        others = [
            self._scaled(layer(streams[:, :, i]), first)
            for i, layer in enumerate(self.merge, 1)
        ]
        return sum(others, first) / self.config.num_streams

    def _scaled(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Scales each token's vector to the norm of its vector in ``like``."""

        def size(x: jax.Array, least: float) -> jax.Array:
            square = (_widened(x) ** 2).mean(-1, keepdims=True)
            return jnp.sqrt(jnp.maximum(square, least))

        scaled = _widened(x) * size(like, _TINY) / size(x, 1e-5)
        return constrain(scaled.astype(like.dtype), "batch", "seq", "embed")

    def _no_pairs(self, x: jax.Array) -> Pairs:
        """Returns zeros for the keys and values that later layers need."""
        config = self.config
        if not config.num_shared_layers:
            return {}
        zeros = jnp.zeros((*x.shape[:2], config.num_kv_heads, config.head_dim), x.dtype)
        zeros = constrain(zeros, "batch", "seq", "kv_heads", "head_dim")
        return {"local": (zeros, zeros), "global": (zeros, zeros)}

    def _find_pairs(self, caches: list[Cache]) -> Pairs:
        """Returns the cached keys and values of the last layer of each kind."""
        layers = [
            (keys[i], values[i]) for keys, values in caches for i in range(len(keys))
        ]
        some: Pairs = {"local": layers[0], "global": layers[0]}
        return some | dict(zip(self.config.layer_kinds, layers, strict=False))

    def _logits(self, x: jax.Array) -> jax.Array:
        logits, cap = self.embed.attend(x), self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
