"""The cost of the Trainer's step, compared with the same step written by hand.

The benchmark answers four questions. Are the compiled programs the same, opcode by
opcode and in bytes of scratch memory? Are their times the same? How long does the host
take to dispatch a step? How long does a fit take, which loads batches and logs every
step, compared with a bare loop over one batch that reads no metric? It also measures
the step of Flax's guide, `nnx.jit` over `nnx.Optimizer`, which traverses the model at
every call.

References:
    Flax, "Scale up on multiple devices", https://flax.readthedocs.io
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.peers import copied, copy_state, make_gpt_step, make_nnx_jit_step
from benchmarks.timing import Ratio, Runner, Table, interleave
from nnx_parallel import FSDP, Callback, DataParallel, Strategy, Trainer, audit
from nnx_parallel.loggers import JSONLinesLogger
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig.tiny(num_layers=2, seq_len=32)
TINY = GPTConfig.tiny(num_layers=1, seq_len=8, embed_dim=16, vocab_size=16)
ROWS = 16
TX = optax.adamw(1e-3)
STRATEGIES = {"data parallel": DataParallel(), "FSDP": FSDP()}


def measure(rounds: int = 500) -> Table:
    """All figures, for data parallelism and FSDP over all devices."""
    table = Table(
        f"Trainer's step over others: a GPT of {CONFIG.num_params:,} parameters, "
        f"{ROWS * CONFIG.seq_len} tokens, 8 devices"
    )
    for name, strategy in STRATEGIES.items():
        _compare_steps(table, name, strategy, rounds)
        _compare_dispatch(table, name, strategy)
        _compare_fit(table, name, strategy)
    return table


def make_trainer(
    config: GPTConfig,
    strategy: Strategy,
    loss: Callable = next_token_loss,
    **options: Any,
) -> Trainer:
    """A Trainer of a GPT, without loggers if the options name none."""
    options = {"loggers": ()} | options
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs), TX, loss, strategy=strategy, **options
    )


def make_batch(trainer: Trainer, config: GPTConfig) -> Any:
    """Random tokens, on the devices."""
    return trainer.shard_batch(host_batch(config))


def host_batch(config: GPTConfig) -> dict[str, np.ndarray]:
    """Random tokens."""
    rng = np.random.default_rng(0)
    shape = (ROWS, config.seq_len + 1)
    return {"tokens": rng.integers(0, config.vocab_size, shape, dtype=np.int32)}


def _compare_steps(table: Table, name: str, strategy: Strategy, rounds: int) -> None:
    traces = []

    def loss(model: GPT, batch: Any) -> Any:
        traces.append(batch["tokens"].shape)
        return next_token_loss(model, batch)

    trainer = make_trainer(CONFIG, strategy, loss)
    batch, model = make_batch(trainer, CONFIG), trainer.model
    assert isinstance(model, GPT)
    start = copy_state(trainer.state)
    by_hand = [make_gpt_step(model, TX, start) for _ in range(2)]
    guide = Runner(*make_nnx_jit_step(model, TX), batch)
    pairs = (trainer.train_step, trainer.state), (by_hand[0], start)
    _add_audits(
        table,
        name,
        *(
            step.lower(state, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]
            for step, state in pairs
        ),
    )
    runs = {
        "ours": Runner(trainer.train_step, trainer.state, batch),
        "by hand": Runner(by_hand[0], start, batch),
        "by hand again": Runner(by_hand[1], copied(start), batch),
    }
    seconds = interleave(runs, rounds)
    milliseconds = 1e3 * float(np.median(seconds["by hand"]))
    table.add(f"{name}: step by hand, ms", milliseconds)
    over_hand = Ratio.of(seconds["ours"], seconds["by hand"])
    table.add(f"{name}: Trainer / by hand", over_hand)
    same = Ratio.of(seconds["by hand again"], seconds["by hand"])
    table.add(f"{name}: by hand / by hand (A/A)", same)
    seconds = interleave({"ours": runs["ours"], "guide": guide}, max(20, rounds // 10))
    over_guide = Ratio.of(seconds["ours"], seconds["guide"])
    table.add(f"{name}: Trainer / nnx.jit", over_guide)
    table.add(f"{name}: traces of {runs['ours'].batch['tokens'].shape}", len(traces))


def _add_audits(table: Table, name: str, *compiled: jax.stages.Compiled) -> None:
    ours, by_hand = map(audit, compiled)
    table.add(f"{name}: same opcodes", ours.opcodes == by_hand.opcodes)
    for what in ("temporary_bytes", "argument_bytes"):
        figures = [getattr(report, what) for report in (ours, by_hand)]
        table.add(f"{name}: {what}, Trainer and by hand", figures)


def _compare_dispatch(table: Table, name: str, strategy: Strategy) -> None:
    """Measures only the host: with a small model the devices have little to do."""
    trainer = make_trainer(TINY, strategy)
    batch, model = make_batch(trainer, TINY), trainer.model
    assert isinstance(model, GPT)
    start = copy_state(trainer.state)
    by_hand = make_gpt_step(model, TX, start)
    runs = {
        "by hand": Runner(by_hand, start, batch).dispatch,
        "ours": Runner(trainer.train_step, trainer.state, batch).dispatch,
        "guide": Runner(*make_nnx_jit_step(model, TX), batch).dispatch,
    }
    seconds = interleave(runs, rounds=200)
    for run, values in seconds.items():
        table.add(f"{name}: dispatch {run}, us", 1e6 * float(np.median(values)))
    dispatch = Ratio.of(seconds["ours"], seconds["by hand"])
    table.add(f"{name}: dispatch, Trainer / by hand", dispatch)


class _Clock(Callback):
    """The time at which the metrics of each step arrived."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(
        self, trainer: Any, step: int, metrics: Mapping[str, float]
    ) -> None:
        del trainer, step, metrics
        self.times.append(time.perf_counter())


def _compare_fit(
    table: Table, name: str, strategy: Strategy, rounds: int = 40, num_steps: int = 50
) -> None:
    """Measures a fit from its 6th step to its last, with all work of each step."""
    clock, warm_up = _Clock(), 5
    with tempfile.TemporaryDirectory() as directory:
        logger = JSONLinesLogger(Path(directory) / "metrics.jsonl")
        trainer = make_trainer(CONFIG, strategy, loggers=(logger,), callbacks=(clock,))
        batch = make_batch(trainer, CONFIG)
        bare = Runner(trainer.train_step, copied(trainer.state), batch)

        def fit() -> float:
            clock.times.clear()
            data = itertools.repeat(host_batch(CONFIG))
            trainer.fit(data, trainer.step + warm_up + num_steps)
            return clock.times[-1] - clock.times[warm_up - 1]

        def loop() -> float:
            bare()
            start = time.perf_counter()
            for _ in range(num_steps):
                bare.state, _ = bare.step(bare.state, batch)
            jax.block_until_ready(bare.state)
            return time.perf_counter() - start

        seconds = interleave({"fit": fit, "loop": loop}, rounds, warm_up=2)
    over_loop = Ratio.of(seconds["fit"], seconds["loop"])
    table.add(f"{name}: fit that logs every step / bare loop", over_loop)
