"""One process of `benchmarks.weights`: reads its copy of a folder."""

import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_parallel
from nnx_parallel import FSDP, Composite, TensorParallel
from nnx_parallel.models import GPT

STRATEGIES = {
    "FSDP": FSDP,
    "TP x FSDP": lambda: Composite(TensorParallel(2), FSDP()),
}


def main() -> None:
    """Takes the reader and the folders from the command line; prints the figures."""
    reader, *folders = sys.argv[1:]
    nnx_parallel.initialize()
    folder = Path(folders[jax.process_index()])
    empty_cache(folder)
    jax.block_until_ready(jnp.ones(8))
    before, start = (peak(), disk_bytes()), time.perf_counter()
    if reader == "safetensors":
        from safetensors.flax import load_file

        model = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    elif reader == "direct call":
        model = nnx.state(GPT.from_pretrained(folder, dtype="keep")(nnx.Rngs(0)))
    else:
        source = GPT.from_pretrained(folder, dtype="keep")
        model = nnx.state(STRATEGIES[reader]().init(source, nnx.Rngs(0)))
    jax.block_until_ready(model)
    figures = {
        "memory": peak() - before[0],
        "disk": disk_bytes() - before[1],
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(figures))


def empty_cache(folder: Path) -> None:
    """Removes the pages of a folder's files from the system's cache."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def disk_bytes() -> int:
    """Bytes that the system has read from disks for this process."""
    return int(Path("/proc/self/io").read_text().split("\nread_bytes:")[1].split()[0])


def peak() -> int:
    """Peak bytes of this process; `getrusage` would include its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    main()
