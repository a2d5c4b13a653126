"""Mistakes of users: how many end in a message that says what to change.

A mistake is ``taught`` if an error or a warning has the words that the user needs. It
is ``bare`` if an error has other words, and ``silent`` if there is neither.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel
from benchmarks.mistake_table import AREAS
from benchmarks.timing import Table
from nnx_parallel import Trainer
from nnx_parallel.data import Shared
from nnx_parallel.layers import lora, merge_lora
from nnx_parallel.models import GPT, GPTConfig, generate, next_token_loss, pad_prompts
from nnx_parallel.weights import save_pretrained

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype(np.float32)
Y = np.arange(16, dtype=np.int32) % 4
T = RNG.normal(size=16).astype(np.float32)
BATCH = {"x": X, "y": Y, "t": T}
USED = (Shared, generate, itertools, jnp, json, lora, merge_lora, pad_prompts, P)
"""Names that only the code of the mistakes uses."""
PROMPT = np.array([[1, 2, 3]], np.int32)
SGD = optax.sgd(0.1)


class MLP(nnx.Module):
    """A classifier of 8 numbers and 4 classes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(8, 16, rngs=rngs)
        self.b = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        return self.b(nnx.relu(self.a(x)))


class Wide(MLP):
    """The classifier with a wider hidden layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(8, 32, rngs=rngs)
        self.b = nnx.Linear(32, 4, rngs=rngs)


class One(nnx.Linear):
    """A regression of one number."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(8, 1, rngs=rngs)


class WithDropout(MLP):
    """The classifier with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        return self.drop(super().__call__(x))


class Modes(WithDropout):
    """The classifier that gets its mode as an argument."""

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        """Returns the logits."""
        return self.drop(self.b(self.a(x)), deterministic=not train)


class Embeds(nnx.Module):
    """A classifier of tokens."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Embed(16, 8, rngs=rngs)
        self.b = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        return self.b(self.a(x).mean(1))


class Convs(nnx.Module):
    """A classifier of images (8, 8, 3)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.b = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        return self.b(self.a(x).mean((1, 2)))


def ce(model: Any, batch: Any) -> jax.Array:
    """Returns the cross-entropy."""
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def ce0(model: Any, batch: Any) -> jax.Array:
    """Returns a loss without labels."""
    return (model(batch["x"]) ** 2).mean()


def make(**options: Any) -> Trainer:
    """Returns a Trainer of the classifier."""
    build: Any = Trainer
    settings = {"model": MLP, "optimizer": SGD, "loss": ce, "loggers": ()}
    return build(**(settings | options))


def fit(data: Any = (BATCH,), **options: Any) -> Any:
    """Trains one step."""
    named = ("eval_data", "eval_every", "last_batch")
    chosen = {name: options.pop(name) for name in named if name in options}
    return make(**options).fit(data, 1, **chosen)


def gpt(**config: Any) -> GPT:
    """Returns a small GPT."""
    return GPT(GPTConfig.tiny(**config), rngs=nnx.Rngs(0))


def fit_gpt(data: Any = None, config: Any = None, **options: Any) -> Any:
    """Trains a small GPT for one step."""
    data = [np.zeros((8, 33), np.int32)] if data is None else data
    config = {"num_layers": 2} | (config or {})
    settings = {"model": lambda rngs: GPT(GPTConfig.tiny(**config), rngs=rngs)}
    return fit(data, **(settings | {"loss": next_token_loss} | options))


def llama(folder: Path) -> None:
    """Writes the weights of a small Llama."""
    save_pretrained(folder, GPT(GPTConfig.tiny_llama(), rngs=nnx.Rngs(0)))


def cli(*arguments: str) -> None:
    """Runs a command; raises an error with what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "nnx_parallel", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        raise SystemError(done.stdout + done.stderr)


def parse(text: str) -> list[tuple[str, list[str], str]]:
    """Returns the name, the words and the code of each mistake of an area."""
    found = []
    for block in text.split("\n# ")[1:]:
        head, _, code = block.partition("\n")
        name, _, words = head.partition(" :: ")
        found.append((name, [word.strip() for word in words.split(";")], code))
    return found


def run(code: str) -> tuple[str, str]:
    """Runs a mistake: the kind of its error, or nothing, and all that it says."""
    names = {k: x for k, x in globals().items() if not k.startswith("_")}
    environment, error = dict(os.environ), None
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        names |= {"n": nnx_parallel, "tmp": Path(folder), "__name__": "mistake"}
        names["script"] = lambda: (Path(folder) / "train.py").write_text(SCRIPT)
        try:
            exec(compile(code, "mistake", "exec"), names)
        except (Exception, SystemExit) as found:
            error = found
    os.environ.clear()
    os.environ.update(environment)
    said = [str(warning.message) for warning in caught]
    if error is not None:
        said += [str(error), *getattr(error, "__notes__", ())]
    return "" if error is None else type(error).__name__, "\n".join(said)


def classify(kind: str, said: str, words: list[str]) -> str:
    """Returns ``taught``, ``bare`` or ``silent``."""
    has = [any(w in said for w in word.split("|")) for word in words]
    return "taught" if all(has) else "bare" if kind else "silent"


SCRIPT = """
import nnx_parallel, numpy as np, optax
from flax import nnx
nnx_parallel.Trainer(
    lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    optax.sgd(0.1),
    lambda m, b: (m(b) ** 2).mean(),
    loggers=(),
).fit([np.ones((8, 4), np.float32)], 1)
"""


def measure(rounds: int | None = None) -> Mistakes:
    """Runs the mistakes and counts their kinds.

    Args:
        rounds: The number of mistakes of each area, from the first.
    """
    table = Mistakes("Mistakes of users, by what the run says")
    total = Counter[str]()
    for area, text in AREAS.items():
        counts = Counter[str]()
        for name, words, code in parse(text)[:rounds]:
            kind, said = run(code)
            found = classify(kind, said, words)
            counts[found] += 1
            if found != "taught":
                first = said.strip().splitlines()[:1]
                table.untaught.append((found, area, name, kind, *first))
        total += counts
        table.add(area, describe(counts))
    table.add("all", describe(total))
    return table


def describe(counts: Counter[str]) -> str:
    """Returns ``196 taught, 3 bare, 0 silent``."""
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


KINDS = ("taught", "bare", "silent")


@dataclass
class Mistakes(Table):
    """Counts by area, and the mistakes that are not taught."""

    untaught: list[tuple[str, ...]] = field(default_factory=list)

    def show(self) -> None:
        """Prints the counts and the mistakes that are bare or silent."""
        super().show()
        for found in self.untaught:
            print(": ".join(found))
