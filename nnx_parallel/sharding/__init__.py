"""Placement: a model names its dims, and rules map the names to the axes of a mesh."""

from nnx_parallel.sharding.constrain import active_layout as active_layout
from nnx_parallel.sharding.constrain import active_mesh as active_mesh
from nnx_parallel.sharding.constrain import annotate as annotate
from nnx_parallel.sharding.constrain import constrain as constrain
from nnx_parallel.sharding.constrain import (
    saves_all_but_gathers as saves_all_but_gathers,
)
from nnx_parallel.sharding.constrain import using as using
from nnx_parallel.sharding.jit import ShardedFunction as ShardedFunction
from nnx_parallel.sharding.jit import sharded_jit as sharded_jit
from nnx_parallel.sharding.layout import Execution as Execution
from nnx_parallel.sharding.layout import Layout as Layout
from nnx_parallel.sharding.names import LOGICAL_AXES as LOGICAL_AXES
from nnx_parallel.sharding.names import ArrayInfo as ArrayInfo
from nnx_parallel.sharding.path_names import TRANSFORMER_NAMES as TRANSFORMER_NAMES
from nnx_parallel.sharding.path_names import PathNames as PathNames
from nnx_parallel.sharding.placement import Placement as Placement
from nnx_parallel.sharding.rules import ChainRules as ChainRules
from nnx_parallel.sharding.rules import FSDPRules as FSDPRules
from nnx_parallel.sharding.rules import LogicalRules as LogicalRules
from nnx_parallel.sharding.rules import PathRules as PathRules
from nnx_parallel.sharding.rules import PolicyRules as PolicyRules
from nnx_parallel.sharding.rules import Rules as Rules
from nnx_parallel.sharding.tree import gather as gather
from nnx_parallel.sharding.tree import named_tree_map as named_tree_map
from nnx_parallel.sharding.tree import (
    process_local_to_global as process_local_to_global,
)
from nnx_parallel.sharding.tree import resolve_shardings as resolve_shardings
from nnx_parallel.sharding.tree import shard as shard
