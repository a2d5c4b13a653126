"""Trains a GPT on text files, and exports it to a folder that transformers can read.

On one CPU, with eight simulated devices and the text of Python's standard library:

    python examples/text.py --simulate 8

On a pod, every process runs the same command, with a run directory that all
processes can read and write:

    python examples/text.py --sources code=/data/code prose=/data/prose \
        --weights 7 3 --run /shared/run --steps 20000 --rows 256 --length 2048

A source is a directory of text files. Run the command again, and it resumes.
"""

import argparse
import ast
import inspect
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
from grain import experimental as packing

import nnx_parallel
from nnx_parallel import FSDP, Checkpoint, TextSamples, Trainer
from nnx_parallel.distributed import print_once
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.weights import save_pretrained

END = 0
"""Token that begins every document, and so also ends the document before it."""


@dataclass(frozen=True)
class Tokenizer:
    """Maps text to tokens and back. Token 0 is `END`."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocab_size: int
    save: Callable[[str], Any] | None = None


def make_tokenizer(
    texts: list[str], vocab_size: int, file: Path | None = None
) -> Tokenizer:
    """Learns a byte-level BPE, or reads it from the file of an earlier start.

    A resumed run needs the same numbers of tokens, also if the texts have changed.
    Without the library `tokenizers`, tokens are bytes.
    """
    try:
        import tokenizers as lib
    except ImportError:
        return Tokenizer(
            encode=lambda text: [byte + 1 for byte in text.encode()],
            decode=lambda tokens: bytes(
                token - 1 for token in tokens if 1 <= token <= 256
            ).decode(errors="replace"),
            vocab_size=257,
        )
    if file is not None and file.exists():
        bpe = lib.Tokenizer.from_file(str(file))
    else:
        bpe = lib.Tokenizer(lib.models.BPE())
        bpe.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = lib.decoders.ByteLevel()
        learner = lib.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|end|>"],  # gets number 0
            initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, learner)
        if file is not None and jax.process_index() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            bpe.save(f"{file}.new")
            os.replace(f"{file}.new", file)  # other processes never see half a file
    return Tokenizer(
        encode=lambda text: bpe.encode(text).ids,
        decode=bpe.decode,
        vocab_size=bpe.get_vocab_size(),
        save=bpe.save,
    )


def read_files(directory: Path) -> list[str]:
    """Returns the text of each file below a directory, in the order of their names."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [path.read_text(errors="replace") for path in files]


def standard_library() -> dict[str, list[str]]:
    """Returns the functions and the documentation of Python's standard library."""
    sources: dict[str, list[str]] = {"code": [], "prose": []}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="replace")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                continue
            if prose := ast.get_docstring(node):
                sources["prose"].append(prose)
            if isinstance(node, ast.FunctionDef):
                code = "".join(text.splitlines(True)[node.lineno - 1 : node.end_lineno])
                sources["code"].append(inspect.cleandoc(code))
    return sources


def documents(
    texts: list[str], tokenizer: Tokenizer, length: int
) -> list[dict[str, np.ndarray]]:
    """Returns the tokens of each text, cut into documents of at most ``length``."""
    rows = []
    for text in texts:
        tokens = np.array([END, *tokenizer.encode(text)], np.int32)
        parts = np.split(tokens, range(length, len(tokens), length))
        rows += [{"tokens": part} for part in parts]
    return rows


def packed(
    sources: list[list[dict[str, np.ndarray]]],
    weights: list[float],
    *,
    length: int,
    rows: int,
    share: tuple[int, int],
) -> grain.IterDataset:
    """Returns endless batches of packed documents, with the rows of this process.

    Args:
        sources: The documents of each source.
        weights: The share of documents that comes from each source.
        length: Tokens in a row: the input and the last label.
        rows: Rows of the global batch.
        share: The index of this process's part, and the number of parts.
    """
    index, count = share
    parts = [
        # Each epoch has a different order. Each checkpoint has the position.
        grain.MapDataset.source(source[index::count]).seed(seed).shuffle().repeat()
        for seed, source in enumerate(sources)
    ]
    mixed = grain.MapDataset.mix(parts, weights=weights).to_iter_dataset()
    dataset = packing.FirstFitPackIterDataset(
        mixed, length_struct={"tokens": length}, num_packing_bins=rows // count
    )

    def batch_of(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"tokens": row["tokens"], "segments": row["tokens_segment_ids"]}

    return dataset.map(batch_of).batch(rows // count, drop_remainder=True)


class First:
    """The first batches of a dataset, as data for evaluations."""

    def __init__(self, dataset: grain.IterDataset, count: int) -> None:
        self.dataset, self.count = dataset, count

    def __iter__(self) -> Iterator[Any]:
        """Yields the same batches each time."""
        return (
            batch for _, batch in zip(range(self.count), self.dataset, strict=False)
        )


def parse() -> argparse.Namespace:
    """Returns the arguments of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sources", nargs="*", default=[], metavar="NAME=DIRECTORY")
    parser.add_argument(
        "--weights", nargs="*", type=float, help="one for each source; default: equal"
    )
    parser.add_argument("--run", default="runs/text", help="shared by all processes")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=16, help="rows of a global batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--every", type=int, default=50, help="steps between saves")
    parser.add_argument("--simulate", type=int, help="number of devices, on a CPU")
    return parser.parse_args()


def main() -> None:
    """Trains or resumes, samples, and exports the model."""
    args = parse()
    nnx_parallel.initialize()  # joins the other processes, if there are any
    if args.simulate:
        nnx_parallel.simulate_devices(args.simulate)
    named = (source.partition("=")[::2] for source in args.sources)
    texts = {name: read_files(Path(path)) for name, path in named} or standard_library()
    # The tokenizer is the same on all processes, because its input is the same.
    sample = [text for source in texts.values() for text in source[:2000]]
    tokenizer = make_tokenizer(sample, args.vocab, Path(args.run) / "tokenizer.json")
    config = GPTConfig.tiny_llama(
        vocab_size=tokenizer.vocab_size,
        seq_len=args.length,
        embed_dim=args.width,
        num_layers=args.layers,
    )
    warmup = min(20, args.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, args.steps)
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
        next_token_loss,
        strategy=FSDP(),
        global_batch_size=args.rows,
        checkpoint=Checkpoint(args.run, every=args.every),
        callbacks=(
            TextSamples(
                ["def read", "Return the"],
                every=args.every,
                encode=tokenizer.encode,
                decode=tokenizer.decode,
                start=END,
                stop=(END,),
                top_p=0.9,
            ),
        ),
    )
    sizes = {"length": args.length + 1, "rows": args.rows, "share": trainer.data_share}
    weights = args.weights or [1.0] * len(texts)
    if len(weights) != len(texts):
        raise SystemExit(f"{len(texts)} sources need {len(texts)} --weights.")
    rows = [documents(each, tokenizer, args.length + 1) for each in texts.values()]
    for name, each in zip(texts, rows, strict=True):
        if len(each) < 20 * (least := trainer.data_share[1]):
            text = f"Source {name!r} has {len(each)} documents of at most {args.length}"
            raise SystemExit(f"{text} tokens; {least} processes need {20 * least}.")
    held_out = packed([each[::20] for each in rows], weights, **sizes)
    for each in rows:
        del each[::20]
    trainer.fit(
        packed(rows, weights, **sizes),
        args.steps,
        eval_data=First(held_out, 8),
        eval_every=args.every,
    )
    export = Path(args.run) / f"export-{trainer.step}"
    if not export.exists():
        save_pretrained(export, trainer.model)
    if tokenizer.save and jax.process_index() == 0:
        tokenizer.save(str(export / "tokenizer.json"))
    print_once(f"Step {trainer.step} is exported to '{export}'.")


if __name__ == "__main__":
    main()
