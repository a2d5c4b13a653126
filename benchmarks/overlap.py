"""Exposed communication: bytes that no matmul overlaps, as a TPU schedules them.

The training step of a GPT is compiled for four v5p chips, without TPUs, and its
schedule is read. The variants are tensor parallelism with the partitioner's collectives
(``bulk``: sequence parallelism), with rings that overlap the matmuls, and in halves of
the rows; and FSDP that gathers each layer when it runs, or its first kernel ahead.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.timing import Table
from benchmarks.tpu_steps import ENVIRONMENT
from nnx_parallel import FSDP, Precision, Strategy, TensorParallel
from nnx_parallel.audit import audit
from nnx_parallel.audit.transfers import compile_with_text
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.state import plan_state
from nnx_parallel.training.compilation import TABLE
from nnx_parallel.training.step import StepOptions, make_train_step

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


class CompilerMissingError(Exception):
    """The TPU compiler is not installed."""


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

    A failed check in the TPU compiler ends the process that it runs in.

    Args:
        name: One of `STRATEGIES`.
        sets_options: Whether the compiler gets the library's options, of `TABLE`.
        overrides: Fields of the GPT's config to change.

    Returns:
        ``sent`` and ``exposed``; of these, ``summed`` and ``summed, exposed`` for sums
        over devices in one collective (FSDP's gradients); and ``temporaries``.

    Raises:
        CompilerMissingError: If there is no TPU compiler.
    """
    arguments = [name, json.dumps(overrides), json.dumps(sets_options)]
    command = [sys.executable, "-m", "benchmarks.overlap", *arguments]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ENVIRONMENT,
    )
    if run.returncode:
        is_missing = (known := "No module named 'libtpu'") in run.stderr
        error = CompilerMissingError if is_missing else RuntimeError
        found = known if is_missing else run.stderr
        raise error(f"{shlex.join(command)} failed: {found}")
    return json.loads(run.stdout.splitlines()[-1])


def compile_and_read(
    strategy: Strategy, config: GPTConfig, *, sets_options: bool
) -> dict[str, float]:
    """Compiles the step for abstract TPUs, and adds up its schedule."""
    devices = Topology.parse(TOPOLOGY).described()
    layout = strategy.layout(strategy.make_mesh(devices))
    assert math.prod(layout.mesh.shape.values()) == CHIPS
    model = abstract_model(lambda rngs: GPT(config, rngs=rngs), nnx.Rngs(0))
    precision = Precision.mixed_bfloat16()
    plan = plan_state(model, layout, optax.adamw(1e-3), precision=precision)
    options = None if sets_options else dict.fromkeys(each.name for each in TABLE)
    options = StepOptions(compiler_options=options)
    step: Any = make_train_step(plan, next_token_loss, options)
    rows = layout.sharding(layout.batch_spec(ROWS))
    shape = (ROWS, config.seq_len + 1)
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=rows)
    compiled, text = compile_with_text(step.lower(plan.abstract, {"tokens": tokens}))
    sent = audit(text).collectives
    sums = [each for each in sent if each.kind in SUMS]
    return {
        "sent": sum(each.sent_bytes for each in sent),
        "exposed": sum(each.sent_bytes for each in sent if not each.is_hidden),
        "summed": sum(each.sent_bytes for each in sums),
        "summed, exposed": sum(x.sent_bytes for x in sums if not x.is_hidden),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


if __name__ == "__main__":
    from dataclasses import replace

    chosen = replace(CONFIG, **json.loads(sys.argv[2]))
    sets_options = json.loads(sys.argv[3])
    found = compile_and_read(STRATEGIES[sys.argv[1]], chosen, sets_options=sets_options)
    print(json.dumps(found))
