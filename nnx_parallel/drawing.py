"""Pictures and tables for terminals, notebooks and SVG files.

The library rich renders pictures for all three. This module imports no other module of
the package, because audits and schedules import it to display themselves.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console, Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

Colour = tuple[int, int, int]
"""Red, green and blue, each from 0 to 255."""

# This replaces rich's template, which draws the window of a terminal and loads a font
# over the network. Rich's template also puts characters of 20 px on lines of 24.4 px,
# which leaves gaps in the lines of boxes. At 21 px there are no gaps.
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" role="img" \
width="{shown:.0f}" viewBox="-14 -14 {width:.0f} {height:.0f}" font-size="21" \
font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', \
monospace">
<title></title>
<style>{{styles}}</style>
<defs>{{lines}}</defs>
<rect x="-14" y="-14" width="{width:.0f}" height="{height:.0f}" rx="10" fill="#fff"/>
{{backgrounds}}
{{matrix}}
</svg>
"""
_COLUMN, _LINE, _MARGINS = 12.2, 24.4, 28
_SHOWN = 0.65  # factor on rich's pixels that makes text 13 px high


class Drawn:
    """An SVG picture, which notebooks display and `save` writes to a file."""

    @property
    def svg(self) -> str:
        """The picture as an SVG document."""
        raise NotImplementedError

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Writes the SVG to a file.

        Raises:
            ValueError: If the path does not end in ``.svg``.
        """
        path = Path(path)
        if path.suffix != ".svg":
            raise ValueError(f"Pictures are saved as SVG: {path} must end in .svg.")
        path.write_text(self.svg, encoding="utf-8")


@dataclass(frozen=True, eq=False)
class Picture(Drawn):
    """A drawing with a title, for ``print``, notebooks and SVG files.

    Attributes:
        title: First line of the picture, and its description for screen readers.
        drawing: The part below the title, which rich renders.
        columns: Width of the printed picture, in characters.
        svg_columns: Maximum width of the SVG, in characters.
    """

    title: str
    drawing: RenderableType
    columns: int = 160
    svg_columns: int = 160

    def __rich__(self) -> Group:
        return Group(Text(self.title, style="bold"), self.drawing)

    def __str__(self) -> str:
        lines = _console(self.columns).render_lines(self.drawing, pad=False)
        text = ["".join(part.text for part in line).rstrip() for line in lines]
        return "\n".join([self.title, *text])

    @property
    def svg(self) -> str:
        """The picture as an SVG document, on a light background."""
        colours: dict[str, Any] = {"force_terminal": True, "color_system": "truecolor"}
        console = _console(self.svg_columns, **colours)
        # The picture is rendered once to measure it, because the template states the
        # size of the document.
        lines = console.render_lines(self, pad=False)
        columns = max(Segment.get_line_length(line) for line in lines)
        width, height = _COLUMN * columns + _MARGINS, _LINE * len(lines) + _MARGINS
        console = _console(columns, record=True, **colours)
        console.print(self)
        template = _SVG.format(shown=_SHOWN * width, width=width, height=height)
        svg = console.export_svg(code_format=template, theme=DEFAULT_TERMINAL_THEME)
        # The title is inserted last, because braces in it would be read as fields of
        # the template.
        return svg.replace("<title></title>", f"<title>{escape(self.title)}</title>", 1)


def _console(columns: int, **options: Any) -> Console:
    """Makes a console that prints nothing and does not depend on the environment."""
    # In a notebook rich would display its output. In a dumb terminal it would use a
    # width of 80 if no height were given.
    options = {"force_terminal": False, "color_system": None, **options}
    options |= {"force_jupyter": False, "no_color": False, "legacy_windows": False}
    return Console(file=io.StringIO(), width=columns, height=100, **options)


def fill(colour: Colour) -> Style:
    """Returns the style of a cell with this background and a readable text colour.

    The text is black or white, depending on the background's relative luminance as
    WCAG 2 defines it.
    """
    linear = [
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
        for v in (value / 255 for value in colour)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # At 0.179 black and white have the same contrast: (L + 0.05)^2 = 1.05 * 0.05.
    ink = "#000000" if luminance > 0.179 else "#ffffff"
    return Style(color=ink, bgcolor=f"#{bytes(colour).hex()}")


Rows = Sequence[Sequence[str]]


def aligned(rows: Rows, *, indent: str = "") -> str:
    """Formats rows as lines of text with aligned columns.

    Example:
        >>> print(aligned([("step", "loss"), ("1,000", "2.4")]))
        step   loss
        1,000  2.4
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(indent + line for line in lines)


def as_html(
    header: Sequence[str], rows: Rows, *, title: str = "", notes: Iterable[str] = ()
) -> str:
    """Formats an HTML table that scrolls in a narrow notebook; all text is escaped."""
    head = "".join(f"<th>{escape_html(name)}</th>" for name in header)
    # No colours are set, so the notebook's theme decides them, whether light or dark.
    cell = '<td style="text-align: left; white-space: nowrap">{}</td>'
    lines = ("".join(cell.format(escape_html(x)) for x in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<thead><tr>{head}</tr></thead>" * bool(header) + f"<tbody>{body}</tbody>"
    below = "".join(f"<div>{escape_html(line)}</div>" for line in notes)
    table = f"<b>{escape_html(title)}</b><table>{table}</table>{below}"
    return f'<div style="overflow-x: auto">{table}</div>'
