"""Of PyTorch 2: a generator of random numbers."""

from typing import Self

import numpy as np


class Generator:
    def manual_seed(self, seed: int) -> Self:
        self.rng = np.random.default_rng(seed)
        return self
