"""Strategies, with one technique in each file, and `Composite` to combine them."""

from nnx_parallel.sharding.layout import Claims as Claims
from nnx_parallel.sharding.rules import ZeroAxis as ZeroAxis
from nnx_parallel.strategies.base import Composite as Composite
from nnx_parallel.strategies.base import Strategy as Strategy
from nnx_parallel.strategies.context_parallel import ContextParallel as ContextParallel
from nnx_parallel.strategies.data_parallel import DataParallel as DataParallel
from nnx_parallel.strategies.expert_parallel import ExpertParallel as ExpertParallel
from nnx_parallel.strategies.fsdp import FSDP as FSDP
from nnx_parallel.strategies.pipeline import Pipeline as Pipeline
from nnx_parallel.strategies.tensor_parallel import TensorParallel as TensorParallel
