"""The compiled training step compared with MaxText's: memory, bytes, estimated cycles.

Both steps are compiled by the same TPU compiler at the same shapes, with the same
compiler options, for chips that this machine does not have. The model is Llama 2 7B,
with sequences of 4,096 tokens, two rows per chip, full remat, AdamW, matmuls in
bfloat16 and parameters in float32. The benchmark reads the scheduled program. Nothing
is run: no figure is the time of a step.

MaxText runs in a separate environment, whose python is an argument; without it the
table has only the rows of this library.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.timing import Table
from benchmarks.tpu_steps import Case, compile_step, figures_of, last_line
from nnx_parallel import FSDP, Composite, OneFOneB, Pipeline, TensorParallel
from nnx_parallel.audit import audit
from nnx_parallel.audit.hlo import KnownValue, Module, parse
from nnx_parallel.models import GPTConfig

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
    "model_name=llama2-7b",
    "compile_topology_num_slices=1",
    "max_target_length=4096",
    "per_device_batch_size=2",
    "remat_policy=full",
    "gradient_clipping_threshold=0.0",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "skip_jax_distributed_system=true",
    "run_name=benchmark",
    "base_output_directory=/tmp/maxtext_output",
)
_CHIPS: dict[str, Any] = {"config": llama2_7b, "topology": "v5p:4x4x4", "rows": 128}
_MAXTEXT_64 = (*_MAXTEXT, "compile_topology=v5p-128")
_PODS: dict[str, Any] = {"config": llama2_7b, "topology": "v6e:16x16", "rows": 512}
_MAXTEXT_256 = (*_MAXTEXT, "compile_topology=v6e-256")
PAIRS = {
    "FSDP 64": Pair(
        ours=Case(strategy=FSDP(64, prefetch="first"), options=OPTIONS, **_CHIPS),
        theirs=_MAXTEXT_64,
    ),
    "tensor 4 x FSDP 16": Pair(
        ours=Case(
            strategy=Composite(TensorParallel(4, overlap="halves"), FSDP(16)),
            options=OPTIONS,
            **_CHIPS,
        ),
        theirs=(*_MAXTEXT_64, "ici_tensor_parallelism=4", "ici_fsdp_parallelism=16"),
    ),
}
FURTHER_PAIRS = {
    "v6e, FSDP 256, prefetch": Pair(
        ours=Case(strategy=FSDP(256, prefetch="first"), **_PODS), theirs=_MAXTEXT_256
    ),
    "v6e, tensor 4 x FSDP 64, halves": Pair(
        ours=Case(
            strategy=Composite(TensorParallel(4, overlap="halves"), FSDP(64)), **_PODS
        ),
        theirs=(
            *_MAXTEXT_256,
            "ici_tensor_parallelism=4",
            "ici_fsdp_parallelism=64",
            "allow_split_physical_axes=true",  # no axis of the torus has 4 chips
        ),
    ),
}
"""Larger steps (``--full``) of this library, with its compiler options."""

_SIX_LAYERS: dict[str, Any] = {
    **_CHIPS,
    "config": lambda: replace(llama2_7b(), num_layers=6),
}
_PIPELINE = Pipeline(8, schedule=OneFOneB())
_70B: dict[str, Any] = {
    "config": lambda: GPTConfig.llama3_70b(seq_len=8192, remat="full"),
    "topology": "v5p:8x8x16",
    "rows": 512,
    "microbatches": 32,
}
_MAY_RING = {
    "tensor 4 x FSDP 16, all-reduces": Case(
        strategy=Composite(TensorParallel(4), FSDP(16)), **_CHIPS
    ),
    "tensor 4 x FSDP 16, sequence": Case(
        strategy=Composite(TensorParallel(4, sequence=True), FSDP(16)), **_CHIPS
    ),
    "v6e, tensor 4 x FSDP 64": Case(
        strategy=Composite(TensorParallel(4, sequence=True), FSDP(64)), **_PODS
    ),
    "70B, pipeline 8 x tensor 8 x FSDP 16": Case(
        strategy=Composite(_PIPELINE, TensorParallel(8, sequence=True), FSDP(16)),
        **_70B,
    ),
}
FURTHER = {
    **{name: pair.ours for name, pair in FURTHER_PAIRS.items()},
    **_MAY_RING,
    **{
        f"{name}, rings": replace(case, options={_RINGS: None})
        for name, case in _MAY_RING.items()
    },
    **{
        f"six layers, FSDP 64, prefetch {mode}": Case(
            strategy=FSDP(64, prefetch=mode), **_SIX_LAYERS
        )
        for mode in (None, "first")
    },
    "tensor 4 x FSDP 16, ring": Case(
        strategy=Composite(TensorParallel(4, overlap="ring"), FSDP(16)), **_CHIPS
    ),
    "v6e, FSDP 256": Case(strategy=FSDP(256), **_PODS),
    "v6e, tensor 4 x FSDP 64, ring": Case(
        strategy=Composite(TensorParallel(4, overlap="ring"), FSDP(64)), **_PODS
    ),
    "70B, pipeline 8 x tensor 8 x FSDP 16, ring": Case(
        strategy=Composite(_PIPELINE, TensorParallel(8, overlap="ring"), FSDP(16)),
        **_70B,
    ),
    "70B, pipeline 8 x tensor 8 x FSDP 16, ring, gather once": Case(
        strategy=Composite(
            replace(_PIPELINE, gather="step"),
            TensorParallel(8, overlap="ring"),
            FSDP(16),
        ),
        **_70B,
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
            for label, more in {"": {}, ", no rings": NO_RINGS}.items():
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
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "step.txt"
        # Isolated mode, because this folder has a `maxtext.py` too, and this process
        # has other packages.
        found = last_line([python, "-I", str(child), json.dumps(request), str(text)])
        return found | read(text.read_text())


def read(text: str) -> dict[str, float]:
    """Bytes of a scheduled program, the share that products hide, and its cycles."""
    report = audit(text)
    return {
        "sent": report.sent_bytes(),
        "hidden": report.hidden_share or 0.0,
        "cycles": estimated_cycles(parse(text)),
    }


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(module: Module) -> float:
    """Returns XLA's estimate of a program's cycles, loops multiplied out.

    It does not count collectives and operations that wait for a collective.
    """

    def of(name: str, arguments: tuple[KnownValue, ...]) -> float:
        computation = module.computations[name]
        values = module.evaluate(name, arguments)
        total = 0.0
        for each in computation.instructions.values():
            operands = tuple(map(values.get, each.operands))
            if each.opcode == "while":
                loop = module.read_loop(each, operands[0])
                body = of(each.attribute("body") or "", (loop.invariants,))
                total += (loop.trip_count or 1) * body
            elif each.opcode in ("call", "conditional"):
                called = filter(None, (each.called, *each.branches))
                total += sum(of(inner, operands) for inner in called)
            elif found := _CYCLES.search(each.attributes):
                # The compiler writes the largest integer if it does not know the cost.
                cycles = int(found[1])
                total += cycles if cycles < 2**60 else 0
        return total

    return of(module.entry, ())


def compile_and_read(case: Case) -> dict[str, float]:
    """This library's step, compiled and read in this process."""
    text, found = compile_step(case)
    return found | read(text)


if __name__ == "__main__":
    cases = {name: pair.ours for name, pair in PAIRS.items()} | FURTHER | TINY
    print(json.dumps(compile_and_read(cases[sys.argv[1]])))
