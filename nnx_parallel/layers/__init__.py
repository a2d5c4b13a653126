"""Layers whose computation depends on mesh axes. All other layers are Flax NNX's."""

from nnx_parallel.layers.attention import attention as attention
from nnx_parallel.layers.attention import segment_positions as segment_positions
from nnx_parallel.layers.attention.kernels import Implementation as Implementation
from nnx_parallel.layers.dense import Dense as Dense
from nnx_parallel.layers.dense import Embed as Embed
from nnx_parallel.layers.dense import compute_gradient_once as compute_gradient_once
from nnx_parallel.layers.dense import name_products as name_products
from nnx_parallel.layers.dense import named as named
from nnx_parallel.layers.dense import project as project
from nnx_parallel.layers.experts.moe import MoE as MoE
from nnx_parallel.layers.experts.routing import Experts as Experts
from nnx_parallel.layers.lora import lora as lora
from nnx_parallel.layers.lora import merge_lora as merge_lora
from nnx_parallel.layers.loss import cross_entropy as cross_entropy
from nnx_parallel.layers.loss import linear_cross_entropy as linear_cross_entropy
from nnx_parallel.layers.stack.scan import Remat as Remat
from nnx_parallel.layers.stack.scan import Save as Save
from nnx_parallel.layers.stack.scan import active_remat as active_remat
from nnx_parallel.layers.stack.scan import apply_remat as apply_remat
from nnx_parallel.layers.stack.scan import check_remat as check_remat
from nnx_parallel.layers.stack.scan import default_remat as default_remat
from nnx_parallel.layers.stack.stack import Stack as Stack
