"""Mixtures of experts on TPUs: memory per chip, and exchanges that matmuls hide.

Training steps are compiled for v5p chips, without TPUs: nothing is run. Each device
sends the rows of its tokens, in chunks, to the devices of their experts, and they come
back.
"""

from __future__ import annotations

import json
import sys

from benchmarks.timing import Table
from benchmarks.tpu_steps import Case, compile_step, figures_of
from nnx_parallel import FSDP, Composite, ExpertParallel
from nnx_parallel.audit import audit
from nnx_parallel.layers.experts.ragged import NUM_CHUNKS
from nnx_parallel.models import GPTConfig


def like_deepseek_v3() -> GPTConfig:
    """DeepSeek-V3 with ordinary attention instead of latent attention."""
    return GPTConfig.preset(
        "deepseek-v3",
        seq_len=4096,
        remat="full",
        latents=None,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        rope_scaling=None,
        attention_scale=None,
    )


CASES: dict[str, Case] = {
    "Mixtral 8x7B, 64 chips": Case(
        config=lambda: GPTConfig.preset("mixtral-8x7b", seq_len=4096, remat="full"),
        strategy=Composite(ExpertParallel(4), FSDP(16)),
        topology="v5p:4x4x4",
        rows=128,
    ),
    "DeepSeek-V3-like, 1,024 chips": Case(
        config=like_deepseek_v3,
        strategy=Composite(ExpertParallel(64), FSDP(16)),
        topology="v5p:8x8x16",
        rows=1024,
    ),
}


def measure(rounds: int = 1) -> Table:
    """Memory, seconds to compile, and bytes of the exchanges; nothing is timed."""
    del rounds
    table = Table("mixtures of experts compiled for TPU v5p")
    for name, case in CASES.items():
        figures = figures_of("benchmarks.experts", name)
        table.add(f"{name}: strategy", f"{case.strategy!r} on {case.topology}")
        table.add(f"{name}: parameters", f"{figures['parameters']:,.0f}")
        table.add(f"{name}: tokens of a step", f"{figures['tokens']:,.0f}")
        table.add(f"{name}: state on a chip", f"{figures['state'] / 2**30:.1f} GiB")
        table.add(f"{name}: memory of a chip", f"{figures['memory'] / 2**30:.1f} GiB")
        table.add(f"{name}: compiled in", f"{figures['seconds']:.0f} s")
        for kind in ("exchanges", "all"):
            sent, hidden = figures[f"{kind}, sent"], figures[f"{kind}, hidden"]
            table.add(f"{name}: {kind}, a chip sends", f"{sent / 2**30:.2f} GiB")
            table.add(f"{name}: of it during matmuls", f"{hidden / sent:.1%}")
        rows = f"{figures['exchange'] / 2**20:.1f} MiB, in theory "
        rows += f"{figures['theory'] / 2**20:.1f} MiB"
        table.add(f"{name}: exchanges of a step", f"{figures['num_exchanges']:.0f}")
        table.add(f"{name}: rows of a chip in one of them", rows)
    return table


def compile_and_read(case: Case) -> dict[str, float]:
    """Compiles a step for abstract TPUs, and reads memory and schedule."""
    text, found = compile_step(case)
    report = audit(text)
    config = case.config()
    assert config.experts
    num_tokens = case.rows * config.seq_len
    num_exchanges = report.count("ragged-all-to-all")
    num_rows = num_tokens * config.experts.top_k // int(found["chips"]) // NUM_CHUNKS
    found |= {
        "parameters": config.num_params,
        "tokens": num_tokens,
        "exchange": report.bytes("ragged-all-to-all") / num_exchanges,
        "num_exchanges": num_exchanges,
        "theory": num_rows * config.embed_dim * 2,
        "flops": report.flops,
        "grouped": report.grouped_flops,
    }
    for name, kind in {"exchanges": "ragged-all-to-all", "all": None}.items():
        found[f"{name}, sent"] = sent = report.sent_bytes(kind)
        found[f"{name}, hidden"] = sent * (report.hidden_share_of(kind) or 0.0)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_and_read(CASES[sys.argv[1]])))
