"""Pictures of a schedule: stages down, time across."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

from nnx_parallel.schedules.simulate import Simulation, TimedSlot
from nnx_parallel.schedules.table import Table
from nnx_parallel.visualize.picture import Colour, Picture, fill

COLOURS: dict[str, Colour] = {
    "forward": (0x2F, 0x6D, 0xB5),
    "backward": (0xD9, 0x76, 0x2B),
    "backward_input": (0xD9, 0x76, 0x2B),
    "backward_weight": (0x2E, 0x7D, 0x57),
}
"""Of the first chunk of a kind of slot; later chunks are lighter."""

# B for both: a table has joint backward slots or split ones, never both.
_LETTERS = dict(zip(COLOURS, "FBBW", strict=True))
_DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_IDLE: Colour = (0xE6, 0xEA, 0xEE)
_PAGE = 112  # columns that can be read on a page of the site

Column = tuple[int, str]
"""Tick and kind of the slots that run at the same time."""


def schedule_picture(table: Table, **costs: Any) -> Picture:
    """A schedule as a picture.

    ``F3`` is the forward pass of microbatch 3, ``B`` backward, ``W`` backward for the
    weights alone; a small digit is the chunk. Colour shows it to scale; plain text has
    a column for each slot, and cuts lines that are longer than a terminal's.

    Args:
        table: The schedule.
        costs: Of ``forward``, ``backward_input`` and ``backward_weight``, as
            `Table.simulate` takes them.
    """
    simulation = table.simulate(**costs)
    stages = _count(table.num_stages, "stage")
    if table.num_chunks > 1:
        stages += f" of {table.num_chunks} chunks"
    parts = [
        f"{stages}, {_count(table.num_microbatches, 'microbatch')}",
        f"bubble {100 * simulation.bubble:.1f}%",
    ]
    # A table for evaluation keeps no input for a backward pass.
    if inputs := simulation.peak_stage_inputs:
        noun = "stage input" if table.num_chunks == 1 else "chunk input"
        parts.append(f"peak memory {_count(inputs, noun)}")
    title = f"{table.name}: {' · '.join(parts)}"
    drawing = Timeline(table.num_stages, table.num_chunks, simulation)
    # Printed lines are cut; an SVG is as wide as its cells.
    return Picture(title, drawing, columns=88, svg_columns=100_000)


@dataclass(frozen=True, eq=False)
class Timeline:
    """The cells of a schedule, for rich: a line for each stage.

    Attributes:
        num_stages: Lines.
        num_chunks: Shades of each colour.
        simulation: What runs when.
    """

    num_stages: int
    num_chunks: int
    simulation: Simulation

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Text]:
        slots = self.simulation.timeline.slots
        labels = {slot: self._label(slot) for slot in slots}
        # One more than the label: ground between two cells.
        widths = dict.fromkeys(self._columns(), _longest(labels) + 1)
        # Without colour a wide cell could not be told from the idle time after it.
        if console.color_system:
            widths = self._to_scale(_longest(labels) + 1)
            if sum(widths.values()) > min(_PAGE, options.max_width):
                # Colours and shades say the kind and the chunk.
                labels = {slot: str(slot.microbatch) for slot in slots}
                widths = self._to_scale(_longest(labels) + 1)
        # A stage has at most one slot of a kind in a tick.
        cells = {(slot.stage, slot.tick, slot.kind): slot for slot in slots}
        for stage in range(self.num_stages):
            line = self._line(f"stage {stage}")
            for column, width in widths.items():
                slot = cells.get((stage, *column))
                label = labels[slot] if slot else "·"
                line.append(f"{label:^{width - 1}}", self._style(slot)).append(" ")
            yield line
        # Columns of plain text are not to scale: a time axis would not fit them.
        if console.color_system:
            start = self.simulation.timeline.tick_start
            yield self._line("tick").append(_axis(widths, str))
            yield self._line("time").append(_axis(widths, lambda t: f"{start[t]:g}"))
            yield self._line("").append_text(self._legend())

    def _columns(self) -> dict[Column, float]:
        """How long each column takes, in the order of time: the stages' is the same."""
        kinds = list(COLOURS)
        slots = self.simulation.timeline.slots
        took = {(slot.tick, slot.kind): slot.end - slot.start for slot in slots}
        order = sorted(took, key=lambda column: (column[0], kinds.index(column[1])))
        return {column: took[column] for column in order}

    def _to_scale(self, least: int) -> dict[Column, int]:
        """Widths in proportion to times, down to an eighth of the longest."""
        columns = self._columns()
        # A kind of slot may cost nothing.
        shortest = min(time for time in columns.values() if time)
        unit = least / max(shortest, max(columns.values()) / 8)
        return {at: max(least, round(unit * time)) for at, time in columns.items()}

    def _line(self, label: str) -> Text:
        width = len(f"stage {self.num_stages - 1}") + 2
        return Text(label.ljust(width), no_wrap=True, overflow="ellipsis")

    def _label(self, slot: TimedSlot) -> str:
        chunk = str(slot.chunk).translate(_DIGITS) if self.num_chunks > 1 else ""
        return f"{_LETTERS[slot.kind]}{slot.microbatch}{chunk}"

    def _style(self, slot: TimedSlot | None) -> Style:
        return fill(_IDLE) if slot is None else self._shade(slot.kind, slot.chunk)

    def _shade(self, kind: str, chunk: int) -> Style:
        share = 0.6 * chunk / max(self.num_chunks - 1, 1)
        red, green, blue = (round(v + share * (255 - v)) for v in COLOURS[kind])
        return fill((red, green, blue))

    def _legend(self) -> Text:
        legend = Text()
        for kind, cost in self.simulation.costs.items():
            for chunk in range(self.num_chunks):
                label = f"{_LETTERS[kind]}{str(chunk).translate(_DIGITS)}"
                label = label if self.num_chunks > 1 else _LETTERS[kind]
                legend.append(f" {label} ", self._shade(kind, chunk))
            legend.append(f" {kind.replace('_', ' ')} (cost {cost:g})   ")
        return legend.append(" · ", fill(_IDLE)).append(" bubble")


def _longest(labels: Mapping[TimedSlot, str]) -> int:
    return max(map(len, labels.values()))


def _axis(widths: Mapping[Column, int], label: Callable[[int], str]) -> str:
    """A label where each tick begins, if the one before leaves room."""
    text, at, begun = "", 0, -1
    for (tick, _), width in widths.items():
        if tick != begun and len(text) <= at:
            text = f"{text:<{at}}{label(tick)} "
        at, begun = at + width, tick
    return text


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
