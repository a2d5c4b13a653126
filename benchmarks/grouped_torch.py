"""PyTorch's side of the comparison of experts: the same model with grouped products.

The model has the shape of `GPT` with Llama's parts and a mixture of experts: no biases,
RMSNorm, queries and keys rotated in halves, SwiGLU, an untied head. Rows are sorted by
expert, and each expert's rows are padded to a multiple of 8, because grouped products
need groups that begin at multiples of 16 bytes, as in torchtitan.
"""

from __future__ import annotations

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # noqa: N812  # pyright: ignore[reportMissingImports]

from benchmarks.gpu_task import Task
from benchmarks.gpu_torch import Torch
from nnx_parallel.models import GPTConfig

ALIGNED = 8
"""The number of rows of each expert is padded to a multiple of this number."""


def grouped_products(rows: Any, kernels: Any, ends: Any) -> Any:
    """Multiplies the rows of each expert by its matrix.

    Args:
        rows: ``(rows, in)``, sorted by expert.
        kernels: ``(experts, in, out)``.
        ends: int32 ``(experts,)``, where the rows of each expert end. Rows after the
            last end are not read.
    """
    if rows.is_cuda or HAS_CPU_PRODUCTS:
        return torch._grouped_mm(rows, kernels.to(rows.dtype), offs=ends)
    begins = [0, *ends.tolist()]
    found = [
        rows[begin:end] @ kernel.to(rows.dtype)
        for begin, end, kernel in zip(begins, begins[1:], kernels, strict=False)
    ]
    rest = rows.new_zeros(rows.shape[0] - begins[-1], kernels.shape[2])
    return torch.cat([*found, rest])


def _has_cpu_products() -> bool:
    """True if this PyTorch has grouped products for CPUs, which use another kernel."""
    rows, kernels = torch.zeros(8, 8), torch.zeros(1, 8, 8)
    try:
        torch._grouped_mm(rows, kernels, offs=torch.tensor([8], dtype=torch.int32))
    except (AttributeError, RuntimeError):
        return False
    return True


HAS_CPU_PRODUCTS = _has_cpu_products()


class Mixture(nn.Module):
    """A router and its experts, dropless."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.experts is not None
        num, width = config.experts.num_experts, config.experts.mlp_dim
        self.num, self.top_k = num, config.experts.top_k
        self.router = nn.Parameter(torch.empty(config.embed_dim, num))
        self.up = nn.Parameter(torch.empty(num, config.embed_dim, width))
        self.gate = nn.Parameter(torch.empty(num, config.embed_dim, width))
        self.down = nn.Parameter(torch.empty(num, width, config.embed_dim))

    def forward(self, x: Any) -> Any:
        """(batch, seq, embed) to the same."""
        tokens = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            scores = (tokens.float() @ self.router).softmax(-1)
        weights, chosen = scores.topk(self.top_k)  # (tokens, top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        row, token, ends = self._places(chosen)
        # A row without a token has an index one past the end, and is filled with zeros.
        rows = F.pad(tokens, (0, 0, 0, 1))[token]
        with torch.autocast(x.device.type, enabled=False):
            hidden = F.silu(grouped_products(rows, self.gate, ends))
            hidden = hidden * grouped_products(rows, self.up, ends)
            found = grouped_products(hidden, self.down, ends)[row]
        found = found.view(*chosen.shape, -1) * weights[..., None]
        return found.sum(1).view_as(x)

    def _places(self, chosen: Any) -> tuple[Any, Any, Any]:
        """The row of each choice, the token of each row, and where experts end."""
        flat = chosen.flatten()
        is_chosen = F.one_hot(flat, self.num)
        sizes = is_chosen.sum(0)
        ends = ((sizes + ALIGNED - 1) // ALIGNED * ALIGNED).cumsum(0)
        starts = F.pad(ends[:-1], (1, 0))
        # Choices in the order of experts, from the start of each expert on.
        order = flat.argsort(stable=True)
        shifts = starts - (sizes.cumsum(0) - sizes)
        places = torch.arange(len(flat), device=flat.device) + shifts[flat[order]]
        num_rows = len(flat) + ALIGNED * self.num
        token = flat.new_full((num_rows,), len(chosen))
        token[places] = order // self.top_k
        row = torch.empty_like(flat)
        row[order] = places
        return row, token, ends.int()


class Block(nn.Module):
    """Attention and experts, each after a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        embed, sizes = config.embed_dim, config.sizes
        self.heads = sizes["heads"], sizes["kv_heads"], sizes["kv_heads"]
        self.head_dim = sizes["head_dim"]
        self.attention_norm = nn.RMSNorm(embed, eps=config.norm_epsilon)
        self.qkv = nn.Linear(embed, sum(self.heads) * self.head_dim, bias=False)
        self.out = nn.Linear(sizes["heads"] * self.head_dim, embed, bias=False)
        self.mlp_norm = nn.RMSNorm(embed, eps=config.norm_epsilon)
        self.mlp = Mixture(config)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """(batch, seq, embed) to the same; the rotation is (seq, head_dim / 2)."""
        batch, seq, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, -1, self.head_dim)
        # each (batch, heads or kv_heads, seq, head_dim)
        q, k, v = qkv.transpose(1, 2).split(self.heads, dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, -1))
        # Autocast leaves norms in float32, which grouped products do not take.
        return x + self.mlp(self.mlp_norm(x).to(x.dtype))


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Rotates pairs of features: feature i and feature i + head_dim / 2."""
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


class GPT(nn.Module):
    """Maps tokens to the mean cross-entropy of each token given the earlier ones.

    Args:
        config: Shape of the model.
        dtype: dtype of the activations.
    """

    def __init__(self, config: GPTConfig, dtype: Any) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed = nn.Embedding(config.vocab_size, config.embed_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.embed_dim, eps=config.norm_epsilon)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_residual = name.endswith(("out.weight", "mlp.down"))
                scale = (2 * config.num_layers) ** -0.5 if is_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Any) -> Any:
        """Loss of tokens, int (batch, seq + 1)."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        half = self.config.sizes["head_dim"] // 2
        positions = torch.arange(inputs.shape[1], device=tokens.device).float()
        steps = torch.arange(half, device=tokens.device) / half
        angles = torch.outer(positions, self.config.rope_theta**-steps)
        x = self.embed(inputs).to(self.dtype)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Grouped(Torch):
    """The compiled mixture of experts, and its training.

    Args:
        task: The task to train.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task, "torch flash")

    def make_model(self, task: Task) -> Any:
        """The mixture instead of the dense model."""
        return GPT(task.model, torch.bfloat16)

    def compile(self, model: Any, task: Task) -> Any:
        """Compiles the model, unless it runs on CPU as a loop with dynamic sizes."""
        is_loop = task.is_tiny and not HAS_CPU_PRODUCTS
        return model if is_loop else super().compile(model, task)
