"""Distributed training for Flax NNX: write a model once, choose a strategy.

A person who trains models writes an NNX model and its loss for one device. A
`Strategy` says where parameters, optimizer state and batch live; `Trainer.fit` does
the rest, on one CPU or a thousand chips, and gives the same numbers.
"""

from nnx_parallel import errors, layers
from nnx_parallel.audit import Report, audit
from nnx_parallel.callbacks import Callback
from nnx_parallel.checkpoint import Checkpoint
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
from nnx_parallel.precision import Precision
from nnx_parallel.sharding import LogicalRules, PathRules, PolicyRules, constrain
from nnx_parallel.state import TrainState
from nnx_parallel.strategies import (
    FSDP,
    Composite,
    DataParallel,
    Strategy,
    TensorParallel,
)
from nnx_parallel.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Checkpoint",
    "Composite",
    "ConsoleLogger",
    "DataParallel",
    "FSDP",
    "JSONLinesLogger",
    "Logger",
    "LogicalRules",
    "Mean",
    "PathRules",
    "PolicyRules",
    "Precision",
    "Report",
    "Strategy",
    "TensorBoardLogger",
    "TensorParallel",
    "TrainState",
    "Trainer",
    "WandbLogger",
    "audit",
    "constrain",
    "decay_mask",
    "errors",
    "layers",
    "make_mesh",
    "muon_dimension_numbers",
    "simulate_devices",
]
