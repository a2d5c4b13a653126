"""What is trained on a GPU, and what each framework must be able to do for it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from models import GPTConfig

WAYS = ("ours", "torch flash", "torch cuDNN")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train, and how much of it.

    Attributes:
        config: Shape of the model, as keywords of `GPTConfig`.
        rows: Sequences of a step.
        is_tiny: On CPU, with hardly any work.
    """

    config: dict[str, Any]
    rows: int
    is_tiny: bool

    @classmethod
    def of(cls, config: GPTConfig, rows: int, is_tiny: bool) -> Task:
        """The task of a model."""
        return cls(config=asdict(config), rows=rows, is_tiny=is_tiny)

    def with_rows(self, rows: int) -> Task:
        """The same with another number of rows."""
        return replace(self, rows=rows)

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @property
    def model(self) -> GPTConfig:
        """The shape."""
        return GPTConfig(**self.config)

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
        """Rows and columns of the large product."""
        return 256 if self.is_tiny else 8192

    def tokens(self) -> np.ndarray:
        """The batch of every step: int32 (rows, seq_len + 1)."""
        shape = (self.rows, self.model.seq_len + 1)
        rng = np.random.default_rng(0)
        return rng.integers(0, self.model.vocab_size, shape, dtype=np.int32)


class Side(Protocol):
    """A framework with a model, its optimizer and a batch on the device."""

    def train(self, num_steps: int) -> float:
        """Trains so many steps, waits for them, and returns the last loss."""
        ...

    def multiply(self, count: int) -> None:
        """Multiplies two large matrices so often, and waits."""
        ...

    def peak_bytes(self) -> int | None:
        """The most memory that was held at once, if that is known."""
        ...
