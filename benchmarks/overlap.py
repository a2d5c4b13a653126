"""Exposed communication: bytes that no matmul hides in the TPU compiler's schedule.

The training step of a GPT is compiled for four v5p chips, without TPUs, and its
schedule is read. The variants are tensor parallelism with the partitioner's collectives
(``bulk``: sequence parallelism), with rings that overlap the matmuls, and in halves of
the rows; and FSDP that gathers each layer when it runs, or its first kernel ahead.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from benchmarks.timing import Table
from benchmarks.tpu_steps import Case, compile_step, last_line
from nnx_parallel import FSDP, Strategy, TensorParallel
from nnx_parallel.audit import audit
from nnx_parallel.models import GPTConfig
from nnx_parallel.training.compilation import TABLE

CHIPS, TOPOLOGY = 4, "v5p:2x2x1"
ROWS = 8
CONFIG = GPTConfig(
    vocab_size=8192,
    seq_len=2048,
    num_layers=16,
    embed_dim=2048,
    num_heads=16,
    mlp_dim=8192,
    tied=False,
)
STRATEGIES: dict[str, Strategy] = {
    "tensor": TensorParallel(CHIPS),
    "bulk": TensorParallel(CHIPS, sequence=True),
    "ring": TensorParallel(CHIPS, overlap="ring"),
    "halves": TensorParallel(CHIPS, overlap="halves"),
    "fsdp": FSDP(CHIPS),
    "fsdp, prefetch first": FSDP(CHIPS, prefetch="first"),
}
SUMS = ("all-reduce", "reduce-scatter")


def measure(rounds: int = 1) -> Table:
    """Bytes sent, bytes exposed and temporaries, per device; nothing is timed."""
    del rounds
    title = f"GPT of {CONFIG.num_params:,} parameters, {CONFIG.num_layers} layers"
    table = Table(f"{title}, {ROWS * CONFIG.seq_len} tokens a step, {TOPOLOGY}")
    for name in STRATEGIES:
        figures = schedule_of(name)
        gib = {key: f"{figures[key] / 2**30:.2f} GiB" for key in figures}
        table.add(f"{name}: sent", gib["sent"])
        table.add(f"{name}: exposed", gib["exposed"])
        table.add(f"{name}: of sums: sent", gib["summed"])
        table.add(f"{name}: of sums: exposed", gib["summed, exposed"])
        table.add(f"{name}: hidden, of what is sent", _share(figures))
        table.add(f"{name}: temporaries", gib["temporaries"])
    return table


def _share(figures: dict[str, float]) -> float:
    return 1 - figures["exposed"] / figures["sent"]


def schedule_of(
    name: str, *, sets_options: bool = True, **overrides: Any
) -> dict[str, float]:
    """Bytes per device of a strategy's step, compiled in a separate process.

    A separate process is needed, because a failed check in the TPU compiler ends its
    process.

    Args:
        name: One of `STRATEGIES`.
        sets_options: Whether the compiler gets the library's options, of `TABLE`.
        overrides: Fields of the GPT's config to change.

    Returns:
        ``sent`` and ``exposed``; of these, ``summed`` and ``summed, exposed`` for sums
        over devices in one collective (FSDP's gradients); and ``temporaries``.

    """
    arguments = [name, json.dumps(overrides), json.dumps(sets_options)]
    return last_line([sys.executable, "-m", "benchmarks.overlap", *arguments])


def compile_and_read(
    strategy: Strategy, config: GPTConfig, *, sets_options: bool
) -> dict[str, float]:
    """Compiles the step for abstract TPUs, and adds up its schedule."""
    text, found = compile_step(
        Case(
            config=lambda: config,
            strategy=strategy,
            topology=TOPOLOGY,
            rows=ROWS,
            options={} if sets_options else dict.fromkeys(each.name for each in TABLE),
        )
    )
    assert found["chips"] == CHIPS
    sent = audit(text).collectives
    sums = [each for each in sent if each.kind in SUMS]
    return {
        "sent": sum(each.sent_bytes for each in sent),
        "exposed": sum(each.sent_bytes for each in sent if not each.is_hidden),
        "summed": sum(each.sent_bytes for each in sums),
        "summed, exposed": sum(x.sent_bytes for x in sums if not x.is_hidden),
        "temporaries": found["temporaries"],
    }


if __name__ == "__main__":
    chosen = replace(CONFIG, **json.loads(sys.argv[2]))
    sets_options = json.loads(sys.argv[3])
    found = compile_and_read(STRATEGIES[sys.argv[1]], chosen, sets_options=sets_options)
    print(json.dumps(found))
