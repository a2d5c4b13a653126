"""The compiled training step compared with MaxText's: memory, bytes, estimated cycles.

Both steps are compiled by the same TPU compiler at the same shapes, for chips that this
machine does not have. They use full remat, AdamW, matmuls in bfloat16 and parameters in
float32. The compiler options are equal, except that this library's steps of ``--full``
use its defaults. The benchmark reads the scheduled program. Nothing is run, so no
figure is the time of a step.

MaxText runs in a separate environment, whose python is an argument; without it the
table has only the rows of this library.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.timing import Table
from benchmarks.tpu_steps import Case, compile_step, figures_of, last_line
from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    ExpertParallel,
    OneFOneB,
    Pipeline,
    TensorParallel,
)
from nnx_parallel.audit import audit
from nnx_parallel.layers import Save
from nnx_parallel.models import GPTConfig
from nnx_parallel.plan import Topology
from nnx_parallel.plan.timeline import read_schedule

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
OPTIONS = {
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_enable_async_all_gather": "true",
    f"{_OFFLOAD}_all_gather": "true",
    f"{_OFFLOAD}_2d_all_gather": "true",
    f"{_OFFLOAD}_3d_all_gather": "true",
    f"{_OFFLOAD}_reduce_scatter": "true",
    f"{_OFFLOAD}_nd_reduce_scatter": "true",
    f"{_OFFLOAD}_all_reduce": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
}
"""The options that MaxText's scripts set on v5p for SparseCores' collectives."""
_RINGS = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
NO_RINGS = {_RINGS: "1000000"}
"""This library also sets this option: the partitioner splits no matmul into a ring."""


def llama2_7b() -> GPTConfig:
    """The fields in which Llama 2 7B differs from Llama 3 8B."""
    return replace(
        GPTConfig.llama3_8b(seq_len=4096, remat="full"),
        vocab_size=32_000,
        num_kv_heads=32,
        mlp_dim=11_008,
        rope_theta=10_000.0,
    )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One step, as this library and as MaxText write it."""

    ours: Case
    theirs: tuple[str, ...]


_MAXTEXT = (
    "compile_topology_num_slices=1",
    "remat_policy=full",
    "gradient_clipping_threshold=0.0",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "skip_jax_distributed_system=true",
    "run_name=benchmark",
    "base_output_directory=/tmp/maxtext_output",
)


def _pair(
    ours: Case, model: str, chips: str, rows: int, *more: str, length: int = 4096
) -> Pair:
    """Pairs a step of this library with the same step of MaxText.

    Args:
        ours: The step of this library.
        model: MaxText's name of the model.
        chips: MaxText's name of the topology.
        rows: Rows on each chip.
        more: Further settings of MaxText.
        length: Tokens per row.
    """
    theirs = (
        f"model_name={model}",
        f"compile_topology={chips}",
        f"per_device_batch_size={rows}",
        f"max_target_length={length}",
    )
    return Pair(ours=ours, theirs=(*_MAXTEXT, *theirs, *more))


def _preset(name: str, seq_len: int = 4096) -> dict[str, Any]:
    return {"config": lambda: GPTConfig.preset(name, seq_len=seq_len, remat="full")}


_TENSOR = "ici_tensor_parallelism=4"
_SPLIT = "allow_split_physical_axes=true"
_CHIPS: dict[str, Any] = {"config": llama2_7b, "topology": "v5p:4x4x4", "rows": 128}
_PODS: dict[str, Any] = {"config": llama2_7b, "topology": "v6e:16x16", "rows": 512}
PAIRS = {
    "Llama 2 7B, 64 v5p, FSDP 64": _pair(
        Case(strategy=FSDP(64, prefetch="first"), options=OPTIONS, **_CHIPS),
        *("llama2-7b", "v5p-128", 2),
    ),
    "Llama 2 7B, 64 v5p, tensor 4 x FSDP 16": _pair(
        Case(
            strategy=Composite(TensorParallel(4, overlap="halves"), FSDP(16)),
            options=OPTIONS,
            **_CHIPS,
        ),
        *("llama2-7b", "v5p-128", 2, _TENSOR, "ici_fsdp_parallelism=16"),
    ),
}
FURTHER_PAIRS = {
    "Llama 2 7B, 256 v6e, FSDP 256": _pair(
        Case(strategy=FSDP(256, prefetch="first"), **_PODS),
        *("llama2-7b", "v6e-256", 2),
    ),
    "Llama 2 7B, 256 v6e, tensor 4 x FSDP 64": _pair(
        Case(
            strategy=Composite(TensorParallel(4, overlap="halves"), FSDP(64)), **_PODS
        ),
        *("llama2-7b", "v6e-256", 2, _TENSOR, "ici_fsdp_parallelism=64"),
        _SPLIT,  # no axis of the torus has 4 chips
    ),
    "Llama 3 8B, 512 v5p, FSDP 512": _pair(
        Case(
            strategy=FSDP(512, prefetch="first"),
            topology="v5p:8x8x8",
            rows=512,
            **_preset("llama3-8b", 8192),
        ),
        *("llama3-8b", "v5p-1024", 1),
        length=8192,
    ),
    "Llama 3 8B, 128 v5p, data 2 x FSDP 64": _pair(
        Case(
            strategy=Composite(DataParallel(2), FSDP(64, prefetch="first")),
            topology="v5p:4x4x8",
            rows=128,
            **_preset("llama3-8b", 8192),
        ),
        *("llama3-8b", "v5p-256", 1),
        *("ici_data_parallelism=2", "ici_fsdp_parallelism=64", _SPLIT),
        length=8192,
    ),
    "Qwen3 4B, 64 v6e, FSDP 64": _pair(
        Case(
            strategy=FSDP(64, prefetch="first"),
            topology="v6e:8x8",
            rows=128,
            **_preset("qwen3-4b"),
        ),
        *("qwen3-4b", "v6e-64", 2),
    ),
    "Gemma 2 9B, 64 v5p, FSDP 64": _pair(
        Case(
            strategy=FSDP(64, prefetch="first"),
            topology="v5p:4x4x4",
            rows=128,
            **_preset("gemma2-9b"),
        ),
        *("gemma2-9b", "v5p-128", 2),
    ),
    "Mixtral 8x7B, 64 v5p, expert 4 x FSDP 16": _pair(
        Case(
            strategy=Composite(ExpertParallel(4), FSDP(16)),
            topology="v5p:4x4x4",
            rows=128,
            **_preset("mixtral-8x7b"),
        ),
        *("mixtral-8x7b", "v5p-128", 2),
        *("ici_expert_parallelism=4", "ici_fsdp_parallelism=16"),
    ),
}
"""Further steps of both libraries (``--full``); ours have the default options."""

_SIX_LAYERS: dict[str, Any] = {
    **_CHIPS,
    "config": lambda: replace(llama2_7b(), num_layers=6),
}
_SEQUENCE = Case(
    strategy=Composite(TensorParallel(4, sequence=True), FSDP(16)), **_CHIPS
)
FURTHER = {
    **{name: pair.ours for name, pair in FURTHER_PAIRS.items()},
    "tensor 4 x FSDP 16, sequence": _SEQUENCE,
    "tensor 4 x FSDP 16, sequence, rings": replace(_SEQUENCE, options={_RINGS: None}),
    "tensor 4 x FSDP 16, ring": Case(
        strategy=Composite(TensorParallel(4, overlap="ring"), FSDP(16)), **_CHIPS
    ),
    **{
        f"six layers, FSDP 64, prefetch {mode}": Case(
            strategy=FSDP(64, prefetch=mode), **_SIX_LAYERS
        )
        for mode in (None, "first")
    },
    **{
        f"Llama 2 7B, 64 v5p, FSDP 64, remat {remat}": Case(
            strategy=FSDP(64, prefetch="first"),
            config=lambda kept=remat: replace(llama2_7b(), remat=kept),
            topology="v5p:4x4x4",
            rows=128,
        )
        for remat in ("full", Save("attention", "mlp_up", "mlp_gate"), "dots")
    },
    "70B, pipeline 8 x tensor 8 x FSDP 16": Case(
        strategy=Composite(
            Pipeline(8, schedule=OneFOneB()),
            TensorParallel(8, sequence=True),
            FSDP(16),
        ),
        config=lambda: GPTConfig.llama3_70b(seq_len=8192, remat="full"),
        topology="v5p:8x8x16",
        rows=512,
        microbatches=32,
    ),
}
"""MaxText's cases, and steps of only this library (``--full``)."""

TINY = {
    "tiny, FSDP 4": Case(
        config=lambda: GPTConfig.tiny(num_layers=2, embed_dim=128, remat="full"),
        strategy=FSDP(4, prefetch="first"),
        topology="v5p:2x2x1",
        rows=8,
    ),
    "tiny, tensor 4, ring": Case(
        config=lambda: GPTConfig.tiny(num_layers=2, embed_dim=128, remat="full"),
        strategy=TensorParallel(4, overlap="ring"),
        topology="v5p:2x2x1",
        rows=8,
    ),
}


def measure(
    rounds: int = 1,
    *,
    full: bool = False,
    tiny: bool = False,
    python: str | None = None,
) -> Table:
    """Memory, bytes sent and hidden, and cycles of each step; nothing is timed.

    Args:
        rounds: Has no effect.
        full: The `FURTHER` steps too, up to 1,024 chips: each takes minutes.
        tiny: Only a tiny model of this library, in seconds.
        python: The python of an environment with MaxText.
    """
    del rounds
    ours = TINY if tiny else {name: pair.ours for name, pair in PAIRS.items()}
    ours = ours | FURTHER if full and not tiny else ours
    pairs = PAIRS | FURTHER_PAIRS
    table = Table("a training step beside MaxText's, compiled for TPUs, not run")
    with_maxtext = not tiny and version_of_maxtext(python)
    for name, case in ours.items():
        table.add(f"{name}: strategy", f"{case.strategy!r} on {case.topology}")
        _add(table, f"{name}: this library", figures_of(__spec__.name, name))
        if with_maxtext and python and name in pairs:
            # The partitioner writes rings only under tensor parallelism.
            rings = {", no rings": NO_RINGS} if _TENSOR in pairs[name].theirs else {}
            for label, more in {"": {}, **rings}.items():
                found = figures_of_maxtext(python, pairs[name], more)
                _add(table, f"{name}: MaxText{label}", found)
    if not tiny:
        table.add("MaxText", with_maxtext or "left out: --python PATH has it")
    return table


def _add(table: Table, name: str, found: Mapping[str, float]) -> None:
    table.add(f"{name}: temporaries", f"{found['temporaries'] / 2**30:.3g} GiB")
    table.add(f"{name}: a chip sends", f"{found['sent'] / 2**30:.3g} GiB")
    table.add(f"{name}: of it during products", f"{found['hidden']:.1%}")
    table.add(f"{name}: estimated cycles", f"{found['cycles'] / 1e6:.4g} million")
    kernels = f"{found['kernels'] / 1e6:.4g} million"
    table.add(f"{name}: kernels of attention, at peak", kernels)
    waits = found["cycles"] + found["waits"]
    table.add(f"{name}: cycles and waits", f"{waits / 1e6:.4g} million")
    share = found["at peak"] / found["cycles"]
    table.add(f"{name}: share of products at peak", f"{share:.1%}")
    table.add(f"{name}: compiled in", f"{found['seconds']:.0f} s")


def version_of_maxtext(python: str | None) -> str | None:
    """The version of MaxText in an environment, or ``None`` where it is missing."""
    if python is None:
        return None
    code = "from importlib.metadata import version as v; "
    code += "print(v('maxtext'), 'libtpu', v('libtpu'))"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False
    )
    if done.returncode:
        error = done.stderr.strip().splitlines()[-1]
        raise SystemExit(f"{python} has no MaxText: {error}")
    return done.stdout.strip()


def figures_of_maxtext(
    python: str, pair: Pair, options: Mapping[str, str]
) -> dict[str, float]:
    """MaxText's step, compiled in its environment and read here.

    Its compiler gets `OPTIONS` and further ``options``.
    """
    child = Path(__file__).with_name("maxtext_child.py")
    request = {"overrides": pair.theirs, "options": OPTIONS | dict(options)}
    topology = Topology.parse(pair.ours.topology)
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "step.txt"
        # Isolated mode, because this folder has a `maxtext.py` too, and this process
        # has other packages.
        found: dict[str, Any] = last_line(
            [python, "-I", str(child), json.dumps(request), str(text)]
        )
        chips = {tuple(device.coords): device for device in topology.described()}
        devices = [chips[tuple(place)] for place in found.pop("places")]
        return found | read(text.read_text(), topology, devices)


def read(text: str, topology: Topology, devices: Sequence[Any]) -> dict[str, float]:
    """Bytes and estimated cycles of a scheduled program.

    Args:
        text: The program, with the compiler's estimates.
        topology: The chips.
        devices: The chips in the order of the program's mesh.
    """
    report = audit(text)
    found = read_schedule(text, topology, devices, {"chips": len(devices)})
    clock = topology.hardware.clock
    return {
        "sent": report.sent_bytes(),
        "hidden": report.hidden_share or 0.0,
        # The compiler does not estimate kernels. Waits are reported separately.
        "cycles": (found.products[1] + found.others) * clock,
        "waits": sum(slow for _, slow in found.waits.values()) * clock,
        "at peak": found.products[0] * clock,
        "kernels": found.kernels * clock,
    }


def compile_and_read(case: Case) -> dict[str, float]:
    """This library's step, compiled and read in this process."""
    topology = Topology.parse(case.topology)
    text, found = compile_step(case)
    mesh = case.strategy.make_mesh(topology.described())
    return found | read(text, topology, [*mesh.devices.flat])


if __name__ == "__main__":
    cases = {name: pair.ours for name, pair in PAIRS.items()} | FURTHER | TINY
    print(json.dumps(compile_and_read(cases[sys.argv[1]])))
