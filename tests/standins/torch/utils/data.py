"""Part of PyTorch 2: a loader that shuffles every pass with its generator."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class DataLoader:
    def __init__(
        self,
        dataset: Sequence,
        *,
        batch_size: int,
        shuffle: bool,
        collate_fn: Callable[[list], Any],
        generator: Any,
        drop_last: bool = False,
    ) -> None:
        assert shuffle
        self.dataset, self.batch_size = dataset, batch_size
        self.sampler, self.drop_last = range(len(dataset)), drop_last
        self._collate, self._generator = collate_fn, generator

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = self._generator.rng.permutation(len(self.dataset))
        for i in range(0, len(order), self.batch_size):
            chosen = order[i : i + self.batch_size]
            yield self._collate([self.dataset[j] for j in chosen])
