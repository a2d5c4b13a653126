"""Pictures of a plan: memory by owner, the step in time, and its bounds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nnx_parallel.drawing import aligned
from nnx_parallel.pipeline.run import PipelineSchedule
from nnx_parallel.plan.report import (
    AXES,
    PRODUCTS,
    Entry,
    Plan,
    lane_colours,
    owners_of,
)
from nnx_parallel.plan.roofline import StepTime
from nnx_parallel.precision import format_bytes
from nnx_parallel.schedules.simulate import TimedSlot
from nnx_parallel.visualize.figures import (
    LETTER,
    SMALL,
    WIDTH,
    Figure,
    Marks,
    cut,
    legend,
    line,
    note,
    rect,
    seconds_text,
    text,
)
from nnx_parallel.visualize.schedules import COLOURS

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_OWNERS = {
    "parameters": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer state": "#009e73",
    "kept activations": "#e69f00",
    "gathered weights": "#f0e442",
    "temporaries": "#d55e00",
}
_OTHERS = ("#cc79a7", "#999999", "#b8860b", "#6b7783", "#c9b3d9")

# Opacity of transfers that take no extra time.
_PALE = 0.45
# Least visible share of a bar or of a step.
_LEAST = 2e-3


def draw_memory(plan: Plan, num_entries: int = 12) -> Figure:
    """Bars of a device's memory by owner, one for each of the first candidates.

    Args:
        plan: The plan.
        num_entries: How many of its candidates; those that cannot run have no bar.

    Example:
        >>> import jax, optax
        >>> from flax import nnx
        >>> from nnx_parallel import FSDP, DataParallel, Trainer, plan
        >>> trainer = Trainer(
        ...     lambda rngs: nnx.Linear(8192, 8192, rngs=rngs),
        ...     optax.adam(1e-3),
        ...     lambda model, batch: model(batch["x"]).mean(),
        ... )
        >>> batch = {"x": jax.ShapeDtypeStruct((64, 8192), "float32")}
        >>> given = [FSDP(), DataParallel()]
        >>> found = plan(
        ...     trainer, topology="cpu:8", batch=batch, candidates=given, compile=0
        ... )
        >>> print(draw_memory(found).title)
        Memory of a device, by owner
    """
    numbered = list(enumerate(plan.entries[:num_entries], 1))
    entries = [(number, e, e.costs) for number, e in numbered if e.costs is not None]
    usable = plan.topology.hardware.usable_bytes
    largest = max((costs.total_bytes for _, _, costs in entries), default=1.0)
    # A bar far beyond the limit would leave nothing of the others to be seen, nor would
    # a limit far beyond the bars.
    full = largest if largest < usable / 5 else min(max(largest, usable), 2 * usable)
    owners = _owners(dict(c.memory) for _, _, c in entries)
    seen = [
        owner
        for owner in owners
        if any(c.memory.get(owner, 0) > _LEAST * full for _, _, c in entries)
    ]
    marks, y = legend([(owners[owner], owner, 1.0) for owner in seen], WIDTH)
    lines = []
    for number, entry, costs in entries:
        total = ("" if costs.is_compiled else "~") + format_bytes(costs.total_bytes)
        is_over = costs.total_bytes > usable
        more, y = _label(f"{number}. {entry.name}", total, y + 8)
        marks += more + _bar(costs.memory, owners, full, y)
        if usable <= full:
            at = WIDTH * usable / full
            marks.append(line((at, y - 3), (at, y + 19), width=2.0))
        lines.append(
            f"{number}. {entry.name}: {total}{', does not fit' * is_over} "
            f"({owners_of(costs)})"
        )
        y += 22
    limit = f"The line: {format_bytes(usable)}, the memory of a device for a program."
    if usable > full:
        limit = f"A program gets {format_bytes(usable)} of a device."
    if any(not costs.is_compiled for _, _, costs in entries):
        limit += " ~ is of formulas."
    marks.append(note(0, y + 16, limit, "soft"))
    return Figure(
        title="Memory of a device, by owner",
        alt=f"Memory of a device by owner. {limit} {'; '.join(lines)}.",
        marks=marks,
        width=WIDTH,
        height=y + 22,
        lines=(*lines, limit),
    )


def draw_timeline(plan: Plan, entry: Entry | None = None) -> Figure:
    """The step in time: products, or slots of a pipeline, and transfers.

    Above at best: memory and transfers that may be hidden run during products. Below at
    worst: one after the other. Both on one scale; they are the ends of the range that
    the table has.

    Args:
        plan: The plan.
        entry: Which of its candidates; by default the first.

    Raises:
        PlanError: If the candidate cannot run.
    """
    entry, time = plan.timed(entry)
    colours = lane_colours(time)
    slots = _slots(entry)
    marks, y = legend(_time_legend(slots), WIDTH)
    for end, words in ((1, "At best"), (0, "At worst")):
        total = time.fast if end else time.slow
        heading = f"{words}, {seconds_text(total)}"
        marks.append(note(0, y + 22, heading, font_weight=600))
        more, y = _panel(time, end, slots, colours, y + 30)
        marks += more
    marks += _time_axis(time.slow, y)
    rows = [("", "at best: hidden", "waited for", "at worst: hidden", "waited for")]
    rows += [
        (
            x.name,
            *map(seconds_text, (x.hidden[1], x.exposed[1], x.hidden[0], x.exposed[0])),
        )
        for x in time.lanes
    ]
    title = f"A step of {entry.name}"
    words = ", ".join(
        f"{x.name} {seconds_text(x.exposed[1])} to {seconds_text(x.exposed[0])}"
        for x in time.lanes
    )
    stages = f" {1 + max(slot.stage for slot in slots)} stages." if slots else ""
    return Figure(
        title=title,
        alt=f"{title} takes {seconds_text(time.fast)} at best and "
        f"{seconds_text(time.slow)} at worst.{stages} Waited for: {words}.",
        marks=marks,
        width=WIDTH,
        height=y + 34,
        lines=(
            f"{seconds_text(time.fast)} at best, {seconds_text(time.slow)} at worst",
            *aligned(rows).splitlines(),
        ),
    )


class _Span(NamedTuple):
    """When a lane works."""

    lane: str
    start: float
    seconds: float
    is_hidden: bool = False


def _spans(time: StepTime, end: int) -> list[_Span]:
    """The work of each lane at one end of the range: 0 the worse, 1 the better."""
    products, *others = time.lanes
    spans = [_Span(products.name, 0.0, products.exposed[end])]
    sent, busy = 0.0, products.exposed[end]
    for lane in others:
        # Memory and links work at the same time; the links share theirs.
        is_sent = lane.name != "memory"
        start = sent if is_sent else 0.0
        hidden = lane.hidden[end]
        # At worst a hidden transfer takes no extra time, however long it is.
        hidden = hidden if end else max(0.0, min(hidden, busy - start))
        spans.append(_Span(lane.name, start, hidden, is_hidden=True))
        sent += hidden * is_sent
        busy = max(busy, start + hidden) if end else busy
    for lane in others:
        spans.append(_Span(lane.name, busy, lane.exposed[end]))
        busy += lane.exposed[end]
    return spans


_GUTTER = 84.0  # left of time 0


def _panel(
    time: StepTime,
    end: int,
    slots: Sequence[TimedSlot],
    colours: dict[str, str],
    y: float,
) -> tuple[Marks, float]:
    """The lanes of one end of the range, and where they end."""
    unit = (WIDTH - _GUTTER) / time.slow
    marks: Marks = []
    products, *others = _spans(time, end)
    if slots:
        height = 14.0 if max(slot.stage for slot in slots) < 8 else 9.0
        more, y = _stages(slots, unit * products.seconds, height, y)
        marks += more
    else:
        marks += [
            note(0, y + 12, products.lane, "soft"),
            rect(_GUTTER, y, unit * products.seconds, 15, colours[products.lane]),
        ]
        y += 19
    for lane in time.lanes[1:]:
        spans = [s for s in others if s.lane == lane.name]
        if sum(s.seconds for s in spans) <= _LEAST * time.slow:
            continue
        marks.append(note(0, y + 12, cut(lane.name, 14), "soft"))
        for span in spans:
            if span.seconds > 0:
                how = "during products" if span.is_hidden else "waited for"
                marks.append(
                    rect(
                        _GUTTER + unit * span.start,
                        y,
                        unit * span.seconds,
                        15,
                        colours[lane.name],
                        opacity=_PALE if span.is_hidden else 1,
                        title=f"{lane.name}: {seconds_text(span.seconds)}, {how}",
                    )
                )
        y += 19
    return marks, y


def _slots(entry: Entry) -> tuple[TimedSlot, ...]:
    """The slots of a pipeline's schedule; none without stages."""
    run = entry.candidate.strategy.claims().execution
    stages = entry.axis_sizes.get("pipe", 1)
    if not isinstance(run, PipelineSchedule) or stages < 2:
        return ()
    table = run.schedule.table(stages, entry.candidate.num_microbatches)
    return table.simulate().timeline.slots


def _stages(
    slots: Sequence[TimedSlot], width: float, height: float, y: float
) -> tuple[Marks, float]:
    """A row for each stage, to scale: all of the schedule is as wide as told."""
    unit = width / max(slot.end for slot in slots)
    stages, chunks = (1 + max(getattr(s, n) for s in slots) for n in ("stage", "chunk"))
    marks: Marks = []
    # One path for each look: a schedule has thousands of slots.
    paths: dict[tuple[str, int], list[str]] = {}
    for slot in slots:
        at, top = _GUTTER + unit * slot.start, y + height * slot.stage
        wide = max(0.3, unit * (slot.end - slot.start) - min(0.8, 0.1 * unit))
        box = f"M{at:.2f} {top:.1f}h{wide:.2f}v{height - 2:g}h-{wide:.2f}z"
        paths.setdefault((slot.kind, slot.chunk), []).append(box)
    for stage in range(stages):
        top = y + height * stage
        # With many stages the names would touch.
        if stages <= 8 or stage % 2 == 0:
            marks.append(note(0, top + height - 3, f"stage {stage}", "soft"))
        marks.append(rect(_GUTTER, top, width, height - 2, "whole", opacity=0.6))
    for (kind, chunk), boxes in sorted(paths.items()):
        fade = 0.6 * chunk / max(1, chunks - 1)
        colour = f"#{bytes(round(v + fade * (255 - v)) for v in COLOURS[kind]).hex()}"
        marks.append(f'<path d="{"".join(boxes)}" fill="{colour}"/>')
    return marks, y + height * stages + 5


def _time_legend(slots: Sequence[TimedSlot]) -> list[tuple[str, str, float]]:
    kinds = [kind for kind in COLOURS if any(slot.kind == kind for slot in slots)]
    items = [
        (f"#{bytes(COLOURS[kind]).hex()}", kind.replace("_", ", for "), 1.0)
        for kind in kinds
    ]
    items = items or [(PRODUCTS, "products", 1.0)]
    return [*items, (AXES[0], "during products", _PALE), (AXES[0], "waited for", 1.0)]


def _time_axis(seconds: float, y: float) -> Marks:
    unit = (WIDTH - _GUTTER) / seconds
    marks = [line((_GUTTER, y + 4), (WIDTH, y + 4), width=1.0)]
    step = _nice(seconds / 4)
    for n in range(int(seconds / step) + 1):
        at = _GUTTER + unit * n * step
        marks.append(line((at, y + 4), (at, y + 8), width=1.0))
        label = seconds_text(n * step) if n else "0"
        if at < WIDTH - 20:
            marks.append(text(round(at, 2), y + 22, label, "soft", font_size=SMALL))
    return marks


def _nice(least: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is as large."""
    power = 10 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= 0.999 * least)


def _owners(memories: Iterable[dict[str, float]]) -> dict[str, str]:
    """A colour for each owner, the large ones always in the same."""
    names = dict.fromkeys(name for memory in memories for name in memory)
    others = [name for name in names if name not in _OWNERS]
    return {
        name: _OWNERS.get(name) or _OTHERS[others.index(name) % len(_OTHERS)]
        for name in names
    }


def _label(words: str, value: str, y: float) -> tuple[Marks, float]:
    """Words in lines, a value at the right of the first; and where they end."""
    room = int((WIDTH - LETTER * len(value) - 24) / LETTER)
    marks = [note(WIDTH, y + 12, value, text_anchor="end", font_weight=600)]
    for each in textwrap.wrap(words, room, subsequent_indent="    "):
        # A space at the beginning would not be drawn.
        indent = 14 if each.startswith(" ") else 0
        marks.append(note(indent, y + 12, each.strip()))
        y += 15
    return marks, y + 4


def _bar(
    memory: Mapping[str, float], colours: Mapping[str, str], full: float, y: float
) -> Marks:
    marks, left = [], 0.0
    for owner, size in memory.items():
        wide = min(WIDTH * size / full, WIDTH - left)
        if size > 0 and wide > 0.05:
            title = f"{owner}: {format_bytes(size)}"
            marks.append(rect(left, y, wide, 16, colours[owner], 0, title=title))
        left += max(0.0, wide)
    if sum(memory.values()) > full:
        # It goes on beyond the picture.
        marks.append(line((WIDTH - 7, y + 3), (WIDTH - 2, y + 8), (WIDTH - 7, y + 13)))
    return marks
