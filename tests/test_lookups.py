"""Labels and tokens out of range that leave the loss finite are named at once."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Player, Players, Trainer
from nnx_parallel.errors import ParallelWarning
from nnx_parallel.layers import cross_entropy
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

CLASSES = 4
X = np.ones((8, 4), np.float32)
GOOD = np.array([0, 1, 2, 3, 0, 1, 2, 3], np.int32)
LOW = np.array([0, 1, 2, 3, 0, 1, 2, -1], np.int32)
HIGH = np.array([0, 1, 2, 3, 0, 1, 2, 5], np.int32)
IGNORED = np.array([0, 1, 2, 3, 0, 1, 2, -100], np.int32)


def by_optax(logits: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def by_take(logits: Any, y: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
    return -chosen[:, 0]


def by_index(logits: Any, y: Any) -> Any:
    return -jax.nn.log_softmax(logits)[jnp.arange(len(y)), y]


def by_vmap(logits: Any, y: Any) -> Any:
    return -jax.vmap(lambda row, label: row[label])(jax.nn.log_softmax(logits), y)


def by_one_hot(logits: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(y, CLASSES))


LOSSES: list[Callable[[Any, Any], Any]] = [
    by_optax,
    by_take,
    by_index,
    by_vmap,
    by_one_hot,
]


def fit(loss: Any, batch: Any, model: Any = None, **options: Any) -> Any:
    model = model or (lambda rngs: nnx.Linear(4, CLASSES, rngs=rngs))
    trainer = Trainer(model, optax.sgd(0.1), loss, loggers=(), **options)
    return trainer.fit([batch] * 2, 2)


def message(name: str, low: int, high: int, size: int = CLASSES) -> str:
    return re.escape(f"The first batch has {name} from {low} to {high}, ") + (
        rf".* valid values are 0 to {size - 1}\."
    )


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("strategy", [None, FSDP()])
def test_negative_label_warns(losses: Any, strategy: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return losses(model(batch["x"]), batch["y"]).mean()

    expected = message(r"batch['y']", -1, 3)
    with pytest.warns(ParallelWarning, match=expected) as found:
        fit(loss, {"x": X, "y": LOW}, strategy=strategy)
    assert len(found) == 1
    assert found[0].filename == __file__
    fit(loss, {"x": X, "y": GOOD}, strategy=strategy)  # warnings are errors


@pytest.mark.parametrize("losses", [by_index, by_vmap, by_one_hot])
def test_label_beyond_classes_warns(losses: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return losses(model(batch["x"]), batch["labels"]).mean()

    with pytest.warns(ParallelWarning, match=message(r"batch['labels']", 0, 5)):
        history = fit(loss, {"x": X, "labels": HIGH})
    assert np.isfinite(history["loss"]).all()


def where(losses: Any, logits: Any, y: Any) -> Any:
    return jnp.where(y >= 0, losses(logits, y), 0).sum() / (y >= 0).sum()


def product(losses: Any, logits: Any, y: Any) -> Any:
    mask = (y != -100).astype(jnp.float32)
    return (losses(logits, jnp.where(y == -100, 0, y)) * mask).sum() / mask.sum()


def clamped(losses: Any, logits: Any, y: Any) -> Any:
    return (losses(logits, jnp.maximum(y, 0)) * (y >= 0)).mean()


def mean_where(losses: Any, logits: Any, y: Any) -> Any:
    return losses(logits, y).mean(where=y >= 0)


def inner(losses: Any, logits: Any, y: Any) -> Any:
    return jnp.nan_to_num(losses(logits, y)) @ (y >= 0).astype(jnp.float32)


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize(
    ("mask", "labels"),
    [
        *((where, LOW), (where, IGNORED), (product, IGNORED), (clamped, LOW)),
        *((mean_where, IGNORED), (inner, LOW)),
    ],
)
def test_masked_labels_do_not_warn(losses: Any, mask: Any, labels: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return mask(losses, model(batch["x"]), batch["y"])

    fit(loss, {"x": X, "y": labels})


def test_mask_that_keeps_a_wrong_label_warns() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return (by_index(model(batch["x"]), batch["y"]) * batch["weights"]).mean()

    weights = np.ones(8, np.float32)
    with pytest.warns(ParallelWarning, match=message(r"batch['y']", -1, 3)):
        fit(loss, {"x": X, "y": LOW, "weights": weights})
    weights = np.where(LOW < 0, 0, weights)
    fit(loss, {"x": X, "y": LOW, "weights": weights})


def test_shifted_labels_are_judged_after_the_shift() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return by_index(model(batch["x"]), batch["y"] - 1).mean()

    fit(loss, {"x": X, "y": GOOD + 1})
    with pytest.warns(ParallelWarning, match=message(r"batch['y']", -1, 2)):
        fit(loss, {"x": X, "y": GOOD})


class Table(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 4, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed(tokens)


class Indexed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(jnp.ones((16, 4)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table[...][tokens]


def squares(model: Any, batch: Any) -> Any:
    return (model(batch["tokens"]) ** 2).mean()


TOKENS = np.arange(16, dtype=np.int32).reshape(8, 2)


@pytest.mark.parametrize(
    ("model", "wrong"), [(Table, -1), (Indexed, -1), (Indexed, 16)]
)
def test_token_outside_table_warns(model: Any, wrong: int) -> None:
    tokens = np.where(TOKENS == 5, wrong, TOKENS)
    expected = message(r"batch['tokens']", min(wrong, 0), max(wrong, 15), 16)
    with pytest.warns(ParallelWarning, match=expected) as found:
        fit(squares, {"tokens": tokens}, model)
    assert "a table of the model with 16 rows" in str(found[0].message)
    fit(squares, {"tokens": TOKENS}, model)


class Attending(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 4, rngs=rngs)

    def __call__(self, tokens: jax.Array, way: str) -> jax.Array:
        x = self.embed(tokens)[:, :, None]  # (batch, seq, heads, embed)
        mask = (tokens >= 0)[:, None, None, :]
        given: dict[str, Any] = {"mask": mask}
        if way == "bias":
            given = {"bias": jnp.where(mask, 0.0, -1e9)}
        y = nnx.dot_product_attention(x, x, x, **given)
        return y[:, :, 0]


@pytest.mark.parametrize("way", ["mask", "bias"])
def test_padding_that_attention_masks_does_not_warn(way: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        losses = (model(tokens, way) ** 2).mean(-1)
        return jnp.where(tokens >= 0, losses, 0).mean()

    fit(loss, {"tokens": np.where(TOKENS > 13, -1, TOKENS)}, Attending)


def test_masks_of_own_losses_do_not_warn() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["x"]), batch["y"], batch["y"] >= 0)

    fit(loss, {"x": X, "y": IGNORED})
    tokens = np.arange(8 * 17, dtype=np.int32).reshape(8, 17) % 64
    weights = (tokens % 5 > 0).astype(np.float32)
    segments = np.where(np.arange(17) < 12, 1, 0) * np.ones_like(tokens)
    batch = {"tokens": tokens, "weights": weights, "segments": segments}
    fit(next_token_loss, batch, lambda rngs: GPT(GPTConfig.tiny(), rngs=rngs))


def test_each_player_is_examined() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return by_index(model(batch["x"]), batch["y"]).mean()

    def other(model: Any, batch: Any) -> Any:
        return (model(batch["x"]) ** 2).mean()

    sgd = optax.sgd(0.1)
    players = Players(
        first=Player(sgd, other, nnx.Param), second=Player(sgd, loss, nnx.Param)
    )
    model = nnx.Linear(4, CLASSES, rngs=nnx.Rngs(0))
    trainer = Trainer(model, players, loggers=())
    with pytest.warns(ParallelWarning, match=message(r"batch['y']", -1, 3)):
        trainer.fit([{"x": X, "y": LOW}] * 2, 2)
