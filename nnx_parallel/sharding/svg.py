"""Pictures of sharded arrays as SVG, on a light ground of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from nnx_parallel.sharding.blocks import (
    ShardMap,
    describe_dim,
    elided,
    hex_of,
    ids_text,
    ink_on,
    shown_bytes,
)

_INK, _MUTED, _LINE, _REST = "#1f2933", "#5b6773", "#d5dae0", "#eef1f4"
_SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_LEFT, _TOP, _RIGHT = 64, 104, 28
_LIMIT = 16  # rows and columns of a large picture
_HEADS = ("array", "shape", "dtype", "sharding", "bytes/device", "devices")
_CHAR = 7.3  # of the monospaced font at 12 px, with room for a wider fallback


def array_svg(shards: ShardMap) -> str:
    """One array, large: its blocks, each with its devices, under its dims' names."""
    width, height = _grid_size(shards)
    notes = " · ".join(shards.notes)
    longest = max(6.6 * len(shards.summary), 6.2 * len(notes))
    total = _LEFT + max(width, longest) + _RIGHT
    bottom = _TOP + height
    lines = [
        _text(_LEFT, 34, shards.name, size=17, weight=600),
        _text(_LEFT, 56, shards.summary, size=13, fill=_MUTED),
        *_dim_labels(shards, width, height),
        *_grid(
            shards,
            (_LEFT, _TOP, width, height),
            limits=(_LIMIT, _limit(shards)),
            size=13,
        ),
        _text(_LEFT, bottom + 24, notes, size=12, fill=_MUTED),
    ]
    height = bottom + (44 if notes else 24)
    return _document(f"{shards.name}: {shards.summary}", total, height, lines)


def table_svg(title: str, maps: Sequence[ShardMap]) -> str:
    """Many arrays: a line for each, with a small picture of its blocks."""
    cells = [_cells(shards) for shards in maps]
    widths = [
        _CHAR * max(len(row[i]) for row in (_HEADS, *cells)) + 26 for i in range(5)
    ]
    lefts = [28 + sum(widths[:i]) for i in range(6)]
    picture = max(_label_width(shards, 10) * _columns(shards, 8) for shards in maps)
    picture = min(400.0, max(128.0, picture))
    rights = [None] * 4 + [lefts[5] - 26, None]
    lines = [_text(28, 36, title, size=17, weight=600)]
    lines += [
        _text(left, 68, head, fill=_MUTED, right=right)
        for left, head, right in zip(lefts, _HEADS, rights, strict=True)
    ]
    total, y = lefts[5] + picture + 28, 78.0
    for shards, row in zip(maps, cells, strict=True):
        height = max(34, 17 * min(8, len(shards.blocks)))
        lines.append(f'<path d="M28 {y:g}H{total - 28:g}" stroke="{_LINE}"/>')
        lines += [
            _text(left, y + 7 + height / 2, cell, mono=True, right=right)
            for left, cell, right in zip(lefts, row, rights, strict=False)
        ]
        lines += _grid(
            shards, (lefts[5], y + 7, picture, height), limits=(8, 8), size=10
        )
        y += height + 13
    return _document(title, total, y + 10, lines)


def _cells(shards: ShardMap) -> list[str]:
    return [
        shards.name,
        shards.shape_text,
        shards.dtype,
        shards.spec,
        shown_bytes(shards.bytes_per_device),
    ]


def _document(title: str, width: float, height: float, lines: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="{_SANS}">'
    )
    ground = f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#ffffff"/>'
    named = f"<title>{escape(title)}</title>"
    return "\n".join([head, named, ground, *lines, "</svg>"]) + "\n"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    fill: str = _INK,
    weight: int = 400,
    mono: bool = False,
    right: float | None = None,
) -> str:
    family = f' font-family="{_MONO}"' if mono else ""
    anchor = "" if right is None else ' text-anchor="end"'
    middle = ' dy="0.35em"' if mono else ""
    return (
        f'<text x="{x if right is None else right:g}" y="{y:g}" font-size="{size}" '
        f'font-weight="{weight}" fill="{fill}"{family}{anchor}{middle}>'
        f"{escape(text)}</text>"
    )


def _grid_size(shards: ShardMap) -> tuple[int, int]:
    """Width and height in pixels: long arrays are long, and every label fits."""
    needed = round(_columns(shards, _limit(shards)) * _label_width(shards, 13))
    if len(shards.dims) < 2:
        return max(needed, 320 if shards.dims else 160), 72
    rows, columns = [shards.shape[d] for d in shards.dims]
    ratio = min(2.2, max(0.6, rows and columns / rows))
    height = max(min(300, round(420 / ratio)), 24 * min(_LIMIT, len(shards.blocks)))
    return max(needed, min(480, round(height * ratio))), height


def _limit(shards: ShardMap) -> int:
    """Columns whose labels fit on a page."""
    return max(3, min(_LIMIT, int(760 / _label_width(shards, 13))))


def _columns(shards: ShardMap, limit: int) -> int:
    return min(limit, len(shards.blocks[0]))


def _label_width(shards: ShardMap, size: int) -> float:
    longest = max(len(ids_text(ids)) for row in shards.blocks for ids in row)
    return min(130.0, 0.62 * size * longest + 12)


def _dim_labels(shards: ShardMap, width: int, height: int) -> Iterator[str]:
    if not shards.dims:
        return
    across = escape(describe_dim(shards, len(shards.dims) - 1))
    yield (
        f'<text x="{_LEFT + width / 2:g}" y="{_TOP - 12}" text-anchor="middle" '
        f'font-size="12" fill="{_INK}">{across} →</text>'
    )
    if len(shards.dims) == 2:
        x, y = _LEFT - 16, _TOP + height / 2
        yield (
            f'<text transform="translate({x} {y:g}) rotate(-90)" text-anchor="middle" '
            f'font-size="12" fill="{_INK}">← {escape(describe_dim(shards, 0))}</text>'
        )


def _grid(
    shards: ShardMap,
    box: tuple[float, float, float, float],
    *,
    limits: tuple[int, int],
    size: int,
) -> Iterator[str]:
    left, top, width, height = box
    rows = elided(len(shards.blocks), limits[0])
    columns = elided(len(shards.blocks[0]), limits[1])
    cell_width, cell_height = width / len(columns), height / len(rows)
    gap = 2 if min(cell_width, cell_height) > 12 else 1
    yield f'<g font-size="{size}" text-anchor="middle" font-weight="500">'
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            x, y = left + j * cell_width, top + i * cell_height
            cell = (x, y, cell_width - gap, cell_height - gap)
            if row is None or column is None:
                yield _block(cell, _REST, "…", _MUTED, "more blocks", size)
                continue
            ids = shards.blocks[row][column]
            fill = shards.colour(ids)
            label = ids_text(ids)
            hint = f"device{'s' if len(ids) > 1 else ''} {label}"
            yield _block(cell, hex_of(fill), label, hex_of(ink_on(fill)), hint, size)
    yield "</g>"


def _block(
    box: tuple[float, float, float, float],
    fill: str,
    label: str,
    ink: str,
    hint: str,
    size: int,
) -> str:
    x, y, width, height = box
    rect = (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'rx="2" fill="{fill}"><title>{escape(hint)}</title></rect>'
    )
    if 0.62 * size * len(label) > width - 2 or size > height + 1:
        return rect
    return rect + (
        f'<text x="{x + width / 2:.2f}" y="{y + height / 2:.2f}" dy="0.35em" '
        f'fill="{ink}" pointer-events="none">{escape(label)}</text>'
    )
