"""The roofline of a step: the bounds of a device, and the step below them."""

from __future__ import annotations

import math
import textwrap
from typing import NamedTuple

from nnx_parallel.drawing import aligned
from nnx_parallel.plan.report import Entry, Plan, lane_colours
from nnx_parallel.plan.roofline import Lane, Range
from nnx_parallel.visualize.figures import (
    LETTER,
    SMALL,
    WIDTH,
    Figure,
    Marks,
    cut,
    line,
    note,
    rect,
    seconds_text,
    text,
)

_LEFT, _TOP, _RIGHT, _BOTTOM = 46.0, 20.0, WIDTH - 8, 288.0
# Share of the slow end: a lane that takes less bounds nothing.
_LEAST = 1e-3


def draw_roofline(plan: Plan, entry: Entry | None = None) -> Figure:
    """FLOP/s of a step against the FLOPs that it has for each byte it moves [1].

    A roof for the products, for memory and for the links of each mesh axis that
    something is sent over: the line is the data sheet's, the band the assumption for
    it. Under each roof a bar: the step's FLOP/s, from the slow to the fast end of its
    time, at its FLOPs for each byte over that roof. Where a bar comes near to its roof,
    that part bounds the step.

    Args:
        plan: The plan.
        entry: Which of its candidates; by default the first.

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
        if x.work and x.hidden[0] + x.exposed[0] + x.hidden[1] > _LEAST * time.slow
    ]
    attained = products.work / time.slow, products.work / time.fast
    scale = _Scale.of(products, lanes, attained)
    shares = {"products": plan.assumptions.products, "memory": plan.assumptions.memory}
    colours = lane_colours(time)
    names, bars = scale.points(products, lanes, attained, colours)
    marks = [*scale.axes(), *names]
    drawn: list[Range] = []
    for x in (products, *lanes):
        share = shares.get(x.name, plan.assumptions.links)
        # Axes with equal links share one roof in the colours of all.
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
    for assumed in plan.assumptions.lines():
        for each in textwrap.wrap(f"assumed: {assumed}", int(WIDTH / LETTER)):
            marks.append(note(0, y + 10, each, "soft"))
            y += 15
    title = f"The roofs of {entry.name}"
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
    """Both axes, by logarithms: FLOP/byte across, FLOP/s up."""

    x: Range
    y: Range

    @classmethod
    def of(cls, products: Lane, lanes: list[Lane], attained: Range) -> _Scale:
        """One that shows the points, their roofs and where these meet."""
        peak = products.speed[1]
        found = [products.work / x.work for x in lanes]
        ridges = [peak / x.speed[1] for x in lanes]
        left = min([*found, *ridges], default=1.0) / 4
        right = max([*found, *ridges], default=1.0) * 4
        return cls((left, right), (min(attained[0], peak / 10) / 4, peak * 2))

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point of the axes is in the picture."""
        across, up = (
            math.log(value / low) / math.log(high / low)
            for value, (low, high) in zip((x, y), self, strict=True)
        )
        return (
            round(_LEFT + across * (_RIGHT - _LEFT), 2),
            round(_BOTTOM - up * (_BOTTOM - _TOP), 2),
        )

    def axes(self) -> Marks:
        """Lines, ticks and names."""
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
        """The line of the data sheet, above the band of the assumption.

        Over as many that are drawn ``before`` it is dashed, and has no band.
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
        # Where one begins or ends at another edge than the other, a corner is between.
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
        """Where a roof enters the picture, and where it meets the products' roof."""
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
        """Names, to be drawn below the roofs, and the step under each of them."""
        names: Marks = []
        marks: Marks = []
        ends: list[float] = []  # of the words of each line
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
    """A lane in words: work, intensity, speed, time at best and at worst."""
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
    """Powers of ten between two limits."""
    low, high = (math.log10(limit) for limit in limits)
    return [10.0**n for n in range(math.ceil(low), math.floor(high) + 1)]


def _per_second(flops: float) -> str:
    return _si(flops, "FLOP/s")


def _si(value: float, unit: str) -> str:
    """Three digits, with a letter for thousands, millions and so on."""
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{float(f'{value / size:.3g}'):g} {letter}{unit}".strip()
    return f"{value:.3g} {unit}".strip()
