"""Reading weights from files: bytes from disk, memory and seconds.

This library reads a checkpoint in the shape of Llama 3.2 1B over 8 simulated devices,
in 1, 2 and 4 processes. `safetensors.flax.load_file` reads it as whole arrays on one
device, and so does `from_pretrained` of transformers, which runs in a separate
environment (``--python PATH``). Each reading is a run of new processes. On a cluster,
processes do not share a cache of files, so each process has a copy of the folder. The
cache is emptied first. The system counts the bytes. Memory is the increase of a
process's peak. On simulated devices the shards are in the host's memory too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.timing import Table
from nnx_parallel.models import GPT, GPTConfig
from nnx_parallel.weights import save_pretrained

CONFIG = GPTConfig.preset("llama3.2-1b", num_layers=12)
CHILD = Path(__file__).with_name("weights_child.py")
RUNS = [
    ("safetensors", 1),
    ("direct call", 1),
    *((strategy, n) for strategy in ("FSDP", "TP x FSDP") for n in (1, 2, 4)),
]


def measure(rounds: int = 3, *, tiny: bool = False, python: str | None = None) -> Table:
    """Bytes, memory and seconds of each reader, in turn.

    Args:
        rounds: Readings by each reader; the table has their medians.
        tiny: Reads a tiny checkpoint, which takes seconds.
        python: The python of an environment with torch and transformers.
    """
    readers = [*RUNS, ("transformers", 1)] if python else RUNS
    table = Table("weights of 2 GB")
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent) / f"model{i}" for i in range(4)]
        write(folders[0], tiny)
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder)
        size = (folders[0] / "model.safetensors").stat().st_size
        runs = [
            [figures_of(*each, folders, python) for each in readers]
            for _ in range(rounds)
        ]
    table.add("bytes of the arrays", f"{size:,}")
    for (reader, processes), *figures in zip(readers, *runs, strict=True):
        name = f"{reader}, {processes} process{'es' if processes > 1 else ''}"
        disk = np.median([[x["disk"] for x in each] for each in figures], axis=0)
        table.add(f"{name}: from disk, all processes", float(disk.sum()) / size)
        table.add(f"{name}: from disk, one process", float(disk.max()) / size)
        for key, unit in (("memory", size), ("seconds", 1)):
            most = np.median([max(x[key] for x in each) for each in figures])
            table.add(f"{name}: {key}", float(most) / unit)
    if not python:
        table.add("transformers", "left out: --python PATH has it")
    return table


def write(folder: Path, tiny: bool) -> None:
    """A checkpoint in bfloat16, of random values."""
    config = GPTConfig.tiny_llama() if tiny else CONFIG
    rng = np.random.default_rng(0)
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    for param in jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        values = rng.standard_normal(param.shape, np.float32) * 0.02
        param.set_value(jnp.asarray(values, jnp.bfloat16))
    save_pretrained(folder, model)


def figures_of(
    reader: str, processes: int, folders: list[Path], python: str | None = None
) -> list[dict[str, float]]:
    """Figures of one reading, by process."""
    devices = str(8 // processes)
    launch = [sys.executable, "-m", "nnx_parallel", "launch", "--cpu"]
    launch += ["--processes", str(processes), "--devices-per-process", devices]
    if reader == "transformers" and python:
        launch = [python, "-I"]  # isolated, because this process has other packages
    run = subprocess.run(
        [*launch, str(CHILD), reader, *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    if run.returncode:
        raise RuntimeError(f"{reader}: {run.stderr}")
    return [json.loads(found) for found in re.findall(r"\{\"memory.*\}", run.stdout)]
