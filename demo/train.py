"""The demo: a GPT over bytes learns Python's standard library, on many devices.

Read `run` first. Only its ``strategy`` argument concerns distribution.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax
import numpy as np
import optax
from flax import nnx

from demo import report
from demo.corpus import RandomWindows, spread_windows, standard_library
from nnx_parallel import (
    FSDP,
    Checkpoint,
    Composite,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Mean,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.layers import Experts
from nnx_parallel.models import GPT, GPTConfig, generate, next_token_loss
from nnx_parallel.optimizers import muon, muon_dimension_numbers

STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "default": lambda: Composite(TensorParallel(2), FSDP()),
    "dp": lambda: DataParallel(),
    "zero1": lambda: FSDP(shard="optimizer"),
    "fsdp": lambda: FSDP(),
    "hsdp": lambda: Composite(DataParallel(2), FSDP()),
    "tp": lambda: Composite(DataParallel(), TensorParallel(4)),
    "long": lambda: Composite(ContextParallel(4), FSDP()),
    "experts": lambda: Composite(ExpertParallel(4), FSDP()),
    "3d": lambda: Composite(Pipeline(2), TensorParallel(2), FSDP()),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sizes of a run.

    Attributes:
        directory: Where checkpoints and metrics go.
        model: Shape of the model.
        num_steps: Total number of updates.
        pause_every: Steps between evaluations, and between checkpoints.
        global_batch_size: Windows of text in a batch.
        seq_len: Bytes to predict in a window.
        num_valid_batches: Batches taken from the held-out files.
        sample_len: Bytes to sample at the end.
    """

    directory: str = "runs/demo"
    model: GPTConfig = field(
        default_factory=lambda: GPTConfig.tiny_llama(
            embed_dim=128, num_kv_heads=4, mlp_dim=256, rope_theta=10_000.0
        )
    )
    num_steps: int = 250
    pause_every: int = 125
    global_batch_size: int = 16
    seq_len: int = 256
    num_valid_batches: int = 32
    sample_len: int = 250


EXPERTS = Experts(num_experts=8, top_k=2, mlp_dim=128, bias_rate=0.003)
"""Use as many FLOPs per token as the MLP that they replace, with 4 x its parameters."""


def with_experts(settings: Settings) -> Settings:
    """Settings with a mixture of experts in each block, and another run directory."""
    model = replace(settings.model, mlp_dim=None, experts=EXPERTS)
    return replace(settings, model=model, directory=f"{settings.directory}-experts")


def run(strategy: Strategy, settings: Settings) -> None:
    """Trains or resumes, restores on half of the devices, and samples text."""
    if strategy.claims().experts is not None:
        settings = with_experts(settings)
    corpus = standard_library()
    sizes = {
        "global_batch_size": settings.global_batch_size,
        "seq_len": settings.seq_len,
    }
    batches = RandomWindows(text=corpus.train, **sizes)
    held_out = spread_windows(
        corpus.valid, num_batches=settings.num_valid_batches, **sizes
    )

    trainer = Trainer(
        model=lambda rngs: GPT(settings.model, rngs=rngs),
        optimizer=lambda model: with_muon(model, settings.num_steps),
        loss=bits_per_byte,
        strategy=strategy,
        # A pipeline needs several microbatches. The losses do not depend on their
        # number.
        num_microbatches=1 if strategy.claims().execution is None else 4,
        checkpoint=Checkpoint(settings.directory, every=settings.pause_every),
        seed=0,
    )
    report.show_start(corpus, trainer)
    trainer.fit(
        batches,
        settings.num_steps,
        eval_data=held_out,
        eval_every=settings.pause_every,
    )
    bits = trainer.evaluate(held_out)["loss"]
    report.show_bits(corpus, held_out, bits)

    # The checkpoint also fits the same model on other devices under another strategy.
    restored = Trainer(
        model=lambda rngs: GPT(settings.model, rngs=rngs),
        optimizer=lambda model: with_muon(model, settings.num_steps),
        loss=bits_per_byte,
        strategy=DataParallel(),
        devices=jax.devices()[:4],
        checkpoint=settings.directory,
    )
    restored.restore()
    restored_bits = restored.evaluate(held_out)["loss"]
    assert math.isclose(restored_bits, bits, abs_tol=1e-4), (restored_bits, bits)
    report.show_restored(restored, restored_bits, bits)

    prompt = np.frombuffer(b"def ", np.uint8)[None].astype(np.int32)  # (1, 4)
    text = restored.predict(
        [prompt],
        lambda model, prompt: generate(
            model,
            prompt,
            max_new_tokens=settings.sample_len,
            key=jax.random.key(0),
            temperature=0.6,
        ),
    )
    report.show_sample(bytes(text[0].astype(np.uint8)))


def bits_per_byte(model: GPT, batch: jax.Array) -> Mean:
    """The cross-entropy of the next byte in bits: its compressed length."""
    return next_token_loss(model, batch) / math.log(2)


def with_muon(model: nnx.Module, num_steps: int) -> optax.GradientTransformation:
    """Muon for the kernels, Adam for the other parameters; both warm up and decay."""

    def schedule(peak: float) -> optax.Schedule:
        warmup = max(1, num_steps // 15)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, num_steps)

    return muon(
        schedule(0.02),
        adam_learning_rate=schedule(3e-3),
        muon_weight_dimension_numbers=muon_dimension_numbers(model),
    )
