"""Distributed training for Flax NNX: write a model once, choose a strategy.

A person who trains models writes an NNX model and its loss for one device. A
`Strategy` says where parameters, optimizer state and batch live; `Trainer.fit` does
the rest, on one CPU or a thousand chips, and gives the same numbers.
"""

from nnx_parallel import errors as errors
from nnx_parallel.audit import Report as Report
from nnx_parallel.audit import audit as audit
from nnx_parallel.callbacks import Callback as Callback
from nnx_parallel.checkpoint import Checkpoint as Checkpoint
from nnx_parallel.loggers import ConsoleLogger as ConsoleLogger
from nnx_parallel.loggers import JSONLinesLogger as JSONLinesLogger
from nnx_parallel.loggers import Logger as Logger
from nnx_parallel.loggers import TensorBoardLogger as TensorBoardLogger
from nnx_parallel.loggers import WandbLogger as WandbLogger
from nnx_parallel.mesh import make_mesh as make_mesh
from nnx_parallel.metrics import Mean as Mean
from nnx_parallel.optimizers import decay_mask as decay_mask
from nnx_parallel.optimizers import muon_dimension_numbers as muon_dimension_numbers
from nnx_parallel.precision import Precision as Precision
from nnx_parallel.sharding import LogicalRules as LogicalRules
from nnx_parallel.sharding import PathRules as PathRules
from nnx_parallel.sharding import PolicyRules as PolicyRules
from nnx_parallel.sharding import constrain as constrain
from nnx_parallel.state import TrainState as TrainState
from nnx_parallel.strategies import FSDP as FSDP
from nnx_parallel.strategies import Composite as Composite
from nnx_parallel.strategies import DataParallel as DataParallel
from nnx_parallel.strategies import Strategy as Strategy
from nnx_parallel.strategies import TensorParallel as TensorParallel
from nnx_parallel.trainer import Trainer as Trainer

__version__ = "0.1.0"
