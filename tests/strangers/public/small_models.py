"""Models like the JAX AI stack's tutorials, jimm, and reinforcement learning agents."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.struct import PyTreeNode

from tests.strangers.public.case import Public, attend, cross_entropy, heads
from tests.strangers.vision import classification_loss, denoising_loss

# The JAX AI stack: dropout modes passed in the call, layers hidden in closures.


class MiniGPTBlock(nnx.Module):
    """Applies norms after residual sums; its dropout has no stream and is off."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs, rate: float = 0.1) -> None:
        self.mha = nnx.MultiHeadAttention(num_heads=2, in_features=dim, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=rate)
        self.layer_norm1 = nnx.LayerNorm(epsilon=1e-6, num_features=dim, rngs=rngs)
        self.linear1 = nnx.Linear(in_features=dim, out_features=2 * dim, rngs=rngs)
        self.linear2 = nnx.Linear(in_features=2 * dim, out_features=dim, rngs=rngs)
        self.layer_norm2 = nnx.LayerNorm(epsilon=1e-6, num_features=dim, rngs=rngs)

    def __call__(self, x, training: bool = False):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1])))
        h = self.mha(inputs_q=x, mask=mask, decode=False)
        x = self.layer_norm1(x + self.dropout1(h, deterministic=not training))
        return self.layer_norm2(x + self.linear2(nnx.relu(self.linear1(x))))


class MiniGPT(nnx.Module):
    """Embeds tokens and positions in one module."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.token_emb = nnx.Embed(num_embeddings=64, features=16, rngs=rngs)
        self.pos_emb = nnx.Embed(num_embeddings=16, features=16, rngs=rngs)
        self.transformer_blocks = nnx.List(
            [MiniGPTBlock(16, rngs=rngs) for _ in range(2)]
        )
        self.output_layer = nnx.Linear(16, 64, use_bias=False, rngs=rngs)

    def __call__(self, inputs, training: bool = False):
        x = self.token_emb(inputs) + self.pos_emb(jnp.arange(inputs.shape[1])[None, :])
        for block in self.transformer_blocks:
            x = block(x, training=training)
        return self.output_layer(x)


def mini_loss(model: Any, batch: Any) -> Any:
    logits = model(batch["tokens"][:, :-1], training=False)
    return cross_entropy(logits, batch["tokens"][:, 1:]), logits


class DigitsUNet(nnx.Module):
    """Blocks are functions that close over layers, which are thus never trained."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.time_mlp = nnx.Linear(8, 8, rngs=rngs)
        self.down_conv1 = self._create_residual_block(1, 8, rngs)
        self.down_conv2 = self._create_residual_block(8, 8, rngs)
        self.attention = self._create_attention_block(8, rngs)
        self.up_conv1 = self._create_residual_block(16, 8, rngs)
        self.final_norm = nnx.LayerNorm(8, rngs=rngs)
        self.final_conv = nnx.Conv(8, 1, (3, 3), padding=((1, 1), (1, 1)), rngs=rngs)

    def _create_attention_block(self, dim: int, rngs: nnx.Rngs) -> Callable:
        query, key, value = (nnx.Linear(dim, dim, rngs=rngs) for _ in range(3))

        def forward(x):
            flat = x.reshape(x.shape[0], -1, 1, x.shape[-1])
            out = attend(query(flat), key(flat), value(flat))
            return x + out.reshape(x.shape)

        return forward

    def _create_residual_block(self, width: int, out: int, rngs: nnx.Rngs) -> Callable:
        conv1 = nnx.Conv(width, out, (3, 3), rngs=rngs)
        norm1 = nnx.LayerNorm(out, rngs=rngs)
        shortcut = nnx.Conv(width, out, (1, 1), rngs=rngs)

        def forward(x):
            return shortcut(x) + nnx.gelu(norm1(conv1(x)))

        return forward

    def __call__(self, x, t):
        rate = jnp.exp(jnp.arange(4) * -2.0)
        time = jnp.concatenate(
            [jnp.sin(t[:, None] * rate), jnp.cos(t[:, None] * rate)], 1
        )
        d1 = self.down_conv1(x) + self.time_mlp(time)[:, None, None, :]
        d2 = self.down_conv2(nnx.max_pool(d1, (2, 2), strides=(2, 2)))
        d2 = self.attention(d2)
        d2 = jax.image.resize(d2, d1.shape, method="nearest")
        x = self.up_conv1(jnp.concatenate([d2, d1], axis=-1))
        return self.final_conv(nnx.gelu(self.final_norm(x)))


class TimeSeries(nnx.Module):
    """Convolutions over time, and a softmax output."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv_1 = nnx.Conv(3, 8, kernel_size=3, padding="SAME", rngs=rngs)
        self.layer_norm_1 = nnx.LayerNorm(num_features=8, epsilon=0.001, rngs=rngs)
        self.conv_2 = nnx.Conv(8, 8, kernel_size=3, padding="SAME", rngs=rngs)
        self.dense_1 = nnx.Linear(in_features=8, out_features=10, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.layer_norm_1(self.conv_1(x)))
        x = jnp.mean(jax.nn.relu(self.conv_2(x)), axis=(1,))
        return jax.nn.softmax(self.dense_1(x))


def series_loss(model: Any, batch: Any) -> Any:
    probs = model(batch["past"])
    onehot = jax.nn.one_hot(batch["label"], 10)
    return -(onehot * jnp.log(probs + 1e-7)).sum(-1).mean()


class MLPBlock(nnx.Sequential):
    """A subclass of `nnx.Sequential`."""

    def __init__(self, dim: int, inner: int, *, rngs: nnx.Rngs = nnx.Rngs(0)) -> None:  # noqa: B008
        layers = [
            nnx.Linear(dim, inner, rngs=rngs),
            nnx.gelu,
            nnx.Dropout(0.1, rngs=rngs),
            nnx.Linear(inner, dim, rngs=rngs),
            nnx.Dropout(0.1, rngs=rngs),
        ]
        super().__init__(*layers)


class Unetr(nnx.Module):
    """A transformer over patches, whose layers feed upsampling convolutions."""

    def __init__(self, *, rngs: nnx.Rngs = nnx.Rngs(0)) -> None:  # noqa: B008
        self.patch_embeddings = nnx.Conv(1, 16, (4, 4), strides=(4, 4), rngs=rngs)
        init = jax.nn.initializers.truncated_normal(stddev=0.02)
        self.position_embeddings = nnx.Param(
            init(rngs.params(), (1, 4, 16), jnp.float32)
        )
        self.encoder = nnx.List([MLPBlock(16, 32, rngs=rngs) for _ in range(2)])
        self.upsample = nnx.ConvTranspose(16, 8, (4, 4), strides=(4, 4), rngs=rngs)
        self.skip = nnx.Sequential(
            nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs),
            nnx.BatchNorm(8, rngs=rngs),
        )
        self.conv_out = nnx.Conv(16, 2, (1, 1), rngs=rngs)

    def __call__(self, image):
        x = self.patch_embeddings(image).reshape(image.shape[0], -1, 16)
        x = x + self.position_embeddings
        hidden = []
        for block in self.encoder:
            x = x + block(x)
            hidden.append(x)
        total: Any = sum(hidden)
        up = self.upsample(total.reshape(-1, 2, 2, 16))
        return self.conv_out(jnp.concatenate([up, self.skip(image)], axis=-1))


def segmentation_loss(model: Any, batch: Any) -> Any:
    logits, masks = model(batch["image"]), (batch["noise"][..., 0] > 0).astype(int)
    probs = nnx.softmax(logits)[..., 1]
    overlap = (probs * masks).sum() / (
        probs.sum() + masks.sum() - (probs * masks).sum()
    )
    xentropy = cross_entropy(logits, masks)
    return xentropy + (1 - overlap), (xentropy, overlap)


class TextClassifier(nnx.Module):
    """Embeds words, applies one block, averages, and uses dropouts with streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding_layer = nnx.Embed(64, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=16, qkv_features=16, decode=False, rngs=rngs
        )
        self.layer_norm_1 = nnx.LayerNorm(num_features=16, rngs=rngs)
        self.dropout1 = nnx.Dropout(0.1, rngs=rngs)
        self.dense1 = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        x = self.embedding_layer(x)
        x = self.layer_norm_1(x + self.attention(x, x))
        return self.dense1(self.dropout1(jnp.mean(x, axis=(1,))))


def text_loss(model: Any, batch: Any) -> jax.Array:
    return cross_entropy(model(batch["tokens"]), batch["label"])


# jimm: streams as a default argument, a mask attribute, a pooling head, SigLIP.


class JimmLayer(nnx.Module):
    """Two Sequentials; the mask is an array of the module."""

    def __init__(self, dim: int, attn_mask=None, rngs: nnx.Rngs = nnx.Rngs(0)) -> None:  # noqa: B008
        self.attn_mask = attn_mask
        self.norm1 = nnx.LayerNorm(dim, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(
            num_heads=2,
            in_features=dim,
            dropout_rate=0.0,
            broadcast_dropout=False,
            decode=False,
            deterministic=False,
            rngs=rngs,
        )
        self.mlp = nnx.Sequential(
            nnx.Linear(dim, 2 * dim, rngs=rngs),
            lambda x: x * nnx.sigmoid(1.702 * x),
            nnx.Dropout(0.0, rngs=rngs),
            nnx.Linear(2 * dim, dim, rngs=rngs),
        )

    def __call__(self, x):
        mask = self.attn_mask
        if mask is not None:
            mask = mask[: x.shape[1], : x.shape[1]]
        return x + self.mlp(x + self.attn(self.norm1(x), mask=mask))


class MAPHead(nnx.Module):
    """A learned query attends to the tokens."""

    def __init__(self, dim: int, rngs: nnx.Rngs = nnx.Rngs(0)) -> None:  # noqa: B008
        self.probe = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 1, dim)))
        self.attn = nnx.MultiHeadAttention(2, dim, decode=False, rngs=rngs)
        self.layernorm = nnx.LayerNorm(num_features=dim, rngs=rngs)

    def __call__(self, x):
        probe = jnp.tile(self.probe[...], [x.shape[0], 1, 1])
        return self.layernorm(self.attn(probe, x, x, decode=False))[:, 0]


class JimmVision(nnx.Module):
    """An image tower with one of two kinds of pooling."""

    def __init__(self, pooling_type: str, rngs: nnx.Rngs = nnx.Rngs(0)) -> None:  # noqa: B008
        self.pooling_type = pooling_type
        self.patch_embeddings = nnx.Conv(1, 16, (4, 4), strides=(4, 4), rngs=rngs)
        if pooling_type == "CLS":
            self.cls_token = nnx.Param(jnp.zeros((1, 1, 16)))
        else:
            self.MAPHead = MAPHead(16, rngs=rngs)
        self.transformer = nnx.Sequential(*[JimmLayer(16, rngs=rngs) for _ in range(2)])

    def __call__(self, image):
        x = self.patch_embeddings(image).reshape(image.shape[0], -1, 16)
        if self.pooling_type == "CLS":
            cls = jnp.tile(self.cls_token[...], (x.shape[0], 1, 1))
            x = jnp.concatenate([cls, x], axis=1)
        x = self.transformer(x)
        return x[:, 0] if self.pooling_type == "CLS" else self.MAPHead(x)


class JimmViT(nnx.Module):
    """An encoder and a classifier."""

    def __init__(self, rngs: nnx.Rngs = nnx.Rngs(0)) -> None:  # noqa: B008
        self.encoder = JimmVision("CLS", rngs=rngs)
        self.classifier = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        return self.classifier(self.encoder(x))


class SigLIP(nnx.Module):
    """Two towers; the scale and the bias of the logits are scalar parameters."""

    def __init__(self, rngs: nnx.Rngs = nnx.Rngs(0)) -> None:  # noqa: B008
        mask = jnp.tril(jnp.ones((16, 16)))
        self.vision_model = JimmVision("MAP", rngs=rngs)
        self.token_embedding = nnx.Embed(num_embeddings=64, features=16, rngs=rngs)
        self.text_model = nnx.Sequential(JimmLayer(16, attn_mask=mask, rngs=rngs))
        self.text_projection = nnx.Linear(16, 16, rngs=rngs)
        self.logit_scale = nnx.Param(jnp.ones([]) * 2.0)
        self.logit_bias = nnx.Param(jnp.zeros(()))

    def __call__(self, image, text):
        image = self.vision_model(image)
        text = self.text_model(self.token_embedding(text))
        text = self.text_projection(text[jnp.arange(len(text)), -1])
        image, text = (
            x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (image, text)
        )
        return jnp.exp(self.logit_scale[...]) * image @ text.T + self.logit_bias[...]


def sigmoid_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["image"], batch["tokens"])
    signs = 2 * jnp.eye(len(logits)) - 1
    return -jnp.sum(nnx.log_sigmoid(signs * logits), axis=-1).mean()


# Agents of reinforcement learning.


class TrXLState(PyTreeNode):
    """The memory of an agent."""

    memory: jax.Array
    valid_len: jax.Array


class GTrXL(nnx.Module):
    """Relative positions from an array outside of Variables, gates, and a memory."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.fc = nnx.Linear(3, 16, rngs=rngs)
        self.values, self.keys, self.queries = linear(8, 8), linear(8, 8), linear(8, 8)
        self.r_proj = linear(16, 16)
        self.u_bias = nnx.Param(jnp.zeros((2, 8)))
        self.v_bias = nnx.Param(jnp.zeros((2, 8)))
        self.inv_freqs = 10_000.0 ** (-jnp.arange(0, 16, 2, dtype=jnp.float32) / 16)
        self.w_r, self.u_r = linear(16, 16), linear(16, 16)
        self.b_g = nnx.Param(jnp.full((16,), 2.0))
        self.fc_pi = nnx.Linear(16, 4, rngs=rngs)

    def initial_state(self, rows: int) -> TrXLState:
        memory, valid = jnp.zeros((rows, 4, 16)), jnp.zeros((rows,), jnp.int32)
        return TrXLState(memory=memory, valid_len=valid)

    def attend(self, x, memory, valid):
        seen = jnp.concatenate([memory, x], axis=1)
        q, k, v = self.queries(heads(x, 2)), self.keys(heads(seen, 2)), heads(seen, 2)
        count, first = seen.shape[1], memory.shape[1]
        angles = jnp.arange(count + 1.0)[:, None] * self.inv_freqs[None, :]
        table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        far = jnp.arange(x.shape[1])[:, None] + first - jnp.arange(count)[None, :]
        relative = heads(self.r_proj(table), 2)[jnp.clip(far, 0, count)]
        energy = jnp.einsum("nqhd,nkhd->nhqk", q + self.u_bias[...], k)
        energy += jnp.einsum("nqhd,qkhd->nhqk", q + self.v_bias[...], relative)
        is_valid = jnp.arange(count)[None] >= first - valid[:, None]
        mask = (far >= 0)[None] & is_valid[:, None]
        weights = nnx.softmax(jnp.where(mask[:, None], energy, -1e30), axis=3)
        out = jnp.einsum("nhql,nlhd->nqhd", weights, self.values(v))
        return out.reshape(x.shape)

    def __call__(self, x, state: TrXLState):
        x = nnx.relu(self.fc(x))
        h = self.attend(x, state.memory, state.valid_len)
        gate = nnx.sigmoid(self.w_r(h) + self.u_r(x) - self.b_g[...])
        x = (1 - gate) * x + gate * jnp.tanh(h)
        state = state.replace(memory=jnp.concatenate([state.memory, x], 1)[:, -4:])
        return self.fc_pi(x), state


def policy_loss(model: Any, batch: Any) -> jax.Array:
    steps, state = batch["past"], model.initial_state(batch["past"].shape[0])
    _, state = model(steps[:, :6], state)
    memory = jax.lax.stop_gradient(state.memory)
    logits, _ = model(
        steps[:, 6:], TrXLState(memory=memory, valid_len=state.valid_len + 4)
    )
    actions = batch["tokens"][:, :6] % 4
    logp = jnp.take_along_axis(nnx.log_softmax(logits), actions[..., None], -1)[..., 0]
    gain = steps[:, 6:].sum(-1)
    ratio = jnp.exp(logp - jax.lax.stop_gradient(logp - 0.1 * gain))
    clipped = jnp.clip(ratio, 0.8, 1.2)
    entropy = -(nnx.softmax(logits) * nnx.log_softmax(logits)).sum(-1).mean()
    return -jnp.minimum(ratio * gain, clipped * gain).mean() - 0.01 * entropy


class PPOLSTM(nnx.Module):
    """Steps a cell with a `jax.lax.scan` that closes over the module."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.fc1 = nnx.Linear(3, 16, rngs=rngs)
        self.lstm = nnx.LSTMCell(16, 16, rngs=rngs)
        self.fc_pi = nnx.Linear(16, 4, rngs=rngs)
        self.fc_v = nnx.Linear(16, 1, rngs=rngs)

    def step(self, obs, carry, done):
        c, h = carry
        keep = (1.0 - done)[..., None]
        carry, hidden = self.lstm((c * keep, h * keep), nnx.relu(self.fc1(obs)))
        return self.fc_pi(hidden), self.fc_v(hidden), carry

    def unroll(self, obs, done, carry):
        def scan_step(carry, inputs):
            logits, value, carry = self.step(inputs[0], carry, inputs[1])
            return carry, (logits, value)

        return jax.lax.scan(scan_step, carry, (obs, done))


def unroll_loss(model: Any, batch: Any) -> jax.Array:
    obs = jnp.swapaxes(batch["past"], 0, 1)
    done = (obs[..., 0] > 1.0).astype(jnp.float32)
    carry = model.lstm.initialize_carry((obs.shape[1], 16), rngs=nnx.Rngs(0))
    _, (logits, values) = model.unroll(obs, done, carry)
    policy = cross_entropy(logits, jnp.swapaxes(batch["tokens"][:, :12], 0, 1) % 4)
    return policy + 0.5 * jnp.square(values[..., 0] - obs.sum(-1)).mean()


class DuelingQNetwork(nnx.Module):
    """An activation as an attribute, two branches, an action selected by index."""

    def __init__(self, activation: Callable, rngs: nnx.Rngs) -> None:
        self.activation = activation
        self.layers = nnx.List()
        for size in (16, 32):
            self.layers.append(nnx.Linear(size, 32, rngs=rngs))
        self.value_head = nnx.Linear(32, 1, rngs=rngs)
        self.advantage_head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, obs):
        for layer in self.layers:
            obs = self.activation(layer(obs))
        advantage = self.advantage_head(obs)
        return self.value_head(obs) + advantage - advantage.mean(-1, keepdims=True)

    def take(self, obs, action):
        return jnp.take_along_axis(self(obs), action[:, None], axis=1).squeeze(1)


def q_agent(rngs: nnx.Rngs) -> nnx.Module:
    online = DuelingQNetwork(nnx.relu, rngs)
    return nnx.Dict(online=online, target=nnx.clone(online))


def q_loss(model: Any, batch: Any) -> jax.Array:
    following = model.target(batch["rows"][:, ::-1]).max(axis=-1)
    target = batch["future"][:, 0] + 0.99 * jax.lax.stop_gradient(following)
    found = model.online.take(batch["rows"], batch["label"] % 4)
    return optax.huber_loss(found, target).mean()


class SquashedGaussianPolicy(nnx.Module):
    """Squashes a sample made with the batch's noise, and returns its probability."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.features = nnx.Linear(16, 32, rngs=rngs)
        self.action_mean = nnx.Linear(32, 4, rngs=rngs)
        self.action_log_std = nnx.Linear(32, 4, rngs=rngs)
        self.rngs = rngs

    def __call__(self, obs, noise):
        x = nnx.relu(self.features(obs))
        mean, log_std = self.action_mean(x), jnp.clip(self.action_log_std(x), -5, 2)
        before = mean + jnp.exp(log_std) * noise
        log_prob = -(log_std + noise**2 / 2) - 2 * (
            jnp.log(2.0) - before - nnx.softplus(-2 * before)
        )
        return jnp.tanh(before), log_prob.sum(axis=-1)


def actor_loss(model: Any, batch: Any) -> Any:
    action, log_prob = model(batch["rows"], batch["future"])
    value = -jnp.square(action - batch["rows"][:, :4]).sum(-1)
    return (0.2 * log_prob - value).mean(), {"entropy": -log_prob.mean()}


STACK: Any = partial(Public, repository="jax-ml/jax-ai-stack")
JIMM: Any = partial(Public, repository="pythoncrazy/jimm")
RL: Any = partial(Public, repository="jinPrelude/minimal-rl-nnx")
REJAX: Any = partial(
    Public, repository="timoklein/rejax", path="src/rejax/networks_nnx.py"
)

CASES = {
    "jax-ai-stack minigpt": STACK(
        path="docs/source/JAX_for_LLM_pretraining.md",
        build=MiniGPT,
        loss=mini_loss,
    ),
    "jax-ai-stack diffusion": STACK(
        path="docs/source/digits_diffusion_model.md",
        build=DigitsUNet,
        is_built=True,
        loss=denoising_loss,
    ),
    "jax-ai-stack time series": STACK(
        path="docs/source/JAX_time_series_classification.md",
        build=TimeSeries,
        loss=series_loss,
    ),
    "jax-ai-stack segmentation": STACK(
        path="docs/source/JAX_examples_image_segmentation.md",
        build=Unetr,
        loss=segmentation_loss,
    ),
    "jax-ai-stack text": STACK(
        path="docs/source/JAX_transformer_text_classification.md",
        build=TextClassifier,
        loss=text_loss,
    ),
    "jimm vit": JIMM(
        path="src/jimm/models/vit.py", build=JimmViT, loss=classification_loss
    ),
    "jimm siglip": JIMM(
        path="src/jimm/models/siglip.py", build=SigLIP, loss=sigmoid_loss
    ),
    "minimal-rl gtrxl": RL(path="ppo_gtrxl.py", build=GTrXL, loss=policy_loss),
    "minimal-rl lstm": RL(path="ppo_lstm.py", build=PPOLSTM, loss=unroll_loss),
    "rejax dqn": REJAX(
        build=q_agent, loss=q_loss, wrt=nnx.All(nnx.Param, nnx.PathContains("online"))
    ),
    "rejax sac": REJAX(build=SquashedGaussianPolicy, loss=actor_loss),
}
