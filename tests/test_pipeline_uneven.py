"""Stages with different numbers of layers, and models with several stacks."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Checkpoint,
    Composite,
    DataParallel,
    ExpertParallel,
    Interleaved,
    OneFOneB,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
    ZeroBubble,
    constrain,
)
from nnx_parallel.layers import Dense, Experts, Stack
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.visualize.describe import Description
from tests.parity.runs import to_host
from tests.pipelines import assert_like_one_device, make_trainer, one_step

WIDTH = 16


class Count(nnx.Variable):
    """A count that a block updates."""


class Block(nnx.Module):
    """A residual block with a trained argument, dropout and statistics."""

    def __init__(self, rngs: nnx.Rngs, hidden: int = WIDTH) -> None:
        sizes = {"embed": WIDTH}, {"mlp": hidden}
        self.up = Dense(*sizes, rngs=rngs)
        self.down = Dense(*reversed(sizes), rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.count = Count(jnp.zeros((), jnp.int32))
        self.mean = Count(jnp.zeros(WIDTH))

    def __call__(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        hidden = constrain(self.up(x), "batch", "seq", "mlp")
        y = self.down(jnp.tanh(hidden)) * 0.3 * scale
        self.count[...] += jnp.sum(x > 0)
        self.mean[...] = self.mean[...] * 0.9 + y.mean((0, 1))
        return x + self.dropout(y)


class Five(nnx.Module):
    """Five layers with one trained argument for all."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH)[None, None])
        self.stack = Stack(Block, 5, rngs=rngs)
        self.out = Dense({"embed": WIDTH}, {"vocab": 4}, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.stack(x, self.scale[...]))


class Two(nnx.Module):
    """Layers of two kinds, followed by one more layer of the first kind."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH)[None, None])
        self.first = Stack(Block, 4, rngs=rngs)
        self.middle = Stack(lambda rngs: Block(rngs, 3 * WIDTH), 3, rngs=rngs)
        self.last = Stack(Block, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for stack in (self.first, self.middle, self.last):
            x = stack(x, self.scale[...])
        return x


def loss(model: Any, batch: Any) -> jax.Array:
    decay = sum(jnp.mean(x**2) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return ((model(batch["x"]) - 1.0) ** 2).mean() + 0.1 * decay


def plain(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - 1.0) ** 2).mean()


def make_batch() -> Any:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(8, 4, WIDTH)).astype(np.float32)}


@pytest.mark.parametrize(
    "strategy",
    [
        Pipeline(2, OneFOneB()),
        pytest.param(Pipeline(4, ZeroBubble()), marks=pytest.mark.deep),
        pytest.param(Pipeline(2, Interleaved(chunks=2)), marks=pytest.mark.deep),
        pytest.param(Pipeline(4, stash="inputs"), marks=pytest.mark.deep),
        pytest.param(
            Composite(Pipeline(2, ZeroBubble(), gather="step"), FSDP(2, min_size=0)),
            marks=pytest.mark.deep,
        ),
        pytest.param(
            Composite(
                Pipeline(2, Interleaved(chunks=2)),
                FSDP(2, min_size=0),
                TensorParallel(2),
            ),
            marks=pytest.mark.deep,
        ),
    ],
    ids=str,
)
def test_uneven_layers_match_one_device(strategy: Strategy) -> None:
    assert_like_one_device(Five, plain, strategy, make_batch, steps=2)


@pytest.mark.parametrize(
    "strategy",
    [
        Pipeline(2, ZeroBubble()),
        pytest.param(Pipeline(3), marks=pytest.mark.deep),
        pytest.param(Pipeline(2, stack="first"), marks=pytest.mark.deep),
        pytest.param(
            Composite(Pipeline(2), FSDP(2, min_size=0), TensorParallel(2)),
            marks=pytest.mark.deep,
        ),
        pytest.param(
            Composite(Pipeline(2), FSDP(2, min_size=0, prefetch="first")),
            marks=pytest.mark.deep,
        ),
    ],
    ids=str,
)
def test_several_stacks_match_one_device(strategy: Strategy) -> None:
    assert_like_one_device(Two, plain, strategy, make_batch, steps=2)


def test_loss_of_all_parameters_matches_one_device() -> None:
    assert_like_one_device(Two, loss, Pipeline(2), make_batch)


# Experts after dense layers


def build_gpt(rngs: nnx.Rngs) -> GPT:
    """Two dense layers, followed by three with experts, as in DeepSeek-V3."""
    mixture = Experts(
        num_experts=8,
        top_k=2,
        mlp_dim=32,
        shared_dim=32,
        scores="sigmoid",
        bias_rate=0.01,
        balance_loss=0.01,
    )
    config = GPTConfig.tiny_llama(
        vocab_size=64,
        seq_len=16,
        num_layers=5,
        dense_layers=2,
        embed_dim=32,
        mlp_dim=48,
        experts=mixture,
    )
    return GPT(config, rngs=rngs)


def make_tokens() -> Any:
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17), np.int32)
    return {"tokens": tokens}


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(Pipeline(2, OneFOneB()), marks=pytest.mark.deep),
        pytest.param(Pipeline(2, ZeroBubble()), marks=pytest.mark.deep),
        pytest.param(Pipeline(2, stack="dense_blocks"), marks=pytest.mark.slow),
        pytest.param(
            Composite(Pipeline(2), ExpertParallel(2), FSDP(2, min_size=0)),
            marks=pytest.mark.deep,
        ),
    ],
    ids=str,
)
def test_dense_before_expert_layers_match_one_device(strategy: Strategy) -> None:
    assert_like_one_device(build_gpt, next_token_loss, strategy, make_tokens, steps=2)
    runs = []
    for each in (DataParallel(1), strategy):
        trainer = make_trainer(build_gpt, next_token_loss, each)
        one_step(trainer, make_tokens())
        biases = to_host(trainer.state.variables)
        runs.append({k: x for k, x in biases.items() if k.endswith("bias")})
    assert [x.shape for x in runs[0].values()] == [(3, 8)]
    for path, expected in runs[0].items():
        assert expected.any()
        assert runs[1][path].tobytes() == expected.tobytes()


@pytest.mark.deep
@pytest.mark.parametrize("stack", ["blocks", "dense_blocks"])
def test_indivisible_rows_outside_pipeline_match_one_device(stack: str) -> None:
    """A microbatch has one row, so its tokens are spread over the stages."""
    assert_like_one_device(
        build_gpt,
        next_token_loss,
        Pipeline(2, stack=stack),
        make_tokens,
        num_microbatches=16,
    )


# Stored state


def fit(strategy: Strategy, steps: int, directory: Path | None) -> Trainer:
    trainer = make_trainer(
        Five,
        plain,
        strategy,
        optimizer=optax.sgd(0.05, momentum=0.9),
        checkpoint=directory and Checkpoint(directory),
    )
    trainer.fit([make_batch()] * 4, num_steps=steps)
    return trainer


@pytest.mark.deep
def test_run_resumes_with_another_stage_count(tmp_path: Path) -> None:
    whole = fit(DataParallel(1), 4, None)
    fit(Pipeline(2), 1, tmp_path)
    fit(Pipeline(4), 2, tmp_path)
    fit(DataParallel(1), 3, tmp_path)
    resumed = fit(Pipeline(3), 4, tmp_path)
    assert resumed.step == 4
    expected = to_host(whole.state.params)
    for path, x in to_host(resumed.state.params).items():
        np.testing.assert_allclose(x, expected[path], rtol=1e-5, atol=1e-6)


def described(strategy: Strategy, build: Any, optimizer: object = None) -> Description:
    sizes = strategy.axis_sizes.values()
    mesh = strategy.make_mesh(jax.devices()[: math.prod(size or 1 for size in sizes)])
    return strategy.describe(build, optimizer=optimizer, mesh=mesh)


def test_uneven_layers_are_stored_in_equal_shares() -> None:
    optimizer = optax.adamw(1e-3)
    even, uneven = (
        described(Pipeline(4), lambda rngs, n=n: Stack(Wide, n, rngs=rngs), optimizer)
        for n in (4, 5)
    )
    for name in ("params_bytes", "gradients_bytes", "optimizer_bytes"):
        share = getattr(uneven, name) / getattr(even, name)
        assert share == pytest.approx(5 / 4, rel=0.01), name
    kernel = next(row for row in uneven.rows if row.info.path == "layer.up.kernel")
    assert kernel.placement.stored == P(None, None, "pipe")
    assert (
        "pipe: dim 2, because it does not split the layers" in kernel.placement.reason
    )


class Wide(Block):
    """A block with most of its parameters in kernels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs, 256)


def test_describe_notes_uneven_and_outer_stacks() -> None:
    notes = described(Pipeline(4), Five).notes
    assert notes == (
        "uneven: 4 stages share the 5 layers of `stack` as 2, 1, 1, 1: 37.5% of their "
        "time is idle for this reason, and each step sends the weights to their stages "
        "and the gradients back.",
    )
    notes = described(Pipeline(3), Two).notes
    assert [note.split(";")[0] for note in notes] == [
        "around the pipeline: `first`, 4 layers",
        "around the pipeline: `last`, 1 layers",
    ]
    assert described(Pipeline(5), Five).notes == ()
