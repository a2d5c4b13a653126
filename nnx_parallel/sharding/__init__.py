"""Placement: names in the model, rules for the names, specs on a mesh."""

from nnx_parallel.sharding.arrays import LOGICAL_AXES as LOGICAL_AXES
from nnx_parallel.sharding.arrays import ArrayInfo as ArrayInfo
from nnx_parallel.sharding.context import active_layout as active_layout
from nnx_parallel.sharding.context import constrain as constrain
from nnx_parallel.sharding.context import saves_all_but_gathers as saves_all_but_gathers
from nnx_parallel.sharding.context import use_params as use_params
from nnx_parallel.sharding.context import using as using
from nnx_parallel.sharding.layout import Layout as Layout
from nnx_parallel.sharding.layout import Placement as Placement
from nnx_parallel.sharding.layout import ZeroAxis as ZeroAxis
from nnx_parallel.sharding.rules import FSDPRules as FSDPRules
from nnx_parallel.sharding.rules import LogicalRules as LogicalRules
from nnx_parallel.sharding.rules import PathRules as PathRules
from nnx_parallel.sharding.rules import PolicyRules as PolicyRules
from nnx_parallel.sharding.rules import Rules as Rules
