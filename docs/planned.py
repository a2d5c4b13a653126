"""The plan whose pictures are on the page of `plan`: that of its script, cut short."""

from __future__ import annotations

import functools
from html import escape

import jax
import optax

from nnx_parallel import FSDP, Composite, DataParallel, Pipeline, Precision, Trainer
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan import (
    Candidate,
    Entry,
    Plan,
    draw_memory,
    draw_roofline,
    draw_timeline,
)
from nnx_parallel.plan import plan as make_plan
from nnx_parallel.visualize.figures import Figure

_CANDIDATES = (
    Candidate(strategy=FSDP(8, shard="gradients"), num_microbatches=4),
    Candidate(strategy=FSDP(8), num_microbatches=4, remat="dots"),
    Candidate(strategy=FSDP(8), num_microbatches=2, remat="full"),
    Candidate(strategy=DataParallel(8), num_microbatches=8, remat="full"),
    Candidate(
        strategy=Composite(Pipeline(4), FSDP(2)), num_microbatches=8, remat="full"
    ),
    Candidate(strategy=FSDP(8)),
)


@functools.cache
def example() -> Plan:
    """Llama 3.2 1B, 64 rows of 8,192 tokens, on 8 H100, by formulas."""
    config = GPTConfig.preset("llama3.2-1b")
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(3e-4),
        next_token_loss,
        precision=Precision.mixed_bfloat16(),
        devices=jax.devices()[:1],
        loggers=(),
    )
    return make_plan(
        trainer,
        topology="h100:8",
        batch={"tokens": jax.ShapeDtypeStruct((64, 8193), "int32")},
        candidates=_CANDIDATES,
        compile=0,
    )


def memory() -> tuple[Figure, str]:
    """Bars, and what they show."""
    return draw_memory(example()), "Memory of a device by owner, a bar for a candidate."


def timeline() -> tuple[Figure, str]:
    """A step of the best candidate without stages."""
    return draw_timeline(example(), _find("FSDP(")), _caption("A step in time", "FSDP(")


def stages() -> tuple[Figure, str]:
    """A step of a pipeline."""
    return draw_timeline(example(), _find("Pipeline(")), _caption(
        "A step in time, by stage", "Pipeline("
    )


def roofline() -> tuple[Figure, str]:
    """The roofs of the best."""
    return draw_roofline(example(), _find("FSDP(")), _caption(
        "The roofs of a step", "FSDP("
    )


def _find(name: str) -> Entry:
    return next(e for e in example().entries if name in e.name)


def _caption(what: str, name: str) -> str:
    return f"<code>{escape(_find(name).name)}</code>{what}."
