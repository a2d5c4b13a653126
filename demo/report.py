"""Prints the facts around the demo's run, in two columns."""

import textwrap

import numpy as np

from demo.corpus import Corpus, bigram_bits, unigram_bits
from nnx_parallel import Trainer

_NEXT = {
    "demo/train.py": "this run, as a script to read",
    "README.md": "strategies, your own model, checkpoints",
    "make demo-clean": "delete this run, so that the next one starts afresh",
    "make demo STRATEGY=fsdp": "another strategy",
    "make test": "the tests of all guarantees",
}


def show_start(corpus: Corpus, trainer: Trainer) -> None:
    """Prints the model, the data, the devices, and the sharding."""
    num_files, num_held_out = len(corpus.train_files), len(corpus.valid_files)
    mesh = " * ".join(f"{axis}={size}" for axis, size in trainer.mesh.shape.items())
    _show("text", f"{corpus.name}: {num_files} files, {num_held_out} more held out")
    description = trainer.describe()
    params = [row.info for row in description.rows if row.info.is_param]
    num_params = sum(info.size for info in params)
    kept, total = description.params_bytes / 2**20, 4 * num_params / 2**20  # float32
    _show("model", f"GPT over bytes, {num_params:,} parameters")
    _show("devices", f"{trainer.mesh.size} simulated, mesh {mesh}")
    _show("memory", f"{kept:.2f} of {total:.2f} MiB of parameters on each")
    _show("loss", "bits per byte")
    print()


def show_bits(corpus: Corpus, held_out: list[np.ndarray], bits: float) -> None:
    """Prints the held-out loss beside the losses of models that only count bytes."""
    print("\nBits per byte of the held-out files (lower is better):\n")
    _show("unigram", f"{unigram_bits(corpus.train, held_out):.4f}  counts bytes")
    _show("bigram", f"{bigram_bits(corpus.train, held_out):.4f}  counts pairs")
    _show("GPT", f"{bits:.4f}")


def show_restored(restored: Trainer, bits: float, before: float) -> None:
    """Prints the loss after the checkpoint was restored on other devices."""
    difference = f"the same to {max(abs(bits - before), 1e-7):.0e}"
    print(
        f"\nStep {restored.step} restored on {restored.mesh.size} devices under "
        "DataParallel():\n"
    )
    _show("GPT", f"{bits:.4f}  {difference}")


def show_sample(text: bytes) -> None:
    """Prints a sample of the model's text, and what to read next."""
    whole_lines = text.decode("ascii", "replace").rpartition("\n")[0]
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in whole_lines)
    print("\nIt continues `def `:\n")
    print(textwrap.indent(shown, "    "))
    print("\nNext:\n")
    width = max(map(len, _NEXT))
    for name, what in _NEXT.items():
        print(f"  {name:<{width}}  {what}")


def _show(name: str, value: str) -> None:
    print(f"  {name:<10}  {value}")
