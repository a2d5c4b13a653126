"""Adapters train to the same numbers as one device under every strategy.

The checks are those of `test_parity`: the same start bit for bit, gradients leaf by
leaf, 20 steps of AdamW, and 20 steps of SGD with momentum. The base must not change.
"""

import math
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
)
from nnx_parallel.layers import lora
from nnx_parallel.sharding import PathNames
from tests.parity.checks import (
    assert_placed,
    assert_same_bits,
    assert_same_numbers,
    axes_in_use,
)
from tests.parity.models import (
    CASES,
    VOCAB,
    WIDTH,
    Arrays,
    Case,
    token_batch,
    token_loss,
)
from tests.parity.runs import Run, described, measure, to_host

MICROBATCHES = 2


class Stock(nnx.Module):
    """Flax's layers outside of a `Stack`, without named dims."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return self.head(x + self.down(jax.nn.gelu(self.up(x))))


NAMES = PathNames(
    (r"(query|key|value)\.kernel", ("embed", "heads", "head_dim")),
    (r"attention\.out\.kernel", ("heads", "head_dim", "embed")),
    (r"up\.kernel", ("embed", "mlp")),
    (r"down\.kernel", ("mlp", "embed")),
    (r"head\.kernel", ("embed", "vocab")),
)


def stock(rngs: nnx.Rngs) -> nnx.Module:
    model = Stock(rngs)
    NAMES(model)
    return model


def easy_batch(rng: np.random.Generator) -> Arrays:
    """Rows of consecutive tokens, which adapters on a random base learn in 20 steps."""
    batch = token_batch(rng)
    num_rows, num_tokens = batch["tokens"].shape
    start = rng.integers(0, 4, (num_rows, 1)) * 16
    return batch | {"tokens": (start + np.arange(num_tokens)) % VOCAB}


MODELS = {
    "stack": Case(
        build=lora(
            CASES["llama"].build, targets="attention|mlp|head", rank=16, alpha=32.0
        ),
        loss=CASES["llama"].loss,
        make_batch=easy_batch,
        wrt=nnx.LoRAParam,
    ),
    "stock": Case(
        build=lora(stock, targets="query|value|out|up|down|head", rank=8, alpha=64.0),
        loss=token_loss,
        make_batch=token_batch,
        wrt=nnx.LoRAParam,
    ),
}
STRATEGIES: dict[str, Strategy] = {
    "data": DataParallel(8),
    "fsdp": FSDP(8, min_size=0),
    "tensor": Composite(TensorParallel(2), FSDP(4, min_size=0)),
    "sequence": Composite(TensorParallel(2, sequence=True), FSDP(4, min_size=0)),
    "pipeline": Composite(Pipeline(2), FSDP(4, min_size=0)),
    "context": Composite(ContextParallel(2), FSDP(4, min_size=0)),
}
QUICK = {("stock", "sequence")}


@cache
def alone(model: str) -> Run:
    devices = jax.devices()[:1]
    return measure(MODELS[model], DataParallel(1), devices, MICROBATCHES)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        pytest.param(m, s, marks=() if (m, s) in QUICK else pytest.mark.deep)
        for m in MODELS
        for s in STRATEGIES
        # A pipeline needs a list of equal blocks.
        if (m, s) != ("stock", "pipeline")
    ],
)
def test_training_matches_one_device(model: str, strategy: str) -> None:
    case, placed = MODELS[model], STRATEGIES[strategy]
    devices = jax.devices()[: math.prod(n or 1 for n in placed.axis_sizes.values())]
    # Flax's attention combines masks of different ranks.
    with jax.numpy_rank_promotion("allow"):
        expected = alone(model)
        run = measure(case, placed, devices, MICROBATCHES)
    assert_same_numbers(run, expected)
    assert all("lora_" in path for path in run.params)
    frozen = to_host({"variables": run.end.variables})
    streams = {path for path in frozen if "dropout" in path or "rngs" in path}
    kept = frozen.keys() - streams
    assert len(kept) > len(run.params) / 2
    assert_same_bits({p: frozen[p] for p in kept}, {p: run.initial[p] for p in kept})
    description = described(case, placed, devices)
    assert_placed(run.start, description)
    assert_placed(run.end, description)
    assert axes_in_use(run) >= set(placed.axis_sizes) - {"data", "context"}
