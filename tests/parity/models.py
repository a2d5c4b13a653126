"""The models of the parity tests, each with its loss, its data, and its rules.

Under every strategy, every shard's last dim has a size of at least 8. Initial
parameters are then bit for bit the same under every layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel.models import (
    GPT,
    GPTConfig,
    MLPClassifier,
    MLPClassifierConfig,
    classification_loss,
    next_token_loss,
)
from nnx_parallel.sharding import LogicalRules, PathRules, Rules
from nnx_parallel.training.step import LossFn

NUM_ROWS = 32  # 4 microbatches of 8 shards each
SEQ_LEN = 8
WIDTH = 64
VOCAB = 64
CLASSES = 16

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with everything that its training needs.

    Attributes:
        build: Builds the model.
        loss: Its loss.
        make_batch: Draws a batch from a random generator.
        wrt: Filter of the Variables that are trained.
        tensor_rules: Placement over the axis ``tensor`` for models without logical
            axes that `TensorParallel` knows.
        other_rules: Rules for the strategies without that axis.
    """

    build: Callable[[nnx.Rngs], nnx.Module]
    loss: LossFn
    make_batch: Callable[[np.random.Generator], Arrays]
    wrt: Any = nnx.Param
    tensor_rules: tuple[Rules, ...] = ()
    other_rules: tuple[Rules, ...] = ()

    def batches(self, count: int) -> list[Arrays]:
        """Draws ``count`` batches, the same at every call."""
        rng = np.random.default_rng(0)
        return [self.make_batch(rng) for _ in range(count)]


class ConvNet(nnx.Module):
    """Convolutions with batch statistics and dropout.

    The activation is smooth. At the kink of a ReLU, rounding would decide the gradient.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(3, WIDTH, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(WIDTH, rngs=rngs)
        # XLA's partitioner computes a multiple of the gradient of grouped convolutions
        # (docs/library-notes.md, "What the partitioner computes wrongly").
        self.conv2 = nnx.Conv(
            WIDTH, 32, (3, 3), strides=2, feature_group_count=4, rngs=rngs
        )
        self.norm2 = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(3 * 3 * 32, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.silu(self.norm1(self.conv1(images)))
        x = nnx.silu(self.norm2(self.conv2(x)))
        return self.head(self.dropout(x.reshape(x.shape[0], -1)))


class AdaptedTransformer(nnx.Module):
    """Trained stock attention, low-rank adapters on MLP and head; the rest frozen."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=WIDTH, dropout_rate=0.1, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = adapted(WIDTH, 2 * WIDTH, rngs)
        self.down = adapted(2 * WIDTH, WIDTH, rngs)
        self.head = adapted(WIDTH, VOCAB, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(tokens))
        x = x + self.down(nnx.gelu(self.up(self.norm2(x))))
        return self.head(x)


def adapted(in_features: int, out_features: int, rngs: nnx.Rngs) -> nnx.LoRA:
    """A linear map with a trainable map of rank 8 added to it."""
    base = nnx.Linear(in_features, out_features, rngs=rngs)
    return nnx.LoRA(in_features, 8, out_features, base_module=base, rngs=rngs)


class Recurrent(nnx.Module):
    """An LSTM over a sequence of vectors."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.LSTMCell(CLASSES, WIDTH, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, sequence: jax.Array) -> jax.Array:
        outputs: Any = self.rnn(sequence)  # (batch, seq, WIDTH)
        return self.head(outputs[:, -1])


class Annotated(nnx.Module):
    """A model with Flax's sharding metadata and the mesh axis of its guide, ``model``.

    It has more outputs than classes, so that every shard's last dim is at least 8.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        columns = nnx.with_partitioning(init, (None, "model"))
        rows = nnx.with_partitioning(init, ("model", None))
        zeros = nnx.with_partitioning(nnx.initializers.zeros_init(), ("model",))
        self.up = nnx.Linear(
            CLASSES, 2 * WIDTH, kernel_init=columns, bias_init=zeros, rngs=rngs
        )
        self.down = nnx.Linear(2 * WIDTH, WIDTH, kernel_init=rows, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


def label_loss(model: Any, batch: Arrays) -> jax.Array:
    """Mean cross-entropy of one label per row, as a plain scalar."""
    logs = jax.nn.log_softmax(model(batch["inputs"]))
    return -jnp.take_along_axis(logs, batch["labels"][:, None], axis=1).mean()


def token_loss(model: Any, batch: Arrays) -> jax.Array:
    """Mean cross-entropy of the next token, as a plain scalar."""
    logs = jax.nn.log_softmax(model(batch["tokens"][:, :-1]))
    labels = batch["tokens"][:, 1:, None]
    return -jnp.take_along_axis(logs, labels, axis=2).mean()


def token_batch(rng: np.random.Generator) -> Arrays:
    """Arithmetic progressions, with weight 0 for some tokens."""
    start, difference = rng.integers(0, VOCAB, (2, NUM_ROWS, 1))
    tokens = (start + difference % 4 * np.arange(SEQ_LEN + 1)) % VOCAB
    lengths = rng.integers(2, SEQ_LEN + 2, (NUM_ROWS, 1))
    weights = np.arange(SEQ_LEN + 1)[None] < lengths
    return {"tokens": tokens, "weights": weights.astype(np.float32)}


def label_batch(*shape: int) -> Callable[[np.random.Generator], Arrays]:
    """Noise around one prototype for each label."""
    prototypes = np.random.default_rng(1).normal(size=(CLASSES, *shape))

    def make(rng: np.random.Generator) -> Arrays:
        labels = rng.integers(0, CLASSES, NUM_ROWS)
        inputs = prototypes[labels] + rng.normal(size=(NUM_ROWS, *shape))
        return {"inputs": inputs.astype(np.float32), "labels": labels}

    return make


def gpt(config: GPTConfig) -> Case:
    """A GPT and the tokens that it learns from."""
    return Case(
        build=lambda rngs: GPT(config, rngs=rngs),
        loss=next_token_loss,
        make_batch=token_batch,
    )


GPT_SIZES = {
    "vocab_size": VOCAB,
    "seq_len": SEQ_LEN,
    "num_layers": 2,
    "embed_dim": WIDTH,
    "dropout": 0.1,
}
CLASSIFIER = MLPClassifierConfig(
    num_features=CLASSES,
    num_classes=CLASSES,
    embed_dim=WIDTH,
    mlp_dim=2 * WIDTH,
    dropout=0.1,
)

CASES = {
    "mlp": Case(
        build=lambda rngs: MLPClassifier(CLASSIFIER, rngs=rngs),
        loss=classification_loss,
        make_batch=label_batch(CLASSES),
    ),
    "gpt": gpt(GPTConfig.tiny(**GPT_SIZES)),
    "llama": gpt(
        GPTConfig.tiny_llama(
            **GPT_SIZES, num_heads=8, num_kv_heads=4, mlp_dim=2 * WIDTH, z_loss=1e-3
        )
    ),
    "cnn": Case(
        build=ConvNet,
        loss=label_loss,
        make_batch=label_batch(6, 6, 3),
        tensor_rules=(
            PathRules(
                (r"conv1\.kernel", P(None, None, None, "tensor")),
                (r"(conv1\.bias|norm1\.)", P("tensor")),
                (r"conv2\.kernel", P(None, None, "tensor")),
            ),
        ),
    ),
    "lora": Case(
        build=AdaptedTransformer,
        loss=token_loss,
        make_batch=token_batch,
        wrt=nnx.Any(nnx.LoRAParam, nnx.All(nnx.Param, nnx.PathContains("attention"))),
        tensor_rules=(
            PathRules(
                (r"attention\.(query|key|value)\.kernel", P(None, "tensor")),
                (r"attention\.out\.kernel", P("tensor")),
                (r"up\.(base_module\.kernel|lora_b)", P(None, "tensor")),
                (r"down\.(base_module\.kernel|lora_a)", P("tensor")),
            ),
        ),
    ),
    "rnn": Case(
        build=Recurrent,
        loss=label_loss,
        make_batch=label_batch(SEQ_LEN, CLASSES),
        tensor_rules=(PathRules((r"cell\..*\.kernel", P(None, "tensor"))),),
    ),
    "annotated": Case(
        build=Annotated,
        loss=label_loss,
        make_batch=label_batch(CLASSES),
        tensor_rules=(LogicalRules({"model": "tensor"}),),
        other_rules=(LogicalRules({"model": None}),),
    ),
}


def deep(*, tied: bool, dropout: float) -> Case:
    """A GPT whose layers divide into 4 stages of 2 chunks."""
    sizes = GPT_SIZES | {"num_layers": 8, "dropout": dropout, "tied": tied}
    return gpt(GPTConfig.tiny(**sizes))


DEEP_CASES = {
    "tied_dropout": deep(tied=True, dropout=0.1),
    "untied": deep(tied=False, dropout=0.0),
    "untied_dropout": deep(tied=False, dropout=0.1),
    "tied": deep(tied=True, dropout=0.0),
}
