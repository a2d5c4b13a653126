"""Packed documents have the same loss and gradients as one document per row."""

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models import GPT, GPTConfig, next_token_loss
from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.layers import Experts, segment_positions
from nnx_parallel.models.rotary import Growth
from tests.parity.checks import assert_gradients_close
from tests.parity.runs import to_host

pytestmark = pytest.mark.long

LENGTHS = [(7, 1, 9), (12, 3), (17,), (2, 2, 10)]  # document lengths in rows of 17
Batch = dict[str, np.ndarray]


def batches() -> tuple[Batch, Batch]:
    """Returns packed documents, and the same documents with one per row."""
    rng = np.random.default_rng(0)
    packed = np.zeros((2, len(LENGTHS), 17), np.int32)
    alone = []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for document, length in enumerate(lengths, 1):
            tokens = rng.integers(0, 64, length)
            packed[:, row, start : start + length] = tokens, np.full(length, document)
            alone.append((np.pad(tokens, (0, 17 - length)), np.arange(17) < length))
            start += length
    tokens, segments = (np.stack(x) for x in zip(*alone, strict=True))
    apart = {"tokens": tokens.astype(np.int32), "segments": segments.astype(np.int32)}
    return {"tokens": packed[0], "segments": packed[1]}, apart


def one_step(
    strategy: Strategy, config: GPTConfig, batch: Batch, num_microbatches: int = 1
) -> tuple[dict[str, float], Any]:
    """Loss, expert metrics, and gradients of one step."""
    sizes = strategy.axis_sizes.values()
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.trace(decay=0.0),  # the state is the gradient
        next_token_loss,
        strategy=strategy,
        num_microbatches=num_microbatches,
        devices=jax.devices()[: math.prod(n or 1 for n in sizes)],
        loggers=(),
    )
    state, metrics = trainer.train_step(trainer.state, trainer.shard_batch(batch))
    assert isinstance(state.opt_state, optax.TraceState)
    shown = ("loss", "expert_load", "router_entropy", "dropped_share")
    found = {name: float(metrics[name]) for name in shown if name in metrics}
    biases = {p: x for p, x in to_host(state.variables).items() if "bias" in p}
    found |= {
        f"{p}/{i}": x for p, all in biases.items() for i, x in enumerate(all.flat)
    }
    return found, to_host(state.opt_state.trace)


LEARNED = GPTConfig.tiny(vocab_size=64, num_layers=2, embed_dim=32)
LLAMA = GPTConfig.tiny_llama(
    vocab_size=64, num_layers=2, embed_dim=32, window=4, softcap=3.0
)
CHUNKS = replace(
    LLAMA,
    window=None,
    softcap=None,
    num_layers=4,
    chunk=3,
    layer_kinds=("local", "global"),
    rotated_layers=(True, False),
    late_qk_norm=True,
    query_growth=Growth(rate=0.5, length=4, ahead=1),
)
"""A model with the attention of Llama 4."""
DEEP = pytest.mark.deep
NAMES = {LEARNED: "learned", LLAMA: "rope", CHUNKS: "chunks"}


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        (LEARNED, Composite(FSDP(2, min_size=0), TensorParallel(2, sequence=True))),
        pytest.param(LLAMA, Composite(Pipeline(2), TensorParallel(2)), marks=DEEP),
        pytest.param(LLAMA, FSDP(2, min_size=0), marks=DEEP),
        pytest.param(LEARNED, FSDP(2, min_size=0, prefetch="first"), marks=DEEP),
        pytest.param(LLAMA, TensorParallel(2), marks=DEEP),
        pytest.param(LEARNED, Pipeline(2), marks=DEEP),
        (CHUNKS, Composite(Pipeline(2), ContextParallel(2))),
        pytest.param(CHUNKS, ContextParallel(2, exchange="gather"), marks=DEEP),
        pytest.param(CHUNKS, ContextParallel(2, exchange="all_to_all"), marks=DEEP),
        pytest.param(CHUNKS, Composite(TensorParallel(2), FSDP(2)), marks=DEEP),
    ],
    ids=lambda x: NAMES[x] if isinstance(x, GPTConfig) else repr(x),
)
def test_packed_documents_match_separate_rows(config: GPTConfig, strategy: Strategy):
    """One device has one document per row; the strategy has packed documents."""
    packed, apart = batches()
    assert_same_step(
        one_step(strategy, config, packed, num_microbatches=2),
        one_step(DataParallel(1), config, apart),
    )


def assert_same_step(found: tuple, expected: tuple) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert_gradients_close(found[1], expected[1])


EXPERTS = Experts(
    num_experts=4, top_k=2, mlp_dim=24, bias_rate=0.01, balance_loss=0.5, z_loss=0.1
)
MIXTURES = {
    "sequence": EXPERTS,
    "batch": replace(EXPERTS, balance_over="batch"),
    "capacity": replace(EXPERTS, capacity_factor=0.75),
    "deepseek": replace(EXPERTS, scores="sigmoid", shared_dim=8, capacity_factor=1.0),
}
NARROW: dict[str, Strategy] = {
    "one": DataParallel(1),
    "ep2_cp2": Composite(ExpertParallel(2), ContextParallel(2)),
    "ep2_tp2": Composite(ExpertParallel(2), TensorParallel(2)),
    "ep2_pp2": Composite(ExpertParallel(2), Pipeline(2)),
    "fsdp2": FSDP(2, min_size=0),
}


@cache
def apart_with_experts(mixture: str) -> tuple[GPTConfig, tuple]:
    """A config, and its step on one device with one document per row."""
    config = replace(LLAMA, mlp_dim=None, experts=MIXTURES[mixture])
    return config, one_step(DataParallel(1), config, batches()[1])


@pytest.mark.parametrize(
    ("mixture", "strategy", "microbatches"),
    [
        ("capacity", "ep2_cp2", 1),
        ("batch", "one", 1),
        pytest.param("sequence", "ep2_tp2", 2, marks=DEEP),
        pytest.param("batch", "ep2_tp2", 1, marks=DEEP),
        pytest.param("capacity", "ep2_pp2", 2, marks=DEEP),
        pytest.param("deepseek", "fsdp2", 2, marks=DEEP),
        pytest.param("deepseek", "ep2_cp2", 1, marks=DEEP),
    ],
)
def test_packed_documents_match_rows_with_experts(mixture, strategy, microbatches):
    """Balance, capacity, bias and statistics match; padding does not change them."""
    config, expected = apart_with_experts(mixture)
    packed, _ = batches()
    found = one_step(NARROW[strategy], config, packed, microbatches)
    assert_same_step(found, expected)


@pytest.mark.parametrize("mixture", ["capacity", pytest.param("batch", marks=DEEP)])
def test_longer_rows_match_shorter_rows(mixture):
    config, expected = apart_with_experts(mixture)
    _, apart = batches()
    wide = {name: np.pad(x, ((0, 2), (0, 16))) for name, x in apart.items()}
    assert_same_step(one_step(DataParallel(1), config, wide), expected)


@pytest.mark.parametrize(
    "strategy",
    [
        Composite(ContextParallel(2), FSDP(2, min_size=0)),
        pytest.param(ContextParallel(2, exchange="gather"), marks=DEEP),
        pytest.param(ContextParallel(2, exchange="all_to_all"), marks=DEEP),
    ],
    ids=repr,
)
def test_chunks_of_split_rows_match_one_device(strategy: Strategy):
    """Chunks of 3 tokens cross the borders between devices."""
    batch = {"tokens": batches()[0]["tokens"][:2]}
    assert_same_step(
        one_step(strategy, CHUNKS, batch), one_step(DataParallel(1), CHUNKS, batch)
    )


def test_packed_document_matches_single_document():
    """Other documents in the row, and the values of padding tokens, have no effect."""
    model = GPT(LLAMA, rngs=nnx.Rngs(0))
    packed, _ = batches()
    # The row has documents of 12 and 3 tokens.
    tokens, segments = packed["tokens"][1:2], packed["segments"][1:2]
    alone = nnx.jit(lambda model, tokens: model(tokens))(model, tokens[:, 12:15])
    tokens = np.where(segments == 2, tokens, tokens + 1)
    logits = nnx.jit(lambda model, *given: model(*given))(model, tokens, segments)
    np.testing.assert_allclose(logits[:, 12:15], alone, rtol=1e-5, atol=1e-6)


def test_loss_counts_labels_within_document():
    packed, apart = batches()
    model, loss = GPT(LEARNED, rngs=nnx.Rngs(0)), nnx.jit(next_token_loss)
    count = sum(n - 1 for lengths in LENGTHS for n in lengths)
    for batch in (packed, apart):
        given = {name: jnp.asarray(x) for name, x in batch.items()}
        assert loss(model, given).weight == count
    weights = jnp.ones((4, 17)).at[0].set(0.0)  # drops one row
    given = {"weights": weights, **{k: jnp.asarray(x) for k, x in packed.items()}}
    assert loss(model, given).weight == count - sum(LENGTHS[0]) + 3
    text = "Segments have shape (2, 17), but tokens have shape (4, 17); the shapes"
    with pytest.raises(ValueError, match=re.escape(text)):
        next_token_loss(model, {**given, "segments": jnp.ones((2, 17), jnp.int32)})


def test_positions_restart_per_document():
    """Segment ids need not be sorted; padding at the end has positions too."""
    ids = jnp.array([[3, 3, 1, 1, 1, 2, 0, 0], [0, 0, 5, 5, 5, 5, 5, 6]])
    expected = [[0, 1, 0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3, 4, 0]]
    assert segment_positions(ids).tolist() == expected


def test_window_applies_while_decoding():
    """Decoding with a cache gives the same logits as the whole sequence."""
    model = GPT(LLAMA, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 10)))
    expected = nnx.jit(GPT.__call__)(model, tokens)
    cache, decode = model.make_cache(2, 10), nnx.jit(GPT.decode)
    _, cache = decode(model, tokens[:, :8], 0, cache)
    for i in (8, 9):
        logits, cache = decode(model, tokens[:, i : i + 1], i, cache)
        np.testing.assert_allclose(logits, expected[:, i], rtol=1e-5, atol=1e-5)
