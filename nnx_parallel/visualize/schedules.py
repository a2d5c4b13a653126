"""Draws a schedule with a row for each stage; time goes from left to right."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

from nnx_parallel.drawing import Colour, Picture, fill
from nnx_parallel.schedules.simulate import Simulation, TimedSlot
from nnx_parallel.schedules.table import Table

COLOURS: dict[str, Colour] = {
    "forward": (0x2F, 0x6D, 0xB5),
    "backward": (0xD9, 0x76, 0x2B),
    "backward_input": (0xD9, 0x76, 0x2B),
    "backward_weight": (0x2E, 0x7D, 0x57),
}
"""Colours of the kinds of slots, for the first chunk; later chunks are lighter."""

# B is used for two kinds, because a table has backward slots that are either all joint
# or all split.
_LETTERS = dict(zip(COLOURS, "FBBW", strict=True))
_DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_IDLE = fill((0xE6, 0xEA, 0xEE))
_PAGE = 112  # characters in a line that can be read on a page of the site

Column = tuple[int, str]
"""Tick and kind of the slots that run at the same time and share a column."""


def schedule_picture(table: Table, **costs: Any) -> Picture:
    """Draws a schedule; the costs are arguments of `Table.simulate`."""
    simulation = table.simulate(**costs)
    stages = _count(table.num_stages, "stage")
    if table.num_chunks > 1:
        stages += f" of {table.num_chunks} chunks"
    microbatches = _count(table.num_microbatches, "microbatch")
    title = f"{table.name}: {stages}, {microbatches} · bubble {simulation.bubble:.1%}"
    # In evaluation, no input is kept for a backward pass.
    if inputs := simulation.peak_stage_inputs:
        noun = "stage input" if table.num_chunks == 1 else "chunk input"
        title += f" · peak memory {_count(inputs, noun)}"
    # Printed lines are cut at 88 characters. An SVG is as wide as its cells.
    return Picture(title, Timeline(table, simulation), columns=88, svg_columns=100_000)


@dataclass(frozen=True, eq=False)
class Timeline:
    """The cells of a schedule for rich, with a line for each stage.

    In colour, the cells are to scale. In plain text, columns have equal widths, and
    lines that are longer than the terminal is wide are cut.
    """

    table: Table
    simulation: Simulation

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Text]:
        slots = self.simulation.timeline.slots
        labels = {s: self._label(s.kind, s.chunk, s.microbatch) for s in slots}
        # Without colour, a wide cell would look like a cell that is followed by idle
        # time.
        is_coloured = bool(console.color_system)
        widths = self._widths(labels, to_scale=is_coloured)
        if is_coloured and sum(widths.values()) > min(_PAGE, options.max_width):
            # Labels are shortened to the microbatch, because colours and shades also
            # show the kind and the chunk.
            labels = {slot: str(slot.microbatch) for slot in slots}
            widths = self._widths(labels, to_scale=True)
        # A stage has at most one slot of a kind in a tick.
        cells = {(slot.stage, slot.tick, slot.kind): slot for slot in slots}
        took = self._took()
        for stage in range(self.table.num_stages):
            line = self._line(f"stage {stage}")
            for column, width in widths.items():
                slot = cells.get((stage, *column))
                label, shade, idle = "", _IDLE, width - 1
                if slot:
                    label, shade = labels[slot], self._shade(slot.kind, slot.chunk)
                    share = (slot.end - slot.start) / took[column] if is_coloured else 1
                    idle = min(round((width - 1) * (1 - share)), width - 1 - len(label))
                line.append(f"{label:^{width - 1 - idle}}", shade)
                line.append(f"{'' if slot else '·':^{idle}}", _IDLE).append(" ")
            yield line
        # Columns of plain text are not to scale, so a time axis would not fit.
        if is_coloured:
            start = self.simulation.timeline.tick_start
            yield self._line("tick").append(_axis(widths, str))
            yield self._line("time").append(_axis(widths, lambda t: f"{start[t]:g}"))
            yield self._line("").append_text(self._legend())

    def _widths(
        self, labels: Mapping[TimedSlot, str], *, to_scale: bool
    ) -> dict[Column, int]:
        """Returns the width of each column, in the order of time."""
        # A column is one character wider than its label, for the space between cells.
        least = max(map(len, labels.values())) + 1
        took = self._took()
        kinds = list(COLOURS)
        order = sorted(took, key=lambda column: (column[0], kinds.index(column[1])))
        if not to_scale:
            return dict.fromkeys(order, least)
        # Columns shorter than an eighth of the longest column are not to scale, because
        # a kind of slot may have the cost 0.
        shortest = max(min(filter(None, took.values())), max(took.values()) / 8)
        unit = least / shortest
        return {at: max(least, round(unit * took[at])) for at in order}

    def _took(self) -> dict[Column, float]:
        """Returns the duration of each column, which is that of its longest slot."""
        took: dict[Column, float] = {}
        for slot in self.simulation.timeline.slots:
            column = (slot.tick, slot.kind)
            took[column] = max(took.get(column, 0.0), slot.end - slot.start)
        return took

    def _line(self, label: str) -> Text:
        width = len(f"stage {self.table.num_stages - 1}") + 2
        return Text(label.ljust(width), no_wrap=True, overflow="ellipsis")

    def _label(self, kind: str, chunk: int, microbatch: object = "") -> str:
        digit = str(chunk).translate(_DIGITS) if self.table.num_chunks > 1 else ""
        return f"{_LETTERS[kind]}{microbatch}{digit}"

    def _shade(self, kind: str, chunk: int) -> Style:
        share = 0.6 * chunk / max(self.table.num_chunks - 1, 1)
        red, green, blue = (round(v + share * (255 - v)) for v in COLOURS[kind])
        return fill((red, green, blue))

    def _legend(self) -> Text:
        legend = Text()
        for kind, cost in self.simulation.costs.items():
            for chunk in range(self.table.num_chunks):
                label = f" {self._label(kind, chunk)} "
                legend.append(label, self._shade(kind, chunk))
            legend.append(f" {kind.replace('_', ' ')} (cost {cost:g})   ")
        return legend.append(" · ", _IDLE).append(" bubble")


def _axis(widths: Mapping[Column, int], label: Callable[[int], str]) -> str:
    """Writes a label where each tick begins, if the previous label leaves room."""
    text, at, begun = "", 0, -1
    for (tick, _), width in widths.items():
        if tick != begun and len(text) <= at:
            text = f"{text:<{at}}{label(tick)} "
        at, begun = at + width, tick
    return text


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
