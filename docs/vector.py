"""SVG for pages that are light or dark: marks, arrays in blocks, and documents.

Colours are CSS classes. So a picture in a page follows the theme of the page. A picture
in a file includes the CSS rules, and follows the theme of the reader's system.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Sharding

from nnx_parallel.drawing import fill
from nnx_parallel.visualize.arrays import device_colour
from nnx_parallel.visualize.figures import DARK, LIGHT
from nnx_parallel.visualize.figures import Marks as Marks
from nnx_parallel.visualize.figures import document as document
from nnx_parallel.visualize.figures import line as line
from nnx_parallel.visualize.figures import rect as rect
from nnx_parallel.visualize.figures import text as text


def standalone(marks: Marks, width: float, height: float, title: str) -> str:
    """Returns a picture as a file, with a background."""
    rules = f"{LIGHT}@media (prefers-color-scheme: dark) {{{DARK}}}"
    ground = f'<rect class="ground" width="{width:g}" height="{height:g}" rx="10"/>'
    style = f"<style>{rules}</style>"
    return document([style, ground, *marks], width, height, title) + "\n"


def shift(marks: Marks, x: float, y: float) -> Marks:
    """Returns the marks, moved to another place."""
    return [f'<g transform="translate({x:g} {y:g})">', *marks, "</g>"]


def device(index: int, count: int = 8) -> str:
    """The colour of a device, as in every picture of the library."""
    return f"#{bytes(device_colour(index, count)).hex()}"


def ink(index: int, count: int = 8) -> str:
    """Black or white, whichever reads better on a device's colour."""
    colour = fill(device_colour(index, count)).color
    return colour.name if colour else "#000000"


def array(
    x: float,
    y: float,
    width: float,
    height: float,
    sharding: Sharding,
    shape: Sequence[int],
    at: Mapping[int, int] | None = None,
) -> Marks:
    """The blocks of an array of two dims, each in the colours of its devices.

    Args:
        x: Left edge.
        y: Upper edge.
        width: Width of the whole array.
        height: Height of the whole array.
        sharding: Which device holds which shard.
        shape: Global shape.
        at: Index of each dim that is not drawn.
    """
    at = at or {}
    held: dict[tuple[tuple[int, int], ...], list[int]] = {}
    count = len(sharding.device_set)
    for where, index in sharding.devices_indices_map(tuple(shape)).items():
        spans = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        if all(spans[d][0] <= i < spans[d][1] for d, i in at.items()):
            drawn = tuple(span for d, span in enumerate(spans) if d not in at)
            held.setdefault(drawn, []).append(where.id)
    rows, columns = (n for d, n in enumerate(shape) if d not in at)
    marks = []
    for ((top, bottom), (left, right)), ids in held.items():
        gap = 1.0 if len(held) > 1 else 0.0
        box = (
            x + width * left / columns,
            y + height * top / rows,
            width * (right - left) / columns - gap,
            height * (bottom - top) / rows - gap,
        )
        if len(ids) == count > 1:
            marks.append(rect(*box, "whole"))
        else:
            marks += _shared(*box, [device(i, count) for i in sorted(ids)])
    return marks


def _shared(
    x: float, y: float, width: float, height: float, colours: Sequence[str]
) -> Marks:
    """A block in slanted stripes, one for each device that holds a copy."""
    slant = min(height, width) / 2 if len(colours) > 1 else 0
    edges = np.linspace(0, width, len(colours) + 1)
    marks = []
    for n, ((a, b), colour) in enumerate(
        zip(itertools.pairwise(edges), colours, strict=True)
    ):
        low, high = (slant if n else 0), (slant if n < len(colours) - 1 else 0)
        corners = [
            (x + a + low / 2, y),
            (x + b + high / 2, y),
            (x + b - high / 2, y + height),
            (x + a - low / 2, y + height),
        ]
        points = " ".join(f"{px:.5g},{py:.5g}" for px, py in corners)
        marks.append(f'<polygon points="{points}" fill="{colour}"/>')
    return marks
