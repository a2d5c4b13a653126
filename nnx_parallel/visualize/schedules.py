"""Pictures of a schedule: stages down, time across, for pages and for terminals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.simulate import Simulation, TimedSlot
from nnx_parallel.schedules.slots import name_slot

COLOURS = {
    "forward": (0x2F, 0x6D, 0xB5),
    "backward": (0xD9, 0x76, 0x2B),
    "backward_input": (0xD9, 0x76, 0x2B),
    "backward_weight": (0x2E, 0x7D, 0x57),
}
"""Red, green and blue of a kind's first chunk; later chunks are lighter."""

_LETTERS = {
    "forward": "F",
    "backward": "B",
    "backward_input": "B",
    "backward_weight": "W",
}
_DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_INK, _MUTED, _IDLE, _LINE = "#1f2933", "#5b6773", "#e6eaee", "#d5dae0"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_LEFT, _RIGHT, _TOP, _ROW, _GAP, _BOTTOM = 76, 24, 74, 30, 6, 76


@dataclass(frozen=True, eq=False)
class Drawing:
    """A schedule as a picture. Notebooks show it; ``print`` draws it in text.

    Attributes:
        name: Of the schedule.
        num_stages: Rows of the picture.
        num_microbatches: Numbers in its cells.
        num_chunks: Shades of its colours.
        simulation: What runs when.
        width: Of the SVG, in pixels.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    simulation: Simulation
    width: int = 960

    @property
    def caption(self) -> str:
        """Sizes, bubble and memory in one line."""
        stages = _count(self.num_stages, "stage")
        if self.num_chunks > 1:
            stages += f" of {self.num_chunks} chunks"
        parts = [
            f"{stages}, {_count(self.num_microbatches, 'microbatch')}",
            f"bubble {100 * self.simulation.bubble:.1f}%",
        ]
        if inputs := self.simulation.peak_stage_inputs:
            noun = "stage input" if self.num_chunks == 1 else "chunk input"
            parts.append(f"peak memory {_count(inputs, noun)}")
        return " · ".join(parts)

    @property
    def svg(self) -> str:
        """The picture as an SVG document, on a light ground of its own."""
        height = _TOP + self.num_stages * (_ROW + _GAP) - _GAP + _BOTTOM
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{self.width}" '
            f'height="{height}" viewBox="0 0 {self.width} {height}" '
            f'font-family="{_FONT}">',
            f"<title>{escape(self.name)}: {self.caption}</title>",
            f"<desc>{escape(self._description)}</desc>",
            f'<rect width="{self.width}" height="{height}" rx="8" fill="#ffffff"/>',
            *self._heading(),
            *self._rows(),
            *self._cells(),
            *self._axis(),
            *self._legend(height),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Writes the SVG.

        Raises:
            ScheduleError: If the path does not end in ``.svg``.
        """
        path = Path(path)
        if path.suffix != ".svg":
            raise ScheduleError(f"Drawings are saved as SVG: {path} must end in .svg.")
        path.write_text(self.svg, encoding="utf-8")

    def __str__(self) -> str:
        return self.text()

    def text(self, columns: int = 88) -> str:
        """The picture for a terminal: a line a stage, a column a slot, not to scale.

        ``F3`` is the forward pass of microbatch 3, ``B`` backward, ``W`` backward for
        the weights alone; a small digit is the chunk.

        Args:
            columns: Longer lines are cut and end in ``…``.
        """
        slots = self.simulation.timeline.slots
        order = list(_LETTERS)
        times = sorted({(s.tick, order.index(s.kind)) for s in slots})
        column = {time: index for index, time in enumerate(times)}
        rows = [["·"] * len(times) for _ in range(self.num_stages)]
        for slot in slots:
            rows[slot.stage][column[slot.tick, order.index(slot.kind)]] = self._cell(
                slot
            )
        size = max(len(cell) for row in rows for cell in row)
        label = len(f"stage {self.num_stages - 1}")
        lines = [
            f"{f'stage {stage}':<{label}}  "
            + " ".join(f"{cell:<{size}}" for cell in row).rstrip()
            for stage, row in enumerate(rows)
        ]
        heading = f"{self.name}: {self.caption}"
        return "\n".join([heading, *(_cut(line, columns) for line in lines)])

    def _cell(self, slot: TimedSlot) -> str:
        chunk = str(slot.chunk).translate(_DIGITS) if self.num_chunks > 1 else ""
        return f"{_LETTERS[slot.kind]}{slot.microbatch}{chunk}"

    @property
    def _description(self) -> str:
        costs = ", ".join(
            f"{_words(k)} {c:g}" for k, c in self.simulation.costs.items()
        )
        return (
            "A timeline with one row for each stage and one cell for each microbatch "
            f"and chunk. Costs of a stage: {costs}. Grey is the bubble, time without "
            "work."
        )

    def _heading(self) -> Iterator[str]:
        yield (
            f'<text x="{_LEFT}" y="32" font-size="17" font-weight="600" '
            f'fill="{_INK}">{escape(self.name)}</text>'
        )
        yield (
            f'<text x="{_LEFT}" y="54" font-size="13" fill="{_MUTED}">'
            f"{self.caption}</text>"
        )

    def _x(self, time: float) -> float:
        inner = self.width - _LEFT - _RIGHT
        return _LEFT + inner * time / self.simulation.total_time

    def _rows(self) -> Iterator[str]:
        for stage in range(self.num_stages):
            y = _y(stage)
            yield (
                f'<text x="{_LEFT - 12}" y="{y + _ROW / 2:g}" dy="0.35em" '
                f'text-anchor="end" font-size="12" fill="{_INK}">stage {stage}</text>'
            )
            yield (
                f'<rect x="{_LEFT}" y="{y}" width="{self.width - _LEFT - _RIGHT}" '
                f'height="{_ROW}" rx="2" fill="{_IDLE}"/>'
            )

    def _cells(self) -> Iterator[str]:
        slots = self.simulation.timeline.slots
        for kind in self.simulation.costs:
            for chunk in range(self.num_chunks):
                fill = _shade(COLOURS[kind], chunk, self.num_chunks)
                yield (
                    f'<g class="{kind}" fill="{_hex(fill)}" font-size="11" '
                    'text-anchor="middle">'
                )
                for slot in slots:
                    if (slot.kind, slot.chunk) == (kind, chunk):
                        yield self._draw_slot(slot, _ink_on(fill))
                yield "</g>"

    def _draw_slot(self, slot: TimedSlot, ink: str) -> str:
        left, right = self._x(slot.start), self._x(slot.end)
        gap = min(1.0, 0.15 * (right - left))
        y = _y(slot.stage)
        name = name_slot(_words(slot.kind), slot.stage, slot.microbatch, slot.chunk)
        cell = (
            f'<rect x="{left:.2f}" y="{y}" width="{right - left - gap:.2f}" '
            f'height="{_ROW}"><title>{name}, tick {slot.tick}</title></rect>'
        )
        if right - left < 7 * len(str(slot.microbatch)) + 4:
            return cell
        return cell + (
            f'<text x="{(left + right - gap) / 2:.2f}" y="{y + _ROW / 2:g}" '
            f'dy="0.35em" fill="{ink}" pointer-events="none">{slot.microbatch}</text>'
        )

    def _axis(self) -> Iterator[str]:
        y = _y(self.num_stages)
        total = self.simulation.total_time
        step = _round_step(total)
        yield f'<g font-size="11" fill="{_MUTED}" text-anchor="middle">'
        for index in range(int(total / step + 1e-9) + 1):
            x = self._x(index * step)
            yield f'<path d="M{x:.2f} {y}v5" stroke="{_LINE}"/>'
            yield f'<text x="{x:.2f}" y="{y + 18}">{index * step:g}</text>'
        yield "</g>"
        yield (
            f'<text x="{_LEFT - 12}" y="{y + 18}" font-size="11" text-anchor="end" '
            f'fill="{_MUTED}">time</text>'
        )

    def _legend(self, height: int) -> Iterator[str]:
        x, y = float(_LEFT), height - 26
        yield f'<g class="legend" font-size="12" fill="{_INK}">'
        for kind, cost in [*self.simulation.costs.items(), ("bubble", None)]:
            label = _words(kind) + ("" if cost is None else f" (cost {cost:g})")
            if kind == "bubble":
                shades = [_IDLE]
            else:
                shades = [
                    _hex(_shade(COLOURS[kind], chunk, self.num_chunks))
                    for chunk in range(self.num_chunks)
                ]
            for shade in shades:
                yield (
                    f'<rect x="{x:g}" y="{y}" width="12" height="12" fill="{shade}"/>'
                )
                x += 12
            yield f'<text x="{x + 6:g}" y="{y + 6}" dy="0.35em">{label}</text>'
            x += 6 + 6.6 * len(label) + 22
        if self.num_chunks > 1:
            yield (
                f'<text x="{x:g}" y="{y + 6}" dy="0.35em" fill="{_MUTED}">'
                f"darkest is chunk 0</text>"
            )
        yield "</g>"


def _y(stage: int) -> int:
    return _TOP + stage * (_ROW + _GAP)


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else line[: columns - 1].rstrip() + "…"


def _round_step(total: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that makes at most ten of ``total``."""
    power = 10.0 ** (len(f"{total:.0f}") - 3)
    while True:
        for factor in (1, 2, 5):
            if total / (factor * power) <= 10:
                return factor * power
        power *= 10


def _shade(
    colour: tuple[int, int, int], chunk: int, num_chunks: int
) -> tuple[int, int, int]:
    share = 0.6 * chunk / max(num_chunks - 1, 1)
    red, green, blue = (round(value + share * (255 - value)) for value in colour)
    return red, green, blue


def _hex(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{value:02x}" for value in colour)


def _ink_on(colour: tuple[int, int, int]) -> str:
    """Black or white, whichever reads better on a colour (WCAG's luminance)."""
    linear = [
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
        for v in (value / 255 for value in colour)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return _INK if luminance > 0.225 else "#ffffff"
