"""Which devices hold which block of an array, as a picture."""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from nnx_parallel.precision import array_bytes, format_bytes
from nnx_parallel.sharding.names import dim_axes
from nnx_parallel.visualize.picture import Colour, Picture, fill

WHOLE: Colour = (0xD9, 0xDF, 0xE5)
"""Of a block that every device holds."""

# For small meshes; `device_colour` makes those of larger ones.
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
        """True if every device holds all of it."""
        # One block is not enough: a dim that is not drawn may be split.
        return len(self.blocks) == len(self.blocks[0]) == 1 and not self.hidden

    @property
    def shape_text(self) -> str:
        """The shape as people write it."""
        return " \u00d7 ".join(map(str, self.shape)) or "scalar"

    @property
    def summary(self) -> str:
        """Shape, dtype, sharding and bytes in one line."""
        devices = f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        held = format_bytes(self.bytes_per_device)
        return (
            f"{self.shape_text} {self.dtype} · {self.spec} · {held} on each of "
            f"{devices}"
        )

    @property
    def caption(self) -> str:
        """The caption: rows, columns, and dims that are not drawn."""
        words = ("rows", "columns")[-len(self.dims) :] if self.dims else ()
        shown = [f"{word}: {describe_dim(self, i)}" for i, word in enumerate(words)]
        return " · ".join([*shown, *self.notes])

    @property
    def notes(self) -> list[str]:
        """The notes of the caption, on what the blocks do not show."""
        # Of the dims that are drawn, `describe_dim` says which are whole.
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
            # With no hidden dim left, devices of one block can only hold copies.
            notes.append("devices of a block hold the same copy")
        return notes

    def colour(self, ids: Sequence[int]) -> Colour:
        """The fill of a block: its first device's colour, grey if all hold it."""
        if self.is_whole:
            return WHOLE
        # By device, not by place: a device looks the same in every array of a table.
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
    # (start, stop) of each dim by device, also of other processes'. No value is read:
    # abstract arrays will do.
    held = {
        device.id: tuple(
            piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)
        )
        for device, index in sharding.devices_indices_map(shape).items()
    }
    # Counted, not read off the spec: an axis of size 1 splits nothing, and not
    # every sharding has a spec.
    parts = [len({index[d] for index in held.values()}) for d in range(len(shape))]
    dims = _shown_dims(shape, parts)
    starts = tuple(
        tuple(sorted({index[d][0] for index in held.values()})) for d in dims
    )
    grid: dict[tuple[int, ...], list[int]] = {}
    # Ascending, so that `ids_text` finds runs.
    for device_id in sorted(held):
        key = tuple(held[device_id][d][0] for d in dims)
        grid.setdefault(key, []).append(device_id)
    # (columns, rows), then transposed. One dim is a row; a scalar is one block.
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
        bytes_per_device=array_bytes(sharding.shard_shape(shape), x.dtype),
        hidden=tuple(d for d in range(len(shape)) if parts[d] > 1 and d not in dims),
    )


def _shown_dims(shape: tuple[int, ...], parts: Sequence[int]) -> tuple[int, ...]:
    """Two dims at most: sharded ones first, then large ones."""
    order = sorted(range(len(shape)), key=lambda d: (parts[d] == 1, -shape[d], d))
    # In the array's own order: the first is the rows.
    return tuple(sorted(order[:2]))


def _dim_names(sharding: Any, ndim: int) -> list[str]:
    # Only a NamedSharding has axes with names.
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
        # Two ids are written out: a range pays from three on.
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
    # One of the `limit` places is the ellipsis.
    head = limit // 2
    return [*range(head), None, *range(count - (limit - 1 - head), count)]


def device_colour(index: int, count: int) -> Colour:
    """The colour of a device among ``count``."""
    if count <= len(_FEW):
        return _FEW[index]
    # Neighbours on the circle of hues are told apart by lightness.
    lightness = (0.42, 0.62)[index % 2]
    red, green, blue = colorsys.hls_to_rgb(0.58 + index / count, lightness, 0.5)
    return round(255 * red), round(255 * green), round(255 * blue)


def array_picture(shards: ShardMap) -> Picture:
    """One array: its blocks, each with the devices that hold it."""
    drawing = Group(
        Text(shards.summary),
        _blocks(shards, rows=16, columns=16),
        Text(shards.caption, style="dim"),
    )
    return Picture(shards.name, drawing)


def tree_picture(kind: str, maps: Sequence[ShardMap]) -> Picture:
    """Many arrays: a line of a table for each, with its blocks at the end."""
    table = Table(show_lines=True)
    for column in ("array", "shape", "dtype", "sharding"):
        table.add_column(column, vertical="middle")
    table.add_column("bytes/device", justify="right", vertical="middle")
    table.add_column("devices")
    for shards in maps:
        table.add_row(
            shards.name,
            shards.shape_text,
            shards.dtype,
            shards.spec,
            format_bytes(shards.bytes_per_device),
            _blocks(shards, rows=4, columns=8, is_boxed=False),
        )
    per_device = format_bytes(sum(shards.bytes_per_device for shards in maps))
    # Arrays of one tree may lie on different numbers of devices.
    devices = max(shards.num_devices for shards in maps)
    title = f"{kind}: {len(maps)} arrays, {per_device} on each of {devices} devices"
    return Picture(title, table)


def _blocks(
    shards: ShardMap, rows: int, columns: int, *, is_boxed: bool = True
) -> Table:
    """A cell for each block; of many rows, or columns than fit, the ends."""
    labels = [ids_text(ids) for row in shards.blocks for ids in row]
    width = max(3 if is_boxed else 1, *map(len, labels)) + 2
    # As many as 99 characters hold with a border each, but at least the two ends
    # and the ellipsis between them.
    fitting = max(3, min(columns, 99 // (width + 1)))
    table = Table(
        box=box.SQUARE if is_boxed else None,
        show_header=False,
        show_lines=is_boxed,
        padding=0,
        pad_edge=False,
    )
    shown = elided(len(shards.blocks[0]), fitting)
    for row in elided(len(shards.blocks), rows):
        table.add_row(*(_cell(shards, row, column, width) for column in shown))
    return table


def _cell(shards: ShardMap, row: int | None, column: int | None, width: int) -> Text:
    if row is None or column is None:
        return Text("…".center(width))
    ids = shards.blocks[row][column]
    return Text(ids_text(ids).center(width), style=fill(shards.colour(ids)))
