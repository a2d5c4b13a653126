"""A GPT on one GPU: this library's step against PyTorch's, compiled, in one run.

Both train the same shape on the same tokens with the same number of rows: float32
parameters and AdamW state, matmuls and activations in bfloat16. PyTorch runs as its
users run it: `torch.compile` over model and loss, `scaled_dot_product_attention`
with FlashAttention and, from Hopper on, with cuDNN's kernel, and the fused AdamW. This
library runs a Trainer's step with its defaults, which also computes the norm of the
gradient. It is run once more on rows that are packed with up to 8 documents, where no
token attends to another document.

Both frameworks preallocate a GPU's memory, so two at once would compete for it. Each
therefore runs in a separate process, as the only user of the device; a round runs
every variant once, every other round in reverse order, so that a GPU that warms up
affects all equally. Compiled programs are cached between rounds. The number of rows is
the largest power of two, up to a limit, that fits for all variants. If a variant could
train more rows, only its memory shows this.

A time covers several steps, which are dispatched without waiting for each other, as in
training: Python's cost counts if the device waits for it. FLOPs are ``6 N + 12 L E T``
per token for all variants. Their share is relative to a matmul of two bfloat16 matrices
of 8192 x 8192, measured in the same processes; the faster framework's time is used.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu_task import PACKED, WAYS, Task
from benchmarks.timing import Ratio, Table
from nnx_parallel.models import GPTConfig

# The vocabulary is padded to a multiple of 128 for both, as in practice.
MODELS = {
    "124M": (GPTConfig.gpt2_124m(vocab_size=50_304), 64),
    "1.3B": (GPTConfig.gpt_1_3b(seq_len=1024), 16),
}
"""The models, and the largest number of rows to try."""
TINY = {"tiny": (GPTConfig.tiny(num_layers=2), 2)}
Models = Mapping[str, tuple[GPTConfig, int]]


def measure(rounds: int = 5, tiny: bool = False) -> Table:
    """Tokens and FLOPs per second, memory, and ratios to PyTorch.

    Args:
        rounds: Times that every variant is run; each time makes several measurements.
        tiny: Run a tiny model on CPU instead, as a smoke test; PyTorch is left out if
            it is not installed, and so is its compiler.

    Raises:
        SystemExit: If there is no GPU, or no PyTorch that sees it.
    """
    title = "A GPT on one device: this library and PyTorch"
    return compare(title, TINY if tiny else MODELS, WAYS, rounds, is_tiny=tiny)


def compare(
    title: str, models: Models, ways: Sequence[str], rounds: int, *, is_tiny: bool
) -> Table:
    """Trains each model in each way that can run here, as `measure` does."""
    tiny, devices = is_tiny, _devices(is_tiny)
    ways = [way for way in ways if _framework(way) in devices]
    if "torch cuDNN" in ways and (tiny or not _is_hopper()):
        ways.remove("torch cuDNN")
    table = Table(
        title,
        hardware=", ".join(sorted(set(devices.values()))),
        packages=("torch",) if "torch" in devices else (),
    )
    if "torch" not in devices:
        table.add("PyTorch", "is not installed: only this library runs")
    with tempfile.TemporaryDirectory() as cache:
        for name, (config, max_rows) in models.items():
            rows, first = _fit(Task.of(config, max_rows, tiny), ways, cache)
            table.add(f"{name}: rows of {config.seq_len} tokens", rows)
            if rows == 0:
                continue
            task = Task.of(config, rows, tiny)
            found = [first, *_rounds(task, ways, rounds - 1, cache)]
            _add_figures(table, name, task, found)
    return table


def _framework(way: str) -> str:
    return "torch" if way.startswith("torch") else "jax"


def _devices(tiny: bool) -> dict[str, str]:
    """The kind of device that each framework would use, by framework.

    Raises:
        SystemExit: If one of them has no GPU and the run is not tiny.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    if tiny:
        return dict.fromkeys(("jax", "torch") if has_torch else ("jax",), "CPU")
    ask = {
        "jax": "import jax; d = jax.devices()[0]; "
        "print(d.device_kind if d.platform == 'gpu' else '')",
        "torch": "import torch as t; "
        "print(t.cuda.get_device_name() if t.cuda.is_available() else '')",
    }
    found = {"jax": _ask(ask["jax"]), "torch": _ask(ask["torch"]) if has_torch else ""}
    if all(found.values()):
        return found
    said = "is not installed" if not has_torch else "sees none"
    versions = {"jax": found["jax"] or "sees none", "torch": found["torch"] or said}
    raise SystemExit(
        "This benchmark needs a GPU that jax and torch both see: "
        f"jax {versions['jax']}, torch {versions['torch']}. Install jax for CUDA "
        "(`pip install 'jax[cuda13]'`) and `torch` next to the library, or run a "
        "smoke test on CPU with --tiny."
    )


def _is_hopper() -> bool:
    """True if PyTorch uses cuDNN's attention on this GPU by default."""
    code = "import torch; print(torch.cuda.get_device_capability() >= (9, 0))"
    return _ask(code) == "True"


def _ask(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


@dataclass(frozen=True, kw_only=True)
class Found:
    """Measurements of one process.

    Attributes:
        seconds: Times of a step, several of them.
        product_flops: FLOP/s of the large matmul.
        losses: Losses of the first step and the last.
        peak_bytes: Peak memory, where the platform reports it.
    """

    seconds: tuple[float, ...]
    product_flops: float
    losses: tuple[float, float]
    peak_bytes: int | None


Round = Mapping[str, Found]


def _fit(task: Task, ways: Sequence[str], cache: str) -> tuple[int, Round]:
    """Returns the largest number of rows, a power of two, that fits, and its round."""
    while task.rows:
        found: dict[str, Found] = {}
        for way in ways:
            if (one := _run(way, task, cache)) is None:
                break
            found[way] = one
        else:
            return task.rows, found
        task = task.with_rows(task.rows // 2)
    return 0, {}


def _rounds(
    task: Task, ways: Sequence[str], count: int, cache: str
) -> list[dict[str, Found]]:
    found = []
    for index in range(count):
        # The round that found the number of rows ran in forward order.
        order = ways if index % 2 else ways[::-1]
        ran = {way: _run(way, task, cache) for way in order}
        lost = [way for way, one in ran.items() if one is None]
        if lost:
            raise RuntimeError(f"{lost} fitted once, and ran out of memory later.")
        found.append({way: one for way, one in ran.items() if one is not None})
    return found


def _run(way: str, task: Task, cache: str) -> Found | None:
    """Runs one process; ``None`` if it ran out of memory."""
    command = [sys.executable, "-m", "benchmarks.gpu_child", way, task.to_json()]
    done = subprocess.run(
        command,
        env=_environment(way, task, cache),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{way} failed: {done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Found(**found) if found is not None else None


def _environment(way: str, task: Task, cache: str) -> dict[str, str]:
    """Memory fractions, and a directory for compiled programs."""
    if task.is_tiny and _framework(way) == "jax":
        return os.environ | {"JAX_PLATFORMS": "cpu"}
    if _framework(way) == "torch":
        return os.environ | {
            "JAX_PLATFORMS": "cpu",  # the module with the model's shape imports jax
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(cache, "torch"),
        }
    return os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "JAX_COMPILATION_CACHE_DIR": os.path.join(cache, "jax"),
    }


def _add_figures(table: Table, name: str, task: Task, found: Sequence[Round]) -> None:
    products = [one.product_flops for ran in found for one in ran.values()]
    attainable = float(np.max(products))
    table.add(f"{name}: TFLOP/s of the large product", attainable / 1e12)
    medians = {
        way: np.array([np.median(ran[way].seconds) for ran in found])
        for way in found[0]
    }
    for way in medians:
        seconds = np.array([ran[way].seconds for ran in found])
        speeds = task.num_tokens / seconds
        flops = float(np.median(speeds)) * task.flops_per_token
        fastest, slowest = float(speeds.max()), float(speeds.min())
        table.add(f"{name}, {way}: tokens/s", float(np.median(speeds)))
        table.add(f"{name}, {way}: tokens/s, from and to", [slowest, fastest])
        table.add(f"{name}, {way}: TFLOP/s", flops / 1e12)
        table.add(f"{name}, {way}: of the large product", flops / attainable)
        if (peak_bytes := found[-1][way].peak_bytes) is not None:
            table.add(f"{name}, {way}: peak bytes", peak_bytes)
        table.add(f"{name}, {way}: first and last loss", list(found[-1][way].losses))
    if PACKED in medians:
        packed = Ratio.of(medians[PACKED], medians["ours"])
        table.add(f"{name}: seconds of a step, packed documents / whole rows", packed)
    for peer in medians:
        if _framework(peer) == "torch":
            ratio = Ratio.of(medians["ours"], medians[peer])
            table.add(f"{name}: seconds of a step, ours / {peer}", ratio)
