"""PyTorch's side of the comparison on a GPU: the same GPT, compiled.

The model has the shape of `GPT` with GPT-2's parts: biases everywhere but at the tied
head, GELU in its tanh form, epsilon 1e-5. Queries, keys and values come from one
matmul, as PyTorch's users write it.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # noqa: N812  # pyright: ignore[reportMissingImports]
from torch.nn.attention import (  # pyright: ignore[reportMissingImports]
    SDPBackend,
    sdpa_kernel,
)

from benchmarks.gpu_task import Task
from nnx_parallel.models import GPTConfig

KERNELS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
}


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        embed, hidden = config.embed_dim, config.sizes["mlp"]
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(embed, eps=1e-5)
        self.qkv = nn.Linear(embed, 3 * embed)
        self.out = nn.Linear(embed, embed)
        self.mlp_norm = nn.LayerNorm(embed, eps=1e-5)
        self.up = nn.Linear(embed, hidden)
        self.down = nn.Linear(hidden, embed)

    def forward(self, x: Any) -> Any:
        """(batch, seq, embed) -> (batch, seq, embed)."""
        batch, seq, embed = x.shape
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.view(batch, seq, 3, self.num_heads, embed // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, embed))
        hidden = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(hidden)


class GPT(nn.Module):
    """Maps tokens to the mean cross-entropy of each token given the earlier ones.

    Args:
        config: Shape of the model.
        dtype: dtype of the activations; with only autocast they would be float32
            between blocks.
    """

    def __init__(self, config: GPTConfig, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype
        self.embed = nn.Embedding(config.vocab_size, config.embed_dim)
        self.positions = nn.Embedding(config.seq_len, config.embed_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embed_dim, eps=1e-5)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("out.weight", "down.weight"))
                scale = (2 * config.num_layers) ** -0.5 if is_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Any) -> Any:
        """Loss of tokens, int (batch, seq + 1)."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(inputs.shape[1], device=tokens.device)
        x = (self.embed(inputs) + self.positions(positions)).to(self.dtype)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)  # tied
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Torch:
    """A compiled model, the fused AdamW, and a batch.

    Args:
        task: The task to train.
        way: The attention kernel.
    """

    def __init__(self, task: Task, way: str) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self._device = torch.device("cpu" if task.is_tiny else "cuda")
        self._kernel = KERNELS[way]
        with self._device:
            model = self.make_model(task)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), 1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._tokens = torch.from_numpy(task.tokens()).long().to(self._device)
        self._model = self.compile(model, task)
        self._size = task.product_size

    def make_model(self, task: Task) -> Any:
        """The model, whose outputs are losses."""
        return GPT(task.model, torch.bfloat16)

    def compile(self, model: Any, task: Task) -> Any:
        """Compiles a function; not with Inductor on CPU, where it takes minutes."""
        compiler = "aot_eager" if task.is_tiny else "inductor"
        return torch.compile(model, backend=compiler, dynamic=False)

    def train(self, num_steps: int) -> float:
        """Dispatches the steps, and waits for the last."""
        loss: Any = math.nan
        with sdpa_kernel(self._kernel):
            for _ in range(num_steps):
                with torch.autocast(self._device.type, torch.bfloat16):
                    loss = self._model(self._tokens)
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
        self._wait()
        return float(loss)

    def multiply(self, count: int) -> None:
        """Multiplies the same two matrices, and holds one result at a time."""
        for _ in range(count):
            torch.mm(*self._matrices)
        self._wait()

    @cached_property
    def _matrices(self) -> tuple[Any, Any]:
        shape = (self._size, self._size)
        options = {"device": self._device, "dtype": torch.bfloat16}
        return torch.randn(shape, **options), torch.randn(shape, **options)

    def peak_bytes(self) -> int | None:
        """Peak memory of PyTorch's allocator."""
        if self._device.type == "cpu":
            return None
        return torch.cuda.max_memory_allocated()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
