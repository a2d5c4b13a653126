"""Part of PyTorch 2: a random number generator, and the class of arrays."""

from typing import Self

import numpy as np


class Tensor:
    """A class without instances, for libraries that look for ``torch.Tensor``."""


class Generator:
    def manual_seed(self, seed: int) -> Self:
        self.rng = np.random.default_rng(seed)
        return self
