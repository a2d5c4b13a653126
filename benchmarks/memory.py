"""Compares the memory of a step by the formulas of `plan` with the compiler's figure.

The twenty steps differ from the steps in the tests, and most of them strain one part of
the formulas: convolutions of several resolutions, experts, large vocabularies, lists of
blocks, averages, optimizers that look at whole matrices, rings, stages. Nothing runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.timing import Table
from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    OneFOneB,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
    muon,
)
from nnx_parallel.layers import Experts, Save, lora
from nnx_parallel.models import (
    GPT,
    GPTConfig,
    ResNet,
    ResNetConfig,
    ViT,
    ViTConfig,
    classification_loss,
    next_token_loss,
)
from nnx_parallel.plan import Topology
from nnx_parallel.plan.candidates import own_candidate
from nnx_parallel.plan.costs import Facts
from nnx_parallel.plan.estimate import Estimate
from nnx_parallel.plan.parts import Parts
from nnx_parallel.training.auto_remat import step_bytes
from nnx_parallel.training.step import make_train_step

ROWS = 32


class UNet(nnx.Module):
    """Convolutions at three resolutions, with skips."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = [(3, 32), (32, 64), (64, 128)]
        self.down = nnx.List([_conv(a, b, rngs) for a, b in sizes])
        self.up = nnx.List([_conv(192, 64, rngs), _conv(96, 32, rngs)])
        self.out = _conv(32, 3, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images to images of the same size."""
        kept = []
        for conv in self.down:
            x = nnx.silu(conv(x))
            kept.append(x)
            x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = kept.pop()
        for conv in self.up:
            skip = kept.pop()
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = nnx.silu(conv(jnp.concatenate([x, skip], -1)))
        return self.out(x)


def _conv(a: int, b: int, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(a, b, (3, 3), rngs=rngs)


def denoising_loss(model: UNet, batch: dict) -> jax.Array:
    """Mean squared error of a reconstructed image."""
    return ((model(batch["inputs"]) - batch["inputs"]) ** 2).mean()


class Blocks(nnx.Module):
    """A list of attention blocks from Flax, without names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.blocks = nnx.List([StockBlock(rngs) for _ in range(4)])
        self.head = nnx.Linear(64, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens to logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class StockBlock(nnx.Module):
    """Attention and an MLP, both from Flax."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(64, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps a residual stream to the next one."""
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Recurrent(nnx.Module):
    """An LSTM over a sequence."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.LSTMCell(64, 128, rngs=rngs))
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.head = nnx.Linear(128, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens to logits."""
        hidden: Any = self.rnn(self.embed(tokens))
        return self.head(hidden)


def token_loss(model: Any, batch: dict) -> jax.Array:
    """Cross entropy of the next token."""
    logits = model(batch["tokens"][:, :-1])
    labels = batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gpt(**options: Any) -> Callable[[nnx.Rngs], GPT]:
    """Returns a function that builds a small GPT; ``options`` change its config."""
    config = GPTConfig.tiny_llama(**{"num_layers": 4, "seq_len": 64, **options})
    return lambda rngs: GPT(config, rngs=rngs)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step; ``options`` are further arguments of the Trainer."""

    model: Callable[[nnx.Rngs], nnx.Module]
    strategy: Strategy
    loss: Any = next_token_loss
    tx: Any = field(default_factory=lambda: optax.adamw(1e-3))
    shapes: Any = ("tokens", 65)
    options: Any = field(default_factory=dict)

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the batch."""
        kind, *size = self.shapes
        if kind == "tokens":
            return {"tokens": jax.ShapeDtypeStruct((ROWS, *size), np.int32)}
        images = jax.ShapeDtypeStruct((ROWS, *size, 3), np.float32)
        return {"inputs": images, "labels": jax.ShapeDtypeStruct((ROWS,), np.int32)}


_EXPERTS = {
    "mlp_dim": None,
    "experts": Experts(num_experts=8, top_k=2, mlp_dim=128),
}
_UNET = {"model": UNet, "loss": denoising_loss, "shapes": ("images", 32, 32)}
_LIST = {"model": Blocks, "loss": token_loss}
_WIDE = {"model": gpt(vocab_size=65_536, num_layers=2)}
_MIXED = {"precision": Precision.mixed_bfloat16(), "ema_decay": 0.99}
CASES: dict[str, Case] = {
    "U-Net, DataParallel(8)": Case(strategy=DataParallel(8), **_UNET),
    "U-Net, FSDP(8)": Case(strategy=FSDP(8, min_size=0), **_UNET),
    "ResNet, FSDP(8)": Case(
        model=lambda rngs: ResNet(ResNetConfig.tiny(), rngs=rngs),
        loss=classification_loss,
        shapes=("images", 32, 32),
        strategy=FSDP(8),
    ),
    "ViT with Adafactor, FSDP(8)": Case(
        model=lambda rngs: ViT(ViTConfig.tiny(), rngs=rngs),
        loss=classification_loss,
        shapes=("images", ViTConfig.tiny().image_size, ViTConfig.tiny().image_size),
        tx=optax.adafactor(1e-3),
        strategy=FSDP(8),
    ),
    "experts, FSDP(8)": Case(model=gpt(**_EXPERTS), strategy=FSDP(8)),
    "experts, ExpertParallel(4)": Case(
        model=gpt(**_EXPERTS), strategy=Composite(ExpertParallel(4), FSDP(2))
    ),
    "vocabulary of 65,536, DataParallel(8)": Case(strategy=DataParallel(8), **_WIDE),
    "vocabulary of 65,536, FSDP(8)": Case(strategy=FSDP(8), **_WIDE),
    "list of Flax blocks, DataParallel(8)": Case(strategy=DataParallel(8), **_LIST),
    "list of Flax blocks, FSDP(8)": Case(strategy=FSDP(8, min_size=0), **_LIST),
    "LSTM, DataParallel(8)": Case(
        model=Recurrent, loss=token_loss, strategy=DataParallel(8)
    ),
    "Muon, FSDP(8)": Case(
        model=gpt(embed_dim=128), tx=muon(1e-3), strategy=FSDP(8, min_size=0)
    ),
    "mixed bfloat16 and an average, FSDP(8)": Case(
        model=gpt(embed_dim=128), strategy=FSDP(8), options=_MIXED
    ),
    "4 microbatches, DataParallel(4), FSDP(2)": Case(
        model=gpt(),
        strategy=Composite(DataParallel(4), FSDP(2)),
        options={"num_microbatches": 4},
    ),
    "adapters, FSDP(8)": Case(
        model=lora(gpt(embed_dim=64), targets="attention|mlp"),
        strategy=FSDP(8),
        options={"wrt": nnx.LoRAParam},
    ),
    "rows of 1,024 tokens, ContextParallel(4)": Case(
        model=gpt(seq_len=1024),
        shapes=("tokens", 1025),
        strategy=Composite(ContextParallel(4), FSDP(2)),
    ),
    "window of 128 tokens of 512, Save": Case(
        model=gpt(seq_len=512, window=128),
        shapes=("tokens", 513),
        strategy=FSDP(8),
        options={"remat": Save("attention", "mlp_up")},
    ),
    "TensorParallel(4, sequence=True), full": Case(
        model=gpt(embed_dim=128),
        strategy=Composite(TensorParallel(4, sequence=True), FSDP(2)),
        options={"remat": "full"},
    ),
    "Pipeline(4), 8 microbatches": Case(
        model=gpt(),
        strategy=Composite(Pipeline(4, OneFOneB()), FSDP(2)),
        options={"num_microbatches": 8},
    ),
    "Pipeline(2), TensorParallel(2), average": Case(
        model=gpt(embed_dim=128),
        strategy=Composite(Pipeline(2), TensorParallel(2), DataParallel(2)),
        options={"num_microbatches": 4, "ema_decay": 0.99},
    ),
}


def compare(case: Case) -> tuple[float, float, int]:
    """Returns the bytes of the arguments, and of a step by formulas and compiler."""
    trainer = Trainer(
        case.model,
        case.tx,
        case.loss,
        strategy=case.strategy,
        loggers=(),
        **case.options,
    )
    parts, cpus = Parts.of(trainer, case.batch), Topology.parse("cpu:8")
    candidate = own_candidate(parts)
    facts = Facts.of(parts, [candidate.remat], "cpu")
    layout = candidate.strategy.layout()
    plan = facts.parts.on(layout)
    costs = Estimate(facts, candidate, cpus, plan).costs
    batch = facts.parts.batch_on(layout, candidate.num_microbatches)
    step: Any = make_train_step(plan, parts.loss, parts.options)
    compiled = step.lower(plan.whole.abstract, batch).compile()
    needed = step_bytes(compiled)
    assert needed is not None, "CPUs report the memory of a program"
    return costs.exact_bytes, costs.total_bytes, needed


def measure(rounds: int = 1) -> Table:
    """Bytes of each step by formulas and by the compiler."""
    del rounds
    table = Table("memory of a step on a device, MiB; compiled for 8 CPU devices")
    table.add("step", "arguments, formulas, compiler; compiler over formulas")
    for name, case in CASES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exact, guess, truth = compare(case)
        sizes = " ".join(f"{x / 2**20:.3g}" for x in (exact, guess, truth))
        rest = (truth - exact) / (guess - exact)
        table.add(name, f"{sizes}; {truth / guess:.2f}; beside arguments {rest:.2f}")
    return table
