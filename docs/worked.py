"""The worked examples: models, machines and strategies, described without devices."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Pipeline,
    Strategy,
    TensorParallel,
)
from nnx_parallel.mesh import MESH_AXES
from nnx_parallel.models import (
    GPT,
    GPTConfig,
    ResNet,
    ResNetConfig,
    ViT,
    ViTConfig,
    config_from_hf,
)
from nnx_parallel.visualize.describe import Description


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model and its strategy.

    Attributes:
        name: Name of the model.
        build: Builds the model.
        strategy: The strategy, with all its sizes.
        why: The reason for the choice.
    """

    name: str
    build: Callable[[nnx.Rngs], nnx.Module]
    strategy: Strategy
    why: str

    @property
    def code(self) -> str:
        """The strategy as Python code."""
        return repr(self.strategy).replace("size=", "").replace("'", '"')

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Sizes of the mesh, outermost first."""
        sizes = {axis: size or 1 for axis, size in self.strategy.axis_sizes.items()}
        return {axis: sizes[axis] for axis in sorted(sizes, key=MESH_AXES.index)}

    def describe(self) -> Description:
        """The sharding of model and AdamW's state over an abstract mesh."""
        sizes = self.axis_sizes
        mesh = AbstractMesh(
            tuple(sizes.values()),
            tuple(sizes),
            axis_types=(AxisType.Auto,) * len(sizes),
        )
        return self.strategy.describe(
            self.build, optimizer=optax.adamw(1e-4), mesh=mesh
        )

    def num_params(self) -> int:
        """Elements of all parameters."""
        model = nnx.eval_shape(lambda: self.build(nnx.Rngs(0)))
        return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def gpt(config: GPTConfig) -> Callable[[nnx.Rngs], nnx.Module]:
    """Builds a GPT."""
    return lambda rngs: GPT(config, rngs=rngs)


CONFIGS = Path(__file__).parent / "configs"


def published(name: str, **overrides: Any) -> GPTConfig:
    """Returns the shape in a published ``config.json``, with changed fields."""
    content = json.loads((CONFIGS / f"{name}.json").read_text())
    return config_from_hf(content, **overrides)

    # The rows of the table are padded to a number that the devices divide.


MEDIUM = published("gpt2-medium", vocab_size=50_304)
GPT3 = GPTConfig.gpt_1_3b(num_layers=96, embed_dim=12_288, num_heads=96)

EXAMPLES = (
    Example(
        name="ResNet-50",
        build=lambda rngs: ResNet(ResNetConfig.resnet50(), rngs=rngs),
        strategy=DataParallel(8),
        why="The activations are much larger: sharding the state gains nothing.",
    ),
    Example(
        name="GPT-2 Medium",
        build=gpt(MEDIUM),
        strategy=FSDP(8, shard="gradients"),
        why="The state fits on a device. ZeRO-2 frees memory for a larger batch.",
    ),
    Example(
        name="ViT-g/14",
        build=lambda rngs: ViT(ViTConfig.g14(), rngs=rngs),
        strategy=FSDP(8),
        why="16 GB of state fit on one device, but leave less memory for activations.",
    ),
    Example(
        name="Llama 3 8B",
        build=gpt(published("llama-3-8b")),
        strategy=Composite(DataParallel(8), FSDP(8)),
        why="FSDP shards within a machine. Between machines only gradients are sent.",
    ),
    Example(
        name="Llama 3 70B",
        build=gpt(published("llama-3-70b")),
        strategy=Composite(FSDP(32), TensorParallel(8)),
        why="A device gets less than one long row, so the 8 devices of a machine share "
        "each matmul.",
    ),
    Example(
        name="Llama 3 8B, 131,072 tokens",
        build=gpt(published("llama-3-8b", seq_len=131_072)),
        strategy=Composite(FSDP(16), ContextParallel(4)),
        why="A row does not fit on one device, so devices share it, and the state too.",
    ),
    Example(
        name="Mixtral 8x7B",
        build=gpt(published("mixtral-8x7b")),
        strategy=Composite(FSDP(8), ExpertParallel(8)),
        why="Each device of a machine has one expert; tokens stay within the machine.",
    ),
    Example(
        name="GPT-3 175B",
        build=gpt(GPT3),
        strategy=Composite(Pipeline(8), FSDP(16), TensorParallel(8)),
        why="A stage has 128 devices. Its all-gathers span 16 of them, not all 128.",
    ),
)


def table() -> list[str]:
    """The examples as a Markdown table."""
    lines = [
        "| model, parameters | strategy | devices | parameters | gradients | "
        "optimizer | sum |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for example in EXAMPLES:
        found, devices = example.describe(), math.prod(example.axis_sizes.values())
        sizes = (found.params_bytes, found.gradients_bytes, found.optimizer_bytes)
        shown = " | ".join(f"{size / 1e9:.3g}" for size in (*sizes, sum(sizes)))
        lines.append(
            f"| {example.name}, {example.num_params() / 1e6:,.1f} M | "
            f"`{example.code}` | {devices:,} | {shown} |"
        )
    return lines
