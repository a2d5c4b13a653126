"""Draws a plan: memory by owner, the step's timeline and roofline, and a page.

The page is one file without scripts, which can be sent and opened in any browser.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from nnx_parallel.drawing import aligned, as_html
from nnx_parallel.errors import PlanError
from nnx_parallel.pipeline.run import PipelineSchedule
from nnx_parallel.plan.report import (
    AXES,
    HEADER,
    PRODUCTS,
    Entry,
    Plan,
    lane_colours,
    owners_of,
)
from nnx_parallel.plan.roofline import Lane, Range, StepTime
from nnx_parallel.precision import format_bytes
from nnx_parallel.schedules.simulate import TimedSlot
from nnx_parallel.visualize.figures import (
    DARK,
    LETTER,
    LIGHT,
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
# Smallest share of a bar or of a step that is visible.
_LEAST = 2e-3


def draw_memory(plan: Plan, num_entries: int = 12) -> Figure:
    """Draws a bar of a device's memory by owner for each of the first candidates.

    Args:
        plan: The plan.
        num_entries: Number of candidates to draw; candidates that cannot run have no
            bar.

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
    # If one bar were far beyond the limit, or the limit far beyond the bars, the other
    # bars would be too short to see.
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
    limit = f"The line is at {format_bytes(usable)}, the memory that a program gets."
    if usable > full:
        limit = f"A program gets {format_bytes(usable)} of a device's memory."
    notes = [limit]
    if any(not costs.is_compiled for _, _, costs in entries):
        notes.append("~ marks estimates by formulas.")
    for words in notes:
        y += 16
        marks.append(note(0, y, words, "soft"))
    return Figure(
        title="Memory of a device, by owner",
        alt=f"Memory of a device by owner. {' '.join(notes)} {'; '.join(lines)}.",
        marks=marks,
        width=WIDTH,
        height=y + 6,
        lines=(*lines, *notes),
    )


def draw_timeline(plan: Plan, entry: Entry | None = None) -> Figure:
    """Draws a step over time: products or slots of a pipeline, and transfers.

    The upper part is the best case: memory traffic, and transfers that may be hidden,
    run during products. The lower part is the worst case: everything runs one after the
    other. Both have the same scale, and are the ends of the range in the table.

    Args:
        plan: The plan.
        entry: The candidate to draw; by default the first.

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
    """A time span in which a lane works."""

    lane: str
    start: float
    seconds: float
    is_hidden: bool = False


def _spans(time: StepTime, end: int) -> list[_Span]:
    """Returns each lane's spans at one end of the range: 0 is worst, 1 is best."""
    products, *others = time.lanes
    spans = [_Span(products.name, 0.0, products.exposed[end])]
    sent, busy = 0.0, products.exposed[end]
    for lane in others:
        # Memory and links work at the same time. Links work one after the other.
        is_sent = lane.name != "memory"
        start = sent if is_sent else 0.0
        hidden = lane.hidden[end]
        # At worst a hidden transfer takes no extra time, however long it lasts.
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
    """Draws the lanes at one end of the range; returns marks and their lower end."""
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
    """Returns the slots of a pipeline's schedule; empty without stages."""
    run = entry.candidate.strategy.claims().execution
    stages = entry.axis_sizes.get("pipe", 1)
    if not isinstance(run, PipelineSchedule) or stages < 2:
        return ()
    table = run.schedule.table(stages, entry.candidate.num_microbatches)
    return table.simulate().timeline.slots


def _stages(
    slots: Sequence[TimedSlot], width: float, height: float, y: float
) -> tuple[Marks, float]:
    """Draws a row for each stage, to scale; the schedule has the given width."""
    unit = width / max(slot.end for slot in slots)
    stages, chunks = (1 + max(getattr(s, n) for s in slots) for n in ("stage", "chunk"))
    marks: Marks = []
    # Slots that look the same share one path, because a schedule has thousands of
    # slots.
    paths: dict[tuple[str, int], list[str]] = {}
    for slot in slots:
        at, top = _GUTTER + unit * slot.start, y + height * slot.stage
        wide = max(0.3, unit * (slot.end - slot.start) - min(0.8, 0.1 * unit))
        box = f"M{at:.2f} {top:.1f}h{wide:.2f}v{height - 2:g}h-{wide:.2f}z"
        paths.setdefault((slot.kind, slot.chunk), []).append(box)
    for stage in range(stages):
        top = y + height * stage
        # With many stages the names would overlap.
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
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= 0.999 * least)


def _owners(memories: Iterable[dict[str, float]]) -> dict[str, str]:
    """Returns a colour for each owner; the main owners always have the same colour."""
    names = dict.fromkeys(name for memory in memories for name in memory)
    others = [name for name in names if name not in _OWNERS]
    return {
        name: _OWNERS.get(name) or _OTHERS[others.index(name) % len(_OTHERS)]
        for name in names
    }


def _label(words: str, value: str, y: float) -> tuple[Marks, float]:
    """Draws wrapped words with a value at the right; returns marks and their end."""
    room = int((WIDTH - LETTER * len(value) - 24) / LETTER)
    marks = [note(WIDTH, y + 12, value, text_anchor="end", font_weight=600)]
    for each in textwrap.wrap(words, room, subsequent_indent="    "):
        # SVG does not draw a space at the beginning, so the line is moved instead.
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
        # An arrow shows that the bar goes on beyond the picture.
        marks.append(line((WIDTH - 7, y + 3), (WIDTH - 2, y + 8), (WIDTH - 7, y + 13)))
    return marks


_LEFT, _TOP, _RIGHT, _BOTTOM = 46.0, 20.0, WIDTH - 8, 288.0
# A lane that takes less than this share of the slow time does not bound the step.
_LEAST_SHARE = 1e-3


def draw_roofline(plan: Plan, entry: Entry | None = None) -> Figure:
    """Draws FLOP/s of a step against its FLOPs for each byte that it moves [1].

    There is a roof for products, for memory, and for the links of each mesh axis with
    traffic. The line of a roof shows the figure of the data sheet, and its band the
    assumed range. Under each roof is a bar. Its horizontal position is the step's FLOPs
    for each byte of that memory or link, and it reaches from the slow to the fast end
    of the step's FLOP/s. If a bar comes near its roof, that part bounds the step.

    Args:
        plan: The plan.
        entry: The candidate to draw; by default the first.

    Raises:
        PlanError: If the candidate cannot run.

    References:
        [1] Williams et al., "Roofline", 2009, https://doi.org/10.1145/1498765.1498785;
        with several roofs: Yang et al., "Hierarchical Roofline", 2020,
        https://arxiv.org/abs/2009.02449
    """
    entry, time = plan.timed(entry)
    products, *others = time.lanes
    lanes = [
        x
        for x in others
        if x.work
        and x.hidden[0] + x.exposed[0] + x.hidden[1] > _LEAST_SHARE * time.slow
    ]
    attained = products.work / time.slow, products.work / time.fast
    scale = _Scale.of(products, lanes, attained)
    shares = {"products": plan.assumptions.products, "memory": plan.assumptions.memory}
    colours = lane_colours(time)
    names, bars = scale.points(products, lanes, attained, colours)
    marks = [*scale.axes(), *names]
    drawn: list[Range] = []
    for x in (products, *lanes):
        share = shares.get(x.name, plan.assumptions.of_transfers(x.leaves_machine))
        # Axes with equal links share one roof, which is drawn in the colours of all of
        # them.
        before = drawn.count(x.speed) * (x is not products)
        marks += scale.roof(x, products.speed[1], share, colours[x.name], before)
        drawn.append(x.speed)
    marks += bars
    rows = [_row(products, products), *(_row(x, products) for x in lanes)]
    y = _BOTTOM + 46
    for lane, row in zip((products, *lanes), rows, strict=True):
        words = ", ".join(filter(None, row[1:4]))
        marks.append(rect(0, y, 11, 11, colours[lane.name], 2))
        marks.append(note(16, y + 10, f"{lane.name}: {words}"))
        y += 18
    y += 4
    for words in plan.assumptions.lines():
        for each in textwrap.wrap(words, int(WIDTH / LETTER)):
            marks.append(note(0, y + 10, each, "soft"))
            y += 15
    title = f"Roofline of {entry.name}"
    speed = f"{_per_second(attained[0])} to {_per_second(attained[1])} a device"
    head = ("", "work of a device", "intensity", "speed", "at best", "at worst")
    return Figure(
        title=title,
        alt=f"Roofline of a step of {entry.name}: {speed}. "
        + "; ".join(f"{row[0]} {', '.join(filter(None, row[1:4]))}" for row in rows),
        marks=marks,
        width=WIDTH,
        height=y + 4,
        lines=(speed, *aligned([head, *rows]).splitlines()),
    )


class _Scale(NamedTuple):
    """Both axes, logarithmic: FLOP/byte is horizontal, FLOP/s is vertical."""

    x: Range
    y: Range

    @classmethod
    def of(cls, products: Lane, lanes: list[Lane], attained: Range) -> _Scale:
        """Makes axes that show the points, their roofs and where the roofs meet."""
        peak = products.speed[1]
        found = [products.work / x.work for x in lanes]
        ridges = [peak / x.speed[1] for x in lanes]
        left = min([*found, *ridges], default=1.0) / 4
        right = max([*found, *ridges], default=1.0) * 4
        return cls((left, right), (min(attained[0], peak / 10) / 4, peak * 2))

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Returns the point in the picture for ``x`` FLOP/byte and ``y`` FLOP/s."""
        across, up = (
            math.log(value / low) / math.log(high / low)
            for value, (low, high) in zip((x, y), self, strict=True)
        )
        return (
            round(_LEFT + across * (_RIGHT - _LEFT), 2),
            round(_BOTTOM - up * (_BOTTOM - _TOP), 2),
        )

    def axes(self) -> Marks:
        """Draws lines, ticks and names."""
        corner = (_LEFT, _BOTTOM)
        marks = [line((_LEFT, _TOP), corner, (_RIGHT, _BOTTOM), width=1.0)]
        last = -1e9
        for tick in _powers(self.x):
            x, _ = self.at(tick, self.y[0])
            marks.append(line((x, _BOTTOM), (x, _BOTTOM + 4), width=1.0))
            if x - last > 44:
                label = f"{tick:,.0f}" if tick >= 1 else f"{tick:g}"
                label = label if tick < 1e5 else f"10^{round(math.log10(tick))}"
                marks.append(text(x, _BOTTOM + 17, label, "soft", font_size=SMALL))
                last = x
        low, high = self.y
        steps = (1, 2, 5) if high < 500 * low else (1,)
        for tick in (n * each for each in _powers((low / 10, high)) for n in steps):
            if not low <= tick <= high:
                continue
            _, y = self.at(self.x[0], tick)
            marks.append(line((_LEFT - 4, y), (_LEFT, y), width=1.0))
            label = _si(tick, "")
            marks.append(note(_LEFT - 7, y + 4, label, "soft", text_anchor="end"))
        marks.append(note(0, 12, "FLOP/s of a device", "soft"))
        right = note(_RIGHT, _BOTTOM + 34, "FLOP a byte", "soft", text_anchor="end")
        return [*marks, right]

    def roof(
        self, lane: Lane, peak: float, shares: Range, colour: str, before: int
    ) -> Marks:
        """Draws a roof: the data sheet's line, and the band of the assumed range.

        If ``before`` roofs are already drawn in the same place, the line is dashed and
        has no band.
        """
        left, right = self.x
        if lane.name == "products":
            low, high = (self.at(left, peak * share)[1] for share in shares)
            box = (_LEFT, high, _RIGHT - _LEFT, low - high)
            roof = line(self.at(left, peak), self.at(right, peak), colour=colour)
            return [rect(*box, colour, 0, opacity=0.15), roof]
        low, high = (
            self._slope(share * speed, peak)
            for share, speed in zip(shares, lane.speed, strict=True)
        )
        # If the two lines of the band begin or end at different edges of the picture,
        # the band includes the corner between these edges.
        (x0, y0), (x1, y1) = self.at(left, self.y[0]), self.at(right, peak)
        begin = [(x0, y0)] * (low[0][0] > x0 and high[0][1] < y0)
        end = [(x1, y1)] * (low[1][1] > y1 and high[1][0] < x1)
        roof = self._slope(lane.speed[1], peak)
        if before:
            return [line(*roof, colour=colour, dash=f"7 {7 * before}")]
        corners = [*low, *end, *reversed(high), *begin]
        points = " ".join(f"{x:g},{y:g}" for x, y in corners)
        band = f'<polygon points="{points}" fill="{colour}" fill-opacity="0.15"/>'
        return [band, line(*roof, colour=colour)]

    def _slope(self, speed: float, peak: float) -> list[tuple[float, float]]:
        """Returns the ends of a roof: the picture's edge, and the products' roof."""
        (left, right), bottom = self.x, self.y[0]
        ends = max(left, bottom / speed), min(right, peak / speed)
        return [self.at(x, x * speed) for x in ends]

    def points(
        self,
        products: Lane,
        lanes: list[Lane],
        attained: Range,
        colours: dict[str, str],
    ) -> tuple[Marks, Marks]:
        """Draws each lane's name, and the step's bar under each roof; returns both."""
        names: Marks = []
        marks: Marks = []
        ends: list[float] = []  # ends of the words of each line
        for lane in sorted(lanes, key=lambda lane: products.work / lane.work):
            x = products.work / lane.work
            roof = min(products.speed[1], x * lane.speed[1])
            low, high = self.at(x, attained[0]), self.at(x, attained[1])
            colour, name = colours[lane.name], cut(lane.name, 16)
            half = LETTER * len(name) / 2 + 3
            middle = min(max(low[0], _LEFT + half), _RIGHT - half)
            row = next((i for i, at in enumerate(ends) if at < middle - half), None)
            if row is None:
                row = len(ends)
                ends.append(0.0)
            ends[row] = middle + half
            names.append(text(middle, low[1] + 15 + 14 * row, name, font_size=SMALL))
            marks += [
                line(high, self.at(x, roof), colour=colour, width=1.2, dash="2 3"),
                line(low, high, colour=colour, width=4.0),
            ]
        return names, marks


def _row(lane: Lane, products: Lane) -> tuple[str, ...]:
    """Describes a lane: work, intensity, speed, time at best and at worst."""
    times = [
        hidden + own for hidden, own in zip(lane.hidden, lane.exposed, strict=True)
    ]
    spent = seconds_text(times[1]), seconds_text(times[0])
    least, most = lane.speed
    if lane is products:
        work, speed = _si(lane.work, "FLOP"), _per_second(most)
        return lane.name, work, "", speed, *spent
    speed = _si(most, "B/s")
    if least < most:
        speed = f"{_si(least, 'B/s')} to {speed}"
    rounded = float(f"{products.work / lane.work:.3g}")
    intensity = f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"
    return lane.name, _si(lane.work, "B"), f"{intensity} FLOP a byte", speed, *spent


def _powers(limits: Range) -> list[float]:
    """Returns the powers of ten between two limits."""
    low, high = (math.log10(limit) for limit in limits)
    return [10.0**n for n in range(math.ceil(low), math.floor(high) + 1)]


def _per_second(flops: float) -> str:
    return _si(flops, "FLOP/s")


def _si(value: float, unit: str) -> str:
    """Formats three digits, with a letter for thousands, millions and so on."""
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{float(f'{value / size:.3g}'):g} {letter}{unit}".strip()
    return f"{value:.3g} {unit}".strip()


_SHOWN = 12  # candidates in the table, and with a bar
_DRAWN = 4  # candidates with a timeline and roofs; the first is open

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --ground: #fff; --box: #f4f4f4;
        --edge: #d0d5da; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 76rem;
       padding: 0 1rem; color: var(--ink); background: var(--ground); }
h1 { font-size: 1.5rem; line-height: 1.3; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2rem; }
pre { background: var(--box); padding: .8rem; border-radius: 6px;
      white-space: pre-wrap; overflow-wrap: anywhere; }
div { overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: .84rem; margin-bottom: .8rem;
        overflow-wrap: normal; }
td, th { padding: .3rem .7rem; vertical-align: top; text-align: left;
         border-bottom: 1px solid var(--edge); white-space: nowrap; }
td:nth-child(2), td:last-child { white-space: normal !important; min-width: 16rem; }
figure { margin: 0; max-width: 40rem; }
svg { display: block; width: 100%; height: auto; }
.pair { display: grid; gap: 1.5rem 2.5rem; margin: .8rem 0;
        grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr)); }
summary { cursor: pointer; padding: .3rem 0; overflow-wrap: anywhere; }
"""
_DARK = """
:root { --ink: #e4e7eb; --ground: #14181e; --box: #232a33; --edge: #3b4552; }
"""


def render(plan: Plan) -> str:
    """Renders the page of a plan as HTML."""
    rows = [
        (str(i + 1), e.candidate.code, *plan.cells(e))
        for i, e in enumerate(plan.entries[:_SHOWN])
    ]
    steps = [e for e in plan.entries[:_DRAWN] if e.time and e.time.lanes]
    parts = [
        f"<h1>{escape(plan.title)}</h1>",
        f"<pre>{escape(plan.code or 'Nothing fits.')}</pre>",
        "<h2>Candidates</h2>",
        as_html(HEADER, rows, notes=plan.summary().splitlines()),
        "<h2>Memory of a device, by owner</h2>",
        _figure(draw_memory(plan, _SHOWN)),
        "<h2>A step</h2>",
        f"<p>{_WORDS}</p>",
        *(_step(plan, entry, is_first=entry is steps[0]) for entry in steps),
    ]
    body = "\n".join(parts)
    dark = f"@media (prefers-color-scheme: dark) {{{_DARK}{DARK}}}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(plan.title)}</title><style>{_STYLE}{LIGHT}{dark}</style>"
        f"</head><body>{body}</body></html>\n"
    )


_WORDS = (
    "The first picture shows a step over time. The second picture is its roofline: "
    "FLOP/s against FLOPs for each byte that memory or links move. A line shows a "
    "figure of the data sheet, and a band shows the assumed range. A bar shows the "
    "step, from its slowest to its fastest time. The roof that is nearest to its bar "
    "bounds the step."
)


def _step(plan: Plan, entry: Entry, *, is_first: bool) -> str:
    """Renders both pictures of a candidate, folded except for the first one."""
    figures = draw_timeline(plan, entry), draw_roofline(plan, entry)
    pair = f'<div class="pair">{"".join(map(_figure, figures))}</div>'
    code = f"<code>{escape(entry.candidate.code)}</code>"
    opened = ' open=""' if is_first else ""
    return f"<details{opened}><summary>{code}</summary>{pair}</details>"


def _figure(figure: Figure) -> str:
    return f"<figure>{figure.inline}</figure>"


def save(plan: Plan, path: str | Path) -> None:
    """Writes a plan as JSON (``.json``) or as a page (``.html``).

    Raises:
        PlanError: If the path has another ending.
    """
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(plan.to_json(), indent=1), encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(render(plan), encoding="utf-8")
    else:
        raise PlanError(f"A plan is saved as .json or .html, not as {path.name!r}.")
