"""Which devices hold which block of an array, laid out for a picture.

Pictures of sharded arrays as SVG, on a light ground of their own.

`visualize`: which device holds what, for terminals, notebooks and pages.
"""

from __future__ import annotations

import colorsys
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from nnx_parallel.sharding.specs import dim_axes
from nnx_parallel.sharding.tree import path_of

Colour = tuple[int, int, int]

WHOLE: Colour = (0xD9, 0xDF, 0xE5)
"""Of a block that every device holds."""

_FEW: tuple[Colour, ...] = (
    (0x2F, 0x6D, 0xB5),
    (0xE3, 0x8B, 0x3A),
    (0x2E, 0x7D, 0x57),
    (0xC8, 0x4B, 0x50),
    (0x8A, 0x63, 0xA8),
    (0x5F, 0xB0, 0xB7),
    (0xE2, 0xC0, 0x4B),
    (0x8C, 0x6A, 0x55),
)


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """The blocks of one array over at most two of its dims.

    Attributes:
        name: What the picture calls it: its path, or ``array``.
        shape: Global shape.
        dtype: Name of its dtype.
        spec: How it is sharded, in words.
        dims: The dims that are shown: rows and columns, or columns alone.
        dim_names: The mesh axes over each of these.
        starts: Along each of these, where blocks begin.
        blocks: Device ids of each block, row by row.
        num_devices: Devices that hold any of it.
        bytes_per_device: What one of them holds.
        hidden: Dims that are sharded and not shown: then the devices of a block share
            it between them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    dims: tuple[int, ...]
    dim_names: tuple[str, ...]
    starts: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    num_devices: int
    bytes_per_device: int
    hidden: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of it."""
        return len(self.blocks) == len(self.blocks[0]) == 1 and not self.hidden

    @property
    def shape_text(self) -> str:
        """The shape as people write it."""
        return " \u00d7 ".join(map(str, self.shape)) or "scalar"

    @property
    def summary(self) -> str:
        """Shape, dtype, sharding and bytes in one line."""
        devices = f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        held = shown_bytes(self.bytes_per_device)
        return (
            f"{self.shape_text} {self.dtype} · {self.spec} · {held} on each of "
            f"{devices}"
        )

    @property
    def caption(self) -> str:
        """What rows and columns are, and what cannot be seen."""
        words = ("rows", "columns")[-len(self.dims) :] if self.dims else ()
        shown = [f"{word}: {describe_dim(self, i)}" for i, word in enumerate(words)]
        return " · ".join([*shown, *self.notes])

    @property
    def notes(self) -> list[str]:
        """What the blocks themselves do not show."""
        whole = [
            d
            for d in range(len(self.shape))
            if d not in self.dims and d not in self.hidden
        ]
        notes = [f"not shown: {_dims(whole)}, whole"] if whole else []
        if self.hidden:
            notes.append(f"devices of a block share it along {_dims(self.hidden)}")
        elif self.is_whole and self.num_devices > 1:
            notes.append("every device holds all of it")
        elif any(len(ids) > 1 for row in self.blocks for ids in row):
            notes.append("devices of a block hold the same copy")
        return notes

    def colour(self, ids: Sequence[int]) -> Colour:
        """The fill of a block: its first device's colour, grey if all hold it."""
        if self.is_whole:
            return WHOLE
        order = sorted({i for row in self.blocks for block in row for i in block})
        return device_colour(order.index(ids[0]), len(order))


def _dims(dims: Sequence[int]) -> str:
    return f"dim{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}"


def describe_dim(shards: ShardMap, index: int) -> str:
    """One of the shown dims: ``dim 0 of 512 in 4 over fsdp``."""
    dim, parts = shards.dims[index], len(shards.starts[index])
    text = f"dim {dim} of {shards.shape[dim]}"
    if parts == 1:
        return f"{text}, whole"
    over = f" over {shards.dim_names[index]}" if shards.dim_names[index] else ""
    return f"{text} in {parts}{over}"


def shard_map_of(x: Any, name: str = "array") -> ShardMap:
    """The blocks of an array, concrete or abstract, that has a sharding.

    Raises:
        TypeError: If it has none.
    """
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        raise TypeError(
            f"`{name}` is a {type(x).__name__} without a sharding. Place it first, for "
            "example with shard(tree, rules, mesh)."
        )
    shape = tuple(x.shape)
    held = {
        device.id: tuple(
            piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)
        )
        for device, index in sharding.devices_indices_map(shape).items()
    }
    parts = [len({index[d] for index in held.values()}) for d in range(len(shape))]
    dims = _shown_dims(shape, parts)
    starts = tuple(
        tuple(sorted({index[d][0] for index in held.values()})) for d in dims
    )
    grid: dict[tuple[int, ...], list[int]] = {}
    for device_id in sorted(held):
        key = tuple(held[device_id][d][0] for d in dims)
        grid.setdefault(key, []).append(device_id)
    keys = [list(itertools.product(*starts[:-1], [c])) for c in (starts or [[0]])[-1]]
    rows = list(zip(*keys, strict=True)) if starts else [[()]]
    names = _dim_names(sharding, len(shape))
    return ShardMap(
        name=name,
        shape=shape,
        dtype=str(x.dtype),
        spec=_spec_text(sharding, len(held)),
        dims=dims,
        dim_names=tuple(names[d] for d in dims),
        starts=starts,
        blocks=tuple(tuple(tuple(grid[key]) for key in row) for row in rows),
        num_devices=len(held),
        bytes_per_device=_bytes(sharding.shard_shape(shape), x.dtype),
        hidden=tuple(d for d in range(len(shape)) if parts[d] > 1 and d not in dims),
    )


def _shown_dims(shape: tuple[int, ...], parts: Sequence[int]) -> tuple[int, ...]:
    """Two dims at most: sharded ones first, then large ones."""
    order = sorted(range(len(shape)), key=lambda d: (parts[d] == 1, -shape[d], d))
    return tuple(sorted(order[:2]))


def _dim_names(sharding: Any, ndim: int) -> list[str]:
    if not isinstance(sharding, NamedSharding):
        return [""] * ndim
    return [" + ".join(axes) for axes in dim_axes(sharding.spec, ndim)]


def _spec_text(sharding: Any, num_devices: int) -> str:
    if num_devices == 1:
        return "on one device"
    if isinstance(sharding, NamedSharding):
        entries = ", ".join(map(repr, sharding.spec))
        return f"P({entries})" if any(sharding.spec) else "replicated"
    return type(sharding).__name__


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return math.prod(shape) * (8 if is_key else jnp.dtype(dtype).itemsize)


def shown_bytes(count: float) -> str:
    """A number of bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def ids_text(ids: Sequence[int]) -> str:
    """Device ids, runs of them shortened.

    Example:
        >>> ids_text([0, 1, 2, 3, 8, 10, 11])
        '0-3, 8, 10, 11'
    """
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )


def elided(count: int, limit: int) -> list[int | None]:
    """Indices of the rows or columns that are drawn; ``None`` stands for the rest.

    Example:
        >>> elided(9, 5)
        [0, 1, None, 7, 8]
    """
    if count <= limit:
        return list(range(count))
    head = limit // 2
    return [*range(head), None, *range(count - (limit - 1 - head), count)]


def device_colour(index: int, count: int) -> Colour:
    """The colour of a device among ``count``."""
    if count <= len(_FEW):
        return _FEW[index]
    lightness = (0.42, 0.62)[index % 2]
    red, green, blue = colorsys.hls_to_rgb(0.58 + index / count, lightness, 0.5)
    return round(255 * red), round(255 * green), round(255 * blue)


def ink_on(colour: Colour) -> Colour:
    """Black or white, whichever reads better on a colour (WCAG's luminance)."""
    linear = [
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
        for v in (value / 255 for value in colour)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if luminance > 0.179 else (255, 255, 255)


def hex_of(colour: Colour) -> str:
    """``#rrggbb``."""
    return "#" + "".join(f"{value:02x}" for value in colour)


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


@dataclass(frozen=True, eq=False)
class Picture:
    """Which device holds what. Notebooks show it; ``print`` draws it in text.

    Attributes:
        title: Of the picture.
        maps: The blocks of each array.
        is_table: Whether arrays are lines of a table, or one array is drawn large.
    """

    title: str
    maps: tuple[ShardMap, ...]
    is_table: bool

    @property
    def svg(self) -> str:
        """The picture as an SVG document."""
        if self.is_table:
            return table_svg(self.title, self.maps)
        return array_svg(self.maps[0])

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Writes the SVG.

        Raises:
            ValueError: If the path does not end in ``.svg``.
        """
        path = Path(path)
        if path.suffix != ".svg":
            raise ValueError(f"Pictures are saved as SVG: {path} must end in .svg.")
        path.write_text(self.svg, encoding="utf-8")

    def __rich__(self) -> Group | Table:
        return self._table() if self.is_table else _large(self.maps[0])

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=160).print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _table(self) -> Table:
        table = Table(title=self.title, title_justify="left", show_lines=True)
        for column in ("array", "shape", "dtype", "sharding"):
            table.add_column(column, vertical="middle")
        table.add_column("bytes/device", justify="right", vertical="middle")
        table.add_column("devices")
        for shards in self.maps:
            table.add_row(
                shards.name,
                shards.shape_text,
                shards.dtype,
                shards.spec,
                shown_bytes(shards.bytes_per_device),
                _small(shards),
            )
        return table


def visualize(tree: Any) -> Picture:
    """Draws which device holds which block of an array, or of every array of a model.

    Args:
        tree: An array; or a model, a state, any pytree. Its arrays have a sharding;
            they may be ``jax.ShapeDtypeStruct``. Of an array with more than two dims
            the picture has two, sharded ones before whole ones and large ones before
            small, and its caption says which.

    Returns:
        A picture: ``print`` and rich draw it in the terminal, a notebook shows it, and
        it has ``svg`` and ``save(path)``. A block is labelled with the devices that
        hold it; copies share a block.

    Raises:
        TypeError: If an array has no sharding, or there is none.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> from nnx_parallel import make_mesh
        >>> from nnx_parallel.sharding import shard
        >>> mesh = make_mesh({"fsdp": 4, "tensor": 2})
        >>> print(visualize(shard(np.ones(4096), P("tensor"), mesh)))
        array
        4096 float32 · P('tensor') · 8 KiB on each of 8 devices
        ┌────────────┬────────────┐
        │ 0, 2, 4, 6 │ 1, 3, 5, 7 │
        └────────────┴────────────┘
        columns: dim 0 of 4096 in 2 over tensor · devices of a block hold the same copy
    """
    if hasattr(tree, "shape") and hasattr(tree, "sharding"):
        return Picture("array", (shard_map_of(tree),), is_table=False)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    maps = [
        shard_map_of(leaf, path_of(keys).removesuffix(".value"))
        for keys, leaf in leaves
    ]
    if not maps:
        raise TypeError(
            f"A {type(tree).__name__} without arrays cannot be drawn. Pass an array "
            "that lies on a mesh, a model, or any pytree of such arrays."
        )
    per_device = sum(shards.bytes_per_device for shards in maps)
    devices = max(shards.num_devices for shards in maps)
    title = (
        f"{type(tree).__name__}: {len(maps)} arrays, {shown_bytes(per_device)} on each "
        f"of {devices} devices"
    )
    return Picture(title, tuple(maps), is_table=True)


def _large(shards: ShardMap) -> Group:
    return Group(
        Text(shards.name, style="bold"),
        Text(shards.summary),
        *_boxes(shards, columns=100),
        Text(shards.caption, style="dim"),
    )


def _boxes(shards: ShardMap, columns: int) -> Iterator[Text]:
    labels = [ids_text(ids) for row in shards.blocks for ids in row]
    width = max(3, *map(len, labels)) + 2
    shown = elided(len(shards.blocks[0]), max(3, min(16, (columns - 1) // (width + 1))))
    line = "─" * width
    yield Text("┌" + "┬".join([line] * len(shown)) + "┐")
    for number, row in enumerate(elided(len(shards.blocks), 16)):
        if number:
            yield Text("├" + "┼".join([line] * len(shown)) + "┤")
        yield _row(shards, row, shown, width)
    yield Text("└" + "┴".join([line] * len(shown)) + "┘")


def _row(
    shards: ShardMap, row: int | None, shown: Sequence[int | None], width: int
) -> Text:
    text = Text("│")
    for column in shown:
        if row is None or column is None:
            text.append("…".center(width))
        else:
            ids = shards.blocks[row][column]
            text.append(ids_text(ids).center(width), style=_style(shards, ids))
        text.append("│")
    return text


def _small(shards: ShardMap) -> Text:
    """The blocks without lines between them, to stand in a table."""
    width = max(len(ids_text(ids)) for row in shards.blocks for ids in row) + 2
    columns = elided(len(shards.blocks[0]), 8)
    lines = []
    for row in elided(len(shards.blocks), 4):
        line = Text()
        for column in columns:
            if row is None or column is None:
                line.append("…".center(width))
            else:
                ids = shards.blocks[row][column]
                line.append(ids_text(ids).center(width), style=_style(shards, ids))
        lines.append(line)
    return Text("\n").join(lines)


def _style(shards: ShardMap, ids: Sequence[int]) -> str:
    fill = shards.colour(ids)
    return f"{hex_of(ink_on(fill))} on {hex_of(fill)}"
