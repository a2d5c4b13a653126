"""Distributed training for Flax NNX: write a model once, choose a strategy.

Write an NNX model and its loss for one device. A `Strategy` decides where parameters,
optimizer state and batch live; `Trainer.fit` does the rest, on one CPU or a thousand
chips, with the same numbers.
"""

from nnx_parallel import errors, layers, weights
from nnx_parallel.audit.report import audit
from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.distributed.initialize import initialize
from nnx_parallel.distributed.runtime import print_once
from nnx_parallel.mesh import make_mesh, simulate_devices
from nnx_parallel.metrics import Mean, Sum
from nnx_parallel.optimizers.by_layer import by_layer
from nnx_parallel.optimizers.muon import muon
from nnx_parallel.optimizers.steps import decay_mask
from nnx_parallel.plan.search import plan
from nnx_parallel.precision import Precision
from nnx_parallel.schedules.schedules import GPipe, Interleaved, OneFOneB, ZeroBubble
from nnx_parallel.sharding.constrain import constrain
from nnx_parallel.sharding.jit import sharded_jit
from nnx_parallel.sharding.offload import Offload
from nnx_parallel.sharding.path_names import TRANSFORMER_NAMES, PathNames
from nnx_parallel.sharding.rules import LogicalRules, PathRules
from nnx_parallel.sharding.tree import gather, process_local_to_global, shard
from nnx_parallel.state import TrainState
from nnx_parallel.strategies.base import Composite, Strategy
from nnx_parallel.strategies.context_parallel import ContextParallel
from nnx_parallel.strategies.data_parallel import DataParallel
from nnx_parallel.strategies.expert_parallel import ExpertParallel
from nnx_parallel.strategies.fsdp import FSDP
from nnx_parallel.strategies.pipeline import Pipeline
from nnx_parallel.strategies.tensor_parallel import TensorParallel
from nnx_parallel.training.arguments import (
    Backend,
    Debugging,
    Evaluation,
    Faults,
    SkipSteps,
)
from nnx_parallel.training.callback import Callback, EarlyStopping
from nnx_parallel.training.compilation import compiler_options
from nnx_parallel.training.players import Player, Players
from nnx_parallel.training.text_samples import TextSamples
from nnx_parallel.training.trainer import Trainer
from nnx_parallel.visualize import visualize

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "Callback",
    "Checkpoint",
    "Composite",
    "ContextParallel",
    "DataParallel",
    "Debugging",
    "EarlyStopping",
    "Evaluation",
    "ExpertParallel",
    "FSDP",
    "Faults",
    "GPipe",
    "Interleaved",
    "LogicalRules",
    "Mean",
    "Offload",
    "OneFOneB",
    "PathNames",
    "PathRules",
    "Pipeline",
    "Player",
    "Players",
    "Precision",
    "SkipSteps",
    "Strategy",
    "Sum",
    "TRANSFORMER_NAMES",
    "TensorParallel",
    "TextSamples",
    "TrainState",
    "Trainer",
    "ZeroBubble",
    "audit",
    "by_layer",
    "compiler_options",
    "constrain",
    "decay_mask",
    "errors",
    "gather",
    "initialize",
    "layers",
    "make_mesh",
    "muon",
    "plan",
    "print_once",
    "process_local_to_global",
    "shard",
    "sharded_jit",
    "simulate_devices",
    "visualize",
    "weights",
]


_OTHER_NAMES = {
    "DDP": "DataParallel",
    "DistributedDataParallel": "DataParallel",
    "FullyShardedDataParallel": "FSDP",
    "fully_shard": "FSDP",
    "ZeRO": "FSDP",
}
"""Names of strategies in other libraries."""


def __getattr__(name: str) -> object:
    # `from nnx_parallel import Stack` gets an error that says where `Stack` is.
    # Names that the package exported before get such an error too.
    if home := errors.home_of(name):
        raise ImportError(f"{name} is in {home}: from {home} import {name}.")
    ours = _OTHER_NAMES.get(name, name)
    near = errors.suggest(ours, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{near}")


def __dir__() -> list[str]:
    modules = [name for name in errors.HOMES if name in globals()]
    return sorted({*__all__, *modules, "__version__"})
