"""Models like those of Tunix, MaxText and Flax's examples, but much smaller."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nnx_parallel.sharding import LogicalRules
from tests.strangers.language import next_token_loss
from tests.strangers.public.case import Public, attend, cross_entropy

# Tunix's Qwen3: experts as stacked parameters, dispatched by one-hot products.


class MoELayer(nnx.Module):
    """Loops over experts; metadata has the spec of each parameter."""

    def __init__(self, dim: int, experts: int, *, rngs: nnx.Rngs) -> None:
        self.num_experts, self.experts_per_tok = experts, 2
        self.router = nnx.Linear(dim, experts, use_bias=False, rngs=rngs)
        init = nnx.initializers.normal(0.2)
        up = (experts, dim, 2 * dim)
        self.gate_proj = nnx.Param(init(rngs.params(), up))
        self.up_proj = nnx.Param(init(rngs.params(), up))
        self.down_proj = nnx.Param(init(rngs.params(), (experts, 2 * dim, dim)))

    def __call__(self, x):
        weights, index = jax.lax.top_k(nnx.softmax(self.router(x)), 2)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        mask = jax.nn.one_hot(index, num_classes=self.num_experts)
        mask = jnp.swapaxes(mask, -1, -2)
        inputs = jnp.einsum("BTID,BTEK->BTED", x[:, :, None, :], mask)
        outputs = []
        for i in range(self.num_experts):
            gate = jnp.einsum("BTD,DF->BTF", inputs[:, :, i], self.gate_proj[...][i])
            up = jnp.einsum("BTD,DF->BTF", inputs[:, :, i], self.up_proj[...][i])
            down = self.down_proj[...][i]
            outputs.append(jnp.einsum("BTF,FD->BTD", nnx.silu(gate) * up, down))
        weights = mask * jnp.tile(weights[:, :, None], (1, 1, self.num_experts, 1))
        return jnp.einsum("BTED,BTEK->BTD", jnp.stack(outputs, axis=2), weights)


class RaggedMoE(nnx.Module):
    """Sorts tokens by expert for `ragged_dot`, and back; uses `nnx.remat`."""

    def __init__(self, dim: int, experts: int, *, rngs: nnx.Rngs) -> None:
        self.num_experts, self.features = experts, dim
        init = nnx.initializers.normal(0.2)
        self.router_logits = nnx.Param(init(rngs.params(), (dim, experts)))
        self.gating_einsum = nnx.Param(init(rngs.params(), (experts, 2, 2 * dim, dim)))
        self.linear = nnx.Param(init(rngs.params(), (experts, 2 * dim, dim)))
        self.per_expert_scale = nnx.Param(jnp.ones((experts,)))

    def block(self, x):
        logits = jnp.einsum("gsd,de->gse", x, self.router_logits[...])
        weights, choices = jax.lax.top_k(nnx.softmax(logits), 2)
        flat = choices.reshape(-1)
        order = jnp.argsort(flat)
        tokens = jnp.repeat(x.reshape(-1, self.features), 2, axis=0)[order]
        sizes = jnp.bincount(flat, length=self.num_experts)
        kernel = jnp.transpose(self.gating_einsum[...], (0, 3, 1, 2))
        kernel = kernel.reshape(self.num_experts, self.features, -1)
        h = jax.lax.ragged_dot(tokens, kernel, group_sizes=sizes)
        h = h.reshape(h.shape[0], 2, -1)
        h = nnx.gelu(h[:, 0]) * h[:, 1]
        out = jax.lax.ragged_dot(h, self.linear[...], group_sizes=sizes)
        which = jnp.repeat(
            jnp.arange(self.num_experts), sizes, total_repeat_length=out.shape[0]
        )
        out = (out * self.per_expert_scale[...][which, None])[jnp.argsort(order)]
        return jnp.einsum("blkd,blk->bld", out.reshape(*choices.shape, -1), weights)

    def __call__(self, x):
        return nnx.remat(self.block.__func__)(self, x)


class TunixEinsum(nnx.Module):
    """An einsum that is given as text, and has its shape as an attribute."""

    def __init__(self, text: str, shape: tuple[int, ...], *, rngs: nnx.Rngs) -> None:
        self.einsum_str, self.shape = text, shape
        self.w = nnx.Param(nnx.initializers.normal(0.2)(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x, self.w[...])


class TunixLayer(nnx.Module):
    """Splits, merges and rematerialises itself in its call; the cache is a dict."""

    def __init__(self, mlp: nnx.Module, *, rngs: nnx.Rngs) -> None:
        self.q_einsum = TunixEinsum("BTD,NDH->BTNH", (4, 16, 8), rngs=rngs)
        self.kv_einsum = TunixEinsum("BSD,CKDH->CBSKH", (2, 2, 16, 8), rngs=rngs)
        self.attn_vec_einsum = TunixEinsum("BTNH,NHD->BTD", (4, 8, 16), rngs=rngs)
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.mlp = mlp

    @property
    def use_gqa(self) -> bool:
        return self.q_einsum.shape[0] != self.kv_einsum.shape[1]

    def block(self, x, mask):
        h = self.norm(x)
        q, (k, v) = self.q_einsum(h), self.kv_einsum(h)
        if self.use_gqa:
            b, t, n, size = q.shape
            q = q.reshape(b, t, k.shape[2], n // k.shape[2], size)
            scores = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(b, t, n, -1)
            weights = nnx.softmax(jnp.where(mask[:, :, None], scores, -2.4e38))
            weights = weights.reshape(b, t, k.shape[2], -1, k.shape[1])
            out = jnp.einsum("BTKGS,BSKH->BTKGH", weights, v).reshape(b, t, n, size)
        else:
            out = attend(q, k, v, mask[:, None])
        x = x + self.attn_vec_einsum(out)
        return {"k": k, "v": v}, x + self.mlp(x)

    def __call__(self, x, mask):
        graphdef, state = nnx.split(self)

        def checkpointed(state, *args):
            return nnx.merge(graphdef, state).block(*args)

        return jax.checkpoint(checkpointed)(state, x, mask)


class Tunix(nnx.Module):
    """Sows the hidden states of all layers, which are never read."""

    def __init__(self, mlp: Any, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.1)
        self.input_embedding = nnx.Param(init(rngs.params(), (64, 16)))
        self.layers = nnx.List(
            TunixLayer(mlp(16, rngs=rngs), rngs=rngs) for _ in range(2)
        )

    def __call__(self, tokens):
        x, cache = self.input_embedding[...][(tokens,)], {}
        mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None]
        for i, layer in enumerate(self.layers):
            cache[f"layer_{i}"], x = layer(x, mask)
            self.sow(nnx.Intermediate, "all_hidden_states", x)
        return jnp.dot(x, self.input_embedding[...].T)


def gated(dim: int, *, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(
        nnx.Linear(dim, 2 * dim, rngs=rngs),
        nnx.silu,
        nnx.Linear(2 * dim, dim, rngs=rngs),
    )


def tunix(mlp: Any) -> Any:
    return lambda rngs: Tunix(mlp, rngs=rngs)


def popped_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["tokens"][:, :-1])
    nnx.pop(model, nnx.Intermediate)
    return cross_entropy(logits, batch["tokens"][:, 1:])


# MaxText: layers stacked along dim 1, logical names, latent attention, a second head.


class DenseGeneral(nnx.Module):
    """A linear map over several dims; its names are in metadata called `sharding`."""

    def __init__(self, inputs, outputs, axis, kernel_axes, *, rngs: nnx.Rngs) -> None:
        self.axis, self.kernel_axes = axis, kernel_axes
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
        size = (int(np.prod(inputs)), int(np.prod(outputs)))
        kernel = init(rngs.params(), size).reshape(*inputs, *outputs)
        self.kernel = nnx.Param(kernel, sharding=kernel_axes, eager_sharding=False)
        self.bias = None

    def __call__(self, x):
        contract = tuple(a % x.ndim for a in self.axis), tuple(range(len(self.axis)))
        return jax.lax.dot_general(x, self.kernel[...], (contract, ((), ())))


class MaxTextLayer(nnx.Module):
    """Returns `(x, None)` for the scan."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        names = ("embed", "q_heads", "kv")
        dense = partial(DenseGeneral, rngs=rngs)
        self.query = dense((16,), (2, 8), (-1,), names)
        self.key = dense((16,), (2, 8), (-1,), ("embed", "kv_heads", "kv"))
        self.value = dense((16,), (2, 8), (-1,), ("embed", "kv_heads", "kv"))
        self.out = dense((2, 8), (16,), (-2, -1), ("heads", "kv", "embed"))
        self.wi_0 = dense((16,), (32,), (-1,), ("embed", "mlp"))
        self.wo = dense((32,), (16,), (-1,), ("mlp", "embed"))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask, deterministic: bool):
        h = self.norm(x)
        h = attend(self.query(h), self.key(h), self.value(h), mask)
        x = x + self.dropout(self.out(h), deterministic=deterministic)
        return x + self.wo(nnx.silu(self.wi_0(x))), None


class MaxText(nnx.Module):
    """The layers are dim 1 of parameters, and dim 0 of other state."""

    def __init__(self, *, rngs: nnx.Rngs, axis: int = 1) -> None:
        self.param_scan_axis, self.num_layers = axis, 2
        init = nnx.initializers.normal(0.1)
        self.embedding = nnx.Param(
            init(rngs.params(), (64, 16)),
            sharding=("vocab", "embed"),
            eager_sharding=False,
        )
        self.layers = nnx.vmap(
            lambda rngs: MaxTextLayer(rngs=rngs),
            in_axes=0,
            out_axes=nnx.StateAxes({nnx.Param: axis, ...: 0}),
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )(rngs.fork(split=self.num_layers))

    def __call__(self, tokens):
        x = jnp.take(self.embedding[...], tokens, axis=0)
        mask = nnx.make_causal_mask(tokens)
        graphdef, params, state = nnx.split(self.layers, nnx.Param, ...)
        axis = self.param_scan_axis
        params = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), params)

        def layer_fn(carry, scanned):
            layer = nnx.merge(graphdef, *scanned)
            carry, _ = layer(carry, mask, False)
            return carry, nnx.state(layer, nnx.Not(nnx.Param))

        layer_fn = jax.checkpoint(layer_fn, prevent_cse=False)
        x, state = jax.lax.scan(layer_fn, x, (params, state))
        nnx.update(self.layers, state)
        return jnp.dot(x, self.embedding[...].T)


class LatentAttention(nnx.Module):
    """DeepSeek's attention: low ranks, and a positional part that all heads share."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.wq_a, self.wq_b = linear(16, 8), nnx.LinearGeneral(8, (2, 12), rngs=rngs)
        self.q_norm, self.kv_norm = (nnx.RMSNorm(8, rngs=rngs) for _ in range(2))
        self.wkv_a = linear(16, 8 + 4)
        self.wkv_b = nnx.LinearGeneral(8, (2, 16), rngs=rngs)
        self.out = nnx.LinearGeneral((2, 8), 16, axis=(-2, -1), rngs=rngs)

    def __call__(self, x, mask):
        q = self.wq_b(self.q_norm(self.wq_a(x)))
        latent, k_pe = jnp.split(self.wkv_a(x), [8], axis=-1)
        k, v = jnp.split(self.wkv_b(self.kv_norm(latent)), 2, axis=-1)
        k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k.shape[:3], 4))
        return x + self.out(attend(q, jnp.concatenate([k, k_pe], -1), v, mask))


class mtp_losses(nnx.Intermediate):  # noqa: N801  its author's name
    """Losses of the heads for later tokens."""


class DeepSeek(nnx.Module):
    """A head predicts the token after the next; the call stores its loss."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.shared_embedding = nnx.Embed(64, 16, rngs=rngs)
        for i in range(2):
            setattr(self, f"layers_{i}", LatentAttention(rngs=rngs))
        self.mtp_projection = nnx.Linear(32, 16, rngs=rngs.fork())
        self.mtp_layer_1 = LatentAttention(rngs=rngs.fork())

    def __call__(self, tokens):
        x, mask = self.shared_embedding(tokens), nnx.make_causal_mask(tokens)
        for i in range(2):
            x = getattr(self, f"layers_{i}")(x, mask)
        rolled = jnp.roll(tokens, -1, axis=1).at[:, -1].set(0)
        both = jnp.concatenate([self.shared_embedding(rolled), x], axis=-1)
        logits = self.shared_embedding.attend(
            self.mtp_layer_1(self.mtp_projection(both), mask)
        )
        target = jnp.roll(tokens, -2, axis=1).at[:, -2:].set(0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        self.losses = mtp_losses(jnp.stack([jnp.sum(losses * (target != 0))]))
        self.weights = mtp_losses(jnp.stack([jnp.sum(target != 0).astype(jnp.float32)]))
        return self.shared_embedding.attend(x)


def mtp_loss(model: Any, batch: Any) -> Any:
    main = next_token_loss(model, batch)
    found: Any = nnx.pop(model, mtp_losses)
    mtp = jnp.sum(found["losses"][...]) / (jnp.sum(found["weights"][...]) + 1e-6)
    return main + 0.1 * mtp, {"mtp_loss": mtp}


# Flax's examples: a counter, arrays outside of Variables, surgery, a loss attribute.


class Count(nnx.Variable):
    """The number of calls of a model."""


class ToyLinear(nnx.Module):
    """A linear layer that is written by hand."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jax.random.uniform(rngs.params(), (inputs, outputs)) / 8)
        self.b = nnx.Param(jnp.zeros((outputs,)))

    def __call__(self, x):
        return x @ self.w + self.b


class Counting(nnx.Module):
    """Increments a counter in its call."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.count = Count(jnp.array(0))
        self.linear1 = ToyLinear(16, 32, rngs=rngs)
        self.linear2 = ToyLinear(32, 1, rngs=rngs)

    def __call__(self, x):
        self.count[...] += 1
        return self.linear2(nnx.relu(self.linear1(x)))


class ArrayLeaf(nnx.Module):
    """Arrays are attributes, and the trained ones are found by name."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.count = jnp.array(0)
        self.w = jax.random.normal(rngs.params(), (16, 4))
        self.b = jnp.zeros((4,))

    def __call__(self, x):
        self.count += 1
        return x @ self.w + self.b


def is_param(path, value) -> bool:
    return path[-1] in ("w", "b")


class Classifier(nnx.Module):
    """After the model is built, a pretrained backbone replaces the original one."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.backbone = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.backbone(x)))


def surgery(rngs: nnx.Rngs) -> nnx.Module:
    model = Classifier(rngs=rngs)
    model.backbone = nnx.Linear(16, 32, rngs=nnx.Rngs(5))
    return model


def is_trainable(path, value) -> bool:
    return "head" in path and isinstance(value, nnx.Param)


class Loss(nnx.Variable):
    """A Variable for a term of the loss."""


class Encoder(nnx.Module):
    """The call creates an attribute with a term of the loss."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear1 = nnx.Linear(16, 32, rngs=rngs)
        self.linear_mean = nnx.Linear(32, 4, rngs=rngs)
        self.linear_std = nnx.Linear(32, 4, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x):
        x = nnx.relu(self.linear1(x))
        mean, std = self.linear_mean(x), jnp.exp(self.linear_std(x))
        self.kl_loss = Loss(jnp.mean(std**2 + mean**2 - jnp.log(std**2) - 1) / 2)
        return mean + std * jax.random.normal(self.rngs.noise(), mean.shape)


def toy_vae(rngs: nnx.Rngs) -> nnx.Module:
    streams = nnx.Rngs(0, noise=1)
    return nnx.Dict(
        encoder=Encoder(rngs=streams), decoder=nnx.Linear(4, 16, rngs=streams)
    )


def toy_vae_loss(model: Any, batch: Any) -> jax.Array:
    out = model.decoder(model.encoder(batch["rows"]))
    losses = nnx.pop(model, Loss)
    kl = sum(jax.tree_util.tree_leaves(losses), 0.0)
    return optax.squared_error(out, batch["rows"]).mean() + 0.1 * kl


def regression_loss(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["rows"]) - batch["future"][:, :1]) ** 2).mean()


class GemmaAttention(nnx.Module):
    """Flax's Gemma 3: an `nnx.Einsum` makes queries, keys and values; sows values."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.qkv_einsum = nnx.Einsum("BTD,SNDH->SBTNH", (3, 2, 16, 8), rngs=rngs)
        self.attn_vec_einsum = nnx.Einsum("BTNH,NHD->BTD", (2, 8, 16), rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x, mask, rngs=None):
        q, k, v = self.qkv_einsum(x)
        logits = jnp.tanh(jnp.einsum("BTNH,BSNH->BTNS", q, k) / 50.0) * 50.0
        logits = jnp.where(jnp.expand_dims(mask, -2), logits, -2.4e38)
        values, index = jax.lax.top_k(logits, 2)
        self.sow(nnx.Intermediate, "logits_topk", (index, values))
        weights = self.dropout(nnx.softmax(logits), rngs=rngs)
        out = jnp.einsum("BTNS,BSNH->BTNH", weights, v)
        return self.attn_vec_einsum(out)

    @property
    def head_dim(self) -> int:
        return self.attn_vec_einsum.kernel.shape[1]


class FlaxGemma(nnx.Module):
    """Gets random streams in the call; has a subclass of Flax's embedding."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embedder = nnx.Embed(64, 16, rngs=rngs)
        self.layers = nnx.List([GemmaAttention(rngs=rngs) for _ in range(2)])
        self.post_attention_norm = None
        self.final_dropout = nnx.Dropout(0.1, deterministic=False)

    def __call__(self, tokens, rngs=None):
        x = self.embedder(tokens) * jnp.sqrt(16)
        mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None]
        for layer in self.layers:
            x = x + layer(x, mask, rngs=rngs)
        x = self.final_dropout(x, rngs=rngs)
        return jnp.tanh(self.embedder.attend(x) / 30.0) * 30.0


def flax_gemma_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["tokens"][:, :-1], rngs=nnx.Rngs(dropout=2))
    nnx.pop(model, nnx.Intermediate)
    weights = (batch["tokens"][:, 1:] > 5).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["tokens"][:, 1:]
    )
    return (losses * weights).sum() / weights.sum()


TOYS, TUNIX = "examples/nnx_toy_examples/", "tunix/models/"
FLAX: Any = partial(Public, repository="google/flax")
MAX: Any = partial(Public, repository="AI-Hypercomputer/maxtext")

CASES = {
    "tunix gemma": Public(
        repository="google/tunix",
        path=TUNIX + "gemma/model.py",
        build=tunix(gated),
        loss=popped_loss,
    ),
    "tunix qwen3": Public(
        repository="google/tunix",
        path=TUNIX + "qwen3/model.py",
        build=tunix(partial(MoELayer, experts=4)),
        loss=popped_loss,
    ),
    "tunix gemma4": Public(
        repository="google/tunix",
        path=TUNIX + "gemma4/moe.py",
        build=tunix(partial(RaggedMoE, experts=4)),
        loss=popped_loss,
    ),
    "maxtext decoder": MAX(
        path="src/maxtext/layers/nnx_decoders.py",
        build=MaxText,
        loss=next_token_loss,
        rules=(LogicalRules({"kv": None, "q_heads": None}),),
    ),
    "maxtext deepseek": MAX(
        path="src/maxtext/layers/multi_token_prediction.py",
        build=DeepSeek,
        loss=mtp_loss,
    ),
    "flax gemma": FLAX(
        path="examples/gemma/modules.py", build=FlaxGemma, loss=flax_gemma_loss
    ),
    "flax counter": FLAX(
        path=TOYS + "02_lifted_transforms.py", build=Counting, loss=regression_loss
    ),
    "flax array leaves": FLAX(
        path=TOYS + "07_array_leaves.py",
        build=ArrayLeaf,
        loss=regression_loss,
        wrt=is_param,
    ),
    "flax surgery": FLAX(
        path=TOYS + "09_parameter_surgery.py",
        build=surgery,
        loss=regression_loss,
        wrt=is_trainable,
    ),
    "flax vae": FLAX(path=TOYS + "05_vae.py", build=toy_vae, loss=toy_vae_loss),
}
