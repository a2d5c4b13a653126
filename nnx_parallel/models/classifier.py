"""The smallest model: a residual MLP over feature vectors, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.errors import suggests_names
from nnx_parallel.layers import Dense, Stack, cross_entropy, named
from nnx_parallel.metrics import Mean
from nnx_parallel.sharding import constrain


@suggests_names
@dataclass(frozen=True, kw_only=True)
class MLPClassifierConfig:
    """Shape of an `MLPClassifier`.

    Attributes:
        num_features: Length of an input.
        num_classes: Number of labels.
        num_layers: Number of hidden blocks.
        embed_dim: Width between blocks.
        mlp_dim: Width inside a block.
        dropout: Probability that an output of a block is dropped.

    Raises:
        ValueError: If a value is out of range.
    """

    num_features: int
    num_classes: int
    num_layers: int = 2
    embed_dim: int = 64
    mlp_dim: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "num_features",
            "num_classes",
            "num_layers",
            "embed_dim",
            "mlp_dim",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"MLPClassifierConfig.{name} is {getattr(self, name)}; it must be "
                    "at least 1."
                )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"MLPClassifierConfig.dropout is {self.dropout}; it must be a "
                "probability in [0, 1)."
            )


class HiddenBlock(nnx.Module):
    """``x + down(gelu(up(x)))``, with one sum over devices under `TensorParallel`."""

    def __init__(self, config: MLPClassifierConfig, *, rngs: nnx.Rngs) -> None:
        embed, mlp = {"embed": config.embed_dim}, {"mlp": config.mlp_dim}
        self.up = Dense(embed, mlp, rngs=rngs, use_bias=True)
        self.down = Dense(mlp, embed, rngs=rngs, use_bias=True)
        self.dropout = nnx.Dropout(
            config.dropout, rngs=rngs if config.dropout else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, embed) to the same shape; the hidden layer is (batch, mlp)."""
        hidden = jax.nn.gelu(constrain(self.up(x), "batch", "mlp"))
        return constrain(x + self.dropout(self.down(hidden)), "batch", "embed")


class MLPClassifier(nnx.Module):
    """Maps feature vectors to logits of classes.

    The hidden blocks are a `Stack`. `TensorParallel` splits the first kernel of each
    block by columns and the second kernel by rows, and `Pipeline` distributes the
    blocks over stages.

    The first and the last layer are `nnx.Linear` modules. Their parameters have names.
    The dims of features and classes have no name, because the data determines their
    sizes, and few meshes divide these sizes.

    Args:
        config: Shape of the model.
        rngs: Keys for parameters and dropout.

    Example:
        >>> config = MLPClassifierConfig(num_features=64, num_classes=10)
        >>> MLPClassifier(config, rngs=nnx.Rngs(0))(jnp.ones((8, 64))).shape
        (8, 10)
    """

    def __init__(self, config: MLPClassifierConfig, *, rngs: nnx.Rngs) -> None:
        kernel_init = nnx.initializers.lecun_normal()
        zeros = nnx.initializers.zeros_init()
        self.inputs = nnx.Linear(
            config.num_features,
            config.embed_dim,
            kernel_init=named(kernel_init, None, "embed"),
            bias_init=named(zeros, "embed"),
            rngs=rngs,
        )
        self.blocks = Stack(
            lambda rngs: HiddenBlock(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.head = nnx.Linear(
            config.embed_dim,
            config.num_classes,
            kernel_init=named(kernel_init, "embed", None),
            bias_init=named(zeros, None),
            rngs=rngs,
        )

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps (batch, features) to logits (batch, classes)."""
        x = constrain(jax.nn.gelu(self.inputs(inputs)), "batch", "embed")
        return constrain(self.head(self.blocks(x)), "batch", None)


def classification_loss(
    model: Callable[[jax.Array], jax.Array], batch: Mapping[str, jax.Array]
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the cross-entropy of the labels, and the accuracy of the likeliest class.

    Args:
        model: A function that maps inputs to logits ``(batch, classes)``.
        batch: ``inputs`` ``(batch, ...)`` and ``labels`` int ``(batch,)``.

    Returns:
        The loss in nats per example, and ``{"accuracy": Mean}``.

    Example:
        >>> config = MLPClassifierConfig(num_features=4, num_classes=3)
        >>> model = MLPClassifier(config, rngs=nnx.Rngs(0))
        >>> batch = {"inputs": jnp.ones((8, 4)), "labels": jnp.zeros(8, jnp.int32)}
        >>> loss, metrics = classification_loss(model, batch)
        >>> sorted(metrics)
        ['accuracy']
    """
    logits = model(batch["inputs"])
    hits = jnp.argmax(logits, axis=-1) == batch["labels"]
    accuracy = Mean(hits.sum().astype(jnp.float32), jnp.float32(hits.size))
    return cross_entropy(logits, batch["labels"]), {"accuracy": accuracy}


def read_labels(settings: Mapping[str, Any]) -> int:
    """Returns the number of classes; the default is two, as in transformers."""
    return len(settings.get("id2label") or ()) or settings.get("num_labels", 2)


def write_labels(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns numbered labels for the ``config.json`` of an image classifier."""
    labels = {f"LABEL_{i}": i for i in range(fields["num_classes"])}
    return {"id2label": {str(i): x for x, i in labels.items()}, "label2id": labels}
