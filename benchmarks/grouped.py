"""A mixture of experts on one GPU: this library's step against PyTorch's, in one run.

The model has the parts of Mixtral and 1 billion active parameters: each token goes to 2
of 8 experts. Both sides are dropless and sort tokens by expert. This library multiplies
with `jax.lax.ragged_dot`; PyTorch multiplies with `torch._grouped_mm`, under
`torch.compile`, with FlashAttention and the fused AdamW. They run and are timed as in
`benchmarks.gpu`. FLOPs count only the experts that a token goes to.
"""

from __future__ import annotations

from benchmarks import gpu
from benchmarks.gpu_task import GROUPED
from benchmarks.timing import Table
from nnx_parallel.layers import Experts
from nnx_parallel.models import GPTConfig

MODELS: gpu.Models = {
    "1B of 3.3B": (
        GPTConfig.tiny_experts(
            vocab_size=32_000,
            seq_len=2048,
            num_layers=20,
            embed_dim=1536,
            num_heads=12,
            num_kv_heads=4,
            experts=Experts(num_experts=8, top_k=2, mlp_dim=4096),
        ),
        16,
    )
}
"""The model, and the largest number of rows to try."""
TINY: gpu.Models = {
    "tiny": (
        GPTConfig.tiny_experts(
            num_layers=2, experts=Experts(num_experts=8, top_k=2, mlp_dim=64)
        ),
        2,
    )
}
WAYS = ("ours", GROUPED)


def measure(rounds: int = 5, tiny: bool = False) -> Table:
    """Tokens and FLOPs per second, memory, and the ratio to PyTorch.

    Args:
        rounds: Times that each side is run; each time makes several measurements.
        tiny: Run a tiny model on CPU instead, as a smoke test; PyTorch is left out if
            it is not installed, and so are its compiler and its grouped products.

    Raises:
        SystemExit: If there is no GPU, or no PyTorch that sees it.
    """
    models = TINY if tiny else MODELS
    title = "A mixture of experts on one device: this library and PyTorch"
    table = gpu.compare(title, models, WAYS, rounds, is_tiny=tiny)
    if tiny and table.packages:
        from benchmarks.grouped_torch import HAS_CPU_PRODUCTS

        loop = "a loop of matmuls: this torch has no grouped products on CPU"
        table.add(GROUPED, "grouped products of CPUs" if HAS_CPU_PRODUCTS else loop)
    for name, (config, _) in models.items():
        table.add(f"{name}: parameters", config.num_params)
        table.add(f"{name}: active parameters", config.num_active_params)
    return table
