"""A table and its buffers as what a scan over ticks is fed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nnx_parallel.pipeline.buffers import Buffers
from nnx_parallel.pipeline.table import Table

Row = dict[str, Any]
"""The slots of one tick: scalars for the mesh, and one entry for each stage."""


def make_rows(table: Table, buffers: Buffers) -> Row:
    """The table and its buffers as arrays with a leading ``ticks`` dim."""
    kinds = ("forward", "backward_input", "backward_weight")
    slots = {kind: getattr(table, kind) for kind in kinds}
    stages = {f"{kind}_chunk": slot.chunk for kind, slot in slots.items()}
    stages |= {
        name: getattr(buffers, name)
        for name in (
            "receive_input",
            "feed_input",
            "forward_input",
            "forward_saved",
            "backward_saved",
            "receive_cotangent",
            "feed_cotangent",
            "backward_cotangent",
            "backward_pending",
            "weight_pending",
        )
    }
    last = table.num_chunks - 1

    def moments(kind: str, stage: int, chunk: int) -> np.ndarray:
        """The microbatch of one chunk of a stage in each tick, or -1."""
        column = slots[kind].microbatch[:, stage]
        return np.where(slots[kind].chunk[:, stage] == chunk, column, -1)

    whole = {f"any_{kind}": slot.any for kind, slot in slots.items()}
    whole |= {
        "enters": moments("forward", 0, 0),
        "leaves": moments("forward", -1, last),
        "returns": moments("backward_input", 0, 0),
    }
    arrays = {"whole": whole, "stages": stages}
    return jax.tree.map(np.asarray, arrays)
