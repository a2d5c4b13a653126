"""The effect of the library's compiler options: with all, without all, without each.

Training steps of six layers in the shape of Llama-2 7B are compiled for TPUs without
TPUs. The share of all sent bytes that matmuls hide is read off each schedule.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from benchmarks.timing import Table
from benchmarks.tpu_steps import Case, compile_step, figures_of
from nnx_parallel import FSDP, Composite, TensorParallel
from nnx_parallel.audit import audit
from nnx_parallel.models import GPTConfig
from nnx_parallel.sharding import LogicalRules
from nnx_parallel.training.compilation import TABLE


def six_layers() -> GPTConfig:
    """Six layers of Llama-2 7B, with full remat."""
    config = GPTConfig.llama3_8b(num_layers=6, seq_len=4096, remat="full")
    shape = {"vocab_size": 32_000, "num_kv_heads": 32, "mlp_dim": 11_008}
    return replace(config, **shape, rope_theta=10_000.0)


# Gathers along this dim need no transposes.
BY_EMBED = (LogicalRules({"embed": "fsdp"}),)
CASES: dict[str, Case] = {
    "FSDP(64), v5p": Case(
        config=six_layers,
        strategy=FSDP(64, rules=BY_EMBED),
        topology="v5p:4x4x4",
        rows=128,
    ),
    "TP 4, FSDP 16, v5p": Case(
        config=six_layers,
        strategy=Composite(TensorParallel(4), FSDP(16)),
        topology="v5p:4x4x4",
        rows=128,
    ),
    "FSDP(256), v6e": Case(
        config=six_layers,
        strategy=FSDP(256, rules=BY_EMBED),
        topology="v6e:16x16",
        rows=512,
    ),
}
OF_TPUS = [option.name for option in TABLE if "gpu" not in option.kinds]
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "none": dict.fromkeys(OF_TPUS),
    **{f"without {name}": {name: None} for name in OF_TPUS},
}
"""`Backend(compiler_options=)` of each row; ``None`` removes an option."""


def measure(rounds: int = 1) -> Table:
    """Hidden share of all sent bytes, and temporaries, by options; nothing is timed."""
    del rounds
    table = Table("options of the compiler: six layers of Llama-2 7B, sequence 4096")
    for case in CASES:
        for variant in VARIANTS:
            # Options are left out one by one only under FSDP on v5p.
            if case == "FSDP(64), v5p" or variant in ("all", "none"):
                name = json.dumps([case, variant])
                found = figures_of("benchmarks.options", name)
                sent, temporary = found["sent"] / 2**30, found["temporary"] / 2**30
                figures = f"{found['hidden']:.1%} of {sent:.2f} GiB hidden"
                figures += f", temporaries {temporary:.2f} GiB"
                table.add(f"{case}: {variant}", figures)
    return table


def compile_and_read(case: Case) -> dict[str, float]:
    """Compiles a step for abstract TPUs, and reads memory and schedule."""
    text, found = compile_step(case)
    report = audit(text)
    temporary = found["memory"] - found["state"]
    sent, hidden = report.sent_bytes(), report.hidden_share or 0.0
    return {"sent": sent, "hidden": hidden, "temporary": temporary}


if __name__ == "__main__":
    chosen, kind = json.loads(sys.argv[1])
    print(json.dumps(compile_and_read(replace(CASES[chosen], options=VARIANTS[kind]))))
