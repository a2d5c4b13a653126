"""A user's strategy is one small class, and combines with other strategies."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel
from nnx_parallel import FSDP, Composite, DataParallel, Mean, Pipeline, Strategy
from nnx_parallel.errors import PipelineError
from nnx_parallel.layers import Dense, Embed, Stack, cross_entropy
from nnx_parallel.sharding import FSDPRules
from nnx_parallel.sharding.nnx_arrays import flatten_pure
from nnx_parallel.strategies import Claims, ZeroAxis
from tests.parity.checks import assert_gradients_close
from tests.parity.runs import first_gradients, recording
from tests.pipelines import make_trainer

VOCAB, WIDTH = 64, 16


class Words(nnx.Module):
    """A language model with a vocabulary at both ends, and blocks between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = Stack(lambda rngs: Block(rngs), 2, rngs=rngs)
        self.head = Dense({"embed": WIDTH}, {"vocab": VOCAB}, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.blocks(self.embed(tokens)))


class Block(nnx.Module):
    """A block that adds a product to its input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.gelu(self.linear(x))


def loss(model: Any, tokens: jax.Array) -> Mean:
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


@dataclass(frozen=True, repr=False)
class LexiconParallel(Strategy):
    """One axis splits the batch, and the vocabulary of embedding and head."""

    size: int | None = None

    def claims(self) -> Claims:
        return Claims(
            axis_sizes={"lexicon": self.size},
            batch=("lexicon",),
            logical={"vocab": "lexicon"},
        )


COMPOSITE = Composite(Pipeline(2), LexiconParallel(2), FSDP(2, min_size=0))


def fit(strategy: Strategy) -> tuple[dict, np.ndarray, dict[str, Any]]:
    """Returns first gradients, losses of three steps, and final parameters by path."""
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, VOCAB, (16, 9), dtype=np.int32) for _ in range(3)]
    optimizer = recording(optax.adamw(1e-3))
    trainer = make_trainer(Words, loss, strategy, optimizer=optimizer)
    gradients = first_gradients(trainer, batches[0])
    losses = trainer.fit(batches, num_steps=3)["loss"]
    return gradients, losses, flatten_pure(trainer.state.params)


def test_strategy_is_short_and_unknown_to_package() -> None:
    lines = inspect.getsource(LexiconParallel).splitlines()
    assert len(lines) < 25
    package = Path(nnx_parallel.__file__).parent
    assert not [f for f in package.rglob("*.py") if "lexicon" in f.read_text().lower()]


def test_composite_training_matches_one_device() -> None:
    expected_gradients, expected, _ = fit(DataParallel(1))
    gradients, losses, params = fit(COMPOSITE)
    assert_gradients_close(gradients, expected_gradients)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert params["embed.embedding"].sharding.spec == P("lexicon", "fsdp")


@dataclass(frozen=True, repr=False)
class GroupedState(Strategy):
    """Groups of devices hold replicas of parameters, and split optimizer state."""

    def claims(self) -> Claims:
        return Claims(
            axis_sizes={"groups": 2, "members": 2},
            batch=("groups", "members"),
            zero=(
                ZeroAxis(rules=FSDPRules("members", min_size=0)),
                ZeroAxis(rules=FSDPRules("groups", min_size=0), shard="optimizer"),
            ),
        )


def test_zero_axes_split_different_dims_and_roles() -> None:
    expected_gradients, expected, _ = fit(DataParallel(1))
    gradients, losses, params = fit(GroupedState())
    assert_gradients_close(gradients, expected_gradients)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert params["embed.embedding"].sharding.spec == P("members")
    mesh = GroupedState().make_mesh(jax.devices()[:4])
    found = GroupedState().describe(Words, mesh=mesh)
    rows = {row.info.path: row for row in found.rows}
    assert rows["embed.embedding"].placement.optimizer == P("members", "groups")
    # A bias has only one dim besides `layers`. The first axis gets it.
    bias = rows["blocks.layer.linear.bias"].placement
    assert bias.optimizer == bias.stored == P(None, "members")


@dataclass(frozen=True, repr=False)
class BorrowedPipeline(Strategy):
    """A user's class that returns the claims of a pipeline."""

    def claims(self) -> Claims:
        return Pipeline(4).claims()


def test_borrowed_claims_are_checked() -> None:
    with pytest.raises(PipelineError, match="has 2 layers, fewer than 4 stages"):
        make_trainer(Words, loss, BorrowedPipeline())


def test_axis_splits_rows_and_is_described() -> None:
    layout = COMPOSITE.layout()
    assert dict(layout.mesh.shape) == {"lexicon": 2, "pipe": 2, "fsdp": 2}
    assert layout.batch_spec(8) == P(("lexicon", "fsdp"))
    found = COMPOSITE.describe(Words)
    (row,) = (row for row in found.rows if row.info.path == "embed.embedding")
    assert row.placement.reason.startswith("name 'vocab' -> lexicon")


def test_specs_follow_names() -> None:
    state = nnx.state(Words(nnx.Rngs(0)))
    specs = flatten_pure(nnx.to_pure_dict(LexiconParallel().specs(state)))
    assert specs["embed.embedding"] == P("lexicon")
