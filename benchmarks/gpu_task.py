"""The task trained on a GPU, and the interface of each framework."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from nnx_parallel.layers import Experts
from nnx_parallel.models import GPTConfig

PACKED = "ours, packed documents"
WAYS = ("ours", PACKED, "torch flash", "torch cuDNN")
GROUPED = "torch grouped"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and a batch to train.

    Attributes:
        config: Shape of the model, as keywords of `GPTConfig`.
        rows: Sequences per step.
        is_tiny: True for a smoke test on CPU.
    """

    config: dict[str, Any]
    rows: int
    is_tiny: bool

    @classmethod
    def of(cls, config: GPTConfig, rows: int, is_tiny: bool) -> Task:
        """The task of a model."""
        return cls(config=asdict(config), rows=rows, is_tiny=is_tiny)

    def with_rows(self, rows: int) -> Task:
        """The same task with another number of rows."""
        return replace(self, rows=rows)

    def to_json(self) -> str:
        """The task for the command line."""
        return json.dumps(asdict(self))

    @property
    def model(self) -> GPTConfig:
        """Shape of the model."""
        given: dict[str, Any] = dict(self.config)
        if (experts := given["experts"]) is not None:
            given["experts"] = Experts(**experts)
        return GPTConfig(**given)

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.model.seq_len

    @property
    def flops_per_token(self) -> int:
        """``6 N + 12 L E T``."""
        return self.model.flops_per_token(self.model.seq_len)

    @property
    def product_size(self) -> int:
        """Rows and columns of the large matmul."""
        return 256 if self.is_tiny else 8192

    def tokens(self) -> np.ndarray:
        """The batch of every step: int32 (rows, seq_len + 1)."""
        shape = (self.rows, self.model.seq_len + 1)
        rng = np.random.default_rng(0)
        return rng.integers(0, self.model.vocab_size, shape, dtype=np.int32)

    def documents(self) -> np.ndarray:
        """Ids of the documents in each row: int32 (rows, seq_len + 1), at most 8."""
        length = self.model.seq_len + 1
        rng = np.random.default_rng(1)
        ends = rng.integers(1, length, (self.rows, 7, 1))
        found = 1 + (np.arange(length) >= ends).sum(1)
        return found.astype(np.int32)


class Side(Protocol):
    """A framework with a model, its optimizer and a batch on the device."""

    def train(self, num_steps: int) -> float:
        """Trains a number of steps, waits for them, and returns the last loss."""
        ...

    def multiply(self, count: int) -> None:
        """Multiplies two large matrices a number of times, and waits."""
        ...

    def peak_bytes(self) -> int | None:
        """Peak memory, if known."""
        ...
