"""Vector drawings as SVG, with the colours of a page or on a light background."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rich.console import Group
from rich.text import Text

from nnx_parallel.drawing import Drawn

Marks = list[str]
"""Elements of an SVG, in the order in which they are drawn."""

WIDTH = 460.0
"""Width of a drawing that can also be read on a phone."""

SMALL = 11.6
"""Font size in a drawing, which is about 9 pixels on a phone."""

LETTER = 6.0
"""Mean width of a letter of size `SMALL`."""

_RULES = """
.ink { fill: %s } .soft { fill: %s } .line { stroke: %s; fill: none }
.whole { fill: %s } .absent { fill: none; stroke: %s; stroke-dasharray: 2 2 }
.ground { fill: %s }
"""
LIGHT = _RULES % ("#1f2933", "#52606d", "#7b8794", "#d9dfe5", "#9aa5b1", "#ffffff")
"""CSS for the classes of marks, for a light background."""

DARK = _RULES % ("#e4e7eb", "#a9b4c0", "#8a96a3", "#4a5560", "#6b7783", "#14181e")
"""CSS for the same classes, for a dark background."""


def document(
    marks: Marks, width: float, height: float, title: str, shown: float = 0
) -> str:
    """Makes an SVG as wide as its column of a page, or ``shown`` pixels wide."""
    wide = f' width="{shown:g}"' if shown else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img"{wide} viewBox="0 0 '
        f'{width:g} {height:g}" font-family="system-ui, sans-serif" font-size="12">'
        f"<title>{escape(title)}</title>{''.join(marks)}</svg>"
    )


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    look: str,
    radius: float = 1.5,
    *,
    opacity: float = 1.0,
    title: str = "",
) -> str:
    """Draws a rectangle; ``look`` is a class, or a colour that begins with ``#``."""
    paint = f'fill="{look}"' if look.startswith("#") else f'class="{look}"'
    paint += f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    end = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return (
        f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" '
        f'rx="{radius:g}" {paint}{end}'
    )


def text(x: float, y: float, words: str, look: str = "ink", **style: object) -> str:
    """Draws words, which are centred at ``x`` by default."""
    options = {"text_anchor": "middle", **style}
    shown = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in options.items())
    paint = f'fill="{look}"' if look.startswith("#") else f'class="{look}"'
    return f'<text x="{x:g}" y="{y:g}" {paint}{shown}>{escape(words)}</text>'


def line(
    *points: tuple[float, float],
    width: float = 1.5,
    arrow: bool = False,
    colour: str = "",
    dash: str = "",
) -> str:
    """Draws lines from point to point; an arrow has a head at the last point."""
    look = f'stroke="{colour}" fill="none"' if colour else 'class="line"'
    look += f' stroke-width="{width:g}"' + (f' stroke-dasharray="{dash}"' * bool(dash))
    path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
    marks = f'<path {look} d="{path}"/>'
    if arrow:
        (x0, y0), (x1, y1) = points[-2:]
        length = math.hypot(x1 - x0, y1 - y0)
        ux, uy = 4.5 * (x1 - x0) / length, 4.5 * (y1 - y0) / length
        left, right = (x1 - ux - uy, y1 - uy + ux), (x1 - ux + uy, y1 - uy - ux)
        head = " L".join(f"{x:.4g} {y:.4g}" for x, y in (left, (x1, y1), right))
        marks += f'<path {look} d="M{head}"/>'
    return marks


def note(x: float, y: float, words: str, look: str = "ink", **style: object) -> str:
    """Draws small words, which begin at ``x`` by default."""
    options = {"text_anchor": "start", "font_size": SMALL, **style}
    return text(round(x, 2), round(y, 2), words, look, **options)


def legend(
    items: Iterable[tuple[str, str, float]], width: float
) -> tuple[Marks, float]:
    """Draws a legend of ``(colour, name, opacity)``; returns marks and height."""
    marks: Marks = []
    x, y = 0.0, 4.0
    for colour, name, opacity in items:
        wide = 16 + LETTER * len(name)
        if x + wide > width:
            x, y = 0.0, y + 18
        marks += [rect(x, y, 11, 11, colour, 2, opacity=opacity)]
        marks += [note(x + 16, y + 10, name)]
        x += wide + 14
    return marks, y + 14


def seconds_text(seconds: float) -> str:
    """Formats seconds with three digits, in s, ms or us.

    Example:
        >>> seconds_text(0.01234)
        '12.3 ms'
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{float(f'{seconds / size:.3g}'):g} {unit}"
    return "0 s" if seconds < 1e-9 else f"{seconds * 1e6:.2g} us"


def cut(words: str, length: int) -> str:
    """Shortens words to a maximum length."""
    return words if len(words) <= length else f"{words[: length - 1]}\u2026"


_TITLE = {"text_anchor": "start", "font_weight": 600}


@dataclass(frozen=True, kw_only=True, repr=False)
class Figure(Drawn):
    """A drawing with a title; notebooks show it, ``print`` prints its numbers.

    Attributes:
        title: First line of the drawing.
        alt: Description of the content, for screen readers.
        marks: The drawing, without the title.
        width: Width of the drawing; the font size is 12 in the same units.
        height: Height of the drawing, in the same units.
        lines: Lines of text with the numbers of the drawing, for ``print``.
    """

    title: str
    alt: str
    marks: Marks
    width: float
    height: float
    lines: tuple[str, ...]

    @property
    def inline(self) -> str:
        """The SVG for a page that defines the classes of `LIGHT`."""
        return document(self.marks, self.width, self.height, self.alt)

    @property
    def svg(self) -> str:
        """The picture as an SVG document, on a light background."""
        title = textwrap.wrap(self.title, int(self.width / 7.6))
        margin, head = 14, 16 * len(title) + 8
        width, height = self.width + 2 * margin, self.height + 2 * margin + head
        marks = [
            f"<style>{LIGHT}</style>",
            rect(0, 0, width, height, "ground", 10),
            *(
                text(margin, margin + 12 + 16 * i, words, **_TITLE)
                for i, words in enumerate(title)
            ),
            f'<g transform="translate({margin} {margin + head})">',
            *self.marks,
            "</g>",
        ]
        # The drawing is enlarged, because the font size 12 is meant for phones.
        return document(marks, width, height, self.alt, round(1.25 * width)) + "\n"

    def __rich__(self) -> Group:
        return Group(Text(self.title, style="bold"), Text("\n".join(self.lines)))

    def __str__(self) -> str:
        return "\n".join([self.title, *self.lines])

    def __repr__(self) -> str:
        return f"<figure: {self.title}>"
