"""Reads a folder of weights on the devices of several processes, and writes another."""

import json
import sys

import jax
import numpy as np
import optax

import nnx_parallel
from nnx_parallel import FSDP, Composite, TensorParallel, Trainer
from nnx_parallel.models import GPT, next_token_loss
from nnx_parallel.weights import save_pretrained
from nnx_parallel.weights.files import Tensor

read: list[int] = []
read_rows = Tensor.read_rows


def count(self: Tensor, first: int, last: int) -> np.ndarray:
    """Counts the bytes that this process reads from the files."""
    rows = read_rows(self, first, last)
    read.append(rows.nbytes)
    return rows


def main() -> None:
    """Takes the source, the target and the strategy from the command line."""
    nnx_parallel.initialize()
    source, target, strategy = sys.argv[1:]
    source = source.format(jax.process_index())
    Tensor.read_rows = count
    tensors = Composite(TensorParallel(2), FSDP(min_size=1))
    trainer = Trainer(
        GPT.from_pretrained(source, dtype="keep"),
        optax.sgd(0.1),
        next_token_loss,
        strategy=FSDP(min_size=1) if strategy == "fsdp" else tensors,
        loggers=(),
    )
    model = trainer.model
    save_pretrained(target, model, source=source)
    print(json.dumps({"read": sum(read)}))  # noqa: T201


if __name__ == "__main__":
    main()
