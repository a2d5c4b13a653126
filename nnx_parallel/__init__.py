"""Distributed training for Flax NNX: write a model once, choose a strategy.

A person who trains models writes an NNX model and its loss for one device. A
`Strategy` says where parameters, optimizer state and batch live; `Trainer.fit` does
the rest, on one CPU or a thousand chips, and gives the same numbers.
"""

from nnx_parallel import errors, layers
from nnx_parallel.audit import Report, audit
from nnx_parallel.callbacks import Callback
from nnx_parallel.checkpoint import Checkpoint
from nnx_parallel.collectives import (
    all_gather_matmul,
    column_parallel_matmul,
    matmul_reduce_scatter,
    row_parallel_matmul,
)
from nnx_parallel.distributed import initialize, print_once
from nnx_parallel.loggers import (
    ConsoleLogger,
    JSONLinesLogger,
    Logger,
    TensorBoardLogger,
    WandbLogger,
)
from nnx_parallel.mesh import make_mesh, simulate_devices
from nnx_parallel.metrics import Mean
from nnx_parallel.optimizers import decay_mask, muon_dimension_numbers
from nnx_parallel.pipeline import (
    GPipe,
    Interleaved,
    OneFOneB,
    Schedule,
    Table,
    ZeroBubble,
)
from nnx_parallel.precision import Precision, cast_floating
from nnx_parallel.sharding import (
    ChainRules,
    FSDPRules,
    LogicalRules,
    PathRules,
    PolicyRules,
    active_mesh,
    annotate,
    constrain,
    gather,
    named_tree_map,
    process_local_to_global,
    resolve_shardings,
    shard,
    sharded_jit,
    visualize,
)
from nnx_parallel.state import TrainState
from nnx_parallel.strategies import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
)
from nnx_parallel.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "ChainRules",
    "Checkpoint",
    "Composite",
    "ConsoleLogger",
    "DataParallel",
    "FSDP",
    "FSDPRules",
    "GPipe",
    "Interleaved",
    "JSONLinesLogger",
    "Logger",
    "LogicalRules",
    "Mean",
    "OneFOneB",
    "PathRules",
    "Pipeline",
    "PolicyRules",
    "Precision",
    "Report",
    "Schedule",
    "Strategy",
    "Table",
    "TensorBoardLogger",
    "TensorParallel",
    "TrainState",
    "Trainer",
    "WandbLogger",
    "ZeroBubble",
    "active_mesh",
    "all_gather_matmul",
    "annotate",
    "audit",
    "cast_floating",
    "column_parallel_matmul",
    "constrain",
    "decay_mask",
    "errors",
    "gather",
    "initialize",
    "layers",
    "make_mesh",
    "matmul_reduce_scatter",
    "muon_dimension_numbers",
    "named_tree_map",
    "print_once",
    "process_local_to_global",
    "resolve_shardings",
    "row_parallel_matmul",
    "shard",
    "sharded_jit",
    "simulate_devices",
    "visualize",
]
