"""Long sequences on TPUs: memory of a chip, and the ring's bytes that matmuls overlap.

Training steps are compiled for v5p chips, without TPUs: nothing is run. The ring is
read from the schedule of a step with 32,768 tokens a chip; Llama 3 8B with 131,072
tokens and Llama 3 70B with 1,048,576 must fit in the memory of a chip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.schedule import read_schedule
from benchmarks.timing import Table
from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    Precision,
    Strategy,
    TensorParallel,
)
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.state import plan_state
from nnx_parallel.training.step import StepOptions, make_train_step


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its sequences, and the chips that train it.

    Attributes:
        config: Its shape; ``seq_len`` is the length of a sequence.
        strategy: How it is trained.
        topology: The chips, wrapped around as real cubes are.
        rows: Sequences of a step.
    """

    config: Callable[[], GPTConfig]
    strategy: Strategy
    topology: str
    rows: int = 1


def llama(preset: Callable[..., GPTConfig], **sizes: Any) -> Callable[[], GPTConfig]:
    """A preset with sizes of its own, that keeps a layer's input alone."""
    return lambda: preset(**sizes, remat="full")


CASES: dict[str, Case] = {
    "ring, 4 chips": Case(
        config=llama(
            GPTConfig.llama3_8b, seq_len=131_072, num_layers=2, vocab_size=8192
        ),
        strategy=ContextParallel(4),
        topology="v5p:2x2x1",
    ),
    "ring, 8 chips": Case(
        config=llama(
            GPTConfig.llama3_8b, seq_len=262_144, num_layers=2, vocab_size=8192
        ),
        strategy=ContextParallel(8),
        topology="v5p:2x2x2",
    ),
    "Llama 3 8B, 131,072 tokens": Case(
        config=llama(GPTConfig.llama3_8b, seq_len=131_072),
        strategy=Composite(FSDP(16), ContextParallel(4)),
        topology="v5p:4x4x4",
        rows=16,
    ),
    "Llama 3 70B, 1,048,576 tokens": Case(
        config=llama(GPTConfig.llama3_70b, seq_len=1_048_576),
        strategy=Composite(
            FSDP(8), ContextParallel(16), TensorParallel(8, sequence=True)
        ),
        topology="v5p:8x8x16",
        rows=8,
    ),
}


def measure(rounds: int = 1) -> Table:
    """Memory, seconds to compile, and the ring's bytes; nothing is timed."""
    del rounds
    table = Table("training steps compiled for TPU v5p")
    for name, case in CASES.items():
        figures = figures_of(name)
        table.add(f"{name}: strategy", f"{case.strategy!r} on {case.topology}")
        table.add(f"{name}: memory of a chip", f"{figures['memory'] / 2**30:.1f} GiB")
        table.add(f"{name}: compiled in", f"{figures['seconds']:.0f} s")
        for kind in ("the ring", "reordering for balance"):
            sent, hidden = figures[kind], figures[f"{kind}, hidden"]
            table.add(f"{name}: {kind} sends", f"{sent / 2**30:.2f} GiB")
            table.add(f"{name}: of it during matmuls", f"{hidden / sent:.1%}")
    return table


def figures_of(name: str) -> dict[str, float]:
    """Of one case, compiled in a process of its own, which a failed check would end."""
    environment = {
        "TPU_SKIP_MDS_QUERY": "1",
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.long_sequences", name],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    if run.returncode:
        raise RuntimeError(f"{name}: {run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def compile_and_read(case: Case) -> dict[str, float]:
    """Compiles a step for abstract TPUs, and reads memory and schedule."""
    from jax.experimental import topologies

    topology: Any = topologies.get_topology_desc(
        platform="tpu", topology_name=case.topology
    )
    config, strategy = case.config(), case.strategy
    layout = strategy.layout(strategy.make_mesh(topology.devices))
    model = abstract_model(lambda rngs: GPT(config, rngs=rngs), nnx.Rngs(0))
    precision = Precision.mixed_bfloat16()
    plan = plan_state(model, layout, optax.adamw(1e-3), precision=precision)
    step: Any = make_train_step(plan, next_token_loss, StepOptions())
    rows = layout.sharding(layout.batch_spec(case.rows))
    shape = (case.rows, config.seq_len + 1)
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=rows)
    start = time.perf_counter()
    compiled = step.lower(plan.abstract, {"tokens": tokens}).compile()
    seconds = time.perf_counter() - start
    transfers = read_schedule(compiled.as_text())
    permutes = [each for each in transfers if each.kind == "collective-permute"]
    kinds = {
        "the ring": [each for each in permutes if "reorder" not in each.source],
        "reordering for balance": [e for e in permutes if "reorder" in e.source],
    }
    found = {kind: sum(each.bytes for each in own) for kind, own in kinds.items()}
    for kind, own in kinds.items():
        hidden = sum(each.bytes for each in own if each.is_hidden)
        found[f"{kind}, hidden"] = hidden
    memory = compiled.memory_analysis()
    return {
        # The state is donated: its outputs take the place of its inputs.
        "memory": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "state": memory.argument_size_in_bytes,
        "seconds": seconds,
        **found,
    }


if __name__ == "__main__":
    print(json.dumps(compile_and_read(CASES[sys.argv[1]])))
