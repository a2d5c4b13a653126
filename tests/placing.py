"""Returns a strategy's placement of one array, for tests of rules and layouts."""

from typing import Any

from nnx_parallel import FSDP, Composite, Strategy, TensorParallel
from nnx_parallel.sharding import ArrayInfo, Placement

FSDP_TP = Composite(FSDP(4), TensorParallel(2))


def place(
    strategy: Strategy, *shape: int, names: tuple | None = None, **fields: Any
) -> Placement:
    """The placement of an array of this shape."""
    info = ArrayInfo(path="block.kernel", shape=shape, names=names, **fields)
    return strategy.layout().place(info)
