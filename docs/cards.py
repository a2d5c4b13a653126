"""Cards of the tutorials: a picture, a line, and the tutorials to read first."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from vector import Marks, device, document, line, rect, text

from nnx_parallel import Interleaved
from nnx_parallel.schedules.table import Table
from nnx_parallel.visualize.schedules import COLOURS

SIZE = (168, 84)
RUNTIME = "<!--runtime of %s-->"
"""HTML comment that is replaced by the seconds of the tutorial's last run."""


def tutorials() -> list[Path]:
    """Returns the files of the tutorials, sorted by number."""
    return sorted((Path(__file__).parents[1] / "tutorials").glob("[0-9]*.py"))


@dataclass(frozen=True)
class Card:
    """The content of a tutorial's card below its title.

    Attributes:
        line: One line that says what the tutorial teaches.
        draw: Draws the card's picture.
        after: Numbers of the tutorials to read first.
    """

    line: str
    draw: Callable[[], Marks]
    after: tuple[int, ...] = ()


def _grid(
    x: float, y: float, width: float, height: float, rows: int, columns: int
) -> Marks:
    """Returns a grid of blocks, each in the colour of a device."""
    w, h = width / columns, height / rows
    return [
        rect(x + w * (n % columns), y + h * (n // columns), w - 2, h - 2, device(n))
        for n in range(rows * columns)
    ]


def _meshes() -> Marks:
    return [
        *_grid(32, 16, 104, 54, 2, 4),
        text(84, 11, "fsdp", "soft", font_size=10),
        text(24, 46, "data", "soft", font_size=10, text_anchor="end"),
    ]


def _data_parallel() -> Marks:
    return [
        *[rect(22, 10 + 8 * n, 44, 7, device(n)) for n in range(8)],
        text(82, 47, "\u00d7"),
        rect(98, 12, 48, 60, "whole"),
    ]


def _fsdp() -> Marks:
    return [
        *_grid(20, 8, 128, 16, 1, 8),
        *[line((27.5 + 16 * n, 26), (27.5 + 16 * n, 36), width=1) for n in range(8)],
        rect(20, 38, 126, 14, "whole"),
        *[line((27.5 + 16 * n, 53), (27.5 + 16 * n, 63), width=1) for n in range(8)],
        *_grid(20, 65, 128, 16, 1, 8),
    ]


def _tensor() -> Marks:
    rows = [rect(110, 10 + 16 * n, 34, 14, device(n)) for n in range(4)]
    return [*_grid(18, 24, 72, 36, 1, 4), text(100, 46, "\u00d7"), *rows]


def _schedule(table: Table, width: float) -> Marks:
    unit, height = width / table.num_ticks, 64 / table.num_stages
    marks = [rect(14, 10, width, 64, "absent")]
    for slot in table.simulate().timeline.slots:
        red, green, blue = COLOURS[slot.kind]
        fade = 0.5 * slot.chunk
        colour = bytes(round(v + fade * (255 - v)) for v in (red, green, blue)).hex()
        start, end = (unit * at for at in (slot.tick, slot.tick + 1))
        marks.append(
            rect(14 + start, 10 + height * slot.stage, end - start - 1, height - 2,
                 f"#{colour}")
        )  # fmt: skip
    return marks


def _pipelines() -> Marks:
    return _schedule(Interleaved(chunks=2).table(num_stages=4, num_microbatches=4), 140)


def _adapters() -> Marks:
    return [
        *_grid(20, 14, 72, 56, 2, 4),
        text(102, 46, "+"),
        rect(114, 14, 10, 56, device(1)),
        rect(128, 14, 26, 10, device(5)),
    ]


def _composing() -> Marks:
    marks: Marks = []
    for stage in range(2):
        x = 18 + 72 * stage
        marks += [rect(x, 14, 60, 56, "whole", 5)]
        marks += [
            rect(
                x + 6 + 25 * (n % 2), 20 + 23 * (n // 2), 23, 21, device(4 * stage + n)
            )
            for n in range(4)
        ]
    return [*marks, line((78, 42), (89, 42), arrow=True)]


def _checkpoints() -> Marks:
    return [
        *_grid(12, 22, 56, 40, 2, 4),
        line((70, 42), (92, 42), arrow=True),
        *_grid(100, 22, 56, 40, 1, 2),
    ]


def _processes() -> Marks:
    marks: Marks = []
    for n in range(4):
        x, y = 26 + 62 * (n % 2), 8 + 37 * (n // 2)
        dead = n == 2
        marks.append(rect(x, y, 54, 30, "absent" if dead else device(n), 4))
        if dead:
            marks += [
                line((x + 21, y + 9), (x + 33, y + 21), width=2),
                line((x + 33, y + 9), (x + 21, y + 21), width=2),
            ]
    return marks


def _own_model() -> Marks:
    return [
        rect(20, 10, 128, 12, "whole"),
        *_grid(20, 26, 128, 18, 1, 8),
        *_grid(20, 47, 128, 28, 2, 4),
    ]


def _own_strategy() -> Marks:
    rows = [rect(24, 10 + 8 * n, 46, 7, device(n)) for n in range(8)]
    return [*rows, *_grid(88, 10, 60, 64, 1, 8)]


def _profiles() -> Marks:
    bars = (
        (0, 20, 40),
        (0, 64, 26),
        (0, 100, 48),
        (1, 36, 22),
        (1, 84, 20),
        (3, 20, 8),
    )
    return [
        line((14, 12), (14, 74), (156, 74)),
        *[rect(x, 16 + 14 * row, width, 11, device(row)) for row, x, width in bars],
        rect(52, 44, 60, 11, device(2)),
    ]


def _migrating() -> Marks:
    before = [rect(16, 14 + 12 * n, 60 - 9 * (n % 3), 7, "whole") for n in range(5)]
    after = [rect(104, 26 + 12 * n, 48 - 9 * n, 7, device(2)) for n in range(3)]
    return [*before, line((82, 42), (96, 42), arrow=True), *after]


def _long() -> Marks:
    side = 9
    return [
        rect(
            48 + side * key,
            6 + side * query,
            side - 1,
            side - 1,
            device(min(query, 7 - query)) if key <= query else "absent",
        )
        for query in range(8)
        for key in range(8)
    ]


def _experts() -> Marks:
    marks: Marks = []
    for token, expert in enumerate((0, 2, 1, 3, 2, 0, 3, 1)):
        y = 9 + 8.5 * token
        marks.append(rect(24, y, 24, 6.5, device(expert)))
        marks.append(line((52, y + 3), (108, 18 + 17 * expert), width=0.7))
    return [*marks, *[rect(110, 10 + 17 * n, 34, 14, device(n), 3) for n in range(4)]]


def _transformer() -> Marks:
    colours = (0, 0, 2, 2)
    return [
        *[rect(58, 8 + 18 * n, 68, 15, device(c), 3) for n, c in enumerate(colours)],
        line((48, 8), (42, 8), (42, 77), (48, 77)),
        text(36, 46, "Stack", "soft", font_size=10, text_anchor="end"),
    ]


def _plan() -> Marks:
    bars = ((54, 22, 12), (38, 18, 40), (24, 12, 74))
    marks: Marks = []
    for row, parts in enumerate(bars):
        x = 18.0
        for part, width in enumerate(parts):
            marks.append(rect(x, 14 + 21 * row, width, 15, device(2 * part)))
            x += width
    return [*marks, line((124, 8), (124, 76), width=2)]


def _text() -> Marks:
    marks: Marks = []
    for row, lengths in enumerate(((52, 20, 48), (34, 68, 18), (88, 32))):
        x = 24.0
        for n, width in enumerate(lengths):
            marks.append(rect(x, 14 + 21 * row, width - 2, 15, device(2 * row + n), 3))
            x += width
    return marks


CARDS = {
    1: Card("Name the devices, and say who holds which block of an array.", _meshes),
    2: Card(
        "Train on handwritten digits: eight devices compute the numbers of one.",
        _data_parallel,
        (1,),
    ),
    3: Card(
        "Where a device's bytes go, and how ZeRO 1, 2 and 3 free them.", _fsdp, (2,)
    ),
    4: Card("Split the matmuls themselves, and count the bytes sent.", _tensor, (1,)),
    5: Card("Schedules, their idle time, and a picture of each.", _pipelines, (2,)),
    6: Card("Combine data, tensor and pipeline parallelism.", _composing, (3, 4, 5)),
    7: Card("Save on eight devices, restore on two, resume.", _checkpoints, (2,)),
    8: Card("Start several processes on a laptop, and kill some.", _processes, (2, 7)),
    9: Card("Shard a stock Flax model, with a step that you write.", _own_model, (3,)),
    10: Card("A strategy in one class, composed and tested.", _own_strategy, (4, 6)),
    11: Card("Is a step computing, communicating or waiting?", _profiles, (3,)),
    12: Card("One script before and after, for nnx.jit and scalax.", _migrating),
    13: Card(
        "From plain NNX to every strategy, one change at a time.", _transformer, (3,)
    ),
    14: Card("Split the tokens of a sequence, and balance the work.", _long, (3,)),
    15: Card("Fine-tune published weights, and write them back.", _adapters, (3,)),
    16: Card(
        "Send each token to a few of many MLPs; balance and split them.", _experts, (3,)
    ),
    17: Card("Find the strategy for chips that you do not have yet.", _plan, (3,)),
    18: Card(
        "Tokenize and pack text files, train, sample, resume, export.", _text, (3, 7)
    ),
}


def cards() -> str:
    """Returns all cards as HTML, with links relative to the page of tutorials."""
    return f'<div class="cards">{"".join(map(_card, tutorials()))}</div>'


def _card(file: Path) -> str:
    number = int(file.stem[:2])
    title = re.search(r"(?m)^# # (.*)$", file.read_text())[1].replace("`", "")
    known = CARDS.get(number)
    if known is None:  # a new tutorial has no card yet: only its title is shown
        picture, words = document([], *SIZE, ""), ""
    else:
        alt = f"Sketch: {known.line}"
        picture = document(known.draw(), *SIZE, alt)
        words = known.line
    return (
        f'<a class="card-link" href="tutorials/{file.stem}.html">{picture}'
        f"<b>{escape(title)}</b><span>{escape(words)}</span>"
        f"<small>{needs(number)}{RUNTIME % file.stem}</small></a>"
    )


def needs(number: int) -> str:
    """Returns the prerequisites of a tutorial, as text."""
    after = CARDS[number].after if number in CARDS else ()
    return f"after {', '.join(map(str, after))}" if after else "needs nothing before"
