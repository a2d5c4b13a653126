"""One process of `benchmarks.weights`: reads its copy of a folder.

This file also runs with the python of an environment that has transformers, so it
imports each library only for its reader.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Takes the reader and the folders from the command line; prints the figures."""
    reader, *folders = sys.argv[1:]
    prepare = prepare_transformers if reader == "transformers" else prepare_jax
    read, folder = prepare(reader, [*map(Path, folders)])
    empty_cache(folder)
    before, start = (peak(), disk_bytes()), time.perf_counter()
    model = read()
    figures = {
        "memory": peak() - before[0],
        "disk": disk_bytes() - before[1],
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(figures))
    del model


def prepare_jax(reader: str, folders: list[Path]) -> tuple[Callable[[], Any], Path]:
    """Initialises JAX; returns a function that reads a folder, and the folder."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import nnx_parallel
    from nnx_parallel import FSDP, Composite, TensorParallel
    from nnx_parallel.models import GPT

    nnx_parallel.initialize()
    folder = folders[jax.process_index()]
    jax.block_until_ready(jnp.ones(8))

    def read() -> Any:
        if reader == "safetensors":
            from safetensors.flax import load_file

            files = sorted(folder.glob("*.safetensors"))
            return jax.block_until_ready([load_file(file) for file in files])
        source = GPT.from_pretrained(folder, dtype="keep")
        if reader == "direct call":
            model = source(nnx.Rngs(0))
        else:
            tensors = Composite(TensorParallel(2), FSDP())
            strategy = FSDP() if reader == "FSDP" else tensors
            model = strategy.init(source, nnx.Rngs(0))
        return jax.block_until_ready(nnx.state(model))

    return read, folder


def prepare_transformers(
    reader: str, folders: list[Path]
) -> tuple[Callable[[], Any], Path]:
    """Imports PyTorch; returns a function that reads a folder, and the folder."""
    del reader
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.ones(8)
    loader = transformers.AutoModelForCausalLM

    def read() -> Any:
        model = loader.from_pretrained(folders[0], dtype="auto")
        for x in model.parameters():
            # Arrays may be memory maps of files, so this reads an element of each page.
            x.detach().flatten()[::2048].sum()
        return model

    return read, folders[0]


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
