"""Plans for the site: pictures of one, and a table of common models and machines."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from html import escape

import jax
import optax

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    ExpertParallel,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan import (
    Candidate,
    Entry,
    Plan,
    Topology,
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
    return _plan("llama3.2-1b", "h100:8", 64, _CANDIDATES)


_RUNS = (
    ("llama3.2-1b", "h100:8", 64),
    ("llama3-8b", "h100:64", 256),
    ("llama3-8b", "v5p:4x4x4", 512),
    ("llama3-70b", "h100:256", 512),
    ("llama3-70b", "v5p:8x8x8", 1024),
    ("mixtral-8x7b", "h100:64", 256),
)
"""A preset, a topology, and rows of 8,192 tokens."""


def numbers() -> list[str]:
    """The two best strategies for each run, as lines of a Markdown table."""
    lines = [
        "| model, rows | on | strategy, microbatches, remat | GiB | step, s | MFU |",
        "|---|---|---|--:|--:|--:|",
    ]
    for preset, topology, rows in _RUNS:
        size = Topology.parse(topology).num_devices
        found = _plan(preset, topology, rows, _usual(preset, size))
        fitting = [e for e in found.entries if e.fits(found.topology)]
        # The entries are in order: the first of each strategy is its fastest.
        best = {repr(e.candidate.strategy): e for e in reversed(fitting)}
        for entry in sorted(best.values(), key=fitting.index)[:2]:
            memory, step, mfu, *_ = found.cells(entry)
            lines.append(
                f"| {preset}, {rows:,} | `{topology}` | `{entry.name}` "
                f"| {memory} | {step} | {mfu} |"
            )
    return lines


def _usual(preset: str, size: int) -> list[Candidate]:
    """Candidates that the section in words leads to, on ``size`` devices."""
    if size == 8:
        strategies: list[Strategy] = [FSDP(8), FSDP(8, shard="gradients")]
    else:
        strategies = [
            FSDP(size),
            Composite(DataParallel(size // 8), FSDP(8)),
            Composite(FSDP(size // 8), TensorParallel(8)),
        ]
    if preset.startswith("mixtral"):
        strategies.append(Composite(FSDP(size // 8), ExpertParallel(8)))
    if size >= 256:
        parts = Pipeline(4), FSDP(size // 32), TensorParallel(8)
        strategies.append(Composite(*parts))
    return [
        Candidate(strategy=strategy, num_microbatches=count, remat=remat)
        for strategy in strategies
        for count in (1, 2, 4, 8, 16)
        for remat in ("dots", "full")
    ]


def _plan(
    preset: str, topology: str, rows: int, candidates: Sequence[Candidate]
) -> Plan:
    config = GPTConfig.preset(preset)
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
        topology=topology,
        batch={"tokens": jax.ShapeDtypeStruct((rows, 8193), "int32")},
        candidates=candidates,
        compile=0,
    )


def memory() -> tuple[Figure, str]:
    """Bars, and their caption."""
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
