"""Small Trainers of four kinds of models, and strategies to plan them with."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.models import (
    GPT,
    GPTConfig,
    ResNet,
    ResNetConfig,
    ViT,
    ViTConfig,
    classification_loss,
    next_token_loss,
)
from nnx_parallel.plan.parts import Parts
from tests.strangers.language import Llama
from tests.strangers.language import next_token_loss as stock_loss

ROWS = 32
TX = optax.adamw(1e-3)


def shape(*dims: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, np.dtype(dtype))


def parts_of(
    build: Callable[[nnx.Rngs], nnx.Module], loss: Any, batch: Any, **options: Any
) -> Parts:
    return Parts.of(Trainer(build, TX, loss, loggers=(), **options), batch)


def gpt(**options: Any) -> Parts:
    config = GPTConfig.tiny(num_layers=2, seq_len=16)
    tokens = shape(ROWS, config.seq_len + 1, dtype="int32")
    build = lambda rngs: GPT(config, rngs=rngs)  # noqa: E731
    return parts_of(build, next_token_loss, {"tokens": tokens}, **options)


def resnet() -> Parts:
    config = ResNetConfig.tiny()
    images = shape(ROWS, 8, 8, 3)
    batch = {"inputs": images, "labels": shape(ROWS, dtype="int32")}
    return parts_of(lambda r: ResNet(config, rngs=r), classification_loss, batch)


def vit() -> Parts:
    config = ViTConfig.tiny()
    images = shape(ROWS, config.image_size, config.image_size, 3)
    batch = {"inputs": images, "labels": shape(ROWS, dtype="int32")}
    return parts_of(lambda r: ViT(config, rngs=r), classification_loss, batch)


def stock() -> Parts:
    """A transformer of plain NNX modules, none of them from this package."""
    tokens = shape(ROWS, 17, dtype="int32")
    return parts_of(lambda rngs: Llama(rngs), stock_loss, {"tokens": tokens})


MODELS: dict[str, Callable[[], Parts]] = {
    "gpt": gpt,
    "resnet": resnet,
    "vit": vit,
    "stock": stock,
}
STRATEGIES: dict[str, Strategy] = {
    "dp8": DataParallel(8),
    "fsdp8": FSDP(8),
    "gradients": FSDP(8, shard="gradients"),
    "optimizer": FSDP(8, shard="optimizer"),
    "all": FSDP(8, min_size=0),
    "hybrid": Composite(DataParallel(2), FSDP(4)),
    "tp2": Composite(FSDP(4), TensorParallel(2)),
    "dp_tp": Composite(DataParallel(2), FSDP(2), TensorParallel(2)),
}
PIPELINED = Composite(Pipeline(2), FSDP(4))
