"""Predicted and published speeds of training steps on TPUs and GPUs; nothing runs.

Each published configuration is written with this library's strategies, compiled for the
devices that it ran on, and timed by `nnx_parallel.plan.timeline`: the compiler's
estimate of each operation, and its transfers over the links of the torus. No compiler
for GPUs runs here, so their steps are estimated by formulas. No constant is fitted to a
published figure.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from benchmarks.timing import Table
from benchmarks.tpu_steps import figures_of
from nnx_parallel import (
    FSDP,
    Composite,
    Offload,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
    plan,
)
from nnx_parallel.layers.stack.scan import Remat
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan import HARDWARE, Candidate, Topology
from nnx_parallel.plan.roofline import Assumptions
from nnx_parallel.plan.timeline import read_schedule
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.state import plan_state
from nnx_parallel.training.step import StepOptions, make_train_step

RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/trillium"
CONFIGS = (
    "https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/tpu"
)
TIERS = (
    "https://github.com/AI-Hypercomputer/maxtext/blob/main/docs/reference/models/"
    "tiering.md"
)

# Options of the TPU compiler that the published runs set and that today's compiler
# accepts. It refuses the option for fused gathers on v6e and v5p, where gathers run on
# the SparseCores instead.
_FUSED = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
    "xla_tpu_data_parallel_opt_different_sized_ops": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
}
_SPARSE_CORES = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": "false",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
}
# With the scheduler's options for programs that keep activations on the host. One
# published option is left out, 96 MiB of VMEM for an operation's tiles
# (`xla_tpu_scoped_vmem_limit_kib`): generating their code takes minutes longer.
_HOSTED = {
    "xla_tpu_enable_all_experimental_scheduler_features": "true",
    "xla_tpu_enable_scheduler_memory_pressure_tracking": "true",
    "xla_tpu_host_transfer_overlap_limit": "24",
    "xla_tpu_aggressive_opt_barrier_removal": "ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_enable_ag_backward_pipelining": "true",
    "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
    "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    "xla_max_concurrent_host_send_recv": "100",
    "xla_tpu_scheduler_percent_shared_memory_limit": "100",
    "xla_latency_hiding_scheduler_rerun": "2",
} | _SPARSE_CORES
_DENSE = {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
    "xla_tpu_assign_all_reduce_scatter_layout": "true",
    "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
    "xla_tpu_data_parallel_opt_different_sized_ops": "true",
} | _HOSTED
_HOST = Offload(optimizer=False, activations="block_inputs")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published run, and the nearest step that this library can express.

    Attributes:
        config: The model; ``seq_len`` is the length of a sequence.
        topology: The chips.
        strategy: How the chips share the work.
        rows: Sequences per device in a step.
        remat: The values that a block keeps.
        tokens: Published tokens/s per chip, or 0 if only ``tflops`` is given.
        tflops: Published FLOP/s per chip / 10^12, including attention's masked scores.
        source: Where it is published.
        differs: Differences from the published run; empty if it has no differences.
    """

    config: Callable[[], GPTConfig]
    topology: str
    strategy: Strategy
    rows: int
    source: str
    remat: Remat = "full"
    offload: Offload | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    tokens: float = 0.0
    tflops: float = 0.0
    differs: str = ""

    @property
    def published_tokens(self) -> float:
        """Tokens/s of a chip."""
        return self.tokens or self.tflops * 1e12 / flops_per_token(self.config())


def flops_per_token(config: GPTConfig) -> float:
    """FLOPs of a trained token as MaxText counts them: three forward passes.

    Products with weights, without the embedding's look-up, and all scores.
    """
    width, heads = config.embed_dim, config.sizes["heads"] * config.sizes["head_dim"]
    kv_heads = config.sizes["kv_heads"] * config.sizes["head_dim"]
    layer = width * (2 * heads + 2 * kv_heads + 3 * config.sizes["mlp"])
    scores = 2 * config.seq_len * heads
    layers = config.num_layers * (layer + scores)
    return 6.0 * (layers + width * config.vocab_size)


def _scaled(layers: int, width: int, heads: int, mlp: int) -> Callable[[], GPTConfig]:
    """Returns MaxText's model of a given size."""
    return lambda: GPTConfig.preset(
        "llama2-7b",
        num_layers=layers,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        mlp_dim=mlp,
        seq_len=2048,
    )


def _llama(name: str, seq_len: int) -> Callable[[], GPTConfig]:
    return lambda: GPTConfig.preset(name, seq_len=seq_len)


_TILES = "theirs has larger tiles"
_KEEPS = (
    "theirs keeps queries, keys, values on the host; ours computes them again; "
    f"{_TILES}"
)
PUBLISHED = {
    "16B, 256 v5e": Published(
        config=_scaled(32, 4096, 64, 28672),
        topology="v5e:16x16",
        strategy=FSDP(256),
        rows=6,
        options=_FUSED,
        tflops=120,
        source=f"{CONFIGS}/v5e",
    ),
    "32B, 256 v5e": Published(
        config=_scaled(32, 8192, 64, 28672),
        topology="v5e:16x16",
        strategy=FSDP(256),
        rows=4,
        options=_FUSED,
        tflops=132,
        source=f"{CONFIGS}/v5e",
    ),
    "64B, 256 v5e": Published(
        config=_scaled(64, 8192, 64, 28672),
        topology="v5e:16x16",
        strategy=FSDP(256),
        rows=2,
        options=_FUSED,
        tflops=118,
        source=f"{CONFIGS}/v5e",
    ),
    "32B, 64 v5p": Published(
        config=_scaled(32, 8192, 64, 28672),
        topology="v5p:4x4x4",
        strategy=Composite(FSDP(16), TensorParallel(4, sequence=True)),
        rows=6,
        remat="dots",
        options=_SPARSE_CORES,
        tflops=328,
        source=f"{CONFIGS}/v5p",
    ),
    "64B, 64 v5p": Published(
        config=_scaled(64, 8192, 64, 28672),
        topology="v5p:4x4x4",
        strategy=Composite(FSDP(16), TensorParallel(4, sequence=True)),
        rows=3,
        remat="dots",
        options=_SPARSE_CORES,
        tflops=323,
        source=f"{CONFIGS}/v5p",
    ),
    "Llama 2 70B, 64 v5p": Published(
        config=_llama("llama2-70b", 4096),
        topology="v5p:4x4x4",
        strategy=FSDP(64),
        rows=2,
        options=_SPARSE_CORES,
        tokens=692,
        source=TIERS,
        differs="theirs computes again only two products of the MLP; ours all",
    ),
    "Llama 3.1 8B, 8 v6e": Published(
        config=_llama("llama3.1-8b", 8192),
        topology="v6e:2x4",
        strategy=FSDP(8),
        rows=3,
        options=_DENSE,
        tokens=7139,
        source=f"{RECIPES}/Llama3.1-8B-MaxText/v6e-8",
        differs=_KEEPS,
    ),
    "Llama 3.1 8B, 256 v6e": Published(
        config=_llama("llama3.1-8b", 8192),
        topology="v6e:16x16",
        strategy=FSDP(256),
        rows=4,
        options=_DENSE,
        tokens=7207,
        source=f"{RECIPES}/Llama3.1-8B-MaxText/v6e-256",
        differs=_KEEPS,
    ),
    "Llama 3.1 70B, 256 v6e": Published(
        config=_llama("llama3.1-70b", 8192),
        topology="v6e:16x16",
        strategy=FSDP(256),
        rows=5,
        offload=_HOST,
        options=_DENSE,
        tokens=960,
        source=f"{RECIPES}/Llama3.1-70B-MaxText/v6e-256",
        differs=_KEEPS,
    ),
    "Llama 3.1 405B, 2 x 256 v6e": Published(
        config=_llama("llama3.1-405b", 8192),
        topology="2*v6e:16x16",
        strategy=FSDP(512),
        rows=1,
        offload=_HOST,
        options=_HOSTED,
        tokens=149.5,
        source=f"{RECIPES}/Llama3.1-405B-MaxText",
        differs=_TILES,
    ),
}


_TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks"
_H100 = HARDWARE["h100"]
# torchtitan's H100s have HBM2e and a power limit of 500 W. Its page says that their
# peak lies between the peaks of SXM (989 TFLOP/s) and NVL (835); this is the mean.
_H100_500W = replace(
    _H100,
    flops={**_H100.flops, "bfloat16": 912e12},
    memory_bytes=96e9,
    memory_bandwidth=2.4e12,
)


def _on_gpus(name: str, tensor: Strategy | None = None, **fields: Any) -> Published:
    state = FSDP() if tensor is None else Composite(FSDP(), tensor)
    return Published(config=_llama(name, 8192), strategy=state, **fields)


_2024 = f"{_TITAN}/llama3_h100_202412_torchtitan.md"
_2025 = f"{_TITAN}/asyncTP_llama3_h100_2025-06_torchtitan.md"
_A100S = "https://github.com/pytorch/torchtitan/blob/v0.1.0/docs/performance.md"
_SEQUENCE, _RING = TensorParallel(8, sequence=True), TensorParallel(8, overlap="ring")
_DOTS = "torchtitan keeps every second product of a block; this library keeps all"
_8B, _70B = "llama3.1-8b", "llama3.1-70b"
GPUS: dict[str, tuple[Topology, Published]] = {
    f"{name}, {count} {hardware.name}": (
        Topology(hardware=hardware, num_devices=count),
        case,
    )
    for name, count, hardware, case in (
        ("Llama 3.1 8B", 8, _H100_500W,
         _on_gpus(_8B, topology="", rows=2, remat="dots", tokens=6667, source=_2024,
                  differs=_DOTS)),
        ("Llama 3.1 8B", 128, _H100_500W,
         _on_gpus(_8B, topology="", rows=2, remat="dots", tokens=6514, source=_2024,
                  differs=_DOTS)),
        ("Llama 3.1 70B, TP 8", 256, _H100_500W,
         _on_gpus(_70B, _SEQUENCE, topology="", rows=2, tokens=597.3, source=_2025)),
        ("Llama 3.1 70B, TP 8 with overlap", 256, _H100_500W,
         _on_gpus(_70B, _RING, topology="", rows=2, tokens=652.4, source=_2025)),
        ("Llama 3 8B", 64, HARDWARE["a100"],
         _on_gpus(_8B, topology="", rows=1, remat="dots", tokens=2973,
                  source=_A100S, differs=_DOTS)),
        ("Llama 3 70B", 64, HARDWARE["a100"],
         _on_gpus(_70B, topology="", rows=1, tokens=331, source=_A100S)),
    )
}  # fmt: skip
"""Runs of torchtitan in bfloat16 with ``torch.compile``."""


def estimate_case(topology: Topology, case: Published) -> dict[str, float]:
    """Seconds of a step by formulas, at best and at worst."""
    config = case.config()
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        precision=Precision.mixed_bfloat16(),
        loggers=(),
    )
    rows = case.rows * topology.num_devices
    tokens = jax.ShapeDtypeStruct((rows, config.seq_len + 1), np.int32)
    candidate = Candidate(strategy=case.strategy, remat=case.remat)
    found = plan(
        trainer,
        topology=topology,
        batch={"tokens": tokens},
        candidates=candidate,
        assumptions=Assumptions(),
        compile=0,
    )
    spent = found.entries[0].time
    assert spent is not None, found.entries[0].refused
    return {"fast": spent.fast, "slow": spent.slow}


def compile_case(case: Published) -> dict[str, float]:
    """Seconds of a step, at best and at worst, and the parts of this time."""
    config, topology = case.config(), Topology.parse(case.topology)
    strategy = case.strategy
    layout = strategy.layout(strategy.make_mesh(topology.described()))
    model = abstract_model(lambda rngs: GPT(config, rngs=rngs), nnx.Rngs(0))
    placed = plan_state(
        model,
        layout,
        optax.adamw(1e-3),
        precision=Precision.mixed_bfloat16(),
        offload=case.offload,
    )
    step: Any = make_train_step(placed, next_token_loss, StepOptions(remat=case.remat))
    rows = case.rows * topology.num_devices
    place = layout.sharding(layout.batch_spec(rows))
    tokens = jax.ShapeDtypeStruct((rows, config.seq_len + 1), np.int32, sharding=place)
    lowered = step.lower(placed.abstract, {"tokens": tokens})
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        given = {**case.options, "xla_dump_to": directory}
        compiled = lowered.compile(compiler_options=given)
        (file,) = Path(directory).glob("*.after_codegen.txt")
        text = file.read_text()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return {
        "memory": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "compile_seconds": compile_seconds,
    } | figures_of_text(case, text, layout.mesh)


def figures_of_text(case: Published, text: str, mesh: Mesh) -> dict[str, float]:
    """The seconds of a compiled case."""
    topology, devices = Topology.parse(case.topology), [*mesh.devices.flat]
    found = read_schedule(text, topology, devices, dict(mesh.shape))
    spent = found.time(Assumptions())
    return {
        "fast": spent.fast,
        "slow": spent.slow,
        "products at peak": found.products[0],
        "products as estimated": found.products[1],
        "other operations": found.others,
        "kernels at peak": found.kernels,
        "waits": sum(seconds[0] for seconds in found.waits.values()),
    }


def measure(rounds: int = 1) -> Table:
    """Predicted over published tokens/s of a chip; ``rounds`` has no meaning here."""
    del rounds
    table = Table("tokens/s of a chip: predicted range, published, and their ratio")
    for name, case in PUBLISHED.items():
        try:
            figures = figures_of("benchmarks.published", name)
        except RuntimeError as error:
            table.add(name, f"not compiled: {str(error).splitlines()[-1][:200]}")
            continue
        table.add(name, row_of(case, figures))
    for name, (topology, case) in GPUS.items():
        table.add(name, row_of(case, estimate_case(topology, case)))
    return table


def row_of(case: Published, figures: Mapping[str, float]) -> str:
    """A case's line: tokens/s of a chip, and the differences."""
    tokens = case.rows * case.config().seq_len
    slow, fast = tokens / figures["slow"], tokens / figures["fast"]
    middle = (slow * fast) ** 0.5
    told = case.published_tokens
    line = (
        f"{slow:,.0f} to {fast:,.0f}, published {told:,.0f}, ratio {middle / told:.2f}"
    )
    return f"{line}; {case.differs}" if case.differs else line


if __name__ == "__main__":
    print(json.dumps(compile_case(PUBLISHED[sys.argv[1]])))
