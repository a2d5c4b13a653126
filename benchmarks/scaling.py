"""The cost of sharding relative to the work: 1, 2, 4 and 8 simulated devices.

Simulated devices share the cores of one machine, so more devices are not faster. The
relevant figure is the CPU time of all threads. The work is constant in strong scaling,
and grows with the number of devices in weak scaling. Any further time is the cost of
sharding.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.timing import Ratio, Table, interleave
from nnx_parallel import FSDP, DataParallel, Strategy, Trainer
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig.tiny(num_layers=2, embed_dim=128, seq_len=64)
ROWS = 16
SIZES = (1, 2, 4, 8)


def measure(rounds: int = 20) -> Table:
    """Returns CPU seconds relative to one device, and bytes relative to 1 / N of it."""
    table = Table(f"CPU time of a step: a GPT of {CONFIG.num_params:,} parameters")
    for name, make in {"data parallel": DataParallel, "FSDP": FSDP}.items():
        strong = {n: _Run(make(n), n, ROWS) for n in SIZES}
        for n, run in strong.items():
            share = strong[1].held_bytes / n
            table.add(f"{name}: {n} devices, bytes each", run.held_bytes)
            table.add(f"{name}: {n} devices, bytes each * N", run.held_bytes / share)
        _compare(table, f"{name}, strong", strong, dict.fromkeys(SIZES, 1.0), rounds)
        weak = {n: _Run(make(n), n, 4 * n) for n in SIZES}
        _compare(table, f"{name}, weak", weak, {n: float(n) for n in SIZES}, rounds)
    return table


class _Run:
    """A step on some devices, timed by the CPU time of the process."""

    def __init__(self, strategy: Strategy, num_devices: int, rows: int) -> None:
        trainer = Trainer(
            lambda rngs: GPT(CONFIG, rngs=rngs),
            optax.adamw(1e-3),
            next_token_loss,
            strategy=strategy,
            devices=jax.devices()[:num_devices],
            loggers=(),
        )
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, 256, (rows, CONFIG.seq_len + 1), dtype=np.int32)
        self.batch = trainer.shard_batch(tokens)
        self.step, self.state = trainer.train_step, trainer.state
        leaves: list[Any] = jax.tree.leaves((self.state.params, self.state.opt_state))
        self.held_bytes = sum(x.addressable_shards[0].data.nbytes for x in leaves)

    def __call__(self) -> float:
        start = time.process_time()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.process_time() - start


def _compare(
    table: Table,
    name: str,
    runs: dict[int, _Run],
    work: dict[int, float],
    rounds: int,
) -> None:
    seconds = interleave({str(n): run for n, run in runs.items()}, rounds, warm_up=2)
    alone = seconds["1"]
    table.add(f"{name}: 1 device, CPU ms", 1e3 * float(np.median(alone)))
    for n in SIZES[1:]:
        ratio = Ratio.of(seconds[str(n)] / work[n], alone)
        table.add(f"{name}: {n} devices / 1, per work", ratio)
