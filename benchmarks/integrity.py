"""What fingerprints, checks and asynchronous saves cost, beside the steps.

Each figure compares runs in turn, one after another in every round.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.timing import Ratio, Table, interleave
from models import GPT, GPTConfig, next_token_loss
from nnx_parallel import FSDP, Checkpoint, Trainer
from nnx_parallel.checkpoint import Storage
from nnx_parallel.checkpoint.fingerprint import fingerprints
from nnx_parallel.checkpoint.training import to_groups
from nnx_parallel.replicas import check_replicas

CONFIG = GPTConfig.tiny(embed_dim=256, num_layers=4, num_heads=4, seq_len=128)
NUM_ROWS = 16
EVERY = 1000
"""Steps between checkpoints at the default settings."""


def measure(rounds: int = 20) -> Table:
    """Compares steps with and without, and a save with and without fingerprints.

    Args:
        rounds: Interleaved rounds.
    """
    table = Table("Integrity: what it costs beside the steps")
    trainer = Trainer(
        model=lambda rngs: GPT(CONFIG, rngs=rngs),
        optimizer=optax.adamw(1e-3),
        loss=next_token_loss,
        strategy=FSDP(),
        loggers=(),
    )
    tokens = np.zeros((NUM_ROWS, CONFIG.seq_len + 1), np.int32)
    batch = trainer.shard_batch({"tokens": tokens})
    size = sum(x.nbytes for x in jax.tree.leaves(to_groups(trainer.state)))
    table.add("training state, MB", size / 1e6)
    runs = {
        "step": lambda: _timed(lambda: _step(trainer, batch)),
        "step again": lambda: _timed(lambda: _step(trainer, batch)),
        "fingerprints": lambda: _timed(lambda: fingerprints(to_groups(trainer.state))),
        "replicas": lambda: _timed(lambda: check_replicas(trainer.state, 1)),
    }
    seconds = interleave(runs, rounds)
    step = float(np.median(seconds["step"]))
    table.add("a step, ms", 1e3 * step)
    same = Ratio.of(seconds["step again"], seconds["step"])
    table.add("step / step (A/A)", same)
    for name in ("fingerprints", "replicas"):
        taken = float(np.median(seconds[name]))
        table.add(f"{name}, ms", 1e3 * taken)
        share = 100 * taken / (EVERY * step)
        table.add(f"{name} every {EVERY} steps, % of the steps", share)
    _measure_saves(table, trainer, batch, rounds)
    return table


def _measure_saves(table: Table, trainer: Trainer, batch: Any, rounds: int) -> None:
    """How much longer steps take while a save is written, over the save's duration."""
    steps, saves, delays, blocks = [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        options = Checkpoint(name, keep_last=1)
        with Storage(options, {}) as storage:
            for index in range(1, rounds + 1):
                alone = [_timed(lambda: _step(trainer, batch)) for _ in range(6)]
                alone = float(np.median(alone))
                start = time.perf_counter()
                storage.save(trainer.state, index, {}, {})
                blocked = time.perf_counter() - start
                beside = [_timed(lambda: _step(trainer, batch)) for _ in range(6)]
                storage.wait()
                whole = time.perf_counter() - start
                steps.append(alone)
                saves.append(whole)
                blocks.append(blocked)
                delays.append(blocked + sum(beside) - 6 * alone)
    table.add("a save until it is on disk, beside steps, ms", 1e3 * _median(saves))
    table.add("of it the fit waits, ms", 1e3 * _median(blocks))
    delay = _median(delays)
    table.add("all delay of the 6 steps beside it, ms", 1e3 * delay)
    share = 100 * delay / _median(saves)
    table.add("delay, % of the save's duration", share)
    every = 100 * delay / (EVERY * _median(steps))
    table.add(f"delay at a save every {EVERY} steps, % of the steps", every)


def _median(values: list[float]) -> float:
    return float(np.median(values))


def _step(trainer: Trainer, batch: Any) -> None:
    trainer.state, metrics = trainer.train_step(trainer.state, batch)
    jax.block_until_ready((trainer.state, metrics))


def _timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
