"""The cost of checksums, checks and asynchronous saves, relative to the steps.

Each figure compares runs that alternate within every round.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.timing import Ratio, Table, interleave
from nnx_parallel import FSDP, Trainer
from nnx_parallel.checkpoint import CheckpointManager, manager
from nnx_parallel.checkpoint.contents import to_groups
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding.checksum import checksums, start_checksums
from nnx_parallel.training.diagnostics import check_replicas

CONFIG = GPTConfig.tiny(embed_dim=256, num_layers=4, num_heads=4, seq_len=128)
SAVED = (
    GPTConfig.tiny(embed_dim=768, num_layers=6, num_heads=12, seq_len=16),
    GPTConfig.gpt2_124m(seq_len=16),
)
"""Models of two sizes to save, because a part of the delay does not depend on size."""
NUM_ROWS = 16
EVERY = 1000
"""Steps between checkpoints at the default settings."""


def measure(rounds: int = 20) -> Table:
    """Compares steps with the checks, and with saves in the background.

    Args:
        rounds: Interleaved rounds; saves get a quarter of them.
    """
    table = Table("Integrity: cost relative to the steps")
    trainer, batch = _make_trainer(CONFIG)
    size = sum(x.nbytes for x in jax.tree.leaves(to_groups(trainer.state)))
    table.add("training state, MB", size / 1e6)
    runs = {
        "step": lambda: _timed(lambda: _step(trainer, batch)),
        "step again": lambda: _timed(lambda: _step(trainer, batch)),
        "checksums": lambda: _timed(lambda: checksums(to_groups(trainer.state))),
        "replicas": lambda: _timed(lambda: check_replicas(trainer.state, 1)),
    }
    seconds = interleave(runs, rounds)
    step = float(np.median(seconds["step"]))
    table.add("a step, ms", 1e3 * step)
    same = Ratio.of(seconds["step again"], seconds["step"])
    table.add("step / step (A/A)", same)
    for name in ("checksums", "replicas"):
        taken = float(np.median(seconds[name]))
        table.add(f"{name}, ms", 1e3 * taken)
        share = 100 * taken / (EVERY * step)
        table.add(f"{name} every {EVERY} steps, % of the steps", share)
    for config in SAVED:
        _measure_saves(table, config, max(rounds // 4, 1))
    return table


def _measure_saves(table: Table, config: GPTConfig, rounds: int) -> None:
    """Delay of the steps during a save, as a share of the save's duration.

    An accelerator leaves the host's cores free while it computes. Simulated devices
    compute on the same cores that compress and write the checkpoint. So two kinds of
    steps are measured: steps on simulated devices, and steps in which the host only
    waits for the same time. In the latter, the same number of arrays is hashed, but
    with few elements, so that programs are dispatched but hardly use the cores.
    """
    trainer, batch = _make_trainer(config)
    _step(trainer, batch)
    size = sum(x.nbytes for x in jax.tree.leaves(to_groups(trainer.state)))
    save = f"a save of {size / 1e6:,.0f} MB"
    seconds = _median([_timed(lambda: _step(trainer, batch)) for _ in range(4)])
    few = jax.tree.map(
        lambda x: jax.device_put(np.zeros(len(jax.devices())), _over_all(x)),
        to_groups(trainer.state),
    )
    kinds = {
        "as on an accelerator": (
            lambda: _wait(trainer, seconds),
            lambda groups, name: start_checksums(few, name),
        ),
        "on the same cores": (lambda: _step(trainer, batch), start_checksums),
    }
    for step, start in kinds.values():
        _save_during_steps(trainer, step, start)  # compiles its programs
    hashing = _timed(lambda: checksums(to_groups(trainer.state)))
    table.add(f"{save}: its checksums on these cores, ms", 1e3 * hashing)
    found = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, (step, start) in kinds.items():
            found[kind].append(_save_during_steps(trainer, step, start))
    for kind, measured in found.items():
        columns = zip(*measured, strict=True)
        saves, blocks, delays = (_median(list(column)) for column in columns)
        what = f"{save}, steps {kind}"
        table.add(f"{what}: until it is on disk, ms", 1e3 * saves)
        table.add(f"{what}: of it the fit waits, ms", 1e3 * blocks)
        table.add(f"{what}: total delay of the steps, ms", 1e3 * delays)
        shares = [100 * delay / whole for whole, _, delay in measured]
        table.add(
            f"{what}: delay, % of the save's duration",
            f"{np.median(shares):.1f} ({min(shares):.1f} to {max(shares):.1f})",
        )


def _save_during_steps(
    trainer: Trainer, step: Callable[[], Any], start: Callable[..., Any]
) -> tuple[float, ...]:
    """Seconds of a save, of the fit's wait for it, and of delay of the steps."""
    with (
        mock.patch.object(manager, "start_checksums", start),
        tempfile.TemporaryDirectory() as name,
        CheckpointManager(name) as checkpoints,
    ):
        assert checkpoints.latest_step is None  # opens the directory
        alone = _median([_timed(step) for _ in range(4)])
        is_saved = (Path(name) / "1").exists
        began, asked = time.time(), time.perf_counter()
        checkpoints.save(trainer.state, 1, {}, {})
        blocked = time.perf_counter() - asked
        beside = []
        while not is_saved():
            beside.append(_timed(step))
            checkpoints.poll()
        # A step may end long after the save, so the end of the save is read off the
        # directory's time, which the rename has set.
        whole = (Path(name) / "1").stat().st_ctime - began
        return whole, blocked, blocked + sum(beside) - len(beside) * alone


def _over_all(x: jax.Array) -> NamedSharding:
    """A sharding over all devices of the mesh on which an array lives."""
    assert isinstance(x.sharding, NamedSharding)
    return NamedSharding(x.sharding.mesh, P(x.sharding.mesh.axis_names))


def _wait(trainer: Trainer, seconds: float) -> None:
    """A step on an accelerator, as the host sees it."""
    jax.block_until_ready(trainer.state)
    time.sleep(seconds)


def _make_trainer(config: GPTConfig) -> tuple[Trainer, Any]:
    trainer = Trainer(
        model=lambda rngs: GPT(config, rngs=rngs),
        optimizer=optax.adamw(1e-3),
        loss=next_token_loss,
        strategy=FSDP(),
        loggers=(),
    )
    tokens = np.zeros((NUM_ROWS, config.seq_len + 1), np.int32)
    return trainer, trainer.shard_batch({"tokens": tokens})


def _median(values: list[float]) -> float:
    return float(np.median(values))


def _step(trainer: Trainer, batch: Any) -> None:
    trainer.state, metrics = trainer.train_step(trainer.state, batch)
    jax.block_until_ready((trainer.state, metrics))


def _timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
