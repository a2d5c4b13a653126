"""Reading weights from files: the bytes that a process reads, its memory, its seconds.

A checkpoint in the shape of Llama 3.2 1B is read over 8 simulated devices, and by
`safetensors.flax.load_file`, which gives whole arrays on one device. Each reading is a
separate process; its memory is the increase of its peak. On simulated devices the
shards are also in the host's memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.timing import Table
from nnx_parallel import FSDP, simulate_devices
from nnx_parallel.models import GPT, GPTConfig
from nnx_parallel.weights import pretrained, save_pretrained

CONFIG = GPTConfig.preset("llama3.2-1b", num_layers=12)


def measure(rounds: int = 3, tiny: bool = False) -> Table:
    """Bytes, memory and seconds of both readers, in turn."""
    table = Table("weights of 2 GB")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        write(folder, tiny)
        size = (folder / "model.safetensors").stat().st_size
        runs = {
            name: [figures_of(name, folder) for _ in range(rounds)] for name in READERS
        }
    ours, theirs = (
        {key: float(np.median([each[key] for each in runs[name]])) for key in keys}
        for name, keys in (
            ("ours", ("read", "memory", "seconds")),
            ("safetensors", ("memory", "seconds")),
        )
    )
    table.add("bytes of the arrays", f"{size:,}")
    table.add("read, of the shards of all devices", ours["read"] / size)
    table.add("memory, ours, of the shards", ours["memory"] / size)
    table.add("memory, safetensors.flax on one device", theirs["memory"] / size)
    table.add("seconds, ours", ours["seconds"])
    table.add("seconds, safetensors.flax on one device", theirs["seconds"])
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


def figures_of(reader: str, folder: Path) -> dict[str, float]:
    """Figures of one reading, in a separate process."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.weights", reader, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    if run.returncode:
        raise RuntimeError(f"{reader}: {run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def peak() -> int:
    """Peak bytes of this process; `getrusage` would include its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def read_ours(folder: Path) -> dict[str, float]:
    """Reads into shards of 8 devices."""
    simulate_devices(8)
    read: list[int] = []
    check = pretrained._check_finite  # pyright: ignore[reportPrivateUsage]

    def count(name: str, tensor: pretrained.Tensor, part: np.ndarray) -> None:
        read.append(part.nbytes)
        check(name, tensor, part)

    pretrained._check_finite = count  # pyright: ignore[reportPrivateUsage]
    jax.block_until_ready(jnp.ones(8))
    before, start = peak(), time.perf_counter()
    source = GPT.from_pretrained(folder, dtype="keep")
    model = FSDP().init(source, nnx.Rngs(0))
    jax.block_until_ready(nnx.state(model))
    seconds = time.perf_counter() - start
    return {"read": sum(read), "memory": peak() - before, "seconds": seconds}


def read_theirs(folder: Path) -> dict[str, float]:
    """Reads whole arrays, by the package safetensors."""
    from safetensors.flax import load_file

    jax.block_until_ready(jnp.ones(8))
    before, start = peak(), time.perf_counter()
    jax.block_until_ready(load_file(folder / "model.safetensors"))
    seconds = time.perf_counter() - start
    return {"memory": peak() - before, "seconds": seconds}


READERS = {"ours": read_ours, "safetensors": read_theirs}

if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](Path(sys.argv[2]))))
