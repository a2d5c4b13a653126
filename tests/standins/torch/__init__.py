"""Part of PyTorch 2: a generator of random numbers, and the class of its arrays."""

from typing import Self

import numpy as np


class Tensor:
    """Nothing here is one; libraries that find a ``torch`` ask."""


class Generator:
    def manual_seed(self, seed: int) -> Self:
        self.rng = np.random.default_rng(seed)
        return self
