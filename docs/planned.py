"""Plans for the site: pictures of a plan, and a table of common models and devices."""

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
    HARDWARE,
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
    """Plans Llama 3.2 1B with 64 rows of 8,192 tokens on 8 H100s, by formulas."""
    return _plan("llama3.2-1b", "h100:8", 64, _CANDIDATES)


_RUNS = (
    ("llama3.2-1b", "h100:8", 64),
    ("llama3-8b", "h100:64", 256),
    ("llama3-8b", "v5p:4x4x4", 512),
    ("llama3-70b", "h100:256", 512),
    ("llama3-70b", "v5p:8x8x8", 1024),
    ("mixtral-8x7b", "h100:64", 256),
)
"""The preset, the topology and the number of rows of 8,192 tokens of each run."""


def numbers() -> list[str]:
    """Returns a Markdown table of the two best strategies for each run, by line."""
    lines = [
        "| model, rows | on | strategy, microbatches, remat | GiB | step, s | MFU |",
        "|---|---|---|--:|--:|--:|",
    ]
    for preset, topology, rows in _RUNS:
        size = Topology.parse(topology).num_devices
        found = _plan(preset, topology, rows, _usual(preset, size))
        fitting = [e for e in found.entries if e.fits(found.topology)]
        # Entries are sorted: the first entry of each strategy is its fastest.
        best = {repr(e.candidate.strategy): e for e in reversed(fitting)}
        for entry in sorted(best.values(), key=fitting.index)[:2]:
            memory, step, mfu, *_ = found.cells(entry)
            lines.append(
                f"| {preset}, {rows:,} | `{topology}` | `{entry.name}` "
                f"| {memory} | {step} | {mfu} |"
            )
    return lines


def hardware() -> list[str]:
    """Returns a Markdown table of the accelerators that `plan` knows, by line."""
    lines = [
        "| name | memory, GiB | bfloat16, TFLOP/s | memory, TB/s | links, GB/s "
        "| joined | network, GB/s | largest AdamW state on 1; 8 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in HARDWARE.values():
        if each.platform == "cpu":  # its figures are not from a data sheet
            continue
        fits = each.usable_bytes / 16e9  # billions of parameters
        lines.append(
            f"| `{each.name}` | {each.memory_bytes / 2**30:.0f} "
            f"| {each.peak('bfloat16') / 1e12:,.0f} "
            f"| {each.memory_bandwidth / 1e12:.1f} "
            f"| {each.link_bandwidth / 1e9:,.0f} | {each.machine_size or 'slice'} "
            f"| {each.network_bandwidth / 1e9:.3g} | {fits:.1f}; {8 * fits:.0f} |"
        )
    return lines


def _usual(preset: str, size: int) -> list[Candidate]:
    """Returns the candidates of choose.md's section "In words", on ``size`` devices."""
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
    """Returns the bar chart of memory, and its caption."""
    return draw_memory(example()), "Memory of a device by owner, one bar per candidate."


def timeline() -> tuple[Figure, str]:
    """Returns the timeline of the best FSDP candidate, and its caption."""
    return draw_timeline(example(), _find("FSDP(")), _caption("A step in time", "FSDP(")


def stages() -> tuple[Figure, str]:
    """Returns the timeline of a pipeline by stage, and its caption."""
    return draw_timeline(example(), _find("Pipeline(")), _caption(
        "A step in time, by stage", "Pipeline("
    )


def roofline() -> tuple[Figure, str]:
    """Returns the roofline of the best FSDP candidate, and its caption."""
    return draw_roofline(example(), _find("FSDP(")), _caption(
        "Roofline of a step", "FSDP("
    )


def _find(name: str) -> Entry:
    return next(e for e in example().entries if name in e.name)


def _caption(what: str, name: str) -> str:
    return f"<code>{escape(_find(name).name)}</code>{what}."
