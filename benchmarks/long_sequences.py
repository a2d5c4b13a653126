"""Long sequences on TPUs: memory per chip, and the ring's bytes that matmuls hide.

Training steps are compiled for v5p chips, without TPUs: nothing is run. The ring is
read from the schedule of a step with 32,768 tokens a chip; Llama 3 8B with 131,072
tokens and Llama 3 70B with 1,048,576 must fit in the memory of a chip.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.timing import Table
from benchmarks.tpu_steps import Case, compile_step, figures_of
from nnx_parallel import FSDP, Composite, ContextParallel, TensorParallel
from nnx_parallel.audit import audit
from nnx_parallel.models import GPTConfig


def llama(preset: Callable[..., GPTConfig], **sizes: Any) -> Callable[[], GPTConfig]:
    """Returns a preset with other sizes; its remat keeps only each layer's input."""
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
        figures = figures_of("benchmarks.long_sequences", name)
        table.add(f"{name}: strategy", f"{case.strategy!r} on {case.topology}")
        table.add(f"{name}: memory of a chip", f"{figures['memory'] / 2**30:.1f} GiB")
        table.add(f"{name}: compiled in", f"{figures['seconds']:.0f} s")
        for kind in ("the ring", "reordering for balance"):
            sent, hidden = figures[kind], figures[f"{kind}, hidden"]
            table.add(f"{name}: {kind} sends", f"{sent / 2**30:.2f} GiB")
            table.add(f"{name}: of it during matmuls", f"{hidden / sent:.1%}")
    return table


def compile_and_read(case: Case) -> dict[str, float]:
    """Compiles a step for abstract TPUs, and reads memory and schedule."""
    text, found = compile_step(case)
    sent = audit(text).collectives
    permutes = [each for each in sent if each.kind == "collective-permute"]
    kinds = {
        "the ring": [each for each in permutes if "reorder" not in each.source],
        "reordering for balance": [e for e in permutes if "reorder" in e.source],
    }
    for kind, own in kinds.items():
        found[kind] = sum(each.sent_bytes for each in own)
        hidden = (each.sent_bytes for each in own if each.is_hidden)
        found[f"{kind}, hidden"] = sum(hidden)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_and_read(CASES[sys.argv[1]])))
