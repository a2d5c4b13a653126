"""All masks of attention, with dropout, in a trained model with a split sequence.

`test_context_attention` tests every pair of exchange, mask, heads and mesh on a single
attention. This file tests the pairs with pipelines, and the full product.
"""

import itertools
import math
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    OneFOneB,
    Pipeline,
    Strategy,
    TensorParallel,
)
from nnx_parallel.layers import Dense, Embed, Stack, cross_entropy
from nnx_parallel.layers.attention import attention
from nnx_parallel.metrics import Mean
from nnx_parallel.sharding import LogicalRules, constrain
from tests.parity.checks import assert_same_numbers
from tests.parity.models import Arrays, Case
from tests.parity.pairs import all_pairs, pairs_met
from tests.parity.runs import Run, measure

SEQ, ROWS, VOCAB, WIDTH, HEADS = 16, 8, 32, 32, 4
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal_window": {"causal": True, "window": 5},
    "packed": {"causal": True, "packed": True},
    "packed_window": {"causal": True, "packed": True, "window": 5},
    "bidirectional": {"packed": True, "window": 5},
}
EXCHANGES = ("ring", "all_to_all", "gather")
KV_HEADS = (4, 2, 1)
MESHES: dict[str, tuple[Strategy, ...]] = {
    "fsdp": (FSDP(2, min_size=0),),
    "tp": (TensorParallel(2),),
    "tp_sequence": (TensorParallel(2, sequence=True),),
    "pp": (Pipeline(2, OneFOneB()),),
    "pp_tp": (Pipeline(2, OneFOneB()), TensorParallel(2)),
}
FACTORS = (EXCHANGES, tuple(MASKS), KV_HEADS, tuple(MESHES))
DEEP = [
    ("ring", "causal", 4, "pp"),
    ("all_to_all", "packed", 2, "pp"),
    ("gather", "causal_window", 1, "pp"),
    ("gather", "packed_window", 4, "pp"),
    ("all_to_all", "bidirectional", 4, "pp"),
    ("ring", "causal_window", 4, "pp_tp"),
    ("all_to_all", "causal", 2, "pp_tp"),
    ("gather", "bidirectional", 2, "pp_tp"),
    ("ring", "packed", 1, "pp_tp"),
    ("all_to_all", "packed_window", 2, "pp_tp"),
]


class Block(nnx.Module):
    """Attention with any kind of mask, and dropout."""

    def __init__(self, mask: str, kv_heads: int, *, rngs: nnx.Rngs) -> None:
        self.mask = mask
        names = [("heads", HEADS), ("kv_heads", kv_heads), ("kv_heads", kv_heads)]
        self.query, self.key, self.value = (
            Dense({"embed": WIDTH}, {name: n, "head_dim": 8}, rngs=rngs)
            for name, n in names
        )
        self.out = Dense({"heads": HEADS, "head_dim": 8}, {"embed": WIDTH}, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        rules = dict(MASKS[self.mask])
        rules["segments"] = segments if rules.pop("packed", False) else None
        y = attention(self.query(x), self.key(x), self.value(x), **rules)
        return constrain(x + self.dropout(self.out(y)), "batch", "seq", "embed")


class Tagger(nnx.Module):
    """Predicts a label for every token."""

    def __init__(self, mask: str, kv_heads: int, *, rngs: nnx.Rngs) -> None:
        self.embed = Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = Stack(lambda rngs: Block(mask, kv_heads, rngs=rngs), 4, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        # Logits are near 0 at the start, as in a GPT. If the first loss were above that
        # of a uniform guess, SGD would oscillate, and rounding differences would grow
        # to 1e-5 in 20 steps.
        init = nnx.initializers.normal(0.02)
        self.head = Dense(
            {"embed": WIDTH}, {"vocab": VOCAB}, rngs=rngs, kernel_init=init
        )

    def __call__(self, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        return self.head(self.norm(self.blocks(self.embed(tokens), segments)))


def tag_loss(model: Tagger, batch: dict[str, jax.Array]) -> Mean:
    """Token loss with weight 0 for padding."""
    logits = model(batch["tokens"], batch["segments"])
    return cross_entropy(logits, batch["labels"], batch["segments"] != 0)


def tagged_batch(rng: np.random.Generator) -> Arrays:
    """Two documents and padding per row; a token's label is whether it is odd."""
    places = np.arange(SEQ)[None]
    first, second = (rng.integers(low, low + 6, (ROWS, 1)) for low in (4, 10))
    segments = 1 + (places >= first) - 2 * (places >= second)
    tokens = rng.integers(0, VOCAB, (ROWS, SEQ))
    segments = segments.astype(np.int32)
    return {"tokens": tokens, "segments": segments, "labels": tokens % 2}


@cache
def case_of(mask: str, kv_heads: int) -> Case:
    return Case(
        build=lambda rngs: Tagger(mask, kv_heads, rngs=rngs),
        loss=tag_loss,
        make_batch=tagged_batch,
    )


@cache
def alone(mask: str, kv_heads: int, microbatches: int) -> Run:
    case = case_of(mask, kv_heads)
    return measure(case, DataParallel(1), jax.devices()[:1], microbatches)


def parametrized() -> list:
    return [
        pytest.param(
            *case, marks=pytest.mark.deep if case in DEEP else pytest.mark.slow
        )
        for case in itertools.product(*FACTORS)
    ]


def test_deep_cases_cover_pipeline_pairs():
    """The pairs with other meshes are covered by `test_context_attention`."""
    piped = {(3, "pp"), (3, "pp_tp")}
    wanted = {pair for pair in pairs_met(all_pairs(*FACTORS)) if piped & {*pair}}
    assert wanted <= pairs_met(DEEP)


@pytest.mark.parametrize(("exchange", "mask", "kv_heads", "mesh"), parametrized())
def test_training_matches_one_device(exchange, mask, kv_heads, mesh):
    size = 4 if mesh == "pp" else 2
    # A single key head is not split. Each device repeats it for its query heads.
    rules = (LogicalRules({"kv_heads": None}),) if kv_heads == 1 else ()
    strategy = Composite(ContextParallel(size, exchange), *MESHES[mesh], rules=rules)
    microbatches = 4 if "pp" in mesh else 1
    count = math.prod(n or 1 for n in strategy.axis_sizes.values())
    case = case_of(mask, kv_heads)
    run = measure(case, strategy, jax.devices()[:count], microbatches)
    assert_same_numbers(run, alone(mask, kv_heads, microbatches))
