"""Reads a folder of weights on the devices of several processes, and writes another."""

import json
import sys

import numpy as np
import optax

import nnx_parallel
from nnx_parallel import FSDP, Composite, TensorParallel, Trainer
from nnx_parallel.models import GPT, next_token_loss
from nnx_parallel.sharding.nnx_arrays import flatten_pure
from nnx_parallel.weights import pretrained, save_pretrained

read: list[int] = []
check = pretrained._check_finite  # pyright: ignore[reportPrivateUsage]


def count(name: str, tensor: pretrained.Tensor, part: np.ndarray) -> None:
    """Counts the bytes of each part of a tensor that this process reads."""
    read.append(part.nbytes)
    check(name, tensor, part)


def main() -> None:
    """Takes the source, the target and the strategy from the command line."""
    nnx_parallel.initialize()
    source, target, strategy = sys.argv[1:]
    pretrained._check_finite = count  # pyright: ignore[reportPrivateUsage]
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
    own = {
        path: sum({str(s.index): s.data.nbytes for s in x.addressable_shards}.values())
        for path, x in flatten_pure(trainer.state.params).items()
    }
    print(json.dumps({"read": sum(read), "shards": sum(own.values())}))  # noqa: T201


if __name__ == "__main__":
    main()
