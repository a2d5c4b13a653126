"""A mesh, and functions that count their traces, for tests of `sharded_jit`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.sharding import FSDPRules

RULES = FSDPRules("fsdp", min_size=0)


class Counted:
    """Wraps a function and counts its traces."""

    def __init__(self, function: Callable) -> None:
        self.traces = 0
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return self.function(*args, **kwargs)


def spec(x: jax.Array) -> P:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding.spec
