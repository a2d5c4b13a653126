"""A step compiles to the same program as a step written by hand."""

import jax
import numpy as np
import optax
import pytest

from benchmarks.peers import copy_state, make_gpt_step
from nnx_parallel import FSDP, DataParallel, Strategy, Trainer, audit
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from tests.steps import QUICKLY

CONFIG = GPTConfig.tiny(embed_dim=32, num_layers=2, vocab_size=64, seq_len=16)
TX = optax.adamw(1e-3)
STRATEGIES = pytest.mark.parametrize(
    "strategy",
    [DataParallel(8), FSDP(8, min_size=0)],
    ids=["dp", "fsdp"],
)


def batches(rows: int, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (rows, CONFIG.seq_len + 1)
    return [
        {"tokens": rng.integers(0, CONFIG.vocab_size, shape, dtype=np.int32)}
        for _ in range(count)
    ]


@STRATEGIES
def test_compiled_step_matches_handwritten_step(strategy: Strategy):
    trainer = Trainer(
        lambda rngs: GPT(CONFIG, rngs=rngs),
        TX,
        next_token_loss,
        strategy=strategy,
        loggers=(),
    )
    model = trainer.model
    assert isinstance(model, GPT)
    state, batch = copy_state(trainer.state), trainer.shard_batch(batches(16, 1)[0])
    by_hand = make_gpt_step(model, TX, state)
    ours, hand = (
        step.lower(start, batch).compile(QUICKLY)  # pyright: ignore[reportFunctionMemberAccess]
        for step, start in ((trainer.train_step, trainer.state), (by_hand, state))
    )
    ours_report, hand_report = audit(ours), audit(hand)
    assert ours_report.opcodes == hand_report.opcodes
    assert ours_report.temporary_bytes == hand_report.temporary_bytes
    assert ours_report.argument_bytes == hand_report.argument_bytes
    assert ours_report.output_bytes == hand_report.output_bytes
    assert ours_report.flops == hand_report.flops
    assert ours_report.bytes() == hand_report.bytes()

    _, our_metrics = ours(trainer.state, batch)
    _, hand_metrics = hand(state, batch)
    assert our_metrics.keys() == hand_metrics.keys()
    for name, value in our_metrics.items():
        assert float(value) == float(hand_metrics[name])


@pytest.mark.parametrize(
    "num_microbatches", [1, pytest.param(4, marks=pytest.mark.deep)]
)
def test_step_is_traced_once_per_shape(num_microbatches: int):
    traces = []

    def loss(model: GPT, batch: dict[str, jax.Array]):
        traces.append(batch["tokens"].shape)
        return next_token_loss(model, batch)

    trainer = Trainer(
        lambda rngs: GPT(CONFIG, rngs=rngs),
        TX,
        loss,
        strategy=FSDP(8),
        num_microbatches=num_microbatches,
        loggers=(),
    )
    trainer.fit(batches(32, 2), num_steps=2)
    trainer.fit(batches(32, 4), num_steps=4)
    trainer.fit(batches(32, 6), num_steps=6)
    state = trainer.state
    for batch in batches(32, 2):
        state, _ = trainer.train_step(state, trainer.shard_batch(batch))
    # With microbatches, `row_analysis` first traces the loss for 16 and for 32 rows.
    read = [(16, 17), (32, 17)] if num_microbatches > 1 else []
    # The first fit also counts the FLOPs of the loss on one device, in another trace.
    step = [*read, (32 // num_microbatches, 17), (32, 17)]
    assert traces == step
    jax.eval_shape(trainer.train_step, state, batches(64, 1)[0])
    assert traces[len(step) :] == [(64 // num_microbatches, 17)]
