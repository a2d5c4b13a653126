"""Split sequences: the numbers of one device, and 1 / n of the activations."""

import dataclasses
import math
from collections.abc import Sequence
from functools import cache

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    GPipe,
    Interleaved,
    OneFOneB,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
    ZeroBubble,
)
from nnx_parallel.collectives.ring import Exchange
from nnx_parallel.mesh import Device
from nnx_parallel.models import GPT, GPTConfig, generate, next_token_loss
from nnx_parallel.sharding import LogicalRules, constrain
from tests.parity.checks import (
    assert_parts,
    assert_placed,
    assert_same_numbers,
)
from tests.parity.models import Arrays, Case, token_batch, token_loss
from tests.parity.runs import Run, compiling, described, measure
from tests.steps import compile_gpt

SEQ, ROWS, VOCAB = 16, 16, 64


def packed_batch(rng: np.random.Generator) -> Arrays:
    """Arithmetic progressions: two documents and padding per row, token weights."""
    start, difference = rng.integers(0, VOCAB, (2, ROWS, 1))
    places = np.arange(SEQ + 1)[None]
    first, second = (rng.integers(low, low + 6, (ROWS, 1)) for low in (4, 11))
    segments = 1 + (places >= first) - 2 * (places >= second)
    return {
        "tokens": (start + difference % 4 * places) % VOCAB,
        "segments": segments.astype(np.int32),
    }


def case_of(kv_heads: int, window: int | None) -> Case:
    config = GPTConfig.tiny_llama(
        vocab_size=VOCAB,
        seq_len=SEQ,
        num_layers=4,
        embed_dim=64,
        mlp_dim=128,
        num_heads=8,
        num_kv_heads=kv_heads,
        dropout=0.1,
        window=window,
    )
    return Case(
        build=lambda rngs: GPT(config, rngs=rngs),
        loss=next_token_loss,
        make_batch=packed_batch,
    )


CASES = {
    "full": case_of(8, None),
    "grouped_window": case_of(4, 5),
    "one_head": case_of(1, None),
}
MESHES: dict[str, tuple[Strategy, ...]] = {
    "alone": (),
    "dp": (DataParallel(2),),
    "fsdp": (FSDP(2, min_size=0),),
    "tp": (TensorParallel(2),),
    "fsdp_tp_sequence": (FSDP(2, min_size=0), TensorParallel(2, sequence=True)),
    "tp_overlap": (TensorParallel(2, overlap="ring"),),
    "pp": (Pipeline(2, GPipe()),),
    "pp_fsdp": (Pipeline(2, ZeroBubble()), FSDP(2, min_size=0)),
    "pp_tp": (Pipeline(2, OneFOneB()), TensorParallel(2)),
    "pp_tp_sequence": (
        Pipeline(2, Interleaved(chunks=2)),
        TensorParallel(2, sequence=True),
    ),
}
FEW = [("gather", "grouped_window", "fsdp_tp_sequence")]
DEEP = [
    ("ring", "grouped_window", "fsdp_tp_sequence"),
    ("all_to_all", "one_head", "pp_tp"),
    ("ring", "full", "fsdp"),
    ("ring", "one_head", "pp_tp"),
    ("ring", "grouped_window", "pp_tp_sequence"),
    ("ring", "full", "tp_overlap"),
    ("gather", "grouped_window", "dp"),
    ("gather", "full", "pp_fsdp"),
    ("all_to_all", "grouped_window", "fsdp"),
    ("all_to_all", "full", "tp"),
    ("gather", "one_head", "alone"),
    ("all_to_all", "full", "pp"),
]


def strategy_of(exchange: Exchange, model: str, mesh: str) -> Strategy:
    size = 4 if len(MESHES[mesh]) < 2 and mesh != "tp_overlap" else 2
    # A single key head is not split. Each device repeats it for its query heads.
    rules = (LogicalRules({"kv_heads": None}),) if model == "one_head" else ()
    return Composite(ContextParallel(size, exchange), *MESHES[mesh], rules=rules)


def devices_of(strategy: Strategy) -> Sequence[Device]:
    return jax.devices()[: math.prod(n or 1 for n in strategy.axis_sizes.values())]


def microbatches_of(strategy: Strategy) -> int:
    return 4 if strategy.claims().execution else 1


@cache
def alone(model: str, microbatches: int) -> Run:
    strategy = DataParallel(1)
    return measure(CASES[model], strategy, jax.devices()[:1], microbatches)


@pytest.mark.parametrize(
    ("exchange", "model", "mesh"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.deep) for case in DEEP)],
)
def test_training_matches_one_device(exchange, model, mesh):
    """Compares 20 training steps with packed documents and dropout."""
    strategy = strategy_of(exchange, model, mesh)
    microbatches, devices = microbatches_of(strategy), devices_of(strategy)
    run = measure(CASES[model], strategy, devices, microbatches)
    assert_same_numbers(run, alone(model, microbatches))
    description = described(CASES[model], strategy, devices)
    assert_placed(run.start, description)
    assert_placed(run.end, description)
    assert_parts(run.end.params, 8 if mesh == "fsdp" else None)


# Where state and activations are


class TestPlaces:
    def test_both_axes_split_sequence_in_mesh_order(self):
        strategy = Composite(TensorParallel(2, sequence=True), ContextParallel(2))
        layout = strategy.layout(strategy.make_mesh(jax.devices()[:4]))
        spec = layout.activation_spec
        names = ("batch", "seq", "embed")
        assert spec((4, 16, 8), names) == P(None, ("context", "tensor"))
        assert spec((4, 14, 8), names) == P(None, "context")
        names = ("batch", "seq", "mlp")
        assert spec((4, 16, 8), names) == P(None, "context", "tensor")
        assert layout.batch_spec(4) == P()

    @pytest.mark.parametrize(
        ("shard", "stored"),
        [
            ("params", P(("fsdp", "context"))),
            ("gradients", P()),
            ("optimizer", P()),
        ],
    )
    def test_state_is_split_over_context_axis(self, shard, stored):
        strategy = Composite(FSDP(2, shard, min_size=0), ContextParallel(4))
        table = strategy.describe(lambda rngs: nnx.Linear(8, 16, rngs=rngs))
        place = {row.info.path: row.placement for row in table.rows}["kernel"]
        assert place.stored == stored
        assert place.used == P()
        assert place.optimizer == P(("fsdp", "context"))
        assert place.reason == "fsdp+context: free dim 0, unaligned"

    def test_one_axis_splits_where_both_do_not_divide(self):
        strategy = Composite(FSDP(2, min_size=0), ContextParallel(4))
        table = strategy.describe(
            lambda rngs: nnx.Linear(3, 6, use_bias=False, rngs=rngs)
        )
        assert table.rows[0].placement.stored == P(None, "fsdp")
        assert table.rows[0].placement.reason == "fsdp: free dim 1, unaligned"

    def test_context_parallel_only_replicates_state(self):
        table = ContextParallel().describe(lambda rngs: nnx.Linear(64, 64, rngs=rngs))
        assert all(row.placement.optimizer == P() for row in table.rows)
        assert "no effect" not in table.summary()

    def test_describe_tells_where_sequence_is_gathered(self):
        def build(rngs: nnx.Rngs) -> nnx.Module:
            return nnx.List([nnx.MultiHeadAttention(4, 16, rngs=rngs)])

        lines = ContextParallel().describe(build).summary().splitlines()
        assert lines[1] == (
            "gathered: the sequence, around 1 modules of Flax's attention (`0`): "
            "each device holds the whole sequence there. With "
            "nnx_parallel.layers.attention, it stays split."
        )


class Stock(nnx.Module):
    """A transformer layer made of Flax's modules, without named dims."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        # The initial scale is larger than Flax's default, so that twenty steps train
        # the model.
        init = nnx.initializers.normal(1.0)
        self.embed = nnx.Embed(VOCAB, 32, embedding_init=init, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.head = nnx.Linear(32, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = constrain(self.embed(tokens), "batch", "seq", "embed")
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return self.head(constrain(x, "batch", "seq", "embed"))


@pytest.mark.deep
def test_stock_attention_matches_one_device():
    case = Case(build=Stock, loss=token_loss, make_batch=token_batch)
    runs = []
    for strategy in (DataParallel(1), Composite(ContextParallel(4), FSDP(2))):
        # Without optimizations, initial values in a shard of one row are rounded
        # differently.
        with compiling(optimized=True):
            runs.append(measure(case, strategy, devices_of(strategy), 1))
    assert_same_numbers(*reversed(runs))


# Memory


CONFIG = GPTConfig.tiny(
    num_layers=2, seq_len=512, embed_dim=32, num_heads=4, vocab_size=64
)


@cache
def temporaries(num_layers: int, size: int) -> int:
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    step = compile_gpt(config, ContextParallel(size), 2)
    return step.memory.temp_size_in_bytes


@pytest.mark.deep
def test_layer_keeps_its_share_of_activations():
    """If W bytes were not split and S bytes were, a layer would take W + S / size."""
    two, four = ((temporaries(6, n) - temporaries(2, n)) / 4 for n in (2, 4))
    assert 2 * four - two < 0.05 * four


# Generation and evaluation


@pytest.mark.deep
def test_generation_and_evaluation_match_one_device():
    """Includes prompts whose length the axis does not divide."""
    rng = np.random.default_rng(0)
    config = GPTConfig.tiny_llama(num_layers=2, seq_len=32, num_kv_heads=2)
    prompts = [rng.integers(0, 256, (2, 5)).astype(np.int32)]
    batches = [rng.integers(0, 256, (2, 33)).astype(np.int32)]
    found = []
    for strategy in (DataParallel(1), Composite(ContextParallel(4), FSDP(2))):
        trainer = Trainer(
            lambda rngs: GPT(config, rngs=rngs),
            optax.adamw(1e-3),
            next_token_loss,
            strategy=strategy,
            devices=devices_of(strategy),
            loggers=(),
        )
        tokens = trainer.predict(
            prompts,
            lambda model, x: generate(model, x, max_new_tokens=8, temperature=0.0),
        )
        found.append((tokens, trainer.evaluate(batches)["loss"]))
    (tokens, loss), (split_tokens, split_loss) = found
    np.testing.assert_array_equal(split_tokens, tokens)
    assert split_loss == pytest.approx(loss, rel=1e-5)
