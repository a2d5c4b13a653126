"""``python -m benchmarks.first_step_child MODEL WAY``: a first step in a new process.

The last line of its output is its measurements, as JSON: seconds from the finished
imports to the loss of the first step on the host, seconds in XLA's compiler, and the
loss.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.stock import StockBlock, StockTransformer
from nnx_parallel import FSDP, Composite, DataParallel, TensorParallel, Trainer
from nnx_parallel.models import GPT, GPTConfig, ResNet, ResNetConfig, next_token_loss
from nnx_parallel.sharding import PathNames

ROWS, SEQ_LEN, VOCAB, CLASSES, IMAGE_SIZE = 16, 32, 256, 16, 32
TX = optax.adamw(1e-3)
STRATEGIES = {
    "one device": DataParallel(1),
    "FSDP": FSDP(8),
    "tensor x FSDP": Composite(TensorParallel(2), FSDP(4)),
}


class Llama(nnx.Module):
    """A list of blocks like Llama's and Qwen 3's: grouped queries, gated MLPs."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, 64, rngs=rngs)
        self.blocks = nnx.List([LlamaBlock(64, 4, 2, rngs) for _ in range(28)])
        self.norm = nnx.RMSNorm(64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(batch, seq) to logits (batch, seq, vocab)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class LlamaBlock(nnx.Module):
    """Attention and gated MLP, each behind a norm."""

    def __init__(self, width: int, heads: int, kv_heads: int, rngs: nnx.Rngs) -> None:
        head_dim = width // heads

        def linear(fan_in: int, fan_out: int) -> nnx.Linear:
            return nnx.Linear(fan_in, fan_out, use_bias=False, rngs=rngs)

        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.query = linear(width, width)
        self.key = linear(width, kv_heads * head_dim)
        self.value = linear(width, kv_heads * head_dim)
        self.out = linear(width, width)
        self.query_norm = nnx.RMSNorm(head_dim, rngs=rngs)
        self.key_norm = nnx.RMSNorm(head_dim, rngs=rngs)
        self.gate, self.up = linear(width, 3 * width), linear(width, 3 * width)
        self.down = linear(3 * width, width)
        self.head_dim = head_dim

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, seq, width) -> (batch, seq, width)."""

        def heads(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], -1, self.head_dim)

        y = self.norms[0](x)
        q = self.query_norm(heads(self.query(y)))
        k = self.key_norm(heads(self.key(y)))
        v = heads(self.value(y))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        y = self.norms[1](x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class VisionTransformer(nnx.Module):
    """Patches, 12 stock blocks, the mean over patches."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, 64, (4, 4), strides=4, rngs=rngs)
        shape = (1, (IMAGE_SIZE // 4) ** 2, 64)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
        self.blocks = nnx.List([StockBlock(64, 4, rngs) for _ in range(12)])
        self.head = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """(batch, height, width, 3) to logits (batch, classes)."""
        x = self.patches(images).reshape(len(images), -1, 64) + self.positions[...]
        mask = jnp.ones((1, 1, x.shape[1], x.shape[1]), bool)
        for block in self.blocks:
            x = block(x, mask, lambda y: y)
        return self.head(x.mean(axis=1))


class Mamba(nnx.Module):
    """Layers of a gated linear recurrence over the sequence, like Mamba's."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, 64, rngs=rngs)
        self.blocks = nnx.List([MambaBlock(64, 8, rngs) for _ in range(12)])
        self.norm = nnx.RMSNorm(64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(batch, seq) to logits (batch, seq, vocab)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.embed.attend(self.norm(x))


class MambaBlock(nnx.Module):
    """A convolution, a selective recurrence, a gate."""

    def __init__(self, width: int, num_states: int, rngs: nnx.Rngs) -> None:
        inner = 2 * width
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * inner, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(
            inner, inner, (4,), padding="CAUSAL", feature_group_count=inner, rngs=rngs
        )
        self.select = nnx.Linear(inner, 2 * num_states, use_bias=False, rngs=rngs)
        self.rate = nnx.Linear(inner, inner, rngs=rngs)
        rates = jnp.arange(1, num_states + 1, dtype=jnp.float32)
        self.log_decay = nnx.Param(jnp.tile(jnp.log(rates), (inner, 1)))
        self.skip = nnx.Param(jnp.ones(inner))
        self.down = nnx.Linear(inner, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, seq, width) -> (batch, seq, width)."""
        x, gate = jnp.split(self.up(self.norm(x)), 2, axis=-1)
        x = jax.nn.silu(self.conv(x))
        taken, given = jnp.split(self.select(x), 2, axis=-1)  # (batch, seq, state)
        rate = jax.nn.softplus(self.rate(x))[..., None]  # (batch, seq, inner, 1)
        decay = jnp.exp(-rate * jnp.exp(self.log_decay[...]))
        change = rate * taken[:, :, None] * x[..., None]

        def join(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        _, states = jax.lax.associative_scan(join, (decay, change), axis=1)
        y = jnp.einsum("bsit,bst->bsi", states, given) + self.skip[...] * x
        return self.down(y * jax.nn.silu(gate))


def token_loss(model: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy of each token given the earlier tokens."""
    tokens = batch["tokens"]
    return mean_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def image_loss(model: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy of the labels."""
    return mean_cross_entropy(model(batch["image"]), batch["label"])


def mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all labels."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def gpt_loss(model: Any, batch: Any) -> jax.Array:
    """The value of our GPT's loss, which is a `Mean`."""
    return next_token_loss(model, batch).value


@dataclass(frozen=True)
class Case:
    """Returns a model, its loss, and names for its dims if the model has no names."""

    build: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable[[Any, Any], jax.Array] = token_loss
    names: PathNames | None = None

    # Without names all devices of `tensor` would compute the whole model.


_MLP_NAMES = (
    (r"(gate|up)\.kernel", ("embed", "mlp")),
    (r"down\.kernel", ("mlp", "embed")),
)
LLAMA_NAMES = PathNames(
    (r"query\.kernel", ("embed", "heads")),
    (r"(key|value)\.kernel", ("embed", "kv_heads")),
    (r"out\.kernel", ("heads", "embed")),
    *_MLP_NAMES,
)
STOCK_NAMES = PathNames(
    (r"(query|key|value)\.kernel", ("embed", "heads", None)),
    (r"out\.kernel", ("heads", None, "embed")),
    *_MLP_NAMES,
    optional=True,
)

GPT_CONFIG = GPTConfig.tiny(num_layers=12, seq_len=SEQ_LEN, vocab_size=VOCAB)
RESNET = ResNetConfig.resnet18(num_classes=CLASSES, width=16, is_small=True)
CASES = {
    "GPT, a Stack of 12": Case(lambda rngs: GPT(GPT_CONFIG, rngs=rngs), gpt_loss),
    "Llama, a list of 28": Case(Llama, names=LLAMA_NAMES),
    "stock transformer, a list of 12": Case(
        lambda rngs: StockTransformer(VOCAB, 64, 12, 4, rngs=rngs), names=STOCK_NAMES
    ),
    "ViT, a list of 12": Case(VisionTransformer, image_loss, STOCK_NAMES),
    "ResNet, BatchNorm": Case(lambda rngs: ResNet(RESNET, rngs=rngs), image_loss),
    "Mamba, a list of 12": Case(Mamba),
}


def make_batch() -> dict[str, np.ndarray]:
    """Random tokens, images and labels."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(ROWS, IMAGE_SIZE, IMAGE_SIZE, 3))
    return {
        "tokens": rng.integers(0, VOCAB, (ROWS, SEQ_LEN + 1), dtype=np.int32),
        "image": images.astype(np.float32),
        "label": rng.integers(0, CLASSES, ROWS, dtype=np.int32),
    }


def plain(case: Case) -> float:
    """The first step as Flax's guide writes it."""
    model = case.build(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(case.loss)(model, batch)
        optimizer.update(model, grads)
        return loss

    return float(step(model, optimizer, make_batch()))


def ours(case: Case, way: str) -> float:
    """The first step of a fit."""
    strategy = STRATEGIES[way]
    devices = jax.devices()[:1] if way == "one device" else None
    trainer = Trainer(
        case.build,
        TX,
        case.loss,
        strategy=strategy,
        names=case.names,
        devices=devices,
        loggers=(),
    )
    return trainer.fit([make_batch()], num_steps=1)["loss"][0]


def main(model: str, way: str) -> None:
    """Runs one first step, and prints how long it took."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1 if way == "nnx.jit" else 8)
    jax.devices()  # a backend takes as long to start for either
    compiling = [0.0]

    def add(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiling[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(add)
    start = time.perf_counter()
    loss = plain(CASES[model]) if way == "nnx.jit" else ours(CASES[model], way)
    print(json.dumps([time.perf_counter() - start, compiling[0], float(loss)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
